"""Describe a tokenizer by the keys that llama.cpp reads from a GGUF file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from gearbox.errors import UserError
from gearbox.exporting.source import Raw

if TYPE_CHECKING:
    from gguf import GGUFWriter

CONVERTER = "use convert_hf_to_gguf.py of llama.cpp on the exported folder"
GPT2, DIGITS = "gpt2", "digits"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's name for how a text is divided before the merges, by the steps in tokenizer.json.
DIVISIONS = {
    (GPT2,): "gpt-2",
    (DIGITS, GPT2): "smollm",
    (CONTRACTIONS + r"\p{N}{1,3}" + REST,): "llama-bpe",
    (CONTRACTIONS + r"\p{N}" + REST,): "qwen2",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6


def division_of(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return llama.cpp's name of the pre-tokenizer, or `spm`. Raise UserError if it has none that fits."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, before = content["model"], content["pre_tokenizer"]
    if model["type"] != "BPE":
        raise UserError(f"--gguf: cannot describe a tokenizer of the type {model['type']}; {CONVERTER}")
    if model.get("byte_fallback"):
        return "spm"
    steps = before["pretokenizers"] if before and before["type"] == "Sequence" else [before] if before else []
    found: list[str] = []
    for step in steps:
        if step["type"] == "Digits" and step["individual_digits"]:
            found.append(DIGITS)
        elif step["type"] == "Split" and "Regex" in step["pattern"]:
            found.append(step["pattern"]["Regex"])
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            found += [GPT2] if step["use_regex"] else []
        else:
            found.append(step["type"])
    if not found and not model["merges"]:
        return "gpt-2"  # without merges each byte is a token, however a text is divided
    if (name := DIVISIONS.get(tuple(found))) is None:
        shown = found[0][:40] if found else "nothing"
        raise UserError(
            f"--gguf: llama.cpp has no name here for a tokenizer that divides text by {shown!r}; {CONVERTER}"
        )
    return name


def add_to(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, num_rows: int, stops: list[int]) -> None:
    """Add tokens, merges, special tokens and the chat template. `num_rows` is the number of rows of the embedding."""
    from gguf import GGUFValueType, Keys

    division = division_of(tokenizer)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = [pair if isinstance(pair, list) else pair.split(" ", 1) for pair in content["model"]["merges"]]
    tokens, kinds = _tokens(tokenizer, num_rows, division == "spm")
    writer.add_tokenizer_model("llama" if division == "spm" else "gpt2")
    writer.add_tokenizer_pre("default" if division == "spm" else division)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if division == "spm":
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(_adds_space(content))
    else:
        strings = GGUFValueType.STRING
        writer.add_key_value(Keys.Tokenizer.MERGES, [" ".join(pair) for pair in merges], GGUFValueType.ARRAY, strings)
    _add_special(writer, tokenizer, stops, num_rows)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)


def _tokens(tokenizer: PreTrainedTokenizerFast, num_rows: int, is_spm: bool) -> tuple[list[str], list[int]]:
    """Return the text and the kind of each row of the embedding. Rows without a token are unused.

    A token without a row is left out: llama.cpp loads no file with more tokens than rows.
    """
    by_id, added = {i: token for token, i in tokenizer.get_vocab().items()}, tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    for i in range(num_rows):
        tokens.append(by_id.get(i, f"[PAD{i}]"))
        if i not in by_id:
            kinds.append(UNUSED)
        elif i in added:
            kinds.append(CONTROL if added[i].special else USER_DEFINED)
        else:
            is_byte = is_spm and len(by_id[i]) == 6 and by_id[i].startswith("<0x")
            kinds.append(BYTE if is_byte else NORMAL)
    return tokens, kinds


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Return a score for each token, so that the highest one is merged first, in the order of the merges."""
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(merges):
        rank.setdefault(left + right, number)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _adds_space(content: Raw) -> bool:
    """Return whether the tokenizer writes a space before a text."""
    return '"Prepend"' in json.dumps(content["normalizer"]) or '"always"' in json.dumps(content["pre_tokenizer"])


def _add_special(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, stops: list[int], num_rows: int) -> None:
    """Add the tokens with a meaning. Generation stops at the token that ends an answer, and at the end of a text."""
    for token, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if token is not None and token < num_rows:
            add(token)
    if others := [token for token in stops if token != tokenizer.eos_token_id]:
        writer.add_eot_token_id(others[0])
    start = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and start[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(False)
