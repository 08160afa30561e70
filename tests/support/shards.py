"""Prepare shards from files, and serve them as a web server would, with faults."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.config.recipe import Recipe
from gearbox.data.corpus import Builder
from gearbox.model import loading
from gearbox.rows import stream
from gearbox.rows.prepare import Preparation
from gearbox.rows.shard_index import ShardIndex
from gearbox.rows.splits import TrainingRows

NUM_RECORDS = 20  # per shard


def recipe_of(path, *overrides: str) -> Recipe:
    given = [f"data.path={path}", "batch.row_tokens=128", "batch.rows=6", "eval.fraction=0.1", *overrides]
    return load_recipe(ROOT / "recipes/tiny.yaml", given)


def preparation(recipe: Recipe, folder: Path, num_records: int = NUM_RECORDS, tell=lambda _: None) -> Preparation:
    tokenizer = loading.load_tokenizer(recipe.model, recipe.data.chat_template, False)
    return Preparation(recipe, tokenizer, folder, num_records, tell)


def prepare(recipe: Recipe, folder: Path, num_records: int = NUM_RECORDS, num_parts: int = 1) -> ShardIndex:
    """Make each part in turn, the last one first, and return the index."""
    index = None
    for part in reversed(range(num_parts)):
        made = preparation(recipe, folder, num_records)
        index = made.write_index(made.make_shards(part, num_parts))
    assert index is not None
    return index


def opened(location, *overrides: str, is_builder: bool = True, tell=lambda _: None) -> TrainingRows:
    """Return the rows of a run on prepared shards."""
    recipe = recipe_of(location, *overrides)
    tokenizer = loading.load_tokenizer(recipe.model, recipe.data.chat_template, False)
    return stream.load_data(recipe, tokenizer, Builder(is_builder, tell))[2]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def served(folder: Path, fails: Callable[[str], int] = lambda path: 0) -> Iterator[str]:
    """Serve a folder and yield its URL. `fails` returns the status code of a request, 0 for a usual answer."""

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self):
            if code := fails(self.path):
                self.send_error(code)
            else:
                super().do_GET()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
