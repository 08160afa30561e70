"""Define the fixtures that every test may use. The test folders match src/gearbox; support/ contains shared helpers."""

from support.environment import ROOT  # isort: skip  first, since it sets variables that other imports read

import resource
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import pytest
from transformers import AutoTokenizer

from gearbox.checkpoint.train_state import TrainState
from support import bucket, kinds, ledger
from support.documents import make_chats
from support.ranks import Outcome, loaded_back_warm, run_ranks, skip_loading_back

kinds.watch_processes()
hypothesis.settings.register_profile("any machine", deadline=None)  # no test depends on speed
hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)  # before -m selects tests
def pytest_collection_modifyitems(items):
    for item in items:
        fixtures = set(item.fixturenames)
        if not any(item.get_closest_marker(kind) for kind in kinds.KINDS):
            item.add_marker(kinds.kind_of(fixtures))
        if fixtures & kinds.NEED_ROOT:
            item.add_marker("root")
        found = [kind for kind in kinds.KINDS if item.get_closest_marker(kind)]
        if len(found) != 1:
            raise pytest.UsageError(f"{item.nodeid}: is marked as {' and '.join(found)}; a test has exactly one kind")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    kinds.running = next(kind for kind in kinds.KINDS if item.get_closest_marker(kind))
    try:
        return (yield)
    finally:
        kinds.running = None


@pytest.fixture(scope="session")
def chats(tmp_path_factory) -> Path:
    return make_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


@pytest.fixture(scope="module")
def tokenizer():
    """Return the byte tokenizer of recipes/tiny."""
    return AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")


@pytest.fixture
def train(tmp_path, chats, monkeypatch):
    """Return a function that runs train.py under a gear on warm forked ranks.

    train("fsdp", "optim.lr=1e-3", ranks=2) -> Outcome

    Only runs with load_back reload the saved model, in a forked process. A fresh one takes 5 s: load_back="cold".
    """

    def call(
        gear: str,
        *overrides: str,
        recipe: str = "recipes/tiny.yaml",
        ranks: int | None = None,
        load_back: bool | str = False,
        meanwhile=lambda children: None,
    ) -> Outcome:
        if not load_back:
            skip_loading_back(monkeypatch)
        small = {
            "run.rehearse": "true", "run.dir": str(tmp_path / "runs"), "data.path": str(chats),
            "batch.rows": "6", "batch.row_tokens": "128", "batch.micro_rows": "1", "train.steps": "3",
            "schedule.warmup": "1", "eval.every": "0", "eval.samples": "0", "optim.master_weights": "fp32",
            "optim.name": "adamw", "save.every": "0",
        }  # fmt: skip
        given = dict(override.split("=", 1) for override in overrides)
        arguments = [recipe, *(f"{key}={value}" for key, value in (small | given).items())]
        with loaded_back_warm(monkeypatch) if load_back is True else nullcontext():
            return run_ranks(gear, arguments, tmp_path / "runs", ranks, meanwhile)

    return call


@pytest.fixture
def books(tmp_path, monkeypatch):
    """Make every rank forked from here on keep a step ledger. Return a function that starts new ledgers.

    That function returns another one, which reads the ledgers.
    """
    monkeypatch.setattr(TrainState, "advance", TrainState.advance)  # restored after the test
    ledger.install()

    def begin(name: str):
        folder = tmp_path / "ledgers" / name
        folder.mkdir(parents=True)
        monkeypatch.setenv(ledger.VARIABLE, str(folder))
        return lambda: ledger.read(folder)

    return begin


@pytest.fixture
def limit_of_file_size():
    """Yield a function that sets RLIMIT_FSIZE, which simulates a full disk without root."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.fixture
def mounted(tmp_path):
    """Return a function that mounts a bucket: mounted(**behaviour) -> context. Its content is in tmp_path / "held"."""
    if reason := bucket.missing():
        pytest.skip(reason)
    return lambda **behaviour: bucket.mounted(
        tmp_path / "held", tmp_path / "runs", **{"refuses": bucket.LIKE_S3} | behaviour
    )
