"""The folders step-N: commit, list, delete, prune, sweep what was left unfinished."""

from __future__ import annotations

import math
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gearbox import filesystem
from gearbox.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MANIFEST_END,
    SHARD,
    STEP,
    CorruptCheckpoint,
    read_manifest,
    render_manifest,
)
from gearbox.redact import redacted


def commit(aside: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Make a checkpoint of shards that are on the disk: the manifest, and one rename unless they lie there already."""
    if aside == folder:
        (folder / MANIFEST).unlink(missing_ok=True)  # of a damaged one of the same step
    with (aside / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(render_manifest(redacted(manifest) | {"format": FORMAT}))
        filesystem.sync(file)
    filesystem.sync_folder(aside)
    if aside == folder:
        for path in folder.iterdir():  # what is left of a damaged one
            if path.name not in {MANIFEST, *manifest["files"]}:
                with suppress(OSError):
                    path.unlink()
        return
    if folder.exists():  # a damaged one of the same step, which was passed over
        delete_checkpoint(folder)
    aside.rename(folder)
    filesystem.sync_folder(folder.parent)


def delete_checkpoint(folder: Path, renames: bool = True) -> None:
    """Delete a checkpoint. A kill on the way leaves nothing that counts as one."""
    aside = folder.with_name(f"{folder.name}.tmp-removed-{time.time_ns()}")  # another may be left: NFS keeps open files
    if renames:
        with suppress(OSError):  # an overlay refuses it for what lies below it
            folder.rename(aside)
            folder = aside
    delete_folder(folder)


def delete_folder(folder: Path) -> None:
    """Delete a folder, and first what makes it a checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # what stays is swept


def delete_unfinished(parent: Path) -> list[Path]:
    """Delete what dead runs left half written; returns the unfinished steps. Only for whoever holds the run's lock."""
    for leftover in parent.glob("*.tmp-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink()
    unfinished = [folder for _, folder in _folders(parent) if _is_unfinished(folder)]
    for folder in unfinished:
        with suppress(OSError):
            delete_folder(folder)
    return unfinished


def prune(parent: Path, keep: int, renames: bool = True) -> None:
    """Delete all but the newest `keep` checkpoints and the one with the lowest held-out loss."""
    whole: dict[int, float | None] = {}
    for step, folder in list_checkpoints(parent):
        try:
            whole[step] = read_manifest(folder).get("eval_loss")
        except CorruptCheckpoint:
            continue
    kept = set(sorted(whole)[-keep:])
    looked_at = {step: loss for step, loss in whole.items() if loss is not None and math.isfinite(loss)}
    if looked_at:
        kept.add(min(looked_at, key=lambda step: (looked_at[step], -step)))
    for step, folder in _folders(parent):
        if step not in kept and step < max(kept, default=0):
            delete_checkpoint(folder, renames)


def list_checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, damaged ones too, newest first; not those that were never finished."""
    return [(step, folder) for step, folder in _folders(parent) if not _is_unfinished(folder)]


def _folders(parent: Path) -> list[tuple[int, Path]]:
    found = [(STEP.fullmatch(path.name), path) for path in parent.glob("step-*")]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def _is_unfinished(folder: Path) -> bool:
    """Whether it has no whole manifest yet. After a rename it always has had one: then it is damaged."""
    try:
        if any(SHARD.fullmatch(path.name) and path.name.count("-") == 1 for path in folder.iterdir()):
            return False
        with (folder / MANIFEST).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(MANIFEST_END)))
            return file.read() != MANIFEST_END
    except FileNotFoundError:
        return True
    except OSError:
        return False
