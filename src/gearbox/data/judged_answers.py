"""Read answers that are judged: pairs of a chosen and a rejected answer, and answers with a label.

A pair becomes two documents with the same prompt, the chosen one first. An answer with a label becomes one document.
The prompt is context, and the answer's assistant turns are trained. In a pair of plain texts, the prompt is what both
begin with.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from gearbox.config.recipe_values import ANSWERS, FORMS
from gearbox.data import row_formats
from gearbox.data.row_formats import Chat, FieldNames, InvalidRecord, JsonObject, Turn, kind_of, make_turn
from gearbox.data.sources import JSON

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gearbox.data.loss_mask import Encoded

GOOD, BAD = 1, 0  # the label of a chosen answer and of a usual document, and of a rejected answer
LABELLED = tuple(form for form in ANSWERS if form != "text")  # formats whose answer a label can judge
LABELS = {"true": GOOD, "1": GOOD, "1.0": GOOD, "false": BAD, "0": BAD, "0.0": BAD}
PROMPTS = ("prompt", "instruction", "conversations")  # fields with the prompt of a pair; the first counts
QUESTIONS = ("question", "query", "input", "problem")  # other names of a prompt
ASKS = re.compile(r"[:>\]]\s*\Z|\n\s*\Z")  # the end of a text that asks for an answer


class Answer(NamedTuple):
    """A document of a record, and the judgement of its answer."""

    document: Chat | str
    label: int
    """GOOD or BAD."""
    field: str
    """The field of the record that contains the answer."""


class _Prompt(NamedTuple):
    """The turns before the answers of a pair, and the field that has them."""

    field: str
    turns: list[Turn]
    is_text: bool
    """True if the field is a text. Beside complete chats, it repeats one of their turns."""


def read(record: JSON, names: FieldNames) -> list[Answer]:
    """Return the documents of a record: two for a pair, else one. Raise InvalidRecord if it cannot be used."""
    if names.form == "preference":
        return _read_pair(row_formats.with_required(record, names), names)
    if names.form == "label":
        return [_read_labelled(row_formats.with_required(record, names), names)]
    return [Answer(row_formats.read(record, names), GOOD, names.main)]


def finish(answers: list[Answer], outcomes: list[Encoded | InvalidRecord], form: str) -> list[Encoded]:
    """Return the tokenized documents of a record. In plain texts of a pair, the tokens that both begin with are masked.

    Raise InvalidRecord if the template rejects one of them, or if an answer that is judged has nothing to train on.
    """
    encoded: list[Encoded] = []
    for answer, outcome in zip(answers, outcomes, strict=True):
        if isinstance(outcome, InvalidRecord):
            raise InvalidRecord(row_formats.of_field(str(outcome), answer.field, answer.document))
        encoded.append(outcome)
    if form == "preference":
        chosen, rejected = encoded
        num_equal = _num_equal(chosen.tokens, rejected.tokens)
        if num_equal == len(chosen.tokens) == len(rejected.tokens):
            raise InvalidRecord(f"{answers[1].field}: has the same tokens as {answers[0].field}; remove the pair")
        if isinstance(answers[0].document, str):
            if not num_equal:
                raise InvalidRecord(_no_prompt(answers[0].field, answers[1].field))
            for one in encoded:
                one.loss_mask[:num_equal] = 0
    if form in ("preference", "label"):
        for answer, one in zip(answers, encoded, strict=True):
            if not one.loss_mask[1:].any():
                raise InvalidRecord(f"{answer.field}: has no supervised token")
    return encoded


def hash_of_pair(chosen: int, rejected: int) -> int:
    """Return the hash of a pair: the xxh3-64 of the hashes of both documents, as 16 little-endian bytes."""
    return xxhash.xxh3_64_intdigest(struct.pack("<2Q", chosen, rejected))


def _num_equal(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return the number of tokens that both begin with."""
    num = min(len(a), len(b))
    different = a[:num] != b[:num]
    return int(different.argmax()) if different.any() else num


def _no_prompt(chosen: str, rejected: str) -> str:
    return (
        f"{chosen}: shares no beginning with {rejected}, which would be the prompt; name the prompt's field with "
        "data.fields='{prompt: FIELD}'"
    )


def _read_pair(record: JsonObject, names: FieldNames) -> list[Answer]:
    """Return the chosen and the rejected answer of a record, each after the prompt."""
    fields = names.of("chosen"), names.of("rejected")
    chosen, rejected = (_read_answer(record, field, names) for field in fields)
    prompt = _read_prompt(record, names, is_chat=isinstance(chosen, list) and chosen[0]["role"] != "assistant")
    if isinstance(chosen, str) != isinstance(rejected, str):
        found = kind_of(record[fields[1]])
        raise InvalidRecord(f"{fields[1]}: must be of the same kind as {fields[0]}, found {found}")
    if isinstance(chosen, str) or isinstance(rejected, str):
        is_equal = chosen == rejected
    else:
        is_equal = _plain(chosen) == _plain(rejected)
    if is_equal:
        raise InvalidRecord(f"{fields[1]}: equals {fields[0]}, so neither is better; remove the pair")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            _check_texts(record, names, chosen, rejected)
            return [Answer(chosen, GOOD, fields[0]), Answer(rejected, BAD, fields[1])]
        chosen, rejected = [make_turn("assistant", chosen)], [make_turn("assistant", rejected)]
    assert isinstance(chosen, list) and isinstance(rejected, list)
    pair = (chosen, rejected)
    context, answers = _divide(pair, fields, prompt)
    system, tools = row_formats.optional_text(record, names.of("system")), row_formats.read_tools(record, names)
    if system and not (context[:1] and context[0] == make_turn("system", system)):
        context = [make_turn("system", system), *context]
    chats = [
        row_formats.chat_of([*context, *answer], tools, len(context), field)
        for answer, field in zip(answers, fields, strict=True)
    ]
    return [Answer(chats[0], GOOD, fields[0]), Answer(chats[1], BAD, fields[1])]


def _read_answer(record: JsonObject, field: str, names: FieldNames) -> str | list[Turn]:
    """Return an answer: a text, or the turns of a list or of a single turn."""
    value = record[field]
    if isinstance(value, list):
        return row_formats.read_turns(value, field, names)
    if isinstance(value, dict):
        turn = row_formats.read_turn(value, field, names)
        if turn["role"] != "assistant":
            raise InvalidRecord(f"{field}: must be an assistant turn, found a {turn['role']} turn")
        return [turn]
    if isinstance(value, str):
        return row_formats.read_text(record, field)
    raise InvalidRecord(f"{field}: must be a text, a turn or a list of turns, found {kind_of(value)}")


def _read_prompt(record: JsonObject, names: FieldNames, is_chat: bool) -> _Prompt | None:
    """Return the prompt of a pair, or None if the record has none. `is_chat` is true if the answers contain it."""
    present = [names.of(name) for name in PROMPTS if names.of(name) and names.of(name) in record]
    given = [field for field in present if record[field] not in (None, "", [])]
    if not given:
        if present and not is_chat:
            raise InvalidRecord(f"{present[0]}: is {'null' if record[present[0]] is None else 'empty'}")
        return None
    field, value = given[0], record[given[0]]
    if field != names.of("conversations") and isinstance(value, str):
        parts = [row_formats.read_text(record, field)]
        if field != names.of("prompt"):
            parts.append(row_formats.optional_text(record, names.of("input")))
        return _Prompt(field, [make_turn("user", "\n\n".join(filter(None, parts)))], is_text=True)
    if field == names.of("instruction"):
        raise InvalidRecord(f"{field}: must be a string, found {kind_of(value)}")
    if field == names.of("prompt") and not isinstance(value, list):
        raise InvalidRecord(f"{field}: must be a string or a list of turns, found {kind_of(value)}")
    return _Prompt(field, row_formats.read_turns(value, field, names), is_text=False)


def _check_texts(record: JsonObject, names: FieldNames, chosen: str, rejected: str) -> None:
    """Raise InvalidRecord for texts without a common beginning, or one without an answer after it."""
    fields = names.of("chosen"), names.of("rejected")
    others = (*QUESTIONS, names.of("system"), names.of("tools"))  # texts of complete documents have none of these
    found = next((name for name in others if record.get(name) not in (None, "", [], "[]")), None)
    if found is not None and "prompt" not in names.fields:
        field = found if found in QUESTIONS else "FIELD"
        raise InvalidRecord(
            f"{fields[0]}: is a text without a prompt; the record also has {found!r}; set data.fields="
            f"'{{prompt: {field}}}', or '{{prompt: null}}' if the text contains it"
        )
    shared = takewhile(lambda letters: letters[0] == letters[1], zip(chosen, rejected, strict=False))
    if not any(letter.strip() for letter, _ in shared):
        raise InvalidRecord(_no_prompt(*fields))
    for field, text, other in zip(fields, (chosen, rejected), (rejected, chosen), strict=True):
        if ASKS.search(text) and other.startswith(text.rstrip()):
            raise InvalidRecord(f"{field}: its answer is empty, after {text.strip()[-20:]!r}")


def _divide(
    pair: tuple[list[Turn], list[Turn]], fields: tuple[str, str], prompt: _Prompt | None
) -> tuple[list[Turn], tuple[list[Turn], list[Turn]]]:
    """Return the turns of the prompt, and those of both answers. Raise InvalidRecord for different prompts."""
    chosen, rejected = map(_plain, pair)
    alone = [turns[0]["role"] == "assistant" for turns in pair]
    if any(alone) and not all(alone):
        other = alone.index(False)
        found = f"a {pair[other][0]['role']} turn"
        raise InvalidRecord(f"{fields[other]}[0]: must be an assistant turn as in {fields[1 - other]}, found {found}")
    if all(alone):
        if prompt is None:
            raise InvalidRecord(
                f"{fields[0]}[0]: is an assistant turn without a prompt; name the prompt's field with "
                "data.fields='{prompt: FIELD}'"
            )
        return prompt.turns, pair
    if prompt is None or prompt.is_text:
        shared = sum(1 for _ in takewhile(lambda turns: turns[0] == turns[1], zip(chosen, rejected, strict=False)))
    else:
        before = prompt.turns
        if chosen[0]["role"] == "system" != before[0]["role"]:
            before = [chosen[0], *before]
        shared = len(before)
        for turns, field in zip((chosen, rejected), fields, strict=True):
            number = next((i for i, (a, b) in enumerate(zip(turns, before, strict=False)) if a != b), None)
            if number is not None:
                what = f"is a {turns[number]['role']} turn that differs from {prompt.field}"
                raise InvalidRecord(f"{field}[{number}]: {what}; give the answer alone, or after the same turns")
    for turns, field in zip((chosen, rejected), fields, strict=True):
        if len(turns) <= shared:
            raise InvalidRecord(f"{field}: its answer is empty: all of its turns are of the prompt")
    for turns, field, place in zip((chosen, rejected), fields, fields[::-1], strict=True):
        if turns[shared]["role"] != "assistant":
            raise InvalidRecord(
                f"{field}[{shared}]: is a {turns[shared]['role']} turn that differs from {place}[{shared}]; give both "
                "answers the same prompt"
            )
    if prompt is not None and prompt.is_text:
        _check_repeated(chosen[:shared], fields[0], prompt)
    return pair[0][:shared], (pair[0][shared:], pair[1][shared:])


def _plain(turns: list[Turn]) -> list[Turn]:
    """Return turns without their weights, which do not matter to what is said."""
    return [{key: value for key, value in turn.items() if key != "weight"} for turn in turns]


def _check_repeated(shared: list[Turn], field: str, prompt: _Prompt) -> None:
    """Raise InvalidRecord unless one of the turns that both answers begin with is the prompt's text."""
    text = prompt.turns[0]["content"].strip()
    asked = [turn["content"].strip() for turn in shared if turn["role"] == "user"]
    if text not in asked:
        raise InvalidRecord(
            f"{prompt.field}: differs from the user turns that {field} begins with; correct it, or ignore it with "
            "data.fields='{prompt: null}'"
        )


def _read_labelled(record: JsonObject, names: FieldNames) -> Answer:
    """Return the answer that a label judges. In a whole chat, it is the last assistant turn."""
    field, value = names.of("label"), record[names.of("label")]
    label = LABELS.get(str(value).strip().lower()) if isinstance(value, bool | int | float | str) else None
    if label is None:
        found = f"the number {value}" if isinstance(value, int | float) else kind_of(value)
        raise InvalidRecord(f"{field}: must be true or false, found {found}")
    form = row_formats.recognise(record, "auto", names.fields, LABELLED)
    if form is None:
        known = " | ".join(", ".join(FORMS[name][0]) for name in LABELLED)
        others = ", ".join(repr(key) for key in record if key != field)
        raise InvalidRecord(f"{field}: judges no answer: the other fields are {others or 'missing'}, not {known}")
    inner = replace(names, form=form)
    chat = row_formats.read(record, inner)
    assert isinstance(chat, Chat)
    if form in ("messages", "conversations"):
        earlier = [i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant"][:-1]
        chat = replace(chat, untrained=chat.untrained | {*earlier})
    return Answer(chat, label, inner.of(FORMS[form][0][-1]))
