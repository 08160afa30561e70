"""Fork ranks from a warm parent process, in the environment that `accelerate launch` sets.

A forked rank starts in a fraction of a second, because it inherits what the parent has imported. It needs a machine
without a GPU: a forked process cannot use CUDA once its parent has.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import accelerate.commands.launch as launcher
import bitsandbytes  # noqa: F401  warm
import datasets  # noqa: F401  warm
import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops.op_builder.all_ops
import deepspeed.runtime.superoffload.superoffload_stage3
import deepspeed.runtime.zero.stage_1_and_2  # noqa: F401  warm
import peft  # noqa: F401  warm
import torch
import torch.utils.tensorboard
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch._C._distributed_c10d import TCPStore
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.llama import modeling_llama  # noqa: F401  warm

from gearbox import processes
from gearbox.errors import UserError
from gearbox.launch.environment import LaunchEnvironment, variables_of_rank

RANK_0_SPEAKS_SECONDS = 0.5


class Limits(NamedTuple):
    """The seconds after which ranks are killed."""

    hang: float = 300
    """From the start; far longer than any run."""
    patience: float = 15
    """From the failure of another rank."""


def warm_up() -> None:
    """Prepare this process for forking: one thread, and transformers' conversion patterns."""
    get_checkpoint_conversion_mapping("llama")  # compiles and caches a thousand patterns
    torch.set_num_threads(1)  # forked children hang if the parent has used two threads


def launcher_environment(gear_path: Path, num_processes: int | None) -> dict[str, str]:
    """Return the variables that accelerate's launcher sets in the environment of each rank."""
    arguments = ["--config_file", str(gear_path)]
    if num_processes is not None:
        arguments += ["--num_processes", str(num_processes)]
    parsed = launcher.launch_command_parser().parse_args([*arguments, "src/train.py"])
    parsed, defaults, _ = launcher._validate_launch_command(parsed)
    environment: dict[str, str]
    if parsed.use_deepspeed:
        parsed.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)  # as launch_command does
        environment = prepare_deepspeed_cmd_env(parsed)[1]
    elif parsed.use_fsdp or parsed.multi_gpu:
        environment = prepare_multi_gpu_env(parsed)
    else:
        environment = prepare_simple_launcher_cmd_env(parsed)[1]
    return environment


def fork_ranks(
    num_ranks: int,
    environment: dict[str, str],
    work: Callable[[], int | None],
    meanwhile: Callable[[list[int]], object] = lambda children: None,
    limits: Limits = Limits(),  # noqa: B008  it cannot be changed
) -> tuple[list[int], str]:
    """Run work() in `num_ranks` forked children; return their exit codes and their output.

    Call `meanwhile` in the parent with their process ids. The children end with this process.
    """
    # Like torch's launcher, this process hosts the store where the ranks meet. A port chosen for rank 0's own store
    # could be taken by then.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # No child connects before all are forked. The store's thread resolves the name of each client. A child forked
    # during that inherits the resolver's held lock, and waits for it forever.
    all_forked, last_fork = os.pipe()
    parent, children = os.getpid(), []
    with tempfile.TemporaryFile("w+") as log:  # the children use it too
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                os.close(last_fork)
                gc.freeze()  # else the child's collector visits all of the parent's objects, and copies their pages
                processes.die_with_parent(signal.SIGKILL)
                os.read(all_forked, 1)  # returns once the parent has closed its end too
                if os.getppid() != parent:
                    os._exit(1)
                # Show where a rank hangs. Ranks print at different times, so that their lines do not mix.
                seconds = limits.hang - limits.patience + rank
                _become_rank(work, environment | variables_of_rank(rank, num_ranks, store.port), log.fileno(), seconds)
            children.append(child)
        os.close(last_fork)
        os.close(all_forked)
        meanwhile(children)
        codes = _wait(children, limits)
        log.seek(0)
        return codes, log.read()


def _become_rank(work: Callable[[], int | None], environment: dict[str, str], log: int, hang: float) -> NoReturn:
    """Run work() in this forked child, with its output in a file, and exit. After `hang` seconds write its stacks."""
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # instead of the parent's
        faulthandler.dump_traceback_later(hang, file=sys.stderr)
        # At the first use after a fork torch replaces its thread pool, which is not thread-safe: transformers' loader
        # threads once failed with "Invalid thread pool!". So use it once before there are threads.
        torch.set_num_threads(1)
        os.environ.update(environment)
        code = work() or 0
    except UserError as error:
        if LaunchEnvironment.read().rank > 0:
            time.sleep(RANK_0_SPEAKS_SECONDS)  # this rank may refuse only because rank 0 has ended
        print("\n".join(f"gearbox: {line}" for line in str(error).splitlines()))  # as src/train.py prints it
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children: Sequence[int], limits: Limits) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limits.hang
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    if codes[child]:  # the others would wait for this rank until the deadline
                        deadline = min(deadline, time.monotonic() + limits.patience)
        if time.monotonic() > deadline:
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]
