"""Start a run of src/launch.py that a test disturbs, and compare its step ledger with an undisturbed run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from gearbox import ROOT
from gearbox.launch import outcome
from support import ledger

WORK = ROOT / ".faults"
SMALL = {
    "run.rehearse": "true", "data.path": str(WORK / "chats.jsonl"), "batch.rows": "6", "batch.row_tokens": "128",
    "batch.micro_rows": "1", "train.steps": "60", "schedule.name": "constant", "schedule.warmup": "1",
    "eval.every": "25", "eval.samples": "0", "save.every": "5", "run.hang_timeout": "6",
}  # fmt: skip
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(WORK / "cache"),
    "TORCH_EXTENSIONS_DIR": str(WORK / "extensions"),
}  # fmt: skip


class Run:
    """A run of `src/launch.py` whose ranks write step ledgers."""

    def __init__(self, name: str, gear: str = "ddp", ranks: int = 2, **changes: str) -> None:
        self.name, self.gear, self.ranks = name, gear, ranks
        self.runs = Path(changes.pop("runs", WORK / "runs"))
        self.folder, self.books = self.runs / name, WORK / "ledgers" / name
        self.books.mkdir(parents=True, exist_ok=True)
        given = SMALL | {"run.dir": str(self.runs), "run.name": name} | {
            key.replace("__", "."): value for key, value in changes.items()
        }  # fmt: skip
        self.num_steps = int(given["train.steps"])
        self.arguments = ["recipes/tiny.yaml", *(f"{key}={value}" for key, value in given.items())]
        self.process: subprocess.Popen | None = None

    def start(self, wrap: list[str] = ()) -> "Run":
        lines = [
            "import sys; from pathlib import Path; sys.path.insert(0, 'src')",
            "from gearbox.launch import cli, supervisor",
            "script = Path('tests/support/train_with_ledger.py').resolve()",
            "cli.run(lambda a: supervisor.supervise(a[:2], a[2:], script))",
        ]
        code = "\n".join(lines)
        flags = [f"--config_file=accelerate_configs/{self.gear}.yaml", f"--num_processes={self.ranks}"]
        self.log = (WORK / "logs" / f"{self.name}.log").open("a")
        self.process = subprocess.Popen(
            [*wrap, sys.executable, "-c", code, *flags, *self.arguments], stdout=self.log, stderr=self.log,
            env=os.environ | ENVIRONMENT | {ledger.VARIABLE: str(self.books)}, start_new_session=True,
        )  # fmt: skip
        return self

    def wait(self, seconds: float = 400) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill_all()
            return -999

    @property
    def output(self) -> str:
        return Path(self.log.name).read_text()

    @property
    def step(self) -> int:
        """The last step in the ledger of rank 0."""
        try:
            lines = (self.books / "rank-0.jsonl").read_text().splitlines()
            return json.loads(lines[-1])["step"] if lines else 0
        except (OSError, ValueError):
            return 0

    def until(self, condition, seconds: float = 120) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if condition():
                return True
            time.sleep(0.02)
        return False

    def processes(self) -> list[psutil.Process]:
        """Return all processes with this run's name on their command line."""
        return [process for process, _ in self._running()]

    def _running(self) -> list[tuple[psutil.Process, list[str]]]:
        found = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
                if f"run.name={self.name}" in line and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process, line))
            except psutil.Error:
                continue
        return found

    def of_kind(self, kind: str) -> list[psutil.Process]:
        """Return the processes of a kind: launcher (accelerate and torch's agent), ranks, or outer (src/launch.py)."""
        if kind == "outer":
            return [psutil.Process(self.process.pid)]
        below = [(p, line) for p, line in self._running() if p.pid != self.process.pid]
        return [p for p, line in below if ("accelerate.commands.launch" in line) == (kind == "launcher")]

    def kill_all(self) -> None:
        for process in self.processes():
            process.kill()

    def left(self, seconds: float = 10) -> list[str]:
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        return [f"process {p.pid} is left" for p in self.processes()]

    def problems(self, reference: "Run", tolerance: float = 0.0) -> list[str]:
        books, expected = ledger.read(self.books), ledger.read(reference.books)
        found = ledger.problems(books, expected, self.ranks, self.num_steps, ledger.num_rows(expected), tolerance)
        return found + self.left() + ledger.leftovers(self.folder)


def reference(gear: str = "ddp", ranks: int = 2, **changes: str) -> Run:
    """Return the undisturbed run with these settings. It is run once and kept."""
    what = "-".join(f"{key.split('__')[-1]}{value}" for key, value in sorted(changes.items()))
    run = Run(f"reference-{gear}-{ranks}-{what}", gear, ranks, **changes)
    if outcome.read_outcome(run.folder / "status.json").get("outcome") != "done":
        assert run.start().wait() == 0, run.output[-3000:]
    return run


def balanced(run: Run, code: int = 0, **same: str) -> list[str]:
    """Return the problems of a run: a wrong exit code, or ledgers that differ from the undisturbed run."""
    ended = run.wait()
    found = [] if ended == code else [f"exit code {ended} instead of {code}"]
    return found + run.problems(reference(run.gear, run.ranks, **same))
