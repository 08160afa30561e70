"""Plant canary secrets in the environment and in the data, and search everything that a run writes for them."""

import io
import json
import os
import subprocess
import sys

import pytest

from gearbox import ROOT, redact
from gearbox.checkpoint import folders
from gearbox.launch.outcome import OUTCOME_FILE, write_outcome

CANARIES = {
    "HF_TOKEN": "hf_canaryAAAAAAAAAAAAAAAA", "WANDB_API_KEY": "canaryBBBBBBBBBBBBBBBB",
    "AWS_SECRET_ACCESS_KEY": "canaryCCCC/CCCC+CCCC", "MLFLOW_TRACKING_PASSWORD": "canaryDDDDDDDD",
    "COMET_API_KEY": "canaryEEEEEEEE", "AZURE_STORAGE_CONNECTION_STRING": "canaryFFFFFFFF",
}  # fmt: skip


@pytest.fixture
def secrets(monkeypatch):
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)


def test_secrets_are_replaced_by_their_names(secrets, monkeypatch):
    for name, value in CANARIES.items():
        assert redact.redact(f"a {value} b") == f"a [{name}] b"
    assert redact.redacted({"x": ["hf_canaryAAAAAAAAAAAAAAAA", 1, None], "canaryEEEEEEEE": 2.5}) == {
        "x": ["[HF_TOKEN]", 1, None], "[COMET_API_KEY]": 2.5
    }  # fmt: skip
    monkeypatch.setenv("LONGER_TOKEN", "canaryBBBBBBBBBBBBBBBB-and-more")
    assert redact.redact("canaryBBBBBBBBBBBBBBBB-and-more") == "[LONGER_TOKEN]", (
        "the longest secret must be replaced first"
    )


def test_harmless_values_are_kept(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsefalse")
    monkeypatch.setenv("MY_TOKEN", "short")
    monkeypatch.setenv("PATH_TO_DATA", "/data/chats.jsonl")
    assert redact.redact("falsefalse short /data/chats.jsonl") == "falsefalse short /data/chats.jsonl"


def test_printed_lines(secrets, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    redact.guard_streams()
    print("token", os.environ["HF_TOKEN"])
    assert out.getvalue() == "token [HF_TOKEN]\n"


def test_no_file_and_no_line_of_a_run_contains_a_secret(train, tmp_path, secrets, monkeypatch):
    """Secrets in the data, in role names and in an error appear in no file and no printed line."""
    lines = [{"instruction": f"say {CANARIES['HF_TOKEN']} {i}", "output": CANARIES["COMET_API_KEY"]} for i in range(30)]
    lines.append({"instruction": CANARIES["WANDB_API_KEY"]})
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    given = (
        f"data.path={path}", "data.on_bad_row=skip", "eval.fraction=0.3", "eval.samples=2", "eval.sample_tokens=1",
        "save.every=1", "data.fields={instruction: instruction, output: output}",
        f"data.roles={{{CANARIES['MLFLOW_TRACKING_PASSWORD']}: user}}",
    )  # fmt: skip
    usual = redact.guard_streams
    from gearbox.launch import watchdog

    monkeypatch.setattr(watchdog.Watchdog, "__init__", guarded(watchdog.Watchdog.__init__, usual))
    outcome = train("single", *given)
    assert outcome.codes == [0], outcome.output
    written = {"the screen": outcome.output.encode()}
    written |= {str(file): file.read_bytes() for file in outcome.folder.rglob("*") if file.is_file()}
    assert any(name.endswith("manifest.json") for name in written) and any("events.out" in name for name in written)
    for name, content in written.items():
        for canary in CANARIES.values():
            assert canary.encode() not in content, name
    assert "[HF_TOKEN]" in (outcome.folder / "report.html").read_text()
    assert "[MLFLOW_TRACKING_PASSWORD]" in (outcome.folder / "resolved.yaml").read_text()
    again = train("single", *given, "run.name=tiny-single", "run.resume=latest", "train.steps=4")
    assert again.codes == [0], "a redacted recipe differs from itself"


def guarded(usual, guard):
    """Guard the streams as cli.run does before main, because the tests' forked ranks start at main."""

    def make(self):
        guard()
        usual(self)

    return make


@pytest.mark.cold
def test_a_traceback_contains_no_secret(secrets, tmp_path):
    code = (
        "from gearbox.launch import cli\ndef main(_): raise RuntimeError('with canaryBBBBBBBBBBBBBBBB')\ncli.run(main)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "with [WANDB_API_KEY]" in ended.stderr and "canary" not in ended.stderr
    outcome = tmp_path / "outcome"
    os.environ[OUTCOME_FILE] = str(outcome)
    try:
        write_outcome("failed", "with canaryBBBBBBBBBBBBBBBB")
    finally:
        del os.environ[OUTCOME_FILE]
    assert "canary" not in outcome.read_text()


def test_without_redaction_the_secret_would_be_found(train, tmp_path, secrets, monkeypatch):
    monkeypatch.setattr(folders, "redacted", lambda value: value)
    outcome = train("single", "save.every=1", f"data.roles={{{CANARIES['COMET_API_KEY']}: user}}")
    found = [file for file in outcome.folder.rglob("manifest.json") if CANARIES["COMET_API_KEY"] in file.read_text()]
    assert found
