"""Test that a teacher's probabilities, written under one gear, train a student equally under others."""

import json

import numpy as np
import pytest
from transformers import LlamaConfig

import teach
from gearbox import ROOT
from gearbox.config.gear import load_gear
from gearbox.distributed.forked_ranks import launcher_environment
from gearbox.model import random_init
from support.ranks import fork_ranks

pytestmark = pytest.mark.ranks
STEPS = 4
EXACT = ("run.rehearse=false", "model.init=pretrained", f"train.steps={STEPS}", "optim.lr=5e-3", "optim.eps=1e-3")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer):
    """Return a model with other sizes than the student."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=260, hidden_size=48, initializer_range=0.3, pad_token_id=0, eos_token_id=3, **shape)
    random_init.write_random(config, tokenizer, 1, folder)
    return folder


@pytest.fixture(scope="module")
def write(tmp_path_factory, chats):
    """Return a function that runs teach.py on forked ranks: write(gear, folder name, *overrides) -> folder."""
    parent = tmp_path_factory.mktemp("written")

    def call(gear: str, name: str, *arguments: str, ranks: int = 1):
        path = ROOT / "accelerate_configs" / f"{gear}.yaml"
        loaded = load_gear(path, {"num_processes": str(ranks)})
        given = ["recipes/tiny.yaml", "--to", str(parent / name), *arguments, "batch.rows=6", "batch.micro_rows=2"]
        given += [f"data.path={chats}", "batch.row_tokens=128", "model.init=pretrained", "train.steps=4"]
        given += ["eval.samples=0"]
        codes, output = fork_ranks(ranks, launcher_environment(path, ranks), lambda: teach.main(given, loaded))
        assert set(codes) == {0}, output
        return parent / name

    return call


def table(folder) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return the ids and log-probabilities of each chunk in a folder of probabilities."""
    found = {}
    for path in sorted(folder.glob("chunks-*.npy")):
        ids, log_probs = (np.load(str(path).replace("chunks-", f"{kind}-")) for kind in ("ids", "log_probs"))
        first = 0
        for key, count in np.load(path).tolist():
            found[key] = ids[first : first + count], log_probs[first : first + count]
            first += count
    return found


def test_a_student_learns_the_same_under_every_gear(train, write, teacher):
    folder = write("ddp", "top", f"model.name={teacher}", "--top=8", ranks=2)
    about = json.loads((folder / "about.json").read_text())
    assert about["top"] == 8 and len(about["files"]) == 6 and not list(folder.parent.glob("top.tmp*"))
    given = (*EXACT, "run.rehearse=false", "model.init=random", "train.objective=distil", f"train.teacher={folder}")
    alone = train("single", *given)
    assert set(alone.codes) == {0}, alone.output
    assert alone.losses[-1] < alone.losses[0]
    for gear, ranks, *changes in (
        ("single", 1, "data.packing=false"),
        ("ddp", 2, "perf.pass_tokens=64"),
        ("fsdp", 2),
        ("zero3", 2),
        ("tp", 2),
        ("pp", 2),
        ("ulysses", 2),
        ("ring", 2),
    ):
        outcome = train(gear, *given, *changes, ranks=ranks)
        assert set(outcome.codes) == {0}, outcome.output
        steps = 1 if changes == ["data.packing=false"] else STEPS  # other rows then
        if steps == STEPS:
            assert outcome.losses == pytest.approx(alone.losses, rel=1e-5), gear


@pytest.fixture(scope="module")
def known(write, teacher):
    """Return what one device writes."""
    return table(write("single", "known", f"model.name={teacher}", "--top=260", "data.packing=false"))


@pytest.mark.parametrize(
    ("gear", "ranks"),
    [("ddp", 2), ("fsdp", 2), ("zero3", 2), ("tp", 2), ("pp", 2), ("ulysses", 2), ("ring", 2), ("fsdp_tp", 4)],
)
def test_every_gear_writes_the_same(write, known, teacher, gear, ranks):
    found = table(write(gear, gear, f"model.name={teacher}", "--top=260", ranks=ranks))
    assert found.keys() == known.keys() and len(known) > 10
    for key, (ids, log_probs) in known.items():
        order, others = np.argsort(ids, 1), np.argsort(found[key][0], 1)
        probs, other = (np.take_along_axis(a, b, 1) for a, b in ((log_probs, order), (found[key][1], others)))
        assert np.allclose(probs, other, atol=1e-4), gear
