"""Train a language model: a recipe says what, the gear that Accelerate was launched with says how.

accelerate launch --config_file accelerate_configs/GEAR.yaml src/train.py [RECIPE] [key.sub=value ...]
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.markup import escape

from gearbox import command
from gearbox.config import BUILTIN_TASKS, Recipe, UserError, accumulation, is_local, load_recipe
from gearbox.gear import Gear, check_against, find_gear


def main(arguments: list[str], gear: Gear | None = None) -> None:
    recipe_path, overrides = command.split_arguments(arguments)
    recipe = load_recipe(recipe_path, overrides)
    gear = gear or find_gear()
    if recipe.run.rehearse:
        recipe = rehearsed(recipe)

    rounds, micro_rows = accumulation(recipe.batch.rows, gear.num_processes, recipe.batch.micro_rows)
    check_against(gear, recipe, recipe_path, rounds, micro_rows)

    # torch is imported from here on; what the files alone can show has been said.
    from gearbox import backend, corpus, data, evaluation, loss, metrics, model, optim, preview, report

    optim.check_device(recipe.optim, on_gpu=not backend.is_rehearsal())
    backend.check_ranks(gear)
    # Before the process group exists: tokenizing may take longer than a collective may wait.
    screen = metrics.console(backend.is_first())
    tokenizer = model.load_tokenizer(recipe.model, recipe.data.chat_template, recipe.run.rehearse)
    documents, evaluated = corpus.of_recipe(recipe, tokenizer, backend.is_first_of_node(), screen.print)
    prepared = data.arrange(recipe, documents, evaluated, tokenizer, recipe.data.packing)

    processes = backend.start_processes(gear)
    backend.check_same(processes, f"{documents.key} {evaluated.key if evaluated else ''}")
    screen.print(f"[bold]Gearbox[/]  recipe {recipe_path}  gear {gear.name}")
    if backend.is_rehearsal():
        screen.print(f"no GPU: rehearsal, {gear.num_processes} x {gear.name} on the CPU in fp32")
    elif idle := backend.num_idle_gpus():
        screen.print(
            f"hint: {idle} more GPUs of this machine are idle; ddp, fsdp and zero3 use --num_processes N of them"
        )

    with run_folder(recipe, recipe_path, gear, processes) as folder:
        source = weights_of(recipe, tokenizer, folder, processes)
        dtype = model.stored_dtype(source, recipe.model.revision)
        accelerator = backend.start(gear, recipe, rounds, micro_rows)
        loaded = model.load(
            source, recipe.model, recipe.adapter, recipe.train.seed,
            backend.precision(gear), recipe.optim.master_weights,
        )  # fmt: skip
        wrapped, optimizer = backend.prepare(accelerator, loaded, optim.make_optimizer(loaded, recipe.optim))
        facts = backend.verify(accelerator, wrapped, optimizer, gear, recipe, rounds)
        loss.check(
            wrapped, len(tokenizer), accelerator.device, tolerance=1e-4 if facts["precision"] == "fp32" else 2e-2
        )
        if prepared.training.packing:
            seen = neighbours_seen(accelerator, wrapped, prepared.training, micro_rows, len(tokenizer))
            isolated = seen <= (1e-4 if facts["precision"] == "fp32" else 3e-2)
            facts["packed documents"] = f"a neighbour changes a token's loss by {seen:.2g}"
            if not isolated:
                facts["packed documents"] += ": this model does not keep them apart, so each row holds one document"
                prepared = data.arrange(recipe, documents, evaluated, tokenizer, packing=False)
        num_rows = len(prepared.training)
        num_steps = recipe.train.steps or math.ceil(num_rows * (recipe.train.epochs or 0) / recipe.batch.rows)
        facts = preview.facts(recipe, documents, prepared, tokenizer) | facts
        facts = print_plan(screen, recipe, facts, num_steps, micro_rows, folder)
        shown = preview.first_documents(prepared.training, tokenizer, 5)
        preview.show(screen, shown[:1], preview.SHOWN_CHARACTERS)
        if processes.is_main_process:
            write_dropped([*prepared.dropped, *prepared.dropped_of_evaluation], folder)

        def samples() -> list[str]:
            ask = (accelerator, wrapped, tokenizer)
            return [evaluation.answer(*ask, sample.prompt, recipe.eval.sample_tokens) for sample in prepared.samples]

        with metrics.Metrics(folder, screen, num_steps) as log:
            before = samples()
            fit(recipe, accelerator, wrapped, optimizer, prepared, num_steps, micro_rows, log)
            after = samples()

        tensors = backend.whole_parameters(accelerator, wrapped, only_trainable=recipe.adapter.method != "none")
        model.save(accelerator.unwrap_model(wrapped), tensors, tokenizer, source, dtype, folder / "model")
        accelerator.wait_for_everyone()
        # The other ranks end here: a large model is loaded back for longer than a collective may wait.
        if accelerator.is_main_process:
            answered = samples_of(prepared.samples, before, after)
            print_samples(screen, answered)
            report.write(folder, facts, shown, answered)
            reply = ask_saved(folder / "model", prepared.samples[0].question if prepared.samples else "Hello")
            screen.print(f"loaded back in a fresh process, it answers: {reply}")
            screen.print(f"the run on a page: {folder / 'report.html'}; every step's numbers: metrics.jsonl")
            screen.print(f"[bold green]done[/]  the model lies in {folder / 'model'}")


def fit(
    recipe: Recipe,
    accelerator: Any,
    model: Any,
    optimizer: Any,
    prepared: Any,
    num_steps: int,
    micro_rows: int,
    log: Any,
) -> None:
    """The loop: the same rows, the same loss and the same learning rate on any number of ranks, under any engine."""
    from gearbox import backend, data, evaluation, optim

    rows = prepared.training
    order = data.order(recipe, rows)
    rank, num_ranks = accelerator.process_index, accelerator.num_processes

    def look(step: int) -> None:
        if len(prepared.held_out):
            log.evaluation(
                step, evaluation.evaluate(accelerator, model, prepared.held_out, recipe.batch.rows, micro_rows)
            )

    look(0)
    rows_hash = ""
    for step in range(num_steps):
        batch = data.make_step(rows, order.step(step), rank, num_ranks, micro_rows)
        rate = optim.learning_rate(step, num_steps, recipe.optim, recipe.schedule)
        backend.set_learning_rate(optimizer, rate)
        loss, grad_norm = train_step(accelerator, model, optimizer, batch, recipe.optim.max_grad_norm)
        rows_hash = data.chain_hash(rows_hash, batch.row_ids)
        log.step(
            step + 1, loss=loss, grad_norm=grad_norm, lr=rate, rows_hash=rows_hash,
            num_tokens=batch.num_tokens, num_targets=batch.num_targets,
        )  # fmt: skip
        if not math.isfinite(loss):
            raise UserError(f"step {step + 1}: the loss is {loss}; lower optim.lr, or look at the data")
        if step + 1 == num_steps or (recipe.eval.every and (step + 1) % recipe.eval.every == 0):
            look(step + 1)


def train_step(accelerator: Any, model: Any, optimizer: Any, batch: Any, max_grad_norm: float) -> tuple[float, float]:
    """One optimizer step over this rank's micro batches; returns the loss and gradient norm of the whole step.

    The loss is the sum over the target tokens of all ranks, divided by their count. Engines average over ranks and
    divide by the micro batches, so both are multiplied back.
    """
    averaged_over = accelerator.num_processes * len(batch.micro_batches)
    total = 0.0
    grad_norm = 0.0
    for micro in batch.micro_batches:
        inputs = {name: t.to(accelerator.device) for name, t in micro.items() if name != "document_ids"}
        with accelerator.accumulate(model):
            share = model(**inputs) / max(1, batch.num_targets)
            accelerator.backward(share * averaged_over)
            total += share.detach()
            if accelerator.sync_gradients:
                grad_norm = float(accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.reduce(total, "sum").item(), grad_norm


def neighbours_seen(accelerator: Any, model: Any, rows: Any, micro_rows: int, num_tokens: int) -> float:
    """How far packed documents see each other in a batch of the shape that is trained: 0, if all is well."""
    from gearbox import data, loss

    batch = rows.batch(data.fullest_rows(rows, micro_rows))
    batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
    return accelerator.gather(loss.leak(model, batch, num_tokens)[None]).max().item()


def rehearsed(recipe: Recipe) -> Recipe:
    """The recipe with what a laptop lacks replaced: weights by random ones, data of the hub by the built-in tasks."""
    changes: dict[str, Any] = {"model": recipe.model.model_copy(update={"init": "random"})}
    paths = [source.path for source in recipe.data.sources]
    if not all(map(is_local, paths)):
        changes["data"] = recipe.data.model_copy(update={"path": BUILTIN_TASKS, "form": "auto", "fields": {}})
    if recipe.eval.path is not None and ("data" in changes or not is_local(recipe.eval.path)):
        changes["eval"] = recipe.eval.model_copy(update={"path": None})
    return recipe.model_copy(update=changes)


def weights_of(recipe: Recipe, tokenizer: Any, folder: Path, processes: Any) -> str:
    """Folder or hub id of the weights to start from; random ones are drawn once and written into the run's folder."""
    from gearbox import model

    if recipe.model.init == "pretrained":
        return recipe.model.name
    base = folder / "base"
    with processes.local_main_process_first():
        if not base.exists():
            config = model.load_config(recipe.model, recipe.run.rehearse)
            if recipe.run.rehearse:
                config = model.narrowed(config, tokenizer)
            model.write_random(config, tokenizer, recipe.train.seed, base)
    return str(base)


@contextmanager
def run_folder(recipe: Recipe, recipe_path: Path, gear: Gear, processes: Any) -> Iterator[Path]:
    """A folder that no other run has, made by rank 0; taken away again if the run ends before its first step."""
    from accelerate.utils import broadcast_object_list

    name = recipe.run.name or f"{recipe_path.stem}-{gear.name}"
    found = [str(claim_folder(Path(recipe.run.dir), name)) if processes.is_main_process else ""]
    if processes.num_processes > 1:
        found = broadcast_object_list(found)
    folder = Path(found[0])
    try:
        if processes.is_main_process:
            resolved = recipe.model_dump(mode="json")
            (folder / "resolved.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False), encoding="utf-8")
        yield folder
    except BaseException:
        metrics_file = folder / "metrics.jsonl"
        started = metrics_file.is_file() and '"rows_hash"' in metrics_file.read_text(encoding="utf-8")
        if processes.is_main_process and not started:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def claim_folder(parent: Path, name: str) -> Path:
    """The first of name, name-2, name-3, ... that is free, made now."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            folder = parent / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UserError(f"run.dir: {parent} cannot be written: {error.strerror}") from None


def write_dropped(dropped: list[Any], folder: Path) -> None:
    """List the documents that are not trained, so that none is lost in silence."""
    if dropped:
        lines = [json.dumps({"place": entry.place, "reason": entry.reason}) + "\n" for entry in dropped]
        (folder / "dropped.jsonl").write_text("".join(lines), encoding="utf-8")


def print_plan(
    screen: Any, recipe: Recipe, facts: dict[str, str], num_steps: int, micro_rows: int, folder: Path
) -> dict[str, str]:
    """Say what will run; returns all that was said."""
    batch = recipe.batch
    num_empty = int(facts["ranks"]) * int(facts["accumulation"]) * micro_rows - batch.rows
    shown = {
        "model": f"{recipe.model.name} ({recipe.model.init}), method {recipe.method}",
        "step": f"{batch.rows} rows = {facts['ranks']} ranks x {facts['accumulation']} rounds x {micro_rows} rows"
        + (f", {num_empty} of them empty" if num_empty else ""),
        "optimizer": f"{recipe.optim.name}, lr {recipe.optim.lr:g}, clip {recipe.optim.max_grad_norm:g}, "
        f"{recipe.schedule.name} over {num_steps:,} steps",
    }
    if recipe.run.rehearse:
        shown["rehearsal"] = "two narrow layers of the architecture, random weights, no network"
    shown |= facts | {"run": str(folder)}
    for name, text in shown.items():
        screen.print(f"[cyan]{name:<24}[/]{escape(text)}")
    return shown


def samples_of(samples: list[Any], before: list[str], after: list[str]) -> list[dict[str, str]]:
    return [
        {"question": sample.question, "before": first, "after": second, "right": sample.answer}
        for sample, first, second in zip(samples, before, after, strict=True)
    ]


def print_samples(screen: Any, samples: list[dict[str, str]]) -> None:
    for sample in samples:
        screen.print("\n".join(f"[cyan]{name:>8}[/] {_short(text)}" for name, text in sample.items()))


def _short(text: str) -> str:
    line = "".join(letter if letter.isprintable() else "·" for letter in " ".join(text.split()))
    return escape(line if len(line) <= 160 else line[:157] + "...") or "(nothing)"


def ask_saved(folder: Path, question: str) -> str:
    """Put one question to the saved model in a process of its own, without a GPU, as whoever receives it would."""
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
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(inherited)}
    ask = [sys.executable, str(Path(__file__).with_name("ask.py")), str(folder), question]
    outcome = subprocess.run(
        ask, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    if outcome.returncode != 0:
        raise RuntimeError(f"{folder} was saved but cannot be loaded back:\n{outcome.stderr[-3000:]}")
    return _short(outcome.stdout)


if __name__ == "__main__":
    command.run(main)
