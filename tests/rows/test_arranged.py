"""Test that the rows of a run are arranged once per machine, and are the same for all who map them."""

import json
import shutil

import numpy as np
import pytest

from gearbox.data import corpus
from gearbox.errors import UserError
from gearbox.rows import arranged
from gearbox.rows.batches import FILES, PackedRows
from support.corpora import QUIET, jsonl, recipe_of
from support.corpora import arranged as arrange


@pytest.fixture
def path(tmp_path):
    records = [{"instruction": f"q{i}", "output": "a" * (i % 40 + 1)} for i in range(60)]
    return jsonl(tmp_path / "a.jsonl", [*records, {"instruction": "no output"}])


SKIP = "data.on_bad_row=skip"


def folders(cache):
    return sorted(folder for folder in cache.glob("rows-*") if folder.is_dir())


def refuse(*_: object) -> None:
    raise AssertionError("the rows are arranged again")


@pytest.mark.parametrize("packing", [True, False])
def test_a_second_start_maps_what_the_first_arranged(tokenizer, path, cache, monkeypatch, packing):
    settings = (SKIP, "eval.fraction=0.2", f"data.packing={packing}")
    documents, first = arrange(tokenizer, path, *settings)
    monkeypatch.setattr(arranged, "_build", refuse)
    _, second = arrange(tokenizer, path, *settings)
    assert (second.facts, [*second.dropped()]) == (first.facts, [*first.dropped()])
    assert first.facts.num_read == 61 and [entry.location for entry in first.dropped()] == [f"{path}:61"]
    for one, other in ((first.training, second.training), (first.held_out, second.held_out)):
        assert len(one) == len(other) > 0
        assert other.batch([0, len(other) - 1])["input_ids"].equal(one.batch([0, len(one) - 1])["input_ids"])
    for rows in (second.training, second.held_out):
        arrays = [rows.chunks.document, rows.chunks.start, rows.members, rows.starts, rows.num_tokens, rows.targets]
        assert all(isinstance(array, np.memmap) for array in arrays)
        made = PackedRows(documents, rows.chunks, rows.row_tokens, rows.pad_token, packing)
        assert (rows.key, rows.num_documents, rows.fullest(5)) == (made.key, made.num_documents, made.fullest(5))


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        ("batch.row_tokens=64", True),
        ("eval.fraction=0.3", True),
        ("data.long=drop", True),
        ("data.packing=false", True),
        ("optim.lr=1e-5", False),
        ("train.seed=7", False),
        ("batch.rows=2", False),
        ("eval.samples=2", False),
    ],
)
def test_a_folder_is_named_by_what_the_rows_depend_on(tokenizer, path, cache, change, is_other):
    settings = (SKIP, "eval.fraction=0.2")
    arrange(tokenizer, path, *settings)
    arrange(tokenizer, path, *settings, change)
    assert len(folders(cache)) == 1 + is_other


@pytest.mark.parametrize("file", [f"training/{name}.npy" for name in FILES] + ["about.json", "dropped.jsonl"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_folder_is_made_again(tokenizer, path, cache, file, damage):
    _, first = arrange(tokenizer, path, SKIP)
    (folder,) = folders(cache)
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    if damage == "cut":
        (folder / file).write_bytes(content[:-1])
    _, second = arrange(tokenizer, path, SKIP)
    assert folders(cache) == [folder]
    assert (folder / file).read_bytes() == content and second.training.key == first.training.key


def test_a_killed_builder_leaves_nothing_in_the_way(tokenizer, path, cache, monkeypatch):
    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as dying, pytest.raises(Killed):
        dying.setattr(arranged.DataFacts, "__init__", die)
        arrange(tokenizer, path, SKIP)
    assert folders(cache) == []
    arrange(tokenizer, path, SKIP)
    (folder,) = folders(cache)
    left = folder.rename(folder.with_name(f"{folder.name}.partial"))  # as if killed before the rename
    (left / "stray").touch()
    assert len(arrange(tokenizer, path, SKIP)[1].training) > 0
    assert folders(cache) == [folder] and not (folder / "stray").exists()


def test_other_ranks_wait_for_the_first(tokenizer, path, cache, monkeypatch):
    """Test a rank that waits: it must find the folder that the first makes meanwhile, and make none."""
    recipe = recipe_of(path, SKIP)
    documents, _ = corpus.load_corpora(recipe, tokenizer, QUIET)
    arranged.split_and_pack(recipe, documents, None, tokenizer, True, QUIET)
    (folder,) = folders(cache)
    shutil.move(folder, cache / "aside")
    monkeypatch.setattr(arranged, "_build", refuse)
    monkeypatch.setattr(corpus.time, "sleep", lambda _: shutil.move(cache / "aside", folder))
    waiting = corpus.Builder(is_first=False, tell=lambda _: None)
    rows = arranged.split_and_pack(recipe, documents, None, tokenizer, True, waiting)
    assert len(rows.training) > 0


def test_data_that_cannot_be_used_leaves_no_folder(tokenizer, tmp_path, cache):
    path = jsonl(tmp_path / "b.jsonl", [{"instruction": "q" * 200, "output": "a"}])
    with pytest.raises(UserError, match="leaves nothing to train on"):
        arrange(tokenizer, path, "batch.row_tokens=32", "data.long=drop")
    assert folders(cache) == [] and [*cache.glob("*.partial")] == []


def test_hostile_numbers_in_the_facts_are_refused_or_made_again(tokenizer, path, cache):
    arrange(tokenizer, path, SKIP)
    (folder,) = folders(cache)
    for content in ("[]", "{}", '{"facts": {}, "bytes": []}', "\0", json.dumps({"bytes": {"training/start.npy": 1}})):
        (folder / "about.json").write_text(content)
        assert arrange(tokenizer, path, SKIP)[1].facts.num_read == 61
