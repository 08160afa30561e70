"""Compute how far a student's next-token probabilities are from a teacher's, of which only the largest are known.

The outcomes are the teacher's k most likely tokens, and one for all other tokens. Their probabilities add up to 1, so
the Kullback-Leibler divergence is never negative, and 0 only if student and teacher agree on every outcome.

Shapes: N target tokens, V vocabulary size, k known tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

LOWEST = -1e4  # log-probability below which the student has no gradient; a token that it excludes has -inf


def most_likely(logits: torch.Tensor, top: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the `top` most likely tokens, [N, k] int32, and log-probabilities, [N, k + 1] in fp32.

    The last log-probability is that of all other tokens together; -inf if there are none. logits: [N, V] in fp32, which
    this overwrites. Only the first `num_tokens` are tokens; the others pad the vocabulary.
    """
    total = logits.logsumexp(1, keepdim=True)
    values, ids = logits[:, :num_tokens].topk(top)
    rest = logits.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return ids.int(), torch.cat([values, rest], 1) - total


def divergence(logits: torch.Tensor, ids: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """Return the divergence of the student from the teacher at each token, [N] in fp32.

    logits: [N, V] of the student. ids and log_probs: the teacher's, as `most_likely` returns them. Value and gradient
    are finite also where an outcome has no probability. The rest is summed over its own tokens, because 1 minus the
    known ones would be rounding noise for a confident model.
    """
    student, chosen = F.log_softmax(logits.float(), 1).clamp_min(LOWEST), ids.long()
    if chosen.shape[1] == student.shape[1]:  # no other token is left
        outcomes, teacher = student.gather(1, chosen), F.log_softmax(log_probs[:, :-1], 1)
    else:
        rest = student.scatter(1, chosen, -torch.inf).logsumexp(1, keepdim=True)
        outcomes, teacher = torch.cat([student.gather(1, chosen), rest], 1), log_probs
    probabilities = teacher.exp()
    difference = teacher.masked_fill(probabilities == 0, 0) - outcomes  # 0 x -inf would not be a number
    return (probabilities * difference).sum(1)
