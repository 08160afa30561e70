"""Set up a training session: one function per setup stage, in the order in which main calls them.

The order matters: every rank makes the same collective calls, and each function needs the earlier results.
"""

from __future__ import annotations

import collections
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from gearbox import processes
from gearbox.checkpoint import disk_space
from gearbox.checks.model import check_architecture
from gearbox.config.gear import Gear
from gearbox.config.job import Job, unused_keys_of_data
from gearbox.config.loader import located
from gearbox.config.recipe import Recipe
from gearbox.console import make_console, status, styled
from gearbox.data.corpus import Builder, MappedCorpus
from gearbox.distributed import engine as engines
from gearbox.distributed import pipeline_stages, process_group, sequence_parallel, verification
from gearbox.distributed.engine import Engine
from gearbox.distributed.process_group import ProcessGroup
from gearbox.distributed.verification import EngineFacts
from gearbox.errors import UserError
from gearbox.kernels.install import installed_kernels
from gearbox.launch import outcome, topology
from gearbox.model import adapters, export, loading, probes, random_init
from gearbox.model.optimizer import make_optimizer
from gearbox.model.pretrained import Pretrained
from gearbox.model.router_loss import has_router_loss, router_weight
from gearbox.pages import run_facts
from gearbox.planning.fit import Fit
from gearbox.reporting import preview
from gearbox.reporting.plan import Plan, data_facts
from gearbox.rows import arranged, stream, teacher
from gearbox.rows.batches import Batch, PackedRows, fullest_rows
from gearbox.rows.splits import Leakage, TrainingRows
from gearbox.rows.streamed_rows import PreparedCorpus
from gearbox.rows.teacher import Teacher, TeacherFacts
from gearbox.sharding import sharded_state
from gearbox.sharding.unwrap import without_adapter
from gearbox.training import comparing, evaluation, resume, run_folder
from gearbox.training.rows_ahead import passes_of
from gearbox.training.run_folder import Run

# Largest relative difference between our loss and the model's own loss, by precision.
LOSS_TOLERANCE = {"no": 1e-4, "bf16": 2e-2}
# Largest change of a token's loss when another document in its row changes, by precision.
LEAK_TOLERANCE = {"no": 1e-4, "bf16": 3e-2}
NUM_SHOWN_RECORDS = 5  # in the report
NARROW_LAYERS = 3  # of the narrow copy that tests whether a model family splits into stages


@dataclass(frozen=True)
class TrainingData:
    """The tokenized documents and the rows packed from them."""

    tokenizer: PreTrainedTokenizerFast
    corpus: MappedCorpus | PreparedCorpus
    evaluated: MappedCorpus | None
    """The documents of eval.path, if set."""
    rows: TrainingRows

    @property
    def is_text(self) -> bool:
        """True if all documents are plain text."""
        return {summary.form for summary in self.corpus.summaries} == {"text"}

    @property
    def digest(self) -> str:
        """An identifier of the tokens, independent of the source files and of their rows."""
        return " ".join(one.digest for one in (self.corpus, self.evaluated) if one is not None)

    @property
    def key(self) -> str:
        """An identifier of the tokens and their rows, independent of the source files."""
        return " ".join(
            [self.digest, *(run_folder.rows_key("", rows) for rows in (self.rows.training, self.rows.held_out))]
        )

    @property
    def held_out_key(self) -> str:
        """An identifier of the held-out tokens and their rows."""
        documents = self.corpus if self.evaluated is None else self.evaluated
        return run_folder.rows_key(documents.digest, self.rows.held_out)


def prepare_data(job: Job) -> tuple[Job, TrainingData]:
    """Tokenize the documents and pack them into rows. Return the job, with the settings of a downloaded adapter."""
    process_group.check_ranks(job.gear)
    screen = make_console(speaks=process_group.is_first_rank())
    if job.recipe.model.trust_remote_code:
        warning = f"WARNING: model.trust_remote_code runs the code shipped with {job.recipe.model.name}"
        screen.print_always(styled((warning, "bold red")))
    recipe = adapters.download_adapter(job.recipe)
    tokenizer = loading.load_tokenizer(recipe.model, recipe.data.chat_template, recipe.run.rehearse)
    adapters.check_tokens(recipe, tokenizer)
    builder = Builder(process_group.is_first_rank_of_node(), screen.print, screen)
    documents, evaluated, rows = stream.load_data(recipe, tokenizer, builder)
    if not recipe.run.rehearse:
        try:
            recipe.schedule.check(rows.num_steps)  # of train.epochs, which are known only now
        except ValueError as error:
            raise UserError(located(str(error), recipe, job.recipe_path)) from None
    return replace(job, recipe=recipe), TrainingData(tokenizer, documents, evaluated, rows)


def join(job: Job, data: TrainingData) -> ProcessGroup:
    """Join the other ranks. Raise UserError unless all ranks share one process group and the same data."""
    gear = job.gear
    world = process_group.join_process_group(gear)
    devices = world.rank_devices()
    topology.check_single_world(devices)
    process_group.check_same_data(world, data.key)
    if outcome.requested_run_folder() is None:  # a restart does not repeat them
        unused = unused_keys_of_data(job.recipe, (summary.form for summary in data.corpus.summaries))
        for hint in (*job.hints, *(located(line, job.recipe, job.recipe_path) for line in unused)):
            world.screen.print_always(f"hint: {hint}")
    for line in topology.format_rank_table(devices):
        world.screen.print(line)
    if nodes := topology.num_idle_nodes(devices):
        world.screen.print_always(
            f"hint: {nodes} more machines of this job are idle; cluster/slurm/train.sbatch uses all machines"
        )
    if process_group.runs_on_cpu():
        processes = "1 CPU process" if gear.num_processes == 1 else f"{gear.num_processes} CPU processes"
        world.screen.print(f"no GPU: running {gear.name} on {processes} in fp32")
    elif gpus := process_group.num_idle_gpus():
        use = "to use them, run ddp, fsdp or zero3 with --num_processes N"
        world.screen.print_always(f"hint: {gpus} more GPUs on this machine are idle; {use}")
    return world


def build_engine(job: Job, data: TrainingData, world: ProcessGroup, run: Run) -> Engine:
    """Load the model, and wrap model and optimizer for the gear's engine."""
    recipe, gear, tokenizer = job.recipe, job.gear, data.tokenizer
    num_layers = max(2, gear.degree("pp"))
    source = random_init.weights_of(recipe, tokenizer, run.folder, world, num_layers, world.screen.print_always)
    origin = Pretrained.of(recipe.model, source)
    config = origin.config()
    check_architecture(gear, config, recipe.model.router_loss if has_router_loss(config) else 0.0)
    num_positions = probes.num_positions(config)
    hint = probes.check_row_tokens(config, recipe.batch.row_tokens, num_positions)
    if hint is not None and not any(hint in said for said in job.hints):  # a model in reach was checked at the start
        world.screen.print_always(f"hint: {hint}")
    fit = _check_memory(config, job, world)
    if recipe.model.init == "pretrained":
        _check_weights_of_nodes(origin, config, gear, world)
    if gear.degree("pp") > 1:
        narrow = random_init.shrink_config(config, tokenizer, num_layers=NARROW_LAYERS)
        pipeline_stages.check_stages_equal_whole(narrow)
    unreached = probes.unreached_parameters(config, tokenizer)
    arguments = probes.document_arguments(config, tokenizer)
    by_document = "positions" in arguments and engines.attends_by_document(gear)
    attention = loading.attention_of(config, recipe.model.attention, by_document)
    sequence_parallel.check_attention(gear, config.model_type, attention)
    if gear.shares_rows and by_document:  # else flash attention, which only ulysses takes
        probes.check_divided_rows(config, tokenizer, recipe.batch.row_tokens)
    if recipe.model.attention == "auto" and engines.attends_by_document(gear) and not by_document:
        world.screen.print_always(
            f"hint: {config.model_type} cannot compute attention by document; masks isolate documents"
        )
    # Before loading, because ZeRO-3 shards the model while it loads.
    accelerator = engines.create_accelerator(job, bool(unreached) or probes.may_skip_experts(config))
    stage = engines.stage_of_rank(gear, world.rank)
    placing = {**engines.loading_options(gear, accelerator, recipe), "attn_implementation": attention}
    with processes.returning_free_memory(for_good=fit.is_tight), engines.reading_own_shard(gear, accelerator, recipe):
        loaded = loading.load(source, recipe, tokenizer, engines.precision(gear), placing, stage)
    without_adapter(loaded).takes_bounds = "bounds" in arguments
    export.stop_at(loaded, stream.answer_ends(data.corpus, tokenizer))
    optimizer = make_optimizer(loaded, recipe.optim, unreached)
    model, optimizer = engines.prepare(gear, accelerator, loaded, optimizer, recipe.perf)
    comparing.install(loaded, job, accelerator)
    unwrapped, dtype = engines.unwrap(accelerator, model), export.stored_dtype(config, origin)
    return Engine(job, world, accelerator, model, unwrapped, optimizer, source, dtype, num_positions, fit)


def _check_memory(config: PretrainedConfig, job: Job, world: ProcessGroup) -> Fit:
    """Return the predicted memory of this rank beside its device's. Raise UserError if the model cannot fit."""
    if process_group.runs_on_cpu():
        ranks = collections.Counter(world.gather(socket.gethostname()))[socket.gethostname()]
        fit = Fit.of(config.to_dict(), job, processes.free_memory() // ranks, before=processes.resident_memory())
    else:
        fit = Fit.of(config.to_dict(), job, torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    fits = world.gather((fit.problem(), fit.warning()))
    if problems := [problem for problem, _ in fits if problem]:
        raise UserError(located(problems[0], job.recipe, job.recipe_path))
    if warnings := [warning for _, warning in fits if warning]:
        world.screen.print_always(f"hint: {warnings[0]}")
    return fit


def _check_weights_of_nodes(origin: Pretrained, config: PretrainedConfig, gear: Gear, world: ProcessGroup) -> None:
    """Raise UserError on every rank if one machine's copy of the weights cannot be used, or if copies differ.

    DDP and ZeRO send the weights of rank 0. Under other engines each machine's ranks read their shards from its copy.
    """
    is_first, problem = process_group.is_first_rank_of_node(), None
    if is_first:
        try:
            loading.check_weights(origin, config)
        except UserError as error:
            problem = str(error)
    found = world.gather((is_first, problem))
    if problems := [text for _, text in found if text is not None]:
        raise UserError(problems[0])
    if sum(first for first, _ in found) == 1 or gear.engine in ("ddp", "zero"):
        return
    copies = world.gather((socket.gethostname(), loading.digests_of_weights(origin)) if is_first else None)
    (first, digests), *others = [copy for copy in copies if copy is not None]
    if different := [name for name, other in others if other != digests]:
        raise UserError(
            f"model.name: the weights of {origin.name!r} on {different[0]} differ from those on {first}; copy the same "
            "files to all machines, or use a shared folder"
        )


def check_engine(engine: Engine, data: TrainingData) -> EngineFacts:
    """Return the verified facts. Raise UserError on an engine mismatch, or if the loss is not the model's own."""
    job = engine.job
    facts = verification.verify(
        engine.accelerator, engine.model, engine.optimizer, job.gear, job.recipe, job.batch.accumulation_steps
    )
    verification.check_finite(engine.unwrapped, engine.world)
    tolerance = LOSS_TOLERANCE[engines.precision(job.gear)]
    causal_lm = without_adapter(engine.unwrapped)
    facts.lines["attention"] = str(causal_lm.config._attn_implementation)
    if job.recipe.perf.kernels == "auto":
        facts.lines["kernels"] = installed_kernels(engine.unwrapped)
    path = probes.check_loss(engine.model, engine.unwrapped, len(data.tokenizer), engine.device, tolerance)
    if path:
        facts.lines["loss"] = path
    if causal_lm.loss_path.own_positions and job.gear.shares_rows:
        raise UserError(
            f"model.name: {causal_lm.config.model_type} numbers its positions itself, and ranks that share a row see "
            "parts of it; use accelerate_configs/fsdp.yaml"
        )
    return facts


def choose_rows(engine: Engine, data: TrainingData) -> TrainingRows:
    """Return the rows to train: packed, or one document per row if packed documents leak into each other."""
    rows = data.rows
    if rows.training.packing:
        change = probes.measure_packing_leak(engine, _packed_batch(engine, rows.training), len(data.tokenizer))
        leakage = Leakage(change, LEAK_TOLERANCE[engines.precision(engine.job.gear)])
        if not leakage.is_isolated:
            recipe = engine.job.recipe
            if isinstance(data.corpus, PreparedCorpus):
                raise UserError(
                    f"data.packing: {leakage.describe().partition(':')[0]}, and {recipe.data.path} has packed rows; "
                    "prepare it again with data.packing=false in another folder"
                )
            builder = Builder(process_group.is_first_rank_of_node(), engine.world.screen.print, engine.world.screen)
            rows = arranged.split_and_pack(recipe, data.corpus, data.evaluated, data.tokenizer, False, builder)
        rows = replace(rows, leakage=leakage)
    else:
        probes.check_row(engine, rows.training)
    if engine.job.recipe.train.teacher is not None:
        rows.training.teacher = _open_teacher(engine, data, rows.training)
    return rows


def _open_teacher(engine: Engine, data: TrainingData, rows: PackedRows) -> Teacher:
    """Return the teacher's probabilities of the rows. Each rank reads a share of the files to verify them."""
    recipe, world, problem, found = engine.job.recipe, engine.world, None, None
    refuse_prepared(recipe, data)
    folder = Path(str(recipe.train.teacher))
    try:
        facts = TeacherFacts.read(folder)
        if facts.vocabulary != teacher.vocabulary_of(data.tokenizer):
            raise UserError(
                f"train.teacher: {folder} has the probabilities of another vocabulary than {recipe.model.name} has; "
                "give a teacher whose tokenizer has the same tokens and ids"
            )
        with status(world.screen, "verifying the teacher's probabilities"):
            problem = facts.damaged(folder, sorted(facts.files)[world.rank :: world.size])
        found = None if problem else Teacher(folder, facts, rows)
    except UserError as error:
        problem = str(error)
    identities = world.gather((problem, None if found is None else found.identity))
    if problems := [text for text, _ in identities if text is not None]:
        raise UserError(located(problems[0], recipe, engine.job.recipe_path))
    if len({identity for _, identity in identities}) > 1:
        raise UserError(f"train.teacher: {folder} differs between machines; give a folder that they share")
    assert found is not None
    return found


def refuse_prepared(recipe: Recipe, data: TrainingData) -> None:
    """Raise UserError for shards of src/prepare.py: their chunks are not all on this machine at the same time."""
    if isinstance(data.corpus, PreparedCorpus):
        raise UserError(
            f"data.path: {recipe.data.path} has prepared shards, and a teacher's probabilities are those of "
            "documents; give the files that the shards were made from"
        )


def _packed_batch(engine: Engine, rows: PackedRows) -> Batch:
    """Return the fullest rows as training computes them: a pass of at least two documents if it divides them."""
    batch = rows.batch(fullest_rows(rows, engine.job.batch.micro_rows))
    passes = [one for one in passes_of(engine, batch) if one["chunk_ids"][0, 0] != one["chunk_ids"][0, -1]]
    return passes[0] if passes else batch


def make_plan(engine: Engine, data: TrainingData, rows: TrainingRows, run: Run, facts: EngineFacts) -> Plan:
    """Plan the run. Raise UserError if it does not match its checkpoint, or if checkpoints do not fit on the disk."""
    job, world = engine.job, engine.world
    rows_key = run_folder.rows_key(data.corpus.digest, rows.training)
    base = world.decide(lambda: loading.fingerprint(engine.source, job.recipe))
    run.check_same(rows_key, base)
    switched_off = without_adapter(engine.unwrapped).own_dropout
    run.check_dropout(switched_off)
    run.state.judge_by(*evaluation.best_by(job.recipe.eval, data.held_out_key))
    if run.state.step > rows.num_steps:
        raise UserError(
            f"train.steps: {rows.num_steps} is less than the {run.state.step} steps of {run.checkpoint}; increase it"
        )
    num_bytes = sharded_state.checkpoint_bytes(engine.unwrapped, engine.optimizer, world)
    is_on_host = engine.device.type == "cpu" or job.gear.offload == "cpu"
    to_come = num_bytes if is_on_host and not run.state.step else 0  # gradients and optimizer state
    memory_problem = disk_space.memory_problem(job.recipe.save, num_bytes, to_come, world)
    return Plan(
        job=job,
        num_steps=rows.num_steps,
        data=data_facts(job.recipe, data.corpus, rows, data.tokenizer),
        facts=facts,
        fit=engine.fit,
        num_weights=verification.count_weights(engine.unwrapped, world),
        leakage=rows.leakage,
        router_weight=router_weight(engine.unwrapped),
        switched_off=switched_off,
        disk=world.decide(
            lambda: disk_space.plan_checkpoints(run.checkpoints, job.recipe.save, num_bytes, memory_problem)
        ),
        folder=run.folder,
        rows_key=rows_key,
        base=base,
    )


def announce(plan: Plan, data: TrainingData, rows: TrainingRows, run: Run, world: ProcessGroup) -> None:
    """Print the plan and a document with its supervised tokens. Write run.json and the list of dropped documents."""
    plan.show(world.screen)
    if run.checkpoint is not None and run.manifest is not None:
        step = f"step {run.state.step} of {plan.num_steps}"
        world.screen.print(styled(("resuming", "bold"), f" from {run.checkpoint} at {step}"))
        if missing := rows.num_rows_left_out(run.state.step, resume.saved_epochs(run.manifest)):
            world.screen.print_always(
                f"hint: step {run.state.step} was the short last step of the earlier train.epochs; the {missing} rows "
                "that it lacked are left out of this epoch"
            )
    first = preview.first_documents(rows.training, data.tokenizer, 1, plan.job.recipe)
    preview.show(world.screen, first, preview.SHOWN_CHARACTERS)
    devices = world.rank_devices()
    if world.rank == 0:
        run.write_dropped(rows.dropped())
        documents = preview.first_documents(rows.training, data.tokenizer, NUM_SHOWN_RECORDS, plan.job.recipe)
        run.write_facts(run_facts.begin(plan, devices, run_folder.versions(), documents, run.state.step))
