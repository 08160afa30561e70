"""docs/troubleshooting.md quotes messages exactly: their text is in the strings of src, with values filled in."""

import ast
import re

import pytest

from gearbox import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text().partition("## Messages of other libraries")[0]
QUOTED = [message for heading in re.findall(r"^### (.*)$", PAGE, re.M) for message in re.findall(r"`([^`]+)`", heading)]
MIN_LITERAL = 6  # characters; shorter ones are in any message
MIN_SHARE = 0.5  # of a message that is literal text; the rest is values


def literals() -> set[str]:
    """Return the literal texts of all strings in src; an f-string has one between each two values."""
    texts = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return {text for text in texts if len(text) >= MIN_LITERAL and "\n" not in text}


LITERALS = literals()


def literal_share(message: str) -> float:
    """Return the share of a message's characters that are literal text of src."""
    if any(message in literal for literal in LITERALS):
        return 1.0
    covered = [False] * len(message)
    for literal in LITERALS:
        lengths = range(MIN_LITERAL, len(literal) + 1)
        # A page may quote a part of a message: its first literal may lack its beginning, its last one its end.
        first = max((n for n in lengths if message.startswith(literal[-n:])), default=0)
        last = max((n for n in lengths if message.endswith(literal[:n])), default=0)
        spans = [(0, first), (len(message) - last, len(message))]
        spans += [match.span() for match in re.finditer(re.escape(literal), message)]
        for start, end in spans:
            covered[start:end] = [True] * (end - start)
    return sum(covered) / len(message)


def test_the_page_has_many_messages():
    assert len(QUOTED) >= 30


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_is_what_the_code_prints(message):
    assert literal_share(message) >= MIN_SHARE


@pytest.mark.parametrize(
    "message",
    [
        "the key optim.lrr is none of the recipe's keys; perhaps lr was meant",
        "num_processes: 3 ranks cannot be cut into tp 2; use 2 or 4",
        "is damaged: it is not as it was written",
    ],
)
def test_a_message_of_an_earlier_version_is_not(message):
    assert literal_share(message) < MIN_SHARE
