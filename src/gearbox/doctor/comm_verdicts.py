"""Turn the measurements of comm_benchmark into findings: wrong values, slow links and slow ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from gearbox.console import format_figure
from gearbox.doctor.comm_benchmark import COLLECTIVES, Links, Measured
from gearbox.doctor.finding import Finding, shorten

# Shares of the median. CPU bounds are looser: other work slows a CPU, and its ranks' links are its own memory.
SLOW_LINK = {"cuda": (0.5, 0.5), "cpu": (0.0, 0.2)}  # within machines, between machines
SLOW_RANK = {"cuda": 0.7, "cpu": 0.5}


def judge_values(measured: list[dict[str, list[Measured]]]) -> Finding:
    """Report whether every rank received the values that the others sent; if not, name the likely culprit."""
    problems = []
    for name in measured[0]:
        by_rank = [sorted({source for _, _, wrong in own[name] for source in wrong}) for own in measured]
        if wrong := {rank: sources for rank, sources in enumerate(by_rank) if sources}:
            problems.append(f"{name}: {likely_culprit(wrong, len(measured))}")
    if not problems:
        return Finding("green", "values", f"{', '.join(measured[0])}: correct on all {len(measured)} ranks")
    advice = "run dcgmi diag -r 3 on that machine; then retry with NCCL_P2P_DISABLE=1 or another driver"
    return Finding("red", "values", "; ".join(problems), advice)


def likely_culprit(wrong: dict[int, list[int]], num_ranks: int) -> str:
    """Describe where values arrived wrong. `wrong` maps a receiving rank to the ranks whose values it got wrong."""
    sources = {source for bad in wrong.values() for source in bad}
    if len(wrong) == 1:
        rank, bad = next(iter(wrong.items()))
        sent_by = f"rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}"
        whose = "all ranks" if len(bad) == num_ranks else sent_by
        return f"only rank {rank} received wrong values (from {whose})"
    if len(sources) == 1:
        return f"values from rank {sources.pop()} arrived wrong on ranks {', '.join(map(str, wrong))}"
    return "; ".join(f"wrong from {', '.join(map(str, bad))} to {rank}" for rank, bad in wrong.items())


def bandwidths(measured: list[dict[str, list[Measured]]]) -> dict[str, list[tuple[int, float, float]]]:
    """Return (bytes, seconds of the slowest rank, bus bandwidth in bytes per second) by collective and message size.

    Bus bandwidth is defined as in nccl-tests: the load of each link. It is comparable across collectives and numbers
    of ranks, and with the hardware's figure.
    """
    share = (len(measured) - 1) / len(measured)
    factor = {"all_reduce": 2 * share, "broadcast": 1.0, "send_recv": 1.0}
    rates = {}
    for name in COLLECTIVES:
        by_size = zip(*(own[name] for own in measured), strict=True)
        slowest = [(ranks[0][0], max(seconds for _, seconds, _ in ranks)) for ranks in by_size]
        rates[name] = [
            (num_bytes, seconds, num_bytes * factor.get(name, share) / seconds) for num_bytes, seconds in slowest
        ]
    return rates


def judge_links(links: Links, hosts: list[str], least: tuple[float, float]) -> list[Finding]:
    """Judge the links within machines and between machines; a link below `least` of the median is yellow.

    `least` holds two shares: within machines, between machines.
    """
    findings = []
    for is_within, share in zip((True, False), least, strict=True):
        group = {(a, b): figures for (a, b), figures in links.items() if (hosts[a] == hosts[b]) == is_within}
        if group:
            findings.append(_judge_link_group(group, hosts, is_within, share))
    return findings


def _judge_link_group(links: Links, hosts: list[str], is_within: bool, least: float) -> Finding:
    rates = {pair: rate for pair, (_, rate) in links.items()}
    usual, (pair, slowest) = statistics.median_high(rates.values()), min(rates.items(), key=lambda item: item[1])
    delay = statistics.median(delay for delay, _ in links.values())
    summary = f"{len(rates)} {'within' if is_within else 'between'} machines: {_rate(usual)}, {_delay(delay)}"
    slow = {pair: rate for pair, rate in rates.items() if rate < least * usual}
    if not slow:
        tail = f"; slowest: {_pair(pair, hosts)} {_rate(slowest)}" if len(rates) > 1 else ""
        return Finding("green", "links", summary + tail)
    text = f"{summary}; slow: {', '.join(f'{_pair(p, hosts)} {_rate(r)}' for p, r in list(slow.items())[:4])}"
    if len(slow) > 4:
        text += f" and {len(slow) - 4} more"
    if guilty := _slow_everywhere(slow, rates):
        text += f"; all links of rank {', '.join(f'{rank} ({hosts[rank]})' for rank in guilty)} are slow"
    advice = (
        "look for a link that is down: nvidia-smi topo -m, nvidia-smi nvlink -s, the PCIe width in nvidia-smi -q"
        if is_within
        else "check cable, port and switch (ethtool, ibstat), and whether NCCL_SOCKET_IFNAME names the fast interface"
    )
    return Finding("yellow", "links", text, advice)


def _slow_everywhere(slow: dict[tuple[int, int], float], rates: dict[tuple[int, int], float]) -> list[int]:
    """Return the ranks whose links are all slow. Return none if there is one link, or if all ranks are affected."""
    if len(rates) == 1:
        return []
    guilty = [rank for rank in _ranks_of(slow) if all(pair in slow for pair in rates if rank in pair)]
    return guilty if len(guilty) < len(_ranks_of(rates)) else []


def _ranks_of(pairs: Iterable[tuple[int, int]]) -> list[int]:
    return sorted({rank for pair in pairs for rank in pair})


def judge_speeds(rates: list[float], hosts: list[str], devices: list[str], least: float = 0.7) -> Finding:
    """Judge the slowest rank: yellow below `least` of the median (of two ranks, of the faster one)."""
    usual = statistics.median_high(rates)
    slow = [rank for rank, rate in enumerate(rates) if rate < least * usual]
    summary = f"{_flops(usual)} per rank in a matrix product"
    if not slow:
        slowest = min(range(len(rates)), key=rates.__getitem__)
        tail = f"; slowest: rank {slowest} ({hosts[slowest]}) {_flops(rates[slowest])}" if len(rates) > 1 else ""
        return Finding("green", "compute", summary + tail)
    names = shorten([f"rank {rank} ({hosts[rank]}, {devices[rank]}) {_flops(rates[rank])}" for rank in slow])
    advice = (
        "every step waits for it: run nvidia-smi -q -d PERFORMANCE,CLOCK there, and check what else uses that device"
    )
    return Finding("yellow", "compute", f"{summary}; slow: {names}", advice)


def _pair(pair: tuple[int, int], hosts: list[str]) -> str:
    a, b = (hosts[rank] for rank in pair)
    return f"{pair[0]}-{pair[1]} ({a})" if a == b else f"{pair[0]}-{pair[1]} ({a}, {b})"


def _rate(bytes_a_second: float) -> str:
    return f"{format_figure(bytes_a_second / 1e9)} GB/s"


def _delay(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"
