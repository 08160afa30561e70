"""From documents to batches. The rows of step s are a pure function of (data, seed, s).

A document is one record of the data; a row is one packed sequence of `batch.row_tokens` tokens.
Shapes: B rows of a micro batch, T = row_tokens.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gearbox.config import BUILTIN_TASKS, Data, UserError, accumulation

IGNORED = -100  # a target that is not trained; the value torch's cross entropy skips


@dataclass(frozen=True)
class Document:
    tokens: np.ndarray
    """Token ids, [n]."""
    supervised: np.ndarray
    """True where the token is one to predict, [n]."""


# --------------------------------------------------------------------------- reading


def read_documents(data: Data) -> list[dict[str, Any]]:
    """The records of data.path, each a mapping. Raises UserError for what cannot be read."""
    if data.path == BUILTIN_TASKS:
        from gearbox import tasks  # the built-in data is data too

        return tasks.documents()
    path = Path(data.path)
    try:
        if path.suffix == ".txt":
            return [{"text": text} for text in path.read_text(encoding="utf-8").split("\n\n") if text.strip()]
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").split("\n")
            return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
        if path.suffix == ".json":
            records = _parse(path.read_text(encoding="utf-8"), str(path))
            if not isinstance(records, list):
                raise UserError(f"{path}: must hold a list of documents, found {type(records).__name__}")
            return records
        import datasets

        if path.suffix in (".parquet", ".csv"):
            return datasets.load_dataset(path.suffix[1:], data_files=str(path), split="train").to_list()
        return datasets.load_dataset(data.path, split=data.split).to_list()
    except UserError:
        raise
    except Exception as error:  # every kind of reader and network error ends here, with its own words
        raise UserError(f"data.path: {data.path!r} (split {data.split!r}) cannot be read: {_one_line(error)}") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: is not JSON: {error}") from None


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def to_messages(record: dict[str, Any], form: str, where: str) -> list[dict[str, str]] | str:
    """The chat of a record, or its text when it is plain text."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: must be an object with fields, found {type(record).__name__}")
    if form == "auto":
        form = "messages" if "messages" in record else "instruction" if "instruction" in record else "text"
    required = {"messages": ["messages"], "instruction": ["instruction", "output"], "text": ["text"]}[form]
    for field in required:
        if not record.get(field):
            raise UserError(f"{where}: the field {field!r} is missing or empty; the fields are {sorted(record)}")
    for field in [*required, *(["input"] if form == "instruction" and record.get("input") else [])]:
        if form != "messages" and not isinstance(record[field], str):
            raise UserError(f"{where}: the field {field!r} must be text, found {record[field]!r}")
    if form == "text":
        return record["text"]
    if form == "instruction":
        question = "\n\n".join(part for part in (record["instruction"], record.get("input")) if part)
        return [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
    chat = record["messages"]
    turns_are_text = isinstance(chat, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in chat
    )
    if not turns_are_text:
        raise UserError(f"{where}: the field 'messages' must be a list of turns with the texts 'role' and 'content'")
    if chat[0]["role"] == "assistant":
        raise UserError(f"{where}: the first turn is the assistant's; there is nothing that it answers")
    return chat


# --------------------------------------------------------------------------- tokens


def tokenize(record: dict[str, Any], tokenizer: Any, data: Data, row_tokens: int, where: str) -> Document:
    """Tokens of one record and which of them are trained, cut to row_tokens."""
    chat = to_messages(record, data.form, where)
    if isinstance(chat, str):
        text_tokens = [*tokenizer(chat, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id][:row_tokens]
        return Document(np.array(text_tokens), np.ones(len(text_tokens), bool))
    if tokenizer.chat_template is None:
        raise UserError(f"{where}: is a chat, but the tokenizer has no chat template; name an instruction-tuned model")
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        spans = [_assistant_span(chat, turn, text, tokenizer, where) for turn in _assistant_turns(chat)]
    except UserError:
        raise
    except Exception as error:  # the template is a program of somebody else's
        raise UserError(f"{where}: the chat template refuses this chat: {_one_line(error)}") from None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = np.array(encoded["input_ids"][:row_tokens])
    starts = np.array([start for start, _ in encoded["offset_mapping"][:row_tokens]])
    if data.supervise == "all":
        return Document(tokens, np.ones(len(tokens), bool))
    supervised = np.zeros(len(tokens), bool)
    for first, end in spans:
        supervised |= (starts >= first) & (starts < end)
    return Document(tokens, supervised)


def _assistant_turns(chat: list[dict[str, str]]) -> list[int]:
    return [i for i, message in enumerate(chat) if message["role"] == "assistant"]


def _assistant_span(chat: list, turn: int, text: str, tokenizer: Any, where: str) -> tuple[int, int]:
    """Characters [first, end) of one assistant turn and its end-of-turn token in the rendered chat."""
    before = tokenizer.apply_chat_template(chat[:turn], tokenize=False, add_generation_prompt=True)
    after = tokenizer.apply_chat_template(chat[: turn + 1], tokenize=False)
    if not (text.startswith(after) and after.startswith(before)):
        raise UserError(
            f"{where}: the chat template changes earlier turns when a later one follows; its mask is unsafe"
        )
    return len(before), len(after.rstrip())


# --------------------------------------------------------------------------- rows


def pack(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """Documents of each row: best fit, longest first. Each document lands in exactly one row, whole."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted by room
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(open_rows, (lengths[document], -1))
        if at == len(open_rows):
            room, row = row_tokens, len(rows)
            rows.append([])
        else:
            room, row = open_rows.pop(at)
        rows[row].append(document)
        if room > lengths[document]:
            bisect.insort(open_rows, (room - lengths[document], row))
    return rows


class Rows:
    """Packed rows, with documents isolated by position ids that restart; no attention mask is needed."""

    def __init__(self, documents: list[Document], row_tokens: int, pad_token: int, packing: bool) -> None:
        self.documents = documents
        self.row_tokens = row_tokens
        self.pad_token = pad_token
        lengths = [len(document.tokens) for document in documents]
        self.rows = pack(lengths, row_tokens) if packing else [[i] for i in range(len(documents))]
        # The first token of a document has nothing before it and is never a target.
        self.targets = np.array([sum(int(documents[i].supervised[1:].sum()) for i in row) for row in self.rows])
        self.filled = sum(lengths) / max(1, len(self.rows) * row_tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, row_ids: list[int | None]) -> dict[str, torch.Tensor]:
        """input_ids, position_ids, labels and document_ids, each [B, T] int64; None makes a row without targets.

        labels[t] is the token to predict from position t, or IGNORED. Padding counts as a document of its own.
        """
        shape = (len(row_ids), self.row_tokens)
        batch = {
            "input_ids": np.full(shape, self.pad_token),
            "position_ids": np.zeros(shape, int),
            "labels": np.full(shape, IGNORED),
            "document_ids": np.full(shape, -1),
        }
        for i, row_id in enumerate(row_ids):
            at = 0
            for index in self.rows[row_id] if row_id is not None else ():
                tokens, supervised = self.documents[index].tokens, self.documents[index].supervised
                span = slice(at, at + len(tokens))
                batch["input_ids"][i, span] = tokens
                batch["position_ids"][i, span] = np.arange(len(tokens))
                batch["labels"][i, at : at + len(tokens) - 1] = np.where(supervised[1:], tokens[1:], IGNORED)
                batch["document_ids"][i, span] = index
                at += len(tokens)
            batch["position_ids"][i, at:] = np.arange(self.row_tokens - at)
        return {name: torch.from_numpy(array) for name, array in batch.items()}


@dataclass(frozen=True)
class Step:
    """What one rank feeds to its model in one optimizer step."""

    micro_batches: list[dict[str, torch.Tensor]]
    num_targets: int
    """Targets of the whole step on all ranks."""
    num_tokens: int
    """Tokens of the whole step on all ranks, padding excluded."""
    row_ids: list[int]
    """Rows of the whole step, in order."""


class Order:
    """Which rows belong to step s: an epoch's permutation, drawn from (seed, epoch), read position by position."""

    def __init__(self, num_rows: int, rows_per_step: int, seed: int) -> None:
        self.num_rows, self.rows_per_step, self.seed = num_rows, rows_per_step, seed
        self._epoch, self._permutation = -1, np.empty(0, int)

    def row(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_rows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        return int(self._permutation[offset])

    def step(self, step: int) -> list[int]:
        first = step * self.rows_per_step
        return [self.row(position) for position in range(first, first + self.rows_per_step)]


def deal(row_ids: list[int], rank: int, data_parallel: int, micro_rows: int) -> list[list[int | None]]:
    """The micro batches of one rank, the same number for each rank; short ones end in None."""
    rounds, micro_rows = accumulation(len(row_ids), data_parallel, micro_rows)
    padded = [*row_ids, *[None] * (rounds * data_parallel * micro_rows - len(row_ids))]
    starts = [(turn * data_parallel + rank) * micro_rows for turn in range(rounds)]
    return [padded[start : start + micro_rows] for start in starts]


def make_step(rows: Rows, row_ids: list[int], rank: int, data_parallel: int, micro_rows: int) -> Step:
    """This rank's share of the given rows, with the counts of the whole."""
    return Step(
        micro_batches=[rows.batch(micro) for micro in deal(row_ids, rank, data_parallel, micro_rows)],
        num_targets=int(rows.targets[row_ids].sum()),
        num_tokens=sum(len(rows.documents[i].tokens) for row in row_ids for i in rows.rows[row]),
        row_ids=row_ids,
    )


def chain_hash(previous: str, row_ids: list[int]) -> str:
    """The running hash of the rows consumed so far, 16 hex digits."""
    return hashlib.sha256(f"{previous}:{row_ids}".encode()).hexdigest()[:16]


# --------------------------------------------------------------------------- splits


@dataclass(frozen=True)
class Prepared:
    training: Rows
    held_out: Rows
    questions: list[list[dict[str, str]]]
    """Chats of held-out documents, for the samples that people read."""
    dropped: int
    """Documents without a single target after cutting."""


def prepare(data: Data, tokenizer: Any, row_tokens: int, held_out_fraction: float, num_questions: int) -> Prepared:
    """Read, tokenize, split by content and pack. Raises UserError where nothing is left to train on."""
    records = read_documents(data)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    training: list[Document] = []
    held_out: list[Document] = []
    questions: list[list[dict[str, str]]] = []
    dropped = 0
    for number, record in enumerate(records, 1):
        where = f"{data.path}, document {number}"
        document = tokenize(record, tokenizer, data, row_tokens, where)
        if not document.supervised[1:].any():
            dropped += 1
        elif _held_out(document.tokens, held_out_fraction):
            held_out.append(document)
            chat = to_messages(record, data.form, where)
            if len(questions) < num_questions and not isinstance(chat, str) and _is_question_and_answer(chat):
                questions.append(chat)
        else:
            training.append(document)
    if not training:
        raise UserError(
            f"data.path: none of the {len(records)} documents of {data.path!r} has a token to train on within "
            f"batch.row_tokens={row_tokens}"
        )
    return Prepared(
        training=Rows(training, row_tokens, pad, data.packing),
        held_out=Rows(held_out, row_tokens, pad, data.packing),
        questions=questions,
        dropped=dropped,
    )


def _is_question_and_answer(chat: list[dict[str, str]]) -> bool:
    roles = [turn["role"] for turn in chat]
    return "assistant" in roles and "user" in roles[: roles.index("assistant")]


def _held_out(tokens: np.ndarray, fraction: float) -> bool:
    """By content, so that no copy of a held-out document is trained on."""
    digest = hashlib.sha256(tokens.astype("<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
