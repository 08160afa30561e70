"""Write what every system trains: the model folders, and the chats.

python benchmarks/peers/material.py FOLDER MODEL [FILE]

FILE is a JSON list of instruction, input, output, or a JSONL file of messages. Without it, the chats are made up, with
lengths spread as in common instruction data.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "models" / "smollm2-135m"
NUM_CHATS = 240
PAD = "<empty_output>"  # a token that no chat contains, so that padding can be counted
LLAMA_10M = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 3,
             "intermediate_size": 512, "tie_word_embeddings": True, "rope_theta": 10000.0}  # fmt: skip
LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "tie_word_embeddings": False, "rope_theta": 500000.0,
            "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip


def write_model(folder: Path, name: str) -> None:
    """Write a model folder, in fp32, or bf16 for the 8B model, so that no system converts weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    tokenizer.pad_token = PAD
    if name == "smollm2-135m":
        model = AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32)
        model.config.pad_token_id = tokenizer.pad_token_id
    else:
        keys = {"vocab_size": 49152, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "head_dim": None}
        keys |= LLAMA_10M if name == "llama-10m" else LLAMA_8B
        tokens = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        torch.set_default_dtype(torch.bfloat16 if name == "llama-8b" else torch.float32)
        with torch.device("cuda" if name == "llama-8b" else "cpu"):
            model = LlamaForCausalLM(LlamaConfig(**(keys | tokens)))
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    # Some systems read the template only from the tokenizer's settings.
    path = partial / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "chat_template": tokenizer.chat_template}), encoding="utf-8")
    partial.rename(folder)


def read_chats(file: Path, number: int) -> list[list[dict[str, str]]]:
    """Return chats of a user's file, drawn from all of it: those with one question, one answer and no system text."""
    text = file.read_text(encoding="utf-8")
    records = (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.split("\n") if line]
    )
    chats = []
    for record in records:
        if "messages" in record:
            chats.append([{key: turn[key] for key in ("role", "content")} for turn in record["messages"]])
        else:
            question = "\n\n".join(filter(None, [record["instruction"], record.get("input")]))
            chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}])
    chats = [chat for chat in chats if [turn["role"] for turn in chat] == ["user", "assistant"]]
    return random.Random(0).sample(chats, min(number, len(chats)))


def make_chats(number: int) -> list[list[dict[str, str]]]:
    """Return made-up chats: answers of 20 to 450 tokens, most of them short, after short questions."""
    draw = random.Random(0)
    words = [a + b for a in ("ta", "ri", "son", "mel", "vo", "den", "ka", "lu") for b in ("r", "nt", "s", "ld", "me")]

    def text(low: int, high: int) -> str:
        return " ".join(draw.choices(words, k=round(low * (high / low) ** draw.random()))).capitalize() + "."

    return [
        [{"role": "user", "content": text(5, 40)}, {"role": "assistant", "content": text(12, 200)}]
        for _ in range(number)
    ]


def describe(folder: Path, chats: list[list[dict[str, str]]]) -> None:
    """Write chats.jsonl, and the figures that the model's FLOPs depend on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    lengths = [len(tokenizer.apply_chat_template(chat, return_dict=False)) for chat in chats]
    chats = [chat for chat, length in zip(chats, lengths, strict=True) if length <= 1024]
    lengths = [length for length in lengths if length <= 1024]
    context = sum(length**2 for length in lengths) / sum(lengths) / 2  # the mean number of tokens that a token sees
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    figures = {"chats": len(chats), "mean_tokens": sum(lengths) / len(lengths), "context": context}
    figures["pad_token"] = tokenizer.convert_tokens_to_ids(PAD)
    (folder / "chats.json").write_text(json.dumps(figures), encoding="utf-8")


def main(folder: Path, model: str, file: Path | None) -> None:
    """Write what is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / model).is_dir():
        write_model(folder / model, model)
    number = NUM_CHATS * (5 if model == "llama-8b" else 1)  # its steps have more tokens
    describe(folder, read_chats(file, number) if file else make_chats(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else None)
