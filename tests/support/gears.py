"""Shipped gears, changed; and what this machine lacks for one."""

import json
from pathlib import Path

import yaml

from gearbox import ROOT

BF16_JSON = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())


def written(tmp_path: Path, name: str, zero_json: dict | str | None = None, **changes) -> Path:
    """A shipped gear with changes (None removes a key), and its JSON with others, in a folder of their own."""
    settings = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text()) | changes
    settings = {key: value for key, value in settings.items() if value is not None}
    if zero_json is not None:
        content = zero_json if isinstance(zero_json, str) else json.dumps(BF16_JSON | zero_json)
        (tmp_path / "zero.json").write_text(content)
        settings["deepspeed_config"] = {"deepspeed_config_file": str(tmp_path / "zero.json")}
    path = tmp_path / "gear.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def disk_operations_are_built() -> bool:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("async_io", verbose=False), "async_io.so").is_file()
