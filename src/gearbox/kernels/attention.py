"""Compute causal attention within each document of packed rows, without a mask and without work between documents.

transformers knows it by the name DOCUMENTS, and builds no masks for it. The documents follow from the positions, which
restart at 0, or from the bounds that `bounds_of` computed on the CPU. If several ranks share each row, a rank computes
its `Parts` of the rows and gathers the keys and values of the complete rows.

Shapes: B rows of T tokens, D documents, H query heads and K key heads. E is the size of a query, V that of a value.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Parts:
    """The parts of the rows that one rank computes while several ranks share each row."""

    gather: Callable[[torch.Tensor], torch.Tensor]
    """Return the keys of the complete rows, [B, K, T, E], from those of this rank's tokens."""
    keys: list[tuple[int, slice]]
    """The row and the tokens whose keys a part reads, for each part in order."""
    bounds: torch.Tensor
    """The bounds of the documents in the tokens of all parts, and in the keys that they read, [2, D + 1] int32."""
    longest: int
    """The number of keys of the longest document."""

    @classmethod
    def of(
        cls, position_ids: torch.Tensor, parts: Sequence[slice], gather: Callable[[torch.Tensor], torch.Tensor]
    ) -> Parts:
        """Return the parts of rows with these positions, [B, T] on the CPU. `parts` are the same tokens of each row."""
        keys, queries, read = [], [0], [0]
        for row, positions in enumerate(position_ids):
            starts = [0, *(positions[1:] == 0).nonzero()[:, 0].add(1).tolist()]
            for part in parts:
                first = max(start for start in starts if start <= part.start)
                keys.append((row, slice(first, part.stop)))
                ends = [*(start for start in starts if part.start < start < part.stop), part.stop]
                queries += [queries[-1] + end - part.start for end in ends]
                read += [read[-1] + end - first for end in ends]
        bounds = torch.tensor([queries, read], dtype=torch.int32)
        return cls(gather, keys, bounds, int(bounds[1].diff().max()))


_parts: Parts | None = None  # a global, because the backward pass of a GPU runs in another thread


@contextmanager
def dividing_rows(parts: Parts) -> Iterator[None]:
    """Compute attention for these parts of rows, in forward and backward passes."""
    global _parts
    _parts = parts
    try:
        yield
    finally:
        _parts = None


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
    is_usual = attention_mask is None and is_causal and query.shape[2] == key.shape[2]
    if _parts is not None and not is_usual:
        raise NotImplementedError("ranks share rows only in causal attention without a mask")
    if not is_usual:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return out, None
    dtype = autocast_dtype(value) or value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    window, scale, dropout = _settings(query, options)
    if _parts is not None:
        read = _of_parts(query, key, value, _parts)
        out = _by_document(*read, (_parts.bounds, _parts.longest), (window, scale, dropout))
        return out.view(query.shape[0], query.shape[2], *out.shape[2:]), None
    bounds, longest = options.get("cu_seq_lens_q"), options.get("max_length_q")
    if bounds is None:
        bounds, longest = _given_bounds(query, options.get("position_ids"))
    window = 0 if window >= query.shape[2] else window
    documents = bounds.expand(2, -1), longest or query.shape[2]
    return _by_document(query, key, value, documents, (window, scale, dropout)), None


def _of_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: Parts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the queries of all parts as one row, and likewise the keys and values that they read."""
    rows = parts.gather(torch.cat([key, value], -1))
    read = torch.cat([rows[row, :, tokens] for row, tokens in parts.keys], 1)[None]
    return query.transpose(0, 1).flatten(1, 2)[None], read[..., : key.shape[-1]], read[..., key.shape[-1] :]


def is_on_cpu(tensor: torch.Tensor) -> bool:
    """Return True if the kernels of the CPU compute a tensor."""
    return tensor.device.type == "cpu"


def _by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: tuple[torch.Tensor, int],
    settings: tuple[int, float, float],
) -> torch.Tensor:
    """Return the output, [B, T, H, V], by the kernel that fits. A document's queries are those of its last keys."""
    (bounds, longest), (window, scale, dropout), on_cpu = documents, settings, is_on_cpu(query)
    is_even = query.shape[-1] == value.shape[-1]
    if not on_cpu and is_even and query.shape[-1] <= MAX_HEAD_SIZE:
        return _on_gpu(query, key, value, (bounds, longest), (window, scale))
    if not on_cpu or dropout or not is_even:
        return _composed(query, key, value, bounds, (window, scale, dropout))
    return cast(torch.Tensor, torch.ops.gearbox.attend_documents(query, key, value, bounds, window, scale)[0])


def _settings(query: torch.Tensor, options: dict[str, Any]) -> tuple[int, float, float]:
    """Return the sliding window (0 for none), the scale of the scores and the dropout that a layer asks for."""
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"{DOCUMENTS} attention has no {unknown[0]}")
    window = options.get("sliding_window") or 0
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    return window, scale, options.get("dropout", 0.0)


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
    queries, keys = bounds
    out = varlen_attn(q, k, v, queries, keys, longest, longest, scale=scale, window_size=sizes, enable_gqa=True)
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
    parts = [
        torch.split(tensor.transpose(0, 1).flatten(1, 2)[None], of, 2)
        for tensor, of in ((query, lengths[0]), (key, lengths[1]), (value, lengths[1]))
    ]
    outputs = []
    for q, k, v in zip(*parts, strict=True):  # [1, H, queries, E], [1, K, keys, E], [1, K, keys, V]
        mask = _mask(q.shape[2], k.shape[2], window, q.dtype)
        mask = None if mask is None else mask.to(q.device)
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, scale=scale, enable_gqa=True)
        )
    return torch.cat(outputs, 2).view(query.shape[1], query.shape[0], query.shape[2], -1).permute(1, 2, 0, 3)


@functools.lru_cache(maxsize=8)
def _mask(num_queries: int, num_keys: int, window: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what is added to the scores of a document, [num_queries, num_keys], or None for plain causal attention.

    The queries are those of the last keys.
    """
    if num_queries == num_keys and not 0 < window < num_keys:
        return None
    allowed = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(before := num_keys - num_queries)
    if window:
        allowed = allowed.triu(before + 1 - window)
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(~allowed, -torch.inf)


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _documents(
    bounds: torch.Tensor, num_tokens: tuple[int, int], window: int, dtype: torch.dtype
) -> Iterator[tuple[int, slice, slice, torch.Tensor | None]]:
    """Yield the row of each document, its queries and its keys in that row, and its mask."""
    queries, keys = bounds.tolist()
    for (start, stop), (first, end) in zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True):
        row, token = divmod(start, num_tokens[0])
        key = first % num_tokens[1]
        mask = _mask(stop - start, end - first, window, dtype)
        yield row, slice(token, token + stop - start), slice(key, key + end - first), mask


@torch.library.custom_op("gearbox::attend_documents", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, [B, T, H, E], and the logarithm of each softmax's sum, [B, H, T]. CPU only.

    query: [B, H, T, E]. key, value: [B, K, N, E] for rows of N keys. window: 0 for none.
    bounds: [2, D + 1] int32. They are the bounds of the documents in the B * T tokens and in the B * N keys.
    """
    batch, heads, num_tokens, size = query.shape
    out = query.new_empty(batch, num_tokens, heads, size)
    sums = query.new_empty(batch, heads, num_tokens, dtype=torch.float32)
    for row, tokens, read, mask in _documents(bounds, (num_tokens, key.shape[2]), window, query.dtype):
        q, k, v = query[row : row + 1, :, tokens], key[row : row + 1, :, read], value[row : row + 1, :, read]
        part, sums[row : row + 1, :, tokens] = _forward(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
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
    for row, tokens, read, mask in _documents(bounds, (query.shape[2], key.shape[2]), window, query.dtype):
        q, lse = query[row : row + 1, :, tokens], sums[row : row + 1, :, tokens]
        k, v = key[row : row + 1, :, read], value[row : row + 1, :, read]
        given, part = (tensor[row : row + 1, tokens].transpose(1, 2) for tensor in (gradient, out))
        found = _backward(given, q, k, v, part, lse, 0.0, mask is None, attn_mask=mask, scale=scale)
        for whole, one, where in zip(gradients, found, (tokens, read, read), strict=True):
            whole[row : row + 1, :, where] = one
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
