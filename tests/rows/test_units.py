"""Test units: pairs of answers never split, in rows, in held-out documents, or by a cut."""

import numpy as np
import pytest

from gearbox.reporting import plan
from gearbox.rows import units
from support.corpora import arranged, jsonl, recipe_of

OBJECTIVES = ("train.objective=dpo", "train.objective=kto")


def pairs(number: int, long: str = "") -> list[dict[str, str]]:
    return [
        {"prompt": f"q{i}", "chosen": f"yes {i}{long * (i % 3)}", "rejected": "no" * (1 + i % 4)} for i in range(number)
    ]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("packing", [True, False])
def test_pairs_share_a_row_and_a_side(tokenizer, tmp_path, objective, packing):
    path = jsonl(tmp_path / "a.jsonl", pairs(80) + pairs(80)[::3])
    given = (objective, f"data.packing={packing}".lower(), "eval.fraction=0.3", "batch.row_tokens=64")
    found, prepared = arranged(tokenizer, path, *given)
    for rows in (prepared.training, prepared.held_out):
        for row in range(len(rows)):
            documents = rows.chunks.document[rows.row(row)].reshape(-1, 2)
            assert (documents[:, 0] % 2 == 0).all() and (documents[:, 1] == documents[:, 0] + 1).all()
            assert rows.num_tokens[row] <= 64
        assert (np.unique(rows.chunks.document) == np.sort(rows.chunks.document)).all() and len(rows)
        own = np.unique(rows.chunks.document // (2 if "kto" in objective else 1))
        assert all(i % 2 or i + 1 in own for i in own), "both answers of a pair are on one side"
    answers = [{found.tokens(i // (2 if "kto" in objective else 1)).tobytes() for i in rows.chunks.document}
               for rows in (prepared.training, prepared.held_out)]  # fmt: skip
    texts = [{bytes(one) for one in side} for side in answers]
    assert not texts[0] & texts[1], "no copy is on both sides"


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("long", ["truncate", "drop"])
@pytest.mark.parametrize("row_tokens", [24, 40])
def test_nothing_is_lost_if_rows_are_short(tokenizer, tmp_path, objective, long, row_tokens):
    path = jsonl(tmp_path / "a.jsonl", pairs(60, "long "))
    given = (objective, f"data.long={long}", f"batch.row_tokens={row_tokens}", "eval.fraction=0.2")
    found, prepared = arranged(tokenizer, path, *given)
    rows = prepared.training
    assert (rows.num_tokens <= row_tokens).all() and (rows.chunks.targets > 0).all()
    for index in range(len(rows.chunks)):
        assert rows.chunk(index)[1][1:].sum() == rows.chunks.targets[index]
    told = plan.data_facts(recipe_of(path, *given), found, prepared, tokenizer)["documents"]
    read, trained, held_out, dropped = [int(word) for word in told.split() if word.isdigit()][:4]
    assert read == trained + held_out + dropped, told
    assert dropped == len([*prepared.dropped()])
    assert trained == rows.num_units


def test_pairs_that_are_equal_after_the_cut_are_dropped(tokenizer, tmp_path):
    long = "x" * 40
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "chosen": long + "a", "rejected": long + "b"}, *pairs(3)])
    _, prepared = arranged(tokenizer, path, "train.objective=dpo", "batch.row_tokens=40")
    (dropped,) = prepared.dropped()
    assert dropped.reason == "the answers are equal before the cut" and dropped.location.endswith("a.jsonl:1")
    _, prepared = arranged(tokenizer, path, "train.objective=kto", "batch.row_tokens=40")
    assert not [*prepared.dropped()], "an answer may equal another one to the same prompt"


@pytest.mark.parametrize("prompts", [("q",), ("q", "q", "q"), ("a", "a", "b", "b", "a")])
def test_answers_to_other_prompts(tokenizer, tmp_path, prompts):
    records = [{"prompt": p, "completion": f"{p}{i}" * (i + 1), "label": i % 2 == 0} for i, p in enumerate(prompts)]
    found, _ = arranged(tokenizer, jsonl(tmp_path / "a.jsonl", records), "train.objective=kto")
    mixed = units.MismatchedCorpus(found)
    own, other = [tokenizer.decode(mixed.tokens(i)) for i in range(2 * len(found))][::2], None
    assert own == [tokenizer.decode(found.tokens(i)) for i in range(len(found))]
    for i, prompt in enumerate(prompts):
        other = tokenizer.decode(mixed.tokens(2 * i + 1))
        asked, answer = other.split("<|assistant|>")
        assert asked == own[i].split("<|assistant|>")[0]
        belongs = answer[0]
        assert belongs != prompt if len({*prompts}) > 1 else other == own[i]
        length, targets = mixed.lengths[2 * i + 1], mixed.targets[2 * i + 1]
        assert length == len(mixed.tokens(2 * i + 1)) and targets == mixed.loss_mask(2 * i + 1)[1:].sum()
