"""A pool without processes: every row counts its steps, so that each stored number names its origin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pronghorn.types import ActionSpec, EnvSpec, Event, LeafSpec, Ready

SPEC = EnvSpec({"obs": LeafSpec((2,), "float32", "vector")}, ActionSpec(discrete=(3,)), name="scripted")


class ScriptedPool:
    """Row r observes [r, 10 * step]; its k-th episode is as long as `lengths[r]` says; reward = step.

    truncated: rows whose episodes are cut by a limit (the others terminate). The final observation is [r, 10 * length].
    waits: rows whose end is told one recv late, after an INACTIVE one (next-step auto-reset).
    units: row → unit; whole units are delivered in turn, `per_recv` of them at a time.
    """

    restarts = 0

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        truncated: Sequence[int] = (),
        waits: Sequence[int] = (),
        units: Sequence[int] | None = None,
        per_recv: int = 1,
        life_loss: Callable[[int, int], bool] = lambda row, step: False,
        spec: EnvSpec = SPEC,
    ) -> None:
        self.spec, self.lengths, self.truncated, self.life_loss = spec, lengths, set(truncated), life_loss
        self.num_rows, self.per_recv = len(lengths), per_recv
        self.waits, self._waiting = set(waits), set[int]()
        self.tasks, self.task_ids = ("scripted",), np.zeros(self.num_rows, np.int64)
        self.unit_ids = np.array(units if units is not None else [0] * self.num_rows, np.int64)
        self.step_of = np.zeros(self.num_rows, np.int64)
        self.sent: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self.kill: set[int] = set()  # units to be lost at the next recv
        self.seeds: list[int] = []
        self._queue = deque((int(u), "first") for u in np.unique(self.unit_ids))

    def recv(self, timeout_s: float, gather_s: float = 0.0) -> Ready | None:
        units = [self._queue.popleft() for _ in range(min(self.per_recv, len(self._queue)))]
        if not units:
            return None
        parts = [self._deliver(unit, what) for unit, what in units]
        index = np.concatenate([np.flatnonzero(p["final"]) for p in parts[:1]])
        if len(parts) > 1:
            flags = np.concatenate([p["final"] for p in parts])
            index = np.flatnonzero(flags)
        arrays = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
        return Ready(
            arrays["rows"], arrays["event"], {"obs": arrays["obs"]}, arrays["reward"], arrays["terminated"],
            arrays["truncated"], arrays["over"], index, {"obs": arrays["last"][index]},
        )  # fmt: skip

    def _deliver(self, unit: int, what: str) -> dict[str, NDArray[np.generic]]:
        rows = np.flatnonzero(self.unit_ids == unit)
        n = len(rows)
        out: dict[str, NDArray[np.generic]] = {
            "rows": rows, "event": np.full(n, Event.STEP, np.uint8), "reward": np.zeros(n, np.float32),
            "terminated": np.zeros(n, bool), "truncated": np.zeros(n, bool), "over": np.zeros(n, bool),
            "final": np.zeros(n, bool), "last": np.zeros((n, 2), np.float32),
        }  # fmt: skip
        if unit in self.kill:
            self.kill.discard(unit)
            out["event"][:] = Event.LOST
            self._queue.append((unit, "first"))
        elif what == "first":
            out["event"][:] = Event.FIRST
            self.step_of[rows] = 0
        else:
            for i, row in enumerate(rows):
                self._advance(int(row), i, out)
        out["obs"] = np.stack([rows, 10 * self.step_of[rows]], 1).astype(np.float32)
        return out

    def _advance(self, row: int, i: int, out: dict[str, NDArray[np.generic]]) -> None:
        if row in self._waiting:
            self._waiting.discard(row)
        else:
            self.step_of[row] += 1
            if row in self.waits and self.step_of[row] == self.lengths[row]:
                self._waiting.add(row)
                out["event"][i], out["reward"][i] = Event.INACTIVE, 77.0
                return
        step = int(self.step_of[row])
        out["reward"][i] = step
        if step == self.lengths[row]:
            cut = row in self.truncated
            out["event"][i], out["over"][i] = Event.LAST, True
            out["truncated" if cut else "terminated"][i] = True
            out["final"][i] = cut
            out["last"][i] = [row, 10 * step]
            self.step_of[row] = 0
        elif self.life_loss(row, step):
            out["event"][i], out["terminated"][i] = Event.LAST, True

    def send(self, rows: NDArray[np.int64], discrete: NDArray[np.int64], continuous: NDArray[np.float32]) -> None:
        units = np.unique(self.unit_ids[rows])
        expected = np.flatnonzero(np.isin(self.unit_ids, units))
        assert sorted(rows) == sorted(expected), "whole units must be answered"
        self.sent.append((rows.copy(), discrete.copy()))
        self._queue.extend((int(u), "step") for u in units)

    def reseed(self, seed: int) -> None:
        self.seeds.append(seed)
        self._queue = deque((int(u), "first") for u in np.unique(self.unit_ids))

    def close(self) -> None: ...
