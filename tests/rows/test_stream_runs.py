"""Train from a stream, killed at random moments on other gears and ranks: each row is trained once, in order."""

import json
import os
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from gearbox.errors import UserError
from gearbox.training import session
from support import ledger
from support.faults import at_step, kill, patch_step
from support.shards import opened, prepare, recipe_of

NUM_KILLS = 8
GEARS = [("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2)]
SETTINGS = (
    *("train.epochs=2", "schedule.name=constant", "save.every=2", "eval.every=20", "data.shuffle_shards=2"),
    *("eval.fraction=0.1", "run.name=x"),
)


@pytest.fixture
def prepared(chats, tmp_path) -> Path:
    """Return the folder of 300 chats in 15 shards."""
    prepare(recipe_of(chats), tmp_path / "prepared")
    return tmp_path / "prepared"


@pytest.fixture
def most_bytes(cache):
    """Watch the cache. Yield a function that returns the most bytes that its shards had at any moment."""
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            found = 0
            for parent, _, names in os.walk(cache / "shards"):
                for name in names:
                    with suppress(FileNotFoundError):
                        found += Path(parent, name).stat().st_size
            most.append(found)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield lambda: max(most)
    ended.set()
    watcher.join()


@pytest.mark.ranks
def test_a_killed_stream_trains_each_row_once_and_in_order(train, books, prepared, monkeypatch, most_bytes):
    rows = opened(prepared, *SETTINGS[:-1])
    index = rows.training.index
    limit = rows.sampler.most_bytes() + index.held_out.num_bytes + max(shard.num_bytes for shard in index.shards)
    assert limit < sum(shard.num_bytes for shard in index.shards) * 0.7, "the stream is larger than the cache"
    given = ("train.steps=null", *SETTINGS, f"data.path=file://{prepared}", f"data.cache_gb={limit / 1e9}")
    kept, draw = books("run"), random.Random(0)
    for _ in range(NUM_KILLS):
        gear, ranks = draw.choice(GEARS)
        with monkeypatch.context() as here:
            patch_step(here, at_step(draw.randint(2, 6), kill, draw.randrange(ranks)))
            outcome = train(gear, *given, ranks=ranks)
        assert -9 in outcome.codes, (outcome.codes, outcome.output)
    last = train("ddp", *given, ranks=2)
    assert set(last.codes) == {0}, last.output
    lines = ledger.kept(kept().attempts["rank-0"])
    assert [line["step"] for line in lines] == list(range(1, rows.num_steps + 1))
    assert [line["rows"] for line in lines] == [rows.rows_of_step(step) for step in range(rows.num_steps)]
    trained = [row for line in lines for row in line["rows"]]
    num_rows = len(rows.training)
    assert sorted(trained[:num_rows]) == sorted(trained[num_rows:]) == list(range(num_rows))
    assert 0 < most_bytes() <= limit
    whole = train("single", *given, "run.name=whole")
    losses = [line["loss"] for line in last.lines("loss")]
    assert losses == pytest.approx(whole.losses[-len(losses) :], rel=1e-4), "the same as without a kill"
    assert [line["eval_loss"] for line in whole.lines("eval_loss")], "the held-out documents are evaluated"


def test_another_index_is_refused_as_other_files_are(train, prepared, chats):
    given = ("schedule.name=constant", "eval.fraction=0.1", "run.name=x", "save.every=2", f"data.path={prepared}")
    first = train("single", *given, "train.steps=2")
    assert first.codes == [0], first.output
    text = chats.read_text().splitlines()
    changed = prepared.parent / "changed.jsonl"
    changed.write_text("\n".join([*text[1:], text[0]]))
    prepared.rename(prepared.with_name("before"))
    prepare(recipe_of(changed), prepared)
    refused = train("single", *given, "train.steps=4", "run.resume=latest")
    assert refused.codes == [2] and "was trained on other rows: the content of data.path" in refused.output
    window = train("single", *given, "train.steps=4", "run.resume=latest", "data.shuffle_shards=3")
    assert "data.shuffle_shards changed from 4 to 3" in window.output


def test_packed_shards_are_refused_for_a_model_that_leaks(train, prepared, monkeypatch):
    monkeypatch.setattr(session, "LEAK_TOLERANCE", {"no": -1.0})
    refused = train("single", "eval.fraction=0.1", f"data.path={prepared}")
    assert refused.codes == [2] and "Traceback" not in refused.output
    assert "prepare it again with data.packing=false in another folder" in refused.output


def test_the_preview_shows_prepared_documents(prepared, capsys):
    import preview

    given = ["recipes/tiny.yaml", f"data.path={prepared}", "batch.row_tokens=128", "eval.fraction=0.1"]
    preview.main([*given, "--rows", "2"])
    shown = capsys.readouterr().out
    assert shown.count("chats.jsonl:") == 3 and "15 in " in shown and "300 read = " in shown
    with pytest.raises(UserError, match=r"^--json: lists the records of files, but "):
        preview.main([*given, "--json"])
    assert json.loads((prepared / "index.json").read_text())["uses"]["read"] == 300
