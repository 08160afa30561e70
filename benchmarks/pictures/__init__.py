"""Measure real runs, and draw the pictures of README and docs from the figures."""
