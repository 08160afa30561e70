"""Check the first records of local data: they have known fields, and can be used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from gearbox.checks.finding import Said, Severity
from gearbox.config.loader import is_url, matches
from gearbox.config.recipe import BUILTIN, Data
from gearbox.config.recipe_values import Source, listed
from gearbox.data import judged_answers, row_formats, sources
from gearbox.data.records import RecordReader
from gearbox.data.row_formats import InvalidRecord
from gearbox.data.sources import Origin, Unreadable, parse_json
from gearbox.errors import UserError, nearest, one_line
from gearbox.filesystem import MAX_SMALL_BYTES, read_limited

if TYPE_CHECKING:
    from gearbox.checks.subject import Subject

MAX_FILES, MAX_RECORDS = 8, 5  # of a source, of a file
LEFT_TO_THE_RUN = ("state.json", "dataset_dict.json", "index.json")  # of saved datasets and prepared shards


@dataclass
class FirstRecords:
    """The first records of a file, or of a source whose files are not found yet."""

    key: str
    """The recipe key that gives the source."""
    data: Data
    source: Source
    forms: tuple[str, ...]
    """The formats that the objective can train on."""
    form: str | None = None
    """The format of the records, or `text` for pairs of plain texts."""
    problems: list[tuple[str, Severity]] = field(default_factory=list)

    def of_each_file(self) -> list[FirstRecords]:
        """Read the first records of each file of this source."""
        path = self.source.path
        found = [] if is_url(path) else matches(path)
        if path not in BUILTIN and not found:  # on the Hub, or missing, which the recipe's reader reports
            return []
        if not all(one.is_file() or one.is_dir() for one in found):  # it also reports pipes and devices, without an end
            return []
        if any((one / name).exists() for one in found for name in LEFT_TO_THE_RUN):
            return []
        try:
            origins = sources.find([self.source])
        except UserError as error:
            self.problems.append((str(error), "problem"))
            return [self]
        return [self._read(origin) for origin in origins[:MAX_FILES]]

    def _read(self, origin: Origin) -> FirstRecords:
        found = FirstRecords(self.key, self.data, self.source, self.forms)
        try:
            for item in islice(RecordReader([origin], self.data, self.forms).items(), MAX_RECORDS):
                value = parse_json(item.record.value)
                try:
                    form: str | None = _form_of(value, item.names)
                except InvalidRecord as error:
                    severity: Severity = "problem" if self.data.on_bad_row == "stop" else "hint"
                    found.problems.append((f"{origin.location(item.record.number)}: {error}", severity))
                    form = None if isinstance(value, Unreadable) else item.names.form
                found.form = found.form or form
                if found.problems:
                    break
        except UserError as error:
            found.problems.append((str(error), "problem"))
        return found


def _form_of(value: sources.JSON | Unreadable, names: row_formats.FieldNames) -> str:
    """Return the format of a record, or `text` for a pair of plain texts. Raise InvalidRecord if it cannot be used."""
    if isinstance(value, Unreadable):
        raise InvalidRecord(value.reason)
    answers = judged_answers.read(value, names)
    return "text" if isinstance(answers[0].document, str) else names.form


def metric_problem(metric: str | None) -> str | None:
    """Return why the file of a metric of the form path.py:function cannot have that function. Nothing is imported."""
    file, _, function = (metric or "").rpartition(":")
    if not file:
        return None
    try:
        tree = ast.parse(read_limited(Path(file).expanduser(), MAX_SMALL_BYTES))
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}; give path.py:function"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{file}: is not Python: {one_line(error)}"
    names = {name for node in tree.body for name in _names_of(node)}
    if function not in names and "*" not in names:
        return f"{file}: has no function {function!r}{nearest(function, sorted(names))}"
    return None


def _names_of(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module may define; "*" if it may define any."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom):
        stored = (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
        return [*stored, *((one.asname or one.name) for one in getattr(node, "names", []))]
    return [] if isinstance(node, ast.Expr) else ["*"]  # such as a function that `if` or `try` defines


def records(subject: Subject) -> Iterator[Said]:
    """Check the first records of each file. The run checks all of them."""
    recipe = subject.recipe
    evaluated = {(source.path, source.split) for source in listed(recipe.eval.path or [])}
    if not recipe.run.rehearse and {(source.path, source.split) for source in listed(recipe.data.path)} <= evaluated:
        text = "is all of data.path, and what is evaluated is not trained; give other documents, or use eval.fraction"
        yield subject.say(f"eval.path: {text}")
    if (problem := metric_problem(recipe.eval.metric)) is not None:
        yield subject.say(f"eval.metric: {problem}")
    for found in subject.first_records:
        for text, severity in found.problems:
            if text.startswith("data."):
                yield subject.say(text.replace("data.path", found.key, 1), severity)
            else:
                yield Said(text, severity)


def teacher(subject: Subject) -> Iterator[Said]:
    """Check that the folder with a teacher's probabilities exists and is complete. The run reads its files."""
    folder = subject.recipe.train.teacher
    if folder is not None and not Path(folder, "about.json").is_file():
        why = "is not complete: it has no about.json" if Path(folder).is_dir() else "does not exist"
        yield subject.say(f"train.teacher: {folder} {why}; write it with src/teach.py")
