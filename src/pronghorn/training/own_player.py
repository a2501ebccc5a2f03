"""A player of the agents of one signature: what it sees and does is translated between their own spaces and the pool's.

What a policy does with its rows is in player.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pronghorn.envs.own_rows import Actions, OwnRows
from pronghorn.training.player import RowPlayer, Rows
from pronghorn.types import Ready


class OwnPlayer(RowPlayer):
    """Brings deliveries to another player in the form of its own rows, and its answers back. It plays no other rows."""

    def __init__(self, own: OwnRows, player: RowPlayer) -> None:
        """player: was made for `own` as its pool."""
        self._own, self._player = own, player

    def record(self, ready: Ready) -> None:
        self._player.record(self._own.narrowed(ready))
        self.num_steps = self._player.num_steps

    def needs_slot(self, ready: Ready) -> NDArray[np.bool_]:
        return self._player.needs_slot(self._own.narrowed(ready))

    def start_unrolls(self, ready: Ready) -> bool:
        return self._player.start_unrolls(self._own.narrowed(ready))

    def act(self, ready: Ready) -> Actions:
        return self._own.widened(self._player.act(self._own.narrowed(ready)))

    def leave(self, rows: Rows) -> None:
        self._player.leave(self._own.numbers(rows))

    def restart(self, seed: int) -> None:
        self._player.restart(seed)

    def load_weights(self) -> None:
        self._player.load_weights()

    def park(self, rows: Rows) -> None:
        self._player.park(self._own.numbers(rows))

    def unpark(self, rows: Rows) -> None:
        self._player.unpark(self._own.numbers(rows))

    def batch_waits(self) -> bool:
        return self._player.batch_waits()

    def wait_for_slots(self, timeout_s: float) -> None:
        self._player.wait_for_slots(timeout_s)
