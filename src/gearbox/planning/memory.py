"""Compute in closed form what each GPU holds at the moment of a training step when it holds most.

The tests compare the figures with simulated steps, with measured ones, and with figures that other projects published.

Letters as elsewhere: N tokens of a pass on one rank, H width, V vocabulary size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from gearbox.config.job import Job
from gearbox.planning.architecture import Architecture
from gearbox.planning.layer_memory import BF16, FP32, NF4, Layer, Setup

CONTEXT = 600 * 2**20  # of CUDA and its libraries on each GPU
COMMUNICATION = 400 * 2**20  # of NCCL's buffers, with several ranks
TERMS = ("weights", "gradients", "optimizer", "activations", "head", "gathered", "allowance")
FRAGMENTATION = 0.03  # share of the activations that the allocator reserves in addition


@dataclass(frozen=True)
class Prediction:
    """The memory of a run, in bytes."""

    terms: dict[str, int]
    """What a GPU holds at its peak, by TERMS."""
    moment: str
    """When the peak is reached."""
    state_bytes: int
    """Weights, gradients and optimizer state of a GPU: what no smaller batch reduces."""
    loading_bytes: int
    """The peak of a GPU while the model loads."""
    host_bytes: int
    """What all ranks together hold in host memory, apart from Python, its libraries and the mapped files."""
    checkpoint_bytes: int
    """Size of a checkpoint."""

    @property
    def peak_bytes(self) -> int:
        """The peak of a GPU, with what CUDA and its allocator take."""
        return sum(self.terms.values())

    @property
    def allocated_bytes(self) -> int:
        """The peak of what a step's tensors take."""
        return self.peak_bytes - self.terms["allowance"]


def predict(shape: Architecture, job: Job, on_cpu: bool = False) -> Prediction:
    """Return the memory of a recipe under a gear, on GPUs in the gear's precision, or on CPUs in fp32."""
    return predicted(shape, Setup.of(job, on_cpu))


def predicted(shape: Architecture, setup: Setup) -> Prediction:
    """Return the memory of a setup: that of the rank that holds most."""
    parts = [Part.of(shape, setup, stage).predict() for stage in range(setup.stages)]
    host, checkpoint = sum(part.host_bytes for part in parts), sum(part.checkpoint_bytes for part in parts)
    return replace(max(parts, key=lambda part: part.peak_bytes), host_bytes=host, checkpoint_bytes=checkpoint)


def allowance(step_bytes: int, num_ranks: int) -> int:
    """Return what CUDA, NCCL and the allocator take, if a step takes so many bytes in addition to the state."""
    return CONTEXT + (COMMUNICATION if num_ranks > 1 else 0) + round(FRAGMENTATION * step_bytes)


Moment = dict[str, float]
"""The bytes of each of TERMS that a moment adds to what a rank always holds."""


@dataclass(frozen=True)
class Part:
    """The part of a model that one rank computes: layers, and perhaps the embedding and the output head."""

    shape: Architecture
    setup: Setup
    layers: list[Layer]
    has_embedding: bool = True
    has_head: bool = True

    @classmethod
    def of(cls, shape: Architecture, setup: Setup, stage: int) -> Part:
        """Return a stage of a pipeline, or the complete model."""
        dense, sparse = Layer(shape, setup, False), Layer(shape, setup, True)
        layers = [sparse] * shape.num_sparse + [dense] * (shape.num_layers - shape.num_sparse)
        sizes, ends = [layer.num_weights for layer in layers], shape.embedding_weights
        bounds = balance(sizes, setup.stages, ends, ends)
        return cls(shape, setup, layers[bounds[stage] : bounds[stage + 1]], stage == 0, stage == setup.stages - 1)

    @property
    def head_weights(self) -> int:
        """The number of weights of the output head on this rank."""
        return self.shape.embedding_weights // self.setup.tp if self.has_head else 0

    @property
    def outside(self) -> int:
        """The number of weights outside the layers."""
        is_shared = self.shape.is_tied and self.has_embedding and self.has_head
        norm = self.shape.width * self.shape.style.norm_parts if self.has_head else 0
        ends = 1 if is_shared else self.has_embedding + self.has_head
        return ends * self.shape.embedding_weights // self.setup.tp + norm

    @property
    def trained(self) -> int:
        """The number of weights that are trained."""
        return sum(layer.trained for layer in self.layers) + (self.outside if self.setup.trains_all else 0)

    def held(self) -> dict[str, float]:
        """Return the bytes of weights, gradients and optimizer state between two micro-batches."""
        setup, trained, shares = self.setup, self.trained, self.setup.shares
        if setup.offload:
            return {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
        frozen = 0.0
        if not setup.trains_all:
            each = NF4 if setup.method.startswith("q") else setup.compute
            in_layers = sum(self._frozen(layer, each) for layer in self.layers)
            frozen = (in_layers + setup.compute * self.outside) / shares.weights
        state = trained * moments_of(setup, self)
        if setup.zero_stage:  # bf16 copies; the fp32 masters count as optimizer state
            copies = setup.compute if setup.zero_stage == 1 else 0
            return {
                "weights": trained * setup.compute / shares.weights + frozen,
                "gradients": trained * (FP32 / shares.gradients + copies),
                "optimizer": (state + FP32 * trained) / shares.optimizer,
            }
        return {
            "weights": trained * setup.master_bytes / shares.weights + frozen,
            "gradients": trained * setup.master_bytes / shares.gradients,
            "optimizer": state / shares.optimizer,
        }

    def _frozen(self, layer: Layer, each: float) -> float:
        """Return the bytes of a layer's frozen weights: its linear layers take `each`, all others two."""
        in_matrices = sum(one.inputs * one.outputs for one in layer.matrices) / self.setup.tp
        return in_matrices * each + (layer.num_weights - in_matrices) * self.setup.compute

    def kept(self) -> float:
        """Return the bytes that all layers keep for the backward pass."""
        return self.setup.in_flight * sum(layer.kept() for layer in self.layers)

    def in_head(self) -> Moment:
        """Return what the output head adds while it computes the loss and its own gradients."""
        setup, width, tokens = self.setup, self.shape.width, self.setup.num_tokens
        vocabulary = self.shape.vocabulary // setup.tp
        if setup.logit_bytes is not None:
            return {"activations": self.kept(), "head": setup.logit_bytes * tokens * vocabulary}
        cast = BF16 if setup.cast_bytes and setup.trains_all else 0
        states = tokens * width * (3 * setup.stream + setup.compute + cast)
        in_fp32 = FP32 if setup.compute == BF16 else 0  # the softmax's copy of a chunk
        chunk = min(max(1, setup.num_logits // vocabulary), tokens) * vocabulary
        casts = setup.cast_bytes * self.head_weights if setup.trains_all else 0
        gradient = FP32 * self.head_weights if setup.trains_all else 0
        buffers = 1 if self.shape.is_tied else 2  # the collective of a tied weight ended long before
        return {
            "activations": self.kept() + self.in_autocast(),
            "head": states + chunk * (setup.compute + in_fp32 + self.shape.style.cap_bytes) + gradient + casts,
            "gathered": buffers * setup.compute * self.head_weights if setup.gathers else 0,
        }

    def in_head_backward(self) -> Moment:
        """Return what is added while the head's gradient in fp32 is rounded to the dtype of its gathered weight."""
        setup = self.setup
        if not (setup.gathers and setup.trains_all):
            return {}
        return {
            "activations": self.kept() + self.in_states(),
            "head": (FP32 + (BF16 if setup.compute == BF16 else 0)) * self.head_weights,
            "gathered": setup.compute * (self.head_weights + self.layers[-1].gathered_weights),
        }

    def in_states(self) -> float:
        """Return the bytes of the last norm's input, and of the gradient of its output."""
        return self.setup.num_tokens * self.shape.width * (self.setup.stream + self.setup.compute)

    def in_autocast(self) -> float:
        """Return the bytes of casts that autocast keeps until the forward pass ends."""
        if self.setup.checkpointing == "none" or not self.setup.trains_all:
            return 0  # those of all matrices are kept anyway
        return self.setup.cast_bytes * sum(layer.in_autocast for layer in self.layers)

    def in_last_layer(self) -> Moment:
        """Return what the backward pass of the last layer adds, while all others wait for theirs."""
        setup = self.setup
        gathered = 2 * setup.compute * self.largest.gathered_weights if setup.gathers else 0
        return {
            "activations": self.kept() + self.in_states() + max(layer.backward() for layer in self.layers),
            "gathered": gathered + self.tied_bytes,
        }

    def in_next_layer(self) -> Moment:
        """Return what the backward pass of the layer before adds, while the last one's gradients are summed."""
        if not self.setup.gathers or len(self.layers) < 2:
            return {}
        largest, added = self.largest, self.in_last_layer()
        kept = largest.gathered_weights / largest.num_weights
        activations = added["activations"] - self.setup.in_flight * largest.kept()
        reduced = self.reduced_bytes * largest.trained * kept
        gathered = added["gathered"]
        if len(self.layers) == 2:  # then no other one is gathered
            gathered -= self.setup.compute * largest.gathered_weights
        return {"activations": activations, "gathered": gathered + reduced}

    @property
    def tied_bytes(self) -> int:
        """Bytes of a tied embedding and its gradient, which FSDP2 keeps until the end of the backward pass."""
        is_kept = self.setup.gathers and self.shape.is_tied
        return (1 + self.setup.trains_all) * self.setup.compute * self.head_weights if is_kept else 0

    @property
    def largest(self) -> Layer:
        """The layer with the most weights."""
        return max(self.layers, key=lambda layer: layer.num_weights)

    @property
    def reduced_bytes(self) -> float:
        """Bytes of a gathered weight's gradient while it is summed over ranks: as computed, in fp32, and its share."""
        setup = self.setup
        return setup.compute + FP32 * (1 + 1 / setup.shares.gradients) if setup.gathers else 0

    def in_reduction(self) -> Moment:
        """Return what is added while the gradient of the output head is summed over ranks."""
        setup = self.setup
        if not (setup.gathers and setup.trains_all):
            return {}
        return {
            "activations": self.kept() + self.in_states(),
            "head": self.reduced_bytes * self.head_weights,
        }

    def at_the_end(self) -> Moment:
        """Return what the backward pass of the first layer adds, when all gradients are there.

        FSDP2 keeps what it has summed over replicas until then.
        """
        last, setup, gathered = self.layers[0], self.setup, 0.0
        if setup.num_replicas > 1:
            embedding = self.shape.embedding_weights if setup.trains_all else 0
            # Without accumulation these sums are the gradients.
            summed = FP32 * self.trained / setup.shares.gradients if setup.accumulates else 0
            gathered = summed + (FP32 + setup.compute) * embedding
        return {"activations": last.kept() + last.backward(), "gathered": gathered}

    def in_embedding(self) -> Moment:
        """Return what is added while the embedding's gradient is added to that of a tied head and to earlier ones."""
        if not (self.setup.trains_all and self.setup.cast_bytes and self.has_embedding):
            return {}
        copies = self.setup.accumulates + 2 * (self.shape.is_tied and self.has_head)
        return {"activations": self.in_states(), "head": copies * FP32 * self.shape.embedding_weights / self.setup.tp}

    def predict(self) -> Prediction:
        """Return the memory at the moment when the rank holds most."""
        held = self.held()
        early = held if self.setup.accumulates else {**held, "gradients": 0.0}
        moments = {
            "the output head": (early, self.in_head()),
            "the backward pass of the output head": (early, self.in_head_backward()),
            "the backward pass of the last layer": (early, self.in_last_layer()),
            "the backward pass of a layer": (early, self.in_next_layer()),
            "the reduction of the head's gradient": (early, self.in_reduction()),
            "the end of the backward pass": (held, self.at_the_end()),
            "the backward pass of the embedding": (held, self.in_embedding()),
        }
        sums = {
            name: {term: base.get(term, 0) + added.get(term, 0) for term in TERMS}
            for name, (base, added) in moments.items()
        }
        moment = max(sums, key=lambda name: sum(sums[name].values()))
        terms = {term: round(count) for term, count in sums[moment].items()}
        step = terms["activations"] + terms["head"] + terms["gathered"]
        terms["allowance"] = allowance(step, self.setup.num_ranks)
        return Prediction(
            terms=terms,
            moment=moment,
            state_bytes=round(sum(held.values())),
            loading_bytes=round(self.loading(held["weights"])),
            host_bytes=round(self.on_host()),
            checkpoint_bytes=round(self.in_checkpoint()),
        )

    def loading(self, weights: float) -> float:
        """Return the peak of a GPU while the model loads: its weights, and the largest tensor in addition.

        Under FSDP2, NF4 weights are sharded after each rank has quantized all of them.
        """
        largest = max([self.head_weights, *(one.num_weights for one in self.layers[0].matrices)])
        if self.setup.method.startswith("q") and self.setup.shares.weights > 1:
            weights *= self.setup.shares.weights
        return weights + (2.06 if self.setup.zero_stage == 3 else 1) * BF16 * largest

    def in_checkpoint(self) -> float:
        """Return the bytes of this part's weights and optimizer state in a checkpoint."""
        return self.trained * (self.setup.master_bytes + moments_of(self.setup, self, on_gpu=False))

    def on_host(self) -> float:
        """Return the bytes of this part in host memory: a checkpoint that is being written, and what is offloaded."""
        offloaded = 0.0
        if self.setup.offload:
            frozen = 0 if self.setup.trains_all else BF16 * (self.shape.num_weights - self.trained)
            copies = FP32 + BF16 if self.setup.zero_stage else 0  # of the gradients, and bf16 weights
            state = moments_of(self.setup, self) if self.setup.offload == "cpu" else 0
            offloaded = self.trained * (2 * self.setup.master_bytes + state + copies) + frozen
        if self.setup.checkpointing == "offload":
            tokens = self.setup.num_tokens * self.setup.num_ranks
            offloaded += tokens * self.setup.stream * self.shape.width * len(self.layers)
        return self.in_checkpoint() + offloaded


def moments_of(setup: Setup, part: Part, on_gpu: bool = True) -> float:
    """Return the bytes of optimizer state for each trained weight, without masters. Paged state leaves a full GPU."""
    if setup.optimizer.startswith("paged") and on_gpu:
        return 0
    if setup.optimizer.endswith("8bit"):
        return 2 + 2 * FP32 / 256  # a byte for each moment, and a scale for each block of 256
    if setup.optimizer == "muon" and setup.trains_all:
        matrices = sum(one.inputs * one.outputs for layer in part.layers for one in layer.matrices) / setup.tp
        return setup.master_bytes * (2 - matrices / part.trained)
    return 2 * setup.master_bytes


def balance(layers: list[int], count: int, before: int, after: int) -> list[int]:
    """Return where each stage begins, and the end, [count + 1], so that the largest stage is as small as possible.

    `layers` are the layers' sizes; `before` and `after` are added to the first and the last stage. Of equally good
    splits, the earlier stages get more layers, because the last one also computes the logits.
    """

    @functools.cache
    def best(first: int, left: int) -> tuple[int, list[int]]:
        """Return the size of the largest of the last `left` stages, from layer `first`, and their bounds."""
        own = before if first == 0 else 0
        if left == 1:
            return own + sum(layers[first:]) + after, [first, len(layers)]
        found = []
        for end in range(len(layers) - left + 1, first, -1):
            largest, bounds = best(end, left - 1)
            found.append((max(own + sum(layers[first:end]), largest), [first, *bounds]))
        return min(found, key=lambda each: each[0])

    return best(0, count)[1]
