"""Run the training loop. Rows, loss and learning rate do not depend on the number of ranks or the engine."""

from __future__ import annotations

import math

import torch

from gearbox import processes
from gearbox.checkpoint.train_state import StepResult, TrainState
from gearbox.distributed.engine import Engine
from gearbox.distributed.pipeline_parallel import Pipeline
from gearbox.errors import UserError
from gearbox.launch.watchdog import GRACE_SECONDS, Watchdog
from gearbox.metrics.clock import Phases, StepClock
from gearbox.model.optimizer import learning_rate
from gearbox.model.router_loss import imbalance, pop_loads, pop_router_loss, router_weight
from gearbox.rows.batches import Batch, StepBatch
from gearbox.rows.splits import TrainingRows
from gearbox.training import comparing, evaluation
from gearbox.training.evaluation import Questions
from gearbox.training.outputs import Outputs
from gearbox.training.rows_ahead import RowsAhead, passes_of


def fit(engine: Engine, rows: TrainingRows, questions: Questions, outputs: Outputs, watchdog: Watchdog) -> bool:
    """Train until rows.num_steps, or until evaluations stop to improve.

    Return True if a rank was asked to stop first; all ranks have then saved.
    """
    recipe, state, ahead = engine.job.recipe, outputs.run.state, RowsAhead(engine, rows)
    first_step = state.step
    processes.return_free_memory()
    while True:
        evaluate_if_due(engine, rows, questions, outputs, watchdog)  # first, so that a checkpoint has its held-out loss
        last_step = evaluation.last_step(recipe.eval, state, rows.num_steps)
        watchdog.heartbeat(f"step {state.step}, boundary")
        stop = outputs.checkpointer.save_if_due(state, last_step, watchdog.stop_requested)
        if stop or state.step == last_step:
            return stop and (state.step < last_step or outputs.checkpointer.saved_step == state.step)

        enter = phases_of(state.step + 1, watchdog, outputs.metrics.clock)
        enter("rows", "data")
        batch = ahead.take(state.step)
        enter("start", "")
        engine.seed_step(state.step)
        rate = learning_rate(state.step, rows.num_steps, recipe.optim, recipe.schedule)
        engine.set_learning_rate(rate)
        comparing.begin_step(engine, rows.training, batch)
        result = train_step(engine, batch, recipe.optim.max_grad_norm, enter)
        enter("end", "")
        is_spike = state.advance(batch, result)
        outputs.metrics.step(batch, result, rate, is_spike)
        outputs.profile.after(state.step)
        outputs.report.start_if_due()
        refuse_divergence(recipe.run.max_bad_steps, rows, state, batch, result)
        if state.step == first_step + 1:  # startup is slow, later steps are not: detect hangs from here
            outputs.run.mark_started()
            engine.world.set_collective_timeout(recipe.run.hang_timeout + GRACE_SECONDS)
            watchdog.arm(outputs.run.hang_folder, recipe.run.hang_timeout)


def phases_of(step: int, watchdog: Watchdog, clock: StepClock) -> Phases:
    """Return a function that reports a phase of the step to the watchdog and to the clock."""
    return Phases(clock, lambda phase: watchdog.heartbeat(f"step {step}, {phase}"))


def train_step(engine: Engine, batch: StepBatch, max_grad_norm: float, enter: Phases) -> StepResult:
    """Take one optimizer step on this rank's micro-batches. Return loss and gradient norm of the global step.

    The loss is the sum over the target tokens of all ranks, divided by their number, or that over units of answers that
    are compared. If loss or gradient is not finite on one rank, the norm is not finite on any rank, and no rank takes
    the step.
    """
    if engine.pipeline is not None:
        return train_pipeline_step(engine, engine.pipeline, batch, max_grad_norm, enter)
    step_loss = torch.zeros((), device=engine.device)
    for number, micro_batch in enumerate(batch.micro_batches, start=1):
        with engine.accumulating():
            for one_pass, is_last in marked_passes(engine, micro_batch):
                enter(f"micro-batch {number}", "forward")
                with engine.forward_inputs(one_pass, is_last) as inputs:
                    loss = engine.model(**inputs) / batch.num_losses  # the model sums them
                    step_loss += loss.detach()
                    if is_last and engine.is_last_micro_batch:
                        enter("loss of all ranks", "communication")
                        step_loss = engine.sum_over_ranks(step_loss)
                        loss = loss * (1 + 0 * step_loss)  # NaN on all ranks if any loss is not finite
                    enter(f"micro-batch {number}, backward", "backward")
                    engine.backward(loss)
            if engine.is_last_micro_batch:
                enter("gradient norm", "optimizer")
                # All numbers are read here, so that the host waits once and queues the next step behind the optimizer.
                grad_norm = engine.clip_gradients(max_grad_norm)
                result = result_of(engine, batch, float(step_loss), grad_norm)
                engine.step_and_zero(skip=not math.isfinite(grad_norm))
    return result


def result_of(engine: Engine, batch: StepBatch, loss: float, grad_norm: float) -> StepResult:
    """Return the result of a step, with what its passes have counted on all ranks."""
    pipeline = engine.pipeline
    loads = loads_of_experts(engine) if pipeline is None else (None, None)
    return StepResult(
        loss,
        grad_norm,
        mean_router_loss(engine, batch.num_targets),
        *loads,
        idle=None if pipeline is None else pipeline.idle,
        figures=comparing.figures_of_step(engine),
    )


def marked_passes(engine: Engine, micro_batch: Batch) -> list[tuple[Batch, bool]]:
    """Return the passes of a micro-batch, each with True if it is the last one."""
    passes = passes_of(engine, micro_batch)
    return [(one_pass, number == len(passes)) for number, one_pass in enumerate(passes, start=1)]


def train_pipeline_step(
    engine: Engine, pipeline: Pipeline, batch: StepBatch, max_grad_norm: float, enter: Phases
) -> StepResult:
    """Take the same step under pipeline parallelism: the pipeline takes all micro-batches at once."""
    enter("pipeline", "")
    micro_batches = [engine.to_device(micro_batch) for micro_batch in batch.micro_batches]
    loss = pipeline.step(micro_batches, 1 / batch.num_losses)
    for part, seconds in pipeline.seconds_of_parts().items():
        enter.clock.add(part, seconds)
    enter("gradient norm", "optimizer")
    grad_norm = engine.clip_gradients(max_grad_norm) if math.isfinite(loss) else math.nan
    result = result_of(engine, batch, loss, grad_norm)
    engine.step_and_zero(skip=not math.isfinite(grad_norm))
    return result


def mean_router_loss(engine: Engine, num_targets: int) -> float | None:
    """Return the step's unweighted router loss per target token, or None without a balanced router."""
    if not router_weight(engine.unwrapped):
        return None
    return float(engine.sum_over_ranks(pop_router_loss(engine.unwrapped))) / max(1, num_targets)


def loads_of_experts(engine: Engine) -> tuple[float | None, float | None]:
    """Return the step's imbalance of tokens over experts, and over the ranks that divide them, or None."""
    loads, ep = pop_loads(engine.unwrapped), engine.job.gear.degree("ep")
    if loads is None or engine.job.gear.shares_rows:  # a rank then sees parts of rows
        return None, None
    loads = engine.sum_over_ranks(loads)
    if not loads.any():  # compiled layers do not count
        return None, None
    return imbalance(loads, loads.shape[1]), imbalance(loads, ep) if ep > 1 else None


def evaluate_if_due(
    engine: Engine, rows: TrainingRows, questions: Questions, outputs: Outputs, watchdog: Watchdog
) -> None:
    """Evaluate the held-out rows and answer questions if that is due. A stop request ends this on all ranks."""
    recipe, state = engine.job.recipe.eval, outputs.run.state
    if not (len(rows.held_out) or len(questions)) or not evaluation.is_due(recipe, state, rows.num_steps):
        return

    def keep_going() -> bool:
        watchdog.heartbeat(f"step {state.step}, evaluation")
        return not any(engine.world.sum([watchdog.stop_requested]))

    result = evaluation.evaluate(engine, rows.held_out, keep_going) if len(rows.held_out) else None
    answers = questions.answer(engine, keep_going) if result or not len(rows.held_out) else None
    if answers is None:
        return
    score = questions.score(recipe, answers, keep_going)
    if score is None and questions.metric is not None:
        return
    state.evaluated = state.step
    outputs.answers.add(questions.shown(recipe, state.step, answers))
    outputs.metrics.skip_time()
    if result is not None:
        state.eval_loss = result.loss
        outputs.metrics.evaluation(result.loss, result.exact_match, score, result.figures)
        state.judge(-result.loss if score is None else score)
    outputs.report.request()


def refuse_divergence(
    max_bad_steps: int, rows: TrainingRows, state: TrainState, batch: StepBatch, result: StepResult
) -> None:
    """Raise UserError after `max_bad_steps` consecutive steps with a non-finite loss or gradient."""
    if state.num_skipped_in_a_row >= max_bad_steps:
        raise UserError(
            f"step {state.step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite for "
            f"{state.num_skipped_in_a_row} steps in a row (run.max_bad_steps); lower optim.lr or check rows "
            f"{batch.row_ids}: {rows.training.locations(batch.row_ids)}"
        )
