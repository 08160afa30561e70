"""Test the optimizer: the learning rate of each step, weight decay, and bitsandbytes' AdamW against torch's."""

from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from gearbox import ROOT
from gearbox.config.recipe_values import Optim, Schedule
from gearbox.model.optimizer import learning_rate, make_optimizer


def rates(num_steps: int, **schedule) -> list[float]:
    return [learning_rate(step, num_steps, Optim(lr=0.5), Schedule(**schedule)) for step in range(num_steps)]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_the_warmup_rises_in_equal_parts_to_the_peak(name):
    found = rates(100, name=name, warmup=5)
    assert found[:6] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    assert max(found) == 0.5 and min(found) > 0


def test_the_rate_falls_as_its_name_says():
    cosine, linear = rates(101, name="cosine", warmup=1), rates(101, name="linear", warmup=1)
    assert rates(101, name="constant", warmup=1) == [0.5] * 101
    assert cosine[26] == pytest.approx(0.25 * (1 + 2**-0.5)) and linear[26] == pytest.approx(0.375)
    assert cosine[51] == pytest.approx(0.25) and linear[51] == pytest.approx(0.25)
    assert cosine[-1] == pytest.approx(0.25 * (1 - torch.cos(torch.tensor(torch.pi / 100)).item()), abs=1e-6)
    assert linear[-1] == pytest.approx(0.005)
    for falling in (cosine, linear):
        assert falling[1:] == sorted(falling[1:], reverse=True)


def test_a_stable_rate_falls_linearly_in_its_last_steps():
    found = rates(100, name="wsd", warmup=5, decay=10)
    assert found[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5]) and found[5:91] == [0.5] * 86
    assert found[91:] == pytest.approx([0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05])
    assert rates(100, name="wsd", warmup=5, decay="10%") == found
    assert rates(100, name="wsd") == rates(100, name="wsd", decay="20%") and rates(100, name="wsd")[81] == 0.475
    assert rates(100, name="wsd", warmup=5, decay=0) == rates(100, name="constant", warmup=5)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
@pytest.mark.parametrize(("warmup", "decay"), [(0, "20%"), ("50%", "50%"), (3, 3), ("99%", 1)])
def test_every_step_of_a_short_run_has_a_rate(num_steps, warmup, decay):
    """Shares are rounded up, and the steps of a run of epochs are unknown at first. The warm-up comes first."""
    found = rates(num_steps, name="wsd", warmup=warmup, decay=decay)
    rising = Schedule(warmup=warmup).num_warmup_steps(num_steps)
    assert all(0 < rate <= 0.5 for rate in found)
    assert found[:rising] == rates(num_steps, name="constant", warmup=warmup)[:rising]


def test_without_warmup_the_first_step_has_the_peak():
    assert rates(10, name="cosine")[0] == rates(10, name="linear")[0] == 0.5
    assert rates(1, name="cosine") == [0.5]


def test_biases_norms_and_frozen_weights_do_not_decay():
    model = torch.nn.ModuleDict({"proj": torch.nn.Linear(4, 4), "frozen": torch.nn.Linear(4, 4),
                                 "input_layernorm": torch.nn.LayerNorm(4)})  # fmt: skip
    model["frozen"].requires_grad_(False)
    optim = Optim(lr=0.125, weight_decay=0.25, betas=(0.5, 0.75), eps=1e-3)
    optimizer = make_optimizer(model, optim)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decays = {names[p]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {"proj.weight": 0.25, "proj.bias": 0, "input_layernorm.weight": 0, "input_layernorm.bias": 0}
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.125, (0.5, 0.75), 1e-3)


def groups_of(model: torch.nn.Module) -> dict[str, dict]:
    """Return the optimizer's group of each trained parameter under Muon."""
    optimizer = make_optimizer(model, Optim(name="muon", lr=0.1, weight_decay=0.25))
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: group for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("method", ["tied", "untied", "lora"])
def test_muon_steps_the_matrices_of_layers_and_adamw_the_rest(method):
    config = AutoConfig.from_pretrained(ROOT / "recipes/tiny", tie_word_embeddings=method == "tied")
    model = AutoModelForCausalLM.from_config(config)
    if method == "lora":
        targets = ["q_proj", "down_proj", "lm_head", "embed_tokens"]
        model = get_peft_model(model, LoraConfig(target_modules=targets, modules_to_save=["norm"]))
    groups = groups_of(model)
    assert {*groups} == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, group in groups.items():
        is_outer = any(part in name for part in ("embed", "head", "norm"))
        assert ("momentum" in group) == (not is_outer), name
        assert group["weight_decay"] == (0 if "norm" in name else 0.25), name


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (16, 80)])
def test_a_step_of_muon_is_torchs(shape):
    """Torch orthogonalizes in bfloat16, which rounds each number to 8 bits."""
    torch.manual_seed(0)
    ours = torch.nn.Linear(*shape, bias=False)
    theirs = deepcopy(ours)
    before = ours.weight.clone()
    numbers = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = make_optimizer(ours, Optim(name="muon", **numbers))
    reference = torch.optim.Muon(theirs.parameters(), adjust_lr_fn="match_rms_adamw", **numbers)
    for _ in range(5):
        ours.weight.grad = torch.randn_like(before)
        theirs.weight.grad = ours.weight.grad.clone()
        optimizer.step()
        reference.step()
    moved, far = (theirs.weight - before).norm(), (ours.weight - theirs.weight).norm()
    assert far < 0.02 * moved
    assert {*optimizer.state[ours.weight]} == {"momentum_buffer"}


def test_under_muon_the_rest_has_the_steps_of_adamw():
    torch.manual_seed(0)
    ours = torch.nn.ModuleList([torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)])
    theirs = deepcopy(ours)
    numbers = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}
    pair = [
        (ours, make_optimizer(ours, Optim(name="muon", **numbers))),
        (theirs, make_optimizer(theirs, Optim(**numbers))),
    ]
    pair[0][1].load_state_dict(pair[0][1].state_dict())  # as accelerate does; it replaces groups and state
    for _ in range(3):
        for model, optimizer in pair:
            optimizer.zero_grad()
            model[2](model[1](model[0](torch.arange(5)))).pow(3).sum().backward()
            theirs[1].weight.grad = None if model is theirs else theirs[1].weight.grad
            optimizer.step()
        ours[1].load_state_dict(theirs[1].state_dict())
    for name in ("0.weight", "1.bias", "2.weight", "2.bias"):
        assert torch.equal(ours.get_parameter(name), theirs.get_parameter(name)), name


@pytest.mark.parametrize("name", ["adamw", "paged_adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_bitsandbytes_adamw_equals_torchs(name):
    """This also holds on a CPU. The 8-bit optimizers are close but not equal."""
    torch.manual_seed(0)
    ours = torch.nn.Linear(64, 128)
    theirs = deepcopy(ours)
    numbers = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}
    pair = [
        (ours, make_optimizer(ours, Optim(name=name, **numbers))),
        (theirs, make_optimizer(theirs, Optim(**numbers))),
    ]
    for _ in range(20):
        inputs, targets = torch.randn(32, 64), torch.randn(32, 128)
        for model, optimizer in pair:
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
    far = (ours.weight - theirs.weight).abs().max().item()
    assert far < 1e-6 if "8bit" not in name else 1e-5 < far < 1e-2
