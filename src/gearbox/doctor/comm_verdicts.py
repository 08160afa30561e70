"""Judge what the collectives, links and ranks of the doctor measured."""

from __future__ import annotations

import statistics
from typing import Any

from gearbox.console import format_figure
from gearbox.doctor.comm_benchmark import COLLECTIVES
from gearbox.doctor.finding import Finding, named


def judge_values(found: list[dict[str, list[tuple[int, float, list[int]]]]]) -> Finding:
    """Whether every rank got from each other what that had sent; the rank that is to blame, where there is one."""
    told = []
    for name in found[0]:
        wrong = {rank: sorted({s for _, _, bad in of[name] for s in bad}) for rank, of in enumerate(found)}
        if any(wrong.values()):
            told.append(f"{name}: {likely_culprit({rank: bad for rank, bad in wrong.items() if bad}, len(found))}")
    names = ", ".join(found[0])
    if not told:
        return Finding("green", "values", f"{names}: right on all {len(found)} ranks")
    advice = "run that machine's GPUs through dcgmi diag -r 3, and again with NCCL_P2P_DISABLE=1 or another driver"
    return Finding("red", "values", "; ".join(told), advice)


def likely_culprit(wrong: dict[int, list[int]], size: int) -> str:
    """`wrong`: rank to those whose values came wrong there."""
    sources = {source for bad in wrong.values() for source in bad}
    if len(wrong) == 1:
        rank, bad = next(iter(wrong.items()))
        whose = "all" if len(bad) == size else ", ".join(map(str, bad))
        return f"rank {rank} received wrong values (of rank{'s' if len(bad) > 1 else ''} {whose}), the others did not"
    if len(sources) == 1:
        return f"what rank {sources.pop()} sent came wrong on ranks {', '.join(map(str, wrong))}"
    return "; ".join(f"from {', '.join(map(str, bad))} to {rank}" for rank, bad in wrong.items())


def bandwidths(found: list[dict[str, list[tuple[int, float, list[int]]]]]) -> dict[str, list[tuple[int, float, float]]]:
    """By collective and size: bytes, seconds of the slowest rank, and the bytes a second that each link carries.

    The last is nccl-tests' bus bandwidth: comparable between collectives, numbers of ranks, and with the hardware's.
    """
    size = len(found)
    share = (size - 1) / size
    factor = {"all_reduce": 2 * share, "broadcast": 1.0, "send_recv": 1.0}
    rates = {}
    for name in COLLECTIVES:
        rows: Any = zip(*(of[name] for of in found), strict=True)
        slowest = [(row[0][0], max(seconds for _, seconds, _ in row)) for row in rows]
        rates[name] = [(n, seconds, n * factor.get(name, share) / seconds) for n, seconds in slowest]
    return rates


def judge_links(
    links: dict[tuple[int, int], tuple[float, float]], hosts: list[str], least: tuple[float, float]
) -> list[Finding]:
    """The slowest link of those within machines, and of those between them; yellow below `least` of the median.

    `least`: for the links within machines, and for those between them.
    """
    findings = []
    for within, share in zip((True, False), least, strict=True):
        rates = {pair: rate for pair, (_, rate) in links.items() if (hosts[pair[0]] == hosts[pair[1]]) == within}
        if not rates:
            continue
        usual, (pair, slowest) = statistics.median_high(rates.values()), min(rates.items(), key=lambda item: item[1])
        delay = statistics.median(links[pair][0] for pair in rates)
        said = f"{len(rates)} {'within' if within else 'between'} machines: {_rate(usual)}, {_delay(delay)}"
        slow = {pair: rate for pair, rate in rates.items() if rate < share * usual}
        if not slow:
            tail = f"; the slowest, {_pair(pair, hosts)}, {_rate(slowest)}" if len(rates) > 1 else ""
            findings.append(Finding("green", "links", said + tail))
            continue
        touched = {rank for pair in slow for rank in pair}
        guilty = [rank for rank in sorted(touched) if len(rates) > 1 and all(p in slow for p in rates if rank in p)]
        text = f"{said}; slow: {', '.join(f'{_pair(p, hosts)} {_rate(r)}' for p, r in list(slow.items())[:4])}"
        if len(slow) > 4:
            text += f" and {len(slow) - 4} more"
        if guilty and len(guilty) < len({rank for pair in rates for rank in pair}):
            text += f"; every link of rank {', '.join(f'{rank} ({hosts[rank]})' for rank in guilty)} is"
        advice = (
            "nvidia-smi topo -m, nvidia-smi nvlink -s and the PCIe width in nvidia-smi -q show a link that is down"
            if within
            else "look at cable, port and switch (ethtool, ibstat), and whether NCCL_SOCKET_IFNAME names the fast one"
        )
        findings.append(Finding("yellow", "links", text, advice))
    return findings


def judge_speeds(rates: list[float], hosts: list[str], devices: list[str], least: float = 0.7) -> Finding:
    """The slowest rank; yellow below `least` of the median, of two ranks below that of the faster one."""
    usual = statistics.median_high(rates)
    slow = [rank for rank, rate in enumerate(rates) if rate < least * usual]
    said = f"{_flops(usual)} a rank in a matrix product"
    if not slow:
        slowest = min(range(len(rates)), key=rates.__getitem__)
        tail = f"; the slowest, rank {slowest} ({hosts[slowest]}), {_flops(rates[slowest])}" if len(rates) > 1 else ""
        return Finding("green", "compute", said + tail)
    told = named([f"rank {rank} ({hosts[rank]}, {devices[rank]}) {_flops(rates[rank])}" for rank in slow])
    advice = "all wait for it at every step: nvidia-smi -q -d PERFORMANCE,CLOCK there; see what else runs on it"
    return Finding("yellow", "compute", f"{said}; slow: {told}", advice)


def _pair(pair: tuple[int, int], hosts: list[str]) -> str:
    a, b = (hosts[rank] for rank in pair)
    return f"{pair[0]}-{pair[1]} ({a})" if a == b else f"{pair[0]}-{pair[1]} ({a}, {b})"


def _rate(bytes_a_second: float) -> str:
    return f"{format_figure(bytes_a_second / 1e9)} GB/s"


def _delay(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"
