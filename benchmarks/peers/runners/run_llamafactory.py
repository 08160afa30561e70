"""Train with LLaMA-Factory, by its command line with a YAML file: packed, documents isolated (neat_packing)."""

import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path

import probe

settings = probe.start()
if importlib.util.find_spec("torchaudio") is None:  # its wheels need CUDA; LLaMA-Factory uses it for sound only
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

from llamafactory.cli import main  # noqa: E402

scratch = Path(settings["scratch"])
roles = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
chats = {"file_name": settings["chats"], "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": roles}
(scratch / "dataset_info.json").write_text(json.dumps({"chats": chats}), encoding="utf-8")
keys = {
    "model_name_or_path": settings["model"],
    "stage": "sft",
    "do_train": True,
    "finetuning_type": settings["method"],
    "dataset": "chats",
    "dataset_dir": str(scratch),
    "template": "smollm2",
    "cutoff_len": settings["row_tokens"],
    "packing": True,
    "neat_packing": True,
    "train_on_prompt": settings["supervise"] == "all",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": settings["rows"],
    "max_steps": settings["steps"],
    "learning_rate": settings["lr"],
    "lr_scheduler_type": "constant",
    "seed": settings["seed"],
    "disable_gradient_checkpointing": True,
    "bf16": settings["bf16"],
    "use_cpu": not settings["bf16"],
    "save_strategy": "no",
    "report_to": "none",
    "output_dir": str(scratch / "out"),
}
if settings["method"] == "lora":
    keys |= {"lora_rank": 16, "lora_alpha": 32, "lora_target": "all"}
path = scratch / "train.yaml"
path.write_text(json.dumps(keys), encoding="utf-8")  # JSON is YAML, too
sys.argv = ["llamafactory-cli", "train", str(path)]
main()
