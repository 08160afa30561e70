"""Simulate every recipe under every gear that can be simulated, and print the peaks. Run this file for the table.

python tests/support/simulations.py FILE.json [RECIPE ...]
"""

from support.environment import ROOT  # isort: skip  first: it sets variables that other imports read

import json
import sys
import tempfile
from pathlib import Path

from gearbox.config.gear import gear_path, load_gear
from gearbox.config.job import Job
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.simulation import step
from gearbox.simulation.simulate import simulate
from support.ranks import fork_ranks

RECIPES = ("tiny", "ddp_4gpu_full", "fsdp_2gpu", "qlora_1gpu", "ddp_4gpu", "smollm2_135m", "zero3_2gpu")
GEARS = {"single": 1, "ddp": 4, "fsdp": 2, "hsdp": 4, "fsdp_offload": 2, "tp": 2, "fsdp_tp": 4, "ring": 2}


def job_of(name: str, gear: str, ranks: int | None = None, *overrides: str) -> Job:
    """Return the job of a recipe under a gear, on so many ranks or on those of the gear's file."""
    path = ROOT / "recipes" / f"{name}.yaml"
    flags = {} if ranks is None or gear == "single" else {"num_processes": str(ranks)}
    return Job.of(path, load_recipe(path, list(overrides)), load_gear(gear_path(gear), flags))


def config_of(job: Job) -> dict:
    """Return the content of the config.json of a recipe's model, from its folder or from recipes/architectures."""
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


def main() -> None:
    """Write the peaks to a file, and print them."""
    file, *recipes = sys.argv[1:]
    rows = []
    for name in recipes or RECIPES:
        for gear, ranks in GEARS.items():
            row = {"recipe": name, "gear": gear, "ranks": ranks}
            try:
                job = job_of(name, gear, ranks)
                found = simulate(job, config_of(job))
                row |= {"peak": found.peak_bytes, "terms": found.terms, "loading": found.loading_bytes}
                row |= {"sent": found.sent_bytes, "seconds": round(found.seconds, 1)}
            except UserError as error:
                row |= {"refused": str(error)}
            except RuntimeError as error:
                row |= {"failed": str(error)[-1500:]}
            rows.append(row)
            Path(file).write_text(json.dumps(rows, indent=1))
            peak = f"{row['peak'] / 1e9:8.2f} GB" if "peak" in row else str(row)[:150]
            print(f"{name:16}{gear:14}{ranks:3} {peak}", flush=True)


if __name__ == "__main__":
    main()
