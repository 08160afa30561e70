"""Run every method under every gear, and write the results to docs/matrix.md (`make matrix`).

Usage: python tests/support/matrix.py [METHOD ...]. Given methods are run alone, and the other columns are kept.

A cell is two runs on warm forked ranks: two steps with a checkpoint, and two more steps resumed from it. Losses, saved
steps and the exported files are compared with the same method on one device.
"""

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

# Without pytest its `pythonpath` setting does not apply.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from gearbox import ROOT
from gearbox.checkpoint.folders import list_checkpoints
from gearbox.config.gear import gear_names, load_gear
from gearbox.data import corpus
from gearbox.proving import description
from support.documents import make_chats, make_pairs
from support.gears import model_for
from support.methods import METHODS
from support.ranks import Outcome, run_ranks, skip_loading_back

TABLE = ROOT / "docs" / "matrix.md"
COMPARED = ("train.objective=dpo", "data.path={pairs}")
COLUMNS = METHODS | {
    "tokens": ("adapter.method=lora", "model.add_tokens=[<think>]"),
    "continued": (
        "adapter.method=lora",
        "adapter.path={adapter}",
        "model.name={base}",
        "model.init=pretrained",
        "run.rehearse=false",
    ),
    "dpo": COMPARED,
    "dpo_lora": (*COMPARED, *METHODS["lora"]),
    "dpo_qlora": (*COMPARED, *METHODS["qlora"]),
}
STAGES = ("train", "save", "resume", "export")
TOLERANCE = 1e-4  # relative for losses, absolute for weights


class Cell(NamedTuple):
    """The result of a method under a gear."""

    passed: tuple[str, ...]
    """The items of STAGES whose results match those of one device."""
    why: str
    """The message if the run is refused; else the end of its output."""

    @property
    def mark(self) -> str:
        return "yes" if self.passed == STAGES else "refused" if self.why and not self.passed else ", ".join(self.passed)


class Matrix:
    """Run cells below a folder, and each method once on one device for reference."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chats, self.pairs = make_chats(folder / "chats.jsonl"), make_pairs(folder / "pairs.jsonl")
        self.references: dict[tuple[str, tuple[str, ...]], Outcome] = {}

    def cell(self, gear: str, method: str) -> Cell:
        first = self.run(gear, method, "run.name=cell", steps=2)
        if 2 in first.codes:
            return Cell((), refusal(first.output))
        reference = self.reference(method, model_for(gear))
        if set(first.codes) != {0}:
            return Cell((), f"ended with {first.codes}: {first.output[-1500:]}")
        passed = ["train"] if close(first.losses, reference.losses[:2]) else []
        passed += ["save"] if [step for step, _ in list_checkpoints(first.folder / "checkpoints")] == [2] else []
        last = self.run(gear, method, "run.name=cell", "run.resume=latest", steps=4)
        if set(last.codes) != {0}:
            return Cell(tuple(passed), f"resume ended with {last.codes}: {last.output[-1500:]}")
        has_resumed = "resuming from" in last.output
        passed += ["resume"] if has_resumed and close(last.losses, reference.losses) else []
        passed += ["export"] if same_model(last.folder / "model", reference.folder / "model") else []
        return Cell(
            tuple(passed),
            "" if len(passed) == len(STAGES) else f"losses {last.losses}, on one device {reference.losses}",
        )

    def reference(self, method: str, model: tuple[str, ...] = ()) -> Outcome:
        """Return the run of a method on one device, of the default model or of another one."""
        if (method, model) not in self.references:
            name = f"run.name=reference-{method}-{len(model)}"
            outcome = self.references[method, model] = self.run("single", method, name, steps=4, model=model)
            assert outcome.codes == [0], outcome.output
        return self.references[method, model]

    def run(self, gear: str, method: str, *more: str, steps: int, model: tuple[str, ...] | None = None) -> Outcome:
        model = model_for(gear) if model is None else model
        settings = {
            "run.rehearse": "true", "run.dir": str(self.folder / "runs" / gear / method), "data.path": str(self.chats),
            "batch.rows": "4", "batch.row_tokens": "64", "batch.micro_rows": "1", "train.steps": str(steps),
            "schedule.name": "constant", "schedule.warmup": "0", "optim.lr": "5e-3", "optim.eps": "1e-3",
            "eval.fraction": "0", "eval.samples": "0", "save.every": "2",
        }  # fmt: skip
        places = {"pairs": self.pairs}
        for kept in (corpus.cache() / "gearbox").glob("reference-*"):  # each run computes its own
            shutil.rmtree(kept)
        if method == "continued":
            start = self.reference("lora", model).folder
            places |= {"adapter": start / "model", "base": start / "base"}
        given = [setting.format(**places) for setting in COLUMNS[method]]
        arguments = [*(f"{key}={value}" for key, value in settings.items()), *model, *given, *more]
        return run_ranks(gear, ["recipes/tiny.yaml", *arguments], self.folder / "runs" / gear / method)


def refusal(output: str) -> str:
    """Return the message that refuses a run, without folders in file names and without "command line"."""
    all_lines = [line.removeprefix("gearbox: ").removeprefix("command line: ") for line in output.splitlines()]
    lines = [line for line in all_lines if re.match(r"\S+\.(yaml|json): |[a-z]+\.[a-z_]+: ", line)]
    return re.sub(r"\S*/", "", lines[-1]) if lines else output[-500:]


def made() -> str:
    """Return when and where a table was made, with the versions of the libraries."""
    return f"Generated on {description.made()}."


def close(ours: list[float], theirs: list[float]) -> bool:
    return ours == pytest.approx(theirs, rel=TOLERANCE)


def same_model(ours: Path, theirs: Path) -> bool:
    """Return whether two exported models have the same files, settings and weights."""
    (mine,), (other,) = (list(folder.glob("*.safetensors")) for folder in (ours, theirs))
    if {path.name for path in ours.iterdir()} != {path.name for path in theirs.iterdir()}:
        return False
    settings = [json.loads(next(folder.glob("*config.json")).read_text()) for folder in (ours, theirs)]
    for each in settings:
        for key in ("target_modules", "base_model_name_or_path", "_name_or_path"):
            each.pop(key, None)  # sets have no order, and each run has its own random base
    a, b = load_file(mine), load_file(other)
    return settings[0] == settings[1] and a.keys() == b.keys() and all(
        torch.allclose(a[name], b[name], rtol=0, atol=TOLERANCE) for name in a
    )  # fmt: skip


def read_table() -> dict[tuple[str, str], str]:
    """Return the committed marks by gear and method."""
    return {key: cell.mark for key, cell in read_cells().items()}


def read_cells() -> dict[tuple[str, str], Cell]:
    """Return the committed results by gear and method."""
    lines = TABLE.read_text().splitlines()
    notes = dict(line.split(". ", 1) for line in lines if re.match(r"\d+\. ", line))
    methods = next(line for line in lines if line.startswith("| gear")).strip("| ").split(" | ")[2:]
    cells = {}
    for row in (line.strip("| ").split(" | ") for line in lines if line.startswith("| `")):
        for method, text in zip(methods, row[2:], strict=True):
            mark, _, note = text.rstrip("]").partition(" [")
            cells[row[0].strip("`"), method] = Cell(STAGES if mark == "yes" else (), notes[note] if note else "")
    return cells


def write_table(cells: dict[tuple[str, str], Cell]) -> None:
    reasons: list[str] = []
    lines = []
    for gear in gear_names():
        marks = []
        for method in COLUMNS:
            cell = cells[gear, method]
            mark = cell.mark
            if mark != "yes":
                why = cell.why.splitlines()[0] if cell.mark == "refused" else "fails: see `make matrix`"
                if why not in reasons:
                    reasons.append(why)
                mark += f" [{reasons.index(why) + 1}]"
            marks.append(mark)
        lines.append(
            f"| `{gear}` | {load_gear(ROOT / f'accelerate_configs/{gear}.yaml').num_processes} | {' | '.join(marks)} |"
        )
    text = f"""# Gears and methods

This table shows which training methods run under which gear (an Accelerate config file). It is generated by running
every cell:

```bash
make matrix
```

{made()}

A run marked `yes` trained two steps, saved a checkpoint, resumed from it for two more steps, and exported its model.
Losses and exported weights match the same method on one device within {TOLERANCE:g}, in fp32. A `refused` run stopped
before training with the message in the footnote. `tokens` is LoRA with `model.add_tokens`; `continued` trains
an existing adapter further. `dpo` compares pairs of answers, with full training, LoRA and QLoRA; each run computes its
own reference. Under `ep` the model is a mixture, with adapters on its attention.

| gear | ranks | {" | ".join(COLUMNS)} |
|---|---|{"---|" * len(COLUMNS)}
"""
    text += "\n".join(lines) + "\n\n" + "\n".join(f"{i}. {why}" for i, why in enumerate(reasons, start=1)) + "\n"
    text += """
## Read next

- [Methods](methods.md): full training, LoRA, QLoRA and DoRA
- [Which strategy fits](parallelism.md): the gears
- [Parity](parity.md): losses of all gears compared
"""
    TABLE.write_text(text)


def main() -> None:
    skip_loading_back(pytest.MonkeyPatch())
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        chosen = sys.argv[1:] or [*COLUMNS]
        cells = {} if chosen == [*COLUMNS] else read_cells()
        for gear in gear_names():
            for method in chosen:
                cells[gear, method] = cell = matrix.cell(gear, method)
                print(f"{gear:14} {method:10} {cell.mark:10} {cell.why}", flush=True)
    write_table(cells)
    failed = [key for key, cell in cells.items() if cell.mark not in ("yes", "refused")]
    sys.exit(f"{len(failed)} cells failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
