"""Tests fork all ranks before any of them runs, and a rank that hangs shows where."""

import os
import time

import pytest

from support import ranks

pytestmark = pytest.mark.ranks


def test_no_rank_runs_before_all_are_forked(tmp_path, monkeypatch):
    """A rank that connects to the store during the next fork can leave that child a lock that nobody releases."""
    began, began_before_a_fork, fork = tmp_path / "began", [], os.fork

    def slow_fork():
        time.sleep(0.2)  # long enough for earlier ranks to begin
        began_before_a_fork.append(began.exists())
        return fork()

    monkeypatch.setattr(os, "fork", slow_fork)
    codes, output = ranks.fork_ranks(3, {}, began.touch)
    assert codes == [0, 0, 0], output
    assert began.exists() and began_before_a_fork == [False, False, False]


def test_a_rank_that_hangs_shows_where(monkeypatch):
    monkeypatch.setattr(ranks, "TIMEOUT", 6)
    monkeypatch.setattr(ranks, "PATIENCE", 5)

    def hang_here():
        time.sleep(60)

    codes, output = ranks.fork_ranks(2, {}, hang_here)
    assert codes == [-9, -9]
    assert output.count("in hang_here") == 2, output
