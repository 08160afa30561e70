"""Test the setup before the first step: shared data, isolated documents, and dropped documents."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest
import transformers

from gearbox import ROOT
from gearbox.checks.documents import MAX_RECORDS
from gearbox.data import corpus, tokenization
from gearbox.distributed import process_group
from gearbox.model import loading
from support import ranks
from support.corpora import jsonl


@pytest.mark.parametrize("gear", ["single", "fsdp", "zero3"])
def test_a_model_that_leaks_between_packed_documents_trains_one_per_row(train, tmp_path, gear):
    """LFM2's convolutions run across a packed row. The loss must equal that of separate documents."""
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
    assert "packing is off, one document per row" in packed.output
    assert ", one document each, " in packed.output and " filled, " not in packed.output
    padded = train(gear, *given, "data.packing=false", ranks=2 if gear != "single" else 1)
    assert packed.losses == padded.losses
    assert "packing is off" not in padded.output


@pytest.mark.parametrize(("gear", "reads_own"), [("fsdp", True), ("ddp", False)])
def test_machines_with_different_weights_are_refused_where_each_reads_its_own(
    train, tmp_path, monkeypatch, gear, reads_own
):
    """Let each rank be on a machine of its own, with its own copy of the weights."""
    for rank in range(2):
        folder = tmp_path / str(rank)
        settings = transformers.LlamaConfig(
            vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            initializer_range=0.1 + rank / 10, pad_token_id=0,
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(ROOT / "recipes/tiny").save_pretrained(folder)
    usual = loading.digests_of_weights
    monkeypatch.setattr(process_group, "is_first_rank_of_node", lambda: True)
    monkeypatch.setattr(
        loading, "digests_of_weights",
        lambda origin: usual(replace(origin, name=str(tmp_path / os.environ["RANK"]))),
    )  # fmt: skip
    given = (f"model.name={tmp_path}/0", "model.init=pretrained", "run.rehearse=false")
    outcome = train(gear, *given, ranks=2)
    assert ("copy the same files to all machines" in outcome.output) == reads_own, outcome.output
    assert set(outcome.codes) == ({2} if reads_own else {0})


def test_dropped_documents_are_listed_in_the_runs_folder(train, tmp_path):
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
    line = next(line for line in outcome.output.splitlines() if line.startswith("documents "))
    read, trained, held_out, dropped = [int(word) for word in line.split() if word.isdigit()][:4]
    assert (read, dropped) == (30, 2) and read == trained + held_out + dropped


def test_a_bad_row_ends_every_rank_before_the_run_has_a_folder(train, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE", 2)  # the launcher would end the waiting rank at once
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * MAX_RECORDS + [{"text": 5}])
    outcome = train("ddp", f"data.path={path}", ranks=2)
    assert outcome.codes[0] == 2 and outcome.folder is None
    assert f"{path}:{MAX_RECORDS + 1}: text: must be a string, found a number" in outcome.output
    assert outcome.output.count("must be a string") == 1, "the waiting rank must print nothing"


def one_dies(*_):
    """Kill the first worker that gets here, and let the others wait."""
    try:
        os.mkdir(os.environ["DIED"])  # noqa: PTH102
    except FileExistsError:
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_tokenizing_process_that_is_killed_ends_the_run(train, tmp_path, monkeypatch):
    """SIGTERM ends the other workers. The signal watch that they inherited must not catch it."""

    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    monkeypatch.setattr(tokenization, "_run_worker", one_dies)
    outcome = train("single", "data.path=builtin:tasks", "data.supervise=last")
    assert outcome.codes == [2], outcome.output


def test_ranks_that_read_different_data_are_refused(train, tmp_path, monkeypatch):
    """Give each rank its own data, as on machines whose copies of a file differ."""

    usual = corpus.load_corpora

    def of_rank(recipe, tokenizer, builder):
        monkeypatch.setattr(corpus, "BUILDER_FIRST_SECONDS", 0)
        path = jsonl(tmp_path / f"{builder.is_first}.jsonl", [{"text": f"{builder.is_first} {i}"} for i in range(50)])
        here = recipe.data.model_copy(update={"path": str(path)})
        return usual(recipe.model_copy(update={"data": here}), tokenizer, builder)

    monkeypatch.setattr(corpus, "load_corpora", of_rank)
    outcome = train("ddp", ranks=2)
    assert outcome.codes == [2, 2] and outcome.folder is None
    assert "data.path: rank 1 read different data from rank 0; every machine needs the same files" in outcome.output


def test_a_run_shows_what_it_trains_on(train):
    outcome = train("ddp", ranks=2)
    assert outcome.output.count("supervised text is between « and »") == 1
    assert "<|assistant|>«" in outcome.output
    assert "documents do not affect each other (largest loss change 0)" in outcome.output
