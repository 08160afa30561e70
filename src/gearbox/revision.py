"""Find the Git revision of this checkout."""

from __future__ import annotations

import subprocess

from gearbox import ROOT

GIT_SECONDS = 10


def revision() -> str | None:
    """Return the commit's id, with `+changes` if files differ from it, or None without Git."""
    commit = _git("rev-parse", "HEAD")
    return commit and commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
