"""Check the borders between folders: what they import, which name an engine, and which ask for their rank."""

import ast
import json
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.data import corpus

# A folder may import only folders before it. Files directly in gearbox/ come before all, and import none.
LAYERS = (
    "config",
    "planning",
    "launch",
    "kernels",
    "data",
    "checks",
    "rows",
    "checkpoint",
    "sharding",
    "distributed",
    "model",
    "generation",
    "metrics",
    "reporting",
    "pages",
    "exporting",
    "training",
    "simulation",
    "proving",
)
BESIDE = {"doctor": {"config", "launch"}}
PACKAGE = ROOT / "src" / "gearbox"
MODULES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "bitsandbytes", "numpy"}
LIGHT = ("", "config", "planning", "launch", "checks")  # these report user errors within half a second
ENGINES = {"accelerate", "deepspeed", "zero", "fsdp", "fully_shard", "FSDPModule", "DTensor", "DistributedDataParallel"}
# Exceptions outside distributed/ and sharding/, with the reason.
ENGINES_ELSEWHERE = {
    ("metrics/tracker_start.py", "accelerate"): "accelerate.tracking: the classes of trackers",
    ("metrics/tracker_process.py", "accelerate"): "PartialState, which Accelerate's loggers need",
}
# A run on one device without 4-bit weights needs none of these. Most libraries import them wherever they are installed.
UNNEEDED = {
    "datasets", "pandas", "deepspeed", "bitsandbytes", "networkx", "torch.distributed.pipelining",
    "torch._inductor.compile_fx",
}  # fmt: skip
FIRST_STEP = """
import json, os, sys, train
from gearbox.launch import cli, watchdog

def stop_after_first_step(*_):
    if "peft" in sys.modules:
        assert sys.modules["peft"].import_utils.is_bnb_available(), "hidden from PEFT only for a moment"
    print(json.dumps([*sys.modules]), flush=True)
    os._exit(0)

watchdog.Watchdog.arm = stop_after_first_step
cli.run(train.main)
"""
RANKS = {"is_main_process", "process_index", "local_process_index", "num_processes", "get_rank", "get_world_size"}


def folder_of(path: Path) -> str:
    """Return the folder of a module, empty for those directly in gearbox/."""
    return path.parts[0] if len(path.parts) > 1 else ""


def in_use(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes except those of `if TYPE_CHECKING:`."""
    nodes, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += ast.iter_child_nodes(node)
    return nodes


def imported(nodes: list[ast.AST]) -> set[str]:
    """Return full dotted names: `from gearbox.data import sources` is gearbox.data.sources."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            assert node.level == 0, "imports are absolute, so that this test can read them"
    return found


def module_of(name: str) -> Path | None:
    """Return our module that an imported name refers to or comes from, if any."""
    parts = name.split(".")[1:] if name.startswith("gearbox.") else []
    for length in (len(parts), len(parts) - 1):
        if length > 0 and (path := Path(*parts[:length]).with_suffix(".py")) in MODULES:
            return path
    return None


def identifiers(nodes: list[ast.AST]) -> set[str]:
    """Return names, attributes, parameters and the parts of imported names, but no strings or comments."""
    found = {part for name in imported(nodes) for part in name.split(".")}
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


def test_every_module_is_in_a_layer():
    assert len(MODULES) >= 80
    assert {folder_of(path) for path in MODULES} == {"", *LAYERS, *BESIDE}


def test_imports_run_downwards():
    wrong = []
    for path, tree in MODULES.items():
        folder = folder_of(path)
        below = BESIDE.get(folder) or ({*LAYERS[: LAYERS.index(folder)]} if folder else set())
        for name in imported([*ast.walk(tree)]):
            target = module_of(name)
            if target is not None and folder_of(target) not in {"", folder, *below}:
                wrong.append(f"{path} imports {name}")
            if target is not None and not folder and target.name != "__init__.py":
                wrong.append(f"{path} is a leaf and imports {name}")
    assert wrong == []


def test_no_module_imports_itself_by_a_detour():
    graph = {
        path: {target for name in imported(in_use(tree)) if (target := module_of(name)) not in (None, path)}
        for path, tree in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules in it
    assert sum(map(len, graph.values())) > 200


def test_what_reports_mistakes_imports_nothing_heavy():
    light = {path: tree for path, tree in MODULES.items() if folder_of(path) in LIGHT}
    assert len(light) >= 18
    assert {
        path: heavy
        for path, tree in light.items()
        if (heavy := {n.split(".")[0] for n in imported(in_use(tree))} & HEAVY)
    } == {}


@pytest.mark.cold
@pytest.mark.parametrize(
    "names", ["gearbox.config.job, gearbox.launch.watchdog", "gearbox.checks.agreement", "gearbox.training.resume"]
)
def test_files_are_checked_without_torch(names):
    code = f"import sys, {names}; print({{*sys.argv}} & {{*sys.modules}})"
    command = [sys.executable, "-c", code, *HEAVY]
    ended = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


@pytest.mark.cold
@pytest.mark.parametrize(
    ("method", "most", "unneeded"), [("lora", 3210, UNNEEDED), ("none", 2960, UNNEEDED | {"peft"})]
)
def test_the_first_step_imports_only_what_it_needs(tmp_path, tokenizer, method, most, unneeded):
    """Run gear single with cached tokens. A module costs a millisecond and 0.1 MB at every start of every rank."""
    overrides = ["data.path=builtin:tasks", f"adapter.method={method}", "optim.lr=1e-3", f"run.dir={tmp_path}"]
    corpus.load_corpora(load_recipe(ROOT / "recipes" / "tiny.yaml", overrides), tokenizer)
    command = [sys.executable, "-c", FIRST_STEP, "recipes/tiny.yaml", *overrides]
    path = {"PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(command, env=os.environ | path, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    modules = json.loads(ended.stdout.splitlines()[-1])
    assert not unneeded & {*modules}
    assert 2000 < len(modules) < most


def test_a_module_run_as_a_script_does_not_hide_the_standard_library():
    """Check src/gearbox/data, which comes first in sys.path when builtin_tasks.py runs as a script."""
    names = {path.stem for path in MODULES if folder_of(path) == "data"}
    assert "builtin_tasks" in names and not names & sys.stdlib_module_names


def test_engines_are_named_in_three_folders():
    found = {(str(path), name) for path, tree in MODULES.items() for name in identifiers(in_use(tree)) & ENGINES}
    theirs = ("distributed/", "sharding/", "simulation/", "config/gear.py")
    elsewhere = {pair for pair in found if not pair[0].startswith(theirs)}
    assert elsewhere == set(ENGINES_ELSEWHERE)
    state = "sharding/sharded_state.py"
    present = {("distributed/engine.py", "accelerate"), (state, "deepspeed"), (state, "DTensor")}
    assert present <= found, "a renamed engine would make this test empty"


def test_the_built_in_data_are_imported_only_where_they_are_asked_for():
    tree = MODULES[Path("data/sources.py")]
    at_first = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert "gearbox.data.builtin_tasks" in imported([*ast.walk(tree)]) - imported(at_first)


@pytest.mark.parametrize(
    ("folder", "allowed"),
    # Reports and checkpoints state the gear's number of processes.
    [("data", set()), ("model", set()), ("reporting", {"num_processes"}), ("checkpoint", {"num_processes"})],
)
def test_data_and_model_do_not_ask_which_process_they_are(folder, allowed):
    parts = {path: tree for path, tree in MODULES.items() if folder_of(path) == folder}
    assert len(parts) >= 5
    for path, tree in parts.items():
        nodes = in_use(tree)
        assert identifiers(nodes) & RANKS <= allowed, path
        assert not any(name.startswith("torch.distributed") for name in imported(nodes)), path
        assert "environ" not in identifiers(nodes) or path == Path("data/tokenization.py"), path
    assert identifiers(in_use(MODULES[Path("distributed/process_group.py")])) & RANKS, (
        "a renamed module would make this test empty"
    )


def test_the_guide_for_agents_lists_the_layers_in_order():
    rows = re.findall(r"^\| `(\w+)/` \|", (ROOT / "AGENTS.md").read_text(), re.M)
    assert rows == [*LAYERS, *BESIDE]
