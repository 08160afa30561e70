# mypy: disable-error-code="no-untyped-call, attr-defined, misc"
"""A GPU that does not exist: tensors on it have a shape and no memory, and every byte of them is counted.

The GPU is the device `cpu:0`, and the host is `cpu`. Torch keeps the two apart like a GPU and a host, in every build
and without a GPU. Tensors of the host that are small stay real, so that positions and documents have their values.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._C._distributed_c10d import Work
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU, HOST = torch.device("cpu", 0), torch.device("cpu")
SMALL = 2**20
"""Elements of the largest tensor of the host that is real."""
aten = torch.ops.aten
Value = Any  # of an operation's arguments and results, which have any type
COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "all_gather_into_tensor": ("all-gather", None),
    "all_gather_into_tensor_out": ("all-gather", None),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "alltoall_base_": ("all-to-all", 1),
    "alltoall_": ("all-to-all", 1),
    "all_to_all_single": ("all-to-all", 0),
    "send": ("send", 0),
}
"""The kind of each collective, and the argument with the complete tensor; None for its result."""


class FakeGPU(TorchDispatchMode):
    """A mode in which tensors of the GPU have no memory. It counts their bytes by term, and what is sent."""

    def __init__(self) -> None:
        """Begin with an empty GPU."""
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.living: dict[int, list[Value]] = {}
        """The bytes and the term of each storage, by its address."""
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.peak_bytes = self.now_bytes = 0
        self.sent: Counter[str] = Counter()
        self.works: deque[_Done] = deque(maxlen=2**14)
        """The latest works: torch would wait for one whose Python part is gone."""
        self.term = "activations"
        """The term of new tensors."""

    @contextmanager
    def counting_as(self, term: str) -> Iterator[None]:
        """Count new tensors as this term."""
        before, self.term = self.term, term
        try:
            yield
        finally:
            self.term = before

    def as_term(self, term: str, function: Callable[..., Value]) -> Callable[..., Value]:
        """Return a function whose new tensors count as this term."""

        def counted(*arguments: object, **options: object) -> object:
            with self.counting_as(term):
                return function(*arguments, **options)

        return counted

    def recount(self, tensors: Iterable[torch.Tensor | None], term: str) -> None:
        """Count tensors that exist already as this term."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found = self.living.get(local.untyped_storage()._cdata)
            if found is not None:
                self.now[found[1]] -= found[0]
                self.now[term] += found[0]
                found[1] = term

    def forget_peak(self) -> None:
        """Begin a new peak, and a new count of what is sent."""
        self.peak, self.peak_bytes = Counter(self.now), self.now_bytes
        self.sent.clear()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with its new size. Engines free and take memory so."""
        if (found := self.living.get(storage._cdata)) is not None:
            self._add(storage.nbytes() - found[0], found[1])
            found[0] = storage.nbytes()

    def _add(self, size: int, term: str) -> None:
        self.now[term] += size
        self.now_bytes += size
        if self.now_bytes > self.peak_bytes:
            self.peak, self.peak_bytes = Counter(self.now), self.now_bytes

    def _count(self, found: Value) -> Value:
        for tensor in tree_leaves(found):
            if not isinstance(tensor, FakeTensor) or tensor.device != GPU:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.living:
                self.living[key] = [storage.nbytes(), self.term]
                self._add(storage.nbytes(), self.term)
                weakref.finalize(storage, self._forget, key)
        return found

    def _forget(self, key: int) -> None:
        size, term = self.living.pop(key)
        self.now[term] -= size
        self.now_bytes -= size

    def __torch_dispatch__(self, func: Value, types: Value, args: Value = (), kwargs: Value = None) -> Value:
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device if isinstance(args[0], FakeTensor) else NotImplemented
        kwargs = kwargs or {}
        if any(not issubclass(kind, FakeTensor) and kind.__torch_dispatch__ is not _usual for kind in types):
            return NotImplemented  # DTensor calls the mode again with its local tensors
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if func in (aten._pin_memory.default, aten.is_pinned.default):
            return tensors[0] if func is aten._pin_memory.default else True
        kwargs.pop("pin_memory", None)
        name = func._schema.name
        if func is aten._local_scalar_dense.default and isinstance(tensors[0], FakeTensor):
            return self._number(tensors[0])
        if name.startswith(("c10d::", "_c10d_functional::")):
            return self._send(name.partition("::")[2], func, args, kwargs)
        if not self._is_fake(tensors, args, kwargs):
            return func(*args, **kwargs)
        known = _known(func, tensors, args, kwargs)
        with self.fake:
            if known is not None and torch.Tag.dynamic_output_shape in func.tags:
                found = torch.empty(known.shape, dtype=known.dtype, device=GPU)
            else:
                found = func(*args, **kwargs)
        if known is not None:
            found.known = known
        return self._count(found)

    def _is_fake(self, tensors: list[torch.Tensor], args: Value, kwargs: dict[str, Value]) -> bool:
        """Return whether an operation has to do with the GPU, or with a large tensor of the host."""
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return True
        device = kwargs.get("device")
        if device is not None and torch.device(device) == GPU:
            return True
        if device is not None and torch.device(device).type == "meta":
            return False
        size = args[0] if not tensors and args and isinstance(args[0], list | torch.Size) else ()
        is_float = (kwargs.get("dtype") or torch.float32).is_floating_point
        return bool(size) and is_float and math.prod(size) > SMALL

    def _number(self, tensor: FakeTensor) -> float | int | bool:
        """Return a number of a tensor, or a plausible one where the values are not known."""
        known = getattr(tensor, "known", None)
        if known is not None:
            return cast("float | int | bool", known.item())
        return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def _send(self, name: str, func: Value, args: Value, kwargs: dict[str, Value]) -> Value:
        """Return what a collective returns, and count the bytes of its complete tensor."""
        if name == "allreduce_":
            self.works.append(_Done(args[0]))
            found = args[0], self.works[-1].boxed()
        else:
            with self.fake:
                found = self._count(func(*args, **kwargs))
        if name in COLLECTIVES:
            kind, place = COLLECTIVES[name]
            complete = found if place is None else args[place]
            tensors = [one for one in tree_leaves(complete) if isinstance(one, torch.Tensor)]
            self.sent[kind] += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return found


class _Done(Work):
    """A collective that has ended. DDP reads its result."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = result

    def wait(self, *_: object) -> bool:
        self.tensors = []
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.tensors)
        self.tensors = []
        return future


_usual = torch.Tensor.__torch_dispatch__


def _known(func: Value, tensors: list[torch.Tensor], args: Value, kwargs: dict[str, Value]) -> torch.Tensor | None:
    """Return the value of a small tensor of integers on the GPU, if it follows from values that are known."""
    values = [getattr(one, "known", None) if isinstance(one, FakeTensor) else one for one in tensors]
    if not values or any(
        value is None or value.is_meta or value.numel() > SMALL or value.is_floating_point() for value in values
    ):
        for tensor in tensors if func._schema.is_mutable else ():
            vars(tensor).pop("known", None)
        return None
    options = dict(kwargs)
    if "device" in options:
        options["device"] = HOST
    real = tree_map_only(FakeTensor, lambda one: one.known, (args, options))
    found = func(*real[0], **real[1])
    is_whole = isinstance(found, torch.Tensor) and not found.is_floating_point()
    return found if is_whole else None
