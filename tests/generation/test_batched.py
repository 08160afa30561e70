"""Test that every gear gives the same answers, that they are those of transformers, and that the best step is saved."""

import json

import pytest
import torch
import transformers

from support.experts import TOKENIZER, config_of

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
        ("ddp", 4, ()),  # 12 places for 10 questions
        ("fsdp", 2, ("adapter.method=lora",)),
        ("zero3", 2, ()),
        ("tp", 2, ()),
        ("ulysses", 2, ()),
        ("ring", 2, ()),
        ("pp", 4, ("adapter.method=lora",)),
    ],
)
def test_every_gear_answers_alike_and_saves_the_best_step(train, alone, tmp_path, gear, ranks, given):
    """The other gears are combinations of these."""
    best = ("train.steps=6", "save.best=true", "eval.metric_documents=9", scores(tmp_path), *given)
    outcome = train(gear, *LENGTHS, PROMPTS, *best, ranks=ranks)
    assert set(outcome.codes) == {0}, outcome.output
    answers, weights = alone(train, *given).kept
    assert [line["step"] for line in answers] == [0] * 10 + [2] * 10
    assert len({line["answer"] for line in answers}) > 5, "the comparison needs different answers"
    assert [line for line in answers_of(outcome) if line["step"] <= 2] == answers
    assert [line["eval_metric"] for line in outcome.lines("eval_metric")] == [-1, 0, -1, -2]
    assert "the model is that of step 2, the best evaluation" in outcome.output
    assert outcome.weights.keys() == weights.keys()
    for name, tensor in outcome.weights.items():
        assert torch.allclose(tensor, weights[name], rtol=0, atol=1e-4), name
    kept = sorted(int(path.name.removeprefix("step-")) for path in (outcome.folder / "checkpoints").iterdir())
    assert kept == [2, 6], "the best one, and the last one to resume from"


def test_divided_experts_answer_alike(train, tmp_path):
    config_of("Mixtral").save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    given = (f"model.name={tmp_path / 'model'}", "run.rehearse=false", "model.init=random", "train.steps=2")
    found = [train(gear, *LENGTHS, PROMPTS, *given, ranks=ranks) for gear, ranks in (("single", 1), ("ep", 2))]
    assert {code for outcome in found for code in outcome.codes} == {0}, found[1].output
    assert answers_of(found[0]) == answers_of(found[1])
    assert len(answers_of(found[0])) > 10


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_the_answers_are_those_of_transformers(train, attention):
    """The saved model generates one question at a time, with its cache."""
    lengths = ("train.steps=30", "optim.lr=1e-2", "eval.every=0", "eval.samples=9", f"model.attention={attention}")
    outcome = train("single", *LENGTHS, PROMPTS, *lengths)
    assert outcome.codes == [0], outcome.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(outcome.folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(outcome.folder / "model")
    last = [line for line in answers_of(outcome) if line["step"] == 30]
    assert len(last) == 12 and [line["expected"] for line in last[9:]] == [None] * 3
    for line in last:
        asked = [{"role": "user", "content": line["question"]}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        reply = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[
            0, ids["input_ids"].shape[1] :
        ]
        assert line["answer"] == tokenizer.decode(reply, skip_special_tokens=True).strip()
    assert {len(line["answer"]) for line in last} - {12}, "an answer must end by itself"
