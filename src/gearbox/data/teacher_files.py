"""Describe a folder with a teacher's probabilities: about.json names its files, and is written last."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Self

from gearbox import filesystem
from gearbox.errors import UserError

ABOUT, FORMAT = "about.json", 1
AGAIN = "write it again with src/teach.py"


class File(NamedTuple):
    """The size and digest of a file."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class TeacherFacts:
    """Describe a folder in about.json."""

    teacher: str
    """Identifies the teacher's weights."""
    vocabulary: str
    """Hash of the tokens and their ids."""
    top: int
    """Number of known tokens, k."""
    num_chunks: int
    num_targets: int
    files: dict[str, File]
    """The other files of the folder, by name."""
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the facts of a complete folder, and compare the sizes of its files. Raise UserError, which names it."""
        if not (folder / ABOUT).is_file():
            why = "is not complete: it has no about.json" if folder.is_dir() else "does not exist"
            raise UserError(f"train.teacher: {folder} {why}; {AGAIN}")
        try:
            content = filesystem.read_json_object(folder / ABOUT)
        except ValueError as error:
            raise UserError(f"train.teacher: {error}; {AGAIN}") from None
        if content.get("format") != FORMAT:
            found = content.get("format")
            raise UserError(f"train.teacher: {folder / ABOUT}: format is {found!r}, not {FORMAT}; {AGAIN}")
        facts = cls._of(content)
        if facts is None:
            raise UserError(f"train.teacher: {folder / ABOUT} is damaged; {AGAIN}")
        for name, file in facts.files.items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != file.bytes:
                found = "is missing" if size is None else f"has {size:,} bytes, not {file.bytes:,}"
                raise UserError(f"train.teacher: {path} {found}; {AGAIN}")
        return facts

    @classmethod
    def _of(cls, content: dict[str, object]) -> Self | None:
        """Return the facts in the content of about.json, or None if it is not what `write` writes."""
        files, teacher, vocabulary = (content.get(name) for name in ("files", "teacher", "vocabulary"))
        numbers = [content.get(name) for name in ("top", "num_chunks", "num_targets")]
        counts = [number for number in numbers if isinstance(number, int) and number > 0]
        if not (isinstance(files, dict) and isinstance(teacher, str) and isinstance(vocabulary, str)):
            return None
        if len(counts) < len(numbers):
            return None
        listed: dict[str, File] = {}
        for name, facts in files.items():
            if name != Path(name).name or not isinstance(facts, dict) or facts.keys() != {*File._fields}:
                return None
            size, digest = facts["bytes"], facts["xxh3_128"]
            if not isinstance(size, int) or not isinstance(digest, str):
                return None
            listed[name] = File(size, digest)
        top, num_chunks, num_targets = counts
        return cls(teacher, vocabulary, top, num_chunks, num_targets, listed)

    def write(self, folder: Path) -> None:
        """Write about.json, when all other files are on disk."""
        files = {name: file._asdict() for name, file in self.files.items()}
        filesystem.atomic_write(folder / ABOUT, json.dumps(asdict(self) | {"files": files}, indent=1))

    def damaged(self, folder: Path, names: list[str]) -> str | None:
        """Return which of these files has another content than about.json lists, or None."""
        for name in names:
            try:
                if filesystem.digest_of(folder / name) != self.files[name].xxh3_128:
                    return f"train.teacher: {folder / name} is damaged; {AGAIN}"
            except OSError as error:
                return f"train.teacher: {folder / name} cannot be read: {error.strerror}"
        return None
