"""Tests of zero3_nvme are skipped with a reason if DeepSpeed cannot run its disk operations here."""

from pathlib import Path

import deepspeed
import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch.utils import cpp_extension

from support.gears import why_no_disk_operations


@pytest.mark.parametrize(
    ("has_libaio", "compiled", "reason"),
    [
        (True, ["pin_memory", "async_io"], ""),
        (True, ["pin_memory"], "which takes minutes"),
        (True, ["async_io"], "which takes minutes"),
        (True, ["pin_memory", "async_io", "elsewhere"], "which takes minutes"),
        (True, ["pin_memory", "async_io", "locked"], "which takes minutes"),
        (False, ["pin_memory", "async_io"], "apt-get install libaio-dev"),
        (False, [], "apt-get install libaio-dev"),
    ],
)
def test_compiled_modules_and_libaio_are_both_needed(monkeypatch, tmp_path, has_libaio, compiled, reason):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose: has_libaio)
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    environment = "/elsewhere" if "elsewhere" in compiled else Path(deepspeed.__file__).parent
    for name in {*compiled} & {"pin_memory", "async_io"}:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
        (tmp_path / name / "build.ninja").write_text(f"build x.o: compile {environment}/x.cpp")
    if "locked" in compiled:
        (tmp_path / "async_io" / "lock").touch()
    found = why_no_disk_operations.__wrapped__()
    assert reason in found and bool(found) == bool(reason)
