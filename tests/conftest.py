import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
# What tests tokenize is kept for the other tests of this run and nobody else.
CACHE = tempfile.TemporaryDirectory(prefix="gearbox-tests-")
os.environ.update(
    HF_DATASETS_CACHE=CACHE.name,
    OMP_NUM_THREADS="1",
    DS_ACCELERATOR="cpu",
    CUDA_VISIBLE_DEVICES="",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
os.chdir(ROOT)

import json  # noqa: E402

import pytest  # noqa: E402

import train as train_script  # noqa: E402
from gearbox.data import builtin_tasks  # noqa: E402
from ranks import Outcome, run_ranks  # noqa: E402


@pytest.fixture(scope="session")
def chats(tmp_path_factory) -> Path:
    return make_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


def make_chats(path: Path) -> Path:
    """300 chats of uneven length and one to three turns, as a file of messages."""
    documents = builtin_tasks.documents(600)
    joined = [documents[2 * i]["messages"] * (1 + i % 3) + documents[2 * i + 1]["messages"] for i in range(300)]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in joined))
    return path


@pytest.fixture
def train(tmp_path, chats, monkeypatch):
    """Run train.py under a gear on warm forked ranks: train("fsdp", "optim.lr=1e-3", ranks=2) -> Outcome.

    The fresh process that loads the model back costs 5 s; it is left to the runs that ask for it with load_back.
    """

    def call(
        gear: str,
        *overrides: str,
        recipe: str = "recipes/tiny.yaml",
        ranks: int | None = None,
        load_back: bool = False,
        meanwhile=lambda children: None,
    ) -> Outcome:
        if not load_back:
            monkeypatch.setattr(train_script, "ask_saved", lambda *_: "(not asked)")
        small = {
            "run.rehearse": "true", "run.dir": str(tmp_path / "runs"), "data.path": str(chats),
            "batch.rows": "6", "batch.row_tokens": "128", "batch.micro_rows": "1", "train.steps": "3",
            "schedule.warmup": "1", "eval.every": "0", "eval.samples": "0", "optim.master_weights": "fp32",
            "optim.name": "adamw", "save.every": "0",
        }  # fmt: skip
        given = dict(override.split("=", 1) for override in overrides)
        arguments = [recipe, *(f"{key}={value}" for key, value in (small | given).items())]
        return run_ranks(gear, arguments, tmp_path / "runs", ranks, meanwhile)

    return call
