"""Read the records of all sources in order, and recognise each source's format by its first record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gearbox.config.recipe import Data
from gearbox.config.recipe_values import ANSWERS, FORMS, JUDGED, TITLES, TURN_FIELDS
from gearbox.data import row_formats
from gearbox.data.row_formats import KEPT, REASONING, FieldNames, InvalidRecord, JsonObject
from gearbox.data.sources import JSON, Origin, Record, Unreadable, parse_json
from gearbox.errors import UserError

NO_FORM = "no form"
NO_TEMPLATE = (
    "model.name: the data has chats, but the tokenizer has no chat template; use an instruction-tuned model, or set "
    "data.chat_template to a template file"
)
NO_END = "model.name: the tokenizer has no end-of-text token to separate documents"
READ_OF_TURN = {*KEPT, *REASONING, "tool_calls", "function_call", "weight"}
NO_NAMES = FieldNames("text", {}, {})  # for records before the first object, which are rejected before names matter


@dataclass(frozen=True)
class OriginSummary:
    """A summary of one file or dataset."""

    source: int
    """Index of the data.path entry it belongs to."""
    form: str
    num_records: int
    unused: list[str]
    """Fields that are not read."""


class Item(NamedTuple):
    """A record, with the index of its origin and the names of its fields."""

    origin: int
    names: FieldNames
    record: Record


class RecordReader:
    """A reader of the records of all origins, which recognises each origin's format by its first record."""

    def __init__(self, origins: list[Origin], data: Data, forms: tuple[str, ...]) -> None:
        """Take what to read, and the formats that the objective can train on."""
        self.origins, self.data, self.forms = origins, data, forms
        self.summaries: list[OriginSummary] = []
        """One for each origin read so far."""

    def items(self) -> Iterator[Item]:
        """Yield all records in order."""
        for index, origin in enumerate(self.origins):
            names, num_records = NO_NAMES, 0
            for record in origin.records(self.data.text_unit):
                num_records += 1
                if names is NO_NAMES and isinstance(value := parse_json(record.value), dict):
                    names = self._names(origin, record.number, value)
                yield Item(index, names, record)
            if not num_records:
                yield Item(index, names, Record(1, Unreadable("the file is empty"), 0))
            form = NO_FORM if names is NO_NAMES else names.form
            self.summaries.append(OriginSummary(origin.source, form, max(1, num_records), []))

    def _names(self, origin: Origin, number: int, record: JsonObject) -> FieldNames:
        where = f"{origin.name}:1: the header" if origin.kind == "csv" else origin.location(number)
        try:
            form = _form_of(record, self.data.form, origin.fields, self.forms)
        except InvalidRecord as error:
            raise UserError(f"{where}: {error}") from None
        return FieldNames(form, origin.fields, self.data.roles)


def unused_fields(record: JSON, names: FieldNames) -> set[str]:
    """Return the fields of a record and of its turns that are not read."""
    if not isinstance(record, dict):
        return set()
    required, optional = FORMS[names.form]
    unused = {*record} - {names.of(name) for name in required + optional}
    for name in {*required, *optional} - {"tools"}:
        value = record.get(names.of(name))
        turns = value if isinstance(value, list) else [value]
        keys = {key for turn in turns if isinstance(turn, dict) for key in turn}
        unused |= {f"{names.of(name)}[].{key}" for key in keys - READ_OF_TURN - {names.of(f) for f in TURN_FIELDS}}
    return unused


def _form_of(record: JsonObject, form: str, fields: dict[str, str | None], forms: tuple[str, ...]) -> str:
    """Return the format of a file, given its first record. Raise InvalidRecord if it is none of the objective's."""
    found = row_formats.recognise(record, form, fields, forms)
    if forms == ANSWERS:
        _refuse_judged(record, found, fields)
    if found is not None:
        return found
    if "preference" in forms and {fields.get(name, name) for name in FORMS["preference"][0]} & record.keys():
        return "preference"  # whose records are then told which answer is missing
    known = " | ".join(", ".join(FORMS[name][0]) for name in forms)
    other = row_formats.recognise(record, "auto", fields, (*JUDGED["kto"], *ANSWERS))
    if other is None:
        names = ", ".join(map(repr, record))
        raise InvalidRecord(f"the fields {names} match no known format ({known}); map them in data.fields")
    objective = "sft" if other in ANSWERS else "kto"
    raise InvalidRecord(
        f"has {TITLES[other]}, but the objective compares answers and needs {known}; set "
        f"train.objective={objective}, or map the fields in data.fields"
    )


def _refuse_judged(record: JsonObject, found: str | None, fields: dict[str, str | None]) -> None:
    """Raise InvalidRecord for a record with a judgement, which would be lost."""
    label = record.get(fields.get("label", "label") or "")
    if found in FORMS and found != "text" and isinstance(label, bool):
        raise InvalidRecord(
            "has answers with a label (true, false); set train.objective=kto to train on both kinds, or keep the rows "
            "with true, without their label"
        )
    pair = {fields.get(name, name) or "" for name in FORMS["preference"][0]}
    others = {value for name, value in fields.items() if name not in FORMS["preference"][0]}
    is_chat = found == "messages" and fields.get(found, found) in record  # of the question and the chosen answer
    if not pair <= record.keys() - others or is_chat:
        return
    chosen = fields.get("chosen") or "chosen"
    answer = record[chosen]
    single = "completion" if "prompt" in record else "output" if "instruction" in record else "text"
    field = "messages" if isinstance(answer, list) and len(answer) > 1 else single
    raise InvalidRecord(
        "has pairs of answers (chosen, rejected); set train.objective=dpo to train on pairs, or "
        f"data.fields='{{{field}: {chosen}}}' to train on good answers"
    )
