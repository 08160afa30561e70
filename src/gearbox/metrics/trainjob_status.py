"""Show a run's progress in the status of its Kubeflow TrainJob: `kubectl get trainjob NAME -o yaml`, trainerStatus.

Kubeflow Trainer puts an address, a certificate and a token into each pod of a TrainJob, if its feature TrainJobStatus
is on. A thread of rank 0 sends the newest numbers there. The caller only hands them over, and never waits for the
network but at the end of a run, for at most POST_SECONDS.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

SERVER_URL, SERVER_CERTIFICATE, SERVER_TOKEN = (
    f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN")
)
"""Variables with the address, and with the paths of two files that Kubernetes renews while the pod runs."""

REPORTED = (
    *("step", "loss", "eval_loss", "eval_perplexity", "eval_exact_match", "eval_metric", "eval_accuracy"),
    *("eval_margin", "accuracy", "margin", "grad_norm", "lr", "tokens", "tokens_per_second", "memory_peak_bytes"),
    *("num_skipped", "save_seconds"),
)
"""The keys of metrics.jsonl that are sent. A status is stored in the cluster's database, so it stays small."""

INTERVAL_SECONDS = 10.0  # between two posts; the server serves all jobs of a cluster
RETRY_SECONDS = 60.0  # after a post that failed
POST_SECONDS = 5.0
MAX_SECONDS_LEFT = 2**31 - 1  # the API has 32 bits for it


class TrainJobStatus:
    """The status of the TrainJob that this process belongs to. Outside of a TrainJob every call does nothing."""

    def __init__(self, screen: Console, num_steps: int) -> None:
        """Read where to send the status, and start nothing yet. Print a failure to `screen`, once."""
        self.url = os.environ.get(SERVER_URL, "")
        self.screen, self.num_steps = screen, num_steps
        self.latest: dict[str, float] = {}
        """The newest value of each reported key."""
        self._lock = threading.Lock()
        self._wakeup, self._ends, self._has_failed = threading.Event(), False, False
        self._thread: threading.Thread | None = None

    def note(self, line: Mapping[str, object]) -> None:
        """Take the numbers of a line of metrics.jsonl, which the next post sends."""
        if not self.url or self._ends:
            return
        numbers = {
            name: value for name, value in line.items() if isinstance(value, int | float) and math.isfinite(value)
        }
        with self._lock:
            self.latest |= numbers
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trainjob-status", daemon=True)
            with suppress(RuntimeError):  # no thread may be started here
                self._thread.start()

    def close(self) -> None:
        """Send the last numbers, and wait for that POST_SECONDS at most."""
        self._ends = True
        self._wakeup.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(POST_SECONDS)

    def _run(self) -> None:
        while True:
            ends = self._ends  # read before the numbers, so that the last ones are sent
            try:
                self._post(json.dumps(self.status()))
                seconds = INTERVAL_SECONDS
            except Exception as error:  # whatever it is, training continues
                seconds = RETRY_SECONDS
                self._print_once(error)
            if ends:
                return
            self._wakeup.wait(seconds)

    def status(self) -> dict[str, dict[str, object]]:
        """Return the body of a post, as UpdateTrainJobStatusRequest of Kubeflow Trainer's API defines it."""
        with self._lock:
            latest = dict(self.latest)
        step = min(int(latest.get("step", 0)), self.num_steps)
        status: dict[str, object] = {
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
            "progressPercentage": 100 * step // self.num_steps if self.num_steps else 0,
            "metrics": [{"name": name, "value": _text(latest[name])} for name in REPORTED if name in latest],
        }
        if step and "seconds" in latest:
            left = latest["seconds"] / step * (self.num_steps - step)
            status["estimatedRemainingSeconds"] = min(round(left), MAX_SECONDS_LEFT)
        return {"trainerStatus": status}

    def _post(self, body: str) -> None:
        """Send the body. Raise an exception unless the server accepts it.

        The token is sent only over TLS, to a server with this certificate. No redirect or proxy gets it.
        """
        url = urlsplit(self.url)
        if url.scheme != "https" or not url.hostname:
            raise ValueError(f"{SERVER_URL}={self.url}: must begin with https://")
        context = ssl.create_default_context(cafile=os.environ.get(SERVER_CERTIFICATE))
        token = Path(os.environ[SERVER_TOKEN]).read_text(encoding="ascii").strip()
        if token.split() != [token]:  # http.client would quote it in its refusal
            raise ValueError(f"the file of {SERVER_TOKEN} has no token, or white space in it")
        server = http.client.HTTPSConnection(url.hostname, url.port, timeout=POST_SECONDS, context=context)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            server.request("POST", url.path, body, headers)
            answer = server.getresponse()
            if answer.status != http.client.OK:
                raise ValueError(f"{answer.status} {answer.reason}")
        finally:
            server.close()

    def _print_once(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            reason = f"{SERVER_TOKEN} is not set" if isinstance(error, KeyError) else str(error) or type(error).__name__
            self.screen.print(f"the TrainJob's status cannot be updated: {reason[:200]}; training continues")


def _text(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.6g}"
