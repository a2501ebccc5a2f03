"""The benchmark of the transport, with actors in this process instead of Ray's: it counts what it says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from stand_in import Handle, StandIn

import cluster


class InThisProcess(StandIn):
    """Made-up actors, no Ray."""

    def place(self, index: int, incarnation: int) -> Handle:
        self.handles.append(Handle(cluster.MadeUpActor(index, incarnation)))
        return self.handles[-1]


@pytest.mark.parametrize(("shape", "kb", "length"), [("dmlab", 2100, 100), ("atari", 170, 20)])
def test_unrolls_and_bytes_of_both_shapes(shape: str, kb: float, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unroll of DeepMind Lab is 101 pictures of 20.7 kB, one of Atari 24 distinct frames of 7.1 kB."""
    monkeypatch.setattr(cluster.RayEngine, "open", lambda settings, actor: InThisProcess())
    record: dict[str, Any] = cluster.measure(shape, 1, 0.5)
    assert record["kb_per_unroll"] == pytest.approx(kb, rel=0.02)
    assert record["steps_per_s"] == pytest.approx(length * record["unrolls_per_s"])
    assert record["unrolls_per_s"] > 0
    assert record["receive_ms"] > 0
    assert record["gather_ms"] > 0
