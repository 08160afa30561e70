"""Write report.html and loss.png of a run from the files in its folder alone, without torch.

The page opens with the run's state and its result. It is written while the run goes, and again when it ends.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Iterator, Mapping
from html import escape
from itertools import zip_longest
from pathlib import Path

import yaml

from gearbox.launch.topology import format_rank_table
from gearbox.metrics.metrics_file import perplexity
from gearbox.pages import charts, page, picture, run_charts, run_data
from gearbox.pages.run_data import MAX_LETTERS, Answer, RunData
from gearbox.pages.run_facts import TIME_FORMAT, from_root
from gearbox.pages.scale import compact, value_label

STALE_SECONDS = 1800  # without a new line, after which a running run may be gone; a long save or evaluation fits
MAX_QUESTIONS = 20
WORDS = {  # of each state, and its colour
    "running": ("running", "warn"),
    "saved": ("stopped and saved", "warn"),
    "done": ("done", "good"),
    "failed": ("failed", "bad"),
    "refused": ("refused", "bad"),
    "crashed": ("ended without a word", "bad"),
    "unknown": ("state unknown", "bad"),
}
MINUTE, HOUR = 60, 3600


def write(folder: Path, status: Mapping[str, object] | None = None) -> None:
    """Write report.html and loss.png. `status` replaces status.json. Raise UserError or OSError."""
    write_files(run_data.read(folder, status))


def write_files(run: RunData) -> None:
    """Write report.html and loss.png into the folder of a run. Raise OSError if they cannot be written."""
    write_page(run.folder / "report.html", run)
    picture.write(run.folder / "loss.png", run_charts.losses(run), run.name)


def write_page(path: Path, run: RunData) -> None:
    """Write the page of a run alone. Raise OSError if it cannot be written."""
    page.write(path, f"{run.name}: {WORDS.get(run.outcome, WORDS['unknown'])[0]}", sections(run))


def sections(run: RunData) -> Iterator[str]:
    """Yield the sections of the page."""
    yield _header(run)
    yield f'<div class="tiles">{"".join(_results(run))}</div><div class="tiles">{"".join(_sizes(run))}</div>'
    yield f'<div class="columns">{"".join(_commands(run))}</div>'
    yield charts.section(run_charts.charts(run))
    yield from _answers(run)
    yield from _documents(run)
    yield from _course(run)
    yield from _settings(run)


def _header(run: RunData) -> str:
    """Return the name of the run, its state and what it is."""
    facts, (word, colour) = run.facts, WORDS.get(run.outcome, WORDS["unknown"])
    updated = str(run.status.get("time", ""))
    objective = f", {run.objective}" if run.objective != "sft" else ""
    what = f"{facts.model}, {facts.method}{objective}" if facts.model else ""
    first = " · ".join(filter(None, (what, _gear(run))))
    dates = [f"started {day(facts.started)}" if facts.started else "", duration_of(run)]
    text = str(run.status.get("text") or "")
    lines = [
        f'<div class="line"><h1>{escape(run.name)}</h1><span class="status {colour}">{word}</span></div>',
        f"<p>{escape(first)}</p>" if first else "",
        f"<p>{escape(' · '.join(filter(None, dates)))}</p>" if any(dates) else "",
        f'<p class="{colour}">{escape(text.removeprefix("gearbox: "))}</p>' if text else "",
    ]
    if run.outcome == "running":
        stale = "It may have ended since. To know, run: python src/report.py"
        moment = escape(day(time.strftime(TIME_FORMAT, time.localtime(run.changed))))
        lines.append(
            f'<p>Last update {moment}<span data-updated="{run.changed:.0f}" data-stale="{STALE_SECONDS}"></span>. '
            f'<span class="stale">{stale} {escape(shlex.quote(from_root(run.folder)))}</span></p>'
        )
    elif updated and run.outcome != "unknown":
        lines.append(f"<p>{'Last seen' if run.outcome == 'crashed' else 'Ended'} {escape(day(updated))}</p>")
    return f"<header>{''.join(lines)}</header>"


def _gear(run: RunData) -> str:
    """Return the gear and the number of its ranks."""
    num_ranks = len(run.facts.ranks)
    ranks = f" on {num_ranks:,} {'rank' if num_ranks == 1 else 'ranks'}" if num_ranks else ""
    return f"gear {run.facts.gear}{ranks}" if run.facts.gear else ""


def day(moment: str) -> str:
    """Return a time of ISO 8601 in a form for people."""
    return moment[:19].replace("T", " ") + (f" (UTC{moment[19:22]}:{moment[22:24]})" if len(moment) == 24 else "")


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = round(seconds)
    if whole < MINUTE:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE} s"
    if whole < 48 * HOUR:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE} min"
    return f"{whole // (24 * HOUR)} days {whole % (24 * HOUR) // HOUR} h"


def duration_of(run: RunData) -> str:
    """Return how long the run has trained."""
    seconds = run.column("seconds").last
    return f"trained {duration(seconds)}" if math.isfinite(seconds) else ""


def _results(run: RunData) -> Iterator[str]:
    """Yield the headline: each result of the model, and before training."""
    model_step = run.status.get("model_step")
    held_out, loss = run.column("eval_loss"), run.column("loss")
    shown = held_out if held_out.steps else loss
    has_first = math.isfinite(shown.first) and shown.first_step != shown.steps[-1]
    if shown.steps:
        last = held_out.at(model_step) if held_out.steps else loss.last
        change = f"from {value_label(shown.first)} in step {shown.first_step:.0f}" if has_first else ""
        if model_step is not None and held_out.steps and model_step != held_out.steps[-1]:
            change += f"; the model is that of step {model_step:,}, the best one"
        yield page.tile(
            "held-out loss" if held_out.steps else "loss of a step", value_label(last), change, is_main=True
        )
    if held_out.steps and not run.compares:
        change = f"from {value_label(perplexity(held_out.first))}" if has_first else ""
        yield page.tile("held-out perplexity", value_label(run.perplexity), change)
    of = "eval_" if run.column("eval_accuracy") else ""
    named = "held-out {}" if of else "{} of a step"
    for key, name, unit in (
        (f"{of}accuracy", named.format("accuracy"), "percent"),
        (f"{of}margin", named.format("margin"), ""),
        ("eval_exact_match", "exact match", "percent"),
        ("eval_metric", "metric", ""),
    ):
        if column := run.column(key):
            change = f"from {value_label(column.first, unit)}" if len(column.steps) > 1 else ""
            yield page.tile(name, value_label(run.of_model(key), unit), change)


def _sizes(run: RunData) -> Iterator[str]:
    """Yield the size of the run: steps, tokens, speed, memory and weights."""
    total = run.facts.num_steps
    share = f"{run.last_step / total:.0%} of {total:,}" if total else ""
    yield page.tile("steps", f"{run.last_step:,}", share)
    if tokens := run.column("tokens"):
        supervised = run.column("tokens_supervised").last
        has_share = math.isfinite(supervised) and tokens.last > 0
        trained = f"{supervised / tokens.last:.0%} of them trained" if has_share else ""
        yield page.tile("tokens", compact(tokens.last), trained)
    if speed := run.column("tokens_per_second"):
        yield page.tile("tokens per second", value_label(speed.median), "median of all steps")
    if memory := run.column("memory_peak_bytes"):
        predicted = run.column("memory_predicted_bytes").last
        beside = f"predicted {value_label(predicted, 'bytes')}" if math.isfinite(predicted) else ""
        yield page.tile("peak memory", value_label(memory.peak, "bytes"), beside)
    if run.facts.num_weights:
        trained_weights, all_weights = run.facts.num_weights_trained, run.facts.num_weights
        of_all = "all are trained" if trained_weights == all_weights else f"of {compact(all_weights)} weights"
        yield page.tile("trained weights", compact(trained_weights), of_all)


def _commands(run: RunData) -> Iterator[str]:
    """Yield the commands that use the model and repeat the run."""
    folder = from_root(run.folder)
    if (run.folder / "model").is_dir() and run.outcome != "running":
        use = "\n".join(shlex.join(["python", f"src/{name}.py", folder]) for name in ("chat", "export"))
        load = f'AutoModelForCausalLM.from_pretrained("{folder}/model")'
        is_adapter = (run.folder / "model" / "adapter_config.json").is_file()
        load = load.replace("AutoModelForCausalLM", "AutoPeftModelForCausalLM") if is_adapter else load
        yield page.card(page.command("Use the model", use) + page.command("In Python", load))
    if run.facts.command:
        hosts = {host for host, _ in run.facts.ranks}
        note = f'<p class="muted">on each of {len(hosts)} machines; see docs/cluster.md</p>' if len(hosts) > 1 else ""
        title = "Repeat the run" if run.outcome in ("done", "running") else "Resume the run"
        again = page.command(title, run.facts.command) + note
        yield page.card(again + page.command("Write this page again", shlex.join(["python", "src/report.py", folder])))


def _answers(run: RunData) -> Iterator[str]:
    """Yield the answers before and after, and each question's answers through the run."""
    by_question: dict[str, list[Answer]] = {}
    for answer in run.answers:
        by_question.setdefault(answer["question"], []).append(answer)
    if not by_question:
        return
    shown = list(by_question.items())[:MAX_QUESTIONS]
    yield "<h2>Answers before and after training</h2>"
    cards = []
    for question, answers in shown:
        first, last, expected = answers[0], answers[-1], answers[-1]["expected"]
        rejected = answers[-1].get("rejected")
        known = [("expected" if rejected is None else "chosen", expected), ("rejected", rejected)]
        rows = [("question", _cut(question)), *((name, _cut(text)) for name, text in known if text is not None)]
        rows += [(f"step {one['step']:,}", _cut(one["answer"])) for one in ([first, last][: len(answers)])]
        between = ""
        if len(answers) > 2:
            lines = [(f"step {one['step']:,}", _cut(one["answer"])) for one in answers]
            summary = f"<summary>All {len(answers)} answers through the run</summary>"
            between = f"<details>{summary}{page.table(lines, kind='facts answers')}</details>"
        cards.append(page.card(page.table(rows, kind="facts answers") + _verdict(last) + between))
    more = f"<p>{len(by_question) - len(shown):,} more questions are in answers.jsonl.</p>"
    yield f'<div class="columns">{"".join(cards)}</div>' + more * (len(by_question) > len(shown))


def _cut(text: str) -> str:
    """Return a text as it is shown, with a sign for what is left out."""
    more = f" [{len(text) - MAX_LETTERS:,} more characters]" if len(text) > MAX_LETTERS else ""
    return f"{text[:MAX_LETTERS]}{more}" or "(empty)"


def _verdict(answer: Answer) -> str:
    """Return whether the last answer is the expected one."""
    if answer["expected"] is None:
        return ""
    said, rejected = answer["answer"].strip(), answer.get("rejected")
    expected = "expected" if rejected is None else "chosen"
    if said == answer["expected"].strip():
        return f'<p class="good">The last answer is the {expected} one.</p>'
    if rejected is None:
        return '<p class="muted">The last answer differs from the expected one.</p>'
    if said == rejected.strip():
        return '<p class="bad">The last answer is the rejected one.</p>'
    return '<p class="muted">The last answer differs from both.</p>'


def _documents(run: RunData) -> Iterator[str]:
    """Yield the sample documents with their trained text marked."""
    if not run.facts.documents:
        return
    documents, above = "", ""
    for (place, pieces), side in zip_longest(run.facts.documents, run.facts.sides[: len(run.facts.documents)]):
        text = "".join(_piece(*piece) for piece in pieces)
        heading = f"<code>{escape(place)}</code>\n" if place != above or not side else ""
        label = f'<span class="muted">{escape(side)}</span>\n' if side else ""
        documents += f'<div class="doc">{heading}{label}{text}</div>'
        above = place
    use = "is compared" if any(run.facts.sides) else "is trained"
    legend = f"<p>Text that is <mark>bold, underlined and shaded</mark> {use}. The rest is context.</p>"
    yield f"<h2>Training documents</h2>{legend}{page.card(documents)}"


def _piece(text: str, is_trained: bool) -> str:
    return f"<mark>{escape(text)}</mark>" if is_trained else escape(text)


def _course(run: RunData) -> Iterator[str]:
    """Yield where the run was launched, and when it was resumed or disturbed."""
    facts, marks, parts = run.facts, run.marks, []
    if facts.ranks:
        rows = [[part for part in line.split("  ") if part] for line in format_rank_table(facts.devices)]
        parts.append(page.card(page.table(rows, ["ranks", "host", "devices"]), "Launch"))
    lines = [(day(facts.first.time), f"started under {facts.first.gear} on {facts.first.num_ranks} ranks")]
    idle = dict(marks.resumes)
    for start in facts.resumes:
        pause = f", after {duration(idle[start.step + 1])} without a step" if start.step + 1 in idle else ""
        changed = f"; commit {start.commit}" if start.commit != facts.first.commit else ""
        where = f"under {start.gear} on {start.num_ranks} {'rank' if start.num_ranks == 1 else 'ranks'}"
        lines.append((day(start.time), f"resumed from step {start.step:,} {where}{pause}{changed}"))
    events = [*lines] if facts.first.time else []
    known = {start.step + 1 for start in facts.resumes}
    events += [
        ("", f"resumed before step {step:,}, after {duration(seconds)} without a step")
        for step, seconds in marks.resumes
        if step not in known
    ]
    events += [("", f"step {step:,} was skipped: loss or gradients were not finite") for step in marks.skipped[:20]]
    events += [("", f"{len(marks.skipped) - 20:,} more steps were skipped")] * (len(marks.skipped) > 20)
    events += [("", f"step {step:,} could not be saved: {why}") for step, why in marks.failed_saves[:20]]
    events += [("", f"{what}; the stacks are in hang/{name}") for name, what in run.hangs]
    events += [("", f"{run.num_bad_lines:,} damaged lines of metrics.jsonl are left out")] * (run.num_bad_lines > 0)
    quiet = events == lines[:1]
    if events:
        note = '<p class="good">No resume, no skipped step, no failed save, no hang.</p>' if quiet else ""
        parts.append(page.card(page.table(events, kind="facts") + note, "Resumes and faults"))
    if parts:
        yield f'<h2>Course</h2><div class="columns texts">{"".join(parts)}</div>'


def _settings(run: RunData) -> Iterator[str]:
    """Yield the plan, the environment and the recipe."""
    facts, parts = run.facts, []
    if facts.plan:
        parts.append(page.card(page.table(facts.plan.items(), kind="facts"), "Plan"))
    environment = {"commit": facts.commit} if facts.commit else {}
    environment |= facts.hardware | facts.versions
    if environment:
        parts.append(page.card(page.table(environment.items(), kind="facts"), "Environment"))
    if parts:
        yield f'<h2>Settings</h2><div class="columns texts">{"".join(parts)}</div>'
    if run.recipe:
        groups: dict[str, dict[str, object]] = {}
        for key, value in run.recipe.items():
            group, _, name = key.partition(".")
            groups.setdefault(group, {})[name] = value
        text = yaml.safe_dump(groups, sort_keys=False, allow_unicode=True, default_flow_style=None)
        summary = f"<summary>Resolved recipe, {len(run.recipe)} keys</summary>"
        source = f"<p>From {escape(facts.recipe)}; the same as resolved.yaml.</p>" if facts.recipe else ""
        yield page.card(f"<details>{summary}{source}<pre>{escape(text)}</pre></details>", wide=True)


def shown_value(value: object) -> str:
    """Return a value of a recipe as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
