"""The loop itself: what it records, how long it runs, what it says of answers, and what a failure leaves."""

import json
import math
import os
import signal
import time

import pytest
import transformers

from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.data import corpus, splits

TRAINING_KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_supervised", "tokens_per_second", "rows_hash", "seconds",
    "memory_peak_bytes", "num_skipped",
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
    held_out = splits.split_and_pack(recipe, documents, None, tokenizer, packing=True).samples
    assert len(held_out) == outcome.output.count("question ")
    right = 0
    for sample in held_out:
        asked = [{"role": "user", "content": sample.question}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        reply = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
        right += tokenizer.decode(reply) == sample.answer + "<|end|>"
    exact = outcome.lines("eval_exact_match")[-1]["eval_exact_match"]
    assert 0 < exact < 1, "the comparison needs right and wrong answers"
    assert exact == pytest.approx(right / len(held_out))


def test_epochs_become_steps(train):
    outcome = train("single", "train.steps=null", "train.epochs=1", "batch.rows=16", "batch.micro_rows=16")
    num_rows = int(outcome.output.split(" of 128 tokens")[0].split()[-1])
    assert len(outcome.losses) == math.ceil(num_rows / 16) > 3


def test_a_run_that_fails_after_its_first_step_keeps_its_numbers(train):
    outcome = train("single", "optim.lr=1e30", "optim.max_grad_norm=0", "train.steps=9")
    assert outcome.codes == [2]
    assert "not finite for 3 steps in a row (run.max_bad_steps); lower optim.lr" in outcome.output
    assert [line["grad_norm"] for line in outcome.lines("grad_norm")][-3:] == [None] * 3
    assert not (outcome.folder / "model").exists()
    assert outcome.losses


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("gear", ["ddp", "fsdp", "zero3"])
def test_every_method_runs_in_bf16(train, monkeypatch, gear, method):
    """In the precision of the gears' files, as on a GPU, with the numbers of fp32 to about three digits."""
    from gearbox.distributed import engine

    changes = {"full": (), "lora": ("adapter.method=lora",), "qlora": ("adapter.method=lora", "model.quantize=nf4")}
    fp32 = train(gear, *changes[method], ranks=2)
    monkeypatch.setattr(engine, "precision", lambda gear: gear.precision)
    bf16 = train(gear, *changes[method], ranks=2)
    assert set(fp32.codes + bf16.codes) == {0}, fp32.output + bf16.output
    assert bf16.losses == pytest.approx(fp32.losses, rel=2e-2)
    assert bf16.losses != fp32.losses


def test_bf16_masters_under_fsdp(train, monkeypatch):
    from gearbox.distributed import engine

    monkeypatch.setattr(engine, "precision", lambda gear: gear.precision)
    outcome = train("fsdp", "optim.master_weights=bf16", ranks=2)
    assert outcome.codes == [0, 0], outcome.output
    half = train("fsdp", ranks=2)
    assert outcome.losses == pytest.approx(half.losses, rel=2e-2)
    held = [float(o.output.split("parameters on this rank")[1].split()[2]) for o in (outcome, half)]
    assert held[0] == pytest.approx(held[1] / 2, abs=0.1), "bf16 takes half of fp32"


def jsonl(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_chats_of_unusual_shape_end_without_a_traceback(train, tmp_path):
    """A system turn first, and chats that ask nothing: trained, never put as a question."""
    shapes = [("system", "assistant"), ("system", "user", "assistant")]
    chats = [[{"role": role, "content": f"abc {i}"} for role in shapes[i % 2]] for i in range(60)]
    path = jsonl(tmp_path / "odd.jsonl", [{"messages": chat} for chat in chats])
    odd = (f"data.path={path}", "eval.fraction=0.5", "eval.samples=9", "eval.sample_tokens=1")
    outcome = train("single", *odd, load_back=True)
    assert outcome.codes == [0], outcome.output
    asked = [line for line in outcome.output.splitlines() if line.startswith("question")]
    assert asked
    assert all(int(line.split()[-1]) % 2 == 1 for line in asked), "only the shape with a question and an answer"


@pytest.mark.parametrize("gear", ["single", "fsdp", "zero3"])
def test_a_model_that_lets_packed_documents_see_each_other_gets_one_a_row(train, tmp_path, gear):
    """LFM2's convolutions run through a packed row. The loss must be that of the documents one at a time."""
    folder = tmp_path / "lfm2"
    settings = transformers.Lfm2Config(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(ROOT / "recipes/tiny").save_pretrained(folder)
    given = (f"model.name={folder}", "model.init=pretrained", "run.rehearse=false", "batch.micro_rows=3")
    packed = train(gear, *given, ranks=2 if gear != "single" else 1)
    assert set(packed.codes) == {0}, packed.output
    assert "this model does not keep them apart, so each row holds one document" in packed.output
    assert "of a document each" in packed.output and " filled, " not in packed.output
    padded = train(gear, *given, "data.packing=false", ranks=2 if gear != "single" else 1)
    assert packed.losses == padded.losses
    assert "does not keep them apart" not in padded.output


def test_documents_that_are_not_trained_are_listed_in_the_runs_folder(train, tmp_path):
    records = [{"instruction": f"q{i}", "output": "a"} for i in range(30)]
    records[7] = {"instruction": "q7"}
    records[9]["instruction"] = "q" * 200
    path = jsonl(tmp_path / "a.jsonl", records)
    outcome = train("ddp", f"data.path={path}", "data.on_bad_row=skip", "eval.fraction=0.1", ranks=2)
    assert set(outcome.codes) == {0}, outcome.output
    listed = [json.loads(line) for line in (outcome.folder / "dropped.jsonl").read_text().splitlines()]
    assert listed == [
        {"place": f"{path}:8", "reason": "output: is missing; the fields are instruction"},
        {"place": f"{path}:10", "reason": "no supervised token before the cut"},
    ]
    told = next(line for line in outcome.output.splitlines() if line.startswith("documents "))
    read, trained, held_out, dropped = [int(word) for word in told.split() if word.isdigit()][:4]
    assert (read, dropped) == (30, 2) and read == trained + held_out + dropped


def test_a_bad_row_ends_every_rank_before_the_run_has_a_folder(train, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": 5}])
    outcome = train("ddp", f"data.path={path}", ranks=2)
    assert outcome.codes[0] == 2 and outcome.folder is None
    assert f"{path}:2: text: must be text, found a number" in outcome.output
    assert outcome.output.count("must be text") == 1, "the rank that waits has nothing to say"


def one_dies(*_):
    """The first process of the pool that comes here; the others go on."""
    try:
        os.mkdir(os.environ["DIED"])  # noqa: PTH102
    except FileExistsError:
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_tokenizing_process_that_is_killed_ends_the_run(train, tmp_path, monkeypatch):
    """The others are ended by SIGTERM, which must not be caught by the watch that they have inherited."""
    from gearbox.data import tokenization

    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    monkeypatch.setattr(tokenization, "_run_worker", one_dies)
    outcome = train("single", "data.path=builtin:tasks", "data.supervise=last")
    assert outcome.codes == [2], outcome.output


def test_ranks_that_read_different_data_are_refused(train, tmp_path, monkeypatch):
    """As machines do whose copies of a file differ."""
    from gearbox.data import corpus

    usual = corpus.load_corpora

    def of_rank(recipe, tokenizer, is_builder, tell):
        monkeypatch.setattr(corpus, "BUILDER_FIRST_SECONDS", 0)
        path = jsonl(tmp_path / f"{is_builder}.jsonl", [{"text": f"{is_builder} {i}"} for i in range(50)])
        here = recipe.data.model_copy(update={"path": str(path)})
        return usual(recipe.model_copy(update={"data": here}), tokenizer, is_builder, tell)

    monkeypatch.setattr(corpus, "load_corpora", of_rank)
    outcome = train("ddp", ranks=2)
    assert outcome.codes == [2, 2] and outcome.folder is None
    assert "data.path: the ranks 1 have read other data than rank 0; is it the same on every machine?" in outcome.output


def test_a_run_shows_what_it_trains_on(train):
    outcome = train("ddp", ranks=2)
    assert outcome.output.count("supervised between « and »") == 1
    assert "<|assistant|>«" in outcome.output
    assert "a neighbour changes a token's loss by 0" in outcome.output


def test_plain_text_and_weighted_sources_train_alike_on_any_ranks(train, tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": f"plain text {i} " * (1 + i % 40)} for i in range(60)])
    path = f"[{{path: {tmp_path}/a.jsonl, weight: 2}}, {{path: builtin:tasks, weight: 1}}]"
    runs = [
        train("single" if ranks == 1 else "ddp", f"data.path={path}", f"batch.micro_rows={micro}", ranks=ranks)
        for ranks, micro in ((1, 6), (2, 1), (3, 2))
    ]
    assert all(set(run.codes) == {0} for run in runs), runs[0].output
    assert len({tuple(line["rows_hash"] for line in run.lines("rows_hash")) for run in runs}) == 1
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-5)


def test_packing_or_not_the_documents_have_the_same_losses(train):
    """The held-out loss is over the same documents, whatever row they are in."""
    found = []
    for packing in ("true", "false"):
        outcome = train("single", f"data.packing={packing}", "eval.fraction=0.3", "train.steps=1", "optim.lr=1e-9",
                        "schedule.warmup_steps=0")  # fmt: skip
        assert outcome.codes == [0], outcome.output
        found.append(outcome.lines("eval_loss")[0]["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
