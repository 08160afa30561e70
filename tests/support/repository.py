"""List the repository's documents, its tracked files and the packages that are slow to import; copy its tree."""

import secrets
import shutil
import subprocess
from pathlib import Path

from gearbox import ROOT

GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "bitsandbytes", "numpy"}


def tracked() -> list[str]:
    """Return the tracked files and the untracked files that git does not ignore."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, text=True, capture_output=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def copy_of_the_tree(folder: Path) -> Path:
    """Copy the files that `tracked` lists to a folder, and return it."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def plant(tree) -> str:
    """Write files that users have, such as keys and tokens. Return the unique word that each contains."""
    secret = f"planted{secrets.token_hex(16)}"
    keys = ".env .env.local .netrc id_rsa id_ed25519 key.pem src/.env src/gearbox/.env.production recipes/id_rsa"
    tokens = (
        "recipes/my.pem docker/key.pem .huggingface/token .cache/huggingface/token src/token .git/config kubeconfig"
    )
    runs = (
        "runs/mine/metrics.jsonl wandb/run models/m/model.safetensors recipes/secrets.yaml ds_configs/credentials.json"
    )
    others = (
        "tests/leftover .kube/config src/gearbox/__pycache__/x.cpython-311.pyc src/wandb/settings requirements/.netrc"
    )
    for name in f"{keys} {tokens} {runs} {others}".split():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(f"token = {secret}\n")
    return secret
