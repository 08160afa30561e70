"""Record the facts of a run in run.json, so that its report can be written again at any time, without torch.

Rank 0 writes the file when a run starts, and again when it resumes. Each fact is the newest start's, apart from
`started` and `first`. A missing or damaged fact reads as its default.
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import psutil
from pydantic import TypeAdapter, ValidationError

from gearbox import ROOT, filesystem
from gearbox.config.job import Job
from gearbox.config.loader import value_of
from gearbox.console import format_bytes
from gearbox.launch.topology import RankDevice
from gearbox.planning.strategy import METHOD_NAMES
from gearbox.redact import redacted

if TYPE_CHECKING:
    from gearbox.reporting.plan import Plan

FILE = "run.json"
GIT_SECONDS = 5  # for a repository on slow storage
MAX_LETTERS = 4000  # of a sample document
MISSING = object()
MAX_NUMBER = 2**63  # a larger one is none of ours
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%z"


@dataclass(frozen=True)
class Start:
    """A start of the run: its first, or a resume."""

    time: str = ""
    """Local time with its offset from UTC, in ISO 8601."""
    step: int = 0
    """The step that the run continued from."""
    gear: str = ""
    num_ranks: int = 1
    commit: str = ""


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that its metrics do not contain."""

    started: str = ""
    """Time of the first start."""
    first: Start = field(default_factory=Start)
    resumes: list[Start] = field(default_factory=list)
    recipe: str = ""
    """Path of the recipe."""
    gear: str = ""
    command: str = ""
    """The command that repeats the run from its first step. The same command resumes an unfinished run."""
    commit: str = ""
    """Git commit of Gearbox, with -dirty after local changes; empty outside a repository."""
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, str] = field(default_factory=dict)
    """Description of the first rank's machine, by label."""
    ranks: list[tuple[str, str]] = field(default_factory=list)
    """Host and device of each rank."""
    num_steps: int = 0
    method: str = ""
    model: str = ""
    num_weights_trained: int = 0
    num_weights: int = 0
    memory_available_bytes: int | None = None
    """Bytes of a rank's device that the run can take."""
    plan: dict[str, str] = field(default_factory=dict)
    """The lines that the run printed at its start, by label."""
    documents: list[tuple[str, list[tuple[str, bool]]]] = field(default_factory=list)
    """Place of some training documents, and their text in pieces, each with whether it is trained."""
    sides: list[str] = field(default_factory=list)
    """Side of each of the documents, such as chosen, if answers are compared; else empty."""

    @property
    def devices(self) -> list[RankDevice]:
        """Host and device of each rank."""
        return [RankDevice(host, device) for host, device in self.ranks]

    @property
    def newest_start(self) -> Start:
        """The start that the other facts belong to."""
        return self.resumes[-1] if self.resumes else self.first


def read(folder: Path) -> RunFacts:
    """Return the facts in a run's folder. Whatever is missing or damaged has its default."""
    try:
        found = filesystem.read_json_object(folder / FILE)
    except ValueError:
        return RunFacts()
    good: dict[str, object] = {}
    types = get_type_hints(RunFacts)
    for one in fields(RunFacts):
        with suppress(KeyError, ValidationError, RecursionError):
            value = TypeAdapter(types[one.name]).validate_python(found[one.name])
            if not isinstance(value, int) or abs(value) < MAX_NUMBER:
                good[one.name] = value
    return RunFacts(**good)  # type: ignore[arg-type]


def write(folder: Path, facts: RunFacts) -> None:
    """Write run.json atomically and without secrets. Raise OSError if that fails."""
    filesystem.atomic_write(folder / FILE, json.dumps(redacted(asdict(facts)), indent=1) + "\n")


def begin(
    plan: Plan,
    devices: Sequence[RankDevice],
    versions: dict[str, str],
    documents: Sequence[tuple[str, list[tuple[str, bool]], str]],
    step: int,
) -> RunFacts:
    """Return the facts of a run that starts at `step`, with those of its earlier starts.

    `documents` are places, texts in pieces, and sides.
    """
    before, job = read(plan.folder), plan.job
    commit = commit_of(ROOT)
    start = Start(time.strftime(TIME_FORMAT), step, job.gear.name, len(devices), commit)
    facts = RunFacts(
        started=start.time,
        first=start,
        recipe=from_root(job.recipe_path),
        gear=job.gear.name,
        command=repeating_command(job),
        commit=commit,
        versions=versions,
        hardware=hardware(),
        ranks=[(one.host, one.device) for one in devices],
        num_steps=plan.num_steps,
        method=METHOD_NAMES[job.recipe.method],
        model=job.recipe.model.name,
        num_weights_trained=plan.num_weights[0],
        num_weights=plan.num_weights[1],
        memory_available_bytes=None if plan.fit is None else plan.fit.available,
        plan=plan.lines(),
        documents=[(place, _shortened(pieces)) for place, pieces, _ in documents],
        sides=[side for _, _, side in documents if side],
    )
    if step == 0 or not before.started:
        return facts
    resumes = [*(one for one in before.resumes if one.step <= step), start]
    return replace(facts, started=before.started, first=before.first, resumes=resumes)


def _shortened(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return the first MAX_LETTERS of a document, with a sign that the rest is missing."""
    left, kept = MAX_LETTERS, []
    for text, is_trained in pieces:
        kept.append((text[:left], is_trained))
        left -= len(text)
        if left < 0:
            return [*kept, (f" [{-left:,} more characters]", False)]
    return kept


def repeating_command(job: Job) -> str:
    """Return the command that starts this run again, or resumes it if it is unfinished."""
    gear, recipe = job.gear, job.full_size or job.recipe
    words = ["python", "src/train.py"]
    if gear.name != "single":
        words = ["python", "src/launch.py", _gear_name(gear.path), f"--num_processes={gear.num_processes}"]
    words.append(from_root(job.recipe_path))
    for key in sorted(recipe.given):
        value: object = recipe.model_dump(mode="json")
        for name in key.split("."):
            value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
        if value is not MISSING:  # as an old name of a key is
            words.append(f"{key}={_override(value)}")
    return shlex.join(words)


def _override(value: object) -> str:
    """Return a text that an override reads, as YAML, as this value."""
    if isinstance(value, str) and value_of(value) == value:
        return value
    text = json.dumps(value, ensure_ascii=False)  # the escapes of JSON are in halves, which YAML does not join
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)


def _gear_name(path: Path) -> str:
    """Return a gear as src/launch.py takes it: a name in accelerate_configs/, or a path."""
    return path.stem if path.resolve().parent == ROOT / "accelerate_configs" else from_root(path)


def from_root(path: Path) -> str:
    """Return a path for a command that is called in the repository: relative if it is inside, else absolute."""
    for one in (path.absolute(), path.resolve()):
        if one.is_relative_to(ROOT):
            return str(one.relative_to(ROOT))
    return str(path.absolute())


def commit_of(folder: Path) -> str:
    """Return the commit of a Git repository, with -dirty after changes; an empty text without Git or repository."""
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
        return ended.stdout.strip()
    return ""


def hardware() -> dict[str, str]:
    """Return a description of this machine, apart from its GPUs, which the ranks name."""
    model = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cores = len(psutil.Process().cpu_affinity() or [])
    return {
        "processor": f"{model}, {cores} {'core' if cores == 1 else 'cores'}",
        "memory": format_bytes(psutil.virtual_memory().total),
        "system": f"{platform.system()} {platform.release()}",
    }
