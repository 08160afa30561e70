"""Run the training: open the run folder, train, evaluate, and report the result."""
