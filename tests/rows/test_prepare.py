"""Guards src/prepare.py: shards do not depend on who makes them, no record is lost, and mixed parts are refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gearbox import ROOT
from gearbox.errors import UserError
from gearbox.launch import environment
from gearbox.rows import prepare as preparing
from gearbox.rows import stream
from gearbox.rows.shard_index import ShardIndex
from support.corpora import arranged, jsonl
from support.shards import files_of, opened, preparation, prepare, recipe_of

CHAT = [{"role": "user", "content": "sort dbca"}, {"role": "assistant", "content": "abcd"}]


@pytest.fixture
def prepared(chats, tmp_path):
    """Return the folder of 300 chats in 15 shards."""
    prepare(recipe_of(chats), tmp_path / "prepared")
    return tmp_path / "prepared"


def test_the_bytes_do_not_depend_on_the_number_of_parts(prepared, chats, tmp_path):
    for num_parts in (2, 3):
        prepare(recipe_of(chats), tmp_path / str(num_parts), num_parts=num_parts)
        assert files_of(tmp_path / str(num_parts)) == files_of(prepared)
    assert len(list((prepared / "shards").iterdir())) == 15


def test_each_part_makes_its_own_shards(chats, tmp_path):
    made = preparation(recipe_of(chats), tmp_path)
    assert made.make_shards(1, 4) == 15
    assert sorted(int(path.name) for path in (tmp_path / "shards").iterdir()) == [1, 5, 9, 13]
    assert made.write_index(15) is None and not (tmp_path / "index.json").exists()


def test_documents_have_the_uses_of_a_run_on_the_files(tokenizer, tmp_path):
    """Held-out, truncated, dropped and duplicate documents are the same, and so are held-out rows and samples."""
    long = [CHAT[0], {"role": "assistant", "content": "abcd " * 60}]
    records = [{"messages": [*CHAT, *CHAT] if i % 3 else long} for i in range(40)]
    records += [{"messages": [{"role": "user", "content": f"copy {i}"}, CHAT[1]]} for i in range(60)]
    records.insert(7, {"messages": []})
    records.insert(70, {"messages": [{"role": "user", "content": "no answer"}]})
    path = jsonl(tmp_path / "a.jsonl", records)
    overrides = ("data.on_bad_row=skip", "eval.fraction=0.3", "batch.row_tokens=128", "eval.samples=9")
    documents, rows = arranged(tokenizer, path, *overrides)
    index = prepare(recipe_of(path, *overrides), tmp_path / "prepared", num_records=7)
    uses = index.uses
    assert (uses.read, uses.trained, uses.held_out) == (102, rows.training.num_documents, rows.held_out.num_documents)
    assert (uses.dropped, uses.truncated, uses.duplicates) == (
        len([*rows.dropped()]), rows.facts.num_truncated, rows.facts.num_duplicates,
    )  # fmt: skip
    assert uses.dropped == 2 and uses.held_out > 5 and uses.truncated > 5 and uses.duplicates > 5
    assert (index.dropped, tuple(index.lengths.model_dump().values())) == (
        rows.facts.dropped,
        rows.facts.document_lengths,
    )
    listed = [json.loads(line) for line in (tmp_path / "prepared" / "dropped.jsonl").read_text().splitlines()]
    assert {(line["place"], line["reason"]) for line in listed} == {(d.location, d.reason) for d in rows.dropped()}

    streamed = opened(tmp_path / "prepared", *overrides)
    assert streamed.samples == rows.samples and rows.samples
    ours, theirs = streamed.held_out, rows.held_out
    batches = [one.batch(range(len(one))) for one in (ours, theirs)]
    for name in ("input_ids", "labels", "position_ids"):
        assert batches[0][name].equal(batches[1][name])
    assert [ours.location(i) for i in range(5)] == [theirs.location(i) for i in range(5)]
    assert sorted(trained_documents(streamed)) == sorted(
        documents.tokens(i)[:128].tobytes() for i in np.unique(rows.training.chunks.document)
    )


def trained_documents(streamed):
    rows = streamed.training
    return [rows.chunk(chunk)[0].tobytes() for row in range(len(rows)) for chunk in rows.row(row)]


def test_copies_of_eval_path_are_not_trained(chats, tmp_path):
    lines = chats.read_text().splitlines()
    evaluated = tmp_path / "evaluated.jsonl"
    evaluated.write_text("\n".join([*lines[:30], json.dumps({"messages": CHAT[:1]})]))
    overrides = (f"eval.path={evaluated}", "data.on_bad_row=skip")
    index = prepare(recipe_of(chats, *overrides), tmp_path / "prepared")
    assert (index.uses.read, index.uses.trained, index.uses.dropped) == (300, 270, 30)
    assert index.dropped == "30 dropped (30 also in eval.path)" and index.dropped_of_evaluation.startswith("1 dropped")
    streamed = opened(tmp_path / "prepared", *overrides)
    assert streamed.held_out.num_documents == 30 and streamed.facts.has_own_evaluation and len(streamed.samples) == 2


def test_a_shard_has_one_source_if_sources_have_weights(chats, tmp_path):
    other = jsonl(tmp_path / "other.jsonl", [{"messages": CHAT}] * 35)
    path = f"[{{path: {chats}, weight: 1}}, {{path: {other}, weight: 3}}]"
    index = prepare(recipe_of(path, "eval.fraction=0"), tmp_path / "prepared")
    assert [shard.source for shard in index.shards] == [0] * 15 + [1] * 2 and index.weights == [1, 3]
    streamed = opened(tmp_path / "prepared", "eval.fraction=0", "train.steps=20")
    sources = [
        index.shards[streamed.training.place(row)[0]].source for s in range(20) for row in streamed.rows_of_step(s)
    ]
    assert sources.count(1) == 90 and streamed.facts.weights == ((str(chats), 1.0), (str(other), 3.0))
    with pytest.raises(UserError, match=r"^train\.epochs: weighted sources end at different times"):
        opened(tmp_path / "prepared", "eval.fraction=0", "train.epochs=1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["batch.row_tokens=64"], r"^batch\.row_tokens: 64, but .*/00000 was prepared with 128; use the same, or"),
        (["data.supervise=all"], r"^data\.supervise: 'all', but .* was prepared with 'assistant'"),
        (["eval.fraction=0.2"], r"^eval\.fraction: 0\.2, but .* was prepared with 0\.1"),
        (["model.add_tokens=[<|x|>]"], r"^model\.name: '\w+' \(hash of the tokenizer\), but|^model\.add_tokens: "),
        (["data.packing=false"], r"^data\.packing: False, but .* was prepared with True"),
    ],
)
def test_parts_and_runs_of_another_recipe_are_refused(chats, tmp_path, changes, message):
    preparation(recipe_of(chats), tmp_path).make_shards(0, 8)
    with pytest.raises(UserError, match=message):
        preparation(recipe_of(chats, *changes), tmp_path)
    made = preparation(recipe_of(chats), tmp_path)
    made.write_index(made.make_shards(0, 1))
    with pytest.raises(UserError, match=message.replace("/00000", "")):
        opened(tmp_path, *changes)


def test_parts_of_other_sources_or_sizes_are_refused(chats, tmp_path):
    preparation(recipe_of(chats), tmp_path / "p").make_shards(0, 8)
    other = tmp_path / "other.jsonl"
    other.write_text(chats.read_text().replace("sort", "short", 1))
    with pytest.raises(UserError, match=r"^data\.path: '\w+' \(hash of the content of the sources\), but "):
        preparation(recipe_of(other), tmp_path / "p")
    with pytest.raises(UserError, match=r"^--records: 21, but .* was prepared with 20"):
        preparation(recipe_of(chats), tmp_path / "p", num_records=21)


def test_what_a_killed_process_left_is_removed_with_the_index(prepared, chats):
    before = files_of(prepared)
    (prepared / "index.json").unlink()
    probe = prepared / "shards" / "probe.tmp-1234abcd-renamed"  # a kill while filesystem.rename_problem renames
    probe.mkdir()
    (probe / "file").write_bytes(b"x")
    (prepared / "shards" / "00003.lock").touch()
    prepare(recipe_of(chats), prepared)
    assert files_of(prepared) == before


def test_a_damaged_shard_is_refused_before_the_index(prepared, chats):
    (prepared / "index.json").unlink()
    file = prepared / "shards" / "00003" / "documents.arrow"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"00003: is damaged \(.*\); delete it, and run this command again$"):
        preparation(recipe_of(chats), prepared)


def test_a_finished_index_is_left_alone(prepared, chats):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    prepare(recipe_of(chats), prepared)
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


def test_a_record_that_cannot_be_used_ends_its_part_and_leaves_no_shard(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*[{"messages": CHAT}] * 25, {"messages": 1}, *[{"messages": CHAT}] * 5])
    with pytest.raises(UserError, match=r"a\.jsonl:26: "):
        prepare(recipe_of(path), tmp_path / "p")
    assert [each.name for each in (tmp_path / "p" / "shards").iterdir() if each.is_dir()] == ["00000"]


def test_a_shard_without_rows_is_part_of_the_stream(tmp_path):
    answered, none = {"messages": CHAT}, {"messages": CHAT[:1]}
    path = jsonl(tmp_path / "a.jsonl", [*[none] * 20, *[answered] * 20, *[none] * 20])
    overrides = ("eval.fraction=0", "data.on_bad_row=skip")
    index = prepare(recipe_of(path, *overrides), tmp_path / "p")
    assert [bool(shard.rows) for shard in index.shards] == [False, True, False] and index.uses.dropped == 40
    assert len(trained_documents(opened(tmp_path / "p", *overrides))) == 20


@pytest.mark.parametrize("kind", ["txt", "csv", "json", "parquet"])
def test_any_form_is_read(tmp_path, kind):
    import pyarrow.parquet

    texts = [f"a text with number {i}" for i in range(45)]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        contents = {"txt": "\n\n".join(texts), "csv": "\n".join(["text", *texts])}
        path.write_text(contents.get(kind) or json.dumps([{"text": text} for text in texts]))
    index = prepare(recipe_of(path), tmp_path / "p")
    assert (index.uses.read, len(index.shards), index.origins[0].num_records) == (45, 3, 45)


def test_duplicates_are_counted_in_parts(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    hashes = draw.integers(0, 2**64, 300, dtype=np.uint64)[draw.integers(0, 300, 900)]
    paths = [tmp_path / f"{i}.npy" for i in range(3)]
    for path, part in zip(paths, np.split(hashes, 3), strict=True):
        np.save(path, np.sort(part))
    monkeypatch.setattr(preparing, "HASHES_AT_ONCE", 100)
    assert preparing._num_duplicates(paths) == 900 - len(np.unique(hashes))


@pytest.mark.parametrize(("task", "part"), [("4", (0, 3)), ("6", (1, 3)), ("8", (2, 3))])
def test_a_slurm_array_gives_the_part(monkeypatch, task, part):
    assert environment.part_of_slurm_array() is None
    for name, value in {"ID": task, "MIN": "4", "MAX": "8", "STEP": "2", "COUNT": "3"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert environment.part_of_slurm_array() == part


def run_prepare(*arguments, **variables):
    command = [sys.executable, "src/prepare.py", "recipes/tiny.yaml", *map(str, arguments)]
    given = os.environ | {"PYTHONPATH": str(ROOT / "src")} | variables
    return subprocess.Popen(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_task(*arguments, **variables):
    """Run the batch script as Slurm does."""
    command = ["bash", "cluster/slurm/prepare.sbatch", "recipes/tiny.yaml", *map(str, arguments)]
    given = os.environ | {"PYTHONPATH": str(ROOT / "src"), "GEARBOX_ENV": sys.prefix} | variables
    return subprocess.Popen(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.cold
def test_a_kill_loses_no_shard_and_another_process_takes_over(tmp_path):
    """Killed in the middle of a shard, the command is run again by two tasks of an array at the same time."""
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT * (1 + i % 40)} for i in range(4000)])
    folder, given = tmp_path / "p", (f"data.path={path}", "--records", 400)
    first = run_prepare(folder, *given)
    while len(list(folder.glob("shards/?????"))) < 3 and first.poll() is None:
        time.sleep(0.002)
    first.send_signal(signal.SIGKILL)
    first.wait()
    times = {done: done.stat().st_mtime_ns for done in folder.glob("shards/?????")}
    assert 3 <= len(times) < 10
    tasks = [
        run_prepare(folder, *given, SLURM_ARRAY_TASK_ID=str(i), SLURM_ARRAY_TASK_MIN="0", SLURM_ARRAY_TASK_STEP="1",
                    SLURM_ARRAY_TASK_COUNT="2")
        for i in range(2)
    ]  # fmt: skip
    outputs = [task.communicate()[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert {done: done.stat().st_mtime_ns for done in times} == times, "no finished shard is made again"
    assert "train with data.path=" in "".join(outputs)
    prepare(recipe_of(path, "eval.fraction=0.02", "batch.rows=8"), tmp_path / "q", num_records=400)
    assert files_of(folder) == files_of(tmp_path / "q"), "nothing is left over"


@pytest.mark.cold
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a recipe and a folder"),
        (["p", "--part", "2/2"], r"--part: '2/2': expected I/N with I from 0 to N-1"),
        (["p", "--records", "0"], "--records must be 1 to"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, message):
    process = run_prepare(*arguments)
    output = process.communicate()[0]
    assert process.returncode == 2 and re.search(message, output) and output.count("\n") == 1, output


def test_the_index_that_is_written_is_the_index_that_is_read(prepared):
    raw = (prepared / "index.json").read_bytes()
    index = ShardIndex.parse(raw, "index.json")
    index.write(prepared / "again.json")
    assert (prepared / "again.json").read_bytes() == raw
    assert stream.is_prepared(str(prepared)) and not stream.is_prepared(str(prepared / "shards"))
