"""Fork ranks from a warm parent process; each runs train.py in the environment that `accelerate launch` sets."""

from support.environment import ROOT  # isort: skip  first: it sets variables that other imports read

import faulthandler
import gc
import io
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import accelerate.commands.launch as launcher
import bitsandbytes  # noqa: F401  warm
import datasets  # noqa: F401  warm
import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops.op_builder.all_ops
import deepspeed.runtime.superoffload.superoffload_stage3
import deepspeed.runtime.zero.stage_1_and_2  # noqa: F401  warm
import peft  # noqa: F401  warm
import pytest
import torch
import torch.utils.tensorboard
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from safetensors.torch import load_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.llama import modeling_llama  # noqa: F401  warm

import ask
import train as train_script
from gearbox.config.gear import load_gear
from gearbox.errors import UserError
from gearbox.reporting import preview
from gearbox.training import finish, loop, session  # noqa: F401  warm: they import all that a run does
from support import kinds

get_checkpoint_conversion_mapping("llama")  # warm: compiles and caches a thousand patterns
torch.set_num_threads(1)  # forked children hang if the parent has used two threads
PATIENCE = 15  # seconds for the other ranks to end after one has failed
TIMEOUT = 300  # seconds until hanging ranks are killed; far longer than any run


@dataclass
class Outcome:
    """The result of a run: exit codes by rank, printed output and run folder."""

    codes: list[int]
    output: str
    folder: Path | None

    def lines(self, key: str) -> list[dict]:
        assert self.folder is not None, self.output
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [record for record in records if key in record]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines("loss")]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        assert self.folder is not None, self.output
        (file,) = (self.folder / "model").glob("*.safetensors")
        return load_file(file)


def launcher_environment(gear_path: Path, num_processes: int | None) -> dict[str, str]:
    """Return the variables that accelerate's launcher sets in the environment of each rank."""
    arguments = ["--config_file", str(gear_path)]
    if num_processes is not None:
        arguments += ["--num_processes", str(num_processes)]
    parsed = launcher.launch_command_parser().parse_args([*arguments, "src/train.py"])
    parsed, defaults, _ = launcher._validate_launch_command(parsed)
    if parsed.use_deepspeed:
        parsed.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)  # as launch_command does
        return prepare_deepspeed_cmd_env(parsed)[1]
    if parsed.use_fsdp or parsed.multi_gpu:
        return prepare_multi_gpu_env(parsed)
    return prepare_simple_launcher_cmd_env(parsed)[1]


def fork_ranks(
    num_ranks: int, environment: dict[str, str], work, meanwhile=lambda children: None
) -> tuple[list[int], str]:
    """Run work() in `num_ranks` forked children; return their exit codes and their output.

    Call `meanwhile` in the parent with their process ids.
    """
    kinds.refuse_in_unit_tests("ranks", "ranks")
    # Like torch's launcher, this process hosts the store where the ranks meet. A port chosen for rank 0's own store
    # could be taken by then.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # No child connects before all are forked. The store's thread resolves the name of each client. A child forked
    # during that inherits the resolver's held lock, and waits for it forever.
    all_forked, last_fork = os.pipe()
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115  the children use it too
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            code = 1
            gc.freeze()  # else the child's collector visits all of the parent's objects, and copies their pages
            try:
                os.close(last_fork)
                os.read(all_forked, 1)  # returns once the parent has closed its end too
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # instead of pytest's
                # Show where a rank hangs. Ranks print at different times, so that their lines do not mix.
                faulthandler.dump_traceback_later(TIMEOUT - PATIENCE + rank, file=sys.stderr)
                # At the first use after a fork torch replaces its thread pool, which is not thread-safe: transformers'
                # loader threads once failed with "Invalid thread pool!". So use it once before there are threads.
                torch.set_num_threads(1)
                os.environ.update(environment)
                if num_ranks > 1:
                    os.environ.update(
                        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks),
                        LOCAL_WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
                        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
                    )  # fmt: skip
                code = work() or 0
            except UserError as error:
                print("\n".join(f"gearbox: {line}" for line in str(error).splitlines()))  # as src/train.py prints it
                code = 2
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    os.close(last_fork)
    os.close(all_forked)
    meanwhile(children)
    codes = _wait(children)
    log.seek(0)
    return codes, log.read()


def skip_loading_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the fresh process at the end of a run that reloads the model, which takes 5 s."""
    monkeypatch.setattr(finish, "ask_saved", lambda *_: "(not asked)")


@contextmanager
def loaded_back_warm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a process forked from here reload the model of the next run, because a fresh process takes 5 s to start.

    Like a fresh process, it has never been a rank.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        _answer(theirs)

    def ask_saved(folder: Path, command: list[str], _) -> str:
        with ours.makefile("rw") as pipe:
            print(json.dumps(command), file=pipe, flush=True)
            answer, error = json.loads(pipe.readline())
        if error:
            raise RuntimeError(f"{folder} was saved but cannot be reloaded:\n{error}")
        return preview.short(answer)

    with monkeypatch.context() as patch:
        patch.setattr(finish, "ask_saved", ask_saved)
        yield
    os.kill(child, 9)
    os.waitpid(child, 0)
    ours.close()
    theirs.close()


def _answer(connection: socket.socket) -> None:
    """Run src/ask.py with the arguments that arrive, send what it prints or its error, and exit."""
    gc.freeze()
    torch.set_num_threads(1)  # as in a rank
    printed, error = io.StringIO(), ""
    with connection.makefile("rw") as pipe:
        command = json.loads(pipe.readline())
        try:
            with redirect_stdout(printed):
                ask.main(command[1:])
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps([printed.getvalue(), error]), file=pipe, flush=True)
    os._exit(0)


def _wait(children: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    if codes[child]:  # the others would wait for this rank until the timeout
                        deadline = min(deadline, time.monotonic() + PATIENCE)
        if time.monotonic() > deadline:
            for child in set(children) - set(codes):
                os.kill(child, 9)
        time.sleep(0.02)
    return [codes[child] for child in children]


def supervise_warm(runs: Path, flags: list[str], arguments: list[str], output: IO[str]) -> int:
    """Train on forked ranks in the place of `supervisor.supervise`. Return the exit code."""
    gear, num_ranks = (flag.partition("=")[2] for flag in flags)
    outcome = run_ranks(gear, arguments, runs, int(num_ranks))
    output.write(outcome.output)
    return max(outcome.codes)


def run_ranks(
    gear_name: str, arguments: list[str], runs: Path, num_processes: int | None = None, meanwhile=lambda children: None
) -> Outcome:
    path = ROOT / "accelerate_configs" / f"{gear_name}.yaml" if "/" not in gear_name else Path(gear_name)
    flags = {} if num_processes is None else {"num_processes": str(num_processes)}
    gear = load_gear(path, flags)
    environment = launcher_environment(path, num_processes)
    before = set(runs.glob("*")) if runs.exists() else set()

    def work() -> int:
        return train_script.main(arguments, gear)

    codes, output = fork_ranks(gear.num_processes, environment, work, meanwhile)
    made = (set(runs.glob("*")) if runs.exists() else set()) - before
    named = [runs / argument.partition("=")[2] for argument in arguments if argument.startswith("run.name=")]
    return Outcome(codes, output, made.pop() if made else next(iter(named), None))
