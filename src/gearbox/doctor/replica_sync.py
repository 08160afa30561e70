"""Compare gradients and parameters of all ranks, and print in order. For the doctor, and for your own training loop.

All of it needs whole parameters, as under DDP, and torch's process group. Every rank must make the same calls.
docs/doctor.md shows how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import xxhash

from gearbox.doctor.finding import Finding
from gearbox.errors import UserError
from gearbox.launch.environment import LaunchEnvironment

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; before there is a process group, the launcher's."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = LaunchEnvironment.read()
    return launched.rank, launched.size


def print_first(*values: object) -> None:
    """Print from rank 0 only."""
    if rank_and_size()[0] == 0:
        print(*values, flush=True)


def print_in_order(*values: object) -> None:
    """Print from every rank, in the order of ranks, each line with its rank. Rank 0 prints all lines: so none mix."""
    for rank, text in enumerate(_from_all(" ".join(map(str, values)))):
        print_first("\n".join(f"[rank {rank}] {line}" for line in text.splitlines() or [""]))


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient on all ranks."""

    name: str
    before: list[float | None]
    """Its L2 norm on each rank, before averaging; None where a rank has none."""
    after: list[float]
    """Its norm after averaging, by rank; empty where it could not be averaged."""
    problem: str
    """What is wrong, with the rank; empty where nothing is."""


class _Own(NamedTuple):
    """What one rank tells the others about its gradients."""

    norms: dict[str, float | None]
    trained: list[str]
    shapes: dict[str, list[int]]


def check_gradients(named_parameters: Iterable[tuple[str, torch.Tensor]], averaged: bool = False) -> list[Gradient]:
    """Compare each gradient with that of the other ranks, after a backward pass.

    Each rank brings its own gradients (under DDP: of a backward pass inside `model.no_sync()`). Copies of them are
    averaged here as DDP does, so nothing is changed. With `averaged` they count as averaged already, and are only
    compared. Raise UserError where parameters are sharded across ranks.
    """
    parameters = {name: _check_whole(name, parameter) for name, parameter in named_parameters}
    all_ranks = _from_all(
        _Own(
            norms={name: None if p.grad is None else _norm(p.grad) for name, p in parameters.items()},
            trained=[name for name, p in parameters.items() if p.requires_grad or p.grad is not None],
            shapes={name: list(p.shape) for name, p in parameters.items()},
        )
    )
    names = list(dict.fromkeys(name for own in all_ranks for name in own.trained))
    # Only a parameter that all ranks have, with the same shape, can be averaged.
    common = [name for name in names if len({str(own.shapes.get(name)) for own in all_ranks}) == 1]
    averages = _from_all({name: _average(parameters[name], averaged) for name in common})
    checked = []
    for name in names:
        before = [own.norms.get(name) for own in all_ranks]
        after = [average[name] for average in averages] if name in averages[0] else []
        problem = _problem(before, [digest for _, digest in after])
        checked.append(Gradient(name, before, [norm for norm, _ in after], problem))
    return checked


def _average(parameter: torch.Tensor, is_averaged: bool) -> tuple[float, str]:
    """Return the norm and the digest of the gradient's average over all ranks; a rank without one counts as zeros."""
    if parameter.grad is None:
        gradient = torch.zeros_like(parameter, dtype=torch.float32)
    else:
        gradient = parameter.grad.float().clone()
    _, size = rank_and_size()
    if not is_averaged and size > 1:
        dist.all_reduce(gradient)
        gradient /= size
    return _norm(gradient), _digest(gradient)


def check_parameters(model: torch.nn.Module) -> list[str]:
    """Return a line for each parameter that differs between ranks in any bit, in the model's order, with the ranks.

    Raise UserError where parameters are sharded across ranks.
    """
    all_ranks = _from_all({name: _digest(_check_whole(name, p).detach()) for name, p in model.named_parameters()})
    problems = []
    for name in dict.fromkeys(name for own in all_ranks for name in own):
        digests = [own.get(name, "missing") for own in all_ranks]
        if odd := _odd(digests):
            verb = "is missing" if {digests[rank] for rank in odd} == {"missing"} else "is another"
            problems.append(f"{name} {verb} on {_ranks(odd)}")
    return problems


def check_small_model(device: torch.device, rank: int) -> list[Finding]:
    """Check a small model: the same on all ranks, one backward pass with other data on each, gradients averaged."""
    model = small_model().to(device)
    differing = check_parameters(model)
    torch.autograd.backward(small_loss(model, seed=rank))
    gradients = check_gradients(model.named_parameters())
    wrong = [f"{gradient.name}: {gradient.problem}" for gradient in gradients if gradient.problem]
    advice = "the ranks' own arithmetic or their all_reduce is at fault: run them through dcgmi diag -r 3"
    findings = []
    if differing:
        findings.append(Finding("red", "parameters", f"the same seed gave other values: {differing[0]}", advice))
    if wrong:
        findings.append(Finding("red", "gradients", "; ".join(wrong), advice))
    else:
        first = gradients[0]
        before = ", ".join(f"{norm:.3g}" for norm in first.before[:4]) + ", ..." * (len(first.before) > 4)
        text = f"equal on all ranks once averaged ({first.name} {before} -> {first.after[0]:.3g})"
        findings.append(Finding("green", "gradients", text))
    return findings


def small_model() -> torch.nn.Module:
    """Return the model that the doctor checks: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential()
    for name, width, height in (("layer", 16, 32), ("head", 32, 4)):
        linear = torch.nn.Linear(width, height)
        for parameter in linear.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        model.add_module(name, linear)
    return model


def small_loss(model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Return the small model's loss on random rows."""
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    output: torch.Tensor = model(rows.to(next(model.parameters()).device))
    return output.square().mean()


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
    """Return the ranks whose value is not the most frequent one. Of equally frequent ones the first counts as right."""
    if len({*values}) < 2:
        return []
    right = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != right]


def _check_whole(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter. Raise UserError where it is sharded by FSDP2, tensor parallelism or ZeRO-3."""
    if hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id"):
        raise UserError(f"{name}: is cut over ranks by this gear; what is compared are whole copies, as under ddp")
    return parameter


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().float()))


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _from_all(value: T) -> list[T]:
    """Return the object of each rank, by rank, on every rank."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    gathered: list[T | None] = [None] * size
    dist.all_gather_object(gathered, value)
    return cast(list[T], gathered)
