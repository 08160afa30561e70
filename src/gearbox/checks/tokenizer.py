"""Check chat template and special tokens, from the tokenizer's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gearbox.checks.finding import Said
from gearbox.data.records import NO_END, NO_TEMPLATE
from gearbox.errors import one_line
from gearbox.filesystem import read_limited

if TYPE_CHECKING:
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    from gearbox.checks.subject import Subject

NO_TOKENIZER = "{} has no tokenizer files, such as tokenizer.json; copy them from the same model"
VOCABULARY_NAMES = ("tokenizer.", "vocab", "merges", "spiece", "sentencepiece", "tekken", "bpe")
VOCABULARY_ENDINGS = (".model", ".tiktoken", ".bpe")
MAX_TEMPLATE_BYTES = 2**20
MAX_ROUNDS = 10_000  # of all loops over numbers: for two messages a template needs fewer
MAX_PIECES = 10_000  # of text that a template writes
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag of transformers
QUESTION, ANSWER = "\U00020000" * 4, "\U00020001" * 4  # characters that no template writes


def lacks_tokenizer(folder: Path) -> bool:
    """Return True for a folder without any file that has a tokenizer's vocabulary."""
    return not any(
        path.name.startswith(VOCABULARY_NAMES) or path.suffix in VOCABULARY_ENDINGS for path in folder.iterdir()
    )


class Template(NamedTuple):
    """A chat template and its place."""

    path: Path
    text: str
    key: str = ""
    """Its key in a JSON file."""


def template(subject: Subject) -> Iterator[Said]:
    """Check that chats have a template, that it can be parsed, and that it ends answers with a token."""
    if subject.recipe.run.rehearse and subject.recipe.data.chat_template is None:
        return
    has_chats = any(found.form not in (None, "text") for found in subject.first_records)
    found, folder = _template_of(subject), subject.model.folder
    if found is None:
        has_vocabulary = folder is not None and not lacks_tokenizer(folder)
        if has_chats and has_vocabulary and subject.recipe.data.chat_template is None:
            yield subject.say(NO_TEMPLATE)
        return
    from jinja2 import TemplateSyntaxError

    where = f"{found.path}: {found.key}: " if found.key else f"{found.path}: "
    try:
        environment = _environment()
        parsed = environment.from_string(GENERATION.sub("", found.text))
    except TemplateSyntaxError as error:
        where = where if found.key else f"{found.path}:{error.lineno}: "
        text = f"{where}the chat template cannot be parsed: {one_line(error)}; correct it, or set data.chat_template"
        yield Said(text, "problem" if has_chats else "hint")
        return
    end = _end_of_answer(parsed, subject) if has_chats else None
    if end == "":
        text = "neither the chat template nor the tokenizer ends an answer; set eos_token, or data.chat_template"
        yield Said(f"{where}{text}", "hint")
    elif end is not None:
        yield Said(
            f"{where}the chat template ends an answer with {end[:40]!r}, which is no token of the tokenizer; use "
            "model.add_tokens, or data.supervise=last",
            "hint",
        )


def _template_of(subject: Subject) -> Template | None:
    """Return the template of the recipe, or else of the model's folder."""
    folder, given = subject.model.folder, subject.recipe.data.chat_template
    paths = [Path(given)] if given is not None else [] if folder is None else [folder / "chat_template.jinja"]
    for path in paths:
        with suppress(OSError, UnicodeDecodeError):
            return Template(path, read_limited(path, MAX_TEMPLATE_BYTES).decode())
    if given is not None or folder is None:
        return None
    written = subject.model.tokenizer_config.get("chat_template")
    if isinstance(written, list):  # one for each use
        named = [one for one in written if isinstance(one, dict)]
        written = next((one.get("template") for one in named if one.get("name") == "default"), None)
    return Template(folder / "tokenizer_config.json", written, "chat_template") if isinstance(written, str) else None


def _environment() -> SandboxedEnvironment:
    """Return an environment that parses what transformers parses."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["strftime_now"] = lambda form: form
    environment.globals["raise_exception"] = _refuse
    environment.globals["range"] = _short_ranges()
    return environment


def _refuse(message: str) -> None:
    raise ValueError(message)


def _short_ranges() -> Callable[..., range]:
    """Return `range`, which raises ValueError once loops, also nested ones, have taken too many rounds."""
    left = MAX_ROUNDS

    def short(*numbers: int) -> range:
        nonlocal left
        found = range(*numbers)
        left -= len(found)
        if left < 0:
            raise ValueError("too many rounds")
        return found

    return short


def _end_of_answer(parsed: jinja2.Template, subject: Subject) -> str | None:
    """Return what the template writes after an answer, if neither that nor the tokenizer has a token to stop at."""
    tokens = {*subject.model.added, *subject.recipe.model.add_tokens}
    special = {name: subject.model.special(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    given = {name: token for name, token in special.items() if token is not None}
    try:
        pieces = parsed.generate(messages=messages, add_generation_prompt=False, **given)
        text = "".join(islice(pieces, MAX_PIECES))
    except Exception:  # a template is code that can raise anything; the run reports it for the user's own chats
        return None
    after = text.partition(ANSWER)[2]
    if not tokens or not text.count(ANSWER):
        return None
    if not after.strip():  # the run then adds the token at which generation stops
        stops = special["eos_token"] or subject.model.read("generation_config.json").get("eos_token_id")
        return "" if stops is None else None
    if any(token in after for token in tokens) or (special["eos_token"] or "\0") in after:
        return None
    return str(after.strip())


def tokens(subject: Subject) -> Iterator[Said]:
    """Check that the model has a row for each token, and that plain text has an end."""
    model = subject.model
    if subject.recipe.run.rehearse or model.folder is None:
        return
    if lacks_tokenizer(model.folder):
        if Path(subject.recipe.model.name).is_dir():  # else in the Hub's cache, to which the run adds files
            yield subject.say(f"model.name: {NO_TOKENIZER.format(model.folder)}")
        return
    ids, special = model.token_ids, {name: model.special(name) for name in ("eos_token", "pad_token", "bos_token")}
    if ids and special["eos_token"] is None and any(found.form == "text" for found in subject.first_records):
        yield subject.say(NO_END)
    path = model.folder / "tokenizer_config.json"
    for name, token in special.items():
        if ids and token is not None and token not in ids:
            text = f"{token!r} is no token of tokenizer.json, so it is added, without a trained embedding"
            yield Said(f"{path}: {name}: {text}; use one of its tokens", "hint")
    vocab_size = getattr(subject.config, "vocab_size", None)
    if ids and isinstance(vocab_size, int) and max(ids.values()) >= vocab_size:
        over = sum(number >= vocab_size for number in ids.values())
        text = f"is {vocab_size:,}, but tokenizer.json has ids up to {max(ids.values()):,}"
        without = f"{over:,} {'tokens have' if over > 1 else 'token has'} no embedding"
        yield Said(f"{model.config_path}: vocab_size: {text}: {without}; use the tokenizer of this model", "hint")
    yield from _wrong_ids(subject, vocab_size)


def _wrong_ids(subject: Subject, vocab_size: object) -> Iterator[Said]:
    """Check the ids in generation_config.json, at which an exported model stops."""
    model = subject.model
    assert model.folder is not None
    given = model.read("generation_config.json").get("eos_token_id")
    for number in given if isinstance(given, list) else [given]:
        if isinstance(number, int) and isinstance(vocab_size, int) and number >= vocab_size:
            text = f"{number} is no token: the model has {vocab_size:,}; give the id of its end of turn"
            yield Said(f"{model.folder / 'generation_config.json'}: eos_token_id: {text}", "hint")
