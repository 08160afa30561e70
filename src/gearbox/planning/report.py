"""Show a plan: a table of gears, notes and a verdict for people, or JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from gearbox.config.recipe_values import WITH_REFERENCE
from gearbox.console import Screen, styled
from gearbox.planning.architecture import Architecture
from gearbox.planning.gpus import ANY_MEMORY, GIB
from gearbox.planning.memory import TERMS
from gearbox.planning.strategy import Machines, Option, reason

Figures = dict[str, Any]
"""Plain values for JSON."""
HEADINGS = {
    "weights": "weights",
    "gradients": "gradi-\nents",
    "optimizer": "opti-\nmizer",
    "activations": "activ-\nations",
    "head": "head",
    "gathered": "gath-\nered",
    "allowance": "allow-\nance",
}


def as_json(option: Option, shape: Architecture) -> Figures:
    """Return an option with bytes, seconds and counts as plain numbers."""
    found, cost, batch = option.prediction, option.cost, option.job.batch
    return {
        "gear": option.gear.name,
        "method": option.method,
        "num_processes": option.gear.num_processes,
        "fits": option.fits,
        "peak_bytes": found.peak_bytes,
        "terms": found.terms,
        "moment": found.moment,
        "state_bytes": found.state_bytes,
        "loading_bytes": found.loading_bytes,
        "host_bytes": found.host_bytes,
        "host_bytes_per_machine": round(option.host_bytes),
        "checkpoint_bytes": found.checkpoint_bytes,
        "micro_rows": batch.micro_rows,
        "accumulation_steps": batch.accumulation_steps,
        "largest_micro_rows": option.largest_micro_rows(shape),
        "flops_per_token": cost.flops_per_token,
        "sent_bytes_per_token": cost.sent_per_token,
        "sent_bytes_per_step": cost.sent_bytes,
        "tokens_per_step": cost.tokens,
        "seconds_per_step": cost.seconds,
        "seconds_per_run": option.run_seconds,
        "price_per_run": option.price,
    }


WIDE = 110
"""Columns of a terminal that shows the table of gears in one piece. A pipe has no width."""


def show_options(screen: Screen, found: list[Option], shape: Architecture, has_memory: bool) -> None:
    """Print a table of gears: what a GPU holds at its peak, in GiB, and what a step takes."""
    has_time = any(option.cost.seconds is not None for option in found)
    terms, rest = [HEADINGS[term] for term in TERMS], ["peak", "fits", "largest\nmicro_rows"][: 3 if has_memory else 1]
    rest += ["sent a\nstep", "time a\nstep"] if has_time else ["sent a\nstep"]
    rows = [_cells(option, shape, has_memory, has_time) for option in found]
    is_narrow = screen.is_terminal and screen.width < WIDE
    first = len(TERMS) + 1
    screen.width = screen.width if is_narrow else max(screen.width, WIDE)
    screen.print("what a GPU holds at the peak of a step, and sends, in GiB")
    for headings, part in (
        [(terms, slice(1, first)), (rest, slice(first, None))] if is_narrow else [([*terms, *rest], slice(1, None))]
    ):
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("gear", no_wrap=True, vertical="bottom")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for option, cells in zip(found, rows, strict=True):
            table.add_row(cells[0], *cells[part], style="" if option.fits or not has_memory else "dim")
        screen.print(table)


def _cells(option: Option, shape: Architecture, has_memory: bool, has_time: bool) -> list[str]:
    """Return a row of the table of gears."""
    prediction, seconds = option.prediction, option.cost.seconds
    cells = [option.gear.name, *(gib(prediction.terms[term]) for term in TERMS), gib(prediction.peak_bytes)]
    if has_memory:
        largest = option.largest_micro_rows(shape)
        cells += ["yes" if option.fits else "no", str(largest) if largest else "-"]
    cells.append(gib(option.cost.sent_bytes))
    return [*cells, "-" if seconds is None else duration(seconds)] if has_time else cells


COMPARED = ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_offload", "tp", "pp")
"""Gears that are compared if no GPU is named."""


def show_counts(screen: Screen, best: list[Figures], has_memory: bool) -> None:
    """Print the best gear for each method and number of GPUs, or what a GPU holds under the usual gears."""
    has_time, has_price = (best[0][key] is not None for key in ("seconds_per_step", "price_per_run"))
    rows = []
    for one in best:
        row = {"method": one["method"], "GPUs": str(one["num_processes"])}
        if has_memory:
            row |= {"gear": one["gear"], "GiB a GPU": gib(one["peak_bytes"]), "fits": "yes" if one["fits"] else "no"}
        else:
            row |= {name: gib(one["peaks"][name]) if name in one["peaks"] else "-" for name in COMPARED}
        row |= {"time a step": duration(one["seconds_per_step"])} if has_time else {}
        row |= {"price of the run": f"{one['price_per_run']:,.2f}"} if has_price else {}
        rows.append(row)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading in ("method", "gear", "fits") else "right")
    for one, row in zip(best, rows, strict=True):
        table.add_row(*row.values(), style="" if one["fits"] else "dim")
    if not has_memory:
        screen.print("what a GPU holds at the peak of a step, in GiB; --gpu NAME chooses the gear")
    screen.print(table)
    screen.print("all gears for one number of GPUs: --gpus N" + ("" if has_memory else " --gpu NAME"))


def show_best(screen: Screen, best: Option) -> None:
    """Print what else a run under the chosen gear needs, and what it takes."""
    found, cost, machines = best.prediction, best.cost, best.machines
    lines = {
        "peak": f"{gib(found.peak_bytes)} GiB, in {found.moment}; {gib(found.loading_bytes)} GiB while loading",
        "host memory": f"{gib(best.host_bytes)} GiB a machine, with Python's own in addition",
        "checkpoint": f"{gib(found.checkpoint_bytes)} GiB",
        "a token": f"{cost.flops_per_token / 1e9:,.1f} GFLOP, {cost.sent_per_token:,.0f} bytes sent by a GPU",
    }
    if best.job.recipe.train.objective in WITH_REFERENCE:
        lines["reference"] = "one forward pass over all rows before the first step, kept for later runs"
    if cost.seconds is not None:
        lines["time"] = f"{duration(cost.seconds)} a step, {cost.tokens / cost.seconds:,.0f} tokens/s"
        if best.run_seconds is not None:
            lines["time"] += f"; {duration(best.run_seconds)} for {best.job.recipe.train.steps:,} steps"
        if best.price is not None:
            lines["price"] = f"{best.price:,.2f} at {machines.price:g} per GPU and hour"
        elif machines.price is not None:
            tokens = machines.price * machines.total / 3600 * cost.seconds / cost.tokens
            lines["price"] = f"{tokens * 1e9:,.2f} for 10^9 tokens; the price of a run needs train.steps"
        peak = f"{machines.mfu:.0%} of {machines.gpu.tflops:,.0f} TFLOP/s"
        lines["assumed"] = f"{peak}; communication runs at the same time"
    for label, text in lines.items():
        screen.print(styled((f"{label:<14}", "cyan"), text))


def show_refused(screen: Screen, refused: dict[str, str]) -> None:
    """Print the gears that cannot run, with the reason."""
    for why in dict.fromkeys(refused.values()):
        names = ", ".join(gear for gear in refused if refused[gear] == why)
        screen.print(styled(("cannot run    ", "dim"), (f"{names}: {why}", "dim")))


def show_verdict(screen: Screen, text: str, advice: Iterable[str]) -> None:
    """Print the verdict, and changes with which a gear fits."""
    screen.print(styled(("verdict       ", "bold"), text))
    for line in advice:
        screen.print(f"{'':<14}{line}")


def verdict(found: list[Option], shape: Architecture, machines: Machines) -> str:
    """Return one line: the cheapest gear that fits, its largest micro-batch, and the reason in words."""
    best = found[0]
    if machines.gpu.memory == ANY_MEMORY:
        least = min(found, key=lambda option: option.prediction.peak_bytes)
        needs = f"{least.gear.name} needs least, {gib(least.prediction.peak_bytes)} GiB a GPU"
        return f"{best.gear.name} needs {gib(best.prediction.peak_bytes)} GiB a GPU, and {needs}; name a GPU with --gpu"
    if best.fits:
        rows = best.largest_micro_rows(shape)
        room = f"batch.micro_rows up to {rows}" if rows > 1 else "one row at a time"
        return f"{best.gear.name} fits on {machines.describe()}, with {room}: {reason(best, found)}"
    need = min(found, key=lambda option: option.prediction.peak_bytes)
    return (
        f"nothing fits on {machines.describe()}: {need.gear.name} needs least, {gib(need.prediction.peak_bytes)} GiB "
        "a GPU"
    )


def gib(num_bytes: float) -> str:
    """Return bytes as GiB, with one decimal."""
    return f"{num_bytes / GIB:,.1f}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds * 1000:,.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
