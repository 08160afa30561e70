"""Serve the status endpoint of Kubeflow Trainer over TLS, as far as its server in Go judges a request.

It answers like the Go server: 403 for a wrong token, 404 for another path, 413 for a large body, 422 for a body that
the API refuses, otherwise 200.
"""

import http.server
import json
import multiprocessing
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gearbox.metrics import trainjob_status

models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow_trainer_api is not installed")
STATUS_PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/research/trainjobs/qwen-7b/status"
MAX_BODY_BYTES = 2**16


class Server:
    """A server in its own process, so that ranks forked later do not share its threads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
        """Make a certificate, a token and the pod's variables. Each answer takes `seconds`, and no post is too slow."""
        monkeypatch.setattr(trainjob_status, "POST_SECONDS", 120.0)
        self.posts_file, self.token_file = folder / "posts", folder / "token"
        self.seconds = seconds
        self.certificate, key = folder / "ca.crt", folder / "key"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
             "-keyout", key, "-out", self.certificate],
            check=True, capture_output=True,
        )  # fmt: skip
        self.rotate("first-token")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.server = http.server.ThreadingHTTPServer(("localhost", 0), self.handler())
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://localhost:{self.server.server_port}{STATUS_PATH}"
        for name, value in (
            (trainjob_status.SERVER_URL, self.url),
            (trainjob_status.SERVER_CERTIFICATE, self.certificate),
            (trainjob_status.SERVER_TOKEN, self.token_file),
        ):
            monkeypatch.setenv(name, str(value))

    def rotate(self, token: str) -> None:
        self.token_file.write_text(f"{token}\n")

    def handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(outer.seconds)
                code = outer.judge(self.path, self.headers["Authorization"], body)
                with outer.posts_file.open("a") as file:
                    file.write(json.dumps([code, self.headers["Authorization"], body.decode()]) + "\n")
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        return Handler

    def judge(self, path: str, authorization: str, body: bytes) -> int:
        if path != STATUS_PATH:
            return 404
        if authorization != f"Bearer {self.token_file.read_text().strip()}":
            return 403
        if len(body) > MAX_BODY_BYTES:
            return 413
        try:
            given = json.loads(body)
            status = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(given).trainer_status
            known = {field.alias or name for name, field in type(status).model_fields.items()}
            assert set(given) == {"trainerStatus"} and set(given["trainerStatus"]) <= known  # the models ignore others
            assert status.last_updated_time.tzinfo is not None
            assert 0 <= status.progress_percentage <= 100  # these bounds are in the CRD, not in the Python models
            assert 0 <= (status.estimated_remaining_seconds or 0) < 2**31
            assert status.metrics and all(metric.name and metric.value for metric in status.metrics)
        except (AssertionError, ValueError, TypeError):
            return 422
        return 200

    def posts(self) -> list[tuple[int, str, dict]]:
        """Return (answer, Authorization, trainerStatus) of each post so far."""
        lines = self.posts_file.read_text().splitlines() if self.posts_file.exists() else []
        return [(code, given, json.loads(body)["trainerStatus"]) for code, given, body in map(json.loads, lines)]

    def wait_for(self, count: int) -> list[tuple[int, str, dict]]:
        deadline = time.monotonic() + 120
        while len(self.posts()) < count:
            assert time.monotonic() < deadline, f"{self.posts()}: expected {count} posts"
            time.sleep(0.02)
        return self.posts()


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> Iterator[Server]:
    server = Server(folder, monkeypatch, seconds)
    process = multiprocessing.get_context("fork").Process(target=server.server.serve_forever, daemon=True)
    process.start()
    try:
        yield server
    finally:
        process.kill()
        process.join()
        server.server.server_close()
