"""Test the kernels of other packages: used where they fit, and refused in one line where they do not."""

import importlib.util

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gearbox import ROOT
from gearbox.errors import UserError
from gearbox.kernels import libraries

TOKENS = torch.arange(64).view(2, 32)


def make(**changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "recipes/tiny", **changes)).train()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_both_need_a_gpu():
    with pytest.raises(UserError, match=r"perf.kernels: liger needs a GPU; use auto"):
        libraries.use_liger(make())
    with pytest.raises(UserError, match=r"perf.float8: needs a GPU of compute capability 8\.9 or more; use float8: f"):
        libraries.use_float8(make())


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_float8_multiplies_in_the_blocks_and_rounds():
    from torchao.float8.float8_linear import Float8Linear

    plain, rounded = make(), make()
    libraries.use_float8(rounded, emulate=True)
    names = [name for name, module in rounded.named_modules() if isinstance(module, Float8Linear)]
    assert len(names) == 14 and not any("lm_head" in name for name in names)
    assert [name for name, _ in rounded.named_parameters()] == [name for name, _ in plain.named_parameters()]
    losses = []
    for model in (plain, rounded):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=5e-2)
    for ours, theirs in zip(rounded.parameters(), plain.parameters(), strict=True):
        assert torch.cosine_similarity(ours.grad.flatten(), theirs.grad.flatten(), 0) > 0.9
    with pytest.raises(UserError, match="no linear layer of the family llama has sides that are multiples of 16"):
        libraries.use_float8(make(hidden_size=36, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
                                  intermediate_size=50), emulate=True)  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels need a GPU")
def test_liger_computes_the_same_model():
    pytest.importorskip("liger_kernel")
    plain, fused = make().cuda(), make().cuda()
    libraries.use_liger(fused)
    tokens = TOKENS.cuda()
    ours, theirs = (model(input_ids=tokens, labels=tokens).loss.item() for model in (fused, plain))
    assert ours == pytest.approx(theirs, rel=1e-4)
    other = make().cuda()
    other.config.model_type = "unknown"
    with pytest.raises(UserError, match=r"perf.kernels: liger does not know the family unknown; use auto"):
        libraries.use_liger(other)
