"""Train a language model: a recipe says what, the gear that Accelerate was launched with says how.

accelerate launch --config_file accelerate_configs/GEAR.yaml src/train.py [RECIPE] [key.sub=value ...]
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.markup import escape

from gearbox.config.compatibility import check_against, check_architecture
from gearbox.config.gear import Gear
from gearbox.config.job import accumulation
from gearbox.config.loader import is_local, load_recipe
from gearbox.config.recipe import BUILTIN_TASKS, Recipe
from gearbox.errors import UserError
from gearbox.launch import cli, outcome, topology, watchdog
from gearbox.launch.launched_gear import find_gear
from gearbox.redact import redact


def main(arguments: list[str], gear: Gear | None = None) -> int:
    watching = watchdog.Watchdog()
    recipe_path, overrides = cli.split_arguments(arguments)
    recipe = load_recipe(recipe_path, overrides)
    gear = gear or find_gear()
    if recipe.run.rehearse:
        recipe = rehearsed(recipe)

    rounds, micro_rows = accumulation(recipe.batch.rows, gear.data_parallel, recipe.batch.micro_rows)
    check_against(gear, recipe, recipe_path, rounds, micro_rows)

    # torch is imported from here on; what the files alone can show has been said.
    from gearbox import console
    from gearbox.checkpoint import checkpointer, disk_space
    from gearbox.data import corpus, splits
    from gearbox.distributed import engine, full_parameters, pipeline_stages, process_group, sharded_state, verification
    from gearbox.model import adapters, export, loading, probes, random_init, router_loss
    from gearbox.model.optimizer import make_optimizer
    from gearbox.reporting import html_report, metrics, plan, preview
    from gearbox.training import evaluation, run_folder

    process_group.check_ranks(gear)
    # Before the process group exists: tokenizing may take longer than a collective may wait.
    screen = console.make_console(process_group.is_first_rank())
    if recipe.model.trust_remote_code:
        screen.print(f"[bold red]WARNING: model.trust_remote_code runs the code that comes with {recipe.model.name}[/]")
    recipe = adapters.download_adapter(recipe)
    tokenizer = loading.load_tokenizer(recipe.model, recipe.data.chat_template, recipe.run.rehearse)
    adapters.check_tokens(recipe, tokenizer)
    documents, evaluated = corpus.load_corpora(recipe, tokenizer, process_group.is_first_rank_of_node(), screen.print)
    prepared = splits.split_and_pack(recipe, documents, evaluated, tokenizer, recipe.data.packing)

    world = process_group.join_process_group(gear)
    seats = world.rank_devices()
    topology.check_single_world(seats)
    process_group.check_same_data(world, f"{documents.key} {evaluated.key if evaluated else ''}")
    screen.print(f"[bold]Gearbox[/]  recipe {recipe_path}  gear {gear.name}")
    for line in topology.format_rank_table(seats):
        screen.print(line)
    if machines := topology.num_idle_nodes(seats):
        screen.print(f"hint: {machines} more machines of this job are idle; cluster/slurm/train.sbatch uses them all")
    if process_group.runs_on_cpu():
        screen.print(f"no GPU: rehearsal, {gear.num_processes} x {gear.name} on the CPU in fp32")
    elif idle := process_group.num_idle_gpus():
        screen.print(
            f"hint: {idle} more GPUs of this machine are idle; ddp, fsdp and zero3 use --num_processes N of them"
        )

    name = f"{recipe_path.stem}-{gear.name}"
    with run_folder.open_run(recipe, name, world, screen.print) as run, watching.running():
        source = weights_of(recipe, tokenizer, run.folder, world, num_layers=max(2, gear.degree("pp")))
        architecture = loading.architecture(source, recipe.model)
        check_architecture(gear, architecture, recipe.model.router_loss)
        if gear.degree("pp") > 1:
            pipeline_stages.check_stages_equal_whole(
                random_init.shrink_config(copy.deepcopy(architecture), tokenizer, num_layers=3)
            )
        accelerator = engine.create_accelerator(gear, recipe, rounds, micro_rows)
        loaded = loading.load(
            source,
            recipe,
            tokenizer,
            engine.precision(gear),
            engine.from_pretrained_kwargs(gear),
            engine.stage_of_rank(gear),
        )
        wrapped, optimizer = engine.prepare(gear, accelerator, loaded, make_optimizer(loaded, recipe.optim))
        bare = engine.unwrap_model(accelerator, wrapped)
        if run.checkpoint is not None:
            run.restore(bare, wrapped, optimizer, world.gather)
        facts = verification.verify(accelerator, wrapped, optimizer, gear, recipe, rounds)
        probes.check_loss(
            wrapped, len(tokenizer), accelerator.device, tolerance=1e-4 if facts["precision"] == "fp32" else 2e-2
        )
        if prepared.training.packing:
            seen = neighbours_seen(gear, accelerator, wrapped, prepared.training, micro_rows, len(tokenizer))
            isolated = seen <= (1e-4 if facts["precision"] == "fp32" else 3e-2)
            facts["packed documents"] = f"a neighbour changes a token's loss by {seen:.2g}"
            if not isolated:
                facts["packed documents"] += ": this model does not keep them apart, so each row holds one document"
                prepared = splits.split_and_pack(recipe, documents, evaluated, tokenizer, packing=False)
        engine.fix_ddp_bucket_order(accelerator, wrapped, prepared.training.batch([None]))
        rows_key = f"{documents.key} {prepared.training.key}"
        base = world.decide(lambda: loading.fingerprint(source, recipe))
        run.check_same(rows_key, base)
        num_steps = prepared.num_steps
        if run.progress.step > num_steps:
            raise UserError(
                f"train.steps: {num_steps} are fewer than the {run.progress.step} steps of {run.checkpoint}; give more"
            )
        size = sharded_state.checkpoint_bytes(bare, optimizer, world.gather)
        if weight := router_loss.router_weight(bare):
            facts["router loss"] = f"{weight:g} x the unbalance of the experts"
        facts["checkpoints"], renames = world.decide(lambda: disk_space.check_space(run.checkpoints, recipe.save, size))
        facts = plan.data_facts(recipe, documents, prepared, tokenizer) | facts
        facts = print_plan(screen, gear, recipe, facts, num_steps, micro_rows, run.folder)
        if run.checkpoint is not None:
            screen.print(f"[bold]goes on[/] from {run.checkpoint}, step {run.progress.step} of {num_steps}")
        shown = preview.first_documents(prepared.training, tokenizer, 5)
        preview.show(screen, shown[:1], preview.SHOWN_CHARACTERS)
        if world.rank == 0:
            write_dropped([*prepared.dropped, *prepared.dropped_of_evaluation], run.folder)

        def samples() -> dict[str, str]:
            ask = (accelerator, wrapped, tokenizer)
            length = recipe.eval.sample_tokens
            return {sample.question: evaluation.answer(*ask, sample.prompt, length) for sample in prepared.samples}

        def describe() -> dict[str, Any]:
            """What a manifest holds beside the progress and the files."""
            return {
                "parameters": sharded_state.full_shapes(bare, world.gather),
                "scalars": sharded_state.scalars(bare, optimizer, world.gather),
                "recipe": recipe.model_dump(mode="json"), "rows": rows_key, "base": base, "versions": run_folder.versions(),
                "gear": {"name": gear.name, "num_processes": gear.num_processes, "engine": facts["engine"]},
            }  # fmt: skip

        if not run.progress.step:
            run.progress.answers_before = samples()
        with metrics.Metrics(run.folder, screen, num_steps, run.progress) as log:
            checkpoints = checkpointer.Checkpointer(
                run.checkpoints, recipe.save, rank=world.rank, run_id=world.gather(uuid4().hex[:8])[0],
                saved_step=run.saved_step, renames=renames,
                beat=watching.heartbeat, agree=world.sum, gather=world.gather,
                pieces=lambda: sharded_state.local_shards(bare, optimizer, world.rank, world.gather),
                describe=describe, tell=lambda **said: tell_of_save(run, log, **said),
            )  # fmt: skip
            watching.watch_peers(world.pids_of_node())
            stopped = fit(
                gear, recipe, accelerator, wrapped, optimizer, prepared, num_steps, micro_rows, run, world, log, checkpoints,
                watching,
            )  # fmt: skip
            if stopped:
                watching.disarm()
                return end_saved(run, screen, accelerator)
            watching.disarm(ignores_signals=run.saved_step < num_steps)
            world.set_collective_timeout(process_group.LOADING_TIMEOUT.total_seconds())
            after = samples()

        trained = full_parameters.iter_full_parameters(
            accelerator, bare, only_trainable=recipe.adapter.method != "none",
            beside=adapters.saved_frozen_names(bare, recipe), gather=world.gather,
        )  # fmt: skip
        export.save(bare, trained, tokenizer, source, export.stored_dtype(architecture), run.folder / "model")
        accelerator.wait_for_everyone()
        # The other ranks end here: a large model is loaded back for longer than a collective may wait.
        if accelerator.is_main_process:
            answered = preview.answers(prepared.samples, run.progress.answers_before, after)
            preview.show_answers(screen, answered)
            html_report.write(run.folder, facts, shown, answered)
            question = prepared.samples[0].question if prepared.samples else "Hello"
            reply = ask_saved(run.folder / "model", question, recipe.model.trust_remote_code)
            screen.print(f"loaded back in a fresh process, it answers: {reply}")
            screen.print(f"the run on a page: {run.folder / 'report.html'}; every step's numbers: metrics.jsonl")
            screen.print(f"[bold green]done[/]  the model lies in {run.folder / 'model'}")
        run.says("done")
    return 0


def fit(
    gear: Gear,
    recipe: Recipe,
    accelerator: Any,
    model: Any,
    optimizer: Any,
    prepared: Any,
    num_steps: int,
    micro_rows: int,
    run: Any,
    world: Any,
    log: Any,
    checkpoints: Any,
    watching: watchdog.Watchdog,
) -> bool:
    """The loop: the same rows, the same loss and the same learning rate on any number of ranks, under any engine.

    Returns whether it was asked to stop, and has saved all that is to be gone on from.
    """
    from gearbox.data import batches
    from gearbox.distributed import engine
    from gearbox.model import router_loss
    from gearbox.model.optimizer import learning_rate
    from gearbox.training import evaluation

    rows, progress = prepared.training, run.progress
    order = prepared.sampler
    rank = accelerator.process_index
    first_step = progress.step
    bare = engine.unwrap_model(accelerator, model)

    def goes_on() -> bool:
        watching.heartbeat(f"step {progress.step}, evaluation")
        return not any(world.sum([watching.stop_signal is not None]))

    while True:
        is_last = progress.step == num_steps
        due = is_last or (progress.step % recipe.eval.every == 0 if recipe.eval.every else progress.step == 0)
        if due and progress.evaluated < progress.step and len(prepared.held_out):
            place = gear.eval_shard(rank)
            result = evaluation.evaluate(
                accelerator, model, prepared.held_out, recipe.batch.rows, micro_rows, place, goes_on
            )
            if result is not None:
                progress.evaluated, progress.eval_loss = progress.step, result.loss
                log.evaluation(result)
        watching.heartbeat(f"step {progress.step}, boundary")
        stop = checkpoints.on_step_boundary(progress, num_steps, stop=watching.stop_signal is not None)
        if stop or is_last:
            return stop and (not is_last or checkpoints.saved_step == progress.step)

        watching.heartbeat(f"step {progress.step + 1}, rows")
        shard = gear.data_rank(rank), gear.data_parallel
        batch = batches.make_step_batch(rows, order.step(progress.step), shard, micro_rows)
        engine.seed_step(recipe.train.seed, progress.step, rank // gear.degree("tp"))
        rate = learning_rate(progress.step, num_steps, recipe.optim, recipe.schedule)
        engine.set_learning_rate(optimizer, rate)
        loss, grad_norm = train_step(
            gear, accelerator, model, optimizer, batch, recipe.optim.max_grad_norm,
            lambda part: watching.heartbeat(f"step {progress.step + 1}, {part}"),
        )  # fmt: skip
        of_this_model = {"idle": model.idle} if gear.degree("pp") > 1 else {}
        if router_loss.router_weight(bare):
            router_sum = accelerator.reduce(router_loss.pop_router_loss(bare), "sum")
            of_this_model["router_loss"] = float(router_sum) / max(1, batch.num_targets)
        skipped = not math.isfinite(grad_norm)
        is_spike = progress.advance(
            rows_hash=batches.chain_hash(progress.rows_hash, batch.row_ids),
            num_tokens=batch.num_tokens, num_targets=batch.num_targets, loss=loss, skipped=skipped,
        )  # fmt: skip
        log.step(
            loss=loss, grad_norm=grad_norm, lr=rate, num_tokens=batch.num_tokens, is_spike=is_spike, skipped=skipped,
            **of_this_model,
        )  # fmt: skip
        if progress.num_skipped_in_a_row >= recipe.run.max_bad_steps:
            raise UserError(
                f"step {progress.step}: the loss is {loss} and the gradient's norm {grad_norm}, and not finite for "
                f"{progress.num_skipped_in_a_row} steps in a row (run.max_bad_steps); lower optim.lr, or look at the "
                f"rows {batch.row_ids}: {rows.locations(batch.row_ids)}"
            )
        if progress.step == first_step + 1:
            run.has_begun = True
            run.says("running")
            world.set_collective_timeout(recipe.run.hang_timeout + watchdog.GRACE_SECONDS)
            watching.arm(run.folder / "hang", recipe.run.hang_timeout)


def train_step(
    gear: Gear,
    accelerator: Any,
    model: Any,
    optimizer: Any,
    batch: Any,
    max_grad_norm: float,
    beat: Callable[[str], None] = lambda part: None,
) -> tuple[float, float]:
    """One optimizer step over this rank's micro batches; returns the loss and gradient norm of the whole step.

    The loss is the sum over the target tokens of all ranks, divided by their count. Engines average over the ranks that
    have tokens of their own and divide by the micro batches, so both are multiplied back. Where loss or gradient are
    not finite on one rank, the norm is finite on none, and no rank takes the step.
    """
    from gearbox.distributed import engine, sequence_parallel

    if gear.degree("pp") > 1:
        return pipelined_step(gear, accelerator, model, optimizer, batch, max_grad_norm, beat)
    averaged_over = gear.averaged_over * len(batch.micro_batches)
    total = 0.0
    grad_norm = 0.0
    for number, micro in enumerate(batch.micro_batches, start=1):
        beat(f"micro batch {number}")
        inputs = {name: t.to(accelerator.device) for name, t in micro.items() if name != "document_ids"}
        with accelerator.accumulate(model), sequence_parallel.local_tokens(gear, accelerator, inputs) as inputs:
            share = model(**inputs) / max(1, batch.num_targets)
            total += share.detach()
            if accelerator.sync_gradients:
                total = accelerator.reduce(total, "sum") / gear.degree("tp")  # whose ranks all have the same
                share = share * (1 + 0 * total)  # 1, or NaN if any rank's loss is not finite
            accelerator.backward(share * averaged_over)
            if accelerator.sync_gradients:
                beat("gradient norm")
                grad_norm = engine.clip_gradients(gear, accelerator, model, max_grad_norm)
            if math.isfinite(grad_norm):
                optimizer.step()
            optimizer.zero_grad()
    return float(total), grad_norm


def pipelined_step(
    gear: Gear,
    accelerator: Any,
    model: Any,
    optimizer: Any,
    batch: Any,
    max_grad_norm: float,
    beat: Callable[[str], None],
) -> tuple[float, float]:
    """The same where the micro batches flow through a pipeline, which takes all of a step at once."""
    from gearbox.distributed import engine

    beat("pipeline")
    micro_batches = [{name: t.to(accelerator.device) for name, t in micro.items()} for micro in batch.micro_batches]
    loss = model.step(micro_batches, 1 / max(1, batch.num_targets))
    beat("gradient norm")
    grad_norm = engine.clip_gradients(gear, accelerator, model, max_grad_norm) if math.isfinite(loss) else math.nan
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return loss, grad_norm


def tell_of_save(run: Any, log: Any, **said: Any) -> None:
    log.save(**said)
    run.saved_step = said.get("saved", run.saved_step)
    if "saved" in said:
        run.says("running")


def end_saved(run: Any, screen: Any, accelerator: Any) -> int:
    """The run was asked to stop: say from where it goes on; returns the exit code."""
    text = f"stopped at step {run.progress.step}; the same command goes on from step {run.saved_step}"
    accelerator.wait_for_everyone()
    run.says("saved", text)
    screen.print(f"[bold green]saved[/]  {text}")
    return outcome.exit_code("saved")


def neighbours_seen(gear: Gear, accelerator: Any, model: Any, rows: Any, micro_rows: int, num_tokens: int) -> float:
    """How far packed documents see each other in a batch of the shape that is trained: 0, if all is well."""
    from gearbox.data import batches
    from gearbox.distributed import sequence_parallel
    from gearbox.model import probes

    batch = rows.batch(batches.fullest_rows(rows, micro_rows))
    batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
    seen = probes.packing_leak(
        model, batch, num_tokens, lambda inputs: sequence_parallel.local_tokens(gear, accelerator, inputs)
    )
    return accelerator.gather(seen[None]).max().item()


def rehearsed(recipe: Recipe) -> Recipe:
    """The recipe with what a laptop lacks replaced: weights, of an adapter too, by random ones, data of the hub by the
    built-in tasks."""
    changes: dict[str, Any] = {"model": recipe.model.model_copy(update={"init": "random"})}
    changes["adapter"] = recipe.adapter.model_copy(update={"path": None})  # its weights fit the whole model alone
    paths = [source.path for source in recipe.data.sources]
    if not all(map(is_local, paths)):
        changes["data"] = recipe.data.model_copy(update={"path": BUILTIN_TASKS, "form": "auto", "fields": {}})
    if recipe.eval.path is not None and ("data" in changes or not is_local(recipe.eval.path)):
        changes["eval"] = recipe.eval.model_copy(update={"path": None})
    return recipe.model_copy(update=changes)


def weights_of(recipe: Recipe, tokenizer: Any, folder: Path, world: Any, num_layers: int) -> str:
    """Folder or hub id of the weights to start from; random ones are drawn once and written into the run's folder.

    A rehearsal's have num_layers.
    """
    from gearbox.model import loading, random_init

    if recipe.model.init == "pretrained":
        return recipe.model.name
    base = folder / "base"
    for is_my_turn in (world.rank == 0, world.rank != 0):
        if is_my_turn and not base.exists():
            config = loading.load_config(recipe.model, recipe.run.rehearse)
            if recipe.run.rehearse:
                config = random_init.shrink_config(config, tokenizer, len(recipe.model.add_tokens), num_layers)
            random_init.write_random(config, tokenizer, recipe.train.seed, base)
        world.barrier()
    return str(base)


def write_dropped(dropped: list[Any], folder: Path) -> None:
    """List the documents that are not trained, so that none is lost in silence."""
    if dropped:
        lines = [redact(json.dumps({"place": entry.location, "reason": entry.reason})) + "\n" for entry in dropped]
        (folder / "dropped.jsonl").write_text("".join(lines), encoding="utf-8")


def print_plan(
    screen: Any, gear: Gear, recipe: Recipe, facts: dict[str, str], num_steps: int, micro_rows: int, folder: Path
) -> dict[str, str]:
    """Say what will run; returns all that was said."""
    batch = recipe.batch
    parts = gear.data_parallel
    num_empty = parts * int(facts["accumulation"]) * micro_rows - batch.rows
    dealt_to = f"{parts} {'ranks' if parts == gear.num_processes else 'copies'}"
    shown = {
        "model": f"{recipe.model.name} ({recipe.model.init}), method {recipe.method}"
        + (f" from {recipe.adapter.path}" if recipe.adapter.path else "")
        + (f", {len(recipe.model.add_tokens)} tokens added" if recipe.model.add_tokens else ""),
        "step": f"{batch.rows} rows = {dealt_to} x {facts['accumulation']} rounds x {micro_rows} rows"
        + (f", {num_empty} of them empty" if num_empty else ""),
        "optimizer": f"{recipe.optim.name}, lr {recipe.optim.lr:g}, clip {recipe.optim.max_grad_norm:g}, "
        f"{recipe.schedule.name} over {num_steps:,} steps",
    }
    if recipe.run.rehearse:
        shown["rehearsal"] = "a few narrow layers of the architecture, random weights, no network"
    shown |= facts | {"run": str(folder)}
    for name, text in shown.items():
        screen.print(f"[cyan]{name:<24}[/]{escape(text)}")
    return shown


def ask_saved(folder: Path, question: str, trust_remote_code: bool = False) -> str:
    """Put one question to the saved model in a process of its own, without a GPU, as whoever receives it would."""
    from gearbox.reporting import preview

    inherited = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
        "ROLE_",
        "MASTER_",
        "OMP_",
        "TORCHELASTIC",
        "ACCELERATE",
        "FSDP_",
        "GEARBOX_",
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(inherited)}
    ask = [sys.executable, str(Path(__file__).with_name("ask.py")), str(folder), question]
    ask += ["trust_remote_code=true"] if trust_remote_code else []
    outcome = subprocess.run(
        ask, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    if outcome.returncode != 0:
        raise RuntimeError(f"{folder} was saved but cannot be loaded back:\n{outcome.stderr[-3000:]}")
    return preview.short(outcome.stdout)


if __name__ == "__main__":
    cli.run(main)
