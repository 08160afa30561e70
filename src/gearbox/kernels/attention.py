"""Compute causal attention within each document of packed rows, without a mask and without work between documents.

transformers knows it by the name DOCUMENTS, and builds no masks for it. The documents follow from the positions, which
restart at 0, or from the bounds that `bounds_of` computed on the CPU.

Shapes: B rows of T tokens, D documents, H query heads and K key heads. E is the size of a query, V that of a value.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gearbox.kernels.lora import autocast_dtype

DOCUMENTS = "documents"
"""The name of this attention in transformers and in model.attention."""
MAX_HEAD_SIZE = 256  # of the GPU's kernel


def bounds_of(position_ids: torch.Tensor) -> dict[str, Any]:
    """Return the documents of rows as the keyword arguments that transformers passes to its flash attention.

    These are the bounds of the documents in the B * T tokens, [D + 1] int32, and the length of the longest document.

    position_ids: [B, T] on the CPU.
    """
    bounds = _bounds(position_ids)
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _bounds(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the start of each document in the B * T tokens, and their end, [D + 1] int32. Each row starts one."""
    starts = position_ids == 0
    starts[:, 0] = True
    found = starts.flatten().nonzero()[:, 0]
    return F.pad(found, (0, 1), value=starts.numel()).to(torch.int32)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401  the arguments of transformers' attention functions
) -> tuple[torch.Tensor, None]:
    """Return the attention's output, [B, T, H, V], in the form of transformers' attention functions.

    query: [B, H, T, E]. key: [B, K, T, E]. value: [B, K, T, V]. Anything else than causal self-attention over complete
    rows is left to transformers' own sdpa: generation with a cache, given masks, layers that look ahead.
    """
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None or not is_causal or query.shape[2] != key.shape[2]:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return out, None
    window, scale, dropout = _settings(query, options)
    dtype, device = autocast_dtype(value) or value.dtype, query.device.type
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    bounds, longest = options.get("cu_seq_lens_q"), options.get("max_length_q")
    if bounds is None:
        bounds, longest = _given_bounds(query, options.get("position_ids"))
    is_even = query.shape[-1] == value.shape[-1]
    if device != "cpu" and is_even and query.shape[-1] <= MAX_HEAD_SIZE:
        return _on_gpu(query, key, value, (bounds, longest or query.shape[2]), (window, scale)), None
    if device != "cpu" or dropout or not is_even:
        return _composed(query, key, value, bounds, (window, scale, dropout)), None
    return torch.ops.gearbox.attend_documents(query, key, value, bounds, window, scale)[0], None


def _settings(query: torch.Tensor, options: dict[str, Any]) -> tuple[int, float, float]:
    """Return the sliding window (0 for none), the scale of the scores and the dropout that a layer asks for."""
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"{DOCUMENTS} attention has no {unknown[0]}")
    window = options.get("sliding_window") or 0
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    return 0 if window >= query.shape[2] else window, scale, options.get("dropout", 0.0)


def _given_bounds(query: torch.Tensor, position_ids: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Return the bounds that positions give, else those of complete rows, and the longest possible document."""
    batch, _, num_tokens, _ = query.shape
    if position_ids is None or position_ids.shape[-1] != num_tokens:
        return torch.arange(0, (batch + 1) * num_tokens, num_tokens, device=query.device).int(), num_tokens
    return _bounds(position_ids.reshape(-1, num_tokens).expand(batch, -1)), num_tokens


def _on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: tuple[torch.Tensor, int],
    settings: tuple[int, float],
) -> torch.Tensor:
    """Return the output by torch's flash kernel for sequences of different lengths, [B, T, H, V]."""
    from torch.nn.attention.varlen import varlen_attn

    (bounds, longest), (window, scale) = documents, settings
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    sizes = (window - 1 if window else -1, 0)
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=sizes, enable_gqa=True)
    return cast(torch.Tensor, out).view(query.shape[0], query.shape[2], *q.shape[1:])


def _composed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    settings: tuple[int, float, float],
) -> torch.Tensor:
    """Return the output by torch's sdpa on each document, for what the kernels cannot do, [B, T, H, V].

    A GPU waits here for the lengths of the documents.
    """
    window, scale, dropout = settings
    lengths = bounds.diff().tolist()
    parts = [torch.split(tensor.transpose(0, 1).flatten(1, 2)[None], lengths, 2) for tensor in (query, key, value)]
    outputs = []
    for q, k, v in zip(*parts, strict=True):  # [1, H, tokens, E], [1, K, tokens, E], [1, K, tokens, V]
        masked = bool(window) and q.shape[2] > window
        mask = _window_mask(q.shape[2], window, q.dtype).to(q.device) if masked else None
        outputs.append(F.scaled_dot_product_attention(q, k, v, mask, dropout, not masked, scale=scale, enable_gqa=True))
    return torch.cat(outputs, 2).view(query.shape[1], query.shape[0], query.shape[2], -1).permute(1, 2, 0, 3)


@functools.lru_cache(maxsize=8)
def _window_mask(num_tokens: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to the scores of a document with a sliding window, [num_tokens, num_tokens]."""
    allowed = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril().triu(1 - window)
    return torch.zeros(num_tokens, num_tokens, dtype=dtype).masked_fill_(~allowed, -torch.inf)


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _documents(bounds: torch.Tensor, num_tokens: int, window: int, dtype: torch.dtype) -> list[tuple[int, slice, Any]]:
    """Return the row, the tokens in it, and the options of the kernel for each document."""
    found = []
    for start, stop in itertools.pairwise(bounds.tolist()):
        row, first = divmod(start, num_tokens)
        masked = window and stop - start > window
        mask = _window_mask(stop - start, window, dtype) if masked else None
        found.append((row, slice(first, first + stop - start), (not masked, mask)))
    return found


@torch.library.custom_op("gearbox::attend_documents", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, [B, T, H, E], and the logarithm of each softmax's sum, [B, H, T]. CPU only.

    query: [B, H, T, E]. key, value: [B, K, T, E]. bounds: [D + 1] int32 in the B * T tokens. window: 0 for none.
    """
    batch, heads, num_tokens, size = query.shape
    out = query.new_empty(batch, num_tokens, heads, size)
    sums = query.new_empty(batch, heads, num_tokens, dtype=torch.float32)
    for row, tokens, (is_causal, mask) in _documents(bounds, num_tokens, window, query.dtype):
        q, k, v = (tensor[row : row + 1, :, tokens] for tensor in (query, key, value))
        part, sums[row : row + 1, :, tokens] = _forward(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        out[row, tokens] = part[0].transpose(0, 1)
    return out, sums


@_attend.register_fake
def _attend_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, num_tokens, size = query.shape
    sums = query.new_empty(batch, heads, num_tokens, dtype=torch.float32)
    return query.new_empty(batch, num_tokens, heads, size), sums


@torch.library.custom_op("gearbox::attend_documents_backward", mutates_args=())
def _attend_backward(
    gradient: torch.Tensor,
    saved: list[torch.Tensor],
    bounds: torch.Tensor,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value. `saved` has these, the output and the sums."""
    query, key, value, out, sums = saved
    gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    for row, tokens, (is_causal, mask) in _documents(bounds, query.shape[2], window, query.dtype):
        q, k, v, lse = (tensor[row : row + 1, :, tokens] for tensor in (query, key, value, sums))
        given, part = (tensor[row : row + 1, tokens].transpose(1, 2) for tensor in (gradient, out))
        found = _backward(given, q, k, v, part, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
        for whole, one in zip(gradients, found, strict=True):
            whole[row : row + 1, :, tokens] = one
    return gradients


@_attend_backward.register_fake
def _attend_backward_fake(
    gradient: torch.Tensor, saved: list[torch.Tensor], bounds: torch.Tensor, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value, _, _ = saved
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:  # noqa: ANN401
    query, key, value, bounds, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)


def _differentiate(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
    *saved, bounds = ctx.saved_tensors
    found = torch.ops.gearbox.attend_documents_backward(gradient, saved, bounds, ctx.window, ctx.scale)
    return *found, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)
AttentionInterface.register(DOCUMENTS, attend)  # without an entry for masks
