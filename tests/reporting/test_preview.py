"""Test the data preview: the counts add up, and exactly the supervised tokens are marked."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import preview as script
from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.data.sources import Origin
from gearbox.data.tokenization import UnusableRecord
from gearbox.reporting import plan, preview
from gearbox.rows.splits import Dropped
from support.corpora import arranged, jsonl, recipe_of
from support.documents import Made


@pytest.fixture
def shown(tmp_path, capsys):
    """Show a file of these records as src/preview.py does, in this process. Return what it prints."""
    path = tmp_path / "a.jsonl"

    def run(records: list, *arguments: str) -> str:
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
        script.main([f"data.path={path}", *arguments])
        return capsys.readouterr().out

    return run


def chat(question: str, answer: str) -> dict:
    return {"instruction": question, "output": answer}


def test_documents_and_counts(shown):
    records = [chat(f"q{i}", "é a") for i in range(40)] + [chat("q1", "é a"), chat("x" * 200, "a"), "{"]
    given = ("eval.fraction=0.2", "data.on_bad_row=skip", "batch.row_tokens=64")
    lines = shown(records, "--rows", "2", *given).splitlines()
    documents = [line for line in lines if line.startswith("<|user|>")]
    assert len(documents) == 2 and all(
        re.fullmatch(r"<\|user\|>q\d+<\|end\|><\|assistant\|>«é a<\|end\|>»", each) for each in documents
    )
    facts = {
        line[:24].strip(): line[24:]
        for line in lines
        if re.match(r"(documents|document lengths|packed rows) +\S", line)
    }
    read, trained, held_out, dropped = (int(n) for n in re.findall(r"\d+", facts["documents"])[:4])
    assert (read, dropped) == (43, 2) and read == trained + held_out + dropped and held_out > 0
    assert "1 no supervised token before the cut" in facts["documents"] and "1 is not JSON" in facts["documents"]
    assert "1 duplicates" in facts["document lengths"]
    filled, padding = (float(n) for n in re.findall(r"([\d.]+)%", facts["packed rows"]))
    assert filled + padding == pytest.approx(100, abs=0.11)


@pytest.mark.parametrize(("num_long", "warns"), [(0, False), (2, False), (3, True), (40, True)])
def test_many_documents_that_are_cut_are_a_warning(tokenizer, tmp_path, num_long, warns):
    records = [chat("q", f"{'a' * 60 if i < num_long else 'a'} {i}") for i in range(40)]
    path, given = jsonl(tmp_path / "a.jsonl", records), "batch.row_tokens=32"
    facts = plan.data_facts(recipe_of(path, given), *arranged(tokenizer, path, given), tokenizer)
    assert f"{num_long} truncated" in facts["document lengths"]
    assert facts.get("warning", "").startswith(f"{num_long} of 40 documents lose their end") == warns
    assert ("warning" in facts) == warns
    split = f"{given} data.long=split".split()
    assert "warning" not in plan.data_facts(recipe_of(path, *split), *arranged(tokenizer, path, *split), tokenizer)


def test_one_line_of_json_a_document_in_file_order(shown, tokenizer):
    records = [chat("q", "a"), "{", chat("x" * 99, "a"), chat("long", "b" * 99), {"instruction": "q", "output": None}]
    given = ("eval.fraction=0", "data.on_bad_row=skip", "batch.row_tokens=32")
    lines = [json.loads(line) for line in shown(records, "--json", *given).splitlines()]
    assert [line["place"].rpartition(":")[2] for line in lines] == ["1", "2", "3", "4", "5"]
    assert [line["use"] for line in lines] == ["trained", "dropped", "dropped", "trained", "dropped"]
    assert [line.get("reason", "")[:16] for line in lines] == [
        "",
        "is not JSON: Exp",
        "no supervised to",
        "",
        "output: is null",
    ]
    assert all(len(line["input_ids"]) == len(line["supervised"]) for line in lines)
    assert {flag for line in lines for flag in line["supervised"]} == {0, 1}
    texts = [
        tokenizer.decode([t for t, flag in zip(line["input_ids"], line["supervised"], strict=True) if flag])
        for line in lines
    ]
    assert texts[0] == "a<|end|>" and texts[3] == "b" * (32 - len("long") - 3) and len(lines[3]["input_ids"]) == 32


@pytest.mark.cold
def test_a_closed_pipe_is_not_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(chat(f"q{i}", "a" * 500)) for i in range(200)))
    line = f"{sys.executable} src/preview.py data.path={path} batch.row_tokens=1024 --json | head -n 1"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["place"].startswith(str(path))
    assert "Error" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.cold
def test_user_errors_are_one_line():
    for arguments, said in [
        (["--rows", "many"], "usage: python src/preview.py"),
        (["--jsn"], "expected [RECIPE]"),
        (["data.supervise=us"], "data.supervise: input should be 'assistant', 'last' or 'all', found 'us'"),
    ]:
        command = [sys.executable, "src/preview.py", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_colours_in_a_terminal_and_marks_elsewhere(tokenizer):
    words = tokenizer("ab€cd", add_special_tokens=False)["input_ids"]
    made = Made([words], [[0, 0, 1, 1, 1, 1, 0]])
    made.location = lambda document: "x:1"
    documents = preview.first_documents(made.rows(16), tokenizer, 5)
    assert documents == [("x:1", [("ab", False), ("€c", True), ("d", False)], "")]
    for terminal, expected in ((True, "\x1b[2mab\x1b[0m\x1b[1;32m€c\x1b[0m\x1b[2md\x1b[0m"), (False, "ab«€c»d")):
        screen = Console(force_terminal=terminal, color_system="standard" if terminal else None, width=80)
        with screen.capture() as captured:
            preview.show(screen, documents)
        assert captured.get().splitlines()[1] == expected


def records_of(tokenizer, texts: list[str], labels: list[int], per_record: int) -> Made:
    """Return documents that end in one supervised token, some of which are of the same record."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    made = Made(ids, [[0] * (len(one) - 1) + [1] for one in ids])
    made.labels, made.bad, made.hashes = np.array(labels, np.int8), [], None
    made.record_numbers = np.arange(len(texts)) // per_record
    made.origins = [Origin("pairs.jsonl", (Path("pairs.jsonl"),))]
    made.location = lambda document: made.origins[0].location(int(made.record_numbers[document]))
    return made


def compared(objective: str):
    return load_recipe(ROOT / "recipes" / "tiny.yaml", [f"train.objective={objective}"])


@pytest.mark.parametrize(
    ("objective", "labels", "per_record", "expected"),
    [
        ("dpo", [1, 0, 1, 0, 1, 0], 2, "0 chosen: a«b» rejected: a«c» 1 chosen: d«e» rejected: d«f»"),
        ("kto", [1, 1, 0, 0, 1, 1], 2, "0 good: a«b» 1 bad: d«e»"),  # whose second documents are mismatched
    ],
)
def test_both_sides_of_a_pair_are_shown_under_one_location(tokenizer, objective, labels, per_record, expected):
    made = records_of(tokenizer, ["ab", "ac", "de", "df", "gh", "gi"], labels, per_record)
    shown = preview.first_documents(made.rows(8), tokenizer, 2, compared(objective))
    screen = Console(width=80)
    with screen.capture() as captured:
        preview.show(screen, shown)
    words = re.sub(r"pairs.jsonl:(\d)  supervised text is between « and »:", r"\1", captured.get()).split()
    assert words == expected.split()


def test_a_pair_is_two_lines_of_json_with_labels(tokenizer):
    made = records_of(tokenizer, ["ab", "ac", "de", "df", "gh", "gi"], [1, 0] * 3, 2)
    made.bad = [UnusableRecord(0, 3, "chosen: is empty")]
    rows = made.rows(8)
    rows.chunks = rows.chunks.where(rows.chunks.document < 4)

    def dropped():
        return [
            Dropped(made.location(4), "longer than a row"),
            Dropped(made.origins[0].location(3), "chosen: is empty"),
        ]

    held = SimpleNamespace(training=rows, held_out=Made([], []).rows(8), dropped=dropped)
    found = [*preview.lines(made, held, compared("dpo"))]
    assert [(line["place"][-1], line["use"], line.get("label")) for line in found] == [
        ("0", "trained", 1), ("0", "trained", 0), ("1", "trained", 1), ("1", "trained", 0),
        ("2", "dropped", 1), ("2", "dropped", 0), ("3", "dropped", None),
    ]  # fmt: skip
    assert [tokenizer.decode(line["input_ids"]) for line in found] == ["ab", "ac", "de", "df", "gh", "gi", ""]
    assert not any("label" in line for line in preview.lines(made, held, compared("sft")))


def test_lines_of_kto_leave_out_the_mismatched_answers(tokenizer):
    own = records_of(tokenizer, ["ab", "de"], [1, 0], 1)
    rows = records_of(tokenizer, ["ab", "ae", "de", "db"], [1, 1, 0, 0], 2)
    rows.corpus = own
    held = SimpleNamespace(training=rows.rows(8), held_out=Made([], []).rows(8), dropped=list)
    found = [*preview.lines(own, held, compared("kto"))]
    assert [(line["use"], line["label"], tokenizer.decode(line["input_ids"])) for line in found] == [
        ("trained", 1, "ab"), ("trained", 0, "de"),
    ]  # fmt: skip


def test_a_long_document_is_shown_at_both_ends():
    text = preview.marked([("a" * 500, False), ("b" * 500, True)], colours=True, num_characters=100)
    assert text.plain == "a" * 50 + " [... 900 characters ...] " + "b" * 50
