"""A checkpoint as files, and when one is written. No engine."""
