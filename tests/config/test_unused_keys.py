"""Test that a key without effect is named, and that one which would change the method is refused."""

import pytest
import yaml

from gearbox import ROOT
from gearbox.checks.agreement import job_of
from gearbox.config.gear import gear_path, load_gear
from gearbox.config.job import unused_keys_of_data
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from support.corpora import jsonl

BARE = {
    "model": {"name": "recipes/tiny", "init": "random"}, "data": {"path": "builtin:tasks"},
    "batch": {"rows": 4, "row_tokens": 64}, "optim": {"lr": 1e-3}, "train": {"steps": 3},
}  # fmt: skip


def hints_of(tmp_path, *overrides: str) -> list[str]:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(BARE))
    job = job_of(path, list(overrides), (load_gear(gear_path("single")), []))
    assert all(hint.startswith("command line: ") for hint in job.hints)
    return [hint.removeprefix("command line: ") for hint in job.hints]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("adapter.method=none adapter.r=8 adapter.alpha=8", "adapter.r, adapter.alpha: no effect, because adapter.m"),
        ("model.revision=main", "model.revision: no effect, because model.name is a folder"),
        ("data.split=test", "data.split: no effect, because data.path has no splits"),
        ("data.split=test data.path=CHATS", "data.split: no effect"),
        ("data.text_unit=line data.path=CHATS", "data.text_unit: no effect, because data.path has no .txt file"),
        ("eval.fraction=0.1 eval.path=CHATS", "eval.fraction: no effect, because eval.path gives the documents"),
        ("eval.fraction=0 eval.every=5 eval.samples=9", "eval.every, eval.samples: no effect, because no document is"),
        ("preference.beta=0.2", "preference.beta: no effect, because train.objective compares no answers"),
        (
            "train.objective=ipo data.path=PAIRS preference.margin=1",
            "preference.margin: no effect, because train.objective is neither",
        ),
        (
            "train.objective=dpo data.path=PAIRS preference.desirable_weight=2",
            "preference.desirable_weight: no effect, because train",
        ),
        ("schedule.decay=10%", "schedule.decay: no effect, because schedule.name is not wsd"),
        ("perf.prefetch=3", "perf.prefetch: no effect, because it sets how far FSDP2 gathers ahead"),
        ("perf.ddp_compression=bf16", "perf.ddp_compression: no effect, because only DDP sends whole gradients"),
        ("eval.samples=0 eval.sample_tokens=9", "eval.sample_tokens: no effect, because eval.samples is 0"),
    ],
)
def test_a_key_without_effect_is_named(tmp_path, overrides, said):
    chats = jsonl(tmp_path / "chats.jsonl", [{"text": "a"}])
    (hint,) = hints_of(
        tmp_path, *overrides.replace("CHATS", str(chats)).replace("PAIRS", "builtin:preferences").split()
    )
    assert hint.startswith(said)


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "adapter.method=lora adapter.r=8",
        "adapter.method=none",
        "train.objective=kto data.path=builtin:preferences preference.undesirable_weight=2 preference.sft_weight=1",
        "data.split=test data.path=org/data model.revision=main model.name=org/model run.rehearse=true",
        "data.split=test data.path=SAVED",
        "data.text_unit=line data.path=FOLDER",
        "data.text_unit=line data.path=FOLDER/*.txt",
        "eval.fraction=0 eval.samples=0 eval.every=0",
        "eval.every=2 eval.samples=9 eval.sample_tokens=5",
        "eval.fraction=0 eval.samples=9 eval.path=FOLDER",
        "schedule.name=wsd schedule.decay=10%",
    ],
)
def test_keys_with_effect_are_not_named(tmp_path, overrides):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/dataset_dict.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.txt").write_text("text")
    given = overrides.replace("SAVED", f"{tmp_path}/saved").replace("FOLDER", f"{tmp_path}/folder")
    assert hints_of(tmp_path, *given.split()) == []


@pytest.mark.parametrize(
    ("gear", "key"), [("ddp", "perf.ddp_compression=bf16"), ("hsdp", "perf.prefetch=3"), ("ddp", "perf.pass_tokens=64")]
)
def test_a_key_with_effect_under_this_gear_is_not_named(gear, key):
    path = ROOT / "recipes/tiny.yaml"
    assert job_of(path, [key], (load_gear(gear_path(gear)), [])).hints == ()


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_have_no_unused_keys(recipe):
    job = job_of(recipe, ["run.rehearse=true"], (load_gear(gear_path("single")), []))
    assert job.hints == ()


def test_an_adapter_without_a_method_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"command line: adapter.r: is set without adapter.method, so all"):
        hints_of(tmp_path, "adapter.targets=[q_proj]", "adapter.r=16")


def test_keys_for_chats_are_named_if_all_documents_are_text(tmp_path, train):
    (tmp_path / "mine.txt").write_text("Some words.\n\n" * 50)
    path = jsonl(tmp_path / "text.jsonl", [{"text": f"text number {i}"} for i in range(60)])
    outcome = train("ddp", f"data.path={path}", "data.supervise=last", "data.text_unit=line", ranks=2)
    lines = " ".join(outcome.output.split()).split("hint: ")[1:]
    assert len(lines) == 2
    assert "data.text_unit: no effect, because data.path has no .txt file" in lines[0]
    assert "data.supervise: no effect, because all documents are plain text" in lines[1]
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", ["data.supervise=last"])
    assert unused_keys_of_data(recipe, ["text", "messages"]) == []
