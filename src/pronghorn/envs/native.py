"""Atari games on ale-py's C++ vector environment, in this process, as a `Pool`; owns no learning and no processes.

The native environment resets in the same step: where a game ends, the observation is already the next game's
first and the final one comes beside it. A life lost is found here, from the count of lives, because ale-py's
own options cannot tell it from the end of the game. Rewards are the game's own; the learner clips.

A native environment cannot be interrupted: `recv` may block for one step of its rows (or for their reset,
about 0.1 s of a core each) whatever its time limit is, and a hang inside it hangs the run.
"""

from __future__ import annotations

import difflib
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.envs.workers import derive_seed
from pronghorn.errors import ConfigError, EnvError, MissingExtraError, UnknownEnvError
from pronghorn.types import ActionSpec, EnvSpec, Event, LeafSpec, Ready

EMULATOR_FPS = 60
SCREEN_SIZE = 84  # pixels, after ale-py's own resizing; Mnih et al. 2015
_NO_ROWS = np.zeros(0, np.int64)


class LaneState(Enum):
    """Where the rows of one native environment are between `recv` and `send`."""

    UNSTARTED = "waits for its first reset"
    STEPPING = "has actions and steps"
    WAITING = "waits for actions"


@dataclass
class Lane:
    """One native environment: the rows of one game and one group, which are stepped together (a unit)."""

    game: str
    rows: NDArray[np.int64]
    native: Any  # ale_py.vector_env.AtariVectorEnv of len(rows) environments
    lives: NDArray[np.int32]  # [len(rows)] after the last step
    state: LaneState = LaneState.UNSTARTED


class AtariPool:
    """A `Pool` (types.py) of Atari games. Leaf 'obs': uint8 [stack, 84, 84], the newest frame last.

    games: one task each, as 'SpaceInvaders' or 'space_invaders'; rows are dealt over them in turn. Several
        games share the full set of 18 actions; one game has its minimal set, or 18 with `full_actions`.
    num_groups: of which one steps while another waits for actions. Units come back in the order in which they
        were sent, so `ordered` changes nothing: a deterministic caller sees one order.
    num_threads: of the emulators; 0: the cores that this process may use.
    frame_skip: frames that one action is held for; the last two are combined by their maximum.
    stack: frames in an observation.        noop_max: random no-ops at a game's start, at most.
    life_loss: a life lost is LAST and terminated with episode_over False, and the game goes on.
    sticky: probability with which the last action is repeated (Machado et al. 2018 use 0.25).
    grayscale: False gives 'obs' [stack * 3, 84, 84], each frame's red, green and blue in turn.
    max_frames: a game is truncated after so many emulator frames (no-ops not counted), with its final
        observation.

    Raises UnknownEnvError, MissingExtraError, and ConfigError when there are fewer rows than games.
    """

    def __init__(
        self,
        games: Sequence[str],
        num_rows: int,
        *,
        num_groups: int = 2,
        num_threads: int = 0,
        seed: int = 0,
        ordered: bool = False,
        frame_skip: int = 4,
        stack: int = 4,
        noop_max: int = 30,
        full_actions: bool = False,
        life_loss: bool = True,
        sticky: float = 0.0,
        grayscale: bool = True,
        max_frames: int = 108_000,
    ) -> None:
        _import_ale()
        roms = [rom_name(game) for game in games]
        if not roms or num_rows < len(roms):
            raise ConfigError(
                "num_rows", num_rows, f"{len(roms)} games need a row each", "Give more environments or fewer games."
            )
        self.num_rows = num_rows
        self.tasks = tuple("atari:" + _title(rom) for rom in roms)
        self.task_ids = np.arange(num_rows, dtype=np.int64) % len(roms)
        self.restarts = 0
        self._seed, self._ordered = seed, ordered
        self._life_loss, self._grayscale = life_loss, grayscale
        self._num_groups = max(1, min(num_groups, num_rows // len(roms)))
        self._full_actions = full_actions or len(set(roms)) > 1
        self._num_threads = num_threads or _num_cores()
        num_lanes = self._num_groups * len(roms)
        # All lanes but the one that waits for its actions step at once, so they share the threads.
        lane_threads = max(1, self._num_threads // max(1, num_lanes - 1))
        self._lanes = [
            _make_lane(
                roms[task],
                rows,
                num_threads=lane_threads,
                frameskip=frame_skip,
                stack_num=stack,
                noop_max=noop_max,
                repeat_action_probability=sticky,
                grayscale=grayscale,
                max_num_frames_per_episode=max_frames,
                full_action_space=self._full_actions,
            )
            for task, rows in _deal(num_rows, len(roms), self._num_groups)
        ]
        self.unit_ids = np.zeros(num_rows, np.int64)
        for unit, lane in enumerate(self._lanes):
            self.unit_ids[lane.rows] = unit
        self._num_actions = int(self._lanes[0].native.single_action_space.n)
        self._pending = deque(self._lanes)
        channels = stack if grayscale else 3 * stack
        self.spec = EnvSpec(
            {"obs": LeafSpec((channels, SCREEN_SIZE, SCREEN_SIZE), "uint8", "image", "chw", 0.0, 255.0)},
            ActionSpec((self._num_actions,)),
            frame_skip=frame_skip,
            render_fps=EMULATOR_FPS / frame_skip,
            name=",".join(self.tasks),
        )

    def recv(self, timeout_s: float) -> Ready | None:
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
        """Answer whole units: discrete [N, 1]. Raises EnvError for rows that do not wait or an unknown action."""
        if len(rows) == 0:
            return
        actions = np.asarray(discrete, np.int64).reshape(len(rows))
        # ale-py's thread dies of an action outside the set, and the next recv would hang for ever.
        if actions.min() < 0 or actions.max() >= self._num_actions:
            raise EnvError(f"{self.spec.name}: actions {actions.tolist()} are not all in 0 … {self._num_actions - 1}")
        units = self.unit_ids[rows]
        for unit in dict.fromkeys(units.tolist()):
            lane, here = self._lanes[unit], units == unit
            if lane.state is not LaneState.WAITING or not np.array_equal(rows[here], lane.rows):
                raise EnvError(
                    f"{self.spec.name}: send() for rows {rows[here].tolist()}, but the unit of rows "
                    f"{lane.rows.tolist()} {lane.state.value}. Answer the whole unit of one recv, in its order."
                )
            lane.native.send(np.ascontiguousarray(actions[here]))
            lane.state = LaneState.STEPPING
            self._pending.append(lane)

    def reseed(self, seed: int) -> None:
        """See `Pool`. A unit in mid-step is waited for; the games are reset by the next recvs."""
        self._seed = seed
        for lane in self._lanes:
            if lane.state is LaneState.STEPPING:
                lane.native.recv()
            lane.state = LaneState.UNSTARTED
        self._pending = deque(self._lanes)

    def describe(self) -> str:
        """One line for the run's header."""
        actions = f"{self._num_actions} actions"
        if self._full_actions and len(self.tasks) > 1:
            actions += " (the full set, shared by all games)"
        return (
            f"ale-py in this process: {self.num_rows} games in {self._num_groups} groups on "
            f"{self._num_threads} threads, {actions}"
        )

    def close(self) -> None:
        """Free the emulators and their threads; safe to call twice."""
        for lane in self._lanes:
            if lane.state is LaneState.STEPPING:
                lane.native.recv()  # its threads write into memory that is about to go
            lane.state, lane.native = LaneState.UNSTARTED, None
        self._lanes, self._pending = [], deque()

    def _first(self, lane: Lane) -> Ready:
        """Reset a unit from (seed, row): the same seed gives the same games, whatever was played before."""
        seeds = np.array([derive_seed(self._seed, int(row), 0) for row in lane.rows])
        obs, info = lane.native.reset(seed=seeds)
        lane.lives = info["lives"]
        num = len(lane.rows)
        never = np.zeros(num, np.bool_)
        event = np.full(num, Event.FIRST, np.uint8)
        reward = np.zeros(num, np.float32)
        return Ready(
            lane.rows, event, self._leaves(obs), reward, never, never.copy(), never.copy(), _NO_ROWS,
            self._leaves(obs[:0]),
        )  # fmt: skip

    def _stepped(self, lane: Lane) -> Ready:
        """What the actions of a unit caused, in the terms of the contract."""
        obs, reward, game_over, cut, info = lane.native.recv()
        truncated = cut & ~game_over
        over = game_over | truncated
        life_lost = self._lives_lost(lane, info["lives"]) & ~over
        final_index = np.flatnonzero(truncated)
        final = info["final_obs"][final_index] if len(final_index) else obs[:0]
        return Ready(
            lane.rows,
            np.where(over | life_lost, np.uint8(Event.LAST), np.uint8(Event.STEP)),
            self._leaves(obs),
            reward.astype(np.float32),
            game_over | life_lost,
            truncated,
            over,
            final_index,
            self._leaves(final),
            records=[{"row": int(row)} for row in lane.rows[over]],
        )

    def _lives_lost(self, lane: Lane, lives: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Rows with fewer lives than before. Not at 0: some games show no life for frames before they end."""
        before, lane.lives = lane.lives, lives
        lost: NDArray[np.bool_] = (lives < before) & (lives > 0)
        return lost if self._life_loss else np.zeros_like(lost)

    def _leaves(self, obs: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        if not self._grayscale:  # [N, stack, H, W, 3] -> [N, stack * 3, H, W]
            obs = np.moveaxis(obs, -1, 2).reshape(len(obs), *self.spec.observation["obs"].shape)
        return {"obs": obs}


def rom_name(game: str) -> str:
    """ale-py's name of a game: 'SpaceInvaders', 'spaceinvaders' and 'space_invaders' are 'space_invaders'."""
    known = {rom.replace("_", ""): rom for rom in _import_ale().roms.get_all_rom_ids()}
    plain = game.replace("_", "").lower()
    if plain not in known:
        near = difflib.get_close_matches(plain, known, n=3, cutoff=0.4)
        hint = f"Did you mean: {', '.join('atari:' + _title(known[name]) for name in near)}?" if near else ""
        raise UnknownEnvError(f"no Atari game '{game}'. {hint or 'See: pronghorn envs'}")
    rom: str = known[plain]
    return rom


def _title(rom: str) -> str:
    """'space_invaders' -> 'SpaceInvaders', the name that Gymnasium and the papers use."""
    return rom.title().replace("_", "")


def _deal(num_rows: int, num_tasks: int, num_groups: int) -> list[tuple[int, NDArray[np.int64]]]:
    """(task, rows) of every unit, group by group: row r plays task r % num_tasks."""
    all_rows = np.arange(num_rows, dtype=np.int64)
    groups = [np.array_split(all_rows[task::num_tasks], num_groups) for task in range(num_tasks)]
    return [(task, groups[task][group]) for group in range(num_groups) for task in range(num_tasks)]


def _make_lane(rom: str, rows: NDArray[np.int64], **options: Any) -> Lane:
    from ale_py.vector_env import AtariVectorEnv

    native = AtariVectorEnv(
        rom,
        len(rows),
        autoreset_mode="SameStep",
        reward_clipping=False,
        img_height=SCREEN_SIZE,
        img_width=SCREEN_SIZE,
        **options,
    )
    return Lane(rom, rows, native, np.zeros(len(rows), np.int32))


def _import_ale() -> Any:
    try:
        import ale_py
        import ale_py.roms
    except ImportError as error:
        raise MissingExtraError("ale-py", "atari", "an Atari environment") from error
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # else every emulator prints a banner
    return ale_py


def _num_cores() -> int:
    """Cores that this process may use; macOS has no affinity masks."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
