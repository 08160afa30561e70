"""Check an image against its lock file: python docker/verify.py LOCK

The image's build runs this script. It exits with code 1 and prints a line for each problem:

- a package that is missing, is not in the lock file, or has another version;
- an unmet requirement of a package;
- a library or a module of Gearbox that does not import;
- no working C compiler;
- no library for InfiniBand.
"""

import ctypes
import importlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import distributions
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
RDMA_LIBRARY = "libibverbs.so.1"  # the name that NCCL opens
INSTALLER = "pip"  # comes with the virtual environment
MIN_MODULES = 80  # Gearbox has more; fewer means that SOURCE is the wrong folder


def canonical(name: str) -> str:
    """Return the normalized package name: Jinja2 becomes jinja2, and ruamel.yaml becomes ruamel-yaml."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(lock: str) -> dict[str, str]:
    """Return the version of each package in the text of a lock file."""
    return {canonical(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.M)}


def differences(locked: dict[str, str], installed: dict[str, str]) -> list[str]:
    """Return a line for each package whose installed version differs from the locked one."""
    return [
        f"{name}: installed {installed.get(name, 'none')}, locked {locked.get(name, 'none')}"
        for name in sorted({*locked, *installed})
        if locked.get(name) != installed.get(name)
    ]


def own_modules(source: Path = SOURCE) -> list[str]:
    """Return the dotted names of all packages, modules and scripts of Gearbox."""
    paths = [path.relative_to(source).with_suffix("") for path in sorted(source.rglob("*.py"))]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def failed_imports() -> list[str]:
    """Return a line with the error for each library, module or script that does not import."""
    sys.path.insert(0, str(SOURCE))
    own = own_modules()
    problems = []
    if len(own) < MIN_MODULES:
        problems.append(f"{SOURCE}: found only {len(own)} modules, expected at least {MIN_MODULES}")
    for name in ["torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes", "datasets", *own]:
        try:
            importlib.import_module(name)
        except Exception as error:
            problems.append(f"import {name}: {error!r}")
    return problems


def main(lock: Path) -> list[str]:
    """Return one line for each problem."""
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
        problems.append(f"gcc cannot compile an extension, which Triton needs: {compiled.stderr.strip()}")
    try:
        ctypes.CDLL(RDMA_LIBRARY)
    except OSError as error:
        problems.append(f"NCCL cannot use InfiniBand: {error}")
    return problems + failed_imports()


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    print("\n".join(found) or f"{sys.argv[1]}: all versions match, everything imports")
    sys.exit(bool(found))
