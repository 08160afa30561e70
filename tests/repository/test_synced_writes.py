"""Only filesystem.py writes files and renames them, so that what a power cut must not take is flushed to disk."""

import ast

import pytest

from gearbox import ROOT

ALLOWED = {  # what may be lost
    "gearbox/filesystem.py": "the one place",
    "gearbox/model/export.py": "tensors go to their places in files of a folder that is flushed before it appears",
    "gearbox/doctor/host.py": "measures a disk with files that it deletes",
    "gearbox/launch/watchdog.py": "writes the stacks of a hang while the process is about to end",
    "gearbox/proving/runs.py": "the launchers' logs",
    "gearbox/metrics/tracker_process.py": "opens run.log for what libraries print, which is not synced",
    "gearbox/exporting/card.py": "writes into a folder that is flushed before it appears",
    "gearbox/exporting/exporter.py": "the same",
    "gearbox/exporting/fresh.py": "hands its job to a child in a temporary folder",
    "gearbox/simulation/step.py": "hands its result to its parent in a temporary folder",
    "schema.py": "writes files of this repository",
}
PATH_METHODS = "write_text write_bytes rename touch symlink_to hardlink_to symlink".split()
WRITES = {*PATH_METHODS, "copyfile", "copy", "copy2", "copytree", "move"}


def unsynced_writes(source: str) -> list[int]:
    """Return the lines that write or rename a file."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if _writes(call)]


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = getattr(getattr(call.func, "value", None), "id", "")
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    if name == "open":
        return any(set(text) & set("wax+") and set(text) <= set("rwaxbt+") for text in texts)
    if owner == "filesystem":
        return False
    if name == "replace":  # of a path; the one of a text has two arguments
        return owner == "os" or (len(call.args) == 1 and not call.keywords)
    return name in WRITES and (name != "copy" or owner == "shutil")


def test_only_one_module_writes_files():
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        lines = unsynced_writes(path.read_text(encoding="utf-8"))
        if lines:
            found[str(path.relative_to(ROOT / "src"))] = lines
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert set(ALLOWED) <= set(found), "an entry of ALLOWED writes nothing any more"


@pytest.mark.parametrize(
    ("line", "writes"),
    [
        ("path.write_text('x')", True),
        ("open(path, 'wb')", True),
        ("path.open(mode='a')", True),
        ("path.open('rb')", False),
        ("path.open('r+')", True),
        ("os.rename(a, b)", True),
        ("a.replace(b)", True),
        ("os.replace(a, b)", True),
        ("'text'.replace('a', 'b')", False),
        ("filesystem.rename(a, b)", False),
        ("shutil.copyfile(a, b)", True),
        ("d.copy()", False),
    ],
)
def test_the_check_knows_the_ways_to_write(line, writes):
    assert bool(unsynced_writes(line)) == writes
