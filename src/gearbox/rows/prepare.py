"""Write the rows of a recipe as shards, of which several machines each make a part (`shard_index` has the layout).

Shard k has the k-th block of records, so its bytes do not depend on who makes it. Each process reads all records, and
tokenizes those of its own shards.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gearbox import filesystem
from gearbox.config.recipe import MAX_QUESTIONS, Recipe
from gearbox.console import Work
from gearbox.data import corpus, loss_mask, tokenization
from gearbox.data.corpus import Builder, MappedDocuments
from gearbox.data.records import NO_FORM, NO_NAMES, Item, OriginSummary, RecordReader
from gearbox.data.sources import Origin
from gearbox.data.tokenization import ABOUT, DOCUMENTS, Collector, UnusableRecord
from gearbox.errors import UserError
from gearbox.rows import shard_index, splits
from gearbox.rows.batches import PackedRows
from gearbox.rows.shard_index import (
    DROPPED,
    HELD_OUT,
    INDEX,
    SHARDS,
    Lengths,
    OriginFacts,
    Question,
    Settings,
    Shard,
    ShardIndex,
    Uses,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MADE, HELD_OUT_DOCUMENTS, HASHES = "made", "held_out.arrow", "hashes.npy"
INDEX_SECONDS = 3600.0  # for another process to write the index
HASHES_AT_ONCE = 2**24  # compared in memory, to count duplicates

FACTS = ("source", "documents", "rows", "chunks", "tokens", "targets", "files")  # of a shard in the index

About = dict[str, Any]


class DocumentsOfShard(MappedDocuments):
    """A `Corpus` of the documents of one shard, with the origins of all."""

    def __init__(self, path: Path, origins: list[Origin], forms: dict[int, str], bad: list[UnusableRecord]) -> None:
        super().__init__(path, origins)
        self.summaries = [OriginSummary(origin.source, forms.get(i, ""), 0, []) for i, origin in enumerate(origins)]
        self.bad = bad


class Preparation:
    """The preparation of a recipe's rows in a folder that all machines share."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        folder: Path,
        num_records: int,
        tell: Callable[[str], None],
    ) -> None:
        """Find the sources. Raise UserError if the folder has shards of another recipe or of other sources."""
        self.recipe, self.tokenizer, self.folder = recipe, tokenizer, folder
        self.num_records, self.tell = num_records, tell
        self.chat_tokenizer = loss_mask.ChatTokenizer(tokenizer, recipe.data.supervise, recipe.data.supervise_supplied)
        self.is_weighted = recipe.data.sources[0].weight is not None
        self.evaluated = corpus.load_evaluated(recipe, tokenizer, Builder(tell=tell))
        self.origins, self.stamps, content = corpus.find_origins(recipe.data)
        content += [source.weight for source in recipe.data.sources]
        content += [self.evaluated.digest] if self.evaluated is not None else []
        self.settings = shard_index.settings_of(recipe, tokenizer)
        self.made_with = shard_index.made_with(num_records, content)
        self.evaluation = None if self.evaluated is None else splits.evaluation_chunks(recipe, self.evaluated)
        filesystem.make_folder(folder / SHARDS)
        for path in sorted((folder / SHARDS).glob("*/made")):
            self._read(path.parent)

    def make_shards(self, part: int, num_parts: int) -> int:
        """Make the shards of a part that do not exist yet. Return the number of shards of all parts."""
        if (index := self._finished()) is not None:
            return len(index.shards)
        reader, number = RecordReader(self.origins, self.recipe.data, self.recipe.forms), -1
        for number, items in groupby(self._in_blocks(reader.items()), key=itemgetter(0)):
            folder = self.folder / SHARDS / f"{number:05}"
            if number % num_parts == part and not folder.exists():
                self._make(folder, (item for _, item in items))
        return number + 1

    def _in_blocks(self, items: Iterable[Item]) -> Iterator[tuple[int, Item]]:
        """Yield each record with the number of its shard. A shard has records of one source if sources have weights."""
        number, in_block, source = -1, self.num_records, 0
        for item in items:
            of_item = self.origins[item.origin].source if self.is_weighted else 0
            if in_block == self.num_records or of_item != source:
                number, in_block, source = number + 1, 0, of_item
            in_block += 1
            yield number, item

    def _make(self, folder: Path, items: Iterator[Item]) -> None:
        """Write a shard, which appears only when complete, unless another process is writing it."""
        lock_path = folder.with_name(f"{folder.name}.lock")
        lock = filesystem.Lock(lock_path, 0)
        if lock.is_taken:
            self.tell(f"{folder}: another process is making it")
            return
        try:
            if not folder.exists():
                for left in folder.parent.glob(f"{folder.name}.tmp-*"):  # by a process that was killed
                    filesystem.remove(left)
                with filesystem.atomic_folder(folder) as made:
                    about = self._fill(made, items)
                self.tell(f"{folder}: {about['documents']:,} documents in {about['rows']:,} rows")
            lock_path.unlink(missing_ok=True)
        finally:
            lock.release()

    def _fill(self, made: Path, items: Iterator[Item]) -> About:
        """Tokenize and pack the records, and write the files of their shard. Return the content of about.json."""
        recipe, tokenizer = self.recipe, self.tokenizer
        forms: dict[int, str] = {}
        num_records: Counter[int] = Counter()

        def noted() -> Iterator[Item]:
            for item in items:
                forms[item.origin] = NO_FORM if item.names is NO_NAMES else item.names.form
                num_records[item.origin] += 1
                yield item

        collected = Collector(self.origins, stop_on_bad=recipe.data.on_bad_row == "stop")
        work = Work("tokenizing", "documents", self.tell)
        tokenization.write_documents(made / DOCUMENTS, noted(), self.chat_tokenizer, collected, work)
        tokenization.check_stamps([self.origins[i] for i in num_records], [self.stamps[i] for i in num_records])
        documents = DocumentsOfShard(made / DOCUMENTS, self.origins, forms, collected.bad)
        divided = splits.divide(recipe, documents, self.evaluation[1] if self.evaluation else None)
        pad_token = splits.pad_token_of(tokenizer)
        rows = PackedRows(documents, divided.training, recipe.batch.row_tokens, pad_token, recipe.data.packing)
        rows.save(made)
        facts = self._facts(rows, made)
        trained, held_out = (np.unique(chunks.document) for chunks in (divided.training, divided.held_out))
        more = made / MADE
        more.mkdir()
        _write_documents(more / HELD_OUT_DOCUMENTS, [(made / DOCUMENTS, held_out)])
        np.save(more / HASHES, np.sort(divided.hashes))
        splits.write_dropped(more / DROPPED, divided.dropped)
        place_in_held_out = {document: place for place, document in enumerate(held_out.tolist())}
        lengths, counts = np.unique(documents.lengths[trained], return_counts=True)
        first = next(iter(num_records))
        about = {
            "settings": self.settings,
            "made_with": self.made_with,
            "origins": {i: [forms[i], count, sorted(collected.unused[i])] for i, count in num_records.items()},
            "source": self.origins[first].source if self.is_weighted else 0,
            "read": len(documents) + len(documents.bad),
            "held_out": len(held_out),
            "reasons": splits.count_reasons(divided.dropped),
            "truncated": divided.num_truncated,
            "split": divided.num_split,
            "lengths": [lengths.tolist(), counts.tolist()],
            "questions": [
                [one.hash, place_in_held_out.get(one.document), one.question, one.answer]
                for one in collected.candidates
            ],
            "answer_ends": sorted(splits.answer_ends(documents, tokenizer)),
            **facts,
        }
        filesystem.write(more / ABOUT, json.dumps(about, sort_keys=True))
        return about

    def _facts(self, rows: PackedRows, folder: Path) -> About:
        """Return the counts of saved rows, and the size and digest of each file."""
        return {
            "documents": rows.num_documents,
            "rows": len(rows),
            "chunks": len(rows.chunks),
            "tokens": int(rows.num_tokens.sum()),
            "targets": int(rows.targets.sum()),
            "files": {
                path.name: {"bytes": path.stat().st_size, "xxh3_128": filesystem.digest_of(path)}
                for path in sorted(folder.iterdir())
            },
        }

    def _read(self, folder: Path) -> About:
        """Return what is known about a shard. Raise UserError if it is damaged or of another recipe."""
        try:
            about = filesystem.read_json_object(folder / MADE / ABOUT)
            sizes = {name: facts["bytes"] for name, facts in about["files"].items()}
            if {name: (folder / name).stat().st_size for name in sizes} != sizes:
                raise ValueError(f"{folder} has a file of another size")
            settings, made_with = about["settings"], about["made_with"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{folder}: is damaged ({error}); delete it, and run this command again") from None
        self._refuse_difference(folder, settings | made_with)
        return about

    def _refuse_difference(self, folder: Path, prepared: Settings) -> None:
        shard_index.refuse_difference(str(folder), prepared, self.settings | self.made_with)

    def write_index(self, num_shards: int) -> ShardIndex | None:
        """Write the index if all shards exist, and return it. Else say which are missing, and return None."""
        folders = [self.folder / SHARDS / f"{number:05}" for number in range(num_shards)]
        if missing := [folder.name for folder in folders if not folder.is_dir()]:
            self.tell(f"{len(missing):,} of {num_shards:,} shards are missing ({', '.join(missing[:8])})")
            return None
        lock_path = self.folder / f"{INDEX}.lock"
        lock = filesystem.Lock(lock_path, INDEX_SECONDS)
        try:
            if (index := self._finished()) is None:
                index = self._combine(folders, [self._read(folder) for folder in folders])
                index.write(self.folder / INDEX)
            shards = self.folder / SHARDS
            for left in [lock_path, *shards.glob("*.lock"), *shards.glob("*.tmp-*")]:  # by processes that were killed
                filesystem.remove(left)
            return index
        finally:
            lock.release()

    def _finished(self) -> ShardIndex | None:
        """Return the index if it has been written and no shard has been deleted since."""
        path = self.folder / INDEX
        if not shard_index.is_index(path):
            return None
        index = ShardIndex.parse(path.read_bytes(), str(path))
        self._refuse_difference(self.folder, index.settings | index.made_with)
        return index if all((self.folder / shard.name).is_dir() for shard in index.shards) else None

    def _combine(self, folders: list[Path], abouts: list[About]) -> ShardIndex:
        """Return the index of all shards. Write the held-out rows and the dropped records of all."""
        recipe = self.recipe
        origins = [
            OriginFacts(
                name=origin.name, kind=origin.kind, source=origin.source, form=NO_FORM, num_records=0, unused=[]
            )
            for origin in self.origins
        ]
        reasons: Counter[str] = Counter()
        for about in abouts:
            reasons += Counter(about["reasons"])
            for number, (form, num_records, unused) in about["origins"].items():
                known = origins[int(number)]
                changes = {"num_records": known.num_records + num_records, "unused": sorted({*known.unused, *unused})}
                changes |= {"form": form} if form != NO_FORM else {}
                origins[int(number)] = known.model_copy(update=changes)

        def total(name: str) -> int:
            return sum(about[name] for about in abouts)

        uses = Uses(
            read=total("read"),
            trained=total("documents"),
            held_out=total("held_out"),
            dropped=reasons.total(),
            truncated=total("truncated"),
            split=total("split"),
            duplicates=_num_duplicates([folder / MADE / HASHES for folder in folders]),
        )
        dropped = splits.summarize_reasons(reasons)
        present = {about["source"] for about in abouts if about["rows"]}
        splits.check_every_source(recipe, present, uses.read, uses.held_out, dropped)
        aside = filesystem.aside_of(self.folder / DROPPED)
        with filesystem.new_file(aside) as file:
            for folder in folders:
                file.write((folder / MADE / DROPPED).read_bytes())
        filesystem.rename(aside, self.folder / DROPPED)
        forms = {number: origin.form for number, origin in enumerate(origins)}
        weights = [source.weight for source in recipe.data.sources if source.weight is not None]
        held_out, questions, dropped_of_evaluation = self._write_held_out(folders, abouts, forms)
        return ShardIndex(
            format=shard_index.FORMAT,
            settings=self.settings,
            made_with=self.made_with,
            weights=weights or None,
            paths=[source.path for source in recipe.data.sources],
            origins=origins,
            shards=[
                Shard(name=f"{SHARDS}/{folder.name}", **{name: about[name] for name in FACTS})
                for folder, about in zip(folders, abouts, strict=True)
            ],
            held_out=held_out,
            uses=uses,
            lengths=Lengths.of([about["lengths"] for about in abouts]),
            dropped=dropped,
            dropped_of_evaluation=dropped_of_evaluation,
            questions=questions,
            answer_ends=sorted({token for about in abouts for token in about["answer_ends"]}),
        )

    def _write_held_out(
        self, folders: list[Path], abouts: list[About], forms: dict[int, str]
    ) -> tuple[Shard | None, list[Question], str]:
        """Write the documents to evaluate on, and their rows. Return them with their questions.

        The text describes the documents of eval.path that are not used.
        """
        recipe, dropped = self.recipe, ""
        parts: list[tuple[Path, NDArray[np.int64] | None]]
        if self.evaluated is None or self.evaluation is None:
            parts = [(folder / MADE / HELD_OUT_DOCUMENTS, None) for folder in folders]
            questions, origins = _questions(abouts), self.origins
            if not any(about["held_out"] for about in abouts):
                return None, [], ""
        else:
            chunks, _, unused = self.evaluation
            chosen = np.unique(chunks.document)
            place = {document: number for number, document in enumerate(chosen.tolist())}
            asked = [one for one in self.evaluated.questions if one.document in place]
            questions = [Question(document=place[q.document], question=q.question, answer=q.answer) for q in asked]
            parts, origins = [(self.evaluated.path, chosen)], self.evaluated.origins
            forms = {number: summary.form for number, summary in enumerate(self.evaluated.summaries)}
            dropped = splits.summarize_dropped(unused) if unused else ""
        filesystem.remove(self.folder / HELD_OUT)  # by a process that was killed
        with filesystem.atomic_folder(self.folder / HELD_OUT) as made:
            _write_documents(made / DOCUMENTS, parts)
            documents = DocumentsOfShard(made / DOCUMENTS, origins, forms, [])
            chunks = splits.evaluation_chunks(recipe, documents)[0]
            pad_token = splits.pad_token_of(self.tokenizer)
            rows = PackedRows(documents, chunks, recipe.batch.row_tokens, pad_token, recipe.data.packing)
            rows.save(made)
            held_out = Shard(name=HELD_OUT, **self._facts(rows, made))
        return held_out, questions, dropped


def _write_documents(path: Path, parts: Sequence[tuple[Path, NDArray[np.int64] | None]]) -> None:
    """Write the chosen documents of each file to one file. None chooses all."""
    import pyarrow

    with filesystem.new_file(path) as file:
        writer = None
        for source, chosen in parts:
            with pyarrow.memory_map(str(source)) as opened, pyarrow.ipc.open_stream(opened) as stream:
                if writer is None:
                    writer = pyarrow.ipc.new_stream(file, stream.schema)
                first = 0
                for batch in stream:
                    numbers = np.arange(first, first + len(batch))
                    first += len(batch)
                    kept = batch if chosen is None else batch.filter(pyarrow.array(np.isin(numbers, chosen)))
                    if len(kept):
                        writer.write_batch(kept)
        if writer is not None:
            writer.close()


def _questions(abouts: list[About]) -> list[Question]:
    """Return the questions of all shards that belong to held-out documents, those with the lowest hashes first."""
    by_hash: dict[int, tuple[int | None, str, str]] = {}
    first = 0  # held-out document of the shard
    for about in abouts:
        for digest, document, question, answer in about["questions"]:
            by_hash.setdefault(digest, (None if document is None else first + document, question, answer))
        first += about["held_out"]
    lowest = [by_hash[digest] for digest in sorted(by_hash)[:MAX_QUESTIONS]]
    return [Question(document=i, question=question, answer=answer) for i, question, answer in lowest if i is not None]


def _num_duplicates(paths: list[Path]) -> int:
    """Return how many documents have the hash of an earlier one. The hashes in each file are sorted."""
    files = [np.load(path, mmap_mode="r") for path in paths]
    num_hashes = sum(map(len, files))
    num_parts = -(-num_hashes // HASHES_AT_ONCE)
    edges = [np.uint64(part * 2**64 // num_parts) for part in range(1, num_parts)]
    cuts = [[0, *np.searchsorted(file, edges).tolist(), len(file)] for file in files]
    num_different = 0
    for part in range(num_parts):
        hashes = [file[cut[part] : cut[part + 1]] for file, cut in zip(files, cuts, strict=True)]
        num_different += len(np.unique(np.concatenate(hashes)))
    return num_hashes - num_different
