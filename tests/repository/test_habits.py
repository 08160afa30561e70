"""Hooks, the pull-request workflow, templates and the guide for agents agree with each other."""

import re
import subprocess

import pytest
import yaml

from gearbox import ROOT


def test_a_pull_request_runs_what_ci_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert "pull_request" in workflow[True], "PyYAML reads `on` as true"
    (job,) = workflow["jobs"].values()
    assert any(".ci/run" in step.get("run", "") for step in job["steps"])
    (targets,) = re.findall(r"^exec make (.*)$", (ROOT / ".ci/run").read_text(), re.M)
    for document in ("CONTRIBUTING.md", "AGENTS.md"):
        named = re.findall(r"make ([\w -]+)`", (ROOT / document).read_text())
        assert set(targets.split()) <= {target for line in named for target in line.split()}, document


@pytest.mark.cold
@pytest.mark.parametrize(
    ("name", "text", "hook"),
    [
        ("module.py", "import os\n", "ruff"),
        ("module.py", "x = {'a':1}\n", "ruff-format"),
        ("page.md", "This is teh page.\n", "codespell"),  # codespell:ignore teh
        ("page.md", "no line end", "end-of-file-fixer"),
    ],
)
def test_a_hook_finds_what_it_is_there_for(tmp_path, name, text, hook):
    """Run a hook in a repository with this configuration: clean files pass, and a planted fault fails."""
    for file in (".pre-commit-config.yaml", "pyproject.toml"):
        (tmp_path / file).write_text((ROOT / file).read_text())
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / ".gitignore").write_text(".venv\n")

    def run_hook() -> int:
        subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True)
        command = [tmp_path / ".venv/bin/pre-commit", "run", hook, "--all-files"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode

    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    assert run_hook() == 0
    (tmp_path / name).write_text(text)
    assert run_hook() == 1
