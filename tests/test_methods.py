"""Every method trains the same under every gear, is loaded back as it was, and goes on from where it was left."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gearbox import ROOT
from gearbox.config.adapter_settings import saved_adapter_settings
from gearbox.config.loader import load_recipe, rehearsed
from gearbox.config.recipe import Adapter
from gearbox.data import batches, splits
from gearbox.data.corpus import load_corpora
from gearbox.errors import UserError
from gearbox.model import adapters, export, loading, loss, random_init
from gearbox.model.optimizer import make_optimizer

STEPS = 4
GIVEN = (
    "optim.lr=1e-2", "optim.eps=1e-3", "optim.max_grad_norm=0.5", f"train.steps={STEPS}", "eval.fraction=0.05",
    "run.rehearse=false", "model.init=pretrained",
)  # fmt: skip
TOKENS = ("model.add_tokens=[ab, sort, cd]",)  # in answers, in questions, in both
UNTIED = ("model.name=untied",)
METHODS = {
    "dora": ("adapter.method=dora", "model.gradient_checkpointing=true"),
    "qdora": ("adapter.method=dora", "model.quantize=nf4"),
    "full, tokens": TOKENS,
    "lora, tokens": ("adapter.method=lora", *TOKENS),
    "rslora, tokens, untied": ("adapter.method=lora", "adapter.rslora=true", *TOKENS, *UNTIED),
    "continued": ("adapter.path=started/model", *TOKENS),
    "paged": ("optim.name=paged_adamw",),
    "8-bit": ("optim.name=adamw_8bit",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two small models, one with a head of its own."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
    for name, is_tied in (("tied", True), ("untied", False)):
        config = random_init.shrink_config(transformers.AutoConfig.from_pretrained(ROOT / "recipes/tiny"), tokenizer)
        config.tie_word_embeddings, config.initializer_range = is_tied, 0.2
        random_init.write_random(config, tokenizer, 0, folder / name)
    return folder


@pytest.fixture(scope="module")
def made():
    """What was run already, by gear and method."""
    return {}


@pytest.fixture
def run(train, folder, made):
    """run(gear, method, override, ...): two ranks, or the single one that they are held against."""

    def call(gear, method, *overrides):
        if not overrides and (gear, method) in made:
            return made[gear, method]
        if "continued" in method and not (folder / "started").exists():
            shutil.copytree(call("single", "lora, tokens").folder, folder / "started")
        given = dict(item.split("=", 1) for item in ("model.name=tied", *GIVEN, *METHODS[method], *overrides))
        for key in ("model.name", "adapter.path"):
            if key in given:
                given[key] = str(folder / given[key])
        # The default recipe gives every key; what an adapter says is given nowhere else.
        recipe, ranks = str(short(folder)), 1 if gear == "single" else 2
        outcome = train(gear, *(f"{key}={value}" for key, value in given.items()), recipe=recipe, ranks=ranks)
        assert set(outcome.codes) == {0}, outcome.output
        outcome.kept = outcome.losses, outcome.weights, [line["eval_loss"] for line in outcome.lines("eval_loss")]
        if not overrides:
            made[gear, method] = outcome
        return outcome

    return call


def short(folder):
    recipe = folder / "short.yaml"
    if not recipe.exists():
        recipe.write_text("model: {name: tied}\ndata: {path: x}\nbatch: {rows: 8, row_tokens: 8}\noptim: {lr: 1}\n")
    return recipe


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


def test_8_bit_states_in_other_blocks_are_near(run):
    assert_same(run("fsdp", "8-bit"), run("single", "8-bit"), weight_tolerance=1e-2)


def test_added_tokens_are_trained(run, folder):
    """Each new row moves, in the embedding and in the head, tied or not."""
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
def test_loaded_back_it_has_the_loss_that_it_was_saved_with(run, chats, folder, method):
    outcome = run("fsdp", method)
    loaded, tokenizer = export.load_for_answers(outcome.folder / "model")
    assert tokenizer.tokenize("sort abcd") == (["sort", "Ġ", "ab", "cd"] if "tokens" in method else list("sortĠabcd"))
    assert tokenizer.decode(tokenizer("sort").input_ids, skip_special_tokens=True) == "sort"
    loss.install_loss(loaded)
    given = ("eval.fraction=0.05", f"data.path={chats}", "batch.row_tokens=128", "eval.samples=0")
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", list(given))
    documents, evaluated = load_corpora(recipe, tokenizer)
    rows = splits.split_and_pack(recipe, documents, evaluated, tokenizer, True).held_out
    batch = rows.batch(list(range(len(rows))))
    batch.pop("document_ids")
    with torch.no_grad():
        losses, _ = loaded(**batch)
    mean = losses.sum().item() / (batch["labels"] != batches.IGNORE_INDEX).sum().item()
    assert mean == pytest.approx(outcome.kept[2][-1], rel=1e-5)
    assert abs(mean - outcome.kept[2][0]) > 1e-3


@pytest.mark.parametrize("method", ["qdora", "lora, tokens"])
def test_what_is_continued_starts_where_it_was_left(run, folder, method):
    first = run("single", method)
    second = run("zero2", method, f"adapter.path={first.folder}/model", "train.steps=2")
    assert second.kept[2][0] == pytest.approx(first.kept[2][-1], rel=1e-5)
    assert first.kept[2][0] != pytest.approx(first.kept[2][-1], rel=1e-3)
    saved = [json.loads((r.folder / "model/adapter_config.json").read_text()) for r in (first, second)]
    for key in ("r", "lora_alpha", "use_dora", "use_rslora", "peft_type"):
        assert saved[0][key] == saved[1][key]
    assert sorted(saved[0]["target_modules"]) == sorted(saved[1]["target_modules"])


def test_a_continued_run_resumes_from_itself_and_notices_another_start(run, folder):
    run("single", "continued")  # makes what it starts from
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
        with pytest.raises(AssertionError, match=r"trained upon other weights than model.name, or adapter.path, has"):
            run("single", "continued", *given, "train.steps=6", "run.name=cut", "run.resume=latest")
    finally:
        save_file(kept, file, metadata={"format": "pt"})


# --------------------------------------------------------------------------- what does not fit


@pytest.fixture
def adapter(run, folder, tmp_path):
    """A copy of one that was saved, to be spoilt."""
    run("single", "continued")  # makes what it starts from
    return shutil.copytree(folder / "started/model", tmp_path / "adapter")


def recipe_with(path, *overrides):
    return load_recipe(short(path.parent), [
        "model.name=recipes/tiny", "data.path=builtin:tasks", "train.steps=9", f"adapter.path={path}", *overrides,
    ])  # fmt: skip


def loaded(base, recipe):
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(base)})})
    tokenizer = loading.load_tokenizer(recipe.model, None, False)
    adapters.check_tokens(recipe, tokenizer)
    return loading.load(str(base), recipe, tokenizer, "no")


def test_weights_that_do_not_fit_are_refused_in_one_line(adapter, folder):
    tokens = TOKENS[0]
    loaded(folder / "tied", recipe_with(adapter, tokens))
    kept = load_file(adapter / adapters.WEIGHTS)
    for change, said in [
        (lambda name, t: t[:, :-1] if "q_proj.lora_A" in name else t, "size mismatch for .*q_proj.lora_A"),
        (
            lambda name, t: t[:-1] if "base_layer" in name else t,
            r"\S+embed_tokens.base_layer.weight is \[262, 64\] there",
        ),
        (lambda name, t: None if "0.mlp.up_proj.lora_B" in name else t, "it lacks .*0.mlp.up_proj.lora_B"),
    ]:
        changed = {name: change(name, t) for name, t in kept.items()}
        save_file({n: t.contiguous() for n, t in changed.items() if t is not None}, adapter / adapters.WEIGHTS)
        with pytest.raises(UserError, match=rf"^adapter\.path: \S+ does not fit the model: {said}[^\n]*$"):
            loaded(folder / "tied", recipe_with(adapter, tokens))
    rows = {name: t + 1 for name, t in kept.items() if "base_layer" in name}
    save_file(kept | rows, adapter / adapters.WEIGHTS)
    made = dict(loaded(folder / "tied", recipe_with(adapter, tokens)).named_parameters())
    assert rows and all(torch.equal(made[name], t) for name, t in rows.items()), "its own rows, not their mean anew"
    save_file(kept | {"base_model.model.model.layers.7.mlp.lora_A.weight": torch.zeros(1)}, adapter / adapters.WEIGHTS)
    with pytest.raises(UserError, match=r"there is no \S+layers\.7"):
        loaded(folder / "tied", recipe_with(adapter, tokens))


def test_other_tokens_than_it_was_trained_with_are_refused(adapter, folder):
    for given in ("[]", "[ab, sort]", "[sort, ab, cd]", "[ab, sort, cd, ef]"):
        with pytest.raises(UserError, match=r"model.add_tokens: is .* was trained with \['ab', 'sort', 'cd'\]"):
            loaded(folder / "tied", recipe_with(adapter, f"model.add_tokens={given}"))
    plain = {n: t for n, t in load_file(adapter / adapters.WEIGHTS).items() if "lora_" in n}
    save_file(plain, adapter / adapters.WEIGHTS)
    with pytest.raises(UserError, match="was trained without added tokens; take them out, or train a new adapter"):
        loaded(folder / "tied", recipe_with(adapter, *TOKENS))


def test_all_linear_must_be_all_linear_layers(adapter, folder):
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["target_modules"].remove("up_proj")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert "up_proj" not in recipe_with(adapter, *TOKENS).adapter.targets
    given = recipe_with(adapter, *TOKENS, "adapter.targets=all-linear")
    with pytest.raises(
        UserError, match=r"adapter\.targets: is all-linear, but .* leaves out model.layers.0.mlp.up_proj"
    ):
        loaded(folder / "tied", given)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["adapter.r=8"], "adapter.r: is 8, but 16 in"),
        (["adapter.alpha=8"], "adapter.alpha: is 8.0, but 32"),
        (["adapter.method=dora"], "adapter.method: is 'dora', but 'lora' in"),
        (["adapter.method=none"], "adapter.method: is 'none', but 'lora' in"),
        (["adapter.rslora=true"], "adapter.rslora: is True, but False in"),
        (["adapter.targets=[q_proj]"], "adapter.targets: is ['q_proj'], but ["),
    ],
)
def test_settings_that_differ_are_refused_by_name(adapter, overrides, said):
    with pytest.raises(UserError) as caught:
        recipe_with(adapter, *overrides)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith(f"in {adapter}, which holds; take the key out")


def test_settings_that_are_the_same_may_be_given(adapter):
    bare = recipe_with(adapter).adapter
    given = ("adapter.method=lora", "adapter.r=16", "adapter.alpha=32", "adapter.dropout=0.1", "adapter.rslora=false")
    assert recipe_with(adapter, *given).adapter == bare.model_copy(update={"dropout": 0.1})
    assert (bare.method, bare.r, bare.alpha, bare.dropout) == ("lora", 16, 32, 0)
    assert sorted(bare.targets)[:2] == ["down_proj", "embed_tokens"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "is of the kind IA3; only LoRA and DoRA can be gone on with"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save: ['lm_head'], which cannot be trained here"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights: 'pissa', which cannot be trained here; merge it"),
        ({"bias": "all"}, "has bias: 'all'"),
        ({"peft_type": None}, "is of the kind None"),
        ("[1]", "holds no adapter: there is no adapter_config.json of PEFT"),
        ("pickled", "holds no adapter_model.safetensors, and pickled weights could run code"),
    ],
)
def test_kinds_that_cannot_be_trained_are_refused(adapter, change, said):
    settings = adapter / "adapter_config.json"
    if isinstance(change, dict):
        settings.write_text(json.dumps(json.loads(settings.read_text()) | change))
    elif change == "pickled":
        (adapter / adapters.WEIGHTS).rename(adapter / "adapter_model.bin")
    else:
        settings.write_text(change)
    with pytest.raises(UserError) as caught:
        recipe_with(adapter)
    assert f"adapter.path: {str(adapter)!r} {said}" in str(caught.value)


def test_an_adapter_of_the_hub(adapter, monkeypatch, tmp_path):
    import huggingface_hub

    with pytest.raises(UserError, match=r"'org/x' is no folder here; for an adapter of the hub give adapter\.method"):
        recipe_with(adapter, "adapter.path=org/x")
    recipe = recipe_with(adapter, "adapter.path=org/x", "adapter.method=lora")
    with pytest.raises(UserError, match=r"adapter.path: 'org/x' is neither a folder here nor to be had from the hub"):
        adapters.download_adapter(recipe)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(adapter))
    brought = adapters.download_adapter(recipe).adapter
    assert brought == saved_adapter_settings(Adapter(path=str(adapter)), adapter)
    with pytest.raises(UserError, match=r"adapter\.method: is 'dora', but 'lora' in"):
        adapters.download_adapter(recipe_with(adapter, "adapter.path=org/x", "adapter.method=dora"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.add_tokens=[<|end|>]"], "model.add_tokens: '<|end|>' is a token of .* already; take it out"),
        (["adapter.method=lora", "adapter.targets=[nothing_such]"], r"adapter\.targets: .*nothing_such"),
        (["adapter.method=dora", "adapter.targets=[q_proj, lm_head]"], "take the head out, or use adapter.method=lora"),
    ],
)
def test_what_only_the_model_can_tell(folder, overrides, said):
    recipe = recipe_with(folder / "tied", "adapter.path=null", *overrides)
    with pytest.raises(UserError, match=said):
        loaded(folder / "tied", recipe)


def test_padding_rows_are_taken_for_added_tokens_before_the_embedding_grows(folder):
    recipe = recipe_with(folder / "untied", "adapter.path=null", *TOKENS)
    tokenizer = loading.load_tokenizer(recipe.model, None, False)
    padded = transformers.AutoModelForCausalLM.from_pretrained(folder / "untied")
    padded.resize_token_embeddings(300, mean_resizing=False)
    adapters.add_tokens(padded, tokenizer, recipe.model.add_tokens)
    for layer in (padded.get_input_embeddings(), padded.get_output_embeddings()):
        assert layer.weight.shape == (300, 64)
        assert torch.allclose(layer.weight[260:263], layer.weight[:260].mean(0).expand(3, -1), atol=1e-6)
        assert not torch.allclose(layer.weight[263], layer.weight[:260].mean(0), atol=1e-3)


def test_a_regular_expression_of_targets_gets_embedding_and_head_too(folder):
    given = ("adapter.path=null", "adapter.method=lora", *TOKENS, "adapter.targets=.*q_proj")
    made = loaded(folder / "tied", recipe_with(folder / "tied", *given))
    adapted = {name.split(".")[-2] for name, _ in made.named_modules() if name.endswith(".base_layer")}
    assert adapted == {"q_proj", "embed_tokens", "lm_head"}


@pytest.mark.parametrize(("rslora", "scaling"), [("false", 2.0), ("true", 8.0)])
def test_rslora_scales_by_the_root_of_the_rank(folder, rslora, scaling):
    given = ("adapter.path=null", "adapter.method=lora", "adapter.r=16", f"adapter.rslora={rslora}")
    made = loaded(folder / "tied", recipe_with(folder / "tied", *given))
    layer = made.get_base_model().model.layers[1].self_attn.q_proj
    assert layer.scaling["default"] == scaling


def test_dropout_on_an_adapted_head_is_drawn_once(folder):
    """Recomputed in the backward pass, the head must drop what it dropped: else the gradient is of another loss."""
    given = ("adapter.path=null", "adapter.method=lora", "adapter.targets=[lm_head]", "adapter.dropout=0.5")
    made = loaded(folder / "untied", recipe_with(folder / "untied", *given))
    weight = made.get_output_embeddings().lora_B["default"].weight
    torch.nn.init.normal_(weight)
    tokens = torch.arange(4, 36)[None]

    def at(offset):
        torch.manual_seed(0)
        with torch.no_grad():
            weight[7, 3] += offset
        return made(input_ids=tokens, labels=tokens.roll(-1, 1))

    at(0).backward()
    slope = (at(1e-2) - at(-2e-2)).item() / 2e-2
    assert slope == pytest.approx(weight.grad[7, 3].item(), rel=2e-2)
    assert abs(slope) > 1e-3


def test_magnitudes_do_not_decay(folder):
    given = ("adapter.path=null", "adapter.method=dora", "optim.weight_decay=0.1")
    recipe = recipe_with(folder / "tied", *given)
    made = loaded(folder / "tied", recipe)
    names = {id(p): name for name, p in made.named_parameters()}
    for group in make_optimizer(made, recipe.optim).param_groups:
        kinds = {"magnitude" in names[id(p)] for p in group["params"]}
        assert kinds == {group["weight_decay"] == 0}


def test_a_rehearsal_keeps_the_settings_and_draws_the_weights(adapter):
    adapter_settings = recipe_with(adapter, *TOKENS).adapter
    assert rehearsed(recipe_with(adapter, *TOKENS)).adapter == adapter_settings.model_copy(update={"path": None})
