"""Read the records of all sources in order, and recognise each source's format by its first record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gearbox.config.recipe import Data
from gearbox.data import row_formats
from gearbox.data.row_formats import FieldNames, JsonObject
from gearbox.data.sources import Origin, Record, Unreadable, parse_json

NO_FORM = "no form"
NO_TEMPLATE = (
    "model.name: the data has chats, but the tokenizer has no chat template; use an instruction-tuned model, or set "
    "data.chat_template to a template file"
)
NO_END = "model.name: the tokenizer has no end-of-text token to separate documents"
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

    def __init__(self, origins: list[Origin], data: Data) -> None:
        self.origins, self.data = origins, data
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
        form = row_formats.form_of(record, self.data.form, origin.fields, where)
        return FieldNames(form, origin.fields, self.data.roles)
