"""Test what is recomputed, kept, moved and compiled in the blocks of a decoder."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from gearbox import ROOT
from gearbox.errors import UserError
from gearbox.kernels import blocks
from gearbox.kernels.install import install_kernels
from gearbox.sharding.unwrap import checking_hooks

TOKENS = torch.arange(2 * 24).view(2, 24) % 200


def make(checkpointing="none", compile_=False, num_layers=2, kernels=False):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(ROOT / "recipes/tiny", num_hidden_layers=num_layers, use_cache=False)
    model = AutoModelForCausalLM.from_config(config).train()
    if kernels:
        install_kernels(model)
    blocks.wrap_blocks(model, checkpointing, compile_)
    return model


class Counted(TorchDispatchMode):
    """Count the operations that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        self.counts[operation.name().split("::")[1].partition(".")[0]] += 1
        return operation(*arguments, **(options or {}))


def step(model, tokens=TOKENS):
    """Return the loss, the gradients, the operations of the backward pass, and the bytes saved for it."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    with Counted() as counted:
        loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()], counted.counts, sum(saved.values())


def same(ours, theirs):
    return ours[0] == theirs[0] and all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


def test_selective_recomputes_all_but_products_and_attention():
    plain, full, selective = (step(make(grade)) for grade in ("none", "full", "selective"))
    assert same(full, plain) and same(selective, plain)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert full[2]["mm"] > plain[2]["mm"] and full[2][attention] == 2 > plain[2][attention]
    assert selective[2]["mm"] == plain[2]["mm"] and selective[2][attention] == 0
    assert selective[2]["rsqrt"] == full[2]["rsqrt"] > plain[2]["rsqrt"]


def test_offload_saves_only_each_blocks_input_in_host_memory(monkeypatch):
    moved = []

    class Watched(blocks.save_on_cpu):
        def __init__(self, pin_memory):
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: moved.append(tensor.shape) or pack(tensor)

    monkeypatch.setattr(blocks, "save_on_cpu", Watched)
    plain, offload = step(make()), step(make("offload"))
    assert same(offload, plain)
    model = make()
    hidden = torch.Size([*TOKENS.shape, model.config.hidden_size])
    assert [shape for shape in moved if shape.numel()] == [hidden] * model.config.num_hidden_layers


def test_compiled_blocks_share_their_graphs_and_take_rows_of_any_length(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward: compile_(forward, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make("selective", compile_=True, num_layers=12, kernels=True)  # the compiler makes at most 8 graphs
    plain = make(num_layers=12)
    for length in (24, 23, 22, 17, 12, 9, 20):
        with blocks.compiling_all():
            ours, theirs = step(model, TOKENS[:, :length]), step(plain, TOKENS[:, :length])
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours[1], theirs[1], strict=True))
    with torch.no_grad():
        model(input_ids=TOKENS[:, :5])  # evaluations and answers are of any length
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2, "one graph of a fixed length, and one of any length"


@pytest.mark.cold  # the compiler starts a process that loads what it has made
def test_a_compiled_block_equals_the_usual_one_in_machine_code(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch._dynamo.reset()
    with checking_hooks(blocks.blocks_of(model := make(compile_=True))):
        ours = step(model)
    theirs = step(make())
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours[1], theirs[1], strict=True))


def test_layers_that_the_compiler_would_leave_are_refused(monkeypatch):
    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward: compile_(forward, backend="aot_eager"))
    model = make(compile_=True)
    refused = pytest.raises(UserError, match=r"perf.compile: the layers of this model differ too much")
    with refused, blocks.compiling_all(), torch._dynamo.config.patch(recompile_limit=1):
        for length in (24, 16, 8):
            step(model, TOKENS[:, :length])


def test_blocks_that_are_not_called_are_refused():
    refused = pytest.raises(UserError, match=r"perf.compile: 2 of 2 layers were not called")
    with refused, checking_hooks(blocks.blocks_of(make(compile_=True))):
        pass


@pytest.mark.parametrize(("changes", "key"), [({"checkpointing": "full"}, "checkpointing: none"),
                                              ({"compile_": True}, "compile: false")])  # fmt: skip
def test_a_family_without_known_blocks_is_refused(changes, key, monkeypatch):
    monkeypatch.setattr(blocks, "blocks_of", lambda model: [])
    with pytest.raises(UserError, match=f"the layers of the family llama are not known; use {key}"):
        make(**changes)
