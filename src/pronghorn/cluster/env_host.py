"""The remote side of central inference: an actor that only runs environments, and is told every action.

It has no network. What calls it is engine.py, or a test; what it answers is a `Ready` of the rows that are ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.cluster.actor import RemoteActor, reported
from pronghorn.training.sampler import part_of
from pronghorn.types import LOST, Ready


@dataclass(frozen=True)
class Actions:
    """Answers to rows [n] of one actor, by whole units; none: only say what is ready.

    discrete [n, D], continuous [n, C].  wait_s: for the first row that is ready.
    """

    rows: NDArray[np.int64]
    discrete: NDArray[np.int64]
    continuous: NDArray[np.float32]
    wait_s: float


@dataclass(frozen=True)
class Rows:
    """What is ready, or None; and how many workers were restarted so far."""

    ready: Ready | None
    restarts: int


class EnvHost(RemoteActor):
    """One actor's environments."""

    @reported
    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        """Nothing to make: the network is the learner's."""
        self._unanswered = 0  # rows that were delivered and wait for their actions

    @reported
    def exchange(self, order: Actions, weights: None) -> Rows:  # type: ignore[override]
        """Send the actions on, and answer with what is ready."""
        if len(order.rows):
            self.pool.send(order.rows, order.discrete, order.continuous)
            self._unanswered -= len(order.rows)
        moves = self._unanswered < self.pool.num_rows
        ready = self.pool.recv(order.wait_s if moves else 0.0)
        if ready is None:
            return Rows(None, self.pool.restarts)
        self._unanswered += int((ready.event != LOST).sum())
        # A copy: what the pool delivers is valid until its next recv only.
        return Rows(part_of(ready, np.ones(len(ready.rows), np.bool_)), self.pool.restarts)
