"""Divide the documents and pack the rows of a run once per machine, in a folder of the cache that all ranks map.

The folder is next to that of the documents. It is named by a hash of everything that the rows depend on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gearbox import filesystem
from gearbox.config.recipe import Recipe
from gearbox.data import corpus
from gearbox.data.corpus import Builder, MappedCorpus
from gearbox.rows import batches, packing, splits, units
from gearbox.rows.batches import PackedRows, make_sampler
from gearbox.rows.splits import DataFacts, Dropped, TrainingRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRAINING, HELD_OUT, DROPPED, ABOUT = "training", "held_out", "dropped.jsonl", "about.json"


def split_and_pack(
    recipe: Recipe,
    documents: MappedCorpus,
    evaluated: MappedCorpus | None,
    tokenizer: PreTrainedTokenizerFast,
    is_packed: bool,
    builder: Builder,
) -> TrainingRows:
    """Return the rows of a run; `evaluated` is the corpus of eval.path. They come from the cache if they are in it.

    Raise UserError if nothing is left to train on or to evaluate on.
    """
    pad_token = splits.pad_token_of(tokenizer)
    folder = corpus.cache() / "gearbox" / f"rows-{_key(recipe, documents, evaluated, pad_token, is_packed)}"

    def build(made: Path) -> None:
        # The arrays of these copies are freed with them.
        theirs = MappedCorpus(evaluated.path.parent, evaluated.origins) if evaluated is not None else None
        ours = MappedCorpus(documents.path.parent, documents.origins)
        with builder.working("packing documents into rows"):
            _build(made, recipe, ours, theirs, (pad_token, is_packed))

    builder.make(folder, _is_whole, build)
    facts = filesystem.read_json_object(folder / ABOUT)["facts"]
    facts["document_lengths"], facts["weights"] = tuple(facts["document_lengths"]), tuple(map(tuple, facts["weights"]))
    options = (recipe.batch.row_tokens, pad_token, is_packed)
    training_units = units.as_units(recipe, documents)
    held_out_corpus = documents if evaluated is None else evaluated
    held_out_units = training_units if evaluated is None else units.as_units(recipe, evaluated)
    training = PackedRows.open(folder / TRAINING, training_units, *options)
    held_out = PackedRows.open(folder / HELD_OUT, held_out_units, *options)
    num_rows = splits.num_rows_of(recipe, len(training))
    return TrainingRows(
        training=training,
        held_out=held_out,
        num_rows=num_rows,
        sampler=make_sampler(recipe, training),
        samples=splits.find_samples(held_out, held_out_corpus.questions, recipe.eval.num_questions),
        facts=DataFacts(**facts),
        dropped_file=folder / DROPPED,
    )


def _key(
    recipe: Recipe, documents: MappedCorpus, evaluated: MappedCorpus | None, pad_token: int, is_packed: bool
) -> str:
    """Return a hash of everything that the rows and the facts about them depend on."""
    dependencies = [
        documents.key,
        evaluated.key if evaluated is not None else recipe.eval.fraction,
        [recipe.batch.row_tokens, recipe.data.long, pad_token, is_packed],
        [[source.path, source.weight] for source in recipe.data.sources],
        None if is_packed else recipe.batch.rows,  # the padding depends on it
        recipe.train.objective if recipe.compares else None,
        [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (packing, splits, batches, units)],
        Path(__file__).read_text(encoding="utf-8"),
    ]
    return hashlib.sha256(json.dumps(dependencies).encode()).hexdigest()[:32]


def _is_whole(folder: Path) -> bool:
    """Return True if the folder has all files that `_build` wrote, in their sizes."""
    try:
        sizes = filesystem.read_json_object(folder / ABOUT)["bytes"]
        return bool(sizes == _sizes(folder))
    except (OSError, ValueError, KeyError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file but about.json, by its path."""
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / ABOUT]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _build(
    folder: Path, recipe: Recipe, read: MappedCorpus, evaluated: MappedCorpus | None, options: tuple[int, bool]
) -> None:
    """Divide the documents into chunks, hold some out, pack the rest, and write all that to the folder."""
    row_tokens, copies = recipe.batch.row_tokens, None
    dropped_of_evaluation: list[Dropped] = []
    documents = held_out_corpus = units.as_units(recipe, read)
    if evaluated is not None:
        held_out_corpus = units.as_units(recipe, evaluated)
        held_out_chunks, copies, dropped_of_evaluation = splits.evaluation_chunks(recipe, held_out_corpus)
    divided = splits.divide(recipe, documents, copies)
    if evaluated is None:
        held_out_chunks = divided.held_out
    dropped = splits.summarize_dropped(divided.dropped)
    size = divided.training.unit_size
    num_read, num_held_out = len(documents) // size + read.num_bad, len(np.unique(divided.held_out.document)) // size
    present = {*np.unique(documents.source_ids[divided.training.document]).tolist()}
    splits.check_every_source(recipe, present, num_read, num_held_out, dropped)
    weights = [(source.path, source.weight) for source in recipe.data.sources if source.weight is not None]
    group = documents.source_ids[divided.training.document] if weights else None
    training = PackedRows(documents, divided.training, row_tokens, *options, group)
    held_out = PackedRows(held_out_corpus, held_out_chunks, row_tokens, *options)
    lengths = documents.lengths[np.unique(divided.training.document)]
    facts = DataFacts(
        num_read=num_read,
        num_truncated=divided.num_truncated,
        num_split=divided.num_split,
        num_duplicates=len(divided.hashes) - len(np.unique(divided.hashes)),
        dropped=dropped,
        dropped_of_evaluation=splits.summarize_dropped(dropped_of_evaluation) if dropped_of_evaluation else "",
        document_lengths=(*(int(np.percentile(lengths, p)) for p in (50, 90, 99)), int(lengths.max())),
        padding=_padding(training, recipe.batch.rows),
        weights=tuple(weights),
        has_own_evaluation=evaluated is not None,
    )
    for name, rows in ((TRAINING, training), (HELD_OUT, held_out)):
        (folder / name).mkdir()
        rows.save(folder / name)
    with filesystem.new_file(folder / DROPPED) as file:
        for entry in (*divided.dropped, *dropped_of_evaluation):
            file.write(f"{json.dumps([entry.location, entry.reason])}\n".encode())
    filesystem.write(folder / ABOUT, json.dumps({"facts": asdict(facts), "bytes": _sizes(folder)}))


def _padding(rows: PackedRows, rows_per_step: int) -> float | None:
    """Return the share of padding of rows of one document that are sorted by length. None for packed rows."""
    if rows.packing or rows.unit_size > 1:
        return None
    lengths = np.sort(rows.num_tokens)
    last_of_step = np.arange(len(lengths)) // rows_per_step * rows_per_step + rows_per_step - 1
    widths = lengths[np.minimum(last_of_step, len(lengths) - 1)]
    return 1 - float(lengths.sum()) / float(widths.sum())
