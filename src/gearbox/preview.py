"""What is trained, to be seen: counts that add up, and documents with their supervised tokens marked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from rich.markup import escape
from rich.text import Text

from gearbox.config import Recipe
from gearbox.data import Prepared, Rows, told
from gearbox.forms import TITLES

SUPERVISED = "bold green"
MARKS = ("«", "»")  # around supervised tokens where there are no colours
SHOWN_CHARACTERS = 600  # of a document at the start of a run


def facts(recipe: Recipe, corpus: Any, prepared: Prepared, tokenizer: Any) -> dict[str, str]:
    """Name and text of each line of the summary."""
    rows, held_out = prepared.training, prepared.held_out
    lengths = corpus.lengths[np.unique(rows.pieces.document)]
    percentiles = " ".join(f"{p}%: {int(np.percentile(lengths, p)):,}" for p in (50, 90, 99))
    num_tokens, num_targets = int(rows.num_tokens.sum()), int(rows.targets.sum())
    evaluated = f"{held_out.num_documents:,} held out"
    if held_out.documents is not rows.documents:
        evaluated, apart = "0 held out", f"; evaluated on {held_out.num_documents:,} of eval.path"
        if prepared.dropped_of_evaluation:
            apart += f", {told(prepared.dropped_of_evaluation)}"
    else:
        apart = ""
    shown = {f"data {number}" if number else "data": text for number, text in enumerate(_origins(corpus))}
    shown["documents"] = (
        f"{prepared.num_read:,} read = {rows.num_documents:,} trained + {evaluated} + {told(prepared.dropped)}{apart}"
    )
    shown["tokens"] = (
        f"{num_tokens:,}, {num_targets / num_tokens:.0%} supervised; lengths {percentiles} max: {lengths.max():,}; "
        f"{prepared.num_truncated:,} truncated, {prepared.num_split:,} split, {prepared.num_duplicates:,} duplicates"
    )
    if rows.packing:
        shown["rows"] = (
            f"{len(rows):,} of {rows.row_tokens:,} tokens, {rows.filled:.1%} filled, {1 - rows.filled:.1%} padding"
        )
    else:
        shown["rows"] = f"{len(rows):,} of a document each, by length, {_padding(rows, recipe.batch.rows):.1%} padding"
    sources = recipe.data.sources
    if sources[0].weight is not None:
        total = sum(source.weight or 0 for source in sources)
        shown["rows"] += "; " + ", ".join(
            f"{(source.weight or 0) / total:.1%} of a step from {source.path} ({size:,} rows)"
            for source, size in zip(sources, rows.group_sizes, strict=True)
        )
    if not _ends_are_special(rows, tokenizer):
        shown["hint"] = (
            "trained turns do not end with a special token, so nothing may tell the model to stop: does the chat "
            "template belong to this tokenizer?"
        )
    return shown


def _ends_are_special(rows: Rows, tokenizer: Any) -> bool:
    """Whether the last trained token of most of the first documents is one that text never makes."""
    specials = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = []
    for document in np.unique(rows.pieces.document)[:100].tolist():
        tokens, trained = rows.documents.tokens(document), rows.documents.supervised(document)
        ends.append(int(tokens[np.flatnonzero(trained)[-1]]) in specials)
    return sum(ends) * 2 >= len(ends)


def _origins(corpus: Any) -> Iterator[str]:
    """A line for each file, the first ones of many."""
    listed = list(zip(corpus.origins, corpus.summaries, strict=True))
    for origin, summary in listed[:4]:
        unused = f"; not read: {', '.join(summary.unused)}" if summary.unused else ""
        yield f"{origin.name}: {summary.num_records:,} rows, {TITLES.get(summary.form, summary.form)}{unused}"
    if len(listed) > 4:
        rest = [summary for _, summary in listed[4:]]
        forms = ", ".join(sorted({TITLES.get(summary.form, summary.form) for summary in rest}))
        yield f"{len(rest):,} more files: {sum(summary.num_records for summary in rest):,} rows, {forms}"


def _padding(rows: Rows, rows_per_step: int) -> float:
    """Share of padding, as if each step held the next rows by length and they were as wide as its longest."""
    lengths = np.sort(rows.num_tokens)
    last_of_step = np.arange(len(lengths)) // rows_per_step * rows_per_step + rows_per_step - 1
    widths = lengths[np.minimum(last_of_step, len(lengths) - 1)]
    return 1 - float(lengths.sum()) / float(widths.sum())


def document(rows: Rows, piece: int, tokenizer: Any) -> list[tuple[str, bool]]:
    """A piece as runs of text that are supervised or not."""
    tokens, flags = rows.piece(piece)
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


def lines(corpus: Any, prepared: Prepared) -> Iterator[dict[str, Any]]:
    """One mapping a document, in order of the files, before packing: its tokens as they are used, and what for."""
    uses: dict[int, str] = {}
    ends = np.zeros(len(corpus), np.int64)
    for use, rows in (("held out", prepared.held_out), ("trained", prepared.training)):
        if rows.documents is corpus:
            ends += rows.pieces.ends(len(ends))  # no document is both
            uses |= dict.fromkeys(np.unique(rows.pieces.document).tolist(), use)
    reasons = {entry.place: entry.reason for entry in prepared.dropped}
    order = [(int(corpus.origin[i]), int(corpus.number[i]), i) for i in range(len(corpus))]
    for origin, number, i in sorted(
        [*order, *((origin, number, None) for origin, number, _ in corpus.bad)], key=lambda o: o[:2]
    ):
        place = corpus.origins[origin].place(number)
        use = uses.get(i, "dropped") if i is not None else "dropped"
        end = int(ends[i]) if use != "dropped" else None
        yield {
            "place": place,
            "use": use,
            **({"reason": reasons[place]} if use == "dropped" else {}),
            "input_ids": corpus.tokens(i)[:end].tolist() if i is not None else [],
            "supervised": corpus.supervised(i)[:end].tolist() if i is not None else [],
        }


def first_documents(rows: Rows, tokenizer: Any, num_documents: int) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Place and runs of the first pieces, in order of the files."""
    return [
        (rows.documents.place(int(rows.pieces.document[piece])), document(rows, piece, tokenizer))
        for piece in range(min(num_documents, len(rows.pieces)))
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
