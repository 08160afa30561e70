"""Collectives that return wrong values, and slow links and ranks, are found; a healthy world is not accused."""

import pytest
import torch.distributed as dist

from gearbox.doctor import comm_benchmark, comm_verdicts
from support.examination import HOST, of_colour, on_rank_1


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_healthy_world_is_green(examine, ranks):
    codes, output, told = examine(ranks=ranks)
    assert codes == [0] * ranks, output
    of_this_machine = {"disk", "memory", "limits", "shm", "versions"}  # it may have little of them, and be busy
    assert not of_colour(told, "red") and {*of_colour(told, "yellow")} <= of_this_machine, told["findings"]
    assert told["ranks"] == [{"host": HOST, "device": "cpu"}] * ranks
    assert set(told["bandwidths"]) == set(comm_benchmark.COLLECTIVES)
    assert [link["ranks"] for link in told["links"]] == [list(pair) for pair in comm_benchmark.pairs([HOST] * ranks)]
    assert {"values", "links", "gradients", "compute"} <= set(of_colour(told, "green"))


def test_a_collective_that_returns_wrong_values(examine):
    def fault() -> None:
        usual = dist.all_reduce
        dist.all_reduce = lambda tensor, *a, **k: (usual(tensor, *a, **k), tensor.view(-1)[:1].add_(1))

    _, _, told = examine(on_rank_1(fault))
    red = of_colour(told, "red")
    assert red["values"] == "all_reduce: rank 1 received wrong values (of rank 0), the others did not"
    assert "after averaging rank 1 has another gradient" in red["gradients"]


def test_a_rank_that_sends_wrong_values(examine):
    def fault() -> None:
        usual = dist.all_gather_into_tensor
        dist.all_gather_into_tensor = lambda taken, mine, *a, **k: usual(taken, 2 * mine, *a, **k)

    _, _, told = examine(on_rank_1(fault))
    assert of_colour(told, "red") == {"values": "all_gather: what rank 1 sent came wrong on ranks 0, 1"}


def test_a_slow_rank(examine):
    def fault() -> None:
        usual = comm_benchmark._product_seconds
        comm_benchmark._product_seconds = lambda *given: sum(usual(*given) for _ in range(20))

    codes, _, told = examine(on_rank_1(fault))
    assert f"slow: rank 1 ({HOST}, cpu)" in of_colour(told, "yellow")["compute"]
    assert codes == [0, 0]  # it would train


def test_which_links_are_measured():
    assert len(comm_benchmark.pairs(["a"] * 8 + ["b"] * 8)) == 16 * 15 // 2
    many = comm_benchmark.pairs([f"node{rank // 8}" for rank in range(64)])
    assert {(rank, rank + 1) for rank in range(63)} <= {*many}
    assert len(many) == 63 + 8 * 7 // 2  # the first ranks of two machines are no neighbours


def test_a_slow_link_and_a_slow_card():
    hosts = ["node1"] * 4 + ["node2"] * 4
    rates = {pair: (5e-6, 300e9) for pair in comm_benchmark.pairs(hosts) if hosts[pair[0]] == hosts[pair[1]]}
    between = {pair: (2e-5, 40e9) for pair in comm_benchmark.pairs(hosts) if hosts[pair[0]] != hosts[pair[1]]}
    assert {f.colour for f in comm_verdicts.judge_links(rates | between, hosts, (0.5, 0.5))} == {"green"}
    slow = rates | between | {(1, 2): (5e-6, 20e9)} | {pair: (2e-5, 9e9) for pair in between if 6 in pair}
    within, outside = comm_verdicts.judge_links(slow, hosts, (0.5, 0.5))
    assert within.colour == "yellow" and within.text.endswith("slow: 1-2 (node1) 20 GB/s")
    assert outside.text.endswith("every link of rank 6 (node2) is")
    devices = [f"cuda:{rank % 4} NVIDIA H100" for rank in range(8)]
    found = comm_verdicts.judge_speeds([700e12] * 7 + [480e12], hosts, devices)
    assert found.colour == "yellow" and "slow: rank 7 (node2, cuda:3 NVIDIA H100) 480 TFLOP/s" in found.text
    assert comm_verdicts.judge_speeds([700e12] * 7 + [500e12], hosts, devices).colour == "green"
    two = comm_verdicts.judge_speeds([480e12, 700e12], hosts[:2], devices[:2])  # the median of two would hide it
    assert two.colour == "yellow" and "slow: rank 0" in two.text


def test_who_is_to_blame():
    assert comm_verdicts.likely_culprit({0: [2], 1: [2], 2: [2]}, 3) == "what rank 2 sent came wrong on ranks 0, 1, 2"
    assert "rank 2 received wrong values (of ranks all)" in comm_verdicts.likely_culprit({2: [0, 1, 2]}, 3)
    assert comm_verdicts.likely_culprit({0: [1], 1: [0]}, 2) == "from 1 to 0; from 0 to 1"
