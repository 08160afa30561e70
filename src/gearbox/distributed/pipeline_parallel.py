"""Pipeline parallelism: a decoder cut into stages of whole layers, one a rank, and micro batches that flow through.

Each rank holds its own stage alone, under the parameter names of the whole model, in which the absent modules are
replaced by ones without weights; the model's own forward runs on every stage. torch.distributed.pipelining has the
schedules. Shapes: M micro batches of B rows of T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from gearbox.data.batches import IGNORE_INDEX
from gearbox.distributed.pipeline_stages import ReceivedHidden, SkippedModule, Stage, set_received

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
BUCKET_NUMEL = 2**25  # gradients summed in one all-reduce: 128 MiB, held a second time for as long


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
        self.stage = Stage(dist.get_rank(stages), dist.get_world_size(stages))
        self.stage_module = _StageModule(module, self.stage, compute)
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
        return self.stage_module.module

    @property
    def layers(self) -> str:
        """Of this stage, such as 0-11."""
        core = self.module.get_base_model() if hasattr(self.module, "peft_config") else self.module
        held = [
            i for i, layer in enumerate(core.base_model.layers) if not isinstance(layer, SkippedModule | ReceivedHidden)
        ]
        return f"{held[0]}-{held[-1]}"

    def bubble(self, num_micro_batches: int) -> float:
        """Share of a step in which a stage waits for the first micro batch, or for others' last; equal stages assumed.

        In both schedules a stage of p waits as long as p - 1 forward and backward passes take, and has m of its own.
        """
        return (self.stage.count - 1) / (num_micro_batches + self.stage.count - 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        """(losses, hits), both [B, T], or without labels an object with .logits [B, T or logits_to_keep, V]."""
        assert not torch.is_grad_enabled(), "step() trains"
        part, arrived = self.stage, None
        if not part.is_first:
            arrived = self.stage_module.border(input_ids.shape, input_ids.device)
            dist.recv(arrived, group=self.stages, group_src=part.index - 1)
        outcome = self.stage_module(arrived, input_ids, labels=labels, **inputs)
        if not part.is_last:
            dist.send(outcome, group=self.stages, group_dst=part.index + 1)
        if labels is None:
            kept = inputs.get("logits_to_keep") or input_ids.shape[1]
            shape = (len(input_ids), kept, self.stage_module.num_tokens)
            logits = self._from_last(outcome.logits.float() if part.is_last else input_ids.new_empty(shape).float())
            return SimpleNamespace(logits=logits)
        losses, hits = outcome if part.is_last else (torch.empty_like(labels).float(), torch.empty_like(labels))
        return self._from_last(losses), self._from_last(hits.to(torch.uint8)).bool()

    def _from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.stages, group_src=self.stage.count - 1)
        return tensor

    def step(self, micro_batches: list[dict[str, torch.Tensor]], scale: float) -> float:
        """Forward and backward of this pipeline's share of an optimizer step, on this model's device.

        Each target token's loss counts `scale` times. Gradients are then those of the whole step on all ranks, summed
        in fp32; returns its loss, on all ranks the same, and not finite if one micro batch's is not.
        """
        inputs = _concatenated([{n: t for n, t in micro.items() if n != "document_ids"} for micro in micro_batches])
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
        return figures[0].item() / self.stage.count

    def _schedule(self, num: int, labels: torch.Tensor) -> tuple[_TimedStage, Any]:
        """Torch's, made for this number of micro batches and this shape, and kept until another comes."""
        key = (num, labels.shape)
        if self._built[0] != key:
            shape = torch.Size((len(labels) // num, labels.shape[1]))
            tokens, hidden = labels.new_empty(shape, device="meta"), self.stage_module.border(shape, "meta")
            stage = _TimedStage(
                self.stage_module, self.stage.index, self.stage.count, labels.device, group=self.stages,
                input_args=tokens if self.stage.is_first else hidden,
                output_args=torch.empty((), device="meta", requires_grad=True) if self.stage.is_last else hidden,
            )  # fmt: skip
            # 1F1B begins with a micro batch for each stage; with fewer the two are the same.
            name = self.schedule if num >= self.stage.count else "gpipe"
            made = SCHEDULES[name](stage, num, loss_fn=lambda loss, _: loss * self._scale, scale_grads=False)
            self._built = (key, (stage, made))
        return self._built[1]

    @property
    def tied(self) -> torch.nn.Parameter | None:
        """The embedding's weight, where this stage is one of two that train it."""
        weight = self.stage_module.tied
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
            other = 0 if self.stage.is_last else self.stage.count - 1
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
        counted = [p.grad for p in trained if not (p is self.tied and self.stage.is_last)]
        squared = torch.nn.utils.get_total_norm(counted).float() ** 2
        dist.all_reduce(squared, group=self.stages)
        norm = squared.sqrt()
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        return norm.item()


class _StageModule(torch.nn.Module):
    """What a schedule runs: (what arrived, tokens) to what is sent on; on the last stage to what the model returns."""

    def __init__(self, module: Any, part: Stage, compute: torch.dtype) -> None:
        super().__init__()
        core = module.get_base_model() if hasattr(module, "peft_config") else module
        self.module, self.stage, self.compute = module, part, compute
        self.width, self.num_tokens, self.dtype = core.config.hidden_size, core.config.vocab_size, core.config.dtype
        holds_tied = core.config.tie_word_embeddings and part.count > 1 and (part.is_first or part.is_last)
        self.tied = core.get_input_embeddings().weight if holds_tied else None

    def border(self, shape: torch.Size, device: Any) -> torch.Tensor:
        """Room for what is sent from stage to stage, [B, T, H], in the precision of the computation."""
        return torch.empty(*shape, self.width, device=device, dtype=self.compute, requires_grad=torch.is_grad_enabled())

    def forward(self, arrived: torch.Tensor | None, input_ids: torch.Tensor, **inputs: Any) -> Any:
        if arrived is not None and not self.stage.is_first:
            # Goes on in the dtype that the hidden states have on one device: fp32, where the weights have it.
            set_received(self.module, arrived.to(self.dtype))
        outcome = self.module(input_ids=input_ids, **inputs)
        set_received(self.module, None)
        return outcome if self.stage.is_last else outcome.to(self.compute)


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


def _concatenated(micro_batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch of all rows [M x B, T], as wide as the widest.

    Stages exchange one shape. It may differ from step to step and from pipeline to pipeline; rows of one document each
    come sorted by length, so that those of a step are about as long.
    """
    width = max(micro["labels"].shape[1] for micro in micro_batches)

    def widened(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return F.pad(tensor, (0, width - tensor.shape[1]), value=IGNORE_INDEX if name == "labels" else 0)

    return {name: torch.cat([widened(name, micro[name]) for micro in micro_batches]) for name in micro_batches[0]}


def _sum_flat(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """One all-reduce for all of them, in fp32."""
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))
