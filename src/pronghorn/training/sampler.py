"""The sampler: asks environments for rows that are ready, acts on them, and writes one row of each unroll per decision.

It is one `step()`, called by a loop in a thread of its own, on a remote actor, or by a test. It neither trains nor
logs, it knows neither algorithm nor losses, and what acts is in acting.py.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.config import derive_seed
from pronghorn.training.acting import Acting, Snapshot
from pronghorn.training.metrics import EpisodeTracker
from pronghorn.training.store import Slots, Store
from pronghorn.types import (
    FIRST,
    INACTIVE,
    LAST,
    LAST_ACTION,
    LAST_REWARD,
    LOST,
    STEP,
    Pool,
    Ready,
)

POLL_S = 0.1  # a blocked sampler still looks for stops and deaths this often
GATHER_S = 0.02  # that rows wait for others while a batch waits for the learner
NO_SLOT = -1
_ACTS = np.array([True, True, True, False, False])  # by Event: rows that get an action which is recorded


class Publisher:
    """Hands snapshots from the learner to the sampler: one reference, replaced as a whole."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.latest = snapshot


class Sampler:
    """Collects experience of all rows of a pool under one policy into its store.

    Per row it keeps: the slot being filled (or none), t within it, and whether an action is on its way. Rows whose
    next unroll finds no free slot are held unanswered, while all others go on.
    """

    def __init__(
        self, pool: Pool, store: Store, acting: Acting, publisher: Publisher, tracker: EpisodeTracker, *, seed: int
    ) -> None:
        self.pool, self.store, self.acting, self.publisher, self.tracker = pool, store, acting, publisher, tracker
        self.num_steps = 0
        self.seconds = {"envs": 0.0, "record": 0.0, "act": 0.0, "slots": 0.0}
        self.stop = threading.Event()
        self._reseed: int | None = None
        self._seed(seed)
        n, action = pool.num_rows, pool.spec.action
        self._slot: Slots = np.full(n, NO_SLOT, np.int64)
        self._t = np.zeros(n, np.int64)
        self._acted = np.zeros(n, np.bool_)
        self._last_discrete = np.full((n, action.num_discrete), -1, np.int64)
        self._last_continuous = np.zeros((n, action.num_continuous), np.float32)
        self._last_reward = np.zeros(n, np.float32)
        self._held: deque[Ready] = deque()

    def run(self, on_error: Callable[[BaseException], None]) -> None:
        """Step until `stop` is set; an exception goes to the caller of the run, with its traceback."""
        try:
            while not self.stop.is_set():
                self.step()
        except BaseException as error:
            on_error(error)

    def step(self) -> None:
        """Serve rows that are ready once: record what their last action caused, act, send."""
        if self._reseed is not None:
            self._restart_rows(self._reseed)
        ready = self._held_ready() or self._receive()
        if ready is None:
            return
        self._load_weights()  # again for rows that needed no slot
        start = time.perf_counter()
        discrete, continuous = self._act(ready)
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
        blocked = sum(len(ready.rows) for ready in self._held) == self.pool.num_rows
        start = time.perf_counter()
        if blocked:
            self.store.wait_for_slots(POLL_S)
        # Many rows at once cost less each; nobody waits for them while the learner has enough to do.
        gather_s = GATHER_S if self.store.batch_waits() else 0.0
        ready = self.pool.recv(0.0 if blocked else POLL_S, gather_s)
        received = time.perf_counter()
        self.seconds["slots" if blocked else "envs"] += received - start
        if ready is None:
            return None
        self._record(ready)
        lost = ready.event == LOST
        if lost.any():
            ready = self._without_lost(ready, lost)
        self.seconds["record"] += time.perf_counter() - received
        if ready is None or (not self._held and self._start_unrolls(ready)):
            return ready
        return self._hold(ready)

    def _hold(self, ready: Ready) -> Ready | None:
        """Set aside, in order, the units with a row that needs a slot; the others, which do not, go on."""
        units = self.pool.unit_ids[ready.rows]
        needs = np.unique(units[_ACTS[ready.event] & (self._slot[ready.rows] == NO_SLOT)])
        for unit in needs:
            self._held.append(_select(ready, units == unit))
        rest = ~np.isin(units, needs)
        return _select(ready, rest) if rest.any() else None

    def _without_lost(self, ready: Ready, lost: NDArray[np.bool_]) -> Ready | None:
        """Rows of a dead worker are not answered: not these, nor any that were held."""
        gone = ready.rows[lost]
        held = (_select(r, ~np.isin(r.rows, gone)) for r in self._held)
        self._held = deque(r for r in held if len(r.rows))
        return None if lost.all() else _select(ready, ~lost)

    def _start_unrolls(self, ready: Ready) -> bool:
        """Give each acting row that has none a slot with its RNN state; False if there are too few slots."""
        self._load_weights()  # after the last step was recorded by the network that acted; the slots carry the version
        acting = ready.rows[_ACTS[ready.event]]
        if self.pool.spec.rows_wait:
            self._park(ready, acting)
        rows = acting[self._slot[acting] == NO_SLOT]
        if len(rows) == 0:
            return True
        # The version is only a lower bound (newer weights may be loaded before acting), which the lag rule allows.
        slots = self.store.acquire(len(rows), self.acting.version)
        if slots is None:
            return False
        self._slot[rows], self._t[rows] = slots, 0
        self.acting.begin(rows, slots)
        return True

    def _park(self, ready: Ready, acting: NDArray[np.int64]) -> None:
        """Let the learner go on without the unrolls of rows that do not act."""
        idle = self._slot[ready.rows[ready.event == INACTIVE]]
        self.store.park(idle[idle != NO_SLOT])
        going_on = self._slot[acting]
        self.store.unpark(going_on[going_on != NO_SLOT], self.acting.version)

    # ------------------------------------------------------------ what the last action caused

    def _record(self, ready: Ready) -> None:
        """Write reward and ends into row t, complete unrolls that reached T, void those of lost rows."""
        self.tracker.observe(ready)
        self._void(ready.rows[ready.event == LOST])
        index = np.flatnonzero(((ready.event == STEP) | (ready.event == LAST)) & self._acted[ready.rows])
        rows = ready.rows[index]
        t, steps = self._t[rows], self.store.flat_steps
        at = self.store.at(self._slot[rows], t)
        steps["reward"][at] = self._last_reward[rows] = ready.reward[index]
        steps["terminated"][at] = ready.terminated[index]
        steps["truncated"][at] = ready.truncated[index] & ~ready.terminated[index]
        steps["truncation_value"][at] = 0.0
        if len(ready.final_index):
            self._record_truncations(ready)
        self._acted[rows] = False
        self._t[rows] = t + 1
        self.num_steps += len(rows)
        begins = _begins_episode(ready)
        self._forget_history(ready.rows[begins])
        full = self._t[rows] == self.store.unroll_length
        if full.any():
            self._complete(ready, index[full], begins)

    def _record_truncations(self, ready: Ready) -> None:
        """V(final observation), by the network that acted, from the RNN state after step t, in raw return units."""
        rows = ready.rows[ready.final_index]
        use = self._acted[rows]
        rows = rows[use]
        if len(rows) == 0:
            return
        obs = self._with_history({k: v[use] for k, v in ready.final_obs.items()}, rows)
        value = self.acting.values(obs, rows)
        self.store.flat_steps["truncation_value"][self.store.at(self._slot[rows], self._t[rows])] = value

    def _complete(self, ready: Ready, index: NDArray[np.int64], begins: NDArray[np.bool_]) -> None:
        """Row T holds only the bootstrap observation; then the unroll is FULL."""
        rows = ready.rows[index]
        slots = self._slot[rows]
        obs = self._with_history({k: v[index] for k, v in ready.obs.items()}, rows)
        at = self.store.at(slots, self._t[rows])
        self.acting.write(obs, at)
        self.store.flat_steps["first"][at] = begins[index]
        self._slot[rows] = NO_SLOT
        self.store.commit(slots)

    def _void(self, rows: NDArray[np.int64]) -> None:
        """The rows' worker died: nothing of their unfinished unrolls is kept."""
        filling = rows[self._slot[rows] != NO_SLOT]
        if len(filling):
            self.store.discard(self._slot[filling])
        self._slot[rows], self._acted[rows] = NO_SLOT, False

    # ------------------------------------------------------------ acting

    def _act(self, ready: Ready) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Row t of each acting row's unroll: obs, action, log mu(a|x), V(x), version. Returns actions for all rows."""
        acting = _ACTS[ready.event]
        whole = bool(acting.all())
        rows = ready.rows if whole else ready.rows[acting]
        if len(rows) == 0:  # all wait for something else than an action
            return self._no_actions(len(ready.rows))
        begins = _begins_episode(ready)
        obs = self._with_history(ready.obs if whole else {k: v[acting] for k, v in ready.obs.items()}, rows)
        first = begins if whole else begins[acting]
        at = self.store.at(self._slot[rows], self._t[rows])
        acted = self.acting.act(obs, rows, first, at)
        steps = self.store.flat_steps
        steps["first"][at] = first
        steps["discrete"][at] = self._last_discrete[rows] = acted.discrete
        steps["continuous"][at] = self._last_continuous[rows] = acted.continuous
        steps["log_prob"][at] = acted.log_prob
        steps["value"][at] = acted.value
        steps["version"][at] = self.acting.version
        steps["task_id"][at] = self.pool.task_ids[rows]
        self._acted[rows] = True
        if whole:
            return acted.discrete, acted.bounded
        discrete, continuous = self._no_actions(len(ready.rows))
        discrete[acting], continuous[acting] = acted.discrete, acted.bounded
        return discrete, continuous

    def _no_actions(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        spec = self.pool.spec.action
        return np.zeros((count, spec.num_discrete), np.int64), np.zeros((count, spec.num_continuous), np.float32)

    # ------------------------------------------------------------ small parts

    def _with_history(self, obs: dict[str, NDArray[Any]], rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Observation leaves with the last action and reward if the model wants them."""
        leaves = dict(obs)
        for name, last in (
            (LAST_ACTION, self._last_discrete),
            (LAST_ACTION + "_continuous", self._last_continuous),
            (LAST_REWARD, self._last_reward),
        ):
            if name in self.store.obs:
                leaves[name] = last[rows]
        return leaves

    def _forget_history(self, rows: NDArray[np.int64]) -> None:
        self._last_discrete[rows], self._last_continuous[rows], self._last_reward[rows] = -1, 0.0, 0.0

    def _load_weights(self) -> None:
        snapshot = self.publisher.latest
        if snapshot.version != self.acting.version:
            self.acting.load(snapshot)

    def _restart_rows(self, seed: int) -> None:
        filling = self._slot[self._slot != NO_SLOT]
        if len(filling):
            self.store.discard(filling, lost=False)
        self._slot[:], self._acted[:] = NO_SLOT, False
        self._held.clear()
        self._seed(seed)
        self.pool.reseed(seed)
        self._reseed = None

    def _seed(self, seed: int) -> None:
        self.acting.seed(derive_seed(seed, 1))


def _begins_episode(ready: Ready) -> NDArray[np.bool_]:
    """Rows whose obs is the first of an episode; a life loss is not, so the RNN state lives on through it."""
    first: NDArray[np.bool_] = (ready.event == FIRST) | ((ready.event == LAST) & ready.episode_over)
    return first


def _select(ready: Ready, keep: NDArray[np.bool_]) -> Ready:
    """A copy of the rows that `keep` marks, valid as long as they are held; final observations were used up by then."""
    return Ready(
        ready.rows[keep], ready.event[keep], {k: v[keep] for k, v in ready.obs.items()}, ready.reward[keep],
        ready.terminated[keep], ready.truncated[keep], ready.episode_over[keep], np.zeros(0, np.int64), {},
    )  # fmt: skip
