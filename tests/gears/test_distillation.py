"""Test that a teacher's probabilities, written under one gear, train a student equally under others."""

import json
import math
import os
import signal

import numpy as np
import pytest
from transformers import LlamaConfig

import teach
from gearbox import ROOT, filesystem
from gearbox.config.gear import load_gear
from gearbox.distributed.forked_ranks import launcher_environment
from gearbox.errors import UserError
from gearbox.generation import teaching
from gearbox.model import random_init
from gearbox.rows.teacher import TeacherFacts
from support.ranks import fork_ranks

pytestmark = pytest.mark.ranks
STEPS = ("train.steps=4", "optim.lr=5e-3", "optim.eps=1e-3", "run.rehearse=false", "model.init=random")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer):
    """Return a model with other sizes than the student."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=260, hidden_size=48, initializer_range=0.3, pad_token_id=0, eos_token_id=3, **shape)
    random_init.write_random(config, tokenizer, 1, folder)
    return folder


@pytest.fixture
def write(tmp_path, chats):
    """Return a function that runs teach.py on forked ranks: write(gear, folder name, *overrides) -> folder."""

    def call(gear: str, name: str, *arguments: str, ranks: int = 1, code: int = 0, says: str = ""):
        path = ROOT / "accelerate_configs" / f"{gear}.yaml"
        loaded = load_gear(path, {"num_processes": str(ranks)})
        given = ["recipes/tiny.yaml", "--to", str(tmp_path / name), *arguments, "batch.rows=6", "batch.micro_rows=2"]
        given += [f"data.path={chats}", "batch.row_tokens=128", "model.init=pretrained", "train.steps=4"]
        given += ["eval.samples=0"]
        codes, output = fork_ranks(ranks, launcher_environment(path, ranks), lambda: teach.main(given, loaded))
        assert (code in codes if code < 0 else set(codes) == {code}) and says in output, output
        return tmp_path / name

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


def test_one_teacher_for_every_gear(train, write, teacher, monkeypatch):
    """Write under two gears, and train under three on what the first wrote. Parts have 1, 2, 4, 8 and 6 portions."""
    monkeypatch.setattr(teaching, "PART_SECONDS", math.inf)
    folder = write("ddp", "known", f"model.name={teacher}", "--top=260", ranks=2)
    about = json.loads((folder / "about.json").read_text())
    assert len(about["files"]) == 6 * 5 and [*folder.parent.glob("known*")] == [folder]
    assert_same(table(folder), table(write("pp", "other", f"model.name={teacher}", "--top=260", ranks=2)))
    given = ("train.objective=distil", f"train.teacher={folder}", *STEPS)
    alone = train("single", *given)
    assert set(alone.codes) == {0} and alone.losses[-1] < alone.losses[0], alone.output
    for gear in ("fsdp", "pp"):
        outcome = train(gear, *given, ranks=2)
        assert set(outcome.codes) == {0}, outcome.output
        assert outcome.losses == pytest.approx(alone.losses, rel=1e-5), gear


def test_a_folder_that_another_process_fills_is_left_alone(write, teacher, tmp_path):
    lock = filesystem.Lock(tmp_path / "known.lock", 0)
    write("ddp", "known", f"model.name={teacher}", ranks=2, code=2, says="another process is filling")
    lock.release()
    assert [path.name for path in tmp_path.glob("known*")] == ["known.lock"]


def test_a_folder_that_cannot_appear_keeps_its_parts(write, teacher, tmp_path, monkeypatch):
    usual = filesystem.rename

    def rename(source, target):
        if target.name == "known":
            raise OSError(28, "No space left on device")
        usual(source, target)

    with monkeypatch.context() as here:
        here.setattr(filesystem, "rename", rename)
        write("single", "known", f"model.name={teacher}", code=2, says="No space left")
    folder = write("single", "known", f"model.name={teacher}", says="resuming: 121 of 121 rows")
    assert not (folder / teaching.PARTS).exists() and len(table(folder)) > 10


@pytest.mark.parametrize("renames", [True, False])
def test_a_killed_command_resumes_under_another_gear(write, teacher, tmp_path, monkeypatch, renames):
    """Parts are small. The command is killed after the third list of parts, and a file of the second is damaged."""
    whole = table(write("single", "whole", f"model.name={teacher}", "--top=5"))
    monkeypatch.setattr(teaching, "PART_SECONDS", 0)
    if not renames:
        monkeypatch.setattr(filesystem, "rename_problem", lambda _: "cannot rename folders")
    partial, usual = tmp_path / ("known.partial" if renames else "known"), teaching._add
    with monkeypatch.context() as here:

        def add_and_die(*given):
            facts, is_short = usual(*given)
            if len(facts.files) >= 18:  # three on each rank
                (partial / "ids-00099.npy").write_bytes(b"not listed")
                os.kill(os.getpid(), signal.SIGKILL)
            return facts, is_short

        here.setattr(teaching, "_add", add_and_die)
        write("ddp", "known", f"model.name={teacher}", "--top=5", ranks=2, code=-9)
    with pytest.raises(UserError, match="does not exist" if renames else "is not complete"):
        TeacherFacts.read(tmp_path / "known")
    assert len([*partial.glob("*.npy")]) == 19
    (partial / "ids-00002.npy").write_bytes((partial / "ids-00003.npy").read_bytes())
    write("single", "known", f"model.name={teacher}", "--top=6", code=2, says="another teacher or --top")
    folder = write("single", "known", f"model.name={teacher}", "--top=5", says="resuming: 14 of ")
    assert_same(table(folder), whole)
    assert {path.name for path in tmp_path.glob("known*")} == {"known"}
    facts = TeacherFacts.read(folder)
    assert facts.damaged(folder, [*facts.files]) is None and {*facts.files} == {
        path.name for path in folder.glob("*.npy")
    }


def assert_same(found, known) -> None:
    """Compare the probabilities of each token, whatever their order."""
    assert found.keys() == known.keys() and len(known) > 10
    for key, (ids, log_probs) in known.items():
        order, others = np.argsort(ids, 1), np.argsort(found[key][0], 1)
        probs, other = (np.take_along_axis(a, b, 1) for a, b in ((log_probs, order), (found[key][1], others)))
        assert np.allclose(probs, other, atol=1e-4)


def test_a_student_equal_to_its_teacher_has_no_loss(train, write, teacher):
    """The teacher saw packed documents, and the student sees one in a row."""
    folder = write("single", "known", f"model.name={teacher}", "--top=260")
    given = (f"model.name={teacher}", "run.rehearse=false", "model.init=pretrained", "train.objective=distil")
    for change in ("data.packing=true", "data.packing=false"):
        outcome = train("single", *given, f"train.teacher={folder}", change, "train.steps=2")
        assert set(outcome.codes) == {0}, outcome.output
        assert abs(outcome.losses[0]) < 1e-5 and outcome.lines("grad_norm")[0]["grad_norm"] < 1e-4
