"""Are the ranks in step: gradients, parameters, and who prints. For the doctor, and for a training loop of your own.

All of it is for whole parameters, as under DDP, with torch's process group running; every rank must call it alike.
docs/doctor.md shows how.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from gearbox.errors import UserError


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; before there is a process group, those that the launcher gave it."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def print_first(*values: Any) -> None:
    """Print from rank 0 alone."""
    if rank_and_size()[0] == 0:
        print(*values, flush=True)


def print_in_order(*values: Any) -> None:
    """Print from every rank, in the order of ranks, each line with its rank. Rank 0 prints them all: else they mix."""
    for rank, text in enumerate(_from_all(" ".join(map(str, values)))):
        print_first("\n".join(f"[rank {rank}] {line}" for line in text.splitlines() or [""]))


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient on all ranks."""

    name: str
    before: list[float | None]
    """Its L2 norm on each rank, before averaging; None where a rank has none."""
    after: list[float]
    """After averaging, by rank. Empty where it could not be averaged."""
    problem: str
    """What is wrong, with the rank; empty where nothing is."""


def check_gradients(named_parameters: Iterable[tuple[str, Any]], averaged: bool = False) -> list[Gradient]:
    """Hold each gradient against that of the other ranks, after a backward pass.

    Each rank comes with its own (under DDP: of a backward pass inside `model.no_sync()`); they are averaged here as DDP
    does, in copies, so nothing is changed. With `averaged` they are taken as averaged already, and only compared.
    Raises UserError where parameters are cut over ranks.
    """
    _, size = rank_and_size()
    parameters = {name: _whole(name, p) for name, p in named_parameters}
    gradients = {name: p.grad for name, p in parameters.items()}
    mine = {name: None if g is None else _norm(g) for name, g in gradients.items()}
    trained = [name for name, p in parameters.items() if p.requires_grad or p.grad is not None]
    found = _from_all((mine, trained, {name: list(p.shape) for name, p in parameters.items()}))
    names = dict.fromkeys(name for _, theirs, _ in found for name in theirs)
    after: dict[str, tuple[float, str]] = {}
    for name in names:
        if len({str(shapes.get(name)) for _, _, shapes in found}) > 1:
            continue  # not a parameter of all ranks, or of another shape: it cannot be averaged
        gradient, parameter = gradients[name], parameters[name]
        whole = torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient.float().clone()
        if not averaged and size > 1:
            dist.all_reduce(whole)
            whole /= size
        after[name] = _norm(whole), _digest(whole)
    results = _from_all(after)
    checked = []
    for name in names:
        before = [norms.get(name) for norms, _, _ in found]
        norms, digests = zip(*(result[name] for result in results), strict=True) if name in after else ((), ())
        checked.append(Gradient(name, before, list(norms), _problem(before, list(digests))))
    return checked


def check_parameters(model: torch.nn.Module) -> list[str]:
    """Name each parameter that is not the same, to the last bit, on all ranks, in the model's order, with the ranks.

    Raises UserError where parameters are cut over ranks.
    """
    found = _from_all({name: _digest(_whole(name, p).detach()) for name, p in model.named_parameters()})
    problems = []
    for name in dict.fromkeys(name for digests in found for name in digests):
        digests = [digests.get(name, "missing") for digests in found]
        if odd := _odd(digests):
            verb = "is missing" if {digests[rank] for rank in odd} == {"missing"} else "is another"
            problems.append(f"{name} {verb} on {_ranks(odd)}")
    return problems


def small_model() -> torch.nn.Module:
    """What the doctor checks with: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential()
    for name, width, height in (("layer", 16, 32), ("head", 32, 4)):
        linear = torch.nn.Linear(width, height)
        for parameter in linear.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        model.add_module(name, linear)
    return model


def small_loss(model: torch.nn.Module, seed: int) -> torch.Tensor:
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    return model(rows.to(next(model.parameters()).device)).square().mean()


def _problem(before: list[float | None], digests: list[str]) -> str:
    without = [rank for rank, norm in enumerate(before) if norm is None]
    if without and len(without) < len(before):
        return f"{_ranks(without)} has no gradient, the others have one"
    bad = [rank for rank, norm in enumerate(before) if norm is not None and not norm < float("inf")]
    if bad:
        return f"the gradient of {_ranks(bad)} is not finite"
    dropped = [rank for rank, norm in enumerate(before) if norm == 0]
    if dropped and len(dropped) < len(before):
        return f"the gradient of {_ranks(dropped)} is 0, the others' is not"
    if odd := _odd(digests):
        return f"after averaging {_ranks(odd)} has another gradient than the others"
    return "" if digests else "it is not a parameter of the same shape on all ranks"


def _odd(values: list[str]) -> list[int]:
    """The ranks whose value is not the most frequent one; of equally frequent ones the first is taken as right."""
    if len({*values}) < 2:
        return []
    right = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != right]


def _whole(name: str, parameter: Any) -> Any:
    if hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id"):
        raise UserError(f"{name}: is cut over ranks by this gear; what is compared are whole copies, as under ddp")
    return parameter


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().float()))


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _from_all(value: Any) -> list[Any]:
    """The object of each rank, by rank, on every rank."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, value)
    return found
