"""Test that a teacher's probabilities are found by the content of chunks, and that wrong folders are refused."""

import json

import numpy as np
import pytest
import torch

from gearbox.config.job import BatchPlan
from gearbox.errors import UserError
from gearbox.rows.batches import make_step_batch
from gearbox.rows.teacher import ABOUT, PartWriter, Teacher, TeacherFacts, table_of
from gearbox.rows.units import IGNORE_INDEX
from support.documents import Made, random_documents

TOP, LENGTHS = 3, [20, 7, 31, 12, 16, 9, 28]


def invented(batch) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and log-probabilities that tell which token they belong to."""
    tokens = batch["input_ids"].numpy()[..., None]
    return (tokens + np.arange(TOP)).astype(np.int32), -(
        tokens + batch["position_ids"].numpy()[..., None] + np.arange(TOP + 1)
    ) / 7


def written(folder, rows, num_parts: int = 2) -> TeacherFacts:
    """Write what a teacher could say, in parts of alternate rows."""
    folder.mkdir()
    files = {}
    for part in range(num_parts):
        own = [*range(len(rows))[part::num_parts]]
        writer = PartWriter(folder, part, int(rows.targets[own].sum()), TOP)
        for row in own:
            batch = rows.batch([row])
            writer.add(rows, batch, *invented(batch))
        files |= writer.close()
    facts = TeacherFacts("weights", "tokens", TOP, len(table_of(folder, files)), int(rows.targets.sum()), files)
    facts.write(folder / ABOUT)
    return facts


@pytest.fixture
def documents() -> Made:
    return random_documents(LENGTHS)


def reversed_documents(documents: Made) -> Made:
    order = range(len(documents))[::-1]
    return Made([documents.tokens(i).tolist() for i in order], [documents.loss_mask(i).tolist() for i in order])


def test_found_in_other_rows_and_in_another_order(tmp_path, documents):
    written(tmp_path / "known", documents.rows(40))
    facts = TeacherFacts.read(tmp_path / "known")
    assert facts.damaged(tmp_path / "known", [*facts.files]) is None
    for rows in (documents.rows(40), documents.rows(64), reversed_documents(documents).rows(40)):
        rows.teacher = Teacher(tmp_path / "known", facts, rows)
        ids = [*range(len(rows))]
        (batch,) = make_step_batch(rows, ids, 0, BatchPlan.divide(len(ids), 1, len(ids))).micro_batches
        is_target = (batch["labels"] != IGNORE_INDEX).numpy()
        expected = invented(batch)
        assert is_target.sum() == rows.targets.sum() > 20
        assert np.array_equal(batch["teacher_ids"].numpy()[is_target], expected[0][is_target])
        log_probs = batch["teacher_log_probs"].view(torch.float32).numpy()
        assert np.array_equal(log_probs[is_target], expected[1][is_target].astype(np.float32))
        assert not batch["teacher_ids"].numpy()[~is_target].any() and not log_probs[~is_target].any()


def test_other_documents_are_refused(tmp_path, documents, monkeypatch):
    monkeypatch.setattr(Made, "location", lambda self, document: f"made:{document}", raising=False)
    facts = written(tmp_path / "known", documents.rows(40))
    tokens, masks = (
        [one(i).tolist() for i in range(len(documents))] for one in (documents.tokens, documents.loss_mask)
    )
    tokens[3][5] += 1
    masks[4][6] ^= 1
    for changed, missing in ((Made(tokens, masks), 2), (random_documents(LENGTHS, seed=1), len(LENGTHS))):
        rows = changed.rows(40)
        with pytest.raises(UserError, match=rf"lacks {missing} of 7 pieces .*rows cut elsewhere .*src/teach\.py"):
            Teacher(tmp_path / "known", facts, rows)


def test_damaged_folders_are_refused(tmp_path, documents):
    folder, rows = tmp_path / "known", documents.rows(40)
    with pytest.raises(UserError, match=r"train\.teacher: .* does not exist"):
        TeacherFacts.read(folder)
    facts = written(folder, rows)
    name, about = "log_probs-00001.npy", (folder / ABOUT).read_text()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "log_probs-00001.npy is damaged; write it again" in str(facts.damaged(folder, [name]))
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"{name} has .* bytes, not"):
        TeacherFacts.read(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        TeacherFacts.read(folder)
    (folder / name).write_bytes(content)
    changes = [{"format": 2}, {"top": 0}, {"top": "3"}, {"files": []}, {"files": {"../x": {}}}, {"teacher": None}]
    for change in changes:
        (folder / ABOUT).write_text(json.dumps(json.loads(about) | change))
        with pytest.raises(UserError, match=r"about\.json.*src/teach\.py"):
            TeacherFacts.read(folder)
    for text in ("", "[]", "\x00", '{"format": 1}'):
        (folder / ABOUT).write_text(text)
        with pytest.raises(UserError, match=r"about\.json"):
            TeacherFacts.read(folder)
    (folder / ABOUT).unlink()
    with pytest.raises(UserError, match=r"is not complete: it has no about\.json"):
        TeacherFacts.read(folder)


def test_arrays_of_other_shapes_are_refused(tmp_path, documents):
    facts = written(tmp_path / "known", documents.rows(40))
    for file, array in (("ids", np.zeros((4, TOP), "<i4")), ("chunks", np.zeros((0, 3), "<u8"))):
        path = tmp_path / "known" / f"{file}-00000.npy"
        kept = path.read_bytes()
        np.save(path, array)
        with pytest.raises(UserError, match="another shape"):
            Teacher(tmp_path / "known", facts, documents.rows(40))
        np.save(path, np.array([{}], object), allow_pickle=True)
        with pytest.raises(UserError, match="missing or damaged"):
            Teacher(tmp_path / "known", facts, documents.rows(40))
        path.write_bytes(kept)
