"""Load the tokenizer, config and weights that a recipe names, with quantization and adapters."""

from __future__ import annotations

import logging
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.quantizers.base import get_keys_to_not_convert

from gearbox import ROOT
from gearbox.checks.model import NO_LANGUAGE_MODEL, QUANTIZED, known_token
from gearbox.checks.tokenizer import lacks_tokenizer
from gearbox.config.adapter_settings import WEIGHTS, read_adapter_config
from gearbox.config.recipe import Model, Recipe
from gearbox.distributed import pipeline_stages
from gearbox.errors import UserError
from gearbox.filesystem import digest_of
from gearbox.kernels import blocks, libraries
from gearbox.kernels.attention import DOCUMENTS
from gearbox.kernels.install import install_kernels
from gearbox.model import adapters, dropout, loss
from gearbox.model.pretrained import Pretrained
from gearbox.sharding.full_parameters import keeping_loaded_weights
from gearbox.sharding.unwrap import is_composite, model_class, text_class, without_adapter

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

# On CPUs with AVX512-BF16, bitsandbytes asks at import for a kernel from the Hub. `keep_storage` makes it unnecessary.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hide its retries; a UserError reports the result
transformers.utils.logging.disable_progress_bar()  # every rank would draw one
# Every rank would print it. PEFT uses one of these names, and this module the other, which older versions have too.
warnings.filterwarnings(
    "ignore", category=FutureWarning, message="`(is_gradient_checkpointing|gradient_checkpointing_)"
)
# PEFT warns about its own patterns for the experts of a mixture, but applies them.
warnings.filterwarnings(
    "ignore", category=RuntimeWarning, message=".*_pattern keys did not match any targeted module.*"
)

TINY = ROOT / "recipes" / "tiny"
ARCHITECTURES = ROOT / "recipes" / "architectures"


def load_tokenizer(model: Model, chat_template: str | None, rehearse: bool) -> PreTrainedTokenizerFast:
    """Return the model's tokenizer with the recipe's added tokens, and with the chat template of a file if given.

    Added tokens are not special tokens. Special tokens are removed from answers, but a parser needs the added ones.
    A rehearsal of a model that is not on this machine uses the tokenizer of recipes/tiny.
    """
    origin = Pretrained.of(model, is_offline=rehearse)
    try:
        tokenizer = origin.tokenizer()
    except UserError:
        if not rehearse or (origin.folder is not None and not lacks_tokenizer(origin.folder)):
            raise
        tokenizer = Pretrained(str(TINY)).tokenizer()
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    if known := [token for token in model.add_tokens if token in tokenizer.get_vocab()]:
        raise UserError(known_token(known[0], model.name))
    tokenizer.add_tokens([transformers.AddedToken(token, normalized=False) for token in model.add_tokens])
    return tokenizer


def load_config(model: Model, rehearse: bool) -> PretrainedConfig:
    """Return the model's config. A rehearsal reads a folder, the cache or recipes/architectures/, never the network."""
    origin = Pretrained.of(model, is_offline=rehearse)
    try:
        config = origin.config()
    except UserError:
        shipped = ARCHITECTURES / f"{model.name.replace('/', '--')}.json"
        if not rehearse or origin.folder is not None:
            raise
        if not shipped.is_file():
            raise UserError(
                f"model.name: {model.name!r} is not a local folder and not in the cache; a rehearsal needs its "
                f"config.json as {shipped.relative_to(ROOT)}"
            ) from None
        config = Pretrained(str(shipped)).config()
    if model_class(config) is None:
        raise UserError(f"model.name: {NO_LANGUAGE_MODEL.format(model.name, config.model_type)}")
    return config


def load(
    source: str,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    precision: str,
    engine_options: dict[str, Any] | None = None,
    stage: pipeline_stages.Stage | None = None,
) -> PreTrainedModel | PeftModel:
    """Return the model to train with its loss installed; with `stage`, only that stage of a pipeline.

    `precision` is the gear's: no (fp32) or bf16. `engine_options` are the engine's options of from_pretrained.
    Full fine-tuning loads fp32 masters, or bf16 masters if the recipe asks for them. With an adapter, the frozen base
    is loaded in the precision of the forward pass and the adapter in fp32.
    """
    settings, masters = recipe.model, recipe.optim.master_weights
    compute = torch.bfloat16 if precision == "bf16" else torch.float32
    trains_all = recipe.adapter.method == "none"
    dtype = (torch.float32 if masters == "fp32" else torch.bfloat16) if trains_all else compute
    config = Pretrained.of(settings, source).config()
    options: dict[str, Any] = {"dtype": dtype, **(engine_options or {})}
    if "attn_implementation" not in options:
        options["attn_implementation"] = attention_of(config, settings.attention)
    if settings.quantize:
        options["quantization_config"] = nf4(compute)  # from_pretrained then loads onto this rank's device
    own_dropout = {} if settings.dropout else dropout.switch_off(config)
    model = load_weights(config, settings, source, options, stage)
    _check_saving(model, Pretrained.of(settings, source))
    if trains_all and getattr(model, "is_quantized", False):
        raise UserError(f"model.name: {QUANTIZED.format(source)}")
    if recipe.perf.kernels == "liger":
        libraries.use_liger(model)
    if recipe.perf.float8:
        libraries.use_float8(model)
    model.own_dropout = own_dropout  # the export writes these rates
    model.config.get_text_config().use_cache = False
    adapters.add_tokens(model, tokenizer, settings.add_tokens)
    if settings.quantize:
        _check_quantized(model, settings)
    if not trains_all:
        model = adapters.attach_adapter(model, recipe)
        if masters == "bf16":
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
    if recipe.perf.kernels == "auto":
        install_kernels(model)
    loss.install_loss(model, settings.router_loss)
    blocks.wrap_blocks(without_adapter(model), recipe.perf.checkpointing, recipe.perf.compile)
    return model


def _loader(config: PretrainedConfig) -> Any:  # noqa: ANN401  classes with from_pretrained, and no common base
    """Return the class whose from_pretrained loads the model without its towers. It may be of remote code."""
    return text_class(config) if is_composite(config) else AutoModelForCausalLM


def load_weights(
    config: PretrainedConfig,
    model: Model,
    source: str,
    options: dict[str, Any],
    stage: pipeline_stages.Stage | None,
) -> PreTrainedModel:
    """Load the model at `source` without its towers, or one stage of it, with from_pretrained and these options."""
    loader = _loader(config)
    if stage is not None:
        loader = pipeline_stages.stage_class(config, stage)
    if model.quantize and model_class(config):  # a pipeline stage cannot know which layer is the head
        options["quantization_config"].llm_int8_skip_modules = _unquantized(config)
    try:
        with keeping_loaded_weights(model.quantize is not None):
            loaded = loader.from_pretrained(
                source, config=config, **Pretrained.of(model).options, use_safetensors=True, **options
            )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise Pretrained.of(model, source).explain(error) from None
    # Under ZeRO-3 transformers also keeps renamings that it did not need, and save_pretrained would undo them.
    used = [conversion for conversion in getattr(loaded, "_weight_conversions", None) or () if conversion.was_used()]
    loaded._weight_conversions = used
    if model.quantize:
        keep_storage(loaded)
    return cast(PreTrainedModel, loaded)


def _check_saving(model: PreTrainedModel, origin: Pretrained) -> None:
    """Raise UserError if the config cannot be saved: it would be known only after the training."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.config.save_pretrained(folder)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(folder)
        except Exception as error:
            raise origin.explain(error) from None


def attention_of(config: PretrainedConfig, chosen: str = "auto", by_document: bool = False) -> str:
    """Return the attention to use. auto is eager for families without sdpa (Gemma 2, gpt-oss).

    `by_document` is True if the gear can compute attention by document, and the family passes positions to it.
    """
    if chosen == "flash_attention_2" and not torch.cuda.is_available():
        raise UserError("model.attention: flash_attention_2 needs a GPU; use auto")
    if chosen == DOCUMENTS and not by_document:
        raise UserError(
            f"model.attention: {config.model_type} cannot compute attention by document on this gear; use auto"
        )
    if chosen != "auto":
        return chosen
    if by_document:
        return DOCUMENTS
    return "sdpa" if getattr(model_class(config), "_supports_sdpa", True) else "eager"


def nf4(compute: torch.dtype) -> BitsAndBytesConfig:
    """Return the settings of 4-bit NF4 weights with double quantization that compute in dtype `compute`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        # FSDP silently leaves uint8 storage, the default, unsharded.
        bnb_4bit_quant_storage=compute,
    )


def keep_storage(model: PreTrainedModel) -> None:
    """Keep the storage of 4-bit weights on CPUs with AVX512-BF16.

    bitsandbytes 0.50 repacks them there at the first evaluation. Sharded weights (FSDP2, ZeRO-3) then compute garbage.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _check_quantized(loaded: PreTrainedModel, model: Model) -> None:
    """Raise UserError if most weights are experts: bitsandbytes quantizes only linear layers."""
    experts = sum(p.numel() for p in loaded.parameters() if p.dim() > 2)
    if experts > sum(p.numel() for p in loaded.parameters()) / 2:
        raise UserError(
            f"model.quantize: {model.quantize} quantizes linear layers, but most weights of {model.name} are "
            "experts; use model.quantize=null (adapters also reach the experts)"
        )


def fingerprint(source: str, recipe: Recipe) -> str | None:
    """Return a text that identifies the frozen weights under an adapter, or None if all weights are trained.

    The adapter at adapter.path is included.
    """
    return None if recipe.adapter.method == "none" else starting_weights(source, recipe)


def starting_weights(source: str, recipe: Recipe) -> str:
    """Return a text that identifies the weights before the first step, with those of the adapter at adapter.path."""
    digests = digests_of_weights(Pretrained.of(recipe.model, source))
    if recipe.adapter.path is not None:
        digests.append(digest_of(Path(recipe.adapter.path) / WEIGHTS))
    return " ".join(digests)


def digests_of_weights(origin: Pretrained) -> list[str]:
    """Return the digest of each file of weights in a folder, or the commit of weights from the Hub."""
    if origin.folder is None:
        return [str(getattr(origin.config(), "_commit_hash", None))]
    return [digest_of(file) for file in origin.weight_files()]


def load_for_answers(
    folder: Path | str,
    trust_remote_code: bool = False,
    key: str = "MODEL",
    switch: str = "trust_remote_code=true",
    quantize: bool = False,
    revision: str | None = None,
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerFast]:
    """Load a saved model, or an adapter with its base, and its tokenizer on the first GPU, or else the CPU.

    A message names it by `key`, and `switch` as what lets its code run. `quantize` loads the weights in NF4.
    """
    origin = saved = Pretrained(str(folder), revision, trust_remote_code, key, switch)
    adapter = saved.adapter_folder()
    if adapter is not None:
        try:
            settings = read_adapter_config(adapter)
        except ValueError as error:
            raise saved.refuse(f"{str(adapter)!r} {error}") from None
        place = f"{adapter / 'adapter_config.json'}: base_model_name_or_path"
        saved = replace(saved, name=str(adapter), is_adapter=True)
        origin = replace(origin, name=settings.base_model_name_or_path or "", revision=settings.revision, key=place)
    tokenizer = saved.tokenizer()
    config = origin.config()
    check_weights(origin, config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = (is_composite(config) and model_class(config)) or AutoModelForCausalLM
    options = origin.options | {"dtype": "auto", "use_safetensors": True, "attn_implementation": attention_of(config)}
    if quantize:
        options |= _quantized(config, origin, device)
    try:
        model = loader.from_pretrained(origin.name, config=config, **options)
        origin = saved
        if adapter is not None:
            model = with_saved_adapter(model, adapter, adapters.peft_config(settings), len(tokenizer))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # hostile files raise many types of exception
        raise origin.explain(error) from None
    if quantize:
        keep_storage(model)
    return model.to(device).eval(), tokenizer


def _quantized(config: PretrainedConfig, origin: Pretrained, device: str) -> dict[str, object]:
    """Return the options that load a model's weights in NF4, like those of a run with model.quantize: nf4."""
    if getattr(config, "quantization_config", None):
        raise origin.refuse(f"the weights of {origin.name!r} are quantized already; load them as they are")
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    settings = nf4(compute)
    settings.llm_int8_skip_modules = _unquantized(config)
    return {"dtype": compute, "quantization_config": settings, "device_map": {"": device}}


def _unquantized(config: PretrainedConfig) -> list[str]:
    """Return the modules that keep their precision in NF4."""
    full = pipeline_stages.meta_model(config)
    return [*get_keys_to_not_convert(full), *adapters.special_layers(full)]


def with_saved_adapter(model: PreTrainedModel, folder: Path, config: PeftConfig, num_tokens: int) -> PeftModel:
    """Return the model with the adapter in `folder`, which has this config, and with its generation settings."""
    import peft

    if num_tokens > model.get_input_embeddings().num_embeddings:  # the adapter's folder has their rows
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        adapted = peft.PeftModel.from_pretrained(model, str(folder), config=config, use_safetensors=True)
    _check_all_loaded(adapted, folder)
    if (folder / "generation_config.json").is_file():
        adapted.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return adapted


def _check_all_loaded(adapted: PeftModel, folder: Path) -> None:
    """Raise UserError if the adapter has tensors for layers that are not loaded, such as those of a cut tower.

    PEFT and torch leave them out without a word, so this loads the adapter once more and looks at the names.
    """
    import peft

    left: set[str] = set()
    hook = adapted.register_load_state_dict_pre_hook(
        lambda module, state, *_: left.update(state.keys() - module.state_dict().keys())
    )
    peft.set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))
    hook.remove()
    if left:
        raise UserError(
            f"{folder / WEIGHTS}: {min(left)}: is of a layer that is not loaded here, one of {len(left)} such tensors; "
            "use this adapter with PEFT and the whole base"
        )


def check_weights(origin: Pretrained, config: PretrainedConfig) -> None:
    """Raise UserError if the weights are damaged or incomplete, or if a tensor has another size than the config says.

    Reads only the headers of the files: the model has no memory. from_pretrained would draw missing weights at random.
    Quantized weights are packed into other shapes, which only their real loading checks.
    """
    if getattr(config, "quantization_config", None):
        return
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # hide its table of the same problems
    options = origin.options | {"device_map": "meta", "use_safetensors": True, "output_loading_info": True}
    try:
        loader = _loader(config)
        _, found = loader.from_pretrained(origin.name, **options, ignore_mismatched_sizes=True)
    except Exception as error:  # without memory and without a GPU, so the files are the cause
        raise origin.explain(error) from None
    finally:
        transformers.logging.set_verbosity(verbosity)
    problems = [
        f"{name} has the size {list(there)} in the file, but {list(here)} by config.json"
        for name, there, here in sorted(found["mismatched_keys"])
    ] + [f"the file lacks {name}" for name in sorted(found["missing_keys"])]
    if problems:
        more = f", and {len(problems) - 1} more problems" if problems[1:] else ""
        raise origin.refuse(
            f"the weights of {origin.name!r} do not fit its config.json: {problems[0]}{more}; use the weights and "
            "config.json of one model"
        )
