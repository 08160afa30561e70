"""Choose the keys of a recipe for a new model: what differs from the recipe that it is made like, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gearbox import ROOT
from gearbox.config.loader import RawMapping
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError

CHATML = "recipes/chat_templates/chatml_tools.jinja"
CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
OF_THE_MODEL = ("revision", "trust_remote_code", "init", "attention", "router_loss")
OF_THE_DATA = ("split", "form", "fields", "roles", "text_unit")
OF_THE_ADAPTER = ("r", "alpha", "rslora", "dropout", "targets")
TITLES = {"full": "Full fine-tuning", "lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA", "qdora": "QDoRA"}
METHODS = ("full", "lora", "qlora")  # in the order in which they are tried
OWN_EPOCHS = 3  # over data that the user gives, whose number of rows is not known yet
EPOCH_STEPS = 8  # at least, in an epoch over such data
RATES = ((3e9, 1e-5), (5e8, 2e-5), (0, 1e-4))  # peak learning rates of full training, by the number of weights
ADAPTER_RATE = 2e-4
NF4 = 4.127 / 8  # bytes of a weight with double quantization
STATE_SHARE = 0.5  # of a GPU's memory for weights and optimizer, if the family has no closed form
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
FROM_GGUF = "convert GGUF to safetensors, as src/fetch_smollm2.py does"
GPUS = re.compile(r"(\d{1,4})x(\S+)", re.IGNORECASE)


@dataclass(frozen=True)
class Gpus:
    """The GPUs to train on."""

    count: int
    name: str
    memory: int
    """Bytes of each."""

    @classmethod
    def parse(cls, text: str) -> Gpus:
        """Return the GPUs that a text such as 2x80GB names. Raise UserError for any other text."""
        found = GPUS.fullmatch("".join(text.split()))
        size = re.fullmatch(r"(?:.*-)?(\d{1,4})GB", found[2], re.IGNORECASE) if found else None
        if found is None or size is None or int(found[1]) == 0 or int(size[1]) == 0:
            raise UserError(f"--gpus: is {text[:40]!r}; write a count and a kind, such as 2x80GB or 8xH100")
        return cls(int(found[1]), f"{size[1]} GB", int(size[1]) * 2**30)

    def __str__(self) -> str:
        count = COUNTS[self.count] if self.count < len(COUNTS) else str(self.count)
        return f"{count} {self.name} GPU{'s' if self.count > 1 else ''}"


@dataclass(frozen=True)
class Sizes:
    """Numbers of a model's weights."""

    weights: int
    in_layers: int
    """Weights of linear layers, which nf4 quantizes."""
    in_experts: int
    """Weights of experts, which nf4 does not quantize."""
    features: int
    """Inputs and outputs of all linear layers: an adapter has that many weights for each of its ranks."""

    def __str__(self) -> str:
        return f"{self.weights / 1e9:.3g}B weights" if self.weights >= 10**7 else f"{self.weights:,} weights"


@dataclass(frozen=True)
class ModelFacts:
    """What a recipe depends on in a model and its tokenizer."""

    name: str
    config: Mapping[str, Any]
    """The content of config.json."""
    sizes: Sizes
    positions: int | None
    """The longest row that the model was trained for, or None."""
    template: Literal["own", "chatml", "text", "unread"]
    """Where the chat template comes from: the tokenizer, this repository, or nowhere, as documents are plain text."""
    ends: str = ""
    """The token that ends a turn or a text."""
    added: tuple[str, ...] = ()
    """Tokens of the chat template that the tokenizer lacks."""
    adapter: str | None = None
    """The folder of a saved adapter to continue."""
    adapter_method: str | None = None
    adapter_rank: int | None = None
    has_weights: bool = True
    note: str = ""
    """A comment for the head of the recipe."""

    @property
    def family(self) -> str:
        """The family of the text decoder."""
        text = self.config.get("text_config")
        inner = text.get("model_type") if isinstance(text, Mapping) else None
        return str(inner or self.config.get("model_type"))


@dataclass(frozen=True)
class Choice:
    """What the plan decides."""

    method: str
    gear: str
    gpus: Gpus
    micro_rows: int
    row_tokens: int
    checkpointing: str
    why: str
    """The reason for the method."""
    memory: tuple[tuple[int, str], ...]
    """Bytes of each GPU, and what they are for."""
    note: str = ""
    """A comment for the head of the recipe."""


class Change(NamedTuple):
    """A key whose value differs from the one in the recipe that the new one was made like."""

    key: str
    before: object
    after: object
    reason: str


def checked_name(model: str) -> str:
    """Return the name of a model, with the home folder for ~. Raise UserError for a file, and for a wrong folder."""
    if not model.strip():
        raise UserError("MODEL: is empty; give a folder with config.json, or a Hub id such as org/model")
    try:
        folder = Path(model).expanduser() if model.startswith("~") else Path(model)
        model.encode()
        is_file, is_folder = folder.is_file(), folder.is_dir()
    except (OSError, ValueError, RuntimeError):
        raise UserError(f"MODEL: {model[:60]!r} is not a path; give a folder, or a Hub id such as org/model") from None
    if is_file:
        is_gguf = folder.suffix == ".gguf"
        raise UserError(f"MODEL: {model!r} is a file; {FROM_GGUF if is_gguf else 'give its folder, with config.json'}")
    if is_folder and not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        advice = FROM_GGUF if any(folder.glob("*.gguf")) else "give the folder of a model that transformers saved"
        raise UserError(f"MODEL: the folder {model!r} has no config.json; {advice}")
    if not is_folder and (model.startswith((".", "/", "~", "models/", "recipes/", "runs/")) or not is_hub_id(model)):
        raise UserError(f"MODEL: no such folder {model!r}; give a folder, or a Hub id such as org/model")
    return str(folder) if model.startswith("~") else model


def is_hub_id(name: str) -> bool:
    """Return True for a name that a model of the Hub may have."""
    return re.fullmatch(r"([\w.-]{1,96}/)?[\w.-]{1,96}", name, re.ASCII) is not None


def choose(facts: ModelFacts, like: Recipe, gpus: Gpus, method: str | None, methods: tuple[str, ...]) -> Choice:
    """Return the first method that fits on the GPUs, and the gear for it. Raise UserError if none fits.

    `method` is the one that the user asks for. Without it, `methods` are tried in order.
    """
    methods = methods if method is None else (method,)
    if facts.adapter_method is not None:
        own = facts.adapter_method
        if method not in (None, own, f"q{own}"):
            raise UserError(f"--method: is {method}, but {facts.adapter} is an adapter of {own}; use {own} or q{own}")
        methods = (own, f"q{own}") if method is None else (method,)
    if facts.sizes.in_experts > facts.sizes.weights / 2:
        if method is not None and method.startswith("q"):
            raise UserError(
                f"--method: {method} quantizes linear layers, but most weights of {facts.name!r} are experts; use lora"
            )
        methods = tuple(one for one in methods if not one.startswith("q"))
    if "dora" in methods and facts.added:
        raise UserError(
            f"--method: {method} cannot add the tokens of a chat template, and {facts.name!r} has none; use lora"
        )
    return _cautious(facts, like, gpus, methods, "--method" if method else "")


def methods_from(method: str) -> tuple[str, ...]:
    """Return a method, and those that need less memory."""
    return (method, *METHODS[METHODS.index(method) + 1 :]) if method in METHODS else (method,)


def _cautious(facts: ModelFacts, like: Recipe, gpus: Gpus, methods: tuple[str, ...], why: str) -> Choice:
    """Return a choice whose weights and optimizer take at most half of a GPU, for a family without a closed form."""
    row_tokens = min(like.batch.row_tokens, facts.positions or like.batch.row_tokens)
    limit = gpus.memory * STATE_SHARE
    least = 0
    for method in methods:
        terms = _states(facts, method, like)
        total = sum(terms.values())
        for gear, parts in (("single", 1),) if gpus.count == 1 else (("ddp", 1), ("fsdp", gpus.count)):
            if total <= limit * parts:
                memory = tuple((round(size / parts), text) for text, size in terms.items())
                note = (
                    f"The family {facts.family} has no closed form. The rest of each GPU is left for activations, with "
                    "one row in a pass."
                )
                return Choice(method, gear, gpus, 1, row_tokens, "full", why or "fits", memory, note)
        least = round(total / gpus.count)
        why = why or f"{TITLES[method]} needs {_gb(least)} for weights and optimizer alone, on each GPU"
    raise UserError(
        f"--gpus: {TITLES[methods[-1]]} of {facts.name!r} needs {_gb(least)} for weights and optimizer on each GPU, "
        f"and {gpus} would have too little left for activations; give more or larger GPUs"
    )


def _states(facts: ModelFacts, method: str, like: Recipe) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer of the whole model."""
    sizes, rank = facts.sizes, facts.adapter_rank or like.adapter.r
    per = 4 if like.optim.master_weights == "fp32" else 2
    moments = 2 if like.optim.name.endswith("8bit") else per if like.optim.name == "muon" else 2 * per
    trained = 2 * per + moments
    if method == "full":
        return {f"Weights, gradients and optimizer: {trained} bytes for each weight.": sizes.weights * trained}
    adapter = sizes.features * rank * trained
    if method.startswith("q"):
        frozen = {
            "Layers in NF4.": sizes.in_layers * NF4,
            "Embedding and output head in bf16.": (sizes.weights - sizes.in_layers) * 2,
        }
    else:
        frozen = {"Frozen weights in bf16.": sizes.weights * 2}
    return frozen | {f"Adapter of rank {rank}, with gradients and optimizer.": adapter}


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def nearest_recipe(method: str, gear: str) -> Path:
    """Return the shipped recipe that is nearest to a method and a gear."""
    if method != "full":
        name = "qlora_1gpu" if method.startswith("q") else "ddp_4gpu"
    elif gear in ("single", "ddp"):
        name = "ddp_4gpu_full"
    else:
        name = "zero3_2gpu" if gear.startswith("zero") else "fsdp_2gpu"
    return ROOT / "recipes" / f"{name}.yaml"


@dataclass
class Draft:
    """The content of a recipe while it is changed, without the keys that have their default."""

    content: RawMapping
    changes: dict[str, Change] = field(default_factory=dict)

    def get(self, key: str) -> object:
        """Return the value of a key, or its default."""
        group, name = key.split(".")
        value: object = self.content.get(group, {}).get(name, _default_of(key))
        return value

    def set(self, key: str, value: object, reason: str) -> None:
        """Give a key a value, for a reason. None or the default removes the key."""
        group, name = key.split(".")
        before, keys = self.get(key), dict(self.content.get(group, {}))
        if value is None or value == _default_of(key):
            keys.pop(name, None)
        else:
            keys[name] = value
        self.content[group] = keys
        if before != (after := self.get(key)):
            self.changes[key] = Change(key, before, after, reason)

    def reset(self, group: str, names: tuple[str, ...], reason: str) -> None:
        """Give keys of a group their defaults."""
        for name in names:
            self.set(f"{group}.{name}", None, reason)


def _default_of(key: str) -> object:
    """Return the default of a key, or None if it is required."""
    group, name = key.split(".")
    annotation: Any = Recipe.model_fields[group].annotation
    known = annotation.model_fields[name]
    return None if known.is_required() else known.get_default()


def compose(facts: ModelFacts, choice: Choice, like: Recipe, data: str | None, is_named: bool) -> Draft:
    """Return a recipe for the model, made like another one. `is_named` is True if the user named that one."""
    draft = Draft(like.model_dump(mode="json", exclude_defaults=True))
    draft.set("model.name", facts.name, "the base of the adapter" if facts.adapter else "the model given")
    draft.reset("model", OF_THE_MODEL, "set for the other model")
    if not facts.has_weights:
        draft.set("model.init", "random", "the folder has no weights")
    draft.set("model.quantize", "nf4" if choice.method.startswith("q") else None, choice.why)
    _set_adapter(draft, facts, choice)
    _set_data(draft, facts, data, is_named)
    is_shorter = choice.row_tokens == facts.positions
    draft.set("batch.row_tokens", choice.row_tokens, "the positions of the model" if is_shorter else "memory")
    draft.set("batch.micro_rows", choice.micro_rows, "memory")
    draft.set("perf.checkpointing", choice.checkpointing, "memory")
    is_full = choice.method == "full"
    if not is_named or (like.method == "full") != is_full:
        trained = str(facts.sizes) if is_full else "an adapter"
        draft.set("optim.lr", rate_of(choice.method, facts.sizes.weights), f"usual for {trained}")
    for key, applies, reason in (
        ("perf.float8", is_full, "multiplies trained weights, which an adapter freezes"),
        ("perf.ddp_compression", choice.gear == "ddp", "only DDP sends whole gradients"),
        ("perf.prefetch", choice.gear.startswith("fsdp"), "only FSDP2 gathers layers ahead"),
    ):
        if not applies:
            draft.set(key, None, reason)
    draft.reset("run", ("name", "resume"), "set for the other run")
    return draft


def set_rows(draft: Draft, num_rows: int | None, gpus: Gpus) -> None:
    """Give a step fewer rows, if the data have too few for EPOCH_STEPS steps in an epoch."""
    rows = draft.get("batch.rows")
    if num_rows is not None and isinstance(rows, int):
        fewer = max(gpus.count, 2 ** ((num_rows // EPOCH_STEPS).bit_length() - 1) if num_rows >= EPOCH_STEPS else 1)
        draft.set("batch.rows", min(rows, fewer), f"the data fill only {num_rows:,}")


def _set_adapter(draft: Draft, facts: ModelFacts, choice: Choice) -> None:
    method = "none" if choice.method == "full" else choice.method.removeprefix("q")
    if facts.adapter is not None:
        draft.reset("adapter", ("method", *OF_THE_ADAPTER), "saved with the adapter")
        draft.set("adapter.path", facts.adapter, "the adapter given")
        return
    draft.set("adapter.path", None, "an adapter of the other model")
    draft.set("adapter.method", method, choice.why)
    if method == "none":
        draft.reset("adapter", OF_THE_ADAPTER, "all weights are trained")
    elif isinstance(draft.get("adapter.targets"), list):
        draft.set("adapter.targets", None, "names of the other model's layers")


def _set_data(draft: Draft, facts: ModelFacts, data: str | None, is_named: bool) -> None:
    if data is not None:
        draft.set("data.path", data, "the data given")
        draft.reset("data", OF_THE_DATA, "set for the other data")
        draft.set("eval.path", None, "documents of the other data")
        if not is_named:
            draft.set("train.steps", None, "depends on the data")
            draft.set("train.epochs", OWN_EPOCHS, "usual for fine-tuning")
    template = None
    if facts.template == "chatml":
        template = CHATML if Path(CHATML).is_file() else str(ROOT / CHATML)
    draft.set("data.chat_template", template, "the tokenizer has none" if template else "the tokenizer has its own")
    draft.set("model.add_tokens", list(facts.added), "marks of turns that the tokenizer lacks")


def rate_of(method: str, num_weights: int) -> float:
    """Return the usual peak learning rate of a method."""
    return next(rate for bound, rate in RATES if num_weights >= bound) if method == "full" else ADAPTER_RATE


def about_weights(facts: ModelFacts) -> str:
    """Return a comment on weights that are missing."""
    if facts.has_weights:
        return ""
    return "The folder has no weights, so they are random. Copy model.safetensors there, and remove init, to train it."


def about_template(facts: ModelFacts) -> str:
    """Return a comment on the chat template, and on the token at which an answer ends."""
    if facts.template == "unread":
        return ""
    if facts.template == "text":
        return f"Documents are plain text. {facts.ends} ends each."
    whose = "the tokenizer's own" if facts.template == "own" else "the one in data, as the tokenizer has none"
    return f"Chat template: {whose}." + (f" {facts.ends} ends a turn." if facts.ends else "")
