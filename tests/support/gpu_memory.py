"""Compute the memory of a training step on a GPU without one: large tensors are allocated, but never touched.

Linux gives a large allocation no memory until something writes to it. `Untouched` skips every operator on large
tensors, and allocates what it would return. Autocast, checkpointing and our kernels run as they are. Frozen NF4 weights
are counted as bf16.
"""

import math
import weakref
from pathlib import Path

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from gearbox.config.loader import load_recipe
from gearbox.kernels import blocks, head
from gearbox.kernels.attention import DOCUMENTS
from gearbox.kernels.install import install_kernels
from gearbox.model import adapters, loading, loss
from gearbox.model.optimizer import make_optimizer
from gearbox.sharding.unwrap import without_adapter

LARGE = 2**16  # elements
VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default}


class Untouched(TorchDispatchMode):
    """A mode that counts the bytes of living tensors, and skips the work on large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def count(self, found):
        for tensor in tree_iter(found):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage._cdata)
        return found

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        returned = [one.alias_info for one in func._schema.returns]
        is_view = func in VIEWS or any(alias is not None and not alias.is_write for alias in returned)
        if not tensors and args and isinstance(args[0], list | torch.Size) and math.prod(args[0]) > LARGE:
            return self.count(torch.empty(args[0], dtype=kwargs.get("dtype"), device=kwargs.get("device")))
        if is_view or not any(tensor.numel() > LARGE for tensor in tensors):
            return self.count(func(*args, **kwargs))
        named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        written = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        if written:  # in place, or into `out`
            outcome = tuple(named[name] for name in written)
            return None if not func._schema.returns else outcome[0] if len(outcome) == 1 else outcome
        on_meta = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        return self.count(tree_map(_untouched, on_meta))


def _to_meta(value):
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _untouched(value):
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return value


def peak_bytes(path: Path, num_layers: int, monkeypatch) -> int:
    """Return the peak of the second step of a recipe under single or ddp, with so many layers, in bytes."""
    recipe = load_recipe(path)
    monkeypatch.setitem(head.NUM_LOGITS, "cpu", head.NUM_LOGITS["cuda"])
    monkeypatch.setattr(adapters, "_init_adapter", lambda model, seed: None)
    model = _built(recipe, num_layers)
    rows, tokens = recipe.batch.micro_rows, recipe.batch.row_tokens
    places = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32)
    bounds = {"cu_seq_lens_q": places, "cu_seq_lens_k": places, "max_length_q": tokens, "max_length_k": tokens}
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    positions = torch.arange(tokens).repeat(rows, 1)
    with Untouched() as memory:
        memory.count([*(parameter.detach() for parameter in model.parameters()), *model.buffers()])
        optimizer = make_optimizer(model, recipe.optim)
        for _ in range(2):
            for _ in range(2):  # micro-batches
                with torch.autocast("cpu", torch.bfloat16):
                    total = model(
                        input_ids=ids, labels=ids, position_ids=positions, num_targets=rows * tokens, **bounds
                    )
                total.backward()
                del total
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak


def layer_weights(path: Path) -> int:
    """Return the number of weights in the layers of a recipe's model."""
    config = loading.load_config(load_recipe(path).model, rehearse=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for block in blocks.blocks_of(model) for parameter in block.parameters())


def num_layers(path: Path) -> int:
    """Return the number of layers of a recipe's model."""
    return loading.load_config(load_recipe(path).model, rehearse=True).num_hidden_layers


def _built(recipe, num_layers: int):
    """Return the model as a run trains it in bf16, with memory that nothing has touched."""
    config = loading.load_config(recipe.model, rehearse=True)
    config.num_hidden_layers, config.use_cache = num_layers, False
    trains_all = recipe.adapter.method == "none"
    dtype = torch.float32 if trains_all else torch.bfloat16
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=DOCUMENTS)
    if not trains_all:
        model = adapters.attach_adapter(model, recipe)
    install_kernels(model)
    loss.install_loss(model, None)
    blocks.wrap_blocks(without_adapter(model), recipe.perf.checkpointing, False)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                kind = torch.float32 if parameter.requires_grad else parameter.dtype
                empty = torch.empty(parameter.shape, dtype=kind)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return model
