"""A run on one page, report.html: what ran, what was trained, how it went. One file, no script, no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

from gearbox.redact import redact

WIDTH, HEIGHT = 420, 150  # of a curve, in pixels
MAX_POINTS = 1000  # of a curve; of more, every n-th is drawn
CURVES = {
    "loss": ("loss", "eval_loss"),
    "exact answers": ("eval_exact_match",),
    "gradient norm": ("grad_norm",),
    "learning rate": ("lr",),
    "tokens a second": ("tokens_per_second",),
    "memory, bytes": ("memory_peak_bytes",),
}
COLOURS = ("var(--line)", "var(--second)")
STYLE = """
:root { color-scheme: light dark; --line: #0a7d32; --second: #c2410c; --soft: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2rem; font-size: 1.1rem; }
table { border-collapse: collapse; } td { padding: .15rem .8rem .15rem 0; vertical-align: top; }
td:first-child { white-space: nowrap; opacity: .7; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--soft); padding: .6rem; opacity: .95; }
pre span { opacity: .6; } pre b { color: var(--line); font-weight: 600; }
.curves { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; } figcaption, text { font-size: 12px; }
text { fill: currentColor; } svg { border: 1px solid var(--soft); }
"""

Runs = list[tuple[str, bool]]  # of a document's text, with whether they are supervised


def write(
    folder: Path,
    facts: dict[str, str],
    documents: list[tuple[str, Runs]],
    samples: list[dict[str, str]],
) -> None:
    """Write folder/report.html out of what is given and of folder/metrics.jsonl."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    parts = [
        f"<title>{escape(folder.name)}</title><style>{STYLE}</style><h1>{escape(folder.name)}</h1>",
        _table(facts),
        "<h2>Curves</h2>",
        f'<div class="curves">{"".join(_figures(records))}</div>',
        "<h2>Answers before and after</h2>" if samples else "",
        *(_table(sample) + "<hr>" for sample in samples),
        "<h2>What is trained</h2><p>Supervised tokens are coloured.</p>",
        *(f"<p>{escape(place)}</p><pre>{_coloured(runs)}</pre>" for place, runs in documents),
    ]
    page = '<!doctype html><html lang="en"><meta charset="utf-8">' + "\n".join(parts) + "</html>\n"
    (folder / "report.html").write_text(redact(page), encoding="utf-8")


def _table(rows: dict[str, str]) -> str:
    cells = (f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>{''.join(cells)}</table>"


def _coloured(runs: Runs) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text, trained in runs for tag in ["b" if trained else "span"])


def _figures(records: list[dict[str, float]]) -> Iterator[str]:
    for title, keys in CURVES.items():
        lines = {key: [(r["step"], r[key]) for r in records if isinstance(r.get(key), int | float)] for key in keys}
        lines = {key: points[:: -(-len(points) // MAX_POINTS)] for key, points in lines.items() if points}
        if lines:
            last = (
                f' <span style="color: {colour}">{escape(key)} {points[-1][1]:.4g}</span>'
                for colour, (key, points) in zip(COLOURS, lines.items(), strict=False)
            )
            yield f"<figure><figcaption>{escape(title)}: {','.join(last)}</figcaption>{_curve(lines)}</figure>"


def _curve(lines: dict[str, list[tuple[float, float]]]) -> str:
    """Each line over the steps, with the ends of both axes written beside them."""
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points if abs(value) < float("inf")] or [0.0]
    low, high, last = min(values), max(values), max(*steps, 1)
    left, bottom = 64, HEIGHT - 18

    def place(step: float, value: float) -> str:
        x = left + (WIDTH - left - 8) * step / last
        y = bottom - (bottom - 8) * ((value - low) / (high - low) if high > low else 0.5)
        return f"{x:.1f},{y:.1f}"

    drawn = []
    for colour, points in zip(COLOURS, lines.values(), strict=False):
        shown = " ".join(place(step, value) for step, value in points if abs(value) < float("inf"))
        drawn.append(f'<polyline points="{shown}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(points) < 30:  # a line of one point would not be seen
            dots = (point.split(",") for point in shown.split())
            drawn += [f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>' for x, y in dots]
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img"><text x="4" y="16">{high:.4g}</text>'
        f'<text x="4" y="{bottom}">{low:.4g}</text><text x="{left}" y="{HEIGHT - 4}">step 0</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 4}" text-anchor="end">{last:g}</text>{"".join(drawn)}</svg>'
    )
