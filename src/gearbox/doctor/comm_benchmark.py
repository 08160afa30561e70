"""What the ranks send each other: whether it arrives, and how fast; and how fast each of them computes.

Each rank calls the same functions; what it saw itself is returned, for `gather` and the judgements below, which are
functions of all ranks' figures. Values tell who sent them: rank r writes r + 1 where the others write nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from gearbox.console import format_bytes_short

KiB, MiB = 2**10, 2**20
ALL_PAIRS = 16  # ranks up to which every pair is a link; then neighbours, and one pair for each two machines
REPEATS = 5
Enter = Callable[[str], None]


def message_sizes(device: torch.device) -> list[int]:
    """In bytes."""
    return [64 * KiB, MiB, 16 * MiB] + ([256 * MiB] if device.type == "cuda" else [])


def measure_collectives(device: torch.device, enter: Enter) -> dict[str, list[tuple[int, float, list[int]]]]:
    """By collective and size: bytes, this rank's seconds, and the ranks whose values came wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, list[tuple[int, float, list[int]]]] = {}
    for number, num_bytes in enumerate(message_sizes(device)):
        part = max(1, num_bytes // 4 // size // size) * size  # elements for a rank, of each rank's
        repeats = REPEATS if num_bytes <= MiB or device.type == "cuda" else 2  # a CPU takes 50 ms for 16 MiB
        for name, make in COLLECTIVES.items():
            enter(f"{name} of {format_bytes_short(num_bytes)}")
            work, wrong = make(rank, size, part, device, number == 0)
            bad = wrong()
            found.setdefault(name, []).append((4 * part * size, _median_seconds(work, device, repeats), bad))
    enter("objects")
    objects: list[Any] = [None] * size
    began = time.perf_counter()
    dist.all_gather_object(objects, {"rank": rank})
    bad = [source for source, value in enumerate(objects) if value != {"rank": source}]
    found["objects"] = [(0, time.perf_counter() - began, bad)]
    return found


Made = tuple[Callable[[], Any], Callable[[], list[int]]]


def _all_reduce(rank: int, size: int, part: int, device: torch.device, first: bool) -> Made:
    values = torch.zeros(part, size, device=device)

    def wrong() -> list[int]:
        values[:, rank] = rank + 1
        dist.all_reduce(values)
        return _wrong(values.T, torch.arange(1, size + 1, device=device))

    return (lambda: dist.all_reduce(values)), wrong


def _all_gather(rank: int, size: int, part: int, device: torch.device, first: bool) -> Made:
    mine, all_ = torch.full((part,), rank + 1.0, device=device), torch.zeros(size, part, device=device)

    def work() -> None:
        dist.all_gather_into_tensor(all_.view(-1), mine)

    def wrong() -> list[int]:
        work()
        return _wrong(all_, torch.arange(1, size + 1, device=device))

    return work, wrong


def _reduce_scatter(rank: int, size: int, part: int, device: torch.device, first: bool) -> Made:
    given = torch.zeros(size, part // size, size, device=device)  # [for whom, ..., from whom]
    given[:, :, rank] = (rank + 1 + size * torch.arange(size, device=device)).view(size, 1).float()
    mine = torch.zeros(part // size, size, device=device)

    def work() -> None:
        dist.reduce_scatter_tensor(mine.view(-1), given.view(-1))

    def wrong() -> list[int]:
        work()
        return _wrong(mine.T, size * rank + torch.arange(1, size + 1, device=device))

    return work, wrong


def _broadcast(rank: int, size: int, part: int, device: torch.device, first: bool) -> Made:
    values = torch.zeros(part * size, device=device)

    def wrong() -> list[int]:
        bad = []
        for source in range(size if first else 1):
            values.fill_(source + 1 if rank == source else 0)
            dist.broadcast(values, source)
            bad += [source] if _wrong(values.view(1, -1), torch.tensor([source + 1], device=device)) else []
        return bad

    return (lambda: dist.broadcast(values, 0)), wrong


def _all_to_all(rank: int, size: int, part: int, device: torch.device, first: bool) -> Made:
    given = (rank * size + torch.arange(1, size + 1, device=device)).float().repeat_interleave(part)
    taken = torch.zeros(size, part, device=device)

    def work() -> None:
        dist.all_to_all_single(taken.view(-1), given)

    def wrong() -> list[int]:
        work()
        return _wrong(taken, size * torch.arange(size, device=device) + rank + 1)

    return work, wrong


def _send_recv(rank: int, size: int, part: int, device: torch.device, first: bool) -> Made:
    given = torch.full((part * size,), rank + 1.0, device=device)
    taken = torch.zeros(part * size, device=device)
    after, before = (rank + 1) % size, (rank - 1) % size

    def work() -> None:
        _exchange([(dist.isend, given, after), (dist.irecv, taken, before)])

    def wrong() -> list[int]:
        work()
        return [before] if _wrong(taken.view(1, -1), torch.tensor([before + 1], device=device)) else []

    return work, wrong


COLLECTIVES: dict[str, Callable[[int, int, int, torch.device, bool], Made]] = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "broadcast": _broadcast,
    "all_to_all": _all_to_all, "send_recv": _send_recv,
}  # fmt: skip


def _wrong(values: torch.Tensor, right: torch.Tensor) -> list[int]:
    """Which rows [from whom, ...] are not filled with the value that is right for them."""
    return (values != right.view(-1, 1).to(values.dtype)).any(1).nonzero().flatten().tolist()


def _exchange(operations: list[tuple[Any, torch.Tensor, int]]) -> None:
    """Point to point as pipelines do it: batched, so that NCCL makes no communicator for each pair."""
    for work in dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations]):
        work.wait()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def pairs(hosts: list[str]) -> list[tuple[int, int]]:
    """The links to measure, of the ranks on these hosts."""
    if len(hosts) <= ALL_PAIRS:
        return list(combinations(range(len(hosts)), 2))
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    between = list(combinations(sorted(first.values()), 2)) if len(first) <= ALL_PAIRS else []
    return sorted({*((rank, rank + 1) for rank in range(len(hosts) - 1)), *between})


def measure_links(hosts: list[str], device: torch.device, enter: Enter) -> dict[str, tuple[float, float]]:
    """Of each pair of which this rank is the first: seconds one way of a few bytes, and bytes a second.

    One pair after the other, with all others waiting: each has the network for itself.
    """
    rank = dist.get_rank()
    small = torch.zeros(2, device=device)
    large = torch.zeros((64 * MiB if device.type == "cuda" else MiB) // 4, device=device)
    together = torch.zeros(1, device=device)
    found = {}
    for a, b in pairs(hosts):
        enter(f"the link between ranks {a} ({hosts[a]}) and {b} ({hosts[b]})")
        dist.all_reduce(together)
        _wait(device)
        if rank not in (a, b):
            continue
        best = []
        for tensor, times in ((small, 20), (large, 4)):
            seconds = []
            for _ in range(1 + times):  # the first makes the connection
                _wait(device)
                began = time.perf_counter()
                first, second = (dist.isend, dist.irecv) if rank == a else (dist.irecv, dist.isend)
                for way in (first, second):
                    _exchange([(way, tensor, b if rank == a else a)])
                _wait(device)
                seconds.append((time.perf_counter() - began) / 2)
            best.append(min(seconds[1:]))
        if rank == a:
            found[f"{a}-{b}"] = best[0], 4 * large.numel() / best[1]
    return found


def measure_speed(device: torch.device, local_rank: int, num_turns: int, enter: Enter) -> float:
    """Floating point operations a second of a matrix product: of five rounds a GPU's median, a CPU's best.

    Ranks that share a machine's cores take turns, so that none is measured against another, and what else runs there
    only slows them down; GPUs run all at once, as in training.
    """
    is_gpu = device.type == "cuda"
    width, batch, dtype = (8192, 10, torch.bfloat16) if is_gpu else (384, 1, torch.float32)
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    together = torch.zeros(1, device=device)
    rates = []
    for _ in range(1 + REPEATS):  # the first warms up
        for turn in range(1 if is_gpu else num_turns):
            enter("the matrix product")
            if dist.is_initialized():
                dist.all_reduce(together)
            if is_gpu or turn == local_rank:
                best = min(_product_seconds(a, b, batch, device) for _ in range(3))
                rates.append(2 * width**3 * batch / best)
    return statistics.median(rates[1:]) if is_gpu else max(rates[1:])


def _product_seconds(a: torch.Tensor, b: torch.Tensor, batch: int, device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(batch):
        a @ b
    _wait(device)
    return time.perf_counter() - began
