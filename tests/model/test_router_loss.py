"""Test the load-balancing loss: value and gradient follow the definition, in any micro-batch."""

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers

from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.model import loading, loss, probes, random_init, router_loss
from gearbox.rows.units import IGNORE_INDEX
from support.experts import CHOSEN, EXPERTS, FAMILIES, LAYERS, SMALL, TOKENIZER, WEIGHT, config_of


def make(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    """Return three rows: a full one, one padded after its last target, and one without targets."""
    torch.manual_seed(1)
    labels = torch.randint(1, 260, (3, 19)).masked_fill(torch.rand(3, 19) < 0.3, IGNORE_INDEX)
    labels[1, 11:] = IGNORE_INDEX
    labels[1, 10] = 7
    labels[2] = IGNORE_INDEX
    rows = torch.randint(1, 260, (3, 19))
    return {"input_ids": rows, "labels": labels, "position_ids": torch.arange(19).repeat(3, 1)}


def plain(untouched: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cross entropy and imbalance from transformers' outputs, token by token and expert by expert."""
    given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    outputs = untouched(**given, output_router_logits=True)
    assert len(outputs.router_logits) == LAYERS
    labels = batch["labels"]
    lost = []
    for row, targets in enumerate(labels):
        places = (targets != IGNORE_INDEX).nonzero().flatten().tolist()
        if not places:
            continue
        tokens = range(places[-1] + 1)
        for logits in outputs.router_logits:
            probabilities = logits.view(*labels.shape, EXPERTS)[row].softmax(-1)
            for expert in range(EXPERTS):
                share = sum(expert in probabilities[t].topk(CHOSEN).indices for t in tokens) / len(tokens)
                mean = sum(probabilities[t, expert] for t in tokens) / len(tokens)
                lost.append(EXPERTS * share * mean * len(places) / LAYERS)
    entropy = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return entropy, torch.stack(lost).sum()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_load_of_experts_counts_the_tokens_that_chose_them(family, batch, checkpointing):
    untouched, installed = make(family), make(family)
    given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    all_logits = untouched(**given, output_router_logits=True).router_logits
    expected = torch.zeros(LAYERS, EXPERTS)
    for layer, logits in enumerate(all_logits):
        for row, length in ((0, 19 - batch["labels"][0].flip(0).ne(IGNORE_INDEX).int().argmax()), (1, 11)):
            chosen = logits.view(3, 19, EXPERTS)[row, :length].topk(CHOSEN).indices
            expected[layer] += chosen.flatten().bincount(minlength=EXPERTS)
    loss.install_loss(installed, 0)
    if checkpointing:
        installed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.no_grad():
        installed(**batch)  # an evaluation does not count
    installed(**batch).backward()
    loads = router_loss.pop_loads(installed)
    assert torch.equal(loads, expected * (1 + checkpointing)), "a layer computed twice counts twice"
    assert not router_loss.pop_loads(installed).any()
    fullest = expected.max(1).values / expected.mean(1)
    assert router_loss.imbalance(loads, EXPERTS) == pytest.approx(fullest.mean().item())
    halves = expected.view(LAYERS, 2, -1).sum(2)
    assert router_loss.imbalance(loads, 2) == pytest.approx((halves.max(1).values / halves.mean(1)).mean().item())


@pytest.mark.parametrize("asked", [None, 0.5, 0])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_is_cross_entropy_and_the_weighted_imbalance(family, batch, asked, checkpointing):
    entropy, imbalance = plain(make(family), batch)
    installed = make(family)
    loss.install_loss(installed, asked)
    if checkpointing:
        installed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weight = WEIGHT if asked is None else asked
    assert router_loss.router_weight(installed) == weight
    found = installed(**batch)
    assert torch.allclose(found, entropy + weight * imbalance, rtol=1e-5)
    assert abs(found / entropy - 1) > 1e-3 or not weight, "otherwise the test would prove nothing"
    found.backward()
    assert router_loss.pop_router_loss(installed).item() == pytest.approx(imbalance.item() if weight else 0, rel=1e-5)
    assert router_loss.pop_router_loss(installed).item() == 0
    with torch.no_grad():
        each, _ = installed(**batch)
    assert torch.allclose(each.sum(), entropy, rtol=1e-5), "evaluation excludes the router loss"
    probes.check_loss(installed, installed, 260, torch.device("cpu"), tolerance=1e-4)


def test_its_gradient_equals_the_plain_one(family, batch):
    untouched, installed = make(family), make(family)
    loss.install_loss(installed)
    entropy, imbalance = plain(untouched, batch)
    (entropy + WEIGHT * imbalance).backward()
    installed(**batch).backward()
    right = dict(untouched.named_parameters())
    for name, parameter in installed.named_parameters():
        assert (parameter.grad - right[name].grad).abs().max() <= 1e-4 * right[name].grad.abs().max(), name
    without = make(family)
    loss.install_loss(without, 0)
    without(**batch).backward()
    ours, others = (one.model.layers[0].mlp.gate.weight.grad for one in (installed, without))
    assert (ours - others).abs().max() > 1e-3


def test_rows_have_the_same_imbalance_in_any_micro_batch(family, batch):
    """The loss in transformers depends on the micro-batch: it is one value over all tokens."""
    installed = make(family)
    loss.install_loss(installed)
    whole = installed(**batch)
    parts = [installed(**{name: tensor[row : row + 1] for name, tensor in batch.items()}) for row in range(3)]
    assert torch.allclose(sum(parts), whole, rtol=1e-6)
    narrow = {name: tensor[1:2, :11] for name, tensor in batch.items()}  # without its padding
    assert torch.allclose(installed(**narrow), parts[1], rtol=1e-6)


def test_with_adapters(family, batch):
    adapted = make(family)
    entropy, imbalance = plain(make(family), batch)
    adapted = peft.get_peft_model(adapted, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    loss.install_loss(adapted)
    assert torch.allclose(adapted(**batch), entropy + WEIGHT * imbalance, rtol=1e-5)


def test_a_dense_model_has_none_and_refuses_one():
    config = transformers.LlamaConfig(**{key: SMALL[key] for key in list(SMALL)[:7]})
    dense = transformers.LlamaForCausalLM(config)
    loss.install_loss(dense)
    assert router_loss.router_weight(dense) == 0
    loss.install_loss(dense, 0)
    with pytest.raises(UserError, match=r"model\.router_loss: llama is not a mixture of experts .*; set it to null"):
        loss.install_loss(dense, 0.01)


def test_experts_are_not_quantized(family, tmp_path):
    random_init.write_random(config_of(family), TOKENIZER, 0, tmp_path / "base")
    base = str(tmp_path / "base")
    overrides = [f"model.name={base}", "adapter.method=lora", "model.quantize=nf4"]
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", overrides)
    with pytest.raises(UserError, match=r"quantizes linear layers, but most weights of .* are experts"):
        loading.load(base, recipe, TOKENIZER, "no")
