"""Native environments of this process in lanes: who waits, who steps, and answers by whole units. It steps nothing.

A lane is one native vector environment: rows that are stepped together (a unit), while others wait for actions.

A native environment cannot be interrupted: `recv` may block for one step or reset of its rows whatever its time limit
is, a hang inside it hangs the run, and a crash of its native code ends the run.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.errors import ConfigError, EnvError
from pronghorn.machine import available_cores
from pronghorn.types import EnvSpec, Event, Ready

NO_ROWS = np.zeros(0, np.int64)


class LaneState(Enum):
    """Where the rows of one native environment are between `recv` and `send`."""

    UNSTARTED = "waits for its first reset"
    STEPPING = "has actions and steps"
    WAITING = "waits for actions"


@dataclass
class Lane:
    """The rows of one task and one group."""

    task: int
    rows: NDArray[np.int64]
    native: Any = None  # the back end's vector environment of len(rows) environments
    lives: NDArray[np.int32] | None = None  # [len(rows)] after the last step, where the back end counts them
    state: LaneState = LaneState.UNSTARTED


class LanePool(ABC):
    """A `Pool` (types.py) of lanes. A back end says how a lane begins, acts and what its step has caused.

    Units come back in the order in which they were sent, so a deterministic caller sees one order.
    tasks: rows are dealt over them in turn; each has `num_groups` lanes.
    """

    spec: EnvSpec

    def __init__(self, tasks: Sequence[str], num_rows: int, num_groups: int, num_threads: int, seed: int) -> None:
        """num_threads: of all lanes together; 0: the cores that this process may use."""
        if num_rows < len(tasks):
            fix = "Give more environments or fewer tasks."
            raise ConfigError("num_rows", num_rows, f"{len(tasks)} tasks need a row each", fix)
        self.num_rows, self.tasks, self.restarts = num_rows, tuple(tasks), 0
        self.task_ids = np.arange(num_rows, dtype=np.int64) % len(tasks)
        self._seed = seed
        self._num_groups = max(1, min(num_groups, num_rows // len(tasks)))
        self._num_threads = num_threads or available_cores()
        self._lanes = [Lane(task, rows) for task, rows in deal(num_rows, len(tasks), self._num_groups)]
        # All lanes but the one that waits for its actions step at once, so they share the threads.
        self._lane_threads = max(1, self._num_threads // max(1, len(self._lanes) - 1))
        self.unit_ids = np.zeros(num_rows, np.int64)
        for unit, lane in enumerate(self._lanes):
            self.unit_ids[lane.rows] = unit
        self._pending = deque(self._lanes)

    @abstractmethod
    def _first(self, lane: Lane) -> Ready:
        """Reset a lane from (seed, row): the same seed gives the same episodes, whatever was played before."""

    @abstractmethod
    def _act(self, lane: Lane, discrete: NDArray[np.int64], continuous: NDArray[np.float32] | None) -> None:
        """Begin a step. Raises EnvError for an action that would break the native code."""

    @abstractmethod
    def _stepped(self, lane: Lane) -> Ready:
        """Wait for the step; what the actions caused, in the terms of the contract."""

    def recv(self, timeout_s: float, gather_s: float = 0.0) -> Ready | None:
        """The unit that was sent longest ago, or None when every unit waits for actions.

        Blocks until that unit has stepped, even past timeout_s. The arrays are fresh ones in each call.
        """
        if not self._pending:
            time.sleep(timeout_s)
            return None
        lane = self._pending.popleft()
        ready = self._first(lane) if lane.state is LaneState.UNSTARTED else self._stepped(lane)
        lane.state = LaneState.WAITING
        return ready

    def send(
        self,
        rows: NDArray[np.int64],
        discrete: NDArray[np.int64],
        continuous: NDArray[np.float32] | None = None,
    ) -> None:
        """Answer whole units. Raises EnvError for rows that do not wait or an unknown action."""
        units = self.unit_ids[rows]
        for unit in dict.fromkeys(units.tolist()):
            lane, here = self._lanes[unit], units == unit
            if lane.state is not LaneState.WAITING or not np.array_equal(rows[here], lane.rows):
                raise EnvError(
                    f"{self.spec.name}: send() for rows {rows[here].tolist()}, but the unit of rows "
                    f"{lane.rows.tolist()} {lane.state.value}. Answer the whole unit of one recv, in its order."
                )
            self._act(lane, discrete[here], None if continuous is None else continuous[here])
            lane.state = LaneState.STEPPING
            self._pending.append(lane)

    def set_option(self, name: str, value: Any, env: int | None = None) -> None:
        """See `Pool`. Raises EnvError: native code takes its settings when it is made."""
        raise EnvError(
            f"set_option: '{name}' of {', '.join(self.tasks)} cannot be changed while it runs, as the native "
            "environments of ale-py and EnvPool take settings only when they are made. Give it in env.args, or play an "
            "environment of worker processes that has set_option()."
        )

    def reseed(self, seed: int) -> None:
        """See `Pool`. A unit in mid-step is waited for; the rows are reset by the next recvs."""
        self._seed = seed
        self._drain()
        self._pending = deque(self._lanes)

    def close(self) -> None:
        """Free the environments and their threads; safe to call twice."""
        self._drain()
        for lane in self._lanes:
            lane.native = None
        self._lanes, self._pending = [], deque()

    def _drain(self) -> None:
        for lane in self._lanes:
            if lane.state is LaneState.STEPPING:
                lane.native.recv()  # its threads write into memory that may be about to go
            lane.state = LaneState.UNSTARTED


def first(lane: Lane, obs: dict[str, NDArray[Any]]) -> Ready:
    """Every row of the lane begins an episode with obs [len(rows), ...]."""
    num = len(lane.rows)
    never = np.zeros(num, np.bool_)
    return Ready(
        lane.rows, np.full(num, Event.FIRST, np.uint8), obs, np.zeros(num, np.float32), never, never.copy(),
        never.copy(), NO_ROWS, {name: leaf[:0] for name, leaf in obs.items()},
    )  # fmt: skip


def deal(num_rows: int, num_tasks: int, num_groups: int) -> list[tuple[int, NDArray[np.int64]]]:
    """(task, rows) of every unit, group by group: row r plays task r % num_tasks."""
    all_rows = np.arange(num_rows, dtype=np.int64)
    groups = [np.array_split(all_rows[task::num_tasks], num_groups) for task in range(num_tasks)]
    return [(task, groups[task][group]) for group in range(num_groups) for task in range(num_tasks)]
