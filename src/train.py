"""Train a language model: a recipe says what, the gear that Accelerate was launched with says how.

accelerate launch --config_file accelerate_configs/GEAR.yaml src/train.py [RECIPE] [key.sub=value ...]

The loop is `fit` in src/gearbox/training/loop.py. session.py there builds what it needs; finish.py ends the run.
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

    # torch, imported in this one place
    from gearbox.training import evaluation, finish, loop, run_folder, session
    from gearbox.training.outputs import open_outputs

    job, data = session.prepare_data(job)  # before ranks meet: tokenizing may take longer than a collective may
    world = session.join(job, data)
    with run_folder.open_run(job, world, world.screen.print) as run, watchdog.running():
        engine = session.build_engine(job, data, world, run)
        run.restore(engine)  # the newest good checkpoint, if there is one
        facts = session.check_engine(engine, data)  # what was asked for is what runs, or nothing does
        rows = session.choose_rows(engine, data)
        engine.fix_ddp_bucket_order(rows.training.batch([None]))  # else a resumed run differs in the last bit
        plan = session.make_plan(engine, data, rows, run, facts)
        session.announce(plan, data, rows, run, world)
        questions = evaluation.SampleQuestions(rows.samples, engine, data.tokenizer)
        if not run.state.step:
            run.state.answers_before = questions.ask()
        with open_outputs(plan, engine, run, watchdog) as outputs:
            if loop.fit(engine, rows, run.state, outputs, watchdog):
                return finish.end_stopped(run, world, watchdog)
            finish.end_training(run, rows.num_steps, world, watchdog)
            answers = questions.ask()
        finish.save_model(engine, data.tokenizer, run)
        if world.rank == 0:
            finish.report(plan, rows, data.tokenizer, answers, run)
        run.write_status("done")
    return 0


if __name__ == "__main__":
    cli.run(main)
