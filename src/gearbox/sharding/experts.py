"""Divide the experts of a mixture among ranks, which send each other the tokens of a layer (expert parallelism).

Each of `ep` consecutive ranks holds different experts and takes different rows. Groups of `ep` ranks hold the same
experts, which FSDP2 divides once more among the groups. So each rank of all N holds 1/N of the experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from gearbox.errors import UserError
from gearbox.sharding.unwrap import without_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MESH = ("copies", "ep", "own")
"""The dimensions of the mesh: ranks with the same experts, ranks with different ones, and a rank by itself."""


def is_of_experts(model: PreTrainedModel, name: str) -> bool:
    """Return True if a parameter has a row for each expert, by the family's plan."""
    return replace_layer_number_by_wildcard(name) in (model.ep_plan or {})


def names_of_experts(model: nn.Module) -> set[str]:
    """Return the names of the parameters with a row for each expert, as the model with its adapter names them."""
    causal_lm = without_adapter(cast("PreTrainedModel", model))
    found = {parameter for name, parameter in causal_lm.named_parameters() if is_of_experts(causal_lm, name)}
    return {name for name, parameter in model.named_parameters() if parameter in found}


def expert_part(rank: int, num_ranks: int, ep: int) -> int:
    """Return which of `num_ranks` equal parts of the experts a rank holds."""
    return rank % ep * (num_ranks // ep) + rank // ep


def divide_experts(model: nn.Module, ep: int, device_type: str, options: dict[str, Any]) -> None:
    """Divide the experts of a model, and let them exchange tokens. `options` are those of FSDP2.

    The exchange brings an expert the gradients of all its tokens in a group. FSDP2 would average over the groups only.
    """
    causal_lm, num_ranks = without_adapter(cast("PreTrainedModel", model)), dist.get_world_size()
    mesh = init_device_mesh(device_type, (num_ranks // ep, ep, 1), mesh_dim_names=MESH)
    plan = causal_lm._expand_parallel_plan(causal_lm.ep_plan)
    if "grouped_gemm" not in plan.values():  # an adapter has wrapped the experts
        raise UserError(
            "adapter.targets: names the experts, which expert parallelism divides; list only layers of the attention, "
            "or use accelerate_configs/fsdp.yaml"
        )
    apply_expert_parallelism(causal_lm, mesh["ep"], mesh["own"], plan, "all_to_all")
    for name, style in plan.items():
        if style == "ep_dispatch_experts":
            experts = cast(FSDPModule, fully_shard(causal_lm.get_submodule(name), mesh=mesh["copies"], **options))
            experts.set_gradient_divide_factor(num_ranks)
            experts.set_force_sum_reduction_for_comms(num_ranks > ep)  # other backends than NCCL only sum
