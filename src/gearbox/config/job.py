"""How the rows of a step are divided into micro batches."""

from __future__ import annotations


def accumulation(rows: int, data_parallel: int, micro_rows: int) -> tuple[int, int]:
    """(micro batches a rank runs in a step, rows in each); the last round may be filled with empty rows."""
    micro_rows = min(micro_rows, -(-rows // data_parallel))
    return -(-rows // (data_parallel * micro_rows)), micro_rows
