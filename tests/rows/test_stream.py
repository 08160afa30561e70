"""Guards the order of a stream: a pure function of (index, seed, step), read from few shards at a time."""

import json
import pickle
import shutil
from contextlib import suppress

import numpy as np
import pytest

from gearbox.data.shard_store import ShardStore
from gearbox.errors import UserError
from gearbox.filesystem import digest_of
from gearbox.rows.shard_index import ShardIndex, is_index
from gearbox.rows.stream import StreamSampler
from support.shards import opened, prepare, recipe_of, served


@pytest.fixture(scope="module")
def prepared(chats, tmp_path_factory):
    """Return a folder of 300 chats in 15 shards."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(recipe_of(chats), folder)
    return folder


def windows_of(rows, order: list[int], shuffle_shards: int) -> list[set[int]]:
    """Return the shards of consecutive windows of an epoch's rows."""
    shards = [rows.place(row)[0] for row in order]
    first_seen = list(dict.fromkeys(shards))
    found, at = [], 0
    while at < len(shards):
        size, members = 0, set()
        while at + size < len(shards) and (shards[at + size] in members or len(members) < shuffle_shards):
            members.add(shards[at + size])
            size += 1
        at += size
        found.append(members)
    assert sum(map(len, found)) == len(first_seen)
    return found


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("shuffle_shards", [1, 4, 40])
def test_each_epoch_has_each_row_once_in_windows_of_shards(chats, tmp_path, shuffle_shards, packing):
    prepare(recipe_of(chats, f"data.packing={packing}"), tmp_path / "p")
    rows = opened(tmp_path / "p", "train.epochs=3", f"data.shuffle_shards={shuffle_shards}", f"data.packing={packing}")
    num_rows = len(rows.training)
    order = [row for step in range(rows.num_steps) for row in rows.rows_of_step(step)]
    epochs = [order[first : first + num_rows] for first in range(0, len(order), num_rows)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(num_rows))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in epochs:
        expected = [shuffle_shards] * (15 // shuffle_shards) + [15 % shuffle_shards] * bool(15 % shuffle_shards)
        assert [len(window) for window in windows_of(rows.training, epoch, shuffle_shards)] == expected


def test_any_step_is_found_without_the_steps_before(prepared):
    rows = opened(prepared, "train.epochs=2.5")
    steps = [rows.rows_of_step(step) for step in range(rows.num_steps)]
    assert sum(map(len, steps)) == rows.num_rows == -(-5 * len(rows.training) // 2)
    for step in np.random.default_rng(0).permutation(rows.num_steps).tolist():
        assert opened(prepared, "train.epochs=2.5").rows_of_step(step) == steps[step]
    assert opened(prepared, "train.epochs=2.5", "train.seed=1").rows_of_step(0) != steps[0]


def test_unpacked_rows_of_a_step_have_similar_lengths(chats, tmp_path):
    prepare(recipe_of(chats, "data.packing=false"), tmp_path, num_records=100)
    rows = opened(tmp_path, "data.packing=false", "train.epochs=1")
    spreads = [np.ptp(rows.training.num_tokens[rows.rows_of_step(step)]) for step in range(rows.num_steps - 1)]
    assert np.median(spreads) < np.ptp(rows.training.num_tokens[range(len(rows.training))]) / 4


def test_batches_are_those_of_the_shards(prepared):
    rows = opened(prepared, "train.epochs=1")
    for step in (0, 3):
        ids = rows.rows_of_step(step)
        batch = rows.training.batch(ids)
        for i, row_id in enumerate(ids):
            shard, row = rows.training.place(row_id)
            alone = rows.training.shard(shard).batch([row])
            assert all(batch[name][i].equal(alone[name][0]) for name in ("input_ids", "labels", "position_ids"))
            assert int(rows.training.num_tokens[row_id]) == int(rows.training.shard(shard).num_tokens[row])
        assert len(batch["chunk_ids"].unique()) == sum(len(rows.training.row(row)) for row in ids) + 1
        assert rows.training.targets[ids].sum() == (batch["labels"] != -100).sum()
    index = rows.training.index
    assert rows.training.num_tokens.sum() == sum(shard.tokens for shard in index.shards)
    assert "chats.jsonl:" in rows.training.locations(ids)


@pytest.mark.parametrize("shuffle_shards", [1, 3])
def test_the_bytes_needed_at_the_same_time_are_enough(prepared, monkeypatch, shuffle_shards):
    """The most bytes of shards that two steps read is what the limit is compared with, and little less would not do."""
    needed, found = [], []
    monkeypatch.setattr(ShardStore, "want", lambda self, names: needed.append(names))
    rows = opened(prepared, "train.epochs=4", f"data.shuffle_shards={shuffle_shards}")
    sampler, shards = rows.sampler, rows.training.shards
    for step in range(1, rows.num_steps):
        windows = sampler._windows(step - 1, step)
        found.append(sum(shards[int(i)].num_bytes for window in windows for i in sampler._shards_of(window)[0]))
    assert isinstance(sampler, StreamSampler)
    assert max(found) <= sampler.most_bytes() <= max(found) + 2 * shuffle_shards * max(s.num_bytes for s in shards)


def test_a_limit_that_is_too_low_is_refused_at_the_start(prepared):
    with pytest.raises(UserError, match=r"^data\.cache_gb: 1e-05 cannot hold the \S+ GB of shards that are needed at"):
        opened(f"file://{prepared}", "data.cache_gb=1e-5")
    assert len(opened(str(prepared), "data.cache_gb=1e-5").training), "a folder on a file system needs no cache"


def size_of(folder):
    """Return the bytes of the files in a folder, while others are evicted from it."""
    while True:
        with suppress(FileNotFoundError):
            return sum(path.stat().st_size for path in folder.rglob("*.*") if path.is_file())


def test_a_stream_reads_few_shards_from_a_url(prepared, tmp_path, cache):
    """An epoch over http under a limit has the tokens of an epoch on the folder."""
    local = opened(prepared, "train.epochs=2", "data.shuffle_shards=2")
    limit = (local.sampler.most_bytes() + local.training.index.held_out.num_bytes) / 1e9
    limit += 2 * max(shard.num_bytes for shard in local.training.shards) / 1e9
    with served(prepared) as url:
        remote = opened(url, "train.epochs=2", "data.shuffle_shards=2", f"data.cache_gb={limit}")
        for step in range(remote.num_steps):
            ids = remote.rows_of_step(step)
            assert ids == local.rows_of_step(step)
            assert remote.training.batch(ids)["input_ids"].equal(local.training.batch(ids)["input_ids"])
            used = size_of(cache / "shards")
            assert 0 < used <= limit * 1e9
    assert remote.training.key == local.training.key


HOSTILE = [
    (lambda index: index["shards"][0].update(name="../../etc"), "shards.0.name"),
    (lambda index: index["shards"][0].update(name="/etc"), "shards.0.name"),
    (lambda index: index["shards"][0]["files"].update({"../x": index["shards"][0]["files"]["rows.npy"]}), "shards.0"),
    (lambda index: index["shards"][0].update(rows=-1), "shards.0.rows"),
    (lambda index: index["shards"][0].update(rows=2**60), "shards.0.rows"),
    (lambda index: index["shards"][0].update(rows="5"), "shards.0.rows"),
    (lambda index: index["shards"][0].update(rows=5.5), "shards.0.rows"),
    (lambda index: index["shards"][0].update(tokens=None), "shards.0.tokens"),
    (lambda index: index["shards"][0].update(source=7), "a source is unknown"),
    (lambda index: index["shards"].append(index["shards"][0]), "a name is repeated"),
    (lambda index: index["shards"].clear(), "shards"),
    (lambda index: index["shards"].pop(), "the shards do not have the trained documents"),
    (lambda index: index["uses"].update(read=1), "documents read are not"),
    (lambda index: index["settings"].clear(), "batch.row_tokens: 128"),
    (lambda index: index.update(weights=[0.0]), "weights.0"),
    (lambda index: index.update(weights=[float("nan")]), "weights"),
    (lambda index: index.update(format="gearbox shards 9"), "format"),
    (lambda index: index.update(more=1), "more"),
    (lambda index: index["lengths"].update(max=[]), "lengths.max"),
    (lambda index: index["questions"].append({"document": -4, "question": "", "answer": ""}), "questions"),
    (lambda index: index["questions"].insert(0, {"document": 10**9, "question": "", "answer": ""}), "a document is"),
    (lambda index: index["answer_ends"].append(-1), "answer_ends"),
]


@pytest.mark.parametrize(("change", "problem"), HOSTILE)
def test_a_hostile_index_is_one_line(prepared, tmp_path, change, problem):
    content = json.loads((prepared / "index.json").read_text())
    first = content["shards"][0]["files"]
    first.setdefault("rows.npy", next(iter(first.values())))
    change(content)
    (tmp_path / "index.json").write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        opened(f"file://{tmp_path}")
    assert problem in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("file", ["documents.arrow", "rows.json", "starts.npy"])
@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"\xff\n", pickle.dumps([])])
def test_hostile_files_that_the_index_lists_are_one_line(prepared, tmp_path, file, raw):
    folder = tmp_path / "p"
    shutil.copytree(prepared, folder)
    content = json.loads((folder / "index.json").read_text())
    first = content["shards"][0]
    (folder / first["name"] / file).write_bytes(raw)
    digest = digest_of(folder / first["name"] / file)
    first["files"][file] = {"bytes": len(raw), "xxh3_128": digest}
    (folder / "index.json").write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        opened(folder).training.shard(0)
    assert "; prepare the data again" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"null", b'{"format": "gearbox shards 1"}', b"[" * 10**5])
def test_what_is_no_index_is_one_line(tmp_path, raw):
    (tmp_path / "index.json").write_bytes(raw)
    with pytest.raises(UserError) as error:
        opened(f"file://{tmp_path}")
    assert str(error.value).startswith(f"file://{tmp_path}/index.json: ") and "\n" not in str(error.value)


def test_a_url_without_an_index_and_a_list_with_one_are_refused(prepared, chats, tmp_path):
    with pytest.raises(UserError, match=r"^data\.path: file:///[^\n]*/index\.json: cannot be read"):
        opened(f"file://{tmp_path}")
    for path in (f"[{prepared}, {chats}]", f"[{prepared}]"):
        with pytest.raises(UserError, match=r"has prepared shards; give it as data\.path, with nothing else"):
            opened(path)
    with pytest.raises(UserError, match=r"has prepared shards; give it as data\.path"):
        opened(chats, f"eval.path={prepared}")


def test_a_folder_of_data_that_is_named_like_an_index_is_data(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps([{"text": f"text {i}"} for i in range(50)]))
    assert not is_index(tmp_path / "index.json") and len(opened(tmp_path).training)


def test_the_identity_of_the_rows_is_in_the_index(prepared, chats, tmp_path):
    """Places and times do not count; tokens, rows and shards do."""
    moved = tmp_path / "moved.jsonl"
    moved.write_text(chats.read_text())
    index = ShardIndex.parse((prepared / "index.json").read_bytes(), "")
    assert prepare(recipe_of(moved), tmp_path / "same").digest == index.digest
    assert prepare(recipe_of(moved), tmp_path / "parts", num_records=30).digest != index.digest
    moved.write_text(chats.read_text().replace("sort", "copy", 1))
    assert prepare(recipe_of(moved), tmp_path / "changed").digest != index.digest
