"""Load an exported folder as its recipient would, in a fresh process, and report what is there.

    python -m gearbox.exporting.fresh JOB

JOB is a JSON file with the keys of `Job`. The result is written to the file that it names. Only transformers and PEFT
load the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gearbox.errors import UserError, one_line_with_type
from gearbox.exporting.source import Raw
from gearbox.launch.environment import python_path, without_launcher

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

NEW_TOKENS = 8
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Job:
    """The folder to load, and how."""

    folder: str
    texts: list[list[int]]
    dtype: str
    """The dtype that all weights must have, such as bfloat16."""
    results: str
    """The safetensors file to write the logits to."""
    is_quantized: bool = False
    """True if the base of an adapter must be quantized, as in its training."""
    trust_remote_code: bool = False
    gguf: str | None = None
    """A GGUF file in the folder to load in place of the safetensors."""
    base: str | None = None
    """The base of an adapter, if it has another name here."""


def run(job: Job) -> str:
    """Load and ask a folder in a fresh process. Return the answer. Raise UserError with what is wrong."""
    place = Path(job.results).with_suffix(".json")
    place.write_text(json.dumps(asdict(job)))
    environment = without_launcher() | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "gearbox.exporting.fresh", str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        errors = done.stderr.strip().splitlines()
        found = {"problem": f"the process ended with code {done.returncode}: {errors[-1] if errors else ''}"}
    if problem := found.get("problem"):
        raise UserError(f"verification: the exported folder does not load in a fresh process: {problem}")
    return str(found["answer"])


def main(job: Job) -> dict[str, str]:
    """Load the folder, write its logits, and return its answer, or the problem."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from gearbox.exporting import comparing, merging

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not job.gguf and (problem := next(_problems_of_files(Path(job.folder)), None)):
        return {"problem": problem}
    options: Raw = {"trust_remote_code": job.trust_remote_code}
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.folder, **options)
    named = {"gguf_file": job.gguf} if job.gguf else {}
    model, problems = _load(job, options | named, len(tokenizer))
    if problems:
        return {"problem": problems[0]}
    save_file({"logits": comparing.logits(model.eval(), job.texts).contiguous()}, job.results)
    prompt = comparing.prompt_of(comparing.QUESTIONS[0], tokenizer)
    tokens = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"][-comparing.MAX_TOKENS :]])
    mask = torch.ones_like(tokens)
    pad = tokenizer.eos_token_id
    with merging.in_fp32(model), torch.no_grad():
        made = model.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=pad
        )
    return {"answer": tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True).strip()}


def _load(job: Job, options: Raw, num_tokens: int) -> tuple[PreTrainedModel | PeftModel, list[str]]:
    """Return the model and what is wrong with its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from gearbox.model.loading import keep_storage, nf4
    from gearbox.sharding.unwrap import is_composite, model_class, without_adapter

    if is_adapter := (Path(job.folder) / "adapter_config.json").exists():
        import peft

        settings = json.loads((Path(job.folder) / "adapter_config.json").read_text())
        name = job.base or settings["base_model_name_or_path"]
        revision = settings.get("revision")
        options |= {"revision": revision}
    else:
        name, revision = job.folder, None
    if job.is_quantized:
        options |= {"quantization_config": nf4(torch.float32), "dtype": torch.float32}
    elif job.gguf:
        options |= {"dtype": torch.float32}
    else:
        options |= {"dtype": "auto", "use_safetensors": True}
    config = _config(name, revision, job)
    loader = (is_composite(config) and model_class(config)) or AutoModelForCausalLM
    model, info = loader.from_pretrained(name, config=config, output_loading_info=True, **options)
    keep_storage(model)
    if job.gguf:
        return model, []
    problems = [f"{kind}: {min(map(str, found))}" for kind, found in info.items() if found]
    if is_adapter:
        if num_tokens > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(num_tokens, mean_resizing=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return peft.PeftModel.from_pretrained(model, job.folder, use_safetensors=True), problems
    problems += _problems_of_dtypes(model, job)
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    head, embedding = model.get_output_embeddings(), without_adapter(model).get_input_embeddings()
    if head is not None and (head.weight is embedding.weight) != tied:
        problems.append(f"tie_word_embeddings is {tied}, but the head is {'' if tied else 'not '}a separate weight")
    return model, problems


def _problems_of_dtypes(model: PreTrainedModel, job: Job) -> Iterator[str]:
    """Yield what is wrong with the dtypes in the files. Towers keep theirs, and some families keep weights in fp32."""
    import torch
    from safetensors import safe_open

    from gearbox.checkpoint.shards import FILE_DTYPES
    from gearbox.sharding.unwrap import is_composite

    wanted, found = getattr(torch, job.dtype), set()
    for path in Path(job.folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  not a dict
    held = {dtype for dtype, name in FILE_DTYPES.items() if name in found and dtype.is_floating_point}
    others = held - {wanted} - ({torch.float32} if model._get_dtype_plan(wanted) else set())
    if wanted not in held or (others and not is_composite(model.config)):
        names = sorted(str(dtype).removeprefix("torch.") for dtype in held)
        yield f"its weights are {', '.join(names)}, not {job.dtype}"


def _config(name: str, revision: str | None, job: Job) -> PretrainedConfig:
    """Return the config. A GGUF file holds Mistral as a Llama, and transformers needs to be told."""
    from transformers import AutoConfig, LlamaConfig

    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=job.trust_remote_code)
    if job.gguf and config.model_type == "mistral":
        return LlamaConfig.from_dict({key: value for key, value in config.to_dict().items() if key != "model_type"})
    return config


def _problems_of_files(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the folder: the index against the files, and the files that a recipient needs."""
    from safetensors import safe_open

    held: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text())["weight_map"]
        if listed != held:
            yield f"{INDEX} does not list what the files hold"
    elif len({*held.values()}) != 1:
        yield f"it has {len({*held.values()})} files of weights and no {INDEX}"
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md"):
        if not (folder / name).is_file():
            yield f"{name} is missing"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    given = Job(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        result = main(given)
    except Exception as error:  # any code of a family
        result = {"problem": one_line_with_type(error)}
    print(json.dumps(result), flush=True)
