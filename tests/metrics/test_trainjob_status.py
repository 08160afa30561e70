"""Test the status of a TrainJob against a TLS server that judges each post by the models of Kubeflow's API."""

import re
import threading
import time

import pytest
from rich.console import Console

from gearbox.console import Screen
from gearbox.metrics import trainjob_status
from gearbox.metrics.trainjob_status import TrainJobStatus
from support.trainjob_server import serving

LINE = {"step": 50, "loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "rows_hash": "ab", "tokens": 1234567, "seconds": 100.0}


@pytest.fixture
def screen():
    return Screen(record=True, force_terminal=False, width=200, markup=False)


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(trainjob_status, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(trainjob_status, "RETRY_SECONDS", 0.01)


def metrics(status):
    return {metric["name"]: metric["value"] for metric in status["metrics"]}


def test_progress_time_left_and_metrics(tmp_path, monkeypatch, screen):
    with serving(tmp_path, monkeypatch) as server:
        trainjob = TrainJobStatus(screen, num_steps=150)
        trainjob.note(LINE)
        ((code, authorization, first),) = server.wait_for(1)
        assert (code, authorization) == (200, "Bearer first-token")
        assert (first["progressPercentage"], first["estimatedRemainingSeconds"]) == (33, 200)
        assert metrics(first) == {
            "step": "50", "loss": "2.5", "grad_norm": "1", "lr": "0.001", "tokens": "1234567"
        }  # fmt: skip

        trainjob.note({"step": 100, "eval_loss": 0.25, "eval_exact_match": float("nan")})
        trainjob.note(LINE | {"step": 150, "loss": None, "seconds": 300.0})
        time.sleep(0.3)
        assert len(server.posts()) == 1, "ten seconds lie between two posts"
        server.rotate("second-token")
        trainjob.close()
        (_, (code, authorization, last)) = server.wait_for(2)
        assert (code, authorization) == (200, "Bearer second-token"), "the token's file is read for each post"
        assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
        assert metrics(last)["eval_loss"] == "0.25" and metrics(last)["loss"] == "2.5"
        assert "eval_exact_match" not in metrics(last)
        trainjob.note(LINE)
        assert len(server.posts()) == 2 and screen.export_text() == ""


def test_nothing_starts_outside_of_a_trainjob(monkeypatch, screen):
    monkeypatch.delenv(trainjob_status.SERVER_URL, raising=False)
    trainjob = TrainJobStatus(screen, num_steps=10)
    trainjob.note(LINE)
    trainjob.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "trainjob-status"]
    assert trainjob.latest == {}


def test_a_server_that_does_not_answer_delays_no_step(tmp_path, monkeypatch, screen):
    with serving(tmp_path, monkeypatch, seconds=600) as server:
        monkeypatch.setattr(trainjob_status, "POST_SECONDS", 0.5)
        trainjob = TrainJobStatus(screen, num_steps=10**6)
        start = time.perf_counter()
        for step in range(1000):
            trainjob.note(LINE | {"step": step})
        assert time.perf_counter() - start < 60, "a step waits for no post"
        start = time.perf_counter()
        trainjob.close()
        assert time.perf_counter() - start < 60, "the end waits for one post, and not for its answer"
        assert server.posts() == []


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        (trainjob_status.SERVER_URL, "https://localhost:1/status", "Connection refused"),
        (trainjob_status.SERVER_URL, "https://no.such.host.invalid/status", "not known|resolution|No address"),
        (trainjob_status.SERVER_URL, "https://[bad", "Invalid IPv6"),
        (trainjob_status.SERVER_URL, "no address", "must begin with https://"),
        (trainjob_status.SERVER_CERTIFICATE, "/no/ca.crt", "No such file"),
        (trainjob_status.SERVER_TOKEN, "/no/token", "No such file"),
        (trainjob_status.SERVER_TOKEN, None, "KUBEFLOW_TRAINER_SERVER_TOKEN is not set"),
        ("token", "forged", "403 Forbidden"),
        ("token", "forged\nsecond", "TOKEN has no token, or white space in it"),
        ("certificate", None, "certificate verify failed"),
        ("scheme", None, "must begin with https://"),
        ("path", None, "404 Not Found"),
    ],
)
def test_a_failure_is_printed_once_and_training_goes_on(
    tmp_path, monkeypatch, quickly, screen, variable, value, reason
):
    with serving(tmp_path, monkeypatch) as server:
        if variable == "token":
            (tmp_path / "forged").write_text(value)
            monkeypatch.setenv(trainjob_status.SERVER_TOKEN, str(tmp_path / "forged"))
        elif variable == "certificate":
            monkeypatch.delenv(trainjob_status.SERVER_CERTIFICATE)  # the system's authorities do not know the server
        elif variable in ("scheme", "path"):
            changed = server.url.replace("https", "http") if variable == "scheme" else f"{server.url}es"
            monkeypatch.setenv(trainjob_status.SERVER_URL, changed)
        elif value is None:
            monkeypatch.delenv(variable)
        else:
            monkeypatch.setenv(variable, value)
        trainjob = TrainJobStatus(screen, num_steps=100)
        for step in range(20):
            trainjob.note(LINE | {"step": step})
            time.sleep(0.02)
        trainjob.close()
        printed = screen.export_text()
        assert "second" not in printed, "the token is shown"
        assert re.search(reason, printed) and printed.count("TrainJob's status cannot be updated") == 1, printed
        assert not [code for code, _, _ in server.posts() if code == 200]
        if variable == "scheme":
            assert server.posts() == [], "the token is not sent in clear text"


def test_a_proxy_gets_no_token(tmp_path, monkeypatch, quickly, screen):
    monkeypatch.setenv("HTTPS_PROXY", "http://localhost:1")
    monkeypatch.setenv("https_proxy", "http://localhost:1")
    with serving(tmp_path, monkeypatch) as server:
        trainjob = TrainJobStatus(screen, num_steps=100)
        trainjob.note(LINE)
        server.wait_for(1)
        trainjob.close()
        assert screen.export_text() == ""


def test_huge_times_fit_into_32_bits(screen: Console):
    trainjob = TrainJobStatus(screen, num_steps=10**9)
    trainjob.latest = {"step": 1, "seconds": 1e6}
    assert trainjob.status()["trainerStatus"]["estimatedRemainingSeconds"] == 2**31 - 1
    assert TrainJobStatus(screen, 0).status()["trainerStatus"]["progressPercentage"] == 0


def test_rank_0_of_a_run_reports(train, tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch) as server:
        run = train("ddp", "train.steps=4", "eval.every=4", "eval.samples=6", ranks=2)
        assert run.codes == [0, 0], run.output
        posts = server.posts()
        assert 1 <= len(posts) <= 3 and {code for code, _, _ in posts} == {200}, "one rank, every ten seconds"
        last = posts[-1][2]
        assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
        assert float(metrics(last)["loss"]) == pytest.approx(run.losses[-1], rel=1e-5)
        assert float(metrics(last)["eval_loss"]) == pytest.approx(run.lines("eval_loss")[-1]["eval_loss"], rel=1e-5)
        assert "trainjob-status" not in run.output and "cannot be updated" not in run.output
