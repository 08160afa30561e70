"""Check everything that can be checked in a second, then train under a gear, and go on where a rank dies.

python src/launch.py GEAR [--doctor] [--flag=value of accelerate launch ...] [RECIPE] [key.sub=value ...]

Where a job has several machines each runs this with its place among them: --num_machines, --machine_rank,
--main_process_ip and --main_process_port, or torchrun's PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.

Exit codes: 0 done; 2 a mistake of yours; 85 saved, the same command goes on; 93 failed, it would fail again.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from gearbox import ROOT, processes
from gearbox.config.gear import gear_names, gear_path, load_gear
from gearbox.config.job import Job
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.launch import cli, outcome
from gearbox.launch.outcome import (
    EXIT_CODES,
    EXIT_CRASHED,
    EXIT_FAILED,
    EXIT_SAVED,
    OUTCOME_FILE,
    RUN_FOLDER,
    read_outcome,
)
from gearbox.launch.topology import Node, node_from_flags

TRAIN = ROOT / "src" / "train.py"
DOCTOR = ROOT / "src" / "doctor.py"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MAX_RESTARTS = 3  # without a newer checkpoint between them
SHUTDOWN_SECONDS = 600  # for ranks that are asked to end: they save first
JOIN_SECONDS = 300  # for machines to meet, beyond the time in which one may still wait for a rank that is gone
MAX_ALONE = 5  # tries in which this machine met no other
LAUNCHER_SECONDS = 30  # for a launcher without ranks, which may wait for one on a machine that is gone
LOOK_SECONDS = 1.0


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        gears = ", ".join(gear_names())
        raise UserError(f"usage: python src/launch.py GEAR [--doctor] [RECIPE] [key.sub=value ...]; the gears: {gears}")
    path = gear_path(arguments[0])
    asks_doctor = "--doctor" in arguments
    given = [argument for argument in arguments[1:] if argument.startswith("--") and argument != "--doctor"]
    ours = [argument for argument in arguments[1:] if not argument.startswith("--")]
    if bare := [flag for flag in given if "=" not in flag]:
        raise UserError(f"{bare[0]}: write the launcher's flags as {bare[0]}=VALUE")
    flags, place = node_from_flags(dict(flag.removeprefix("--").split("=", 1) for flag in given))

    recipe_path, overrides = cli.split_arguments(ours)
    problems = []
    recipe = gear = None
    try:
        recipe = load_recipe(recipe_path, overrides)
    except UserError as error:
        problems.append(str(error))
    try:
        gear = load_gear(path, flags)
    except UserError as error:
        problems.append(str(error))
    if recipe is None or gear is None:
        raise UserError("\n".join(problems))
    Job.of(recipe_path, recipe, gear)
    if place is not None and gear.num_processes % place.num_machines:
        raise UserError(f"--num_processes={gear.num_processes}: {place.num_machines} machines cannot share them evenly")
    launcher = [f"--config_file={path}", *(f"--{name}={value}" for name, value in flags.items())]
    join_seconds = recipe.run.hang_timeout + JOIN_SECONDS
    if asks_doctor and (code := train(launcher, [], DOCTOR, place=place, join_seconds=join_seconds)):
        return code
    return train(launcher, [str(recipe_path), *overrides], place=place, join_seconds=join_seconds)


def train(
    flags: list[str],
    arguments: list[str],
    script: Path = TRAIN,
    output: IO[str] | None = None,
    place: Node | None = None,
    join_seconds: float = float("inf"),
) -> int:
    """Run the script under `accelerate launch` until it is done, saved or failed; returns the exit code.

    All that is said goes to the screen, or to `output`. One launcher a try, with a rendezvous of its own: no gear needs
    another way, and a launcher that dies is no exception. A try that comes to a newer checkpoint is progress. Of
    several machines each tries by itself, and has join_seconds to meet the others again.
    """
    asked: list[int] = []
    said = output or sys.stderr
    if place is not None:
        flags = [*flags, *place.flags(join_seconds)]
    with tempfile.TemporaryDirectory() as folder:
        outcome_file = Path(folder) / "outcome"
        environment = os.environ | {
            OUTCOME_FILE: str(outcome_file),
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1",  # else SIGUSR1 kills torch's launcher, not its ranks
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),  # it kills after 30 s what still saves
        }
        newest = num_restarts = num_alone = 0
        run: str | None = None  # its folder, once it has taken a step
        deadline = time.monotonic() + join_seconds
        while True:
            outcome_file.unlink(missing_ok=True)
            code, has_met = _attempt(
                [*flags, str(script), *arguments], environment, script, asked, output, place,
                partial(_may_wait, place, deadline, run),
            )  # fmt: skip
            if place is not None and not has_met and not asked:
                num_alone += 1  # another machine may still be in the try before this one
                if (ended := _ended(run)) is not None:
                    return ended
                if time.monotonic() < deadline and num_alone < MAX_ALONE:
                    continue
                print(f"gearbox: {place.num_machines} machines did not meet at {place.address}:{place.port} within "
                      f"{join_seconds:g} s", file=said)  # fmt: skip
                return EXIT_CRASHED if run is None else EXIT_SAVED
            deadline, num_alone = time.monotonic() + join_seconds, 0
            status = read_outcome(outcome_file)
            outcome, saved_step = status.get("outcome"), int(status.get("saved_step", newest))
            run = status["run"] if status.get("step") else run
            if outcome in ("refused", "failed"):
                print(status["text"], file=said)
            if outcome == "saved" and code == -signal.SIGKILL and not asked:
                outcome = "running"  # nobody wanted this end: the launcher was killed, and its ranks have saved
            if outcome in EXIT_CODES:
                return 130 if asked.count(signal.SIGINT) > 1 else EXIT_CODES[outcome]
            if asked:  # before there was anything to save, or in too little time: what is saved stays
                return 130 if asked.count(signal.SIGINT) > 1 else EXIT_SAVED
            if run is None:
                return code  # it has not come to its first step, and would not the next time
            num_restarts = 1 if saved_step > newest else num_restarts + 1
            newest = max(newest, saved_step)
            if num_restarts > MAX_RESTARTS:
                print(
                    f"gearbox: {MAX_RESTARTS} restarts in a row came to no checkpoint after step {newest}; the reason "
                    f"stands above; {run} keeps what there is",
                    file=said,
                )
                return EXIT_FAILED
            print(
                f"gearbox: the run ended with code {code}; restart {num_restarts} goes on from step {newest}",
                file=said,
                flush=True,
            )
            environment[RUN_FOLDER] = run


def _may_wait(place: Node | None, deadline: float, run: str | None) -> bool:
    """Whether machines that have not come may still come."""
    return place is None or (time.monotonic() < deadline and _ended(run) is None)


def _ended(run: str | None) -> int | None:
    """The exit code of a run that another machine's launcher has ended, None while it goes on."""
    status = outcome.read_outcome(Path(run) / "status.json") if run is not None else {}
    return outcome.EXIT_CODES.get(status.get("outcome", ""))


def _attempt(
    arguments: list[str],
    environment: dict[str, str],
    script: Path,
    asked: list[int],
    output: IO[str] | None,
    place: Node | None,
    may_wait: Callable[[], bool],
) -> tuple[int, bool]:
    """One `accelerate launch`, with signals handed to the ranks; returns its exit code once no rank is left, and
    whether there were any: until then it waits for other machines, while it may."""
    process: subprocess.Popen[bytes] | None = None
    ranks: list[psutil.Process] = []

    def look() -> None:
        with suppress(psutil.Error):
            children = psutil.Process(process.pid).children() if process else []
            ranks[:] = [child for child in children if str(script) in child.cmdline()] or ranks

    def hand_on(number: int, _: Any) -> None:
        asked.append(number)
        look()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if process and not ranks:
            process.terminate()

    usual = {number: signal.signal(number, hand_on) for number in SIGNALS}
    try:
        if place is not None:
            while not place.is_reachable():
                if asked or not may_wait():
                    return outcome.EXIT_CRASHED, False
                time.sleep(LOOK_SECONDS)
            environment = environment | place.environment()
        process = subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", *arguments],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a terminal's Ctrl-C comes here alone, and is handed on once
            preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM),
        )
        last_seen = math.inf
        while process.poll() is None:
            try:
                process.wait(timeout=LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                look()
                if not ranks and not may_wait():
                    process.terminate()
                if any(map(processes.is_alive, ranks)):
                    last_seen = time.monotonic()
                elif time.monotonic() - last_seen > LAUNCHER_SECONDS:
                    process.kill()
                    process.wait()
                    return outcome.EXIT_CRASHED, True
        _, alive = psutil.wait_procs(ranks, timeout=SHUTDOWN_SECONDS)
        for rank in alive:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    return process.returncode, bool(ranks) or process.returncode == 0  # ranks may end between two looks


if __name__ == "__main__":
    cli.run(main)
