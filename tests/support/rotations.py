"""Name rotary positions and sizes of families whose GGUF files need more keys."""

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
GEMMA = {"sliding_window": 16, "query_pre_attn_scalar": 16}
