"""Write variants of the shipped gears, name what they can train, and check whether zero3_nvme can run here."""

import functools
import json
from pathlib import Path

import yaml

from gearbox import ROOT
from gearbox.config.compatibility import conflicts
from gearbox.config.gear import Gear, gear_path, load_gear
from gearbox.config.job import BatchPlan
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError

BF16_JSON = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())


def written(tmp_path: Path, name: str, zero_json: dict | str | None = None, **changes) -> Path:
    """Write a shipped gear with changes to its YAML (None removes a key) and to its DeepSpeed JSON; return its path."""
    settings = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text()) | changes
    settings = {key: value for key, value in settings.items() if value is not None}
    if zero_json is not None:
        content = zero_json if isinstance(zero_json, str) else json.dumps(BF16_JSON | zero_json)
        (tmp_path / "zero.json").write_text(content)
        settings["deepspeed_config"] = {"deepspeed_config_file": str(tmp_path / "zero.json")}
    path = tmp_path / "gear.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def check_against(gear: Gear, recipe: Recipe, recipe_path: Path, batch: BatchPlan) -> None:
    """Raise UserError with every conflict, as a run does."""
    if problems := conflicts(gear, recipe, recipe_path, batch):
        raise UserError("\n".join(problems))


def model_for(gear: str) -> tuple[str, ...]:
    """Return overrides that name a model for a shipped gear: none, or a mixture with adapters on its attention."""
    if load_gear(gear_path(gear)).degree("ep") == 1:
        return ()
    attention = "adapter.targets=[q_proj, k_proj, v_proj, o_proj]"
    return ("model.name=Qwen/Qwen3-30B-A3B", "run.rehearse=true", attention)


@functools.cache
def why_no_disk_operations() -> str:
    """Return why zero3_nvme cannot run here within seconds, or "" if it can.

    DeepSpeed compiles two modules at the first start and keeps them. At every start it also links a program with
    libaio, and looks for ninja: the compiled modules are not enough. Another environment compiles them again, and a
    process that is killed while it compiles leaves a lock for which all others wait.
    """
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import _get_build_directory, is_ninja_available

    if not is_ninja_available() or not AsyncIOBuilder().is_compatible(verbose=False):
        return (
            "DeepSpeed's disk operations need libaio, a compiler and ninja: apt-get install libaio-dev g++ ninja-build"
        )
    environment = str(Path(deepspeed.__file__).parent)

    def is_compiled(name: str) -> bool:
        folder = Path(_get_build_directory(name, verbose=False))
        if not (folder / f"{name}.so").is_file() or (folder / "lock").exists():
            return False
        return environment in (folder / "build.ninja").read_text()

    if not all(map(is_compiled, ("pin_memory", "async_io"))):
        return "DeepSpeed would compile its disk operations, which takes minutes; make matrix compiles them"
    return ""
