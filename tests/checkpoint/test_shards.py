"""Test that any part of any tensor can be read, and that malicious shards never run code."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from gearbox.checkpoint import manifest
from gearbox.checkpoint.manifest import CorruptCheckpoint
from gearbox.checkpoint.shards import ShardReader, TensorShard
from gearbox.checkpoint.staging import Staging
from support.checkpoints import check, forged, make, tensors


def test_a_staging_disk_that_changes_data_is_detected(tmp_path):
    staging = Staging(tmp_path)
    staging.stage([TensorShard("parameter", "w", 0, tensors()["w"])])
    staging.write(tmp_path / "shard")
    staging.disk.seek(-3, os.SEEK_END)
    staging.disk.write(b"?")
    with pytest.raises(manifest.CorruptCheckpoint, match=r"save\.stage: data read from the local disk differs"):
        staging.write(tmp_path / "shard")
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]


def test_any_part_of_any_tensor_can_be_read(tmp_path):
    folder = make(tmp_path)
    saved, given = ShardReader(folder, check(folder)), tensors()
    for start, numel in ((0, 2000), (0, 1200), (1199, 2), (1200, 800), (1999, 1), (700, 900)):
        assert torch.equal(saved.read("parameter", "w", start, numel), given["w"][start : start + numel])
    assert torch.equal(saved.read("parameter", "b"), given["b"])
    assert torch.equal(saved.read("exp_avg", "w"), given["m"])
    assert saved.kinds("w") == ["exp_avg"] and saved.kinds("b") == []
    for start, numel in ((1999, 2), (0, 2001)):
        with pytest.raises(CorruptCheckpoint, match="no shard contains"):
            saved.read("parameter", "w", start, numel)


def test_other_tools_can_open_a_shard(tmp_path):
    folder = make(tmp_path)
    with safe_open(folder / "shard-00000.safetensors", framework="pt") as shard:
        assert torch.equal(shard.get_tensor("parameter|w|0"), tensors()["w"][:1200])


def test_the_staging_buffer_is_reused(tmp_path):
    staging, given = Staging(), tensors()
    staging.stage([TensorShard("parameter", "w", 0, given["w"])])
    place = staging.buffer.data_ptr()
    staging.stage([TensorShard("parameter", "w", 0, given["w"][:100])])
    assert staging.buffer.data_ptr() == place
    assert staging.write(tmp_path / "x")["bytes"] == (tmp_path / "x").stat().st_size < 1000


def forged_shard(folder: Path, content: bytes) -> None:
    name = "shard-00000.safetensors"
    (folder / name).write_bytes(content)
    facts = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
    forged(folder, files=manifest.read_manifest(folder).files | {name: facts})


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def header(entries: dict) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "shard",
    [
        "pickle", "torch", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 200 * 2**20) + b" " * 1000, b"",
        header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        header({"no-bars": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
        header({"parameter|w|x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
        b"\x08" + b"\0" * 7 + b'{"a": 1}',
    ],
)  # fmt: skip
def test_malicious_shards_are_refused_without_running_code(tmp_path, shard):
    folder, mark = make(tmp_path / "checkpoints"), tmp_path / "it-ran"
    if shard == "pickle":
        shard = pickle.dumps(Payload(mark))
    elif shard == "torch":
        torch.save({"w": Payload(mark)}, tmp_path / "x")
        shard = (tmp_path / "x").read_bytes()
    forged_shard(folder, shard)
    with pytest.raises(CorruptCheckpoint, match=r"shard-00000.safetensors"):
        ShardReader(folder, check(folder))
    assert not mark.exists()


def entry(dtype: str, numel: int, *shape: int) -> tuple[str, int, list[int]]:
    return dtype, numel, list(shape or (numel,))


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ({"parameter|w|0": entry("F32", 1200)}, "parameter of b: no shard contains it"),
        ({"parameter|w|0": entry("F32", 1199)}, "its shards do not have the 2,000 elements of"),
        ({"parameter|w|1": entry("F32", 1200)}, "its shards overlap at element 1"),
        ({"parameter|w|0": entry("F32", 1000), "parameter|w|900": entry("F32", 200)}, "overlap at element 900"),
        ({"parameter|w|0": entry("F32", 1200), "parameter|w|1500": entry("F32", 0)}, "overlap at element"),
        ({"parameter|w|5000": entry("F32", 1200)}, "is outside of the shape [40, 50]"),
        ({"parameter|w|-1": entry("F32", 1200)}, "is not a key of the form kind|parameter|first"),
        ({"parameter|w|\u0660": entry("F32", 1200)}, "is not a key of the form"),
        ({"parameter|w|0": entry("I32", 1200)}, "has the type I32"),
        ({"parameter|w|0": entry("F32", 1200, 24, 50)}, "has the shape [24, 50]"),
        ({"parameter|w|0,0": entry("F32", 1200, 24, 50)}, "is outside of the shape"),
        ({"parameter|x|0": entry("F32", 1)}, "belongs to no parameter of manifest.json"),
        ({"exp_avg|x|0": entry("F32", 1)}, "belongs to no parameter"),
        ({"[/]": entry("F32", 1)}, "'[/]' is not a key"),
    ],
)
def test_a_shard_that_contradicts_the_manifest(tmp_path, pieces, problem):
    """Put other pieces in place of the first 1,200 elements of `w`, and of `b`."""
    folder, entries, at = make(tmp_path), {}, 0
    given = pieces | ({} if "of b" in problem else {"parameter|b|0": entry("BF16", 7)})
    for key, (dtype, numel, shape) in given.items():
        end = at + numel * (2 if dtype == "BF16" else 4)
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    forged_shard(folder, header(entries) + bytes(at))
    with pytest.raises(CorruptCheckpoint) as refusal:
        ShardReader(folder, check(folder))
    assert problem in str(refusal.value) and len(str(refusal.value)) < 500


def test_blocks_that_overlap_do_not_hide_a_gap(tmp_path):
    """Four blocks have as many elements as the tensor, but two of them are at the same place."""
    folder = make(tmp_path)
    blocks = {"parameter|w|0,0": [20, 25], "parameter|w|0,25": [20, 25], "parameter|w|20,0": [20, 25]}
    for last, is_whole in (("parameter|w|20,25", True), ("parameter|w|19,0", False)):
        entries = {"parameter|b|0": {"dtype": "BF16", "shape": [7], "data_offsets": [8000, 8014]}}
        for number, (key, shape) in enumerate((blocks | {last: [20, 25]}).items()):
            entries[key] = {"dtype": "F32", "shape": shape, "data_offsets": [number * 2000, (number + 1) * 2000]}
        content = header(entries) + bytes(8014)
        (folder / "shard-00000.safetensors").write_bytes(content)
        facts = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
        forged(folder, files={"shard-00000.safetensors": facts})
        reader = ShardReader(folder, check(folder))
        if is_whole:
            assert not reader.read("parameter", "w").any()
        else:
            with pytest.raises(CorruptCheckpoint, match="no shard contains some of the elements"):
                reader.read("parameter", "w")


@pytest.mark.parametrize(
    ("lost", "there"), [("exp_avg_sq", {"step": {"float32": 20.0}}), ("step", {"exp_avg_sq": 1.0})]
)
def test_what_adamw_needs_must_be_there(tmp_path, lost, there):
    folder = make(tmp_path)
    forged(folder, recipe={"optim": {"name": "adamw"}}, scalars={"w": there})
    with pytest.raises(CorruptCheckpoint, match=f"^{lost} of w: is missing; the optimizer needs it"):
        ShardReader(folder, check(folder))
