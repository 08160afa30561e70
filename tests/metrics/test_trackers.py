"""Test that trackers that raise, hang or lose their disk neither stop nor slow training, and that numbers arrive."""

import json
import resource
import threading
import time

import pytest
from accelerate import PartialState
from accelerate.tracking import GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gearbox.metrics import trackers
from gearbox.metrics.tracker_process import log_of
from gearbox.metrics.tracker_start import Description, LocalTracker, Opened, start, tags_of_wandb
from gearbox.metrics.trackers import Trackers

SPOKEN: list[str] = []


class Kept(GeneralTracker):
    """A tracker that keeps its numbers, and fails on request."""

    name, requires_logging_directory = "kept", False

    def __init__(self, calls, fails):
        super().__init__()
        self.calls, self.fails = calls, fails

    @property
    def tracker(self):
        return self

    def _do(self, name, *facts):
        self.fails(name, *facts)
        self.calls.append((name, *facts))

    def start(self):
        self._do("start")

    def log(self, values, step=None):
        self._do("log", values, step)

    def finish(self):
        self._do("finish")


@pytest.fixture
def board(tmp_path, monkeypatch):
    """Return a function that makes opened trackers of a run: one `Kept` for each function that fails."""
    monkeypatch.setattr(trackers, "PAUSES", (0.01, 0.05))
    SPOKEN.clear()

    def make(*fails, step=0, names="abc"):
        calls = [[] for _ in fails]
        found = Trackers(names[: len(fails)], Description(tmp_path), SPOKEN.append)

        def tracker(name):
            number = names.index(name)

            def begin(run, run_id, resumes, after):
                return start(Kept(calls[number], fails[number])), Opened(run_id)

            return LocalTracker(name, Description(tmp_path), begin)

        monkeypatch.setattr(found, "_tracker", tracker)
        found.open(step)
        return found, calls

    return make


def quiet(*_):
    pass


def steps(calls) -> list[int]:
    return [call[2] for call in calls if call[0] == "log"]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fail_in(name, error):
    def fails(call, *_):
        if call == name:
            raise error

    return fails


@pytest.mark.parametrize("error", [RuntimeError("no\nnetwork"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_tracker_that_raises_is_named_once_and_the_others_go_on(board, call, error):
    found, (failing, healthy) = board(fail_in(call, error), quiet)
    for step in range(1, 6):
        found.log({"loss": 1.0, "rows_hash": "ab", "spike": True}, step)
    found.close(is_done=True)
    assert steps(healthy) == [1, 2, 3, 4, 5] and healthy[-1] == ("finish",)
    assert healthy[1] == ("log", {"loss": 1.0, "spike": True}, 1)
    about = [line for line in SPOKEN if type(error).__name__ in line]
    assert len(about) == 1 and about[0].startswith(f"tracker a: fails: {type(error).__name__}"), SPOKEN
    assert "\n" not in about[0] and about[0].endswith("; training continues")
    lost = "tracker a: lines not recorded: 5; metrics.jsonl has them all"
    assert (lost in SPOKEN) == (call != "finish"), SPOKEN
    assert steps(failing) == ([1, 2, 3, 4, 5] if call == "finish" else [])


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_tracker_that_hangs_delays_nothing_but_the_end_and_that_not_for_long(board, call, monkeypatch):
    monkeypatch.setattr(trackers, "STOPPED_SECONDS", 0.4)
    released = threading.Event()
    found, (_, healthy) = board(lambda name, *_: name == call and released.wait(60), quiet)
    before = time.perf_counter()
    for step in range(1, 101):
        found.log({"loss": 1.0}, step)
    assert time.perf_counter() - before < 5, "a hanging tracker must not be waited for"
    found.close(is_done=False)
    assert time.perf_counter() - before < 10
    assert steps(healthy) == list(range(1, 101))
    assert [line for line in SPOKEN if "a: did not finish in time" in line], SPOKEN
    released.set()


def test_a_tracker_that_was_left_is_not_opened_again(board, monkeypatch):
    monkeypatch.setattr(trackers, "STOPPED_SECONDS", 0.2)
    released = threading.Event()

    def fails(name, *_):
        if name == "log":
            released.wait(60)
            raise RuntimeError("its process was killed")

    found, (calls,) = board(fails)
    found.log({"loss": 1.0}, 1)
    found.close(is_done=False)
    released.set()
    found.threads[0].join(30)
    assert not found.threads[0].is_alive() and calls == [("start",), ("finish",)]


def test_a_call_that_takes_long_is_reported_once(board, monkeypatch):
    monkeypatch.setattr(trackers, "STALL_SECONDS", 0.05)
    released = threading.Event()
    found, _ = board(lambda name, *_: released.wait(60))
    for step in range(1, 5):
        time.sleep(0.06)
        found.log({"loss": 1.0}, step)
    released.set()
    found.close(is_done=True)
    assert len([line for line in SPOKEN if "a: has not answered for" in line]) == 1, SPOKEN


def test_the_queue_drops_the_oldest_and_counts_them(board, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_WAITING", 10)
    released = threading.Event()
    found, (calls,) = board(lambda name, *_: name == "start" and released.wait(60))
    for step in range(1, 31):
        found.log({"loss": 1.0}, step)
    released.set()
    found.close(is_done=True)
    assert steps(calls) == list(range(21, 31))
    assert "tracker a: lines not recorded: 20; metrics.jsonl has them all" in SPOKEN


def test_a_tracker_that_recovers_gets_what_waited(board):
    left = [5]

    def fails(name, *_):
        if name == "start" and left[0]:
            left[0] -= 1
            raise OSError("the server is away")

    found, (calls,) = board(fails)
    for step in range(1, 4):
        found.log({"loss": 1.0}, step)
    wait_until(lambda: not left[0])
    found.close(is_done=True)
    assert steps(calls) == [1, 2, 3] and len(SPOKEN) == 1, SPOKEN


def test_a_line_that_a_tracker_cannot_take_is_skipped(board):
    def fails(name, *facts):
        if name == "log" and facts[1] == 2:
            raise ValueError("not this one")

    found, (calls,) = board(fails)
    for step in range(1, 5):
        found.log({"loss": 1.0}, step)
    wait_until(lambda: 4 in steps(calls))
    found.close(is_done=True)
    assert steps(calls) == [1, 3, 4]
    assert "tracker a: lines not recorded: 1; metrics.jsonl has them all" in SPOKEN


def write_metrics(folder, last):
    lines = [{"step": 0, "eval_loss": 2.0}] + [{"step": step, "loss": float(step)} for step in range(1, last + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_tracker_that_is_added_later_gets_the_earlier_steps(board, tmp_path):
    write_metrics(tmp_path, 4)
    (tmp_path / "trackers.json").write_text(json.dumps({"a": {"id": "f" * 32, "recorded": 2}}))
    found, (known, added) = board(quiet, quiet, step=4)
    found.log({"loss": 5.0}, 5)
    found.close(is_done=True)
    assert steps(known) == [3, 4, 5] and steps(added) == [0, 1, 2, 3, 4, 5]
    written = json.loads((tmp_path / "trackers.json").read_text())
    assert written["a"] == {"id": "f" * 32, "recorded": 5} and written["b"]["recorded"] == 5
    assert not SPOKEN


def test_a_save_notes_only_what_a_kill_cannot_lose(board, tmp_path):
    found, _ = board(quiet)
    for step in (1, 2, 3):
        found.log({"loss": 1.0}, step)
        wait_until(lambda step=step: found.threads[0].recorded == step)
        found.save()
    assert json.loads((tmp_path / "trackers.json").read_text())["a"]["recorded"] == 2
    found.close(is_done=False)
    assert json.loads((tmp_path / "trackers.json").read_text())["a"]["recorded"] == 3


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"a": 3}', '{"a": {"id": 3, "recorded": 1}}', '{"a": {"id": "../etc", "recorded": 1}}',
        '{"a": {"id": "ffffffffffffffff", "recorded": true}}', '{"a": {"id": "ffffffffffffffff", "recorded": -7}}',
        '{"a": {"id": "ffffffffffffffff"}}', "[" * 100_000, '{"\x1b[2J": []}',
    ],
)  # fmt: skip
def test_a_damaged_file_starts_new_runs(board, tmp_path, content):
    write_metrics(tmp_path, 2)
    (tmp_path / "trackers.json").write_text(content)
    found, (calls,) = board(quiet, step=2)
    found.log({"loss": 3.0}, 3)
    found.close(is_done=True)
    assert steps(calls) == [0, 1, 2, 3]
    (line,) = SPOKEN
    assert line.endswith("trackers.json: has unusable entries; trackers start new runs")


def test_a_recorded_step_beyond_the_checkpoint_is_not_believed(board, tmp_path):
    write_metrics(tmp_path, 2)
    (tmp_path / "trackers.json").write_text(json.dumps({"a": {"id": "f" * 32, "recorded": 9}}))
    found, (calls,) = board(quiet, step=2)
    found.log({"loss": 3.0}, 3)
    found.close(is_done=True)
    assert steps(calls) == [3]


@pytest.fixture
def single():
    """Let Accelerate's loggers work in this process."""
    PartialState(cpu=True)
    yield
    PartialState._reset_state()


def losses(folder) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_a_full_disk_delays_events_but_loses_none(tmp_path, single, monkeypatch, limit_of_file_size, capfd):
    monkeypatch.setattr(trackers, "PAUSES", (0.01, 0.05))
    SPOKEN.clear()
    found = Trackers(["tensorboard"], Description(tmp_path, {"gear": "a|b\nc"}), SPOKEN.append)
    found.open(0)
    thread = found.threads[0]

    found.log({"loss": 1.0}, 1)
    wait_until(lambda: thread.recorded == 1)
    limit_of_file_size(0)
    found.log({"loss": 2.0}, 2)
    wait_until(lambda: thread.news)
    found.log({"loss": 3.0}, 3)
    limit_of_file_size(resource.RLIM_INFINITY)
    found.log({"loss": 4.0}, 4)
    found.close(is_done=True)
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert SPOKEN == ["tracker tensorboard: fails: OSError: [Errno 27] File too large; training continues"]
    assert "Traceback" not in capfd.readouterr().err


def test_tensorboard_goes_on_after_a_resume_with_each_step_once(train, tmp_path):
    first = train("ddp", "train.steps=4", "save.every=2", "run.name=same", ranks=2)
    assert first.codes == [0, 0], first.output
    assert len(list((first.folder / "tensorboard").iterdir())) == 1, "only rank 0 writes events"
    record = first.folder / "trackers.json"
    assert json.loads(record.read_text())["tensorboard"]["recorded"] == 4
    record.write_text(record.read_text().replace('"recorded": 4', '"recorded": 2'))  # as if it was killed
    second = train("single", "train.steps=7", "save.every=2", "run.name=same", "run.resume=latest")
    assert second.codes == [0], second.output
    assert [step for step, _ in losses(second.folder)] == list(range(1, 8))
    assert dict(losses(second.folder)) == pytest.approx({line["step"]: line["loss"] for line in second.lines("loss")})
    assert not [line for line in second.output.splitlines() if line.startswith("tracker")]


def test_without_trackers_nothing_is_written(train):
    outcome = train("single", "run.trackers=[]")
    assert outcome.codes == [0], outcome.output
    assert not {"tensorboard", "trackers", "trackers.json"} & {path.name for path in outcome.folder.iterdir()}


def test_tags_and_logs_that_are_refused_stop_no_tracker(tmp_path):
    assert tags_of_wandb({"gear": "ddp", "method": "", "model": "m" * 99}) == ["ddp", "m" * 64]
    (tmp_path / "run.log").mkdir()
    for place, kept in (("other.log", "chatter"), ("run.log", None)):
        with log_of(tmp_path / place) as log:
            log.write("chatter")
        assert kept is None or (tmp_path / place).read_text() == kept
