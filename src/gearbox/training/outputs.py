"""Open the outputs of a training run: metrics, checkpoints and the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gearbox.checkpoint.checkpointer import Checkpointer, SaveFacts, SaveFailure
from gearbox.checkpoint.manifest import Manifest, WrittenBy
from gearbox.checkpoint.shards import TensorShard
from gearbox.checkpoint.train_state import TrainState
from gearbox.config.gear import Gear
from gearbox.config.loader import recipe_for_manifest
from gearbox.distributed import engine as engines
from gearbox.distributed.engine import Engine
from gearbox.launch.report_process import ReportProcess
from gearbox.launch.watchdog import Watchdog
from gearbox.metrics.answers_file import AnswersFile
from gearbox.metrics.clock import StepClock
from gearbox.metrics.profile import Profiler
from gearbox.metrics.progress import Progress
from gearbox.metrics.recorder import Devices, Metrics
from gearbox.metrics.tracker_start import Description
from gearbox.metrics.trackers import Trackers
from gearbox.planning import gpus
from gearbox.reporting.plan import Plan
from gearbox.sharding import sharded_state
from gearbox.training import run_folder
from gearbox.training.run_folder import Run


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of this run's checkpoints (a `CheckpointSource`)."""

    engine: Engine
    plan: Plan

    def local_shards(self) -> list[TensorShard]:
        """Return the tensors that this rank writes."""
        return self.engine.local_shards()

    def manifest(self, state: TrainState) -> Manifest:
        """Return the manifest of this step, without its files."""
        engine, job = self.engine, self.engine.job
        return Manifest(
            step=state.step,
            progress=state.to_json(),
            eval_loss=state.eval_loss if state.evaluated == state.step else None,
            parameters=sharded_state.full_shapes(engine.unwrapped, engine.world),
            scalars=sharded_state.scalars(engine.unwrapped, engine.optimizer, engine.world),
            recipe=recipe_for_manifest(job.recipe),
            rows=self.plan.rows_key,
            base=self.plan.base,
            versions=run_folder.versions(),
            gear=WrittenBy(name=job.gear.name, num_processes=job.gear.num_processes, engine=self.plan.facts.engine),
        )


@dataclass(frozen=True)
class SaveReport:
    """A `SaveListener` that reports saves to the metrics, the run's status and the watchdog."""

    run: Run
    metrics: Metrics
    watchdog: Watchdog
    report: ReportProcess

    def committing(self) -> None:
        """Flush the metrics of the checkpoint's steps to disk."""
        self.metrics.sync()

    def saved(self, facts: SaveFacts) -> None:
        """Record a complete checkpoint."""
        self.metrics.save(facts)
        self.run.saved_step = facts.saved
        self.run.write_status("running")
        self.report.request()

    def save_failed(self, failure: SaveFailure) -> None:
        """Record a failed save."""
        self.metrics.save(failure)

    def heartbeat(self, doing: str) -> None:
        """Report to the watchdog that this rank makes progress."""
        self.watchdog.heartbeat(doing)


@dataclass(frozen=True)
class Outputs:
    """The outputs of a run while it trains."""

    run: Run
    metrics: Metrics
    checkpointer: Checkpointer
    answers: AnswersFile
    profile: Profiler
    report: ReportProcess


def parts_not_told_apart(gear: Gear) -> frozenset[str]:
    """Return the parts of a step that this gear mixes with others: ZeRO steps inside its backward pass."""
    return frozenset(["communication"] * (gear.num_processes == 1) + ["optimizer"] * (gear.zero_stage > 0))


def devices_of(engine: Engine) -> Devices:
    """Return what is known of the run's devices. A peak is known in bf16 only."""
    fit, kind = engine.fit, None
    if engine.device.type == "cuda" and engines.precision(engine.job.gear) == "bf16":
        kind = gpus.kind_of(torch.cuda.get_device_name(engine.device))
    return Devices(
        count=engine.world.size,
        predicted_bytes=None if fit is None else fit.predicted_bytes,
        flops_per_token=None if fit is None else fit.flops_per_token,
        peak_flops=None if kind is None or kind.tflops is None else kind.tflops * 1e12,
    )


@contextmanager
def open_outputs(plan: Plan, engine: Engine, run: Run, watchdog: Watchdog) -> Iterator[Outputs]:
    """Open metrics and checkpoints. While they are open, the loop saves on a stop, and a dead rank ends this one."""
    screen, keys = engine.world.screen, engine.job.recipe.run
    progress = Progress(screen, run.state, plan.num_steps, keys.log_every)
    clock = StepClock(engine.device, parts_not_told_apart(engine.job.gear))
    recorder = Metrics(run.folder, progress, clock, run.saved_step, devices_of(engine))
    if recorder.writes and keys.trackers:
        described = Description.of(run.folder, engine.job)
        recorder.trackers = Trackers(keys.trackers, described, screen.print_always)
    with recorder as metrics:
        page = ReportProcess(run.folder, engine.world.rank == 0)
        report = SaveReport(run, metrics, watchdog, page)
        contents = CheckpointContents(engine, plan)
        checkpointer = Checkpointer(plan.disk, engine.world, contents, report, run.saved_step)
        metrics.waited_for_saves = lambda: checkpointer.seconds_waited
        watchdog.watch_peers(engine.world.pids_of_node())
        place = (engine.world.rank, engine.device)
        profile = Profiler(run.folder / "profile", keys, plan.num_steps, screen, place)
        profile.on_end = metrics.skip_time
        profile.open(run.state.step)
        try:
            answers = AnswersFile(run.folder, engine.world.screen, run.state.evaluated)
            yield Outputs(run, metrics, checkpointer, answers, profile, page)
            checkpointer.close()
        finally:
            profile.close()
            page.close()
