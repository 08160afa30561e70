"""Know the public chat templates that tests try: where each comes from, and its copy in models/templates.

templates.tsv lists facts about the files. Their text belongs to others, so it is fetched and never committed:

    python tests/support/template_files.py
"""

import ast
import csv
import hashlib
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from gearbox import ROOT

FOLDER = ROOT / "models" / "templates"
LIST = Path(__file__).with_name("templates.tsv")
URL = "https://raw.githubusercontent.com/{repository}/{commit}/{path}"


class TemplateFile(NamedTuple):
    """A row of templates.tsv."""

    name: str
    """The file's name in FOLDER, without .jinja."""
    family: str
    repository: str
    """owner/name@commit"""
    path: str
    """The file in its repository. What follows # is the place of the template inside the file."""
    sha256: str
    bos: str
    eos: str
    """The tokenizer's end of text, as the model's family has it."""

    @property
    def copy(self) -> Path:
        return FOLDER / f"{self.name}.jinja"

    def read(self) -> str:
        """Return the text of the copy. Raise ValueError if it is another text than the listed one."""
        content = self.copy.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ValueError(f"{self.copy} differs from the file that {LIST.name} lists; fetch it again")
        return content.decode()


def listed() -> list[TemplateFile]:
    with LIST.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        assert next(rows) == [*TemplateFile._fields]
        return [TemplateFile(*row) for row in rows]


def present() -> list[TemplateFile]:
    """Return the listed files that have a copy on this machine."""
    return [file for file in listed() if file.copy.is_file()]


@cache
def download(url: str) -> str:
    with urlopen(url) as answer:
        text: str = answer.read().decode()
        return text


def fetch(file: TemplateFile, read: Callable[[str], str] = download) -> None:
    """Write the copy of a file, after its hash has been compared."""
    repository, _, commit = file.repository.partition("@")
    path, *places = file.path.split("#")
    text = read(URL.format(repository=repository, commit=commit, path=path))
    if places:
        text = _within(text, path, places)
    if hashlib.sha256(text.encode()).hexdigest() != file.sha256:
        raise ValueError(f"{file.repository}: {file.path} is not the file that {LIST.name} lists")
    file.copy.parent.mkdir(parents=True, exist_ok=True)
    file.copy.write_bytes(text.encode())


def _within(text: str, path: str, places: list[str]) -> str:
    """Return the template at some place of a JSON list of models, or of a Python dictionary of models."""
    if path.endswith(".json"):
        models = {model["model_name"]: model["chat_template"] for model in json.loads(text) if "chat_template" in model}
    else:
        returned = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Return))
        assert returned.value is not None
        models = {name: model["chat_template"] for name, model in ast.literal_eval(returned.value).items()}
    found = models[places[0]]
    for place in places[1:]:
        found = found[place]
    return str(found)


if __name__ == "__main__":
    for each in listed():
        if not each.copy.is_file():
            fetch(each)
            print(f"fetched {each.name}")
