"""Test the loss of the output head against plain cross entropy."""

import pytest
import torch
import torch.nn.functional as F

from gearbox.kernels import head

NUM_TOKENS, WIDTH, VOCABULARY = 23, 8, 50


def plain_by_token(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float, cap: float | None):
    logits = (hidden @ weight.T).float() * scale
    return F.cross_entropy(cap * torch.tanh(logits / cap) if cap else logits, labels, reduction="none")


def plain(*arguments):
    return plain_by_token(*arguments).sum()


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def tensors(request):
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH).to(request.param).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH).to(request.param).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (NUM_TOKENS,))


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.0, 2.0), (3.0, 5.0)])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(monkeypatch, tensors, size, scale, cap):
    monkeypatch.setattr(head, "chunk_tokens", lambda *_: size)
    expected, found = plain(*tensors, scale, cap), head.cross_entropy_sum(*tensors, scale, cap)
    tolerance = 1e-5 if tensors[0].dtype == torch.float32 else 2e-2
    assert found.dtype == torch.float32 and torch.allclose(found, expected, rtol=tolerance)
    right = torch.autograd.grad(expected * 0.1, tensors[:2])
    for ours, theirs in zip(torch.autograd.grad(found * 0.1, tensors[:2]), right, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (3.0, 5.0)])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_log_probs_and_weighed_gradients_are_those_of_plain_cross_entropy(
    monkeypatch, tensors, size, scale, cap, is_frozen
):
    monkeypatch.setattr(head, "chunk_tokens", lambda *_: size)
    tensors[1].requires_grad_(not is_frozen)
    expected, found = -plain_by_token(*tensors, scale, cap), head.log_probs(*tensors, scale, cap)
    assert found.dtype == torch.float32 and torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    tolerance = 1e-5 if tensors[0].dtype == torch.float32 else 2e-2
    weights, trained = torch.randn(NUM_TOKENS), tensors[:1] if is_frozen else tensors[:2]
    right = torch.autograd.grad((expected * weights).sum(), trained)
    for ours, theirs in zip(torch.autograd.grad((found * weights).sum(), trained), right, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_a_weight_is_trained_by_log_probs_alone_and_under_autocast(tensors):
    hidden, weight, labels = (tensors[0].detach().float(), tensors[1].detach().float().requires_grad_(), tensors[2])
    with torch.autocast("cpu", torch.bfloat16):
        head.log_probs(hidden, weight, labels)[3:].sum().backward()
    (right,) = torch.autograd.grad(-plain(hidden[3:], weight, labels[3:], 1.0, None), weight)
    assert weight.grad.dtype == torch.float32 and (weight.grad - right).abs().max() <= 2e-2 * right.abs().max()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_no_targets_have_no_log_probs_and_gradients_of_zero(tensors, is_frozen):
    hidden, weight, labels = tensors
    weight.requires_grad_(not is_frozen)
    found = head.log_probs(hidden[:0], weight, labels[:0])
    found.sum().backward()
    assert found.shape == (0,) and not hidden.grad.any() and (is_frozen or not weight.grad.any())


def test_a_frozen_weight_gets_no_gradient(tensors):
    hidden, weight, labels = tensors
    weight.requires_grad_(False)
    head.cross_entropy_sum(hidden, weight, labels).backward()
    assert hidden.grad is not None and weight.grad is None


def test_no_targets_are_a_loss_of_zero_with_gradients_of_zero(tensors):
    hidden, weight, labels = tensors
    loss = head.cross_entropy_sum(hidden[:0], weight, labels[:0])
    loss.backward()
    assert loss == 0 and not weight.grad.any()


def test_autocast_keeps_the_gradient_of_an_fp32_weight_in_fp32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(NUM_TOKENS, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH)
    weight.requires_grad_()
    labels = torch.randint(0, VOCABULARY, (NUM_TOKENS,))
    expected = torch.autograd.grad(plain(hidden, weight, labels, 1.0, None), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = head.cross_entropy_sum(hidden, weight, labels)
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        assert ours.dtype == torch.float32 and (ours - theirs).abs().max() <= 2e-2 * theirs.abs().max()


def test_a_second_backward_pass_is_an_error_and_not_a_wrong_gradient(tensors):
    loss = head.cross_entropy_sum(*tensors)
    (loss * 0.5).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss * 0.5).backward()
