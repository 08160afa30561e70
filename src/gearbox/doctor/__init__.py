"""Whether this machine, or this cluster, is ready."""
