"""From a file to a step: sources, row_formats, loss_mask, tokenization, corpus, packing, splits, batches, sampler."""
