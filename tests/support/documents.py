"""Make artificial documents: in memory, for tests that need rows but no files, and as files of chats and pairs."""

import json
from pathlib import Path

import numpy as np

from gearbox.data import builtin_tasks
from gearbox.rows.batches import PackedRows
from gearbox.rows.packing import Chunks


class Made:
    """A corpus made from lists, with the methods that `PackedRows` needs."""

    def __init__(self, tokens: list[list[int]], supervised: list[list[int]]) -> None:
        self._tokens = [np.array(ids, np.int32) for ids in tokens]
        self._supervised = [np.array(flags, np.int8) for flags in supervised]
        self.lengths = np.array([len(ids) for ids in self._tokens], np.int64)
        self.targets = np.array([int(flags[1:].sum()) for flags in self._supervised])
        self.origin_ids = np.zeros(len(self), np.int32)

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, document: int) -> np.ndarray:
        return self._tokens[document]

    def loss_mask(self, document: int) -> np.ndarray:
        return self._supervised[document]

    def chunks(self) -> Chunks:
        return Chunks(np.arange(len(self)), np.zeros(len(self), np.int64), self.lengths, self.targets)

    def rows(self, row_tokens: int, pad_token: int = 0, packing: bool = True, group=None) -> PackedRows:
        return PackedRows(self, self.chunks(), row_tokens, pad_token, packing, group)


def random_documents(lengths: list[int], seed: int = 0, supervised: float = 0.7, vocabulary: int = 90) -> Made:
    draw = np.random.default_rng(seed)
    return Made(
        [draw.integers(4, vocabulary, n).tolist() for n in lengths],
        [(draw.random(n) < supervised).astype(int).tolist() for n in lengths],
    )


def make_chats(path: Path) -> Path:
    """Write 300 chats of uneven length, with one to three turns, as a file of messages."""
    documents = builtin_tasks.documents(600)
    joined = [documents[2 * i]["messages"] * (1 + i % 3) + documents[2 * i + 1]["messages"] for i in range(300)]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in joined))
    return path


def make_pairs(path: Path, number: int = 120) -> Path:
    """Write pairs of answers of uneven length, some after several turns, as a file of preferences."""
    documents = [one["messages"] for one in builtin_tasks.documents(3 * number)]
    records = []
    for i in range(number):
        earlier = [turn for chat in documents[2 * i : 2 * i + i % 3] for turn in chat]
        question, answer = documents[2 * i + 2]
        good = {"role": "assistant", "content": answer["content"].upper() * (1 + i % 2)}
        records.append({"prompt": [*earlier, question], "chosen": [good], "rejected": [answer]})
    path.write_text("\n".join(map(json.dumps, records)))
    return path
