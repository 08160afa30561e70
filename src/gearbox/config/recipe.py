"""Define the recipe, which decides what to train: every key with its type, default and unit.

`make schema` writes the editors' schema and the reference page from this module. Nothing here imports torch, so a
misspelt key is reported in well under a second.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from gearbox.config.old_keys import accepts
from gearbox.config.recipe_values import (
    ANSWERS,
    JUDGED,
    Fields,
    FilePath,
    Float,
    Group,
    Int,
    Metric,
    NonNegativeFloat,
    Optim,
    Paths,
    PositiveFloat,
    PositiveInt,
    Preference,
    Profile,
    Schedule,
    Source,
    Trackers,
    listed,
)
from gearbox.errors import shown

MAX_QUESTIONS = 256  # of a data set; more are not kept
BUILTIN_TASKS, BUILTIN_FORMS, BUILTIN_PREFERENCES = "builtin:tasks", "builtin:forms", "builtin:preferences"
BUILTIN = (BUILTIN_TASKS, BUILTIN_FORMS, BUILTIN_PREFERENCES)
LOCAL_ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".txt")
MAX_RECORD_BYTES = 16 * 2**20  # per document; tokenizing a larger one would take gigabytes
Role = Literal["system", "user", "assistant", "tool"]
RESUME = ("auto", "latest", "never")  # or a checkpoint folder
ONE_OF = ("train.steps", "train.epochs")  # on the command line, one of these replaces the other


class Model(Group):
    """The model to train, and how to load it."""

    model_config = ConfigDict(json_schema_extra=accepts("model"))

    name: FilePath
    """Folder with a config.json, or the id of a model on the Hugging Face Hub."""
    revision: str | None = None
    """Commit, tag or branch of a Hub model; `null` uses its default branch."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. It has all your permissions, so read it first."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` loads the weights; `random` draws them from `train.seed` for the architecture in config.json."""
    quantize: Literal["nf4"] | None = None
    """`nf4` stores the frozen base weights in 4 bits with double quantization; it needs an adapter (QLoRA)."""
    attention: Literal["auto", "documents", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation; `auto` uses `documents`, which computes nothing between packed documents, or else
    `sdpa` with a mask. `flash_attention_2` needs the package flash_attn, which is in no lock file nor in the image."""
    router_loss: NonNegativeFloat | None = None
    """Weight of the loss that spreads tokens over a mixture's experts; `null` uses router_aux_loss_coef from the
    model's config.json, and 0 disables the loss."""
    dropout: bool = False
    """Keep the dropout that the model's config.json asks for; gears then no longer draw the same random numbers."""
    add_tokens: list[Annotated[str, Field(min_length=1)]] = []
    """Tokens to add to the tokenizer, such as `[<|note|>]`; they are never split, and are shown in answers. Their
    embeddings start as the mean of all others. With an adapter, the embedding and the output head are adapted too."""

    @field_validator("add_tokens")
    @classmethod
    def _each_once(cls, tokens: list[str]) -> list[str]:
        if twice := sorted({token for token in tokens if tokens.count(token) > 1}):
            raise ValueError(f"duplicate token {twice[0]!r}; keep one")
        return tokens


class Adapter(Group):
    """The adapter to train instead of all weights."""

    method: Literal["none", "lora", "dora"] = "none"
    """`none` trains all weights; `lora` trains low-rank additions; `dora` trains these and each row's magnitude. With
    `model.quantize`, the methods are QLoRA and QDoRA."""
    path: FilePath | None = None
    """Folder or Hub id of a saved adapter (safetensors) to continue training, with its saved settings."""
    r: Int = Field(16, ge=1)
    """Rank of each low-rank addition."""
    alpha: Float = Field(32.0, gt=0)
    """Scale of the low-rank addition, which is multiplied by alpha / r."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead, so that large ranks do not learn slowly."""
    dropout: Float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an adapter's input; above 0, gears no longer draw the same random numbers."""
    targets: str | list[str] = "all-linear"
    """Modules to adapt: `all-linear` (every linear layer except the output head), or a list of names."""

    @field_validator("targets")
    @classmethod
    def _no_other_spelling(cls, targets: str | list[str]) -> str | list[str]:
        if isinstance(targets, str) and targets.lower() == "all":
            raise ValueError("is 'all'; use all-linear")
        if isinstance(targets, str) and "," in targets and re.fullmatch(r"[\w., -]+", targets):
            names = ", ".join(part.strip() for part in targets.split(",") if part.strip())
            raise ValueError(f"is {shown(targets)}; write a list: [{names}]")
        return targets


class Data(Group):
    """The documents to train on, and how to read them."""

    path: Paths
    """File (.jsonl, .json, .parquet, .csv, .txt), folder or glob of files, dataset saved by `datasets`, Hub dataset
    id, or built-in data: `builtin:tasks`, `builtin:forms` or `builtin:preferences`. A list such as `[a.jsonl, b.jsonl]`
    mixes several; an item may also be `{path, weight, split, fields}`. Also the folder or URL of shards that
    src/prepare.py wrote."""
    split: str = "train"
    """Split of a Hub or saved dataset; Hub datasets also take slices such as `train[:5%]`."""
    form: Literal["auto", "messages", "conversations", "instruction", "prompt", "text", "preference", "label"] = "auto"
    """Format of the records: messages (role, content), conversations (from, value), instruction (input, output), prompt
    (completion) or text; preference (chosen, rejected) or label for `train.objective`. `auto` detects it from their
    fields. Chats with tool calls also have a `tools` field."""
    fields: Fields = {}
    """Names of your fields, such as `{instruction: question, output: answer}`; `null` ignores a field."""
    roles: dict[str, Role] = {}
    """Roles to rename, such as `{bot: assistant}`."""
    chat_template: FilePath | None = None
    """File with a chat template (Jinja), saved with the model; `null` uses the tokenizer's template."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """Chat turns to train on, with the end of each turn: all assistant turns, the `last` assistant turn, or `all` turns
    except tool results."""
    supervise_supplied: bool = False
    """Also train on what the template writes after the head of an answer in the prompt, such as an empty think block.
    It is not trained by default, because the template writes it at generation too."""
    long: Literal["auto", "truncate", "split", "drop"] = "auto"
    """Treatment of a document longer than a row: cut off its end, split it into pieces, or drop it; `auto` splits text
    and truncates chats."""
    text_unit: Literal["paragraph", "line", "file"] = "paragraph"
    """Unit of a .txt file that is one document; paragraphs are separated by blank lines."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """`stop` ends the run at the first unusable record; `skip` leaves such records out and lists them in the run
    folder."""
    packing: bool = True
    """Fill each row with several documents, isolated from each other; `false` puts one document in each row and batches
    documents of similar length."""
    shuffle_shards: PositiveInt = 4
    """Prepared shards whose rows are shuffled together; each epoch also shuffles the shards. Twice as many are needed
    on the machine at the same time."""
    cache_gb: PositiveFloat | None = None
    """Gigabytes (10^9 bytes) of prepared shards from a URL that each machine's cache may have; `null` keeps all."""

    @property
    def sources(self) -> list[Source]:
        """The sources in data.path, each with its split and fields."""
        defaults = {"split": self.split, "fields": self.fields}
        return [
            source.model_copy(update={key: value for key, value in defaults.items() if getattr(source, key) is None})
            for source in listed(self.path)
        ]

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
    """Rows per optimizer step, over all devices; the accumulation steps are derived from this."""
    row_tokens: Int = Field(ge=8)
    """Tokens per row; `data.long` sets the treatment of longer documents."""
    micro_rows: Int = Field(1, ge=1)
    """Rows per device in one forward pass; lower it if memory runs out, as the result does not change."""


class Train(Group):
    """The objective of a run, its length and its seed."""

    objective: Literal["sft", "dpo", "ipo", "simpo", "orpo", "kto", "distil"] = "sft"
    """Learn given answers (`sft`), which of two answers is better (`dpo`, `ipo`, `simpo`, `orpo`), which answers are
    good (`kto`), or a teacher's probabilities (`distil`)."""
    teacher: FilePath | None = None
    """Folder with a teacher's probabilities of these documents, which src/teach.py wrote, for `distil`."""
    steps: PositiveInt | None = None
    """Number of optimizer steps; set this or `epochs`."""
    epochs: PositiveFloat | None = None
    """Number of epochs over the training rows; set this or `steps`. The last step has only the rows that are left."""
    seed: Int = Field(0, ge=0)
    """Seed of the data order, random weights and adapters."""

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self


class Eval(Group):
    """The held-out documents, and when to evaluate on them."""

    every: Int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    fraction: Float = Field(0.02, ge=0, lt=1)
    """Share of the documents to hold out, chosen by a hash of their content; 0 holds out none."""
    path: Paths | None = None
    """Documents to evaluate on instead of a fraction, read like `data.path` but without weights; copies of these are
    not trained on."""
    samples: Int = Field(2, ge=0)
    """Number of held-out questions to answer at each evaluation, for you to read in `answers.jsonl`. With
    `data.supervise: all` there are none."""
    prompts: list[Annotated[str, Field(min_length=1)]] = []
    """Questions of your own to answer at each evaluation, such as `["reverse abcd"]`."""
    sample_tokens: Int = Field(48, ge=1)
    """Maximum length of an answer, in tokens."""
    metric: Metric | None = None
    """Score of answers to held-out questions: `exact_match`, or `path.py:function` for your own function. It takes the
    texts question, answer and expected, and returns a number; higher is better."""
    metric_documents: Int = Field(64, ge=1, le=MAX_QUESTIONS)
    """Number of held-out documents whose answers the metric scores."""
    patience: PositiveInt | None = None
    """Evaluations without a new best before the run ends early; `null` never ends it. The best has the highest
    metric, or the lowest held-out loss without a metric."""

    @property
    def holds_out(self) -> bool:
        """True if documents are held out."""
        return self.path is not None or self.fraction > 0

    @property
    def num_questions(self) -> int:
        """The number of held-out questions to answer."""
        return max(self.samples, self.metric_documents if self.metric else 0)

    @field_validator("path")
    @classmethod
    def _no_weights(cls, path: str | list[Source] | None) -> str | list[Source] | None:
        if path is not None and any(source.weight is not None for source in listed(path)):
            raise ValueError("every document counts once in an evaluation; remove weight")
        return path


class Save(Group):
    """The checkpoints to write, and how many to keep."""

    every: Int = Field(100, ge=0)
    """Steps between checkpoints, with one more at the end; 0 saves only when a signal ends the run."""
    keep: Int = Field(2, ge=2)
    """Number of newest checkpoints to keep, in addition to the best: the one with the lowest held-out loss, or of
    `save.best`."""
    best: bool = False
    """Also write a checkpoint at each new best evaluation and at the end, and save the best as the run's model. The
    best is that of `eval.patience`."""
    stage: FilePath | None = None
    """Folder on each machine's local disk where a rank's shard waits to be written; `null` uses host memory."""


class Run(Group):
    """The run folder, how to resume, and when to stop."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Folder of the run in `run.dir`; `null` joins the names of recipe and gear, such as `tiny-fsdp`, or `tiny-fsdp-2`
    if that is taken."""
    dir: FilePath = "runs"
    """Folder that contains the runs."""
    rehearse: bool = False
    """Train a small stand-in without network: the same architecture with a few narrow layers and random weights. Rows,
    tokens per row and steps are few too, apart from those that the command line gives."""
    resume: FilePath = "auto"
    """`auto` resumes an unfinished run of that name; `latest` also resumes a finished run, for more steps. `never`
    starts from scratch; a checkpoint folder starts a new run from that checkpoint."""
    hang_timeout: Float = Field(600.0, gt=0)
    """Seconds without progress, after the first step, before every rank writes its stack and the run ends."""
    max_bad_steps: Int = Field(3, ge=1)
    """Number of consecutive steps with a non-finite loss or gradient, each skipped, before the run ends."""
    log_every: PositiveInt = 10
    """Steps between two lines on a screen that is not a terminal, where the first and the last step always have one."""
    profile: Profile | None = None
    """Steps to record operation by operation, such as `{steps: [10, 13]}`, in the run's folder `profile`; they are
    slower than others. `null` records none."""
    memory_snapshot: bool = False
    """Record who allocated each block of GPU memory in the profiled steps, or in the first steps without `profile`."""
    trackers: Trackers = ["tensorboard"]
    """Trackers that get the numbers of each step: any of tensorboard, wandb, mlflow, trackio, comet and swanlab; `[]`
    uses none. Packages other than tensorboard must be installed."""


class Perf(Group):
    """Speed and memory. Without dropout, only `float8` and `ddp_compression` change results beyond rounding."""

    kernels: Literal["auto", "liger", "none"] = "auto"
    """Implementation of norms, activations and adapters: Gearbox's own where they know the family, Liger's kernels for
    GPUs, or `none`, the family's own modules."""
    compile: bool = False
    """Compile each layer with torch.compile at the first step."""
    checkpointing: Literal["none", "selective", "full", "offload"] = "none"
    """Activations to recompute in the backward pass. `selective` keeps matrix products and attention, and `full` only
    the input of each layer; `offload` also moves that input to host memory."""
    prefetch: PositiveInt = 1
    """Layers whose weights FSDP2 gathers ahead of the one that computes; each holds its full weights for longer."""
    float8: bool = False
    """Multiply matrices in 8-bit floating point (torchao), which rounds more; it needs a GPU of compute capability 8.9
    and full fine-tuning."""
    pass_tokens: PositiveInt | None = None
    """Tokens of packed documents in one forward and backward pass, under single and ddp: a row is divided between
    documents, and needs less memory. `null` is 256 for adapters on a CPU, else complete rows."""
    ddp_compression: Literal["none", "bf16"] = "none"
    """`bf16` sends DDP's gradients in half the bytes, rounded."""


class Recipe(Group):
    """A recipe: the groups of keys that describe what to train."""

    model: Model
    adapter: Adapter = Adapter()
    data: Data
    batch: Batch
    optim: Optim
    schedule: Schedule = Schedule()
    train: Train
    preference: Preference = Preference()
    eval: Eval = Eval()
    save: Save = Save()
    perf: Perf = Perf()
    run: Run = Run()
    _given: frozenset[str] = PrivateAttr(frozenset())

    def model_post_init(self, context: frozenset[str] | None) -> None:
        """Keep the context of the validation: the keys that the command line gives."""
        self._given = frozenset(context or ())

    @property
    def given(self) -> frozenset[str]:
        """The keys that the command line gives."""
        return self._given

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if not self.run.rehearse:
            self.schedule.check(self.train.steps)
        if self.train.epochs is not None and self.data.sources[0].weight is not None:
            raise ValueError("train.epochs: weighted sources end at different times; give train.steps instead")
        needs = {"eval.metric": self.eval.metric, "eval.patience": self.eval.patience, "save.best": self.save.best}
        for key in filter(needs.get, needs):
            if not self.eval.holds_out:
                raise ValueError(f"{key}: needs held-out documents; set eval.fraction or eval.path")
            if key != "eval.metric" and not self.eval.every:
                raise ValueError(f"{key}: compares the evaluations of a run, and eval.every is 0; set eval.every")
        self._check_objective()
        if self.eval.metric and self.data.supervise == "all":
            raise ValueError(
                "eval.metric: data.supervise=all trains questions too; set data.supervise=assistant, or "
                "remove eval.metric"
            )
        return self

    def _check_objective(self) -> None:
        """Raise ValueError for data that the objective cannot train on."""
        objective, form = self.train.objective, self.data.form
        if form not in ("auto", *self.forms):
            wanted = " or ".join(self.forms) if objective in JUDGED else "a format without a judgement"
            raise ValueError(f"data.form: is {form}, but train.objective={objective} needs {wanted}")
        if (objective == "distil") != (self.train.teacher is not None):
            fix = "set train.teacher" if objective == "distil" else "remove it, or set train.objective=distil"
            raise ValueError(f"train.teacher: belongs to train.objective=distil; {fix}")
        if objective in JUDGED and self.data.supervise == "all":
            raise ValueError("data.supervise: all trains prompts too, and answers are compared; use assistant")
        if objective in JUDGED and self.data.long == "split":
            raise ValueError("data.long: answers that are compared are not split; use truncate or drop")

    @property
    def forms(self) -> tuple[str, ...]:
        """The formats of records that the objective can train on."""
        return JUDGED.get(self.train.objective, ANSWERS)

    @property
    def compares(self) -> bool:
        """True if the objective compares answers."""
        return self.train.objective in JUDGED

    @property
    def adapts_all(self) -> bool:
        """True if an adapter is on every linear layer, and on the experts of a mixture."""
        return self.adapter.method != "none" and self.adapter.targets == "all-linear"

    @property
    def method(self) -> str:
        """The training method: full, lora, qlora, dora or qdora."""
        if self.adapter.method == "none":
            return "full"
        return f"q{self.adapter.method}" if self.model.quantize else self.adapter.method
