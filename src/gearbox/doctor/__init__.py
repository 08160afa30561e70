"""Check whether this machine, or this cluster, is ready to train."""
