"""Guards the cache of tokens: made once by one rank, and anew by whatever the tokens depend on."""

import os
import shutil
import threading
import time
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
import xxhash
from transformers import AutoTokenizer

from gearbox import ROOT
from gearbox.data import corpus, loss_mask, row_formats, tokenization
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


@pytest.mark.parametrize("change", ["content", "supervise", "template", "special", *corpus.MODULES])
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
        edit_source(monkeypatch, change, tmp_path)
    read(other, path, *overrides)
    assert counts == [3, 3]


def edit_source(monkeypatch, module, folder: Path) -> None:
    copy = folder / "edited.py"
    copy.write_text(Path(module.__file__).read_text() + "\n")
    monkeypatch.setattr(module, "__file__", str(copy))


def forget(cache: Path) -> None:
    """So that the next read tokenizes again."""
    shutil.rmtree(cache)


def test_the_digest_is_of_the_documents_however_they_are_batched(tokenizer, tmp_path, cache, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": (HI + BYE) * (1 + i % 3)} for i in range(300)])
    digests = []
    for num_cores, batch_documents in [(2, 64), (2, 7), (1, 64), (1, 300)]:
        monkeypatch.setattr(tokenization, "BATCH_DOCUMENTS", batch_documents)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=num_cores: set(range(n)))
        digests.append(read(tokenizer, path).digest)
        forget(cache)
    assert len(digests) == 4 and len({*digests}) == 1


def test_the_digest_is_that_of_the_cached_file_and_not_of_the_code(tokenizer, tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    built, mapped = read(tokenizer, path), read(tokenizer, path)
    edit_source(monkeypatch, row_formats, tmp_path)
    rebuilt = read(tokenizer, path)
    assert built.key == mapped.key != rebuilt.key
    assert built.digest == mapped.digest == rebuilt.digest
    columns = [
        np.concatenate([built.tokens(i) for i in range(3)]),
        np.concatenate([built.loss_mask(i) for i in range(3)]),
        built.lengths,
    ]
    streams = b"".join(xxhash.xxh3_128_digest(column.tobytes()) for column in columns)
    assert built.digest == xxhash.xxh3_128_hexdigest(streams)


def test_the_digest_tells_tokens_masks_order_and_edges_of_documents_apart(tokenizer, tmp_path):
    swapped = [{"messages": [HI[0], HI[1] | {"content": HI[1]["content"].swapcase()}]}, *GOOD[1:]]
    untrained = [{"messages": [HI[0], HI[1] | {"weight": 0}, *BYE]}, *GOOD[1:]]
    trained = [{"messages": HI + BYE}, *GOOD[1:]]
    digests = [
        read(tokenizer, jsonl(tmp_path / "a.jsonl", records)).digest
        for records in (GOOD, swapped, untrained, trained, GOOD[::-1], GOOD[:2])
    ]
    # Two texts that split the same tokens, all of them trained, at another place.
    end = tokenizer.eos_token
    digests += [
        read(tokenizer, jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])).digest
        for texts in ([f"a{end}b", "c"], ["a", f"b{end}c"])
    ]
    assert len({*digests}) == len(digests)


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
