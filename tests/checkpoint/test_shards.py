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
