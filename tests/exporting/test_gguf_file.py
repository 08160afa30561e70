"""Test that a GGUF file holds the model and the tokenizer of its folder, and is refused where it could not."""

import json

import pytest
import tokenizers
import torch
import transformers
from gguf import GGUFReader

from gearbox.errors import UserError
from gearbox.exporting import gguf_file, gguf_vocabulary
from support.exports import TOKENIZER, export, verify_here, write_model
from support.rotations import GEMMA, LLAMA3


@pytest.fixture(autouse=True)
def here(monkeypatch):
    verify_here(monkeypatch)


@pytest.mark.parametrize(
    ("family", "kind", "sizes", "limit"),
    [
        ("llama", "f32", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, 1e-6),
        ("mistral", "f16", {"sliding_window": None}, 1e-2),
        ("qwen2", "q8_0", {}, 0.1),
        ("qwen3", "bf16", {"head_dim": 32}, 5e-2),
        ("gemma3_text", "f16", GEMMA, 1e-2),
    ],
)
def test_a_gguf_file_answers_like_its_folder(tmp_path, family, kind, sizes, limit):
    base = write_model(family, tmp_path / "base", **sizes)
    folder = export(base, tmp_path / "x", "--gguf", kind)
    found = json.loads((folder / "gearbox_export.json").read_text())["verified"]["gguf"]
    assert found["distance"] < limit
    read = GGUFReader(folder / f"x-{kind.upper()}.gguf")
    assert read.fields["tokenizer.chat_template"].contents().count("assistant")
    assert read.fields["tokenizer.ggml.eos_token_id"].contents() == 3
    assert read.fields["tokenizer.ggml.merges"].contents() == [], "llama.cpp loads no file without this key"
    assert len(read.fields["tokenizer.ggml.tokens"].contents()) == 260, "llama.cpp wants a token for each row"
    names = {tensor.name for tensor in read.tensors}
    assert ("rope_freqs.weight" in names) == ("rope_parameters" in sizes)


def test_the_pairs_of_a_head_become_neighbours():
    rows = torch.arange(16)[:, None]
    assert gguf_file._neighbours(rows, 2).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_a_file_with_wrong_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "_neighbours", lambda rows, _: rows)
    with pytest.raises(UserError, match=r"x-F16\.gguf answers otherwise"):
        export(write_model("llama", tmp_path / "base"), tmp_path / "x", "--gguf")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("family", "sizes", "text"),
    [
        ("olmo2", {}, "cannot write the family olmo2"),
        ("llama", {"rope_parameters": LLAMA3 | {"rope_type": "dynamic"}}, "rotary positions of the type dynamic"),
    ],
)
def test_other_families_are_refused(tmp_path, family, sizes, text):
    base = write_model(family, tmp_path / "base", **sizes)
    with pytest.raises(UserError, match=rf"{text}.*convert_hf_to_gguf.py"):
        export(base, tmp_path / "x", "--gguf")


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([tokenizers.pre_tokenizers.ByteLevel(False)], "gpt-2"),
        ([tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(False)], "smollm"),
        ([tokenizers.pre_tokenizers.Whitespace()], None),
    ],
)
def test_the_division_of_text_has_the_name_of_llama_cpp(steps, name):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    if name is None:
        with pytest.raises(UserError, match="divides text by 'Whitespace'"):
            gguf_vocabulary.division_of(tokenizer)
    else:
        assert gguf_vocabulary.division_of(tokenizer) == name
