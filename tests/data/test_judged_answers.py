"""Guards answers that are judged: both answers of a pair follow one prompt, and a bad pair is lost as one record."""

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

import prepare
from gearbox import ROOT
from gearbox.checks.documents import FirstRecords
from gearbox.data import judged_answers
from gearbox.data.corpus import MappedDocuments
from gearbox.data.judged_answers import hash_of_pair
from gearbox.data.row_formats import FieldNames, InvalidRecord
from gearbox.errors import UserError
from gearbox.rows import stream
from gearbox.rows.shard_index import FORMAT, INDEX
from support.corpora import QUIET, jsonl, read, recipe_of
from support.template_chats import call, result, tool, turn
from support.templates import Subject

ASK, MORE, YES, NO = turn("user", "ask"), turn("user", "more"), turn("assistant", "yes"), turn("assistant", "no")
THOUGHT = turn("assistant", "yes", reasoning_content="let me see")
CALL = turn("assistant", "", tool_calls=[call(city="Bern")])
PAIR = {"prompt": "ask", "chosen": "yes", "rejected": "no"}
ASKED = "<|user|>ask<|end|><|assistant|>"
BOTH = [f"{ASKED}«yes<|end|>»", f"{ASKED}«no<|end|>»"]


def marked(tokenizer, found) -> list[str]:
    """Return the documents with their trained tokens between marks."""
    documents = []
    for i in range(len(found)):
        tokens, mask = found.tokens(i), found.loss_mask(i)
        pieces = [
            f"«{tokenizer.decode([t])}»" if on else tokenizer.decode([t]) for t, on in zip(tokens, mask, strict=True)
        ]
        documents.append("".join(pieces).replace("»«", ""))
    return documents


def compare(tokenizer, path, *overrides: str, objective: str = "dpo"):
    return read(tokenizer, path, f"train.objective={objective}", *overrides)


LAYOUTS = {
    "texts": (PAIR, []),
    "alpaca": ({"instruction": "ask", "input": "", "chosen": "yes", "rejected": "no"}, []),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "ask"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
        },
        [],
    ),
    "explicit": ({"prompt": [ASK], "chosen": [YES], "rejected": [NO]}, []),
    "explicit, then texts": ({"prompt": [ASK], "chosen": "yes", "rejected": "no"}, []),
    "implicit": ({"chosen": [ASK, YES], "rejected": [ASK, NO]}, []),
    "prompt repeated": ({"prompt": [ASK], "chosen": [ASK, YES], "rejected": [ASK, NO]}, []),
    "ultrafeedback": (
        {"prompt": "ask", "chosen": [ASK, YES], "rejected": [ASK, NO], "messages": [ASK, YES], "score_chosen": 1.0},
        [],
    ),
    "orca": ({"system": "", "question": "ask", "chosen": "yes", "rejected": "no"}, ["data.fields={prompt: question}"]),
    "other names": (
        {"good": [{"by": "ai", "is": "yes"}], "bad": [{"by": "ai", "is": "no"}], "q": "ask"},
        ["data.fields={prompt: q, chosen: good, rejected: bad, role: by, content: is}", "data.roles={ai: assistant}"],
    ),
    "nulls beside": (PAIR | {"instruction": None, "system": None, "tools": None, "conversations": None}, []),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_both_answers_after_one_prompt(tokenizer, tmp_path, layout):
    record, overrides = LAYOUTS[layout]
    found = compare(tokenizer, jsonl(tmp_path / "a.jsonl", [record]), *overrides)
    assert marked(tokenizer, found) == BOTH
    assert found.labels.tolist() == [1, 0] and found.labels.dtype == np.int8
    assert found.location(0) == found.location(1) == f"{tmp_path}/a.jsonl:1"
    (asked,) = found.questions
    assert (asked.document, asked.question, asked.answer, asked.rejected) == (0, "ask", "yes", "no")


def test_turns_of_the_prompt_are_context_and_all_of_the_answer_is_trained(tokenizer, tmp_path):
    before = [turn("system", "s"), MORE, NO, ASK]
    record = {"chosen": [*before, YES, MORE, NO], "rejected": [*before, NO, ASK, YES], "system": "s"}
    path = jsonl(tmp_path / "a.jsonl", [record])
    context = "<|system|>s<|end|><|user|>more<|end|><|assistant|>no<|end|><|user|>ask<|end|><|assistant|>"
    assert marked(tokenizer, compare(tokenizer, path)) == [
        f"{context}«yes<|end|>»<|user|>more<|end|><|assistant|>«no<|end|>»",
        f"{context}«no<|end|>»<|user|>ask<|end|><|assistant|>«yes<|end|>»",
    ]
    assert marked(tokenizer, compare(tokenizer, path, "data.supervise=last")) == [
        f"{context}yes<|end|><|user|>more<|end|><|assistant|>«no<|end|>»",
        f"{context}no<|end|><|user|>ask<|end|><|assistant|>«yes<|end|>»",
    ]


def test_the_prompt_of_plain_texts_is_what_both_begin_with(tokenizer, tmp_path):
    texts = [{"chosen": f"\n\nHuman: a\n\nAssistant: {a}", "rejected": f"\n\nHuman: a\n\nAssistant: {b}"} for a, b in
             [("hi", "go"), ("go", "go on")]]  # fmt: skip
    found = compare(tokenizer, jsonl(tmp_path / "a.jsonl", texts))
    start = "\n\nHuman: a\n\nAssistant: "
    ends = ["«hi<|end|>»", "«go<|end|>»", "go«<|end|>»", "go« on<|end|>»"]
    assert marked(tokenizer, found) == [start + end for end in ends]
    assert found.summaries[0].form == "preference" and found.questions == []


def bad_pair(chosen, rejected, **more):
    return {"chosen": chosen, "rejected": rejected, **more}


# The second line of a file, and the start of the error that it causes.
BAD_PAIRS = {
    "equal": (PAIR | {"rejected": "yes"}, "rejected: equals chosen"),
    "equal but for weights": (bad_pair([ASK, YES | {"weight": 1}], [ASK, YES]), "rejected: equals chosen"),
    "empty": (PAIR | {"chosen": ""}, "chosen: is empty"),
    "blank": (PAIR | {"rejected": " \n"}, "rejected: is empty"),
    "blank turn": (bad_pair([ASK, YES], [ASK, turn("assistant", " ")]), "rejected[1].content: is empty"),
    "no turns": (bad_pair([], [ASK, NO]), "chosen: is empty"),
    "missing": ({"prompt": "ask", "chosen": "yes"}, "rejected: is missing"),
    "null": (PAIR | {"rejected": None}, "rejected: is null"),
    "prompt null": (PAIR | {"prompt": None}, "prompt: is null"),
    "prompt empty": (PAIR | {"prompt": ""}, "prompt: is empty"),
    "prompt a number": (PAIR | {"prompt": 5}, "prompt: must be a string or a list of turns, found a number"),
    "a number": (PAIR | {"chosen": 5}, "chosen: must be a text, a turn or a list of turns, found a number"),
    "two kinds": (PAIR | {"rejected": [NO]}, "rejected: must be of the same kind as chosen, found a list"),
    "other questions": (bad_pair([ASK, YES], [MORE, NO]), "chosen[0]: is a user turn that differs from rejected[0]"),
    "other questions later": (
        bad_pair([ASK, YES, ASK, NO], [ASK, YES, MORE, NO]), "chosen[2]: is a user turn that differs from rejected[2]",
    ),
    "another prompt": (bad_pair([ASK, YES], [ASK, NO], prompt="more"), "prompt: differs from the user turns that c"),
    "another list": (bad_pair([ASK, YES], [ASK, NO], prompt=[MORE]), "chosen[0]: is a user turn that differs from pro"),
    "another list in one": (bad_pair([ASK, YES], [MORE, NO], prompt=[ASK]), "rejected[0]: is a user turn that differs"),
    "no prompt": (bad_pair([YES], [NO]), "chosen[0]: is an assistant turn without a prompt"),
    "no prompt of texts": (bad_pair("yes", "no"), "chosen: shares no beginning with rejected"),
    "unmapped prompt": (bad_pair("so yes", "so no", question="a"), "chosen: is a text without a prompt; the record"),
    "a user answers": (bad_pair({"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, prompt="ask"),
                       "chosen: must be an assistant turn, found a user turn"),
    "one user answers": (bad_pair([YES], [MORE], prompt="ask"), "rejected[0]: must be an assistant turn as in chosen"),
    "no answer": (bad_pair([ASK], [ASK, NO]), "chosen: its answer is empty"),
    "no answer in text": (bad_pair("Q: a\nA:", "Q: a\nA: b"), "chosen: its answer is empty, after"),
    "nothing supervised": (bad_pair([ASK, YES], [ASK, NO | {"weight": 0}]), "rejected: has no supervised token"),
    "rejected by the template": (bad_pair([ASK, YES], [ASK, THOUGHT]), "rejected: turn 2 (assistant): the chat templ"),
    "an image": (PAIR | {"images": ["a.png"]}, "images: is an image"),
    "not UTF-8": (PAIR | {"chosen": "\ud800"}, "chosen: is not UTF-8"),
    "a usual chat": ({"messages": [ASK, YES]}, "chosen: is missing: this row has chat messages"),
}  # fmt: skip


def test_bad_pairs_are_named_and_dropped_as_one_record_each(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [PAIR, *(record for record, _ in BAD_PAIRS.values()), PAIR])
    found = compare(tokenizer, path, "data.on_bad_row=skip")
    assert marked(tokenizer, found) == BOTH * 2
    assert [entry.number for entry in found.bad] == [*range(2, len(BAD_PAIRS) + 2)]
    for (kind, (_, message)), entry in zip(BAD_PAIRS.items(), found.bad, strict=True):
        assert entry.reason.startswith(message) and "\n" not in entry.reason, kind
    with pytest.raises(UserError, match=r"a\.jsonl:2: rejected: equals chosen, so neither is better; remove the pair"):
        compare(tokenizer, path)


def test_answers_that_a_template_makes_equal_are_no_pair(tokenizer, tmp_path, monkeypatch):
    template = tokenizer.chat_template.replace("message['content']", "message['content'] | trim")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=r"a\.jsonl:1: rejected: has the same tokens as chosen; remove the pair"):
        compare(tokenizer, jsonl(tmp_path / "a.jsonl", [PAIR | {"rejected": "yes \n"}]))


WEATHER = [tool("weather", city="string")]
KINDS = {
    "several turns": bad_pair([ASK, NO, MORE, YES], [ASK, NO, MORE, NO]),
    "a thought in the chosen answer": bad_pair([THOUGHT], [NO], prompt="ask", system="Be brief."),
    "a thought in the prompt": bad_pair([ASK, THOUGHT, MORE, YES], [ASK, THOUGHT, MORE, NO]),
    "a call": bad_pair([CALL], [NO], prompt="ask", tools=WEATHER),
    "a call and its result": bad_pair([CALL, result(), YES], [NO], prompt=[ASK], tools=WEATHER),
}


TEMPLATES = {  # and the kinds that they render
    "recipes/chat_templates/chatml_tools": {*KINDS} - {"a thought in the chosen answer"},
    "tests/data/templates/llama_like": {*KINDS} - {"a thought in the chosen answer"},
    "tests/data/templates/qwen_like": {*KINDS},
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_have_the_same_tokens_up_to_the_trained_answers(template):
    subject, rendered = Subject((ROOT / f"{template}.jinja").read_text(), None, "<|im_end|>"), set()
    for kind, record in KINDS.items():
        answers = judged_answers.read(record, FieldNames("preference", {}, {}))
        outcomes = subject.encoder("assistant").encode([answer.document for answer in answers])
        if not any(isinstance(outcome, InvalidRecord) for outcome in outcomes):
            rendered.add(kind)
            chosen, rejected = judged_answers.finish(answers, outcomes, "preference")
            first = min(int(np.argmax(one.loss_mask)) for one in (chosen, rejected))
            assert chosen.tokens[:first].tolist() == rejected.tokens[:first].tolist(), kind
            trained = subject.tokenizer.decode(rejected.tokens[rejected.loss_mask == 1])
            assert trained.removeprefix("<think>\n\n</think>\n\n").startswith("no"), kind
    assert rendered == TEMPLATES[template]


def test_a_label_judges_the_last_answer(tokenizer, tmp_path):
    records = [
        {"messages": [ASK, YES, ASK, NO], "label": False},
        {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "yes"}], "label": True},
        {"prompt": "ask", "completion": "yes", "label": 1},
        {"prompt": [ASK], "completion": [YES, ASK, NO], "label": 0},
        {"instruction": "ask", "output": "no", "label": "False"},
    ]
    found = compare(tokenizer, jsonl(tmp_path / "a.jsonl", records), objective="kto")
    assert marked(tokenizer, found) == [
        f"{ASKED}yes<|end|>{ASKED}«no<|end|>»", BOTH[0], BOTH[0], f"{BOTH[0]}{BOTH[1]}", BOTH[1],
    ]  # fmt: skip
    assert found.labels.tolist() == [0, 1, 1, 0, 0]
    assert {(asked.document, asked.answer, asked.rejected) for asked in found.questions} == {(1, "yes", None)}
    assert found.summaries[0].form == "label"


BAD_LABELS = [
    ({"messages": [ASK, YES], "label": "good"}, "label: must be true or false, found the string 'good'"),
    ({"messages": [ASK, YES], "label": 2}, "label: must be true or false, found the number 2"),
    ({"messages": [ASK, YES], "label": [True]}, "label: must be true or false, found a list"),
    ({"messages": [ASK, YES], "label": None}, "label: is null"),
    ({"messages": [ASK, YES], "label": ""}, "label: is empty"),
    ({"messages": [ASK, YES]}, "label: is missing"),
    ({"text": "yes", "label": True}, "label: judges no answer: the other fields are 'text', not messages | conv"),
    ({"messages": [ASK, YES | {"weight": 0}], "label": True}, "messages: has no supervised token"),
    ({"prompt": "ask", "completion": " ", "label": True}, "completion: is empty"),
]


def test_bad_labels_are_named(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": [ASK, YES], "label": True}, *(record for record, _ in BAD_LABELS)])
    found = compare(tokenizer, path, "data.on_bad_row=skip", objective="kto")
    assert len(found) == 1 and len(found.bad) == len(BAD_LABELS)
    for (_, message), entry in zip(BAD_LABELS, found.bad, strict=True):
        assert entry.reason.startswith(message), message


def test_files_of_all_kinds_are_mixed(tokenizer, tmp_path):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["q", "a", "kto_tag"], ["ask", "yes", "true"], ["ask", "no", "0"]])
    pq.write_table(pa.Table.from_pylist([bad_pair([ASK, YES], [ASK, NO], prompt=None)]), tmp_path / "b.parquet")
    names = "{prompt: q, completion: a, label: kto_tag}"
    listed = f"[{{path: {tmp_path}/a.csv, fields: {names}}}, {tmp_path}/b.parquet]"
    found = compare(tokenizer, listed, objective="kto")
    assert marked(tokenizer, found) == BOTH * 2 and found.labels.tolist() == [1, 0, 1, 0]
    assert [summary.form for summary in found.summaries] == ["label", "preference"]
    with pytest.raises(UserError, match=r"a\.csv:1: the header: has answers with a label .*; set train.objective=kto"):
        compare(tokenizer, listed)


@pytest.mark.parametrize(
    ("record", "objective", "message"),
    [
        (
            {"messages": [ASK, YES]},
            "dpo",
            "has chat messages, but the objective compares answers and needs chosen, reject",
        ),
        (
            {"text": "a"},
            "kto",
            "has plain text, but the objective compares answers and needs chosen, rejected | label; s",
        ),
        (
            {"a": "a", "b": "b"},
            "orpo",
            "the fields 'a', 'b' match no known format (chosen, rejected); map them in data.",
        ),
        ({"prompt": "ask", "chosen": "yes"}, "dpo", "rejected: is missing"),
    ],
)
def test_a_file_without_pairs_is_refused_with_what_it_has(tokenizer, tmp_path, record, objective, message):
    path = jsonl(tmp_path / "a.jsonl", [record])
    with pytest.raises(UserError) as caught:
        compare(tokenizer, path, objective=objective)
    assert str(caught.value).startswith(f"{path}:1: {message}")


def test_the_key_and_the_digest_of_documents_depend_on_their_judgement(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [PAIR | {"messages": [ASK, YES]}])
    usual, dpo, kto = (compare(tokenizer, path, objective=objective) for objective in ("sft", "dpo", "kto"))
    assert len(usual) == 1 and len({usual.key, dpo.key, kto.key}) == 3 and dpo.digest == kto.digest
    digests = set()
    for labels in [(True, False), (False, True), (True, True)]:
        records = [
            {"prompt": "ask", "completion": text, "label": label} for text, label in zip("ab", labels, strict=True)
        ]
        digests.add(compare(tokenizer, jsonl(tmp_path / "b.jsonl", records), objective="kto").digest)
    assert len(digests) == 3


def test_the_hash_of_a_pair_is_that_of_both_documents(tokenizer, tmp_path):
    records = [PAIR | {"prompt": f"ask {i}"} for i in range(20)]
    found = compare(tokenizer, jsonl(tmp_path / "a.jsonl", records))
    pairs = [hash_of_pair(*pair) for pair in found.hashes.reshape(-1, 2).tolist()]
    first = found.hashes[:2].astype("<u8").tobytes()
    assert len(first) == 16 and int(pairs[0]) == xxhash.xxh3_64_intdigest(first)
    assert int(pairs[3]) == hash_of_pair(int(found.hashes[6]), int(found.hashes[7]))
    assert hash_of_pair(1, 2) != hash_of_pair(2, 1)
    assert [asked.document for asked in found.questions] == (2 * np.argsort(pairs)).tolist()


def test_documents_of_earlier_versions_are_usual_ones(tokenizer, tmp_path):
    found = compare(tokenizer, jsonl(tmp_path / "a.jsonl", [PAIR]))
    with pa.memory_map(str(found.path)) as file:
        table = pa.ipc.open_stream(file).read_all().drop_columns("label")
        with pa.OSFile(str(tmp_path / "old.arrow"), "wb") as old, pa.ipc.new_stream(old, table.schema) as writer:
            writer.write_table(table)
    documents = MappedDocuments(tmp_path / "old.arrow", found.origins)
    assert documents.labels.tolist() == [1, 1] and documents.lengths.tolist() == found.lengths.tolist()


def test_shards_are_neither_prepared_nor_read_for_answers_that_are_compared(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [PAIR])
    given = [str(ROOT / "recipes/tiny.yaml"), str(tmp_path / "made"), f"data.path={path}", "train.objective=dpo"]
    with pytest.raises(
        UserError, match=r"^train\.objective: dpo reads files, and no prepared shards; train with these"
    ):
        prepare.main(given)
    (tmp_path / INDEX).write_text(json.dumps({"format": FORMAT}))
    recipe = recipe_of(tmp_path, "train.objective=dpo")
    with pytest.raises(UserError, match=r"^data\.path: .* has prepared shards, but train.objective=dpo reads files"):
        stream.load_data(recipe, tokenizer, QUIET)


def test_the_checks_before_a_run_read_pairs(tmp_path):
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", [PAIR, PAIR | {"rejected": "yes"}]), "train.objective=dpo")
    (found,) = FirstRecords("data.path", recipe.data, recipe.data.sources[0], recipe.forms).of_each_file()
    assert found.form == "preference"
    assert [text for text, _ in found.problems] == [
        f"{tmp_path}/a.jsonl:2: rejected: equals chosen, so neither is better; remove the pair"
    ]
    texts = recipe_of(jsonl(tmp_path / "a.jsonl", [bad_pair("Q: yes", "Q: no")]), "train.objective=dpo")
    (found,) = FirstRecords("data.path", texts.data, texts.data.sources[0], texts.forms).of_each_file()
    assert found.form == "text" and not found.problems, "such a file needs no chat template"
