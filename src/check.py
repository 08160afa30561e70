"""Check whether recipe, gear, ZeRO JSON, model, tokenizer and data agree, in seconds and without a GPU.

Usage: python src/check.py [RECIPE] [--config_file GEAR] [--gpu NAME] [--json] [--flag=value ...] [key.sub=value ...]

    RECIPE              a recipe file (default: recipes/tiny.yaml)
    --config_file GEAR  a gear: a path that ends in .yaml, or a name in accelerate_configs/ (default: single)
    --gpu NAME          the GPU to check for, such as A100, T4 or 24GB (default: the one that nvidia-smi shows)
    --json              print one JSON object
    --flag=value        a flag of accelerate launch, such as --num_processes=8
    key.sub=value       a key of the recipe to change, such as optim.lr=1e-5; docs/recipe.md lists all keys

Every finding is one line. A problem also stops a run at its start; a hint does not.

Exit codes: 0 the files agree; 2 there is a problem, or a user error.

Examples:
    python src/check.py recipes/tiny.yaml --config_file fsdp
    python src/check.py recipes/tiny.yaml --config_file accelerate_configs/ddp.yaml --num_processes=3 --json
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from gearbox import console
from gearbox.checks import agreement
from gearbox.checks.agreement import Examined
from gearbox.checks.finding import Finding, Locator, Said
from gearbox.config.gear import gear_path, read_gear
from gearbox.config.loader import COMMAND_LINE
from gearbox.errors import UserError
from gearbox.launch import cli
from gearbox.launch.outcome import EXIT_USER_ERROR
from gearbox.planning.gpus import Gpu, gpu_named
from gearbox.training import resume
from launch import launcher_flags

OPTIONS = ("--config_file", "--gpu")


def main(arguments: list[str]) -> int:
    """Print every finding. Return the exit code."""
    try:
        return check(arguments)
    except UserError as error:
        if "--json" not in arguments:
            raise
        locator = Locator(Path(COMMAND_LINE))
        print_json([locator.locate(Said(line)) for line in str(error).splitlines()])
        return EXIT_USER_ERROR


def check(arguments: list[str]) -> int:
    """Print every finding about the files that the arguments name. Return the exit code."""
    options, words = split(arguments)
    gear_file = Path(gear_path(options.get("--config_file", "single")))
    flags = launcher_flags([word for word in words if word.startswith("-") and word != "--json"])
    recipe_path, overrides = cli.split_arguments([word for word in words if not word.startswith("-")])
    gpu = gpu_named(options["--gpu"]) if "--gpu" in options else first_gpu()
    examined = agreement.examine(recipe_path, overrides, read_gear(gear_file, flags), gpu)
    findings = sorted([*examined.findings, *of_run_folder(examined)], key=lambda one: (one.file, one.line or 0))
    num_problems = sum(one.severity == "problem" for one in findings)
    names = f"{shown(recipe_path)} and {shown(gear_file)}"
    verdict = f"{names}: {count(num_problems, 'problem')}, {count(len(findings) - num_problems, 'hint')}"
    if not findings:
        verdict = f"{names} agree"
    seconds = time.process_time()  # of the processor, with the imports
    if "--json" in words:
        print_json(findings)
    else:
        screen = console.make_console(speaks=True)
        for one in findings:
            screen.print(line_of(one))
        style = "bold red" if num_problems else "bold green"
        screen.print(console.styled((verdict, style), f" ({len(agreement.CHECKS)} checks, {seconds:.1f} s)"))
    return EXIT_USER_ERROR if num_problems else 0


def print_json(findings: list[Finding]) -> None:
    """Print one object for editors and CI."""
    agree = not any(one.severity == "problem" for one in findings)
    print(json.dumps({"agree": agree, "findings": [one.as_json() for one in findings]}, indent=2))


def split(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of this command's own options, and the other words."""
    options: dict[str, str] = {}
    words, given = [], iter(arguments)
    for word in given:
        name, equals, value = word.partition("=")
        if name not in OPTIONS:
            words.append(word)
        elif value := value if equals else next(given, ""):
            options[name] = value
        else:
            raise UserError(f"{name}: needs a value, such as {name} {'fsdp' if name == '--config_file' else 'A100'}")
    return options, words


def of_run_folder(examined: Examined) -> list[Finding]:
    """Return what a run would refuse about its folder, if nothing else is refused."""
    if examined.job is None or examined.problems:
        return []
    try:
        resume.check_early(examined.job)
    except UserError as error:
        locator = Locator(examined.job.recipe_path)
        return [locator.locate(Said(line)) for line in str(error).splitlines()]
    return []


def first_gpu() -> Gpu | None:
    """Return the first GPU that nvidia-smi shows, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    with suppress(OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
        from gearbox.doctor import nvidia_smi

        row = nvidia_smi.query_gpus(["name", "memory.total", "compute_cap"])[0]
        return Gpu(row["name"], int(row["memory.total"]) * 2**20, capability=float(row["compute_cap"]))
    return None


def line_of(finding: Finding) -> Text:
    """Return the printed line of a finding."""
    hint = [("hint: ", "yellow")] if finding.severity == "hint" else []
    line = "" if finding.line is None else f":{finding.line}"
    return console.styled((f"{shown(Path(finding.file))}{line}: ", "bold"), *hint, finding.rest)


def shown(path: Path) -> str:
    """Return a path from the working directory, if it is below that."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def count(number: int, noun: str) -> str:
    """Return a number and its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    cli.run(main)
