"""Run the fault tests on real launchers, ranks and disks, and write their table to docs/reliability.md.

`make faults` runs this script. It skips faults that have already passed according to .faults/results.json.

python tests/support/battery.py [NAME ...]     run all faults, or only the named ones
"""

import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import psutil

# Without pytest, the script must add these folders itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from gearbox import ROOT
from gearbox.checkpoint import folders
from support import environment, ledger, power, shards  # noqa: F401  sets the environment and working folder of the runs
from support.disturbed_run import SMALL, WORK, Run, balanced, reference

RESULTS = WORK / "results.json"
FAULTS = {}


def fault(times: int, outcome: str):
    def register(function):
        FAULTS[function.__name__] = (function, times, outcome)
        return function

    return register


def in_one_run(run: Run, draw: random.Random, count: int, strike) -> list[str]:
    """Disturb one run `count` times, each time after a newer checkpoint."""
    run.start()
    monitor = ledger.Monitor(run.folder / "checkpoints")
    last = 0
    for _ in range(count):
        aim = last + draw.randint(6, 12)
        if not run.until(lambda aim=aim: run.step >= aim):
            return [f"did not reach step {aim}: {run.output[-1500:]}"]
        struck_at = run.step
        strike(run, draw)
        if not run.until(lambda struck_at=struck_at: run.step < struck_at or not run.of_kind("ranks")):
            return ["the fault had no effect"]
        last = run.step  # may be after `struck_at`; only the restarted run reaches the next aim
    return balanced(run, train__steps=str(run.num_steps)) + monitor.result()


def strike_rank(run: Run, draw: random.Random) -> None:
    draw.choice(run.of_kind("ranks")).kill()


@fault(20, "restart from the newest checkpoint; step ledgers match")
def kill_a_rank(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Kill a random rank at a random step, in one run."""
    run = Run("kill-rank", train__steps=str(20 * times + 20))
    return in_one_run(run, draw, times, strike_rank), {"seconds_to_next_step": ledger.read(run.books).restarts}


@fault(20, "the same command on other ranks resumes; each row is trained once, in order")
def kill_a_stream(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Kill all processes of a run on streamed shards, each time at a random moment on another number of ranks."""
    folder = WORK / "prepared"
    given = ["batch.row_tokens=128", "batch.rows=6", "train.epochs=4", "data.shuffle_shards=2"]
    if not (folder / "index.json").exists():
        shards.prepare(shards.recipe_of(WORK / "chats.jsonl", *given), folder)
    rows = shards.opened(folder, *given)
    most = (rows.sampler.most_bytes() + rows.training.index.held_out.num_bytes) * 1.2
    changes = {
        "data__path": f"file://{folder}", "data__cache_gb": str(most / 1e9), "data__shuffle_shards": "2",
        "eval__fraction": "0.1", "train__steps": str(rows.num_steps), "run__hang_timeout": "60",
    }  # fmt: skip
    for number in range(times + 1):
        gear, ranks = draw.choice([("single", 1), ("ddp", 2), ("ddp", 4)])
        run = Run("kill-stream", gear, ranks, **changes)
        before = run.step
        run.start()
        if number < times:
            run.until(lambda run=run, before=before: run.step not in (0, before))
            run.until(lambda: False, draw.uniform(0, 2))
            run.kill_all()
        if (code := run.wait()) != 0 and number == times:
            return [f"exit code {code}: {run.output[-1500:]}"], {}
        if code == 0:
            break
    lines = ledger.kept(ledger.read(run.books).attempts["rank-0"])
    trained = [line["rows"] for line in lines]
    wrong = trained != [rows.rows_of_step(step) for step in range(rows.num_steps)]
    return ["the rows of the steps differ"] * wrong, {"killed": number}


@fault(3, "ranks save and exit; restart; step ledgers match")
def kill_the_launcher(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Kill only accelerate's launcher."""
    run = Run("kill-launcher", train__steps="60")
    return in_one_run(run, draw, times, lambda run, _: run.of_kind("launcher")[0].kill()), {}


@fault(3, "restart; step ledgers match")
def kill_all_ranks(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Kill all ranks at once."""
    run = Run("kill-ranks", train__steps="60")
    return in_one_run(run, draw, times, lambda run, _: [rank.kill() for rank in run.of_kind("ranks")]), {}


@fault(3, "ranks save and exit; the same command resumes; step ledgers match")
def kill_the_launchers_group(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Kill src/launch.py and accelerate's process group."""
    run = Run("kill-group", train__steps="60")
    found = []
    for number in range(times):
        run.start()
        aim = run.step + draw.randint(6, 12)
        run.until(lambda aim=aim: run.step >= aim)
        launcher = run.of_kind("launcher")[0]
        os.killpg(os.getpgid(run.process.pid), signal.SIGKILL)
        os.killpg(os.getpgid(launcher.pid), signal.SIGKILL)
        run.process.wait()
        found += [f"{number}: {each}" for each in run.left()]
    run.start()
    return found + balanced(run, train__steps="60"), {}


@fault(6, "saved, exit code 85; the same command resumes; step ledgers match")
def signals(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Send SIGTERM, SIGUSR1, SIGINT to src/launch.py; SIGTERM to accelerate's launcher, to a rank; SIGUSR1 to all."""
    run, found = Run("signals", train__steps="90"), []
    everything = lambda: [run.of_kind("outer")[0], *run.of_kind("launcher"), *run.of_kind("ranks")]  # noqa: E731
    cases = [
        ("outer", signal.SIGTERM), ("outer", signal.SIGUSR1), ("outer", signal.SIGINT), ("launcher", signal.SIGTERM),
        ("ranks", signal.SIGTERM), ("everything", signal.SIGUSR1),
    ]  # fmt: skip
    for kind, number in cases:
        run.start()
        aim = run.step + draw.randint(3, 9)
        if not run.until(lambda aim=aim: run.step >= aim):
            return [f"{kind}: did not reach step {aim}"], {}
        targets = everything() if kind == "everything" else run.of_kind(kind)[:1]
        for target in targets:
            target.send_signal(number)
        code = run.wait(60)
        found += [f"{kind} {number.name}: exit code {code}"] if code != 85 else []
        found += [f"{kind} {number.name}: {each}" for each in run.left()]
    run.start()
    return found + balanced(run, train__steps="90"), {}


@fault(4, "exit code 85 with nothing to save, or 130 at the second SIGINT")
def signals_while_starting(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Send SIGTERM 1, 4 and 7 seconds after the start, and SIGINT twice during training."""
    found = []
    for seconds in (1, 4, 7):
        run = Run(f"early-{seconds}").start()
        time.sleep(seconds)
        run.process.send_signal(signal.SIGTERM)
        code = run.wait(60)
        found += [f"after {seconds} s: exit code {code}"] if code != 85 else []
        found += run.left()
    run = Run("twice", train__steps="5000", save__every="5000").start()
    run.until(lambda: run.step >= 3)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    code = run.wait(30)
    # The first SIGINT may be handled before the second arrives. Then the run saves, which is also correct.
    return found + ([f"twice: exit code {code}"] if code not in (130, 85) else []) + run.left(), {}


@fault(12, "no process is left after ten seconds")
def kill_the_launcher_while_starting(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Kill src/launch.py and accelerate's launcher within three seconds of the first rank, while ranks import."""
    found = []
    for number in range(times):
        run = Run(f"starting-{number}").start()
        run.until(lambda run=run: run.of_kind("ranks"))
        time.sleep(draw.choice([0, 0.05, 0.1, 0.3, 1, 3]))
        for process in [run.process, *run.of_kind("launcher")]:
            process.kill()
        run.process.wait()
        found += [f"{number}: {each}" for each in run.left()]
    return found, {}


@fault(3, "stack of each rank in the run's folder, late rank named; restart; step ledgers match")
def stop_a_rank(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Send SIGSTOP to a random rank."""
    run = Run("stop-rank", train__steps="60")
    found = in_one_run(run, draw, times, lambda run, d: d.choice(run.of_kind("ranks")).send_signal(signal.SIGSTOP))
    stacks = [path for path in (run.folder / "hang").glob("*.txt") if "MainThread" in path.read_text()]
    named = run.output.count(" is stopped; stacks saved to ")
    found += [f"{len(stacks)} stacks"] if len(stacks) != 2 * times else []
    return found + ([f"late rank named {named} times"] if named != times else []), {}


@fault(4, "exit code 93 after three restarts; no process is left")
def the_same_fault_each_time(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Kill a rank before each new checkpoint."""
    run = Run("same-fault", save__every="50").start()
    for _ in range(times):
        if not run.until(lambda: run.of_kind("ranks") and run.step >= 3):
            break
        before = len(ledger.read(run.books).attempts["rank-0"])
        run.of_kind("ranks")[0].kill()
        run.until(lambda before=before: len(ledger.read(run.books).attempts["rank-0"]) > before)
    code = run.wait(120)
    found = [] if code == 93 else [f"exit code {code}"]
    restarts = run.output.count("; restart ")
    return found + ([f"{restarts} restarts"] if restarts != 3 else []) + run.left(), {}


@fault(18, "a complete checkpoint at every moment; the same command resumes; step ledgers match")
def kill_at_every_call_of_a_save(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Kill rank 0 at its K-th fsync or rename (strace)."""
    if shutil.which("strace") is None:
        return ["strace is not installed"], {}
    run, found, killed = Run("strace", "single", 1, train__steps="30"), [], 0
    monitor = ledger.Monitor(run.folder / "checkpoints")
    calls = "fsync,rename,renameat,renameat2"
    for call in range(1, times + 1):
        # Attach by pid once this attempt has trained a step, so that only the calls of saves count.
        before, ranks = len(ledger.read(run.books).attempts.get("rank-0", [])), []
        run.start()

        def is_training(before=before, ranks=ranks) -> bool:
            ranks[:] = run.of_kind("ranks")
            return bool(ranks) and len(ledger.read(run.books).attempts.get("rank-0", [])) > before

        if not run.until(is_training):
            break
        rank = ranks[0]
        tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", "-e",
             f"inject=fsync,rename:signal=KILL:when={call}", "-p", str(rank.pid)]
        )  # fmt: skip
        run.until(lambda rank=rank: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, 60)
        killed += not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
        os.killpg(os.getpgid(run.process.pid), signal.SIGKILL)
        run.process.wait()
        tracer.kill()
        found += run.left()
        if run.step >= run.num_steps:
            break
    run.start()
    return found + balanced(run, train__steps="30") + monitor.result(), {"killed": killed}


@fault(100, "detected, named, skipped")
def damage(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Damage every file of a checkpoint: flip a bit, zero a page, truncate, swap, delete; load clean copies between."""
    from support.checkpoints import DAMAGES

    source = next(path for _, path in folders.list_checkpoints(reference().folder / "checkpoints"))
    names = sorted(path.name for path in source.iterdir())
    missed, alarms = 0, 0
    for number in range(times):
        hurt = WORK / "damage" / source.name
        shutil.rmtree(hurt, ignore_errors=True)
        shutil.copytree(source, hurt)
        alarms += ledger.whole_checkpoint(hurt.parent) is None
        DAMAGES[number % len(DAMAGES)](hurt / draw.choice(names), draw)
        missed += ledger.whole_checkpoint(hurt.parent) is not None
    return [f"{missed} damages missed"] * bool(missed) + [f"{alarms} false alarms"] * bool(alarms), {
        "clean_loads": times
    }


@contextmanager
def tmpfs(options: str) -> Iterator[Path]:
    """Mount a separate disk, yield its folder, and unmount it."""
    disk = WORK / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@fault(1, "path, needed and free space reported; training continues, save retried; step ledgers match")
def disk_full(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Fill a tmpfs during a run, and free it again."""
    with tmpfs("size=12m") as disk:
        run = Run("disk-full", runs=str(disk), train__steps="90").start()
        run.until(lambda: run.step >= 12)
        stuffing = disk / "stuffing"
        with stuffing.open("wb") as file:
            try:
                while True:
                    file.write(b"x" * 65536)
            except OSError:
                pass
        run.until(lambda: "not written" in run.output, 60)
        saved = ledger.whole_checkpoint(run.folder / "checkpoints")
        stuffing.unlink()
        found = balanced(run, train__steps="90")
        reports = [line for line in run.output.splitlines() if "not written" in line]
        found += [] if reports and "needs " in reports[0] and " free" in reports[0] else ["space not reported"]
        return found + ([] if saved else ["no valid checkpoint while the disk was full"]), {"reports": reports[:1]}


@fault(1, "refused before training, exit code 2")
def disk_read_only(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Put run.dir on a read-only disk."""
    with tmpfs("ro") as disk:
        run = Run("read-only", runs=str(disk)).start()
        code = run.wait(90)
        found = (
            [] if code == 2 and "Read-only file system; choose another run.dir" in run.output else [f"exit code {code}"]
        )
        return found + run.left(), {}


@fault(1, "recreated with all later files; same losses")
def folder_removed(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Remove the run's folder during a run."""
    run = Run("removed", save__every="5").start()
    run.until(lambda: run.step >= 22)
    shutil.rmtree(run.folder, ignore_errors=True)
    shutil.rmtree(run.folder, ignore_errors=True)
    found = balanced(run)
    return found + ([] if (run.folder / "model").is_dir() else ["no model"]), {}


@fault(12, "the same command resumes; done stays done, with the same model; step ledgers match")
def cut_the_power(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Cut the power of a disk that loses what was not synced: anywhere in a run, after its last step, at its end."""
    if reason := power.missing():
        return [reason], {}
    work = WORK / "power"
    shutil.rmtree(work, ignore_errors=True)
    steps, found, steps_at_cut = str(10 * times), [], []
    run = Run("power", runs=str(work / "mount"), train__steps=steps)
    expected = reference(train__steps=steps)
    is_done = lambda: "done: model saved" in run.output  # noqa: E731
    for number in range(times + 1):
        is_late = number > times * 2 // 3
        with power.mounted(work, work / "mount", 0 if is_late else draw.randint(1, 250)) as disk:
            run.start()
            is_cut = lambda disk=disk: disk.poll() is not None  # noqa: E731
            if is_late and number < times and run.until(lambda: run.step >= run.num_steps, 400):
                time.sleep(draw.uniform(0, 1))  # saves the checkpoint, the model, the report
            else:
                run.until(lambda is_cut=is_cut: is_cut() or is_done(), 400)
            disk.terminate()
            disk.wait()
            run.kill_all()
            run.process.wait()
            found += [f"cut {number}: {each}" for each in run.left()]
        power.cut_and_restore(work, draw if number % 2 else None)
        steps_at_cut.append(run.step)
        if is_done():
            break
    found += run.problems(expected) + power.problems(work / "disk" / "power", expected.folder)
    return found, {"steps_at_cut": steps_at_cut}


@fault(25, "same final weights as the undisturbed run; step ledgers match")
def soak(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Inject 25 random faults into one run: kill ranks and launchers, stop ranks, send signals, repeat the command."""
    import torch
    from safetensors.torch import load_file

    steps = str(20 * times + 20)
    run, found, struck, last = Run("soak", train__steps=steps).start(), [], [], 0
    monitor = ledger.Monitor(run.folder / "checkpoints")
    for _ in range(times):
        aim = last + draw.randint(6, 12)
        if not run.until(lambda aim=aim: run.step >= aim):
            return [f"did not reach step {aim} after {struck}: {run.output[-1500:]}"], {}
        kind = draw.choice(["kill rank", "kill launcher", "stop rank", "kill all", "term", "usr1"])
        struck.append(kind)
        if kind == "kill rank":
            draw.choice(run.of_kind("ranks")).kill()
        elif kind == "kill launcher":
            run.of_kind("launcher")[0].kill()
        elif kind == "stop rank":
            draw.choice(run.of_kind("ranks")).send_signal(signal.SIGSTOP)
        elif kind == "kill all":
            for process in run.processes():
                process.kill()
        else:
            run.process.send_signal(signal.SIGTERM if kind == "term" else signal.SIGUSR1)
        if kind in ("kill all", "term", "usr1"):
            code = run.wait(90)
            found += [f"{kind}: exit code {code}"] if code != {"kill all": -9}.get(kind, 85) else []
            found += run.left()
            run.start()
        else:
            ranks = {rank.pid for rank in run.of_kind("ranks")}
            run.until(lambda ranks=ranks: not ranks & {rank.pid for rank in run.of_kind("ranks")})
        last = run.step
    found += balanced(run, train__steps=steps) + monitor.result()
    ours, theirs = (
        load_file(next((each.folder / "model").glob("*.safetensors"))) for each in (run, reference(train__steps=steps))
    )
    found += [f"{name} differs" for name in ours if not torch.equal(ours[name], theirs[name])]
    return found, {"struck": {kind: struck.count(kind) for kind in sorted({*struck})}}


GEARS = [("single", 1), ("ddp", 2), ("fsdp", 2), ("zero2", 2), ("zero3", 2)]


@fault(40, "losses within 1e-5 of the undisturbed run")
def every_gear_to_every_gear(draw: random.Random, times: int) -> tuple[list[str], dict]:
    """Train 3 steps under one gear, 3 under another: each pair of single, ddp, fsdp, zero2, zero3; full and LoRA."""
    import pytest

    from support.documents import make_chats
    from support.ranks import run_ranks, skip_loading_back

    skip_loading_back(pytest.MonkeyPatch())
    make_chats(WORK / "chats.jsonl")
    found, worst = [], 0.0
    common = [f"{key}={value}" for key, value in SMALL.items()]
    common += ["eval.every=0", "save.every=3", "optim.lr=1e-2", "run.hang_timeout=60"]
    for method in ("none", "lora"):
        base = WORK / "pairs" / method
        shutil.rmtree(base, ignore_errors=True)
        given = ["recipes/tiny.yaml", *common, f"adapter.method={method}", f"run.dir={base}"]

        def run(gear, ranks, name, steps, resume="auto", given=given, base=base):
            arguments = [*given, f"run.name={name}", f"train.steps={steps}", f"run.resume={resume}"]
            return run_ranks(gear, arguments, base, ranks)

        expected = run("single", 1, "reference", 6).losses
        for first, first_ranks in GEARS:
            start = run(first, first_ranks, first, 3)
            for second, second_ranks in GEARS:
                if first == second:
                    continue
                name = f"{first}-{second}"
                outcome = run(second, second_ranks, name, 6, base / first / "checkpoints" / "step-3")
                if set(outcome.codes) != {0}:
                    found.append(f"{method} {name}: {outcome.output[-500:]}")
                    continue
                losses = start.losses + outcome.losses
                apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
                worst = max(worst, apart)
                found += [f"{method} {name}: {apart:.1e} apart"] if apart > 1e-5 else []
    return found, {"largest_difference": worst}


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "accelerate", "deepspeed", "transformers"))
    return (
        f"{os.cpu_count()} cores of {model}, {psutil.virtual_memory().total / 2**30:.0f} GiB, no GPU; "
        f"Python {platform.python_version()}, {versions}"
    )


def write_table(results: dict) -> None:
    rows = ["| fault | times | expected | outcome |", "|---|---|---|---|"]
    for name, (function, _, expected) in FAULTS.items():
        if name in results:
            found = results[name]
            verdict = "passed" if not found["problems"] else "**failed**: " + "; ".join(found["problems"])[:200]
            times = found["facts"].get("killed", found["times"])
            rows.append(
                f"| {function.__doc__.rstrip('.')} | {times} | {expected} | {verdict} ({found['seconds']:.0f} s) |"
            )
    notes = []
    waits = results.get("kill_a_rank", {}).get("facts", {}).get("seconds_to_next_step")
    if waits:
        ordered = sorted(waits)
        notes.append(
            f"From a rank's last step before its death to the first step of the restarted run: median "
            f"{ordered[len(ordered) // 2]:.1f} s, maximum {ordered[-1]:.1f} s ({len(ordered)} restarts). "
            "Python spends most of this time importing its libraries twice."
        )
    apart = results.get("every_gear_to_every_gear", {}).get("facts", {}).get("largest_difference")
    if apart is not None:
        notes.append(f"Between gears, the largest relative difference of a loss was {apart:.1e}.")
    struck = results.get("soak", {}).get("facts", {}).get("struck")
    if struck:
        notes.append("Random faults: " + ", ".join(f"{count} x {kind}" for kind, count in struck.items()) + ".")
    made = f"Made by `make faults` on {time.strftime('%Y-%m-%d')}: {machine()}."
    table = "\n".join([made, "", *rows, "", *(note + "\n" for note in notes)])
    page = ROOT / "docs" / "reliability.md"
    before, mark, after = page.read_text(encoding="utf-8").partition("<!-- made by make faults -->\n")
    end = after.partition("<!-- end -->")[2]
    page.write_text(f"{before}{mark}{table}<!-- end -->{end}", encoding="utf-8")


def main(names: list[str]) -> int:
    from support.documents import make_chats

    for folder in ("runs", "ledgers", "logs"):
        (WORK / folder).mkdir(parents=True, exist_ok=True)
    make_chats(WORK / "chats.jsonl")
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name, (function, times, _) in FAULTS.items():
        if (names and name not in names) or (not names and results.get(name, {}).get("problems") == []):
            continue
        for folder in ("runs", "ledgers", "logs"):
            for old in (WORK / folder).iterdir():
                if not old.name.startswith("reference-"):
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
        started = time.monotonic()
        try:
            problems, facts = function(random.Random(name), times)
        except Exception as error:
            problems, facts = [f"{type(error).__name__}: {error}"], {}
        results[name] = {
            "problems": problems, "facts": facts, "times": times, "seconds": time.monotonic() - started
        }  # fmt: skip
        RESULTS.write_text(json.dumps(results, indent=1))
        print(f"{name}: {problems or 'passed'} {facts}", flush=True)
        write_table(results)
    return int(any(found["problems"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
