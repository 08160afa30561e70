"""Estimate what a step computes and sends, and from that the time and the price of a run.

Time rests on two assumptions, which the plan prints: the share of its peak that a GPU reaches, and that it
communicates while it computes.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

from gearbox import ROOT
from gearbox.config.job import Job
from gearbox.planning.architecture import Architecture
from gearbox.planning.gpus import HOST_LINK, NETWORK, Gpu
from gearbox.planning.layer_memory import BF16, FP32, Layer, Setup
from gearbox.planning.memory import Part

MFU = 0.4  # share of the peak: 38 to 43 % for Llama 3 405B on 16,384 H100 (arXiv 2407.21783, table 4)
NF4_SLOWDOWN = 1.3  # of products with weights that are dequantized first
MEASURED = ROOT / "benchmarks" / "mfu.json"
"""The shares that `make gpu` measured, by the name of a GPU and the recipe."""


@dataclass(frozen=True)
class Cost:
    """Describe what a step takes."""

    flops: float
    """Operations of all ranks, with what checkpointing computes again."""
    sent_bytes: float
    """Bytes that each rank sends."""
    tokens: int
    seconds: float | None
    """None if the GPU's rates are unknown."""

    @property
    def sent_per_token(self) -> float:
        """Bytes that a rank sends for each token of the step."""
        return self.sent_bytes / self.tokens

    @property
    def flops_per_token(self) -> float:
        """Operations for each token of the step."""
        return self.flops / self.tokens


def measured_mfu(gpu: Gpu) -> float:
    """Return the share of its peak that a GPU reached in our benchmarks, the median of recipes, or the assumed one."""
    measured: dict[str, dict[str, float]] = json.loads(MEASURED.read_text()) if MEASURED.is_file() else {}
    return statistics.median(measured.get(gpu.name, {"": MFU}).values())


def cost_of_step(shape: Architecture, job: Job, gpu: Gpu, num_machines: int = 1, mfu: float = MFU) -> Cost:
    """Return the operations, bytes and time of a step."""
    setup, batch, gear = Setup.of(job), job.batch, job.gear
    tokens = batch.rows * job.recipe.batch.row_tokens
    flops = tokens * flops_per_token(shape, setup, job.recipe.batch.row_tokens)
    if job.recipe.train.objective == "kto":  # measures first how far the model has moved
        flops += tokens * forward_flops_per_token(shape, job.recipe.batch.row_tokens)
    sent = sent_per_step(shape, setup, job)
    if gpu.tflops is None:
        return Cost(flops, sent, tokens, None)
    slowdown = NF4_SLOWDOWN if setup.method.startswith("q") else 1.0
    padded = batch.num_padded_rows / batch.rows
    compute = flops * slowdown * padded / (gear.num_processes * gpu.tflops * 1e12 * mfu)
    if setup.stages > 1:
        compute *= (batch.accumulation_steps + setup.stages - 1) / batch.accumulation_steps  # idle stages
    seconds = max(compute, sent / (gpu.link * 1e9))
    if num_machines > 1:  # a ring of all GPUs enters each machine once, and its GPUs divide that among their adapters
        crossing = sent if gear.engine == "pp" else sent * num_machines / gear.num_processes
        seconds = max(seconds, crossing / (NETWORK * 1e9))
    if setup.offload:  # weights go to the GPU twice for each micro-batch, and gradients come back
        part = Part.of(shape, setup, 0)
        moved = batch.accumulation_steps * (2 * BF16 * shape.num_weights + FP32 * part.trained)
        seconds = max(seconds, moved / gear.num_processes / (HOST_LINK * 1e9))
    return Cost(flops, sent, tokens, seconds)


def flops_per_token(shape: Architecture, setup: Setup, row_tokens: int) -> float:
    """Return the operations for a token of training: 2 for each weight that multiplies it, in each of the passes.

    The backward pass multiplies for the gradient of the input, and again for that of a trained weight. A token attends
    to half of its row on average. Checkpointing computes the layers once more, but not the head.
    """
    in_layers, head = shape.active_weights - shape.embedding_weights, shape.embedding_weights
    attention = 2 * shape.num_layers * shape.heads * shape.head_size * row_tokens / 2
    forward = 2 * (in_layers + attention)
    backward = forward + (2 * in_layers if setup.trains_all else 0) + 2 * attention
    again = forward if setup.checkpointing in ("full", "offload") else 0
    return forward + backward + again + 2 * head * (3 if setup.trains_all else 2)


def forward_flops_per_token(shape: Architecture, row_tokens: int) -> float:
    """Return the operations for a token of a forward pass, as for a reference's log-probabilities."""
    attention = 2 * shape.num_layers * shape.heads * shape.head_size * row_tokens / 2
    return 2 * (shape.active_weights + attention)


def sent_per_step(shape: Architecture, setup: Setup, job: Job) -> float:
    """Return the bytes that a rank sends in a step. docs/parallelism.md has the table, and a test counts them."""
    gear, rounds, ranks = job.gear, job.batch.accumulation_steps, job.gear.num_processes
    trained = Part.of(shape, setup, 0).trained
    frozen = 0 if setup.trains_all else shape.num_weights
    reduced = trained * (setup.master_bytes if gear.engine == "ddp" else FP32)
    share = (setup.shares.weights - 1) / setup.shares.weights
    tokens = rounds * setup.num_tokens
    sent = 0.0
    if gear.engine == "ddp":
        sent = 2 * reduced * (ranks - 1) / ranks
    elif gear.zero_stage in (1, 2):
        sums = 2 * reduced if gear.zero_stage == 1 else reduced * rounds
        sent = (sums + BF16 * trained) * (gear.data_parallel - 1) / gear.data_parallel
    elif gear.engine == "fsdp" or gear.zero_stage == 3:
        total = shape.num_weights
        part = 1 - shape.num_sparse * _not_gathered(Layer(shape, setup, True)) / total
        sent = rounds * part * (2 * BF16 * (trained + frozen) + reduced) / setup.tp * share
        if (replicas := gear.degree("dp_replicate")) > 1:
            sent += rounds * 2 * reduced * (1 - share) * (replicas - 1) / replicas
    if setup.tp > 1:  # four all-reduces of the hidden states in each layer, and more if it is computed again
        passes = 6 if setup.checkpointing in ("full", "offload") else 4
        sent += passes * shape.num_layers * tokens * shape.width * BF16 * 2 * (setup.tp - 1) / setup.tp
    if setup.ep > 1 and shape.experts is not None:  # tokens to their experts and back, in both directions
        sent += 4 * shape.num_sparse * tokens * shape.experts.chosen * shape.width * BF16 * (setup.ep - 1) / setup.ep
    if setup.stages > 1:
        sent += 2 * tokens * shape.width * BF16 + 2 * reduced * (gear.data_parallel - 1) / gear.data_parallel
    if setup.key_tokens:
        parts = gear.degree("sp") * gear.degree("cp")
        kept = 4 * shape.width if gear.degree("sp") > 1 else 4 * shape.key_heads * shape.head_size
        sent += 2 * shape.num_layers * tokens * kept * BF16 * (parts - 1) / (parts if gear.degree("sp") > 1 else 1)
    return sent


def _not_gathered(layer: Layer) -> int:
    return layer.num_weights - layer.gathered_weights
