"""Print the fp32 rate of one thread in FLOP per CPU second, for products at the shapes of a model's linear layers."""

import json
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)
config = json.loads((Path(sys.argv[1]) / "config.json").read_text(encoding="utf-8"))
hidden, inner = config["hidden_size"], config["intermediate_size"]
device = "cuda" if len(sys.argv) > 2 else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
num_flops, seconds = 0, 0.0
for wide in (hidden, inner, 8192):  # attention, the feed-forward layer, a part of the output head
    left = torch.randn(1024, hidden, device=device, dtype=dtype)
    right = torch.randn(wide, hidden, device=device, dtype=dtype)
    left @ right.T
    repeats = max(1, int(4e10 if device == "cpu" else 4e13) // (2 * 1024 * hidden * wide))
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter() if device == "cuda" else time.process_time()
    for _ in range(repeats):
        left @ right.T
    if device == "cuda":
        torch.cuda.synchronize()
    seconds += (time.perf_counter() if device == "cuda" else time.process_time()) - started
    num_flops += repeats * 2 * 1024 * hidden * wide
print(num_flops / seconds)
