"""Turn data files into the batches of a training step.

The modules in order of use: sources, row_formats, loss_mask, tokenization, corpus, packing, splits, batches, sampler.
"""
