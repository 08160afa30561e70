"""From a file to the batch of step s. No rank, no engine."""
