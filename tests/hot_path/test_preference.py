"""Test the losses that compare answers against the formulas of their papers, and against TRL's values and gradients."""

import json
import math
from pathlib import Path

import pytest
import torch

from gearbox.config.recipe_values import JUDGED, Preference
from gearbox.kernels import head, preference
from gearbox.kernels.preference import Answers

OBJECTIVES = list(JUDGED)
GOLDEN = json.loads((Path(__file__).parent / "trl_losses.json").read_text(encoding="utf-8"))
WIDTH, VOCABULARY = 8, 50
LENGTHS = [[3, 5], [1, 1], [7, 2]]
SETTINGS = Preference(label_smoothing=0.1, margin=0.4, desirable_weight=0.7, undesirable_weight=1.3)
PER_TOKEN = ("ipo", "simpo", "orpo")


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def log_prob(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return log p(y | x), one token after the other."""
    total = torch.zeros(())
    for state, label in zip(hidden, labels, strict=True):
        probabilities = torch.exp(weight @ state) / torch.exp(weight @ state).sum()
        total = total + probabilities[label].log()
    return total


def plain_loss(objective: str, good: tuple[torch.Tensor, ...], bad: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the loss of one pair as its paper writes it. Each answer is log p, log p of the reference, |y|."""
    beta, margin, epsilon = SETTINGS.beta_of(objective), SETTINGS.margin_of(objective), SETTINGS.label_smoothing
    gains = [(p - reference) / (length if objective in PER_TOKEN else 1) for p, reference, length in (good, bad)]
    lead = beta * (gains[0] - gains[1]) - margin
    if objective in ("dpo", "simpo"):
        return -(1 - epsilon) * sigmoid(lead).log() - epsilon * sigmoid(-lead).log()
    if objective == "ipo":
        return (gains[0] - gains[1] - 1 / (2 * beta)) ** 2
    if objective == "orpo":
        odds = [torch.exp(gain) / (1 - torch.exp(gain)) for gain in gains]
        return -beta * sigmoid(torch.log(odds[0] / odds[1])).log()
    desirable = SETTINGS.desirable_weight * (1 - sigmoid(beta * gains[0]))
    return desirable + SETTINGS.undesirable_weight * (1 - sigmoid(-beta * gains[1]))


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_and_gradients_are_those_of_the_papers(monkeypatch, objective, is_frozen):
    monkeypatch.setattr(head, "chunk_tokens", lambda *_: 4)  # chunks end within answers
    torch.manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    hidden = torch.randn(int(lengths.sum()), WIDTH, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) / 2).requires_grad_(not is_frozen)
    labels = torch.randint(0, VOCABULARY, (len(hidden),))
    reference = -3 * lengths - torch.rand(3, 2) if objective in ("dpo", "ipo", "kto") else torch.zeros(3, 2)

    spans = zip(hidden.split(lengths.flatten().tolist()), labels.split(lengths.flatten().tolist()), strict=True)
    sums = [log_prob(states, weight, chosen) for states, chosen in spans]
    sides = list(zip(sums, reference.flatten(), lengths.flatten(), strict=True))
    expected = torch.stack([plain_loss(objective, sides[2 * i], sides[2 * i + 1]) for i in range(3)])
    each = head.log_probs(hidden, weight, labels)
    slots = torch.repeat_interleave(torch.arange(6), lengths.flatten())
    found = torch.zeros(6).index_add(0, slots, each).view(3, 2)
    found = preference.losses(objective, Answers(found, reference, lengths.float()), SETTINGS)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    trained = [hidden] if is_frozen else [hidden, weight]
    right = torch.autograd.grad(expected.mean(), trained)
    for ours, theirs in zip(torch.autograd.grad(found.mean(), trained), right, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_losses_and_gradients_are_those_of_trl(case):
    answers = {name: torch.tensor(case[name]) for name in ("log_probs", "reference", "lengths")}
    answers["log_probs"].requires_grad_()
    found = preference.losses(case["objective"], Answers(**answers), Preference(**case["settings"]))
    loss = found.sum() / case["num_units"]
    loss.backward()
    assert math.isclose(loss.item(), case["loss"], rel_tol=1e-5)
    right = torch.tensor(case["gradient"])
    assert (answers["log_probs"].grad - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_absent_and_extreme_answers_have_finite_losses_and_gradients(objective):
    numbers = [0.0, -1e-9, -1e-3, -1e4, -1e7]
    rows = [[a, b] for a in numbers for b in numbers]
    log_probs = torch.tensor([*rows, *rows, [0.0, 0.0], [-5.0, 0.0]], requires_grad=True)
    lengths = torch.tensor([[1.0, 1.0]] * 25 + [[1e6, 1e6]] * 25 + [[0.0, 0.0], [4.0, 0.0]])
    answers = Answers(log_probs, torch.zeros_like(log_probs), lengths)
    losses = preference.losses(objective, answers, Preference())
    losses.sum().backward()
    assert losses.isfinite().all() and log_probs.grad.isfinite().all()
    assert losses[-2] == 0 and not log_probs.grad[-2].any()
    assert (losses[-1] != 0) == (objective == "kto") == bool(log_probs.grad[-1, 0]), "a pair needs both answers"
    assert log_probs.grad[-1, 1] == 0
    assert preference.figures(objective, answers, Preference()).isfinite().all()


def test_figures_of_pairs_are_means_over_complete_pairs():
    log_probs = torch.tensor([[-4.0, -9.0], [-8.0, -3.0], [-1.0, 0.0]])
    reference = torch.tensor([[-5.0, -8.0], [-6.0, -2.0], [-2.0, 0.0]])
    answers = Answers(log_probs, reference, torch.tensor([[2.0, 3.0], [4.0, 1.0], [5.0, 0.0]]))
    parts = [Answers(*[t[rows] for t in vars(answers).values()]) for rows in (slice(0, 1), slice(1, 3))]

    def measured(objective):
        sums = sum(preference.figures(objective, part, Preference(beta=0.5)) for part in parts)
        return preference.means(objective, sums)

    gains = {"margin": 0.25, "reward_chosen": -0.25, "reward_rejected": -0.5, "accuracy": 0.5, "kl": -1 / 6}
    assert measured("dpo") == pytest.approx(gains)
    assert measured("ipo")["reward_chosen"] == pytest.approx(0.5 * (1 / 2 - 2 / 4) / 2)
    assert measured("simpo")["reward_rejected"] == pytest.approx(0.5 * ((-1 / 3) - 1) / 2)
    assert "kl" not in measured("orpo")


def test_figures_of_kto_count_good_and_bad_answers_apart():
    log_probs = torch.tensor([[-4.0, 0.0], [0.0, -3.0], [-7.0, 0.0]])
    reference = torch.tensor([[-6.0, 0.0], [0.0, -2.0], [-6.0, 0.0]])
    answers = Answers(log_probs, reference, torch.tensor([[2.0, 0.0], [0.0, 1.0], [5.0, 0.0]]))
    found = preference.means("kto", preference.figures("kto", answers, Preference()))
    rewards = {"margin": 0.15, "reward_chosen": 0.05, "reward_rejected": -0.1}
    assert found == pytest.approx(rewards | {"accuracy": 2 / 3})
    good = Answers(log_probs[:1], reference[:1], answers.lengths[:1])
    assert preference.means("kto", preference.figures("kto", good, Preference())) == pytest.approx(
        {"reward_chosen": 0.2, "accuracy": 1.0}
    )
    assert preference.means("kto", torch.zeros(len(preference.FIGURES))) == {}
