"""Split a decoder into stages of consecutive layers, and check that the stages compute what the full model computes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from gearbox.errors import UserError, one_line_with_type
from gearbox.planning.memory import balance
from gearbox.sharding.unwrap import decoder_of, text_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: number `index` of `count`."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """True for the stage with the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that computes the logits."""
        return self.index == self.count - 1


class SkippedModule(nn.Module):
    """A placeholder for a module of another stage."""

    def forward(self, hidden: torch.Tensor, *others: object, **options: object) -> torch.Tensor:
        """Return the hidden states unchanged."""
        return hidden


class ReceivedHidden(nn.Module):
    """A placeholder that returns the hidden states received from the previous stage.

    It replaces the embedding and the layer before this stage's first one. In place of that layer it discards its
    input. So what the model's forward applies to the embedding, such as Granite's multiplier, is applied only once, on
    the first stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *others: object, **options: object) -> torch.Tensor | None:
        """Return the hidden states that `set_received` stored."""
        return self.hidden


def stage_class(config: PretrainedConfig, stage: Stage) -> type[PreTrainedModel]:
    """Return a model class of this architecture that has only one stage.

    `from_pretrained` builds it without allocating memory, and reads only this stage's weights from the files.
    """
    full_class = text_class(config)

    def build(self: PreTrainedModel, config: PretrainedConfig, *arguments: object, **options: object) -> None:
        full_class.__init__(self, config, *arguments, **options)
        keep_stage(self, stage)

    return type(full_class.__name__, (full_class,), {"__init__": build, "__module__": full_class.__module__})


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the full model on the meta device, without memory."""
    with torch.device("meta"):
        return text_class(config)(config)


def keep_stage(model: PreTrainedModel, stage: Stage) -> None:
    """Remove all stages but one, in place. Layer indices and parameter names stay those of the full model."""
    decoder = decoder_of(model)
    first, end = layers_of_stage(model, stage)
    is_tied = model.config.tie_word_embeddings
    received = ReceivedHidden()
    names = list(model.config.get_text_config().base_model_pp_plan)
    at = names.index("layers")
    for i in range(len(decoder.layers)):
        if not first <= i < end:
            decoder.layers[i] = received if i == first - 1 else SkippedModule()
    if not stage.is_first and not (is_tied and stage.is_last):
        for name in names[:at]:
            setattr(decoder, name, received)
    if not stage.is_last:
        for name in names[at + 1 :]:
            setattr(decoder, name, SkippedModule())
        model.set_output_embeddings(None)
        model.all_tied_weights_keys = {}
    model._keys_to_ignore_on_load_unexpected = {"."}  # else from_pretrained lists the other stages' weights


def is_stage(model: nn.Module) -> bool:
    """Return True if a model is a single pipeline stage."""
    return any(isinstance(module, SkippedModule | ReceivedHidden) for module in model.modules())


def layers_of_stage(model: PreTrainedModel, stage: Stage) -> tuple[int, int]:
    """Return the first layer of a stage and the first layer after it, as indices into the full model."""
    layers = [_numel(layer) for layer in decoder_of(model).layers]
    bounds = balance(
        layers,
        stage.count,
        before=_numel(model.get_input_embeddings()),
        after=_numel(model.get_output_embeddings()),
    )
    return bounds[stage.index], bounds[stage.index + 1]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def check_stages_equal_whole(config: PretrainedConfig) -> None:
    """Raise UserError unless this architecture gives the same logits in stages of one layer each.

    `config` describes a narrow copy, which is built with random weights.
    """
    refusal = f"model.name: the family {config.model_type} cannot be split into stages"
    way_out = "; use accelerate_configs/fsdp.yaml"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            full = text_class(config)(config).float().eval()
        tokens = torch.arange(1, 33).view(2, 16) % config.get_text_config().vocab_size
        positions = (torch.arange(16) % 10).expand(2, 16)  # two documents per row
        inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        logits = full(**inputs).logits
        staged, names = _run_staged(full, inputs)
    except Exception as error:
        raise UserError(f"{refusal}: {one_line_with_type(error, 200)}{way_out}") from None
    expected = [name for name, _ in full.named_parameters()]
    if config.tie_word_embeddings:  # on the first and the last stage
        expected += [name for name, p in full.named_parameters() if p is full.get_input_embeddings().weight]
    if odd := {name for name in {*names, *expected} if names.count(name) != expected.count(name)}:
        raise UserError(f"{refusal}: {min(odd)} is outside its pipeline plan{way_out}")
    off = ((staged - logits).abs().max() / logits.abs().max()).item()
    if not off < 1e-5:
        raise UserError(f"{refusal}: the logits differ by {off:.2g}{way_out}")


def _run_staged(full: PreTrainedModel, inputs: dict[str, torch.Tensor | bool]) -> tuple[torch.Tensor, list[str]]:
    """Run a model in stages of one layer each. Return its logits and the parameter names of all stages."""
    count = len(decoder_of(full).layers)
    names: list[str] = []
    hidden: torch.Tensor | None = None
    for index in range(count):
        stage = copy.deepcopy(full)
        keep_stage(stage, Stage(index, count))
        names += [name for name, _ in stage.named_parameters()]
        set_received(stage, hidden)
        hidden = decoder_of(stage)(**inputs).last_hidden_state
    return stage(**inputs).logits, names


def set_received(stage: nn.Module, hidden: torch.Tensor | None) -> None:
    """Set the hidden states that a stage's placeholders return; None clears them."""
    for module in stage.modules():
        if isinstance(module, ReceivedHidden):
            module.hidden = hidden
