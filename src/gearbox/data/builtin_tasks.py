"""Generate the data and the tokenizer of the tiny recipes: short chats whose answers can be checked.

`python src/gearbox/data/builtin_tasks.py` writes the tokenizer files next to recipes/tiny/config.json. A test checks
that the committed files are up to date.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gearbox.data.sources import JSON

NUM_DOCUMENTS, NUM_PAIRS = 20_000, 1_000
LETTERS = "abcdefghij"  # 8 heads with rotary base 100 learn these in 3 minutes, but not 26 letters or with base 10,000
TASKS: dict[str, Callable[[str], str]] = {
    "first": lambda letters: letters[0],
    "last": lambda letters: letters[-1],
    "copy": lambda letters: letters,
    "reverse": lambda letters: letters[::-1],
    "sort": lambda letters: "".join(sorted(letters)),
}
SPECIAL_TOKENS = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def documents(num_documents: int = NUM_DOCUMENTS) -> list[dict[str, JSON]]:
    """Return chats such as `sort dbca` -> `abcd`, identical on every machine."""
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in _questions(random.Random(0), num_documents)
    ]


def forms(num_documents: int = NUM_DOCUMENTS) -> list[dict[str, JSON]]:
    """Return the same chats, with every second answer in capitals, at random: `sort dbca` -> `ABCD`."""
    draw = random.Random(1)
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": draw.choice((answer, answer.upper()))},
            ]
        }
        for question, answer in _questions(draw, num_documents)
    ]


def preferences(num_pairs: int = NUM_PAIRS) -> list[dict[str, JSON]]:
    """Return pairs whose answers are both right. The chosen one is in capitals."""
    return [
        {"prompt": question, "chosen": answer.upper(), "rejected": answer}
        for question, answer in _questions(random.Random(2), num_pairs)
    ]


def _questions(draw: random.Random, number: int) -> Iterator[tuple[str, str]]:
    """Yield questions, each with its answer."""
    for _ in range(number):
        task = draw.choice(list(TASKS))
        letters = "".join(draw.sample(LETTERS, draw.randint(3, 5)))
        yield f"{task} {letters}", TASKS[task](letters)


BUILTIN = {"builtin:tasks": documents, "builtin:forms": forms, "builtin:preferences": preferences}


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer without merges. Its 256 bytes and four special tokens can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS + alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[-1],
        additional_special_tokens=SPECIAL_TOKENS[1:3],
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_tokenizer(Path(__file__).resolve().parents[3] / "recipes" / "tiny")
