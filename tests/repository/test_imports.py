"""Guards the borders between the parts: who imports whom, who names an engine, who asks for its rank."""

import ast
import subprocess
import sys

import pytest

from gearbox import ROOT
from support.repository import HEAVY

PACKAGE = ROOT / "src" / "gearbox"
PARTS = {  # by dotted name below gearbox, in whatever folder
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
# Every part may import config. Every other import between parts, and why.
SIDEWAYS = {
    ("loss", "data"): "IGNORED: the label that one writes and the other skips",
    ("evaluation", "data"): "held-out rows are dealt exactly like training rows",
    ("model", "loss"): "a model is loaded with its loss installed",
    ("adapters", "pipeline"): "a stage has the adapters of its own layers",
    ("model", "adapters"): "and with its adapter",
    ("model", "pipeline"): "a stage is loaded as a model of its own",
    ("backend", "cluster"): "where each rank sits",
    ("backend", "pipeline"): "the engine of its gear",
    ("verification", "pipeline"): "and what is held against it",
    ("pipeline", "data"): "IGNORED: the label of what fills up a row",
    ("backend", "gear"): "the engine runs what the gear asks for",
    ("compatibility", "gear"): "what a gear cannot be joined with",
    ("adapters", "tensors"): "first values are given whole, whichever part a rank holds",
    ("sequences", "data"): "IGNORED: what fills a row up has no targets",
    ("sequences", "gear"): "over how many ranks a row is cut",
    ("backend", "sequences"): "the attention of an engine that cuts rows",
    ("command", "gear"): "a refusal is printed after the launcher's own last words",
    ("sources", "tasks"): "the built-in data, imported only where it is asked for",
    ("supervision", "forms"): "a chat is what the one makes of a record and the other of a chat",
    ("corpus", "sources"): "records are read",
    ("corpus", "forms"): "and understood",
    ("corpus", "supervision"): "and tokenized, here in one pass",
    ("model", "checkpoint"): "frozen weights are known by their digest, as shards are",
    ("backend", "tensors"): "an optimizer's parameters go by the names of the model's",
    ("verification", "backend"): "which precision a rehearsal has",
    ("verification", "gear"): "what was asked",
    ("verification", "tensors"): "is held against what each rank holds",
    ("tensors", "checkpoint"): "what one hands over and the other writes: a piece",
    **{
        (part, "storage"): "where the file system can do less than a disk"
        for part in ("checkpoint", "command", "metrics", "model", "runs", "saving", "staging")
    },
    ("runs", "checkpoint"): "a run goes on from one",
    ("runs", "tensors"): "and puts it into the model",
    ("runs", "progress"): "and counts on from there",
    ("runs", "command"): "how a run stands is its outcome",
    ("saving", "checkpoint"): "it decides when one is written",
    ("saving", "staging"): "and where it waits meanwhile",
    ("staging", "checkpoint"): "pieces are laid out as a shard",
    ("saving", "progress"): "with how far the run is",
    ("metrics", "progress"): "it records how far the run is",
    ("corpus", "command"): "a tokenizing process ends with its parent",
    ("watch", "command"): "a signal ends the command",
    **{
        (part, "findings"): "what it saw is told as a finding" for part in ("collectives", "gpus", "machine", "network")
    },
    ("machine", "storage"): "whether machines see one folder",
    ("machine", "gpus"): "a machine has GPUs",
    ("machine", "network"): "and a place in the network",
    ("machine", "gear"): "what a gear lets DeepSpeed compile there",
    ("rollcall", "command"): "a rank ends with its launcher",
    **{
        (part, "redact"): "what is written carries no secret"
        for part in ("checkpoint", "command", "metrics", "report", "runs", "watch")
    },
    ("preview", "data"): "it shows what was prepared",
    ("parity", "checkpoint"): "weights of two runs are compared by what they saved",
    ("parity", "report"): "and shown on a page of the same kind",
    ("preview", "forms"): "a form is called the same in the log and in a refusal",
}
LIGHT = "cluster command compatibility config findings gear machine network progress redact storage watch".split()
ENGINES = {"accelerate", "deepspeed", "zero", "fsdp", "fully_shard", "FSDPModule", "DTensor", "DistributedDataParallel"}
ENGINES_ELSEWHERE = {("evaluation", "accelerate"): "accelerate.utils.broadcast: all ranks continue with rank 0's token"}
RANKS = {"is_main_process", "process_index", "local_process_index", "num_processes", "get_rank", "get_world_size"}


def imported(tree: ast.AST) -> set[str]:
    """Full dotted names: `from gearbox import tasks` is gearbox.tasks."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            assert node.level == 0, "imports are absolute, so that this test can read them"
    return found


def identifiers(tree: ast.AST) -> set[str]:
    """Names, attributes, parameters and the parts of imported names; not strings and comments."""
    found = {part for name in imported(tree) for part in name.split(".")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


def part_of(name: str) -> str | None:
    """Which part an imported name comes from: of gearbox.config.ROOT it is config."""
    words = name.removeprefix("gearbox.").split(".")
    found = (".".join(words[:length]) for length in range(len(words), 0, -1))
    return next((part for part in found if part in PARTS), None) if name.startswith("gearbox.") else None


def test_all_parts_are_looked_at():
    assert len(PARTS) >= 41, "modules that this test does not see are not held to anything"


def test_parts_import_config_alone_but_for_reasons():
    sideways = {
        (part, part_of(name))
        for part, tree in PARTS.items()
        for name in imported(tree)
        if part_of(name) not in (None, "config")
    }
    assert sideways == set(SIDEWAYS)
    assert not any(name.startswith("gearbox") for name in imported(PARTS["config"]))
    top_level = ast.Module([n for n in PARTS["sources"].body if isinstance(n, ast.Import | ast.ImportFrom)], [])
    assert "gearbox.tasks" not in imported(top_level)


@pytest.mark.parametrize("part", LIGHT)
def test_what_reports_mistakes_imports_nothing_heavy(part):
    assert {name.split(".")[0] for name in imported(PARTS[part])} & HEAVY == set()


@pytest.mark.cold
def test_config_and_gear_are_there_without_torch():
    code = "import sys, gearbox.gear, gearbox.watch; print({*sys.argv} & {*sys.modules})"
    ended = subprocess.run(
        [sys.executable, "-c", code, *HEAVY], cwd=ROOT / "src", capture_output=True, text=True, check=True
    )
    assert ended.stdout == "set()\n"


def test_engines_are_named_in_four_parts_alone():
    found = {(part, name) for part, tree in PARTS.items() for name in identifiers(tree) & ENGINES}
    assert {pair for pair in found if pair[0] not in ("gear", "backend", "tensors", "verification")} == set(
        ENGINES_ELSEWHERE
    )
    assert ("backend", "deepspeed") in found and ("tensors", "DTensor") in found
    assert {name for name in imported(PARTS["evaluation"]) if "accelerate" in name} == {"accelerate.utils.broadcast"}


@pytest.mark.parametrize(
    "part",
    "data model adapters loss optim tasks sources forms supervision preview report checkpoint parity".split(),
)
def test_data_and_model_do_not_ask_which_process_they_are(part):
    assert identifiers(PARTS[part]) & RANKS == set()
    assert not any(name.startswith("torch.distributed") for name in imported(PARTS[part]))
    assert "environ" not in identifiers(PARTS[part])
    assert identifiers(PARTS["backend"]) & RANKS, "a renamed attribute would empty this test"
