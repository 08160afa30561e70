"""Turn the tokens of an answer into text while they are generated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

THOUGHT = r"(?:\w+:)?(?:think|thinking|thought|reasoning)"
OPEN = re.compile(rf"<{THOUGHT}>|\[THINK\]")
CLOSE = re.compile(rf"</{THOUGHT}>|\[/THINK\]")
MARK = re.compile(rf"{OPEN.pattern}|{CLOSE.pattern}")
ASKS_TO_THINK = re.compile(rf"(?:{OPEN.pattern})\s*\Z")  # the end of a prompt
PART_OF_MARK = re.compile(r"[<\[]/?[\w:]{0,28}\Z")
PART_OF_CHARACTER = "\ufffd"  # how a tokenizer decodes the first bytes of a character


class Piece(NamedTuple):
    """A piece of an answer."""

    text: str
    is_thought: bool = False


class TextStream:
    """A streamer of generate() that hands on the text of new tokens as soon as it cannot change any more.

    Tokens are decoded in a window that begins before the last text, since a tokenizer removes the first space of a
    text. A character whose bytes are divided among several tokens waits for its last one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, hear: Callable[[str], None]) -> None:
        self.tokens: list[int] = []
        self._tokenizer, self._hear = tokenizer, hear
        self._window = self._heard = 0
        self._is_prompt = True

    @property
    def text(self) -> str:
        """The text of all tokens so far, without special tokens."""
        return self._decode(0, None)

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, and then each new token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.tokens.extend(value.flatten().tolist())
        self._hand_on(is_last=False)

    def end(self) -> None:
        """Hand on what is left."""
        self._hand_on(is_last=True)

    def _hand_on(self, is_last: bool) -> None:
        before, now = self._decode(self._window, self._heard), self._decode(self._window, None)
        if len(now) > len(before) and (is_last or not now.endswith(PART_OF_CHARACTER)):
            self._window, self._heard = self._heard, len(self.tokens)
            self._hear(now[len(before) :])

    def _decode(self, first: int, end: int | None) -> str:
        return str(self._tokenizer.decode(self.tokens[first:end], skip_special_tokens=True))


class Pieces:
    """A filter that divides the text of an answer into thoughts and the rest, and removes the spaces around it.

    The marks of a thought are part of it. An empty thought is left out: models write it where they need not think.
    """

    def __init__(self, hear: Callable[[Piece], None], prompt: str) -> None:
        """Begin inside a thought if the prompt opens one."""
        self._hear, self._is_thought = hear, ASKS_TO_THINK.search(prompt) is not None
        self._text = ""
        """Text that may be part of a mark."""
        self._waiting: list[Piece] = []
        """Spaces, and an opening mark, which are passed on before the next letter."""
        self._is_first = True

    def add(self, text: str) -> None:
        """Take the next text, and hand on what is certain."""
        self._text += text
        while mark := MARK.search(self._text):
            self._add_text(self._text[: mark.start()])
            self._add_mark(mark[0])
            self._text = self._text[mark.end() :]
        part = PART_OF_MARK.search(self._text)
        cut = part.start() if part else len(self._text)
        self._add_text(self._text[:cut])
        self._text = self._text[cut:]

    def end(self) -> None:
        """Hand on what may have been the beginning of a mark, but not the spaces at the end."""
        self._add_text(self._text)
        self._text = ""
        for piece in self._waiting:
            if MARK.fullmatch(piece.text):
                self._hear(piece)
        self._waiting = []

    def _add_mark(self, mark: str) -> None:
        opens = OPEN.fullmatch(mark) is not None
        if opens:
            self._waiting.append(Piece(mark, True))
        elif any(OPEN.fullmatch(piece.text) for piece in self._waiting):
            while not OPEN.fullmatch(self._waiting.pop().text):  # an empty thought, with the spaces in it
                pass
        else:
            self._give(Piece(mark, True))
        self._is_thought = opens

    def _add_text(self, text: str) -> None:
        if self._is_first and not self._waiting:
            text = text.lstrip()
        if letters := text.rstrip():
            self._give(Piece(letters, self._is_thought))
        if spaces := text[len(letters) :]:
            self._waiting.append(Piece(spaces, self._is_thought))

    def _give(self, piece: Piece) -> None:
        for earlier in [*self._waiting, piece]:
            self._hear(earlier)
        self._waiting, self._is_first = [], False
