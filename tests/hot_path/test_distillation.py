"""Test the divergence from a teacher's stored probabilities against its plain formula in fp64."""

import pytest
import torch
import torch.nn.functional as F

from gearbox.kernels import distillation

NUM_TOKENS, VOCABULARY = 9, 40


def stored(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    return distillation.most_likely(logits.clone(), top, logits.shape[1])


def plain(student: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Compare two distributions over the known tokens and all others together, in fp64."""
    p, q = (
        torch.cat([known := logits.softmax(1).gather(1, ids.long()), 1 - known.sum(1, keepdim=True)], 1)
        for logits in (teacher.double(), student.double())
    )
    return (p * (p.log() - q.log())).sum(1)


@pytest.mark.parametrize("top", [1, 5, VOCABULARY - 1])
def test_value_and_gradient_are_those_of_the_plain_formula(top):
    torch.manual_seed(0)
    teacher, student = (3 * torch.randn(NUM_TOKENS, VOCABULARY) for _ in range(2))
    ids, log_probs = stored(teacher, top)
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    found, expected = distillation.divergence(ours, ids, log_probs), plain(theirs, teacher, ids)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6) and (found > 0).all()
    gradients = [torch.autograd.grad(loss.sum(), of)[0] for loss, of in ((found, ours), (expected, theirs))]
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6)
    assert torch.allclose(log_probs.exp().sum(1), torch.ones(NUM_TOKENS))


def test_all_tokens_give_the_complete_divergence():
    torch.manual_seed(0)
    teacher, student = (3 * torch.randn(NUM_TOKENS, VOCABULARY) for _ in range(2))
    found = distillation.divergence(student, *stored(teacher, VOCABULARY))
    full = F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True).sum(1)
    assert torch.allclose(found, full, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top", [1, 7, VOCABULARY])
def test_zero_only_if_they_agree(top):
    torch.manual_seed(0)
    teacher = 5 * torch.randn(NUM_TOKENS, VOCABULARY)
    known = stored(teacher, top)
    same = (teacher + 3).requires_grad_()
    loss = distillation.divergence(same, *known).sum()
    (gradient,) = torch.autograd.grad(loss, same)
    assert abs(loss.item()) < 1e-5 and gradient.abs().max() < 1e-6
    moved = teacher.clone()
    moved[:, 0] += 1
    assert (distillation.divergence(moved, *known) > 1e-9).any()


def test_hostile_values_are_finite():
    """The rest is 0, the student is sure of another token, or excludes what the teacher is sure of."""
    sure = torch.full((1, VOCABULARY), -200.0)
    sure[0, 3] = 200
    excluded = torch.full((1, VOCABULARY), -torch.inf)
    excluded[0, 5:8] = 0
    huge = torch.linspace(-1e30, 1e30, VOCABULARY)[None]
    for teacher in (sure, excluded, huge, torch.zeros(1, VOCABULARY)):
        for student in (sure, sure.flip(1), excluded, huge, huge.flip(1)):
            for top in (1, 3, VOCABULARY):
                logits = student.clone().requires_grad_()
                loss = distillation.divergence(logits, *stored(teacher, top)).sum()
                (gradient,) = torch.autograd.grad(loss, logits)
                assert loss.isfinite() and loss > -1e-5 and gradient.isfinite().all(), (teacher, student, top)


def test_padding_of_the_vocabulary_is_no_token():
    logits = torch.arange(VOCABULARY).float()[None]
    ids, log_probs = distillation.most_likely(logits.clone(), 2, 10)
    assert ids.tolist() == [[9, 8]]
    assert torch.allclose(log_probs[0, :2], logits.log_softmax(1)[0, [9, 8]])
    assert torch.allclose(log_probs.exp().sum(), torch.ones(()))
