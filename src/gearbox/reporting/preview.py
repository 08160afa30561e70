"""Show training documents with their supervised tokens marked, and the model's answers to sample questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from gearbox.config.recipe import Recipe
from gearbox.console import styled
from gearbox.data.row_formats import JsonObject
from gearbox.rows.batches import PackedRows
from gearbox.rows.packing import Corpus
from gearbox.rows.splits import TrainingRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SIDES = {"kto": ("bad", "good")}
"""What an objective calls documents of label 0 and of label 1, if not rejected and chosen."""
SUPERVISED = "bold green"
MARKS = ("«", "»")  # around supervised tokens where there are no colours
SHOWN_CHARACTERS = 600  # characters of a document printed at the start of a run

Runs = list[tuple[str, bool]]  # consecutive pieces of a document's text, each with True if it is supervised


class Shown(NamedTuple):
    """A document to show."""

    place: str
    runs: Runs
    side: str = ""
    """What the answer is to its objective, such as chosen; empty if answers are not compared."""


def document_runs(tokens: NDArray[np.int32], loss_mask: NDArray[np.int8], tokenizer: PreTrainedTokenizerFast) -> Runs:
    """Return a chunk as pieces of text, each entirely supervised or entirely unsupervised."""
    edges = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(loss_mask)]
    return [
        (tokenizer.decode(tokens[first:end].tolist(), clean_up_tokenization_spaces=False), bool(loss_mask[first]))
        for first, end in pairwise(edges)
    ]


def marked(runs: Runs, colours: bool, num_characters: int | None = None) -> Text:
    """Return the text with supervised pieces coloured or marked. Cut the middle out of a long text."""
    text = Text()
    for run, is_supervised in runs:
        piece = run if colours or not is_supervised else run.join(MARKS)
        text.append(
            "".join(c if c.isprintable() or c == "\n" else "·" for c in piece), SUPERVISED if is_supervised else "dim"
        )
    if num_characters is not None and len(text) > num_characters:
        half = num_characters // 2
        text = text[:half] + Text(f" [... {len(text) - 2 * half:,} characters ...] ") + text[-half:]
    return text


def documents_per_answer(recipe: Recipe) -> int:
    """Return the documents in rows for each answer of the data: under KTO a mismatched answer follows each one."""
    return 2 if recipe.train.objective == "kto" else 1


def lines(corpus: Corpus, rows: TrainingRows, recipe: Recipe) -> Iterator[JsonObject]:
    """Yield one JSON object per document with its tokens and use, in file order, before packing.

    A pair is two documents, the chosen answer before the rejected one. Documents that are compared have their label.
    """
    uses: dict[int, str] = {}
    ends, step = np.zeros(len(corpus), np.int64), documents_per_answer(recipe)
    for use, of_use in (("held out", rows.held_out), ("trained", rows.training)):
        if getattr(of_use.documents, "corpus", of_use.documents) is corpus:  # those held out may come from eval.path
            chunks = of_use.chunks.where(of_use.chunks.document % step == 0)
            chunks = replace(chunks, document=chunks.document // step)
            ends += chunks.ends(len(ends))  # a document is never both trained and held out
            uses |= dict.fromkeys(np.unique(chunks.document).tolist(), use)
    reasons = {entry.location: entry.reason for entry in rows.dropped()}
    records: list[tuple[int, int, int | None]] = [(entry.origin, entry.number, None) for entry in corpus.bad]
    records += [(int(corpus.origin_ids[i]), int(corpus.record_numbers[i]), i) for i in range(len(corpus))]
    for origin, number, document in sorted(records, key=lambda record: record[:2]):
        location = corpus.origins[origin].location(number)
        line: JsonObject = {"place": location, "use": "dropped"}
        if document in uses:
            line["use"] = uses[document]
        else:
            line["reason"] = reasons[location]
        end = int(ends[document]) if document in uses else None
        line["input_ids"] = corpus.tokens(document)[:end].tolist() if document is not None else []
        line["supervised"] = corpus.loss_mask(document)[:end].tolist() if document is not None else []
        if recipe.compares and document is not None:
            line["label"] = int(corpus.labels[document])
        yield line


def first_documents(
    rows: PackedRows, tokenizer: PreTrainedTokenizerFast, num_records: int, recipe: Recipe | None = None
) -> list[Shown]:
    """Return the first chunks, in file order: `num_records` of them, or those of so many compared records.

    A pair is two documents, the chosen answer and the rejected one. A recipe that compares answers names their sides.
    """
    if recipe is None or not recipe.compares:
        chunks = rows.first_chunks(num_records)
        return [Shown(place, document_runs(tokens, mask, tokenizer)) for place, tokens, mask in chunks]
    step = documents_per_answer(recipe)
    chunks = rows.first_chunks(2 * step * num_records)[::step]
    places = [*dict.fromkeys(place for place, _, _ in chunks)][:num_records]
    names = SIDES.get(recipe.train.objective, ("rejected", "chosen"))
    labels = cast("Corpus", rows.documents).labels[rows.chunks.document[: len(chunks) * step : step]].tolist()
    return [
        Shown(place, document_runs(tokens, mask, tokenizer), names[label])
        for (place, tokens, mask), label in zip(chunks, labels, strict=True)
        if place in places
    ]


def show(screen: Console, documents: list[Shown], num_characters: int | None = None) -> None:
    """Print each record's location, and its documents with supervised tokens marked."""
    colours = bool(screen.color_system)
    how = "coloured" if colours else f"between {MARKS[0]} and {MARKS[1]}"
    above = ""
    for place, runs, side in documents:
        if place != above or not side:
            screen.print(styled((place, "cyan"), f"  supervised text is {how}:"))
        if side:
            screen.print(styled((f"{side}:", "cyan"), ""))
        screen.print(marked(runs, colours, num_characters))
        above = place


def show_answers(screen: Console, samples: list[dict[str, str]]) -> None:
    """Print questions and answers, one field per line."""
    for sample in samples:
        for name, text in sample.items():
            screen.print(styled((f"{name:>8}:", "cyan"), f" {short(text)}"))


def short(text: str) -> str:
    """Return a text as one line of at most 160 characters."""
    line = "".join(letter if letter.isprintable() else "·" for letter in " ".join(text.split()))
    return (line if len(line) <= 160 else line[:157] + "...") or "(empty)"
