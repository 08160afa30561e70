"""Test that every method trains the same under every gear, reloads as it was saved, and resumes where it stopped."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.data.corpus import Builder, load_corpora
from gearbox.model import loading, loss
from gearbox.rows import arranged, units
from support.methods import ADDED_TOKENS, METHODS, short, two_models

STEPS = 4
GIVEN = (
    "optim.lr=1e-2", "optim.eps=1e-3", "optim.max_grad_norm=0.5", f"train.steps={STEPS}", "eval.fraction=0.05",
    "run.rehearse=false", "model.init=pretrained",
)  # fmt: skip
UNTIED = ("model.name=untied",)
CASES = {
    "dora": (*METHODS["dora"], "perf.checkpointing=full"),
    "qdora": METHODS["qdora"],
    "full, tokens": ADDED_TOKENS,
    "lora, tokens": (*METHODS["lora"], *ADDED_TOKENS),
    "rslora, tokens, untied": (*METHODS["lora"], "adapter.rslora=true", *ADDED_TOKENS, *UNTIED),
    "continued": ("adapter.path=started/model", *ADDED_TOKENS),
    "paged": ("optim.name=paged_adamw",),
    "8-bit": ("optim.name=adamw_8bit",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def made():
    """Return the runs made so far, by gear and method."""
    return {}


@pytest.fixture
def run(train, folder, made):
    """Return run(gear, method, override, ...), which uses two ranks, or one rank for the reference gear."""

    def call(gear, method, *overrides):
        if not overrides and (gear, method) in made:
            return made[gear, method]
        if "continued" in method and not (folder / "started").exists():
            shutil.copytree(call("single", "lora, tokens").folder, folder / "started")
        given = dict(item.split("=", 1) for item in ("model.name=tied", *GIVEN, *CASES[method], *overrides))
        for key in ("model.name", "adapter.path"):
            if key in given:
                given[key] = str(folder / given[key])
        recipe, ranks = str(short(folder)), 1 if gear == "single" else 2
        outcome = train(gear, *(f"{key}={value}" for key, value in given.items()), recipe=recipe, ranks=ranks)
        assert set(outcome.codes) == {0}, outcome.output
        outcome.kept = outcome.losses, outcome.weights, [line["eval_loss"] for line in outcome.lines("eval_loss")]
        if not overrides:
            made[gear, method] = outcome
        return outcome

    return call


def assert_same(outcome, reference, loss_tolerance=1e-4, weight_tolerance=1e-4):
    (losses, weights, looks), (their_losses, their_weights, their_looks) = outcome.kept, reference.kept
    assert len(losses) == STEPS
    assert losses + looks == pytest.approx(their_losses + their_looks, rel=loss_tolerance)
    assert weights.keys() == their_weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(tensor, their_weights[name], rtol=0, atol=weight_tolerance), name


@pytest.mark.parametrize(
    ("gear", "method"),
    [
        *((gear, "dora") for gear in ("ddp", "fsdp", "zero2", "zero3")),
        *((gear, "qdora") for gear in ("ddp", "fsdp", "zero2")),
        *((gear, "full, tokens") for gear in ("fsdp", "zero3")),
        *((gear, "lora, tokens") for gear in ("fsdp", "zero3")),
        *((gear, "rslora, tokens, untied") for gear in ("fsdp", "zero3")),
        *((gear, "continued") for gear in ("ddp", "fsdp", "zero2", "zero3")),
        *((gear, "paged") for gear in ("zero2", "zero3")),
    ],
)
def test_same_as_on_one_device(run, gear, method):
    assert_same(run(gear, method), run("single", method))


def test_8_bit_states_in_other_blocks_are_close(run):
    assert_same(run("fsdp", "8-bit"), run("single", "8-bit"), weight_tolerance=1e-2)


def test_added_tokens_are_trained(run, folder):
    """Training moves each new row of the embedding and of the head, tied or untied."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tied")
    ids = list(range(len(tokenizer), len(tokenizer) + 3))
    before = load_file(folder / "tied/model.safetensors")["model.embed_tokens.weight"]
    full = run("single", "full, tokens").kept[1]["model.embed_tokens.weight"]
    assert full.shape == (len(tokenizer) + 3, before.shape[1])
    assert all((full[i] - before.mean(0)).abs().max() > 1e-3 for i in ids)
    for method in ("lora, tokens", "rslora, tokens, untied"):
        weights = run("single", method).kept[1]
        rows = weights["base_model.model.model.embed_tokens.base_layer.weight"]
        start = load_file(folder / method.replace("lora, tokens", "tied").split(", ")[-1] / "model.safetensors")
        assert torch.equal(rows[: ids[0]], start["model.embed_tokens.weight"])
        assert all(torch.allclose(rows[i], rows[: ids[0]].mean(0), atol=1e-6) for i in ids)
        assert (weights["base_model.model.model.embed_tokens.lora_embedding_A"][:, ids] != 0).any(0).all()
        assert (weights["base_model.model.lm_head.lora_B.weight"][ids] != 0).any(1).all()


@pytest.mark.parametrize("method", ["dora", "lora, tokens", "rslora, tokens, untied", "full, tokens"])
def test_a_reloaded_model_has_the_loss_it_was_saved_with(run, chats, folder, method):
    outcome = run("fsdp", method)
    loaded, tokenizer = loading.load_for_answers(outcome.folder / "model")
    assert tokenizer.tokenize("sort abcd") == (["sort", "Ġ", "ab", "cd"] if "tokens" in method else list("sortĠabcd"))
    assert tokenizer.decode(tokenizer("sort").input_ids, skip_special_tokens=True) == "sort"
    loss.install_loss(loaded)
    given = ("eval.fraction=0.05", f"data.path={chats}", "batch.row_tokens=128", "eval.samples=0")
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", list(given))
    documents, evaluated = load_corpora(recipe, tokenizer)
    rows = arranged.split_and_pack(recipe, documents, evaluated, tokenizer, True, Builder()).held_out
    batch = rows.batch(list(range(len(rows))))
    batch.pop("chunk_ids")
    with torch.no_grad():
        losses, _ = loaded(**batch)
    mean = losses.sum().item() / (batch["labels"] != units.IGNORE_INDEX).sum().item()
    assert mean == pytest.approx(outcome.kept[2][-1], rel=1e-5)
    assert abs(mean - outcome.kept[2][0]) > 1e-3


@pytest.mark.parametrize("method", ["qdora", "lora, tokens"])
def test_a_continued_adapter_starts_at_its_saved_loss(run, folder, method):
    first = run("single", method)
    second = run("zero2", method, f"adapter.path={first.folder}/model", "train.steps=2")
    assert second.kept[2][0] == pytest.approx(first.kept[2][-1], rel=1e-5)
    assert first.kept[2][0] != pytest.approx(first.kept[2][-1], rel=1e-3)
    saved = [json.loads((r.folder / "model/adapter_config.json").read_text()) for r in (first, second)]
    for key in ("r", "lora_alpha", "use_dora", "use_rslora", "peft_type"):
        assert saved[0][key] == saved[1][key]
    assert sorted(saved[0]["target_modules"]) == sorted(saved[1]["target_modules"])


def test_a_continued_run_resumes_from_itself_and_notices_a_changed_adapter(run, folder):
    run("single", "continued")  # creates the adapter it starts from
    given = ("schedule.name=constant", "schedule.warmup=0", "save.every=2")
    whole = run("single", "continued", *given, "train.steps=4", "run.name=whole")
    run("single", "continued", *given, "train.steps=2", "run.name=cut")
    last = run("single", "continued", *given, "train.steps=4", "run.name=cut", "run.resume=latest")
    assert last.kept[0] == whole.kept[0]
    for name, tensor in last.kept[1].items():
        assert torch.equal(tensor, whole.kept[1][name]), name
    file = folder / "started/model/adapter_model.safetensors"
    kept = load_file(file)
    try:
        save_file(kept | {name: t + 1e-3 for name, t in kept.items() if "lora_B" in name}, file)
        with pytest.raises(AssertionError, match=r"trained on other base weights: model.name or adapter.path has"):
            run("single", "continued", *given, "train.steps=6", "run.name=cut", "run.resume=latest")
    finally:
        save_file(kept, file, metadata={"format": "pt"})
