"""Test that held-out loss, exact match and sample answers match the model on any number of ranks."""

import math
import re
import shutil

import pytest
import torch
import transformers

from gearbox import ROOT
from gearbox.checkpoint.train_state import TrainState
from gearbox.config.loader import load_recipe
from gearbox.data import corpus
from gearbox.errors import UserError
from gearbox.launch.outcome import read_outcome
from gearbox.metrics import metrics_file
from gearbox.rows import arranged
from gearbox.training.evaluation import best_by, last_step, refuse_nothing_held_out
from support.corpora import jsonl


def test_evaluation_agrees_on_any_number_of_ranks(train):
    found = []
    for ranks in (1, 2, 3):
        outcome = train("single" if ranks == 1 else "ddp", "eval.fraction=0.2", "train.steps=2", ranks=ranks)
        found.append([(line["eval_loss"], line["eval_exact_match"]) for line in outcome.lines("eval_loss")])
    for others in found[1:]:
        for (loss, exact), (first_loss, first_exact) in zip(others, found[0], strict=True):
            assert loss == pytest.approx(first_loss, rel=1e-5)
            assert exact == first_exact


def test_exact_match_equals_that_of_greedy_decoding(train, tmp_path):
    """Compare the share from one forward pass with answers that the saved model generates token by token."""
    lengths = ("train.steps=40", "optim.lr=1e-2", "batch.rows=32", "batch.micro_rows=32", "batch.row_tokens=32")
    path = tmp_path / "two.jsonl"
    letters = [a + b for a in "abcdefgh" for b in "abcdefgh"]
    turn = '{{"messages": [{{"role": "user", "content": "{}"}}, {{"role": "assistant", "content": "{}"}}]}}'
    path.write_text("\n".join(turn.format(pair, pair[1] if pair < "e" else pair) for pair in letters))
    outcome = train(
        "single", *lengths, f"data.path={path}", "eval.fraction=0.3", "eval.samples=99", "eval.sample_tokens=1"
    )
    assert outcome.codes == [0], outcome.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(outcome.folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(outcome.folder / "model")
    sizes = ["batch.row_tokens=32", "eval.fraction=0.3", "eval.samples=99"]
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", [f"data.path={path}", *sizes])
    documents, _ = corpus.load_corpora(recipe, tokenizer)
    held_out = arranged.split_and_pack(recipe, documents, None, tokenizer, True, corpus.Builder()).samples
    assert len(held_out) == outcome.output.count("question: ")
    right = 0
    for sample in held_out:
        asked = [{"role": "user", "content": sample.question}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        reply = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
        right += tokenizer.decode(reply) == sample.answer + "<|end|>"
    exact = outcome.lines("eval_exact_match")[-1]["eval_exact_match"]
    assert 0 < exact < 1, "the comparison needs right and wrong answers"
    assert exact == pytest.approx(right / len(held_out))


def test_exact_match_is_left_out_where_answers_are_long(train, tmp_path):
    chats = [{"instruction": f"q{i}", "output": "abcd" * 9} for i in range(20)]
    path = jsonl(tmp_path / "long.jsonl", chats)
    outcome = train("single", f"data.path={path}", "eval.fraction=0.5", "train.steps=1")
    assert outcome.codes == [0], outcome.output
    assert outcome.lines("eval_loss") and "held-out loss" in outcome.output
    report = (outcome.folder / "report.html").read_text()
    logged = str(outcome.lines("eval_loss"))
    assert not any(re.search("exact match|eval_exact", text) for text in (outcome.output, report, logged))


def test_chats_of_unusual_shape_end_without_a_traceback(train, tmp_path):
    """Chats that open with a system turn train. Chats without a question are never sample questions."""
    shapes = [("system", "assistant"), ("system", "user", "assistant")]
    chats = [[{"role": role, "content": f"abc {i}"} for role in shapes[i % 2]] for i in range(60)]
    path = jsonl(tmp_path / "odd.jsonl", [{"messages": chat} for chat in chats])
    odd = (f"data.path={path}", "eval.fraction=0.5", "eval.samples=9", "eval.sample_tokens=1")
    outcome = train("single", *odd, load_back=True)
    assert outcome.codes == [0], outcome.output
    asked = [line for line in outcome.output.splitlines() if line.startswith("question")]
    assert asked
    assert all(int(line.split()[-1]) % 2 == 1 for line in asked), "only chats with a question and an answer are asked"


def test_the_held_out_loss_does_not_depend_on_packing(train):
    """The held-out loss covers the same documents with and without packing."""
    found = []
    for packing in ("true", "false"):
        outcome = train("single", f"data.packing={packing}", "eval.fraction=0.3", "train.steps=1", "optim.lr=1e-9",
                        "schedule.warmup=0")  # fmt: skip
        assert outcome.codes == [0], outcome.output
        found.append(outcome.lines("eval_loss")[0]["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("method", ["none", "lora"])
def test_the_saved_model_stops_where_trained_answers_end(train, tmp_path, method):
    """<|user|> ends the answers of this template, and is not the tokenizer's end-of-text."""
    template = tmp_path / "next_head.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    outcome = train("fsdp", f"data.chat_template={template}", f"adapter.method={method}", load_back=True)
    assert outcome.codes == [0, 0], outcome.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(outcome.folder / "model")
    stops = transformers.GenerationConfig.from_pretrained(outcome.folder / "model").eos_token_id
    assert {*stops} == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")}


def scoring(tmp_path, text: str = "return 1.0") -> tuple[str, ...]:
    (tmp_path / "scores.py").write_text(f"def score(question, answer, expected):\n    {text}\n")
    return f"eval.metric={tmp_path / 'scores.py'}:score", "eval.metric_documents=3", "eval.fraction=0.2"


def test_a_run_ends_early_on_all_ranks_and_a_resumed_one_at_the_same_step(train, tmp_path):
    """A constant score is never better than the first one, of step 1."""
    given = (*scoring(tmp_path), "eval.every=1", "schedule.name=constant", "eval.sample_tokens=2", "run.name=early")
    stuck = train("ddp", *given, "eval.patience=3", "train.steps=9", ranks=2)
    assert stuck.codes == [0, 0], stuck.output
    assert "stopped early at step 4/9: the last 3 evaluations did not improve on step 1" in stuck.output
    assert [line["step"] for line in stuck.lines("eval_metric")] == [0, 1, 2, 3, 4]
    assert outcome_of(stuck) == "done"
    # A run that is interrupted after step 2 stops where this one did. So does one with less patience, at once.
    other = (*given[:-1], "run.name=other", "save.every=1")
    assert train("single", *other, "train.steps=2").codes == [0]
    resumed = train("single", *other, "eval.patience=3", "train.steps=9", "run.resume=latest")
    assert resumed.codes == [0] and "stopped early at step 4/9" in resumed.output, resumed.output
    assert resumed.weights.keys() == stuck.weights.keys()
    for name, tensor in resumed.weights.items():
        assert torch.allclose(tensor, stuck.weights[name], rtol=0, atol=1e-4)
    again = train("single", *other, "eval.patience=3", "train.steps=9", "run.resume=latest")
    assert again.codes == [0] and "stopped early at step 4/9" in again.output, again.output
    more = train("single", *other, "eval.patience=4", "train.steps=9", "run.resume=latest")
    assert more.codes == [0] and "stopped early at step 5/9" in more.output, more.output
    assert [line["step"] for line in more.lines("loss")] == [1, 2, 3, 4, 5]
    answered = metrics_file.read(more.folder / "answers.jsonl").good
    assert not answered, "documents of the metric are no samples"


def outcome_of(outcome) -> str:
    return read_outcome(outcome.folder / "status.json")["outcome"]


def test_a_damaged_best_checkpoint_leaves_the_last_model(train, tmp_path):
    given = (*scoring(tmp_path), "eval.every=1", "schedule.name=constant", "eval.sample_tokens=2", "run.name=best")
    first = train("single", *given, "save.best=true", "train.steps=2")
    assert first.codes == [0] and "the model is that of step 1, the best evaluation" in first.output, first.output
    (shard,) = (first.folder / "checkpoints" / "step-1").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    more = train("single", *given, "save.best=true", "train.steps=3", "run.resume=latest")
    assert more.codes == [0], more.output
    assert "best checkpoint not used" in more.output and "that of the last step, 3, not of the best one" in more.output
    plain = train("single", *given[:-1], "train.steps=3")
    for name, tensor in more.weights.items():
        assert torch.equal(tensor, plain.weights[name]), name


def test_a_resumed_run_drops_the_answers_that_it_gives_again(train, tmp_path):
    given = ("eval.fraction=0.2", "eval.samples=2", "eval.sample_tokens=3", "eval.every=1", "run.name=answers")
    given += ("save.every=2", "schedule.name=constant", 'eval.prompts=["a"]')
    first = train("single", *given, "train.steps=3")
    assert first.codes == [0], first.output
    shutil.rmtree(first.folder / "checkpoints" / "step-3")
    with (first.folder / "answers.jsonl").open("a") as file:
        file.write('{"step": 1}\n{"step": 3, "question": "x"')  # damaged, as by a kill
    again = train("single", *given, "train.steps=4", "run.resume=latest")
    assert again.codes == [0], again.output
    steps = [line["step"] for line in metrics_file.read(again.folder / "answers.jsonl").good]
    assert steps == [step for step in (0, 1, 2, 3, 4) for _ in range(3)]


def test_prompts_are_answered_without_held_out_documents(train):
    outcome = train("single", "eval.fraction=0", 'eval.prompts=["a", "b"]', "eval.sample_tokens=2", "train.steps=2")
    assert outcome.codes == [0], outcome.output
    answered = metrics_file.read(outcome.folder / "answers.jsonl").good
    assert [(line["step"], line["question"]) for line in answered] == [(0, "a"), (0, "b"), (2, "a"), (2, "b")]
    assert not outcome.lines("eval_loss")


def test_a_failing_metric_and_a_long_prompt_are_one_line(train, tmp_path):
    failing = train("ddp", *scoring(tmp_path, "return 1 / 0"), ranks=2)
    assert failing.codes == [2, 2]
    assert "raised ZeroDivisionError: division by zero; fix the function" in failing.output
    long = train("single", f"eval.prompts=[{'abc' * 99}]")
    assert long.codes == [2] and "eval.prompts: number 1 has" in long.output
    assert "Traceback" not in failing.output + long.output


@pytest.mark.unit
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("eval.patience=2 eval.every=0", "eval.patience: compares the evaluations of a run, and eval.every is 0"),
        ("save.best=true eval.every=0", "save.best: compares the evaluations of a run"),
        ("save.best=true eval.fraction=0", "save.best: needs held-out documents"),
        ("eval.metric=exact_match eval.fraction=0", "eval.metric: needs held-out documents"),
        (
            "eval.metric=bleu",
            "eval.metric: must be exact_match, or your function such as scores.py:score, found",
        ),
        ("eval.metric=scores.py", "eval.metric: must be exact_match"),
        ("eval.metric=exact_match data.supervise=all", "eval.metric: data.supervise=all trains questions too"),
        ("eval.metric_documents=1000", "eval.metric_documents: "),
        ('eval.prompts=[""]', "eval.prompts.0: "),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        load_recipe(ROOT / "recipes/tiny.yaml", given.split())


@pytest.mark.unit
def test_the_best_evaluation_is_the_first_with_the_highest_finite_score():
    state = TrainState()
    state.judge_by("held-out loss", "")
    for step, score in enumerate([9.0, -3.0, -2.0, math.nan, -2.0, -1.0, -math.inf]):
        state.step = step
        state.judge(score)
    assert (state.best_step, state.best_score, state.num_not_better, state.score_before) == (5, -1.0, 1, 9.0)
    assert TrainState.from_json(state.to_json()) == state
    state.judge_by("exact_match", "")
    state.judge(0.5)
    assert (state.best_step, state.best_score, state.num_not_better, state.score_before) == (6, 0.5, 0, None)
    earlier = TrainState(step=4).to_json()
    for name in ("best_by", "best_on", "best_step", "best_score", "num_not_better", "score_before"):
        del earlier[name]
    assert TrainState.from_json(earlier | {"answers_before": {"a": "b"}}) == TrainState(step=4)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("given", "held_out", "goes_on"),
    [
        ("", "a", False),
        ("eval.metric=exact_match", "a", True),
        ("", "b", True),
        ("eval.path=builtin:tasks", "a", False),
    ],
)
def test_a_run_that_stopped_early_goes_on_if_it_is_judged_by_something_else(given, held_out, goes_on):
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", ["eval.patience=2", "eval.every=1", *given.split()])
    for on in ("", best_by(load_recipe(ROOT / "recipes/tiny.yaml", []).eval, "a")[1]):
        saved = TrainState(step=5, best_by="held-out loss", best_on=on, best_step=3, best_score=-1.0, num_not_better=2)
        state = TrainState.from_json(saved.to_json())
        state.judge_by(*best_by(recipe.eval, held_out))
        is_other = goes_on and (bool(on) or bool(given))  # an earlier version did not name the documents
        assert last_step(recipe.eval, state, 9) == (9 if is_other else 5)
        assert (state.best_step, state.best_score) == ((0, None) if is_other else (3, -1.0))


@pytest.mark.unit
@pytest.mark.parametrize("key", ["eval.patience=2", "save.best=true"])
def test_evaluations_to_compare_need_a_held_out_document(key):
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", ["eval.every=1", key, "eval.fraction=0.01"])
    with pytest.raises(
        UserError, match=rf"^{key.split('=')[0]}: .* eval\.fraction=0\.01 holds out none of these; raise"
    ):
        refuse_nothing_held_out(recipe, 0)
    refuse_nothing_held_out(recipe, 1)
    refuse_nothing_held_out(load_recipe(ROOT / "recipes/tiny.yaml", []), 0)
