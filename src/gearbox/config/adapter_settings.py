"""Read a saved PEFT adapter's settings into a recipe's adapter group."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from gearbox.config.recipe import Adapter
from gearbox.filesystem import read_json_object

WEIGHTS = "adapter_model.safetensors"
# Recipe keys by those of PEFT's adapter_config.json.
PEFT_KEYS = {
    "r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
    "target_modules": "targets",
}
PLACEMENT = ("exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out")
UNSET: tuple[object, ...] = (None, False, "none", [], {})


def _pattern(text: str) -> str:
    """Return a regular expression unchanged. Raise ValueError if it is invalid."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error})") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class SavedAdapter(BaseModel):
    """PEFT's adapter_config.json of a LoRA adapter, with PEFT's own defaults.

    Every key that is not listed here must be empty. Others describe another kind of adapter, and some make PEFT import
    a module or open a pickle.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    peft_type: Literal["LORA"]
    r: int = Field(8, ge=1, le=2**16)
    lora_alpha: float = Field(8.0, gt=0)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    use_rslora: bool = False
    use_dora: bool = False
    target_modules: Pattern | list[str]
    init_lora_weights: Literal[True, False, "gaussian"] = True  # PiSSA and similar methods also change the base weights
    # Where the adapter is in the model.
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1, le=2**16)]] | None = None
    alpha_pattern: dict[Pattern, float] | None = None
    target_parameters: list[str] | None = None  # weights of experts
    exclude_modules: Pattern | list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[Pattern] | Pattern | None = None
    fan_in_fan_out: bool = False
    # Notes, and settings without effect here.
    base_model_name_or_path: str | None = Field(None, max_length=1000)
    revision: str | None = None
    inference_mode: bool = False
    task_type: str | None = None
    auto_mapping: dict[str, str | None] | None = None
    peft_version: str | None = None
    qalora_group_size: int = 16
    megatron_core: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the arguments of peft.LoraConfig. PEFT reads no other key of the file."""
        keys = [*PEFT_KEYS, *PLACEMENT, "use_dora", "target_parameters"]
        return {key: getattr(self, key) for key in keys} | {
            "rank_pattern": self.rank_pattern or {},
            "alpha_pattern": self.alpha_pattern or {},
        }


def saved_adapter_settings(adapter: Adapter, folder: Path) -> Adapter:
    """Return the adapter group with the settings saved in `folder`. Only the dropout may differ.

    Raise ValueError if the saved adapter cannot be trained here, or if the recipe gives another value.
    """
    try:
        config = read_adapter_config(folder)
        if config.target_parameters:
            raise ValueError("has target_parameters, which is not supported; train a new adapter")
    except ValueError as error:
        raise ValueError(f"adapter.path: {str(folder)!r} {error}") from None
    saved = {"method": "dora" if config.use_dora else "lora"}
    saved |= {ours: getattr(config, theirs) for theirs, ours in PEFT_KEYS.items()}
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


def read_adapter_config(folder: Path) -> SavedAdapter:
    """Return PEFT's adapter_config.json. Raise ValueError unless it describes a LoRA adapter that can be used here.

    The error's text follows the folder's name.
    """
    path = folder / "adapter_config.json"
    if not path.exists():
        raise ValueError("is not a PEFT adapter: it has no adapter_config.json")
    try:
        content = read_json_object(path)
    except ValueError as error:
        raise ValueError(f"is not a PEFT adapter: {error}; download or copy it again") from None
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"has no {WEIGHTS}, and pickled weights could run code")
    if (kind := content.get("peft_type")) != "LORA":
        raise ValueError(f"has peft_type {kind}; only LoRA and DoRA adapters can be used here")
    unknown = [k for k, value in content.items() if k not in SavedAdapter.model_fields and value not in UNSET]
    if content.get("init_lora_weights", True) not in (True, False, "gaussian"):
        unknown.append("init_lora_weights")
    if unknown:
        raise ValueError(
            f"has {unknown[0]}: {repr(content[unknown[0]])[:100]}, which is not supported; merge the adapter into its "
            "model, set model.name to the result, and train a new adapter"
        )
    try:
        return SavedAdapter.model_validate(content)
    except ValidationError as error:
        (first, *_) = error.errors()
        key = next(str(part) for part in first["loc"])
        value = str(content.get(key, "not there"))[:60]
        raise ValueError(f"is not a PEFT adapter: {path}: {key}: is {value!r}; {first['msg']}") from None
