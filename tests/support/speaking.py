"""Make small models that say a given text, and talk to src/chat.py through a pseudo-terminal."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gearbox import ROOT

TINY = ROOT / "recipes" / "tiny"
WIDTH = 272  # of the embedding: a token is one dimension, and recipes/tiny has 260 tokens


def tokenizer_of(template: str | None = "tiny"):
    """Return the byte tokenizer of recipes/tiny, with another chat template or with none."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    if template != "tiny":
        tokenizer.chat_template = template
    return tokenizer


def save_speaker(folder: Path, says: str, loops: bool = False, template: str | None = "tiny") -> Path:
    """Save a real Llama whose next token depends on the last one only, so that it answers with this text.

    No two bytes of the text may be the same. With `loops` it begins again at the end, and never stops.
    """
    tokenizer = tokenizer_of(template)
    said = tokenizer(says, add_special_tokens=False)["input_ids"]
    assert len({*said}) == len(said), "a byte occurs twice"
    config = LlamaConfig(
        vocab_size=260, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=3, pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    first = tokenizer.convert_tokens_to_ids("<|assistant|>")
    with torch.no_grad():
        for parameter in (model.lm_head.weight, model.model.embed_tokens.weight):
            parameter.zero_()
        model.model.embed_tokens.weight[range(260), range(260)] = 1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for last, following in zip([first, *said], [*said, said[0] if loops else 3], strict=True):
            model.lm_head.weight[following, last] = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_random(folder: Path, family: str = "llama", template: str | None = "tiny", **settings) -> Path:
    """Save a small random model of a family that computes its positions (llama), or has a table of them (gpt2)."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of(template)
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
        config = GPT2Config(vocab_size=260, eos_token_id=3, bos_token_id=3, **(sizes | settings))
        model = GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=260, eos_token_id=3, initializer_range=0.3, **(sizes | settings))
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Terminal:
    """A pseudo-terminal on which a script of src/ runs."""

    def __init__(self, script: str, *arguments: str, **environment: str) -> None:
        line = [sys.executable, str(ROOT / "src" / script), *arguments]
        self.process, self.screen = pty.fork()
        if not self.process:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets its background jobs ignore it
            os.execve(sys.executable, line, os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"} | environment)
        self.output = ""

    def wait_for(self, text: str, seconds: float = 240) -> str:
        """Return what is printed up to this text."""
        deadline = time.monotonic() + seconds
        while text not in self.output and time.monotonic() < deadline:
            if select.select([self.screen], [], [], 0.2)[0]:
                try:
                    self.output += os.read(self.screen, 65536).decode("utf-8", "replace")
                except OSError:  # the process has ended
                    break
        before, found, after = self.output.partition(text)
        assert found, f"{text!r} is not in {self.output!r}"
        self.output = after
        return before + found

    def type(self, text: str) -> None:
        time.sleep(0.3)  # the prompt is printed a moment before the terminal waits for keys
        os.write(self.screen, text.encode())

    def end(self) -> int:
        """Wait for the end. Return the exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        os.close(self.screen)
        return code
