"""Train the same chats with Gearbox and with other trainers, in turns, and write the tables of docs/performance.md.

python benchmarks/peers [--rounds N] [--systems A,B] [--cases A,B] [--file FILE] [--fresh] [--gpu]

python benchmarks/peers --write          write the tables and pictures from the samples, without a run

python benchmarks/peers --profile        print where the time of a LoRA step of SmolLM2-135M goes

python benchmarks/peers --curves         measure only Gearbox, over row length, size, ranks, rows and documents

A stopped run continues where it stopped; --fresh forgets the samples of the chosen cases and systems. The first run
makes an environment for each peer. All is kept in .peers/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers import environments, figures  # noqa: E402
from peers.cases import CASES, CHATS, GPU_CASES, SYSTEMS, Case  # noqa: E402

MATERIAL = environments.FOLDER / "material"
RECORD = environments.FOLDER / "samples.json"  # of this machine; publishing copies it to PUBLISHED
PUBLISHED = ROOT / "benchmarks" / "peers" / "samples.json"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- made by make bench -->", "<!-- end -->"
SECONDS = 900  # that a system may take
VARIABLES = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled",
}  # fmt: skip


def read() -> figures.Record:
    """Return the record of earlier rounds, or an empty one."""
    record: figures.Record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    return {"samples": [], "versions": {}, "models": {}} | record


def write(record: figures.Record) -> None:
    """Write the record, one line for each sample."""
    rest = {key: value for key, value in record.items() if key != "samples"}
    lines = ",\n".join(json.dumps(sample) for sample in record["samples"])
    partial = RECORD.with_suffix(".partial")
    partial.write_text(f'{json.dumps(rest)[:-1]},\n"samples": [\n{lines}\n]}}\n', encoding="utf-8")
    partial.replace(RECORD)


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    found = {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    if shutil.which("nvidia-smi"):
        names = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        found["gpu"] = names.partition(": ")[2].partition(" (UUID")[0]
    return found


def prepare(record: figures.Record, cases: dict[str, Case], file: Path | None) -> None:
    """Write models and chats, and note what they are."""
    for model in sorted({case.model for case in cases.values()}):
        command = [sys.executable, str(Path(__file__).parent / "material.py"), str(MATERIAL), model]
        subprocess.run([*command, *([str(file)] if file else [])], check=True)
        record["models"][model] = json.loads((MATERIAL / model / "config.json").read_text(encoding="utf-8"))
    name = file.name if file else "made up"
    chats = {**json.loads((MATERIAL / "chats.json").read_text(encoding="utf-8")), "file": name}
    if record.get("chats", chats) != chats:
        sys.exit(f"{RECORD}: its samples are of other chats; run again with --fresh")
    here = machine()
    if any(record.get("machine", here)[key] != here[key] for key in ("cpu", "cores")):
        sys.exit(f"{RECORD}: its samples are of another machine; run again with --fresh")
    record |= {"chats": chats, "machine": record.get("machine", here)}


def matmul_rate(model: str, gpu: bool) -> float:
    """Return the rate of matrix products at this moment."""
    command = [sys.executable, str(Path(__file__).parent / "rate.py"), str(MATERIAL / model), *(["gpu"] if gpu else [])]
    done = subprocess.run(command, env=os.environ | VARIABLES, capture_output=True, text=True, check=True)
    return float(done.stdout)


def sample(name: str, case: Case, pad_token: int, gpu: bool, **extra: Any) -> figures.Sample:
    """Run a system once in its own process, and return what its probe noted, or the error."""
    system = SYSTEMS[name]
    with tempfile.TemporaryDirectory() as scratch:
        spawned = time.time()
        settings = {
            "packs": system.packs, "model": str(MATERIAL / case.model), "model_keys": {}, "overrides": [],
            "chats": str(MATERIAL / "chats.jsonl"), "row_tokens": case.row_tokens, "micro_rows": 1, "lr": case.lr,
            "rows": case.rows if system.packs else CHATS, "steps": case.steps if system.packs else case.steps_unpacked,
            "method": case.method, "supervise": case.supervise, "bf16": gpu, "scratch": scratch,
            "result": f"{scratch}/result.json", "pad_token": pad_token, "seed": 0, **extra,
        }  # fmt: skip
        path = Path(scratch) / "settings.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        python, script = environments.python_of(system.environment), Path(__file__).parent / "runners" / system.script
        hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | VARIABLES | hidden
        variables["HF_HOME"] = scratch  # so that no system finds what it prepared before
        log = Path(scratch) / "log"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [str(python), str(script), str(path)], env=variables, stdout=output, stderr=output, cwd=scratch,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                return {"error": f"took more than {SECONDS} s"}
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
        result = Path(settings["result"])
        if not result.is_file():
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            shutil.copy(log, environments.FOLDER / f"{name}.log")
            return {"error": (lines or ["no output"])[-1][:160]}
        return {**json.loads(result.read_text(encoding="utf-8")), "spawned": spawned}


def measure(record: figures.Record, options: argparse.Namespace, cases: dict[str, Case]) -> None:
    """Take the samples that are missing, in turns, and keep each at once."""
    systems = [name for name in SYSTEMS if name in options.systems]
    failed = {name: environments.install(SYSTEMS[name].environment) for name in systems}
    have = {(one["system"], one["case"], one["round"]) for one in record["samples"] if "error" not in one}
    for number in range(options.rounds):
        for case_name, case in cases.items():
            rate = 0.0
            for name in systems:
                only_gearbox = case.method == "qlora" and name != "gearbox"  # compared with its own LoRA
                if only_gearbox or (name, case_name, number) in have:
                    continue
                system, rate = SYSTEMS[name], rate or matmul_rate(case.model, options.gpu)
                if failed[name]:
                    found = {"error": f"cannot be installed: {failed[name]}"}
                else:
                    found = sample(name, case, record["chats"]["pad_token"], options.gpu, seed=number)
                    record["versions"][system.environment] = environments.versions(system.environment)
                    record["date"] = time.strftime("%Y-%m-%d")
                key = {"system": name, "case": case_name, "round": number, "load": os.getloadavg()[0]}
                kept = [
                    s for s in record["samples"] if (s["system"], s["case"], s["round"]) != (name, case_name, number)
                ]
                record["samples"] = [*kept, {**key, "matmul_rate": rate, **found}]
                write(record)
                print(f"round {number + 1}, {case_name}, {name}: {short(record['samples'][-1])}", flush=True)


def short(sample: figures.Sample) -> str:
    """Return one line about a sample."""
    if "error" in sample:
        return f"failed: {sample['error']}"
    found = figures.figures(sample, 0)
    rest = f"{found['peak_gb']:.1f} GB, first step {found['first_wall']:.0f} s"
    return f"{found['cpu_rate']:.0f} tokens per CPU second, {rest}"


def put(text: str, begin: str, made: str) -> str:
    """Return the page with this part between its markers. Raises ValueError if a marker is missing."""
    before, found, rest = text.partition(f"{begin}\n")
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"docs/performance.md: the lines {begin} and {END} are missing; add them")
    return f"{before}{found}{made.rstrip()}\n{end}{after}"


def publish(record: figures.Record) -> None:
    """Write the tables into docs/performance.md, and draw the pictures."""
    from peers import inside, pictures  # imports matplotlib

    text = PAGE.read_text(encoding="utf-8")
    if record["samples"]:
        made = figures.page(record)
        print(made)
        text = put(text, BEGIN, "![Tokens per CPU second of each system](pictures/peers.svg)\n\n" + made)
    if "profile" in record:
        text = put(text, "<!-- profile -->", "\n".join(inside.profile_table(record)))
    if "curves" in record:
        picture = "![Tokens per CPU second over rows, layers and documents](pictures/curves.svg)\n\n"
        text = put(text, "<!-- curves -->", picture + "\n".join(inside.curves_table(record)))
    PAGE.write_text(text, encoding="utf-8")
    shutil.copy(RECORD, PUBLISHED)
    pictures.draw(record)


def main() -> None:
    """Do what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--cases", type=lambda text: text.split(","), default=[])
    parser.add_argument("--file", type=Path)
    for flag in ("gpu", "fresh", "write", "profile", "curves"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    if options.gpu and shutil.which("nvidia-smi") is None:
        sys.exit("--gpu: this machine has no CUDA device; run it on one that has")
    known = GPU_CASES if options.gpu else CASES
    wrong = [name for name in (*options.cases, *options.systems) if name not in {**known, **SYSTEMS}]
    if wrong:
        sys.exit(f"{', '.join(wrong)}: not known; choose from {', '.join([*known, *SYSTEMS])}")
    cases = {name: case for name, case in known.items() if name in (options.cases or known)}
    record = read()
    if options.fresh:
        kept = [one for one in record["samples"] if one["case"] not in cases or one["system"] not in options.systems]
        record = record | {"samples": kept} if kept else {"samples": [], "versions": {}, "models": {}}
    if not options.write:
        prepare(record, cases, options.file)
    if options.profile or options.curves:
        from peers import inside

        inside.profile(record) if options.profile else inside.curves(record)
        write(record)
    elif not options.write:
        measure(record, options, cases)
    publish(record)


if __name__ == "__main__":
    main()
