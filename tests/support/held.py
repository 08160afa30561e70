"""Count the bytes that a rank holds, between two real steps and while the optimizer takes its step."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from gearbox.sharding.unwrap import unwrap_optimizer
from support.faults import Step, at_step, patch_step
from support.ranks import Outcome


def at_second_step(
    monkeypatch: pytest.MonkeyPatch, folder: Path, look: Callable[[Step], dict], run: Callable[[], Outcome]
) -> list[dict]:
    """Return what look(step) returns on each rank for the second step of run(). `look` takes the step itself."""

    def keep(step: Step) -> None:
        (folder / f"{step.rank}.json").write_text(json.dumps(look(step)))

    with monkeypatch.context() as here:
        patch_step(here, at_step(2, keep))
        outcome = run()
    assert set(outcome.codes) == {0}, outcome.output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(outcome.codes))]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, under any engine."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def held(step: Step) -> dict:
    """Return bytes between two steps (parameters, optimizer), and those of the gradients at the optimizer's step."""
    model = step.model
    engine = getattr(model, "optimizer", None)  # ZeRO's
    gradients = []

    def count(*_, **__):
        if engine is None:
            parts = [local(p.grad) for p in model.parameters() if p.grad is not None]
        elif hasattr(engine, "grad_partitions_flat_buffer"):
            parts = [engine.grad_partitions_flat_buffer]
        elif hasattr(engine, "fp32_groups_gradients_flat"):  # ZeRO-1 in bf16
            parts = [*engine.fp32_groups_gradients_flat, *(p.grad for p in model.parameters() if p.grad is not None)]
        else:  # parts of buckets, which later gradients overwrite
            parts = [t.clone() for kept in engine.averaged_gradients.values() for t in kept or () if t is not None]
        gradients.append(num_bytes(parts))

    base = unwrap_optimizer(step.optimizer)
    if engine is None:
        base.register_step_pre_hook(count)
    else:
        usual = engine.step
        engine.step = lambda *a, **k: (count(), usual(*a, **k))[1]
    step.take()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    parameters = [local(p) for p in model.parameters()]
    masters = [p for group in base.param_groups for p in group["params"]] if engine is not None else []
    masters += getattr(engine, "fp32_partitioned_groups_flat", [])
    states = [local(t) for state in base.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    trained = num_bytes(local(p) for p in model.parameters() if p.requires_grad)
    return {
        "parameters": num_bytes(parameters), "masters": num_bytes(masters), "trained": trained,
        "gradients": gradients[0], "optimizer": num_bytes(states),
    }  # fmt: skip
