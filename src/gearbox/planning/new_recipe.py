"""Choose method, gear, row length and micro-batch of a recipe for a new model, by the plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gearbox import ROOT
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError
from gearbox.planning import strategy
from gearbox.planning.architecture import Architecture, Config
from gearbox.planning.gpus import Gpu, gpu_named
from gearbox.planning.layer_memory import NF4
from gearbox.planning.memory import predict
from gearbox.planning.strategy import METHODS, Machines, Option

CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
TITLES = {"full": "Full fine-tuning", "lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA", "qdora": "QDoRA"}
GEARS = ("single", "ddp", "zero1", "zero2", "fsdp", "zero3", "fsdp_offload", "zero3_offload")
"""Gears that run any family; others need a family whose matrices or layers they can divide."""
TERMS = {
    "weights": "Weights.",
    "gradients": "Gradients.",
    "optimizer": "Optimizer state.",
    "head": "Output head: a chunk of logits, and gradients.",
    "gathered": "Layers gathered from other GPUs.",
    "allowance": "CUDA, NCCL, and what the allocator cannot use.",
}
SHORTEST = 512  # tokens of a row
MOST_MICRO_ROWS = 8  # more rows in a pass are hardly faster
COUNT_TOLERANCE = 0.01  # between the closed form's number of weights and that of the model that transformers builds
STATE_SHARE = 0.5  # of a GPU's memory for weights and optimizer, if the family has no closed form
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
FROM_GGUF = "convert GGUF to safetensors, as src/fetch_smollm2.py does"
GPUS = re.compile(r"(\d{1,4})x(\S+)", re.IGNORECASE)


def parse_gpus(text: str) -> Machines:
    """Return the GPUs that a text such as 2x80GB or 8xH100 names. Raise UserError for any other text."""
    found = GPUS.fullmatch("".join(text.split()))
    if found is None or int(found[1]) == 0:
        raise UserError(f"--gpus: is {text[:40]!r}; write a count and a kind, such as 2x80GB or 8xH100")
    try:
        return machines_of(int(found[1]), gpu_named(found[2]))
    except UserError as error:
        raise UserError(f"--gpus: {str(error).removeprefix('--gpu: ')}") from None


def machines_of(count: int, gpu: Gpu) -> Machines:
    """Return GPUs as machines: more than eight are on machines of eight, if that divides them."""
    return Machines(gpu, 8, count // 8) if count > 8 and count % 8 == 0 else Machines(gpu, count)


def described(machines: Machines) -> str:
    """Return the GPUs in words, such as two 80 GB GPUs."""
    total = machines.total
    count = COUNTS[total] if total < len(COUNTS) else str(total)
    name = re.sub(r"^(\d+)GB$", r"\1 GB", machines.gpu.name, flags=re.IGNORECASE)
    return f"{count} {name} GPU{'s' if total > 1 else ''}"


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
    """The facts of a model and its tokenizer that its recipe depends on."""

    name: str
    config: Config
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
    """The method, gear and sizes that the plan decides."""

    method: str
    gear: str
    gpus: Machines
    micro_rows: int
    row_tokens: int
    checkpointing: str
    why: str
    """The reason for the method."""
    memory: tuple[tuple[int, str], ...]
    """Bytes of each GPU, and what they are for."""
    note: str = ""
    """A comment for the head of the recipe."""


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


def choose(facts: ModelFacts, like: Recipe, gpus: Machines, method: str | None, methods: tuple[str, ...]) -> Choice:
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
    try:
        shape = Architecture.of(facts.config)
    except UserError:
        shape = None
    why = "--method" if method else ""
    if shape is None or abs(shape.num_weights / facts.sizes.weights - 1) > COUNT_TOLERANCE:
        return _cautious(facts, like, gpus, methods, why)
    return _planned(facts, shape, like, gpus, methods, why)


def methods_from(method: str) -> tuple[str, ...]:
    """Return a method, and those that need less memory."""
    return (method, *METHODS[METHODS.index(method) + 1 :]) if method in METHODS else (method,)


def _planned(
    facts: ModelFacts, shape: Architecture, like: Recipe, gpus: Machines, methods: tuple[str, ...], why: str
) -> Choice:
    """Return the first choice that fits with room to spare: by row length, by method, without recomputing if possible.

    Gears that keep the optimizer in host memory are slow, and taken only for a method that the user asks for.
    """
    row_tokens, is_given = _row_tokens(facts, like), bool(why)
    needed: dict[str, int] = {}
    while row_tokens >= min(SHORTEST, like.batch.row_tokens, facts.positions or SHORTEST):
        for method in methods:
            for checkpointing in ("none", "full"):
                recipe = _candidate(facts, like, method, row_tokens, checkpointing)
                found, _ = strategy.options(shape, recipe, Path("recipe"), gpus)
                found = [one for one in found if one.gear.name in GEARS and (is_given or not one.gear.offload)]
                if found and found[0].prediction.peak_bytes <= strategy.ROOMY * gpus.gpu.memory:
                    first = next(
                        (f"{TITLES[one]} needs {_gb(size)} on each GPU" for one, size in needed.items()), "fits"
                    )
                    return _choice(found[0], shape, gpus, why or first)
                if found:
                    needed[method] = min(one.prediction.peak_bytes for one in found)
        row_tokens //= 2
    least = min(needed, key=lambda method: needed[method], default=methods[-1])
    raise UserError(
        f"--gpus: {TITLES[least]} of {facts.name!r} needs {_gb(needed.get(least, 0))} on each GPU, even with short "
        f"rows; give more or larger GPUs than {described(gpus)}"
    )


def _row_tokens(facts: ModelFacts, like: Recipe) -> int:
    return min(like.batch.row_tokens, facts.positions or like.batch.row_tokens)


def _candidate(facts: ModelFacts, like: Recipe, method: str, row_tokens: int, checkpointing: str) -> Recipe:
    """Return a recipe as the planner needs it."""
    recipe = strategy.with_method(like, method)
    recipe = strategy.with_values(recipe, "model", add_tokens=list(facts.added))
    recipe = strategy.with_values(recipe, "perf", checkpointing=checkpointing)
    if facts.adapter_rank is not None:
        recipe = strategy.with_values(recipe, "adapter", r=facts.adapter_rank)
    return strategy.with_values(recipe, "batch", row_tokens=row_tokens, micro_rows=1)


def _choice(option: Option, shape: Architecture, gpus: Machines, why: str) -> Choice:
    """Return the choice of a gear, with the largest power of two of rows in a pass that leaves room."""
    most = min(MOST_MICRO_ROWS, option.largest_micro_rows(shape))
    job, found = option.job, option.prediction
    rows = 2
    while rows <= most:
        larger = strategy.with_micro_rows(option.job, rows)
        prediction = predict(shape, larger)
        if prediction.peak_bytes > strategy.ROOMY * gpus.gpu.memory:
            break
        job, found, rows = larger, prediction, 2 * rows
    recipe = job.recipe
    texts = TERMS | {"activations": f"Activations of {recipe.batch.micro_rows} x {recipe.batch.row_tokens:,} tokens."}
    if option.method != "full":
        texts["weights"] = "Weights: the frozen ones" + (", with layers in NF4" * option.method.startswith("q"))
        texts["weights"] += ", and those of the adapter."
    return Choice(
        method=option.method,
        gear=option.gear.name,
        gpus=gpus,
        micro_rows=recipe.batch.micro_rows,
        row_tokens=recipe.batch.row_tokens,
        checkpointing=recipe.perf.checkpointing,
        why=why,
        memory=tuple((size, texts[term]) for term, size in found.terms.items()),
        note=f"The peak is reached in {found.moment}.",
    )


def _cautious(facts: ModelFacts, like: Recipe, gpus: Machines, methods: tuple[str, ...], why: str) -> Choice:
    """Return a choice whose weights and optimizer take at most half of a GPU, for a family without a closed form."""
    row_tokens = _row_tokens(facts, like)
    limit = gpus.gpu.memory * STATE_SHARE
    least = 0
    for method in methods:
        terms = _states(facts, method, like)
        total = sum(terms.values())
        for gear, parts in (("single", 1),) if gpus.total == 1 else (("ddp", 1), ("fsdp", gpus.total)):
            if total <= limit * parts:
                memory = tuple((round(size / parts), text) for text, size in terms.items())
                note = (
                    f"The family {facts.family} has no closed form. The rest of each GPU is left for activations, with "
                    "one row in a pass."
                )
                return Choice(method, gear, gpus, 1, row_tokens, "full", why or "fits", memory, note)
        least = round(total / gpus.total)
        why = why or f"{TITLES[method]} needs {_gb(least)} on each GPU for weights and optimizer"
    raise UserError(
        f"--gpus: {TITLES[methods[-1]]} of {facts.name!r} needs {_gb(least)} on each GPU for weights and optimizer, "
        f"and as much for activations; give more or larger GPUs than {described(gpus)}"
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
