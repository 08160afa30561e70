"""Measure how long pipeline stages idle, by the number of micro-batches, and draw two steps.

Usage: python benchmarks/pipeline.py

It runs two stages on two cores, and writes benchmarks/pipeline.md and docs/pipeline.svg.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import psutil  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from gearbox.distributed import pipeline_parallel, pipeline_stages  # noqa: E402
from gearbox.model import loss  # noqa: E402
from support.ranks import fork_ranks  # noqa: E402

ROWS, ROW_TOKENS = 16, 128
NUMS = [1, 2, 4, 8, 16]
STAGES = 2
REPETITIONS = 5
CONFIG = transformers.LlamaConfig(
    vocab_size=260,
    hidden_size=256,
    intermediate_size=1024,
    num_attention_heads=8,
    num_hidden_layers=8,
    tie_word_embeddings=False,
    use_cache=False,
    dtype=torch.float32,
)
WIDTH, LEFT, LANE = 900, 84, 34
COLORS = {"F": "#4c8dd6", "B": "#e0913a"}

Run = dict[str, Any]  # one step on one rank, as written by `measure`


def measure(folder: Path) -> None:
    """Measure every schedule and number of micro-batches, in turns, so that other jobs disturb all equally."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (STAGES, 1), mesh_dim_names=("pp", "dp"))
    stages, replicas = mesh["pp"].get_group(), mesh["dp"].get_group()
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = pipeline_stages.stage_class(CONFIG, pipeline_stages.Stage(rank, STAGES))(CONFIG)
    loss.install_loss(model)
    pipes = {name: pipeline_parallel.Pipeline(model, stages, replicas, name) for name in pipeline_parallel.SCHEDULES}
    rows = torch.randint(0, 260, (ROWS, ROW_TOKENS))
    found = []
    for repetition in range(REPETITIONS + 1):
        for num in NUMS:
            micro = [{"input_ids": each, "labels": each.roll(-1, 1)} for each in rows.chunk(num)]
            for name, pipe in pipes.items():
                torch.distributed.barrier()
                pipe.step(micro, 1 / rows.numel())
                if repetition:  # the first repetition warms up
                    passes = [[timed.kind, timed.micro_batch, timed.start, timed.end] for timed in pipe.passes]
                    run = {"schedule": name, "num": num, "seconds": pipe.seconds, "idle": pipe.idle}
                    found.append(run | {"passes": passes})
    (folder / f"{rank}.json").write_text(json.dumps(found))


def table(runs: list[list[Run]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of medians over the repetitions."""
    yield "| micro-batches | (p-1)/(m+p-1) | gpipe | 1f1b | seconds per step, 1f1b |"
    yield "|---|---|---|---|---|"
    for num in NUMS:
        cases = {name: of(runs, name, num) for name in pipeline_parallel.SCHEDULES}
        idle = {name: statistics.median(both[0]["idle"] for both in case) for name, case in cases.items()}
        seconds = statistics.median(both[0]["seconds"] for both in cases["1f1b"])
        ideal = (STAGES - 1) / (num + STAGES - 1)
        naive = " (naive)" if num == 1 else ""
        yield f"| {num}{naive} | {ideal:.0%} | {idle['gpipe']:.0%} | {idle['1f1b']:.0%} | {seconds:.2f} |"


def of(runs: list[list[Run]], name: str, num: int) -> list[tuple[Run, ...]]:
    """Return the repetitions of one case, each as a tuple of stages."""
    return [both for both in zip(*runs, strict=True) if (both[0]["schedule"], both[0]["num"]) == (name, num)]


def picture(cases: list[tuple[str, tuple[Run, ...]]]) -> str:
    """Return an SVG with a panel per case, a lane per stage and a rectangle per pass, on one time scale."""
    longest = max(stage["seconds"] for _, stages in cases for stage in stages)
    per_second = (WIDTH - LEFT - 16) / longest
    height = 44 + len(cases) * (STAGES * LANE + 58)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    top = 14
    for title, stages in cases:
        parts.append(f'<text x="{LEFT}" y="{top + 14}" font-weight="bold" fill="#222">{title}</text>')
        top += 24
        for number, stage in enumerate(stages):
            width = stage["seconds"] * per_second
            label = f'<text x="8" y="{top + LANE / 2 + 3}" fill="#222">stage {number}</text>'
            parts += [label, f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{LANE - 6}" fill="#ececec"/>']
            parts += [rectangle(timed, top, per_second) for timed in stage["passes"]]
            top += LANE
        top += 34
    legend = [("#4c8dd6", "forward"), ("#e0913a", "backward"), ("#ececec", "idle")]
    for i, (color, word) in enumerate(legend):
        x = LEFT + 110 * i
        parts.append(f'<rect x="{x}" y="{height - 28}" width="14" height="14" fill="{color}"/>')
        parts.append(f'<text x="{x + 20}" y="{height - 16}" fill="#222">{word}</text>')
    right = f'x="{WIDTH - 16}" y="{height - 16}" text-anchor="end"'
    parts.append(f'<text {right} fill="#222">longer step: {longest:.1f} s</text>')
    return "\n".join([*parts, "</svg>\n"])


def rectangle(timed: tuple[str, int, float, float], top: float, per_second: float) -> str:
    """Return the SVG of a pass (kind, micro-batch, start, end)."""
    kind, number, start, end = timed
    x, width = LEFT + start * per_second, max(1.0, (end - start) * per_second)
    position = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE - 6}"'
    drawn = f'<rect {position} fill="{COLORS[kind]}" stroke="white"/>'
    if width > 10:
        middle = f'x="{x + width / 2:.1f}" y="{top + LANE / 2 + 2}" text-anchor="middle"'
        drawn += f'<text {middle} fill="white">{number + 1}</text>'
    return drawn


def main() -> None:
    """Measure the cases, and write the table and the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes, output = fork_ranks(STAGES, {}, lambda: measure(folder))
        assert set(codes) == {0}, output
        runs = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(STAGES)]
    lines = [
        "# Idle time of pipeline stages",
        "",
        "Measured by `python benchmarks/pipeline.py`. The columns `gpipe` and `1f1b` show the idle share of a step: a",
        "stage ran neither forward nor backward. Values are means over the stages, and medians of "
        f"{REPETITIONS} steps.",
        "",
        f"- Model: a Llama of {CONFIG.num_hidden_layers} layers of width {CONFIG.hidden_size}, split into {STAGES} "
        "stages, one per core, on gloo in fp32.",
        f"- Step: {ROWS} rows x {ROW_TOKENS} tokens, split into micro-batches.",
        f"- Machine: {psutil.cpu_count()} cores ({platform.machine()}), load {psutil.getloadavg()[0]:.0f} at the end. "
        f"Above {STAGES}, other jobs ran.",
        f"- torch {torch.__version__}",
        "",
        *table(runs),
        "",
    ]
    (ROOT / "benchmarks" / "pipeline.md").write_text("\n".join(lines))
    cases = []
    for title, schedule, num in (("naive: one micro-batch", "gpipe", 1), ("1f1b: 8 micro-batches", "1f1b", 8)):
        fastest = min(of(runs, schedule, num), key=lambda both: both[0]["seconds"])  # least disturbed
        cases.append((f"{title}, {fastest[0]['idle']:.0%} idle", fastest))
    (ROOT / "docs" / "pipeline.svg").write_text(picture(cases))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
