"""Pack tokenized documents into rows, choose the rows of each step, and build their batches."""
