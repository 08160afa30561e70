"""Fixes of transformers' and accelerate's tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def fix_replicated_gradients() -> None:
    """Mend how transformers 5.23 adds the gradients of norms of single heads (Qwen3) over the ranks that share heads.

    It adds what has accumulated, with each micro batch once more: the first one's is then counted many times.
    """
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    def install_forward(self: Any, module: Any, mesh: Any) -> Any:
        usual, hooked = module.forward, set()

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient, group=mesh.get_group())
            return gradient

        def forward(*inputs: Any, **options: Any) -> Any:
            for parameter in module.parameters(recurse=False):  # loading puts other ones in place of the first
                if torch.is_grad_enabled() and parameter.requires_grad and parameter not in hooked:
                    hooked.add(parameter)
                    parameter.register_hook(summed)
            return usual(*inputs, **options)

        module.forward = forward
        return module

    ReplicatedWithGradAllReduce.install_forward = install_forward


def fix_sharded_layers(model: torch.nn.Module) -> None:
    """What transformers and PEFT leave amiss of matrices that are cut over ranks."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and isinstance(module.weight, DTensor):
            # The whole layer's, which transformers' hooks ask for; PEFT 0.21 notes an adapter's part.
            module.out_features, module.in_features = module.weight.shape
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            if local.untyped_storage().nbytes() > local.nbytes:  # on a CPU a view keeps the whole in memory
                parameter._local_tensor = local.clone()


def split_groups_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Part the optimizer's groups by the mesh of their tensors, which one multi-tensor operation cannot mix."""
    groups = []
    for group in optimizer.param_groups:
        by_mesh: dict[Any, list[Any]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups += [group | {"params": parameters} for parameters in by_mesh.values()]
    optimizer.param_groups[:] = groups


def norm_of_shards(gradients: list[torch.Tensor]) -> float:
    """The norm of gradients of which some are cut over one mesh, some over another and some not at all."""
    sums: dict[tuple[Any, ...], torch.Tensor] = {}  # of squares, by the groups of ranks over which they must be added
    for gradient in gradients:
        local = gradient
        groups: tuple[Any, ...] = ()
        if isinstance(gradient, DTensor):
            local, mesh = gradient.to_local(), gradient.device_mesh
            cut = [i for i, placement in enumerate(gradient.placements) if getattr(placement, "dim", None) is not None]
            groups = tuple(mesh.get_group(i) for i in cut)
        sums[groups] = sums.get(groups, 0) + local.float().square().sum()
    for groups, squares in sums.items():
        for group in groups:
            torch.distributed.all_reduce(squares, group=group)
    return float(sum(sums.values())) ** 0.5
