"""Train a language model. The recipe decides what to train; the launched gear (an Accelerate config file) decides how.

Usage: accelerate launch --config_file accelerate_configs/GEAR.yaml src/train.py [RECIPE] [key.sub=value ...] [--quiet]
       python src/train.py [RECIPE] [key.sub=value ...] [--quiet]

    RECIPE         a recipe file (default: recipes/tiny.yaml)
    key.sub=value  a key of the recipe to change, such as optim.lr=1e-5; docs/recipe.md lists all keys
    --quiet        print only warnings, refusals and the last line

The second form runs the gear single. Run src/launch.py instead for restarts after a crash and for exit codes.

Exit codes of the second form: 0 done; 1 crashed; 2 a user error; 85 stopped and saved, run the same command to resume;
130 interrupted. Under `accelerate launch`, 0 means done or saved, and any other code means that the run did not end.

Examples:
    accelerate launch --config_file accelerate_configs/fsdp.yaml src/train.py recipes/tiny.yaml run.name=first
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 src/train.py train.steps=100

The loop is `fit` in src/gearbox/training/loop.py. In that folder, session.py builds what the loop needs, and finish.py
ends the run.
"""

from __future__ import annotations

import gearbox.launch.lifeline  # noqa: F401  isort: skip  first, so that this process ends with its launcher

from gearbox.checks.agreement import read_job
from gearbox.config.gear import Gear
from gearbox.launch import cli, environment
from gearbox.launch.watchdog import Watchdog
from gearbox.training import resume


def main(arguments: list[str], gear: Gear | None = None) -> int:
    """Train the recipe named by the arguments. Return the exit code."""
    environment.let_segments_grow()  # before torch is imported
    watchdog = Watchdog()  # first, so that a signal during start-up ends this rank at once
    job = read_job(cli.without_quiet(arguments), gear)  # reports mistakes in the files within half a second
    resume.check_early(job)
    cli.show_job(job)
    with cli.importing("torch"):  # after the checks, because it takes seconds
        from gearbox.training import comparing, evaluation, finish, loop, run_folder, session
        from gearbox.training.outputs import open_outputs

    job, data = session.prepare_data(job)  # before ranks meet: tokenizing may exceed the collective timeout
    world = session.join(job, data)
    with run_folder.open_run(job, world, world.screen.print_always) as run, watchdog.running():
        with cli.status("loading the model"):
            engine = session.build_engine(job, data, world, run)
        run.restore(engine)  # from the newest complete checkpoint, if there is one
        facts = session.check_engine(engine, data)  # stops if the running setup differs from the requested one
        rows = session.choose_rows(engine, data)
        engine.warm_up(rows.training)
        plan = session.make_plan(engine, data, rows, run, facts)
        session.announce(plan, data, rows, run, world)
        if not comparing.prepare(engine, data, rows, run, watchdog):
            return finish.end_stopped(run, world, watchdog)
        questions = evaluation.Questions.of(engine, rows, data.tokenizer, data.is_text)
        with open_outputs(plan, engine, run, watchdog) as outputs:
            if loop.fit(engine, rows, questions, outputs, watchdog):
                return finish.end_stopped(run, world, watchdog)
            finish.end_training(run, rows.num_steps, world, watchdog)
        step = finish.save_model(engine, data.tokenizer, run)  # of the model: the last one, or the best
        finish.report(plan, rows, data.tokenizer, outputs.answers.compared(step), run, watchdog)
    return 0


if __name__ == "__main__":
    cli.run(main, diverts=True)
