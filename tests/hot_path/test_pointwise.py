"""Test that the families' models compute the same with our norms, activations and linear layers."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gearbox.kernels.install import install_kernels, installed_kernels
from support.small_models import assert_close, errors, gradients, saved_bytes, small_model

FAMILIES = {
    "llama": "5 RMSNorm, 2 gated MLP, 14 linear",
    "qwen2": "5 RMSNorm, 2 gated MLP, 14 linear",
    "qwen3": "9 RMSNorm, 2 gated MLP, 14 linear",  # norms of the heads
    "mistral": "5 RMSNorm, 2 gated MLP, 14 linear",
    "gemma": "5 RMSNorm, 2 gated MLP, 14 linear",
    "gemma2": "9 RMSNorm, 2 gated MLP, 14 linear",
    "gemma3_text": "13 RMSNorm, 2 gated MLP, 14 linear",
    "olmo2": "9 RMSNorm, 2 gated MLP, 14 linear",
    "gpt_oss": "5 RMSNorm, 8 linear",
    "phi3": "5 RMSNorm, 8 linear",  # one matrix for gate and up
    "gpt2": "none",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_same(family):
    theirs = small_model(family)
    ours = copy.deepcopy(theirs)
    install_kernels(ours)
    assert installed_kernels(ours) == FAMILIES[family]
    exact = gradients(theirs)
    assert_close(gradients(ours), exact)
    assert errors(gradients(ours, autocast=True), exact) <= 1.01 * errors(gradients(theirs, autocast=True), exact)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_a_family_in_bf16_rounds_as_before(family):
    theirs = small_model(family, torch.bfloat16)
    ours = copy.deepcopy(theirs)
    install_kernels(ours)
    exact = gradients(copy.deepcopy(theirs).float())
    computed = gradients(ours)
    assert all(gradient.dtype == torch.bfloat16 for gradient in computed[1].values())
    assert errors(computed, exact) <= 1.01 * errors(gradients(theirs), exact)


def test_a_norm_or_mlp_of_another_formula_is_left_alone():
    model = small_model("llama")

    class Norm(type(model.model.norm)):
        def forward(self, x):
            return super().forward(x) * 1.001

    class MLP(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=3))

    model.model.norm.__class__ = Norm
    for layer in model.model.layers:
        layer.mlp.__class__ = MLP
    install_kernels(model)
    assert installed_kernels(model) == "4 RMSNorm, 14 linear"


def test_installing_draws_no_random_numbers():
    model = small_model("llama")
    state = torch.get_rng_state()
    install_kernels(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_checkpointing_changes_no_bit():
    model = small_model("llama")
    install_kernels(model)
    usual = gradients(model)
    for block in model.model.layers:
        block.forward = lambda *arguments, forward=block.forward, **options: checkpoint(
            forward, *arguments, use_reentrant=False, **options
        )
    again = gradients(model)
    assert all(torch.equal(usual[1][name], again[1][name]) for name in usual[1])


def test_only_the_inputs_of_norms_and_activations_are_saved():
    model = small_model("llama")
    model.set_attn_implementation("sdpa")
    before = saved_bytes(model)
    install_kernels(model)
    # Of each layer: two norms' inputs, queries (32), keys and values (16 each), attention (32), gate and up (48 each).
    of_layer = 2 * 32 + 32 + 2 * 16 + 32 + 2 * 48
    others = 2 + 4 + 16  # the norms' scales, the attention's logarithms, and keys that sdpa repeats or copies
    assert saved_bytes(model) <= 4 * (2 * (of_layer + others) + 32 + 1 + 2 * 8)
    assert before > 1.5 * saved_bytes(model)
