"""Write, verify and read checkpoints. This package does not depend on an engine."""
