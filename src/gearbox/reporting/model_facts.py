"""Read what a new recipe depends on in a model: the sizes of its config, and the chat template of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from huggingface_hub import constants, get_session
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from gearbox import ROOT
from gearbox.checks.model import NO_LANGUAGE_MODEL
from gearbox.config.adapter_settings import SavedAdapter, read_adapter_config
from gearbox.config.loader import is_local
from gearbox.config.recipe import Data, Recipe
from gearbox.config.recipe_values import JUDGED
from gearbox.data import sources
from gearbox.data.loss_mask import ChatTokenizer
from gearbox.data.records import RecordReader
from gearbox.data.row_formats import Chat, InvalidRecord
from gearbox.distributed.pipeline_stages import meta_model
from gearbox.errors import UserError, one_line
from gearbox.model import probes
from gearbox.model.loading import ARCHITECTURES
from gearbox.model.pretrained import ADAPTER, Pretrained
from gearbox.planning.architecture import Config
from gearbox.planning.new_recipe import CHATML_MARKS, ModelFacts, Sizes, checked_name
from gearbox.rows.stream import is_prepared
from gearbox.sharding.unwrap import model_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HUB_SECONDS = 5
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")  # a run explains those it refuses
SAMPLE = Chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good day"}])


class Found(NamedTuple):
    """The content of a config.json, and what transformers makes of it."""

    raw: Config
    """Its content."""
    config: PretrainedConfig | None
    """None if only the model's own Python code can read it."""
    note: str = ""
    """The reason why the tokenizer was not read, if it was not."""


def read(model: str, data: Data, forms: tuple[str, ...]) -> ModelFacts:
    """Return the facts of a folder or Hub id. The data, in these formats, decide whether it needs a chat template.

    Raise UserError for a model that cannot be trained.
    """
    adapter, saved = None, None
    if (Path(model) / ADAPTER).is_file():
        adapter, saved = model, _saved_adapter(Path(model))
        model = checked_name(saved.base_model_name_or_path or "")
    is_offline = not Path(model).is_dir() and not _is_hub_reachable()
    switch = "model.trust_remote_code: true in the recipe"
    origin = Pretrained(model, key="MODEL", switch=switch, is_offline=is_offline)
    found = _read_config(origin)
    sizes = _estimated(found.raw, origin) if found.config is None else _counted(found.config, origin)
    facts = ModelFacts(
        name=model,
        config=found.raw,
        sizes=sizes,
        positions=_positions(found.config, found.raw),
        template="unread",
        adapter=adapter,
        adapter_method=None if saved is None else "dora" if saved.use_dora else "lora",
        adapter_rank=None if saved is None else saved.r,
        has_weights=origin.folder is None or any(path.suffix in WEIGHTS for path in origin.folder.iterdir()),
        note=found.note,
    )
    if found.config is None or found.note:
        return facts
    tokenizer, rows = origin.tokenizer(), found.config.get_text_config(decoder=True).vocab_size
    if len(tokenizer) > rows:
        note = f"The tokenizer has {len(tokenizer):,} tokens, but the model only {rows:,}: the rest cannot be trained."
        facts = replace(facts, note=note)
    if not tokenizer.chat_template and _are_texts(data, forms):
        return replace(facts, template="text", ends=tokenizer.eos_token or "")
    return _with_template(facts, tokenizer)


def _is_hub_reachable() -> bool:
    """Return True if the Hub answers one request. Without a network, reading from it would retry for minutes."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # the client's own types change between its versions
        return False
    return True


def _saved_adapter(folder: Path) -> SavedAdapter:
    """Return the settings of a saved adapter. Raise UserError unless they name its base model."""
    try:
        settings = read_adapter_config(folder)
    except ValueError as error:
        raise UserError(f"MODEL: {str(folder)!r} {error}") from None
    if not settings.base_model_name_or_path:
        raise UserError(
            f"MODEL: {folder / ADAPTER}: base_model_name_or_path: is empty; write the adapter's base model there"
        )
    return settings


def _read_config(origin: Pretrained) -> Found:
    """Return the content of config.json, and the config that transformers makes of it."""
    try:
        origin.check_files()
        raw, _ = PretrainedConfig.get_config_dict(origin.name, **origin.options)
    except Exception as error:
        explained = origin.explain(error)
        if "cannot be reached" not in str(explained):
            raise explained from None
        return _read_shipped(origin)
    for part in (raw, raw.get("text_config")):
        if isinstance(part, Mapping) and (settings := part.get("quantization_config")):
            how = settings.get("quant_method", "quantization_config") if isinstance(settings, Mapping) else settings
            raise UserError(
                f"MODEL: the weights of {origin.name!r} are quantized ({str(how)[:40]}), and cannot be trained; give "
                "the model with bf16 weights, and --method qlora to quantize them here"
            )
    try:
        config = origin.config()
    except UserError:
        if not raw.get("auto_map"):
            raise
        note = f"The model comes with {_code_of(raw)}. Read that, then add trust_remote_code: true to model."
        return Found(raw, None, f"{note} The chat template was not read, and the sizes are estimates.")
    if model_class(config) is None:
        raise UserError(f"MODEL: {NO_LANGUAGE_MODEL.format(origin.name, config.model_type)}")
    return Found(raw, config)


def _read_shipped(origin: Pretrained) -> Found:
    """Return the config in recipes/architectures/ of a Hub model that is not on this machine."""
    path = ARCHITECTURES / f"{origin.name.replace('/', '--')}.json"
    if not path.is_file():
        raise UserError(
            f"MODEL: {origin.name!r} is not here and the Hub cannot be reached; give a folder, save config.json as "
            f"{path.relative_to(ROOT)}, or export HF_TOKEN if gated"
        )
    shipped = Pretrained(str(path), key="MODEL")
    raw, _ = PretrainedConfig.get_config_dict(str(path))
    return Found(raw, shipped.config(), "The tokenizer is not on this machine, so its chat template was not read.")


def _code_of(raw: Config) -> str:
    """Return the names of the Python files that a config.json names."""
    named = raw["auto_map"].values() if isinstance(raw["auto_map"], Mapping) else ()
    files = sorted({str(one).rpartition("--")[2].partition(".")[0] for one in named})
    return ", ".join(f"{file}.py" for file in files[:3] if file.isidentifier()) or "Python code"


def _counted(config: PretrainedConfig, origin: Pretrained) -> Sizes:
    """Return the numbers of weights of the model without its towers, which is built without memory."""
    try:
        model = meta_model(config)
    except Exception as error:  # any code of a family, which may need a package, or a value that its config lacks
        raise UserError(f"MODEL: {origin.name!r} ({config.model_type}) cannot be built: {one_line(error)}") from None
    parameters = {id(p): p for p in model.parameters()}.values()
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    return Sizes(
        weights=sum(p.numel() for p in parameters),
        in_layers=sum(m.weight.numel() for m in linear),
        in_experts=sum(p.numel() for p in parameters if p.dim() > 2),
        features=sum(sum(m.weight.shape) for m in linear),
    )


def _estimated(raw: Config, origin: Pretrained) -> Sizes:
    """Return upper bounds for a model that is known only by its Python code."""
    numbers = [raw.get(key) for key in ("hidden_size", "num_hidden_layers", "vocab_size")]
    width, layers, vocabulary = (number if type(number) is int else 0 for number in numbers)
    if min(width, layers, vocabulary) <= 0:
        raise UserError(
            f"MODEL: {origin.name!r} comes with Python code, and its config.json lacks hidden_size, num_hidden_layers "
            "or vocab_size; copy a recipe of recipes/, and set model.name"
        )
    given = raw.get("intermediate_size")
    inner = given if type(given) is int else 4 * width
    in_layers = layers * (4 * width * width + 3 * width * inner)
    return Sizes(in_layers + 2 * vocabulary * width, in_layers, 0, layers * (8 * width + 3 * (width + inner)))


def _positions(config: PretrainedConfig | None, raw: Config) -> int | None:
    """Return the longest row that the model was trained for, or None."""
    if config is None:
        number = raw.get("max_position_embeddings")
    else:
        text = config.get_text_config(decoder=True)
        number = probes.num_positions(config) or getattr(text, "max_position_embeddings", None)
    return number if type(number) is int and number > 0 else None


def objective_for(data: Data, like: Recipe) -> str:
    """Return the objective of a recipe, or one that can train on the data: `dpo` for pairs, `kto` for labels."""
    usual = like.train.objective
    if not all(is_local(source.path) and not is_prepared(source.path) for source in data.sources):
        return usual
    for objective, forms in ((usual, like.forms), ("dpo", JUDGED["dpo"]), ("kto", JUDGED["kto"])):
        with suppress(UserError, StopIteration):
            for origin in sources.find(data.sources):
                next(RecordReader([origin], data, forms).items())
            return objective
    return usual


def _are_texts(data: Data, forms: tuple[str, ...]) -> bool:
    """Return True if the first record of every file is plain text. Data that are elsewhere are taken for chats."""
    if not all(is_local(source.path) and not is_prepared(source.path) for source in data.sources):
        return False
    items = [next(RecordReader([origin], data, forms).items()) for origin in sources.find(data.sources)]
    return {item.names.form for item in items} == {"text"}


def _with_template(facts: ModelFacts, tokenizer: PreTrainedTokenizerFast) -> ModelFacts:
    """Return the facts with the chat template to use, and the token that ends a turn."""
    if not tokenizer.chat_template:
        known = tokenizer.get_vocab()
        added = tuple(mark for mark in CHATML_MARKS if mark not in known)
        return replace(facts, template="chatml", ends=CHATML_MARKS[1], added=added)
    (encoded,) = ChatTokenizer(tokenizer, "assistant").encode([SAMPLE])
    if isinstance(encoded, InvalidRecord):
        return replace(facts, template="own", note=f"It rejects a chat of two turns: {encoded}.")
    last = int(encoded.tokens[encoded.loss_mask.nonzero()[0][-1]])
    return replace(facts, template="own", ends=str(tokenizer.convert_ids_to_tokens(last)))
