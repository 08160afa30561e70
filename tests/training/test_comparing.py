"""Test a step that compares answers against a plain implementation: one answer after the other, without packing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from gearbox.config.job import BatchPlan
from gearbox.config.recipe_values import JUDGED, WITH_REFERENCE, Preference
from gearbox.model import loss
from gearbox.rows.batches import PackedRows, make_step_batch
from gearbox.rows.packing import Chunks
from gearbox.rows.units import ComparedAnswers, MismatchedCorpus, passes_of
from gearbox.training import comparing
from support.documents import Made
from support.small_models import small_model

SETTINGS = Preference(beta=0.7, label_smoothing=0.1, sft_weight=0.3, desirable_weight=0.8, undesirable_weight=1.2)
PROMPTS, ANSWERS = (5, 5, 3, 9, 2, 6), (4, 2, 7, 1, 3, 5)  # lengths in tokens; two prompts are equal


def made_pairs() -> Made:
    """Return pairs of documents: the same prompt, and answers of different lengths."""
    draw, tokens, masks = np.random.default_rng(0), [], []
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        ids = np.random.default_rng(prompt).integers(3, 64, prompt).tolist()
        for length in (answer, 1 + (answer + i) % 5):
            tokens.append([*ids, *draw.integers(3, 64, length).tolist()])
            masks.append([0] * prompt + [1] * length)
    made = Made(tokens, masks)
    made.labels = np.tile(np.array([1, 0], np.int8), len(PROMPTS))
    return made


def log_prob(model, ids, mask) -> tuple[torch.Tensor, int]:
    """Return log p(answer | prompt), and the number of its tokens."""
    ids = torch.tensor(np.array(ids, np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
    picked = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    is_target = torch.tensor(np.array(mask))[1:] > 0
    return picked[is_target].sum(), int(is_target.sum())


def plain(objective, model, base, made: Made) -> torch.Tensor:
    """Return the loss of a step over all pairs."""
    beta, terms, usual, num_good, kl = 0.7, [], 0.0, 0, []
    if objective == "kto":
        other = MismatchedCorpus(made)
        mismatched = [(other.tokens(2 * i + 1), other.loss_mask(2 * i + 1)) for i in range(len(made))]
        kl = [(log_prob(model, *one)[0] - log_prob(base, *one)[0]).item() for one in mismatched]
    z0 = max(0.0, sum(kl) / max(1, len(kl)))
    for i in range(0, len(made), 2):
        sides = [(made.tokens(j), made.loss_mask(j)) for j in (i, i + 1)]
        (p, p_tokens), (q, q_tokens) = (log_prob(model, *side) for side in sides)
        u, v = (log_prob(base, *side)[0].detach() for side in sides)
        usual, num_good = usual - p, num_good + p_tokens
        if objective == "dpo":
            lead = beta * (p - u - q + v)
            terms.append(-0.9 * logsigmoid(lead) - 0.1 * logsigmoid(-lead))
        elif objective == "ipo":
            terms.append(((p - u) / p_tokens - (q - v) / q_tokens - 1 / (2 * beta)) ** 2)
        elif objective == "simpo":
            lead = beta * (p / p_tokens - q / q_tokens) - 1
            terms.append(-0.9 * logsigmoid(lead) - 0.1 * logsigmoid(-lead))
        elif objective == "orpo":
            odds = [mean - torch.log1p(-mean.exp()) for mean in (p / p_tokens, q / q_tokens)]
            terms.append(-beta * logsigmoid(odds[0] - odds[1]))
        else:
            terms += [0.8 * (1 - torch.sigmoid(beta * (p - u - z0))), 1.2 * (1 - torch.sigmoid(beta * (z0 - q + v)))]
    return torch.stack(terms).mean() + 0.3 * usual / num_good


def engine_of(model, micro_rows: int) -> SimpleNamespace:
    """Return what `comparing` needs of an engine on one device."""
    perf, adapter = SimpleNamespace(pass_tokens=None), SimpleNamespace(method="none")
    data = SimpleNamespace(packing=True)
    recipe = SimpleNamespace(batch=SimpleNamespace(rows=3), perf=perf, adapter=adapter, data=data)
    gear, batch = SimpleNamespace(engine="single", degree=lambda _: 1), SimpleNamespace(micro_rows=micro_rows)
    job = SimpleNamespace(recipe=recipe, gear=gear, batch=batch)
    return SimpleNamespace(
        job=job,
        model=model,
        unwrapped=model,
        device=torch.device("cpu"),
        eval_shard=(0, 1),
        to_device=lambda batch: {name: value for name, value in batch.items() if name != "chunk_ids"},
        sum_over_all_ranks=lambda value: value,
    )


@pytest.mark.parametrize(("packing", "divides"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("objective", JUDGED)
def test_a_step_equals_a_plain_one(objective, packing, divides):
    made, base, twin = made_pairs(), small_model("llama"), small_model("llama")
    for parameter in twin.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model = small_model("llama")
    model.load_state_dict(twin.state_dict())
    expected = plain(objective, twin, base, made)
    expected.backward()

    corpus = MismatchedCorpus(made) if objective == "kto" else made
    chunks = Chunks(np.arange(len(corpus)), np.zeros(len(corpus), int), corpus.lengths, corpus.targets, unit_size=2)
    rows = PackedRows(corpus, chunks, 40, 0, packing)
    rows.answers = ComparedAnswers.of(corpus, chunks)
    loss.install_loss(base)
    loss.install_loss(model)
    row_ids = list(range(len(rows)))
    if objective in WITH_REFERENCE:
        _, sums = comparing.sums_of_answers(engine_of(base, 2), rows, row_ids, lambda: True)
        rows.answers = ComparedAnswers(rows.answers.sides, sums)
    model.comparison = loss.Comparison(objective, SETTINGS)
    batch = make_step_batch(rows, row_ids, 0, BatchPlan.divide(len(row_ids), 1, 2))
    comparing.begin_step(engine_of(model, 2), rows, batch)
    total = torch.zeros(())
    for micro in batch.micro_batches:
        for one in passes_of(micro, 12) if divides else [micro]:
            inputs = {name: value for name, value in one.items() if name != "chunk_ids"}
            part = model(**inputs) / batch.num_losses
            part.backward()
            total += part.detach()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, theirs[name].grad, rtol=0, atol=1e-5), name
