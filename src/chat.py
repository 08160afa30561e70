"""Talk to a trained model. The answer appears while it is generated.

Usage: python src/chat.py MODEL [--system TEXT] [--temperature T] [--top_p P] [--max_new_tokens N] [--seed S]
                          [--quantize nf4] [--trust_remote_code]

    MODEL                a folder with a saved model or adapter, a run's folder, or a Hub id
    --system TEXT        a system prompt
    --temperature T      sample with this temperature (default: 0, take the most likely token)
    --top_p P            sample among the most likely tokens that have this probability together (default: 1)
    --max_new_tokens N   most tokens of an answer (default: 512)
    --seed S             repeat what was sampled with this seed (default: a different sample each time)
    --quantize nf4       load the weights in 4 bits, for an adapter whose base does not fit otherwise
    --trust_remote_code  run the code shipped with the model

Commands in the chat:
    /base, /tuned  answer with the model before or after training from now on, the last question first
    /system TEXT   change the system prompt, or remove it
    /retry         answer the last question again
    /reset         forget the conversation
    /help, /quit   show these commands; leave

Ctrl-C ends an answer. Ctrl-D, or Ctrl-C twice, leaves. If the input is not a terminal, each line of it is a question
or a command, and each answer is one line. A line break in an answer is written as \\n.

Exit codes: 0 left by the user, or at the end of the input; 2 a user error.

Examples:
    python src/chat.py runs/first --temperature 0.7
    echo "reverse abcd" | python src/chat.py runs/first/model
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gearbox.console import Screen, make_console, printable, status, styled
from gearbox.errors import UserError, nearest
from gearbox.generation.saved_model import find_model
from gearbox.launch import cli

if TYPE_CHECKING:
    from gearbox.generation.chat import Answer, Chat, Speaker, Speakers
    from gearbox.generation.streaming import Piece

COMMANDS = ("/base", "/tuned", "/system", "/retry", "/reset", "/help", "/quit")
LEAVE = "Ctrl-C again or Ctrl-D leaves"
LIMITS = {"temperature": (0, 100), "top_p": (0.001, 1), "max_new_tokens": (1, 100_000), "seed": (0, 2**32)}


def main(arguments: list[str]) -> int:
    """Talk until the user leaves or the input ends."""
    options = parse(arguments)
    source = find_model(options.model)
    if sys.stdin is None:  # closed by `<&-`
        sys.stdin = io.StringIO()
    for stream in (sys.stdin, sys.stdout):
        if reconfigure := getattr(stream, "reconfigure", None):  # no character of a question or answer ends the chat
            reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    is_terminal = sys.stdin.isatty()
    screen = make_console(speaks=is_terminal)
    with status(screen, f"loading {source}"):
        speakers, chat = open_chat(source, options, screen if is_terminal else make_console(True, stderr=True))
    if is_terminal:
        return Conversation(speakers, chat, screen).hold()
    try:
        answer_lines(speakers, chat)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options. Raise UserError for any wrong argument."""
    parser = cli.Parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--system")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top_p", type=float)
    parser.add_argument("--max_new_tokens", type=int, default=512)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--quantize", choices=["nf4"])
    parser.add_argument("--trust_remote_code", action="store_true")
    options = parser.parse_args(arguments)
    for name, (least, most) in LIMITS.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise UserError(f"--{name}: must be from {least} to {most}, found {value:g}")
    for name in ("top_p", "seed"):
        if getattr(options, name) is not None and not options.temperature:
            raise UserError(f"--{name}: needs --temperature, because nothing is sampled without it")
    return options


def open_chat(source: str, options: argparse.Namespace, screen: Screen) -> tuple[Speakers, Chat]:
    """Load the model, and begin a conversation whose notes go to `screen`."""
    import torch

    from gearbox.generation.chat import Chat, Sampling, Speakers

    is_quantized = options.quantize is not None
    speakers = Speakers.load(source, options.trust_remote_code, "--trust_remote_code", is_quantized)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p or 1.0)
    chat = Chat(speakers.tuned, sampling, lambda text: screen.print(styled((text, "yellow"))))
    if options.system is not None:
        set_system(chat, options.system)
    return speakers, chat


def set_system(chat: Chat, text: str) -> None:
    """Set the system prompt, or remove it if the text is empty. Raise UserError without a chat template."""
    if text and not chat.speaker.tokenizer.chat_template:
        raise UserError("a system prompt needs a chat template, which the model lacks")
    chat.system = text or None


def switch(speakers: Speakers, chat: Chat, to_base: bool) -> None:
    """Let the other model answer from now on."""
    chat.speaker = speakers.base() if to_base else speakers.tuned


def divide(line: str) -> tuple[str, str]:
    """Return the command of a line, or an empty string, and the rest. Raise UserError for an unknown command."""
    if not line.startswith("/"):
        return "", line.strip()
    name, _, rest = line.strip().partition(" ")
    if name not in COMMANDS:
        hint = nearest(name, [*COMMANDS]) or "; /help lists them; put a space before a question that begins with /"
        raise UserError(f"{name[:40]}: unknown command{hint}")
    return name, rest.strip()


def answer_lines(speakers: Speakers, chat: Chat) -> None:
    """Answer each line of the input with one line."""
    for line in sys.stdin:
        command, text = divide(line)
        pieces: list[str] = []

        def hear(piece: Piece, pieces: list[str] = pieces) -> None:
            pieces.append(piece.text)

        if command == "/quit":
            return
        if command in ("/base", "/tuned"):
            switch(speakers, chat, to_base=command == "/base")
        if command == "/system":
            set_system(chat, text)
        elif command == "/reset":
            chat.reset()
        elif command == "/help":
            chat.tell(" ".join(COMMANDS))
        elif command:
            if chat.turns or command == "/retry":
                leave_if_interrupted(chat.retry(hear))
                write_line(pieces)
        else:
            if text:
                leave_if_interrupted(chat.ask(text, hear))
            write_line(pieces)


def leave_if_interrupted(answer: Answer) -> None:
    """Let Ctrl-C end the process, as it does without an answer."""
    if answer.end == "interrupted":
        raise KeyboardInterrupt


def write_line(pieces: list[str]) -> None:
    """Write an answer as one line."""
    print(printable("".join(pieces)).replace("\n", "\\n"), flush=True)


@dataclass
class Conversation:
    """A chat on a terminal."""

    speakers: Speakers
    chat: Chat
    screen: Screen
    was_interrupted: bool = False
    """Ctrl-C was the last thing that the user did."""

    def hold(self) -> int:
        """Talk until the user leaves. Return the exit code."""
        with suppress(ImportError):
            import readline  # noqa: F401  input() then edits lines, and has a history
        self.introduce()
        while True:
            try:
                line = input(self.prompt)
            except EOFError:
                self.screen.print()
                return 0
            except KeyboardInterrupt:
                self.screen.print()
                if self.was_interrupted:
                    return 0
                self.was_interrupted = True
                self.note(LEAVE)
                continue
            self.was_interrupted = False
            try:
                command, text = divide(line)
                if command == "/quit":
                    return 0
                self.take(command, text)
            except UserError as error:
                self.screen.print(styled((str(error), "red")))
            except KeyboardInterrupt:  # while a base is loaded
                self.screen.print()
                self.was_interrupted = True

    @property
    def prompt(self) -> str:
        """The text before a question, which names the model if it is the base."""
        return "> " if self.chat.speaker is self.speakers.tuned else "base> "

    def introduce(self) -> None:
        """Say which model answers, and how to leave."""
        speaker = self.speakers.tuned
        base = f", an adapter of {self.speakers.base().name}" if self.speakers.has_adapter else ""
        self.screen.print(styled((speaker.name, "bold"), f"{base}, on {device_of(speaker)}"))
        self.note("/help lists the commands; Ctrl-C ends an answer, Ctrl-D leaves")
        if not speaker.tokenizer.chat_template:
            from gearbox.generation.chat import NO_TEMPLATE

            self.note(NO_TEMPLATE)

    def take(self, command: str, text: str) -> None:
        """Carry out a command, or answer a question."""
        if command in ("/base", "/tuned"):
            with status(self.screen, f"looking for the {command[1:]} model"):
                switch(self.speakers, self.chat, to_base=command == "/base")
            self.note(f"{self.chat.speaker.name} answers{' without its adapter' * self.chat.speaker.ignores_adapter}")
            if self.chat.turns:
                self.show(again=True)
        elif command == "/system":
            set_system(self.chat, text)
            self.note("system prompt set" if text else "system prompt removed")
        elif command == "/reset":
            self.chat.reset()
            self.note("conversation forgotten")
        elif command == "/help":
            assert __doc__ is not None
            self.screen.print(__doc__.partition("Commands in the chat:\n")[2].partition("\n\n")[0])
        elif command == "/retry":
            self.show(again=True)
        elif text:
            self.show(text)

    def show(self, question: str = "", again: bool = False) -> None:
        """Answer a question, or the last one again. Print the answer while it is generated, and why it ended."""
        answer = self.chat.retry(self.hear) if again else self.chat.ask(question, self.hear)
        self.screen.print()
        if answer.end == "interrupted":
            self.was_interrupted = True
            self.note(f"stopped; {LEAVE}")
        elif answer.end == "full":
            self.note(f"cut after {answer.num_tokens:,} tokens; --max_new_tokens allows more")

    def hear(self, piece: Piece) -> None:
        """Print a piece of an answer. Thoughts are dim."""
        text = piece.text.replace("\t", "    ")
        self.screen.print(styled((text, "dim" if piece.is_thought else "")), end="")

    def note(self, text: str) -> None:
        """Print a remark."""
        self.screen.print(styled((text, "dim")))


def device_of(speaker: Speaker) -> str:
    """Return what computes the answers, such as cpu or the name of a GPU."""
    import torch

    device = speaker.model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


if __name__ == "__main__":
    cli.run(main)
