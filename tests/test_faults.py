"""Faults on warm forked ranks, each balanced by the ledger. `make faults` does the same with real launchers, for hours.

What each protection is for is shown by switching it off.
"""

import errno
import json
import os
import resource
import shutil
import signal
import time

import pytest

import ledger
import train as script
from gearbox.checkpoint import checkpointer, folders
from gearbox.checkpoint.staging import Staging
from gearbox.checkpoint.train_state import TrainState
from gearbox.data import batches, sampler, splits
from gearbox.launch import outcome, watchdog
from gearbox.reporting import metrics
from gearbox.training import evaluation
from test_resume import count_steps

STEPS = ("schedule.name=constant", "save.every=2", "train.steps=8", "run.name=x")
NUM_ROWS = 101  # of the chats, in rows of 128 tokens


@pytest.fixture
def books(tmp_path, monkeypatch):
    """Every rank forked from here on keeps a ledger; returns what reads them, and begins new ones."""
    monkeypatch.setattr(batches, "make_step_batch", batches.make_step_batch)  # put back afterwards
    monkeypatch.setattr(TrainState, "advance", TrainState.advance)
    ledger.install()

    def begin(name: str):
        folder = tmp_path / "ledgers" / name
        folder.mkdir(parents=True)
        monkeypatch.setenv(ledger.VARIABLE, str(folder))
        return lambda: ledger.read(folder)

    return begin


def at_step(step: int, act, rank: int | None = None):
    """train_step with an act before a step, by its number."""
    usual, counted = script.train_step, [0]

    def train_step(gear, accelerator, model, optimizer, batch, *rest):
        counted[0] += 1
        if counted[0] == step and rank in (None, accelerator.process_index):
            act(batch)
        return usual(gear, accelerator, model, optimizer, batch, *rest)

    return train_step


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("gear", "ranks"), [("ddp", 3), ("fsdp", 2), ("zero3", 2)])
def test_a_rank_that_dies(train, books, monkeypatch, gear, ranks):
    """Twice: the books balance, nothing is left over, and every other rank ends by itself."""
    reference = books("reference")
    whole = train(gear, *STEPS, "run.name=whole", ranks=ranks)
    assert set(whole.codes) == {0}, whole.output
    expected, kept = reference(), books("run")
    monitor = ledger.Monitor(whole.folder.parent / "x" / "checkpoints")
    for step, victim in ((4, ranks - 1), (3, 0)):
        with monkeypatch.context() as here:
            here.setattr(script, "train_step", at_step(step, kill, victim))
            outcome = train(gear, *STEPS, ranks=ranks)
        assert outcome.codes[victim] == -9 and set(outcome.codes) <= {-9, 1}, (outcome.codes, outcome.output)
    last = train(gear, *STEPS, ranks=ranks)
    assert set(last.codes) == {0}, last.output
    found = kept()
    assert [len(attempts) for attempts in found.attempts.values()] == [3] * ranks
    assert ledger.problems(found, expected, ranks, 8, NUM_ROWS) == []
    assert monitor.result() == []
    assert ledger.leftovers(last.folder) == []
    assert last.losses == whole.losses


def test_the_ledger_notices_what_is_wrong(train, books, monkeypatch):
    """Each protection switched off, the books do not balance."""
    reference = books("reference")
    train("single", *STEPS, "run.name=whole")
    expected = reference()

    def interrupted(name, **broken):
        kept = books(name)
        with monkeypatch.context() as here:
            here.setattr(script, "train_step", at_step(6, kill))
            train("single", *STEPS, f"run.name={name}")
        with monkeypatch.context() as here:
            for where, value in broken.values():
                here.setattr(*where, value)
            train("single", *STEPS, f"run.name={name}")
        return ledger.problems(kept(), expected, 1, 8, NUM_ROWS)

    from gearbox.training import run_folder

    assert interrupted("well") == []
    ahead = classmethod(lambda cls, saved: cls(**saved | {"step": saved["step"] + 1}))
    assert any("instead of" in problem for problem in interrupted("ahead", load=((TrainState, "from_json"), ahead)))
    forgetful = interrupted("forgetful", load=((run_folder.Run, "restore"), lambda *_: None))
    assert any("instead of" in problem for problem in forgetful)
    again = interrupted("again", load=((sampler.Sampler, "step"), lambda self, step: list(range(6))))
    assert any("trained other rows" in problem for problem in again)
    assert any("rows came twice" in problem for problem in again)


def stopping(number: int, rank: int):
    def act(*_):
        if os.environ.get("RANK", "0") == str(rank):
            os.kill(os.getpid(), number)

    return act


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("the first step", signal.SIGTERM),
        ("evaluating", signal.SIGUSR1),
        ("saving", signal.SIGTERM),
        ("rows", signal.SIGTERM),
        ("the last step", signal.SIGUSR1),
    ],
)
def test_a_signal_in_every_phase(train, books, monkeypatch, phase, number):
    """To one rank alone: all save and end together, and the same command goes on from there."""
    reference = books("reference")
    given = (*STEPS, "eval.every=2", "eval.fraction=0.2", "save.every=3")
    whole = train("ddp", *given, "run.name=whole", ranks=2)
    expected, kept = reference(), books("run")
    act = stopping(number, rank=1)

    def before(usual):
        def call(*arguments, **rest):
            act()
            return usual(*arguments, **rest)

        return call

    with monkeypatch.context() as here:
        if phase.endswith("step"):
            here.setattr(script, "train_step", at_step(1 if "first" in phase else 8, act))
        elif phase == "evaluating":
            here.setattr(evaluation, "make_step_batch", before(evaluation.make_step_batch))
        elif phase == "saving":
            here.setattr(Staging, "write", before(Staging.write))
        else:
            here.setattr(batches, "make_step_batch", before(batches.make_step_batch))
        outcome = train("ddp", *given, ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    status = json.loads((outcome.folder / "status.json").read_text())
    assert status["outcome"] == "saved" and "the same command goes on from step" in status["text"]
    assert status["saved_step"] == status["step"]
    last = train("ddp", *given, ranks=2)
    assert last.codes == [0, 0], last.output
    assert last.losses == whole.losses
    assert ledger.problems(kept(), expected, 2, 8, NUM_ROWS) == []
    looks = [[(line["step"], line["eval_loss"]) for line in run.lines("eval_loss")] for run in (last, whole)]
    assert looks[0] == looks[1], "an evaluation that was cut short is made whole"


def test_before_there_is_anything_to_save_it_ends_at_once(train, monkeypatch):
    def term(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    monkeypatch.setattr(splits, "split_and_pack", term)
    started = time.monotonic()
    outcome = train("single", *STEPS)
    assert outcome.codes == [85] and time.monotonic() - started < 25
    assert "gearbox: SIGTERM: there is nothing to save" in outcome.output


def test_after_the_last_step_what_is_saved_stays(train, monkeypatch):
    def term(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    from gearbox.model import export

    with monkeypatch.context() as here:
        here.setattr(export, "save", term)
        outcome = train("single", *STEPS)
    assert outcome.codes == [85]
    last = train("single", *STEPS)
    assert last.codes == [0] and "goes on from" in last.output and len(last.losses) == 8
    assert (last.folder / "model").is_dir()


def test_sigint_twice_ends_at_once(train, monkeypatch):
    """Also where the main thread would not come back: from a thread of our own."""

    def twice(*_):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        time.sleep(30)

    monkeypatch.setattr(script, "train_step", at_step(3, twice))
    assert train("single", *STEPS).codes == [130]


HANG = "run.hang_timeout=3"


def stacks(outcome) -> dict[int, str]:
    return {int(path.name.split(".")[0][5:]): path.read_text() for path in (outcome.folder / "hang").iterdir()}


def test_a_rank_that_is_stopped(train, monkeypatch):
    """SIGSTOP: it is named, and its own stack is there too."""
    stop = at_step(4, lambda *_: os.kill(os.getpid(), signal.SIGSTOP), 1)
    monkeypatch.setattr(script, "train_step", stop)
    outcome = train("ddp", *STEPS, HANG, ranks=2)
    assert outcome.codes == [1, 1], outcome.output
    assert "gearbox: no step for 3 s: rank 1 is stopped; every stack lies in" in outcome.output
    found = stacks(outcome)
    assert set(found) == {0, 1}
    assert all("thread MainThread" in text and "in fit" in text for text in found.values())


def test_a_rank_that_is_late(train, monkeypatch):
    usual = batches.make_step_batch

    def sleeping(rows, row_ids, shard, *rest):
        if shard[0] == 1 and TrainState.now == 3:
            time.sleep(60)
        return usual(rows, row_ids, shard, *rest)

    count_steps(monkeypatch)
    monkeypatch.setattr(batches, "make_step_batch", sleeping)
    outcome = train("ddp", *STEPS, HANG, ranks=2)
    assert outcome.codes == [1, 1], outcome.output
    assert "rank 1 is late: in step 3, rows, while the others are in step 3, micro batch" in outcome.output
    assert "in sleeping" in stacks(outcome)[1]


def test_a_collective_that_one_rank_calls_alone(train, monkeypatch):
    from gearbox.distributed import process_group

    monkeypatch.setattr(script, "train_step", at_step(4, lambda *_: process_group.ProcessGroup().sum([1] * 7), 1))
    outcome = train("ddp", *STEPS, HANG, ranks=2)
    assert set(outcome.codes) == {1}, outcome.output
    assert "Traceback" in outcome.output or "every stack lies in" in outcome.output


def test_without_the_watch_a_hang_would_last(train, monkeypatch):
    monkeypatch.setattr(watchdog.Watchdog, "_hang", lambda self: None)
    stop = at_step(4, lambda *_: os.kill(os.getpid(), signal.SIGSTOP), 1)
    monkeypatch.setattr(script, "train_step", stop)
    ended = []

    def meanwhile(children):
        time.sleep(12)
        ended.extend(child for child in children if os.waitpid(child, os.WNOHANG)[0])
        for child in children:
            os.kill(child, signal.SIGKILL)

    train("ddp", *STEPS, HANG, ranks=2, meanwhile=meanwhile)
    assert ended == []


def spoiled(row: int, monkeypatch, rank: int = 1, forever: bool = False):
    """The loss of a rank is NaN in one step, or in each."""
    usual, counted = script.train_step, [0]

    def train_step(gear, accelerator, model, optimizer, batch, *rest):
        counted[0] += 1
        if (counted[0] == row or forever) and accelerator.process_index == rank:
            forward = model.forward

            def nan(*arguments, **inputs):
                return forward(*arguments, **inputs) * float("nan")

            model.forward = nan
            try:
                return usual(gear, accelerator, model, optimizer, batch, *rest)
            finally:
                model.forward = forward
        return usual(gear, accelerator, model, optimizer, batch, *rest)

    monkeypatch.setattr(script, "train_step", train_step)


@pytest.mark.parametrize(
    ("gear", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2)]
)
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(train, monkeypatch, gear, ranks):
    with monkeypatch.context() as here:
        spoiled(3, here, rank=ranks - 1)
        outcome = train(gear, *STEPS, "train.steps=5", ranks=ranks)
    assert set(outcome.codes) == {0}, outcome.output
    lines = outcome.lines("num_skipped")
    assert [line["num_skipped"] for line in lines] == [0, 0, 1, 1, 1]
    assert [line["loss"] is None for line in lines] == [False, False, True, False, False]
    assert outcome.output.count("step 3/5  not finite, skipped on all ranks") == 1
    # The weights are those of a run that never saw step 3's rows: its rows are consumed, its step not taken.
    usual = script.train_step
    counted = [0]

    def left_out(parts, accelerator, model, optimizer, batch, *rest):
        counted[0] += 1
        return (1.0, 1.0) if counted[0] == 3 else usual(parts, accelerator, model, optimizer, batch, *rest)

    monkeypatch.setattr(script, "train_step", left_out)
    without = train(gear, *STEPS, "train.steps=5", "run.name=without", ranks=ranks)
    assert outcome.losses[3:] == without.losses[3:]


def test_too_many_in_a_row_end_the_run_with_their_rows(train, monkeypatch):
    spoiled(0, monkeypatch, forever=True)
    outcome = train("ddp", *STEPS, "run.max_bad_steps=2", ranks=2)
    assert outcome.codes == [2, 2]
    assert "step 2: the loss is nan" in outcome.output and "look at the rows [" in outcome.output
    assert "chats.jsonl:" in outcome.output
    assert json.loads((outcome.folder / "status.json").read_text())["outcome"] == "failed"
    assert [line["num_skipped"] for line in outcome.lines("num_skipped")] == [1, 2]


def test_spikes_are_marked():
    progress = TrainState()
    marks = []
    for step in range(60):
        loss = 9.0 if step in (5, 40) else 3.0 - 0.01 * step + 0.1 * (step % 3)
        marks += [step] if progress.advance(
            rows_hash="", num_tokens=1, num_targets=1, loss=loss, skipped=False) else []  # fmt: skip
    assert marks == [40], "nothing can be told of the first ones"


@pytest.fixture
def limit_of_file_size():
    """RLIMIT_FSIZE stands for a full disk where there is no root."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_full_disk_during_a_save(train, monkeypatch, limit_of_file_size):
    """One rank's shard does not fit: all give up together, train on, and try again."""
    usual, counted = Staging.write, [0]

    def write(self, path):
        counted[0] += 1
        if counted[0] == 2 and "00001" in path.name:
            limit_of_file_size(200_000)
            try:
                return usual(self, path)
            finally:
                limit_of_file_size(resource.RLIM_INFINITY)
        return usual(self, path)

    monkeypatch.setattr(Staging, "write", write)
    outcome = train("ddp", *STEPS, "save.every=3", "train.steps=10", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    assert "checkpoint of step 6 not written" in outcome.output
    (line,) = outcome.lines("save_error")
    assert "File too large" in line["save_error"] and "are needed" in line["save_error"]
    assert str(outcome.folder) in line["save_error"] and line["last_saved"] == 3
    assert [line["saved"] for line in outcome.lines("saved")] == [3, 9, 10]
    assert ledger.leftovers(outcome.folder) == []


def test_a_full_disk_at_the_last_step_is_tried_again(train, monkeypatch):
    usual, counted = Staging.write, [0]

    def write(self, path):
        counted[0] += 1
        if counted[0] in (1, 2):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return usual(self, path)

    monkeypatch.setattr(Staging, "write", write)
    monkeypatch.setattr(checkpointer, "LAST_TRY_SECONDS", 1)
    outcome = train("ddp", *STEPS, "save.every=100", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    assert [line["saved"] for line in outcome.lines("saved")] == [8]
    assert outcome.output.count("checkpoint of step 8 not written") == 2


def test_a_save_that_is_slower_than_the_hang_timeout_is_none(train, monkeypatch):
    usual = Staging.write

    def slow(self, path):
        time.sleep(6)
        return usual(self, path)

    monkeypatch.setattr(Staging, "write", slow)
    outcome = train("ddp", *STEPS, "save.every=100", HANG, ranks=2)
    assert outcome.codes == [0, 0], outcome.output


def test_training_goes_on_while_a_save_is_written_and_two_never_overlap(train, tmp_path, monkeypatch):
    usual = Staging.write
    marks = tmp_path / "marks"

    def slow(self, path):
        with marks.open("a") as file:
            file.write(f"begin {TrainState.now - 1}\n")
            file.flush()
            begun = TrainState.now
            while TrainState.now < begun + 2 and begun < 7:  # until training has gone on by two steps
                time.sleep(0.01)
            facts = usual(self, path)
            file.write("end\n")
        return facts

    count_steps(monkeypatch)
    monkeypatch.setattr(Staging, "write", slow)
    outcome = train("single", *STEPS, "save.every=3")
    assert outcome.codes == [0], outcome.output
    assert [line["saved"] for line in outcome.lines("saved")] == [3, 6, 8]
    assert marks.read_text().split() == ["begin", "3", "end", "begin", "6", "end", "begin", "8", "end"]


def test_pruning_that_fails_leaves_the_save_a_success(train, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOTEMPTY, "not empty")

    monkeypatch.setattr(folders, "prune", fail)
    outcome = train("single", *STEPS)
    assert outcome.codes == [0] and [line["saved"] for line in outcome.lines("saved")] == [2, 4, 6, 8]


def test_a_shard_that_is_on_another_machine_is_noticed(train, monkeypatch):
    usual = Staging.write

    def elsewhere(self, path):
        facts = usual(self, path)
        if "00001" in path.name:
            path.unlink()
        return facts

    monkeypatch.setattr(Staging, "write", elsewhere)
    monkeypatch.setattr(checkpointer, "LAST_TRIES", 0)
    outcome = train("ddp", *STEPS, ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    assert outcome.lines("saved") == []
    assert "do all machines share run.dir?" in outcome.output


def test_a_folder_that_is_removed_during_the_run(train, tmp_path, monkeypatch):
    """It is made anew, with what comes after."""

    monkeypatch.setattr(script, "train_step", at_step(5, lambda _: shutil.rmtree(tmp_path / "runs" / "x")))
    outcome = train("single", *STEPS)
    assert outcome.codes == [0], outcome.output
    assert [line["step"] for line in outcome.lines("loss")] == [5, 6, 7, 8]
    assert ledger.whole_checkpoint(outcome.folder / "checkpoints") == 8
    assert (outcome.folder / "model").is_dir()


def test_a_full_disk_stops_no_metrics(train, tmp_path, monkeypatch, limit_of_file_size):
    """Lines that cannot be written wait until they can, and none is written by half."""
    usual, counted = metrics.append, [0]

    def append(path, text):
        counted[0] += 1
        if 3 <= counted[0] <= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(path, text)

    monkeypatch.setattr(metrics, "append", append)
    outcome = train("single", *STEPS, "save.every=0")
    assert outcome.codes == [0], outcome.output
    assert outcome.output.count("metrics.jsonl cannot be written: No space left on device; its lines wait") == 1
    assert [line["step"] for line in outcome.lines("loss")] == list(range(1, 9))
    usual(tmp_path / "lines", "one\n")
    limit_of_file_size(8)
    with pytest.raises(OSError, match="File too large"):
        usual(tmp_path / "lines", "another line\n")
    limit_of_file_size(resource.RLIM_INFINITY)
    assert (tmp_path / "lines").read_text() == "one\n"


def test_the_outcome_is_what_status_json_says(tmp_path, monkeypatch):
    monkeypatch.setenv(outcome.OUTCOME_FILE, str(tmp_path / "outcome"))
    (tmp_path / "run").mkdir()
    outcome.write_outcome("saved", "text", tmp_path / "run", step=3)
    assert outcome.read_outcome(tmp_path / "outcome") == outcome.read_outcome(tmp_path / "run" / "status.json")
    assert outcome.read_outcome(tmp_path / "nowhere") == {}
