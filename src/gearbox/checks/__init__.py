"""Compare a recipe with its gear, model, tokenizer and data, without importing torch or transformers."""
