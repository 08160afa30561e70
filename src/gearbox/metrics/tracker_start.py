"""Start a tracker through Accelerate's class for it: the same run as before, quietly, and offline without a network."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from gearbox.config.job import Job
from gearbox.redact import redacted
from gearbox.revision import revision

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "gearbox"
REACH_SECONDS = 5.0  # to connect to a tracker's server
INIT_SECONDS = 30.0
MAX_WANDB_TAG = 64  # characters
EMPTY_ZIP_BYTES = 22
# Variables of a tracker's process, unless the user has set them. They stop what is sent home besides the run.
ENVIRONMENT = {
    "COMET_DISABLE_AUTO_LOGGING": "1",  # otherwise Comet changes torch and other libraries
    "COMET_ERROR_TRACKING_ENABLE": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "WANDB_ERROR_REPORTING": "false",
}
SERVERS = {"wandb": "https://api.wandb.ai", "comet": "https://www.comet.com", "swanlab": "https://api.swanlab.cn"}


@dataclass(frozen=True)
class Description:
    """The facts of a run that its trackers store."""

    folder: Path
    """The run's folder."""
    config: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    """The resolved recipe and facts, as `group.key: value`."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags by what they mean, such as `{"gear": "fsdp"}`."""

    @classmethod
    def of(cls, folder: Path, job: Job) -> Description:
        """Return the description of a job that runs in a folder, without secrets."""
        recipe, gear = job.recipe, job.gear
        facts = {"gear": gear.name, "num_processes": gear.num_processes, "revision": revision()}
        groups = recipe.model_dump(mode="json")
        flat = {f"{group}.{key}": value for group, keys in groups.items() for key, value in keys.items()}
        plain: dict[str, str | int | float | bool | None] = {
            key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in (flat | facts).items()
        }
        tags = {"gear": gear.name, "method": recipe.method, "model": Path(recipe.model.name).name}
        return cls(folder, redacted(plain), redacted(tags))

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.folder.name

    @property
    def data(self) -> Path:
        """The folder in which trackers may store the run's data."""
        return self.folder / "trackers"

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return asdict(self) | {"folder": str(self.folder)}


class Opened(NamedTuple):
    """The result of starting a tracker."""

    run_id: str
    """The id of the tracker's run."""
    place: str = ""
    """Where it records, in a few words."""
    keeps: Literal["each step", "each save", "the end"] = "each save"
    """When the recorded steps survive a kill of the tracker's process: at once, after seconds, or once it finishes."""


class LocalTracker:
    """A tracker in this process (a `Tracker` of trackers.py)."""

    def __init__(
        self,
        name: str,
        description: Description,
        make: Callable[[Description, str, bool, int], tuple[GeneralTracker, Opened]] | None = None,
    ) -> None:
        """Store the parameters. `make` starts the tracker; the default is this module's function for the name."""
        self.description, self.make = description, make or MAKERS[name]
        self.with_step = name != "wandb"  # its own step never goes back, so the step is one of the numbers
        self.tracker: GeneralTracker | None = None

    def open(self, run_id: str, resumes: bool, after: int) -> Opened:
        """Start the tracker."""
        self.tracker, opened = self.make(self.description, run_id, resumes, after)
        return opened

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Record the numbers of a step."""
        assert self.tracker is not None
        if self.with_step:
            self.tracker.log(numbers, step=step)
        else:
            self.tracker.log({**numbers, "step": step})

    def close(self) -> None:
        """Finish the run."""
        tracker, self.tracker = self.tracker, None
        if tracker is not None:
            tracker.finish()

    def abandon(self) -> None:
        """Close what a failure has left. A writer that hangs is left to its thread."""
        with suppress(Exception):
            self.close()


def start(tracker: GeneralTracker, config: Mapping[str, object] | None = None) -> GeneralTracker:
    """Start a tracker of Accelerate on this process, and store the configuration."""
    tracker.main_process_only = False  # only rank 0 has one, so that no class asks for its rank
    tracker.start()
    if config:
        tracker.store_init_configuration(config)
    return tracker


def can_reach(url: str) -> bool:
    """Return whether a server accepts connections. A proxy is expected to know."""
    parts = urlsplit(url if "://" in url else f"https://{url}")
    if getproxies().keys() & {"http", "https", "all"}:
        return True
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 443), REACH_SECONDS):
            return True
    except OSError:
        return False


def why_offline(name: str, key: str | None, server: str | None) -> str:
    """Return why a tracker's server cannot be used, or an empty string."""
    if not key:
        return "there is no API key"
    server = server or SERVERS[name]
    return "" if can_reach(server) else f"{urlsplit(server).hostname or server} cannot be reached"


def start_tensorboard(run: Description, run_id: str, resumes: bool, after: int) -> tuple[GeneralTracker, Opened]:
    """Write events to the run's folder. TensorBoard ignores the earlier events of the steps after `after`."""
    from accelerate.tracking import TensorBoardTracker

    silence_writers()
    tracker = start(TensorBoardTracker("tensorboard", run.folder, purge_step=after + 1))
    rows = [f"| {key} | {_cell(value)} |" for key, value in (run.config | run.tags).items()]
    tracker.log({"run": "\n".join(["| key | value |", "|---|---|", *rows])}, step=max(0, after))
    return tracker, Opened(run_id, keeps="each step")


def silence_writers() -> None:
    """Print no traceback of TensorBoard's own threads, as when the disk is full: the next call raises the error."""
    usual = threading.excepthook
    if getattr(usual, "silences_writers", False):
        return

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            usual(arguments)

    hook.silences_writers = True  # type: ignore[attr-defined]
    threading.excepthook = hook


def _cell(value: object) -> str:
    return str(value).replace("|", r"\|").replace("\n", " ")


def start_wandb(run: Description, run_id: str, resumes: bool, after: int) -> tuple[GeneralTracker, Opened]:
    """Start or resume a run of Weights & Biases."""
    import wandb
    from accelerate.tracking import WandBTracker

    settings: dict[str, object] = {
        "console": "off", "disable_git": True, "init_timeout": INIT_SECONDS, "save_code": False,
        "x_stats_pid": os.getppid(),
    }  # fmt: skip
    reason, mode = "", os.environ.get("WANDB_MODE")
    if mode is None:
        has_key = wandb.login(prompt=False, verify=False) if "WANDB_API_KEY" not in os.environ else True
        reason = why_offline("wandb", "key" if has_key else None, os.environ.get("WANDB_BASE_URL"))
        mode = "offline" if reason else "online"
    tracker = start(
        WandBTracker(
            os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            resume="allow",
            name=run.name,
            dir=str(_made(run.data)),
            tags=tags_of_wandb(run.tags),
            mode=mode,
            settings=wandb.Settings(**settings),
        ),
        run.config,
    )
    tracker.tracker.define_metric("step", hidden=True)
    tracker.tracker.define_metric("*", step_metric="step")
    if mode == "offline":
        paths = run.data / "wandb" / f"offline-run-*-{run_id}"
        return tracker, Opened(run_id, _offline(reason, f"wandb sync {paths}"))
    return tracker, Opened(run_id, _at(tracker.tracker.url))


def tags_of_wandb(tags: Mapping[str, str]) -> list[str]:
    """Return the tags as W&B accepts them: it refuses empty and long ones."""
    return [tag[:MAX_WANDB_TAG] for tag in tags.values() if tag]


def start_mlflow(run: Description, run_id: str, resumes: bool, after: int) -> tuple[GeneralTracker, Opened]:
    """Start or resume a run of MLflow, by default in a database in the folder of the runs."""
    place = f"sqlite:///{run.folder.parent.resolve() / 'mlflow.db'}"
    place = os.environ.setdefault("MLFLOW_TRACKING_URI", place)
    import mlflow
    from accelerate.tracking import MLflowTracker
    from mlflow.exceptions import MlflowException

    mlflow.set_tracking_uri(place)
    known: dict[str, str] | None = None
    if resumes:
        try:
            known = mlflow.get_run(run_id).data.params
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
    tracker = start(MLflowTracker(PROJECT, run_name=run.name, run_id=None if known is None else run_id))
    config = {key.replace("[", "_").replace("]", "_"): value for key, value in run.config.items()}
    tracker.store_init_configuration({key: value for key, value in config.items() if key not in (known or {})})
    changed = {key: value for key, value in config.items() if str(value) != (known or {}).get(key, str(value))}
    mlflow.set_tags(run.tags | {f"resumed.{key}": value for key, value in changed.items()})  # parameters never change
    return tracker, Opened(tracker.tracker.info.run_id, f"in {place}", "each step")


def start_trackio(run: Description, run_id: str, resumes: bool, after: int) -> tuple[GeneralTracker, Opened]:
    """Start or resume a run of Trackio, by default in the folder of the runs."""
    folder = os.environ.setdefault("TRACKIO_DIR", str(run.folder.parent.resolve() / "trackio"))  # before the import
    from accelerate.tracking import TrackioTracker

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    tracker = start(
        TrackioTracker(
            project,
            name=run.name,
            resume="allow" if resumes else "never",
            embed=False,
            auto_log_cpu=False,
            config={**run.config, **{f"tag.{key}": value for key, value in run.tags.items()}},
        )
    )
    server = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
    return tracker, Opened(run_id, f"in {server or folder}")


def start_comet(run: Description, run_id: str, resumes: bool, after: int) -> tuple[GeneralTracker, Opened]:
    """Start or resume an experiment of Comet."""
    import comet_ml
    from accelerate.tracking import CometMLTracker

    config = comet_ml.config.get_config()
    reason = why_offline("comet", config["comet.api_key"], config["comet.url_override"])
    is_online = not reason and os.environ.get("COMET_START_ONLINE", "1").lower() not in ("0", "false")
    folder = os.environ.get("COMET_OFFLINE_DIRECTORY") or str(_made(run.data / "comet"))
    for left in Path(folder).glob(f"{run_id}-*.zip"):
        if left.stat().st_size <= EMPTY_ZIP_BYTES:  # of an experiment that was killed; an upload would fail on it
            left.unlink()
    own = (
        "log_code log_graph parse_args log_git_metadata log_git_patch log_env_network auto_output_logging "
        "auto_param_logging auto_metric_logging auto_histogram_tensorboard_logging"
    )
    tracker = start(
        CometMLTracker(
            os.environ.get("COMET_PROJECT_NAME", PROJECT),
            experiment_key=run_id,
            mode="get_or_create",
            online=is_online,
            experiment_config=comet_ml.ExperimentConfig(
                **dict.fromkeys(own.split(), False),
                display_summary_level=0,
                offline_directory=folder,
                name=run.name,
                tags=[*run.tags.values()],
            ),
        ),
        run.config,
    )
    if not is_online:
        return tracker, Opened(run_id, _offline(reason, f"comet upload {folder}/*.zip"), "the end")
    return tracker, Opened(run_id, _at(tracker.tracker.url))


def start_swanlab(run: Description, run_id: str, resumes: bool, after: int) -> tuple[GeneralTracker, Opened]:
    """Start or resume an experiment of SwanLab."""
    import swanlab
    from accelerate.tracking import SwanLabTracker
    from swanlab.sdk.internal.settings import create_settings

    known, reason, mode = create_settings(), "", os.environ.get("SWANLAB_MODE")
    if mode is None:
        reason = why_offline("swanlab", known.api_key, known.api_host)
        mode = "offline" if reason else "online"
    folder = _made(run.data / "swanlab")
    tracker = start(
        SwanLabTracker(
            os.environ.get("SWANLAB_PROJECT") or os.environ.get("SWANLAB_PROJ_NAME") or PROJECT,
            id=run_id[:21],
            resume="allow",
            name=run.name,
            tags=[*run.tags.values()],
            mode=mode,
            log_dir=str(folder),
            settings=swanlab.Settings(interactive=False, probe=swanlab.Settings.Probe(git=False)),
        ),
        run.config,
    )
    if mode == "offline":
        return tracker, Opened(run_id, _offline(reason, f"swanlab sync {folder}/run-*-{run_id[:21]}"))
    return tracker, Opened(run_id, f"in {folder}" if mode == "local" else _at(tracker.tracker.url))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _offline(reason: str, command: str) -> str:
    return f"offline{reason and f', because {reason}'}; to upload it, run: {command}"


def _at(url: object) -> str:
    return f"at {url}" if url else ""


MAKERS: dict[str, Callable[[Description, str, bool, int], tuple[GeneralTracker, Opened]]] = {
    "tensorboard": start_tensorboard,
    "wandb": start_wandb,
    "mlflow": start_mlflow,
    "trackio": start_trackio,
    "comet": start_comet,
    "swanlab": start_swanlab,
}
