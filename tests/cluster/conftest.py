"""Fixtures of the stand-in for Ray."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from stand_in import clock, engine  # noqa: E402

__all__ = ["clock", "engine"]
