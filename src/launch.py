"""Check everything that can be checked in a second, then train under a gear, and go on where a rank dies.

python src/launch.py GEAR [--flag=value of accelerate launch ...] [RECIPE] [key.sub=value ...]

Exit codes: 0 done; 2 a mistake of yours; 85 saved, the same command goes on; 93 failed, it would fail again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from gearbox import command
from gearbox.config import ROOT, UserError, accumulation, load_recipe
from gearbox.gear import check_against, gear_names, gear_path, load_gear

TRAIN = ROOT / "src" / "train.py"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MAX_RESTARTS = 3  # without a newer checkpoint between them
SHUTDOWN_SECONDS = 600  # for ranks that are asked to end: they save first


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        gears = ", ".join(gear_names())
        raise UserError(f"usage: python src/launch.py GEAR [RECIPE] [key.sub=value ...]; the gears: {gears}")
    path = gear_path(arguments[0])
    flags = [argument for argument in arguments[1:] if argument.startswith("--")]
    ours = [argument for argument in arguments[1:] if not argument.startswith("--")]
    if bare := [flag for flag in flags if "=" not in flag]:
        raise UserError(f"{bare[0]}: write the launcher's flags as {bare[0]}=VALUE")

    recipe_path, overrides = command.split_arguments(ours)
    problems = []
    recipe = gear = None
    try:
        recipe = load_recipe(recipe_path, overrides)
    except UserError as error:
        problems.append(str(error))
    try:
        gear = load_gear(path, dict(flag.removeprefix("--").split("=", 1) for flag in flags))
    except UserError as error:
        problems.append(str(error))
    if recipe is None or gear is None:
        raise UserError("\n".join(problems))
    check_against(
        gear, recipe, recipe_path, *accumulation(recipe.batch.rows, gear.data_parallel, recipe.batch.micro_rows)
    )
    return train([f"--config_file={path}", *flags], [str(recipe_path), *overrides])


def train(flags: list[str], arguments: list[str], script: Path = TRAIN, output: IO[str] | None = None) -> int:
    """Run the script under `accelerate launch` until it is done, saved or failed; returns the exit code.

    All that is said goes to the screen, or to `output`. One launcher a try, with a rendezvous of its own: no gear needs
    another way, and a launcher that dies is no exception. A try that comes to a newer checkpoint is progress.
    """
    asked: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        outcome_file = Path(folder) / "outcome"
        environment = os.environ | {
            command.OUTCOME_FILE: str(outcome_file),
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1",  # else SIGUSR1 kills torch's launcher, not its ranks
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),  # it kills after 30 s what still saves
        }
        newest = num_restarts = 0
        run: str | None = None  # its folder, once it has taken a step
        while True:
            outcome_file.unlink(missing_ok=True)
            code = _attempt([*flags, str(script), *arguments], environment, script, asked, output)
            status = command.read_outcome(outcome_file)
            outcome, saved_step = status.get("outcome"), int(status.get("saved_step", newest))
            run = status["run"] if status.get("step") else run
            if outcome in ("refused", "failed"):
                print(status["text"], file=output or sys.stderr)
            if outcome == "saved" and code == -signal.SIGKILL and not asked:
                outcome = "running"  # nobody wanted this end: the launcher was killed, and its ranks have saved
            if outcome in command.EXIT_CODES:
                return 130 if asked.count(signal.SIGINT) > 1 else command.EXIT_CODES[outcome]
            if asked:  # before there was anything to save, or in too little time: what is saved stays
                return 130 if asked.count(signal.SIGINT) > 1 else command.EXIT_SAVED
            if run is None:
                return code  # it has not come to its first step, and would not the next time
            num_restarts = 1 if saved_step > newest else num_restarts + 1
            newest = max(newest, saved_step)
            if num_restarts > MAX_RESTARTS:
                print(
                    f"gearbox: {MAX_RESTARTS} restarts in a row came to no checkpoint after step {newest}; the reason "
                    f"stands above; {run} keeps what there is",
                    file=output or sys.stderr,
                )
                return command.EXIT_FAILED
            print(
                f"gearbox: the run ended with code {code}; restart {num_restarts} goes on from step {newest}",
                file=output or sys.stderr,
                flush=True,
            )
            environment[command.RUN_FOLDER] = run


def _attempt(
    arguments: list[str], environment: dict[str, str], script: Path, asked: list[int], output: IO[str] | None
) -> int:
    """One `accelerate launch`, with signals handed to the ranks; returns its exit code once no rank is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", *arguments],
        env=environment,
        stdout=output,
        stderr=output,
        start_new_session=True,  # a terminal's Ctrl-C comes here alone, and is handed on once
        preexec_fn=lambda: command.end_with_parent(signal.SIGTERM),
    )
    ranks: list[psutil.Process] = []

    def look() -> None:
        try:
            children = psutil.Process(process.pid).children()
            ranks[:] = [child for child in children if str(script) in child.cmdline()] or ranks
        except psutil.Error:
            return

    def hand_on(number: int, _: Any) -> None:
        asked.append(number)
        look()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if not ranks:
            process.terminate()

    usual = {number: signal.signal(number, hand_on) for number in SIGNALS}
    try:
        while process.poll() is None:
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                look()
        _, alive = psutil.wait_procs(ranks, timeout=SHUTDOWN_SECONDS)
        for rank in alive:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    return process.returncode


if __name__ == "__main__":
    command.run(main)
