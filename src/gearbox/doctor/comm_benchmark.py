"""Measure collectives and links between ranks, check the values they deliver, and time a matrix product on each rank.

Every rank calls the same functions. Each call returns this rank's measurements. The ranks gather these, and
comm_verdicts judges them. A value identifies its sender: rank r writes r + 1, the other ranks write nothing there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.distributed as dist

from gearbox.console import format_bytes_short

KiB, MiB = 2**10, 2**20
ALL_PAIRS = 16  # up to this many ranks every pair is measured; above, neighbours and one pair per two machines
REPEATS = 5
EnterStage = Callable[[str], None]
Measured = tuple[int, float, list[int]]
"""Bytes, this rank's seconds, and the ranks whose values arrived wrong."""
Links = dict[tuple[int, int], tuple[float, float]]
"""Pair of ranks -> (one-way seconds of a few bytes, bytes per second)."""


@dataclass(frozen=True)
class Message:
    """The message of one collective: its size, its device and the rank that measures."""

    rank: int
    """The rank that measures."""
    num_ranks: int
    part: int
    """Elements that each rank sends to each rank."""
    device: torch.device
    is_smallest: bool
    """Whether this is the first of several sizes."""

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank sends to all ranks, in float32."""
        return 4 * self.part * self.num_ranks

    def each_rank(self, first: int = 1) -> torch.Tensor:
        """Return consecutive numbers, one for each rank, starting at `first`."""
        return torch.arange(first, first + self.num_ranks, device=self.device)

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return a zeroed buffer on the device."""
        return torch.zeros(*shape, device=self.device)


def message_sizes(device: torch.device) -> list[int]:
    """Return the message sizes to measure, in bytes."""
    return [64 * KiB, MiB, 16 * MiB] + ([256 * MiB] if device.type == "cuda" else [])


def measure_collectives(device: torch.device, enter_stage: EnterStage) -> dict[str, list[Measured]]:
    """Time each collective at each message size, and check its values."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, list[Measured]] = {}
    for number, num_bytes in enumerate(message_sizes(device)):
        part = max(1, num_bytes // 4 // num_ranks // num_ranks) * num_ranks
        message = Message(rank, num_ranks, part, device, is_smallest=number == 0)
        repeats = REPEATS if num_bytes <= MiB or device.type == "cuda" else 2  # a CPU takes 50 ms for 16 MiB
        for name, make in COLLECTIVES.items():
            enter_stage(f"{name} of {format_bytes_short(num_bytes)}")
            work, check = make(message)
            wrong = check()
            found.setdefault(name, []).append((message.num_bytes, _median_seconds(work, device, repeats), wrong))
    enter_stage("objects")
    objects: list[dict[str, int]] = [{}] * num_ranks
    began = time.perf_counter()
    dist.all_gather_object(objects, {"rank": rank})
    wrong = [source for source, value in enumerate(objects) if value != {"rank": source}]
    found["objects"] = [(0, time.perf_counter() - began, wrong)]
    return found


Collective = tuple[Callable[[], object], Callable[[], list[int]]]
"""The work to time, and a check that returns the ranks whose values arrived wrong."""


def _all_reduce(message: Message) -> Collective:
    values = message.zeros(message.part, message.num_ranks)

    def check() -> list[int]:
        values[:, message.rank] = message.rank + 1
        dist.all_reduce(values)
        return _wrong(values.T, message.each_rank())

    return (lambda: dist.all_reduce(values)), check


def _all_gather(message: Message) -> Collective:
    own = torch.full((message.part,), message.rank + 1.0, device=message.device)
    gathered = message.zeros(message.num_ranks, message.part)

    def work() -> None:
        dist.all_gather_into_tensor(gathered.view(-1), own)

    def check() -> list[int]:
        work()
        return _wrong(gathered, message.each_rank())

    return work, check


def _reduce_scatter(message: Message) -> Collective:
    rank, num_ranks = message.rank, message.num_ranks
    sent = message.zeros(num_ranks, message.part // num_ranks, num_ranks)  # [receiver, ..., sender]
    sent[:, :, rank] = (rank + 1 + num_ranks * message.each_rank(0)).view(num_ranks, 1).float()
    received = message.zeros(message.part // num_ranks, num_ranks)

    def work() -> None:
        dist.reduce_scatter_tensor(received.view(-1), sent.view(-1))

    def check() -> list[int]:
        work()
        return _wrong(received.T, num_ranks * rank + message.each_rank())

    return work, check


def _broadcast(message: Message) -> Collective:
    values = message.zeros(message.part * message.num_ranks)

    def check() -> list[int]:
        wrong = []
        for source in range(message.num_ranks if message.is_smallest else 1):
            values.fill_(source + 1 if message.rank == source else 0)
            dist.broadcast(values, source)
            right = torch.tensor([source + 1], device=message.device)
            wrong += [source] if _wrong(values.view(1, -1), right) else []
        return wrong

    return (lambda: dist.broadcast(values, 0)), check


def _all_to_all(message: Message) -> Collective:
    rank, num_ranks = message.rank, message.num_ranks
    sent = (rank * num_ranks + message.each_rank()).float().repeat_interleave(message.part)
    received = message.zeros(num_ranks, message.part)

    def work() -> None:
        dist.all_to_all_single(received.view(-1), sent)

    def check() -> list[int]:
        work()
        return _wrong(received, num_ranks * message.each_rank(0) + rank + 1)

    return work, check


def _send_recv(message: Message) -> Collective:
    num_elements = message.part * message.num_ranks
    sent = torch.full((num_elements,), message.rank + 1.0, device=message.device)
    received = message.zeros(num_elements)
    after, before = (message.rank + 1) % message.num_ranks, (message.rank - 1) % message.num_ranks

    def work() -> None:
        _exchange([(dist.isend, sent, after), (dist.irecv, received, before)])

    def check() -> list[int]:
        work()
        return [before] if _wrong(received.view(1, -1), torch.tensor([before + 1], device=message.device)) else []

    return work, check


COLLECTIVES: dict[str, Callable[[Message], Collective]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}


def _wrong(values: torch.Tensor, right: torch.Tensor) -> list[int]:
    """Return the rows of `values` ([sender, ...]) that differ anywhere from their expected value in `right`."""
    rows: list[int] = (values != right.view(-1, 1).to(values.dtype)).any(1).nonzero().flatten().tolist()
    return rows


def _exchange(operations: list[tuple[Callable[..., object], torch.Tensor, int]]) -> None:
    """Send and receive in one batch, as pipelines do: NCCL then needs no communicator per pair."""
    for work in dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations]):
        work.wait()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def pairs(hosts: list[str]) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure. `hosts` lists the host of each rank."""
    if len(hosts) <= ALL_PAIRS:
        return list(combinations(range(len(hosts)), 2))
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    between = list(combinations(sorted(first.values()), 2)) if len(first) <= ALL_PAIRS else []
    return sorted({*((rank, rank + 1) for rank in range(len(hosts) - 1)), *between})


def measure_links(hosts: list[str], device: torch.device, enter_stage: EnterStage) -> dict[str, tuple[float, float]]:
    """Measure all pairs of ranks, and return those that this rank starts.

    Keys are pairs such as `0-1`; values are seconds and bytes per second, as in Links. Pairs run one after the other
    while the other ranks wait, so each pair has the network to itself.
    """
    rank = dist.get_rank()
    small = torch.zeros(2, device=device)
    large = torch.zeros((64 * MiB if device.type == "cuda" else MiB) // 4, device=device)
    together = torch.zeros(1, device=device)
    found = {}
    for a, b in pairs(hosts):
        enter_stage(f"the link between ranks {a} ({hosts[a]}) and {b} ({hosts[b]})")
        dist.all_reduce(together)
        _wait(device)
        if rank in (a, b):
            peer, is_first = (b, True) if rank == a else (a, False)
            delay = _one_way_seconds(small, peer, is_first, repeats=20)
            seconds = _one_way_seconds(large, peer, is_first, repeats=4)
            if is_first:
                found[f"{a}-{b}"] = delay, 4 * large.numel() / seconds
    return found


def _one_way_seconds(tensor: torch.Tensor, peer: int, sends_first: bool, repeats: int) -> float:
    """Send a tensor to the peer and back; return the fastest one-way time in seconds."""
    ways = (dist.isend, dist.irecv) if sends_first else (dist.irecv, dist.isend)
    seconds = []
    for _ in range(1 + repeats):  # the first round opens the connection
        _wait(tensor.device)
        began = time.perf_counter()
        for way in ways:
            _exchange([(way, tensor, peer)])
        _wait(tensor.device)
        seconds.append((time.perf_counter() - began) / 2)
    return min(seconds[1:])


def join_links(parts: list[dict[str, tuple[float, float]]]) -> Links:
    """Merge the results of `measure_links` of all ranks."""
    return {(int(a), int(b)): figures for part in parts for name, figures in part.items() for a, b in [name.split("-")]}


def measure_speed(device: torch.device, local_rank: int, num_turns: int, enter_stage: EnterStage) -> float:
    """Return the FLOP/s of a matrix product: the median of five rounds on a GPU, the best of five on a CPU.

    CPU ranks of one machine take turns, because they share its cores. GPUs run at the same time, as in training.
    """
    is_gpu = device.type == "cuda"
    width, batch, dtype = (8192, 10, torch.bfloat16) if is_gpu else (384, 1, torch.float32)
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    together = torch.zeros(1, device=device)
    rates = []
    for _ in range(1 + REPEATS):  # the first warms up
        for turn in range(1 if is_gpu else num_turns):
            enter_stage("the matrix product")
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
