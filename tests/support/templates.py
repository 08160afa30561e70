"""Encode chats of every kind with every template of models/templates, and write docs/data.md (`make templates`)."""

import json
import re
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from gearbox import ROOT
from gearbox.data.loss_mask import ChatTokenizer
from gearbox.data.row_formats import InvalidRecord
from gearbox.errors import UserError
from support.template_chats import MarkedChat, mark
from support.template_oracle import ENDS, missing, places, spans

FOLDER = ROOT / "models" / "templates"
MARKS = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|>|<\uff5c[^\uff5c<>\s'\"{}]{1,40}\uff5c>|\[/?[A-Z_]{3,25}\]|\[\|[a-z]+\|\]|<\|\"\|>"
    r"|<\|[a-z_]+>|<[a-z_]+\|>|</?s>|<[be]os>|<(?:start|end)_of_turn>|<SPECIAL_\d+>|</?seed:\w+>|<sep>"
    r"|</?(?:mm:)?think>|</?tool_call>|</?tool_response>|</?(?:role|assistant|user|system)>|<reserved_10[67]>"
    r"|<(?:beginning|end)_of_sentence>|</?minimax:tool_call>|<(?:start|end)_[a-z]+>|<_(?:end|bot|user)>|<AI>"
)
EXACT, REFUSED, REFUSED_WRONGLY, WRONG = "exact", "refused", "refused wrongly", "wrong"


@dataclass
class Verdict:
    """What became of a chat of one kind with one template."""

    result: str
    why: str = ""


def make_tokenizer(template: str, bos: str | None, eos: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes that knows the marks of a template as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    found = {*MARKS.findall(template), *filter(None, (bos, eos)), *re.findall(r"\]~b\]|\]~!b\[|\[e~\[", template)}
    # As in most real vocabularies, marks inside a turn such as </tool_call> are one token, but not a special one.
    words = [
        AddedToken(mark, normalized=False, special="think" not in mark and "tool" not in mark) for mark in sorted(found)
    ]
    backend.add_tokens(words)
    given = {"bos_token": bos, "eos_token": eos}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in given.items() if v})
    tokenizer.chat_template = template
    return tokenizer


class Subject:
    """A template with a tokenizer, as Gearbox uses them."""

    def __init__(self, template: str, bos: str | None = "<s>", eos: str | None = "</s>") -> None:
        self.template = template
        self.tokenizer = make_tokenizer(template, bos, eos)
        self.encoders: dict[str, ChatTokenizer] = {}
        letters = {letter: bytes([number]) for number, letter in _letters().items()}
        vocabulary = self.tokenizer.get_vocab()
        self.bytes = {i: letters.get(word) or word.encode() for word, i in vocabulary.items()}

    def encoder(self, supervise: str) -> ChatTokenizer:
        if supervise not in self.encoders:
            self.encoders[supervise] = ChatTokenizer(self.tokenizer, supervise)
        return self.encoders[supervise]

    def marks(self) -> str:
        return " and ".join([*dict.fromkeys(MARKS.findall(self.template))][:4])

    def render(self, marked: MarkedChat, turns: int | None = None) -> str:
        """Return the chat, or its first turns and the head of an answer."""
        template = re.sub(r"strftime_now\((['\"])(.*?)\1\)", _fixed_date, self.template)
        (text,), _ = render_jinja_template(
            [marked.chat.turns[:turns]], tools=marked.chat.tools, chat_template=template,
            add_generation_prompt=turns is not None, **self.tokenizer.special_tokens_map,
        )  # fmt: skip
        return text

    def verdict(self, record: dict[str, Any], form: str = "messages") -> Verdict:
        marked = mark(record, self.marks(), form)
        return self.judge(marked, self.encode(marked))

    def encode(self, marked: MarkedChat) -> tuple[str, list[bool]] | str:
        """Return the encoded text and which of its characters are supervised, or why the chat is refused."""
        try:
            (outcome,) = self.encoder(marked.supervise).encode([marked.chat])
        except (InvalidRecord, UserError) as error:
            return str(error)
        if isinstance(outcome, InvalidRecord):
            return str(outcome)
        pieces = [self.bytes[int(token)] for token in outcome.tokens]
        flags = [bool(flag) for piece, flag in zip(pieces, outcome.loss_mask, strict=True) for _ in piece]
        text = b"".join(pieces).decode()
        starts, position = [], 0
        for letter in text:
            starts.append(flags[position])
            position += len(letter.encode())
        return text, starts

    def judge(self, marked: MarkedChat, outcome: tuple[str, list[bool]] | str) -> Verdict:
        try:
            complete = self.render(marked)
        except Exception as error:
            complete, reason = None, f"the template fails: {error}"
        else:
            lacks = missing(complete, marked)
            reason = f"the template omits {', '.join(dict.fromkeys(lacks))}" if lacks else ""
        if isinstance(outcome, str):
            return Verdict(REFUSED, reason) if reason else Verdict(REFUSED_WRONGLY, outcome)
        text, supervised = outcome
        if lacks := missing(text, marked):
            return Verdict(WRONG, f"encoded without {', '.join(lacks)}")
        if complete is not None and not _same(text, complete):
            return Verdict(WRONG, f"encodes another text than the template renders: {_difference(text, complete)}")
        faults = self.faults(marked, text, supervised)
        return Verdict(WRONG, "; ".join(faults)) if faults else Verdict(EXACT)

    def faults(self, marked: MarkedChat, text: str, supervised: list[bool]) -> list[str]:
        """Return what is wrong with the supervised characters of a text."""
        answers = [i for i, turn in enumerate(marked.chat.turns) if turn["role"] == "assistant"]
        trained = {*answers} - marked.chat.untrained
        if marked.supervise == "last":
            trained &= {answers[-1]}
        found = []
        for place in places(text, marked):
            flags = {*supervised[place.first : place.end]}
            role = "tools" if place.part.owner < 0 else marked.chat.turns[place.part.owner]["role"]
            wanted = place.part.owner in trained or (marked.supervise == "all" and role != "tool")
            if flags != {wanted}:
                found.append(f"{place.part.what} of turn {place.part.owner + 1} is {'not ' * wanted}supervised")
        if marked.supervise == "all" or found:
            return found
        prompts = {owner: self.prompt(marked, owner) for owner in answers}
        left = [*supervised]
        for span in spans(text, marked, prompts):
            if span.owner not in trained:
                continue
            first, end = span.least - 1, span.least
            while first > 0 and supervised[first - 1]:
                first -= 1
            while end < len(text) and supervised[end]:
                end += 1
            left[first:end] = [False] * (end - first)
            found += self.faults_of_span(text, span, first, end)
        if any(left):
            stray = "".join(letter for letter, flag in zip(text, left, strict=True) if flag)
            found.append(f"other text is supervised: {stray[:60]!r}")
        return found

    def faults_of_span(self, text: str, span: Any, first: int, end: int) -> list[str]:
        found, name = [], f"turn {span.owner + 1}"
        if not span.firsts:
            found.append(f"{name} has no head that the oracle knows: {text[max(0, first - 30) : first + 10]!r}")
        elif first not in span.firsts:
            nearest = min(span.firsts, key=lambda at: abs(at - first))
            shown = text[max(0, min(first, nearest) - 20) : max(first, nearest) + 10]
            found.append(f"{name} begins {first - nearest:+d} characters from the end of its head: {shown!r}")
        ends = [mark.end() for mark in ENDS.finditer(text, 0, end)]
        eos = self.tokenizer.eos_token
        has_end = (ends and ends[-1] == end) or bool(eos and text[:end].endswith(eos))
        if not has_end:
            found.append(f"{name} has no end of turn: {text[end - 20 : end]!r} + {text[end : end + 20]!r}")
        elif span.end is not None and span.end != end and not (eos and text[:end].endswith(eos)):
            found.append(f"{name} ends {end - span.end:+d} characters from its end: {text[span.least : end]!r}")
        return found

    def prompt(self, marked: MarkedChat, owner: int) -> str | None:
        try:
            return self.render(marked, owner)
        except Exception:
            return None


def _letters() -> dict[int, str]:
    """Return the letter that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [number for number in range(256) if number not in plain]
    return {number: chr(number) for number in plain} | {number: chr(256 + i) for i, number in enumerate(others)}


def _fixed_date(call: re.Match[str]) -> str:
    return json.dumps(date(2024, 7, 26).strftime(call[2]))


def _same(text: str, complete: str) -> bool:
    """Return True if the text is the complete rendering, with an end added or a head without answer removed."""
    if text.startswith(complete):
        return not text[len(complete) :] or bool(ENDS.fullmatch(text[len(complete) :].strip()))
    return complete.startswith(text) and "mk" not in complete[len(text) :]


def _difference(a: str, b: str) -> str:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{a[same - 10 : same + 20]!r}, not {b[same - 10 : same + 20]!r}"
