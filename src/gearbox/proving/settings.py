"""Choose the gears of a comparison, and change a recipe so that they train the same numbers. Nothing imports torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from gearbox import processes
from gearbox.config.gear import Gear, gear_path, load_gear
from gearbox.config.job import REHEARSED_ROWS
from gearbox.config.old_keys import OLD_KEYS
from gearbox.config.recipe import Recipe
from gearbox.errors import UserError

STEPS = 4  # of each run of a proof


class Change(NamedTuple):
    """A key of the recipe that a comparison sets."""

    key: str
    value: str
    why: str


RANDOM = "each rank draws different random numbers"


def load_gears(names: list[str]) -> list[Gear]:
    """Return the gears, each with its number of ranks. Raise UserError with every problem."""
    gears, problems = [], []
    for name in names:
        stem, colon, ranks = name.partition(":")
        try:
            gears.append(load_gear(gear_path(stem), {"num_processes": ranks} if colon else {}))
        except UserError as error:
            problems.append(f"--gears: {error}")
    labels = [label(gear) for gear in gears]
    problems += [f"--gears: duplicate {name}" for name in sorted({*labels}) if labels.count(name) > 1]
    if len(names) < 2:
        problems.append(f"--gears: {names[0]}: give two or more, such as single,fsdp")
    if problems:
        raise UserError("\n".join(problems))
    return gears


def label(gear: Gear) -> str:
    """Return the name of a gear's run, with its number of ranks, such as ddp-2."""
    return f"{gear.name}-{gear.num_processes}"


def comparison_overrides(recipe: Recipe, overrides: list[str], num_steps: int, weights_every: int) -> list[str]:
    """Return the overrides that make a recipe comparable: its first steps, with checkpoints but no evaluation."""
    if num_steps < 1 or weights_every < 1:
        raise UserError(f"--steps {num_steps} --weights-every {weights_every}: both must be 1 or more")
    warmup = recipe.schedule.num_warmup_steps(recipe.train.steps or num_steps)
    warmup = min(warmup, num_steps // 4)  # so that most steps have a high learning rate
    values = {
        "train.steps": num_steps,
        "train.epochs": "null",
        "schedule.warmup": warmup,
        "schedule.decay": "20%",  # a count may not fit into so few steps
        "eval.fraction": 0,
        "eval.path": "null",
        "eval.samples": 0,
        "save.every": weights_every,
        "save.keep": max(2, -(-num_steps // weights_every)),
        "run.resume": "never",
        "run.name": "null",
    }
    for key in [override.partition("=")[0] for override in overrides]:
        if key in values or getattr(OLD_KEYS.get(key), "new", None) in values or key.startswith(("eval.", "save.")):
            raise UserError(f"{key}: the comparison sets this key; remove it")
    return [f"{key}={value}" for key, value in values.items()]


def incomparable(recipe: Recipe) -> list[Change]:
    """Return the keys whose settings make gears differ by design."""
    optim, perf, name = recipe.optim, recipe.perf, recipe.optim.name
    found = [
        (recipe.adapter.dropout > 0, "adapter.dropout", "0", RANDOM),
        (recipe.model.dropout, "model.dropout", "false", RANDOM),
        ("8bit" in name, "optim.name", "adamw", f"{name} rounds in blocks of a rank's shard"),
        (optim.master_weights == "bf16", "optim.master_weights", "fp32", "bf16 rounds every step's update"),
        (perf.ddp_compression != "none", "perf.ddp_compression", "none", "bf16 rounds the gradients under DDP"),
        (perf.float8, "perf.float8", "false", "rounds to 8 bits, and not every gear can"),
    ]
    return [Change(*one) for applies, *one in found if applies]


def changes_of_proof(recipe: Recipe, gears: Sequence[Gear], row_tokens: int) -> list[Change]:
    """Return the keys that a proof sets, so that its gears are comparable, and its rows have at most `row_tokens`.

    What the command line gives stays, apart from settings that make gears differ by design.
    """
    batch, most = recipe.batch, max(gear.data_parallel for gear in gears)
    rows = min(batch.rows, max(REHEARSED_ROWS, 2 * most))
    short = "a short step has the same code"
    found = [
        Change("batch.rows", str(rows), short),
        Change("batch.micro_rows", str(max(1, min(batch.micro_rows, rows // (2 * most)))), "two rounds on every gear"),
        Change("batch.row_tokens", str(min(batch.row_tokens, row_tokens)), short),
        Change("optim.eps", "0.001", "a smaller one turns the rounding errors of small gradients into whole steps"),
        Change("perf.compile", "false", "compiling takes minutes under each gear"),
    ]
    return incomparable(recipe) + [
        one for one in found if one.key not in recipe.given and str(_value(recipe, one.key)).lower() != one.value
    ]


def _value(recipe: Recipe, key: str) -> object:
    group, name = key.split(".")
    return getattr(getattr(recipe, group), name)


def prepare_imports() -> None:
    """Set what libraries read while they are imported by a process that forks: no GPU, and no threads of tokenizers."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # asks for a kernel that is not needed
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not processes.num_visible_gpus():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would choose it too, with a warning
