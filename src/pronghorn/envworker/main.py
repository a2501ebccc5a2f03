"""The worker process: runs environments and hands their flat records over; it never learns and never chooses.

Started by file path in any Python >= 3.8 that has NumPy: `python main.py SOCKET_FD MEMORY_FD`. Arrays live in
one shared map; one Unix stream socket carries the wake-ups. A message is an 8-byte header and a payload:

    kind u8, group u8, slot u16, payload length u32          (native byte order: both ends are one machine)

    trainer -> worker                                   worker -> trainer
    START   {"envs", "sys_path", "cpus", "nice"}        SPEC   {"specs": [spec], "env_specs": [index]}
    ATTACH  {"size", "arrays", "worker", "rows",        READY  group, slot; payload: records of ended episodes
             "groups", "seeds", "info"}                 ERROR  {"code", "message", "traceback", "env", ...}
    STEP    group, slot (no payload)                    FRAME  height, width, channels (3 x u32), pixels
    RESEED  {"seeds"}     OPTION {"name", "value",
    RENDER  {"env", "ending"}     "env": index or null
    CLOSE                         for all}

The trainer answers SPEC by sizing the map and ATTACH; the worker resets its rows and reports each group READY.
Then the trainer writes actions into the map and sends STEP for a group; the worker steps that group's
environments in order, writes their rows and reports READY. Observations have two slots, used in turn, so that
those of one READY stay untouched while the next step is under way.

A row is an agent. An environment whose episode is over is reset at once, here and only here: reward, flags,
final observation (where truncated) and the next episode's first observation are one record with event LAST.
So RENDER, which draws what is now, cannot show the end of an episode: where pictures were asked for before, one is
drawn ahead of the reset, and RENDER with "ending" takes it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import json
import mmap
import os
import signal
import socket
import struct
import sys
import traceback
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

PRIVATE_PACKAGE = "pronghorn_envworker"  # its presence tells that this process is a worker


def _package() -> str:
    """Name of the package of the files next to this one: a private one when this file was started by its path."""
    if __package__:
        return __package__
    here = os.path.dirname(os.path.abspath(__file__))
    # Python put this directory first on the path, where 'spaces' or 'doom' would hide the user's own modules.
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != here]
    spec = importlib.util.spec_from_file_location(
        PRIVATE_PACKAGE, os.path.join(here, "__init__.py"), submodule_search_locations=[here]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PRIVATE_PACKAGE] = package
    spec.loader.exec_module(package)
    return PRIVATE_PACKAGE


_PACKAGE = _package()
building = importlib.import_module(_PACKAGE + ".building")
many_rows = importlib.import_module(_PACKAGE + ".many_rows")
spaces = importlib.import_module(_PACKAGE + ".spaces")

HEADER = struct.Struct("=BBHI")
FRAME_SHAPE = struct.Struct("=III")
START, ATTACH, STEP, RESEED, OPTION, RENDER, CLOSE = range(1, 8)
SPEC, READY, ERROR, FRAME = range(16, 20)
NUM_SLOTS = 2
BY_AGENT = ("return", "length", "outcome")  # numbers of an episode's record that are also kept for each agent
OUTCOMES = "outcomes"  # in the first record after a game's end: what it declared for each row of its environment
MAX_NAMED_AGENTS = 16  # in games of more they are not
MAX_FLOAT32 = float(np.finfo(np.float32).max)

Message = Tuple[int, int, int, bytes]


class Channel:
    """Blocking framed messages over the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, kind: int, group: int = 0, slot: int = 0, payload: bytes = b"") -> None:
        self._sock.sendall(HEADER.pack(kind, group, slot, len(payload)) + payload)

    def send_json(self, kind: int, value: Any) -> None:
        self.send(kind, payload=json.dumps(value, default=float).encode())

    def receive(self) -> Message:
        """The next message. Raises EOFError when the trainer has gone."""
        kind, group, slot, length = HEADER.unpack(self._exactly(HEADER.size))
        return kind, group, slot, self._exactly(length) if length else b""

    def _exactly(self, size: int) -> bytes:
        parts: List[bytes] = []
        while size:
            part = self._sock.recv(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class Arrays:
    """Views of the shared map, by the layout that the trainer sent: {name: [offset, dtype, shape]}."""

    def __init__(self, buffer: Any, layout: Dict[str, Any]) -> None:
        views = {
            name: np.ndarray(tuple(shape), np.dtype(dtype), buffer, offset)
            for name, (offset, dtype, shape) in layout.items()
        }
        self.obs = {name[4:]: view for name, view in views.items() if name.startswith("obs/")}  # [2, R, ...]
        self.final_obs = {name[6:]: view for name, view in views.items() if name.startswith("final/")}  # [R, ...]
        self.event, self.reward, self.info = views["event"], views["reward"], views["info"]  # [R], [R], [R, K]
        self.terminated, self.truncated = views["terminated"], views["truncated"]
        self.episode_over, self.game = views["episode_over"], views["game"]  # [R], [R]
        self.discrete, self.continuous = views["discrete"], views["continuous"]  # [R, D], [R, C]
        self.at_work = views["at_work"]  # [W] number of the environment that each worker is stepping


class MaskCheck:
    """Whether rows that act may choose at all: one allowed value in each discrete factor."""

    def __init__(self, spec: Dict[str, Any]) -> None:
        masks = [name for name, leaf in spec["observation"].items() if leaf["kind"] == "mask"]
        self._name = masks[0] if masks else None
        self._starts = np.cumsum([0, *spec["action"]["discrete"][:-1]])

    def __call__(self, obs: Dict[str, Any], episode_steps: Any, acts: Any = True) -> None:
        """obs: of one row, or of k rows, of which those of `acts` [k] count. Raises ContractBroken."""
        if self._name is None:
            return
        nothing = np.add.reduceat(obs[self._name] != 0, self._starts, axis=-1, dtype=np.int64) == 0
        nothing &= np.reshape(acts, (-1, 1) if nothing.ndim == 2 else ())
        if nothing.any():
            *row, factor = np.argwhere(nothing)[0].tolist()
            raise spaces.ContractBroken(
                "'%s' allows nothing in factor %d after step %s of the episode; a row that acts needs a choice"
                % (self._name, factor, episode_steps[row[0]] if row else episode_steps)
            )


class SingleRow:
    """One environment with one agent, and the one row of the map that it fills."""

    def __init__(self, env: Any, row: int, arrays: Arrays, info: Sequence[str]) -> None:
        self.env, self.row, self.arrays, self.info = env, row, arrays, list(enumerate(info))
        self._views = [
            [(name, array[slot, row : row + 1]) for name, array in arrays.obs.items()] for slot in range(NUM_SLOTS)
        ]
        self._final_views = [(name, array[row : row + 1]) for name, array in arrays.final_obs.items()]
        self._check_mask = MaskCheck(env.spec)
        self.episode_return, self.episode_steps, self.total_steps = 0.0, 0, 0
        self._is_watched = False  # pictures of endings are drawn only for those who look
        self._ending: Any = None

    def begin(self, seed: Optional[int], slot: int) -> None:
        """Start a new episode and write its first observation."""
        obs = self._reset(seed)
        self._check_mask(obs, 0)
        self._write(self._views[slot], obs)
        a, row = self.arrays, self.row
        a.event[row], a.reward[row] = many_rows.FIRST, 0.0
        a.terminated[row] = a.truncated[row] = a.episode_over[row] = False
        a.info[row] = np.nan

    def advance(self, slot: int, records: List[Dict[str, Any]]) -> None:
        """One decision: step, write the row; an episode that is over is reset within the same record."""
        a, row = self.arrays, self.row
        # Copies: an environment that keeps its action must not see the trainer write the next one.
        obs, reward, terminated, truncated, over, info = self.env.step(a.discrete[row].copy(), a.continuous[row].copy())
        self.total_steps += 1
        self.episode_steps += 1
        self.episode_return += reward
        if truncated:
            self._write(self._final_views, obs)
        if over:
            records.append(self._record())
            if self._is_watched:
                self._keep_ending()
            obs = self._reset(None)
        self._check_mask(obs, self.episode_steps)
        self._write(self._views[slot], obs)
        a.event[row] = many_rows.LAST if terminated or truncated else many_rows.STEPPED
        a.reward[row] = _finite_reward(reward)
        a.terminated[row], a.truncated[row], a.episode_over[row] = terminated, truncated, over
        for column, name in self.info:
            a.info[row, column] = info.get(name, np.nan)

    def render(self) -> Any:
        """The picture of what is now."""
        self._is_watched = True
        return self.env.render()

    def ending(self) -> Any:
        """The picture of how the last episode ended, once; None where none did since the first picture."""
        frame, self._ending = self._ending, None
        return frame

    def _keep_ending(self) -> None:
        frame = self.env.render()
        self._ending = None if frame is None else np.array(frame)  # the environment may draw on it again

    def _reset(self, seed: Optional[int]) -> Dict[str, Any]:
        self.episode_return, self.episode_steps = 0.0, 0
        obs: Dict[str, Any] = self.env.reset(seed)
        return obs

    def _record(self) -> Dict[str, Any]:
        stats = self.env.stats() if hasattr(self.env, "stats") else {}
        return dict(stats, row=self.row, length=self.episode_steps, **{"return": self.episode_return})

    @staticmethod
    def _write(views: List[Tuple[str, Any]], obs: Dict[str, Any]) -> None:
        for name, view in views:
            value = obs[name]
            if value.shape != view.shape[1:]:  # assignment would broadcast it silently
                raise spaces.ContractBroken(
                    "observation leaf '%s' has shape %s; the spec declares %s" % (name, value.shape, view.shape[1:])
                )
            _require_finite(name, value)
            view[0] = value


class ManyRows:
    """One environment of several rows (`many_rows.RowsEnv`), and their rows of the map."""

    def __init__(self, env: Any, row: int, arrays: Arrays, info: Sequence[str]) -> None:
        self.env, self.arrays, self.info = env, arrays, list(info)
        count = env.spec["rows_per_env"]
        self.rows = slice(row, row + count)
        self.episode_return, self.episode_steps = np.zeros(count), np.zeros(count, np.int64)
        self.total_steps = 0
        self._agents = env.spec.get("agents", ())
        self._check_mask = MaskCheck(env.spec)

    def begin(self, seed: Optional[int], slot: int) -> None:
        """Start a new episode in every row and write the first observations."""
        self.episode_return[:], self.episode_steps[:] = 0.0, 0
        self._put(self.env.reset(seed), slot)

    def advance(self, slot: int, records: List[Dict[str, Any]]) -> None:
        """One decision of every row; what the environment says is already one record a row."""
        a, rows = self.arrays, self.rows
        step = self.env.step(a.discrete[rows].copy(), a.continuous[rows].copy())
        self.total_steps += 1
        moved = (step.event == many_rows.STEPPED) | (step.event == many_rows.LAST)
        self.episode_return[moved] += step.reward[moved]
        self.episode_steps[moved] += 1
        self._put(step, slot)
        over = np.flatnonzero(step.episode_over).tolist()
        records.extend(self._record(i, step) for i in over)
        begins = step.episode_over | (step.event == many_rows.FIRST)
        self.episode_return[begins], self.episode_steps[begins] = 0.0, 0

    def render(self) -> Any:
        """The picture of what is now."""
        return self.env.render()

    def ending(self) -> Any:
        """The picture of how the last game ended, once; None where the environment keeps none."""
        return self.env.ending() if hasattr(self.env, "ending") else None

    def _record(self, i: int, step: Any) -> Dict[str, Any]:
        """Of the episode that ended in one of the rows; what every episode has is there by the agent's name as well."""
        own = {"length": int(self.episode_steps[i]), "return": float(self.episode_return[i])}
        record: Dict[str, Any] = {**step.stats.get(i, {}), **own}
        if 0 < len(self._agents) <= MAX_NAMED_AGENTS:
            by_agent = {"%s/%s" % (name, self._agents[i]): record[name] for name in BY_AGENT if name in record}
            record.update(by_agent)
        if i in step.games:
            record[OUTCOMES] = step.games[i]
        return dict(record, row=self.rows.start + i)

    def _put(self, step: Any, slot: int) -> None:
        """Write a VectorStep into the map."""
        a, rows = self.arrays, self.rows
        self._check_mask(step.obs, self.episode_steps, step.event != many_rows.INACTIVE)
        if step.truncated.any():
            self._write(a.final_obs, step.final_obs, step.truncated)
        self._write(a.obs, step.obs, step.event != many_rows.INACTIVE, slot)
        a.reward[rows], a.event[rows] = _finite_reward(step.reward), step.event
        a.terminated[rows], a.truncated[rows], a.episode_over[rows] = step.terminated, step.truncated, step.episode_over
        if self._agents:
            a.game[rows] = self.env.games  # that of the rows that begin now, if any does
        for column, name in enumerate(self.info):
            a.info[rows, column] = step.info.get(name, np.nan)

    def _write(self, arrays: Dict[str, Any], obs: Dict[str, Any], used: Any, slot: Optional[int] = None) -> None:
        """used: [k] rows whose values matter."""
        for name, array in arrays.items():
            view = array[self.rows] if slot is None else array[slot, self.rows]
            if obs[name].shape != view.shape:  # assignment would broadcast it silently
                raise spaces.ContractBroken(
                    "observation leaf '%s' has shape %s; the spec declares %s" % (name, obs[name].shape, view.shape)
                )
            _require_finite(name, obs[name][used])
            view[...] = obs[name]


def _finite_reward(reward: Any) -> Any:
    """As float32, in which a number may overflow that was finite before."""
    if isinstance(reward, (float, int)) and -MAX_FLOAT32 <= reward <= MAX_FLOAT32:  # one number, without NumPy's ways
        return reward
    with np.errstate(over="ignore"):
        small = np.float32(reward)
    if not np.isfinite(small).all():
        raise spaces.ContractBroken("the reward %r is not a finite float32; scale it down" % (reward,))
    return small


def _require_finite(name: str, value: Any) -> None:
    """One NaN would spread through the network to every weight."""
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        shown = np.array2string(value, threshold=8, precision=3)
        raise spaces.ContractBroken(
            "observation leaf '%s' holds a number that is not finite: %s. Fix it in the environment, or replace such "
            "numbers in a wrapper (numpy.nan_to_num)" % (name, shown)
        )


class Worker:
    """The environments of one process, in groups that step in turn."""

    def __init__(self, channel: Channel, memory_fd: int) -> None:
        self._channel, self._memory_fd = channel, memory_fd
        self._envs: List[Any] = []
        self._rows: List[Any] = []  # of each environment its SingleRow or ManyRows
        self._groups: List[List[Tuple[int, Any]]] = []  # (environment's number, its rows)
        self._at_work = 0  # number of the environment at work, for error messages
        self._shared_at_work: Any = np.zeros(1, np.int32)  # the same, where the trainer sees it
        self._phase = "start"

    def run(self) -> None:
        """Build, attach, serve; whatever goes wrong is told to the trainer before it is raised."""
        try:
            self._build(self._expect(START))
            self._attach(self._expect(ATTACH))
            self._serve()
        except EOFError:
            pass  # the trainer has gone: end quietly
        except Exception as error:
            self._report(error)
            raise
        finally:
            for env in self._envs:
                env.close()

    def _expect(self, wanted: int) -> Dict[str, Any]:
        kind, _, _, payload = self._channel.receive()
        if kind == CLOSE:
            raise EOFError
        if kind != wanted:
            raise RuntimeError("message of kind %d came where %d was due" % (kind, wanted))
        value: Dict[str, Any] = json.loads(payload)
        return value

    def _build(self, config: Dict[str, Any]) -> None:
        """Make every environment and describe them to the trainer."""
        settle(config)
        specs: List[Any] = []
        env_specs: List[int] = []
        for index, env in enumerate(config["envs"]):
            self._at_work = index
            made = building.make(env["kind"], env["target"], env["kwargs"], env["options"])
            self._envs.append(made)
            many_rows.require_agents(made)
            spec = dict(made.spec, name=env["name"])
            if spec not in specs:
                specs.append(spec)
            env_specs.append(specs.index(spec))
        self._channel.send_json(SPEC, {"specs": specs, "env_specs": env_specs})

    def _attach(self, config: Dict[str, Any]) -> None:
        """Map the shared arrays and begin every row."""
        arrays = Arrays(mmap.mmap(self._memory_fd, config["size"]), config["arrays"])
        os.close(self._memory_fd)
        kinds = [ManyRows if many_rows.has_rows(env) else SingleRow for env in self._envs]
        places = zip(kinds, self._envs, config["rows"])
        self._rows = [kind(env, row, arrays, config["info"]) for kind, env, row in places]
        self._groups = [[(index, self._rows[index]) for index in group] for group in config["groups"]]
        self._shared_at_work = arrays.at_work[config["worker"] : config["worker"] + 1]
        gc.freeze()  # what lives for the whole run need not be visited by every collection
        self._begin(config["seeds"])

    def _begin(self, seeds: Sequence[int]) -> None:
        self._phase = "reset"
        for group, rows in enumerate(self._groups):
            for index, row in rows:
                self._at_work = self._shared_at_work[0] = index
                row.begin(seeds[index], slot=0)
            self._channel.send(READY, group, 0)
        self._phase = "step"

    def _serve(self) -> None:
        """Answer the trainer until it says CLOSE or goes away."""
        while True:
            kind, group, slot, payload = self._channel.receive()
            if kind == STEP:
                self._step(group, slot)
            elif kind == CLOSE:
                return
            else:
                self._rare(kind, json.loads(payload))

    def _step(self, group: int, slot: int) -> None:
        records: List[Dict[str, Any]] = []
        for index, row in self._groups[group]:
            self._at_work = self._shared_at_work[0] = index
            row.advance(slot, records)
        self._channel.send(READY, group, slot, json.dumps(records, default=float).encode() if records else b"")

    def _rare(self, kind: int, value: Dict[str, Any]) -> None:
        if kind == RESEED:
            self._begin(value["seeds"])
        elif kind == OPTION:
            self._phase = "option"
            only = value.get("env")
            for index in range(len(self._envs)) if only is None else [only]:
                self._set_option(index, value["name"], value["value"])
            self._phase = "step"
        elif kind == RENDER:
            row = self._rows[value["env"]]
            frame = row.ending() if value["ending"] else row.render()
            shape = (0, 0, 0) if frame is None else frame.shape
            pixels = b"" if frame is None else np.ascontiguousarray(frame, dtype=np.uint8).tobytes()
            self._channel.send(FRAME, payload=FRAME_SHAPE.pack(*shape) + pixels)
        else:
            raise RuntimeError("unknown message of kind %d" % kind)

    def _set_option(self, index: int, name: str, value: Any) -> None:
        self._at_work = self._shared_at_work[0] = index
        env = self._envs[index]
        if not hasattr(env, "set_option"):
            raise spaces.ContractBroken(
                "the setting '%s' cannot be changed while it runs: %s has no method set_option(name, value); write one "
                "(pronghorn/envworker/building.py), or set it when the environment is made"
                % (name, type(env).__name__)
            )
        env.set_option(name, value)

    def _report(self, error: Exception) -> None:
        steps = [row.total_steps for rows in self._groups for index, row in rows if index == self._at_work]
        fields = {name: getattr(error, name) for name in ("package", "extra", "purpose") if hasattr(error, name)}
        report = dict(
            fields,
            code=getattr(error, "code", "crash"),
            message=str(error) or type(error).__name__,
            type=type(error).__name__,
            traceback=_foreign_traceback(error),
            env=self._at_work,
            phase=self._phase,
            steps=steps[0] if steps else 0,
        )
        with contextlib.suppress(OSError):  # the trainer has gone; the log still gets the traceback
            self._channel.send_json(ERROR, report)


def _foreign_traceback(error: Exception) -> str:
    """The traceback from the first frame that is not ours on: what the environment's author needs to see."""
    ours = (os.path.dirname(os.path.abspath(__file__)), "<frozen importlib")
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(ours):
        frame = frame.tb_next
    # A file that cannot be parsed has no frame of its own: the exception itself names file, line and column.
    if frame is None and not isinstance(error, SyntaxError):
        frame = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frame))


def settle(config: Dict[str, Any]) -> None:
    """Make this process what the trainer wants before any environment exists: path, core, priority."""
    given = config["sys_path"]
    sys.path[:] = given + [entry for entry in sys.path if entry not in given]
    if config["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, config["cpus"])  # inherited by engines that the environment starts
    if config["nice"]:
        os.nice(config["nice"])


def main(argv: Sequence[str]) -> None:
    """argv: the numbers of two inherited descriptors, the socket's and the shared map's."""
    socket_fd, memory_fd = int(argv[0]), int(argv[1])
    for fd in (socket_fd, memory_fd):
        os.set_inheritable(fd, False)  # a game engine that kept the socket would hide this process's death
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # the trainer asks a hung worker for its stack
    with socket.socket(fileno=socket_fd) as sock:
        Worker(Channel(sock), memory_fd).run()


if __name__ == "__main__":
    main(sys.argv[1:])
