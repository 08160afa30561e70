"""Pipeline parallelism: a decoder is split into stages of consecutive layers, through which micro-batches flow.

Each rank holds one stage, under the parameter names of the full model. Modules of other stages are replaced by
modules without weights, and the model's own forward runs on every stage. The schedules are those of
`torch.distributed.pipelining`. Shapes: M micro-batches of B rows of T tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gearbox.distributed.pipeline_stages import ReceivedHidden, SkippedModule, Stage, set_received
from gearbox.rows.units import IGNORE_INDEX
from gearbox.sharding.unwrap import decoder_of, without_adapter

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

SCHEDULES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}  # the names of torch's classes
BUCKET_NUMEL = 2**25  # elements summed in one all-reduce; its fp32 buffer takes another 128 MiB

Moment: TypeAlias = float | torch.cuda.Event
"""A point in time: seconds, or an event of a GPU's stream."""
_cuda_event: Callable[..., torch.cuda.Event] = torch.cuda.Event  # torch does not annotate its constructor


@dataclass(frozen=True)
class TimedPass:
    """A forward or backward pass of one micro-batch on this stage."""

    kind: str
    """F (forward) or B (backward)."""
    micro_batch: int
    start: float
    end: float
    """Both are seconds since the step began on this rank."""


@dataclass(frozen=True)
class Logits:
    """The output of a model that was called without labels."""

    logits: torch.Tensor
    """[B, T or logits_to_keep, V]"""


@dataclass(frozen=True)
class _BuiltSchedule:
    """A schedule of torch for one number and one shape of micro-batches."""

    num_micro_batches: int
    shape: torch.Size
    """[M x B, T]"""
    clock: _Clock
    schedule: PipelineScheduleSingle


class Pipeline(nn.Module):
    """This rank's stage of a model, with the methods that run all stages together.

    Call it like the full model, without gradients and on all ranks of the pipeline: each rank gets the full model's
    output. `step` trains.
    """

    def __init__(
        self,
        module: PreTrainedModel | PeftModel,
        stages: dist.ProcessGroup,
        replicas: dist.ProcessGroup,
        schedule: str = "1f1b",
        compute: torch.dtype = torch.float32,
    ) -> None:
        """Wrap `module`, a model of `stage_class` or an adapter around it.

        `stages` are the ranks of this pipeline, by stage. `replicas` are the ranks that hold the same stage.
        `schedule` is a key of SCHEDULES. `compute` is the dtype of the hidden states that stages send.
        """
        super().__init__()
        self.stage = Stage(dist.get_rank(stages), dist.get_world_size(stages))
        self.stage_module = _StageModule(module, self.stage, compute)
        self.stages, self.replicas, self.schedule = stages, replicas, schedule
        self.passes: list[TimedPass] = []
        """The passes of the last step, in order."""
        self.seconds = 0.0
        """Duration of the last step, until the last backward pass of any stage ends."""
        self.seconds_summing = 0.0
        """Seconds after that, in which gradients were summed over replicas."""
        self.idle = 0.0
        """Share of `seconds` in which a stage computed nothing: the mean over all stages, the same on all ranks."""
        self._built: _BuiltSchedule | None = None
        self._scale = 1.0

    @property
    def module(self) -> PreTrainedModel | PeftModel:
        """This rank's stage of the model, without the pipeline's wrapper."""
        return self.stage_module.module

    @property
    def layers(self) -> str:
        """The indices of this stage's layers, such as 0-11."""
        layers = decoder_of(without_adapter(self.module)).layers
        own = [i for i, layer in enumerate(layers) if not isinstance(layer, SkippedModule | ReceivedHidden)]
        return f"{own[0]}-{own[-1]}"

    def bubble(self, num_micro_batches: int) -> float:
        """Return the share of a step in which a stage waits for the first micro-batch or for others' last one.

        This assumes equally fast stages. With p stages and m micro-batches, each stage runs m forward and backward
        passes and waits for p - 1, in both schedules.
        """
        return (self.stage.count - 1) / (num_micro_batches + self.stage.count - 1)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **inputs: object
    ) -> tuple[torch.Tensor, torch.Tensor] | Logits:
        """Return what the full model returns without gradients: two tensors, or the logits if there are no labels."""
        assert not torch.is_grad_enabled(), "call step() to train"
        stage, received = self.stage, None
        if not stage.is_first:
            received = self.stage_module.empty_hidden(input_ids.shape, input_ids.device)
            dist.recv(received, group=self.stages, group_src=stage.index - 1)
        output = self.stage_module(received, input_ids, labels=labels, **inputs)
        if not stage.is_last:
            dist.send(output, group=self.stages, group_dst=stage.index + 1)
        if labels is None:
            kept = cast("torch.Tensor | int | None", inputs.get("logits_to_keep"))
            num_kept = len(kept) if isinstance(kept, torch.Tensor) else kept or input_ids.shape[1]
            shape = (len(input_ids), num_kept, self.stage_module.num_tokens)
            logits = output.logits.float() if stage.is_last else input_ids.new_empty(shape).float()
            return Logits(self._from_last(logits))
        top = cast("tuple[int, int] | None", inputs.get("top"))
        first, second = output if stage.is_last else _unfilled(labels, top)
        if top is not None:
            return self._from_last(first), self._from_last(second)
        return self._from_last(first), self._from_last(second.to(torch.uint8)).bool()

    def _from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the last stage's tensor on every stage; the others pass a tensor of the same shape."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.stages, group_src=self.stage.count - 1)
        return tensor

    def step(self, micro_batches: list[dict[str, torch.Tensor]], scale: float) -> float:
        """Run forward and backward of this pipeline's share of an optimizer step, and return the step's loss.

        Inputs must be on the model's device. Each target token's loss is multiplied by `scale`. Afterwards every
        rank has the gradients of the complete step, summed in fp32. The loss is the same on all ranks, and not finite
        if that of any micro-batch is not.
        """
        inputs: dict[str, Any] = _concatenated(micro_batches)
        labels: torch.Tensor = inputs["labels"]
        losses: list[torch.Tensor] = []
        self._scale = scale
        built = self._build_schedule(len(micro_batches), labels)
        built.clock.begin()
        built.schedule.step(inputs["input_ids"], target=labels, losses=losses, return_outputs=False, **inputs)
        total = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=labels.device)
        dist.all_reduce(total, group=self.stages)  # waits for the last stage
        self.passes, self.seconds = built.clock.end()
        began = time.perf_counter()
        self._sum_over_replicas()
        self._sum_tied()
        busy = sum(timed.end - timed.start for timed in self.passes) / self.seconds
        figures = torch.tensor([total, 1 - busy], device=labels.device)
        dist.all_reduce(figures)
        self.seconds_summing = time.perf_counter() - began
        self.idle = figures[1].item() / dist.get_world_size()
        return figures[0].item() / self.stage.count

    def seconds_of_parts(self) -> dict[str, float]:
        """Return where the last step's time went: its passes, and waiting for and sending to other ranks."""
        forward, backward = (sum(p.end - p.start for p in self.passes if p.kind == kind) for kind in "FB")
        rest = max(0.0, self.seconds - forward - backward) + self.seconds_summing
        return {"forward": forward, "backward": backward, "communication": rest}

    def _build_schedule(self, num_micro_batches: int, labels: torch.Tensor) -> _BuiltSchedule:
        """Return torch's schedule for this number and shape of micro-batches; rebuild it when either changes."""
        from torch.distributed import pipelining

        built = self._built
        if built is None or (built.num_micro_batches, built.shape) != (num_micro_batches, labels.shape):
            shape = torch.Size((len(labels) // num_micro_batches, labels.shape[1]))
            tokens = labels.new_empty(shape, device="meta")
            hidden = self.stage_module.empty_hidden(shape, torch.device("meta"))
            loss = torch.empty((), device="meta", requires_grad=True)
            stage = pipelining.PipelineStage(
                self.stage_module,
                self.stage.index,
                self.stage.count,
                labels.device,
                input_args=tokens if self.stage.is_first else hidden,
                output_args=loss if self.stage.is_last else hidden,
                group=self.stages,
            )
            # 1F1B starts with one micro-batch per stage; with fewer, both schedules are the same.
            name = self.schedule if num_micro_batches >= self.stage.count else "gpipe"
            schedule = getattr(pipelining, SCHEDULES[name])(
                stage, num_micro_batches, loss_fn=lambda loss, _: loss * self._scale, scale_grads=False
            )
            self._built = built = _BuiltSchedule(num_micro_batches, labels.shape, _Clock(stage), schedule)
        return built

    @property
    def tied(self) -> nn.Parameter | None:
        """The embedding's weight if two stages train it and this is one of the two, else None."""
        weight = self.stage_module.tied
        return weight if weight is not None and weight.requires_grad else None

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def _sum_over_replicas(self) -> None:
        """Sum the gradients over the replicas of this stage."""
        gradients = [_gradient(parameter) for parameter in self._trained()]
        if dist.get_world_size(self.replicas) == 1:
            return
        bucket: list[torch.Tensor] = []
        for i, gradient in enumerate(gradients):
            bucket.append(gradient)
            if i == len(gradients) - 1 or sum(gradient.numel() for gradient in bucket) > BUCKET_NUMEL:
                _sum_flat(bucket, self.replicas)
                bucket = []

    def _sum_tied(self) -> None:
        """Sum the gradients of tied weights over the first and the last stage."""
        if self.tied is None:
            return
        own = _gradient(self.tied)
        received = torch.empty_like(own)
        other = 0 if self.stage.is_last else self.stage.count - 1
        exchange = [
            dist.P2POp(dist.isend, own, group=self.stages, group_peer=other),
            dist.P2POp(dist.irecv, received, group=self.stages, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own += received  # a + b = b + a, so both copies stay bitwise equal

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the gradients to max_norm. Return their norm before, over all stages; tied weights count once."""
        trained = self._trained()
        counted = [_gradient(p) for p in trained if not (p is self.tied and self.stage.is_last)]
        squared = nn.utils.get_total_norm(counted).float() ** 2
        dist.all_reduce(squared, group=self.stages)
        norm = squared.sqrt()
        nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        return norm.item()


class _StageModule(nn.Module):
    """The module that a schedule runs: it maps received hidden states and tokens to this stage's output."""

    def __init__(self, module: PreTrainedModel | PeftModel, stage: Stage, compute: torch.dtype) -> None:
        super().__init__()
        base = without_adapter(module)
        self.module, self.stage, self.compute = module, stage, compute
        text = base.config.get_text_config()
        self.width, self.num_tokens, self.dtype = text.hidden_size, text.vocab_size, base.config.dtype
        holds_tied = base.config.tie_word_embeddings and stage.count > 1 and (stage.is_first or stage.is_last)
        self.tied: nn.Parameter | None = base.get_input_embeddings().weight if holds_tied else None

    def empty_hidden(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Return an uninitialized buffer for the hidden states [B, T, H] that stages send, in the compute dtype."""
        return torch.empty(*shape, self.width, device=device, dtype=self.compute, requires_grad=torch.is_grad_enabled())

    def forward(
        self, received: torch.Tensor | None, input_ids: torch.Tensor, **inputs: object
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | CausalLMOutputWithPast:
        """Return what the next stage receives; on the last stage, the model's output."""
        if received is not None and not self.stage.is_first:
            # Continue in the dtype that hidden states have on one device: fp32 if the weights are fp32.
            set_received(self.module, received.to(self.dtype))
        output = self.module(input_ids=input_ids, **inputs)
        set_received(self.module, None)
        return output if self.stage.is_last else output.to(self.compute)


class _Clock:
    """A clock that records when each pass of a stage begins and ends. On a GPU, events wait for what is received."""

    def __init__(self, stage: PipelineStage) -> None:
        """Record the passes of this stage from now on."""
        self.device = stage.device
        self.times: list[tuple[str, int, Moment, Moment]] = []
        stage.forward_one_chunk = self._timed("F", stage.forward_one_chunk)  # type: ignore[method-assign]
        stage.backward_one_chunk = self._timed("B", stage.backward_one_chunk)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Begin a step and forget the passes of the last one."""
        self.times.clear()
        self.began = self._now()

    def end(self) -> tuple[list[TimedPass], float]:
        """Return the passes of the step, and its duration in seconds."""
        ended = self._now()
        if isinstance(ended, torch.cuda.Event):
            ended.synchronize()
        passes = [TimedPass(kind, i, self._since(a), self._since(b)) for kind, i, a, b in self.times]
        return passes, self._since(ended)

    def _timed(self, kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_timed(micro_batch: int, *arguments: object, **options: object) -> object:
            start = self._now()
            result = run(micro_batch, *arguments, **options)
            self.times.append((kind, micro_batch, start, self._now()))
            return result

        return run_timed

    def _now(self) -> Moment:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = _cuda_event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Moment) -> float:
        if isinstance(self.began, torch.cuda.Event):
            return float(self.began.elapsed_time(cast(torch.cuda.Event, moment))) / 1000
        return cast(float, moment) - self.began


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient. Create zeros if it is missing, as for an expert that no token reached on this rank."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _concatenated(micro_batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return one batch of all rows [M x B, T], padded to the widest micro-batch.

    Stages exchange one shape. It may differ from step to step and from pipeline to pipeline. Unpacked rows are sorted
    by length, so the rows of a step have similar lengths.
    """
    width = max(micro["labels"].shape[1] for micro in micro_batches)

    def widened(name: str, tensor: torch.Tensor) -> torch.Tensor:
        ends = (0, 0) * (tensor.dim() - 2) + (0, width - tensor.shape[1])
        return F.pad(tensor, ends, value=IGNORE_INDEX if name == "labels" else 0)

    return {name: torch.cat([widened(name, micro[name]) for micro in micro_batches]) for name in micro_batches[0]}


def _unfilled(labels: torch.Tensor, top: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors in the shapes of what the last stage returns: losses and hits, or the `top` likely tokens."""
    if top is None:
        return labels.new_empty(labels.shape, dtype=torch.float32), torch.empty_like(labels)
    ids = labels.new_empty(*labels.shape, top[0], dtype=torch.int32)
    return ids, labels.new_empty(*labels.shape, top[0] + 1, dtype=torch.float32)


def _sum_flat(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over a group in fp32, in one all-reduce."""
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, summed in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))
