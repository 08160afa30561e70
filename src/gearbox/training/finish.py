"""End a run: report a stop, or export, reload and report the trained model."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from gearbox import ROOT, processes
from gearbox.checkpoint.shards import ShardReader
from gearbox.checkpoint.train_state import TrainState
from gearbox.console import format_bytes, make_console, status, styled
from gearbox.distributed.engine import Engine
from gearbox.distributed.process_group import LOADING_TIMEOUT, ProcessGroup, is_first_rank
from gearbox.launch import lifeline
from gearbox.launch.environment import CALLER_RELOADS, without_launcher
from gearbox.launch.outcome import exit_code
from gearbox.launch.watchdog import LOOK_SECONDS, Watchdog
from gearbox.model import adapters, export
from gearbox.reporting import preview
from gearbox.reporting.plan import Plan
from gearbox.rows.splits import TrainingRows
from gearbox.sharding.full_parameters import FullParameters
from gearbox.training import evaluation
from gearbox.training.run_folder import Run, verify_share


def end_stopped(run: Run, world: ProcessGroup, watchdog: Watchdog) -> int:
    """End a run that was asked to stop: report the step that it resumes from. Return the exit code."""
    watchdog.disarm()
    step, saved_step = run.state.step, run.saved_step
    is_saved = step == saved_step
    after = f"stopped at step {step}" if is_saved else f"stopped at step {step}, which could not be saved"
    text = f"{after}; run the same command to resume from step {saved_step}"
    world.barrier()
    run.write_status("saved", text)
    word = styled(("saved", "bold green") if is_saved else ("not saved", "bold red"), f": {text}")
    world.screen.print_always(word)
    if world.rank == 0:
        run.write_report()
    return exit_code("saved")


def end_training(run: Run, num_steps: int, world: ProcessGroup, watchdog: Watchdog) -> None:
    """Leave the loop: other ranks may exit, and later work may take longer than a step."""
    state = run.state
    watchdog.disarm(on_stop="the model is being saved" if run.saved_step < state.step else "")
    world.set_collective_timeout(LOADING_TIMEOUT.total_seconds())
    if state.step < num_steps:
        world.screen.print(f"stopped early at step {state.step}/{num_steps}: {_why_stuck(state)}")
    if state.score_before is not None and state.best_score is not None and state.score_before > state.best_score:
        before = evaluation.show_score(state, state.score_before)
        world.screen.print(f"hint: the model before training was better than at any evaluation: {before}")


def _why_stuck(state: TrainState) -> str:
    """Return why training ended before its last step."""
    looks = f"the last {state.num_not_better} evaluation{'s' * (state.num_not_better > 1)}"
    if state.best_score is None:
        return f"{looks} gave no finite {state.best_by}"
    best = evaluation.show_score(state, state.best_score)
    return f"{looks} did not improve on step {state.best_step}, with {best}"


def save_model(engine: Engine, tokenizer: PreTrainedTokenizerFast, run: Run) -> int:
    """Write run.folder/model. Every rank calls it, and parameters are gathered one at a time.

    Return the step of the model: the last one, or with save.best the best evaluated one, if its checkpoint is complete.
    """
    recipe, state, best = engine.job.recipe, run.state, None
    if recipe.save.best and state.best_step not in (0, state.step):
        best = _best_checkpoint(run, engine.world)
    parameters = FullParameters(
        engine.unwrapped,
        engine.world,
        engine.device,
        only_trainable=recipe.adapter.method != "none",
        also=adapters.saved_frozen_names(engine.unwrapped, recipe),
        saved=best,
    )
    folder = run.folder / "model"
    with status(engine.world.screen, f"saving the model to {folder}"):
        export.save(engine.unwrapped, parameters, tokenizer, engine.source, engine.stored_dtype, folder)
    engine.world.barrier()
    step = state.step if best is None else state.best_step
    if recipe.save.best and state.best_score is not None and step == state.best_step:
        score = evaluation.show_score(state, state.best_score)
        engine.world.screen.print(f"the model is that of step {step}, the best evaluation: {score}")
    run.model_step = step
    return step


def _best_checkpoint(run: Run, world: ProcessGroup) -> ShardReader | None:
    """Return a reader of the best step's checkpoint, on all ranks or, with a printed reason, on none."""
    folder = run.checkpoints / f"step-{run.state.best_step}"
    problem, found = verify_share(folder, world)
    if problems := [text for text in world.gather(problem) if text]:
        text = f"{folder}: {problems[0]}; the model is that of the last step, {run.state.step}, not of the best one"
        world.screen.print_always(styled(("best checkpoint not used", "bold red"), f": {text}"))
        return None
    assert found is not None
    return ShardReader(folder, found[0])


def report(
    plan: Plan,
    rows: TrainingRows,
    tokenizer: PreTrainedTokenizerFast,
    answered: list[dict[str, str]],
    run: Run,
    watchdog: Watchdog,
) -> None:
    """End the run as done. Rank 0 shows the answers, writes the report, and reloads the saved model first.

    The other ranks exit meanwhile, because loading a large model can outlast a collective's timeout.
    """
    if not is_first_rank():
        run.write_status("done")
        return
    watchdog.disarm(on_stop="the model is saved; it will not be asked")
    screen = make_console(speaks=True)
    preview.show_answers(screen, answered)
    question = answered[0]["question"] if answered else "Hello"
    model = run.folder / "model"
    command = ask_command(model, question, plan.job.recipe.model.trust_remote_code)
    asks = CALLER_RELOADS not in os.environ
    problem = _memory_problem(model) if asks else ""
    reply = None
    if asks and not problem:
        with status(screen, "loading the saved model in a fresh process"):
            reply = ask_saved(model, command, watchdog)
    if reply is not None:
        screen.print(f"reloaded in a fresh process: {preview.short(question)!r} is answered with {reply!r}")
    screen.print(f"report: {run.folder / 'report.html'}; metrics: {run.folder / 'metrics.jsonl'}")
    why = problem or "stopped before the saved model was asked"
    left = f"{why}; run: python {shlex.join(command)}" if asks and reply is None else ""
    run.write_report("done", left)  # first: the page of a run that is done is complete
    run.write_status("done", left)
    screen.print_always(styled(("done", "bold green"), f": model saved to {model}{left and f'; {left}'}"))


def _memory_problem(folder: Path) -> str:
    """Return why the saved model does not fit in host memory in addition to the trained one; empty if it fits."""
    need, free = export.bytes_to_load(folder), processes.free_memory()
    if need <= free:
        return ""
    return f"the saved model was not asked: {format_bytes(free)} of host memory free, {format_bytes(need)} needed"


def ask_command(folder: Path, question: str, trust_remote_code: bool) -> list[str]:
    """Return the script and the arguments that ask a saved model one question."""
    flags = ["trust_remote_code=true"] if trust_remote_code else []
    return [str(ROOT / "src" / "ask.py"), str(folder), question, *flags]


def ask_saved(folder: Path, command: list[str], watchdog: Watchdog) -> str | None:
    """Ask the saved model in a fresh process without a GPU, as a recipient of the model would. Return the answer.

    After a stop, end the process and return None. The process has its own session, so a signal to this rank's group
    reaches only this rank. It ends with this rank (see gearbox.launch.lifeline).
    """
    environment = without_launcher() | {"CUDA_VISIBLE_DEVICES": "", lifeline.PARENT: str(os.getpid())}
    pipe = subprocess.PIPE
    asking = subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    with asking:
        while not watchdog.stop_requested:
            with suppress(subprocess.TimeoutExpired):
                answer, errors = asking.communicate(timeout=LOOK_SECONDS)
                break
        else:
            asking.kill()
            return None
    if asking.returncode != 0:
        raise RuntimeError(f"{folder} was saved but cannot be reloaded:\n{errors[-3000:]}")
    return preview.short(answer)
