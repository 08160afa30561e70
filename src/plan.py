"""Plan a run before a GPU is booked: which gear fits, how much memory each takes, and what a step costs.

Usage: python src/plan.py [RECIPE] [--gpu NAME] [--gpus N] [--nodes M] [--method NAME] [--params SIZE] [--price P]
                          [--mfu SHARE] [--gear NAME] [--simulate] [--json] [key.sub=value ...]

    RECIPE         a recipe file (default: recipes/tiny.yaml)
    --gpu NAME     a GPU such as H100, A100-40GB or RTX-4090, or its memory such as 24GB; docs/plan.md lists them
    --gpus N       GPUs of each machine (default: compare 1 to 64 GPUs)
    --nodes M      number of machines (default: 1)
    --method NAME  full, lora or qlora instead of the recipe's method
    --params SIZE  instead of the recipe's model, a known one of about this size, such as 70B
    --price P      price of a GPU for an hour, in any currency
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
from gearbox.config.loader import load_recipe, located
from gearbox.config.recipe import Recipe
from gearbox.console import Screen, make_console, styled
from gearbox.errors import UserError, nearest
from gearbox.launch import cli
from gearbox.planning import report, strategy
from gearbox.planning.architecture import Architecture, Config, model_of_size, read_config
from gearbox.planning.cost import measured_mfu
from gearbox.planning.gpus import ANY_MEMORY, Gpu, gpu_named

ANY_SIZE = Gpu("GPU of any size", ANY_MEMORY)
COUNTS = (1, 2, 4, 8, 16, 32, 64)


def main(arguments: list[str]) -> int:
    """Print the plan of a recipe. Return the exit code."""
    options, recipe_path, overrides = parse(arguments)
    recipe = load_recipe(recipe_path, overrides)
    if options.method:
        recipe = strategy.with_method(recipe, options.method)
    if options.params:
        recipe = strategy.with_values(recipe, "model", name=model_of_size(options.params))
    config = config_of(recipe, recipe_path)
    shape = Architecture.of(config)
    gpu = gpu_named(options.gpu) if options.gpu else ANY_SIZE
    machines = strategy.Machines(gpu, options.gpus or 1, options.nodes, options.mfu or measured_mfu(gpu))
    screen = make_console(speaks=not options.json)
    name = f"{recipe.model.name}: {shape.num_weights / 1e9:,.2f}B weights, {strategy.METHOD_NAMES[recipe.method]}"
    size = f"micro-batches of {recipe.batch.micro_rows} x {recipe.batch.row_tokens:,} tokens"
    screen.print(styled((name, "bold"), f", {size}"))
    if options.gpus is None and options.gear is None and not options.simulate:
        best = list(best_by_count(shape, recipe, recipe_path, machines))
        show_or_dump(options, {"best": best}, lambda: report.show_counts(screen, best, gpu is not ANY_SIZE))
        return 0 if any(one["fits"] for one in best if one["method"] == recipe.method) else 1
    found, refused = strategy.options(shape, recipe, recipe_path, machines)
    if options.gear:
        found = only(options.gear, found, refused)
    if not found:
        raise UserError("\n".join(f"{gear}: {why}" for gear, why in refused.items()))
    verdict = report.verdict(found, shape, machines)
    content = {"gears": [report.as_json(option, shape) for option in found], "refused": refused, "verdict": verdict}
    if options.simulate:
        content["simulated"] = compare_with_simulation(screen, found, config)

    def show() -> None:
        report.show_options(screen, found, shape, gpu is not ANY_SIZE)
        report.show_best(screen, found[0], machines, recipe.train.steps, options.price)
        report.show_refused(screen, refused)
        advice = [] if found[0].fits else strategy.advice(shape, recipe, recipe_path, machines)
        report.show_verdict(screen, verdict, advice)

    show_or_dump(options, content, show)
    return 0 if found[0].fits else 1


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
    parser.add_argument("--nodes", type=int, default=1)
    for name in ("price", "mfu"):
        parser.add_argument(f"--{name}", type=float)
    for name in ("simulate", "json"):
        parser.add_argument(f"--{name}", action="store_true")
    options, ours = parser.parse_known_args(arguments)
    for name in ("gpus", "nodes", "price"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 10**6:
            raise UserError(f"--{name}: must be above 0 and below a million, found {value:g}")
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
            yield report.as_json(found[0], shape) | {"verdict": report.verdict(found, shape, some)}


def compare_with_simulation(screen: Screen, found: list[strategy.Option], config: Config) -> list[report.Figures]:
    """Run a step of each gear on tensors without memory, compare it with the closed form, and return the figures."""
    from gearbox.simulation.simulate import simulate

    figures = []
    for option in found:
        with cli.status(f"simulating {option.gear.name}"):
            try:
                simulated = simulate(option.job, config)
            except UserError as error:
                screen.print(f"{option.gear.name}: {error}")
                continue
        closed = option.prediction.allocated_bytes
        screen.print(
            f"{option.gear.name}: simulated {report.gib(simulated.peak_bytes)} GiB, closed form "
            f"{report.gib(closed)} GiB ({closed / simulated.peak_bytes - 1:+.1%}), without allowance"
        )
        figures.append({"gear": option.gear.name, "peak_bytes": simulated.peak_bytes, "terms": simulated.terms})
    return figures


if __name__ == "__main__":
    cli.run(main)
