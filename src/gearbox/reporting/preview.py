"""What is trained, as people see it: documents with their supervised tokens marked, and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from gearbox.data.batches import PackedRows
from gearbox.data.packing import Corpus
from gearbox.data.row_formats import JsonObject
from gearbox.data.splits import Sample, TrainingRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SUPERVISED = "bold green"
MARKS = ("«", "»")  # around supervised tokens where there are no colours
SHOWN_CHARACTERS = 600  # of a document at the start of a run

Runs = list[tuple[str, bool]]  # of a document's text, each with whether it is supervised


def document_runs(rows: PackedRows, chunk: int, tokenizer: PreTrainedTokenizerFast) -> Runs:
    """Return a chunk as runs of text that are supervised or not."""
    tokens, loss_mask = rows.chunk(chunk)
    edges = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(loss_mask)]
    return [
        (tokenizer.decode(tokens[first:end].tolist(), clean_up_tokenization_spaces=False), bool(loss_mask[first]))
        for first, end in pairwise(edges)
    ]


def styled(runs: Runs, colours: bool, num_characters: int | None = None) -> Text:
    """Return the runs with colours, or with marks around what is supervised; a long text loses its middle."""
    text = Text()
    for run, is_supervised in runs:
        marked = run if colours or not is_supervised else run.join(MARKS)
        text.append(
            "".join(c if c.isprintable() or c == "\n" else "·" for c in marked), SUPERVISED if is_supervised else "dim"
        )
    if num_characters is not None and len(text) > num_characters:
        half = num_characters // 2
        text = text[:half] + Text(f" [... {len(text) - 2 * half:,} characters ...] ") + text[-half:]
    return text


def lines(corpus: Corpus, rows: TrainingRows) -> Iterator[JsonObject]:
    """Yield one JSON object per record, in order of the files, before packing: its tokens as used, and what for."""
    uses: dict[int, str] = {}
    ends = np.zeros(len(corpus), np.int64)
    for use, of_use in (("held out", rows.held_out), ("trained", rows.training)):
        if of_use.documents is corpus:
            ends += of_use.chunks.ends(len(ends))  # no document is both
            uses |= dict.fromkeys(np.unique(of_use.chunks.document).tolist(), use)
    reasons = {entry.location: entry.reason for entry in rows.dropped}
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
        yield line


def first_documents(rows: PackedRows, tokenizer: PreTrainedTokenizerFast, num_documents: int) -> list[tuple[str, Runs]]:
    """Return location and runs of the first chunks, in order of the files."""
    return [
        (rows.documents.location(int(rows.chunks.document[chunk])), document_runs(rows, chunk, tokenizer))
        for chunk in range(min(num_documents, len(rows.chunks)))
    ]


def show(screen: Console, documents: list[tuple[str, Runs]], num_characters: int | None = None) -> None:
    """Print documents with their supervised tokens marked."""
    colours = bool(screen.color_system)
    how = "coloured" if colours else f"between {MARKS[0]} and {MARKS[1]}"
    for location, runs in documents:
        screen.print(f"[cyan]{escape(location)}[/]  supervised {how}:")
        screen.print(styled(runs, colours, num_characters))


def answers(samples: Sequence[Sample], before: dict[str, str], after: dict[str, str]) -> list[dict[str, str]]:
    """Return each sample question with its answers before and after the training, and the right one."""
    return [
        {
            "question": sample.question,
            "before": before.get(sample.question, "(not asked)"),
            "after": after[sample.question],
            "right": sample.answer,
        }
        for sample in samples
    ]


def show_answers(screen: Console, samples: list[dict[str, str]]) -> None:
    """Print what `answers` returns, a line each."""
    for sample in samples:
        screen.print("\n".join(f"[cyan]{name:>8}[/] {short(text)}" for name, text in sample.items()))


def short(text: str) -> str:
    """Return a text on one short line, escaped for rich."""
    line = "".join(letter if letter.isprintable() else "·" for letter in " ".join(text.split()))
    return escape(line if len(line) <= 160 else line[:157] + "...") or "(nothing)"
