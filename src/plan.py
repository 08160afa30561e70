"""Plan a run before a GPU is booked: which gear fits, how much memory each takes, and what a step costs.

Usage: python src/plan.py [RECIPE] [--gpu NAME] [--gpus N] [--nodes M] [--method NAME] [--params SIZE] [--price P]
                          [--mfu SHARE] [--gear NAME] [--simulate] [--json] [key.sub=value ...]

    RECIPE         a recipe file (default: recipes/tiny.yaml)
    --gpu NAME     a GPU such as H100, A100-40GB or RTX-4090, or its memory such as 24GB; docs/plan.md lists them
    --gpus N       GPUs of each machine (default: compare 1 to 64 GPUs)
    --nodes M      number of machines, with --gpus (default: 1)
    --method NAME  full, lora or qlora instead of the recipe's method
    --params SIZE  instead of the recipe's model, a known one of about this size, such as 70B
    --price P      price of a GPU for an hour, in any currency, with --gpu
    --mfu SHARE    share of a GPU's peak rate that a step reaches (default: measured in benchmarks/mfu.json, else 0.4)
    --gear NAME    plan this gear only
    --simulate     also run a step on tensors without memory, under the gear's real engine
    --json         print everything as JSON
    key.sub=value  a key of the recipe to change, such as batch.row_tokens=8192; docs/recipe.md lists all keys

Needs only the model's config.json, from a folder, the Hub's cache or recipes/architectures/: no weights and no GPU.

Exit codes: 0 a gear fits, or no GPU was given; 1 nothing fits; 2 a user error.

Examples:
    python src/plan.py recipes/fsdp_2gpu.yaml --gpu A100-80GB --gpus 2
    python src/plan.py recipes/qlora_1gpu.yaml --gpu 24GB --params 70B --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from gearbox.config.gear import gear_names
from gearbox.config.job import Job
from gearbox.config.loader import load_recipe, located
from gearbox.config.recipe import Recipe
from gearbox.console import Screen, make_console, status, styled
from gearbox.errors import UserError, nearest
from gearbox.launch import cli
from gearbox.planning import report, strategy
from gearbox.planning.architecture import Architecture, Config, NoClosedForm, model_of_size, read_config
from gearbox.planning.cost import measured_mfu
from gearbox.planning.gpus import ANY_MEMORY, Gpu, gpu_named
from gearbox.planning.memory import allowance
from gearbox.simulation.simulate import Simulation, simulate

ANY_SIZE = Gpu("GPU of any size", ANY_MEMORY)
COUNTS = (1, 2, 4, 8, 16, 32, 64)


def main(arguments: list[str]) -> int:
    """Print the plan of a recipe. Return the exit code."""
    options, recipe_path, overrides = parse(arguments)
    recipe = load_recipe(recipe_path, overrides)
    if options.method:
        recipe = strategy.with_method(recipe, options.method)
    if options.params is not None:
        recipe = strategy.with_values(recipe, "model", name=model_of_size(options.params))
    machines = machines_of(options)
    config = config_of(recipe, recipe_path)
    try:
        shape = Architecture.of(config)
    except UserError as error:
        if options.simulate and isinstance(error, NoClosedForm):
            return simulate_alone(options, recipe, recipe_path, config, machines)
        raise UserError(located(str(error), recipe, recipe_path)) from None
    screen = make_console(speaks=not options.json)
    name = f"{recipe.model.name}: {shape.num_weights / 1e9:,.2f}B weights, {strategy.METHOD_NAMES[recipe.method]}"
    size = f"micro-batches of {recipe.batch.micro_rows} x {recipe.batch.row_tokens:,} tokens"
    screen.print(styled((name, "bold"), f", {size}"))
    if options.gpus is None and options.gear is None and not options.simulate:
        best = list(best_by_count(shape, recipe, recipe_path, machines))
        show_or_dump(options, {"best": best}, lambda: report.show_counts(screen, best, machines.gpu is not ANY_SIZE))
        return 0 if any(one["fits"] for one in best if one["method"] == recipe.method) else 1
    found, refused = strategy.options(shape, recipe, recipe_path, machines)
    if options.gear is not None:
        found = only(options.gear, found, refused)
    if not found:
        raise UserError("\n".join(f"{gear}: {why}" for gear, why in refused.items()))
    verdict = report.verdict(found, shape, machines)
    content = {"gears": [report.as_json(option, shape) for option in found], "refused": refused, "verdict": verdict}
    if options.simulate:
        content["simulated"] = compare_with_simulation(screen, found, config)

    def show() -> None:
        report.show_options(screen, found, shape, machines.gpu is not ANY_SIZE)
        report.show_best(screen, found[0])
        report.show_refused(screen, refused)
        advice = [] if found[0].fits else strategy.advice(shape, recipe, recipe_path, machines)
        report.show_verdict(screen, verdict, advice)

    show_or_dump(options, content, show)
    return 0 if found[0].fits else 1


def machines_of(options: argparse.Namespace) -> strategy.Machines:
    """Return the machines that the options name. Raise UserError if a GPU or its speed is unknown."""
    gpu = ANY_SIZE if options.gpu is None else gpu_named(options.gpu)
    if options.price is not None and gpu.tflops is None:
        raise UserError("--price: needs the speed of a GPU; name one with --gpu, such as H100")
    mfu = options.mfu or measured_mfu(gpu)
    return strategy.Machines(gpu, options.gpus or 1, options.nodes or 1, mfu, options.price)


def show_or_dump(options: argparse.Namespace, content: report.Figures, show: Callable[[], None]) -> None:
    """Print the content as JSON if that is asked for, else call `show`."""
    if options.json:
        print(json.dumps(content))
    else:
        show()


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Path, list[str]]:
    """Return the options, the recipe's path and the overrides. Raise UserError for any wrong argument."""
    parser = cli.Parser(__doc__)
    for name in ("gpu", "params", "method", "gear"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--nodes", type=int)
    for name in ("price", "mfu"):
        parser.add_argument(f"--{name}", type=float)
    for name in ("simulate", "json"):
        parser.add_argument(f"--{name}", action="store_true")
    options, ours = parser.parse_known_args(arguments)
    for name in ("gpus", "nodes", "price"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 10**6:
            raise UserError(f"--{name}: must be above 0 and below a million, found {value:g}")
    if options.nodes is not None and options.gpus is None:
        raise UserError("--nodes: needs the GPUs of each machine; give --gpus too, such as --gpus 8")
    if options.mfu is not None and not 0 < options.mfu <= 1:
        raise UserError(f"--mfu: must be above 0 and at most 1, found {options.mfu:g}; give a share such as 0.4")
    if options.method is not None and options.method not in strategy.METHODS:
        raise UserError(f"--method: {options.method!r} is unknown; give one of {', '.join(strategy.METHODS)}")
    return options, *cli.split_arguments(ours)


def config_of(recipe: Recipe, recipe_path: Path) -> Config:
    """Return the config.json of a recipe's model. Raise UserError if it is not on this machine."""
    config = read_config(recipe.model)
    if config is None:
        name = recipe.model.name.replace("/", "--")
        raise UserError(
            located(
                f"model.name: the config.json of {recipe.model.name!r} is not on this machine; save it as "
                f"recipes/architectures/{name}.json, or give --params 7B",
                recipe,
                recipe_path,
            )
        )
    return config


def only(name: str, found: list[strategy.Option], refused: dict[str, str]) -> list[strategy.Option]:
    """Return the option of one gear. Raise UserError if it cannot run."""
    if name in refused:
        raise UserError(f"--gear: {name}: {refused[name]}")
    chosen = [option for option in found if option.gear.name == name]
    if not chosen:
        raise UserError(f"--gear: {name!r} is unknown{nearest(name, gear_names())}; the gears are {gear_names()}")
    return chosen


def best_by_count(
    shape: Architecture, recipe: Recipe, recipe_path: Path, machines: strategy.Machines
) -> Iterator[report.Figures]:
    """Yield the best gear for each method on 1 to 64 GPUs."""
    for method in dict.fromkeys((recipe.method, *strategy.METHODS)):
        changed = strategy.with_method(recipe, method)
        for count in COUNTS:
            some = replace(machines, num_gpus=min(count, 8), num_machines=max(1, count // 8))
            found, _ = strategy.options(shape, changed, recipe_path, some)
            peaks = {option.gear.name: option.prediction.peak_bytes for option in found}
            yield report.as_json(found[0], shape) | {"peaks": peaks, "verdict": report.verdict(found, shape, some)}


def compare_with_simulation(screen: Screen, found: list[strategy.Option], config: Config) -> list[report.Figures]:
    """Run a step of each gear on tensors without memory, compare it with the closed form, and return the figures."""
    figures = []
    for option in found:
        simulated = simulated_step(screen, option.job, config)
        if isinstance(simulated, UserError):
            screen.print(f"{option.gear.name}: {simulated}")
            continue
        closed = option.prediction.allocated_bytes
        screen.print(
            f"{option.gear.name}: simulated {report.gib(simulated.peak_bytes)} GiB, closed form "
            f"{report.gib(closed)} GiB ({closed / simulated.peak_bytes - 1:+.1%}), without allowance"
        )
        figures.append({"gear": option.gear.name, "peak_bytes": simulated.peak_bytes, "terms": simulated.terms})
    return figures


def simulated_step(screen: Screen, job: Job, config: Config) -> Simulation | UserError:
    """Return a simulated step of a job, or why it cannot be simulated."""
    with status(screen, f"simulating {job.gear.name}"):
        try:
            return simulate(job, config)
        except UserError as error:
            return error


def simulate_alone(
    options: argparse.Namespace, recipe: Recipe, recipe_path: Path, config: Config, machines: strategy.Machines
) -> int:
    """Simulate a family without a closed form under each gear, and print what a GPU needs. Return the exit code."""
    screen = make_console(speaks=not options.json)
    figures, refused = [], {}
    for name in [options.gear] if options.gear is not None else gear_names():
        try:
            job = strategy.job_of(name, recipe, recipe_path, machines)
        except UserError as error:
            refused[name] = strategy.without_place(error)
            continue
        simulated = simulated_step(screen, job, config)
        if isinstance(simulated, UserError):
            refused[name] = strategy.without_place(simulated)
            continue
        state = sum(simulated.terms[term] for term in ("weights", "gradients", "optimizer"))
        reserved = allowance(simulated.peak_bytes - state, machines.total)
        terms, peak = {**simulated.terms, "allowance": reserved}, simulated.peak_bytes + reserved
        fits = peak <= machines.gpu.memory
        figures.append({"gear": name, "method": recipe.method, "fits": fits, "peak_bytes": peak, "terms": terms})
        parts = ", ".join(f"{term} {report.gib(size)}" for term, size in terms.items())
        screen.print(f"{name}: {'fits' if fits else 'does not fit'}, {report.gib(peak)} GiB a GPU: {parts}")
    if not figures:
        raise UserError("\n".join(f"{gear}: {why}" for gear, why in refused.items()))
    show_or_dump(options, {"simulated": figures, "refused": refused}, lambda: report.show_refused(screen, refused))
    return 0 if any(one["fits"] for one in figures) else 1


if __name__ == "__main__":
    cli.run(main)
