"""Test runs that are killed and resumed with the real packages of requirements/extras.txt, without a network."""

import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import zipfile

import psutil
import pytest

from gearbox import ROOT, filesystem

pytestmark = [pytest.mark.cold, pytest.mark.extras, pytest.mark.long, pytest.mark.timeout(1800)]
STEPS, NAMES = 60, "[tensorboard,wandb,mlflow,trackio,comet,swanlab]"
VARIABLES = ("WANDB", "MLFLOW", "TRACKIO", "COMET", "SWANLAB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a run that was killed alone, then with the processes of its trackers, and then finished."""
    runs = tmp_path_factory.mktemp("tracked") / "runs"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES)}
    environment |= {"HF_HUB_OFFLINE": "1", "SECRET_TOKEN": "not-to-be-seen"}
    command = [
        sys.executable, str(ROOT / "src/train.py"), "recipes/tiny.yaml", "run.rehearse=true", f"run.dir={runs}",
        f"train.steps={STEPS}", "eval.every=20", "save.every=5", "batch.rows=24", "batch.row_tokens=512",
        "schedule.warmup=1", "eval.samples=0", "run.name=kept", f"run.trackers={NAMES}",
    ]  # fmt: skip
    for kills_trackers, until in ((False, 5), (True, 20)):
        with (runs.parent / "log").open("a") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            _wait_for_step(runs / "kept", until, process)
            children = psutil.Process(process.pid).children()
            process.send_signal(signal.SIGKILL)
            process.wait()
            for child in children if kills_trackers else []:
                os.killpg(child.pid, signal.SIGKILL)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fails" not in done.stdout, done.stdout
    (runs.parent / "screen").write_text(done.stdout + done.stderr)
    return runs / "kept"


def _wait_for_step(folder, step, process):
    """Wait until trackers.json says that all trackers have recorded this step, which Comet does only at the end."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        facts = filesystem.read_json_object(path) if (path := folder / "trackers.json").is_file() else {}
        if facts and all(one["recorded"] >= step for name, one in facts.items() if name != "comet"):
            return
        time.sleep(0.05)
    raise AssertionError((folder.parent.parent / "log").read_text())


def losses(folder) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def same(found: dict[int, float], folder) -> bool:
    expected = losses(folder)
    return list(expected) == list(range(1, STEPS + 1)) and found == pytest.approx(expected, rel=1e-6)


def test_tensorboard_has_each_step_once(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0}).Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert same(dict(found), folder) and len(found) == STEPS


def records_of(content: bytes):
    """Yield the records of a log of LevelDB's format, as wandb writes it: 7 bytes, then blocks of 32 KiB."""
    place, record, block = 7, b"", 32 * 1024
    while place + 7 <= len(content):
        if (left := block - place % block) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # complete, or the last part
            yield record
            record = b""


def test_wandb_has_one_run_with_every_step(folder):
    from wandb.proto import wandb_internal_pb2

    found, ids, config = {}, set(), {}
    for file in sorted((folder / "trackers/wandb").glob("offline-run-*/run-*.wandb")):
        for data in records_of(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config |= {item.key: item.value_json for item in record.run.config.update}
            if record.HasField("config"):
                config |= {item.key: item.value_json for item in record.config.update}
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if "loss" in items:
                found[items["step"]] = items["loss"]
    assert len(ids) == 1
    assert same(found, folder)
    assert json.loads(config["train.steps"]) == STEPS and json.loads(config["gear"]) == "single"


def test_mlflow_has_one_run_with_every_step(folder):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'gearbox'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert same({metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}, folder)
    assert run.info.run_name == "kept" and run.info.status == "FINISHED"
    assert run.data.tags["gear"] == "single" and run.data.params["train.steps"] == str(STEPS)


def test_trackio_has_one_run_with_every_step(folder):
    (store,) = (folder.parent / "trackio").glob("gearbox*.db")
    with sqlite3.connect(store) as database:
        rows = database.execute("SELECT run_name, run_id, step, metrics FROM metrics").fetchall()
    assert len({(name, number) for name, number, _, _ in rows}) == 1 and rows[0][0] == "kept"
    found = {step: json.loads(metrics) for _, _, step, metrics in rows if "loss" in json.loads(metrics)}
    assert same({step: numbers["loss"] for step, numbers in found.items()}, folder)


def test_comet_has_one_experiment_with_every_step(folder):
    found, keys = {}, set()
    for file in (folder / "trackers/comet").glob("*.zip"):
        with zipfile.ZipFile(file) as archive:
            keys.add(json.loads(archive.read("experiment.json"))["offline_id"])
            for line in archive.read("messages.json").splitlines():
                message = json.loads(line)
                metric = message["payload"].get("metric") or {}
                if message["type"] == "metric_msg" and metric.get("metricName") == "loss":
                    found[metric["step"]] = float(metric["metricValue"])
            assert not any(name.endswith(".py") for name in archive.namelist()), "no code is uploaded"
    assert len(keys) == 1
    assert same(found, folder)


def test_swanlab_has_one_run(folder):
    stores = sorted((folder / "trackers/swanlab").glob("run-*/run-*.swanlab"))
    assert len(stores) == 3 and len({store.name for store in stores}) == 1
    assert all(b"loss" in store.read_bytes() for store in stores)


def test_no_secret_is_stored_and_the_screen_stays_quiet(folder):
    stored = [path for path in [*folder.rglob("*"), *folder.parent.glob("*.db")] if path.is_file()]
    assert not [path for path in stored if b"not-to-be-seen" in path.read_bytes()]
    lines = (folder.parent.parent / "screen").read_text().splitlines()
    spoken = [line for line in lines if any(name in line.lower() for name in NAMES.strip("[]").split(","))]
    assert all(line.startswith("tracker ") for line in spoken), spoken
    assert len([line for line in spoken if "records" in line]) == 5, spoken
