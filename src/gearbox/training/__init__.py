"""A run, from its folder to its last line."""
