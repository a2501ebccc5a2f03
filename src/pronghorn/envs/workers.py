"""Environments in worker processes, behind `recv` and `send`: starts, feeds, watches and replaces the workers.

It runs no environment itself and knows no policy. The protocol is that of envworker/main.py: arrays in one
shared map, wake-ups over one socket per worker. A *unit* is one group of one worker: the rows that step
together. Rows are numbered group by group, so that one whole group of all workers is one slice of the map.

Life of a unit:    busy ──READY──▶ ready ──recv──▶ taken ──send──▶ busy
                   any ──its worker died──▶ lost ──recv (LOST)──▶ busy, with a new worker ──▶ ready (FIRST)
A unit that is taken when its worker dies becomes lost only once it has been answered, so that a row is never
in two unanswered recvs.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import selectors
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pronghorn.envs.layout import Unit, anonymous_file, divide, map_layout, merged
from pronghorn.envs.process import WorkerProcess, import_path, interpreter, start_error
from pronghorn.envs.restarts import RestartBudget
from pronghorn.envworker import keeper as keeper_module
from pronghorn.envworker import main as protocol
from pronghorn.envworker.deathmatch import is_match
from pronghorn.errors import ConfigError, PronghornError, UsageError, WorkerDied
from pronghorn.limits import require_engines, require_map, require_workers
from pronghorn.types import Event, Ready

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.25  # how often deadlines are looked at while nothing arrives
_CLOSE_WAIT_S = 1.0


@dataclass(frozen=True)
class ResolvedEnv:
    """What a back end needs to build one environment; `registry.resolve` makes it from a name.

    backend: 'worker' (a process of ours), 'atari' (ale-py's vector environment) or 'envpool'.
    kind, target, kwargs, options: the arguments of `envworker.building.make`.
    """

    name: str
    backend: str
    kind: str
    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "target": self.target,
                "kwargs": dict(self.kwargs), "options": dict(self.options)}  # fmt: skip


def derive_seed(seed: int, row: int, generation: int) -> int:
    """Seed in [0, 2^31) of a row's first reset; generation counts the restarts of its worker."""
    return int(np.random.SeedSequence([seed, row, generation]).generate_state(1)[0] & 0x7FFFFFFF)


class WorkerPool:
    """A `Pool` (types.py) over worker processes.

    envs: the tasks; rows are dealt over them in turn, and all must have equal observations and actions.
    num_groups: units per worker, of which one steps while another waits for actions (at most envs_per_worker).
    ordered: recv gives whole groups (of all workers) in fixed cyclic order, for the deterministic modes;
        otherwise whatever is ready.
    pin: 'auto' gives each worker one core of this process's affinity mask when there are enough, 'off' never.
    python: interpreter of the workers (it needs NumPy and the environment); None: this one.
    sys_path: directories that come first on the workers' import path; None: this process's own path and the
        current directory (with another interpreter: the directory of the script and the current one).
    step_timeout_s: a unit that has not answered for so long is hung: killed and restarted.
    start_timeout_s: limit for building the environments and their first reset.
    restart_budget: restarts allowed within restart_window_s; the next death raises WorkerDied, and so does a failure
        that only repeats itself (restarts.py).
    evaluation: it may run beside a training run, so it asks for no more files than it takes itself.

    Rows with event LOST are not answered: `send` ignores them, whether they are left out or not. A failure
    before every row has been reset once is raised at once, by its kind: UnknownEnvError, MissingExtraError,
    SpaceError, or EnvError with the worker's traceback; except that a match whose engines did not come together is
    tried again within the budget.

    Each record of an ended episode has row, task, return (raw sum of rewards), length (steps), and the
    environment's own numbers.
    """

    def __init__(
        self,
        envs: Sequence[ResolvedEnv],
        *,
        num_workers: int,
        envs_per_worker: int,
        num_groups: int = 2,
        seed: int,
        ordered: bool = False,
        pin: str = "auto",
        python: str | None = None,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        restart_budget: int = 10,
        restart_window_s: float = 600.0,
        sys_path: Sequence[str] | None = None,
        nice: int = 0,
        evaluation: bool = False,
    ) -> None:
        _require_sizes(envs, num_workers, envs_per_worker, num_groups)
        require_workers(num_workers, num_workers * envs_per_worker, evaluation=evaluation)
        self.restarts = 0
        self._envs, self._seed, self._ordered, self._nice = list(envs), seed, ordered, nice
        self._python = interpreter(python)
        self._sys_path = import_path(sys_path, python)
        self._step_timeout_s, self._start_timeout_s = step_timeout_s, start_timeout_s
        self._budget = RestartBudget(restart_budget, restart_window_s)
        self._num_workers, self._envs_per_worker = num_workers, envs_per_worker
        self._cores = _cores(pin, num_workers)
        self._pin_asked = pin
        self._num_groups = min(num_groups, envs_per_worker)
        self._next_group = 0  # ordered mode
        self.tasks = tuple(env.name for env in self._envs)
        self._number_rows(1)  # until the workers say how many rows an environment has
        self._generation = [0] * num_workers
        self._options: dict[tuple[str, int | None], Any] = {}  # by (name, environment, None for all): the last value
        self._frame: NDArray[np.uint8] | None = None
        self._next_check, self._looked = 0.0, time.monotonic()
        self._starting, self._mapped, self._closed = True, False, False
        self._failure: PronghornError | None = None
        self._processes: list[WorkerProcess | None] = [None] * num_workers
        self._due: dict[int, float] = {}  # when a worker that is being replaced starts
        self._selector = selectors.DefaultSelector()
        self._memory_fd = anonymous_file()
        self._directory = Path(tempfile.mkdtemp(prefix="pronghorn-"))
        self._keeper = keeper_module.Keeper(str(self._directory))
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _number_rows(self, rows_per_env: int) -> None:
        """Rows of an environment are consecutive, and so are the environments of a unit."""
        self._rows_per_env = rows_per_env
        self._units = divide(self._num_workers, self._envs_per_worker, self._num_groups, rows_per_env)
        self.num_rows = self._num_workers * self._envs_per_worker * rows_per_env
        self._unit_of_row = [unit for unit in self._units for _ in unit.rows]
        # In fixed order a whole group stays together, even while it is held: what acts in one forward pass must not
        # depend on what came first, an answer or a slot, as results differ in the last bit with the number of rows.
        ids = [unit.group if self._ordered else i for i, unit in enumerate(self._units)]
        self.unit_ids = np.array([i for i, unit in zip(ids, self._units, strict=True) for _ in unit.rows], np.int64)
        self.task_ids = np.arange(self.num_rows, dtype=np.int64) // rows_per_env % len(self._envs)

    # ---------------------------------------------------------------------------------------- the two calls

    def recv(self, timeout_s: float, gather_s: float = 0.0) -> Ready | None:
        """See `Pool`. Arrays are valid until the next recv; those of a single slice of rows are not copied."""
        if self._failure is not None:
            raise self._failure
        until = time.monotonic() + timeout_s
        self._poll(0.0)
        while not (units := self._deliverable()):
            remaining = until - time.monotonic()
            if remaining <= 0:
                return None
            self._poll(remaining)
        if gather_s and not self._ordered:
            self._wait_for_others(time.monotonic() + gather_s)
            units = self._deliverable()
        return self._assemble(units)

    def _wait_for_others(self, until: float) -> None:
        """Until no unit steps, or that time."""
        while any(unit.deadline < math.inf for unit in self._units) and (remaining := until - time.monotonic()) > 0:
            self._poll(remaining)

    def send(self, rows: NDArray[np.int64], discrete: NDArray[np.int64], continuous: NDArray[np.float32]) -> None:
        """See `Pool`. rows: of one recv, with or without those that were LOST."""
        if self._failure is not None:
            raise self._failure
        deadline = time.monotonic() + self._step_timeout_s
        position = 0
        while position < len(rows):
            unit = self._unit_of_row[rows[position]]
            end = position + unit.stop - unit.start
            if not np.array_equal(rows[position:end], unit.rows) or not (unit.taken or unit.excused):
                raise UsageError(
                    f"send: row {rows[position]} is not waiting for an action; answer the rows of one recv"
                )
            if unit.taken:
                self._discrete[unit.start : unit.stop] = discrete[position:end]
                self._continuous[unit.start : unit.stop] = continuous[position:end]
                self._answer(unit, deadline)
            position = end

    def _answer(self, unit: Unit, deadline: float) -> None:
        unit.taken = False
        if unit.void:
            unit.void = False
            return
        process = self._processes[unit.worker]
        assert process is not None
        unit.deadline = deadline
        process.send(protocol.STEP, unit.group, 1 - unit.slot)

    def _deliverable(self) -> list[Unit]:
        if not self._ordered:
            return [unit for unit in self._units if unit.deliverable]
        group = self._units[self._next_group * self._num_workers : (self._next_group + 1) * self._num_workers]
        if not all(unit.deliverable for unit in group):
            return []
        self._next_group = (self._next_group + 1) % self._num_groups
        return group

    def _assemble(self, units: list[Unit]) -> Ready:
        """One Ready of all rows of `units`; marks them delivered."""
        one_slice = all(a.stop == b.start and a.slot == b.slot for a, b in pairwise(units))
        if one_slice:
            start, stop, slot = units[0].start, units[-1].stop, units[0].slot
            rows = self._all_rows[start:stop]
            obs = {name: array[slot, start:stop] for name, array in self._obs.items()}
        else:
            rows = np.concatenate([unit.rows for unit in units])
            obs = self._gather(units)
        ready = Ready(
            rows, self._event[rows], obs, self._reward[rows], self._terminated[rows], self._truncated[rows],
            self._episode_over[rows], self._no_rows, self._no_final,
            self._info[rows] if self.spec.info else None, game=self._game[rows] if self.spec.agents else None,
        )  # fmt: skip
        self._hand_over(units, ready)
        if ready.truncated.any():
            ready.final_index = np.flatnonzero(ready.truncated)
            final_rows = rows[ready.final_index]
            ready.final_obs = {name: array[final_rows] for name, array in self._final.items()}
        return ready

    def _gather(self, units: list[Unit]) -> dict[str, NDArray[Any]]:
        position = 0
        for unit in units:
            end = position + unit.stop - unit.start
            for name, array in self._obs.items():
                self._gathered[name][position:end] = array[unit.slot, unit.start : unit.stop]
            position = end
        return {name: array[:position] for name, array in self._gathered.items()}

    def _hand_over(self, units: list[Unit], ready: Ready) -> None:
        position = 0
        for unit in units:
            end = position + unit.stop - unit.start
            if unit.lost:
                unit.lost, unit.excused = False, True
                ready.event[position:end] = Event.LOST
                ready.reward[position:end] = 0.0
                for flags in (ready.terminated, ready.truncated, ready.episode_over):
                    flags[position:end] = False
            else:
                unit.ready, unit.excused, unit.taken = False, False, True
                ready.records += unit.records
                unit.records = []
            position = end

    # ------------------------------------------------------------------------------------- the rarer calls

    def reseed(self, seed: int) -> None:
        """See `Pool`. Waits for the steps under way: an environment cannot be interrupted inside one."""
        while any(unit.deadline < math.inf for unit in self._units):
            self._poll(_CHECK_EVERY_S)
        self._seed, self._next_group = seed, 0
        self._generation = [0] * self._num_workers
        for unit in self._units:
            unit.ready = unit.taken = unit.lost = unit.void = unit.excused = False
            unit.records = []
        for process in self._processes:
            # A worker that is still starting takes its seeds when it is attached.
            if process is not None and process.attached:
                process.send_json(protocol.RESEED, {"seeds": self._seeds(process.index)})
                self._expect_ready(process.index, self._step_timeout_s)

    def set_option(self, name: str, value: Any, env: int | None = None) -> None:
        """Call `set_option(name, value)` of one environment or of all before the next step, and after each restart.

        env: number of the environment, its first row // rows_per_env; None: all, in place of what single ones were
            told before. value: JSON. Restarted ones are told the last value only, so give a table whole.
        Call it from the thread that calls recv and send. What an environment refuses, a later recv raises.
        Raises UsageError: no such environment, or a value that is not JSON.
        """
        if self._failure is not None:
            raise self._failure
        self._require_env(env)
        value = _as_json(name, value)
        for key in [key for key in self._options if key[0] == name and env in (None, key[1])]:
            del self._options[key]  # the order, in which restarted ones are told, is that of the last calls
        self._options[name, env] = value
        for process in self._processes:
            if process is not None and process.attached:
                self._tell_option(process, name, value, env)

    def _require_env(self, env: int | None) -> None:
        num_envs = self.num_rows // self._rows_per_env
        if env is not None and not 0 <= env < num_envs:
            raise UsageError(
                f"set_option: env = {env}, and there are {num_envs}; give the environment's first row // rows_per_env "
                f"(0 to {num_envs - 1}), or None for all"
            )

    def _tell_option(self, process: WorkerProcess, name: str, value: Any, env: int | None) -> None:
        """Send a setting to a worker, if the environment (None: all) is one of its own."""
        index = None
        if env is not None:
            first_row = env * self._rows_per_env
            if self._unit_of_row[first_row].worker != process.index:
                return
            index = self._rows_of(process.index).index(first_row)
        process.send_json(protocol.OPTION, {"name": name, "value": value, "env": index})

    def render(self, row: int, *, ending: bool = False) -> NDArray[np.uint8] | None:
        """The picture [H, W, 3] of the row's environment between its steps, or None if it has none.

        ending: how its last episode (or game of several agents) ended, before the next one began. Once, and only where
        pictures were asked for before.
        """
        unit = self._unit_of_row[row]
        process = self._processes[unit.worker]
        if process is None or not process.attached:
            return None
        self._frame = None
        process.deadline = time.monotonic() + self._step_timeout_s
        first_row = row - row % self._rows_per_env
        index = self._rows_of(unit.worker).index(first_row)
        process.send_json(protocol.RENDER, {"env": index, "ending": ending})
        while self._frame is None and self._processes[unit.worker] is process:
            self._poll(_CHECK_EVERY_S)
        return self._picture()

    def _picture(self) -> NDArray[np.uint8] | None:
        return self._frame if self._frame is not None and self._frame.size else None

    def describe(self) -> str:
        """One line for the run's header."""
        if self._cores:
            pinned = "pinned to cores " + ",".join(map(str, self._cores))
        elif self._pin_asked == "off":
            pinned = "not pinned (off)"
        else:
            pinned = "not pinned (more workers than cores, or not supported here)"
        return (
            f"{self._num_workers} workers x {self._envs_per_worker} environments in {self._num_groups} groups, {pinned}"
        )

    def state(self) -> list[str]:
        """What every worker is doing, a line each. Any thread may ask."""
        return [self._state_of(index) for index in range(self._num_workers)]

    def _state_of(self, index: int) -> str:
        process = self._processes[index]
        if process is None:
            return f"worker {index}: being replaced"
        states = Counter(unit.state for unit in self._units_of(index))
        units = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"worker {index} (process {process.popen.pid}, {process.status}), groups: {units}"

    def close(self) -> None:
        """See `Pool`."""
        if self._closed:
            return
        self._closed = True
        alive = [process for process in self._processes if process is not None]
        for process in alive:
            process.send(protocol.CLOSE)
        until = time.monotonic() + _CLOSE_WAIT_S
        for process in alive:
            process.wait_end(until)
            self._end(process)
        self._selector.close()
        os.close(self._memory_fd)
        self._keeper.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    # ------------------------------------------------------------------------------------- starting workers

    def _start(self) -> None:
        if any(env.kind == "doom" for env in self._envs):
            keeper_module.remove_stale_engine_files()
            require_engines(self._num_workers * self._envs_per_worker // len(self._envs))
        for index in range(self._num_workers):
            self._spawn(index)
        while any(process is None or process.spec is None for process in self._processes):
            self._poll(_CHECK_EVERY_S)
        processes = [process for process in self._processes if process is not None]
        self.spec = merged([spec for process in processes for spec in (process.spec or {})["specs"]])
        self._number_rows(self.spec.rows_per_env)
        self._map()
        for process in processes:
            self._attach(process)
        self._mapped = True
        while not all(unit.ready for unit in self._units):
            self._poll(_CHECK_EVERY_S)
        self._starting = False

    def _spawn(self, index: int) -> None:
        directory = self._directory / f"worker{index}-{self.restarts}"
        process = WorkerProcess(index, self._python, self._memory_fd, directory)
        self._processes[index] = process
        self._keeper.add(process.popen.pid)
        self._selector.register(process.sock, selectors.EVENT_READ, (process, False))
        if process.exit_fd >= 0:
            self._selector.register(process.exit_fd, selectors.EVENT_READ, (process, True))
        process.deadline = time.monotonic() + self._start_timeout_s
        envs = [self._envs[self.task_ids[row]].to_json() for row in self._rows_of(index)]
        cpus = [self._cores[index]] if self._cores else []
        process.send_json(protocol.START, {"envs": envs, "sys_path": self._sys_path, "cpus": cpus, "nice": self._nice})

    def _attach(self, process: WorkerProcess) -> None:
        rows = self._rows_of(process.index)
        units = self._units_of(process.index)
        process.attached = True
        process.send_json(
            protocol.ATTACH,
            {
                "size": self._size, "arrays": self._layout, "worker": process.index, "rows": rows,
                "groups": [[rows.index(row) for row in self._first_rows(unit)] for unit in units],
                "seeds": self._seeds(process.index), "info": self.spec.info,
            },
        )  # fmt: skip
        for (name, env), value in self._options.items():
            self._tell_option(process, name, value, env)
        self._expect_ready(process.index, self._start_timeout_s)

    def _map(self) -> None:
        """Size the shared map for the environments' spec and make this side's views of it."""
        self._size, self._layout = map_layout(self.spec, self.num_rows, self._num_workers)
        require_map(self._size, self.num_rows)
        os.ftruncate(self._memory_fd, self._size)
        arrays = protocol.Arrays(mmap.mmap(self._memory_fd, self._size), self._layout)
        self._obs, self._final = arrays.obs, arrays.final_obs
        self._event, self._reward, self._info = arrays.event, arrays.reward, arrays.info
        self._terminated, self._truncated = arrays.terminated, arrays.truncated
        self._episode_over, self._game, self._at_work = arrays.episode_over, arrays.game, arrays.at_work
        self._discrete, self._continuous = arrays.discrete, arrays.continuous
        self._all_rows = np.arange(self.num_rows, dtype=np.int64)
        self._gathered = {name: np.empty_like(array[0]) for name, array in self._obs.items()}
        self._no_rows = np.empty(0, np.int64)
        self._no_final = {name: array[:0] for name, array in self._gathered.items()}

    def _units_of(self, worker: int) -> list[Unit]:
        return self._units[worker :: self._num_workers]

    def _first_rows(self, unit: Unit) -> range:
        """The first row of each environment of the unit."""
        return range(unit.start, unit.stop, self._rows_per_env)

    def _rows_of(self, worker: int) -> list[int]:
        """The first row of each of the worker's environments, in their order."""
        return [row for unit in self._units_of(worker) for row in self._first_rows(unit)]

    def _seeds(self, worker: int) -> list[int]:
        return [derive_seed(self._seed, row, self._generation[worker]) for row in self._rows_of(worker)]

    def _expect_ready(self, worker: int, timeout_s: float) -> None:
        for unit in self._units_of(worker):
            unit.deadline = time.monotonic() + timeout_s

    # ------------------------------------------------------------------------------------- watching workers

    def _poll(self, timeout_s: float) -> None:
        """Take what workers sent, waiting at most timeout_s for the first; replace those that died or hang."""
        wait_s = min(timeout_s, _CHECK_EVERY_S)
        arrived = self._selector.select(wait_s)
        now = time.monotonic()
        self._excuse(now - self._looked - wait_s)
        self._looked = now
        self._spawn_due()
        for key, _ in arrived:
            process, exited = key.data
            if self._processes[process.index] is process:  # not replaced by an earlier event of this round
                self._read(process, exited)
        if now >= self._next_check:  # only now: an answer that lay there while nobody looked came in time
            self._next_check = now + _CHECK_EVERY_S
            self._check(now)

    def _excuse(self, away_s: float) -> None:
        """Put off all deadlines by a long time in which this process did not look.

        It may have been stopped (Ctrl-Z, a paused container), and its workers with it. Shorter times, as of an update
        of the learner, count as they are, so that they do not put off the end of a worker that hangs.
        """
        if away_s < self._step_timeout_s / 2:
            return
        for unit in self._units:
            unit.deadline += away_s
        for process in self._processes:
            if process is not None:
                process.deadline += away_s

    def _check(self, now: float) -> None:
        self._keeper.check()
        for process in [process for process in self._processes if process is not None]:
            late = [unit for unit in self._units_of(process.index) if unit.deadline < now]
            if late or process.deadline < now:
                limit_s = self._step_timeout_s if process.begun else self._start_timeout_s
                self._bury(process, f"did not answer within {limit_s:g} s. Its stack:\n{process.stack_of_hang()}")
            else:
                process.limit_log()

    def _read(self, process: WorkerProcess, exited: bool) -> None:
        try:
            data = process.sock.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if exited:  # a child of the worker still holds the socket open
                self._bury(process)
            return
        except ConnectionError:
            data = b""
        if not data:
            self._bury(process)
            return
        process.buffer += data
        for kind, group, slot, payload in process.messages():
            self._take(process, kind, group, slot, payload)

    def _take(self, process: WorkerProcess, kind: int, group: int, slot: int, payload: bytes) -> None:
        if kind == protocol.READY:
            unit = self._units[group * self._num_workers + process.index]
            unit.ready, unit.slot, unit.deadline, process.begun = True, slot, math.inf, True
            if payload:
                unit.records = json.loads(payload)
                self._budget.episode_ended(process.index)
                for record in unit.records:
                    record["task"] = self.tasks[self.task_ids[record["row"]]]
        elif kind == protocol.SPEC:
            process.spec, process.deadline = json.loads(payload), math.inf
            if self._mapped:
                self._attach(process)
        elif kind == protocol.FRAME:
            process.deadline = math.inf
            shape = protocol.FRAME_SHAPE.unpack_from(payload)
            self._frame = np.frombuffer(payload, np.uint8, offset=protocol.FRAME_SHAPE.size).reshape(shape)
        else:
            process.report = json.loads(payload)
            self._bury(process)

    def _bury(self, process: WorkerProcess, hang: str = "") -> None:
        """End a dead or hung worker and all that it started; start its successor, or raise."""
        if not hang:
            process.wait_exit(0.5)  # so that its own status is seen, not our signal
        status = self._end(process)
        site = self._site(process)
        cause = f"worker {process.index} ({site}) {hang or process.epitaph(status)}"
        process.discard()
        first_life = self._generation[process.index] == 0
        again = self._starting and process.may_start_again(any(is_match(name) for name in self.tasks))
        if (self._starting and not again) or (first_life and process.broke_contract_at_once):
            self._fail(start_error(process.report, site, cause))
        self._count_death(process, cause)
        for unit in self._units_of(process.index):  # while all start, nobody has got a row that could be lost
            unit.ready, unit.lost, unit.void, unit.deadline, unit.records = False, not again, unit.taken, math.inf, []
        self._generation[process.index] += 1
        self._due[process.index] = time.monotonic() + self._budget.delay_s(process.index)
        self._spawn_due()

    def _spawn_due(self) -> None:
        """Start the successors whose time has come."""
        now = time.monotonic()
        for index in [index for index, due in self._due.items() if due <= now]:
            del self._due[index]
            self._spawn(index)

    def _end(self, process: WorkerProcess) -> int:
        """Kill what there is of a worker and forget it; returns its exit status."""
        self._processes[process.index] = None
        self._selector.unregister(process.sock)
        if process.exit_fd >= 0:
            self._selector.unregister(process.exit_fd)
        status = process.kill()
        self._keeper.remove(process.popen.pid)
        return status

    def _site(self, process: WorkerProcess) -> str:
        """Which environment was at work, as far as is known."""
        rows = self._rows_of(process.index)
        if process.report is not None:
            row = rows[process.report["env"]]
        elif process.attached:
            row = rows[int(self._at_work[process.index])]
        else:
            return "starting " + ", ".join(sorted({self.tasks[self.task_ids[row]] for row in rows}))
        return f"{self.tasks[self.task_ids[row]]}, row {row}"

    def _count_death(self, process: WorkerProcess, cause: str) -> None:
        reason = self._budget.why_not(process.index, process.report)
        if reason:
            self._fail(WorkerDied(f"{cause}\n{reason}"))
        self.restarts += 1
        delay_s = self._budget.delay_s(process.index)
        when = f" in {delay_s:g} s" if delay_s else ""
        text = "%s\nrestarting it%s: %d of %d restarts used"
        log.warning(text, cause, when, self._budget.num_used, self._budget.budget)

    def _fail(self, error: PronghornError) -> NoReturn:
        self._failure = error  # every later recv says the same
        raise error


def _require_sizes(envs: Sequence[ResolvedEnv], num_workers: int, envs_per_worker: int, num_groups: int) -> None:
    if not hasattr(os, "killpg"):
        raise PronghornError("worker processes need Linux or macOS (sockets, process groups). On Windows use WSL 2.")
    # A worker builds its environments in the interpreter that runs the user's file; were that file to start
    # workers itself when it is imported, every one of them would start the whole run again.
    if protocol.PRIVATE_PACKAGE in sys.modules:
        raise UsageError(
            "this file starts a run when it is imported, and a worker imported it to build its environment. "
            "Put the start of the run under: if __name__ == '__main__':"
        )
    for name, value in (("num_workers", num_workers), ("envs_per_worker", envs_per_worker), ("num_groups", num_groups)):
        if value < 1:
            raise ConfigError(f"env.{name}", value, "it is a count of at least 1", "Give a positive number.")
    for env in envs:
        try:
            json.dumps(env.to_json())
        except TypeError as error:
            fix = "Give numbers, text, lists and tables only; build other objects inside the function."
            raise ConfigError("env.args", dict(env.kwargs), f"arguments travel as JSON ({error})", fix) from None
    if not 1 <= len(envs) <= num_workers * envs_per_worker:
        raise ConfigError(
            "env.id", [env.name for env in envs],
            f"{len(envs)} tasks cannot be dealt to {num_workers * envs_per_worker} environments",
            "Give every task at least one: raise env.num_workers or env.envs_per_worker.",
        )  # fmt: skip


def _as_json(name: str, value: Any) -> Any:
    """A copy of a setting's value, as the workers get it. Raises UsageError."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"set_option: {name} = {value!r}: settings travel to the workers as JSON ({error}); give numbers, text, "
            "lists and tables only"
        ) from None


def _cores(pin: str, num_workers: int) -> list[int]:
    """Cores to pin to, round-robin; empty: no pinning."""
    if pin not in ("auto", "off"):
        raise ConfigError("env.pin", pin, "it is 'auto' or 'off'", "Leave it at auto.")
    if pin == "off" or not hasattr(os, "sched_getaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[:num_workers] if num_workers <= len(allowed) else []
