"""Train a language model: a recipe says what, the gear that Accelerate was launched with says how.

accelerate launch --config_file accelerate_configs/GEAR.yaml src/train.py [RECIPE] [key.sub=value ...]

The loop is `fit` in src/gearbox/training/loop.py; what is built before it is in session.py beside it.
"""

from __future__ import annotations

from gearbox.config.gear import Gear
from gearbox.launch import cli
from gearbox.launch.launched_gear import read_job
from gearbox.launch.watchdog import Watchdog


def main(arguments: list[str], gear: Gear | None = None) -> int:
    """Train as the arguments say. Return the exit code."""
    watchdog = Watchdog()  # first, so that a signal during start-up ends this rank at once
    job = read_job(arguments, gear)  # refused here, in half a second, if the files show a mistake

    from gearbox.training import evaluation, finish, loop, run_folder, session  # torch, imported in this one place

    job, data = session.prepare_data(job)  # before ranks meet: tokenizing may take longer than a collective may
    world = session.join(job, data)
    with run_folder.open_run(job, world, world.screen.print) as run, watchdog.running():
        engine = session.build_engine(job, data, world, run)
        verified = session.verify(engine, data)  # what was asked for is what runs, or nothing does
        plan = session.make_plan(engine, data, verified, run)
        session.announce(plan, data, verified.rows, run, world)
        questions = evaluation.SampleQuestions(verified.rows, engine, data.tokenizer)
        if not run.state.step:
            run.state.answers_before = questions.ask()
        with session.open_outputs(plan, engine, run, watchdog) as outputs:
            if loop.fit(engine, verified.rows, run.state, outputs, watchdog):
                return finish.end_stopped(run, world, watchdog)
            finish.end_training(run, plan.num_steps, world, watchdog)
            answers = questions.ask()
        finish.save_model(engine, questions, run)
        finish.report(plan, questions, answers, run)
    return 0


if __name__ == "__main__":
    cli.run(main)
