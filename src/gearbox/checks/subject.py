"""Gather what the checks read: recipe, gear, the model's files on this machine, and the data's first records."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gearbox.checks.documents import FirstRecords
from gearbox.checks.family import PlainConfig
from gearbox.checks.finding import Said, Severity
from gearbox.config.job import Job
from gearbox.config.loader import RawMapping, located
from gearbox.config.recipe import Model, Recipe
from gearbox.filesystem import read_json_object
from gearbox.planning.architecture import ARCHITECTURES, places
from gearbox.planning.gpus import Gpu

MAX_TOKENIZER_BYTES = 64 * 2**20  # a larger file takes seconds, and is left to the run


@dataclass(frozen=True)
class LocalModel:
    """A model's folder here, if there is one, and what its files say. A damaged file says nothing."""

    folder: Path | None
    config_path: Path | None
    damaged: list[str] = field(default_factory=list)
    """What is wrong with files that were read."""

    @classmethod
    def of(cls, model: Model) -> LocalModel:
        """Find a model: its folder, or the one in the Hub's cache, or its config in recipes/architectures/."""
        found = next((path for path in places(model) if path.is_file()), None)
        return cls(None if found is None or found.parent == ARCHITECTURES else found.parent, found)

    @cached_property
    def config(self) -> RawMapping | None:
        """The content of config.json."""
        return None if self.config_path is None else self._read(self.config_path) or None

    def read(self, name: str) -> RawMapping:
        """Return the content of a JSON file of the folder, empty if it is missing."""
        path = None if self.folder is None else self.folder / name
        return {} if path is None or not path.is_file() else self._read(path)

    def _read(self, path: Path) -> RawMapping:
        """Return the content of a JSON file, empty if it is damaged, or too large for a quick check."""
        try:
            return {} if path.stat().st_size > MAX_TOKENIZER_BYTES else read_json_object(path, MAX_TOKENIZER_BYTES)
        except OSError as error:
            self.damaged.append(f"{path} cannot be read: {error.strerror}")
        except ValueError as error:
            self.damaged.append(str(error))
        return {}

    @cached_property
    def tokenizer_config(self) -> RawMapping:
        """The content of tokenizer_config.json."""
        return self.read("tokenizer_config.json")

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """The id of each token in tokenizer.json."""
        model = self._tokenizer.get("model")
        vocabulary: object = model.get("vocab") if isinstance(model, dict) else None
        ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
        if isinstance(vocabulary, list):  # pairs of token and score
            ids = {str(pair[0]): number for number, pair in enumerate(vocabulary) if isinstance(pair, list) and pair}
        return {token: number for token, number in (ids | self.added).items() if isinstance(number, int)}

    @cached_property
    def _tokenizer(self) -> RawMapping:
        return self.read("tokenizer.json")

    @cached_property
    def added(self) -> dict[str, int]:
        """The id of each token in tokenizer.json that is never split."""
        tokens = self._tokenizer.get("added_tokens")
        named = [token for token in tokens if isinstance(token, dict)] if isinstance(tokens, list) else []
        return {str(token.get("content")): token.get("id", -1) for token in named}

    def special(self, name: str) -> str | None:
        """Return a special token, such as eos_token."""
        token = self.tokenizer_config.get(name) or self.read("special_tokens_map.json").get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None


@dataclass(frozen=True)
class Subject:
    """The subject of the checks. A check that needs a job says nothing without one."""

    recipe_path: Path
    recipe: Recipe
    """The recipe as it was written, without its wrong keys."""
    job: Job | None
    """The recipe and its gear; None if the gear cannot be used."""
    gpu: Gpu | None = None

    @cached_property
    def model(self) -> LocalModel:
        """The files of the model."""
        return LocalModel.of(self.recipe.model)

    @cached_property
    def config(self) -> PlainConfig | None:
        """The config of the text model, if its family is known; None for the narrow stand-in of a rehearsal."""
        content = None if self.recipe.run.rehearse else self.model.config
        return None if content is None else PlainConfig.of(content)

    @cached_property
    def first_records(self) -> list[FirstRecords]:
        """The first records of each file of local data."""
        data, evaluated = self.recipe.data, self.recipe.eval.path
        found = [FirstRecords("data.path", data, source, self.recipe.forms) for source in data.sources]
        if evaluated is not None:
            data = data.model_copy(update={"path": evaluated})
            found += [FirstRecords("eval.path", data, source, self.recipe.forms) for source in data.sources]
        return [part for one in found for part in one.of_each_file()]

    def say(self, text: str, severity: Severity = "problem") -> Said:
        """Return words about a key of the recipe, with which the text begins."""
        return Said(located(text, self.recipe, self.recipe_path), severity)
