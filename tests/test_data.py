"""Guards the way from documents to batches: nothing lost, nothing seen twice, nothing seen by a neighbour."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from gearbox import data
from gearbox.config import ROOT, Data, UserError
from gearbox.data import IGNORED, Document, Order, Rows, chain_hash, deal, make_step, pack, tokenize

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hé €  \n"}]
BYE = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "bye"}]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")


def random_documents(lengths: list[int], seed: int = 0, supervised: float = 0.7) -> list[Document]:
    draw = np.random.default_rng(seed)
    return [Document(draw.integers(4, 90, n), draw.random(n) < supervised) for n in lengths]


@pytest.mark.parametrize("seed", [0, 1])
def test_packing_loses_nothing_and_leaves_little_room(seed):
    row_tokens = 512
    lengths = np.random.default_rng(seed).lognormal(4.5, 1.0, 2000).astype(int).clip(1, row_tokens).tolist()
    rows = pack(lengths, row_tokens)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in row) for row in rows) <= row_tokens
    assert sum(lengths) / (len(rows) * row_tokens) >= 0.95


def test_without_packing_each_document_has_its_row():
    rows = Rows(random_documents([3, 9, 5]), 10, 0, packing=False)
    assert rows.rows == [[0], [1], [2]] and rows.filled == 17 / 30


def test_labels_and_positions_stay_inside_their_document():
    rows = Rows(random_documents([5, 7, 3, 6, 2, 9], supervised=0.6), 16, pad_token=1, packing=True)
    batch = rows.batch([*range(len(rows)), None])
    assert {(tuple(tensor.shape), tensor.dtype) for tensor in batch.values()} == {((len(rows) + 1, 16), torch.int64)}
    for i, members in enumerate([*rows.rows, []]):
        columns = []  # token, position, label, document
        for index in members:
            tokens, trained = rows.documents[index].tokens.tolist(), rows.documents[index].supervised
            labels = [tokens[t] if trained[t] else IGNORED for t in range(1, len(tokens))] + [IGNORED]
            columns += zip(tokens, range(len(tokens)), labels, [index] * len(tokens), strict=True)
        columns += [(1, position, IGNORED, -1) for position in range(16 - len(columns))]
        names = ("input_ids", "position_ids", "labels", "document_ids")
        assert torch.stack([batch[name][i] for name in names], 1).tolist() == [list(column) for column in columns]
    assert rows.targets.tolist() == (batch["labels"][:-1] != IGNORED).sum(1).tolist()


@pytest.mark.parametrize("num_rows", [1, 6, 7, 64])
@pytest.mark.parametrize("micro_rows", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_step_is_dealt_once_and_in_equal_shapes(ranks, micro_rows, num_rows):
    row_ids = list(range(100, 100 + num_rows))
    dealt = [deal(row_ids, rank, ranks, micro_rows) for rank in range(ranks)]
    assert sorted(row for share in dealt for micro in share for row in micro if row is not None) == row_ids
    (shapes,) = {tuple(map(len, share)) for share in dealt}
    assert set(shapes) == {min(micro_rows, -(-num_rows // ranks))}
    assert len(shapes) * shapes[0] * ranks - num_rows < ranks * shapes[0], "no round is all empty"


def test_a_step_counts_the_whole_on_every_rank():
    rows = Rows(random_documents([5, 7, 3, 6, 2, 9, 16]), 16, 0, packing=True)
    row_ids = [2, 0, 1]
    shares = [make_step(rows, row_ids, rank, 2, 1) for rank in range(2)]
    assert len({(share.num_targets, share.num_tokens, tuple(share.row_ids)) for share in shares}) == 1
    micro_batches = [micro for share in shares for micro in share.micro_batches]
    assert sum(int((micro["labels"] != IGNORED).sum()) for micro in micro_batches) == shares[0].num_targets > 0
    assert sum(int((micro["document_ids"] >= 0).sum()) for micro in micro_batches) == shares[0].num_tokens


def test_an_epoch_is_a_permutation_drawn_from_seed_and_epoch():
    epochs = [[Order(50, 1, seed).row(epoch * 50 + i) for i in range(50)] for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


def test_the_rows_of_a_step_depend_on_nothing_before_it():
    order = Order(23, 6, 5)
    steps = [order.step(step) for step in range(60)]
    assert Order(23, 6, 5).step(57) == steps[57] and order.step(3) == steps[3]


def test_the_hash_chain_tells_every_order_apart():
    def chain(*steps):
        value = ""
        for row_ids in steps:
            value = chain_hash(value, row_ids)
        return value

    assert chain([1, 2], [3]) == chain([1, 2], [3])
    assert len({chain([1, 2], [3]), chain([2, 1], [3]), chain([1, 2, 3]), chain([3], [1, 2]), chain([3])}) == 5


@pytest.mark.parametrize(
    ("record", "supervise", "trained"),
    [
        ({"messages": HI + BYE}, "assistant", "hé €  \n<|end|>bye<|end|>"),
        ({"messages": [{"role": "system", "content": "s"}, *BYE, *HI]}, "assistant", "bye<|end|>hé €  \n<|end|>"),
        ({"messages": BYE}, "all", "<|user|>b<|end|><|assistant|>bye<|end|>"),
        ({"instruction": "q", "input": "i", "output": "o"}, "assistant", "o<|end|>"),
        ({"instruction": "q", "input": "i", "output": "o"}, "all", "<|user|>q\n\ni<|end|><|assistant|>o<|end|>"),
        ({"instruction": "q", "input": "", "output": "o"}, "all", "<|user|>q<|end|><|assistant|>o<|end|>"),
        ({"text": "plain é"}, "assistant", "plain é<|end|>"),
    ],
)
def test_the_right_tokens_are_trained(tokenizer, record, supervise, trained):
    document = tokenize(record, tokenizer, Data(path="x", supervise=supervise), 256, "x:1")
    assert tokenizer.decode(document.tokens[document.supervised]) == trained


def test_line_breaks_that_a_template_puts_around_turns_are_not_trained():
    spaced = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    spaced.chat_template = spaced.chat_template.replace("|>", "|>\n")
    document = tokenize({"messages": HI + BYE}, spaced, Data(path="x"), 256, "x:1")
    assert spaced.decode(document.tokens) == "<|user|>\nhi<|end|>\n<|assistant|>\nhé €  \n<|end|>\n" + (
        "<|user|>\nb<|end|>\n<|assistant|>\nbye<|end|>\n"
    )
    assert spaced.decode(document.tokens[document.supervised]) == "hé €  \n<|end|>bye<|end|>"


@pytest.mark.parametrize("record", [{"messages": HI + BYE}, {"text": "a longer text"}])
def test_a_long_document_is_cut_at_the_end(tokenizer, record):
    whole, cut = (tokenize(record, tokenizer, Data(path="x"), length, "x:1") for length in (256, 9))
    assert len(cut.tokens) == len(cut.supervised) == 9 < len(whole.tokens)
    assert (cut.tokens == whole.tokens[:9]).all() and (cut.supervised == whole.supervised[:9]).all()


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    changing = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    content = "message['content'] if loop.last or message['role'] == 'user' else message['content'].split('>')[-1]"
    changing.chat_template = tokenizer.chat_template.replace("message['content']", f"({content})")
    chat = [HI[0], {"role": "assistant", "content": "thought>answer"}, *BYE]
    with pytest.raises(UserError, match="x:3: the chat template changes earlier turns"):
        tokenize({"messages": chat}, changing, Data(path="x"), 256, "x:3")
    assert tokenize({"messages": BYE}, changing, Data(path="x"), 256, "x:3").supervised.any()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', "a.jsonl:3: is not JSON"),
        ("a.json", "[1,", "a.json: is not JSON"),
        ("a.json", '{"text": "a"}', "a.json: must hold a list of documents, found dict"),
        ("a.jsonl", '{"text": "a"}\n5\n', "a.jsonl, document 2: must be an object with fields, found int"),
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "a.jsonl, document 2: the field 'text' is missing or empty; the "
         "fields are ['txt']"),
        ("a.jsonl", '{"instruction": "a"}\n', "a.jsonl, document 1: the field 'output' is missing or empty"),
        ("a.jsonl", '{"messages": []}\n', "a.jsonl, document 1: the field 'messages' is missing or empty"),
        ("a.jsonl", '{"messages": ["a"]}\n', "a.jsonl, document 1: "),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n', "none of the 1 documents"),
        ("a.txt", " \n\n \n", "none of the 0 documents"),
    ],
)  # fmt: skip
def test_bad_records_are_named_by_their_place(tokenizer, tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        data.prepare(Data(path=str(tmp_path / name)), tokenizer, 64, 0.0, 0)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_no_copy_of_a_held_out_document_is_trained_on_in_whatever_order(tokenizer, tmp_path):
    records = [{"text": f"document {i % 60}"} for i in range(180)] + [{"messages": HI + BYE}] * 2
    splits = []
    for order in (records, records[::-1]):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(map(json.dumps, order)))
        prepared = data.prepare(Data(path=str(path)), tokenizer, 64, 0.3, 2)
        both = (prepared.training, prepared.held_out)
        sides = [[document.tokens.tobytes() for document in rows.documents] for rows in both]
        assert not set(sides[0]) & set(sides[1]) and min(map(len, sides)) > 20
        assert len(sides[0]) + len(sides[1]) == len(records)
        splits.append([sorted(side) for side in sides])
    assert splits[0] == splits[1]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"instruction": 5, "output": "x"}, "the field 'instruction' must be text, found 5"),
        ({"messages": "hello"}, "the field 'messages' must be a list of turns"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the first turn is the assistant's"),
    ],
)
def test_fields_of_the_wrong_shape_are_named(record, said):
    with pytest.raises(UserError, match=said):
        data.to_messages(record, "auto", "f.jsonl, document 1")


def test_a_line_of_jsonl_may_hold_any_unicode(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert data.read_documents(Data(path=str(tmp_path / "a.jsonl"))) == [{"text": "a\u2028b\x85c"}]


def test_a_real_instruction_file():
    """About 1,000 Alpaca records: none lost, each answer supervised to its end."""
    path = ROOT.parent / "shared" / "data" / "alpaca_en_demo.json"
    if not path.is_file():
        pytest.skip(f"the Alpaca sample {path.name} is not on this machine")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    prepared = data.prepare(Data(path=str(path)), tokenizer, 4096, 0.02, 2)
    documents = [*prepared.training.documents, *prepared.held_out.documents]
    records = json.loads(path.read_text())
    assert len(documents) + prepared.dropped == len(records) > 900
    answers = {record["output"].strip() for record in records}
    for document in documents[:50]:
        answer = tokenizer.decode(document.tokens[document.supervised])
        assert len(document.tokens) == 4096 or answer.removesuffix("<|end|>").strip() in answers
    assert prepared.training.filled > 0.9
