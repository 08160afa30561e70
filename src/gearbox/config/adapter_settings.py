"""Read a saved PEFT adapter's settings into a recipe's adapter group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gearbox.config.recipe import Adapter

# Keys of PEFT's adapter_config.json fall into three groups: those that a recipe also has, those that place the adapter
# in the model, and notes. Every other key must be empty: otherwise the adapter is of an unsupported kind.
PEFT_KEYS = {
    "r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
    "target_modules": "targets",
}
PEFT_PLACEMENT = "rank_pattern alpha_pattern exclude_modules layers_to_transform layers_pattern fan_in_fan_out".split()
PEFT_NOTES = """
    peft_type use_dora task_type auto_mapping peft_version base_model_name_or_path revision inference_mode
    init_lora_weights qalora_group_size megatron_core
""".split()


def saved_adapter_settings(adapter: Adapter, folder: Path) -> Adapter:
    """Return the adapter group with the settings saved in `folder`. Only the dropout may differ.

    Raise ValueError if the saved adapter cannot be trained here, or if the recipe gives another value.
    """
    config = _read_adapter_config(folder)
    saved = {"method": "dora" if config.get("use_dora") else "lora"}
    saved |= {ours: config[theirs] for theirs, ours in PEFT_KEYS.items() if theirs in config}
    given = {key: getattr(adapter, key) for key in saved if key in adapter.model_fields_set}
    for key, value in given.items():
        are_lists = isinstance(value, list) and isinstance(saved[key], list)
        if are_lists and sorted(value) == sorted(saved[key]):
            continue
        if key == "dropout" or (key, value) == ("targets", "all-linear"):  # the model decides which modules these are
            saved[key] = value
        elif value != saved[key]:
            raise ValueError(
                f"adapter.{key}: is {value!r}, but {saved[key]!r} in {folder}; remove the key to use the saved value"
            )
    return adapter.model_copy(update=saved)


def _read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return PEFT's adapter_config.json. Raise ValueError unless it describes a LoRA that can be trained here."""
    location = f"adapter.path: {str(folder)!r}"
    try:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        kind = config["peft_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{location} is not a PEFT adapter: adapter_config.json is missing or invalid") from None
    if not (folder / "adapter_model.safetensors").is_file():
        raise ValueError(f"{location} has no adapter_model.safetensors, and pickled weights could run code")
    if kind != "LORA":
        raise ValueError(f"{location} has peft_type {kind}; only LoRA and DoRA adapters can be trained further")
    known = [*PEFT_KEYS, *PEFT_PLACEMENT, *PEFT_NOTES]
    unknown = [k for k, value in config.items() if k not in known and value not in (None, False, "none", [], {})]
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        unknown.append("init_lora_weights")  # PiSSA and similar methods also change the base weights
    if unknown:
        raise ValueError(
            f"{location} has {unknown[0]}: {config[unknown[0]]!r}, which is not supported; merge the adapter into its "
            "model, set model.name to the result, and train a new adapter"
        )
    return config
