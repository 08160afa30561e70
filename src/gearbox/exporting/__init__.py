"""Turn a run or a checkpoint into a folder that other tools read: merge, verify, describe and publish it."""
