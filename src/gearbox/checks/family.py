"""Read facts about a model's family from the installed transformers, without importing it."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from gearbox.config.loader import RawMapping

BASES = {"PreTrainedConfig", "PretrainedConfig"}
LINEAR = re.compile(r"self\.(\w+)\s*=\s*(?:nn\.Linear|\w*Linear|Conv1D)\(")
LANGUAGE_MODELS = re.compile(
    r"^MODEL_FOR_(?:CAUSAL_LM|IMAGE_TEXT_TO_TEXT|MULTIMODAL_LM)_MAPPING_NAMES = OrderedDict\((.*?)^\)", re.M | re.S
)
OTHER_FILES = re.compile(r"^from \.\.(\w+)\.modeling_\w+ import", re.M)
# Families whose positions are a table, and the key of its size. All others compute positions, or have none.
TABLES = {
    "gpt2": "n_positions",
    "gpt_bigcode": "n_positions",
    "gpt_neo": "max_position_embeddings",
    "opt": "max_position_embeddings",
    "biogpt": "max_position_embeddings",
}


class PlainConfig:
    """A config.json with the defaults of its family's config class, read like a config of transformers."""

    def __init__(self, content: RawMapping, defaults: RawMapping) -> None:
        self._content, self._defaults = content, defaults
        self._names: dict[str, str] = defaults.get("attribute_map") or {}

    @classmethod
    def of(cls, content: RawMapping) -> PlainConfig | None:
        """Return the text part of a config.json; None if its family is not in transformers, or runs its own code."""
        text = content.get("text_config")
        if isinstance(text, dict):
            content = text
        kind = content.get("model_type")
        defaults = class_defaults(kind) if isinstance(kind, str) and "auto_map" not in content else None
        return None if defaults is None else cls(content, defaults)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  a value of a JSON file
        for key in (self._names.get(name, name), name):
            for values in (self._content, self._defaults):
                if key in values:
                    return values[key]
        raise AttributeError(name)

    def get_text_config(self) -> PlainConfig:
        """Return this config, which is that of the text model."""
        return self


def class_defaults(model_type: str) -> RawMapping | None:
    """Return the attributes and defaults of a family's config class, or None if they cannot be read."""
    for path in _files(model_type, "configuration"):
        classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
        for node in classes.values():
            found = _constants(node)
            if found.get("model_type") == model_type:
                bases = [ast.unparse(base) for base in node.bases]
                return found if BASES.issuperset(bases) else None
    return None


def _constants(node: ast.ClassDef) -> RawMapping:
    """Return the attributes of a class whose values are literals."""
    found: RawMapping = {}
    for line in node.body:
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        value = getattr(line, "value", None)
        if targets and isinstance(targets[0], ast.Name) and value is not None:
            try:
                found[targets[0].id] = ast.literal_eval(value)
            except ValueError:
                continue
    return found


def is_language_model(model_type: str) -> bool:
    """Return whether transformers has a language model for this family, with towers or without; True if in doubt."""
    folder = _models()
    path = None if folder is None else folder / "auto/modeling_auto.py"
    if path is None or not path.is_file():
        return True
    return f'("{model_type}",' in "".join(LANGUAGE_MODELS.findall(path.read_text()))


def has_router_loss(config: PlainConfig) -> bool:
    """Return whether a family has a load-balancing loss in transformers."""
    source = "".join(path.read_text() for path in _files(config.model_type, "modeling"))
    return "def load_balancing_loss_func" in source and '"router_logits"' in source


class ModuleNames(NamedTuple):
    """The names in the code of a family."""

    linear: set[str]
    """The attributes that are linear layers."""
    words: set[str]
    """All words: a module has one of these names, or a number."""


def module_names(model_type: str) -> ModuleNames | None:
    """Return the names of a family's modules, or None if its code is not in transformers."""
    sources = [path.read_text() for path in _files(model_type, "modeling")]
    for name in {name for source in sources for name in OTHER_FILES.findall(source)}:
        sources += [path.read_text() for path in _files(name, "modeling")]
    if not sources:
        return None
    text = "\n".join(sources)
    return ModuleNames({*LINEAR.findall(text)}, {*re.findall(r"\w+", text)})


def _files(model_type: str, kind: str) -> list[Path]:
    """Return the files of a family of this kind. `gemma3_text` is in the folder gemma3."""
    folder = _models()
    names = (model_type.replace("-", "_"), model_type.removesuffix("_text"))
    if folder is None or not re.fullmatch(r"[\w-]+", model_type):
        return []
    found = next((folder / name for name in names if (folder / name).is_dir()), None)
    return sorted(found.glob(f"{kind}_*.py")) if found is not None else []


@lru_cache
def _models() -> Path | None:
    spec = importlib.util.find_spec("transformers")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) / "models" if places else None
