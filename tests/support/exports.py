"""Export in this process, and make small models and adapters to export."""

from pathlib import Path

import peft
import torch
import transformers

import export as export_script
from gearbox import ROOT
from gearbox.exporting import fresh
from gearbox.model import loading

TOKENIZER = ROOT / "recipes/tiny"
SIZES = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3,
}  # fmt: skip


def verify_here(monkeypatch):
    """Let exports be verified in this process: a fresh one takes 10 s to import transformers."""

    def run(job):
        found = fresh.main(job)
        if "problem" in found:
            raise fresh.UserError(found["problem"])
        return found["answer"]

    monkeypatch.setattr(fresh, "run", run)


def export(source, output, *flags):
    """Run src/export.py. Return the folder."""
    export_script.main([str(source), "--output", str(output), *flags])
    return Path(output)


def write_model(family, folder, dtype=torch.float32, **sizes):
    """Write a small random model with the byte tokenizer, whose norms and biases are not those of a new one."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.to(dtype).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


def write_adapter(base, folder, size=0.1, **settings):
    """Write an adapter of a model, whose weights are drawn with this size."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    targets = settings.pop("target_modules", ["q_proj", "v_proj", "down_proj"])
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets, **settings)
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * size
        elif "magnitude" in name:
            parameter.data *= 1 + size * torch.rand(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@torch.no_grad()
def logits_of(folder):
    """Return the logits of a saved model or adapter, loaded as a run loads it back."""
    model, _ = loading.load_for_answers(Path(folder))
    return model.float()(input_ids=torch.arange(4, 100)[None]).logits
