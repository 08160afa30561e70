"""What tests share: `from support.ranks import fork_ranks`. Nothing in here is a test."""
