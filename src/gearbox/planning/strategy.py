"""Choose a gear: which gears run a recipe on these GPUs, which fit, how large a micro-batch may be, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gearbox.config.gear import Gear, gear_names, gear_path, load_gear
from gearbox.config.job import Job
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError
from gearbox.planning.architecture import Architecture
from gearbox.planning.cost import MFU, Cost, cost_of_step
from gearbox.planning.gpus import GIB, Gpu
from gearbox.planning.memory import Prediction, predict

ROOMY = 0.9  # share of the memory below which a plan leaves room for what it cannot know
METHODS = ("full", "lora", "qlora")
METHOD_NAMES = {"full": "full fine-tuning", "lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA", "qdora": "QDoRA"}


@dataclass(frozen=True)
class Machines:
    """The GPUs to plan for."""

    gpu: Gpu
    num_gpus: int
    """GPUs of each machine."""
    num_machines: int = 1
    mfu: float = MFU
    price: float | None = None
    """Price of a GPU for an hour, None if it is unknown."""

    @property
    def total(self) -> int:
        """The number of all GPUs."""
        return self.num_gpus * self.num_machines

    def describe(self) -> str:
        """Return the GPUs in words, such as 2 machines of 8 x H100 (79.6 GiB)."""
        gpus = f"{self.num_gpus} x {self.gpu.name} ({self.gpu.memory / GIB:.1f} GiB)"
        return gpus if self.num_machines == 1 else f"{self.num_machines} machines of {gpus}"


@dataclass(frozen=True)
class Option:
    """A gear and a method for a recipe, on these GPUs."""

    job: Job
    prediction: Prediction
    cost: Cost
    machines: Machines

    @property
    def gear(self) -> Gear:
        """The gear."""
        return self.job.gear

    @property
    def method(self) -> str:
        """The training method."""
        return self.job.recipe.method

    @property
    def fits(self) -> bool:
        """True if a GPU has the memory."""
        return self.prediction.peak_bytes <= self.memory

    @property
    def memory(self) -> int:
        """Bytes of a GPU."""
        return self.machines.gpu.memory

    @property
    def host_bytes(self) -> float:
        """Bytes that a machine needs in host memory, apart from Python, its libraries and the mapped files."""
        return self.prediction.host_bytes / self.machines.num_machines

    @property
    def run_seconds(self) -> float | None:
        """The time of all steps, None if it or their number is unknown."""
        steps = self.job.recipe.train.steps
        return None if steps is None or self.cost.seconds is None else steps * self.cost.seconds

    @property
    def price(self) -> float | None:
        """The price of all steps, None if it is unknown."""
        price, seconds = self.machines.price, self.run_seconds
        return None if price is None or seconds is None else price * self.machines.total * seconds / 3600

    def largest_micro_rows(self, shape: Architecture) -> int:
        """Return the most rows of a micro-batch that fit, 0 if not even one does."""
        most = -(-self.job.recipe.batch.rows // self.gear.data_parallel)
        low, high = 0, most
        while low < high:  # memory grows with the rows
            rows = (low + high + 1) // 2
            fits = predict(shape, with_micro_rows(self.job, rows)).peak_bytes <= self.memory
            low, high = (rows, high) if fits else (low, rows - 1)
        return low


def with_micro_rows(job: Job, rows: int) -> Job:
    """Return the job with another number of rows in a micro-batch."""
    recipe = with_values(job.recipe, "batch", micro_rows=rows)
    batch = type(job.batch).divide(recipe.batch.rows, job.gear.data_parallel, rows)
    return replace(job, recipe=recipe, batch=batch)


def with_values(recipe: Recipe, group: str, **values: object) -> Recipe:
    """Return the recipe with other values in one group."""
    return recipe.model_copy(update={group: getattr(recipe, group).model_copy(update=values)})


def with_method(recipe: Recipe, method: str) -> Recipe:
    """Return the recipe with another training method."""
    if recipe.method == method:
        return recipe
    recipe = with_values(recipe, "adapter", method="none" if method == "full" else method.removeprefix("q"), path=None)
    return with_values(recipe, "model", quantize="nf4" if method.startswith("q") else None)


def gear_for(name: str, machines: Machines) -> Gear:
    """Return a gear with as many ranks as there are GPUs. Raise UserError if its degrees do not divide them."""
    flags = {} if name == "single" else {"num_processes": str(machines.total)}
    if name == "hsdp":
        flags["parallelism_config_dp_replicate_size"] = str(max(2, machines.num_machines))
    return load_gear(gear_path(name), flags)


def job_of(name: str, recipe: Recipe, recipe_path: Path, machines: Machines) -> Job:
    """Return the job of a recipe under a gear on all GPUs. Raise UserError if it cannot run."""
    gear = gear_for(name, machines)
    if gear.num_processes != machines.total:
        raise UserError(f"{gear.path}: uses 1 of {machines.total} GPUs")
    if gear.num_processes == 1 and name != "single":
        raise UserError(f"{gear.path}: one GPU shares with no other")
    return Job.of(recipe_path, recipe, gear)


def without_place(error: UserError) -> str:
    """Return the first line of an error, without the file that it names."""
    return str(error).splitlines()[0].partition(": ")[2]


def options(
    shape: Architecture, recipe: Recipe, recipe_path: Path, machines: Machines
) -> tuple[list[Option], dict[str, str]]:
    """Return each gear that can run the recipe on all GPUs, those that fit first, and why the others cannot run it."""
    found, refused = [], {}
    for name in gear_names():
        try:
            job = job_of(name, recipe, recipe_path, machines)
            check_shapes(shape, job.gear)
        except UserError as error:
            refused[name] = without_place(error)
            continue
        cost = cost_of_step(shape, job, machines.gpu, machines.num_machines, machines.mfu)
        found.append(Option(job, predict(shape, job), cost, machines))
    return sorted(found, key=_rank), refused


def _rank(option: Option) -> tuple[bool, bool, bool, float, float, int]:
    """Return what orders options: those that fit first, without offload, with room, then by time, then the simplest."""
    return (
        not option.fits,
        option.gear.offload is not None,
        option.prediction.peak_bytes > ROOMY * option.memory,
        float(f"{option.cost.seconds or 0:.2g}"),
        0 if option.fits else option.prediction.peak_bytes,
        SIMPLEST.index(option.gear.name) if option.gear.name in SIMPLEST else len(SIMPLEST),
    )


def check_shapes(shape: Architecture, gear: Gear) -> None:
    """Raise UserError if the gear cannot divide the layers, the experts or the heads of a model."""
    if gear.degree("pp") > shape.num_layers:
        raise UserError(f"{gear.path}: {gear.degree('pp')} stages, but the model has {shape.num_layers} layers")
    num_experts = shape.experts.count if shape.experts else 0
    if gear.degree("ep") > 1 and not num_experts:
        raise UserError(f"{gear.path}: the model has no experts to divide")
    if num_experts % (gear.num_processes if gear.degree("ep") > 1 else 1):
        raise UserError(f"{gear.path}: {gear.num_processes} ranks cannot divide {num_experts} experts")
    tp, sp = gear.degree("tp"), gear.degree("sp")
    if shape.heads % tp or shape.key_heads % tp:
        raise UserError(f"{gear.path}: tp={tp} does not divide {shape.heads} heads and {shape.key_heads} key heads")
    if shape.heads % sp or (shape.key_heads % sp and sp % shape.key_heads):
        raise UserError(f"{gear.path}: sp={sp} does not divide {shape.heads} heads and {shape.key_heads} key heads")


SIMPLEST = ("single", "ddp", "zero1", "zero2", "fsdp", "zero3", "hsdp", "tp", "fsdp_tp", "ep", "pp", "ring", "ulysses")
"""Gears that are equally fast, in the order of preference: those that exchange less and need fewer settings first."""
WHY = {
    "single": "it fits on one GPU, so there is nothing to exchange",
    "ddp": "the model fits on each GPU; only gradients are exchanged, once per step",
    "zero1": "the weights fit on each GPU, and the optimizer state does not; only that is sharded",
    "zero2": "the weights fit on each GPU, and gradients with optimizer state do not; only these are sharded",
    "fsdp": "the model does not fit on one GPU; each holds a part of it, and gathers a layer at a time",
    "zero3": "the model does not fit on one GPU; each holds a part of it, and gathers a layer at a time",
    "hsdp": "each machine holds one copy of the model, so that only gradients cross the slower network",
    "tp": "each GPU computes a part of each matrix, which also divides the activations",
    "fsdp_tp": "GPUs divide each matrix, and share those parts with other groups",
    "ep": "each GPU holds some of the experts, and sends tokens to them instead of gathering experts",
    "pp": "each GPU holds some of the layers, and sends only hidden states",
    "ulysses": "rows are too long for one GPU, so that GPUs divide the tokens of each row",
    "ring": "rows are too long for one GPU, so that GPUs divide the tokens of each row",
}


def reason(option: Option, found: list[Option]) -> str:
    """Return in words why an option is the cheapest."""
    if option.gear.offload:
        needed = f"{option.host_bytes / GIB:,.0f} GiB"
        return (
            "all GPUs together are too small, so that weights or optimizer state wait in host memory; "
            f"it is slow: each machine needs {needed} of it"
        )
    if option.gear.name in ("fsdp", "zero3") and any(one.fits for one in found if one.gear.name in SIMPLEST[:4]):
        return "gears that shard less would fill nearly all memory; each GPU holds a part of the model"
    return WHY.get(option.gear.name, "it is the fastest that fits")


def advice(shape: Architecture, recipe: Recipe, recipe_path: Path, machines: Machines) -> Iterator[str]:
    """Yield changes of the recipe with which a gear fits, the mildest first, if none fits without."""
    for words, changed in _changes(recipe):
        try:
            found, _ = options(shape, changed, recipe_path, machines)
        except UserError:
            continue
        if found and found[0].fits and not found[0].gear.offload:
            yield f"{words} fits under {found[0].gear.name}"


def _changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield changes that save memory, in words and as recipes."""
    small = with_values(with_values(recipe, "batch", micro_rows=1), "perf", checkpointing="full")
    if (recipe.batch.micro_rows, recipe.perf.checkpointing) != (1, "full"):
        yield "batch.micro_rows=1 perf.checkpointing=full", small
    if recipe.method == "full" and recipe.optim.name != "adamw_8bit":
        eight = with_values(small, "optim", name="adamw_8bit", master_weights="bf16")
        yield "optim.master_weights=bf16 optim.name=adamw_8bit, with full checkpointing,", eight
    for method in METHODS[METHODS.index(recipe.method) + 1 :] if recipe.method in METHODS else ():
        keys = "adapter.method=lora" + (" model.quantize=nf4" if method == "qlora" else "")
        yield keys, with_method(small, method)
