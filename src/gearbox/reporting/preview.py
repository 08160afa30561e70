"""What is trained, to be seen: counts that add up, and documents with their supervised tokens marked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from rich.markup import escape
from rich.text import Text

from gearbox.data.batches import PackedRows
from gearbox.data.splits import TrainingRows

SUPERVISED = "bold green"
MARKS = ("«", "»")  # around supervised tokens where there are no colours
SHOWN_CHARACTERS = 600  # of a document at the start of a run


def document_runs(rows: PackedRows, piece: int, tokenizer: Any) -> list[tuple[str, bool]]:
    """A piece as runs of text that are supervised or not."""
    tokens, flags = rows.chunk(piece)
    edges = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)]
    return [
        (tokenizer.decode(tokens[first:end].tolist(), clean_up_tokenization_spaces=False), bool(flags[first]))
        for first, end in pairwise(edges)
    ]


def styled(runs: list[tuple[str, bool]], colours: bool, num_characters: int | None = None) -> Text:
    """The runs with colours, or with marks around what is supervised; the middle of a long one is left out."""
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


def lines(corpus: Any, prepared: TrainingRows) -> Iterator[dict[str, Any]]:
    """One mapping a document, in order of the files, before packing: its tokens as they are used, and what for."""
    uses: dict[int, str] = {}
    ends = np.zeros(len(corpus), np.int64)
    for use, rows in (("held out", prepared.held_out), ("trained", prepared.training)):
        if rows.documents is corpus:
            ends += rows.chunks.ends(len(ends))  # no document is both
            uses |= dict.fromkeys(np.unique(rows.chunks.document).tolist(), use)
    reasons = {entry.location: entry.reason for entry in prepared.dropped}
    order = [(int(corpus.origin[i]), int(corpus.number[i]), i) for i in range(len(corpus))]
    for origin, number, i in sorted(
        [*order, *((origin, number, None) for origin, number, _ in corpus.bad)], key=lambda o: o[:2]
    ):
        place = corpus.origins[origin].location(number)
        use = uses.get(i, "dropped") if i is not None else "dropped"
        end = int(ends[i]) if use != "dropped" else None
        yield {
            "place": place,
            "use": use,
            **({"reason": reasons[place]} if use == "dropped" else {}),
            "input_ids": corpus.tokens(i)[:end].tolist() if i is not None else [],
            "supervised": corpus.loss_mask(i)[:end].tolist() if i is not None else [],
        }


def first_documents(rows: PackedRows, tokenizer: Any, num_documents: int) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Place and runs of the first pieces, in order of the files."""
    return [
        (rows.documents.location(int(rows.chunks.document[piece])), document_runs(rows, piece, tokenizer))
        for piece in range(min(num_documents, len(rows.chunks)))
    ]


def show(screen: Any, documents: list[tuple[str, list[tuple[str, bool]]]], num_characters: int | None = None) -> None:
    """Print documents with what is supervised in them."""
    colours = bool(screen.color_system)
    how = "coloured" if colours else f"between {MARKS[0]} and {MARKS[1]}"
    for place, runs in documents:
        screen.print(f"[cyan]{escape(place)}[/]  supervised {how}:")
        screen.print(styled(runs, colours, num_characters))


def answers(samples: list[Any], before: dict[str, str], after: dict[str, str]) -> list[dict[str, str]]:
    """Each sample question with its answers before and after the training, and the right one."""
    return [
        {
            "question": sample.question,
            "before": before.get(sample.question, "(not asked)"),
            "after": after[sample.question],
            "right": sample.answer,
        }
        for sample in samples
    ]


def show_answers(screen: Any, samples: list[dict[str, str]]) -> None:
    for sample in samples:
        screen.print("\n".join(f"[cyan]{name:>8}[/] {short(text)}" for name, text in sample.items()))


def short(text: str) -> str:
    line = "".join(letter if letter.isprintable() else "·" for letter in " ".join(text.split()))
    return escape(line if len(line) <= 160 else line[:157] + "...") or "(nothing)"
