"""Test that held-out loss, exact match and sample answers match the model on any number of ranks."""

import re

import pytest
import transformers

from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.data import corpus
from gearbox.rows import arranged
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
