"""EnvPool's C++ environments, in this process, as a `Pool`; it owns no learning and no processes.

EnvPool resets in the next step: the action after an episode's end is ignored, and what it gives is the reset
observation. That dummy step is made here, at once and only for the rows that ended, so that no row has to wait and the
learner sees reward, flags, final observation and the next episode's first one as one record.

EnvPool marks an episode that ends at its time limit as truncated, also where the task ended in that very step (Atari
says both, and then it is terminated). It shares this process, with what that means for hangs and crashes: see `lanes`.
Its own way to serve whichever rows are ready first is not used: it never delivers fewer rows than asked for, so rows
that the sampler holds back would hold up the others.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.envs.lanes import Lane, LanePool, first
from pronghorn.envs.layout import merged
from pronghorn.envs.process import typed_error
from pronghorn.envs.workers import derive_seed
from pronghorn.envworker.spaces import Actions, ContractBroken, Observations
from pronghorn.errors import ConfigError, EnvError, MissingExtraError, UnknownEnvError
from pronghorn.types import EnvSpec, Event, Ready

EMULATOR_FPS = 60
_OURS = ("num_envs", "batch_size", "num_threads", "seed", "env_seed", "max_num_players", "task", "base_path",
         "gym_reset_return_info", "thread_affinity_offset", "reward_threshold")  # fmt: skip
_BOOKKEEPING = ("env_id", "elapsed_step", "lives", "reward", "terminated")  # infos that are no numbers of an episode


class EnvPoolPool(LanePool):
    """A `Pool` (types.py) of EnvPool's tasks.

    tasks: ids as 'CartPole-v1'; rows are dealt over them in turn, and all must have equal observations and actions.
    num_groups: of which one steps while another waits for actions.
    num_threads: of all environments together; 0: the cores that this process may use.
    render: have the environments draw.
    options: obs_keys, image_layout and info of our adapter for Gymnasium environments (envworker/single.py).
    settings: EnvPool's own, of every task: max_episode_steps, and for Atari stack_num, episodic_life and so on. With
        episodic_life a life lost is LAST and terminated with episode_over False, and the game goes on; EnvPool then
        plays some no-ops whose rewards it does not tell.

    Raises UnknownEnvError with the nearest ids, MissingExtraError, and ConfigError for settings that no task has.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        num_rows: int,
        *,
        num_groups: int = 2,
        num_threads: int = 0,
        seed: int = 0,
        render: bool = False,
        options: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(["envpool:" + task for task in tasks], num_rows, num_groups, num_threads, seed)
        self._package = _import_envpool()
        self._ids, self._settings, self._render = list(tasks), dict(settings or {}), render
        options = options or {}
        self._info_names = tuple(options.get("info", ()))
        self._actions: list[Actions] = []  # of each task
        self._observations: list[Observations] = []
        self.spec: EnvSpec = merged([self._task_spec(task, options) for task in tasks])

    def _task_spec(self, task: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The spec of the next task, as JSON, and how its spaces are translated."""
        native = self._native_spec(task)
        config = native.config._asdict()
        if config.get("max_num_players", 1) != 1:
            raise EnvError(f"envpool:{task} has {config['max_num_players']} players that take turns or play together, "
                           "which is not supported. Choose a task of one player.")  # fmt: skip
        with _quiet():
            observation, action = native.gymnasium_observation_space, native.gymnasium_action_space
        try:
            actions = Actions(action)
            observations = Observations(
                observation, actions.num_choices, options.get("obs_keys", ()), options.get("image_layout", "")
            )
        except ContractBroken as error:
            raise typed_error(error.code, f"envpool:{task}: {error}", {}) from error
        self._actions.append(actions)
        self._observations.append(observations)
        skip = int(config.get("frame_skip", 1))
        is_atari = "repeat_action_probability" in config
        return {
            "observation": observations.to_json(),
            "action": actions.to_json(),
            "frame_skip": skip,
            "info": list(self._info_names),
            "render_fps": EMULATOR_FPS / skip if is_atari else 30.0,
            "name": "envpool:" + task,
        }

    def _native_spec(self, task: str) -> Any:
        known = self._package.list_all_envs()
        if task not in known:
            near = ["envpool:" + name for name in difflib.get_close_matches(task, known, 3, 0.5)]
            hint = f"Did you mean: {', '.join(near)}?" if near else "envpool.list_all_envs() lists the ids."
            raise UnknownEnvError(f"there is no EnvPool task '{task}'. {hint}")
        with _quiet():
            try:
                names = sorted(set(self._package.make_spec(task).config._fields) - set(_OURS))
            except (ImportError, OSError) as error:  # its tasks are imported by family, and some need more libraries
                fix = "Install the library that it names (Procgen's tasks need Qt 5), or choose another task."
                raise EnvError(f"envpool:{task} cannot be loaded by EnvPool here: {error}. {fix}") from error
            for name in self._settings:
                if name not in names:
                    fix = f"It has: {', '.join(names)}."
                    raise ConfigError("env.args", name, f"envpool:{task} has no such argument", fix)
            try:
                return self._package.make_spec(task, **self._settings)
            except (TypeError, ValueError, AssertionError) as error:
                rule = f"EnvPool does not take these values for {task} ({str(error).splitlines()[0]})"
                raise ConfigError("env.args", self._settings, rule, "Compare with envpool.make_spec(id).") from error

    def _first(self, lane: Lane) -> Ready:
        """EnvPool takes seeds only when it builds, so a lane is built anew."""
        seeds = [derive_seed(self._seed, int(row), 0) for row in lane.rows]
        drawing = {"render_mode": "rgb_array"} if self._render else {}
        lane.native = None  # ends the threads of the one before
        with _quiet():
            lane.native = self._package.make_gymnasium(
                self._ids[lane.task], num_envs=len(seeds), num_threads=min(self._lane_threads, len(seeds)), seed=seeds,
                **self._settings, **drawing,
            )  # fmt: skip
            obs, _ = lane.native.reset()
        return self._with_info(first(lane, self._leaves(lane, obs, len(seeds))), {})

    def _act(self, lane: Lane, discrete: NDArray[np.int64], continuous: NDArray[np.float32] | None) -> None:
        """discrete: [N, D]; continuous: [N, C]."""
        sizes = np.array(self.spec.action.discrete, np.int64)
        if (discrete < 0).any() or (discrete >= sizes).any():
            raise EnvError(f"{self.spec.name}: actions {discrete.tolist()} are not all in [0, n) with n = {sizes}")
        if continuous is None:
            continuous = np.zeros((len(lane.rows), 0), np.float32)
        lane.native.send(self._actions[lane.task].unflatten(discrete, continuous))

    def _stepped(self, lane: Lane) -> Ready:
        obs, reward, terminated, truncated, info = lane.native.recv()
        if not np.isfinite(reward).all():
            raise EnvError(f"{self.spec.name}: the rewards {reward} are not finite")
        # EnvPool calls a life loss the end; whether the game is over only the infos of Atari tell.
        game_over = np.asarray(info.get("terminated", terminated), np.bool_)
        truncated = truncated & ~game_over if "terminated" in info else truncated
        terminated = (terminated | game_over) & ~truncated
        leaves, ended = self._leaves(lane, obs, len(lane.rows)), np.flatnonzero(terminated | truncated)
        final_index = np.flatnonzero(truncated)
        final = {name: leaf[final_index] for name, leaf in leaves.items()}
        if len(ended):
            self._reset_ended(lane, ended, leaves)
        over = game_over | truncated
        ready = Ready(
            lane.rows,
            np.where(terminated | truncated, np.uint8(Event.LAST), np.uint8(Event.STEP)),
            leaves,
            np.array(reward, np.float32),
            terminated,
            truncated,
            over,
            final_index,
            final,
            records=[{"row": int(lane.rows[i]), **_numbers(info, i)} for i in np.flatnonzero(over).tolist()],
        )
        return self._with_info(ready, info)

    def _reset_ended(self, lane: Lane, ended: NDArray[np.int64], leaves: dict[str, NDArray[Any]]) -> None:
        """Make the dummy step of the rows that ended, and put what they begin with into leaves [len(rows), ...]."""
        action = self.spec.action
        discrete = np.zeros((len(ended), action.num_discrete), np.int64)  # ignored
        continuous = np.zeros((len(ended), action.num_continuous), np.float32)
        lane.native.send(self._actions[lane.task].unflatten(discrete, continuous), ended)
        obs, _, _, _, info = lane.native.recv()
        for name, leaf in self._leaves(lane, obs, len(ended)).items():
            leaves[name][info["env_id"]] = leaf

    def _leaves(self, lane: Lane, obs: Any, count: int) -> dict[str, NDArray[Any]]:
        leaves: dict[str, NDArray[Any]] = self._observations[lane.task].flatten(obs, count)
        for name, leaf in leaves.items():
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                raise EnvError(f"{self.spec.name}: observation leaf '{name}' holds a number that is not finite")
        return leaves

    def _with_info(self, ready: Ready, info: Mapping[str, Any]) -> Ready:
        if self._info_names:
            nothing = np.full(len(ready.rows), np.nan)
            columns = [np.asarray(info.get(name, nothing), np.float32) for name in self._info_names]
            ready.info = np.stack(columns, axis=1)
        return ready

    def render(self, row: int) -> NDArray[np.uint8] | None:
        """The picture [H, W, 3] of a row that waits for actions, or None if it draws none."""
        lane = self._lanes[int(self.unit_ids[row])]
        if not self._render or lane.native is None:
            return None
        frames = lane.native.render(env_ids=np.flatnonzero(lane.rows == row).astype(np.int32))
        return None if frames is None else np.asarray(frames[0], np.uint8)

    def describe(self) -> str:
        """One line for the run's header."""
        return (
            f"EnvPool in this process: {self.num_rows} environments in {self._num_groups} groups on "
            f"{self._num_threads} threads"
        )


def _numbers(info: Mapping[str, Any], row: int) -> dict[str, float]:
    """The plain numbers of a row's infos, for the record of the episode that it ended."""
    own = {name: x[row] for name, x in info.items() if name not in _BOOKKEEPING and getattr(x, "ndim", 0) == 1}
    return {name: float(value) for name, value in own.items() if np.isfinite(value)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the remarks that EnvPool's spaces cause in Gymnasium (the precision of bounds)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _import_envpool() -> Any:
    try:
        with _quiet():
            import envpool
    except ImportError as error:
        raise MissingExtraError("envpool", "envpool", "an EnvPool environment") from error
    return envpool
