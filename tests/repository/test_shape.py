"""The code stays within limits on length, width and complexity."""

import ast
import re
from pathlib import Path

import pytest
from radon.complexity import cc_visit

from gearbox import ROOT

SRC = ROOT / "src"
FILES = sorted(path for path in SRC.rglob("*.py") if ".egg-info" not in str(path))
TREES = {path.relative_to(SRC): ast.parse(path.read_text()) for path in FILES}
LAUNCHER_VARIABLES = (
    r"""["'](RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)["']"""
)

MAX_FILES_OF_FOLDER = 10  # without __init__.py, which holds one line about the folder
MAX_COMMANDS = 17  # files directly in src
MAX_LINES_OF_FILE = 400
MAX_LINES_OF_FUNCTION = 60
MAX_PARAMETERS = 6  # without self
MAX_COMPLEXITY = 20  # McCabe complexity, computed by radon
MAX_ANY = 132  # in all of src
MAX_SHARE_OF_ANY = 0.06  # of annotated parameters
MAX_FMT_SKIPS = 10
MIN_SHARE_OF_DOCSTRINGS = 0.95  # of public functions and classes


def functions() -> list[tuple[str, ast.FunctionDef]]:
    """Return every function and method with its location, such as gearbox/training/loop.py:fit."""
    return [
        (f"{path}:{node.name}", node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    """Return the parameters without self, cls, *args and **kwargs."""
    given = function.args
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [one for one in found if one.arg not in ("self", "cls")]


def num_lines(function: ast.FunctionDef) -> int:
    return function.end_lineno - function.lineno + 1


def one(path: str, name: str) -> ast.FunctionDef:
    (found,) = [node for place, node in functions() if place == f"{path}:{name}"]
    return found


def names(tree: ast.AST, name: str) -> int:
    return sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


def test_all_of_src_is_seen():
    assert len(FILES) >= 80 and len(functions()) >= 700


def test_a_folder_holds_few_files():
    folders = {path.parent for path in FILES}
    counts = {str(folder.relative_to(SRC)): len([*folder.glob("[!_]*.py")]) for folder in folders}
    assert counts.pop(".") <= MAX_COMMANDS
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES_OF_FOLDER} == {}
    assert len(folders) >= 11


def test_every_folder_says_its_job():
    inits = {path: ast.get_docstring(tree) for path, tree in TREES.items() if path.name == "__init__.py"}
    assert len(inits) >= 10 and all(text and len(text.splitlines()) == 1 for text in inits.values()), inits


def test_files_and_functions_are_short():
    assert {str(path): n for path in FILES if (n := len(path.read_text().splitlines())) > MAX_LINES_OF_FILE} == {}
    assert {place: n for place, node in functions() if (n := num_lines(node)) > MAX_LINES_OF_FUNCTION} == {}


def test_functions_take_few_parameters():
    assert {place: n for place, node in functions() if (n := len(parameters(node))) > MAX_PARAMETERS} == {}


def test_functions_are_not_tangled():
    blocks = [(path, block) for path in FILES for block in cc_visit(path.read_text())]
    methods = [(path, method) for path, block in blocks for method in getattr(block, "methods", [])]
    tangled = {f"{p}:{b.name}": b.complexity for p, b in blocks + methods if b.complexity > MAX_COMPLEXITY}
    assert len(blocks) > 500
    assert tangled == {}


def test_any_is_rare():
    assert sum(names(tree, "Any") for tree in TREES.values()) <= MAX_ANY
    annotations = [one.annotation for _, node in functions() for one in parameters(node) if one.annotation is not None]
    with_any = [annotation for annotation in annotations if names(annotation, "Any")]
    assert len(with_any) / len(annotations) <= MAX_SHARE_OF_ANY


def test_the_formatter_decides():
    assert sum(path.read_text().count("# fmt: skip") for path in FILES) <= MAX_FMT_SKIPS


def test_no_banners():
    banners = [
        (str(p), line) for p in FILES for line in p.read_text().splitlines() if re.search(r"#.*([-=#~])\1{9}", line)
    ]
    assert banners == []


def test_public_names_have_docstrings():
    public = {
        f"{path}:{node.name}": ast.get_docstring(node)
        for path, tree in TREES.items()
        for parent in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
        for node in parent.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    without = [place for place, text in public.items() if not text]
    assert len(public) > 400 and len(without) / len(public) <= 1 - MIN_SHARE_OF_DOCSTRINGS, without


def test_launcher_variables_are_read_in_one_module():
    readers = {str(path.relative_to(SRC)) for path in FILES if re.search(LAUNCHER_VARIABLES, path.read_text())}
    assert readers == {"gearbox/launch/environment.py"}


def test_main_reads_as_verbs():
    main = one("train.py", "main")
    stored = {node.id for node in ast.walk(main) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert num_lines(main) <= 40 and len(stored) <= 12
    assert not any(isinstance(node, ast.FunctionDef | ast.Lambda) for node in ast.walk(main) if node is not main)


@pytest.mark.parametrize(("name", "lines", "num_parameters"), [("fit", 35, 5), ("train_step", 30, 4)])
def test_the_loop_fits_on_a_screen(name, lines, num_parameters):
    function = one("gearbox/training/loop.py", name)
    assert num_lines(function) <= lines and len(parameters(function)) <= num_parameters
    assert not any(names(parameter, "Any") for parameter in parameters(function))


def test_train_takes_no_name_from_an_engine():
    imported = [node.module for node in ast.walk(TREES[Path("train.py")]) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[1] for name in imported if name.startswith("gearbox.")} == {
        "checks",
        "config",
        "launch",
        "training",
    }
