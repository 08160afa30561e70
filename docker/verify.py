"""Refuse an image whose parts are not those of its lock file, or do not fit together: python docker/verify.py LOCK

A step of the image's build. Exit code 1 and a line a problem: a version that is not the lock's, a package that the lock
does not know or that is missing, a requirement that is not met, a part of Gearbox that does not import, no C compiler.
"""

import importlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import distributions
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
INSTALLER = "pip"  # comes with the virtual environment
MIN_MODULES = 80  # Gearbox has more: with fewer this script looks in the wrong place


def canonical(name: str) -> str:
    """Return one spelling for what the index takes for one name: Jinja2, jinja2; ruamel.yaml, ruamel-yaml."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(lock: str) -> dict[str, str]:
    """Return package to version, by the lock's text."""
    return {canonical(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.M)}


def differences(locked: dict[str, str], installed: dict[str, str]) -> list[str]:
    """Return a line for each package that is not installed as locked."""
    return [
        f"{name}: installed {installed.get(name, 'not at all')}, locked {locked.get(name, 'not at all')}"
        for name in sorted({*locked, *installed})
        if locked.get(name) != installed.get(name)
    ]


def own_modules(source: Path = SOURCE) -> list[str]:
    """Return the names of Gearbox's packages, modules and commands."""
    paths = [path.relative_to(source).with_suffix("") for path in sorted(source.rglob("*.py"))]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def failed_imports() -> list[str]:
    """Return a line for each module or command that does not import, and why."""
    sys.path.insert(0, str(SOURCE))
    own = own_modules()
    problems = [f"only {len(own)} modules in {SOURCE}"] if len(own) < MIN_MODULES else []
    for name in ["torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes", "datasets", *own]:
        try:
            importlib.import_module(name)
        except Exception as error:
            problems.append(f"import {name}: {error!r}")
    return problems


def main(lock: Path) -> list[str]:
    """Return all problems, a line each."""
    installed = {canonical(found.name): found.version for found in distributions()}
    del installed[INSTALLER]
    problems = differences(locked_versions(lock.read_text()), installed)
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    if checked.returncode:
        problems += checked.stdout.splitlines()
    with tempfile.TemporaryDirectory() as folder:
        compiled = subprocess.run(
            ["gcc", "-shared", "-x", "c", "-", "-o", f"{folder}/stub.so", f"-I{sysconfig.get_path('include')}"],
            input="#include <Python.h>\n", capture_output=True, text=True, check=False,
        )  # fmt: skip
    if compiled.returncode:
        problems.append(f"Triton could compile nothing here: {compiled.stderr.strip()}")
    return problems + failed_imports()


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    print("\n".join(found) or f"{sys.argv[1]}: installed as locked, and everything imports")
    sys.exit(bool(found))
