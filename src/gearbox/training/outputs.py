"""What a run writes while it trains: metrics and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gearbox.checkpoint.checkpointer import Checkpointer, SaveFacts, SaveFailure
from gearbox.checkpoint.manifest import Manifest, WrittenBy
from gearbox.checkpoint.shards import TensorShard
from gearbox.checkpoint.train_state import TrainState
from gearbox.config.loader import recipe_for_manifest
from gearbox.distributed import sharded_state
from gearbox.distributed.engine import Engine
from gearbox.launch.watchdog import Watchdog
from gearbox.reporting.metrics import Metrics
from gearbox.reporting.plan import Plan
from gearbox.training import run_folder
from gearbox.training.run_folder import Run


@dataclass(frozen=True)
class CheckpointContents:
    """What a checkpoint of this run is made of (`CheckpointSource`)."""

    engine: Engine
    plan: Plan

    def local_shards(self) -> list[TensorShard]:
        """Return what this rank writes."""
        return self.engine.local_shards()

    def manifest(self, state: TrainState) -> Manifest:
        """Return the manifest of this step, without files."""
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
    """Reports saves to the metrics, the run's status and the watchdog (`SaveListener`)."""

    run: Run
    metrics: Metrics
    watchdog: Watchdog

    def saved(self, facts: SaveFacts) -> None:
        """Record a checkpoint that is complete."""
        self.metrics.save(facts)
        self.run.saved_step = facts.saved
        self.run.write_status("running")

    def save_failed(self, failure: SaveFailure) -> None:
        """Record a checkpoint that could not be written."""
        self.metrics.save(failure)

    def heartbeat(self, doing: str) -> None:
        """Tell the watchdog that this rank makes progress."""
        self.watchdog.heartbeat(doing)


@dataclass(frozen=True)
class Outputs:
    """What a run writes while it trains."""

    run: Run
    metrics: Metrics
    checkpointer: Checkpointer


@contextmanager
def open_outputs(plan: Plan, engine: Engine, run: Run, watchdog: Watchdog) -> Iterator[Outputs]:
    """Open metrics and checkpoints. Within, a stop is left to the loop, which saves, and dead ranks end this one."""
    with Metrics(run.folder, engine.world.screen, plan.num_steps, run.state) as metrics:
        report = SaveReport(run, metrics, watchdog)
        contents = CheckpointContents(engine, plan)
        checkpointer = Checkpointer(plan.disk, engine.world, contents, report, run.saved_step)
        watchdog.watch_peers(engine.world.pids_of_node())
        yield Outputs(run, metrics, checkpointer)
