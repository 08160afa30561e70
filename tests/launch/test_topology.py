"""Test a machine's place in a job, the rank table, and machines that have not met. tests/cluster trains on two."""

import re
import socket
import subprocess
import sys

import pytest

from gearbox import ROOT
from gearbox.errors import UserError
from gearbox.launch import topology
from gearbox.launch.environment import LaunchEnvironment, python_path
from gearbox.launch.topology import Node, RankDevice, check_single_world, format_rank_table, node_from_flags

NAMES = [name for names in topology.NODE_FLAGS.values() for name in names] + [
    topology.RANKS_PER_NODE,
    *topology.NUM_NODES_VARIABLES,
]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in [
        *NAMES,
        topology.RANKS_PER_NODE,
        *topology.NUM_NODES_VARIABLES,
        "GROUP_WORLD_SIZE",
        "SLURM_JOB_NUM_NODES",
        "GLOO_SOCKET_IFNAME",
    ]:
        monkeypatch.delenv(name, raising=False)


def test_the_rank_table_has_a_line_per_machine():
    seats = [RankDevice(f"node{i // 8 + 1}", f"cuda:{i % 8} NVIDIA H100 80GB HBM3") for i in range(16)]
    assert format_rank_table(seats) == [
        "rank 0-7  node1  cuda:0-7 NVIDIA H100 80GB HBM3",
        "rank 8-15  node2  cuda:0-7 NVIDIA H100 80GB HBM3",
    ]
    assert format_rank_table([RankDevice("a", "cuda:0 H100"), RankDevice("a", "cuda:1 A100")]) == [
        "rank 0  a  cuda:0 H100",
        "rank 1  a  cuda:1 A100",
    ]
    assert format_rank_table([RankDevice("a", "cpu")] * 2) == ["rank 0-1  a  cpu"]


@pytest.mark.parametrize("rank_name", ["PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"])
def test_the_environment_completes_the_flags(monkeypatch, rank_name):
    given = {"PET_NNODES": "2", rank_name: "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29500"}
    for name, value in (given | {"PET_NPROC_PER_NODE": "4"}).items():
        monkeypatch.setenv(name, value)
    assert node_from_flags({}) == ({"num_processes": "8"}, Node(2, 1, "a", 29500))
    rest, place = node_from_flags({"machine_rank": "0", "main_process_ip": "b", "num_processes": "6", "log_dir": "x"})
    assert (rest, place) == ({"num_processes": "6", "log_dir": "x"}, Node(2, 0, "b", 29500))


def test_one_machine_needs_no_node(monkeypatch):
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert node_from_flags({}) == ({}, None)
    assert node_from_flags({"main_process_port": "29501"}) == ({"main_process_port": "29501"}, None)
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    assert node_from_flags({}) == ({"num_processes": "2"}, None)


FIRST = {"num_machines": "2", "machine_rank": "0", "main_process_ip": "a", "main_process_port": "29500"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_machines": "2"}, "--num_machines=2: also give --machine_rank=..., or set PET_NODE_RANK"),
        ({"num_machines": "2", "machine_rank": "0", "main_process_ip": "a"}, "also give --main_process_port=..."),
        ({"num_machines": "1:4"}, "found '1:4'; elastic ranges, as in torchrun --nnodes=1:4, are not supported"),
        ({"num_machines": "two"}, "num_machines (PET_NNODES): must be an integer >= 1, found 'two'"),
        (FIRST | {"machine_rank": "2"}, "--machine_rank=2: must be 0 to 1 for 2 machines"),
        (FIRST | {"main_process_port": "0"}, "(PET_MASTER_PORT): must be an integer >= 1, found '0'"),
    ],
)  # fmt: skip
def test_an_incomplete_node_is_refused(flags, said):
    with pytest.raises(UserError, match=re.escape(said)):
        node_from_flags(flags)


@pytest.mark.cold
@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({"flag": "--num_processes=3"}, "gearbox: --num_processes=3: must be divisible by the 2 machines"),
        ({"variable": "auto"}, "gearbox: PET_NPROC_PER_NODE: must be an integer >= 1, found 'auto'"),
    ],
)
def test_ranks_that_cannot_be_placed_are_refused(monkeypatch, ranks, said):
    if "variable" in ranks:
        monkeypatch.setenv("PET_NPROC_PER_NODE", ranks["variable"])
    line = [
        "src/launch.py",
        "ddp",
        *(f"--{flag}={value}" for flag, value in FIRST.items()),
        *ranks.get("flag", "").split(),
    ]
    outcome = subprocess.run([sys.executable, *line], cwd=ROOT, text=True, capture_output=True, check=False)
    assert (outcome.returncode, outcome.stderr.strip()) == (2, said)


def test_c10d_numbers_machines_by_machine_rank(monkeypatch):
    """c10d orders machines by address, so 10 must sort after 9, and the first address must be reachable."""
    ordered = [Node(12, rank, "10.0.0.1", 29500).environment()["PET_LOCAL_ADDR"] for rank in range(12)]
    assert ordered == sorted(ordered) and ordered[0] == "10.0.0.1"
    assert Node(12, 1, "node-a.example", 1).environment()["PET_LOCAL_ADDR"] > "node-a.example"


def test_gloo_gets_the_interface_that_leads_to_the_first_machine(monkeypatch):
    assert Node(2, 1, "127.0.0.1", 29500).environment()["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in Node(2, 1, "no such name", 29500).environment()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in Node(2, 1, "127.0.0.1", 29500).environment()


def test_the_first_machine_is_reachable_once_it_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert Node(2, 1, "127.0.0.1", port).is_reachable()
    assert not Node(2, 1, "127.0.0.1", port).is_reachable()
    assert Node(2, 0, "127.0.0.1", port).is_reachable()


@pytest.mark.parametrize("name", topology.NUM_NODES_VARIABLES)
def test_machines_that_have_not_met_are_refused(monkeypatch, name):
    alone, together = [RankDevice("node1", "cpu")] * 2, [RankDevice("node1", "cpu"), RankDevice("node2", "cpu")]
    check_single_world(alone)
    monkeypatch.setenv(name, "2")
    check_single_world(together)
    with pytest.raises(
        UserError,
        match=f"{name}=2, but the 2 ranks of this job are all on node1: each machine would train a separate model",
    ):
        check_single_world(alone)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # two launchers on one host
    check_single_world(alone)
    monkeypatch.setenv(name, "1:4")  # torchrun's elastic range
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    check_single_world(alone)


def test_a_kubernetes_port_is_not_a_torch_port(monkeypatch):
    """Kubernetes sets MASTER_PORT=tcp://... in each pod if a service is named master."""
    for given, port in (("29500", 29500), ("tcp://10.0.0.7:80", 0), ("", 0)):
        monkeypatch.setenv("MASTER_PORT", given)
        assert LaunchEnvironment.read().store_port == port


def test_a_child_finds_the_packages_of_its_parent(tmp_path, monkeypatch):
    """Modules of a cluster name packages in PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:/other")
    assert python_path().split(":") == [str(ROOT / "src"), str(tmp_path), "/other"]
    monkeypatch.delenv("PYTHONPATH")
    assert python_path() == str(ROOT / "src")


def test_idle_machines_of_a_slurm_job(monkeypatch):
    assert topology.num_idle_nodes([RankDevice("node1", "cpu")]) == 0
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert topology.num_idle_nodes([RankDevice("node1", "cpu")]) == 2
