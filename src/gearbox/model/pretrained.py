"""Read the files of a pretrained model, which anyone may have written.

No code of the model runs unless the user allows it, nothing asks on the terminal, and no pickle is opened. Whatever is
wrong with a file becomes a UserError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import cached_file

from gearbox.checks.model import INDEX, NO_SAFETENSORS, NO_SHARD, SINGLE
from gearbox.checks.tokenizer import NO_TOKENIZER, lacks_tokenizer
from gearbox.config.adapter_settings import WEIGHTS
from gearbox.config.recipe import Model
from gearbox.errors import UserError, one_line, one_line_with_type
from gearbox.filesystem import MAX_JSON_BYTES, read_json_object

ADAPTER, TOKENIZER = "adapter_config.json", "tokenizer.json"
# Files that transformers reads in full: one with another content is named, before a library fails on it.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    INDEX,
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of generation_config.json
ADAPTER_FILES = ["*.json", "*.jinja", WEIGHTS]
READ_ENDINGS = (".json", ".jinja", ".safetensors", ".model", ".txt", ".tiktoken", ".bpe")
MAX_TOKENIZER_BYTES = 512 * 2**20
# Parts of the names of sizes in a config, and bounds: a larger model would be built for minutes, or fill the memory.
BOUNDS = {"layers": 10_000, "experts": 10_000, "heads": 10_000, "dim": 10_000_000, "size": 10_000_000}


@dataclass(frozen=True)
class Pretrained:
    """A folder or Hub id, and what a message calls it."""

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    key: str = "model.name"
    """The place where the user gave the name."""
    switch: str = "model.trust_remote_code=true"
    """What the user sets to let the model's code run."""
    is_offline: bool = False
    is_adapter: bool = False
    """It has no config.json, and its weights are in another file."""

    @classmethod
    def of(cls, model: Model, source: str | None = None, is_offline: bool = False) -> Pretrained:
        """Return the recipe's model. `source` is its folder, if that is not the one in the recipe."""
        return cls(source or model.name, model.revision, model.trust_remote_code, is_offline=is_offline)

    @property
    def folder(self) -> Path | None:
        """The local folder, or None for a Hub id."""
        return Path(self.name) if _exists(self.name) and Path(self.name).is_dir() else None

    @property
    def options(self) -> dict[str, Any]:
        """Options of every from_pretrained. Without trust_remote_code it would ask on the terminal."""
        options = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        return options | {"local_files_only": True} if self.is_offline else options

    def refuse(self, text: str) -> UserError:
        """Return a UserError about this model."""
        return UserError(f"{self.key}: {text}")

    def config(self) -> PretrainedConfig:
        """Return the config. Raise UserError if a file is damaged, or if it names weights that are not safetensors."""
        self.check_files()
        try:
            config = AutoConfig.from_pretrained(self.name, **self.options)
        except Exception as error:  # hostile files raise many types of exception
            raise self.explain(error) from None
        weights = getattr(config, "transformers_weights", None)
        if weights is not None and weights != (INDEX if self._shards() else SINGLE):
            raise self.refuse(f"config.json of {self.name!r} takes its weights from {weights!r}; use {SINGLE}")
        if getattr(config, "distributed_config", None):
            raise self.refuse(
                f"config.json of {self.name!r} has distributed_config, which only a gear may set; remove it"
            )
        for name, number in _sizes(config.to_dict()):
            if number > min((bound for part, bound in BOUNDS.items() if part in name), default=number):
                raise self.refuse(f"config.json of {self.name!r} has {name}: {number}, which no model has")
        return config

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer. Raise UserError if a file of it is missing or damaged."""
        self.check_files()
        if self.folder is not None and lacks_tokenizer(self.folder):  # transformers would create one for some families
            raise UserError(f"{self.key}: {NO_TOKENIZER.format(self.folder)}")
        try:
            tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(self.name, **self.options)
            tokenizer("a")  # some wrong settings show only now
        except Exception as error:
            if self.folder is not None and (self.folder / TOKENIZER).is_file():
                self._read(self.folder / TOKENIZER, MAX_TOKENIZER_BYTES)
            raise self.explain(error) from None
        templates = tokenizer.chat_template or ""
        if not all(
            isinstance(one, str) for one in (templates.values() if isinstance(templates, dict) else [templates])
        ):
            raise self.refuse(f"the chat template of {self.name!r} is not text; correct its tokenizer_config.json")
        if not tokenizer.is_fast:
            raise self.refuse(f"{self.name!r} has a slow tokenizer, which does not report the positions of its tokens")
        if not len(tokenizer):
            raise self.refuse(f"the tokenizer of {self.name!r} has no tokens; copy its files from the same model")
        return tokenizer

    def check_files(self) -> None:
        """Raise UserError if a small file is not JSON, or if the index names other files than safetensors."""
        if self.folder is None and self.name.startswith(("/", ".", "~")) and not _exists(self.name):
            raise self.refuse(f"{self.name!r} is not a folder on this machine; give the folder of a model")
        if self.folder is not None:
            for path in sorted(self.folder.iterdir()):
                if path.suffix in READ_ENDINGS and not path.is_file():
                    raise self.refuse(f"{path} is not a regular file")
            for name in SMALL_FILES:
                content = self._read(self.folder / name) if (self.folder / name).exists() else {}
                for key in TOKEN_IDS if name == "generation_config.json" else ():
                    if not _are_tokens(content.get(key)):
                        raise self.refuse(f"{self.folder / name}: {key}: is {content[key]!r}; use numbers of tokens")
        if self.is_adapter:
            return
        if self._find(ADAPTER) is not None:  # transformers would load its base, and pickled weights
            raise self.refuse(f"{self.name!r} is an adapter; give its base here, and the adapter as adapter.path")
        self._shards()

    def adapter_folder(self) -> Path | None:
        """Return the folder of an adapter, downloaded if it is on the Hub. Return None if this is no adapter."""
        found = self._find(ADAPTER)
        if found is None or self.folder is not None:
            return found and found.parent
        try:
            return Path(snapshot_download(self.name, revision=self.revision, allow_patterns=ADAPTER_FILES))
        except Exception as error:
            raise self.explain(error) from None

    def weight_files(self) -> list[Path]:
        """Return the files that from_pretrained reads. Those of a Hub model must have been downloaded."""
        names = [WEIGHTS] if self.is_adapter else self._shards() or [SINGLE]
        return [path for path in map(self._find, names) if path is not None]

    def _shards(self) -> list[str]:
        """Return the files that the index names, if the model has an index and uses it."""
        if self.folder is not None and (self.folder / SINGLE).exists():
            return []
        if (path := self._find(INDEX)) is None:
            return []
        index = self._read(path)
        names = index.get("weight_map")
        if not isinstance(names, dict) or not names or not isinstance(index.get("metadata"), dict):
            raise self.refuse(f"{path} needs a weight_map and metadata; download or copy it again")
        for name in names.values():
            if not isinstance(name, str) or not _is_safetensors_inside(name):
                raise self.refuse(
                    f"{path} names {str(name)[:100]!r}; it may name only safetensors files in the same folder"
                )
            if self.folder is not None and not (self.folder / name).is_file():
                raise self.refuse(NO_SHARD.format(path, name))
        return sorted(set(names.values()))

    def _find(self, name: str) -> Path | None:
        """Return the path of a file in the folder or in the cache of the Hub. Download a small file if needed."""
        if self.folder is not None:
            return self.folder / name if (self.folder / name).exists() else None
        if Path(self.name).is_absolute():
            return None
        try:
            found = cached_file(
                self.name,
                name,
                revision=self.revision,
                local_files_only=self.is_offline,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except Exception:  # from_pretrained explains why the model cannot be reached
            return None
        return None if found is None else Path(found)

    def _read(self, path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
        try:
            return read_json_object(path, max_bytes)
        except ValueError as error:
            raise self.refuse(f"{error}; download or copy it again") from None

    def explain(self, error: Exception) -> UserError:
        """Return a UserError that explains in one line why the model cannot be loaded and what to do."""
        if isinstance(error, UserError):
            return error
        name, causes = self.name, _causes(error)
        if any(isinstance(cause, GatedRepoError) for cause in causes):
            return self.refuse(
                f"{name!r} is gated: accept its terms at https://huggingface.co/{name}, then export HF_TOKEN"
            )
        if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
            return self.refuse(f"{name!r} is not on the Hub; check the spelling, or export HF_TOKEN if it is private")
        if "trust_remote_code" in str(error):
            return self.refuse(f"{name!r}{self._where_code()} comes with Python code; read it, then set {self.switch}")
        if isinstance(error, SafetensorError):
            return self.refuse(self._damaged_file())
        if "safetensors" in str(error) and not (self.folder and any(self.folder.glob("*.safetensors"))):
            return self.refuse(NO_SAFETENSORS.format(name))
        offline = any(isinstance(cause, LocalEntryNotFoundError | ConnectionError) for cause in causes)
        if self.folder is None and (offline or any(word in str(error).lower() for word in ("connect", "offline"))):
            return self.refuse(
                f"{name!r} is not on this machine and the Hub cannot be reached; give a local folder"
                + (", or rehearse with run.rehearse=true" if self.key == "model.name" else "")
            )
        is_plain = isinstance(error, OSError | ValueError | ImportError)
        reason = one_line(error) if is_plain else one_line_with_type(error)
        return self.refuse(f"{name!r} cannot be loaded: {reason}")

    def _where_code(self) -> str:
        """Return which file of a local folder names Python code, as text after the model's name."""
        for name in ("config.json", "tokenizer_config.json") if self.folder is not None else ():
            path = Path(self.name) / name
            if path.is_file() and self._read(path).get("auto_map"):
                return f" ({name})"
        return ""

    def _damaged_file(self) -> str:
        """Return a text that names the first safetensors file that cannot be opened."""
        for path in self.weight_files():
            try:
                with safe_open(path, "pt"):
                    continue
            except SafetensorError as error:
                return f"{path} is damaged ({one_line(error)}); download or copy it again"
        return f"a safetensors file of {self.name!r} is damaged; download it again"


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and those that led to it."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # such as a name that is too long
        return False


def _are_tokens(value: object) -> bool:
    """Return True for a token's id, for a list of ids, and for None."""
    return value is None or all(
        type(one) is int and 0 <= one < 2**31 for one in (value if isinstance(value, list) else [value])
    )


def _is_safetensors_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix == ".safetensors" and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _sizes(settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the integers of a config and of its sub-configs with their names."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _sizes(value)
        elif isinstance(value, int):
            yield str(name), value
