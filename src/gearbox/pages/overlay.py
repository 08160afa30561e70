"""Compare several runs on one page: results, differing recipe keys, and curves by step and by tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

from gearbox.pages import charts, page
from gearbox.pages.charts import Chart, Line
from gearbox.pages.run_data import Column, RunData
from gearbox.pages.run_report import WORDS, day, duration, shown_value
from gearbox.pages.scale import compact, moving_mean, value_label

NOT_SHOWN = {"run.name", "run.dir"}  # keys that differ in every pair of runs
CURVES = (  # title, key, unit, whether the curve is smoothed, and whether its scale starts at 0
    ("Held-out loss", "eval_loss", "nats per token", False, False),
    ("Loss, moving mean", "loss", "nats per token", True, False),
    ("Held-out reward accuracy", "eval_accuracy", "percent", False, True),
    ("Held-out reward margin", "eval_margin", "", False, True),
    ("KL divergence, moving mean", "kl", "nats", True, True),
    ("Exact match", "eval_exact_match", "percent", False, True),
    ("Learning rate", "lr", "", False, True),
    ("Gradient norm, moving mean", "grad_norm", "", True, True),
    ("Tokens per second, moving mean", "tokens_per_second", "", True, True),
    ("Peak memory of the first rank", "memory_peak_bytes", "bytes", False, True),
)
BY_TOKENS = ("eval_loss", "loss")
RESULTS: tuple[tuple[str, str, Callable[[RunData], float], str, int], ...] = (  # and -1 if less is better, 1 if more is
    ("held-out loss", "eval_loss", lambda run: run.of_model("eval_loss"), "", -1),
    ("perplexity", "eval_loss", lambda run: run.perplexity, "", -1),
    ("accuracy", "eval_accuracy", lambda run: run.of_model("eval_accuracy"), "percent", 1),
    ("margin", "eval_margin", lambda run: run.of_model("eval_margin"), "", 0),
    ("exact match", "eval_exact_match", lambda run: run.of_model("eval_exact_match"), "percent", 1),
    ("last loss", "loss", lambda run: run.column("loss").last, "", 0),
    ("tokens/s", "tokens_per_second", lambda run: run.column("tokens_per_second").median, "", 1),
    ("peak memory", "memory_peak_bytes", lambda run: run.column("memory_peak_bytes").peak, "bytes", -1),
)


def write(path: Path, runs: Sequence[RunData]) -> None:
    """Write the page. Raise OSError if it cannot be written."""
    names = names_of(runs)
    page.write(path, f"{len(runs)} runs compared", sections(runs, names))


def names_of(runs: Sequence[RunData]) -> list[str]:
    """Return a different name for each run: its folder's, with the folders above where names repeat."""
    paths = [run.folder.resolve() for run in runs]
    for num_parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-num_parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]


def sections(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[str]:
    """Yield the sections of the page."""
    yield f"<header><h1>{len(runs)} runs compared</h1><p>{escape(', '.join(names))}</p></header>"
    yield f"<h2>Results</h2>{page.card(_results(runs, names))}"
    different = [*_different_keys(runs)]
    yield "<h2>Keys of the recipes that differ</h2>"
    equal = "<p>All recorded keys are equal, apart from names and folders.</p>"
    yield page.card(page.table(different, ["key", *names]) if different else equal)
    yield charts.section(_charts(runs, names))


def _results(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Return the table of results. The best figure of each column is bold and labelled."""
    columns = [[measure(run) for run in runs] for _, _, measure, _, _ in RESULTS]
    used = [place for place, values in enumerate(columns) if any(map(math.isfinite, values))]
    has_one_loss = len({run.objective for run in runs}) == 1
    lines = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        word, colour = WORDS.get(run.outcome, WORDS["unknown"])
        seconds = run.column("seconds").last
        cells = [f"<td>{escape(name)}</td>", f'<td class="{colour}">{word}</td>']
        for place in used:
            cells.append(_cell(run, place, columns[place], number, has_one_loss))
        tokens = run.column("tokens").last
        facts = run.facts
        ranks = f"{facts.gear}, {len(facts.ranks)} {'rank' if len(facts.ranks) == 1 else 'ranks'}"
        texts = [
            f"{run.last_step:,}",
            compact(tokens) if math.isfinite(tokens) else "-",
            duration(seconds) if math.isfinite(seconds) else "-",
            ranks if facts.gear else "-",
            facts.commit or "-",
            day(facts.started) or "-",
        ]
        lines.append("".join([*cells, *(f"<td>{escape(text)}</td>" for text in texts)]))
    head = ["run", "state", *(RESULTS[place][0] for place in used), "steps", "tokens", "trained for", "gear", "commit"]
    return page.html_table(lines, [*head, "started"], "num")


def _cell(run: RunData, place: int, values: Sequence[float], number: int, has_one_loss: bool) -> str:
    """Return a run's result, given those of all runs. Losses of several objectives have no best."""
    heading, key, _, unit, direction = RESULTS[place]
    has_none = not run.column(key).steps or (run.compares and heading == "perplexity")
    text = "-" if has_none else value_label(values[number], unit)
    is_ranked = direction and (has_one_loss or heading != "held-out loss")
    is_best = is_ranked and text == _best(values, unit, direction)
    return f"<td>{f'<b>{text}</b> <span class=good>best</span>' if is_best else text}</td>"


def _best(values: Sequence[float], unit: str, direction: int) -> str | None:
    """Return the best of different values as it is shown, or None if all look equal."""
    finite = [value for value in values if math.isfinite(value)]
    if len({value_label(value, unit) for value in finite}) < 2:
        return None
    return value_label(max(finite) if direction > 0 else min(finite), unit)


def _different_keys(runs: Sequence[RunData]) -> Iterator[list[str]]:
    """Yield each key whose value is not the same in all runs that have a recipe, with the values."""
    known = [run.recipe for run in runs if run.recipe]
    keys = dict.fromkeys(key for recipe in known for key in recipe)
    for key in keys:
        values = [_plain(run.recipe[key]) if key in run.recipe else "-" for run in runs]
        if key not in NOT_SHOWN and len({*values} - {"-"}) > 1:  # an earlier version lacks keys, which is no difference
            yield [key, *values]


def _plain(value: object) -> str:
    """Return a value so that equal numbers are equal, such as 2e-3, 0.002 and 32.0, 32."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError):
            return f"{float(value):.12g}"
    return shown_value(value)


def _charts(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[Chart]:
    """Yield the charts: the losses by step and by tokens, the others by step."""
    for title, key, unit, is_smooth, from_zero in CURVES:
        for by_tokens in (False, True) if key in BY_TOKENS else (False,):
            lines = []
            for number, (run, name) in enumerate(zip(runs, names, strict=True)):
                column = run.column(key)
                xs = _tokens_at(run, column) if by_tokens else column.steps
                values = moving_mean(column.values)[0] if is_smooth and column else column.values
                style: charts.Style = "dots" if key.startswith("eval_") else "line"
                colour = number % charts.NUM_COLOURS + 1
                points = [(x, y) for x, y in zip(xs, values, strict=True) if not math.isnan(x)]
                dash = (number + number // charts.NUM_COLOURS) % len(charts.DASHES)
                lines.append(Line(name, [x for x, _ in points], [y for _, y in points], style, colour, dash))
            log = None if key in ("loss", "eval_loss", "grad_norm") else False
            x_name = "token" if by_tokens else "step"
            units = {run.unit_of_loss for run in runs} if key in BY_TOKENS else {unit}
            yield Chart(title, lines, " or ".join(sorted(units)), x_name, from_zero, log)


def _tokens_at(run: RunData, column: Column) -> list[float]:
    """Return the tokens that the run had trained at each step of a column."""
    tokens = run.column("tokens")
    known = dict(zip(tokens.steps, tokens.values, strict=True))
    return [known.get(step, 0.0 if not step else math.nan) for step in column.steps]
