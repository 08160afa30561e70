"""Encode chats of every kind with every template of models/templates, and write docs/data.md (`make templates`)."""

import json
import os
import platform
import re
import sys
import textwrap
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
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
from gearbox.errors import UserError, one_line
from support import template_files
from support.template_chats import KINDS, MarkedChat, Part, Record, mark, real_chats, with_arguments_as_text
from support.template_files import FOLDER, TemplateFile, listed, present
from support.template_oracle import ENDS, missing, places, spans, unknowable

DOCUMENT = ROOT / "docs" / "data.md"
BEGIN, FINISH = "<!-- made by make templates -->", "<!-- end -->"
NUM_REAL = 20  # chats of real data for each template
MARKS = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|>|<\uff5c[^\uff5c<>\s'\"{}]{1,40}\uff5c>|\[/?[A-Z_]{3,25}\]|\[\|[a-z]+\|\]|<\|\"\|>"
    r"|<\|[a-z_]+>|<[a-z_]+\|>|</?s>|<[be]os>|<(?:start|end)_of_turn>|<SPECIAL_\d+>|</?seed:\w+>|<sep>"
    r"|</?(?:mm:)?think>|</?tool_call>|</?tool_response>|</?(?:role|assistant|user|system)>|<reserved_10[67]>"
    r"|<(?:beginning|end)_of_sentence>|</?minimax:tool_call>|<(?:start|end)_[a-z]+>|<_(?:end|bot|user)>|<AI>"
)
# As in most real vocabularies, these marks inside of a turn are one token each, but not special ones.
INNER = re.compile(r"think|</?tool|<\uff5ctool")
THOUGHT = re.compile(r"think|thought|channel", re.I)
REAL = "real"
CALLS = {kind for kind in KINDS if re.search(r"call|argument|ids|result|tools", kind)} | {"last only", "everything"}
THOUGHTS = {kind for kind in KINDS if re.search(r"reason|think", kind)}
GROUPS = {"turns": {*KINDS} - CALLS - THOUGHTS, "calls": CALLS - THOUGHTS, "reasoning": THOUGHTS, "real": {REAL}}
BAR = "\\|"
EXACT, REFUSED, REFUSED_WRONGLY, WRONG = "exact", "refused", "refused wrongly", "wrong"


@dataclass
class Verdict:
    """The result of a chat of one kind with one template."""

    result: str
    why: str = ""


def make_tokenizer(template: str, bos: str | None, eos: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes that knows the marks of a template as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    found = {*MARKS.findall(template + _examples(template)), *filter(None, (bos, eos))}
    found |= {*re.findall(r"\]~b\]|\]~!b\[|\[e~\[", template)}
    if "[TOOL_CALLS]" not in found:
        found -= {"[INST]", "[/INST]"}  # Mistral's first vocabularies have no tokens for these
    backend.add_tokens([AddedToken(mark, normalized=False, special=not INNER.search(mark)) for mark in sorted(found)])
    given = {"bos_token": bos, "eos_token": eos}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in given.items() if v})
    tokenizer.chat_template = template
    return tokenizer


def _examples(template: str) -> str:
    """Return chats rendered with the template, which may put its marks together from parts."""
    texts = []
    for kind in ("system", "several turns", "call"):
        chat = mark(KINDS[kind]).chat
        with suppress(Exception):
            texts += render_jinja_template([chat.turns], tools=chat.tools, chat_template=template)[0]
    return "".join(texts)


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
        """Return some marks of the template. A template takes text before </think> for reasoning."""
        found = dict.fromkeys(mark for mark in MARKS.findall(self.template) if not THOUGHT.search(mark))
        return " and ".join([*found][:4])

    def render(self, marked: MarkedChat, turns: int | None = None) -> str:
        """Return the chat, or its first turns and the head of an answer. Some templates want arguments as JSON text."""
        try:
            return self._render(marked, turns)
        except TypeError:
            return self._render(replace(marked, chat=with_arguments_as_text(marked.chat)), turns)

    def _render(self, marked: MarkedChat, turns: int | None) -> str:
        template = re.sub(r"strftime_now\((['\"])(.*?)\1\)", _fixed_date, self.template)
        (text,), _ = render_jinja_template(
            [marked.chat.turns[:turns]], tools=marked.chat.tools, chat_template=template,
            add_generation_prompt=turns is not None, **self.tokenizer.special_tokens_map,
        )  # fmt: skip
        return text

    def verdict(self, record: Record) -> Verdict:
        marked = mark(record, self.marks())
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
        complete, reason = self.complete(marked)
        if isinstance(outcome, str):
            return Verdict(REFUSED, reason) if reason else Verdict(REFUSED_WRONGLY, outcome)
        text, supervised = outcome
        context = {f"name of turn {i + 1}" for i in range(len(marked.chat.turns)) if i not in self.trained(marked)}
        if lacks := {*missing(text, marked)} - context:
            return Verdict(WRONG, f"encoded without {', '.join(lacks)}")
        if complete is not None and not _same(text, complete, self.tokenizer.eos_token or ""):
            return Verdict(WRONG, f"encodes another text than the template renders: {_difference(text, complete)}")
        faults = self.faults(marked, text, supervised)
        return Verdict(WRONG, "; ".join(faults)) if faults else Verdict(EXACT)

    def complete(self, marked: MarkedChat) -> tuple[str | None, str]:
        """Return the rendered chat, and why it has to be refused."""
        try:
            complete = self.render(marked)
        except Exception as error:
            return None, f"the template fails: {error}"
        if lacks := missing(complete, marked):
            return complete, f"the template omits {', '.join(dict.fromkeys(lacks))}"
        # A turn of the user follows, and empty results get a marker, to show where the template ends an answer.
        turns, parts = [*marked.chat.turns, {"role": "user", "content": ""}], [*marked.parts]
        for i, turn in enumerate(turns):
            if turn["role"] in ("user", "tool") and not turn["content"]:
                turns[i] = turn | {"content": f"mk{900 + i}a"}
                parts.append(Part(i, turn["role"], f"mk{900 + i}a", f"mk{900 + i}a"))
        longer = MarkedChat(replace(marked.chat, turns=turns), marked.supervise, parts)
        try:
            followed = self.render(longer)
        except Exception:
            followed = complete
        return complete, unknowable(followed, longer, self.trained(marked))

    def trained(self, marked: MarkedChat) -> set[int]:
        answers = [i for i, turn in enumerate(marked.chat.turns) if turn["role"] == "assistant"]
        return {*(answers[-1:] if marked.supervise == "last" else answers)} - marked.chat.untrained

    def faults(self, marked: MarkedChat, text: str, supervised: list[bool]) -> list[str]:
        """Return what is wrong with the supervised characters of a text."""
        answers = [i for i, turn in enumerate(marked.chat.turns) if turn["role"] == "assistant"]
        trained = self.trained(marked)
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
        for span in spans(text, marked, prompts, "endgeneration" in self.template):
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
        eos = self.tokenizer.eos_token
        has_end = any(mark.end() == end for mark in ENDS.finditer(text, span.least))
        has_end |= bool(eos and text[:end].endswith(eos))
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


def _same(text: str, complete: str, eos: str) -> bool:
    """Return True if the text is the complete rendering, with an end added or a head without answer removed."""
    kept = complete.rstrip()
    more = text[len(kept) :].strip()
    if text == complete or (text.startswith(kept) and (more == eos or ENDS.fullmatch(more))):
        return True
    return complete.startswith(text) and "mk" not in complete[len(text) :]


def _difference(a: str, b: str) -> str:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{a[same - 10 : same + 20]!r}, not {b[same - 10 : same + 20]!r}"


def verdicts(files: list[TemplateFile], kinds: dict[str, Record]) -> dict[tuple[TemplateFile, str], Verdict]:
    """Return the verdict of each kind of chat with each template."""
    found = {}
    for file in files:
        subject = Subject(file.read(), file.bos or None, file.eos or None)
        found |= {(file, kind): subject.verdict(record) for kind, record in kinds.items()}
    return found


def all_kinds(num_real: int = NUM_REAL) -> dict[str, Record]:
    real = real_chats()
    return KINDS | {f"{REAL} {i + 1}": record for i, record in enumerate(real[:: max(1, len(real) // num_real)])}


def reason_of(verdict: Verdict) -> str:
    """Return a verdict's reason without numbers and names, so that equal reasons can be counted."""
    why = re.sub(r"(name|call|tool|user|assistant|reasoning|system) of turn \d+", r"\1", verdict.why)
    if why.startswith("the template omits "):
        parts = set(why.removeprefix("the template omits ").split(", "))
        names = {"name": "calls", "call": "calls", "tool": "results", "the tools": "tools", "assistant": "answers"}
        shown = sorted({names.get(part, part) for part in parts})
        return f"omits {shown[0] if len(shown) == 1 else 'tools' if {'calls', 'tools'} & {*shown} else shown[-1]}"
    why = why.removeprefix("the template fails: ").removeprefix("the template ")
    return re.sub(r"(turn )\d+", r"\1n", one_line(ValueError(why), 60))


def table(found: dict[tuple[TemplateFile, str], Verdict]) -> str:
    """Return the table of docs/data.md: a row for each family."""
    families: dict[str, dict[tuple[TemplateFile, str], Verdict]] = {}
    for (file, kind), verdict in found.items():
        families.setdefault(file.family, {})[file, kind] = verdict
    heads = ["templates", "files", *GROUPS, "why refused: the template ..."]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for family in sorted(families, key=lambda name: (name == "others", name.lower())):
        cells = families[family]
        row = [family, str(len({file for file, _ in cells}))]
        for kinds in GROUPS.values():
            group = [verdict for (_, kind), verdict in cells.items() if kind in kinds or kind.split()[0] in kinds]
            row.append(f"{sum(one.result == EXACT for one in group)} of {len(group)}")
        reasons = Counter(reason_of(one) for one in cells.values() if one.result == REFUSED)
        row.append(", ".join(f"{why.replace('|', BAR)} ({n})" for why, n in reasons.most_common(3)))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def summary(found: dict[tuple[TemplateFile, str], Verdict]) -> str:
    """Return the sentences above the table."""
    results = Counter(verdict.result for verdict in found.values())
    files = len({file for file, _ in found})
    real = len({kind for _, kind in found if kind.startswith(REAL)})
    return (
        f"{files} public templates were tried with {len(KINDS)} kinds of chats and {real} real tool chats. Of "
        f"{len(found):,} pairs, {results[EXACT]:,} are exact, {results[REFUSED]:,} are refused with the reason, "
        f"{results[REFUSED_WRONGLY]} are refused wrongly, and {results[WRONG]} are wrong. "
        f"Generated on {date.today()}: {os.cpu_count()} cores, {platform.machine()}; Python "
        f"{platform.python_version()}, transformers {version('transformers')}, tokenizers {version('tokenizers')}, "
        f"jinja2 {version('jinja2')}."
    )


def write(found: dict[tuple[TemplateFile, str], Verdict]) -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(FINISH)[2]
    wrapped = textwrap.fill(summary(found), 118)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{wrapped}\n\n{table(found)}\n\n{FINISH}{after}", encoding="utf-8")


def main() -> None:
    files = present()
    if missing_files := len(listed()) - len(files):
        sys.exit(f"{missing_files} templates are not in {FOLDER}; run {Path(template_files.__file__).name} first")
    found = verdicts(files, all_kinds())
    for (file, kind), verdict in found.items():
        if verdict.result in (REFUSED_WRONGLY, WRONG):
            print(f"{file.name}, {kind}: {verdict.result}: {verdict.why}")
    print(summary(found))
    write(found)


if __name__ == "__main__":
    main()
