"""Pipeline parallelism: a decoder cut into stages of whole layers, one a rank, and micro batches that flow through.

Each rank holds its own stage alone, under the parameter names of the whole model, in which the absent modules are
replaced by ones without weights; the model's own forward runs on every stage. torch.distributed.pipelining has the
schedules. Shapes: M micro batches of B rows of T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from gearbox.config import UserError
from gearbox.data import IGNORED

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
BUCKET_NUMEL = 2**25  # gradients summed in one all-reduce: 128 MiB, held a second time for as long


# --------------------------------------------------------------------------- the cut


@dataclass(frozen=True)
class Part:
    """Stage `index` of `count`."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


class PassThrough(torch.nn.Module):
    """In the place of a module that another stage has."""

    def forward(self, hidden: Any, *others: Any, **options: Any) -> Any:
        return hidden


class Received(torch.nn.Module):
    """In the place of the embedding and of the layer before a stage's first: gives what the stage before has sent.

    As that layer it drops whatever the model's forward made of the embedding, such as Granite's factor: it was made
    once, on the first stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *others: Any, **options: Any) -> Any:
        return self.hidden


def family(config: Any, part: Part) -> type:
    """The class of this architecture that has one stage alone.

    from_pretrained builds it without memory, and reads of the files what it has.
    """
    whole = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def build(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        whole.__init__(self, config, *arguments, **options)
        cut(self, part)

    return type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})


def outline(config: Any) -> Any:
    """The whole model, without memory."""
    with torch.device("meta"):
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def cut(model: Any, part: Part) -> None:
    """Leave of the model one stage, in place. Indices of layers and names of parameters stay those of the whole."""
    decoder = model.base_model
    first, end = span(model, part)
    is_tied = model.config.tie_word_embeddings
    received = Received()
    names = list(model.config.base_model_pp_plan)
    at = names.index("layers")
    for i in range(len(decoder.layers)):
        if not first <= i < end:
            decoder.layers[i] = received if i == first - 1 else PassThrough()
    if not part.is_first and not (is_tied and part.is_last):
        for name in names[:at]:
            setattr(decoder, name, received)
    if not part.is_last:
        for name in names[at + 1 :]:
            setattr(decoder, name, PassThrough())
        model.set_output_embeddings(None)
        model.all_tied_weights_keys = {}
    model._keys_to_ignore_on_load_unexpected = {"."}  # from_pretrained would list what the other stages have


def is_cut(model: torch.nn.Module) -> bool:
    return any(isinstance(module, PassThrough | Received) for module in model.modules())


def span(model: Any, part: Part) -> tuple[int, int]:
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
def prove(config: Any) -> None:
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
        cut(stage, Part(index, count))
        names += [name for name, _ in stage.named_parameters()]
        _receive(stage, hidden)
        hidden = stage.base_model(**inputs).last_hidden_state
    return stage(**inputs).logits, names


def _receive(stage: torch.nn.Module, hidden: torch.Tensor | None) -> None:
    for module in stage.modules():
        if isinstance(module, Received):
            module.hidden = hidden


# --------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class Block:
    """One forward or backward pass of a micro batch on this stage."""

    kind: str
    """F or B"""
    micro_batch: int
    start: float
    end: float
    """Seconds since the step began here."""


class Pipeline(torch.nn.Module):
    """The stage of this rank, and the means to run all of them together.

    Called like the whole model, without gradients, by all ranks of the pipeline, it returns on all of them what the
    whole model would. `step` trains.
    """

    def __init__(
        self,
        module: Any,
        stages: dist.ProcessGroup,
        replicas: dist.ProcessGroup,
        schedule: str = "1f1b",
        compute: torch.dtype = torch.float32,
    ) -> None:
        """`module`: a model of `family`, or an adapter around it. `stages`: the ranks of this pipeline, by stage;
        `replicas`: those that hold the same stage. `schedule`: a name of SCHEDULES; `compute`: of what is sent."""
        super().__init__()
        self.part = Part(dist.get_rank(stages), dist.get_world_size(stages))
        self.stage = _Stage(module, self.part, compute)
        self.stages, self.replicas, self.schedule = stages, replicas, schedule
        self.blocks: list[Block] = []
        """Of the last step, in order."""
        self.seconds = 0.0
        """From the last step's begin to the end of its last backward pass, on whichever stage."""
        self.idle = 0.0
        """Share of them in which a stage computed nothing, the mean over all stages; the same on all ranks."""
        self._built: tuple[Any, Any] = (None, None)
        self._scale = 1.0

    @property
    def module(self) -> Any:
        """This rank's part of the bare model."""
        return self.stage.module

    @property
    def layers(self) -> str:
        """Of this stage, such as 0-11."""
        core = self.module.get_base_model() if hasattr(self.module, "peft_config") else self.module
        held = [i for i, layer in enumerate(core.base_model.layers) if not isinstance(layer, PassThrough | Received)]
        return f"{held[0]}-{held[-1]}"

    def bubble(self, num_micro_batches: int) -> float:
        """Share of a step in which a stage waits for the first micro batch, or for others' last; equal stages assumed.

        In both schedules a stage of p waits as long as p - 1 forward and backward passes take, and has m of its own.
        """
        return (self.part.count - 1) / (num_micro_batches + self.part.count - 1)

    # ----------------------------------------------------------------------- without gradients

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        """(losses, hits), both [B, T], or without labels an object with .logits [B, T or logits_to_keep, V]."""
        assert not torch.is_grad_enabled(), "step() trains"
        part, arrived = self.part, None
        if not part.is_first:
            arrived = self.stage.border(input_ids.shape, input_ids.device)
            dist.recv(arrived, group=self.stages, group_src=part.index - 1)
        outcome = self.stage(arrived, input_ids, labels=labels, **inputs)
        if not part.is_last:
            dist.send(outcome, group=self.stages, group_dst=part.index + 1)
        if labels is None:
            kept = inputs.get("logits_to_keep") or input_ids.shape[1]
            shape = (len(input_ids), kept, self.stage.num_tokens)
            logits = self._from_last(outcome.logits.float() if part.is_last else input_ids.new_empty(shape).float())
            return SimpleNamespace(logits=logits)
        losses, hits = outcome if part.is_last else (torch.empty_like(labels).float(), torch.empty_like(labels))
        return self._from_last(losses), self._from_last(hits.to(torch.uint8)).bool()

    def _from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.stages, group_src=self.part.count - 1)
        return tensor

    # ----------------------------------------------------------------------- with gradients

    def step(self, micro_batches: list[dict[str, torch.Tensor]], scale: float) -> float:
        """Forward and backward of this pipeline's share of an optimizer step, on this model's device.

        Each target token's loss counts `scale` times. Gradients are then those of the whole step on all ranks, summed
        in fp32; returns its loss, on all ranks the same, and not finite if one micro batch's is not.
        """
        inputs = _joined([{n: t for n, t in micro.items() if n != "document_ids"} for micro in micro_batches])
        labels = inputs["labels"]
        losses: list[torch.Tensor] = []
        self._scale = scale
        stage, schedule = self._schedule(len(micro_batches), labels)
        stage.begin()
        schedule.step(inputs["input_ids"], target=labels, losses=losses, return_outputs=False, **inputs)
        total = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=labels.device)
        dist.all_reduce(total, group=self.stages)  # ends when the last stage does
        self.blocks, self.seconds = stage.end()
        self._sum_gradients()
        busy = sum(block.end - block.start for block in self.blocks) / self.seconds
        figures = torch.tensor([total, 1 - busy], device=labels.device)
        dist.all_reduce(figures)
        self.idle = figures[1].item() / dist.get_world_size()
        return figures[0].item() / self.part.count

    def _schedule(self, num: int, labels: torch.Tensor) -> tuple[_TimedStage, Any]:
        """Torch's, made for this number of micro batches and this shape, and kept until another comes."""
        key = (num, labels.shape)
        if self._built[0] != key:
            shape = torch.Size((len(labels) // num, labels.shape[1]))
            tokens, hidden = labels.new_empty(shape, device="meta"), self.stage.border(shape, "meta")
            stage = _TimedStage(
                self.stage, self.part.index, self.part.count, labels.device, group=self.stages,
                input_args=tokens if self.part.is_first else hidden,
                output_args=torch.empty((), device="meta", requires_grad=True) if self.part.is_last else hidden,
            )  # fmt: skip
            # 1F1B begins with a micro batch for each stage; with fewer the two are the same.
            name = self.schedule if num >= self.part.count else "gpipe"
            made = SCHEDULES[name](stage, num, loss_fn=lambda loss, _: loss * self._scale, scale_grads=False)
            self._built = (key, (stage, made))
        return self._built[1]

    # ----------------------------------------------------------------------- gradients

    @property
    def tied(self) -> torch.nn.Parameter | None:
        """The embedding's weight, where this stage is one of two that train it."""
        weight = self.stage.tied
        return weight if weight is not None and weight.requires_grad else None

    def _sum_gradients(self) -> None:
        """Over the replicas of this stage; of tied weights then over the first stage and the last."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None:  # an expert that no token reached, here
                parameter.grad = torch.zeros_like(parameter)
        if dist.get_world_size(self.replicas) > 1:
            bucket: list[torch.Tensor] = []
            for i, parameter in enumerate(trained):
                bucket.append(parameter.grad)
                if i == len(trained) - 1 or sum(gradient.numel() for gradient in bucket) > BUCKET_NUMEL:
                    _sum_flat(bucket, self.replicas)
                    bucket = []
        if self.tied is not None:
            other = 0 if self.part.is_last else self.part.count - 1
            theirs = torch.empty_like(self.tied.grad)
            exchange = [
                dist.P2POp(dist.isend, self.tied.grad, group=self.stages, group_peer=other),
                dist.P2POp(dist.irecv, theirs, group=self.stages, group_peer=other),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            self.tied.grad += theirs  # a + b = b + a: both copies stay equal to the last bit

    def clip_gradients(self, max_norm: float) -> float:
        """The gradient's norm over all stages, before it is clipped to max_norm; tied weights count once."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        counted = [p.grad for p in trained if not (p is self.tied and self.part.is_last)]
        squared = torch.nn.utils.get_total_norm(counted).float() ** 2
        dist.all_reduce(squared, group=self.stages)
        norm = squared.sqrt()
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        return norm.item()


class _Stage(torch.nn.Module):
    """What a schedule runs: (what arrived, tokens) to what is sent on; on the last stage to what the model returns."""

    def __init__(self, module: Any, part: Part, compute: torch.dtype) -> None:
        super().__init__()
        core = module.get_base_model() if hasattr(module, "peft_config") else module
        self.module, self.part, self.compute = module, part, compute
        self.width, self.num_tokens, self.dtype = core.config.hidden_size, core.config.vocab_size, core.config.dtype
        holds_tied = core.config.tie_word_embeddings and part.count > 1 and (part.is_first or part.is_last)
        self.tied = core.get_input_embeddings().weight if holds_tied else None

    def border(self, shape: torch.Size, device: Any) -> torch.Tensor:
        """Room for what is sent from stage to stage, [B, T, H], in the precision of the computation."""
        return torch.empty(*shape, self.width, device=device, dtype=self.compute, requires_grad=torch.is_grad_enabled())

    def forward(self, arrived: torch.Tensor | None, input_ids: torch.Tensor, **inputs: Any) -> Any:
        if arrived is not None and not self.part.is_first:
            # Goes on in the dtype that the hidden states have on one device: fp32, where the weights have it.
            _receive(self.module, arrived.to(self.dtype))
        outcome = self.module(input_ids=input_ids, **inputs)
        _receive(self.module, None)
        return outcome if self.part.is_last else outcome.to(self.compute)


class _TimedStage(PipelineStage):
    """Notes when each pass begins and ends: on a GPU by events of its stream, which wait for what has arrived."""

    def begin(self) -> None:
        self.times: list[tuple[str, int, Any, Any]] = []
        self.began = self._now()

    def end(self) -> tuple[list[Block], float]:
        """The blocks of the step, and its seconds."""
        ended = self._now()
        if self.device.type == "cuda":
            ended.synchronize()
        blocks = [Block(kind, i, self._since(a), self._since(b)) for kind, i, a, b in self.times]
        return blocks, self._since(ended)

    def forward_one_chunk(self, chunk: int, *arguments: Any, **options: Any) -> Any:
        return self._timed("F", super().forward_one_chunk, chunk, *arguments, **options)

    def backward_one_chunk(self, chunk: int, *arguments: Any, **options: Any) -> Any:
        return self._timed("B", super().backward_one_chunk, chunk, *arguments, **options)

    def _timed(self, kind: str, work: Any, chunk: int, *arguments: Any, **options: Any) -> Any:
        start = self._now()
        outcome = work(chunk, *arguments, **options)
        self.times.append((kind, chunk, start, self._now()))
        return outcome

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        return self.began.elapsed_time(moment) / 1000 if self.device.type == "cuda" else moment - self.began


def _joined(micro_batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch of all rows [M x B, T], as wide as the widest.

    Stages exchange one shape. It may differ from step to step and from pipeline to pipeline; rows of one document each
    come sorted by length, so that those of a step are about as long.
    """
    width = max(micro["labels"].shape[1] for micro in micro_batches)

    def widened(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return F.pad(tensor, (0, width - tensor.shape[1]), value=IGNORED if name == "labels" else 0)

    return {name: torch.cat([widened(name, micro[name]) for micro in micro_batches]) for name in micro_batches[0]}


def _sum_flat(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """One all-reduce for all of them, in fp32."""
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))
