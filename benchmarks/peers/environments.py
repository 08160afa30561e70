"""Make one environment for each peer, with pinned versions, in .peers/ of the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers"
REQUIREMENTS = Path(__file__).parent / "requirements"


def python_of(environment: str) -> Path:
    """Return the Python of an environment; "" is that of Gearbox."""
    return FOLDER / environment / "bin" / "python" if environment else Path(sys.executable)


def install(environment: str) -> str:
    """Install an environment unless it is complete. Return what failed, or an empty text.

    Torch comes first, so that no package brings another build of it. The files of REQUIREMENTS are complete, and are
    installed without dependencies: some peers demand packages that need CUDA, and that they do not use here.
    """
    if not environment or (FOLDER / environment / "complete").is_file():
        return ""
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    python = python_of(environment)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    print(f"installing {environment} into {python.parents[1]}", flush=True)
    for command in (
        [sys.executable, "-m", "venv", str(python.parents[1])],
        [*pip, torch],
        [*pip, "--no-deps", "--requirement", str(REQUIREMENTS / f"{environment}.txt")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip() or done.stdout.strip() or "failed").splitlines()[-1]
    (python.parents[1] / "complete").touch()
    return ""


def versions(environment: str) -> dict[str, str]:
    """Return the versions of the packages that matter."""
    names = ["torch", "transformers", "peft", "accelerate"]
    names += {"trl": ["trl"], "llamafactory": ["llamafactory"], "": []}.get(environment, [environment])
    code = (
        "import json, sys; from importlib import metadata as m; found = {d.metadata['Name']: d.version for d in "
        "m.distributions()}; print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
    )
    done = subprocess.run([str(python_of(environment)), "-c", code, *names], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
