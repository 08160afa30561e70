"""Guards the fetching of shards: what is read is what the index lists, and the cache stays under its limit."""

import os
import shutil
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from gearbox import filesystem
from gearbox.data import shard_store
from gearbox.data.shard_store import ShardStore
from gearbox.errors import UserError
from support.shards import files_of, served

NAMES = [f"shards/{number:05}" for number in range(6)]
SIZE = 3000  # bytes of a folder


@pytest.fixture
def held(tmp_path) -> Path:
    """Return a folder with six folders of two files."""
    for number, name in enumerate(NAMES):
        folder = tmp_path / "held" / name
        folder.mkdir(parents=True)
        (folder / "a.npy").write_bytes(bytes([number]) * 1000)
        (folder / "b.npy").write_bytes(bytes([number]) * (SIZE - 1000))
    return tmp_path / "held"


def store_of(held: Path, location: str, cache: Path, limit: int | None = None, **given) -> ShardStore:
    folders = {
        name: {
            path.name: SimpleNamespace(bytes=path.stat().st_size, xxh3_128=filesystem.digest_of(path))
            for path in sorted((held / name).iterdir())
        }
        for name in NAMES
        if (held / name).is_dir()
    }
    return ShardStore(
        location, cache / "index", folders, limit, **{"is_fetcher": True, "seconds": 20, "tell": print} | given
    )


def usage(cache: Path) -> int:
    found = 0
    for parent, _, names in os.walk(cache):
        for name in names:
            with suppress(FileNotFoundError):
                found += Path(parent, name).stat().st_size
    return found


@pytest.mark.parametrize("kind", ["file", "http"])
def test_folders_are_fetched_ahead_in_order(held, tmp_path, kind):
    asked = []
    with served(held, lambda path: asked.append(path) or 0) as url:
        store = store_of(held, url if kind == "http" else f"file://{held}", tmp_path / "cache")
        store.want(NAMES[:3])
        folder = store.open(NAMES[1])
        assert files_of(folder) == files_of(held / NAMES[1])
        store.open(NAMES[2])
        assert asked == [f"/{name}/{file}.npy" for name in NAMES[:3] for file in "ab"] * (kind == "http")
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == [
        f"shards-0000{i}" for i in range(3)
    ]


def test_a_folder_on_a_file_system_is_read_where_it_is(held, tmp_path):
    store = store_of(held, str(held), tmp_path / "cache")
    assert store.open(NAMES[0]) == held / NAMES[0] and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("location", ["{held}", "file://{held}"])
@pytest.mark.parametrize("damage", ["changed", "shorter", "longer", "missing"])
def test_a_damaged_shard_is_one_line(held, tmp_path, location, damage):
    store = store_of(held, location.format(held=held), tmp_path / "cache", seconds=1)
    file = held / NAMES[3] / "b.npy"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes({"changed": b"x" + content[1:], "shorter": content[1:], "longer": content + b"x"}[damage])
    with pytest.raises(UserError, match=r"^data\.path: .*/shards/00003/b\.npy: [^\n]*$"):
        store.open(NAMES[3])
    assert not (tmp_path / "cache" / "index" / "shards-00003").exists()


def test_a_damaged_transfer_is_repeated_once(held, tmp_path):
    """A server sends another file once, as a cache between the machines may."""
    told, asked = [], Counter()
    file = held / NAMES[0] / "a.npy"
    good = file.read_bytes()

    def swap(path: str) -> int:
        asked[path] += 1
        if path.endswith("00000/a.npy"):
            file.write_bytes(b"y" * len(good) if asked[path] == 1 else good)
        return 0

    with served(held, swap) as url:
        store = store_of(held, url, tmp_path / "cache", tell=told.append)
        assert files_of(store.open(NAMES[0]))["a.npy"] == good
    assert asked[f"/{NAMES[0]}/a.npy"] == 2
    assert next(line for line in told if "damaged" in line).endswith("; fetching it again")


@pytest.mark.parametrize("code", [500, 503, 429])
def test_a_server_that_fails_every_second_request_is_asked_again(held, tmp_path, monkeypatch, code):
    monkeypatch.setattr(shard_store, "FIRST_RETRY_SECONDS", 0.01)
    requests, told = [], []

    def fails(path: str) -> int:
        requests.append(path)
        return code if len(requests) % 2 else 0

    with served(held, fails) as url:
        store = store_of(held, url, tmp_path / "cache", tell=told.append)
        store.want(NAMES)
        for name in NAMES:
            assert files_of(store.open(name)) == files_of(held / name)
    assert len(requests) == 24 and len(told) == 12 and all(line.startswith("WARNING: http") for line in told)


def test_a_server_that_is_gone_ends_the_run_in_time(held, tmp_path):
    with served(held) as url:
        pass
    store = store_of(held, url, tmp_path / "cache", seconds=2, tell=lambda _: None)
    with pytest.raises(UserError, match=r"^data\.path: http://[^\n]* cannot be read: URLError: [^\n]*$"):
        store.open(NAMES[0])


def test_a_missing_shard_and_an_unknown_scheme_are_refused_at_once(held, tmp_path):
    started = time.monotonic()
    with served(held, lambda path: 404) as url, pytest.raises(UserError, match=r"00000/a\.npy: cannot be read: .*404"):
        store_of(held, url, tmp_path / "cache", seconds=1000).open(NAMES[0])
    with pytest.raises(UserError, match=r"^data\.path: nonsense://x/[^\n]*: ValueError"):
        store_of(held, "nonsense://x", tmp_path / "cache", seconds=1000).open(NAMES[0])
    assert time.monotonic() - started < 500


def test_the_cache_stays_under_its_limit_at_every_moment(held, tmp_path):
    limit, cache, most, ended = 3 * SIZE + 500, tmp_path / "cache", [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            most.append(usage(cache))

    watcher = threading.Thread(target=watch)
    watcher.start()
    store = store_of(held, f"file://{held}", cache, limit)
    for _ in range(3):
        for now, ahead in zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True):
            store.want([now, ahead])
            folder = store.open(now)
            assert files_of(folder) == files_of(held / now)
            store.close(now)
    ended.set()
    watcher.join()
    assert 2 * SIZE < max(most) <= limit


def test_a_folder_that_someone_reads_is_not_evicted(held, tmp_path):
    """The reader is another process or rank; both wait for room, and get it when the reader ends."""
    cache = tmp_path / "cache"
    reader = store_of(held, f"file://{held}", cache, 2 * SIZE)
    folders = [reader.open(NAMES[0]), reader.open(NAMES[1])]
    other = store_of(held, f"file://{held}", cache, 2 * SIZE, seconds=1)
    with pytest.raises(UserError, match=r"00002: was not fetched within 1 s; the cache is full"):
        other.open(NAMES[2])
    assert all(files_of(folder) for folder in folders)
    reader.close(NAMES[0])
    patient = store_of(held, f"file://{held}", cache, 2 * SIZE)
    assert patient.open(NAMES[2]).is_dir() and not folders[0].exists() and folders[1].is_dir()


def test_only_the_first_rank_of_a_machine_fetches(held, tmp_path):
    other = store_of(held, f"file://{held}", tmp_path / "cache", is_fetcher=False)
    found = []
    waiting = threading.Thread(target=lambda: found.append(other.open(NAMES[4])))
    waiting.start()
    time.sleep(0.3)
    assert not found and not (tmp_path / "cache" / "fetching.lock").exists()
    first = store_of(held, f"file://{held}", tmp_path / "cache")
    first.want([NAMES[4]])
    waiting.join(20)
    assert files_of(found[0]) == files_of(held / NAMES[4])


def test_what_a_killed_process_left_is_removed(held, tmp_path):
    left = tmp_path / "cache" / "index" / "shards-00002.partial"
    left.mkdir(parents=True)
    (left / "a.npy").write_bytes(b"x" * 2 * SIZE)
    old = tmp_path / "cache" / "older index" / "shards-00000"
    shutil.copytree(held / NAMES[0], old)
    store = store_of(held, f"file://{held}", tmp_path / "cache", 2 * SIZE)
    assert files_of(store.open(NAMES[2])) == files_of(held / NAMES[2]) and not left.exists()
    store.open(NAMES[3])
    assert not old.exists(), "shards of an index that nobody reads make room"


def test_a_folder_of_which_a_file_is_missing_is_fetched_again(held, tmp_path):
    """A process was killed while it evicted the folder."""
    folder = store_of(held, f"file://{held}", tmp_path / "cache").open(NAMES[0])
    (folder / "a.npy").unlink()
    assert files_of(store_of(held, f"file://{held}", tmp_path / "cache").open(NAMES[0])) == files_of(held / NAMES[0])


def test_a_folder_that_is_wanted_now_replaces_one_that_is_wanted_later(held, tmp_path):
    """A resumed run finds the cache full of shards that its earlier process fetched ahead."""
    store = store_of(held, f"file://{held}", tmp_path / "cache", 2 * SIZE)
    for name in NAMES[:2]:
        store.open(name)
        store.close(name)
    store.want([NAMES[5], NAMES[0], NAMES[1]])
    assert files_of(store.open(NAMES[5])) == files_of(held / NAMES[5])
    assert store.open(NAMES[0]).is_dir() and not (tmp_path / "cache" / "index" / "shards-00001").exists()
