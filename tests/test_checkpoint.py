"""The folder itself: damage is recognised, nothing in it runs, and it is whole or not there."""

import json
import os
import pickle
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from gearbox.checkpoint import folders, manifest
from gearbox.checkpoint.manifest import CorruptCheckpoint, read_manifest, verify_shards
from gearbox.checkpoint.shards import ShardReader, TensorShard
from gearbox.checkpoint.staging import Staging

FACTS = {
    "step": 20, "parameters": {"w": [40, 50], "b": [7]}, "scalars": {"w": {"step": {"float32": 20.0}}},
    "recipe": {}, "progress": {},
}  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(2000, generator=generator), "b": torch.randn(7, generator=generator).bfloat16(),
        "m": torch.randint(0, 255, (2000,), dtype=torch.uint8, generator=generator),
    }  # fmt: skip


def make(parent: Path, step: int = 20, eval_loss: float | None = None) -> Path:
    """A checkpoint of two ranks, `w` cut in two."""
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
    facts = FACTS | {"step": step, "files": files} | ({} if eval_loss is None else {"eval_loss": eval_loss})
    folder = parent / f"step-{step}"
    folders.commit(aside, folder, facts)
    return folder


def check(folder: Path) -> dict:
    manifest = read_manifest(folder)
    verify_shards(folder, manifest["files"])
    return manifest


def test_any_part_of_any_tensor_comes_back(tmp_path):
    folder = make(tmp_path)
    saved, given = ShardReader(folder, check(folder)), tensors()
    for start, numel in ((0, 2000), (0, 1200), (1199, 2), (1200, 800), (1999, 1), (700, 900)):
        assert torch.equal(saved.read("parameter", "w", start, numel), given["w"][start : start + numel])
    assert torch.equal(saved.read("parameter", "b"), given["b"])
    assert torch.equal(saved.read("exp_avg", "w"), given["m"])
    assert saved.kinds("w") == ["exp_avg"] and saved.kinds("b") == []
    for start, numel in ((1999, 2), (0, 2001)):
        with pytest.raises(CorruptCheckpoint, match="are in no shard"):
            saved.read("parameter", "w", start, numel)


def test_other_tools_can_open_a_shard(tmp_path):
    folder = make(tmp_path)
    with safe_open(folder / "shard-00000.safetensors", framework="pt") as shard:
        assert torch.equal(shard.get_tensor("parameter|w|0"), tensors()["w"][:1200])


def test_the_staging_buffer_is_used_again(tmp_path):
    staging, given = Staging(), tensors()
    staging.stage([TensorShard("parameter", "w", 0, given["w"])])
    place = staging.buffer.data_ptr()
    staging.stage([TensorShard("parameter", "w", 0, given["w"][:100])])
    assert staging.buffer.data_ptr() == place
    assert staging.write(tmp_path / "x")["bytes"] == (tmp_path / "x").stat().st_size < 1000


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def zero(path: Path, draw: random.Random) -> None:
    """A page of it, or what there is; of bytes that were not zero before."""
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


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.safetensors", "shard-00001.safetensors"])
def test_every_damage_to_every_file_is_recognised(tmp_path, damage, name):
    folder = make(tmp_path)
    for seed in range(12):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        hurt = shutil.copytree(folder, tmp_path / "copy" / "step-20")
        damage(hurt / name, random.Random(seed))
        with pytest.raises(CorruptCheckpoint, match=r"manifest|shard"):
            check(hurt)
        check(folder)


def test_that_is_the_digests_doing(tmp_path, monkeypatch):
    """Without them a flipped bit of a weight loads as if nothing were."""
    folder = make(tmp_path)
    shard = folder / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-50] ^= 1
    shard.write_bytes(content)
    monkeypatch.setattr(manifest, "digest_of", lambda path: check_facts[path.name])
    check_facts = {name: facts["xxh3_128"] for name, facts in manifest.read_manifest(folder)["files"].items()}
    loaded = ShardReader(folder, check(folder)).read("parameter", "w")
    assert not torch.equal(loaded, tensors()["w"])


def test_a_manifest_of_another_step_is_noticed(tmp_path):
    one, other = make(tmp_path, 20), make(tmp_path, 40)
    shutil.copy(one / "manifest.json", other / "manifest.json")
    with pytest.raises(CorruptCheckpoint, match="is that of step 20"):
        check(other)


def forged(folder: Path, **changes) -> None:
    """Change what the manifest says, with the right digest: what somebody would do who means it."""
    content = json.loads((folder / "manifest.json").read_text())["manifest"] | changes
    (folder / "manifest.json").write_text(manifest.render_manifest(content))


def forged_shard(folder: Path, content: bytes) -> None:
    name = "shard-00000.safetensors"
    (folder / name).write_bytes(content)
    facts = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
    forged(folder, files=manifest.read_manifest(folder)["files"] | {name: facts})


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
def test_planted_shards_do_not_run_and_are_refused(tmp_path, shard):
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../../secret.safetensors", "names files that no checkpoint has"),
        ("/etc/passwd", "names files that no checkpoint has"),
        ("shard-00000.safetensors/../x", "names files that no checkpoint has"),
        ("optimizer.pt", "names files that no checkpoint has"),
    ],
)
def test_a_manifest_cannot_name_files_elsewhere(tmp_path, name, said):
    folder = make(tmp_path)
    forged(folder, files={name: {"bytes": 1, "xxh3_128": ""}})
    with pytest.raises(CorruptCheckpoint, match=said):
        check(folder)


def test_a_shard_is_no_link(tmp_path):
    folder = make(tmp_path)
    shard = folder / "shard-00000.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpoint, match="is no file of its own"):
        check(folder)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"digest": 1, "manifest": 2}', "[" * 100_000, pickle.dumps([1]).decode("latin-1")]
)
def test_manifests_that_are_none(tmp_path, text):
    folder = make(tmp_path)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"manifest.json: is damaged"):
        check(folder)


def test_a_manifest_as_large_as_a_disk_is_not_read(tmp_path):
    folder = make(tmp_path)
    os.truncate(folder / "manifest.json", 2**40)  # sparse
    with pytest.raises(CorruptCheckpoint, match=r"which none has"):
        check(folder)


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, float("nan")), (6, None)):
        make(tmp_path, step, loss)
    flip(make(tmp_path, 7) / "shard-00000.safetensors", random.Random(0))
    (tmp_path / "step-0").mkdir()  # half of one
    (tmp_path / "notes.txt").write_text("mine")
    folders.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-2", "step-6", "step-7"]


def test_a_damaged_one_of_the_same_step_gives_way(tmp_path):
    flip(make(tmp_path) / "manifest.json", random.Random(0))
    check(make(tmp_path))


def test_sweeping_takes_temporaries_alone(tmp_path):
    make(tmp_path)
    (tmp_path / "step-40.tmp-dead").mkdir()
    (tmp_path / "step-20.tmp-removed").mkdir()
    (tmp_path / "written.tmp-123").touch()
    folders.delete_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-20"]


@pytest.mark.parametrize("call", range(1, 8))
def test_killed_at_any_call_a_whole_one_is_left(tmp_path, call):
    """At each fsync and rename of a save and of the pruning after it, in a process that dies there."""
    make(tmp_path, 1), make(tmp_path, 2)
    child = os.fork()
    if child == 0:
        left = [call]
        for name in ("fsync", "rename"):
            usual = getattr(os, name)

            def or_die(*arguments, usual=usual):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), 9)
                return usual(*arguments)

            setattr(os, name, or_die)
        make(tmp_path, 3)
        folders.prune(tmp_path, keep=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -9, "there are fewer calls than this"
    names = sorted(path.name for path in tmp_path.iterdir() if ".tmp-" not in path.name)
    assert names in (["step-1", "step-2"], ["step-1", "step-2", "step-3"])
    for name in names:
        check(tmp_path / name)
