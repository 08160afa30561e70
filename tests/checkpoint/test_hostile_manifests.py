"""Test that a manifest made by hand, with a digest that matches, is refused in one line or read, and never crashes."""

import copy
import json
import math
import os
import socket
import time
from pathlib import Path

import pytest

from gearbox import ROOT
from gearbox.checkpoint import folders, manifest
from gearbox.checkpoint.manifest import CorruptCheckpoint, read_manifest, verify_sizes
from gearbox.checkpoint.shards import ShardReader
from gearbox.checkpoint.train_state import TrainState
from gearbox.config.loader import load_recipe
from gearbox.training import resume
from support.checkpoints import make

RECIPE = load_recipe(ROOT / "recipes" / "tiny.yaml")
SECONDS = 3  # of CPU time; the largest manifests take less than one
DEEP: list = []
for _ in range(500):
    DEEP = [DEEP]
ODD = [
    None, True, [], {}, "", "x" * 10**6, "[/]", "\x1b[2J\n", "../../x", -1, 0, 1.5, 1e308, 10**30, 2**53 + 1, 10**5000,
    math.nan, math.inf, "\ud800", DEEP, [None], {"": None}, {"a": {"b": []}}, {"[/red]\n": -1},
]  # fmt: skip
PLACES = [
    (), ("step",), ("progress",), ("progress", "step"), ("progress", "recent_losses"), ("progress", "recent_losses", 0),
    ("progress", "evaluated"), ("progress", "eval_loss"), ("progress", "best_step"), ("progress", "best_score"),
    ("progress", "best_by"), ("progress", "best_on"), ("progress", "num_not_better"), ("progress", "rows_hash"),
    ("progress", "seconds"),
    ("parameters",), ("parameters", "w"), ("parameters", "w", 0), ("scalars",),
    ("scalars", "w"), ("scalars", "w", "step"), ("scalars", "w", "step", "float32"), ("recipe",), ("recipe", "model"),
    ("recipe", "train"), ("recipe", "train", "epochs"), ("recipe", "schedule"), ("recipe", "data", "path"), ("rows",),
    ("base",), ("versions",), ("versions", "torch"), ("gear",), ("gear", "name"), ("gear", "num_processes"), ("files",),
    ("files", "shard-00000.safetensors"), ("files", "shard-00000.safetensors", "bytes"),
    ("files", "shard-00000.safetensors", "xxh3_128"), ("eval_loss",), ("format",),
]  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Return a checkpoint whose manifest has all that a run writes."""
    folder = make(tmp_path / "checkpoints")
    content = json.loads((folder / "manifest.json").read_text())["manifest"]
    content |= {"recipe": RECIPE.model_dump(mode="json"), "versions": {"torch": "2.13"}, "eval_loss": 1.5}
    content["recipe"]["optim"]["name"] = "adamw_8bit"  # the moments of this checkpoint are made up
    content["progress"] = TrainState(step=20, recent_losses=[1.0]).to_json()
    write(folder, content)
    return folder


def content_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())["manifest"]


def write(folder: Path, content: object) -> None:
    """Write a manifest with the digest of its content."""
    try:
        text = manifest.render_manifest(content)
    except (ValueError, RecursionError):  # Python refuses to write it
        text = manifest._with_digest(json.dumps(str(type(content))).encode()).decode()
    (folder / "manifest.json").write_text(text)


def use(folder: Path) -> str:
    """Do with a checkpoint what a resume does before it loads weights. Return the problem, or an empty string."""
    started = time.process_time()
    try:
        found = read_manifest(folder)
        TrainState.from_json(found.progress)
        verify_sizes(folder, found.files)
        ShardReader(folder, found)
        if not resume.differences(found.recipe, RECIPE):
            resume.saved_epochs(found)
        problem = ""
    except CorruptCheckpoint as error:
        problem = str(error)
        assert problem and len(problem) < 1500
    assert time.process_time() - started < SECONDS
    return problem


def changed(content: dict, place: tuple, value: object) -> object:
    """Return the content with another value at a place."""
    if not place:
        return value
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return content


def test_the_intact_manifest_is_read(checkpoint):
    assert use(checkpoint) == ""
    content = content_of(checkpoint)
    write(checkpoint, content | {"of_a_later_version": [1]})
    assert use(checkpoint) == "", "unknown fields are ignored"
    del content["eval_loss"]
    write(checkpoint, content)
    assert use(checkpoint) == "" and read_manifest(checkpoint).eval_loss is None


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)) or "all")
def test_an_odd_value_at_any_place(checkpoint, place):
    content, refused = content_of(checkpoint), 0
    for value in ODD:
        write(checkpoint, changed(content, place, value))
        refused += bool(use(checkpoint))
    lenient = {"rows", "base", "eval_loss", "recipe", "progress"}  # free texts and values that are compared later
    assert refused >= (1 if place and place[0] in lenient else len(ODD) - 8)


@pytest.mark.parametrize("place", [place for place in PLACES if place], ids=lambda place: ".".join(map(str, place)))
def test_a_missing_value_at_any_place(checkpoint, place):
    content = content_of(checkpoint)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    del inner[place[-1]]
    write(checkpoint, content)
    problem = use(checkpoint)
    assert problem or len(place) > 1 or place[0] in ("eval_loss", "format")


BODIES = {
    "no JSON": b"{",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "no UTF-8": b'{"step": "\xff"}',
    "a lone surrogate": b'{"step": "\\ud800"}',
    "deep lists": b"[" * 10**6,
    "deep objects": b'{"a":' * 10**6,
    "more after the end": b"{} {}",
    "a long number": b'{"step": ' + b"9" * 10**6 + b"}",
    "a long exponent": b'{"step": 1e' + b"9" * 10**6 + b"}",
    "comments": b"{/* */}",
    "many values": b'{"parameters": {"w": [' + b"1," * 10**7 + b"1]}}",
    "many wrong values": b'{"parameters": {' + b",".join(b'"%d": ["a"]' % n for n in range(240_000)) + b"}}",
    "many wrong lists": b'{"parameters": {' + b",".join(b'"%d": {}' % n for n in range(240_000)) + b"}}",
    "many objects": b'{"scalars": {' + b",".join(b'"%d":{"step":{"a":1}}' % n for n in range(240_000)) + b"}}",
    "many recipes": b'{"recipe": {' + b",".join(b'"%d": 1' % n for n in range(240_000)) + b"}}",
    "one long text": b'{"rows": "' + b"[/]" * 10**7 + b'"}',
    "many lines": b"\n" * 10**7,
    "the end inside": b'{"step": 1\n}\n}',
}


@pytest.mark.parametrize("name", BODIES)
def test_a_file_with_a_digest_that_is_no_manifest(checkpoint, name):
    (checkpoint / "manifest.json").write_bytes(manifest._with_digest(BODIES[name]))
    assert use(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"\xef\xbb\xbf" + text, lambda text: text.replace(b"\n", b"\r\n"), lambda text: text + text,
        lambda text: text[:-1], lambda text: text + b"\n", lambda text: b" " + text, lambda text: text.upper(),
        lambda text: text.replace(b'"step": 20', b'"step":  20'), lambda text: text.replace(b"\n ", b"\n"),
        lambda text: text.replace(b'"digest": ', b'"digest":  '), lambda text: text.replace(b"}", b"}\t", 1),
    ],
)  # fmt: skip
def test_every_byte_outside_of_the_body_counts(checkpoint, change):
    path = checkpoint / "manifest.json"
    path.write_bytes(change(path.read_bytes()))
    assert "its digest does not match" in use(checkpoint)


def make_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


NO_FILES = {
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a socket": make_socket,
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("other")) if path.exists() else "other"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("gone"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_only_a_regular_file_is_read(checkpoint, kind):
    path = checkpoint / "manifest.json"
    path.rename(checkpoint / "other")
    NO_FILES[kind](path)
    assert use(checkpoint) == "manifest.json: cannot be read: it is not a regular file"
    good = [make(checkpoint.parent, step) for step in (1, 2)]
    assert [step for step, _ in folders.list_checkpoints(checkpoint.parent)] == [20, 2, 1]
    folders.prune(checkpoint.parent, keep=2)
    assert all(folder.is_dir() for folder in good) and checkpoint.is_dir()
    make(checkpoint.parent, 30)
    folders.prune(checkpoint.parent, keep=2)
    assert [step for step, _ in folders.list_checkpoints(checkpoint.parent)] == [30, 2]


def test_the_largest_manifest_that_a_model_needs_is_read(checkpoint):
    """A third of LoRA on each expert of a model with 60 layers of 384 experts."""
    path = "base_model.model.model.layers.{}.mlp.experts.{}.{}_proj.lora_{}.default.weight"
    parts = [(layer, expert) for layer in range(40, 60) for expert in range(384)]
    names = [path.format(*part, kind, side) for part in parts for kind in ("gate", "up", "down") for side in "AB"]
    content = content_of(checkpoint) | {
        "parameters": {name: [16, 7168] for name in names},
        "scalars": {name: {"step": {"float32": 1000.0}} for name in names},
    }
    write(checkpoint, content)
    text = (checkpoint / "manifest.json").read_bytes()
    assert 3 * len(text) < manifest.MAX_MANIFEST_BYTES
    assert 3 * sum(map(text.count, manifest.MARKS)) < manifest.MAX_MARKS
    started = time.process_time()
    assert len(read_manifest(checkpoint).parameters) == 46_080
    assert time.process_time() - started < SECONDS


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step": "20"}, "manifest.json: is corrupt: step: should be a valid integer"),
        ({"parameters": {"w": [4, -1]}}, "is corrupt: parameters: w: should be greater than or equal to 0"),
        ({"parameters": {"[/]": "x"}}, "is corrupt: parameters: [/]: should be a valid list"),
        ({"recipe": []}, "is corrupt: recipe: is not an object"),
        ({"recipe": {"model": 3}}, "is corrupt: recipe: model: should be a valid dictionary"),
        ({"eval_loss": "low"}, "is corrupt: eval_loss: should be a valid number"),
        ({"format": 2}, "has format 2; this version reads format 1"),
        ({"step": 40}, "manifest.json: belongs to step 40"),
        ({"scalars": {"w": {"exp_avg": 1.0}}}, "exp_avg of w: is both a number and a tensor"),
        ({"scalars": {"w": {"step": {"storage": 1.0}}}}, "step of w: has the unknown type storage"),
    ],
)
def test_what_is_said(checkpoint, change, problem):
    write(checkpoint, content_of(checkpoint) | change)
    assert problem in use(checkpoint)
