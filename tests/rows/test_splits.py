"""Guards splits: a document is trained, held out or dropped with a reason, and no copy is on both sides."""

import pytest

from gearbox.errors import UserError
from gearbox.reporting import plan
from support.corpora import BYE, HI, add_up, arranged, jsonl, read, recipe_of


def test_sources_with_weights_and_field_names(tokenizer, tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"question": f"q{i}", "answer": "yes"} for i in range(40)])
    jsonl(tmp_path / "b.jsonl", [{"text": f"text {i}"} for i in range(40)])
    path = (
        f"[{{path: {tmp_path}/a.jsonl, weight: 3, fields: {{instruction: question, output: answer}}}},"
        f" {{path: {tmp_path}/b.jsonl, weight: 1}}]"
    )
    found, prepared = arranged(tokenizer, path, "batch.row_tokens=64")
    assert [summary.form for summary in found.summaries] == ["instruction", "text"]
    first = prepared.training.group_sizes[0]
    rows = [row for step in range(50) for row in prepared.sampler.rows_of_step(step)]
    assert sum(row < first for row in rows) == 300 == 0.75 * len(rows)
    assert "75.0% of each batch from" in plan.data_facts(recipe_of(path), found, prepared, tokenizer)["packed rows"]


@pytest.mark.parametrize(
    ("length", "sizes"),
    [("train.steps=7", [4] * 7), ("train.epochs=2.5", [4] * 31 + [1]), ("train.epochs=1.1", [4] * 13 + [3])],
)
def test_the_steps_of_a_run(tokenizer, tmp_path, length, sizes):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x" * 31}] * 50)
    lengths = ["train.steps=null", "train.epochs=null", "schedule.warmup=0", length]
    _, prepared = arranged(tokenizer, path, "batch.row_tokens=32", "batch.rows=4", *lengths)
    assert len(prepared.training) == 50 and prepared.num_steps == len(sizes)
    steps = [prepared.rows_of_step(step) for step in range(len(sizes))]
    assert [len(step) for step in steps] == sizes, "only the last step is short"
    assert sorted(row for step in range(25) for row in prepared.sampler.rows_of_step(step)) == sorted([*range(50)] * 2)


def test_without_weights_sources_are_one_pool(tokenizer, tmp_path):
    for name in "ab":
        jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name}{i}"} for i in range(10)])
    found, prepared = arranged(tokenizer, f"[{{path: {tmp_path}/a.jsonl}}, {{path: {tmp_path}/b.jsonl}}]")
    assert len(found) == 20 and prepared.training.group_sizes == [1]


@pytest.mark.parametrize(
    ("long", "trained", "reason"),
    [("truncate", 3, "no supervised token before the cut"), ("drop", 2, "longer than a row"), ("split", 4, None)],
)
def test_long_documents(tokenizer, tmp_path, long, trained, reason):
    shapes = [("a", "b"), ("a", "b" * 40), ("a" * 40, "b"), ("c", "d")]
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": q, "output": a} for q, a in shapes])
    _, prepared = arranged(tokenizer, path, "batch.row_tokens=32", f"data.long={long}")
    add_up(prepared)
    assert prepared.training.num_documents == trained
    assert {entry.reason for entry in prepared.dropped()} == ({reason} if reason else set())
    facts = prepared.facts
    assert (facts.num_truncated, facts.num_split) == {"truncate": (1, 0), "split": (0, 2), "drop": (0, 0)}[long]
    total = prepared.training.targets.sum()
    assert total == {"truncate": 2 + 28 + 2, "drop": 2 + 2, "split": 2 + 2 + 41 + 2}[long]


def test_auto_truncates_chats_and_splits_text(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x" * 100}])
    jsonl(tmp_path / "b.jsonl", [{"instruction": "q", "output": "x" * 100}])
    _, prepared = arranged(tokenizer, f"{tmp_path}/*.jsonl", "batch.row_tokens=32")
    assert (prepared.facts.num_truncated, prepared.facts.num_split) == (1, 1)
    assert int(prepared.training.num_tokens.sum()) == (101 + 3) + 32, "the text is cut three times"
    assert path.exists()


def test_nothing_to_train_on_is_explained(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": "a" * 50, "output": "b"}] * 3)
    with pytest.raises(UserError) as caught:
        arranged(tokenizer, path, "batch.row_tokens=32")
    assert str(caught.value).endswith(
        "leaves nothing to train on within batch.row_tokens=32: 3 documents read, 0 held out, 3 dropped (3 no "
        "supervised token before the cut)"
    )
    (tmp_path / "b.jsonl").write_text("{\n{\n")
    with pytest.raises(UserError, match=r"none of the 2 rows in .*b\.jsonl can be used; .*b\.jsonl:1: is not JSON"):
        read(tokenizer, tmp_path / "b.jsonl", "data.on_bad_row=skip")


def test_no_copy_of_a_held_out_document_is_trained_on_in_any_order(tokenizer, tmp_path):
    records = [{"text": f"document {i % 60}"} for i in range(180)]
    splits = []
    for name, order in (("a", records), ("b", records[::-1])):
        path = jsonl(tmp_path / f"{name}.jsonl", order)
        found, prepared = arranged(tokenizer, path, "eval.fraction=0.3")
        sides = [
            [found.tokens(i).tobytes() for i in rows.chunks.document] for rows in (prepared.training, prepared.held_out)
        ]
        assert not {*sides[0]} & {*sides[1]} and min(map(len, sides)) > 20
        add_up(prepared)
        assert prepared.facts.num_duplicates == 120
        splits.append([sorted(side) for side in sides])
    assert splits[0] == splits[1]


def test_documents_that_differ_only_after_truncation_are_copies(tokenizer, tmp_path):
    records = [{"instruction": f"q{i // 10}", "output": "x" * 30 + str(i)} for i in range(400)]
    path = jsonl(tmp_path / "a.jsonl", records)
    for row_tokens, copies in ((32, 360), (64, 0)):
        found, prepared = arranged(tokenizer, path, f"batch.row_tokens={row_tokens}", "eval.fraction=0.3")
        sides = [
            {found.tokens(i)[:row_tokens].tobytes() for i in rows.chunks.document}
            for rows in (prepared.training, prepared.held_out)
        ]
        assert not sides[0] & sides[1] and all(sides)
        assert prepared.facts.num_duplicates == copies


def test_evaluation_on_a_separate_file(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": f"q{i}", "output": "a"} for i in range(20)])
    other = jsonl(tmp_path / "b.jsonl", [{"prompt": f"q{i}", "completion": "a"} for i in (3, 4, 99)])
    found, prepared = arranged(tokenizer, path, f"eval.path={other}")
    assert prepared.held_out.num_documents == 3 and prepared.training.num_documents == 18
    dropped = [(entry.location, entry.reason) for entry in prepared.dropped()]
    assert dropped == [(f"{path}:{n}", "also in eval.path") for n in (4, 5)]
    add_up(prepared)
    assert {sample.question for sample in prepared.samples} <= {"q3", "q4", "q99"} and prepared.samples
    line = plan.data_facts(recipe_of(path), found, prepared, tokenizer)["documents"]
    assert line == "20 read = 18 trained + 0 held out + 2 dropped (2 also in eval.path); evaluation: 3 from eval.path"


def test_records_that_are_not_evaluated_are_counted(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": f"q{i}", "output": "a"} for i in range(20)])
    rows = [
        {"instruction": "e1", "output": "a"},
        {"instruction": "e2", "output": ""},
        {"instruction": "e" * 99, "output": "a"},
    ]
    other = jsonl(tmp_path / "b.jsonl", rows)
    settings = (f"eval.path={other}", "data.on_bad_row=skip", "batch.row_tokens=32")
    found, prepared = arranged(tokenizer, path, *settings)
    assert [entry.location for entry in prepared.dropped()] == [f"{other}:2", f"{other}:3"]
    line = plan.data_facts(recipe_of(path), found, prepared, tokenizer)["documents"]
    assert line.endswith(
        "evaluation: 1 from eval.path, 2 dropped (1 output: is empty; 1 no supervised token before the cut)"
    )
    jsonl(other, rows[2:])
    with pytest.raises(UserError, match=r"eval.path: .* leaves nothing to evaluate on: 1 dropped"):
        arranged(tokenizer, path, *settings)


def test_split_documents_with_the_same_beginning_are_not_copies(tokenizer, tmp_path):
    rows = [{"instruction": "x" * 100, "output": f"answer {i}"} for i in range(20)]
    path = jsonl(tmp_path / "a.jsonl", rows[1:])
    other = jsonl(tmp_path / "b.jsonl", rows[:1])
    _, prepared = arranged(tokenizer, path, f"eval.path={other}", "data.long=split", "batch.row_tokens=64")
    assert (len([*prepared.dropped()]), prepared.facts.num_duplicates, prepared.training.num_documents) == (0, 0, 19)


@pytest.mark.parametrize(("supervise", "asked"), [("assistant", ("hi", "hé €  \n")), ("last", ("b", "bye"))])
def test_the_sample_of_a_long_chat_asks_for_a_trained_answer(tokenizer, tmp_path, supervise, asked):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": HI + BYE}, {"messages": BYE}])
    other = jsonl(tmp_path / "b.jsonl", [{"messages": HI + BYE}])
    _, prepared = arranged(tokenizer, path, f"eval.path={other}", f"data.supervise={supervise}")
    (sample,) = prepared.samples
    assert (sample.question, sample.answer) == asked
    assert tokenizer.decode(sample.prompt).endswith(f"<|user|>{asked[0]}<|end|><|assistant|>")


def test_samples_are_held_out_questions_with_the_trained_prompt(tokenizer, tmp_path):
    records = [{"instruction": f"q{i}", "output": f"a{i}"} for i in range(60)]
    _, prepared = arranged(tokenizer, jsonl(tmp_path / "a.jsonl", records * 2), "eval.fraction=0.3", "eval.samples=5")
    assert len({sample.question for sample in prepared.samples}) == 5
    held = {int(i) % 60 for i in prepared.held_out.chunks.document}
    for sample in prepared.samples:
        assert int(sample.question[1:]) in held and sample.answer == sample.question.replace("q", "a")
        assert tokenizer.decode(sample.prompt) == f"<|user|>{sample.question}<|end|><|assistant|>"
