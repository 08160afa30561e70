"""Load a model for tensor parallelism, and work around its faults in transformers, accelerate and PEFT."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gearbox.config.gear import Gear
from gearbox.sharding.unwrap import without_adapter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

FULL_OUTSIDE = ("colwise_gather_output", "rowwise_split_input")  # plans of layers with full inputs and outputs


def fix_replicated_gradients() -> None:
    """Fix how transformers 5.23 sums the gradients of per-head norms (Qwen3) over the ranks that share the heads.

    It sums the accumulated gradient again in each micro-batch, and so counts the first one's gradient many times.
    """
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    def install_forward(self: ReplicatedWithGradAllReduce, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        usual = module.forward
        hooked: set[nn.Parameter] = set()

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient, group=mesh.get_group())
            return gradient

        def forward(*inputs: object, **options: object) -> object:
            for parameter in module.parameters(recurse=False):  # loading replaces the first ones
                if torch.is_grad_enabled() and parameter.requires_grad and parameter not in hooked:
                    hooked.add(parameter)
                    cast(Any, parameter).register_hook(summed)  # torch does not annotate it
            return usual(*inputs, **options)

        module.forward = forward
        return module

    ReplicatedWithGradAllReduce.install_forward = install_forward


def fix_adapter_sizes() -> None:
    """Fix the sizes of PEFT 0.21's adapters of layers that split their input or gather their output (OLMo 2, Phi).

    PEFT computes these adapters in full on every rank, but takes their sizes from the local shard.
    """
    from peft.tuners.lora import LoraLayer

    usual = LoraLayer._get_in_out_features

    def sizes(self: LoraLayer, module: nn.Module) -> tuple[int, int]:
        weight = getattr(module, "weight", None)
        if isinstance(weight, DTensor) and getattr(module, "_hf_tp_plan", None) in FULL_OUTSIDE:
            return weight.shape[1], weight.shape[0]
        return cast(tuple[int, int], usual(self, module))

    LoraLayer._get_in_out_features = sizes


def fix_sharded_layers(model: nn.Module) -> None:
    """Fix sizes and memory of layers whose matrices transformers and PEFT have sharded across ranks."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
            # transformers' hooks need the full layer's sizes; PEFT 0.21 sets those of an adapter's local shard.
            module.out_features, module.in_features = module.weight.shape
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            if local.untyped_storage().nbytes() > local.nbytes:  # on a CPU a view keeps the full tensor in memory
                parameter._local_tensor = local.clone()


def split_parameters(model: PreTrainedModel | PeftModel) -> set[nn.Parameter]:
    """Return the parameters that the family's plan divides among the ranks of tp; each rank holds the others in full.

    Of an adapter's two matrices only the one next to the divided side is divided. None is where the layer itself splits
    its input or gathers its output: PEFT then computes the adapter in full on every rank.
    """
    causal_lm, found = without_adapter(model), set()
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        module, _, kind = pattern.rpartition(".")
        module, _, half = module.partition(".lora_")  # A.default, B.default or empty
        style = causal_lm.tp_plan.get(pattern) or causal_lm.tp_plan.get(module.removesuffix(".base_layer"), "")
        if half and style in FULL_OUTSIDE:
            continue
        divides_outputs = style.startswith(("colwise", "embedding", "packed")) and half[:1] in ("", "B")
        divides_inputs = style.startswith("rowwise") and half[:1] in ("", "A") and kind != "bias"
        if divides_outputs or divides_inputs:
            found.add(parameter)
    return found


def split_groups_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Split the optimizer's groups by the mesh of their tensors: a multi-tensor operation cannot mix meshes."""
    groups = []
    for group in optimizer.param_groups:
        by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups += [group | {"params": parameters} for parameters in by_mesh.values()]
    optimizer.param_groups[:] = groups


def norm_of_shards(gradients: list[torch.Tensor]) -> float:
    """Return the norm of gradients that may be sharded over different meshes, or not sharded."""
    sums: dict[tuple[ProcessGroup, ...], torch.Tensor] = {}  # sums of squares, by the groups that must add them up
    for gradient in gradients:
        local = gradient
        groups: tuple[ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            local, mesh = gradient.to_local(), gradient.device_mesh
            sharded = [i for i, p in enumerate(gradient.placements) if getattr(p, "dim", None) is not None]
            groups = tuple(mesh.get_group(i) for i in sharded)
        sums[groups] = sums.get(groups, 0) + local.float().square().sum()
    for groups, squares in sums.items():
        for group in groups:
            torch.distributed.all_reduce(squares, group=group)
    norm: float = float(sum(sums.values())) ** 0.5
    return norm


def from_pretrained_kwargs(gear: Gear) -> dict[str, Any]:
    """Return options for `from_pretrained`: under tensor parallelism each rank reads only its shard of each matrix."""
    if gear.degree("tp") == 1:
        return {}
    from transformers.distributed import DistributedConfig

    class TensorParallel(DistributedConfig):  # type: ignore[misc]
        """A config by which transformers shards only over tp. Here FSDP is applied later, after adapters."""

        dp_size = 1

    if gear.engine == "tp":
        fix_replicated_gradients()
    fix_adapter_sizes()
    tp = gear.degree("tp")
    return {"distributed_config": TensorParallel(tp_size=tp, fsdp_size=gear.num_processes // tp)}
