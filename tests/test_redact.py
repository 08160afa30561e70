"""Plant canary secrets in the environment and in the data, and search everything that a run writes for them."""

import html
import io
import json
import os
import subprocess
import sys
from urllib.parse import quote

import pytest

from gearbox import ROOT, redact
from gearbox.checkpoint import folders
from gearbox.launch.outcome import OUTCOME_FILE, write_outcome

CANARIES = {
    "HF_TOKEN": "hf_canaryAAAAAAAAAAAAAAAA", "WANDB_API_KEY": "canaryBBBBBBBBBBBBBBBB",
    "AWS_SECRET_ACCESS_KEY": "canaryCCCC/CCCC+CCCC", "MLFLOW_TRACKING_PASSWORD": "canaryDDDDDDDD",
    "COMET_API_KEY": "canaryEEEEEEEE", "AZURE_STORAGE_CONNECTION_STRING": "canaryFFFFFFFF",
    "DB_PASS": 'canary"GG\\GG&<é>', "DATABASE_URL": "postgres://me:canaryHH@db/x",
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


@pytest.mark.parametrize(
    "name",
    "DB_PASS MYSQL_PWD PGPASSWORD SSH_PASSPHRASE GCP_CREDS MY_CREDENTIALS SENTRY_DSN REDIS_URL SLACK_WEBHOOK SSH_KEY "
    "GITHUB_TOKEN AUTH_KEY SESSION_COOKIE".split(),
)
def test_names_of_secrets(monkeypatch, name):
    monkeypatch.setenv(name, "canaryZZZZZZ")
    assert redact.redact("a canaryZZZZZZ b") == f"a [{name}] b"


@pytest.mark.parametrize(
    "name",
    "PWD OLDPWD TOKENIZERS_PATH NUM_PASSES COMPASS_HOME BYPASS_CACHE VDEV_PASSTHROUGH CREDIT_LINE KEYBOARD SSH_AGENT "
    "MAX_PASSAGES HOSTNAME DSN_STYLE_NAMES".split(),
)
def test_names_of_other_values(monkeypatch, name):
    monkeypatch.setenv(name, "/gone/canaryZZZZZZ")
    assert redact.redact("a /gone/canaryZZZZZZ b") == "a /gone/canaryZZZZZZ b"


@pytest.mark.parametrize("value", ["disabled", "10000000", "300000.5", "/tmp", "short"])
def test_values_that_are_no_secrets(monkeypatch, value):
    monkeypatch.setenv("MY_PASS", value)
    assert redact.redact(f"a {value} b") == f"a {value} b"


def test_a_secret_is_found_however_it_is_written(monkeypatch):
    secret = "a\"b\\c&d<é>'e f/g"
    monkeypatch.setenv("DB_PASS", secret)
    as_json = [json.dumps(secret), json.dumps(secret, ensure_ascii=False)]
    in_url = [f"https://x/?p={quote(secret, safe=safe)}" for safe in ("/", "")]
    for written in (secret, *as_json, *in_url, repr({"x": secret}), html.escape(secret)):
        said = redact.redact(written)
        assert "[DB_PASS]" in said and "b" not in said.replace("DB_PASS", ""), said
    key = "-----BEGIN KEY-----\n" + "Qx7" * 20 + "\n-----END KEY-----"
    monkeypatch.setenv("SIGNING_KEY", key)
    assert "Qx7" not in redact.redact(key) + redact.redact(json.dumps(key)) + redact.redact(key.splitlines()[1])


def test_a_secret_may_be_longer_than_a_path(monkeypatch):
    monkeypatch.setenv("MY_JWT", "x9" * 3000)
    assert redact.redact("x9" * 3000) == "[MY_JWT]"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgres://me:pw@db:5432/x", "postgres://me:[password]@db:5432/x"),
        ("redis://:p@ss:w@db/0", "redis://:[password]@db/0"),
        ("https://ghp_ABCDEFGHIJKLMNOPQRST@github.com/x", "https://[token]@github.com/x"),
        ("ssh://deployer@host/x https://a.b/c?d=e@f.g http://[::1]:80/@x", None),
        ("tcp://127.0.0.1:29500 is not me@example.com", None),
    ],
)
def test_passwords_in_urls(url, said):
    assert redact.redact(f"at {url}, ") == f"at {said or url}, "


def test_printed_lines(secrets, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    redact.guard_streams()
    print("token", os.environ["HF_TOKEN"])
    assert out.getvalue() == "token [HF_TOKEN]\n"
    monkeypatch.setattr(sys, "stdout", None)  # closed by the caller
    redact.guard_streams()
    assert sys.stdout.write("text") == 4
    sys.stdout.flush()


def test_no_file_and_no_line_of_a_run_contains_a_secret(train, tmp_path, secrets, monkeypatch):
    """Secrets in the data, in role names and in an error appear in no file and no printed line."""
    lines = [{"instruction": f"say {CANARIES['HF_TOKEN']} {i}", "output": CANARIES["COMET_API_KEY"]} for i in range(30)]
    lines += [{"instruction": CANARIES["DB_PASS"], "output": CANARIES["DATABASE_URL"]}] * 9
    lines += [{"instruction": "x", "output": 1, CANARIES["DB_PASS"]: 2}, {"instruction": CANARIES["WANDB_API_KEY"]}]
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
        assert b"canary" not in content, name
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
