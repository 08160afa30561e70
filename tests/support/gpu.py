"""Run the acceptance run on this machine's GPUs, and write docs/gpu.md (`make gpu`).

Each part is a test of tests/gpu, in a child process with a time limit. A failure or a hang does not hide the other
parts. Results are kept in .gpu/results.json, so a stopped run resumes. Parts that passed are not run again.

python tests/support/gpu.py [PART ...]     run all parts, or only the named ones

Exit codes: 0 no part failed; 1 a part failed or was not run; 2 nothing was run: no GPU, or the doctor found a red line.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import psutil

# Without pytest its `pythonpath` setting does not apply.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gearbox import ROOT, processes
from gearbox.config.gear import gear_names, gear_path, load_gear
from gearbox.doctor import finding, gpus, host
from gearbox.errors import UserError
from peers.cases import SYSTEMS

PAGE_FILE = ROOT / "docs" / "gpu.md"
FOLDER = ROOT / ".gpu"
VARIABLE = "GEARBOX_TEST_GPUS"  # without it, tests/support/environment.py hides all GPUs
TESTS = "tests/gpu/test_parts.py::test_part"
SECONDS = 40 * 60  # no part starts later
PRECISIONS = ("bf16", "fp32")
BF16_ONLY = {"ring", "ulysses"}  # their attention needs a flash kernel, and none computes in fp32
RECIPES = {
    "qlora_1gpu": 1, "ddp_4gpu": 1, "ddp_4gpu_full": 1, "dpo_1gpu": 1, "dpo_4gpu": 1, "fsdp_2gpu": 2, "zero3_2gpu": 2,
}  # with GPUs  # fmt: skip
OPTIMIZERS = ("adamw_8bit", "paged_adamw", "paged_adamw_8bit")


class Part(NamedTuple):
    """A part of the acceptance run: a test with a time limit in seconds, and the GPUs that it needs."""

    name: str
    shows: str
    gpus: int = 1
    limit: int = 300
    test: str = ""

    @property
    def test_id(self) -> str:
        return self.test or f"{TESTS}[{self.name}]"


class Result(NamedTuple):
    """The result of a part: passed, failed, skipped or stopped, with a reason unless it passed."""

    status: str
    why: str
    figures: dict[str, str]
    seconds: float


def ranks_of(gear: str, num_gpus: int) -> int:
    """Return the largest number of ranks, up to that of the gear's file, that the GPUs allow, or 0."""
    path = gear_path(gear)
    for number in range(min(load_gear(path).num_processes, num_gpus), 0, -1):
        try:
            return load_gear(path, {"num_processes": str(number)}).num_processes
        except UserError:  # the degrees of parallelism need more
            continue
    return 0


def fewest_ranks(gear: str) -> int:
    """Return the smallest number of ranks of a gear."""
    return next(number for number in range(1, 9) if ranks_of(gear, number))


def all_parts() -> list[Part]:
    """Return the parts, the quick and important ones first."""
    compared = [gear for gear in gear_names() if gear != "single"]
    parts = [Part("doctor", "the doctor under the launcher, on all GPUs: no red line")]
    parts += [Part("attention", "each attention against eager: output and gradients"), Part("profile", "the kernels")]
    parts += [
        Part(f"parity-{gear}-{precision}", f"`{gear}` against `single`, {precision}", fewest_ranks(gear), limit)
        for precision in PRECISIONS
        for gear in compared
        if precision == "bf16" or gear not in BF16_ONLY
        for limit in [600 if "nvme" in gear or "offload" in gear else 300]  # DeepSpeed compiles operations
    ]
    parts += [Part("qlora", "QLoRA against LoRA")]
    parts += [Part(f"optimizer-{name}", f"`{name}` against `adamw`") for name in OPTIMIZERS]
    parts += [
        Part(f"resume-{gear}", f"`{gear}`: save, kill -9, resume; against `single`")
        for gear in ("single", "fsdp", "zero3")
    ]
    parts += [
        Part(f"shapes-{recipe}", f"`recipes/{recipe}.yaml` with random weights", count, 900)
        for recipe, count in RECIPES.items()
    ]
    return parts + [Part(f"peers-{name}", one.title, limit=600) for name, one in SYSTEMS.items() if one.packs]


def run_part(part: Part, num_gpus: int, folder: Path) -> Result:
    """Run a part in a child process, and end it with all its processes at its limit."""
    if part.gpus > num_gpus:
        return Result("skipped", f"needs {part.gpus} GPUs", {}, 0)
    folder.mkdir(parents=True, exist_ok=True)
    report, log = folder / f"{part.name}.xml", folder / f"{part.name}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", part.test_id, "-m", "gpu", "-o", "timeout=0", f"--junitxml={report}"]
    begin = time.monotonic()
    with log.open("w") as output:
        child = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {VARIABLE: str(num_gpus)}, stdout=output, stderr=output,
            start_new_session=True, preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL),
        )  # fmt: skip
        try:
            code = child.wait(part.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_tree(child.pid)
            child.wait()
    seconds = time.monotonic() - begin
    if code is None:
        return Result("stopped", f"took more than {part.limit} s; see {log}", {}, seconds)
    if not report.is_file():
        return Result("failed", f"pytest exited with code {code}; see {log}", {}, seconds)
    return read_report(report, seconds)


def kill_tree(pid: int) -> None:
    """Kill a process and all processes that it started, directly or not."""
    try:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
    except psutil.NoSuchProcess:
        return


def read_report(report: Path, seconds: float) -> Result:
    """Return the result in the JUnit file that pytest wrote for one test."""
    cases = ET.parse(report).findall(".//testcase")
    if len(cases) != 1:
        return Result("failed", f"pytest found {len(cases)} tests instead of one; see {report}", {}, seconds)
    (case,) = cases
    figures = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
    for kind, status in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(kind)) is not None:
            why = " ".join(found.get("message", "").removeprefix("AssertionError: ").split())
            return Result(status, why.partition(" assert ")[0][:300], figures, seconds)
    return Result("passed", "", figures, seconds)


def accept(parts: Sequence[Part], num_gpus: int, hardware: dict[str, str], folder: Path) -> dict[str, Result]:
    """Run the parts that have not passed on this hardware, and keep each result at once. Return all results."""
    kept = folder / "results.json"
    stored = json.loads(kept.read_text()) if kept.is_file() else {}
    earlier = stored.get("results", {}) if stored.get("hardware") == hardware else {}
    results = {name: Result(*one) for name, one in earlier.items()}
    if not results:
        for run in folder.glob("reference-*"):  # of earlier code or hardware
            shutil.rmtree(run)
    deadline = time.monotonic() + SECONDS
    for part in parts:
        if part.name in results and results[part.name].status == "passed":
            continue
        if time.monotonic() > deadline:
            print(f"{SECONDS // 60} minutes are over; run the same command to resume", flush=True)
            break
        results[part.name] = result = run_part(part, num_gpus, folder)
        folder.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".partial")
        partial.write_text(json.dumps({"hardware": hardware, "results": results}, indent=1))
        partial.replace(kept)
        told = result.why or ", ".join(f"{name} {value}" for name, value in result.figures.items())
        print(f"{part.name:28} {result.status:8} {result.seconds:5.0f} s  {told}", flush=True)
    return results


def describe_hardware() -> dict[str, str]:
    """Return what the figures depend on, without the date, so that a run resumes on the same hardware only."""
    import torch

    kinds = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = {f"{kind.name}, {kind.total_memory / 2**30:.0f} GiB, compute {kind.major}.{kind.minor}" for kind in kinds}
    packages = "torch accelerate deepspeed transformers peft bitsandbytes".split()
    return {
        "GPUs": f"{len(kinds)} x {'; '.join(sorted(names))}",
        "driver": f"{gpus.driver_version()}, CUDA {torch.version.cuda}",
        "host": f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.machine()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in packages),
    }


def write_page(parts: Sequence[Part], hardware: dict[str, str], results: dict[str, Result], date: str) -> str:
    """Return the page: the hardware and a row for each part. Without results it reports that there is no run yet."""
    if results:
        head = [f"Generated on {date} by `make gpu`:", "", "| hardware | |", "|---|---|"]
        head += [f"| {name} | {cell(value)} |" for name, value in hardware.items()]
    else:
        head = ["No run on GPUs is recorded yet. The first run replaces this sentence and fills the table."]
    rows = []
    for part in parts:
        result = results.get(part.name, Result("not run", "", {}, 0))
        told = [result.why] if result.why else []
        told += [f"{name} {value}" for name, value in result.figures.items()]
        seconds = f"{result.seconds:.0f}" if result.seconds else "-"
        cells = (part.shows, str(part.gpus), result.status, "; ".join(told) or "-", seconds)
        rows.append(f"| {' | '.join(map(cell, cells))} |")
    return PAGE.format(head="\n".join(head), rows="\n".join(rows), minutes=SECONDS // 60)


def cell(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


PAGE = """# On GPUs

```bash
make gpu
```

This command runs every gear (an Accelerate config file) and every method on this machine's GPUs, and writes this page.
It prints the doctor's findings first. Without a GPU it runs nothing and exits with code 2.

{head}

## Parts

| part | GPUs | result | figures | seconds |
|---|---|---|---|---|
{rows}

## How a part passes

- **Parity**: every step of a gear is compared with the same step of `single`, as in [Parity](parity.md). In bf16 the
  losses agree to three digits (5e-3). In fp32 they agree within 1e-5.
- **Resume**: all processes are killed after the first checkpoint. The same command resumes, and passes as parity does.
- **QLoRA**: the losses fall, and stay within 5 % of LoRA on the same weights in bf16.
- **Optimizers**: the losses stay within 5e-3 of those of `adamw`. Checkpoints with 8-bit moments are smaller.
- **Attention**: output and gradients are compared with eager in fp32. An error may be twice that of eager in
  bf16, or 1e-4 in fp32.
- **Kernels**: a trace of the profiler names the kernel of each attention. Attention by document needs a flash kernel.
- **Shapes**: a recipe trains at its full size, with random weights of its architecture. The peak of the memory is
  within 5 % of the sum in the recipe's first lines. MFU is relative to a measured rate of matrix products.
- **Peers**: Gearbox and the installed trainers train the same 8B model once. Without `.peers/` they are skipped.

Gears with more ranks than GPUs run with fewer ranks. A part that needs more GPUs than the machine has is skipped. So is
a recipe that needs more memory than a GPU has.

## Stop and resume

Results are kept in `.gpu/results.json` as they come, in a folder with logs, traces and random weights of 15 GB.
After {minutes} minutes no further part starts. The same command resumes, and repeats only the parts that have not
passed. On other hardware it begins again. `.venv/bin/python tests/support/gpu.py attention` runs only the
part of this name, and does not write this page.

## Read next

- [Doctor](doctor.md): check machines, links and ranks before a long run
- [Performance](performance.md): the figures on CPUs, next to other trainers
- [Parity](parity.md): compare gears on your own recipe
"""


def main(named: list[str]) -> int:
    """Run the acceptance run. Return the exit code."""
    parts = all_parts()
    if unknown := sorted({*named} - {part.name for part in parts}):
        print(f"gpu: {', '.join(unknown)}: not a part; choose from {', '.join(part.name for part in parts)}")
        return 2
    found, num_gpus = gpus.inspect_gpus(1)
    if num_gpus == 0:
        print(f"gpu: nothing was run: {'; '.join(' -> '.join(filter(None, (f.text, f.advice))) for f in found)}")
        return 2
    findings = host.inspect_host(None, FOLDER, num_local_ranks=1, world_size=1, num_machines=1)
    for one in findings:
        print("\n".join(finding.lines(one)), flush=True)
    if finding.worst(findings) == "red":
        print("gpu: nothing was run: fix the red lines first")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part, too
    hardware = describe_hardware()
    chosen = [part for part in parts if not named or part.name in named]
    results = accept(chosen, num_gpus, hardware, FOLDER)
    if not named:
        PAGE_FILE.write_text(write_page(parts, hardware, results, f"{datetime.now(UTC):%Y-%m-%d}"))
    states = [results[part.name].status if part.name in results else "not run" for part in chosen]
    wrong = [part.name for part, state in zip(chosen, states, strict=True) if state not in ("passed", "skipped")]
    print(f"{len(wrong)} of {len(chosen)} parts have not passed: {', '.join(wrong)}" if wrong else "no part failed")
    if not (wrong or named):
        (FOLDER / "results.json").unlink()  # the next `make gpu` starts over
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
