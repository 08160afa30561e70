"""Test adapters and added tokens: which layers are adapted, and that mismatches are refused by name."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gearbox.config.adapter_settings import saved_adapter_settings
from gearbox.config.job import rehearsed
from gearbox.config.loader import load_recipe
from gearbox.config.recipe import Adapter
from gearbox.errors import UserError
from gearbox.model import adapters, loading, random_init
from gearbox.model.optimizer import make_optimizer
from support.methods import ADDED_TOKENS, METHODS, short, two_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def adapter(train, folder, tmp_path):
    """Return a copy of a run's saved adapter, which a test may damage."""
    started = folder / "started"
    if not started.exists():
        given = (f"model.name={folder / 'tied'}", "model.init=pretrained", "run.rehearse=false", "optim.lr=1e-2")
        outcome = train("single", *given, *METHODS["lora"], *ADDED_TOKENS, recipe=str(short(folder)))
        assert outcome.codes == [0], outcome.output
        shutil.copytree(outcome.folder / "model", started)
    return shutil.copytree(started, tmp_path / "adapter")


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
    tokens = ADDED_TOKENS[0]
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
    assert rows and all(torch.equal(made[name], t) for name, t in rows.items()), "the saved rows, not a new mean"
    save_file(kept | {"base_model.model.model.layers.7.mlp.lora_A.weight": torch.zeros(1)}, adapter / adapters.WEIGHTS)
    with pytest.raises(UserError, match=r"the model has no \S+layers\.7"):
        loaded(folder / "tied", recipe_with(adapter, tokens))


def test_other_tokens_than_it_was_trained_with_are_refused(adapter, folder):
    for given in ("[]", "[ab, sort]", "[sort, ab, cd]", "[ab, sort, cd, ef]"):
        with pytest.raises(UserError, match=r"model.add_tokens: is .* was trained with \['ab', 'sort', 'cd'\]"):
            loaded(folder / "tied", recipe_with(adapter, f"model.add_tokens={given}"))
    plain = {n: t for n, t in load_file(adapter / adapters.WEIGHTS).items() if "lora_" in n}
    save_file(plain, adapter / adapters.WEIGHTS)
    with pytest.raises(UserError, match="was trained without added tokens; remove them, or train a new adapter"):
        loaded(folder / "tied", recipe_with(adapter, *ADDED_TOKENS))


def test_all_linear_must_be_all_linear_layers(adapter, folder):
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["target_modules"].remove("up_proj")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert "up_proj" not in recipe_with(adapter, *ADDED_TOKENS).adapter.targets
    given = recipe_with(adapter, *ADDED_TOKENS, "adapter.targets=all-linear")
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
    assert str(caught.value).endswith(f"in {adapter}; remove the key to use the saved value")


def test_settings_that_are_the_same_may_be_given(adapter):
    bare = recipe_with(adapter).adapter
    given = ("adapter.method=lora", "adapter.r=16", "adapter.alpha=32", "adapter.dropout=0.1", "adapter.rslora=false")
    assert recipe_with(adapter, *given).adapter == bare.model_copy(update={"dropout": 0.1})
    assert (bare.method, bare.r, bare.alpha, bare.dropout) == ("lora", 16, 32, 0)
    assert sorted(bare.targets)[:2] == ["down_proj", "embed_tokens"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "has peft_type IA3; only LoRA and DoRA adapters can be used here"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save: ['lm_head'], which is not supported"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights: 'pissa', which is not supported; merge the"),
        ({"bias": "all"}, "has bias: 'all'"),
        ({"peft_type": None}, "has peft_type None"),
        ("[1]", "is not a PEFT adapter: "),
        ("pickled", "has no adapter_model.safetensors, and pickled weights could run code"),
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
    assert f"adapter.path: {str(adapter)!r} {said}" in str(caught.value) and "\n" not in str(caught.value)


def test_an_adapter_of_the_hub(adapter, monkeypatch, tmp_path):
    import huggingface_hub

    with pytest.raises(UserError, match=r"'org/x' is not a local folder; for a Hub adapter, also set adapter\.method"):
        recipe_with(adapter, "adapter.path=org/x")
    recipe = recipe_with(adapter, "adapter.path=org/x", "adapter.method=lora")
    with pytest.raises(
        UserError, match=r"adapter.path: 'org/x' is not a local folder and could not be downloaded from the Hub"
    ):
        adapters.download_adapter(recipe)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(adapter))
    brought = adapters.download_adapter(recipe).adapter
    assert brought == saved_adapter_settings(Adapter(path=str(adapter)), adapter)
    with pytest.raises(UserError, match=r"adapter\.method: is 'dora', but 'lora' in"):
        adapters.download_adapter(recipe_with(adapter, "adapter.path=org/x", "adapter.method=dora"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.add_tokens=[<|end|>]"], "model.add_tokens: '<|end|>' is already a token of .*; remove it"),
        (["adapter.method=lora", "adapter.targets=[nothing_such]"], r"adapter\.targets: no module .* 'nothing_such'$"),
        (
            ["adapter.method=lora", "adapter.targets=[q_proj, v_porj, xyz]"],
            r"no module of the model is named 'v_porj'; did you mean 'v_proj'\? or 'xyz'$",
        ),
        (["adapter.method=lora", "adapter.targets=.*nothing"], r"adapter\.targets: .*\.\*nothing"),
        (["adapter.method=dora", "adapter.targets=[q_proj, lm_head]"], "remove the head, or use adapter.method=lora"),
    ],
)
def test_errors_that_need_the_loaded_model(folder, overrides, said):
    recipe = recipe_with(folder / "tied", "adapter.path=null", *overrides)
    with pytest.raises(UserError, match=said):
        loaded(folder / "tied", recipe)


def test_names_of_any_depth_and_of_experts_match(folder, tmp_path):
    given = ("adapter.path=null", "adapter.method=lora", "adapter.targets=[layers.1.mlp.up_proj, self_attn.q_proj]")
    made = loaded(folder / "tied", recipe_with(folder / "tied", *given))
    adapted = {
        name.removeprefix("base_model.model.") for name, _ in made.named_modules() if name.endswith(".base_layer")
    }
    assert adapted == {
        f"model.layers.{n}.base_layer" for n in ("1.mlp.up_proj", "0.self_attn.q_proj", "1.self_attn.q_proj")
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained("recipes/tiny")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        **shape, num_key_value_heads=2, num_local_experts=2, vocab_size=len(tokenizer), pad_token_id=0
    )
    random_init.write_random(config, tokenizer, 0, tmp_path / "mixtral")
    experts = ("adapter.path=null", "adapter.method=lora", "adapter.targets=[q_proj, w1, w2, w3]")
    made = loaded(tmp_path / "mixtral", recipe_with(folder / "tied", *experts))
    assert any("experts" in name and "lora_A" in name for name, _ in made.named_parameters())
    with pytest.raises(UserError, match="no module of the model is named 'w4'"):
        loaded(tmp_path / "mixtral", recipe_with(folder / "tied", *experts[:2], "adapter.targets=[w1, w2, w3, w4]"))


def test_a_saved_adapter_may_name_modules_of_other_families(adapter, folder):
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["target_modules"].append("query_key_value")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    loaded(folder / "tied", recipe_with(adapter, ADDED_TOKENS[0]))


@pytest.mark.parametrize(("gear", "ranks"), [("pp", 2), ("zero3", 2)])
def test_each_target_is_looked_for_in_the_complete_model(train, gear, ranks):
    lora = ("adapter.method=lora", "adapter.targets=[q_proj, nothing]")
    refused = train(gear, *lora, ranks=ranks)
    assert set(refused.codes) == {2} and "no module of the model is named 'nothing'" in refused.output, refused.output
    kept = train(gear, lora[0], "adapter.targets=[layers.0.self_attn.q_proj, layers.1.mlp.up_proj]", ranks=ranks)
    assert set(kept.codes) == {0}, kept.output
    partly = train(gear, lora[0], "adapter.targets=[layers.0.self_attn.q_proj]", ranks=ranks)
    if gear == "pp":
        assert 2 in partly.codes and "adapter.targets: a pipeline stage has none of these modules" in partly.output
    else:
        assert set(partly.codes) == {0}, partly.output


def test_padding_rows_are_taken_for_added_tokens_before_the_embedding_grows(folder):
    recipe = recipe_with(folder / "untied", "adapter.path=null", *ADDED_TOKENS)
    tokenizer = loading.load_tokenizer(recipe.model, None, False)
    padded = transformers.AutoModelForCausalLM.from_pretrained(folder / "untied")
    padded.resize_token_embeddings(300, mean_resizing=False)
    adapters.add_tokens(padded, tokenizer, recipe.model.add_tokens)
    for layer in (padded.get_input_embeddings(), padded.get_output_embeddings()):
        assert layer.weight.shape == (300, 64)
        assert torch.allclose(layer.weight[260:263], layer.weight[:260].mean(0).expand(3, -1), atol=1e-6)
        assert not torch.allclose(layer.weight[263], layer.weight[:260].mean(0), atol=1e-3)


def test_a_regular_expression_of_targets_gets_embedding_and_head_too(folder):
    given = ("adapter.path=null", "adapter.method=lora", *ADDED_TOKENS, "adapter.targets=.*q_proj")
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
    """The backward pass recomputes the head and must drop the same values, or the gradient is wrong."""
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
    adapter_settings = recipe_with(adapter, *ADDED_TOKENS).adapter
    assert rehearsed(recipe_with(adapter, *ADDED_TOKENS)).adapter == adapter_settings.model_copy(update={"path": None})
