"""Read the tables of nvidia-smi: fields of each GPU, the GPUs that CUDA shows, and a value for each pair of GPUs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations

SMI_SECONDS = 10


def run(*arguments: str) -> str:
    """Return what nvidia-smi prints. Raise OSError without nvidia-smi, and SubprocessError if it fails."""
    return subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_SECONDS, check=True
    ).stdout


def query_gpus(fields: Sequence[str]) -> list[dict[str, str]]:
    """Return the index and these fields of each GPU.

    nvidia-smi prints nothing if it lacks one of the fields. Then each is queried on its own, so that a field which
    this driver has dropped is missing, and no other.
    """
    with suppress(subprocess.CalledProcessError):
        return _query("index", *fields)
    rows = {row["index"]: row for row in _query("index")}
    for field in fields:
        with suppress(subprocess.CalledProcessError):
            for row in _query("index", field):
                rows.get(row["index"], {}).update(row)
    return [*rows.values()]


def _query(*fields: str) -> list[dict[str, str]]:
    table = run(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def parse_matrix(matrix: str, visible: Sequence[int]) -> dict[str, list[tuple[int, int]]]:
    """Return the pairs of visible GPUs by their value in a matrix of `nvidia-smi topo`."""
    rows = [
        re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in matrix.splitlines()
    ]  # nvidia-smi underlines the header
    head = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] != ["X"]), [])
    names = [name for name in head if re.fullmatch(r"GPU\d+", name)]
    values = {row[0]: row[1 : 1 + len(names)] for row in rows if row and row[0] in names and "X" in row}
    pairs: dict[str, list[tuple[int, int]]] = {}
    shown = [(column, name) for column, name in enumerate(names) if int(name[3:]) in visible]
    for (i, a), (j, b) in combinations(shown, 2):
        pairs.setdefault(values[a][j] if a in values else values[b][i], []).append((int(a[3:]), int(b[3:])))
    return pairs


def visible_gpus(listing: str, chosen: str | None) -> list[int]:
    """Return the indices of the GPUs in `nvidia-smi -L` that CUDA_VISIBLE_DEVICES=`chosen` shows, in its order.

    As in CUDA, the list has indices, or UUIDs or their first characters. It ends at the first entry that is no GPU, and
    shows none if an entry is repeated. Indices are those of nvidia-smi. CUDA numbers GPUs of different kinds otherwise,
    unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set.
    """
    devices = _devices(listing)
    if chosen is None:
        return list(dict.fromkeys(devices.values()))
    prefix = next((kind for kind in ("GPU-", "MIG-") if chosen.startswith(kind)), "")
    shown: list[str] = []
    for entry in chosen.split(","):
        if prefix:
            found = [uuid for uuid in devices if entry.startswith(prefix) and uuid.startswith(entry)]
        else:
            number = re.match(r"\s*\+?(\d+)", entry)  # CUDA reads 1gpu as 1
            found = [uuid for uuid, index in devices.items() if number and int(number[1]) == index][:1]
        if len(found) != 1:
            break
        if found[0] in shown:
            return []
        shown += found
    return list(dict.fromkeys(devices[uuid] for uuid in shown))


def _devices(listing: str) -> dict[str, int]:
    """Return UUID -> index of the GPU, for GPUs and for the MIG devices below each."""
    devices: dict[str, int] = {}
    index = -1
    for line in listing.splitlines():
        if number := re.match(r"GPU (\d+):", line):
            index = int(number[1])
        if uuid := re.search(r"\(UUID: ([^)]+)\)", line):
            devices[uuid[1]] = index
    return devices
