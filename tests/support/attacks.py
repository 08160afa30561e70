"""Attack runs, models and settings with damaged or made-up files, and write their table to docs/reliability.md.

`make attacks` runs this script. Each attack copies an intact victim, changes one file of it at random, and uses it on
warm forked ranks. Their input answers every question with "y".

python tests/support/attacks.py [VICTIM[-NUMBER] ...]     make all attacks, or only the named ones
"""

import json
import math
import os
import pickle
import random
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

# Without pytest, the script must add these folders itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from gearbox import ROOT

from support import ranks  # isort: skip  first: it sets variables that other imports read

import ask
import train as train_script
from gearbox.checkpoint.manifest import render_manifest
from gearbox.config.gear import load_gear
from support.battery import machine
from support.checkpoints import DAMAGES, swap
from support.documents import make_chats

HANG_SECONDS = 30  # a run takes up to 9 on an idle core, and 11 beside other work
MAX_BYTES = 4 * 2**30
FACTS = ("as usual", "refused", "traceback", "hang", "wrong resume", "prompt or foreign code")
SETTINGS = {
    "run.rehearse": "true", "batch.rows": "4", "batch.row_tokens": "64", "batch.micro_rows": "2",
    "schedule.name": "constant", "schedule.warmup": "0", "eval.every": "0", "eval.samples": "0", "save.every": "3",
    "optim.name": "adamw", "optim.master_weights": "fp32", "eval.fraction": "0.1",
}  # fmt: skip
DEEP: list = []
for _ in range(600):
    DEEP = [DEEP]
ODD = [
    None, [], {}, "", "x" * 10**6, -1, 0, 3, 1e308, 10**30, math.nan, math.inf, True, "[/]", "[bold]", "\x1b[2J",
    "a\nb", "../../../etc/passwd", "/dev/zero", "\ud800", DEEP, {"a": {"b": []}}, [None], ["x"],
    {str(number): number for number in range(9999)},
]  # fmt: skip
Damage = Callable[[Path, random.Random], None]


def replace(make: Callable[[Path], object]) -> Damage:
    """Return a damage that removes a file and makes something else at its place."""

    def damage(path: Path, draw: random.Random) -> None:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        make(path)

    return damage


def make_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def with_bytes(make: Callable[[bytes], bytes]) -> Damage:
    return lambda path, draw: path.write_bytes(make(path.read_bytes()))


# What can happen to any file.
PLACES = [replace(make) for make in (
    lambda path: path.mkdir(), lambda path: os.mkfifo(path), make_socket, lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path.name), lambda path: path.symlink_to("gone"), lambda path: path.write_bytes(b""),
)]  # fmt: skip
BYTES = [
    *(damage for damage in DAMAGES if damage is not swap),
    with_bytes(lambda content: bytes(len(content))),
    with_bytes(lambda content: random.Random(len(content)).randbytes(4096)),
    with_bytes(lambda content: b"\xef\xbb\xbf" + content),
    with_bytes(lambda content: content + b"\n\x1b[31m[/red]\xff\n"),
    with_bytes(lambda content: content.replace(b"\n", b"\r\n")),
    with_bytes(lambda content: content + content),
]


def mutate(content: Any, draw: random.Random) -> Any:
    """Return JSON in which one value at a random place is replaced, removed, renamed or repeated."""
    if not isinstance(content, dict | list) or not content or draw.random() < 0.1:
        return draw.choice(ODD)
    key = draw.choice(sorted(content, key=str)) if isinstance(content, dict) else draw.randrange(len(content))
    what = draw.choice(["deeper", "deeper", "deeper", "replace", "replace", "remove", "rename"])
    if what == "deeper":
        content[key] = mutate(content[key], draw)
    elif what == "replace":
        content[key] = draw.choice(ODD)
    elif what == "remove":
        del content[key]
    elif isinstance(content, dict):
        content[draw.choice(["[/]", "../x", "", "\n", "1", f"{key}x"])] = content.pop(key)
    else:
        content.append(content[key])
    return content


def mutate_json(path: Path, draw: random.Random) -> None:
    path.write_bytes(json.dumps(mutate(json.loads(path.read_text()), draw)).encode(errors="surrogatepass"))


def mutate_manifest(path: Path, draw: random.Random) -> None:
    """Forge a manifest with a digest that matches."""
    content = json.loads(path.read_text())["manifest"]
    path.write_bytes(render_manifest(mutate(content, draw)).encode(errors="surrogatepass"))


def mutate_line(path: Path, draw: random.Random) -> None:
    lines = path.read_text().splitlines()
    number = draw.randrange(len(lines))
    lines[number] = json.dumps(mutate(json.loads(lines[number]), draw))
    path.write_bytes("\n".join([*lines, ""]).encode(errors="surrogatepass"))


def mutate_header(path: Path, draw: random.Random) -> None:
    """Change the JSON header of a safetensors file, and its length."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(mutate(json.loads(content[8:end]), draw)).encode(errors="surrogatepass")
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


def mutate_yaml(path: Path, draw: random.Random) -> None:
    path.write_text(yaml.safe_dump(mutate(yaml.safe_load(path.read_text()), draw)), errors="surrogatepass")


def damages_of(path: Path) -> list[Damage]:
    """Return the damages that fit a file; those that understand its format come more often."""
    formats = {".safetensors": mutate_header, ".jsonl": mutate_line, ".yaml": mutate_yaml, ".json": mutate_json}
    own = mutate_manifest if path.name == "manifest.json" else formats.get(path.suffix)
    return [*PLACES, *BYTES, *([own] * 16 if own else [])]


class Code:
    """An object whose unpickling creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


class Result(NamedTuple):
    """The result of an attack: one of FACTS, and the end of the output."""

    fact: str
    seconds: float
    output: str


class Attacks:
    """Intact victims below a folder, and attacks on copies of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marker = folder, folder / "code-has-run"
        self.chats = make_chats(folder / "chats.jsonl")
        self.own = folder / "own.yaml"
        self.own.write_text("model: {name: recipes/tiny}\noptim: {lr: 1e-2}\n")
        ranks.skip_loading_back(pytest.MonkeyPatch())
        ranks.TIMEOUT = 3 * HANG_SECONDS
        self._run("run", [*self._settings("run.name=run", "train.steps=6")], must=0)
        self.base = self.intact("run") / "model"
        own = (f"model.name={self.base}", "run.rehearse=false", "adapter.method=lora", "adapter.r=2")
        self._run("adapter", self._settings("run.name=adapter", "train.steps=2", *own), must=0)
        whole = ["run.name=run", "run.resume=latest", "train.steps=9"]
        shutil.copytree(self.intact("run"), folder / "whole" / "run")
        self._run("whole", self._settings(*whole), must=0)
        self.expected = self._weights(folder / "whole" / "run" / "model")

    def intact(self, name: str) -> Path:
        return self.folder / name / name

    def _settings(self, *given: str) -> list[str]:
        common = SETTINGS | {"data.path": str(self.chats)} | dict(each.split("=", 1) for each in given)
        return [str(self.own), *(f"{key}={value}" for key, value in common.items())]

    @staticmethod
    def _weights(model: Path) -> bytes:
        return (model / "model.safetensors").read_bytes()

    def _run(self, place: str, arguments: list[str], gear: str = "single", must: int | None = None) -> Result:
        """Train with these arguments and run.dir=PLACE."""
        path = ROOT / "accelerate_configs" / f"{gear}.yaml" if "/" not in gear else Path(gear)
        there = [f"run.dir={self.folder / place}"]
        number = 2 if gear in ("fsdp", "ddp") else 1

        def work() -> int:
            return train_script.main(arguments + there, load_gear(path, {"num_processes": str(number)}))

        result = self._fork(work, number, ranks.launcher_environment(path, number) if "/" not in gear else {})
        assert must is None or result.fact == "as usual", result
        return result

    def _fork(self, work: Callable[[], object], number: int = 1, environment: dict[str, str] | None = None) -> Result:
        answers, write = os.pipe()
        os.write(write, b"y\n" * 1000)
        os.close(write)

        def answering() -> int:
            os.dup2(answers, 0)
            sys.stdin = os.fdopen(0)
            resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))  # a link to /dev/zero has no end
            return int(work() or 0)

        started = time.monotonic()
        codes, output = ranks.fork_ranks(number, environment or {}, answering)
        seconds = time.monotonic() - started
        unread = len(os.read(answers, 4096))
        os.close(answers)
        if unread < 2000 or self.marker.exists():
            fact = "prompt or foreign code"
        elif seconds > HANG_SECONDS:
            fact = "hang"
        elif "Traceback" in output or {*codes} not in ({0}, {2}):
            fact = "traceback"
        else:
            fact = "refused" if codes[0] else "as usual"
        self.marker.unlink(missing_ok=True)
        return Result(fact, seconds, f"{codes} {output[-3000:]}")

    def _copy(self, source: Path, place: str) -> Path:
        copy = self.folder / place / source.name
        shutil.rmtree(copy.parent, ignore_errors=True)
        shutil.copytree(source, copy, symlinks=True)
        return copy

    def _hurt(self, folder: Path, draw: random.Random, pattern: str = "*") -> str:
        """Damage a random file of a folder. Return what was done."""
        path = draw.choice(sorted(path for path in folder.rglob(pattern) if path.is_file()))
        damage = draw.choice(damages_of(path))
        number = [*PLACES, *BYTES].index(damage) if damage in [*PLACES, *BYTES] else damage.__name__
        damage(path, draw)
        return f"{path.relative_to(folder)} damage {number}"

    def _resume(self, draw: random.Random, pattern: str, gear: str) -> tuple[str, Result]:
        copy = self._copy(self.intact("run"), "attacked")
        done = self._hurt(copy, draw, pattern)
        result = self._run("attacked", self._settings("run.name=run", "run.resume=latest", "train.steps=9"), gear)
        models = [path / "model" for path in copy.parent.iterdir() if (path / "model").is_dir()]
        if result.fact == "as usual" and gear == "single" and self._weights(models[-1]) != self.expected:
            result = result._replace(fact="wrong resume")
        return done, result

    def run(self, draw: random.Random) -> tuple[str, Result]:
        return self._resume(draw, "*", draw.choice(["single", "single", "fsdp"]))

    def checkpoint(self, draw: random.Random) -> tuple[str, Result]:
        return self._resume(draw, "step-*/*", draw.choice(["single", "single", "fsdp"]))

    def manifest(self, draw: random.Random) -> tuple[str, Result]:
        return self._resume(draw, "manifest.json", "single")

    def model(self, draw: random.Random) -> tuple[str, Result]:
        copy = self._copy(self.base, "attacked")
        done = self._plant(copy, draw) if draw.random() < 0.4 else self._hurt(copy, draw)
        if draw.random() < 0.4:
            return f"{done}, asked", self._ask(copy)
        own = (f"model.name={copy}", "run.rehearse=false", "train.steps=1")
        return done, self._run("attacked", self._settings(*own))

    def adapter(self, draw: random.Random) -> tuple[str, Result]:
        copy = self._copy(self.intact("adapter") / "model", "attacked")
        done = self._plant(copy, draw) if draw.random() < 0.3 else self._hurt(copy, draw)
        if draw.random() < 0.5:
            return f"{done}, asked", self._ask(copy)
        own = (f"model.name={self.base}", f"adapter.path={copy}", "run.rehearse=false", "train.steps=1")
        return done, self._run("attacked", self._settings(*own))

    def _ask(self, folder: Path) -> Result:
        return self._fork(lambda: ask.main([str(folder), "sort dbca", "max_new_tokens=2"]))

    def data(self, draw: random.Random) -> tuple[str, Result]:
        place = self.folder / "attacked"
        shutil.rmtree(place, ignore_errors=True)
        (place / "data").mkdir(parents=True)
        records = [json.loads(line) for line in self.chats.read_text().splitlines()[:60]]
        kind = draw.choice(["jsonl", "jsonl", "json", "parquet", "csv", "txt"])
        path = place / "data" / f"some.{kind}"
        write_records(path, records)
        done = self._hurt(place / "data", draw)
        return done, self._run("attacked", self._settings(f"data.path={path}", "train.steps=1"))

    def gear(self, draw: random.Random) -> tuple[str, Result]:
        place = self.folder / "attacked"
        shutil.rmtree(place, ignore_errors=True)
        for name in ("accelerate_configs", "ds_configs"):
            shutil.copytree(ROOT / name, place / name)
        name = draw.choice(["single", "ddp", "fsdp", "zero2", "zero3"])
        pattern = draw.choice([f"{name}.yaml", f"{name}.yaml", f"{name.replace('single', 'zero3')}.json"])
        if not [*place.rglob(pattern)]:
            pattern = f"{name}.yaml"
        done = self._hurt(place, draw, pattern)
        gear = str(place / "accelerate_configs" / f"{name}.yaml")
        arguments = self._settings("train.steps=1", f"run.dir={place}")
        return done, self._fork(lambda: check(Path(gear), arguments))

    def recipe(self, draw: random.Random) -> tuple[str, Result]:
        place = self.folder / "attacked"
        shutil.rmtree(place, ignore_errors=True)
        (place / "recipes").mkdir(parents=True)
        shutil.copy(ROOT / "recipes" / "tiny.yaml", place / "recipes")
        done = self._hurt(place, draw)
        given = [f"{key}={value}" for key, value in SETTINGS.items() if key not in ("optim.name", "eval.fraction")]
        arguments = [str(place / "recipes" / "tiny.yaml"), *given, "train.steps=1", f"data.path={self.chats}"]
        return done, self._run("attacked", arguments)

    def _plant(self, folder: Path, draw: random.Random) -> str:
        """Add a file that brings code. Return what was done."""
        code = f"from pathlib import Path\nPath({str(self.marker)!r}).touch()\n"
        for name in ("evil.py", "custom_generate/generate.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(code + "class Evil: pass\ndef generate(*_, **__): pass\n")
        maps = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
        for name in ("pytorch_model.bin", "adapter_model.bin", "tokenizer.bin"):
            (folder / name).write_bytes(pickle.dumps(Code(self.marker)))
        what = draw.choice(["config", "tokenizer", "both", "index", "bin", "base", "class"])
        if what in ("config", "both"):
            edit(folder / "config.json", auto_map=maps, model_type=draw.choice(["llama", "evil"]))
        if what in ("tokenizer", "both", "class"):
            edit(folder / "tokenizer_config.json", auto_map=maps, tokenizer_class="Evil")
        if what == "class":
            (folder / "tokenizer.json").unlink(missing_ok=True)
        if what == "index":
            names = {"model.embed_tokens.weight": draw.choice(["pytorch_model.bin", "../x.safetensors", "/etc/passwd"])}
            edit(folder / "model.safetensors.index.json", metadata={}, weight_map=names)
        if what in ("index", "bin"):
            for path in folder.glob("*.safetensors"):
                path.unlink()
        if what == "base":
            evil = folder / "base"
            shutil.copytree(self.base, evil)
            edit(evil / "config.json", auto_map=maps, model_type="evil")
            (evil / "evil.py").write_text(code)
            edit(folder / "adapter_config.json", base_model_name_or_path=str(evil), auto_mapping=maps)
        return f"planted {what}"


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


def write_records(path: Path, records: list[dict]) -> None:
    """Write chats in the format that the file's ending names."""
    turns = [each["messages"] for each in records]
    flat = [{"prompt": each[0]["content"], "completion": each[-1]["content"]} for each in turns]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".txt":
        path.write_text("\n\n".join(each["prompt"] for each in flat))
    else:
        import pandas

        frame = pandas.DataFrame(flat)
        frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)


def check(gear: Path, arguments: list[str]) -> int:
    """Load a gear, and train with it if it needs one process."""
    loaded = load_gear(gear)
    return train_script.main(arguments, loaded) if loaded.num_processes == 1 and loaded.engine == "single" else 0


VICTIMS = {
    "run": (60, "any file of a run's folder; resume"),
    "checkpoint": (50, "a file of a checkpoint; resume"),
    "manifest": (60, "a manifest with a matching digest; resume"),
    "model": (60, "a model's folder, also with code; train, ask"),
    "adapter": (40, "an adapter's folder, also with code; train, ask"),
    "data": (40, "a file of data; train"),
    "gear": (25, "a gear or its ZeRO settings; train"),
    "recipe": (15, "a recipe; train"),
}


def write_table(found: dict[str, Counter], slowest: float) -> None:
    """Replace the table of attacks in docs/reliability.md."""
    lines = [f"| attacked | attacks | {' | '.join(FACTS)} |", "|---" * (len(FACTS) + 2) + "|"]
    for name, counts in found.items():
        numbers = " | ".join(str(counts[fact]) for fact in FACTS)
        lines.append(f"| {VICTIMS[name][1]} | {counts.total()} | {numbers} |")
    made = f"Made by `make attacks` on {time.strftime('%Y-%m-%d')}: {machine()}. The slowest took {slowest:.1f} s."
    page = ROOT / "docs" / "reliability.md"
    before, mark, after = page.read_text(encoding="utf-8").partition("<!-- made by make attacks -->\n")
    end = after.partition("<!-- end -->")[2]
    page.write_text("\n".join([f"{before}{mark}{made}", "", *lines, "<!-- end -->"]) + end, encoding="utf-8")


def main(names: list[str]) -> int:
    """Make the attacks, print what should not have happened, and write the table after a full round."""
    found: dict[str, Counter] = {name: Counter() for name in VICTIMS}
    slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="gearbox-attacks-") as folder:
        attacks = Attacks(Path(folder))
        for victim, (times, _) in VICTIMS.items():
            for number in range(times):
                name = f"{victim}-{number}"
                if names and not {victim, name} & {*names}:
                    continue
                done, result = getattr(attacks, victim)(random.Random(name))
                found[victim][result.fact] += 1
                slowest = max(slowest, result.seconds)
                is_bad = result.fact not in FACTS[:2]
                print(f"{name}: {done}: {result.fact} ({result.seconds:.1f} s)", flush=True)
                if is_bad or names:
                    print(result.output, flush=True)
    if not names:
        write_table(found, slowest)
    return int(any(counts[fact] for counts in found.values() for fact in FACTS[2:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
