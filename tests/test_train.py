"""The loop itself: what it records, how long it runs, what it says of answers, and what a failure leaves."""

import json
import math

import pytest
import transformers

import train as script
from gearbox import data
from gearbox.config import ROOT, load_recipe

TRAINING_KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_supervised", "tokens_per_second", "rows_hash", "seconds",
    "memory_peak_bytes",
}  # fmt: skip


def test_metrics_have_the_documented_keys(train):
    outcome = train("ddp", "train.steps=4", "eval.every=2", "eval.fraction=0.2", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    lines = outcome.lines("loss")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(set(line) == TRAINING_KEYS for line in lines)
    assert [line["step"] for line in outcome.lines("eval_loss")] == [0, 2, 4]
    assert lines[-1]["tokens"] > lines[-1]["tokens_supervised"] > 0
    assert len({line["rows_hash"] for line in lines}) == 4
    assert outcome.output.count("step 4/4") == 2, "the last step and the last evaluation, each from one rank"


def test_evaluation_agrees_on_any_number_of_ranks(train):
    found = []
    for ranks in (1, 2, 3):
        outcome = train("single" if ranks == 1 else "ddp", "eval.fraction=0.2", "train.steps=2", ranks=ranks)
        found.append([(line["eval_loss"], line["eval_exact_match"]) for line in outcome.lines("eval_loss")])
    for others in found[1:]:
        for (loss, exact), (first_loss, first_exact) in zip(others, found[0], strict=True):
            assert loss == pytest.approx(first_loss, rel=1e-5)
            assert exact == first_exact


def test_exact_match_is_what_greedy_decoding_gives(train, tmp_path):
    """The share that one forward pass claims against answers generated a token at a time by the saved model."""
    lengths = ("train.steps=150", "optim.lr=1e-2", "batch.rows=32", "batch.micro_rows=32", "batch.row_tokens=32")
    path = tmp_path / "two.jsonl"
    letters = [a + b for a in "abcdefgh" for b in "abcdefgh"]
    turn = '{{"messages": [{{"role": "user", "content": "{}"}}, {{"role": "assistant", "content": "{}"}}]}}'
    path.write_text("\n".join(turn.format(pair, pair[1] if pair < "e" else pair) for pair in letters))
    outcome = train("single", *lengths, f"data.path={path}", "eval.fraction=0.3")
    assert outcome.codes == [0], outcome.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(outcome.folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(outcome.folder / "model")
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", [f"data.path={path}"])
    held_out = data.prepare(recipe.data, tokenizer, 32, 0.3, 1000)
    right = 0
    for chat in held_out.questions:
        ids = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        reply = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
        right += tokenizer.decode(reply) == chat[1]["content"] + "<|end|>"
    exact = outcome.lines("eval_exact_match")[-1]["eval_exact_match"]
    assert 0 < exact < 1, "the comparison needs right and wrong answers"
    assert exact == pytest.approx(right / len(held_out.questions))


def test_epochs_become_steps(train):
    outcome = train("single", "train.steps=null", "train.epochs=1", "batch.rows=16", "batch.micro_rows=16")
    num_rows = int(outcome.output.split(" rows of 128")[0].split()[-1])
    assert len(outcome.losses) == math.ceil(num_rows / 16) > 3


def test_a_run_that_fails_after_its_first_step_keeps_its_numbers(train):
    outcome = train("single", "optim.lr=1e30", "optim.max_grad_norm=0", "train.steps=5")
    assert outcome.codes == [2]
    assert "the loss is nan; lower optim.lr" in outcome.output or "the loss is inf" in outcome.output
    assert not (outcome.folder / "model").exists()
    assert outcome.losses


def test_folders_are_claimed_one_by_one(tmp_path):
    assert [script.claim_folder(tmp_path / "runs", "x").name for _ in range(3)] == ["x", "x-2", "x-3"]


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("gear", ["ddp", "fsdp", "zero3"])
def test_every_method_runs_in_bf16(train, monkeypatch, gear, method):
    """In the precision of the gears' files, as on a GPU, with the numbers of fp32 to about three digits."""
    from gearbox import backend

    changes = {"full": (), "lora": ("adapter.method=lora",), "qlora": ("adapter.method=lora", "model.quantize=nf4")}
    fp32 = train(gear, *changes[method], ranks=2)
    monkeypatch.setattr(backend, "precision", lambda gear: gear.precision)
    bf16 = train(gear, *changes[method], ranks=2)
    assert set(fp32.codes + bf16.codes) == {0}, fp32.output + bf16.output
    assert bf16.losses == pytest.approx(fp32.losses, rel=2e-2)
    assert bf16.losses != fp32.losses


def test_bf16_masters_under_fsdp(train, monkeypatch):
    from gearbox import backend

    monkeypatch.setattr(backend, "precision", lambda gear: gear.precision)
    outcome = train("fsdp", "optim.master_weights=bf16", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    half = train("fsdp", ranks=2)
    assert outcome.losses == pytest.approx(half.losses, rel=2e-2)
    held = [float(o.output.split("parameters on this rank")[1].split()[2]) for o in (outcome, half)]
    assert held[0] == pytest.approx(held[1] / 2, abs=0.1), "bf16 takes half of fp32"


def test_chats_of_unusual_shape_end_without_a_traceback(train, tmp_path):
    """A system turn first, and chats without a question or an answer: trained where asked, never put as a question."""
    path = tmp_path / "odd.jsonl"
    shapes = [("system", "assistant"), ("system", "user", "assistant"), ("user",)]
    chats = [[{"role": role, "content": f"abc {i}"} for role in shapes[i % 3]] for i in range(60)]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    odd = (f"data.path={path}", "data.supervise=all", "eval.fraction=0.5", "eval.samples=9", "eval.sample_tokens=1")
    outcome = train("single", *odd, load_back=True)
    assert outcome.codes == [0], outcome.output
    asked = [line for line in outcome.output.splitlines() if line.startswith("question")]
    assert asked
    assert all(int(line.split()[-1]) % 3 == 1 for line in asked), "only the shape with a question and an answer"
