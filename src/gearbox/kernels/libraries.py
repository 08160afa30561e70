"""Use kernels of other packages where they are installed: Liger's for whole layers, torchao's products in 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from gearbox.errors import UserError
from gearbox.kernels.blocks import blocks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOAT8_CAPABILITY = (8, 9)  # the first GPUs with 8-bit floating-point units
FLOAT8_MULTIPLE = 16  # of both sides of a matrix


def use_liger(model: PreTrainedModel) -> None:
    """Replace norms, activations and rotations by Liger's kernels. Gearbox's own head still computes the loss.

    Raise UserError without a GPU, or if Liger does not know the family.
    """
    if not torch.cuda.is_available():
        raise UserError("perf.kernels: liger needs a GPU; use auto")
    from liger_kernel.transformers import monkey_patch

    family = model.config.model_type
    if family not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:  # Liger would only log that
        raise UserError(f"perf.kernels: liger does not know the family {family}; use auto")
    monkey_patch._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)


def use_float8(model: PreTrainedModel, emulate: bool = False) -> None:
    """Let the linear layers of all blocks multiply in 8-bit floating point, forward and backward. Weights stay.

    `emulate` computes the same on a device without such units, for tests. Raise UserError without a fitting GPU, or if
    no layer fits.
    """
    fits = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
    if not (fits or emulate):
        raise UserError("perf.float8: needs a GPU of compute capability 8.9 or more; use float8: false")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    for block in blocks_of(model):
        convert_to_float8_training(block, module_filter_fn=_fits, config=Float8LinearConfig(emulate=emulate))
    if not any(isinstance(module, Float8Linear) for module in model.modules()):
        raise UserError(
            f"perf.float8: no linear layer of the family {model.config.model_type} has sides that are multiples of "
            f"{FLOAT8_MULTIPLE}; use float8: false"
        )


def _fits(module: nn.Module, _name: str) -> bool:
    return isinstance(module, nn.Linear) and not any(side % FLOAT8_MULTIPLE for side in module.weight.shape)
