"""Test that every gear gives the same answers, that they are those of transformers, and that the best step is saved."""

import json

import pytest
import torch
import transformers

SCORES = """
calls = 0


def score(question, answer, expected):
    global calls
    assert question and expected is not None
    calls += 1
    return -abs((calls - 1) // 9 - 1)  # the second evaluation, of 9 documents each, is the best one
"""
LENGTHS = ("eval.every=2", "eval.fraction=0.3", "eval.samples=7", "eval.sample_tokens=12", "schedule.name=constant")
PROMPTS = 'eval.prompts=["reverse abcdefgh", "a", "why is the sky blue, and why is the sea blue too?"]'


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return get(train), which answers on one device once."""
    made = {}

    def get(train, *given):
        if given not in made:
            outcome = train("single", *LENGTHS, PROMPTS, "train.steps=2", *given)
            assert outcome.codes == [0], outcome.output
            outcome.kept = answers_of(outcome), outcome.weights
            made[given] = outcome
        return made[given]

    return get


def answers_of(outcome) -> list[dict]:
    return [json.loads(line) for line in (outcome.folder / "answers.jsonl").read_text().splitlines()]


def scores(tmp_path):
    path = tmp_path / "scores.py"
    path.write_text(SCORES)
    return f"eval.metric={path}:score"


@pytest.mark.parametrize(
    ("gear", "ranks", "given"),
    [
        ("single", 1, ()),
        ("ddp", 3, ()),
        ("fsdp", 2, ("adapter.method=lora",)),
        ("zero1", 2, ()),
        ("zero3", 2, ()),
        ("fsdp_tp", 4, ()),
        ("ulysses", 2, ()),
        ("ring", 2, ()),
        ("pp", 2, ()),
        ("pp", 4, ("adapter.method=lora",)),
        ("fsdp", 2, ()),
        ("fsdp_offload", 2, ()),
        ("hsdp", 4, ()),
        ("zero2", 2, ()),
        ("zero3_offload", 2, ()),
        ("tp", 2, ()),
        ("ulysses", 4, ()),
    ],
)
def test_every_gear_answers_alike_and_saves_the_best_step(train, alone, tmp_path, gear, ranks, given):
    best = ("train.steps=6", "save.best=true", "eval.metric_documents=9", scores(tmp_path), *given)
    outcome = train(gear, *LENGTHS, PROMPTS, *best, ranks=ranks)
    assert set(outcome.codes) == {0}, outcome.output
    answers, weights = alone(train, *given).kept
    assert len(answers) == 2 * 10 and [line["step"] for line in answers] == [0] * 10 + [2] * 10
    assert [line for line in answers_of(outcome) if line["step"] <= 2] == answers
    assert [line["eval_metric"] for line in outcome.lines("eval_metric")] == [-1, 0, -1, -2]
    assert "the model is that of step 2, the best evaluation" in outcome.output
    assert outcome.weights.keys() == weights.keys()
    for name, tensor in outcome.weights.items():
        assert torch.allclose(tensor, weights[name], rtol=0, atol=1e-4), name
    kept = sorted(int(path.name.removeprefix("step-")) for path in (outcome.folder / "checkpoints").iterdir())
    assert kept == [2, 6]
