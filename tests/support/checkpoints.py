"""Write checkpoints of two ranks without a run, and damage them in every way."""

import json
import os
import random
from pathlib import Path

import torch

from gearbox.checkpoint import folders, manifest
from gearbox.checkpoint.manifest import Manifest, ShardFacts, read_manifest, verify_shards
from gearbox.checkpoint.shards import TensorShard
from gearbox.checkpoint.staging import Staging


def manifest_of(
    step: int, files: dict[str, ShardFacts], eval_loss: float | None = None, best_step: object = None
) -> Manifest:
    return Manifest(
        step=step,
        progress={} if best_step is None else {"best_step": best_step},
        parameters={"w": [40, 50], "b": [7]},
        scalars={"w": {"step": {"float32": 20.0}}},
        recipe={},
        rows="",
        base=None,
        versions={},
        gear={"name": "ddp", "num_processes": 2, "engine": "DDP"},
        files=files,
        eval_loss=eval_loss,
    )


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(2000, generator=generator), "b": torch.randn(7, generator=generator).bfloat16(),
        "m": torch.randint(0, 255, (2000,), dtype=torch.uint8, generator=generator),
    }  # fmt: skip


def make(parent: Path, step: int = 20, eval_loss: float | None = None, best_step: object = None) -> Path:
    """Write a checkpoint of two ranks, with `w` sharded across both."""
    parent.mkdir(exist_ok=True)
    aside = parent / f"step-{step}.tmp-abc"
    aside.mkdir()
    given = tensors()
    shards = [
        [TensorShard("parameter", "w", 0, given["w"][:1200]), TensorShard("parameter", "b", 0, given["b"])],
        [TensorShard("exp_avg", "w", 0, given["m"]), TensorShard("parameter", "w", 1200, given["w"][1200:])],
    ]
    staging, files = Staging(), {}
    for rank, pieces in enumerate(shards):
        staging.stage(pieces)
        name = f"shard-{rank:05d}.safetensors"
        files[name] = staging.write(aside / name)
    folder = parent / f"step-{step}"
    folders.commit(aside, folder, manifest_of(step, files, eval_loss, best_step))
    return folder


def check(folder: Path) -> Manifest:
    found = read_manifest(folder)
    verify_shards(folder, found.files)
    return found


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def zero(path: Path, draw: random.Random) -> None:
    """Zero 4096 bytes, or all if the file is smaller; at least one was not zero before."""
    content = bytearray(path.read_bytes())
    at = draw.randrange(max(1, len(content) - 4096))
    assert any(content[at : at + 4096])
    content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    path.write_bytes(content)


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def swap(path: Path, draw: random.Random) -> None:
    other = draw.choice([each for each in path.parent.iterdir() if each != path])
    path.rename(path.with_suffix(".x"))
    other.rename(path)
    path.with_suffix(".x").rename(other)


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


DAMAGES = [flip, zero, truncate, swap, delete]


def forged(folder: Path, **changes) -> None:
    """Change entries of the manifest and update its digest, as a deliberate forgery would."""
    content = json.loads((folder / "manifest.json").read_text())["manifest"] | changes
    (folder / "manifest.json").write_text(manifest.render_manifest(content))
