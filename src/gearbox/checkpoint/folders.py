"""Commit, list, delete and prune the folders step-N, and clean up unfinished ones."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

from gearbox import filesystem
from gearbox.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_END,
    SHARD,
    STEP,
    CorruptCheckpoint,
    Manifest,
    read_manifest,
    render_manifest,
    verify_sizes,
)
from gearbox.redact import redacted


def commit(aside: Path, folder: Path, manifest: Manifest) -> None:
    """Commit shards that are on disk: write the manifest, then rename `aside` to `folder` unless they are the same."""
    if aside == folder:
        _delete_manifest(folder)  # of a corrupt checkpoint of the same step
    filesystem.write(aside / MANIFEST, render_manifest(redacted(manifest.to_json())))
    filesystem.sync(aside)
    filesystem.sync_names(aside)
    if aside == folder:
        for path in folder.iterdir():  # leftovers of a corrupt checkpoint
            if path.name not in {MANIFEST, *manifest.files}:
                with suppress(OSError):
                    path.unlink()
        return
    if os.path.lexists(folder):  # a corrupt checkpoint of the same step, which was skipped
        delete_checkpoint(folder)
    filesystem.rename(aside, folder)


def delete_checkpoint(folder: Path, renames: bool = True) -> None:
    """Delete a checkpoint. A kill midway leaves nothing that counts as a checkpoint."""
    # A unique name: NFS may keep an earlier folder that has open files.
    aside = folder.with_name(f"{folder.name}.tmp-removed-{time.time_ns()}")
    if renames:
        with suppress(OSError):  # an overlay refuses to rename folders of its lower layer
            filesystem.rename(folder, aside)
            folder = aside
    delete_folder(folder)


def delete_folder(folder: Path) -> None:
    """Delete a folder, its manifest first. Of a link, delete only the link."""
    if folder.is_dir() and not folder.is_symlink():
        _delete_manifest(folder)
    filesystem.remove(folder)  # a later start deletes leftovers


def _delete_manifest(folder: Path) -> None:
    with suppress(FileNotFoundError, IsADirectoryError):  # a folder of that name makes no checkpoint
        (folder / MANIFEST).unlink()


def delete_unfinished(parent: Path) -> list[Path]:
    """Delete the leftovers of dead runs and return the unfinished steps. Only the holder of the run's lock calls it."""
    for leftover in parent.glob("*.tmp-*"):
        filesystem.remove(leftover)
    unfinished = [folder for _, folder in _folders(parent) if _is_unfinished(folder)]
    for folder in unfinished:
        with suppress(OSError):
            delete_folder(folder)
    return unfinished


def prune(parent: Path, keep: int, renames: bool = True) -> None:
    """Delete all but the newest `keep` checkpoints and the best one.

    The newest checkpoint knows the best step. If that was not saved, the one with the lowest held-out loss is kept.
    """
    complete: dict[int, float | None] = {}
    best_step: int | None = None
    for step, folder in list_checkpoints(parent):
        try:
            manifest = read_manifest(folder)
            verify_sizes(folder, manifest.files)
            if not complete and type(named := manifest.progress.get("best_step")) is int:
                best_step = named
            complete[step] = manifest.eval_loss
        except CorruptCheckpoint:
            continue
    kept = set(sorted(complete)[-keep:])
    evaluated = {step: loss for step, loss in complete.items() if loss is not None and math.isfinite(loss)}
    if best_step in complete:
        kept.add(best_step)
    elif evaluated:
        kept.add(min(evaluated, key=lambda step: (evaluated[step], -step)))
    for step, folder in _folders(parent):
        if step not in kept and step < max(kept, default=0):
            delete_checkpoint(folder, renames)


def list_checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Return the step and folder of each checkpoint, newest first. Include corrupt checkpoints, not unfinished ones."""
    return [(step, folder) for step, folder in _folders(parent) if not _is_unfinished(folder)]


def _folders(parent: Path) -> list[tuple[int, Path]]:
    found = [(STEP.fullmatch(path.name), path) for path in parent.glob("step-*") if path.is_dir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def _is_unfinished(folder: Path) -> bool:
    """Return True if the folder has no complete manifest yet. A renamed folder is complete or corrupt."""
    try:
        if any(SHARD.fullmatch(path.name) and path.name.count("-") == 1 for path in folder.iterdir()):
            return False
        with filesystem.open_regular(folder / MANIFEST, follows_links=False) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(MANIFEST_END)))
            return file.read() != MANIFEST_END
    except FileNotFoundError:
        return True
    except OSError:
        return False
