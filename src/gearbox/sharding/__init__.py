"""Reach, read, gather and save the tensors of a model that an engine divides among ranks."""
