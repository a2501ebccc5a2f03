"""One policy at the rows that it plays: records what its actions caused, acts, and fills unrolls of its own store.

It asks no environment for anything; the sampler brings it the rows that are ready and sends its actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Container
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pronghorn.training.acting import Acting, Snapshot
from pronghorn.training.metrics import EpisodeTracker
from pronghorn.training.store import Slots, Store
from pronghorn.types import FIRST, INACTIVE, LAST, LAST_ACTION, LAST_REWARD, LOST, STEP, ActionSpec, PoolRows, Ready

NO_SLOT = -1
ACTS = np.array([True, True, True, False, False])  # by Event: rows that get an action which is recorded

Rows = NDArray[np.int64]


class Publisher:
    """Hands snapshots from the learner to the sampler: one reference, replaced as a whole."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.latest = snapshot


class History:
    """What each row did last and got for it, for models that are fed it."""

    def __init__(self, num_rows: int, action: ActionSpec, leaves: Container[str]) -> None:
        """leaves: names of those that the model reads."""
        self.discrete = np.full((num_rows, action.num_discrete), -1, np.int64)
        self.continuous = np.zeros((num_rows, action.num_continuous), np.float32)
        self.reward = np.zeros(num_rows, np.float32)
        both = ((LAST_ACTION, self.discrete), (LAST_ACTION + "_continuous", self.continuous))
        read: tuple[tuple[str, NDArray[Any]], ...] = (*both, (LAST_REWARD, self.reward))
        self._read = {name: last for name, last in read if name in leaves}

    def added_to(self, obs: dict[str, NDArray[Any]], rows: Rows) -> dict[str, NDArray[Any]]:
        """Observation leaves [N, …] with the last action and reward if the model wants them."""
        return {**obs, **{name: last[rows] for name, last in self._read.items()}}

    def forget(self, rows: Rows) -> None:
        """They begin an episode."""
        self.discrete[rows], self.continuous[rows], self.reward[rows] = -1, 0.0, 0.0


class RowPlayer(ABC):
    """Who plays rows of a pool, as the sampler sees him."""

    num_steps = 0  # recorded so far

    @abstractmethod
    def record(self, ready: Ready) -> None:
        """Take what the last actions of these rows caused."""

    @abstractmethod
    def needs_slot(self, ready: Ready) -> NDArray[np.bool_]:
        """[N] rows that act and have no unroll to write into."""

    @abstractmethod
    def start_unrolls(self, ready: Ready) -> bool:
        """Give each acting row that has none a slot; False if there are too few slots."""

    @abstractmethod
    def act(self, ready: Ready) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The actions [N, D], [N, C] of all these rows; anything for those that do not act."""

    @abstractmethod
    def leave(self, rows: Rows) -> None:
        """Another plays these rows from the episode on that they begin."""

    @abstractmethod
    def restart(self, seed: int) -> None:
        """Void what is in progress, uncounted, and seed the sampling of actions."""

    def load_weights(self) -> None:  # noqa: B027 - nothing to do for who never changes
        """Act with the newest weights from now on."""

    def park(self, rows: Rows) -> None:  # noqa: B027 - nor for who has no unrolls
        """Let the learner go on without the unrolls of rows that do not act for now."""

    def unpark(self, rows: Rows) -> None:  # noqa: B027
        """They act again."""

    def batch_waits(self) -> bool:
        """Whether a learner has a whole batch of its before it."""
        return False

    def wait_for_slots(self, timeout_s: float) -> None:  # noqa: B027
        """Sleep until there may be more slots, or timeout_s passed."""


class Player(RowPlayer):
    """Per row it keeps: the slot being filled (or none), t within it, and whether an action is on its way.

    Where another policy takes over a row, the unroll that the row was filling is left PARKED, and the next row that
    begins an episode here goes on with it: every step that was acted reaches the loss.
    """

    def __init__(
        self, pool: PoolRows, store: Store, acting: Acting, publisher: Publisher, tracker: EpisodeTracker
    ) -> None:
        self.store, self.acting, self.publisher, self.tracker = store, acting, publisher, tracker
        self._spec, self._task_ids = pool.spec, pool.task_ids
        self._lineage = publisher.latest.lineage
        n = pool.num_rows
        self._slot: Slots = np.full(n, NO_SLOT, np.int64)
        self._t = np.zeros(n, np.int64)
        self._acted = np.zeros(n, np.bool_)
        self._history = History(n, pool.spec.action, store.obs)
        self._left: deque[tuple[int, int]] = deque()  # (slot, t) of unrolls that rows left unfinished

    # ------------------------------------------------------------ what the last action caused

    def record(self, ready: Ready) -> None:
        """Write reward and ends into row t, complete unrolls that reached T, void those of lost rows."""
        self.tracker.observe(ready)
        self._void(ready.rows[ready.event == LOST])
        index = np.flatnonzero(((ready.event == STEP) | (ready.event == LAST)) & self._acted[ready.rows])
        rows = ready.rows[index]
        t, steps = self._t[rows], self.store.flat_steps
        at = self.store.at(self._slot[rows], t)
        steps["reward"][at] = self._history.reward[rows] = ready.reward[index]
        steps["terminated"][at] = ready.terminated[index]
        steps["truncated"][at] = ready.truncated[index] & ~ready.terminated[index]
        steps["truncation_value"][at] = 0.0
        if len(ready.final_index):
            self._record_truncations(ready)
        self._acted[rows] = False
        self._t[rows] = t + 1
        self.num_steps += len(rows)
        begins = begins_episode(ready)
        self._history.forget(ready.rows[begins])
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
        obs = self._history.added_to({k: v[use] for k, v in ready.final_obs.items()}, rows)
        value = self.acting.values(obs, rows)
        self.store.flat_steps["truncation_value"][self.store.at(self._slot[rows], self._t[rows])] = value

    def _complete(self, ready: Ready, index: NDArray[np.int64], begins: NDArray[np.bool_]) -> None:
        """Row T holds only the bootstrap observation; then the unroll is FULL."""
        rows = ready.rows[index]
        slots = self._slot[rows]
        obs = self._history.added_to({k: v[index] for k, v in ready.obs.items()}, rows)
        at = self.store.at(slots, self._t[rows])
        self.acting.write(obs, at)
        self.store.flat_steps["first"][at] = begins[index]
        self._slot[rows] = NO_SLOT
        self.store.commit(slots)

    def _void(self, rows: Rows) -> None:
        """The rows' worker died: nothing of their unfinished unrolls is kept."""
        filling = rows[self._slot[rows] != NO_SLOT]
        if len(filling):
            self.store.discard(self._slot[filling])
        self._slot[rows], self._acted[rows] = NO_SLOT, False

    # ------------------------------------------------------------ unrolls

    def needs_slot(self, ready: Ready) -> NDArray[np.bool_]:
        needs: NDArray[np.bool_] = ACTS[ready.event] & (self._slot[ready.rows] == NO_SLOT)
        return needs

    def start_unrolls(self, ready: Ready) -> bool:
        if self.publisher.latest.lineage != self._lineage:
            self._begin_lineage()
        self.load_weights()  # after the last step was recorded by the network that acted; slots carry the version
        acting = ready.rows[ACTS[ready.event]]
        if self._spec.rows_wait:
            self.park(ready.rows[ready.event == INACTIVE])
            self.unpark(acting)
        rows = acting[self._slot[acting] == NO_SLOT]
        if self._left:
            rows = self._go_on(rows, ready)
        if len(rows) == 0:
            return True
        # The version is only a lower bound (newer weights may be loaded before acting), which the lag rule allows.
        slots = self.store.acquire(len(rows), self.acting.version)
        if slots is None:
            return False
        self._slot[rows], self._t[rows] = slots, 0
        self.acting.begin(rows, slots)
        return True

    def park(self, rows: Rows) -> None:
        slots = self._slot[rows]
        self.store.park(slots[slots != NO_SLOT])

    def unpark(self, rows: Rows) -> None:
        slots = self._slot[rows]
        self.store.unpark(slots[slots != NO_SLOT], self.acting.version)

    def leave(self, rows: Rows) -> None:
        """Another policy plays these rows from the episode on that they begin: their unrolls stay, parked."""
        self.park(rows)
        filling = rows[self._slot[rows] != NO_SLOT]
        self._left.extend(zip(self._slot[filling].tolist(), self._t[filling].tolist(), strict=True))
        self._slot[rows] = NO_SLOT

    def _go_on(self, rows: Rows, ready: Ready) -> Rows:
        """Rows that begin an episode take over unrolls that others left, oldest first; returns the other rows.

        The RNN state is reset at the seam, as at any beginning of an episode.
        """
        begins = rows[np.isin(rows, ready.rows[begins_episode(ready)])][: len(self._left)]
        if len(begins) == 0:
            return rows
        left = np.array([self._left.popleft() for _ in begins], np.int64)
        self._slot[begins], self._t[begins] = left.T
        self.unpark(begins)
        return rows[~np.isin(rows, begins)]

    # ------------------------------------------------------------ acting

    def act(self, ready: Ready) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Row t of each acting row's unroll: obs, action, log mu(a|x), V(x), version. Returns actions for all rows."""
        acting = ACTS[ready.event]
        whole = bool(acting.all())
        rows = ready.rows if whole else ready.rows[acting]
        if len(rows) == 0:  # all wait for something else than an action
            return no_actions(self._spec.action, len(ready.rows))
        begins = begins_episode(ready)
        obs = self._history.added_to(ready.obs if whole else {k: v[acting] for k, v in ready.obs.items()}, rows)
        first = begins if whole else begins[acting]
        at = self.store.at(self._slot[rows], self._t[rows])
        acted = self.acting.act(obs, rows, first, at)
        if first.any():
            self.tracker.begin(rows[first], self._lineage)
        steps = self.store.flat_steps
        steps["first"][at] = first
        steps["discrete"][at] = self._history.discrete[rows] = acted.discrete
        steps["continuous"][at] = self._history.continuous[rows] = acted.continuous
        steps["log_prob"][at] = acted.log_prob
        steps["value"][at] = acted.value
        steps["version"][at] = self.acting.version
        steps["task_id"][at] = self._task_ids[rows]
        self._acted[rows] = True
        if whole:
            return acted.discrete, acted.bounded
        discrete, continuous = no_actions(self._spec.action, len(ready.rows))
        discrete[acting], continuous[acting] = acted.discrete, acted.bounded
        return discrete, continuous

    # ------------------------------------------------------------ small parts

    def load_weights(self) -> None:
        snapshot = self.publisher.latest
        # Weights that replaced the policy wait for the next `start_unrolls`: these rows hold unrolls of the old one.
        if snapshot.version != self.acting.version and snapshot.lineage == self._lineage:
            self.acting.load(snapshot)

    def _begin_lineage(self) -> None:
        """The policy was replaced: all that was begun under the old one is void, actions on their way included."""
        self._discard_all("replaced")
        self._lineage = self.publisher.latest.lineage
        self.acting.forget()

    def restart(self, seed: int) -> None:
        self._discard_all("restart")
        self.acting.seed(seed)

    def batch_waits(self) -> bool:
        return self.store.batch_waits()

    def wait_for_slots(self, timeout_s: float) -> None:
        self.store.wait_for_slots(timeout_s)

    def _discard_all(self, why: Literal["replaced", "restart"]) -> None:
        """Void all unrolls in progress."""
        filling = np.concatenate((self._slot[self._slot != NO_SLOT], [slot for slot, _ in self._left])).astype(np.int64)
        if len(filling):
            self.store.discard(filling, why)
        self._left.clear()
        self._slot[:], self._acted[:] = NO_SLOT, False


def begins_episode(ready: Ready) -> NDArray[np.bool_]:
    """Rows whose obs is the first of an episode; a life loss is not, so the RNN state lives on through it."""
    first: NDArray[np.bool_] = (ready.event == FIRST) | ((ready.event == LAST) & ready.episode_over)
    return first


def no_actions(action: ActionSpec, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """[count, D] and [count, C] zeros."""
    return np.zeros((count, action.num_discrete), np.int64), np.zeros((count, action.num_continuous), np.float32)
