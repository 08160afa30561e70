"""Weights, quantization and adapters: from a recipe to a model, and from a model to a folder that others load."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.quantizers.base import get_keys_to_not_convert

from gearbox import adapters, loss, pipeline, storage
from gearbox.checkpoint import digest_of
from gearbox.config import ROOT, Model, Recipe, UserError

logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the outcome is said in one line
transformers.utils.logging.disable_progress_bar()  # every rank would draw its own
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is_gradient_checkpointing.*")  # PEFT asks for it
# PEFT's own patterns for the experts of a mixture, which it applies nevertheless.
warnings.filterwarnings(
    "ignore", category=RuntimeWarning, message=".*_pattern keys did not match any targeted module.*"
)

TINY = ROOT / "recipes" / "tiny"
ARCHITECTURES = ROOT / "recipes" / "architectures"


def load_tokenizer(model: Model, chat_template: str | None, rehearse: bool) -> Any:
    """The model's tokenizer, with the chat template of that file if there is one, and with the recipe's added tokens.

    These are no special tokens: those are taken out of answers, where whoever parses a mark looks for it. A rehearsal
    of a model that is not on this machine takes the tokenizer of recipes/tiny.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.name, **_where(model), local_files_only=rehearse)
    except Exception as error:
        if not rehearse:
            raise unreachable(model.name, error) from None
        tokenizer = AutoTokenizer.from_pretrained(TINY)
    if not tokenizer.is_fast:
        raise UserError(
            f"model.name: {model.name!r} has a slow tokenizer, which cannot say where its tokens lie in the text"
        )
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    if known := [token for token in model.add_tokens if token in tokenizer.get_vocab()]:
        raise UserError(f"model.add_tokens: {known[0]!r} is a token of {model.name} already; take it out")
    tokenizer.add_tokens([transformers.AddedToken(token, normalized=False) for token in model.add_tokens])
    return tokenizer


def load_config(model: Model, rehearse: bool) -> Any:
    """The architecture. A rehearsal never asks the network: folder, cache, or recipes/architectures/."""
    try:
        config = AutoConfig.from_pretrained(model.name, **_where(model), local_files_only=rehearse)
    except Exception as error:
        shipped = ARCHITECTURES / f"{model.name.replace('/', '--')}.json"
        if not rehearse:
            raise unreachable(model.name, error) from None
        if not shipped.is_file():
            raise UserError(
                f"model.name: a rehearsal needs the architecture of {model.name!r}: it is neither a folder, nor in the "
                f"cache, nor at {shipped.relative_to(ROOT)}; put the model's config.json there"
            ) from None
        config = AutoConfig.from_pretrained(shipped)
    if config.__class__ not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model.name: {model.name!r} ({config.model_type}) is not a causal language model")
    return config


def _where(model: Model) -> dict[str, Any]:
    """Which revision to load, and whether code that comes with it may run: said each time, else a prompt would ask."""
    return {"revision": model.revision, "trust_remote_code": model.trust_remote_code}


def unreachable(name: str, error: Exception) -> UserError:
    """Why a model could not be had, in one line that says what to do."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return UserError(
            f"model.name: {name!r} is gated: accept its terms at https://huggingface.co/{name}, then export HF_TOKEN"
        )
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return UserError(
            f"model.name: the hub has no {name!r}; check the spelling, or export HF_TOKEN if it is private"
        )
    if "trust_remote_code" in str(error):
        return UserError(
            f"model.name: {name!r} brings Python code of its own; read it, then set model.trust_remote_code=true"
        )
    if "safetensors" in str(error):
        return UserError(
            f"model.name: {name!r} has no safetensors weights, and pickled ones could run code: convert them in a "
            "sandbox by AutoModelForCausalLM.from_pretrained(..., use_safetensors=False).save_pretrained(FOLDER)"
        )
    offline = any(isinstance(cause, LocalEntryNotFoundError | ConnectionError) for cause in causes)
    if offline or "connect" in str(error).lower() or "offline" in str(error).lower():
        return UserError(
            f"model.name: {name!r} is neither on this machine nor can the hub be reached; give a local folder, or "
            "rehearse with run.rehearse=true"
        )
    return UserError(f"model.name: {name!r} cannot be loaded: {' '.join(str(error).split())[:300]}")


def narrowed(config: Any, tokenizer: Any, num_added: int = 0, num_layers: int = 2) -> Any:
    """The same architecture for a rehearsal: few layers, width 64, as many query heads a key head as before.

    Its vocabulary is the tokenizer's without the added tokens, whose rows are added to it as to any other.
    """
    heads, num_layers = 4, min(num_layers, config.num_hidden_layers)
    ratio = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    narrow = {
        "num_hidden_layers": num_layers,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // ratio),
        "head_dim": None if hasattr(config, "qk_rope_head_dim") else 64 // heads,  # there it follows from that one
        "vocab_size": len(tokenizer) - num_added,
        "layer_types": config.layer_types[:num_layers] if getattr(config, "layer_types", None) else None,
        "max_window_layers": num_layers,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    for key, value in narrow.items():
        if value is not None and getattr(config, key, None) is not None:
            setattr(config, key, value)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, key, getattr(tokenizer, key))
    config.dtype = torch.float32
    return config


def write_random(config: Any, tokenizer: Any, seed: int, folder: Path) -> None:
    """Draw random weights once, as a folder, so that every gear loads them the way it loads real ones.

    bf16 has the same numbers, as it mostly has the hub's: ZeRO in bf16 rounds what it loads, so that its fp32 masters
    would start from other weights than another gear's. Atomic; a folder that another process finished first stays.
    """
    aside = folder.with_name(f"{folder.name}.{uuid4().hex[:8]}")  # machines may share it, and process ids
    transformers.set_seed(seed)
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model = model.to(torch.bfloat16).to(config.dtype or torch.float32)
    try:
        with storage.filled(folder, aside) as filled:
            model.save_pretrained(filled)
            tokenizer.save_pretrained(filled)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not folder.exists():
            raise


def load(
    source: str,
    recipe: Recipe,
    tokenizer: Any,
    precision: str,
    placing: dict[str, Any] | None = None,
    part: pipeline.Part | None = None,
) -> torch.nn.Module:
    """The model to train, its loss installed. `precision` is the gear's: no (fp32) or bf16; `placing` the engine's.

    With `part` it is one stage of a pipeline alone. Full fine-tuning loads fp32 masters (bf16 if the recipe says so);
    an adapter's frozen base comes in the precision of the forward pass, and the adapter itself in fp32.
    """
    settings, masters = recipe.model, recipe.optim.master_weights
    compute = torch.bfloat16 if precision == "bf16" else torch.float32
    trains_all = recipe.adapter.method == "none"
    dtype = (torch.float32 if masters == "fp32" else torch.bfloat16) if trains_all else compute
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": _attention(source, settings)}
    options |= placing or {}
    if settings.quantize:
        options["quantization_config"] = _nf4(compute)  # loads onto this rank's device by itself
    family = AutoModelForCausalLM
    if part is not None:
        config = AutoConfig.from_pretrained(source, **_where(settings))
        family = pipeline.family(config, part)
        if settings.quantize:  # what stays as it is (the head) would be guessed anew for each stage
            options["quantization_config"].llm_int8_skip_modules = get_keys_to_not_convert(pipeline.outline(config))
    try:
        loaded = family.from_pretrained(source, **_where(settings), use_safetensors=True, **options)
    except (OSError, ValueError, ImportError) as error:
        raise unreachable(source, error) from None
    loaded.config.use_cache = False
    adapters.add_tokens(loaded, tokenizer, settings.add_tokens)
    if settings.quantize:
        _check_quantized(loaded, settings)
    if not trains_all:
        loaded = adapters.adapted(loaded, recipe)
        if masters == "bf16":
            for parameter in loaded.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
    loss.install(loaded, settings.router_loss)
    if settings.gradient_checkpointing:
        # Non-reentrant on every gear: it needs no input that requires grad, so frozen bases work under ZeRO-3 too.
        loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return loaded


def _attention(source: str, model: Model) -> str:
    """sdpa where the family has it (Gemma 2 and gpt-oss have not), else eager; or what the recipe names."""
    if model.attention != "auto":
        return model.attention
    config = AutoConfig.from_pretrained(source, **_where(model))
    family = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "sdpa" if getattr(family, "_supports_sdpa", True) else "eager"


def _nf4(compute: torch.dtype) -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        # uint8, the default, is left out of FSDP's sharding without an error.
        bnb_4bit_quant_storage=compute,
    )


def _check_quantized(loaded: torch.nn.Module, model: Model) -> None:
    """Raise UserError where most weights stayed as they were: bitsandbytes quantizes linear layers, and no experts."""
    experts = sum(p.numel() for p in loaded.parameters() if p.dim() > 2)
    if experts > sum(p.numel() for p in loaded.parameters()) / 2:
        raise UserError(
            f"model.quantize: {model.quantize} is for linear layers, and most weights of {model.name} are experts, "
            "which would stay as they are; use model.quantize=null: an adapter reaches the experts too"
        )


def save(
    model: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    tokenizer: Any,
    source: str,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    """Write what `from_pretrained` loads: the whole model, or the adapter alone. `tensors` are whole, on the CPU.

    All ranks of a sharded model must call this with their own iterator; only the rank that is given tensors writes.
    A whole model is cast to dtype, as it comes in; an adapter keeps its own. The folder appears at once, by a rename.
    """
    is_adapter = hasattr(model, "peft_config")
    weights = {name: tensor if is_adapter else tensor.to(dtype) for name, tensor in tensors}
    if not weights:
        return
    with storage.filled(folder, folder.with_name(f"{folder.name}.tmp")) as aside:
        if is_adapter:
            if pipeline.is_cut(model):
                import peft

                # Of what it is given PEFT writes only that for which the model has adapters: let it be the whole model.
                model = peft.get_peft_model(pipeline.outline(model.config), model.peft_config["default"])
            model.peft_config["default"].base_model_name_or_path = source
            # "auto" would ask the hub for the size of the base's vocabulary.
            has_rows = any("lora_" not in name for name in weights)
            model.save_pretrained(aside, state_dict=weights, save_embedding_layers=has_rows)
            (aside / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        else:
            model.config.use_cache = True
            model.config.dtype = dtype
            model.save_pretrained(aside, state_dict=weights)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it was asked


def architecture(source: str, model: Model) -> Any:
    """The config of the weights at `source`. Raises UserError where they cannot be had."""
    try:
        return AutoConfig.from_pretrained(source, **_where(model))
    except (OSError, ValueError) as error:
        raise unreachable(source, error) from None


def stored_dtype(config: Any) -> torch.dtype:
    """The dtype in which a checkpoint's weights are kept, and in which the trained ones are saved."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def fingerprint(source: str, recipe: Recipe) -> str | None:
    """Identifies what an adapter is trained upon: a folder's weights by their content, the hub's by their commit, and
    the adapter that it goes on from."""
    if recipe.adapter.method == "none":
        return None
    files = sorted(Path(source).glob("*.safetensors"))
    found = [digest_of(file) for file in files]
    if not files:
        found = [str(getattr(AutoConfig.from_pretrained(source, **_where(recipe.model)), "_commit_hash", None))]
    if recipe.adapter.path is not None:
        found.append(digest_of(Path(recipe.adapter.path) / adapters.WEIGHTS))
    return " ".join(found)


def load_for_answers(folder: Path, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A saved model (an adapter with its base) and its tokenizer, on the CPU or the first GPU, as a user loads it."""
    settings = folder / "adapter_config.json"
    adapter = json.loads(settings.read_text()) if settings.is_file() else {}
    base, revision = adapter.get("base_model_name_or_path", str(folder)), adapter.get("revision")
    trust = {"trust_remote_code": trust_remote_code}
    model = AutoModelForCausalLM.from_pretrained(base, revision=revision, dtype="auto", use_safetensors=True, **trust)
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    if settings.is_file():
        import peft

        if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # the adapter brings their rows
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model = peft.PeftModel.from_pretrained(model, str(folder), use_safetensors=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer
