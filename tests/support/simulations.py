"""Simulate every recipe under every gear that can be simulated (`make simulate`), and compare with the closed form.

The peaks are kept in benchmarks/simulated.json. Delete a row, or the file, to simulate it again.
"""

from support.environment import ROOT  # isort: skip  first: it sets variables that other imports read

import json
import tempfile
from pathlib import Path

from gearbox.config.gear import gear_path, load_gear
from gearbox.config.job import Job
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.planning.architecture import Architecture
from gearbox.planning.memory import predict
from gearbox.simulation import step
from gearbox.simulation.simulate import simulate
from support.ranks import fork_ranks

RECIPES = (
    "tiny", "tiny_dpo", "ddp_4gpu_full", "fsdp_2gpu", "qlora_1gpu", "ddp_4gpu", "smollm2_135m", "zero3_2gpu",
    "dpo_1gpu", "dpo_4gpu",
)  # fmt: skip
GEARS = {"single": 1, "ddp": 4, "fsdp": 8, "hsdp": 8, "fsdp_offload": 2, "tp": 2, "ring": 2}
# Instead of a model that `make smollm2` copies, and of one that a first run trains.
NAMES = {
    "smollm2_135m": ("model.name=HuggingFaceTB/SmolLM2-135M-Instruct",), "tiny_dpo": ("model.name=recipes/tiny",),
}  # fmt: skip
FILE, PAGE, FIRST_CELL = ROOT / "benchmarks/simulated.json", ROOT / "docs/plan.md", "| recipe |"


def job_of(name: str, gear: str, ranks: int | None = None, *overrides: str) -> Job:
    """Return the job of a recipe under a gear, on so many ranks or on those of the gear's file."""
    path = ROOT / "recipes" / f"{name}.yaml"
    flags = {} if ranks is None or gear == "single" else {"num_processes": str(ranks)}
    return Job.of(path, load_recipe(path, list(overrides)), load_gear(gear_path(gear), flags))


def config_of(job: Job) -> dict:
    """Return the content of the config.json of a recipe's model, from recipes/architectures or from its folder."""
    name = job.recipe.model.name
    folder, shipped = ROOT / name / "config.json", ROOT / "recipes/architectures" / f"{name.replace('/', '--')}.json"
    return json.loads((folder if folder.exists() else shipped).read_text())


def simulated(job: Job, config: dict) -> dict:
    """Return what `simulate` finds, by a forked process, which need not import the libraries."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"

        def work() -> None:
            file.write_text(json.dumps(step.simulate_step(job, config)))

        codes, output = fork_ranks(1, {}, work)
        assert codes == [0], output
        return json.loads(file.read_text())


def work_of(recipe: str, gear: str) -> Job:
    """Return the job of a row of the table."""
    return job_of(recipe, gear, GEARS[gear], *NAMES.get(recipe, ()))


def simulate_all() -> None:
    """Simulate what the file lacks, and write it after each one, so that a killed command resumes."""
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    for recipe in RECIPES:
        for gear in GEARS:
            if (name := f"{recipe} {gear}") in rows:
                continue
            try:
                job = work_of(recipe, gear)
                found = simulate(job, config_of(job))
                rows[name] = {"peak_bytes": found.peak_bytes, "terms": found.terms, "seconds": round(found.seconds)}
            except UserError as error:
                rows[name] = {"refused": str(error).replace(f"{ROOT}/", "")}
            print(name, rows[name], flush=True)
            FILE.write_text(json.dumps(rows, indent=1) + "\n")


def ratios() -> dict[str, float]:
    """Return the closed form's peak divided by the simulated one, for each simulated row of the file."""
    rows = json.loads(FILE.read_text())
    found = {}
    for name, row in rows.items():
        if "peak_bytes" in row:
            job = work_of(*name.split())
            found[name] = predict(Architecture.of(config_of(job)), job).allocated_bytes / row["peak_bytes"]
    return found


def table() -> str:
    """Return the ratios by recipe and gear, as Markdown."""
    found = ratios()
    lines = [f"| recipe | {' | '.join(f'`{gear}` x {ranks}' for gear, ranks in GEARS.items())} |"]
    lines.append("|---" + "|---:" * len(GEARS) + "|")
    for recipe in RECIPES:
        ratio = [found.get(f"{recipe} {gear}") for gear in GEARS]
        lines.append(f"| {recipe} | {' | '.join('refused' if one is None else f'{one:.3f}' for one in ratio)} |")
    return "\n".join(lines)


def main() -> None:
    """Complete the file, and write the table to docs/plan.md."""
    simulate_all()
    text = PAGE.read_text()
    start, end = text.index(FIRST_CELL), text.index("\n\n", text.index(FIRST_CELL))
    PAGE.write_text(text[:start] + table() + text[end:])


if __name__ == "__main__":
    main()
