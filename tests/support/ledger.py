"""Record each step of each rank in a ledger, and compare a disturbed run's ledgers with an undisturbed run's."""

import json
import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from gearbox.checkpoint import folders, manifest
from gearbox.checkpoint.train_state import TrainState

VARIABLE = "GEARBOX_TEST_LEDGER"  # names the folder of the ledgers


def install() -> None:
    """Make this process append each step (attempt, step, row ids, loss) to its rank's ledger, before anything else."""
    advance = TrainState.advance

    def written(self, batch, result):
        line = {
            "attempt": os.getpid(), "step": self.step + 1, "rows": batch.row_ids, "loss": result.loss.hex(),
            "time": time.time(),
        }  # fmt: skip
        with (Path(os.environ[VARIABLE]) / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return advance(self, batch, result)

    TrainState.advance = written


@dataclass
class Books:
    """The ledgers of a run: by rank, its attempts in order, each a list of lines."""

    attempts: dict[str, list[list[dict]]] = field(default_factory=dict)

    @property
    def restarts(self) -> list[float]:
        """Seconds from rank 0's last step of an attempt to its first step of the next."""
        mine = self.attempts["rank-0"]
        return [round(after[0]["time"] - before[-1]["time"], 1) for before, after in pairwise(mine)]


def read(folder: Path) -> Books:
    books = Books()
    for path in sorted(folder.glob("rank-*.jsonl")):
        grouped = defaultdict(list)
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            grouped[entry["attempt"]].append(entry)
        books.attempts[path.stem] = list(grouped.values())
    return books


def kept(attempts: list[list[dict]]) -> list[dict]:
    """Return the steps that count: each attempt up to the step where the next attempt resumed."""
    lines: list[dict] = []
    for attempt in attempts:
        first = attempt[0]["step"]
        lines = [line for line in lines if line["step"] < first] + attempt
    return lines


def num_rows(undisturbed: Books) -> int:
    """Return the rows of an epoch: the number of rows before one repeats."""
    seen: set[int] = set()
    for line in kept(undisturbed.attempts["rank-0"]):
        for row in line["rows"]:
            if row in seen:
                return len(seen)
            seen.add(row)
    return len(seen)


def problems(books: Books, reference: Books, num_ranks: int, num_steps: int, num_rows: int, tolerance=0.0) -> list[str]:
    """Return the differences from an undisturbed run, none if all steps match."""
    found = []
    expected = {line["step"]: line for line in kept(reference.attempts["rank-0"])}
    if len(books.attempts) != num_ranks and not tolerance:
        found.append(f"{len(books.attempts)} ledgers for {num_ranks} ranks")
    for rank, attempts in books.attempts.items():
        lines = kept(attempts)
        steps = [line["step"] for line in lines]
        if steps != list(range(1, num_steps + 1)) and not tolerance:
            found.append(f"{rank}: steps {_gaps(steps, num_steps)}")
        for line in (line for attempt in attempts for line in attempt):  # repeated steps too
            if line["rows"] != expected[line["step"]]["rows"]:
                found.append(f"{rank}: step {line['step']} trained different rows")
            theirs, ours = (float.fromhex(each["loss"]) for each in (expected[line["step"]], line))
            if abs(ours - theirs) > tolerance * abs(theirs):
                found.append(f"{rank}: step {line['step']} has loss {ours!r} instead of {theirs!r}")
    consumed = [row for line in kept(books.attempts["rank-0"]) for row in line["rows"]]
    for epoch in range(0, len(consumed), num_rows):
        part = consumed[epoch : epoch + num_rows]
        if len(set(part)) != len(part):
            found.append(f"epoch {epoch // num_rows}: {len(part) - len(set(part))} rows repeated")
    return found


def _gaps(steps: list[int], num_steps: int) -> str:
    missing = sorted({*range(1, num_steps + 1)} - {*steps})
    twice = sorted({step for step in steps if steps.count(step) > 1})
    return f"missing {missing[:5]}, repeated {twice[:5]}"


def whole_checkpoint(folder: Path) -> int | None:
    """Return the step of the newest checkpoint that verifies, or None."""
    for step, path in folders.list_checkpoints(folder):
        try:
            manifest.verify_shards(path, manifest.read_manifest(path).files)
            return step
        except manifest.CorruptCheckpoint:
            continue
    return None


class Monitor(threading.Thread):
    """A thread that checks continuously that a valid checkpoint exists, from the first one on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.ended, self.looks, self.gaps, self.seen = folder, threading.Event(), 0, 0, False
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.1):
            # Retry once: a listed checkpoint may be removed before it is verified.
            found = whole_checkpoint(self.folder) or whole_checkpoint(self.folder)
            self.seen = self.seen or found is not None
            self.looks += self.seen
            self.gaps += self.seen and found is None

    def result(self) -> list[str]:
        self.ended.set()
        self.join()
        return [f"{self.gaps} of {self.looks} checks found no valid checkpoint"] if self.gaps or not self.looks else []


def leftovers(run: Path) -> list[str]:
    """Return temporary files and folders that a run should have removed."""
    return [str(path) for path in run.rglob("*") if ".tmp" in path.name]
