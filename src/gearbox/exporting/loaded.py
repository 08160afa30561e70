"""Load what a source contains on the CPU: its model with the trained weights, its tokenizer and where it stops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from gearbox import filesystem
from gearbox.checkpoint.manifest import CorruptCheckpoint
from gearbox.checkpoint.shards import ShardReader
from gearbox.config.adapter_settings import WEIGHTS, read_adapter_config
from gearbox.config.recipe import Model
from gearbox.data.loss_mask import ChatTokenizer
from gearbox.data.row_formats import Chat, InvalidRecord
from gearbox.errors import UserError
from gearbox.exporting.source import ADAPTER, Source
from gearbox.model import adapters, export, loading
from gearbox.model.pretrained import Pretrained
from gearbox.sharding.sharded_state import persistent_buffers
from gearbox.sharding.unwrap import without_adapter

if TYPE_CHECKING:
    from peft import PeftModel

META = {"device_map": "meta"}


@dataclass
class Loaded:
    """A model on the CPU, and what is saved with it."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerFast
    origin: Pretrained
    """The model that was trained, or the saved model itself."""
    config: PretrainedConfig
    """Its config, as its files have it."""
    dtype: torch.dtype
    """The data type of the files to write."""


def load(source: Source, dtype: torch.dtype | None, trust_remote_code: bool) -> Loaded:
    """Return the model of a source. `dtype` is the one that was asked for; None keeps that of the base.

    Raise UserError if the base is missing, or if an adapter was trained on other weights.
    """
    model = _model_of(source, trust_remote_code)
    origin = _origin(source, model)
    config = origin.config()
    loading.check_weights(origin, config)
    stored = export.stored_dtype(config, origin)
    wanted = dtype or stored
    tokenizer = _tokenizer(source, model, origin)
    quantize = source.is_quantized
    options = {
        "dtype": torch.float32 if quantize else stored if source.is_adapter else wanted,
        "attn_implementation": loading.attention_of(config),
        **({"quantization_config": loading.nf4(torch.float32)} if quantize else {}),
    }
    given = model.model_copy(update={"quantize": "nf4" if quantize else None, "revision": origin.revision})
    base = loading.load_weights(config, given, origin.name, options, None)
    base.own_dropout = {}
    loading.keep_storage(base)  # also of a base whose files are quantized
    if source.manifest is not None:
        loaded = _restored(source, base, tokenizer, wanted)
        export.stop_at(loaded, _answer_ends(tokenizer, source))
    elif source.is_adapter:
        settings = read_adapter_config(source.folder)
        try:
            loaded = loading.with_saved_adapter(base, source.folder, adapters.peft_config(settings), len(tokenizer))
        except Exception as error:  # hostile files, and adapters of another base, raise many types of exception
            raise _saved(source, origin, f"SOURCE with the base {origin.name!r}").explain(error) from None
    else:
        loaded = base
    return Loaded(loaded.eval(), tokenizer, origin, config, wanted)


def skeleton(loaded: Loaded) -> PreTrainedModel:
    """Return the loaded model without weights and without an adapter: it knows how its files are written."""
    origin = loaded.origin
    named = Model(name=origin.name, revision=origin.revision, trust_remote_code=origin.trust_remote_code)
    empty = loading.load_weights(loaded.config, named, origin.name, dict(META), None)
    rows = len(without_adapter(loaded.model).get_input_embeddings().weight)  # an adapted layer has no num_embeddings
    if rows != empty.get_input_embeddings().num_embeddings:
        empty.resize_token_embeddings(rows, mean_resizing=False)
    empty.own_dropout = {}
    empty.generation_config = without_adapter(loaded.model).generation_config
    return empty


def _model_of(source: Source, trust_remote_code: bool) -> Model:
    """Return the model group of the recipe. Code of a model runs only if this command allows it too."""
    if source.recipe is None:
        name = source.base or str(source.folder)
        return Model(name=name, revision=source.revision, trust_remote_code=trust_remote_code)
    asked = source.recipe.model.trust_remote_code
    return source.recipe.model.model_copy(
        update={"revision": source.revision, "trust_remote_code": asked and trust_remote_code}
    )


def _origin(source: Source, model: Model) -> Pretrained:
    """Return the model to load: the base, or the saved model itself. Raise UserError if it is missing or changed."""
    switch = "--trust_remote_code"
    if source.manifest is None and not source.is_adapter:
        return Pretrained(str(source.folder), None, model.trust_remote_code, "SOURCE", switch)
    if not source.base:
        raise UserError(f"{source.folder / ADAPTER}: base_model_name_or_path: is empty; add --base FOLDER_OR_ID")
    origin = Pretrained(source.base, source.revision, model.trust_remote_code, "base", switch)
    is_path = Path(source.base).exists() or source.base.startswith((".", "/", "~")) or source.base.count("/") != 1
    if is_path and origin.folder is None:
        raise UserError(
            f"base: {source.base!r}, on which {source.folder} was trained, is not a folder here; go to the folder "
            "where the run was started, or add --base FOLDER_OR_ID"
        )
    recipe, manifest = source.recipe, source.manifest
    if recipe is None or manifest is None or manifest.base is None:
        return origin
    path = recipe.adapter.path
    if path is not None and not (Path(path) / WEIGHTS).is_file():
        raise UserError(f"adapter.path: {path!r}, with which {source.folder} began, is missing; restore it")
    if loading.fingerprint(source.base, recipe.model_copy(update={"model": model})) != manifest.base:
        raise UserError(
            f"base: {source.base!r} has changed since {source.folder} was trained on it; restore its files, or add "
            "--base FOLDER_OR_ID"
        )
    return origin


def _tokenizer(source: Source, model: Model, origin: Pretrained) -> PreTrainedTokenizerFast:
    """Return the tokenizer with the chat template and the added tokens of the training."""
    if source.manifest is None:
        return _saved(source, origin, origin.key).tokenizer()
    assert source.recipe is not None
    template = source.recipe.data.chat_template
    if template is not None and not Path(template).is_file():
        raise UserError(
            f"data.chat_template: {template!r} is not here; go to the folder where the run was started, or restore it"
        )
    model = model.model_copy(update={"name": origin.name})
    tokens = [token for token in model.add_tokens if token not in origin.tokenizer().get_vocab()]
    return loading.load_tokenizer(model.model_copy(update={"add_tokens": tokens}), template, rehearse=False)


def _saved(source: Source, origin: Pretrained, key: str) -> Pretrained:
    """Return the files of the source itself, which messages name by `key`."""
    return replace(origin, name=str(source.folder), revision=None, is_adapter=source.is_adapter, key=key)


def _restored(
    source: Source, base: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype
) -> PreTrainedModel | PeftModel:
    """Return the base with the weights of a checkpoint, of which one tensor at a time is read."""
    recipe, manifest = source.recipe, source.manifest
    assert recipe is not None and manifest is not None
    adapters.add_tokens(base, tokenizer, recipe.model.add_tokens)
    model: PreTrainedModel | PeftModel = base
    if source.is_adapter:
        model = adapters.attach_adapter(base, recipe)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = export.file_dtypes(base, torch.float32 if source.is_adapter else dtype)
    try:
        reader = ShardReader(source.folder, manifest)
        if missing := sorted(trained.keys() - reader.shapes.keys()):
            raise CorruptCheckpoint(f"it has no {missing[0]}")
        tied = {*(getattr(without_adapter(model), "_tied_weights_keys", None) or ())}
        if unknown := sorted(reader.shapes.keys() - trained.keys() - tied):
            raise CorruptCheckpoint(f"the model has no {unknown[0]}")
        for name, parameter in trained.items():
            if [*parameter.shape] != reader.shapes[name]:
                raise CorruptCheckpoint(f"{name} is {reader.shapes[name]}, but {[*parameter.shape]} in the model")
            parameter.data = reader.read("parameter", name).view(parameter.shape).to(kept(name))
        for name, buffer in persistent_buffers(model):
            if "buffer" in reader.kinds(name):
                buffer.copy_(reader.read("buffer", name).view(buffer.shape))
    except CorruptCheckpoint as error:
        raise UserError(f"{source.folder}: {error}; export another checkpoint, or give its base by --base") from None
    if not source.is_adapter:
        model.tie_weights()
    return model


def _answer_ends(tokenizer: PreTrainedTokenizerFast, source: Source) -> set[int]:
    """Return the tokens after which generation stops: those that end an answer in the trained template."""
    assert source.recipe is not None
    data, known = source.recipe.data, {*tokenizer.added_tokens_decoder}
    if source.run is not None and (source.run / "model" / "generation_config.json").is_file():
        found = filesystem.read_json_object(source.run / "model" / "generation_config.json").get("eos_token_id")
        return {one for one in (found if isinstance(found, list) else [found]) if isinstance(one, int)} & known
    if not tokenizer.chat_template or data.form == "text":
        return {tokenizer.eos_token_id} & known
    chat = Chat([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello to you."}])
    (encoded,) = ChatTokenizer(tokenizer, data.supervise, data.supervise_supplied).encode([chat])
    if isinstance(encoded, InvalidRecord):
        return set()
    mask = [*encoded.loss_mask.tolist(), 0]
    return {int(token) for i, token in enumerate(encoded.tokens) if mask[i] > mask[i + 1]} & known
