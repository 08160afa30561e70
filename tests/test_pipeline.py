"""Pipelines: a cut model computes what the whole one does, holds its own part of it, and trains the same weights."""

import copy
import json
import os

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from gearbox import loss, pipeline
from gearbox.config import UserError
from gearbox.data import IGNORED
from ranks import fork_ranks

NARROW = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
FAMILIES = {
    "llama, tied": transformers.LlamaConfig(**NARROW, num_hidden_layers=3, tie_word_embeddings=True),
    "llama, untied": transformers.LlamaConfig(**NARROW, num_hidden_layers=3, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**NARROW, num_hidden_layers=4, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**NARROW, num_hidden_layers=4, query_pre_attn_scalar=8, sliding_window=8),
    "granite": transformers.GraniteConfig(**NARROW, num_hidden_layers=3, embedding_multiplier=12.0),
}


def write_model(config, folder):
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config.dtype = torch.float32
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(folder)
    return config


def micro_batches(num: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Packed rows, two documents each, and few targets."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        tokens = torch.randint(3, 97, (2, 24), generator=draw)
        labels = tokens.roll(-1, 1).masked_fill(torch.rand(2, 24, generator=draw) < 0.5, IGNORED)
        positions = (torch.arange(24) % 13).expand(2, 24)
        made.append({"input_ids": tokens, "labels": labels, "position_ids": positions})
    return made


def whole_gradients(folder, batches, scale):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss.install(model)
    total = sum(model(**batch) for batch in batches) * scale
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}, model


def start(num_stages, num_replicas=1):
    """Join the group of a fork; the groups of this rank's pipeline and of its stage."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (num_stages, num_replicas), mesh_dim_names=("pp", "dp"))
    return mesh["pp"].get_group(), mesh["dp"].get_group()


def load_stage(folder, part):
    config = transformers.AutoConfig.from_pretrained(folder)
    model = pipeline.family(config, part).from_pretrained(folder, dtype=torch.float32)
    loss.install(model)
    return model


def run(num_stages, work, num_replicas=1):
    """Call work(the groups) on so many ranks."""
    codes, output = fork_ranks(num_stages * num_replicas, {}, lambda: work(start(num_stages, num_replicas)))
    assert set(codes) == {0}, output
    return output


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_whole(tmp_path, name, schedule):
    write_model(FAMILIES[name], tmp_path)
    batches = micro_batches(5)
    expected, gradients, whole = whole_gradients(tmp_path, batches, 0.01)
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()
    whole.eval()
    with torch.no_grad():
        losses, hits = whole(**batches[0])
        logits = whole(input_ids=batches[0]["input_ids"][:, :7], use_cache=False, logits_to_keep=1).logits

    def work(groups):
        part = pipeline.Part(dist.get_rank(groups[0]), 2)
        pipe = pipeline.Pipeline(load_stage(tmp_path, part), *groups, schedule=schedule)
        with torch.no_grad():
            pipe.eval()
            ours, found = pipe(**batches[0])
            assert torch.equal(ours, losses) and torch.equal(found, hits)
            kept = pipe(input_ids=batches[0]["input_ids"][:, :7], use_cache=False, logits_to_keep=1).logits
            assert torch.equal(kept, logits)
            pipe.train()
        total = pipe.step(batches, 0.01)
        assert abs(total - expected) < 1e-6 * expected
        held = dict(pipe.module.named_parameters())
        assert 0 < len(held) < len(gradients)
        for each, parameter in held.items():
            assert torch.allclose(parameter.grad, gradients[each], rtol=1e-4, atol=1e-6), each
        assert abs(pipe.clip_gradients(1e-3) - norm) < 1e-5 * norm
        clipped = gradients[each] * (1e-3 / norm)
        assert torch.allclose(parameter.grad, clipped, rtol=1e-3, atol=1e-8)
        assert 0 < pipe.idle < 1

    run(2, work)
