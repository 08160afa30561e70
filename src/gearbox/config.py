"""The recipe: what to train. Every key, its type, its default and its unit stand here, once.

Nothing here imports torch, so a misspelt key is reported in well under a second.
"""

from __future__ import annotations

import difflib
import json
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

DEFAULT_RECIPE = Path("recipes/tiny.yaml")
ROOT = Path(__file__).resolve().parents[2]
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


class UserError(Exception):
    """A mistake that the user can mend. Its text is shown as it is, without a traceback."""


def _number(value: Any) -> Any:
    """YAML 1.1 reads `2e-5` as a string; here it is a number, as everywhere else."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _no_bool(value: Any) -> Any:
    """YAML's true is Python's 1; as a count it is a mistake."""
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


def _known_fields(fields: dict[str, str | None]) -> dict[str, str | None]:
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


class Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)


class Model(Group):
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
    path: str
    """As data.path."""
    weight: Float | None = Field(None, gt=0)
    """Share of the rows of every step, relative to the other weights; null: all rows once an epoch. All or none."""
    split: str | None = None
    """As data.split, which is the default."""
    fields: Fields | None = None
    """As data.fields, which is the default."""


class Data(Group):
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
        """data.path as a list, each with its split and fields."""
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
    rows: Int = Field(ge=1)
    """Rows of one optimizer step, over all devices. Accumulation is derived from it."""
    row_tokens: Int = Field(ge=8)
    """Tokens of a row; data.long says what becomes of a longer document."""
    micro_rows: Int = Field(1, ge=1)
    """Rows that one device holds in one forward pass: lower it when memory runs out; the result stays."""


class Optim(Group):
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
    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up; cosine and linear end at 0."""
    warmup_steps: Int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0 to its peak."""


class Train(Group):
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
    every: Int = Field(100, ge=0)
    """Steps between two checkpoints, and one at the end; 0 saves only when a signal ends the run."""
    keep: Int = Field(2, ge=2)
    """Newest checkpoints that are kept, beside the one with the lowest held-out loss."""
    stage: str | None = None
    """A folder on each machine's own disk where a rank's shard waits until it is written; null: the host's memory."""


class Run(Group):
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
        path = self.adapter.path
        if path is not None and Path(path).is_dir():
            self = self.model_copy(update={"adapter": continued(self.adapter, Path(path))})
        elif path is not None and self.adapter.method == "none":
            raise ValueError(
                f"adapter.path: {path!r} is no folder here; for an adapter of the hub give adapter.method too, lora or "
                "dora"
            )
        if self.model.quantize and self.adapter.method == "none":
            raise ValueError("model.quantize freezes the weights: set adapter.method: lora, or quantize: null")
        if self.train.steps is not None and self.schedule.warmup_steps >= self.train.steps:
            raise ValueError(
                f"schedule.warmup_steps ({self.schedule.warmup_steps}) must be below train.steps ({self.train.steps})"
            )
        if self.train.epochs is not None and self.data.sources[0].weight is not None:
            raise ValueError("train.epochs: weighted sources end at different times: give train.steps instead")
        return self

    @property
    def method(self) -> str:
        """full, lora, qlora, dora or qdora."""
        if self.adapter.method == "none":
            return "full"
        return f"q{self.adapter.method}" if self.model.quantize else self.adapter.method


# Keys of PEFT's adapter_config.json: those that a recipe has too, those that PEFT goes by where it puts the adapter
# into the model, and notes. Any other must be empty, else it is an adapter of another kind.
PEFT_KEYS = {
    "r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_rslora": "rslora", "target_modules": "targets",
}  # fmt: skip
PEFT_PLACES = "rank_pattern alpha_pattern exclude_modules layers_to_transform layers_pattern fan_in_fan_out".split()
PEFT_NOTES = """
    peft_type use_dora task_type auto_mapping peft_version base_model_name_or_path revision inference_mode
    init_lora_weights qalora_group_size megatron_core
""".split()


def continued(adapter: Adapter, folder: Path) -> Adapter:
    """The adapter with the settings of the one in `folder`; of its own, only the dropout may differ.

    Raises ValueError where it cannot be trained here, or where the recipe gives another value.
    """
    where = f"adapter.path: {str(folder)!r}"
    try:
        found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        kind = found["peft_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{where} holds no adapter: there is no adapter_config.json of PEFT") from None
    if not (folder / "adapter_model.safetensors").is_file():
        raise ValueError(f"{where} holds no adapter_model.safetensors, and pickled weights could run code")
    if kind != "LORA":
        raise ValueError(f"{where} is of the kind {kind}; only LoRA and DoRA can be gone on with")
    known = [*PEFT_KEYS, *PEFT_PLACES, *PEFT_NOTES]
    others = [key for key, value in found.items() if key not in known and value not in (None, False, "none", [], {})]
    if found.get("init_lora_weights", True) not in (True, False, "gaussian"):
        others.append("init_lora_weights")  # PiSSA and its kin change the weights below the adapter too
    if others:
        raise ValueError(
            f"{where} has {others[0]}: {found[others[0]]!r}, which cannot be trained here; merge it into its model, "
            "give that as model.name, and train a new adapter"
        )
    holds = {"method": "dora" if found.get("use_dora") else "lora"}
    holds |= {ours: found[theirs] for theirs, ours in PEFT_KEYS.items() if theirs in found}
    given = {key: getattr(adapter, key) for key in holds if key in adapter.model_fields_set}
    for key, value in given.items():
        are_lists = isinstance(value, list) and isinstance(holds[key], list)
        if are_lists and sorted(value) == sorted(holds[key]):
            continue
        if key == "dropout" or (key, value) == ("targets", "all-linear"):  # which these are, the model will say
            holds[key] = value
        elif value != holds[key]:
            raise ValueError(
                f"adapter.{key}: is {value!r}, but {holds[key]!r} in {folder}, which holds; take the key out"
            )
    return adapter.model_copy(update=holds)


def accumulation(rows: int, data_parallel: int, micro_rows: int) -> tuple[int, int]:
    """(micro batches a rank runs in a step, rows in each); the last round may be filled with empty rows."""
    micro_rows = min(micro_rows, -(-rows // data_parallel))
    return -(-rows // (data_parallel * micro_rows)), micro_rows


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError for unreadable files, bad YAML and repeated keys."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            seen = set()
            for key_node, _ in node.value:
                if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                    line = key_node.start_mark.line + 1
                    raise UserError(f"{path}:{line}: {key_node.value!r} is given twice; keep one")
                seen.add(str(key_node.value))
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
        raise UserError(f"{path}: there is no such file{_did_you_mean(near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a mapping of groups, such as `model:`, found {type(content).__name__}")
    return content


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """The recipe at `path` with `key.sub=value` overrides. Raises UserError naming every problem at once."""
    content = read_yaml(path)
    problems: list[str] = []
    for override in overrides or []:
        key, equals, text = override.partition("=")
        *groups, last = key.split(".")
        if not equals or not groups:
            problems.append(f"{override!r}: an override is written group.key=value, such as optim.lr=1e-5")
            continue
        target = content
        for group in groups:
            if not isinstance(target.get(group), dict):
                target[group] = {}
            target = target[group]
        try:
            target[last] = yaml.safe_load(text)
        except yaml.YAMLError:
            target[last] = text
    recipe = None
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        problems += [_explain(item) for item in error.errors()]
    if recipe is not None:
        problems += _missing_files(recipe)
    if problems or recipe is None:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return recipe


def _missing_files(recipe: Recipe) -> list[str]:
    """What looks like a local path must be there; a name such as `org/model` is left to the hub."""
    problems = []
    name = recipe.model.name
    looks_local = name.startswith((".", "/", "~", "models/", "recipes/", "runs/"))
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            problems.append(f"model.name: the folder {name!r} holds no config.json")
    elif looks_local or name.count("/") > 1:
        hint = "; `make smollm2` makes it" if name == "models/smollm2-135m" else ""
        problems.append(
            f"model.name: there is no folder {name!r}{hint or '; give a folder or a hub id such as org/model'}"
        )
    for path in [source.path for source in recipe.data.sources]:
        problems += _missing_data("data.path", path)
    if recipe.eval.path is not None:
        problems += _missing_data("eval.path", recipe.eval.path)
    resume = recipe.run.resume
    if resume not in RESUME and not (Path(resume) / "manifest.json").is_file():
        problems.append(f"run.resume: {resume!r} is none of {', '.join(RESUME)}, nor a checkpoint's folder")
    if recipe.data.chat_template is not None and not Path(recipe.data.chat_template).is_file():
        problems.append(f"data.chat_template: there is no file {recipe.data.chat_template!r}")
    return problems if not recipe.run.rehearse else [p for p in problems if not p.startswith("model.")]


def _missing_data(key: str, path: str) -> list[str]:
    if path == BUILTIN_TASKS or matches(path):
        return []
    if path.startswith("builtin:"):
        return [f"{key}: {path!r} is unknown; the only built-in data is {BUILTIN_TASKS}"]
    if any(letter in path for letter in "*?["):
        return [f"{key}: no file matches {path!r}"]
    if is_local(path) or path.count("/") > 1:
        return [f"{key}: there is no file {path!r}"]
    return []


def matches(path: str) -> list[Path]:
    """The file or folder of that name, or what a glob finds, sorted."""
    expanded = Path(path).expanduser()
    return [expanded] if expanded.exists() else [Path(p) for p in sorted(glob(str(expanded), recursive=True))]  # noqa: PTH207  of any root


def is_local(path: str) -> bool:
    """Whether data.path speaks of this machine, and not of the hub."""
    return (
        path == BUILTIN_TASKS or path.endswith(LOCAL_ENDINGS) or path.startswith((".", "/", "~")) or bool(matches(path))
    )


def recipe_keys() -> list[str]:
    """Every key of the schema as group.key."""
    return [f"{group}.{key}" for group, field in Recipe.model_fields.items() for key in _fields(field.annotation)]


def _fields(annotation: Any) -> list[str]:
    return list(annotation.model_fields) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _did_you_mean(near: list[str]) -> str:
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean 'lr'?`, or an empty string where nothing is near."""
    return _did_you_mean(difflib.get_close_matches(word, known, 1, 0.6))


def _explain(item: Any) -> str:
    location = [str(part) for part in item["loc"] if isinstance(part, str | int)]
    in_source = location[:3] == ["data", "path", "list"]
    if location[:2] == ["data", "path"]:
        del location[2:3]  # the name of the alternative, which the user has not written
    key, found = ".".join(location), item["input"]
    if item["type"] == "extra_forbidden":
        name = location[-1]
        exact = [known for known in recipe_keys() if known.endswith(f".{name}")]
        group = Source if in_source else Recipe if len(location) == 1 else Recipe.model_fields[location[0]].annotation
        siblings = _fields(group)
        return f"{key}: there is no such key{_did_you_mean(exact) or nearest(name, siblings)}"
    if item["type"] == "missing":
        return f"{key}: is required"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message[0].lower()}{message[1:]}, found {found!r}"
