"""A decoder split into stages of whole layers, and the check that the stages compute the same."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn

from gearbox.errors import UserError, one_line_with_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Stage:
    """Stage `index` of the `count` stages of a pipeline."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the logits."""
        return self.index == self.count - 1


class SkippedModule(nn.Module):
    """Stands in for a module that another stage has."""

    def forward(self, hidden: torch.Tensor, *others: object, **options: object) -> torch.Tensor:
        """Return the hidden states as they are."""
        return hidden


class ReceivedHidden(nn.Module):
    """Stands in for the embedding and for the layer before a stage's first: gives what the stage before has sent.

    As that layer it drops whatever the model's forward made of the embedding, such as Granite's factor: it was made
    once, on the first stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *others: object, **options: object) -> torch.Tensor | None:
        """Return what `set_received` has set."""
        return self.hidden


def stage_class(config: PretrainedConfig, stage: Stage) -> type[PreTrainedModel]:
    """Return the class of this architecture that has only one stage.

    from_pretrained builds it without memory, and reads of the files what it has.
    """
    full_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def build(self: PreTrainedModel, config: PretrainedConfig, *arguments: object, **options: object) -> None:
        full_class.__init__(self, config, *arguments, **options)
        keep_stage(self, stage)

    return type(full_class.__name__, (full_class,), {"__init__": build, "__module__": full_class.__module__})


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the full model, without memory."""
    with torch.device("meta"):
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def keep_stage(model: PreTrainedModel, stage: Stage) -> None:
    """Remove all stages but one, in place. Indices of layers and names of parameters stay those of the full model."""
    decoder = model.base_model
    first, end = layers_of_stage(model, stage)
    is_tied = model.config.tie_word_embeddings
    received = ReceivedHidden()
    names = list(model.config.base_model_pp_plan)
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
    model._keys_to_ignore_on_load_unexpected = {"."}  # from_pretrained would list what the other stages have


def is_stage(model: nn.Module) -> bool:
    """Return whether a model is only one stage."""
    return any(isinstance(module, SkippedModule | ReceivedHidden) for module in model.modules())


def layers_of_stage(model: PreTrainedModel, stage: Stage) -> tuple[int, int]:
    """Return the first layer of a stage and the first after it, of a full model."""
    layers = [_numel(layer) for layer in model.base_model.layers]
    bounds = balance(
        layers,
        stage.count,
        before=_numel(model.get_input_embeddings()),
        after=_numel(model.get_output_embeddings()),
    )
    return bounds[stage.index], bounds[stage.index + 1]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def balance(layers: list[int], count: int, before: int, after: int) -> list[int]:
    """Return where each stage begins, and the end, [count + 1], so that the largest stage is as small as possible.

    `layers` are the sizes of layers, `before` and `after` what the first and the last stage have in addition. Where
    several splits are as good, earlier stages get more: the last one also computes the logits.
    """

    @functools.cache
    def best(first: int, left: int) -> tuple[int, list[int]]:
        """Return the size of the largest of the last `left` stages, from layer `first`, and where they begin."""
        own = before if first == 0 else 0
        if left == 1:
            return own + sum(layers[first:]) + after, [first, len(layers)]
        found = []
        for end in range(len(layers) - left + 1, first, -1):
            largest, bounds = best(end, left - 1)
            found.append((max(own + sum(layers[first:end]), largest), [first, *bounds]))
        return min(found, key=lambda each: each[0])

    return best(0, count)[1]


@torch.no_grad()
def check_stages_equal_whole(config: PretrainedConfig) -> None:
    """Compare the staged forward of a narrow random copy of an architecture with its full one, a stage a layer.

    `config` is the narrow one. Raises UserError where the family cannot be split so.
    """
    refusal = f"model.name: the family {config.model_type} cannot be cut into stages"
    way_out = "; use accelerate_configs/fsdp.yaml"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            full = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float().eval()
        tokens = torch.arange(1, 33).view(2, 16) % config.vocab_size
        positions = (torch.arange(16) % 10).expand(2, 16)  # two documents a row
        inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        logits = full(**inputs).logits
        staged, names = _run_staged(full, inputs)
    except Exception as error:
        raise UserError(f"{refusal}: {one_line_with_type(error, 200)}{way_out}") from None
    expected = [name for name, _ in full.named_parameters()]
    if config.tie_word_embeddings:  # on the first stage and on the last
        expected += [name for name, p in full.named_parameters() if p is full.get_input_embeddings().weight]
    if odd := {name for name in {*names, *expected} if names.count(name) != expected.count(name)}:
        raise UserError(f"{refusal}: {min(odd)} lies outside its pipeline plan{way_out}")
    off = ((staged - logits).abs().max() / logits.abs().max()).item()
    if not off < 1e-5:
        raise UserError(f"{refusal}: its logits then differ by {off:.2g}{way_out}")


def _run_staged(full: PreTrainedModel, inputs: dict[str, torch.Tensor | bool]) -> tuple[torch.Tensor, list[str]]:
    """Run a model split into as many stages as it has layers.

    Returns its logits, and the names of the parameters of all stages.
    """
    count = len(full.base_model.layers)
    names: list[str] = []
    hidden: torch.Tensor | None = None
    for index in range(count):
        stage = copy.deepcopy(full)
        keep_stage(stage, Stage(index, count))
        names += [name for name, _ in stage.named_parameters()]
        set_received(stage, hidden)
        hidden = stage.base_model(**inputs).last_hidden_state
    return stage(**inputs).logits, names


def set_received(stage: nn.Module, hidden: torch.Tensor | None) -> None:
    """Set what the stand-ins of a stage give; None forgets it."""
    for module in stage.modules():
        if isinstance(module, ReceivedHidden):
            module.hidden = hidden
