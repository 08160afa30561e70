"""Turn data files into the rows of step s: sources, formats, loss masks, tokenization, packing, splits, sampling."""
