"""Test that a rehearsal is short by itself, keeps what the command line gives, and still accumulates and packs."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import yaml

from gearbox import ROOT
from gearbox.config.gear import gear_path, load_gear
from gearbox.config.job import Job
from gearbox.config.loader import load_recipe
from gearbox.reporting.plan import shortened

LARGE = {
    "model": {"name": "org/model"}, "data": {"path": "org/data"}, "batch": {"rows": 64, "row_tokens": 2048},
    "optim": {"lr": 1e-5}, "schedule": {"warmup": 50}, "train": {"steps": 500},
}  # fmt: skip


@pytest.fixture
def rehearse(tmp_path):
    """Return a function that gives the job of a large recipe with overrides: rehearse("batch.rows=16", gear="ddp")."""

    def call(*overrides: str, gear: str = "fsdp", ranks: int = 2, **changes) -> Job:
        path = tmp_path / "large.yaml"
        path.write_text(
            yaml.safe_dump({group: LARGE.get(group, {}) | changes.get(group, {}) for group in LARGE | changes})
        )
        recipe = load_recipe(path, [*overrides, "run.rehearse=true"])
        return Job.of(path, recipe, load_gear(gear_path(gear), {"num_processes": str(ranks)}))

    return call


def test_a_rehearsal_is_short_and_says_so(rehearse):
    job = rehearse(batch={"micro_rows": 8})
    recipe = job.recipe
    assert (recipe.batch.rows, recipe.batch.row_tokens, recipe.train.steps, recipe.schedule.warmup) == (8, 256, 20, 5)
    assert (job.batch.accumulation_steps, job.batch.micro_rows) == (2, 2)
    assert [*shortened(recipe, job.full_size)] == [
        "8 rows x 256 tokens instead of 64 x 2,048",
        "20 steps instead of 500",
    ]


@pytest.mark.parametrize(("ranks", "rows"), [(1, 8), (2, 8), (4, 8), (8, 16), (32, 64), (64, 64)])
@pytest.mark.parametrize("micro_rows", [1, 3, 64])
def test_every_rank_accumulates_if_the_recipe_has_the_rows(rehearse, ranks, rows, micro_rows):
    job = rehearse(gear="ddp" if ranks > 1 else "single", ranks=ranks, batch={"micro_rows": micro_rows})
    assert job.batch.rows == rows
    assert job.batch.accumulation_steps >= (2 if rows < 64 else 1)


@pytest.mark.parametrize("given", ["batch.rows=32", "batch.row_tokens=512", "batch.micro_rows=4", "train.steps=100"])
def test_what_the_command_line_gives_stays(rehearse, given):
    key, value = given.split("=")
    group, name = key.split(".")
    assert getattr(getattr(rehearse(given).recipe, group), name) == int(value)


def test_epochs_become_steps_unless_they_are_given(rehearse):
    in_file = rehearse(train={"steps": None, "epochs": 3})
    assert (in_file.recipe.train.steps, in_file.recipe.train.epochs) == (20, None)
    assert [*shortened(in_file.recipe, in_file.full_size)][1] == "20 steps instead of 3 epochs"
    given = rehearse("train.epochs=3").recipe.train
    assert (given.steps, given.epochs) == (None, 3)


def test_a_small_recipe_keeps_its_sizes(rehearse):
    job = rehearse(batch={"rows": 4, "row_tokens": 64}, train={"steps": 3}, schedule={"warmup": 1})
    assert job.recipe.batch == job.full_size.batch and job.recipe.train == job.full_size.train
    assert [*shortened(job.recipe, job.full_size)] == []


def test_a_warm_up_longer_than_the_rehearsal_is_cut(rehearse):
    assert rehearse("train.steps=2").recipe.schedule.warmup == 0
    assert rehearse(schedule={"warmup": "5%"}).recipe.schedule.warmup == "5%"


@pytest.mark.parametrize("gpus", ["", "0"])
def test_what_needs_a_gpu_and_its_package_is_left_out_elsewhere(rehearse, monkeypatch, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    for package in ("liger_kernel", "torchao", "flash_attn"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
        sys.modules[package].__spec__ = ModuleSpec(package, None)
    fast = {"perf": {"kernels": "liger", "float8": True}, "model": {"attention": "flash_attention_2"}}
    recipe = rehearse(**fast).recipe
    found = (recipe.perf.kernels, recipe.perf.float8, recipe.model.attention)
    assert found == (("liger", True, "flash_attention_2") if gpus else ("auto", False, "auto"))


def test_documents_of_the_user_are_not_cut_shorter(rehearse):
    recipe = rehearse(f"data.path={ROOT}/recipes/chats.jsonl").recipe
    assert (recipe.batch.rows, recipe.batch.row_tokens) == (8, 2048)


def test_any_other_run_has_its_full_size(tmp_path):
    path = ROOT / "recipes/fsdp_2gpu.yaml"
    job = Job.of(path, load_recipe(path), load_gear(gear_path("fsdp"), {}))
    assert job.full_size is None and job.recipe == load_recipe(path)
