"""The doctor finds what a machine lacks, and reports it once for all machines that lack it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gearbox import ROOT, processes
from gearbox.config.gear import load_gear
from gearbox.doctor import finding, host
from gearbox.doctor.finding import Finding
from support.examination import DDP, of_colour


def shell(line: str, folder: Path) -> subprocess.CompletedProcess:
    programs = os.path.dirname(sys.executable)  # noqa: PTH120  a symlinked interpreter must stay in its environment
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "DS_"))}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    return subprocess.run(
        line, shell=True, cwd=folder, env=environment, text=True, capture_output=True, check=False, timeout=120
    )


@pytest.mark.cold
def test_the_verdict_is_printed_last(tmp_path):
    (tmp_path / "runs").touch()
    ended = shell(f"accelerate launch --config_file {DDP} --num_processes 2 {ROOT}/src/doctor.py", tmp_path)
    assert ended.returncode == 137, "the first rank ends its launcher"
    assert "rank 0-1" in ended.stdout and ended.stdout.splitlines()[-1].startswith("not ready")
    assert "red     disk        runs cannot be written: Not a directory\n" + " " * 19 + " -> " in ended.stdout
    assert "\x1b" not in ended.stdout, "colour codes without a terminal"
    assert ended.stderr.strip() in ("", "Killed"), "nothing of the launcher"


def has_namespaces() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


@pytest.mark.root
@pytest.mark.cold
@pytest.mark.skipif(not has_namespaces(), reason="needs root and a mount namespace")
def test_a_machine_that_lacks_almost_everything(tmp_path):
    (tmp_path / "runs").mkdir()
    steps = [
        "mount -t tmpfs -o size=16m none /dev/shm",
        "mount -t tmpfs -o size=1m none runs",
        "ulimit -n 256",
        f"exec python {ROOT}/src/doctor.py --machine --json",
    ]
    ended = shell(f"unshare -m sh -c {shlex.quote('; '.join(steps))}", tmp_path)
    report = json.loads(ended.stdout)
    assert ended.returncode == 1 and report["verdict"] == "red", ended.stdout + ended.stderr
    assert of_colour(report, "red") == {"disk": "runs cannot be written: No space left on device"}
    assert of_colour(report, "yellow")["limits"] == "256 open files; 1 ranks may need 528"
    # Two ranks need shared memory, which a single rank does not use.
    look = [
        "import sys; sys.path.insert(0, sys.argv[1])",
        "from pathlib import Path; from gearbox.doctor import host",
        "[print(host.shared_memory(Path('/dev/shm'), 2, gpus)) for gpus in (0, 2)]",
    ]
    line = f"mount -t tmpfs -o size=16m none /dev/shm; exec python -c {shlex.quote('; '.join(look))} {ROOT}/src"
    printed = shell(f"unshare -m sh -c {shlex.quote(line)}", tmp_path).stdout.splitlines()
    assert "'yellow'" in printed[0] and "gloo needs none" in printed[0]
    assert "'red'" in printed[1] and "/dev/shm has 16 MiB; NCCL may need 128 MiB for 2 ranks" in printed[1]
    line = f"mount -t tmpfs -o ro none runs; exec python {ROOT}/src/doctor.py --machine"
    ended = shell(f"unshare -m sh -c {shlex.quote(line)}", tmp_path)
    assert "red     disk        runs cannot be written: Read-only file system" in ended.stdout, ended.stdout


@pytest.mark.cold
def test_one_machine_is_checked_without_torch(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import doctor; "
        "code = doctor.main(['--machine']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    ended = shell(f"python -c {shlex.quote(code)}", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    names = [line.split()[1] for line in ended.stdout.splitlines()[:-1] if not line.startswith(" ")]
    assert names == ["versions", "driver", "shm", "limits", "memory", "disk", "rdma", "address", "hub"]


def test_versions_out_of_bounds_and_untested():
    found = host.installed()
    assert [f.colour for f in host.package_versions(found, ROOT / "pyproject.toml", ROOT / "constraints.txt")] == [
        "green"
    ]

    def texts(**other: str | None) -> dict[str, str]:
        changed = {name: version for name, version in (found | other).items() if version is not None}
        findings = host.package_versions(changed, ROOT / "pyproject.toml", ROOT / "constraints.txt")
        return {finding.colour: finding.text for finding in findings}

    assert texts(torch="2.9.1")["red"].startswith("torch 2.9.1 is not >=2.11 (below 2.10 a checkpoint can run code")
    assert texts(peft=None) == {"red": "peft is missing"}
    tested = re.search(r"^deepspeed==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert texts(deepspeed="0.19.9.9") == {"yellow": f"deepspeed 0.19.9.9 (tested: {tested})"}
    assert set(texts(torch=found["torch"].partition("+")[0] + "+cu130")) == {
        "green"
    }  # another build of the same version


def test_machines_that_differ():
    same = {"torch": "2.13.0", "python": "3.11.7"}
    assert finding.differing({"node1": same, "node2": same}) is None
    found = finding.differing({"node1": same, "node2": same, "node3": same | {"torch": "2.12.1"}})
    assert found.colour == "red" and found.text == "torch 2.13.0 on node1, node2, 2.12.1 on node3"
    found = finding.differing({"node1": same, "node2": {"python": "3.11.7"}})
    assert found.text == "torch 2.13.0 on node1, missing on node2"


def test_a_finding_that_all_machines_share_is_listed_once():
    good, bad = Finding("green", "shm", "8 GiB"), Finding("red", "shm", "64 MiB", "give it more")
    merged = finding.merged([("node1", [good]), ("node2", [bad]), ("node3", [good])])
    assert [(f.colour, f.hosts) for f in merged] == [("green", ("node1", "node3")), ("red", ("node2",))]
    assert finding.lines(merged[1]) == ["red     shm         node2: 64 MiB", f"{'':<19} -> give it more"]
    assert [f.hosts for f in finding.merged([("node1", [good]), ("node2", [good])])] == [()]


def test_the_memory_of_a_container(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(str(2**30))
    assert processes.cgroup_room(tmp_path) is None
    (tmp_path / "memory.max").write_text(str(4 * 2**30))
    assert processes.cgroup_room(tmp_path) == 3 * 2**30
    (tmp_path / "memory.stat").write_text(f"anon 1\nfile {2**29}\nshmem {2**28}\n")
    assert processes.cgroup_room(tmp_path) == 3 * 2**30 + 2**28, "cached files can be freed"
    monkeypatch.setattr(processes, "cgroup_room", lambda: 3 * 2**30)
    assert host.memory(1).colour == "green"
    assert "3 GiB free below the container's limit; 2 ranks take" in host.memory(2).text


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
    assert found.text.endswith("async_io; missing: C++ compiler, libaio headers, nvcc")
    (tmp_path / "async_io.so").touch()
    assert [finding.colour for finding in host.operations(gear, 1)] == ["green"]
    forced = json.loads((ROOT / "ds_configs" / "zero3_offload.json").read_text())
    (tmp_path / "forced.json").write_text(json.dumps(forced | {"zero_force_ds_cpu_optimizer": True}))
    flags = {"deepspeed_config_file": str(tmp_path / "forced.json")}
    assert load_gear(ROOT / "accelerate_configs" / "zero3_offload.yaml", flags).compiled == ["cpu_adam"]
    # The advice for 40 GB GPUs at the top of this recipe needs no compiler.
    head = (ROOT / "recipes" / "zero3_2gpu.yaml").read_text()
    offload, free = (json.loads(f"{{{line}}}") for line in re.findall(r'^#   (".*)$', head, re.M))
    advised = json.loads((ROOT / "ds_configs" / "zero3.json").read_text()) | free
    advised["zero_optimization"] |= offload
    (tmp_path / "advised.json").write_text(json.dumps(advised))
    flags = {"deepspeed_config_file": str(tmp_path / "advised.json")}
    gear = load_gear(ROOT / "accelerate_configs" / "zero3.yaml", flags)
    assert (gear.offload, gear.compiled) == ("cpu", [])
    assert [*host.operations(load_gear(DDP), 1)] == []
    assert [*host.operations(load_gear(ROOT / "accelerate_configs" / "zero3_offload.yaml"), 1)] == []
