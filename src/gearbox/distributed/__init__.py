"""torch.distributed, Accelerate, FSDP2 and DeepSpeed: the only folder that names an engine."""
