"""Test that a folder is pushed to the Hub on request: a server on this machine takes its place."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from gearbox.errors import UserError
from gearbox.exporting import hub


@pytest.fixture
def server(monkeypatch):
    """Yield what the server received, and the status with which it answers."""
    received = {"status": 200, "files": {}, "created": None, "tokens": set(), "there": [], "deleted": []}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            received["tokens"].add(self.headers.get("Authorization"))
            address, answer = f"http://{self.headers['Host']}/me/mine", {}
            if self.path == "/api/repos/create":
                received["created"] = json.loads(body)
                answer = {"url": address, "name": "me/mine"}
            elif "/preupload/" in self.path:
                asked = json.loads(body)["files"]
                answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
            elif "/commit/" in self.path:
                lines = [json.loads(line) for line in body.splitlines()]
                files = [line["value"] for line in lines if line["key"] == "file"]
                received["files"] = {f["path"]: base64.b64decode(f["content"]) for f in files}
                received["deleted"] = sorted(line["value"]["path"] for line in lines if line["key"] == "deletedFile")
                answer = {"commitUrl": f"{address}/commit/0123", "commitOid": "0123", "success": True}
            self._reply(answer)

        def do_GET(self):
            files = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in received["there"]]
            self._reply(files if "/tree/" in self.path else {"sha": "0123", "id": "me/mine", "siblings": []})

        def _reply(self, answer):
            text = json.dumps(answer).encode()
            self.send_response(received["status"])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            return

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{listening.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_only_for_this_test")
    yield received
    listening.shutdown()
    listening.server_close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/config.json").write_text("{}")
    return tmp_path / "x"


@pytest.mark.parametrize("public", [False, True])
def test_a_folder_is_pushed_whole_and_private_unless_asked(server, folder, public):
    assert hub.push(folder, "me/mine", public).endswith("/me/mine")
    created = server["created"]
    assert (created.get("private") is True or created.get("visibility") == "private") != public
    assert server["files"] == {"config.json": b"{}"}
    assert server["tokens"] == {"Bearer hf_only_for_this_test"}


def test_no_file_of_an_older_model_is_left(server, folder):
    """An adapter's config would add it to the merged model; one file of weights would hide several."""
    older = ["adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json", "x-F16.gguf"]
    server["there"] = [*older, "config.json", "eval.csv", "draft/model.safetensors", ".gitattributes"]
    hub.push(folder, "me/mine", False)
    assert server["deleted"] == sorted(older) and {*server["files"]} == {"config.json"}


@pytest.mark.parametrize("name", ["name", "me/a..b", "me/a--b", "me/x.git", "m\u00e9/x", "me/x."])
def test_an_id_that_the_hub_refuses_is_refused_before_the_export(monkeypatch, name):
    monkeypatch.setenv("HF_TOKEN", "hf_only_for_this_test")
    with pytest.raises(UserError, match=r"--push: .* is not an id such as organization/name"):
        hub.check(name)


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_refusal_is_one_line_without_the_token(server, folder, status):
    server["status"] = status
    with pytest.raises(UserError) as error:
        hub.push(folder, "me/mine", False)
    text = str(error.value)
    assert text.startswith("--push: me/mine") and "\n" not in text and "hf_only" not in text and str(folder) in text


def test_no_network_is_one_line(folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_only_for_this_test")
    with pytest.raises(UserError, match=r"the Hub cannot be reached.*the export is in"):
        hub.push(folder, "me/mine", False)
