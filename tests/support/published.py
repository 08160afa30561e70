"""List memory that other projects published, with the setup of each run, to compare the closed form with.

Each term was calibrated by one pair. Two lengths of a row give the bytes of a logit and of a token. Runs on 8 and 128
GPUs give the sharded state, and runs with and without offloaded activations the input of each layer.
"""

import json
from dataclasses import dataclass, replace

from gearbox.planning.architecture import ARCHITECTURES, Architecture
from gearbox.planning.layer_memory import BF16, Setup, Shares
from gearbox.planning.memory import predicted

LOGIT = 17.0  # bytes where a trainer keeps all logits: from Qwen3-0.6B at 8k and 16k tokens
TORCHTUNE = "[torchtune](https://github.com/meta-pytorch/torchtune#memory-and-training-speed)"
TORCHTITAN = "[torchtitan](https://github.com/pytorch/torchtitan/tree/main/benchmarks)"
TITAN_1690 = "[torchtitan #1690](https://github.com/pytorch/torchtitan/issues/1690)"
PRIME = "[prime-rl](https://github.com/PrimeIntellect-ai/prime-rl)"
SWIFT = "[ms-swift](https://github.com/modelscope/ms-swift)"
MUON = "[DeepSpeed](https://github.com/deepspeedai/DeepSpeed/tree/master/blogs)"
ANSWER = "[fsdp_qlora](https://github.com/AnswerDotAI/fsdp_qlora)"


@dataclass(frozen=True)
class Published:
    """A run whose memory was published."""

    model: str
    run: str
    gib: float
    source: str
    setup: Setup
    difference: str = ""
    """What that trainer does otherwise, or why the figure is off."""
    in_fp32: bool = False
    """True if frozen weights are in fp32."""
    has_gradients: bool = True
    """False if the optimizer steps in the backward pass."""
    keeps_half: bool = False
    """True if checkpointing keeps every second product: the mean of `selective` and `full`."""

    def predicted_gib(self) -> float:
        """Return what the closed form gives."""
        path = ARCHITECTURES / f"{self.model.replace('/', '--')}.json"
        shape = Architecture.of(json.loads(path.read_text()))
        found = predicted(shape, self.setup)
        size = found.allocated_bytes - (0 if self.has_gradients else found.terms["gradients"])
        if self.keeps_half:
            size = (size + predicted(shape, replace(self.setup, checkpointing="full")).allocated_bytes) / 2
        return (size + (BF16 * shape.num_weights if self.in_fp32 else 0)) / 2**30


def sharded(ranks: int, **settings) -> dict:
    """Return settings of FSDP2."""
    return {"shares": Shares(ranks, ranks, ranks), "gathers": True, "casts": False, "num_ranks": ranks, **settings}


OWN = {"is_lean": False}  # the modules of the family, without fused kernels
ALL_LOGITS = {"logit_bytes": LOGIT}
CHECKPOINTED = {"checkpointing": "full", **OWN}
LINEAR = (8, ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
TUNE = {"num_tokens": 4096, "master_bytes": BF16, "accumulates": False, **CHECKPOINTED}
LLAMA8, LLAMA70 = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-2-70b-hf"
QWEN4, QWEN7 = "Qwen/Qwen3-4B", "Qwen/Qwen2.5-7B-Instruct"
SWIFT_LORA = {"method": "lora", "num_tokens": 2048, "num_ranks": 2, **CHECKPOINTED, **ALL_LOGITS}
ROUGH = "batch and number of GPUs are not given: 2 ranks of one row"
PAIR = Shares(2, 2, 2)
PUBLISHED = [
    Published(LLAMA8, "LoRA, 2 x 2,048", 16.2, TORCHTUNE, Setup("lora", adapter=LINEAR, **TUNE)),
    Published(LLAMA8, "QLoRA, 2 x 2,048", 7.4, TORCHTUNE, Setup("qlora", adapter=LINEAR, **TUNE)),
    Published(
        LLAMA8, "full in bf16, paged 8-bit AdamW, 2 x 2,048", 18.9, TORCHTUNE,
        Setup("full", optimizer="paged_adamw_8bit", **TUNE), "steps in the backward pass", has_gradients=False,
    ),
    *(
        Published(
            LLAMA8, f"full, FSDP2 on {ranks}, 2 x 8,192", gib, TORCHTITAN,
            Setup("full", num_tokens=16384, checkpointing="selective", **ALL_LOGITS, **sharded(ranks)),
            "keeps every second product", keeps_half=True,
        )
        for ranks, gib in ((8, 82.4), (128, 67.0))
    ),
    Published(
        "Qwen/Qwen3-32B", "full, FSDP2 on 8, 2 x 4,096", 81.85, TITAN_1690,
        Setup("full", num_tokens=8192, **CHECKPOINTED, **ALL_LOGITS, **sharded(8)),
    ),
    *(
        Published(
            QWEN4, f"LoRA, 1 x {tokens:,}", gib, PRIME,
            Setup("lora", num_tokens=tokens, casts=False, **CHECKPOINTED), "frozen weights in fp32", in_fp32=True,
        )
        for tokens, gib in ((16384, 23.3), (65536, 42.0))
    ),
    *(
        Published(
            QWEN4, f"LoRA, activations offloaded, 1 x {tokens:,}", gib, PRIME,
            Setup("lora", num_tokens=tokens, casts=False, checkpointing="offload", **OWN), "the same", in_fp32=True,
        )
        for tokens, gib in ((16384, 20.6), (65536, 31.1))
    ),
    *(
        Published(
            "Qwen/Qwen3-0.6B", f"full, 1 x {tokens:,}", gib, PRIME,
            Setup("full", num_tokens=tokens, casts=False, **CHECKPOINTED, **ALL_LOGITS),
        )
        for tokens, gib in ((8192, 31.7), (16384, 52.8))
    ),
    *(
        Published(
            model, "full, FSDP2 on 8, 1 x 16,384", gib, PRIME,
            Setup("full", num_tokens=16384, **CHECKPOINTED, **ALL_LOGITS, **sharded(8)),
        )
        for model, gib in ((QWEN4, 54.6), ("Qwen/Qwen3-30B-A3B", 106.4))
    ),
    Published(
        "Qwen/Qwen2.5-3B-Instruct", "full, ZeRO-2 on 8", 34.5, MUON,
        Setup("full", 4096, casts=False, zero_stage=2, shares=Shares(1, 8, 8), num_ranks=8, **OWN, **ALL_LOGITS),
        "the batch is not given: 4,096 tokens a rank",
    ),
    Published(QWEN7, "LoRA, DDP", 27.5, SWIFT, Setup(**SWIFT_LORA), f"{ROUGH}; DDP's excess is not explained"),
    Published(QWEN7, "LoRA, ZeRO-2", 18.0, SWIFT, Setup(zero_stage=2, casts=False, **SWIFT_LORA), ROUGH),
    Published(
        QWEN7, "LoRA, ZeRO-3", 16.0, SWIFT,
        Setup(zero_stage=3, casts=False, gathers=True, shares=PAIR, **SWIFT_LORA),
        f"{ROUGH}; ZeRO-3 keeps up to 1e9 gathered weights",
    ),
    Published(QWEN7, "LoRA, FSDP2", 14.7, SWIFT, Setup(casts=False, gathers=True, shares=PAIR, **SWIFT_LORA), ROUGH),
    Published(
        LLAMA70, "QLoRA on 2, offloaded", 14.9, ANSWER,
        Setup("qlora", num_tokens=2048, offload="cpu", **CHECKPOINTED, **sharded(2)),
        "the batch is not given, and its buffers are not those of FSDP2",
    ),
]  # fmt: skip


def table() -> str:
    """Return the rows of the table in docs/plan.md."""
    lines = ["| model | run | published, GiB | closed form | off by | source |", "|---|---|---|---|---|---|"]
    for one in PUBLISHED:
        ours = one.predicted_gib()
        run = f"{one.run} ({one.difference})" if one.difference else one.run
        name = one.model.rpartition("/")[2]
        lines.append(f"| {name} | {run} | {one.gib:g} | {ours:.1f} | {ours / one.gib - 1:+.0%} | {one.source} |")
    return "\n".join(lines)
