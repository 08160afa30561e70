"""Compare the attentions of a model with eager, and name the kernels that ran, by a profiler's trace."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from gearbox.kernels.attention import DOCUMENTS, bounds_of

FLASH_2 = "flash_attention_2"
FAMILIES = {  # with what differs from the usual settings
    "llama": {"head_dim": 64},
    "mistral": {"head_dim": 64, "sliding_window": 48},
    "qwen2": {},
    "llama with wide heads": {"head_dim": 320},  # too wide for the GPU's kernel: torch's sdpa for each document
}
DOCUMENT_LENGTHS = [[100, 1, 60, 95], [256]]  # of each row
EXACT = 1e-4  # the largest error in fp32; kernels of GPUs emulate fp32 by three products of less
# In this order: cuDNN's kernels and those of flash-attn have `flash` in their names, too.
KERNELS = {
    "cudnn": r"cudnn.*(sdpa|flash|fprop|bprop)",
    "flash of torch": r"pytorch_flash|_scaled_dot_product_flash_attention(?!_for_cpu)",
    "flash of flash-attn": r"\bflash::|\bflash_(fwd|bwd)|FlashAttn(Fwd|Bwd)|FlashAttention(Forward|Backward)",
    "efficient": r"fmha_cutlass|PyTorchMemEffAttention",
    "flash for CPU": r"flash_attention_for_cpu|gearbox::attend_documents",
}
SOFTMAX = r"(?<!log_)(?<!Log)softmax"
PRODUCT = r"gemm|gemv|bmm|matmul|nvjet|cutlass"


def kernel_of(names: Iterable[str]) -> str:
    """Return the attention among the names of kernels or, on a CPU, of operators, or `none`."""
    names = [*names]
    for kernel, pattern in KERNELS.items():
        if any(re.search(pattern, name) for name in names):
            return kernel
    softmax = any(re.search(SOFTMAX, name, re.I) and "LogSoftMax" not in name for name in names)
    return "math" if softmax and any(re.search(PRODUCT, name, re.I) for name in names) else "none"


def attentions(device: str, dtype: torch.dtype) -> list[str]:
    """Return the values of model.attention that can run on this device in this precision, without eager."""
    found = ["sdpa"]
    has_kernel = device == "cpu" or (dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 0))
    found += [DOCUMENTS] if has_kernel else []
    return found + ([FLASH_2] if device != "cpu" and dtype == torch.bfloat16 and is_flash_attn_2_available() else [])


def make_model(family: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Return a small model with the same random weights, up to rounding, in each precision."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family.split()[0], vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1,
        **FAMILIES[family],
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16).to(device, dtype)


def run(model: PreTrainedModel, attention: str) -> list[torch.Tensor]:
    """Return the logits of packed rows, and the gradient of each weight, in fp32."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENT_LENGTHS])
    tokens = torch.randint(256, positions.shape, generator=torch.Generator().manual_seed(1))
    upstream = torch.randn(*positions.shape, 256, generator=torch.Generator().manual_seed(2))
    model.set_attn_implementation(attention)
    model.zero_grad()
    told = {}
    if attention in (DOCUMENTS, FLASH_2):
        told = {key: v.to(model.device) if torch.is_tensor(v) else v for key, v in bounds_of(positions).items()}
    inputs = {"input_ids": tokens.to(model.device), "position_ids": positions.to(model.device)}
    logits = model(**inputs, use_cache=False, **told).logits.float()
    (logits * upstream.to(model.device)).sum().backward()
    gradients = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    return [logits.detach(), *gradients]


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative distance of a tensor to the expected one."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True) if b.any())


def compare_attentions(device: str, figures: dict[str, str]) -> list[str]:
    """Compare each attention with eager in fp32, and add the errors to `figures`. Return the problems."""
    problems = []
    for family in FAMILIES:
        expected = run(make_model(family, torch.float32, device), "eager")
        for dtype, precision in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            model = make_model(family, dtype, device)
            allowed = max(EXACT, 2 * error(run(model, "eager"), expected))
            for attention in attentions(device, dtype):
                found = error(run(model, attention), expected)
                name = f"{family}, {attention}, {precision}"
                figures[name] = f"{found:.1e} of {allowed:.1e}"
                if not found <= allowed:
                    problems.append(f"{name}: error {found:.1e}, allowed {allowed:.1e}")
    return problems


def profile_attentions(device: str, folder: Path, figures: dict[str, str]) -> dict[str, str]:
    """Profile a pass of each attention in bf16, keep its trace in the folder, and return the kernels by attention."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    folder.mkdir(parents=True, exist_ok=True)
    model = make_model("llama", torch.bfloat16, device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device != "cpu" else [])]
    found = {}
    for attention in ["eager", *attentions(device, torch.bfloat16)]:
        run(model, attention)  # first calls compile and choose kernels
        with profile(activities=activities) as profiler:
            run(model, attention)
            if device != "cpu":
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(folder / f"trace-{attention}.json"))
        kind = DeviceType.CPU if device == "cpu" else DeviceType.CUDA
        found[attention] = kernel_of(event.name for event in profiler.events() if event.device_type == kind)
    figures |= found
    return found
