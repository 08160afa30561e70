"""Test that layers with LoRA compute what PEFT's layers compute, and that PEFT computes what ours cannot."""

import copy

import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gearbox.kernels.install import install_kernels, installed_kernels
from gearbox.kernels.lora import _Lora
from support.small_models import assert_close, errors, gradients, saved_bytes, small_model


def with_lora(family: str = "llama", dtype=torch.float32, **options):
    """Return a small model with LoRA on all linear layers, whose second matrices are not zero."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options
    model = peft.get_peft_model(small_model(family, dtype), peft.LoraConfig(**options)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture
def calls(monkeypatch):
    """Count the layers that our function computes."""
    found = []
    real = _Lora.forward

    def forward(*arguments):
        found.append(1)
        return real(*arguments)

    monkeypatch.setattr(_Lora, "forward", staticmethod(forward))
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", {}),  # biases
        ("gemma3_text", {}),
        ("phi3", {}),
        ("gpt2", {"fan_in_fan_out": True}),  # its base computes the product
        ("llama", {"use_rslora": True}),
        ("llama", {"target_modules": ["q_proj", "down_proj"]}),
        ("llama", {"modules_to_save": ["lm_head"]}),
    ],
)
def test_a_family_with_lora_computes_the_same(family, options, calls):
    theirs = with_lora(family, **options)
    ours = copy.deepcopy(theirs)
    install_kernels(ours)
    assert "LoRA" in installed_kernels(ours)
    exact = gradients(theirs)
    assert_close(gradients(ours), exact)
    assert calls
    assert errors(gradients(ours, autocast=True), exact) <= 1.3 * errors(gradients(theirs, autocast=True), exact)


def test_a_base_in_bf16_keeps_fp32_adapters(calls):
    theirs = with_lora(dtype=torch.bfloat16)
    ours = copy.deepcopy(theirs)
    install_kernels(ours)
    exact = gradients(copy.deepcopy(theirs).float())
    computed = gradients(ours, autocast=True)
    assert len(calls) == 14
    assert {gradient.dtype for name, gradient in computed[1].items() if "lora" in name} == {torch.float32}
    assert errors(computed, exact) <= 1.3 * errors(gradients(theirs, autocast=True), exact)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True, "target_modules": ["q_proj"]}])
def test_variants_of_lora_are_left_to_peft(options, calls):
    theirs = with_lora("qwen2", **options)
    ours = copy.deepcopy(theirs)
    install_kernels(ours)
    assert "LoRA" not in installed_kernels(ours)
    assert_close(gradients(ours), gradients(theirs))
    assert not calls


def test_dropout_is_left_to_peft(calls):
    theirs = with_lora(lora_dropout=0.5)
    ours = copy.deepcopy(theirs)
    install_kernels(ours)
    for model in (theirs, ours):
        model.train()
    torch.manual_seed(0)
    exact = gradients(theirs)
    torch.manual_seed(0)
    assert_close(gradients(ours), exact)
    assert not calls


def merge(model):
    model.merge_adapter()


def disable(model):
    model.base_model.disable_adapter_layers()
    model.get_input_embeddings().weight.requires_grad_()


def add_another(model):
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])


def shard(model):
    """Empty each small matrix but during its own call, as an engine does that shards weights by hooks."""
    for name, module in model.named_modules():
        if ".lora_" in name and type(module) is nn.Linear:
            module.whole, module.weight.data = module.weight.data, torch.empty(0)
            module.register_forward_pre_hook(lambda module, _: setattr(module.weight, "data", module.whole))


@pytest.mark.parametrize("change", [merge, disable, add_another, shard])
def test_a_layer_that_changes_later_is_left_to_peft(change, calls):
    theirs = with_lora()
    ours = copy.deepcopy(theirs)
    install_kernels(ours)
    torch.manual_seed(0)
    change(ours)
    torch.manual_seed(0)
    if change is not shard:
        change(theirs)
    ids = torch.arange(3, 19)[None]
    assert torch.allclose(ours(ids, use_cache=False).logits, theirs(ids, use_cache=False).logits, atol=1e-5)
    assert not calls


def test_merging_afterwards_gives_the_same_weights():
    theirs = with_lora()
    ours = copy.deepcopy(theirs)
    install_kernels(ours)
    merged, expected = (model.merge_and_unload().state_dict() for model in (ours, theirs))
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


def keep_products(_context, operation, *_, **__):
    is_kept = operation.name().startswith(("aten::mm", "aten::addmm", "aten::linear", "gearbox::"))
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("options", [{}, {"context_fn": lambda: create_selective_checkpoint_contexts(keep_products)}])
def test_checkpointing_changes_no_bit(options, calls):
    model = with_lora()
    install_kernels(model)
    usual = gradients(model)
    for block in model.base_model.model.model.layers:
        block.forward = lambda *arguments, forward=block.forward, **more: checkpoint(
            forward, *arguments, use_reentrant=False, **options, **more
        )
    again = gradients(model)
    assert len(calls) > 28
    assert all(torch.equal(usual[1][name], again[1][name]) for name in usual[1])


def test_a_compiled_model_computes_the_same():
    model = with_lora()
    exact = gradients(model)
    install_kernels(model)
    block = model.base_model.model.model.layers[0]
    block.forward = torch.compile(block.forward, backend="eager", fullgraph=True)
    assert_close(gradients(model), exact)


def test_only_the_inputs_of_norms_and_activations_are_saved():
    model = with_lora().base_model.model
    model.set_attn_implementation("sdpa")
    before = saved_bytes(model)
    install_kernels(model)
    of_layer = 2 * 32 + 32 + 2 * 16 + 32 + 2 * 48 + 7 * 4  # as without LoRA, and seven inner products of rank 4
    others = 2 + 4 + 16
    assert saved_bytes(model) <= 4 * (2 * (of_layer + others) + 32 + 1 + 2 * 8)
    assert before > 1.4 * saved_bytes(model)


def test_4_bit_weights_keep_their_own_product(calls):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    quantized = bnb.nn.Linear4bit(64, 64, bias=True, compute_dtype=torch.float32, quant_type="nf4")
    theirs = peft.get_peft_model(
        nn.Sequential(quantized.to("cpu")), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"])
    )
    nn.init.normal_(theirs.base_model.model[0].lora_B["default"].weight)
    inputs = torch.randn(2, 5, 64, requires_grad=True)
    results = []
    for _ in range(2):
        theirs.zero_grad()
        inputs.grad = None
        y = theirs.base_model.model(inputs)
        y.square().sum().backward()
        results.append([y, inputs.grad, *(p.grad for p in theirs.parameters() if p.grad is not None)])
        install_kernels(theirs)
        assert installed_kernels(theirs) == "1 LoRA"
    assert len(calls) == 1 and len(results[0]) == 4
    for ours, exact in zip(*results, strict=True):
        assert torch.allclose(ours, exact, rtol=1e-5, atol=1e-4)
