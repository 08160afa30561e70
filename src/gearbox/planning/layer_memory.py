"""Compute in closed form what a layer of a decoder takes on one rank, for training steps of our loop.

The figures follow what the functions in kernels/ keep for the backward pass.

Letters as elsewhere: N tokens of a pass on one rank, H width, I features inside the MLP, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gearbox.config.gear import Gear
from gearbox.config.job import Job
from gearbox.config.recipe import Recipe
from gearbox.planning.architecture import Architecture, Experts, Matrix

BF16, FP32 = 2, 4  # bytes of a number
NUM_LOGITS, NUM_LOGITS_ON_CPU = 2**26, 2**24  # that kernels/head.py computes at one time
PASS_TOKENS_ON_CPU = 256  # more tokens at one time are computed 2 % faster, and need twice the memory
NF4 = 4.127 / 8  # bytes of a weight with double quantization: 4 bits, a byte for each 64, 4 bytes for each 64 * 256


class Shares(NamedTuple):
    """Parts that an engine divides the model into, one for each rank of a group."""

    weights: int
    gradients: int
    optimizer: int


WHOLE = Shares(1, 1, 1)


@dataclass(frozen=True)
class Setup:
    """Describe what decides the memory of a step: what a rank computes, and what its engine holds and gathers."""

    method: str
    """full, lora, dora, qlora or qdora."""
    num_tokens: int
    """N: tokens of a forward pass on this rank."""
    checkpointing: str = "none"
    optimizer: str = "adamw"
    master_bytes: int = FP32
    """Bytes of a trained weight between steps, of its gradient, and of each of AdamW's moments."""
    adapter: tuple[int, tuple[str, ...] | None] = (16, None)
    """The rank of an adapter and the names of the layers that it adapts; None for all linear layers."""
    accumulates: bool = True
    """True if gradients are held while a micro-batch runs: of the ones before it, or as parts of DDP's buckets."""
    shares: Shares = WHOLE
    casts: bool = True
    """True if autocast computes in bf16 with the weights of the optimizer, as under single, ddp, tp and pp."""
    gathers: bool = False
    """True if the weights of a layer are gathered when it computes."""
    zero_stage: int = 0
    offload: str | None = None
    ep: int = 1
    """Ranks that hold different experts."""
    tp: int = 1
    """Ranks that divide each matrix."""
    stages: int = 1
    """Ranks that divide the layers."""
    in_flight: int = 1
    """Micro-batches whose activations a rank holds: under a pipeline at most the number of stages."""
    row_tokens: int = 0
    """Tokens that attend to each other."""
    key_tokens: int = 0
    """Tokens of the complete rows whose keys and values a rank gathers, if ranks share each row."""
    num_ranks: int = 1
    num_replicas: int = 1
    """Groups of ranks that hold a complete sharded model each."""
    compute: int = BF16
    """Bytes of the numbers that layers compute with: fp32 on a CPU."""
    num_logits: int = NUM_LOGITS
    """Logits of a chunk of the output head."""
    is_lean: bool = True
    """True if our kernels compute norms, gates and adapters, which save only their inputs."""
    logit_bytes: float | None = None
    """Bytes of each logit of all N tokens where a trainer keeps them; None for our head, which keeps a chunk."""

    @classmethod
    def of(cls, job: Job, on_cpu: bool = False) -> Setup:
        """Return the setup of a recipe under a gear, as it runs on GPUs in the gear's precision, or on CPUs in fp32."""
        recipe, gear, batch = job.recipe, job.gear, job.batch
        row_tokens, parts = recipe.batch.row_tokens, gear.degree("sp") * gear.degree("cp")
        lines = 1 if recipe.data.packing or not recipe.compares else 2  # without packing each answer has its own
        in_lines = lines * batch.micro_rows * row_tokens
        tokens = in_lines // parts
        if (limit := pass_tokens(recipe, on_cpu)) and gear.engine in ("single", "ddp"):
            tokens = min(tokens, limit)
        is_fp32 = on_cpu or gear.precision != "bf16"
        targets = recipe.adapter.targets
        names = None if isinstance(targets, str) else tuple(targets)
        stages, steps = gear.degree("pp"), batch.accumulation_steps
        return cls(
            method=recipe.method,
            num_tokens=tokens,
            checkpointing=recipe.perf.checkpointing,
            optimizer=recipe.optim.name,
            master_bytes=FP32 if recipe.optim.master_weights == "fp32" else BF16,
            adapter=(recipe.adapter.r, names),
            accumulates=steps > 1 or gear.engine == "ddp",
            shares=shares_of(gear),
            casts=not is_fp32 and gear.engine in ("single", "ddp", "tp", "pp"),
            gathers=gear.engine == "fsdp" or gear.zero_stage == 3,
            zero_stage=gear.zero_stage,
            offload=gear.offload,
            ep=gear.degree("ep"),
            tp=gear.degree("tp"),
            stages=stages,
            in_flight=min(steps, stages if gear.schedule == "1f1b" else steps) if stages > 1 else 1,
            row_tokens=row_tokens,
            key_tokens=in_lines if parts > 1 else 0,
            num_ranks=gear.num_processes,
            num_replicas=gear.degree("dp_replicate"),
            compute=FP32 if is_fp32 else BF16,
            num_logits=NUM_LOGITS_ON_CPU if on_cpu else NUM_LOGITS,
            is_lean=recipe.perf.kernels == "auto",
        )

    @property
    def trains_all(self) -> bool:
        """True if all weights are trained."""
        return self.method == "full"

    @property
    def stream(self) -> int:
        """Bytes of a feature of the hidden states between layers: what autocast adds to fp32 weights is fp32."""
        return FP32 if self.casts and self.trains_all and self.master_bytes == FP32 else self.compute

    @property
    def cast_bytes(self) -> int:
        """Bytes of the copy that autocast makes of each trained weight."""
        return BF16 if self.casts and self.master_bytes == FP32 else 0


def pass_tokens(recipe: Recipe, on_cpu: bool) -> int | None:
    """Return the most tokens of a forward pass, or None for complete rows.

    By default only adapters on a CPU have a limit: each pass adds its gradients of all trained weights.
    """
    if not recipe.data.packing:
        return None
    by_default = on_cpu and recipe.adapter.method != "none" and not recipe.perf.compile
    return recipe.perf.pass_tokens or (PASS_TOKENS_ON_CPU if by_default else None)


def shares_of(gear: Gear) -> Shares:
    """Return the numbers of parts that a gear divides weights, gradients and optimizer state into."""
    if gear.engine == "fsdp" or gear.zero_stage == 3:
        return Shares(gear.shard, gear.shard, gear.shard)
    stage, ranks = gear.zero_stage, gear.data_parallel
    return Shares(1, ranks if stage == 2 else 1, ranks if stage else 1)


@dataclass(frozen=True)
class Layer:
    """A layer on one rank: its features, and the bytes that it takes."""

    shape: Architecture
    setup: Setup
    is_sparse: bool

    @property
    def queries(self) -> int:
        """Features of all queries."""
        return self.shape.heads * self.shape.head_size // self.setup.tp

    @property
    def keys(self) -> int:
        """Features of all keys, and of all values."""
        return self.shape.key_heads * self.shape.head_size // self.setup.tp

    @property
    def inner(self) -> int:
        """I: features inside the MLP, or inside the expert that computes every token."""
        return (self.shape.shared_width if self.is_sparse else self.shape.mlp_width) // self.setup.tp

    @property
    def experts(self) -> Experts | None:
        """The experts of a sparse layer."""
        return self.shape.experts if self.is_sparse else None

    @property
    def matrices(self) -> list[Matrix]:
        """The linear layers."""
        return [*self.shape.attention, *(self.shape.shared if self.is_sparse else self.shape.mlp)]

    @property
    def adapted(self) -> list[Matrix]:
        """The linear layers that an adapter changes."""
        _, names = self.setup.adapter
        return [] if self.setup.trains_all else [one for one in self.matrices if names is None or one.name in names]

    @property
    def num_weights(self) -> int:
        """The number of weights on one rank."""
        return self.shape.layer_weights(self.is_sparse) // self.setup.tp

    @property
    def gathered_weights(self) -> int:
        """The number of weights that a rank gathers: of experts that ranks divide, those of its part."""
        divided = self.experts.num_weights(self.shape.width) if self.experts is not None else 0
        own = divided // self.setup.ep if self.setup.ep < self.setup.shares.weights else 0
        return self.num_weights - (divided - own if self.setup.ep > 1 else 0)

    @property
    def adapter_weights(self) -> int:
        """The number of weights of the adapters."""
        rank, _ = self.setup.adapter
        magnitudes = "dora" in self.setup.method
        return self.expert_adapter_weights + sum(
            rank * (one.inputs + one.outputs) + magnitudes * one.outputs for one in self.adapted
        )

    @property
    def expert_adapter_weights(self) -> int:
        """The number of weights of the adapters of experts and router. That of gate and up has twice the rank."""
        if self.experts is None or not self.adapts_experts:
            return 0
        width, inner, count = self.shape.width, self.experts.width, self.experts.count
        of_one = 2 * (width + 2 * inner) + inner + width
        return self.setup.adapter[0] * (count * of_one + width + count)

    @property
    def adapts_experts(self) -> bool:
        """True if the adapter changes experts."""
        _, names = self.setup.adapter
        is_named = names is None or not {"down_proj", "w2"}.isdisjoint(names)
        return is_named and self.is_sparse and self.shape.style.adapts_experts and not self.setup.trains_all

    @property
    def trained(self) -> int:
        """The number of weights that are trained."""
        return self.num_weights if self.setup.trains_all else self.adapter_weights

    @property
    def in_autocast(self) -> int:
        """The number of weights of the layers that autocast casts, as our kernels do not know their inputs."""
        if self.setup.tp > 1:
            return sum(one.num_weights for one in self.matrices) // self.setup.tp
        style, names = self.shape.style, {self.shape.attention[-1].name}
        if style.norms_outputs:
            names |= {one.name for one in self.matrices[:-1]}
        if style.fuses_mlp or not style.is_gated:
            names.add(self.matrices[-1].name)
        return sum(one.num_weights for one in self.matrices if one.name in names) // self.setup.tp

    def kept_for_all(self) -> int:
        """Return the bytes of a token that the backward pass reads, if nothing is computed again."""
        shape, setup, style = self.shape, self.setup, self.shape.style
        if not setup.is_lean:
            return self.kept_without_kernels()
        normed = style.num_norms if style.norms_outputs else style.num_norms - 2  # outputs of attention and MLP
        norms = 2 * setup.stream * shape.width + normed * self.setup.compute * shape.width + FP32 * style.num_norms
        if style.norm_parts == 2:  # our kernels know no norm with a bias
            norms += self.setup.compute * style.num_norms * shape.width
        if style.norms_outputs and setup.stream == FP32:  # each matrix keeps its own cast of its input
            norms += (self.setup.compute * (len(self.matrices) - 2) - 2 * FP32) * shape.width
        heads, copies = shape.heads, 2
        if style.qk_norm:
            heads, copies = heads + shape.heads + shape.key_heads, 3
        attention = self.setup.compute * copies * (self.queries + self.keys) + FP32 * heads // setup.tp
        inner = self.setup.compute * self.inner * (2 if style.is_gated else 1)
        if style.fuses_attention:  # the parts of a product keep all of it
            attention += self.setup.compute * (self.queries + self.keys)
        if style.fuses_mlp or not style.is_gated:  # our kernel knows no such MLP, which keeps all that it computes
            inner *= 2
        low = self.setup.compute * setup.adapter[0] * len(self.adapted)
        return norms + attention + inner + low + self.kept_inputs() + self.kept_scores() + self.kept_by_experts()

    def kept_scores(self) -> int:
        """Return the bytes of a token that attention without sdpa keeps: scores, and keys and values for each head."""
        if not self.shape.style.score_bytes:
            return 0
        scores = self.shape.style.score_bytes * self.shape.heads // self.setup.tp
        return scores * min(self.setup.row_tokens, self.setup.num_tokens) + 2 * self.setup.compute * self.queries

    def kept_by_experts(self) -> int:
        """Return the bytes of a token that its experts keep: for each its input, its output and what is inside."""
        if self.experts is None:
            return 0
        parts = 7 if self.experts.has_bias else 4
        inside = parts * self.experts.width // self.setup.tp
        return self.setup.compute * self.experts.chosen * (2 * self.shape.width + inside)

    def kept_inputs(self) -> int:
        """Return the bytes of a token that matrices keep of their inputs. Our kernels know none that tp divides.

        Autocast gives each matrix a copy of an fp32 input, and PEFT gives one to each adapter.
        """
        setup, style, width = self.setup, self.shape.style, self.shape.width
        if setup.tp == 1:
            return 0
        if self.adapted:
            by_rows = (self.shape.attention[-1].name, self.matrices[-1].name)
            return setup.compute * sum(one.inputs // (setup.tp if one.name in by_rows else 1) for one in self.adapted)
        copies = len(self.matrices) - 2 if setup.stream == FP32 and not style.norms_outputs else 2
        return setup.compute * (width * copies + self.inner * (style.is_gated and not style.fuses_mlp))

    def kept_without_kernels(self) -> int:
        """Return the same for the family's own modules. Their norms compute in fp32, and MLPs keep four results.

        Autocast gives each matrix a copy of its input, and PEFT gives one to each adapter.
        """
        shape, style, setup = self.shape, self.shape.style, self.setup
        states, adapters = self.queries + self.keys, bool(self.adapted)
        of_norm = FP32 + (0 if adapters else setup.stream)
        copies = len(self.matrices) - 2 if adapters or setup.stream == FP32 else 2
        norms = (of_norm * style.num_norms + self.setup.compute * copies) * shape.width
        attention = 2 * self.setup.compute * states + FP32 * shape.heads // setup.tp
        attention += of_norm * states if style.qk_norm else 0
        attention += self.setup.compute * self.queries if adapters else 0
        inner = self.setup.compute * self.inner * (4 if style.is_gated else 2)
        inner += self.setup.compute * setup.adapter[0] * len(self.adapted)
        return norms + attention + inner + self.kept_scores() + self.kept_by_experts()

    def kept_for_products(self) -> int:
        """Return the bytes of a token that selective checkpointing keeps: the input, and all products and attention."""
        shape, gates = self.shape, 2 if self.shape.style.is_gated else 1
        outputs = 2 * self.queries + 2 * self.keys + 2 * shape.width + gates * self.inner
        if self.experts is not None:
            outputs += self.experts.chosen * (shape.width + 2 * self.experts.width // self.setup.tp)
        low = self.setup.adapter[0] * len(self.adapted)
        return (
            self.setup.stream * shape.width + self.setup.compute * (outputs + low) + FP32 * shape.heads // self.setup.tp
        )

    def kept(self) -> int:
        """Return the bytes that wait for the backward pass."""
        setup = self.setup
        if setup.checkpointing == "none":
            return setup.num_tokens * self.kept_for_all() + self.cast() + self.gathered_keys()
        if setup.checkpointing == "selective":
            return setup.num_tokens * self.kept_for_products()
        return setup.num_tokens * setup.stream * self.shape.width if setup.checkpointing == "full" else 0

    def cast(self) -> int:
        """Return the bytes of weights that are made for a pass: those that autocast has cast, and adapted experts."""
        adapted = self.experts.num_weights(self.shape.width) if self.experts is not None and self.adapts_experts else 0
        return self.setup.cast_bytes * self.trained + self.setup.compute * adapted

    def gathered_keys(self) -> int:
        """Return the bytes of the keys and values of complete rows, if ranks share each row."""
        return self.setup.compute * 2 * self.keys * self.setup.key_tokens

    def backward(self) -> int:
        """Return the bytes that the backward pass of the layer takes in addition.

        They are what is computed again, and gradients. Inside the MLP these are three, or five without our kernels. A
        narrow MLP has fewer than attention. The hidden states of the head are free by then.
        """
        setup, again = self.setup, 0
        if setup.checkpointing in ("full", "offload"):
            again = self.kept_for_all() - setup.stream * self.shape.width * (setup.checkpointing == "full")
        rebuilt = 0 if setup.checkpointing == "none" else self.cast() + self.gathered_keys()
        in_mlp = setup.num_tokens * setup.compute * ((3 if setup.is_lean else 5) * self.inner - self.shape.width)
        in_attention = setup.num_tokens * setup.compute * 2 * (self.queries + self.keys) + self.gathered_keys()
        return setup.num_tokens * again + max(in_mlp, in_attention) + rebuilt
