"""A decoder cut into stages of whole layers, and the check that the stages compute the same."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from gearbox.errors import UserError


@dataclass(frozen=True)
class Stage:
    """Stage `index` of `count`."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


class SkippedModule(torch.nn.Module):
    """In the place of a module that another stage has."""

    def forward(self, hidden: Any, *others: Any, **options: Any) -> Any:
        return hidden


class ReceivedHidden(torch.nn.Module):
    """In the place of the embedding and of the layer before a stage's first: gives what the stage before has sent.

    As that layer it drops whatever the model's forward made of the embedding, such as Granite's factor: it was made
    once, on the first stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *others: Any, **options: Any) -> Any:
        return self.hidden


def stage_class(config: Any, part: Stage) -> type:
    """The class of this architecture that has one stage alone.

    from_pretrained builds it without memory, and reads of the files what it has.
    """
    whole = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def build(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        whole.__init__(self, config, *arguments, **options)
        keep_stage(self, part)

    return type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})


def meta_model(config: Any) -> Any:
    """The whole model, without memory."""
    with torch.device("meta"):
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def keep_stage(model: Any, part: Stage) -> None:
    """Leave of the model one stage, in place. Indices of layers and names of parameters stay those of the whole."""
    decoder = model.base_model
    first, end = layers_of_stage(model, part)
    is_tied = model.config.tie_word_embeddings
    received = ReceivedHidden()
    names = list(model.config.base_model_pp_plan)
    at = names.index("layers")
    for i in range(len(decoder.layers)):
        if not first <= i < end:
            decoder.layers[i] = received if i == first - 1 else SkippedModule()
    if not part.is_first and not (is_tied and part.is_last):
        for name in names[:at]:
            setattr(decoder, name, received)
    if not part.is_last:
        for name in names[at + 1 :]:
            setattr(decoder, name, SkippedModule())
        model.set_output_embeddings(None)
        model.all_tied_weights_keys = {}
    model._keys_to_ignore_on_load_unexpected = {"."}  # from_pretrained would list what the other stages have


def is_stage(model: torch.nn.Module) -> bool:
    return any(isinstance(module, SkippedModule | ReceivedHidden) for module in model.modules())


def layers_of_stage(model: Any, part: Stage) -> tuple[int, int]:
    """First layer of a stage and the first after it, of a model that is whole."""
    layers = [_numel(layer) for layer in model.base_model.layers]
    bounds = balance(
        layers,
        part.count,
        before=_numel(model.get_input_embeddings()),
        after=_numel(model.get_output_embeddings()),
    )
    return bounds[part.index], bounds[part.index + 1]


def _numel(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def balance(layers: list[int], count: int, before: int, after: int) -> list[int]:
    """Where each stage begins, and the end, [count + 1]: the largest stage is as small as contiguous ones can be.

    `layers` are the sizes of layers, `before` and `after` what the first and the last stage have beside them. Where
    several cuts are as good, earlier stages get more: the last one also computes the logits.
    """

    @functools.cache
    def best(first: int, left: int) -> tuple[int, list[int]]:
        """Size of the largest of the `left` last stages, which begin at layer `first`, and where they begin."""
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
def check_stages_equal_whole(config: Any) -> None:
    """Hold the staged forward of a narrow random copy of an architecture against its whole one, a stage a layer.

    `config` is the narrow one. Raises UserError where the family cannot be cut so.
    """
    refusal = f"model.name: the family {config.model_type} cannot be cut into stages"
    way_out = "; use accelerate_configs/fsdp.yaml"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            whole = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float().eval()
        tokens = torch.arange(1, 33).view(2, 16) % config.vocab_size
        positions = (torch.arange(16) % 10).expand(2, 16)  # two documents a row
        inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        logits = whole(**inputs).logits
        staged, names = _staged(whole, inputs)
    except Exception as error:
        raise UserError(f"{refusal}: {type(error).__name__}: {' '.join(str(error).split())[:200]}{way_out}") from None
    expected = [name for name, _ in whole.named_parameters()]
    if config.tie_word_embeddings:  # on the first stage and on the last
        expected += [name for name, p in whole.named_parameters() if p is whole.get_input_embeddings().weight]
    if odd := {name for name in {*names, *expected} if names.count(name) != expected.count(name)}:
        raise UserError(f"{refusal}: {min(odd)} lies outside its pipeline plan{way_out}")
    off = ((staged - logits).abs().max() / logits.abs().max()).item()
    if not off < 1e-5:
        raise UserError(f"{refusal}: its logits then differ by {off:.2g}{way_out}")


def _staged(whole: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, list[str]]:
    """The logits of a model cut into as many stages as it has layers, and the names of the parameters of all stages."""
    count = len(whole.base_model.layers)
    names: list[str] = []
    hidden: Any = None
    for index in range(count):
        stage = copy.deepcopy(whole)
        keep_stage(stage, Stage(index, count))
        names += [name for name, _ in stage.named_parameters()]
        set_received(stage, hidden)
        hidden = stage.base_model(**inputs).last_hidden_state
    return stage(**inputs).logits, names


def set_received(stage: torch.nn.Module, hidden: torch.Tensor | None) -> None:
    for module in stage.modules():
        if isinstance(module, ReceivedHidden):
            module.hidden = hidden
