"""Ask a trained model a question, and print its greedy answer. For more than one question use src/chat.py.

Usage: python src/ask.py MODEL "question" [max_new_tokens=64] [trust_remote_code=true]

    MODEL                   a folder with a saved model or adapter, a run's folder, or a Hub id
    max_new_tokens=N        stop after N tokens (default: 64)
    trust_remote_code=true  run the code shipped with the model

Exit codes: 0 answered; 2 a user error; 130 interrupted by Ctrl-C.

Example:
    python src/ask.py runs/first/model "reverse abcd"
"""

from __future__ import annotations

import gearbox.launch.lifeline  # noqa: F401  isort: skip  first: the run that asks may end before this process

import sys

from gearbox.errors import UserError
from gearbox.generation.saved_model import find_model
from gearbox.launch import cli

MAX_NEW_TOKENS = 100_000


def main(arguments: list[str]) -> None:
    """Load the model in a folder and print its greedy answer."""
    limits = [a.partition("=")[2] for a in arguments if a.startswith("max_new_tokens=")]
    trust = "trust_remote_code=true" in arguments
    words = [a for a in arguments if not a.startswith(("max_new_tokens=", "trust_remote_code="))]
    if len(words) != 2 or not words[1].strip():
        raise UserError(f"usage: {cli.usage(__doc__)}")
    limit = limits[0] if limits else "64"
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MAX_NEW_TOKENS:
        raise UserError(f"max_new_tokens: is {limit[:20]!r}; use a number from 1 to {MAX_NEW_TOKENS}")
    if any(0xD800 <= ord(letter) <= 0xDFFF for letter in words[1]):  # Python's stand-ins for bytes of other encodings
        raise UserError("the question is not UTF-8; set the terminal to UTF-8, or write other letters")
    source = find_model(words[0])
    if reconfigure := getattr(sys.stdout, "reconfigure", None):  # no character of an answer ends the script
        reconfigure(errors="backslashreplace")

    from gearbox.generation.chat import Chat, Sampling, Speakers, shown

    speaker = Speakers.load(source, trust, "trust_remote_code=true").tuned
    chat = Chat(speaker, Sampling(int(limit)), tell=lambda text: print(text, file=sys.stderr))
    answer = chat.ask(words[1])
    print(shown(answer.text))
    if answer.end == "interrupted":
        raise KeyboardInterrupt


if __name__ == "__main__":
    cli.run(main)
