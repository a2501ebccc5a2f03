"""Atari games on ale-py's C++ vector environment, in this process, as a `Pool`; owns no learning and no processes.

The native environment resets in the same step: where a game ends, the observation is already the next game's
first and the final one comes beside it. A life lost is found here, from the count of lives, because ale-py's
own options cannot tell it from the end of the game. Rewards are the game's own; the learner clips.

It shares this process, with what that means for hangs and crashes: see `lanes`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.envs.lanes import Lane, LanePool, first
from pronghorn.envs.workers import derive_seed
from pronghorn.errors import EnvError, MissingExtraError, UnknownEnvError
from pronghorn.types import ActionSpec, EnvSpec, Event, LeafSpec, Ready

EMULATOR_FPS = 60
SCREEN_SIZE = 84  # pixels, after ale-py's own resizing; Mnih et al. 2015


class AtariPool(LanePool):
    """A `Pool` (types.py) of Atari games. Leaf 'obs': uint8 [stack, 84, 84], the newest frame last.

    games: one task each, as 'SpaceInvaders' or 'space_invaders'; rows are dealt over them in turn. Several
        games share the full set of 18 actions; one game has its minimal set, or 18 with `full_actions`.
    num_groups: of which one steps while another waits for actions. ordered: changes nothing, as units come back in
        the order in which they were sent.
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
        super().__init__(["atari:" + _title(rom) for rom in roms], num_rows, num_groups, num_threads, seed)
        self._life_loss, self._grayscale = life_loss, grayscale
        self._full_actions = full_actions or len(set(roms)) > 1
        for lane in self._lanes:
            lane.native = _make_native(
                roms[lane.task],
                len(lane.rows),
                num_threads=self._lane_threads,
                frameskip=frame_skip,
                stack_num=stack,
                noop_max=noop_max,
                repeat_action_probability=sticky,
                grayscale=grayscale,
                max_num_frames_per_episode=max_frames,
                full_action_space=self._full_actions,
            )
        self._num_actions = int(self._lanes[0].native.single_action_space.n)
        channels = stack if grayscale else 3 * stack
        self.spec = EnvSpec(
            {"obs": LeafSpec((channels, SCREEN_SIZE, SCREEN_SIZE), "uint8", "image", "chw", 0.0, 255.0)},
            ActionSpec((self._num_actions,)),
            frame_skip=frame_skip,
            render_fps=EMULATOR_FPS / frame_skip,
            name=",".join(self.tasks),
        )

    def describe(self) -> str:
        """One line for the run's header."""
        actions = f"{self._num_actions} actions"
        if self._full_actions and len(self.tasks) > 1:
            actions += " (the full set, shared by all games)"
        return (
            f"ale-py in this process: {self.num_rows} games in {self._num_groups} groups on "
            f"{self._num_threads} threads, {actions}"
        )

    def _first(self, lane: Lane) -> Ready:
        seeds = np.array([derive_seed(self._seed, int(row), 0) for row in lane.rows])
        obs, info = lane.native.reset(seed=seeds)
        lane.lives = info["lives"]
        return first(lane, self._leaves(obs))

    def _act(self, lane: Lane, discrete: NDArray[np.int64], continuous: NDArray[np.float32] | None) -> None:
        """discrete: [N, 1]."""
        actions = np.asarray(discrete, np.int64).reshape(len(lane.rows))
        # ale-py's thread dies of an action outside the set, and the next recv would hang for ever.
        if actions.min() < 0 or actions.max() >= self._num_actions:
            raise EnvError(f"{self.spec.name}: actions {actions.tolist()} are not all in 0 … {self._num_actions - 1}")
        lane.native.send(np.ascontiguousarray(actions))

    def _stepped(self, lane: Lane) -> Ready:
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
        assert before is not None  # since the reset
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


def _make_native(rom: str, num_envs: int, **options: Any) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        rom,
        num_envs,
        autoreset_mode="SameStep",
        reward_clipping=False,
        img_height=SCREEN_SIZE,
        img_width=SCREEN_SIZE,
        **options,
    )


def _import_ale() -> Any:
    try:
        import ale_py
        import ale_py.roms
    except ImportError as error:
        raise MissingExtraError("ale-py", "atari", "an Atari environment") from error
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # else every emulator prints a banner
    return ale_py
