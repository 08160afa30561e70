"""Open the outputs of a training run: metrics, checkpoints and the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gearbox.checkpoint.checkpointer import Checkpointer, SaveFacts, SaveFailure
from gearbox.checkpoint.manifest import Manifest, WrittenBy
from gearbox.checkpoint.shards import TensorShard
from gearbox.checkpoint.train_state import TrainState
from gearbox.config.loader import recipe_for_manifest
from gearbox.distributed.engine import Engine
from gearbox.launch.report_process import ReportProcess
from gearbox.launch.watchdog import Watchdog
from gearbox.metrics.recorder import Metrics
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
    report: ReportProcess


@contextmanager
def open_outputs(plan: Plan, engine: Engine, run: Run, watchdog: Watchdog) -> Iterator[Outputs]:
    """Open metrics and checkpoints. While they are open, the loop saves on a stop, and a dead rank ends this one."""
    predicted = None if plan.fit is None else plan.fit.predicted_bytes
    with Metrics(run.folder, engine.world.screen, plan.num_steps, run.state, run.saved_step, predicted) as metrics:
        page = ReportProcess(run.folder, engine.world.rank == 0)
        report = SaveReport(run, metrics, watchdog, page)
        contents = CheckpointContents(engine, plan)
        checkpointer = Checkpointer(plan.disk, engine.world, contents, report, run.saved_step)
        watchdog.watch_peers(engine.world.pids_of_node())
        try:
            yield Outputs(run, metrics, checkpointer, page)
            checkpointer.close()
        finally:
            page.close()
