"""Compute the hot path of a step: attention by document, head and loss, adapters, norms and activations."""
