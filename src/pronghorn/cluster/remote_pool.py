"""Environments on other machines as one `Pool`: the learner's device acts for all their rows (central inference).

    Espeholt et al. 2020, "SEED RL": observations travel to the learner, actions back; weights do not travel.

It acts for nobody itself: the ordinary sampler does, which cannot tell it from a pool of this machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.cluster.crew import Crew, Lost
from pronghorn.cluster.env_host import Actions, Rows
from pronghorn.config import Config
from pronghorn.errors import EnvError
from pronghorn.types import LOST, Ready

ANSWER_S = 0.5  # an actor whose rows all step for longer answers that none is ready


class RemotePool:
    """A `Pool` (types.py) of the rows of all actors, one actor after another."""

    def __init__(self, crew: Crew, config: Config) -> None:
        self.crew, self.spec, self.num_rows = crew, crew.spec, crew.num_rows
        self.tasks, self.task_ids, self.unit_ids = crew.tasks, crew.task_ids, crew.unit_ids
        self.restarts = 0
        self._restarts = [0] * config.cluster.actors  # of each actor's present life
        self._taken = np.zeros(crew.num_rows, np.bool_)  # delivered, and waits for its action
        self._void = np.zeros(crew.num_rows, np.bool_)  # taken from an actor that is lost since
        self._arrived: deque[Ready] = deque()
        action = crew.spec.action
        self._nothing = (
            np.zeros(0, np.int64), np.zeros((0, action.num_discrete), np.int64),
            np.zeros((0, action.num_continuous), np.float32),
        )  # fmt: skip
        crew.begin(config)

    def recv(self, timeout_s: float, gather_s: float = 0.0) -> Ready | None:
        """See `Pool`. Rows of several actors come together when they are there together."""
        self._ask()
        for index, event in self.crew.poll(0.0 if self._arrived else timeout_s):
            if isinstance(event, Lost):
                self._lose(index)
            else:
                assert isinstance(event, Rows)
                self._arrive(index, event)
        if not self._arrived:
            return None
        ready = _joined(list(self._arrived))
        self._arrived.clear()
        self._taken[ready.rows] = ready.event != LOST
        return ready

    def send(self, rows: NDArray[np.int64], discrete: NDArray[np.int64], continuous: NDArray[np.float32]) -> None:
        """See `Pool`."""
        keep = self._taken[rows]  # those that were LOST may be among them
        rows, discrete, continuous = rows[keep], discrete[keep], continuous[keep]
        self._taken[rows] = False
        gone = self._void[rows]
        if gone.any():
            self._void[rows] = False
            self._arrived.append(self._lost(rows[gone]))
        actors = rows // self.crew.rows_per_actor
        for index in np.unique(actors[~gone]).tolist():
            of = (actors == index) & ~gone
            self._order(index, rows[of] - index * self.crew.rows_per_actor, discrete[of], continuous[of])

    def set_option(self, name: str, value: Any, env: int | None = None) -> None:
        """See `Pool`. Raises EnvError."""
        raise EnvError(f"{name}: settings of running environments cannot be changed on other machines")

    def reseed(self, seed: int) -> None:
        """Raises EnvError: only runs that take turns begin anew at a save, and they are refused with remote actors."""
        raise EnvError("remote actors cannot begin anew at a save, as --max-lag 0 and 1 ask: add --max-lag 16")

    def describe(self) -> str:
        """One line for the run's header."""
        return f"{self.crew.describe()}; acting for all of them here"

    def state(self) -> list[str]:
        """What every actor is doing, a line each."""
        return self.crew.state()

    def close(self) -> None:
        """See `Pool`."""
        self.crew.close()

    # ------------------------------------------------------------ actors

    def _order(
        self, index: int, rows: NDArray[np.int64], discrete: NDArray[np.int64], continuous: NDArray[np.float32]
    ) -> None:
        self.crew.order(index, Actions(rows, discrete, continuous, ANSWER_S), None)

    def _ask(self) -> None:
        """Whoever has rows that step, and no order to tell of them, gets one."""
        size = self.crew.rows_per_actor
        for index in self.crew.ready(1):
            own = slice(index * size, (index + 1) * size)
            if not self._taken[own].all() and not self._void[own].any():
                self._order(index, *self._nothing)

    def _arrive(self, index: int, event: Rows) -> None:
        self.restarts += event.restarts - self._restarts[index]
        self._restarts[index] = event.restarts
        if event.ready is not None:
            first = index * self.crew.rows_per_actor
            records = [{**record, "row": record["row"] + first} for record in event.ready.records]
            self._arrived.append(replace(event.ready, rows=event.ready.rows + first, records=records))

    def _lose(self, index: int) -> None:
        """Rows that wait for their action are lost once it comes, the others at once."""
        own = np.arange(index * self.crew.rows_per_actor, (index + 1) * self.crew.rows_per_actor)
        self._void[own] = self._taken[own]
        self._restarts[index] = 0
        if not self._taken[own].all():
            self._arrived.append(self._lost(own[~self._taken[own]]))

    def _lost(self, rows: NDArray[np.int64]) -> Ready:
        """These rows as LOST."""
        count, never = len(rows), np.zeros(len(rows), np.bool_)
        obs = {name: np.zeros((count, *leaf.shape), leaf.dtype) for name, leaf in self.spec.observation.items()}
        info = np.zeros((count, len(self.spec.info)), np.float32) if self.spec.info else None
        game = np.zeros(count, np.int64) if self.spec.agents else None
        return Ready(
            rows, np.full(count, LOST, np.uint8), obs, np.zeros(count, np.float32), never, never, never,
            np.zeros(0, np.int64), {name: leaf[:0] for name, leaf in obs.items()}, info, [], game,
        )  # fmt: skip


def _joined(parts: Sequence[Ready]) -> Ready:
    """Several deliveries as one, in their order."""
    if len(parts) == 1:
        return parts[0]
    firsts = np.cumsum([0, *(len(part.rows) for part in parts[:-1])])
    names = ("rows", "event", "reward", "terminated", "truncated", "episode_over")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    obs, final_obs = (
        {name: np.concatenate([leaves[name] for leaves in all_leaves]) for name in all_leaves[0]}
        for all_leaves in ([part.obs for part in parts], [part.final_obs for part in parts])
    )
    index = np.concatenate([part.final_index + first for part, first in zip(parts, firsts, strict=True)])
    infos, games = [p.info for p in parts if p.info is not None], [p.game for p in parts if p.game is not None]
    return Ready(
        **arrays, obs=obs, final_index=index, final_obs=final_obs, info=np.concatenate(infos) if infos else None,
        records=[record for part in parts for record in part.records], game=np.concatenate(games) if games else None,
    )  # fmt: skip
