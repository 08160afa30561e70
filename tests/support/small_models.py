"""Make small random models of a family, and measure their gradients and what they save for the backward pass."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM


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
