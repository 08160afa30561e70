"""Name what is compared: the cases that are trained, and the systems that train them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A model and a method. A step has `rows` rows, or CHATS chats for a system that does not pack them."""

    title: str
    model: str
    method: str  # lora | full
    supervise: str  # all | assistant
    rows: int
    steps: int
    steps_unpacked: int  # each such step has more tokens
    lr: float = 1e-4
    row_tokens: int = 1024


@dataclass(frozen=True)
class System:
    """A trainer, the script that runs it, and the environment of that script; "" is that of Gearbox."""

    title: str
    script: str
    environment: str
    packs: bool = True


CHATS = 8  # of a step without packing: the default batch of the Trainer and of TRL
CASES = {
    "135m-lora": Case("SmolLM2-135M, LoRA", "smollm2-135m", "lora", "all", 1, 3, 2),
    "10m-full": Case("Llama 10M, full", "llama-10m", "full", "all", 2, 5, 4),
    "10m-masked": Case("Llama 10M, full, prompts masked", "llama-10m", "full", "assistant", 2, 5, 4),
}
GPU_CASES = {
    "8b-lora": Case("8B, LoRA, rows of 4,096", "llama-8b", "lora", "all", 4, 8, 8, row_tokens=4096),
    "8b-chats": Case("8B, LoRA, prompts masked", "llama-8b", "lora", "assistant", 8, 8, 8, row_tokens=2048),
    "8b-qlora": Case("8B, QLoRA, rows of 4,096", "llama-8b", "qlora", "all", 4, 8, 8, row_tokens=4096),
}
SYSTEMS = {
    "gearbox": System("Gearbox", "run_gearbox.py", ""),
    "axolotl": System("axolotl, packed", "run_axolotl.py", "axolotl"),
    "torchtune": System("torchtune, packed", "run_torchtune.py", "torchtune"),
    "llamafactory": System("LLaMA-Factory, packed", "run_llamafactory.py", "llamafactory"),
    "trl": System("TRL, packed", "run_trl.py", "trl"),
    "trl-plain": System("TRL as it comes", "run_trl.py", "trl", packs=False),
    "trainer": System("transformers' Trainer", "run_trainer.py", "trl", packs=False),
}
