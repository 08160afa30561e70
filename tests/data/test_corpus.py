"""Guards the cache of tokens: made once by one rank, and anew by whatever the tokens depend on."""

import os
import threading
import time
from itertools import chain, repeat
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gearbox import ROOT
from gearbox.data import corpus, loss_mask, row_formats
from gearbox.errors import UserError
from support.corpora import BYE, GOOD, HI, jsonl, read, recipe_of, texts


def count_encoded(monkeypatch) -> list[int]:
    counts: list[int] = []
    usual = loss_mask.ChatTokenizer.encode
    monkeypatch.setattr(loss_mask.ChatTokenizer, "encode", lambda self, d: counts.append(len(d)) or usual(self, d))
    return counts


def test_what_was_tokenized_is_not_tokenized_again(tokenizer, tmp_path, monkeypatch):
    counts = count_encoded(monkeypatch)
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    first = read(tokenizer, path)
    assert counts == [3]
    again = read(tokenizer, path, "batch.row_tokens=32", "data.packing=false", "data.long=drop", "eval.fraction=0.1")
    moved = tmp_path / "b.jsonl"
    path.rename(moved)
    renamed = read(tokenizer, moved)
    assert counts == [3], "rows, splits and names do not matter"
    assert texts(tokenizer, again) == texts(tokenizer, renamed) == texts(tokenizer, first)
    assert renamed.location(2) == f"{moved}:3"


@pytest.mark.parametrize("change", ["content", "supervise", "template", "special", "code"])
def test_whatever_the_tokens_depend_on_makes_them_anew(tokenizer, tmp_path, monkeypatch, change):
    counts = count_encoded(monkeypatch)
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    read(tokenizer, path)
    other = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    overrides = []
    if change == "content":
        jsonl(path, [*GOOD[:2], {"messages": BYE + HI}])
    elif change == "supervise":
        overrides = ["data.supervise=last"]
    elif change == "template":
        other.chat_template = other.chat_template.replace("<|end|>", "<|end|>\n")
    elif change == "special":
        other.add_special_tokens({"eos_token": "<|pad|>"})
    else:
        copy = tmp_path / "forms.py"
        copy.write_text(Path(row_formats.__file__).read_text() + "\n")
        monkeypatch.setattr(row_formats, "__file__", str(copy))
    read(other, path, *overrides)
    assert counts == [3, 3]


def test_a_rank_that_does_not_build_waits_for_the_one_that_does(tokenizer, tmp_path, monkeypatch):
    counts = count_encoded(monkeypatch)
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", GOOD))
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(corpus.load_corpora(recipe, tokenizer, is_builder=False, tell=lambda _: None)[0])
    )
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive() and counts == []
    built = corpus.load_corpora(recipe, tokenizer, is_builder=True, tell=lambda _: None)[0]
    waiting.join(30)
    assert counts == [3] and texts(tokenizer, found[0]) == texts(tokenizer, built)


def test_a_tokenizer_whose_file_asks_for_a_cut_has_one_key_on_every_rank(tmp_path):
    """The builder switches the cut off; what the others look for must not depend on that."""
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x" * 300}])
    other = jsonl(tmp_path / "b.jsonl", [{"text": "y" * 300}])
    keys = []
    for is_builder in (True, False):
        cutting = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
        cutting.backend_tokenizer.enable_truncation(max_length=8)
        both = corpus.load_corpora(recipe_of(path, f"eval.path={other}"), cutting, is_builder, tell=lambda _: None)
        keys.append([found.key for found in both])
        assert [int(found.lengths[0]) for found in both] == [301, 301]
    assert keys[0] == keys[1]


def test_a_rank_that_nobody_builds_for_builds_itself(tokenizer, tmp_path, monkeypatch):
    """It has read other data than the builder; that is told once all ranks can compare."""
    monkeypatch.setattr(corpus, "BUILDER_FIRST_SECONDS", 0.2)
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", GOOD))
    assert len(corpus.load_corpora(recipe, tokenizer, is_builder=False, tell=lambda _: None)[0]) == 3


def test_a_waiting_rank_ends_with_its_launcher(tokenizer, tmp_path, monkeypatch):
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", GOOD))
    parents = chain([os.getppid(), os.getppid()], repeat(1))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(RuntimeError, match="the launcher has ended"):
        corpus.load_corpora(recipe, tokenizer, is_builder=False)


def test_a_cache_that_cannot_be_written_is_named(tokenizer, tmp_path, cache):
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cache/gearbox: cannot be written .*; set HF_DATASETS_CACHE"):
        read(tokenizer, jsonl(tmp_path / "a.jsonl", GOOD))
