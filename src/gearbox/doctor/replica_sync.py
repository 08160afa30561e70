"""Compare gradients and parameters across ranks, and print in rank order; for the doctor and for your own loop.

These functions need unsharded parameters, as under DDP, and torch's process group. Every rank must make the same calls.
docs/doctor.md has an example.
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
    """Return this process's rank and the number of ranks; without a process group, as the launcher set them."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = LaunchEnvironment.read()
    return launched.rank, launched.size


def print_first(*values: object) -> None:
    """Print from rank 0 only."""
    if rank_and_size()[0] == 0:
        print(*values, flush=True)


def print_in_order(*values: object) -> None:
    """Print the values of every rank in rank order, each line with its rank. Rank 0 prints all, so no lines mix."""
    for rank, text in enumerate(_from_all(" ".join(map(str, values)))):
        print_first("\n".join(f"[rank {rank}] {line}" for line in text.splitlines() or [""]))


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter on all ranks."""

    name: str
    before: list[float | None]
    """Its L2 norm on each rank before averaging; None if the rank has no gradient."""
    after: list[float]
    """Its L2 norm on each rank after averaging; empty if it could not be averaged."""
    problem: str
    """What is wrong, and on which rank; empty if nothing is."""


class _Own(NamedTuple):
    """A description of one rank's gradients, sent to the other ranks."""

    norms: dict[str, float | None]
    trained: list[str]
    shapes: dict[str, list[int]]


def check_gradients(named_parameters: Iterable[tuple[str, torch.Tensor]], averaged: bool = False) -> list[Gradient]:
    """Compare each gradient across ranks, after a backward pass.

    Each rank needs its own gradients (under DDP: from a backward pass inside `model.no_sync()`). This function averages
    copies, as DDP would, and changes nothing. With `averaged` it takes the gradients as averaged and only compares
    them. Raise UserError if parameters are sharded across ranks.
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
    # Averaging needs the same shape on all ranks.
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
    """Return norm and digest of the gradient averaged over all ranks; a missing gradient counts as zeros."""
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
    """Return a line for each parameter that differs between ranks in any bit, in model order, naming the ranks.

    Raise UserError if parameters are sharded across ranks.
    """
    all_ranks = _from_all({name: _digest(_check_whole(name, p).detach()) for name, p in model.named_parameters()})
    problems = []
    for name in dict.fromkeys(name for own in all_ranks for name in own):
        digests = [own.get(name, "missing") for own in all_ranks]
        if odd := _odd(digests):
            verb = "is missing" if {digests[rank] for rank in odd} == {"missing"} else "differs"
            problems.append(f"{name} {verb} on {_ranks(odd)}")
    return problems


def check_small_model(device: torch.device, rank: int) -> list[Finding]:
    """Check parameters and averaged gradients of a small model, built on all ranks from the same seed."""
    model = small_model().to(device)
    differing = check_parameters(model)
    torch.autograd.backward(small_loss(model, seed=rank))
    gradients = check_gradients(model.named_parameters())
    wrong = [f"{gradient.name}: {gradient.problem}" for gradient in gradients if gradient.problem]
    advice = "a rank computes wrongly, or all_reduce does: run dcgmi diag -r 3 on the machines"
    findings = []
    if differing:
        findings.append(Finding("red", "parameters", f"values from the same seed differ: {differing[0]}", advice))
    if wrong:
        findings.append(Finding("red", "gradients", "; ".join(wrong), advice))
    else:
        first = gradients[0]
        before = ", ".join(f"{norm:.3g}" for norm in first.before[:4]) + ", ..." * (len(first.before) > 4)
        text = f"equal on all ranks after averaging ({first.name} {before} -> {first.after[0]:.3g})"
        findings.append(Finding("green", "gradients", text))
    return findings


def small_model() -> torch.nn.Module:
    """Return the small model that the doctor checks, identical on every rank."""
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
        return f"no gradient on {_ranks(without)}, unlike the others"
    bad = [rank for rank, norm in enumerate(before) if norm is not None and not norm < float("inf")]
    if bad:
        return f"gradient is not finite on {_ranks(bad)}"
    dropped = [rank for rank, norm in enumerate(before) if norm == 0]
    if dropped and len(dropped) < len(before):
        return f"gradient is 0 on {_ranks(dropped)}, unlike the others"
    if odd := _odd(digests):
        return f"gradient still differs after averaging on {_ranks(odd)}"
    return "" if digests else "parameter is missing or has another shape on some ranks"


def _odd(values: list[str]) -> list[int]:
    """Return the ranks whose value is not the most frequent. On a tie the first value counts as right."""
    if len({*values}) < 2:
        return []
    right = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != right]


def _check_whole(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter. Raise UserError if FSDP2, tensor parallelism or ZeRO-3 shards it."""
    if hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id"):
        raise UserError(f"{name}: sharded by this gear; only full copies can be compared, as under ddp")
    return parameter


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().float()))


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _from_all(value: T) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    gathered: list[T | None] = [None] * size
    dist.all_gather_object(gathered, value)
    return cast(list[T], gathered)
