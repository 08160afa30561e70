"""Write files of documents, and read them as a run would."""

import json
from pathlib import Path

import pytest

from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.config.recipe import Recipe
from gearbox.data import corpus
from gearbox.rows import arranged as arranged_rows
from gearbox.rows import splits

QUIET = corpus.Builder(tell=lambda _: None)
HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hé €  \n"}]
BYE = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "bye"}]
GOOD = [{"messages": HI}, {"messages": BYE}, {"messages": HI + BYE}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the cache folder of this test."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gearbox"


def recipe_of(path, *overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/tiny.yaml", [f"data.path={path}", "eval.fraction=0", *overrides])


def read(tokenizer, path, *overrides: str) -> corpus.MappedCorpus:
    return corpus.load_corpora(recipe_of(path, *overrides), tokenizer, QUIET)[0]


def arranged(tokenizer, path, *overrides: str) -> tuple[corpus.MappedCorpus, splits.TrainingRows]:
    recipe = recipe_of(path, *overrides)
    documents, evaluated = corpus.load_corpora(recipe, tokenizer, QUIET)
    rows = arranged_rows.split_and_pack(recipe, documents, evaluated, tokenizer, recipe.data.packing, QUIET)
    return documents, rows


def texts(tokenizer, found: corpus.MappedCorpus) -> list[str]:
    return [tokenizer.decode(found.tokens(i)) for i in range(len(found))]


def jsonl(path: Path, records: list) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


def add_up(prepared: splits.TrainingRows) -> None:
    held_out = prepared.held_out.num_documents if prepared.held_out.documents is prepared.training.documents else 0
    assert prepared.facts.num_read == prepared.training.num_documents + held_out + len([*prepared.dropped()])
