"""Test that the manifest detects all damage to every file and cannot name files elsewhere."""

import os
import pickle
import random
import shutil

import pytest
import torch

from gearbox.checkpoint import manifest
from gearbox.checkpoint.manifest import CorruptCheckpoint
from gearbox.checkpoint.shards import ShardReader
from support.checkpoints import DAMAGES, check, forged, make, tensors


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.safetensors", "shard-00001.safetensors"])
def test_every_damage_to_every_file_is_detected(tmp_path, damage, name):
    folder = make(tmp_path)
    for seed in range(12):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        hurt = shutil.copytree(folder, tmp_path / "copy" / "step-20")
        damage(hurt / name, random.Random(seed))
        with pytest.raises(CorruptCheckpoint, match=r"manifest|shard"):
            check(hurt)
        check(folder)


def test_damage_is_detected_by_the_digests(tmp_path, monkeypatch):
    """A flipped bit of a weight loads without an error if digests are not compared."""
    folder = make(tmp_path)
    shard = folder / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-50] ^= 1
    shard.write_bytes(content)
    monkeypatch.setattr(manifest, "digest_of", lambda path: check_facts[path.name])
    check_facts = {name: facts["xxh3_128"] for name, facts in manifest.read_manifest(folder).files.items()}
    loaded = ShardReader(folder, check(folder)).read("parameter", "w")
    assert not torch.equal(loaded, tensors()["w"])


def test_a_manifest_of_another_step_is_detected(tmp_path):
    one, other = make(tmp_path, 20), make(tmp_path, 40)
    shutil.copy(one / "manifest.json", other / "manifest.json")
    with pytest.raises(CorruptCheckpoint, match="belongs to step 20"):
        check(other)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../../secret.safetensors", "lists invalid file names"),
        ("/etc/passwd", "lists invalid file names"),
        ("shard-00000.safetensors/../x", "lists invalid file names"),
        ("optimizer.pt", "lists invalid file names"),
    ],
)
def test_a_manifest_cannot_name_files_elsewhere(tmp_path, name, problem):
    folder = make(tmp_path)
    forged(folder, files={name: {"bytes": 1, "xxh3_128": ""}})
    with pytest.raises(CorruptCheckpoint, match=problem):
        check(folder)


def test_a_shard_must_not_be_a_link(tmp_path):
    folder = make(tmp_path)
    shard = folder / "shard-00000.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpoint, match="is not a regular file"):
        check(folder)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"digest": 1, "manifest": 2}', "[" * 100_000, pickle.dumps([1]).decode("latin-1")]
)
def test_invalid_manifests(tmp_path, text):
    folder = make(tmp_path)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"manifest.json: is corrupt"):
        check(folder)


def test_a_manifest_as_large_as_a_disk_is_not_read(tmp_path):
    folder = make(tmp_path)
    os.truncate(folder / "manifest.json", 2**40)  # sparse
    with pytest.raises(CorruptCheckpoint, match=r"above the 41,943,040 limit"):
        check(folder)
