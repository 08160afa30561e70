"""The recipe: what to train. Every key, its type, its default and its unit stand here, once.

Nothing here imports torch, so a misspelt key is reported in well under a second.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal

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
    model_validator,
)

from gearbox.errors import nearest

BUILTIN_TASKS = "builtin:tasks"
LOCAL_ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".txt")
MAX_RECORD_BYTES = 16 * 2**20  # of one document; its tokens would take gigabytes to make
Role = Literal["system", "user", "assistant", "tool"]
# What a row may hold, by the form it is of; the first form whose required fields (the first tuple) are there is it.
FORMS = {
    "messages": (("messages",), ("tools",)),
    "conversations": (("conversations",), ("system", "tools")),
    "instruction": (("instruction", "output"), ("input", "system")),
    "prompt": (("prompt", "completion"), ("system", "tools")),
    "text": (("text",), ()),
}
RESUME = ("auto", "latest", "never")  # or the folder of a checkpoint
TURN_FIELDS = ("role", "content", "from", "value")
OLD_WARMUP = "schedule.warmup_steps"  # what schedule.warmup was called, in recipes, overrides and manifests
SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


def _number(value: object) -> object:
    """Return a string such as `2e-5`, which YAML 1.1 does not read as a number, as a float."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _no_bool(value: object) -> object:
    """Raise ValueError for YAML's true, which Python takes for 1; as a count it is a mistake."""
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


def _share(text: str) -> str | None:
    """Return a percentage below 100% in its shortest form, such as 2.5%, or None for any other text."""
    match = SHARE.fullmatch(text)
    share = Decimal(match[1]).normalize() if match else Decimal(100)
    return f"{share:f}%" if share < 100 else None


def _count_or_share(value: object) -> int | str:
    """Return a count as int and a share as a string such as 5%. Raises ValueError for anything else."""
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
        f"must be a count of steps such as 50, or a share of the run below 100% such as 5%, found {value!r}"
        + (f"; did you mean {near}?" if near else "")
    )


def _accept_old_warmup(json_schema: dict[str, Any]) -> None:
    """Let editors accept the old key, which is deprecated."""
    old_key = {"deprecated": True, "description": "Renamed to warmup.", "minimum": 0, "type": "integer"}
    json_schema["properties"]["warmup_steps"] = old_key


def _known_fields(fields: dict[str, str | None]) -> dict[str, str | None]:
    """Raise ValueError for a field that no form of rows has."""
    known = sorted({name for groups in FORMS.values() for group in groups for name in group} | {*TURN_FIELDS})
    for name in fields:
        if name not in known:
            raise ValueError(
                f"{name!r} is no field of a form{nearest(name, known) or '; they are ' + ', '.join(known)}"
            )
    return fields


Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Int = Annotated[int, BeforeValidator(_no_bool)]
Fields = Annotated[dict[str, str | None], AfterValidator(_known_fields)]
Warmup = Annotated[
    int | str,
    BeforeValidator(_count_or_share),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9]{1,2}(\.[0-9]+)?%$"}]}
    ),
]


class Group(BaseModel):
    """A group of keys. Unknown keys are errors, and values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)


class Model(Group):
    """Which model is trained, and how it is loaded."""

    name: str
    """A folder with config.json, or the id of a model on the Hugging Face hub."""
    revision: str | None = None
    """Commit, tag or branch of a hub model; null is its default branch."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model, which can do whatever you can. Off unless you have read it."""
    init: Literal["pretrained", "random"] = "pretrained"
    """pretrained loads the weights; random draws them from train.seed, by the model's config.json."""
    quantize: Literal["nf4"] | None = None
    """nf4 keeps the frozen base in 4 bits with double quantization (needs an adapter: QLoRA)."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """auto is sdpa, which isolates packed documents on every device."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: about a third more time, far less activation memory."""
    router_loss: Float | None = Field(None, ge=0)
    """Weight of the loss that spreads tokens over the experts of a mixture; null is the model's own
    (router_aux_loss_coef of its config.json), 0 is none."""
    add_tokens: list[Annotated[str, Field(min_length=1)]] = []
    """Tokens that the tokenizer gets beside its own, such as [<|note|>]: never split, and shown in answers. Their
    embeddings start as the mean of all others; with an adapter, the embedding and the output head are adapted too."""

    @field_validator("add_tokens")
    @classmethod
    def _each_once(cls, tokens: list[str]) -> list[str]:
        if twice := sorted({token for token in tokens if tokens.count(token) > 1}):
            raise ValueError(f"{twice[0]!r} is given twice; keep one")
        return tokens


class Adapter(Group):
    """Which adapter is trained instead of all weights."""

    method: Literal["none", "lora", "dora"] = "none"
    """none trains all weights; lora trains low-rank additions; dora these and each row's magnitude. QLoRA and QDoRA
    are these with model.quantize."""
    path: str | None = None
    """Folder, or id on the hub, of an adapter (safetensors) that training goes on with; its own settings hold."""
    r: Int = Field(16, ge=1)
    """Rank of each low-rank addition."""
    alpha: Float = Field(32.0, gt=0)
    """The addition is scaled by alpha / r."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead, which keeps large ranks from learning slowly."""
    dropout: Float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an adapter's input. Above 0 the gears no longer draw the same numbers."""
    targets: str | list[str] = "all-linear"
    """Modules to adapt: all-linear (every linear layer but the output head) or a list of names."""


class Source(Group):
    """One of several sources of data."""

    path: str
    """As data.path."""
    weight: Float | None = Field(None, gt=0)
    """Share of the rows of every step, relative to the other weights; null: all rows once an epoch. All or none."""
    split: str | None = None
    """As data.split, which is the default."""
    fields: Fields | None = None
    """As data.fields, which is the default."""


class Data(Group):
    """Which documents are trained, and how they are read."""

    path: Annotated[
        Annotated[str, Tag("path")] | Annotated[list[Source], Tag("list"), Field(min_length=1)],
        Discriminator(lambda value: "list" if isinstance(value, list) else "path"),
    ]
    """A .jsonl, .json, .parquet, .csv or .txt file, a folder or glob of them, a dataset saved by `datasets`, a hub
    dataset's id, or builtin:tasks; or a list of {path, weight, split, fields}."""
    split: str = "train"
    """Split of a hub or saved dataset; slices such as train[:5%] are allowed for hub datasets."""
    form: Literal["auto", "messages", "conversations", "instruction", "prompt", "text"] = "auto"
    """Form of the rows; auto tells it by their fields: messages (role, content), conversations (from, value),
    instruction (input, output), prompt (completion), text. Tool calls: tools beside messages or conversations."""
    fields: Fields = {}
    """Other names of fields, such as {instruction: question, output: answer}; null passes over a field."""
    roles: dict[str, Role] = {}
    """Other names of roles, such as {bot: assistant}."""
    chat_template: str | None = None
    """A file with a chat template (Jinja); null takes the tokenizer's own. It is saved with the model."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """Trained turns of a chat, with the end of each: the assistant's, the last of them, or all but tool results."""
    long: Literal["auto", "truncate", "split", "drop"] = "auto"
    """A document longer than a row: cut off its end, cut it into pieces, or drop it; auto splits text, cuts chats."""
    text_unit: Literal["paragraph", "line", "file"] = "paragraph"
    """What a document of a .txt file is; paragraphs are parted by blank lines."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """stop ends the run at the first row that cannot be used; skip leaves such rows out and lists them in the run."""
    packing: bool = True
    """Fill each row with several documents that cannot see each other; false: one a row, batches of similar length."""

    @property
    def sources(self) -> list[Source]:
        """All sources of data.path, each with its split and fields."""
        listed = [Source(path=self.path)] if isinstance(self.path, str) else self.path
        defaults = {"split": self.split, "fields": self.fields}
        return [s.model_copy(update={k: v for k, v in defaults.items() if getattr(s, k) is None}) for s in listed]

    @field_validator("path")
    @classmethod
    def _all_weighted_or_none(cls, path: str | list[Source]) -> str | list[Source]:
        weighted = [source.weight is not None for source in path] if isinstance(path, list) else []
        if any(weighted) and not all(weighted):
            raise ValueError("give a weight to every source or to none")
        return path


class Batch(Group):
    """The size of a step and of its rows."""

    rows: Int = Field(ge=1)
    """Rows of one optimizer step, over all devices. Accumulation is derived from it."""
    row_tokens: Int = Field(ge=8)
    """Tokens of a row; data.long says what becomes of a longer document."""
    micro_rows: Int = Field(1, ge=1)
    """Rows that one device holds in one forward pass: lower it when memory runs out; the result stays."""


class Optim(Group):
    """The optimizer."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = "adamw"
    """The others are bitsandbytes': 8bit keeps a byte a moment, paged moves the state out of a full GPU's memory."""
    lr: Float = Field(gt=0)
    """Peak learning rate."""
    betas: tuple[Annotated[Float, Field(ge=0, lt=1)], Annotated[Float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: Float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: Float = Field(0.0, ge=0)
    """Decoupled weight decay; biases, norms and DoRA's magnitudes are exempt."""
    max_grad_norm: Float = Field(1.0, ge=0)
    """Clip the gradient to this L2 norm over all weights; 0 does not clip."""
    master_weights: Literal["fp32", "bf16"] = "fp32"
    """Storage of the trainable weights between steps; bf16 saves 2 bytes a parameter and loses small updates."""


class Schedule(Group):
    """The learning rate over the steps of a run."""

    model_config = ConfigDict(json_schema_extra=_accept_old_warmup)

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up; cosine and linear end at 0."""
    warmup: Warmup = 0
    """Steps over which the learning rate rises from 0 to its peak: a count such as 50, or a share of the run, 5%."""

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the warm-up of a run of num_steps. A share is rounded up and leaves the run at least its last step."""
        if isinstance(self.warmup, int):
            return self.warmup
        share = Fraction(self.warmup.removesuffix("%")) / 100  # exact: 0.07 * 100 is above 7 in floating point
        return min(math.ceil(share * num_steps), num_steps - 1)


class Train(Group):
    """The length of a run, and its seed."""

    steps: Int | None = Field(None, ge=1)
    """Optimizer steps; give this or epochs."""
    epochs: Float | None = Field(None, gt=0)
    """Passes over the training rows; give this or steps."""
    seed: Int = Field(0, ge=0)
    """Draws the data order, random weights and adapters."""

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self


class Eval(Group):
    """What is evaluated, and when."""

    every: Int = Field(0, ge=0)
    """Steps between two evaluations; 0 evaluates only at the start and the end."""
    fraction: Float = Field(0.02, ge=0, lt=1)
    """Share of the documents held out, chosen by a hash of their content; 0 holds none out."""
    path: str | None = None
    """Documents to evaluate on, read like data.path, instead of a fraction; copies of them are not trained on."""
    samples: Int = Field(2, ge=0)
    """Held-out questions that are answered before and after the training, to be read."""
    sample_tokens: Int = Field(48, ge=1)
    """Longest sample answer, in tokens."""


class Save(Group):
    """When checkpoints are written, and how many are kept."""

    every: Int = Field(100, ge=0)
    """Steps between two checkpoints, and one at the end; 0 saves only when a signal ends the run."""
    keep: Int = Field(2, ge=2)
    """Newest checkpoints that are kept, beside the one with the lowest held-out loss."""
    stage: str | None = None
    """A folder on each machine's own disk where a rank's shard waits until it is written; null: the host's memory."""


class Run(Group):
    """The folder of a run, how it resumes and when it gives up."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder of the run below run.dir; null is <recipe>-<gear>, with -2, -3, ... where that is taken."""
    dir: str = "runs"
    """Folder that holds the runs."""
    rehearse: bool = False
    """Same architecture, two narrow layers, random weights, no network: for a laptop."""
    resume: str = "auto"
    """auto goes on with an unfinished run of that name; latest also with a finished one, for more steps; never starts
    anew; a checkpoint's folder starts a new run from it."""
    hang_timeout: Float = Field(600.0, gt=0)
    """Seconds without progress, after the first step, until each rank's stack is written and the run ends."""
    max_bad_steps: Int = Field(3, ge=1)
    """Steps in a row whose loss or gradient is not finite, all of them skipped, until the run ends."""


class Recipe(Group):
    """What to train: all groups of keys."""

    model: Model
    adapter: Adapter = Adapter()
    data: Data
    batch: Batch
    optim: Optim
    schedule: Schedule = Schedule()
    train: Train
    eval: Eval = Eval()
    save: Save = Save()
    run: Run = Run()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        steps, warmup = self.train.steps, self.schedule.warmup
        if steps is not None and isinstance(warmup, int) and warmup >= steps:
            raise ValueError(
                f"schedule.warmup: must be below train.steps ({steps}), found {warmup}; give fewer steps, or a share "
                "of the run such as 5%"
            )
        if self.train.epochs is not None and self.data.sources[0].weight is not None:
            raise ValueError("train.epochs: weighted sources end at different times: give train.steps instead")
        return self

    @property
    def method(self) -> str:
        """The method of training: full, lora, qlora, dora or qdora."""
        if self.adapter.method == "none":
            return "full"
        return f"q{self.adapter.method}" if self.model.quantize else self.adapter.method


def recipe_keys() -> list[str]:
    """Return every key of the schema as group.key."""
    return [f"{group}.{key}" for group, field in Recipe.model_fields.items() for key in keys_of_group(field.annotation)]


def keys_of_group(annotation: object) -> list[str]:
    """Return the keys of a group by its type, none for any other type."""
    return list(annotation.model_fields) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
