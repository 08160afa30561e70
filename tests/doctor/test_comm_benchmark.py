"""The doctor finds wrong values in collectives, slow links and slow ranks, and reports no fault in a healthy world."""

import pytest
import torch.distributed as dist

from gearbox.doctor import comm_benchmark, comm_verdicts
from support.examination import HOST, of_colour, on_rank_1


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_healthy_world_is_green(examine, ranks):
    codes, output, report = examine(ranks=ranks)
    assert codes == [0] * ranks, output
    of_this_machine = {"disk", "memory", "limits", "shm", "versions"}  # this machine may be small or busy
    assert not of_colour(report, "red") and {*of_colour(report, "yellow")} <= of_this_machine, report["findings"]
    assert report["ranks"] == [{"host": HOST, "device": "cpu"}] * ranks
    assert set(report["bandwidths"]) == set(comm_benchmark.COLLECTIVES)
    assert [link["ranks"] for link in report["links"]] == [list(pair) for pair in comm_benchmark.pairs([HOST] * ranks)]
    assert {"values", "links", "gradients", "compute"} <= set(of_colour(report, "green"))


def test_a_collective_that_returns_wrong_values(examine):
    def fault() -> None:
        usual = dist.all_reduce
        dist.all_reduce = lambda tensor, *a, **k: (usual(tensor, *a, **k), tensor.view(-1)[:1].add_(1))

    _, _, report = examine(on_rank_1(fault))
    red = of_colour(report, "red")
    assert red["values"] == "all_reduce: only rank 1 received wrong values (from rank 0)"
    assert "gradient still differs after averaging on rank 1" in red["gradients"]


def test_a_rank_that_sends_wrong_values(examine):
    def fault() -> None:
        usual = dist.all_gather_into_tensor
        dist.all_gather_into_tensor = lambda taken, mine, *a, **k: usual(taken, 2 * mine, *a, **k)

    _, _, report = examine(on_rank_1(fault))
    assert of_colour(report, "red") == {"values": "all_gather: values from rank 1 arrived wrong on ranks 0, 1"}


def test_a_slow_rank(examine):
    def fault() -> None:
        usual = comm_benchmark._product_seconds
        comm_benchmark._product_seconds = lambda *given: sum(usual(*given) for _ in range(20))

    codes, _, report = examine(on_rank_1(fault))
    assert f"slow: rank 1 ({HOST}, cpu)" in of_colour(report, "yellow")["compute"]
    assert codes == [0, 0]  # a slow rank can train


def test_which_links_are_measured():
    assert len(comm_benchmark.pairs(["a"] * 8 + ["b"] * 8)) == 16 * 15 // 2
    many = comm_benchmark.pairs([f"node{rank // 8}" for rank in range(64)])
    assert {(rank, rank + 1) for rank in range(63)} <= {*many}
    assert len(many) == 63 + 8 * 7 // 2  # neighbours, and one pair per two machines


def test_a_slow_link_and_a_slow_card():
    hosts = ["node1"] * 4 + ["node2"] * 4
    rates = {pair: (5e-6, 300e9) for pair in comm_benchmark.pairs(hosts) if hosts[pair[0]] == hosts[pair[1]]}
    between = {pair: (2e-5, 40e9) for pair in comm_benchmark.pairs(hosts) if hosts[pair[0]] != hosts[pair[1]]}
    assert {f.colour for f in comm_verdicts.judge_links(rates | between, hosts, (0.5, 0.5))} == {"green"}
    slow = rates | between | {(1, 2): (5e-6, 20e9)} | {pair: (2e-5, 9e9) for pair in between if 6 in pair}
    within, outside = comm_verdicts.judge_links(slow, hosts, (0.5, 0.5))
    assert within.colour == "yellow" and within.text.endswith("slow: 1-2 (node1) 20 GB/s")
    assert outside.text.endswith("all links of rank 6 (node2) are slow")
    devices = [f"cuda:{rank % 4} NVIDIA H100" for rank in range(8)]
    found = comm_verdicts.judge_speeds([700e12] * 7 + [480e12], hosts, devices)
    assert found.colour == "yellow" and "slow: rank 7 (node2, cuda:3 NVIDIA H100) 480 TFLOP/s" in found.text
    assert comm_verdicts.judge_speeds([700e12] * 7 + [500e12], hosts, devices).colour == "green"
    two = comm_verdicts.judge_speeds(
        [480e12, 700e12], hosts[:2], devices[:2]
    )  # the median of two would hide the slow one
    assert two.colour == "yellow" and "slow: rank 0" in two.text


def test_the_likely_culprit_is_named():
    assert (
        comm_verdicts.likely_culprit({0: [2], 1: [2], 2: [2]}, 3) == "values from rank 2 arrived wrong on ranks 0, 1, 2"
    )
    assert "only rank 2 received wrong values (from all ranks)" in comm_verdicts.likely_culprit({2: [0, 1, 2]}, 3)
    assert comm_verdicts.likely_culprit({0: [1], 1: [0]}, 2) == "wrong from 1 to 0; wrong from 0 to 1"
