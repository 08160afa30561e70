"""Start, watch and end processes, without importing torch."""
