"""Compare the model's config.json with gear, row length and adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gearbox.checks.architecture import check_architecture
from gearbox.checks.family import TABLES, has_router_loss, module_names
from gearbox.checks.finding import Said
from gearbox.errors import UserError, nearest

if TYPE_CHECKING:
    from gearbox.checks.subject import Subject

# Scalings that multiply the positions that a model was trained with. Others already count them.
EXTENDING = ("linear", "dynamic", "yarn")
MOST_TIMES = 10_000


def readable(subject: Subject) -> Iterator[Said]:
    """Check that the model's small files can be read."""
    model = subject.model
    if subject.recipe.run.rehearse:
        return
    _ = model.config, model.tokenizer_config, model.token_ids  # reads them
    for text in model.damaged:
        yield subject.say(f"model.name: {text}; download or copy it again")


def architecture(subject: Subject) -> Iterator[Said]:
    """Check that the gear can divide the model."""
    config, job = subject.config, subject.job
    if job is None or config is None:
        return
    try:
        check_architecture(job.gear, config, job.recipe.model.router_loss if has_router_loss(config) else 0.0)
    except UserError as error:
        yield Said(str(error), key="parallelism_config")
    except (ArithmeticError, TypeError, ValueError):
        return  # a size in config.json is no number, which transformers reports


def positions(subject: Subject) -> Iterator[Said]:
    """Check that rows are not longer than what the model can read, or was trained with."""
    config, row_tokens = subject.config, subject.recipe.batch.row_tokens
    if config is None:
        return
    table = TABLES.get(config.model_type)
    limit = getattr(config, table, None) if table else None
    if text := too_long_for_table(config.model_type, row_tokens, limit, table):
        yield subject.say(text)
    elif text := longer_than_trained(config, row_tokens, limit):
        yield subject.say(text, "hint")


def too_long_for_table(family: str, row_tokens: int, limit: int | None, key: str | None) -> str | None:
    """Return why rows do not fit a table of `limit` positions, given by this key of config.json; None if they do."""
    if limit is None or row_tokens <= limit:
        return None
    named = f"{key} in its config.json" if key else "the size of its table"
    return (
        f"batch.row_tokens: rows of {row_tokens:,} tokens, but {family} has {limit:,} positions ({named}); use {limit} "
        "or less"
    )


def longer_than_trained(config: Any, row_tokens: int, limit: int | None) -> str | None:  # noqa: ANN401  two kinds of config
    """Return a hint if rows are longer than those that a model without a table was trained with."""
    trained = getattr(config, "max_position_embeddings", None)
    if limit is not None or not isinstance(trained, int) or trained <= 0:
        return None
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if isinstance(scaling, dict) and (scaling.get("rope_type") or scaling.get("type")) in EXTENDING:
        factor = scaling.get("factor", 1)
        original = scaling.get("original_max_position_embeddings") or trained
        if isinstance(factor, int | float) and isinstance(original, int) and 1 <= factor <= MOST_TIMES:
            trained = max(trained, int(original * factor))
    if row_tokens <= trained:
        return None
    return (
        f"batch.row_tokens: rows of {row_tokens:,} tokens are longer than the {trained:,} positions that "
        f"{config.model_type} was trained with (max_position_embeddings in its config.json)"
    )


def targets(subject: Subject) -> Iterator[Said]:
    """Check that each name in adapter.targets is that of a module. The run checks it again on the model itself."""
    adapter, config = subject.recipe.adapter, subject.config
    if config is None or adapter.method == "none" or adapter.path is not None or isinstance(adapter.targets, str):
        return
    names = module_names(config.model_type)
    if names is None:
        return
    last = {name: name.rpartition(".")[2] for name in adapter.targets}
    if unmatched := [name for name, end in last.items() if end not in names.words and not end.isdecimal()]:
        yield subject.say(no_such_module(unmatched, sorted(names.linear)))


def no_such_module(unmatched: list[str], known: list[str]) -> str:
    """Return the message for targets that match nothing."""
    named = " or ".join(f"{name!r}{nearest(name, known)}" for name in unmatched)
    return f"adapter.targets: no module of the model is named {named}"


def added_tokens(subject: Subject) -> Iterator[Said]:
    """Check that the added tokens are new."""
    recipe = subject.recipe
    if not recipe.run.rehearse and (
        known := [token for token in recipe.model.add_tokens if token in subject.model.token_ids]
    ):
        yield subject.say(known_token(known[0], recipe.model.name))


def known_token(token: str, model: str) -> str:
    """Return the message for an added token that the tokenizer already has."""
    return f"model.add_tokens: {token!r} is already a token of {model}; remove it"
