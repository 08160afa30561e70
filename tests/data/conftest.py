"""Give each data test a separate cache."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the cache folder of this test."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gearbox"
