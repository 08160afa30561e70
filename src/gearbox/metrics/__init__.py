"""Record what each step of a run measured: metrics.jsonl, progress lines, trackers and profiles."""
