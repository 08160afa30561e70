"""Engines: torch.distributed, Accelerate, FSDP2 and DeepSpeed. No other folder names an engine."""
