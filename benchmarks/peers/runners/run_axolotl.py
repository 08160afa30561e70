"""Train with axolotl, by its command line with a YAML file: packed, documents isolated."""

import importlib.util
import json
from pathlib import Path

import probe


def main() -> None:
    """Write the YAML file, and train. A function, because axolotl starts processes that import this file."""
    settings = probe.start()
    from axolotl.cli.train import do_cli

    scratch = Path(settings["scratch"])
    keys = {
        "base_model": settings["model"],
        "datasets": [
            {
                "path": settings["chats"],
                "ds_type": "json",
                "type": "chat_template",
                "field_messages": "messages",
                "roles_to_train": ["system", "user", "assistant"] if settings["supervise"] == "all" else ["assistant"],
            }
        ],
        "train_on_inputs": settings["supervise"] == "all",
        "dataset_num_proc": 1,
        "dataset_prepared_path": str(scratch / "prepared"),
        "val_set_size": 0,
        "sequence_len": settings["row_tokens"],
        "sample_packing": True,
        "attn_implementation": "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa",
        "micro_batch_size": 1,
        "gradient_accumulation_steps": settings["rows"],
        "max_steps": settings["steps"],
        "seed": settings["seed"],
        "learning_rate": settings["lr"],
        "lr_scheduler": "constant",
        "bf16": settings["bf16"],
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "output_dir": str(scratch / "out"),
    }
    if settings["method"] == "lora":
        keys |= {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_target_linear": True}
        if not settings["bf16"]:  # its kernels for LoRA need CUDA, and are on by default
            keys |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    path = scratch / "train.yaml"
    path.write_text(json.dumps(keys), encoding="utf-8")  # JSON is YAML, too
    do_cli(str(path))


if __name__ == "__main__":
    main()
