"""Turn files into tokenized documents."""
