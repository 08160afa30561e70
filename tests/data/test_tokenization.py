"""Guards the tokenizing processes: results keep the order of the file, and no process is left running."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gearbox import ROOT
from gearbox.data import loss_mask
from gearbox.errors import UserError
from support.cold import survivors
from support.corpora import jsonl, read


def test_the_first_bad_line_is_reported_whichever_process_finds_it(tokenizer, tmp_path):
    lines = [json.dumps({"text": "x" * 2000})] * 900
    lines[600] = lines[150] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"a\.jsonl:151: is not JSON"):
        read(tokenizer, tmp_path / "a.jsonl")
    found = read(tokenizer, tmp_path / "a.jsonl", "data.on_bad_row=skip")
    assert [number for _, number, _ in found.bad] == [151, 601] and len(found) == 898
    assert found.record_numbers.tolist() == [n for n in range(1, 901) if n not in (151, 601)]


def test_a_file_that_changes_while_it_is_read(tokenizer, tmp_path, cache, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(50)])
    usual = loss_mask.ChatTokenizer.encode

    def encode_slowly(self, documents):
        with path.open("a") as file:
            file.write('{"text": "late"}\n')
        return usual(self, documents)

    monkeypatch.setattr(loss_mask.ChatTokenizer, "encode", encode_slowly)
    with pytest.raises(UserError, match=r"a\.jsonl: changed while it was being read; run again when it is complete"):
        read(tokenizer, path)
    assert not list(cache.glob("*[!k]"))


@pytest.mark.cold
def test_tokenizer_threads_do_not_hang_after_a_fork(tmp_path, cache):
    """Users set TOKENIZERS_PARALLELISM to silence a warning. The pool's processes then waited forever."""
    jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " * 50} for i in range(300)])
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache.parent), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "src/preview.py", f"data.path={tmp_path}/a.jsonl"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def start_on_a_large_file(tmp_path: Path, cache: Path) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """Return a running src/preview.py and its tokenizing processes."""
    jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " * 5000} for i in range(400)])
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache.parent)}
    command = [sys.executable, "src/preview.py", f"data.path={tmp_path}/a.jsonl"]
    parent = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    workers: list[psutil.Process] = []
    while len(workers) < 2 and parent.poll() is None:
        time.sleep(0.05)
        workers = psutil.Process(parent.pid).children()
    assert len(workers) >= 2, parent.communicate()
    return parent, workers


@pytest.mark.cold
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core there is no pool")
def test_a_killed_builder_leaves_no_process_and_the_next_builder_starts_over(tokenizer, tmp_path, cache):
    parent, workers = start_on_a_large_file(tmp_path, cache)
    parent.kill()
    parent.wait()
    left = survivors(workers)
    for worker in left:
        worker.kill()
    assert not left
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == [".partial"]
    jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " * 5000} for i in range(400)])
    found = read(tokenizer, tmp_path / "a.jsonl")
    assert len(found) == 400
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == [""]


@pytest.mark.cold
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core there is no pool")
def test_a_process_that_is_killed_for_memory_is_reported(tmp_path, cache):
    parent, workers = start_on_a_large_file(tmp_path, cache)
    workers[0].kill()
    message = parent.communicate()[1]
    assert parent.returncode == 2
    assert message.strip() == "gearbox: data.path: a tokenizing process was killed; it probably ran out of memory"
