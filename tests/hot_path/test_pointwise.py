"""Test that the families' models compute the same with our norms, activations and linear layers."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from gearbox.kernels.install import install_kernels

FAMILIES = {
    "llama": "RMSNorm 5, gated MLP 2, linear 14",
    "qwen2": "RMSNorm 5, gated MLP 2, linear 14",
    "qwen3": "RMSNorm 9, gated MLP 2, linear 14",  # norms of the heads
    "mistral": "RMSNorm 5, gated MLP 2, linear 14",
    "gemma": "RMSNorm 5, gated MLP 2, linear 14",
    "gemma2": "RMSNorm 9, gated MLP 2, linear 14",
    "gemma3_text": "RMSNorm 13, gated MLP 2, linear 14",
    "olmo2": "RMSNorm 9, gated MLP 2, linear 14",
    "gpt_oss": "RMSNorm 5, linear 8",
    "phi3": "RMSNorm 5, linear 8",  # one matrix for gate and up
    "gpt2": "",
}


def small_model(family: str, dtype=torch.float32):
    """Return a small random model of a family whose norms have weights other than 1."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    return model


def gradients(model, autocast=False):
    """Return the loss and the gradient of every trained parameter, and of the embedded tokens."""
    ids = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(inputs_embeds=embedded, labels=ids, use_cache=False).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.item(), found | {"input": embedded.grad}


def assert_close(ours, theirs, tolerance=2e-6):
    (our_loss, our_gradients), (their_loss, their_gradients) = ours, theirs
    assert our_loss == pytest.approx(their_loss, rel=1e-6)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        other = their_gradients[name]
        assert gradient.dtype == other.dtype and (gradient - other).norm() <= tolerance * (other.norm() + 1e-3), name


def errors(computed, exact):
    """Return the sum over all gradients of their relative distance to the exact ones."""
    return sum(float((computed[1][name] - exact[1][name]).norm() / exact[1][name].norm()) for name in exact[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_same(family):
    theirs = small_model(family)
    ours = copy.deepcopy(theirs)
    assert install_kernels(ours) == FAMILIES[family]
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
    assert install_kernels(model) == "RMSNorm 4, linear 14"


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


def saved_bytes(model, tokens=64):
    """Return the bytes per token that a forward pass of the layers keeps for the backward pass."""
    kept = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    embedded = torch.randn(1, tokens, model.config.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(kept.values()) / tokens


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
