"""The shipped recipes, gears and ZeRO JSONs agree, apart from what is refused on purpose."""

import pytest

from gearbox import ROOT
from gearbox.checks import agreement
from gearbox.checks.lengths import MAX_EMPTY_SHARE, nearest_full, rows
from gearbox.checks.subject import Subject
from gearbox.config.gear import gear_names, gear_path, load_gear, read_gear
from gearbox.config.job import BatchPlan, Job
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.planning.gpus import gpu_named

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HEADS = "does not divide this model's 9 attention heads"
PACKED = "packed 4-bit weights cannot be split"
MADE = {"tiny_dpo": ["model.name=recipes/tiny", "model.init=random"]}  # in place of the model that another run makes
REFUSED = {
    ("smollm2_135m", "tp"): HEADS,
    ("smollm2_135m", "fsdp_tp"): HEADS,
    ("smollm2_135m", "ulysses"): HEADS,
    ("dpo_1gpu", "tp"): PACKED,
    ("dpo_1gpu", "fsdp_tp"): PACKED,
    ("qlora_1gpu", "tp"): PACKED,
    ("qlora_1gpu", "fsdp_tp"): PACKED,
}


def test_every_shipped_gear_and_recipe_is_tried():
    assert len(RECIPES) >= 7 and len(gear_names()) >= 15
    assert {name for name, _ in REFUSED} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_shipped_files_agree(recipe):
    for name in gear_names():
        job, findings = agreement.examine(recipe, MADE.get(recipe.stem, []), read_gear(gear_path(name), {}))
        assert job is not None
        texts = [finding.text for finding in findings]
        if job.gear.degree("ep") > 1:  # no shipped recipe has experts
            assert any("there are no experts to divide" in text for text in texts)
            continue
        expected = REFUSED.get((recipe.stem, name))
        if expected is None:
            assert texts == [], name
        else:
            (text,) = texts
            assert expected in text, name


@pytest.mark.parametrize("num_rows", [1, 7, 8, 12, 64, 100])
def test_batches_on_1_to_64_ranks(num_rows):
    """A hint comes exactly if a rank gets nothing or many rows are empty, and what it advises leaves none empty."""
    path, gear = ROOT / "recipes/tiny.yaml", gear_path("ddp")
    recipe = load_recipe(path, [f"batch.rows={num_rows}", "batch.micro_rows=2"])
    for ranks in range(1, 65):
        job = Job.of(path, recipe, load_gear(gear, {"num_processes": str(ranks)}))
        said = [*rows(Subject(path, recipe, job))]
        first_rows = [rank * job.batch.micro_rows for rank in range(ranks)]
        share = job.batch.num_empty_rows / job.batch.num_padded_rows
        assert bool(said) == (max(first_rows) >= num_rows or share >= MAX_EMPTY_SHARE), ranks
        for advised in nearest_full(job.batch, 2).split(" or "):
            assert BatchPlan.divide(int(advised), ranks, 2).num_empty_rows == 0


def test_a_gpu_is_known_by_its_name():
    assert gpu_named("A100-40GB").capability == 8.0
    assert gpu_named("L40S").capability == 8.9
    assert gpu_named("24GB").capability is None
    with pytest.raises(UserError, match=r"--gpu: 'Z9' is unknown"):
        gpu_named("Z9")
