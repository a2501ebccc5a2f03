"""The sampler: asks environments for rows that are ready and brings each to the policy that plays it.

It is one `step()`, called by a loop in a thread of its own, on a remote actor, or by a test. It neither trains nor
logs, and it knows neither algorithm nor losses. What a policy does with its rows is in player.py.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pronghorn.config import derive_seed
from pronghorn.training.player import RowPlayer, begins_episode, no_actions
from pronghorn.training.watchdog import ENVIRONMENTS, Stage
from pronghorn.types import LOST, Pool, Ready

POLL_S = 0.1  # a blocked sampler still looks for stops and deaths this often
STAGES = ("envs", "record", "act", "slots")  # what a sampler's time goes to, as in docs/metrics.md
GATHER_S = 0.02  # that rows wait for others while a batch waits for the learner


class Seats(Protocol):
    """Who plays which row, decided when a row begins an episode and kept until that is over."""

    def take(self, ready: Ready, begins: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Indices of the players of the rows that begin, in their order. It sees each delivery of the pool once."""


class Part(NamedTuple):
    """The rows of a delivery that one player plays. where: their places [N] bool, or None if it plays all."""

    player: RowPlayer
    ready: Ready
    where: NDArray[np.bool_] | None


class StepLoop(ABC):
    """A loop made of steps, for a thread of its own or for who wants to take one at a time."""

    def __init__(self, stages: Sequence[str]) -> None:
        """stages: names of what its time goes to."""
        self.seconds = dict.fromkeys(stages, 0.0)
        self.elsewhere: dict[str, float] = {}  # the same of all samplers on other machines
        self.stop = threading.Event()
        self.stage = Stage("sampler")

    def run(self, on_error: Callable[[BaseException], None]) -> None:
        """Step until `stop` is set; an exception goes to the caller of the run, with its traceback."""
        try:
            while not self.stop.is_set():
                self.step()
        except BaseException as error:
            on_error(error)

    @abstractmethod
    def step(self) -> None:
        """One turn; it waits a fraction of a second at most."""


class Sampler(StepLoop):
    """Collects experience of all rows of a pool.

    Rows whose next unroll finds no free slot are held unanswered, with all that is stepped together with them, while
    the others go on.
    """

    def __init__(
        self, pool: Pool, players: Sequence[RowPlayer], *, seed: int, seats: Seats | None = None,
        playing: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """seats: who plays what from the next episode on; None: that never changes.

        playing: [rows] index of the player who plays each from the start; None: the first player plays all.
        """
        super().__init__(STAGES)
        self.pool, self.players, self.seats = pool, list(players), seats
        self._reseed: int | None = None
        self._seed(seed)
        self._player = np.zeros(pool.num_rows, np.int64) if playing is None else playing.copy()  # of each row
        self._held: deque[Ready] = deque()
        self._lacks = self.players[0]  # who had too few slots the last time

    @property
    def blocked(self) -> bool:
        """Whether every row waits for a slot."""
        return sum(len(ready.rows) for ready in self._held) == self.pool.num_rows

    @property
    def num_steps(self) -> int:
        """Steps recorded so far."""
        return sum(player.num_steps for player in self.players)

    def counts(self) -> dict[str, int]:
        """What is counted of unrolls that came from elsewhere (docs/metrics.md): none."""
        return {"remote_unrolls": 0}

    def step(self) -> None:
        """Serve rows that are ready once: record what their last action caused, act, send."""
        if self._reseed is not None:
            self._restart_rows(self._reseed)
        ready = self._held_ready() or self._receive()
        if ready is None:
            return
        parts = list(self._parts(ready))
        for part in parts:
            part.player.load_weights()  # again for rows that needed no slot
        start = time.perf_counter()
        self.stage.works("acts")
        discrete, continuous = self._act(parts, len(ready.rows))
        self.seconds["act"] += time.perf_counter() - start
        self.pool.send(ready.rows, discrete, continuous)

    def request_reseed(self, seed: int) -> None:
        """At the next step: void unrolls in progress, seed environments and action sampling anew, reset every row."""
        self._reseed = seed

    # ------------------------------------------------------------ rows that are ready

    def _held_ready(self) -> Ready | None:
        """The rows held longest, if there are slots for them now."""
        return self._held.popleft() if self._held and self._start_unrolls(self._held[0]) else None

    def _receive(self) -> Ready | None:
        """What the pool delivers next, recorded, with a slot for each row that acts; units without one are held."""
        blocked = self.blocked
        start = time.perf_counter()
        self.stage.waits(*(("waits for slots", "learner") if blocked else ("waits for rows", ENVIRONMENTS)))
        if blocked:
            self._lacks.wait_for_slots(POLL_S)
        # Many rows at once cost less each; nobody waits for them while a learner has enough to do.
        gather_s = GATHER_S if any(player.batch_waits() for player in self.players) else 0.0
        ready = self.pool.recv(0.0 if blocked else POLL_S, gather_s)
        received = time.perf_counter()
        self.seconds["slots" if blocked else "envs"] += received - start
        if ready is None:
            return None
        self.stage.works("records")
        for player, part, _ in self._parts(ready):
            player.record(part)
        self._change_players(ready)
        lost = ready.event == LOST
        if lost.any():
            ready = self._without_lost(ready, lost)
        self.seconds["record"] += time.perf_counter() - received
        if ready is None or (not self._held and self._start_unrolls(ready)):
            return ready
        return self._hold(ready)

    def _start_unrolls(self, ready: Ready) -> bool:
        """A slot for each acting row that has none; False if a player has too few."""
        parts = list(self._parts(ready))
        for player, part, _ in parts if len(self.players) > 1 else ():
            player.unpark(part.rows)
        lacking = [player for player, part, _ in parts if not player.start_unrolls(part)]
        if lacking:
            self._lacks = lacking[0]
            self._wait(parts)
        return not lacking

    def _wait(self, parts: Sequence[Part]) -> None:
        """These rows are held. Where one's wait for another's slots, their own learner must not wait for them."""
        for player, part, _ in parts if len(self.players) > 1 else ():
            player.park(part.rows)

    def _hold(self, ready: Ready) -> Ready | None:
        """Set aside, in order, the units with a row that needs a slot; the others, which do not, go on."""
        units, needs = self.pool.unit_ids[ready.rows], np.zeros(len(ready.rows), np.bool_)
        for player, part, where in self._parts(ready):
            needs[... if where is None else where] = player.needs_slot(part)
        lacking = np.unique(units[needs])
        for unit in lacking:
            self._held.append(part_of(ready, units == unit))
            self._wait(list(self._parts(self._held[-1])))
        rest = ~np.isin(units, lacking)
        return part_of(ready, rest) if rest.any() else None

    def _without_lost(self, ready: Ready, lost: NDArray[np.bool_]) -> Ready | None:
        """Rows of a dead worker are not answered: not these, nor any that were held."""
        gone = ready.rows[lost]
        held = (part_of(r, ~np.isin(r.rows, gone)) for r in self._held)
        self._held = deque(r for r in held if len(r.rows))
        return None if lost.all() else part_of(ready, ~lost)

    # ------------------------------------------------------------ whose rows

    def _parts(self, ready: Ready) -> Iterator[Part]:
        """The rows of each player that has some."""
        if len(self.players) == 1:
            yield Part(self.players[0], ready, None)
            return
        playing = self._player[ready.rows]
        indices = np.unique(playing)
        for index in indices:
            where = playing == index
            whole = len(indices) == 1
            yield Part(self.players[index], *((ready, None) if whole else (part_of(ready, where), where)))

    def _change_players(self, ready: Ready) -> None:
        """Rows that begin an episode get the player who plays it."""
        if self.seats is None:
            return
        begins = begins_episode(ready)
        rows, taken = ready.rows[begins], self.seats.take(ready, begins)
        changes = taken != self._player[rows]
        for index in np.unique(self._player[rows[changes]]):
            self.players[index].leave(rows[changes & (self._player[rows] == index)])
        self._player[rows] = taken

    def _act(self, parts: Sequence[Part], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The actions of all rows [count, ...] of a delivery."""
        if parts[0].where is None:
            return parts[0].player.act(parts[0].ready)
        discrete, continuous = no_actions(self.pool.spec.action, count)
        for player, part, where in parts:
            discrete[where], continuous[where] = player.act(part)
        return discrete, continuous

    # ------------------------------------------------------------ small parts

    def _restart_rows(self, seed: int) -> None:
        self._held.clear()
        self._seed(seed)
        self.stage.waits("waits for rows that begin anew", ENVIRONMENTS)
        self.pool.reseed(seed)
        self._reseed = None

    def _seed(self, seed: int) -> None:
        """All unrolls in progress are void."""
        for index, player in enumerate(self.players):
            player.restart(derive_seed(seed, 1, index) if index else derive_seed(seed, 1))


def part_of(ready: Ready, keep: NDArray[np.bool_]) -> Ready:
    """A copy of the rows that `keep` [N] marks, valid as long as it is held."""
    place = np.cumsum(keep) - 1  # of each row among those that are kept
    final = keep[ready.final_index]
    rows = ready.rows[keep]
    kept = set(rows.tolist()) if ready.records else set()
    return Ready(
        rows, ready.event[keep], {k: v[keep] for k, v in ready.obs.items()}, ready.reward[keep],
        ready.terminated[keep], ready.truncated[keep], ready.episode_over[keep],
        place[ready.final_index[final]], {k: v[final] for k, v in ready.final_obs.items()},
        None if ready.info is None else ready.info[keep], [r for r in ready.records if r["row"] in kept],
        None if ready.game is None else ready.game[keep],
    )  # fmt: skip
