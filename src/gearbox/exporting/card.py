"""Write the model card of an exported folder, and the manifest with the digest of each file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from huggingface_hub import try_to_load_from_cache

from gearbox import filesystem
from gearbox.config.recipe import LOCAL_ENDINGS
from gearbox.exporting.source import Raw, Source
from gearbox.generation.saved_model import EXPORT_MANIFEST
from gearbox.metrics import metrics_file
from gearbox.metrics.metrics_file import perplexity
from gearbox.model.pretrained import Pretrained
from gearbox.redact import redacted

if TYPE_CHECKING:
    from gearbox.exporting.exporter import Result

FORMAT = 1
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60  # letters of the loss curve
PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes")
METHODS = {
    "full": "full fine-tuning",
    "lora": "LoRA",
    "dora": "DoRA",
    "qlora": "QLoRA (4-bit base)",
    "qdora": "QDoRA (4-bit base)",
}


def write(source: Source, result: Result, origin: Pretrained, command: str, folder: Path) -> None:
    """Write README.md, and the loss curve if the run has drawn one."""
    parts = [_title(source, result), _numbers(source, result), _curve(source, folder), _use(source, result)]
    parts += [_recipe(source), _made(source, command)]
    front = yaml.safe_dump(_front_matter(source, result, origin), sort_keys=False, allow_unicode=True)
    body = "\n\n".join(part for part in parts if part)
    filesystem.write(folder / "README.md", f"---\n{front}---\n\n{redacted(body)}\n")


def write_manifest(source: Source, result: Result, command: str, folder: Path) -> None:
    """Write the manifest: what was exported from what, how it was verified, and the digest of each file."""
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.name != EXPORT_MANIFEST}
    manifest = source.manifest
    content = {
        "format": FORMAT,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "kind": result.kind,
        "dtype": result.dtype,
        "source": str(source.folder),
        "step": source.step,
        "gear": None if manifest is None else manifest.gear["name"],
        "base": recorded_base(source),
        "base_revision": source.revision,
        "base_digest": None if manifest is None else manifest.base,
        "merged_into": ("dequantized nf4" if source.is_quantized else "base") if result.merge else None,
        "command": command,
        "versions": versions(),
        "trained_with": None if manifest is None else manifest.versions,
        "verified": {
            name: vars(found)
            for name, found in (
                ("reloaded", result.reloaded),
                ("gguf", result.gguf),
                *(vars(result.merge).items() if result.merge else ()),
            )
            if found is not None
        },
        "files": {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in files.items()},
    }
    filesystem.write(folder / EXPORT_MANIFEST, as_json(redacted(content)))


def as_json(content: Raw) -> str:
    """Return the text of a JSON file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def versions() -> dict[str, str]:
    """Return the versions of the packages that made the files."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def recorded_base(source: Source) -> str:
    """Return the base as others find it: a Hub id, a path below the current folder, or an absolute path."""
    base = source.base or ""
    if not base or not Path(base).is_dir():
        return base
    full, here = Path(base).resolve(), Path.cwd().resolve()
    return os.path.relpath(full, here) if full.is_relative_to(here) else str(full)


def _hub_base(source: Source) -> str | None:
    base = source.base or ""
    return base if HUB_ID.fullmatch(base) and not Path(base).exists() else None


def _front_matter(source: Source, result: Result, origin: Pretrained) -> Raw:
    """Return the metadata that the Hub reads."""
    adapter = result.kind == "adapter"
    found: Raw = {}
    if (hub := _hub_base(source)) is not None:
        found |= {"base_model": hub, "base_model_relation": "adapter" if adapter else "finetune"}
    found |= _licence(source, origin)
    sources = [] if source.recipe is None else [one.path for one in source.recipe.data.sources]
    datasets = sorted({one for one in sources if HUB_ID.fullmatch(one) and not one.endswith(LOCAL_ENDINGS)})
    if hubs := [one for one in datasets if not Path(one).exists()]:
        found["datasets"] = hubs
    method = [] if source.recipe is None else [source.recipe.method]
    return found | {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gearbox", "sft", *method, *(["gguf"] if result.gguf else [])],
    }


def _licence(source: Source, origin: Pretrained) -> dict[str, str]:
    """Return the license of the base, if the card in its folder or in the cache of the Hub names one."""
    try:
        hub = _hub_base(source)
        found_at = hub and try_to_load_from_cache(hub, "README.md", revision=source.revision)
        path = Path(found_at) if isinstance(found_at, str) else Path(source.base or origin.name) / "README.md"
        text = filesystem.read_limited(path, filesystem.MAX_SMALL_BYTES).decode().replace("\r\n", "\n")
        front = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else {}
        found = {key: front.get(key) for key in ("license", "license_name", "license_link")}
    except Exception:  # anyone may have written the card
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str) and len(value) < 200}


def _title(source: Source, result: Result) -> str:
    name = source.run.name if source.run is not None else source.folder.name
    if source.base is None:
        return f"# {_plain(name)}"
    method = METHODS[source.recipe.method] if source.recipe is not None else "fine-tuning"
    what = {"model": "This model", "adapter": "This adapter", "merged model": "This model, with its adapter merged,"}
    return f"# {_plain(name)}\n\n{what[result.kind]} was trained from `{_plain(source.base)}` by {method}."


def _numbers(source: Source, result: Result) -> str:
    """Return a table of what is known about the training and the files."""
    lines: list[tuple[str, object]] = []
    if source.step is not None:
        lines.append(("steps", f"{source.step:,}"))
    progress = {} if source.manifest is None else source.manifest.progress
    for key, name in (("tokens", "tokens read"), ("tokens_supervised", "tokens trained on")):
        if isinstance(progress.get(key), int):
            lines.append((name, f"{progress[key]:,}"))
    last = _metrics(source)
    held = next((line for line in reversed(last) if isinstance(line.get("eval_loss"), float)), None)
    if held is not None:
        loss = held["eval_loss"]
        lines.append(("held-out loss", f"{loss:.4f} at step {held.get('step')}"))
        if isinstance(accuracy := held.get("eval_accuracy"), float):  # of pairs, whose loss has no perplexity
            lines.append(("held-out accuracy", f"{accuracy:.1%}"))
        else:
            lines.append(("held-out perplexity", f"{perplexity(loss):.4g}"))
    lines.append(("dtype", result.dtype))
    if source.recipe is not None:
        lines.append(("data", ", ".join(f"`{_plain(one.path)}`" for one in source.recipe.data.sources)))
    if result.merge is not None:
        lines.append(("merged into", "the dequantized base" if source.is_quantized else "the base"))
        lines.append(("merged from adapter", str(result.merge.rounded)))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in lines)])


def _metrics(source: Source) -> list[Raw]:
    """Return the lines of metrics.jsonl up to the exported step."""
    if source.run is None:
        return []
    found = metrics_file.read(source.run / "metrics.jsonl").good
    return [line for line in found if line["step"] <= (source.step or 2**53)]


def _curve(source: Source, folder: Path) -> str:
    """Return the loss curve: the run's picture, or a line of bars."""
    losses = [line["loss"] for line in _metrics(source) if isinstance(line.get("loss"), float)]
    losses = [loss for loss in losses if math.isfinite(loss)]
    picture = None if source.run is None else source.run / "loss.png"
    if picture is not None and picture.is_file():
        shutil.copyfile(picture, folder / "loss.png")
        return "![Loss over the steps](loss.png)"
    if len(losses) < 2:
        return ""
    size = max(1, math.ceil(len(losses) / WIDTH))
    means = [sum(part) / len(part) for part in (losses[i : i + size] for i in range(0, len(losses), size))]
    low, high = min(means), max(means)
    bars = "".join(BARS[int((mean - low) / ((high - low) or 1) * (len(BARS) - 1))] for mean in means)
    return f"Training loss, from {losses[0]:.4f} to {losses[-1]:.4f}:\n\n```text\n{bars}\n```"


def _use(source: Source, result: Result) -> str:
    """Return Python code that loads the folder."""
    if result.kind != "adapter":
        code = (
            "from transformers import pipeline\n\n"
            'chat = pipeline("text-generation", "FOLDER_OR_ID", dtype="auto")\n'
            'print(chat([{"role": "user", "content": "Hello"}], max_new_tokens=100))'
        )
    else:
        quantized = (
            "import torch\nfrom transformers import BitsAndBytesConfig\n" if source.is_quantized else "",
            'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,\n'
            "    bnb_4bit_compute_dtype=torch.bfloat16)",
        )
        option = f",\n    quantization_config={quantized[1]}" if source.is_quantized else ""
        rows = (
            "model.resize_token_embeddings(len(tokenizer))  # it has added tokens\n"
            if source.recipe is not None and source.recipe.model.add_tokens
            else ""
        )
        pinned = "" if source.revision is None else f", revision={source.revision!r}"
        code = (
            f"{quantized[0]}from peft import PeftModel\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_ID")\n'
            f'model = AutoModelForCausalLM.from_pretrained({recorded_base(source)!r}{pinned}, dtype="auto"{option})\n'
            f'{rows}model = PeftModel.from_pretrained(model, "FOLDER_OR_ID")'
        )
    return f"## Use\n\n````python\n{code}\n````"


def _recipe(source: Source) -> str:
    if source.recipe is None:
        return ""
    text = yaml.safe_dump(redacted(source.recipe.model_dump(mode="json", exclude_defaults=True)), sort_keys=False)
    return f"## Recipe\n\n````yaml\n{_plain(text.rstrip(), keeps_lines=True)}\n````"


def _made(source: Source, command: str) -> str:
    used = versions() if source.manifest is None else source.manifest.versions
    listed = ", ".join(f"{_plain(name)} {_plain(number)}" for name, number in used.items())
    return f"## How it was made\n\nTrained with Gearbox: {listed}. Exported by:\n\n````text\n{_plain(command)}\n````"


def _plain(text: str, keeps_lines: bool = False) -> str:
    """Return text that cannot end a code block, a table or a heading."""
    text = text if keeps_lines else " ".join(text.split())
    return (
        text.replace("`", "'")
        .replace("|", "/" if not keeps_lines else "|")
        .replace("<", "&lt;" if not keeps_lines else "<")
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
