"""Cut the power of the disk at several moments of a run: the same command resumes, and what is done stays."""

import random

import pytest

from support import power
from support.faults import STEPS

GIVEN = (*STEPS, "train.steps=4", "eval.every=2", "eval.fraction=0.2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.mark.root
@pytest.mark.skipif(bool(power.missing()), reason=power.missing() or "-")
@pytest.mark.parametrize("seed", [None, 0], ids=["unsynced names are lost", "some are kept"])
def test_a_run_survives_power_cuts(train, tmp_path, whole, seed):
    if not (whole / "x").exists():
        assert train("single", *GIVEN, f"run.dir={whole}").codes == [0]
    draw = None if seed is None else random.Random(seed)
    # Before the model is drawn, before the first checkpoint, after it, near the end, and after the end.
    for cut_at in (15, 62, 105, 95, 0):
        with power.mounted(tmp_path, tmp_path / "mount", cut_at) as server:
            outcome = train("single", *GIVEN, f"run.dir={tmp_path / 'mount'}")
            server.terminate()
            server.wait()
        power.cut_and_restore(tmp_path, draw)
        assert outcome.codes == [-9 if cut_at else 0], outcome.output
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["x"]
    assert power.problems(tmp_path / "disk" / "x", whole / "x") == []


@pytest.mark.root
@pytest.mark.skipif(bool(power.missing()), reason=power.missing() or "-")
def test_a_run_without_checkpoints_that_is_done_survives_a_power_cut(train, tmp_path, whole):
    """No checkpoint has flushed the names above the model, and the metrics."""
    if not (whole / "x").exists():
        assert train("single", *GIVEN, f"run.dir={whole}").codes == [0]
    with power.mounted(tmp_path, tmp_path / "mount") as server:
        outcome = train("single", *GIVEN, "save.every=0", f"run.dir={tmp_path / 'mount' / 'runs'}")
        server.terminate()
        server.wait()
    assert outcome.codes == [0], outcome.output
    power.cut_and_restore(tmp_path)
    assert power.problems(tmp_path / "disk" / "runs" / "x", whole / "x") == ["no valid checkpoint"]
