"""Gearbox: one training script for language models, with the backend as a gear."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
