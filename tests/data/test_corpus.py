"""Guards the token cache: one rank builds it once, and any change that affects tokens rebuilds it."""

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


def test_tokenized_data_is_not_tokenized_again(tokenizer, tmp_path, monkeypatch):
    counts = count_encoded(monkeypatch)
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    first = read(tokenizer, path)
    assert counts == [3]
    again = read(tokenizer, path, "batch.row_tokens=32", "data.packing=false", "data.long=drop", "eval.fraction=0.1")
    moved = tmp_path / "b.jsonl"
    path.rename(moved)
    renamed = read(tokenizer, moved)
    assert counts == [3], "rows, splits and file names are not part of the key"
    assert texts(tokenizer, again) == texts(tokenizer, renamed) == texts(tokenizer, first)
    assert renamed.location(2) == f"{moved}:3"


@pytest.mark.parametrize("name", [tokenization.DOCUMENTS, tokenization.ABOUT])
@pytest.mark.parametrize("damage", ["empty", "shorter", "missing"])
def test_a_damaged_cache_is_built_again(tokenizer, tmp_path, monkeypatch, name, damage):
    counts = count_encoded(monkeypatch)
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    first = read(tokenizer, path)
    (file,) = (tmp_path / "cache").rglob(name)
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[: len(content) // 2] if damage == "shorter" else b"")
    assert texts(tokenizer, read(tokenizer, path)) == texts(tokenizer, first)
    assert counts == [3, 3]


@pytest.mark.parametrize("change", ["content", "supervise", "supplied", "template", "special", *corpus.MODULES])
def test_any_change_that_affects_tokens_rebuilds_them(tokenizer, tmp_path, monkeypatch, change):
    counts = count_encoded(monkeypatch)
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    read(tokenizer, path)
    other = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    overrides = []
    if change == "content":
        jsonl(path, [*GOOD[:2], {"messages": BYE + HI}])
    elif change == "supervise":
        overrides = ["data.supervise=last"]
    elif change == "supplied":
        overrides = ["data.supervise_supplied=true"]
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
    """Delete the cache, so that the next read tokenizes again."""
    shutil.rmtree(cache)


def test_the_digest_does_not_depend_on_the_batching(tokenizer, tmp_path, cache, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": (HI + BYE) * (1 + i % 3)} for i in range(300)])
    digests = []
    for num_cores, batch_documents in [(2, 64), (2, 7), (1, 64), (1, 300)]:
        monkeypatch.setattr(tokenization, "BATCH_DOCUMENTS", batch_documents)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=num_cores: set(range(n)))
        digests.append(read(tokenizer, path).digest)
        forget(cache)
    assert len(digests) == 4 and len({*digests}) == 1


def test_the_digest_depends_on_the_cached_file_and_not_on_the_code(tokenizer, tmp_path, monkeypatch):
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


def test_the_digest_depends_on_tokens_masks_order_and_document_boundaries(tokenizer, tmp_path):
    swapped = [{"messages": [HI[0], HI[1] | {"content": HI[1]["content"].swapcase()}]}, *GOOD[1:]]
    untrained = [{"messages": [HI[0], HI[1] | {"weight": 0}, *BYE]}, *GOOD[1:]]
    trained = [{"messages": HI + BYE}, *GOOD[1:]]
    digests = [
        read(tokenizer, jsonl(tmp_path / "a.jsonl", records)).digest
        for records in (GOOD, swapped, untrained, trained, GOOD[::-1], GOOD[:2])
    ]
    # Two pairs of texts with the same trained tokens, split at different places.
    end = tokenizer.eos_token
    digests += [
        read(tokenizer, jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])).digest
        for texts in ([f"a{end}b", "c"], ["a", f"b{end}c"])
    ]
    assert len({*digests}) == len(digests)


def test_other_ranks_wait_for_the_builder(tokenizer, tmp_path, monkeypatch):
    counts = count_encoded(monkeypatch)
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", GOOD))
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(corpus.load_corpora(recipe, tokenizer, corpus.Builder(False, lambda _: None))[0])
    )
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive() and counts == []
    built = corpus.load_corpora(recipe, tokenizer, corpus.Builder(True, lambda _: None))[0]
    waiting.join(30)
    assert counts == [3] and texts(tokenizer, found[0]) == texts(tokenizer, built)


def test_a_tokenizer_file_with_truncation_has_one_key_on_every_rank(tmp_path):
    """The builder switches truncation off. The key that other ranks look for must not depend on that."""
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x" * 300}])
    other = jsonl(tmp_path / "b.jsonl", [{"text": "y" * 300}])
    keys = []
    for is_builder in (True, False):
        cutting = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
        cutting.backend_tokenizer.enable_truncation(max_length=8)
        both = corpus.load_corpora(
            recipe_of(path, f"eval.path={other}"), cutting, corpus.Builder(is_builder, lambda _: None)
        )
        keys.append([found.key for found in both])
        assert [int(found.lengths[0]) for found in both] == [301, 301]
    assert keys[0] == keys[1]


def test_a_rank_without_a_builder_builds_the_cache_itself(tokenizer, tmp_path, monkeypatch):
    """This rank's data differs from the builder's. The ranks report that once they can compare."""
    monkeypatch.setattr(corpus, "BUILDER_FIRST_SECONDS", 0.2)
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", GOOD))
    assert len(corpus.load_corpora(recipe, tokenizer, corpus.Builder(False, lambda _: None))[0]) == 3


def test_a_waiting_rank_exits_with_its_launcher(tokenizer, tmp_path, monkeypatch):
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", GOOD))
    parents = chain([os.getppid(), os.getppid()], repeat(1))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(RuntimeError, match="the launcher exited"):
        corpus.load_corpora(recipe, tokenizer, corpus.Builder(is_first=False))


def test_a_cache_that_is_not_writable_is_reported(tokenizer, tmp_path, cache):
    cache.parent.write_text("a file in place of the folder")
    with pytest.raises(UserError, match=r"cache/gearbox: cannot be written .*; set HF_DATASETS_CACHE"):
        read(tokenizer, jsonl(tmp_path / "a.jsonl", GOOD))
