"""Each fault is planted, found and named; a healthy world is not accused of anything."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import doctor
from gearbox import ROOT
from gearbox.config.gear import load_gear
from gearbox.doctor import comm_benchmark, comm_verdicts, finding, gpus, host, network, replica_sync
from gearbox.doctor.finding import Finding
from gearbox.errors import UserError
from ranks import fork_ranks, launcher_environment

HOST = os.uname().nodename
DDP = ROOT / "accelerate_configs" / "ddp.yaml"


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """Run the doctor on two warm ranks: examine(plant, "--timeout", "2") -> exit codes, output, what its JSON says."""
    monkeypatch.setattr(doctor, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(comm_benchmark, "message_sizes", lambda device: [2**16])

    def call(plant=lambda rank: None, *arguments: str, ranks: int = 2, meanwhile=lambda children: None):
        gear = load_gear(DDP, {"num_processes": str(ranks)})

        def work() -> int:
            plant(int(os.environ["RANK"]))
            return doctor.main(["--json", *arguments], gear)

        codes, output = fork_ranks(ranks, launcher_environment(DDP, ranks), work, meanwhile)
        spoken = [line for line in output.splitlines() if line.startswith("{")]
        assert len(spoken) == 1, output  # one rank speaks
        assert "Traceback" not in output, output
        return codes, output, json.loads(spoken[0])

    return call


def of_colour(told: dict, colour: str) -> dict[str, str]:
    return {finding["name"]: finding["text"] for finding in told["findings"] if finding["colour"] == colour}


# ----------------------------------------------------------------------- all ranks


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


def on_rank_1(fault):
    return lambda rank: fault() if rank == 1 else None


def changed_model(change):
    def fault() -> None:
        usual = replica_sync.small_model

        def changed() -> torch.nn.Module:
            model = usual()
            change(model)
            return model

        replica_sync.small_model = changed

    return on_rank_1(fault)


def test_a_rank_that_drops_a_gradient(examine):
    codes, _, told = examine(changed_model(lambda model: model.head.weight.register_hook(torch.zeros_like)))
    assert of_colour(told, "red") == {"gradients": "head.weight: the gradient of rank 1 is 0, the others' is not"}
    assert codes == [1, 0]  # that of a machine's first rank counts


def test_a_rank_that_freezes_a_parameter(examine):
    _, _, told = examine(changed_model(lambda model: model.head.bias.requires_grad_(False)))
    assert of_colour(told, "red") == {"gradients": "head.bias: rank 1 has no gradient, the others have one"}


def test_a_parameter_that_differs(examine):
    def change(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.layer.bias[3] += 1e-6

    _, _, told = examine(changed_model(change))
    assert of_colour(told, "red") == {"parameters": "the same seed gave other values: layer.bias is another on rank 1"}


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


def test_a_rank_that_never_comes(examine):
    codes, _, told = examine(on_rank_1(lambda: time.sleep(60)), "--timeout", "2", meanwhile=release)
    assert of_colour(told, "red") == {"ranks": f"rank 1 ({HOST}) did not come within 2 s"}
    assert codes[0] == 1


def release(children: list[int]) -> None:
    """Kill rank 1 once rank 0 has ended."""
    first = psutil.Process(children[0])
    while first.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
    os.kill(children[1], signal.SIGKILL)


def in_broadcast(act):
    """On rank 1, in the middle of the doctor's work."""
    return on_rank_1(lambda: comm_benchmark.COLLECTIVES.update(broadcast=lambda *_: act()))


def test_a_rank_that_dies(examine):
    codes, _, told = examine(in_broadcast(lambda: os._exit(9)))
    assert of_colour(told, "red") == {"ranks": f"rank 1 ({HOST}) has died in broadcast of 64 KiB"}
    assert codes == [1, 9]


def test_a_rank_that_dies_where_nothing_fails_by_itself(examine, monkeypatch):
    """The others wait outside any collective, as they would inside one of NCCL's."""
    monkeypatch.setattr(gpus, "take_device", lambda local_rank: os._exit(9) if local_rank else torch.device("cpu"))
    _, _, told = examine(lambda rank: None, "--timeout", "8")
    assert of_colour(told, "red") == {"ranks": f"rank 1 ({HOST}) has died in check-in"}


def test_a_first_rank_that_dies(examine):
    """It would have spoken; another does."""
    fault = {"broadcast": lambda *_: os._exit(9)}
    codes, _, told = examine(lambda rank: comm_benchmark.COLLECTIVES.update(fault) if rank == 0 else None)
    assert of_colour(told, "red") == {"ranks": f"rank 0 ({HOST}) has died in broadcast of 64 KiB"}
    assert codes == [9, 1]


def test_a_rank_that_fails(examine):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand a page more")

    _, _, told = examine(in_broadcast(fail))
    said = f"rank 1 ({HOST}) failed in broadcast of 64 KiB: CUDA error: an illegal memory access was encountered"
    assert of_colour(told, "red") == {"ranks": said}


def test_a_rank_that_is_busy_elsewhere(examine):
    _, _, told = examine(in_broadcast(lambda: time.sleep(60)), "--timeout", "4", meanwhile=release)
    said = rf"rank 1 \({HOST}\) does not take part in broadcast of 64 KiB for 4 s, in .*\(test_doctor.py:\d+\)"
    assert re.fullmatch(said, of_colour(told, "red")["ranks"]), told["findings"]


def test_a_rank_that_is_stopped(examine):
    stop = in_broadcast(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    _, _, told = examine(stop, "--timeout", "4", meanwhile=release)
    said = f"rank 1 ({HOST}) does not answer: dead, stopped, or cut off, in broadcast of 64 KiB"
    assert of_colour(told, "red") == {"ranks": said}


def test_the_launcher_is_told_why(examine, tmp_path, monkeypatch):
    monkeypatch.setenv("GEARBOX_OUTCOME_FILE", str(tmp_path / "outcome"))
    examine(in_broadcast(lambda: os._exit(9)))
    outcome = json.loads((tmp_path / "outcome").read_text())
    assert outcome["outcome"] == "failed" and f"rank 1 ({HOST}) has died" in outcome["text"]


def test_machines_that_have_not_met_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "RUNS", tmp_path)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    gear = load_gear(DDP, {"num_processes": "2"})
    codes, output = fork_ranks(2, launcher_environment(DDP, 2), lambda: doctor.main(["--json"], gear))
    assert codes == [2, 2] and "each machine would train alone" in output


# ----------------------------------------------------------------------- a cold start, and one machine


def shell(line: str, folder: Path) -> subprocess.CompletedProcess:
    programs = os.path.dirname(sys.executable)  # noqa: PTH120  a symlinked interpreter must stay in its environment
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "DS_"))}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    return subprocess.run(
        line, shell=True, cwd=folder, env=environment, text=True, capture_output=True, check=False, timeout=120
    )


def test_what_is_red_is_the_last_thing_on_the_screen(tmp_path):
    (tmp_path / "runs").touch()
    ended = shell(f"accelerate launch --config_file {DDP} --num_processes 2 {ROOT}/src/doctor.py", tmp_path)
    last = ended.stderr.strip().splitlines()[-2:]
    assert ended.returncode == 1
    assert "rank 0-1" in ended.stdout and "not ready" in ended.stdout
    assert "\x1b" not in ended.stdout, "no colours where there is no terminal"
    assert last[0] == "red     disk        runs cannot be written: Not a directory", ended.stderr
    assert last[1].strip().startswith("-> ")


def has_namespaces() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="needs root and a mount namespace")
def test_a_machine_that_lacks_almost_everything(tmp_path):
    (tmp_path / "runs").mkdir()
    steps = (
        "mount -t tmpfs -o size=16m none /dev/shm; mount -t tmpfs -o size=1m none runs; ulimit -n 256; "
        f"exec python {ROOT}/src/doctor.py --machine --json"
    )
    ended = shell(f"unshare -m sh -c {shlex.quote(steps)}", tmp_path)
    told = json.loads(ended.stdout)
    assert ended.returncode == 1 and told["verdict"] == "red", ended.stdout + ended.stderr
    assert of_colour(told, "red") == {"disk": "runs cannot be written: No space left on device"}
    assert of_colour(told, "yellow")["limits"] == "256 open files, 1 ranks may need 528"
    # two ranks there: what a single one would not notice
    look = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from gearbox.doctor import host; "
        "[print(host.shared_memory(Path('/dev/shm'), 2, gpus)) for gpus in (0, 2)]"
    )
    line = f"mount -t tmpfs -o size=16m none /dev/shm; exec python -c {shlex.quote(look)} {ROOT}/src"
    said = shell(f"unshare -m sh -c {shlex.quote(line)}", tmp_path).stdout.splitlines()
    assert "'yellow'" in said[0] and "gloo needs none" in said[0]
    assert "'red'" in said[1] and "/dev/shm has 16 MiB; NCCL may need 128 MiB for 2 ranks" in said[1]
    steps = f"mount -t tmpfs -o ro none runs; exec python {ROOT}/src/doctor.py --machine"
    ended = shell(f"unshare -m sh -c {shlex.quote(steps)}", tmp_path)
    assert "red     disk        runs cannot be written: Read-only file system" in ended.stdout, ended.stdout


def test_one_machine_is_looked_at_without_torch(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import doctor; "
        "code = doctor.main(['--machine']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    ended = shell(f"python -c {shlex.quote(code)}", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    names = [line.split()[1] for line in ended.stdout.splitlines()[:-1] if not line.startswith(" ")]
    assert names == ["versions", "driver", "shm", "limits", "memory", "disk", "address", "hub"]


# ----------------------------------------------------------------------- machines that are not here


def test_versions_out_of_bounds_and_untested():
    found = host.installed()
    assert [f.colour for f in host.package_versions(found, ROOT / "pyproject.toml", ROOT / "constraints.txt")] == [
        "green"
    ]

    def told(**other: str | None) -> dict[str, str]:
        changed = {name: version for name, version in (found | other).items() if version is not None}
        told = host.package_versions(changed, ROOT / "pyproject.toml", ROOT / "constraints.txt")
        return {finding.colour: finding.text for finding in told}

    assert told(torch="2.9.1")["red"].startswith("torch 2.9.1 is not >=2.11 (below 2.10 a checkpoint can run code")
    assert told(peft=None) == {"red": "peft is missing"}
    tested = re.search(r"^deepspeed==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert told(deepspeed="0.19.9.9") == {"yellow": f"deepspeed 0.19.9.9 (tested: {tested})"}
    assert set(told(torch=found["torch"].partition("+")[0] + "+cu130")) == {"green"}  # another build of the same


def test_machines_that_differ():
    same = {"torch": "2.13.0", "python": "3.11.7"}
    assert finding.differing({"node1": same, "node2": same}) is None
    found = finding.differing({"node1": same, "node2": same, "node3": same | {"torch": "2.12.1"}})
    assert found.colour == "red" and found.text == "torch 2.13.0 on node1, node2, 2.12.1 on node3"
    found = finding.differing({"node1": same, "node2": {"python": "3.11.7"}})
    assert found.text == "torch 2.13.0 on node1, missing on node2"


def test_what_is_the_same_on_all_machines_is_said_once():
    good, bad = Finding("green", "shm", "8 GiB"), Finding("red", "shm", "64 MiB", "give it more")
    merged = finding.merged([("node1", [good]), ("node2", [bad]), ("node3", [good])])
    assert [(f.colour, f.hosts) for f in merged] == [("green", ("node1", "node3")), ("red", ("node2",))]
    assert finding.lines(merged[1]) == ["red     shm         node2: 64 MiB", f"{'':<19} -> give it more"]
    assert [f.hosts for f in finding.merged([("node1", [good]), ("node2", [good])])] == [()]


@pytest.mark.parametrize(
    ("resolved", "environment", "colour", "words"),
    [
        (["127.0.1.1"], {}, "red", "node1 resolves to 127.0.1.1: gloo would tell 1 other machines"),
        (["127.0.0.1", "::1"], {}, "red", "node1 resolves to 127.0.0.1"),
        ([], {}, "red", "node1 does not resolve"),
        (["10.9.9.9"], {}, "red", "node1 resolves to 10.9.9.9"),  # an address that no interface here has
        (["127.0.1.1", "10.0.0.5"], {}, "green", "node1 is 10.0.0.5 on eth1"),
        (["127.0.1.1"], {"GLOO_SOCKET_IFNAME": "eth1"}, "green", "eth1"),
        (["10.0.0.5"], {"GLOO_SOCKET_IFNAME": "^lo"}, "red", "gloo wants a whole name"),
        (["10.0.0.5"], {"NCCL_SOCKET_IFNAME": "ib"}, "red", "NCCL_SOCKET_IFNAME=ib fits none"),
        (["10.0.0.5"], {"NCCL_SOCKET_IFNAME": "eth"}, "green", "eth1"),
        (["10.0.0.5"], {"NCCL_SOCKET_IFNAME": "=eth"}, "red", "fits none"),
    ],
)
def test_the_address_that_other_machines_are_told(resolved, environment, colour, words):
    interfaces = {"lo": ["127.0.0.1"], "eth1": ["10.0.0.5"]}
    addresses = network.HostAddresses("node1", resolved, interfaces, way_out="10.0.0.5")
    found = network.check_address(addresses, 2, 8, environment)
    assert found.colour == colour and words in found.text
    if colour == "red":
        assert "GLOO_SOCKET_IFNAME=eth1" in found.advice  # the interface that leads to the first machine
    alone = network.check_address(addresses, 1, 8, environment)
    assert alone.colour == "green"


def test_the_hub_never_blocks_and_is_never_red(monkeypatch):
    assert network.check_hub({"HF_HUB_OFFLINE": "1"}).colour == "green"
    found = network.check_hub({"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert found.colour == "yellow" and "http://127.0.0.1:9" in found.text
    monkeypatch.setattr(network, "HUB_SECONDS", 0.1)
    assert network.in_background(lambda: threading.Event().wait())().colour == "yellow"


def test_drivers(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
    (tmp_path / "version").write_text(line + "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n")
    assert gpus.driver_version(tmp_path / "version") == "580.95.05"
    assert gpus.driver_version(tmp_path / "none") is None
    assert gpus.torch_cuda() == torch.version.cuda

    def told(*given) -> tuple[str, str]:
        found = gpus.check_driver(*given)
        assert (found.colour == "green") == (not found.advice)
        return found.colour, found.text

    assert told("580.95.05", "13.0", 8) == ("green", "NVIDIA driver 580.95.05, torch's CUDA 13.0, 8 GPUs")
    assert told("550.144.03", "13.0", 0)[0] == "red" and "which needs 580" in told("550.144.03", "13.0", 0)[1]
    assert told("550.144.03", "12.8", 8)[0] == "green"
    assert told("580.95.05", "13.0", 0)[0] == "red" and "sees no GPU" in told("580.95.05", "13.0", 0)[1]
    assert told("580.95.05", None, 0)[0] == "red"
    assert told(None, "13.0", 0)[0] == "green"


def test_gpus_that_are_taken_broken_or_hot():
    row = "{}, NVIDIA H100 80GB HBM3, 81559, {}, {}, Not Active, {}\n"
    clean = "".join(row.format(i, 4, 0, "Not Active") for i in range(4))
    (found,) = gpus.check_gpus(clean)
    assert (found.colour, found.text) == ("green", "4 x NVIDIA H100 80GB HBM3 80 GiB, free")
    table = row.format(0, 70000, 0, "Not Active") + row.format(1, 4, 2, "Not Active") + row.format(2, 4, 0, "Active")
    told = {finding.text: finding.colour for finding in gpus.check_gpus(table)}
    assert set(told.values()) == {"yellow"}
    assert [*told] == [
        "taken already: 68.4 of 80 GiB of GPU 0",
        "GPU 1: 2 uncorrected ECC errors since the start",
        "GPU 2 is slowed down by heat or power",
    ]
    (found,) = gpus.check_gpus("0, NVIDIA GeForce RTX 4090, 24564, 12, [N/A], Not Active, Not Active\n")
    assert found.colour == "green"


NVSWITCH = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t56-111\t1\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
TWO_SOCKETS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-15\t0
GPU1\tNV4\t X \tSYS\tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \tPHB\t16-31\t1
GPU3\tSYS\tSYS\tPHB\t X \t16-31\t1
"""


def test_topologies():
    (found,) = gpus.check_topology(NVSWITCH, 2)
    assert found.text == "NVLink between all 2 GPUs (NV18)"
    (found,) = gpus.check_topology(TWO_SOCKETS, 4)
    assert found.text.startswith(
        "pairs without NVLink: 4 by SYS (0-2, 0-3, 1-2, 1-3); 1 by PHB (2-3); SYS crosses CPUs"
    )
    assert [*gpus.check_topology(NVSWITCH, 1)] == [*gpus.check_topology("", 2)] == []


def test_the_memory_of_a_container(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(str(2**30))
    assert host._cgroup_room(tmp_path) is None
    (tmp_path / "memory.max").write_text(str(4 * 2**30))
    assert host._cgroup_room(tmp_path) == 3 * 2**30
    monkeypatch.setattr(host, "_cgroup_room", lambda: 3 * 2**30)
    assert host.memory(1).colour == "green"
    assert "3 GiB free of the container's limit for 2 ranks" in host.memory(2).text


def test_operations_that_would_be_compiled(monkeypatch, tmp_path):
    gear = load_gear(ROOT / "accelerate_configs" / "zero3_nvme.yaml")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(host, "_header", lambda name: True)
    monkeypatch.setattr(host.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert [finding.colour for finding in host.operations(gear, 0)] == ["green"]
    monkeypatch.setattr(host, "_header", lambda name: False)
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    (found,) = host.operations(gear, 1)
    assert found.colour == "red"
    assert found.text.endswith("async_io, but there is no a C++ compiler, no libaio's headers, no nvcc")
    (tmp_path / "async_io.so").touch()
    assert [finding.colour for finding in host.operations(gear, 1)] == ["green"]
    forced = json.loads((ROOT / "ds_configs" / "zero3_offload.json").read_text())
    (tmp_path / "forced.json").write_text(json.dumps(forced | {"zero_force_ds_cpu_optimizer": True}))
    flags = {"deepspeed_config_file": str(tmp_path / "forced.json")}
    assert load_gear(ROOT / "accelerate_configs" / "zero3_offload.yaml", flags).compiled == ["cpu_adam"]
    assert [*host.operations(load_gear(DDP), 1)] == []
    assert [*host.operations(load_gear(ROOT / "accelerate_configs" / "zero3_offload.yaml"), 1)] == []


# ----------------------------------------------------------------------- clusters that are not here


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


# ----------------------------------------------------------------------- a training loop of one's own


def test_the_documented_snippet(tmp_path):
    """As it stands in the document, on two ranks, healthy; and where rank 1 has another weight and drops a gradient."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "doctor.md").read_text(), re.S)

    def run(faulty: bool) -> str:
        def work() -> None:
            dist.init_process_group("gloo")
            torch.manual_seed(0)
            inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            model = torch.nn.parallel.DistributedDataParallel(inner)
            if faulty and dist.get_rank() == 1:
                with torch.no_grad():
                    inner[1].bias += 1
                inner[0].weight.register_hook(torch.zeros_like)
            exec(snippet, {"model": model, "batch": torch.randn(3, 4)})

        codes, output = fork_ranks(2, {}, work)
        assert codes == [0, 0], output
        return output

    said = run(faulty=False)
    assert said.splitlines() == ["in step", "[rank 0] 4 gradients", "[rank 1] 4 gradients"], said
    said = run(faulty=True)
    assert "module.1.bias is another on rank 1" in said
    assert "module.0.weight: the gradient of rank 1 is 0, the others' is not" in said


def test_gradients_that_are_not_finite_or_not_averaged():
    def work() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = torch.nn.Linear(3, 1)
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.fill_(0)
        model(torch.full((1, 3), 1.0 + rank)).sum().backward()
        told = [gradient.problem for gradient in replica_sync.check_gradients(model.named_parameters(), averaged=True)]
        assert told == ["after averaging rank 1 has another gradient than the others", ""], told
        checked = replica_sync.check_gradients(model.named_parameters())
        assert [gradient.problem for gradient in checked] == ["", ""]
        assert checked[0].before == pytest.approx([3**0.5, 2 * 3**0.5])
        assert checked[0].after == pytest.approx([1.5 * 3**0.5] * 2)
        if rank == 1:
            model.bias.grad.fill_(float("nan"))
        told = [gradient.problem for gradient in replica_sync.check_gradients(model.named_parameters())]
        assert told == ["", "the gradient of rank 1 is not finite"], told

    codes, output = fork_ranks(2, {}, work)
    assert codes == [0, 0], output


def test_shards_are_refused():
    model = torch.nn.Linear(2, 2)
    model.weight.device_mesh = "a mesh"
    with pytest.raises(UserError, match="weight: is cut over ranks"):
        replica_sync.check_parameters(model)
