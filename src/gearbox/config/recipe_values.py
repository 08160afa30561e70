"""Define the types of the recipe's values: how each is read, and its bounds. Sources and schedules are such values."""

from __future__ import annotations

import math
import os
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
)

from gearbox.config.old_keys import accepts
from gearbox.errors import nearest, shown

CONFIG = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)  # of a group of keys
# The fields of a record by its format, required and optional. A record has the first format whose required fields it
# contains.
FORMS = {
    "messages": (("messages",), ("tools",)),
    "conversations": (("conversations",), ("system", "tools")),
    "instruction": (("instruction", "output"), ("input", "system")),
    "prompt": (("prompt", "completion"), ("system", "tools")),
    "text": (("text",), ()),
    "preference": (
        ("chosen", "rejected"),
        ("prompt", "instruction", "input", "conversations", "system", "tools"),
    ),
    "label": (
        ("label",),
        (
            *("prompt", "completion", "messages", "conversations", "instruction", "input", "output"),
            *("system", "tools"),
        ),
    ),
}
TITLES = {
    "messages": "chat messages",
    "conversations": "ShareGPT conversations",
    "instruction": "Alpaca instructions",
    "prompt": "prompts with completions",
    "text": "plain text",
    "preference": "pairs of a chosen and a rejected answer",
    "label": "answers with a label (true, false)",
}
ANSWERS = ("messages", "conversations", "instruction", "prompt", "text")
"""The formats of documents without a judgement."""
JUDGED = {
    "dpo": ("preference",),
    "ipo": ("preference",),
    "simpo": ("preference",),
    "orpo": ("preference",),
    "kto": ("preference", "label"),
}
"""The objectives that compare answers, each with the formats that it trains on."""
WITH_REFERENCE = ("dpo", "ipo", "kto")
"""The objectives that compare the model with what it was before its first step."""
TRACKERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "comet": "comet_ml",
    "swanlab": "swanlab",
}
"""The trackers, each with its package."""
TURN_FIELDS = ("role", "content", "from", "value")
MAX_NAME_BYTES, MAX_PATH_LETTERS = 255, 1000  # of Linux's file systems, and of a path that leaves room for file names
SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


def _number(value: object) -> object:
    """Return a numeric string as a float. YAML 1.1 reads `2e-5` as a string."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _no_bool(value: object) -> object:
    """Raise ValueError for true or false, which Python would accept as 1 or 0."""
    if isinstance(value, bool):
        raise ValueError("must be an integer")
    return value


def _share(text: str) -> str | None:
    """Return a percentage below 100% in its shortest form, such as 2.5%, or None for any other text."""
    match = SHARE.fullmatch(text)
    share = Decimal(match[1]).normalize() if match else Decimal(100)
    return f"{share:f}%" if share < 100 else None


def _count_or_share(value: object) -> int | str:
    """Return a step count as an int, or a share as a string such as 5%. Raise ValueError for anything else."""
    near = None
    if isinstance(value, str):
        if (share := _share(value)) is not None:
            return 0 if share == "0%" else share
        near = _share(re.sub(r"\s", "", value))
        value = int(value) if re.fullmatch("[0-9]+", value) else value
    elif isinstance(value, float):
        near = _share(f"{value * 100:g}%") if 0 < value < 1 else None
        value = int(value) if value.is_integer() else value
    if type(value) is int and value >= 0:
        return value
    raise ValueError(
        f"must be a number of steps such as 50, or a share of the run below 100% such as 5%, found {shown(value)}"
        + (f"; did you mean {near}?" if near else "")
    )


def steps_of(given: int | str, num_steps: int) -> Fraction:
    """Return a number of steps, or a share of num_steps. It is exact: 0.07 * 100 is above 7 in floating point."""
    return Fraction(given) if isinstance(given, int) else Fraction(given.removesuffix("%")) / 100 * num_steps


def _known_fields(fields: dict[str, str | None]) -> dict[str, str | None]:
    """Raise ValueError for a field that no record format has."""
    known = sorted({name for groups in FORMS.values() for group in groups for name in group} | {*TURN_FIELDS})
    for name in fields:
        if name not in known:
            raise ValueError(f"unknown field {name!r}{nearest(name, known) or '; the fields are ' + ', '.join(known)}")
    return fields


def _metric(text: str) -> str:
    """Return the name of a metric as it is. Raise ValueError unless it is exact_match or path.py:function."""
    file, _, function = text.rpartition(":")
    if text != "exact_match" and not (file.endswith(".py") and function.isidentifier()):
        raise ValueError(f"must be exact_match, or your function such as scores.py:score, found {shown(text)}")
    return text


def _path(text: str) -> str:
    """Return a path or an id on the Hub as it is. Raise ValueError for text that can be neither."""
    if not text.strip():  # Path("") is the working directory
        raise ValueError("is empty; give a path")
    try:
        names = os.fsencode(text).split(b"/")
        Path(text).expanduser()
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"is not a path: {error}") from None
    if "\0" in text or max(map(len, names)) > MAX_NAME_BYTES or len(text) > MAX_PATH_LETTERS:
        limits = f"a name above {MAX_NAME_BYTES} bytes, or over {MAX_PATH_LETTERS:,} letters"
        raise ValueError(f"is not a path: it has a zero byte, {limits}")
    return text


def _trackers(value: object) -> object:
    """Return a list of trackers, each once. Raise ValueError for an unknown one. A single name is a list of one."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"must be a list of trackers such as [tensorboard, wandb], found {shown(value)}")
    for name in names:
        if name not in TRACKERS:
            known = nearest(name.lower(), [*TRACKERS]) or f"; choose from {', '.join(TRACKERS)}, or [] for none"
            raise ValueError(f"unknown tracker {shown(name)}{known}")
    return list(dict.fromkeys(names))


Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Int = Annotated[int, BeforeValidator(_no_bool)]
AnyPath = Annotated[str, AfterValidator(_path)]
FilePath = Annotated[AnyPath, AfterValidator(lambda text: str(Path(text).expanduser()) if text[:1] == "~" else text)]
"""A path in which ~ is the home folder, since a shell does not replace it after `key=`."""
Metric = Annotated[FilePath, AfterValidator(_metric)]
Fields = Annotated[dict[str, str | None], AfterValidator(_known_fields)]
# The bound comes before the validator: after it, pydantic writes a bound that JSON Schema does not know.
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(_no_bool)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_number)]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(_number)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "comet", "swanlab"]
Trackers = Annotated[list[Tracker], BeforeValidator(_trackers)]
CountOrShare = Annotated[
    int | str,
    BeforeValidator(_count_or_share),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9]{1,2}(\.[0-9]+)?%$"}]}
    ),
]


class Source(BaseModel):
    """A source of data, as an item of the list `data.path`."""

    model_config = CONFIG

    path: AnyPath
    """File, folder, glob, saved dataset, Hub dataset id or built-in data, as in `data.path`."""
    weight: PositiveFloat | None = None
    """Share of every step's rows, relative to the other weights; `null` uses all rows once per epoch. Give a weight
    to every source or to none."""
    split: str | None = None
    """Split of this source; `null` uses `data.split`."""
    fields: Fields | None = None
    """Field names of this source; `null` uses `data.fields`."""


def _as_source(item: object) -> object:
    """Return a path as the source that it means in a list. Raise ValueError for an item that is no source."""
    if not isinstance(item, str | dict | Source):
        raise ValueError(f"must be a path, or a mapping such as {{path: chats.jsonl, weight: 2}}, found {shown(item)}")
    return {"path": item} if isinstance(item, str) else item


Item = Annotated[Source, BeforeValidator(_as_source, json_schema_input_type=str | Source)]
Paths = Annotated[
    Annotated[AnyPath, Tag("path")] | Annotated[list[Item], Tag("list"), Field(min_length=1)],
    Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "path"),
]


def listed(path: str | list[Source]) -> list[Source]:
    """Return the sources of a data.path or an eval.path."""
    return [Source(path=path)] if isinstance(path, str) else path


class Group(BaseModel):
    """A group of keys. Unknown keys are errors, and values are immutable."""

    model_config = CONFIG


class Schedule(Group):
    """The learning rate over the steps of a run."""

    model_config = ConfigDict(json_schema_extra=accepts("schedule"))

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after the warm-up; `cosine` and `linear` end at 0. `wsd` (warm-up, stable, decay)
    keeps the peak until its last steps, in which the rate falls linearly to 0."""
    warmup: CountOrShare = 0
    """Steps in which the learning rate rises from 0 to its peak: a number such as `50`, or a share of the run such as
    `5%`."""
    decay: CountOrShare = "20%"
    """Steps of `wsd` in which the learning rate falls: a number such as `200`, or a share of the run such as `20%`."""

    def check(self, num_steps: int | None) -> None:
        """Raise ValueError if warm-up and decay do not fit into a run of so many steps; None is a number not known."""
        if num_steps is not None and isinstance(self.warmup, int) and self.warmup >= num_steps:
            raise ValueError(
                f"schedule.warmup: must be below the {num_steps} steps of the run, found {self.warmup}; give fewer "
                "steps, or a share of the run such as 5%"
            )
        parts = (self.warmup, self.decay)
        known = [steps_of(part, num_steps or 1) for part in parts if num_steps or isinstance(part, str)]
        if self.name == "wsd" and sum(known) > (num_steps or 1):
            raise ValueError(
                f"schedule.decay: {self.decay} is more than what schedule.warmup ({self.warmup}) leaves of the run; "
                "give fewer steps, or a share such as 10%"
            )

    def num_decay_steps(self, num_steps: int) -> int:
        """Return the last steps in which the rate falls, at most all after the warm-up."""
        return min(math.ceil(steps_of(self.decay, num_steps)), num_steps - self.num_warmup_steps(num_steps))

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the warm-up steps of a run of num_steps. A share is rounded up, but leaves at least the last step."""
        if isinstance(self.warmup, int):
            return self.warmup
        return min(math.ceil(steps_of(self.warmup, num_steps)), num_steps - 1)


class Optim(Group):
    """The optimizer and its settings."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "muon"] = "adamw"
    """AdamW, or a bitsandbytes variant of it: 8bit stores each moment in one byte, and paged moves the state out of a
    full GPU's memory. `muon` steps the matrices of layers by Muon, with one moment, and all other weights by AdamW."""
    lr: Float = Field(gt=0)
    """Peak learning rate; one that suits AdamW suits Muon too."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: Float = Field(1e-8, gt=0)
    """Constant added to AdamW's denominator."""
    weight_decay: Float = Field(0.0, ge=0)
    """Decoupled weight decay; biases, norms and DoRA magnitudes are exempt."""
    max_grad_norm: Float = Field(1.0, ge=0)
    """L2 norm over all weights to which the gradient is clipped; 0 disables clipping."""
    master_weights: Literal["fp32", "bf16"] = "fp32"
    """Data type of the trainable weights between steps; `bf16` saves 2 bytes per parameter but loses small updates."""


class Preference(Group):
    """The loss that compares answers (`train.objective`). A reward is `beta` times the gain in log-probability."""

    beta: PositiveFloat | None = None
    """Strength with which the model is kept near its reference, or the scale of rewards without one. `null` is 0.1, as
    in the papers of DPO, IPO, KTO and ORPO, and 2.0 for `simpo`, as in its paper."""
    label_smoothing: Float = Field(0.0, ge=0, lt=0.5)
    """Probability that a pair is in the wrong order, for `dpo` and `simpo` (conservative DPO)."""
    margin: NonNegativeFloat | None = None
    """Reward by which a chosen answer should lead, for `dpo` and `simpo`; `null` is 0 for `dpo`, and 1.0 for `simpo`
    (gamma in its paper)."""
    sft_weight: NonNegativeFloat | None = None
    """Weight of the usual loss of the good answers, a mean over their tokens, which is added. `null` is 1 for `orpo`,
    whose loss it is part of, and 0 for the others."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of good answers in `kto`."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of bad answers in `kto`; its paper balances the products of weights and numbers of answers."""

    def beta_of(self, objective: str) -> float:
        """Return beta, or its default for the objective."""
        return self.beta if self.beta is not None else 2.0 if objective == "simpo" else 0.1

    def margin_of(self, objective: str) -> float:
        """Return the margin, or its default for the objective."""
        return self.margin if self.margin is not None else 1.0 if objective == "simpo" else 0.0

    def sft_weight_of(self, objective: str) -> float:
        """Return the weight of the usual loss, or its default for the objective."""
        return self.sft_weight if self.sft_weight is not None else float(objective == "orpo")


class Profile(Group):
    """The steps to profile."""

    steps: tuple[PositiveInt, PositiveInt]
    """The first and the last step, such as `[10, 13]`; steps count from 1."""

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[int, int]) -> tuple[int, int]:
        if steps[0] > steps[1]:
            raise ValueError(f"the first step {steps[0]} is after the last one {steps[1]}")
        return steps
