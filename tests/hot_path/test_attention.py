"""Test attention by document against torch's sdpa with a mask."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from gearbox.errors import UserError
from gearbox.kernels import attention
from gearbox.kernels.attention import DOCUMENTS
from gearbox.model import loading, probes

LAYER = torch.nn.Module()
ROWS = [[9, 1, 22, 8], [40], [3, 3, 33, 1]]  # lengths of the documents of each row


def positions(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def mask_of(position_ids: torch.Tensor, window: int) -> torch.Tensor:
    document, width = (position_ids == 0).cumsum(1), position_ids.shape[1]
    same = document[:, None, :, None] == document[:, None, None, :]
    allowed = torch.ones(width, width, dtype=torch.bool).tril()
    return same & (allowed.triu(1 - window) if window else allowed)


def made(heads: int, width: int, dtype: torch.dtype, size: int = 16) -> torch.Tensor:
    return torch.randn(len(ROWS), width, heads, size, dtype=dtype).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("given", ["positions", "bounds"])
@pytest.mark.parametrize("window", [0, 7, 100])
@pytest.mark.parametrize("value_size", [16, 8])  # multi-head latent attention has narrower values
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_those_of_sdpa_with_a_mask(given, window, value_size, dtype):
    torch.manual_seed(0)
    where = positions(ROWS)
    inputs = (made(4, 40, dtype), made(2, 40, dtype), made(2, 40, dtype, value_size))
    expected = F.scaled_dot_product_attention(
        *inputs, attn_mask=mask_of(where, window if window < 40 else 0), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    told = {"position_ids": where} if given == "positions" else attention.bounds_of(where)
    found, weights = attention.attend(LAYER, *inputs, None, scaling=0.3, sliding_window=window or None, **told)
    assert weights is None and found.shape == (3, 40, 4, value_size)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert torch.allclose(found, expected, rtol=0, atol=tolerance)
    upstream = torch.randn_like(found)
    right = torch.autograd.grad(expected, inputs, upstream)
    for ours, theirs in zip(torch.autograd.grad(found, inputs, upstream), right, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("window", [0, 7, 100])
@pytest.mark.parametrize("value_size", [16, 8])
def test_parts_of_rows_add_up_to_the_rows(window, value_size):
    """Three ranks have an early and a late part each. Documents end within parts, at their ends, and span them."""
    torch.manual_seed(0)
    where = positions([[9, 1, 20, 12], [42], [3, 4, 34, 1]])
    inputs = (made(4, 42, torch.float32), made(2, 42, torch.float32), made(2, 42, torch.float32, value_size))
    expected, _ = attention.attend(LAYER, *inputs, None, position_ids=where, sliding_window=window or None)
    found = torch.empty_like(expected)
    for rank in range(3):
        mine = [slice(7 * part, 7 * part + 7) for part in (rank, 5 - rank)]
        local = [torch.cat([tensor[:, :, part] for part in mine], 2) for tensor in inputs]
        parts = attention.Parts.of(where, mine, lambda _: torch.cat(inputs[1:], -1))
        with attention.dividing_rows(parts):
            out, _ = attention.attend(LAYER, *local, None, sliding_window=window or None)
        assert out.shape == (3, 14, 4, value_size)
        found[:, mine[0]], found[:, mine[1]] = out.chunk(2, 1)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    upstream = torch.randn_like(found)
    right = torch.autograd.grad(expected, inputs, upstream)
    for ours, theirs in zip(torch.autograd.grad(found, inputs, upstream), right, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


def test_parts_of_rows_take_no_masks():
    tensor = made(4, 40, torch.float32)
    parts = attention.Parts.of(positions(ROWS), [slice(0, 40)], lambda keys: keys)
    with attention.dividing_rows(parts), pytest.raises(NotImplementedError, match="without a mask"):
        attention.attend(LAYER, tensor, tensor, tensor, mask_of(positions(ROWS), 0))


def test_rows_without_positions_are_one_document_each():
    torch.manual_seed(0)
    inputs = (made(4, 40, torch.float32), made(4, 40, torch.float32), made(4, 40, torch.float32))
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True).transpose(1, 2)
    assert torch.allclose(attention.attend(LAYER, *inputs, None)[0], expected, atol=1e-6)


def test_a_cache_a_mask_and_layers_that_look_ahead_are_left_to_sdpa():
    torch.manual_seed(0)
    query, key = made(4, 1, torch.float32), made(4, 40, torch.float32)
    expected = F.scaled_dot_product_attention(query, key, key).transpose(1, 2)
    assert torch.allclose(attention.attend(LAYER, query, key, key, None)[0], expected, atol=1e-6)
    both = F.scaled_dot_product_attention(key, key, key).transpose(1, 2)
    assert torch.allclose(attention.attend(LAYER, key, key, key, None, is_causal=False)[0], both, atol=1e-6)
    mask = mask_of(positions(ROWS), 3)
    masked = F.scaled_dot_product_attention(key, key, key, attn_mask=mask).transpose(1, 2)
    assert torch.allclose(attention.attend(LAYER, key, key, key, mask)[0], masked, atol=1e-6)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_it_does_not_compute_is_refused(name):
    tensor = made(4, 40, torch.float32)
    with pytest.raises(NotImplementedError, match=name):
        attention.attend(LAYER, tensor, tensor, tensor, None, **{name: 1.0})


def test_autocast_sets_its_dtype():
    tensor = made(4, 40, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention.attend(LAYER, tensor, tensor, tensor.bfloat16(), None)[0].dtype == torch.bfloat16


class Sizes(TorchDispatchMode):
    """A record of the elements of the tensors that operations return."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outcome = func(*args, **kwargs or {})
        found = outcome if isinstance(outcome, tuple | list) else [outcome]
        self.largest = max(self.largest, *(t.numel() for t in found if isinstance(t, torch.Tensor)), 0)
        return outcome


def test_the_model_never_makes_a_tensor_of_row_by_row():
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    model, where = transformers.LlamaForCausalLM(config), torch.arange(512)[None] % 32
    for name, quadratic in (("sdpa", True), (DOCUMENTS, False)):
        model.set_attn_implementation(name)
        with Sizes() as sizes:
            model(input_ids=where % 20, position_ids=where, use_cache=False).logits.sum().backward()
        assert (sizes.largest >= 512 * 512) == quadratic, name


def test_the_kernel_of_a_gpu_gets_bounds_and_window(monkeypatch):
    """Use tensors without memory instead of a GPU's: they show shapes, dtypes and arguments, not values."""
    bounds = attention.bounds_of(positions(ROWS))
    assert bounds["cu_seq_lens_q"].tolist() == [0, 9, 10, 32, 40, 80, 83, 86, 119, 120]
    assert bounds["max_length_k"] == 40
    calls = []
    usual = varlen.varlen_attn

    def recorded(*inputs: object, **options: object) -> torch.Tensor:
        calls.append((inputs, options))
        return usual(*inputs, **options)

    monkeypatch.setattr(varlen, "varlen_attn", recorded)
    query, key = (torch.empty(3, heads, 40, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    starts = bounds["cu_seq_lens_q"].to("meta")
    told = bounds | {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    found, _ = attention.attend(LAYER, query, key, key, None, sliding_window=5, **told)
    assert (found.shape, found.dtype) == ((3, 40, 4, 16), torch.bfloat16)
    (((q, k, _, *rest), options),) = calls
    assert (q.shape, k.shape) == ((120, 4, 16), (120, 2, 16)) and rest[2:] == [40, 40]
    assert options["window_size"] == (4, 0)  # the kernel counts the tokens before this one


def test_the_kernel_of_a_gpu_gets_the_bounds_of_queries_and_of_keys(monkeypatch):
    """A part of 10 tokens reads the keys of its documents: those of the first one begin before the part."""
    parts = attention.Parts.of(positions(ROWS), [slice(20, 30), slice(30, 40)], lambda keys: keys)
    assert parts.bounds.tolist() == [
        [0, 10, 12, 20, 30, 40, 50, 59, 60],
        [0, 20, 42, 50, 80, 120, 144, 177, 178],
    ]
    assert parts.longest == 40
    calls = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda *given, **_: calls.append(given) or given[0])
    query, key = (
        torch.empty(3, heads, tokens, 16, dtype=torch.bfloat16, device="meta") for heads, tokens in ((4, 20), (2, 40))
    )
    parts = dataclasses.replace(parts, bounds=parts.bounds.to("meta"), gather=lambda _: torch.cat([key, key], -1))
    with attention.dividing_rows(parts):
        found, _ = attention.attend(LAYER, query, key[:, :, 20:], key[:, :, 20:], None)
    ((q, k, v, *_, max_q, max_k),) = calls
    assert found.shape == (3, 20, 4, 16)
    assert (q.shape, k.shape, v.shape) == ((60, 4, 16), (178, 2, 16), (178, 2, 16)) and max_q == max_k == 40


def test_which_arguments_a_family_passes_to_its_attention(tokenizer):
    def arguments(name: str, **settings: object) -> set[str]:
        return probes.document_arguments(getattr(transformers, f"{name}Config")(**settings), tokenizer)

    assert arguments("Llama") == arguments("Mistral", sliding_window=4096) == {"positions", "bounds"}
    assert arguments("Gemma3Text", sliding_window=512) == {"positions", "bounds"}
    assert arguments("Gemma2") == arguments("Llama4Text") == set()  # capped scores, chunks
    assert arguments("OPT") == set()  # passes neither
    assert arguments("Persimmon") == {"bounds"}


def test_auto_attends_by_document_where_family_and_gear_allow_it():
    config = transformers.LlamaConfig()
    assert loading.attention_of(config, "auto", by_document=True) == DOCUMENTS
    assert loading.attention_of(config, "auto") == "sdpa"
    assert loading.attention_of(config, "sdpa", by_document=True) == "sdpa"
    assert loading.attention_of(transformers.Gemma2Config()) == "eager"
    with pytest.raises(UserError, match=r"model\.attention: llama cannot compute attention by document on this gear"):
        loading.attention_of(config, DOCUMENTS)
