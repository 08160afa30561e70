"""Export a source to one folder: write it aside, verify it in a fresh process, and rename it only if it is right."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from gearbox import filesystem
from gearbox.checkpoint.disk_space import free_bytes
from gearbox.config.adapter_settings import WEIGHTS
from gearbox.console import Screen, format_bytes, status
from gearbox.errors import UserError, one_line
from gearbox.exporting import card, comparing, fresh, gguf_file, loaded
from gearbox.exporting.comparing import Difference, MergeFacts
from gearbox.exporting.loaded import Loaded
from gearbox.exporting.merging import MergedTensors
from gearbox.exporting.source import ADAPTER, Raw, Source
from gearbox.generation.saved_model import EXPORT_MANIFEST
from gearbox.model import adapters, export
from gearbox.sharding.sharded_state import persistent_buffers
from gearbox.sharding.unwrap import without_adapter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VLLM_RANK = 16  # the largest rank that vLLM takes unless it is told
RESERVE = 64 * 2**20  # bytes for tokenizer, card and the file system
SAME_WITH_GGUF = {"f32": 1e-3, "f16": 2e-2, "bf16": 5e-2, "q8_0": 0.25}
"""Largest distance of a GGUF file's logits from the folder's, by type (see `comparing.Difference`)."""


@dataclass(frozen=True)
class Options:
    """Hold the options of the command."""

    output: Path
    merge: bool = False
    dtype: str | None = None
    """fp32, bf16 or fp16; None keeps the dtype of the base."""
    gguf: str | None = None
    """The type of a GGUF file to write too."""
    force: bool = False
    trust_remote_code: bool = False
    command: str = ""


@dataclass
class Result:
    """Describe what was exported and verified."""

    kind: str
    """model, adapter or merged model."""
    dtype: str
    merge: MergeFacts | None = None
    reloaded: Difference | None = None
    gguf: Difference | None = None
    answer: str = ""


def run(source: Source, options: Options, screen: Screen) -> Result:
    """Export a source. Raise UserError, and leave nothing, if it cannot be exported or verified."""
    _check(source, options)
    with status(screen, f"loading {source.folder}"):
        found = loaded.load(source, DTYPES.get(options.dtype or ""), options.trust_remote_code)
    writes_model = options.merge or not source.is_adapter
    if writes_model and not source.is_quantized:
        _check_unpacked(source, found)
    if options.gguf:
        gguf_file.check(found.config, found.tokenizer)
    dtype = str(found.dtype).removeprefix("torch.")
    result = Result("merged model" if options.merge else "adapter" if source.is_adapter else "model", dtype)
    tensors = MergedTensors(found.model, found.dtype) if writes_model else None
    _check_space(source, found, options, tensors)
    texts = comparing.texts_of(source, found.tokenizer, comparing.num_positions(found.model))
    if tensors is None and options.dtype:
        _round_adapter(source, found, DTYPES[options.dtype])
    with _output(options) as aside, tempfile.TemporaryDirectory() as scratch:
        with status(screen, "computing what it predicts"):
            expected = _expected(found, texts, options, result, screen)
        with status(screen, f"writing {options.output}"):
            if tensors is not None:
                _write_model(found, tensors, aside)
            else:
                try:
                    result.dtype = _write_adapter(source, found, DTYPES.get(options.dtype or ""), aside)
                except SafetensorError as error:  # the disk is full
                    raise OSError(one_line(error)) from None
            found.tokenizer.save_pretrained(aside)
            _add_older_keys(aside, found.tokenizer)
            card.write(source, result, found.origin, options.command, aside)
        found.model = cast("PreTrainedModel", None)  # the fresh processes need its memory
        del tensors
        gc.collect()
        with status(screen, "loading it in a fresh process"):
            job = fresh.Job(
                str(aside),
                texts,
                result.dtype,
                f"{scratch}/logits.safetensors",
                source.is_quantized and not options.merge,
                options.trust_remote_code,
                base=source.base,
            )
            result.answer = fresh.run(job)
            if (aside / ADAPTER).is_file():
                _print_hints(filesystem.read_json_object(aside / ADAPTER), screen)
        result.reloaded = _checked(expected, job, comparing.SAME, "the exported folder")
        if options.gguf:
            with status(screen, f"writing {options.gguf} as GGUF"):
                name = gguf_file.write(aside, options.gguf, options.output.name)
            with status(screen, "loading the GGUF file in a fresh process"):
                job = replace(job, gguf=name, results=f"{scratch}/gguf.safetensors")
                fresh.run(job)
            result.gguf = _checked(expected, job, SAME_WITH_GGUF[options.gguf], name)
        card.write_manifest(source, result, options.command, aside)
    return result


def _check(source: Source, options: Options) -> None:
    """Raise UserError if the options contradict the source, or if the output exists and is not ours to replace."""
    if options.merge and not source.is_adapter:
        raise UserError(f"--merge: {source.folder} has no adapter to merge; leave the flag out")
    if options.gguf and source.is_adapter and not options.merge:
        raise UserError("--gguf: a GGUF file holds a full model; add --merge")
    output = options.output
    try:
        exists = os.path.lexists(output)
        if exists and (output.is_symlink() or not output.is_dir()):
            raise UserError(f"--output: {output} is a link or a file; give a folder that does not exist")
        if exists and not (output / EXPORT_MANIFEST).is_file() and any(output.iterdir()):
            raise UserError(f"--output: {output} exists and is not an earlier export; give another folder")
        if exists and not options.force:
            raise UserError(f"--output: {output} exists; add --force to replace it, or give another folder")
        needed = [str(source.folder), source.base, source.recipe and source.recipe.adapter.path]
        if any(Path(one).resolve().is_relative_to(output.resolve()) for one in needed if one):
            raise UserError(f"--output: {output} contains what is exported, or its base; give another folder")
        filesystem.make_folder(output.absolute().parent)
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written: {error.strerror}; give another folder") from None


def _check_unpacked(source: Source, found: Loaded) -> None:
    """Raise UserError if the files of the base have packed weights: they are not those of a plain model."""
    if getattr(without_adapter(found.model), "quantization_method", None) != "bitsandbytes":
        return
    if source.is_adapter:
        raise UserError(
            f"--merge: the files of its base, {found.origin.name!r}, are quantized; give by --base the model that they "
            "were made from, or leave --merge out"
        )
    raise UserError(f"SOURCE: {source.folder} has quantized weights; export the model that they were made from")


def _check_space(source: Source, found: Loaded, options: Options, tensors: MergedTensors | None) -> None:
    """Raise UserError if the disk has no room for the folder."""
    if tensors is not None:
        need = RESERVE + sum(one.nbytes for one in tensors.expected.values())
    elif source.manifest is None:
        need = RESERVE + (source.folder / WEIGHTS).stat().st_size
    else:
        need = RESERVE + sum(one.nbytes for one in found.model.parameters() if one.requires_grad)
    if options.gguf and tensors is not None:
        need += int(sum(one.numel() for one in tensors.expected.values()) * gguf_file.BYTES[options.gguf])
    if need > (free := free_bytes(options.output.absolute().parent)):
        raise UserError(
            f"--output: {options.output} needs {format_bytes(need)}, but its disk has {format_bytes(free)} free; free "
            "space or give another folder"
        )


@contextmanager
def _output(options: Options) -> Iterator[Path]:
    """Yield a folder to fill, which becomes the output at once. An earlier export is replaced only then."""
    output = options.output
    old = filesystem.aside_of(output, "earlier")
    try:
        with filesystem.atomic_folder(output) as aside:
            yield aside
            if output.exists():
                filesystem.sync_tree(aside)  # this may take minutes, in which the earlier export keeps its name
                filesystem.rename(output, old)
    except BaseException as error:  # also a signal
        if old.exists():
            filesystem.remove(output)
            filesystem.rename(old, output)
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"--output: {output} cannot be written: {error.strerror or error}; give another folder"
        ) from None
    filesystem.remove(old)


def _expected(found: Loaded, texts: list[list[int]], options: Options, result: Result, screen: Screen) -> torch.Tensor:
    """Return the logits that the exported folder must have. Raise UserError if a merge is refused."""
    if not options.merge:
        return comparing.logits(found.model, texts)
    facts, expected = comparing.merge_facts(cast("PeftModel", found.model), texts, found.dtype)
    result.merge = facts
    screen.print(f"the adapter moves the base by {facts.effect}")
    screen.print(f"merged in fp32, it differs from the adapter by {facts.exact}")
    if found.dtype != torch.float32:
        screen.print(f"merged in {result.dtype}, it differs from the adapter by {facts.rounded}")
    if facts.effect.distance <= comparing.FLOOR:
        screen.print("hint: the adapter changes nothing yet; the merged model equals its base")
    comparing.check_merge(facts, result.dtype)
    return expected


def _write_model(found: Loaded, tensors: MergedTensors, folder: Path) -> None:
    """Write a full model tensor by tensor."""
    writer = loaded.skeleton(found)
    if tensors.is_untied:
        for config in (writer.config, writer.config.get_text_config()):
            config.tie_word_embeddings = False
    export.save_full(writer, tensors, found.origin.name, found.dtype, folder)


def _round_adapter(source: Source, found: Loaded, dtype: torch.dtype) -> None:
    """Round the weights of a loaded adapter to the dtype of its file, so that both compute the same."""
    for tensor in _adapter_tensors(source, found).values():
        tensor.copy_(_cast(tensor, dtype))


def _adapter_tensors(source: Source, found: Loaded) -> dict[str, torch.Tensor]:
    """Return the tensors of a loaded adapter by their names in the model."""
    named = {name: t.detach() for name, t in (*found.model.named_parameters(), *persistent_buffers(found.model))}
    if source.manifest is None:
        with safe_open(source.folder / WEIGHTS, "pt") as file:
            held = {*file.keys()}
        return {name: tensor for name, tensor in named.items() if "lora_" in name or name in held}
    assert source.recipe is not None
    trained = {name for name, p in found.model.named_parameters() if p.requires_grad}
    trained |= {*adapters.saved_frozen_names(found.model, source.recipe)}
    return {name: tensor for name, tensor in named.items() if name in trained}


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _write_adapter(source: Source, found: Loaded, dtype: torch.dtype | None, folder: Path) -> str:
    """Write an adapter in PEFT's format. Return the dtypes of its tensors."""
    base = card.recorded_base(source)
    if source.manifest is None:
        weights = {name: _cast(one, dtype) for name, one in load_file(source.folder / WEIGHTS).items()}
        settings = filesystem.read_json_object(source.folder / ADAPTER)
        settings |= {"base_model_name_or_path": base, "revision": source.revision}
        filesystem.write(folder / ADAPTER, card.as_json(settings))
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
        if (source.folder / "generation_config.json").is_file():
            shutil.copyfile(source.folder / "generation_config.json", folder / "generation_config.json")
    else:
        weights = {name: _cast(tensor, dtype) for name, tensor in _adapter_tensors(source, found).items()}
        adapted = cast("PeftModel", found.model)
        adapted.peft_config["default"].revision = source.revision
        export.save_adapter(adapted, weights, base, folder)
    return ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in weights.values()}))


def _add_older_keys(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Add what transformers 4 and programs on it read under other names: the rotary base, the tokenizer's class and
    its chat template. Without them such a program refuses the folder, or computes with another rotary base.
    """
    path = folder / "config.json"
    if path.is_file():
        settings = filesystem.read_json_object(path)
        for group in (settings, settings.get("text_config") or {}):
            group.update({key: value for key, value in _older_rotation(group).items() if key not in group})
            if "dtype" in group:
                group.setdefault("torch_dtype", group["dtype"])
        filesystem.atomic_write(path, card.as_json(settings))
    path = folder / "tokenizer_config.json"
    settings = filesystem.read_json_object(path)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    template = tokenizer.chat_template
    if isinstance(template, str):
        settings["chat_template"] = template
    filesystem.atomic_write(path, card.as_json(settings))


def _print_hints(settings: Raw, screen: Screen) -> None:
    """Print what servers of adapters refuse in this one, or do wrong without a word."""
    names = {
        "use_dora": "DoRA",
        "modules_to_save": "whole layers",
        "trainable_token_indices": "added tokens",
        "target_parameters": "adapted experts",
    }
    if refused := [name for key, name in names.items() if settings.get(key)]:
        screen.print(f"hint: vLLM and TGI do not serve an adapter with {' or '.join(refused)}; add --merge for them")
    rank = max([settings["r"], *(settings.get("rank_pattern") or {}).values()])
    if rank > VLLM_RANK:
        screen.print(f"hint: vLLM takes an adapter of rank {rank} only with --max-lora-rank")


def _older_rotation(settings: Raw) -> Raw:
    """Return the rotary positions of a config under the keys of transformers 4."""
    given = settings.get("rope_parameters") or {}
    local = given.get("sliding_attention") if str(settings.get("model_type")).startswith("gemma3") else None
    full = given["full_attention"] if local else given
    if "rope_theta" not in full:
        return {}
    scaling = {key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
    older = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    older |= {"rope_scaling": scaling} if full.get("rope_type", "default") != "default" else {}
    return older | ({"rope_local_base_freq": local["rope_theta"]} if local else {})


def _checked(expected: torch.Tensor, job: fresh.Job, limit: float, name: str) -> Difference:
    """Return how far reloaded logits are from the expected ones. Raise UserError if that is too far."""
    found = comparing.difference(expected, load_file(job.results)["logits"])
    if not found.distance <= limit:
        raise UserError(f"verification: {name} answers otherwise than its source: {found}; it was not kept")
    return found
