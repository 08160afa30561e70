"""Compose a recipe for a new model: what differs from the recipe that it is made like, and the reason for each key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from gearbox import ROOT
from gearbox.config.loader import RawMapping
from gearbox.config.recipe import Recipe
from gearbox.config.recipe_values import Group
from gearbox.planning.new_recipe import Choice, ModelFacts
from gearbox.planning.strategy import Machines

CHATML = "recipes/chat_templates/chatml_tools.jinja"
OF_THE_MODEL = ("revision", "trust_remote_code", "init", "attention", "router_loss")
OF_THE_DATA = ("split", "form", "fields", "roles", "text_unit")
OF_THE_ADAPTER = ("r", "alpha", "rslora", "dropout", "targets")
OWN_EPOCHS = 3  # over data that the user gives, whose number of rows is not known yet
EPOCH_STEPS = 8  # at least, in an epoch over such data
RATES = ((3e9, 1e-5), (5e8, 2e-5), (0, 1e-4))  # peak learning rates of full training, by the number of weights
ADAPTER_RATE = 2e-4
COMPARING_RATES = (5e-6, 5e-7)  # of an adapter and of full training: the alignment-handbook's for Zephyr 7B


class Change(NamedTuple):
    """A key whose value differs from the one in the recipe that the new one was made like."""

    key: str
    before: object
    after: object
    reason: str


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
    known = cast("type[Group]", Recipe.model_fields[group].annotation).model_fields[name]
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
    fits = "fits without recomputing" if choice.checkpointing == "none" else "memory"
    draft.set("perf.checkpointing", choice.checkpointing, fits)
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


def set_rows(draft: Draft, num_rows: int | None, gpus: Machines) -> None:
    """Give a step fewer rows, if the data have too few for EPOCH_STEPS steps in an epoch."""
    rows = draft.get("batch.rows")
    if num_rows is not None and isinstance(rows, int):
        fewer = max(gpus.total, 2 ** ((num_rows // EPOCH_STEPS).bit_length() - 1) if num_rows >= EPOCH_STEPS else 1)
        draft.set("batch.rows", min(rows, fewer), f"the data fill only {num_rows:,}")


def set_objective(draft: Draft, objective: str, method: str) -> None:
    """Give a recipe the objective that suits its data, with a learning rate that is usual for comparing answers."""
    if objective != draft.get("train.objective"):
        draft.set("train.objective", objective, "the data have answers to compare")
        draft.set("optim.lr", COMPARING_RATES[method == "full"], "usual for comparing answers")


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
        ends = f"{facts.ends} ends each." if facts.ends else "The tokenizer has no token that ends one."
        return f"Documents are plain text. {ends}"
    whose = "the tokenizer's own" if facts.template == "own" else "the one in data, as the tokenizer has none"
    return f"Chat template: {whose}." + (f" {facts.ends} ends a turn." if facts.ends else "")
