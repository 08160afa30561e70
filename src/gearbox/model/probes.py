"""Check the real model before training: rows fit it, our loss equals its own, and packed documents do not leak."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import nn

from gearbox.checks.model import longer_than_trained, too_long_for_table
from gearbox.distributed import pipeline_stages
from gearbox.distributed.engine import Engine
from gearbox.errors import UserError, one_line_with_type
from gearbox.kernels import attention
from gearbox.kernels.attention import DOCUMENTS
from gearbox.model.loss import LossPath
from gearbox.model.random_init import shrink_config
from gearbox.rows.batches import PackedRows, fullest_rows
from gearbox.rows.units import IGNORE_INDEX
from gearbox.sharding.unwrap import model_class, text_class, without_adapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

NUM_TOKENS = 16  # of the row that compares losses
NUM_NARROW_TOKENS = (512, 64)  # of the row that finds parameters without a gradient; fewer for short position tables
NARROW_DOCUMENTS = (23, 1, 17, 7)  # lengths of the documents in the row that compares attentions
NARROW_CUT = 30  # tokens of that row in the first of two parts; within a document
NARROW_WINDOW = 6  # of sliding attention in that row
TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding")  # last part of the name
TOWERS = ("vision", "image", "img", "audio")  # parts of the names of modules that do not read text


@torch.no_grad()
def check_loss(model: nn.Module, unwrapped: nn.Module, num_tokens: int, device: torch.device, tolerance: float) -> str:
    """Choose the path on which the loss is plain cross entropy on the model's own logits, and describe it.

    Raise UserError if no path does, or if the model reads the tokens that it is to predict. Some families transform
    their logits in ways that `_logit_shape` does not know, or number their positions differently. Every rank must call
    this, on the wrapped model.
    """
    causal_lm = without_adapter(unwrapped)
    family = causal_lm.config.model_type
    tokens = torch.arange(1, NUM_TOKENS + 1, device=device)[None] % num_tokens
    labels = tokens.roll(-1, 1)
    row = {"position_ids": torch.arange(NUM_TOKENS, device=device)[None], "labels": labels}
    model.eval()
    theirs, own_positions = _own_losses(model, tokens, family)
    if not math.isfinite(total := theirs.sum().item()):
        raise UserError(f"model.name: the loss of the loaded weights is {total}; they are damaged, or overflow")
    for path in (LossPath(False, own_positions), LossPath(True, own_positions)):
        causal_lm.loss_path = path
        ours = model(input_ids=tokens, **row)[0]
        if abs(ours.sum().item() - theirs.sum().item()) <= tolerance * abs(theirs.sum().item()):
            break
    else:
        raise UserError(
            f"model.name: the family {family} transforms its logits in an unknown way (model's loss "
            f"{theirs.sum().item():.5g}, ours {ours.sum().item():.5g})"
        )
    changed, half = tokens.clone(), NUM_TOKENS // 2
    changed[:, half:] = (tokens[:, half:] + num_tokens // 2) % num_tokens
    change = (model(input_ids=changed, **row)[0] - ours)[:, :half].abs().max().item()
    model.train()
    if not change <= tolerance:
        raise UserError(
            f"model.name: the family {family} reads the tokens that it is to predict (a loss changes by "
            f"{change:.2g}); use a causal model, or set is_decoder"
        )
    return path.describe()


def _own_losses(model: nn.Module, tokens: torch.Tensor, family: str) -> tuple[torch.Tensor, bool]:
    """Return the loss of each token by the model's own forward, [1, T], and whether it numbers positions differently.

    Raise UserError if the model cannot read a row of tokens.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    with _refused(family):
        logits = model(input_ids=tokens).logits.float()
    try:
        numbered = model(input_ids=tokens, position_ids=positions).logits.float()
    except TypeError:
        numbered = torch.full_like(logits, torch.inf)
    losses = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="none")
    return losses[None], not (numbered - logits).abs().max() <= 1e-3 * logits.abs().max()


@contextmanager
def _refused(family: str) -> Iterator[None]:
    """Turn an error of a family's own code into a UserError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a family can raise anything
        reason = one_line_with_type(error, 200)
        raise UserError(f"model.name: the family {family} cannot be trained on text: {reason}") from None


def unreached_parameters(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> set[str]:
    """Return the parameters that get no gradient from the loss, by name, with * in place of each number.

    Examples are poolers and the indexers of sparse attention. They are found on a narrow copy with random weights. Call
    this before Accelerate starts, because ZeRO-3 would shard the copy.
    """
    for num_tokens in NUM_NARROW_TOKENS:
        try:
            model, tokens = _narrow_copy(config, tokenizer, num_tokens)
            model(input_ids=tokens).logits.sum().backward()
        except Exception:  # `check_loss` reports a family that cannot be trained
            continue
        named = [(numberless(name), parameter) for name, parameter in model.named_parameters()]
        return {name for name, _ in named} - {name for name, parameter in named if parameter.grad is not None}
    return set()


def _narrow_copy(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, num_tokens: int, attention: str | None = None
) -> tuple[PreTrainedModel, torch.Tensor]:
    """Return a narrow copy of a model with random weights, and a row of random tokens for it, [1, num_tokens]."""
    narrow = shrink_config(config, tokenizer)
    narrow.get_text_config().use_cache = False  # as in training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = text_class(narrow)._from_config(narrow, attn_implementation=attention).float()
        return model, torch.randint(1, narrow.get_text_config().vocab_size, (1, num_tokens))


def document_arguments(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> set[str]:
    """Return the arguments in which a family passes the start of documents to its attention: positions, bounds.

    With such an argument, attention by document equals sdpa with a mask on packed rows. They are compared on a narrow
    copy with random weights and a narrow sliding window. Call this before Accelerate starts, because ZeRO-3 would shard
    the copy.
    """
    family = model_class(config)
    if not (getattr(family, "_supports_sdpa", False) and getattr(family, "_supports_flash_attn", False)):
        return set()
    config, positions = _with_narrow_window(config), _narrow_positions()
    logits: dict[str, torch.Tensor] = {}
    for way, name, bounds in (
        ("mask", "sdpa", {}),
        ("positions", DOCUMENTS, {}),
        ("bounds", DOCUMENTS, attention.bounds_of(positions)),
    ):
        try:
            model, tokens = _narrow_copy(config, tokenizer, positions.shape[1], name)
            with torch.no_grad():
                logits[way] = model.eval()(input_ids=tokens, position_ids=positions, **bounds).logits.float()
        except Exception:  # a family can raise anything
            continue
    expected = logits.pop("mask", None)
    if expected is None:
        return set()
    return {way for way, found in logits.items() if torch.allclose(found, expected, rtol=1e-4, atol=1e-5)}


def _with_narrow_window(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a config whose sliding attention, if any, is shorter than the documents of the probes."""
    config = copy.deepcopy(config)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        if getattr(part, "sliding_window", None):
            part.sliding_window = NARROW_WINDOW
    return config


def _fixed_rope_limit(config: PretrainedConfig) -> float:
    """Return the number of tokens up to which the rotary frequencies do not depend on the positions of a row."""
    text = config.get_text_config(decoder=True)
    given = getattr(text, "rope_parameters", None) or {}
    limits = [
        part.get("original_max_position_embeddings") or text.max_position_embeddings
        for part in (given, *given.values())
        if isinstance(part, dict) and part.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=math.inf)


def _narrow_positions() -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in NARROW_DOCUMENTS])[None]


@torch.no_grad()
def check_divided_rows(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, row_tokens: int) -> None:
    """Raise UserError if a family computes a token from other tokens of its row elsewhere than in attention.

    Ranks that share a row would miss these tokens: convolutions and states along the row are examples. A narrow copy
    computes a row, and then each of its parts with the keys and values of the complete row.
    """
    if (limit := _fixed_rope_limit(config)) < row_tokens:
        raise UserError(
            f"batch.row_tokens: above {limit:,} tokens {config.model_type} rotates positions by the length of rows, "
            f"which these ranks share; use {limit} or less"
        )
    positions, kept = _narrow_positions(), list[torch.Tensor]()
    model, tokens = _narrow_copy(_with_narrow_window(config), tokenizer, positions.shape[1], DOCUMENTS)
    model.eval()

    def logits_of(part: slice, gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with attention.dividing_rows(attention.Parts.of(positions, [part], gather)), _refused(config.model_type):
            return cast(torch.Tensor, model(input_ids=tokens[:, part], position_ids=positions[:, part]).logits.float())

    def keep(keys: torch.Tensor) -> torch.Tensor:
        kept.append(keys)
        return keys

    whole = logits_of(slice(0, positions.shape[1]), keep)
    for part in (slice(0, NARROW_CUT), slice(NARROW_CUT, positions.shape[1])):
        found = logits_of(part, functools.partial(next, iter(kept)))  # the row's keys instead of the part's
        if not torch.allclose(found, whole[:, part], rtol=1e-4, atol=1e-5):
            raise UserError(
                f"model.name: {config.model_type} has layers besides attention that read earlier tokens, so ranks "
                "cannot share rows; use accelerate_configs/fsdp.yaml"
            )


def may_skip_experts(config: PretrainedConfig) -> bool:
    """Return True if a row may reach no expert: LongCat's router can choose experts without weights for all tokens."""
    return bool(getattr(config.get_text_config(), "zero_expert_num", 0))


def numberless(name: str) -> str:
    """Return a parameter's name with * in place of each number."""
    return re.sub(r"\d+", "*", name)


def packing_leak(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    num_tokens: int,
    local_tokens: Callable[[dict[str, torch.Tensor]], AbstractContextManager[dict[str, torch.Tensor]]] = nullcontext,
) -> torch.Tensor:
    """Return how much packed documents affect each other: the largest change of a token's loss, [].

    `batch` is packed, has the shape used in training, and is on the model's device. The probe changes the tokens of the
    first document in each row. It then compares the losses of all other documents, which must not change.

    Every rank must call this. Each uses the tokens that `local_tokens` selects. The model stays in training mode,
    because engines treat evaluation differently.
    """
    documents = batch["chunk_ids"]
    changed = documents == documents[:, :1]
    labels = torch.roll(batch["input_ids"], -1, 1).masked_fill(documents != torch.roll(documents, -1, 1), IGNORE_INDEX)
    others = torch.where(changed, (batch["input_ids"] + num_tokens // 2) % num_tokens, batch["input_ids"])
    rows = {
        "usual": batch["input_ids"],
        "others": others,
        "position_ids": batch["position_ids"],
        "labels": labels.masked_fill(changed | (documents < 0), IGNORE_INDEX),
    }
    losses: list[torch.Tensor] = []
    with local_tokens(rows) as mine, torch.no_grad():
        for tokens in ("usual", "others"):
            torch.manual_seed(0)  # dropout, if any
            inputs = {"position_ids": mine["position_ids"], "labels": mine["labels"]}
            losses.append(model(input_ids=mine[tokens], **inputs)[0])
    return (losses[0] - losses[1]).abs().max()


def measure_packing_leak(engine: Engine, batch: dict[str, torch.Tensor], num_tokens: int) -> float:
    """Return the largest packing leak over all ranks, for a packed batch with the shape used in training."""
    on_device = {name: tensor.to(engine.device) for name, tensor in batch.items()}
    with _refused(without_adapter(engine.unwrapped).config.model_type):
        leak = packing_leak(engine.model, on_device, num_tokens, engine.local_tokens)
    return float(engine.accelerator.gather(leak[None]).max())


@torch.no_grad()
def check_row(engine: Engine, rows: PackedRows) -> None:
    """Raise UserError if the model cannot read unpacked rows in training: Reformer reads only rows of one length."""
    batch = engine.to_device(rows.batch(fullest_rows(rows, engine.job.batch.micro_rows)))
    with _refused(without_adapter(engine.unwrapped).config.model_type), engine.local_tokens(batch) as inputs:
        engine.model(**inputs)


def num_positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions in the model's table, or None if it computes positions of any number.

    Rotary models compute them. Others are built without memory, to look for a table.
    """
    if getattr(config.get_text_config(decoder=True), "rope_parameters", None):
        return None
    try:
        model = pipeline_stages.meta_model(config)
    except Exception:  # loading will explain it
        return None
    return min(_table_sizes(model), default=None)


def _table_sizes(model: PreTrainedModel) -> list[int]:
    """Return the number of positions of each table in a model: embeddings, and buffers of GPT-J and CTRL."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    # OPT begins at position 2, and RoBERTa after the index of its padding.
    first = {n: getattr(m, "offset", 0 if m.padding_idx is None else m.padding_idx + 1) for n, m in modules.items()}
    sizes = {name: module.num_embeddings - first[name] for name, module in modules.items()}
    sizes |= {name: len(buffer) for name, buffer in model.named_buffers() if buffer.dim() == 2}
    for module in model.modules():  # CTRL's table is a plain attribute
        sizes |= {name: len(value) for name, value in vars(module).items() if name in TABLES and hasattr(value, "dim")}
    return [
        size
        for name, size in sizes.items()
        if name.rpartition(".")[2] in TABLES and not any(tower in name for tower in TOWERS)
    ]


def check_row_tokens(config: PretrainedConfig, row_tokens: int, limit: int | None) -> str | None:
    """Return a hint if rows are longer than those that the model was trained with.

    Raise UserError if they are longer than its table of positions: `limit`, from `num_positions`.
    """
    text = config.get_text_config(decoder=True)
    keys = [key for key, value in vars(text).items() if value == limit and "position" in key]
    if problem := too_long_for_table(config.model_type, row_tokens, limit, keys[0] if keys else None):
        raise UserError(problem)
    return longer_than_trained(text, row_tokens, limit)
