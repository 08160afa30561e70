"""Train with torchtune, by its command line with a YAML file: packed, documents isolated."""

import json
import os
import sys
from pathlib import Path

import probe

settings = probe.start()

from torchtune._cli.tune import main  # noqa: E402

scratch, folder = Path(settings["scratch"]), Path(settings["model"])
config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
lora, tied = settings["method"] == "lora", config["tie_word_embeddings"]
family = "llama3_2" if tied else "llama3"
model = {
    "_component_": f"torchtune.models.{family}.{'lora_' if lora else ''}{family}",
    "vocab_size": config["vocab_size"],
    "num_layers": config["num_hidden_layers"],
    "num_heads": config["num_attention_heads"],
    "num_kv_heads": config["num_key_value_heads"],
    "embed_dim": config["hidden_size"],
    "max_seq_len": settings["row_tokens"],
    "intermediate_dim": config["intermediate_size"],
    "norm_eps": config["rms_norm_eps"],
    "rope_base": int(config["rope_parameters"]["rope_theta"]),
}
if tied:
    model["scale_factor"] = 1
if lora:
    modules = ["q_proj", "k_proj", "v_proj", "output_proj"]
    model |= {"lora_attn_modules": modules, "apply_lora_to_mlp": True, "lora_rank": 16, "lora_alpha": 32}
keys = {
    "output_dir": str(scratch / "out"),
    "model": model,
    "tokenizer": {
        "_component_": "torchtune_chats.ChatTokenizer",
        "path": str(folder / "tokenizer.json"),
        "pad_id": settings["pad_token"],
        "max_seq_len": settings["row_tokens"],
    },
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "checkpoint_files": ["model.safetensors"],
        "recipe_checkpoint": None,
        "output_dir": str(scratch / "out"),
        "model_type": family.upper(),
    },
    "resume_from_checkpoint": False,
    "dataset": {
        "_component_": "torchtune_chats.packed_chats",
        "path": settings["chats"],
        "supervise": settings["supervise"],
        "packed": True,
    },
    "seed": settings["seed"],
    "shuffle": True,
    "batch_size": 1,
    "gradient_accumulation_steps": settings["rows"],
    "max_steps_per_epoch": settings["steps"],
    "epochs": 1,
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": settings["lr"]},
    "optimizer_in_bwd": False,
    "lr_scheduler": {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 0,
    },
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "clip_grad_norm": 1.0,
    "compile": False,
    "device": "cuda" if settings["bf16"] else "cpu",
    "dtype": "bf16" if settings["bf16"] else "fp32",
    "enable_activation_checkpointing": False,
    "metric_logger": {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": str(scratch / "logs"),
    },
    "log_every_n_steps": 1,
}
if not lora:
    del keys["lr_scheduler"]
path = scratch / "train.yaml"
path.write_text(json.dumps(keys), encoding="utf-8")  # JSON is YAML, too
os.chdir(Path(__file__).parent)  # so that torchtune finds the components
sys.argv = ["tune", "run", f"{'lora' if lora else 'full'}_finetune_single_device", "--config", str(path)]
main()
