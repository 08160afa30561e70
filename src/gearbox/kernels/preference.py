"""Compute the losses that compare answers, from the sums of the log-probabilities of their tokens.

Shapes: P units, which are pairs of answers. Column 0 is the chosen or good answer, column 1 the rejected or bad one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from gearbox.config.recipe_values import WITH_REFERENCE, Preference

FIGURES = ("reward_chosen", "reward_rejected", "right", "gain", "chosen", "rejected", "judged", "chosen_tokens")
"""What `figures` sums over units: rewards, right orders and gains in log-probability, then the counts to divide by."""
PER_TOKEN = ("ipo", "simpo", "orpo")
"""The objectives that divide the log-probability of an answer by its length."""


@dataclass(frozen=True)
class Answers:
    """The answers of P units, each tensor [P, 2] in fp32. An answer that a unit lacks has 0 in all three."""

    log_probs: torch.Tensor
    """Log-probability of each answer: the sum over its target tokens."""
    reference: torch.Tensor
    """What the reference gives the answer, or zeros without one. For `kto` the caller has added the distance z0."""
    lengths: torch.Tensor
    """Number of target tokens."""


def losses(objective: str, answers: Answers, settings: Preference) -> torch.Tensor:
    """Return the loss of each unit, [P]: 0 for a pair that lacks an answer. The usual loss is not part of it."""
    is_given = answers.lengths > 0
    gains = _gains(objective, answers)
    beta, margin = settings.beta_of(objective), settings.margin_of(objective)
    if objective == "kto":
        good, bad = (kto(gains, beta) * is_given).unbind(1)
        return settings.desirable_weight * good + settings.undesirable_weight * bad
    chosen, rejected = gains.unbind(1)
    if objective == "ipo":
        values = ipo(chosen, rejected, beta)
    elif objective == "orpo":
        values = orpo(chosen, rejected, beta)
    else:
        leads = beta * (chosen - rejected) - margin
        values = {"dpo": dpo, "simpo": simpo}[objective](leads, settings.label_smoothing)
    return values * is_given.all(1)


def dpo(leads: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return -(1 - e) log s(x) - e log s(-x), where x is the chosen answer's lead in reward.

    A reward is beta log(p / p_ref) of the whole answer.
    With e = 0 it is equation 7 of Rafailov et al., "Direct Preference Optimization", 2023.
    With e > 0 it is conservative DPO: Mitchell, "A note on DPO with noisy preferences", 2023.
    """
    return -(1 - label_smoothing) * logsigmoid(leads) - label_smoothing * logsigmoid(-leads)


def simpo(leads: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return the loss of `dpo` for other rewards: beta / |y| log p, of which gamma is subtracted as the margin.

    Meng, Xia and Chen, "SimPO: Simple Preference Optimization with a Reference-Free Reward", 2024, equation 6.
    """
    return dpo(leads, label_smoothing)


def ipo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """Return (h - 1 / (2 beta))^2, where h is the difference of log(p / p_ref) of two answers, and beta is tau.

    Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences", 2023, equation 17. Each
    log-ratio is a mean over the answer's tokens. Otherwise the strength of beta depends on the length, and the authors
    advised TRL so (huggingface/trl, pull request 1265). TRL's `DPOTrainer` with loss_type "ipo" does the same.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def orpo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """Return -beta log s(log odds(chosen) - log odds(rejected)), where odds(p) = p / (1 - p), and log p is per token.

    Hong, Lee and Thorne, "ORPO: Monolithic Preference Optimization without Reference Model", 2024, equations 4, 6 and
    7, where beta is lambda. Their first term is the usual loss, which `sft_weight` adds.
    """
    return -beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def kto(gains: torch.Tensor, beta: float) -> torch.Tensor:
    """Return 1 - s(beta (r - z0)) for good answers, and 1 - s(beta (z0 - r)) for bad ones, [P, 2].

    gains: r - z0, where r = log(p / p_ref) of an answer. Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic
    Optimization", 2024, L_KTO of section 4 (TRL cites it as equation 7), without the weights lambda.
    """
    return torch.sigmoid(-beta * _wanted(gains))


@torch.no_grad()
def figures(objective: str, answers: Answers, settings: Preference) -> torch.Tensor:
    """Return the sums that `means` divides, [F] in the order of FIGURES. Sums of several calls or ranks can be added.

    A reward is beta times the gain in log-probability that the loss compares. It is per token for an objective in
    PER_TOKEN, and less z0 for `kto`. The gain of `kl` is always of the whole answer.
    """
    given, beta = (answers.lengths > 0).float(), settings.beta_of(objective)
    if objective != "kto":
        given = given * given.flip(1)
    rewards = beta * _gains(objective, answers)
    if objective == "kto":
        is_right = (_wanted(rewards) > 0) * given
    else:
        is_right = (rewards[:, :1] > rewards[:, 1:]) * given[:, :1]
    gains = (answers.log_probs - answers.reference) * given
    num_judged = given.sum() if objective == "kto" else given[:, 0].sum()
    rewards, tokens = (rewards * given).sum(0), (answers.lengths * given)[:, 0].sum()
    return torch.stack([*rewards, is_right.sum(), gains[:, 0].sum(), *given.sum(0), num_judged, tokens])


def means(objective: str, sums: torch.Tensor) -> dict[str, float]:
    """Return the figures of units as means, given their sums [F]. What no unit measured is left out.

    `kl` estimates the distance to the reference in nats per token, as the mean of log(p / p_ref) over the tokens of
    chosen answers. It would be the KL divergence if the model had written them, and can be below 0.
    The caller adds the `kl` of `kto`: z0, which is measured on other answers.
    """
    sum_of = dict(zip(FIGURES, sums.tolist(), strict=True))
    found = {}
    for name in ("chosen", "rejected"):
        if sum_of[name]:
            found[f"reward_{name}"] = sum_of[f"reward_{name}"] / sum_of[name]
    if len(found) == 2:
        found = {"margin": found["reward_chosen"] - found["reward_rejected"]} | found
    if sum_of["judged"]:
        found["accuracy"] = sum_of["right"] / sum_of["judged"]
    if objective in WITH_REFERENCE and objective != "kto" and sum_of["chosen_tokens"]:
        found["kl"] = sum_of["gain"] / sum_of["chosen_tokens"]
    return found


def _gains(objective: str, answers: Answers) -> torch.Tensor:
    """Return what an objective compares, [P, 2]: the log-probabilities less the reference, of answers or tokens."""
    gains = answers.log_probs - answers.reference
    return gains / answers.lengths.clamp(min=1) if objective in PER_TOKEN else gains


def _wanted(gains: torch.Tensor) -> torch.Tensor:
    """Return how far each answer has moved to where it should, [P, 2]: a bad one should lose."""
    good, bad = gains.unbind(1)
    return torch.stack([good, -bad], 1)


def _log_odds(log_probs: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)) of log p, and never infinity. The bound is where p is 1 in the dtype."""
    bounded = log_probs.clamp(max=-torch.finfo(log_probs.dtype).eps)
    return bounded - torch.log(-torch.expm1(bounded))
