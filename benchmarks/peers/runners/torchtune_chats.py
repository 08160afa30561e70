"""Chats for torchtune, which reads no chat template: a tokenizer and a packed dataset, as components of its YAML."""

import json
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.datasets import PackedDataset

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class ChatTokenizer:
    """Encode chats as the chat template of SmolLM2 does."""

    def __init__(self, path: str, pad_id: int, max_seq_len: int) -> None:
        from tokenizers import Tokenizer

        self.backend, self.pad_id, self.max_seq_len = Tokenizer.from_file(path), pad_id, max_seq_len

    def encode(self, messages: list[dict[str, str]], supervise: str) -> dict[str, list[int]]:
        """Return tokens and labels."""
        tokens: list[int] = []
        labels: list[int] = []
        for message in [{"role": "system", "content": SYSTEM}, *messages]:
            head = self.backend.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False).ids
            text = self.backend.encode(f"{message['content']}<|im_end|>\n", add_special_tokens=False).ids
            is_target = supervise == "all" or message["role"] == "assistant"
            tokens += head + text
            labels += head if supervise == "all" else [CROSS_ENTROPY_IGNORE_IDX] * len(head)
            labels += text if is_target else [CROSS_ENTROPY_IGNORE_IDX] * len(text)
        return {"tokens": tokens[: self.max_seq_len], "labels": labels[: self.max_seq_len]}


class Chats(Dataset):
    """The chats of a JSONL file."""

    def __init__(self, tokenizer: ChatTokenizer, path: str, supervise: str) -> None:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        self.rows = [tokenizer.encode(json.loads(line)["messages"], supervise) for line in lines]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]


def packed_chats(tokenizer: ChatTokenizer, path: str, supervise: str, **_: Any) -> PackedDataset:
    """Return rows of several chats, isolated from each other."""
    chats = Chats(tokenizer, path, supervise)
    return PackedDataset(chats, max_seq_len=tokenizer.max_seq_len, padding_idx=tokenizer.pad_id)
