"""Builds environments and gives each the flat form that a worker runs; knows no processes and no shared memory.

A flat environment (`FlatEnv`, by duck typing) is any object with

    spec          dict: {"observation": {leaf: {"shape", "dtype", "kind", "layout", "low", "high", "n"}},
                         "action": {"discrete": [n, ...], "low": [...], "high": [...]}, "rows_per_env": 1,
                         "frame_skip": k, "info": [names], "render_fps": f, "name": s}
    reset(seed)   seed: int or None -> {leaf: array}
    step(discrete, continuous)      discrete: int64 [D], 0-based; continuous: float32 [C] ->
                  (obs, reward, terminated, truncated, episode_over, info)
                  episode_over is normally `terminated or truncated`; a life loss is terminated with
                  episode_over False, and no reset follows it
    render()      uint8 [H, W, 3], or None;      close()
    stats()       optional: numbers for the record of the episode that just ended
    set_option(name, value)         optional: changes a named setting of the running environment
"""

from __future__ import annotations

import difflib
import errno
import importlib
import importlib.util
import inspect
import math
import os
import socket
import sys
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import numpy as np

from .spaces import Actions, ContractBroken, Observations

FIRST, STEPPED, LAST, INACTIVE = 0, 1, 2, 4  # the numbers of pronghorn.types.Event

PLUGINS = (  # id prefix, module that registers it, our extra, distribution
    ("ALE/", "ale_py", "atari", "ale-py"),
    ("MiniGrid-", "minigrid", "minigrid", "minigrid"),
    ("BabyAI-", "minigrid", "minigrid", "minigrid"),
)
_EXTRAS = {"Box2D": "box2d", "mujoco": "mujoco", "ale_py": "atari", "minigrid": "minigrid", "vizdoom": "doom",
           "cv2": "doom", "pettingzoo": "pettingzoo"}  # fmt: skip
FREE_PORT = "FREE_PORT"
PORT_TRIES = 8
_SKIP_NAMES = ("frameskip", "_frameskip", "frame_skip", "_frame_skip", "_skip")
GYM_OPTIONS = ("obs_keys", "image_layout", "frame_skip", "info", "reset_options", "render", "register")


class NotFound(Exception):
    """No environment, module or function of that name."""

    code = "unknown"


class PackageMissing(Exception):
    """A package that the environment needs is absent from the worker's interpreter."""

    code = "missing"

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__("%s needs the package '%s'" % (purpose, package))
        self.package, self.extra, self.purpose = package, extra, purpose


class GymnasiumEnv:
    """Any Gymnasium 1.x environment in flat form.

    obs_keys: keys of a Dict observation to use; image_layout: 'hwc' or 'chw' where the sizes leave it open;
    frame_skip: repeats every action so often (rewards are summed); info: names of numeric info entries to
    report at every step; reset_options: given to every reset.
    """

    def __init__(
        self,
        env: Any,
        obs_keys: Sequence[str] = (),
        image_layout: str = "",
        frame_skip: int = 1,
        info: Sequence[str] = (),
        reset_options: Optional[Mapping[str, Any]] = None,
        name: str = "",
    ) -> None:
        self.env = env
        self.class_name = type(getattr(env, "unwrapped", env)).__name__
        self._actions = Actions(env.action_space)
        self._observations = Observations(env.observation_space, self._actions.num_choices, obs_keys, image_layout)
        self._repeat, self._info_names = int(frame_skip), tuple(info)
        self._options = {} if reset_options is None else {"options": dict(reset_options)}
        self._last_info: Dict[str, Any] = {}
        metadata = getattr(env, "metadata", None) or {}
        self.spec = {
            "observation": self._observations.to_json(),
            "action": self._actions.to_json(),
            "rows_per_env": 1,
            "frame_skip": self._effective_skip(),
            "info": list(self._info_names),
            "render_fps": float(metadata.get("render_fps") or 30.0),
            "name": name or self.class_name,
        }

    def reset(self, seed: Optional[int] = None) -> Dict[str, Any]:
        try:
            result = self.env.reset(seed=seed, **self._options)
        except TypeError as error:
            if "seed" not in str(error) and "options" not in str(error):
                raise
            need = "(obs, info), from reset(*, seed=None, options=None)"
            raise self._wrong("reset", self.env.reset(), 2, need) from None
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise self._wrong("reset", result, 2, "(obs, info)")
        self._last_info = result[1]
        return self._observations.flatten(result[0])

    def step(self, discrete: Any, continuous: Any) -> Any:
        action = self._actions.unflatten(discrete, continuous)
        total = 0.0
        for _ in range(self._repeat):
            obs, reward, terminated, truncated, info = self._step_once(action)
            total += float(reward)
            if terminated or truncated:
                break
        if not math.isfinite(total):
            raise ContractBroken("%s.step() returned the reward %r; it must be finite" % (self.class_name, total))
        self._last_info = info
        terminated, truncated = bool(terminated), bool(truncated)
        return self._observations.flatten(obs), total, terminated, truncated, terminated or truncated, info

    def _step_once(self, action: Any) -> Any:
        need = "(obs, reward, terminated, truncated, info)"
        try:
            result = self.env.step(action)
        except ValueError as error:  # a wrapper of Gymnasium unpacks an old environment's four values
            if "values to unpack (expected 5" not in str(error):
                raise
            raise ContractBroken(
                "%s.step() is of the old Gym interface (%s); 5 values are needed: %s" % (self.class_name, error, need)
            ) from None
        if not (isinstance(result, tuple) and len(result) == 5):
            raise self._wrong("step", result, 5, need)
        return result

    def _wrong(self, method: str, result: Any, needed: int, names: str) -> ContractBroken:
        came = len(result) if isinstance(result, tuple) else 1
        return ContractBroken(
            "%s.%s() returned %d value%s; %d are needed: %s. Port it to the Gymnasium 1.x interface, or wrap it "
            "with shimmy.GymV21CompatibilityV0."
            % (self.class_name, method, came, "" if came == 1 else "s", needed, names)
        )

    def _effective_skip(self) -> int:
        inner = inherent_frame_skip(self.env)
        if inner > 1 and self._repeat > 1:
            raise ContractBroken(
                "frame_skip = %d: %s already repeats each action %d times, together that would be %d frames a step. "
                "Leave frame_skip at 1, or build the environment with its own skip set to 1."
                % (self._repeat, self.class_name, inner, inner * self._repeat)
            )
        return inner * self._repeat

    def render(self) -> Any:
        try:
            frame = self.env.render()
        except NotImplementedError:  # Gymnasium's base class: this environment draws nothing
            return None
        if isinstance(frame, list):
            frame = frame[-1] if frame else None
        return None if frame is None else np.asarray(frame, dtype=np.uint8)

    def stats(self) -> Dict[str, float]:
        """The plain numbers of the last step's info (for instance is_success)."""
        return {str(key): float(x) for key, x in self._last_info.items() if _is_number(x)}

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()


class VectorStep:
    """What one step of an environment of k rows caused: a record a row, whatever the environment's auto-reset does.

    event [k]: STEPPED, LAST (obs is already the next episode's first) or INACTIVE (the row waits: nothing to record).
    final_obs: leaves [k, ...], valid where truncated.  info: {name: [k]}.
    """

    __slots__ = ("episode_over", "event", "final_obs", "info", "obs", "reward", "terminated", "truncated")

    def __init__(self, obs: Dict[str, Any], reward: Any, terminated: Any, truncated: Any, info: Dict[str, Any]) -> None:
        self.obs, self.info = obs, info
        self.reward = np.array(reward, np.float64)  # copies: the environment may write its own arrays again
        self.terminated, self.truncated = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        self.episode_over = self.terminated | self.truncated
        self.event = np.where(self.episode_over, LAST, STEPPED)
        self.final_obs = obs

    @classmethod
    def first(cls, obs: Dict[str, Any], count: int) -> "VectorStep":
        """The first observations of all k rows."""
        nothing = np.zeros(count)
        step = cls(obs, nothing, nothing, nothing, {})
        step.event[:] = FIRST
        return step


class GymnasiumVectorEnv:
    """A Gymnasium 1.x vector environment as one environment of k rows that step together.

    Its three auto-reset modes give the same records: same-step, whose final observations lie in the infos; disabled,
    where rows are reset here; and next-step, whose dummy step (last observation to first, action ignored) must not be
    trained on: a row that ended is INACTIVE, and its record comes with the reset observation one step later.
    """

    def __init__(
        self,
        env: Any,
        obs_keys: Sequence[str] = (),
        image_layout: str = "",
        frame_skip: int = 1,
        info: Sequence[str] = (),
        reset_options: Optional[Mapping[str, Any]] = None,
        name: str = "",
    ) -> None:
        self.env, self.count = env, int(env.num_envs)
        self.class_name = type(env).__name__
        self._actions = Actions(env.single_action_space)
        self._observations = Observations(
            env.single_observation_space, self._actions.num_choices, obs_keys, image_layout
        )
        if frame_skip != 1:
            raise ContractBroken("frame_skip = %d: a vector environment repeats its actions itself" % frame_skip)
        self._info_names, self._options = tuple(info), dict(reset_options or {})
        metadata = getattr(env, "metadata", None) or {}
        # Gymnasium 1.0, before there was a choice, says nothing and resets in the next step
        mode = metadata.get("autoreset_mode", "NextStep")
        self._mode = str(getattr(mode, "value", mode))
        if self._mode not in ("NextStep", "SameStep", "Disabled"):
            raise ContractBroken("%s has the unknown auto-reset mode %r" % (self.class_name, mode))
        self._held: Optional[VectorStep] = None  # next-step: the records of rows that ended in the last step
        self.spec = {
            "observation": self._observations.to_json(),
            "action": self._actions.to_json(),
            "rows_per_env": self.count,
            "rows_wait": self._mode == "NextStep",
            "frame_skip": 1,
            "info": list(self._info_names),
            "render_fps": float(metadata.get("render_fps") or 30.0),
            "name": name or self.class_name,
        }

    def reset(self, seed: Optional[int] = None) -> VectorStep:
        self._held = None
        obs, _ = self.env.reset(seed=seed, **({"options": dict(self._options)} if self._options else {}))
        return VectorStep.first(self._observations.flatten(obs, self.count), self.count)

    def step(self, discrete: Any, continuous: Any) -> VectorStep:
        obs, reward, terminated, truncated, info = self.env.step(self._actions.unflatten(discrete, continuous))
        flat_obs = self._observations.flatten(obs, self.count)
        named = {name: _info_column(info, name) for name in self._info_names if name in info}
        step = VectorStep(flat_obs, reward, terminated, truncated, named)
        if not np.isfinite(step.reward).all():
            raise ContractBroken("%s.step() returned the rewards %r; they must be finite" % (self.class_name, reward))
        if self._mode == "NextStep":
            return self._next_step(step)
        if step.episode_over.any():
            if self._mode == "SameStep":
                step.final_obs = self._final_obs(info, step)
            else:
                options = dict(self._options, reset_mask=step.episode_over.copy())
                step.final_obs = flat_obs
                step.obs = self._observations.flatten(self.env.reset(options=options)[0], self.count)
        return step

    def _next_step(self, step: VectorStep) -> VectorStep:
        """Hold the records of rows that ended now; deliver those held, whose reset observation has come."""
        held, self._held = self._held, None
        was_over = np.zeros(self.count, np.bool_) if held is None else held.episode_over.copy()
        if step.episode_over.any():
            self._held = VectorStep(step.obs, step.reward, step.terminated, step.truncated, {})
        for array in (step.reward, step.terminated, step.truncated):
            array[step.episode_over] = 0
        step.event[step.episode_over], step.episode_over[:] = INACTIVE, was_over
        if held is not None:
            step.event[was_over] = LAST
            for name in ("reward", "terminated", "truncated"):
                getattr(step, name)[was_over] = getattr(held, name)[was_over]
            step.final_obs = held.final_obs
        return step

    def _final_obs(self, info: Mapping[str, Any], step: VectorStep) -> Dict[str, Any]:
        """Leaves [k, ...] of the final observations, from the infos of a same-step reset."""
        for key in ("final_obs", "final_observation"):  # since Gymnasium 1.0; before
            if key in info:
                final = info[key]
                break
        else:
            raise ContractBroken(
                "%s resets in the same step, but its infos hold no 'final_obs' of the rows that ended" % self.class_name
            )
        leaves = {name: array.copy() for name, array in step.obs.items()}
        for row in np.flatnonzero(step.episode_over).tolist():
            for name, value in self._observations.flatten(_row_of(final, row)).items():
                leaves[name][row] = value
        return leaves

    def render(self) -> Any:
        """The picture of the first row."""
        frames = self.env.render()
        return None if frames is None or not len(frames) else np.asarray(frames[0], dtype=np.uint8)

    def close(self) -> None:
        self.env.close()


class ParallelEnv:
    """A PettingZoo parallel environment as rows, one for each possible agent.

    An agent that ends while others play on is INACTIVE; its last record (reward, flags, final observation) comes
    together with the observation it begins anew with: when the environment is reset, or when the agent returns before.
    An agent that is absent is INACTIVE. Observations of agents may differ in length: shorter ones are padded at the
    end, by 0 or the nearest value within their bounds.
    """

    def __init__(
        self,
        env: Any,
        obs_keys: Sequence[str] = (),
        image_layout: str = "",
        frame_skip: int = 1,
        info: Sequence[str] = (),
        reset_options: Optional[Mapping[str, Any]] = None,
        name: str = "",
    ) -> None:
        self.env, self.agents = env, list(env.possible_agents)
        self.count = len(self.agents)
        self.class_name = type(getattr(env, "unwrapped", env)).__name__
        if frame_skip != 1:
            raise ContractBroken("frame_skip = %d: an environment of many agents repeats actions itself" % frame_skip)
        self._actions = [Actions(env.action_space(agent)) for agent in self.agents]
        for agent, actions in zip(self.agents, self._actions):
            if actions.to_json() != self._actions[0].to_json():
                raise ContractBroken(
                    "%s: the action spaces of '%s' and '%s' differ; one policy plays all agents, so they must be equal "
                    "(pettingzoo's and supersuit's wrappers can pad them)" % (self.class_name, self.agents[0], agent)
                )
        choices = self._actions[0].num_choices
        spaces = [env.observation_space(agent) for agent in self.agents]
        self._observations = [Observations(space, choices, obs_keys, image_layout) for space in spaces]
        self._leaves = _common_leaves([o.to_json() for o in self._observations], self.agents)
        self._info_names, self._options = tuple(info), dict(reset_options or {})
        self._held: Dict[int, Any] = {}  # row -> (reward, terminated, truncated, final leaves) not delivered yet
        metadata = getattr(env, "metadata", None) or {}
        self.spec = {
            "observation": self._leaves,
            "action": self._actions[0].to_json(),
            "rows_per_env": self.count,
            "rows_wait": True,
            "frame_skip": 1,
            "info": list(self._info_names),
            "render_fps": float(metadata.get("render_fps") or 30.0),
            "name": name or self.class_name,
        }

    def reset(self, seed: Optional[int] = None) -> VectorStep:
        self._held = {}
        step = VectorStep.first(self._empty(), self.count)
        step.event[:] = INACTIVE
        self._arrive(step, self._reset(seed))
        return step

    def step(self, discrete: Any, continuous: Any) -> VectorStep:
        playing = [row for row, agent in enumerate(self.agents) if agent in self.env.agents]
        chosen = {self.agents[r]: self._actions[r].unflatten(discrete[r], continuous[r]) for r in playing}
        obs, rewards, terminated, truncated, infos = self.env.step(chosen)
        step = VectorStep.first(self._empty(), self.count)
        step.event[:] = INACTIVE
        step.final_obs = self._empty()
        step.info = {name: np.full(self.count, np.nan) for name in self._info_names}
        for row in playing:
            agent = self.agents[row]
            for name in self._info_names:
                step.info[name][row] = infos.get(agent, {}).get(name, np.nan)
            flags = bool(terminated.get(agent, False)), bool(truncated.get(agent, False))
            reward = float(rewards.get(agent, 0.0))
            if not math.isfinite(reward):
                raise ContractBroken("%s: the reward of '%s' is %r" % (self.class_name, agent, reward))
            if any(flags):
                self._held[row] = (reward, *flags, self._padded(row, obs[agent]) if agent in obs else None)
            else:
                step.event[row], step.reward[row] = STEPPED, reward
                self._put(step.obs, row, self._padded(row, obs[agent]))
        if not self.env.agents:
            obs = self._reset(None)
        self._arrive(step, {agent: x for agent, x in obs.items() if agent in self.env.agents})
        return step

    def _reset(self, seed: Optional[int]) -> Dict[Any, Any]:
        obs: Dict[Any, Any]
        obs, _ = self.env.reset(seed=seed, **({"options": dict(self._options)} if self._options else {}))
        return obs

    def _arrive(self, step: VectorStep, obs: Mapping[Any, Any]) -> None:
        """Rows whose agent is there but did not just step: they begin, after what was held of their last episode."""
        for row, agent in enumerate(self.agents):
            if agent not in obs or step.event[row] != INACTIVE:
                continue
            self._put(step.obs, row, self._padded(row, obs[agent]))
            step.event[row] = FIRST
            if row in self._held:
                step.reward[row], step.terminated[row], step.truncated[row], final = self._held.pop(row)
                step.event[row], step.episode_over[row] = LAST, True
                if final is not None:
                    self._put(step.final_obs, row, final)

    def _empty(self) -> Dict[str, Any]:
        return {n: np.zeros((self.count, *leaf["shape"]), leaf["dtype"]) for n, leaf in self._leaves.items()}

    def _padded(self, row: int, obs: Any) -> Dict[str, Any]:
        leaves: Dict[str, Any] = {}
        for leaf in self._observations[row].leaves:
            value, shape = leaf.read(obs), tuple(self._leaves[leaf.name]["shape"])
            if value.shape != shape:
                low, high = leaf.extra.get("low", -math.inf), leaf.extra.get("high", math.inf)
                widths = [(0, full - own) for full, own in zip(shape, value.shape)]
                value = np.pad(value, widths, constant_values=min(max(0, low), high))
            leaves[leaf.name] = value
        return leaves

    @staticmethod
    def _put(arrays: Dict[str, Any], row: int, leaves: Mapping[str, Any]) -> None:
        for name, value in leaves.items():
            arrays[name][row] = value

    def render(self) -> Any:
        frame = self.env.render()
        return None if frame is None else np.asarray(frame, dtype=np.uint8)

    def close(self) -> None:
        self.env.close()


def _common_leaves(described: Sequence[Dict[str, Any]], agents: Sequence[Any]) -> Dict[str, Any]:
    """The leaves that hold every agent's: equal names and kinds, the largest sizes, the widest bounds."""
    common: Dict[str, Any] = {name: dict(leaf) for name, leaf in described[0].items()}
    for agent, leaves in zip(agents, described):
        for name in {**common, **leaves}:
            if name not in common or name not in leaves or not _joinable(common[name], leaves[name]):
                both = common.get(name), leaves.get(name)
                raise ContractBroken(
                    "the observations of '%s' and '%s' differ in '%s' (%s and %s); one policy plays all agents, so "
                    "only the length of vectors may differ" % (agents[0], agent, name, *both)
                )
            one, other = common[name], leaves[name]
            one["shape"] = [max(pair) for pair in zip(one["shape"], other["shape"])]
            for key, widest in (("low", min), ("high", max)):
                if key in one and key in other:
                    one[key] = widest(one[key], other[key])
                else:
                    one.pop(key, None)
    return common


def _joinable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    same = all(one.get(key) == other.get(key) for key in ("kind", "dtype", "layout", "n", "start"))
    lengths_may_differ = one["kind"] == "vector" and len(one["shape"]) == len(other["shape"])
    return same and (lengths_may_differ or one["shape"] == other["shape"])


def _info_column(info: Mapping[str, Any], name: str) -> Any:
    """[k] of a vector environment's infos, nan where its row did not report the entry (mask '_name')."""
    given = np.asarray(info.get("_" + name, True), np.bool_)
    return np.where(given, np.asarray(info[name], np.float64), np.nan)


def _row_of(batch: Any, row: int) -> Any:
    """One row of final observations: of an array of whole observations, or of the arrays that a dictionary holds."""
    if isinstance(batch, Mapping):
        return {key: _row_of(value, row) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row_of(part, row) for part in batch)
    return batch[row]


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.number, np.bool_)) and math.isfinite(float(value))


def inherent_frame_skip(env: Any) -> int:
    """Frames that one step of `env` covers: the product of the skips of its layers (1 when none says any)."""
    skip, layer = 1, env
    while layer is not None:
        inner = getattr(layer, "env", None)
        own = vars(layer) if hasattr(layer, "__dict__") else {}
        for name in _SKIP_NAMES:
            # Old wrappers forward attributes, so a wrapper is asked for its own only.
            value = own.get(name, getattr(type(layer), name, None) if inner is None else None)
            if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 1:
                skip *= int(value)
                break
        layer = inner
    return skip


def make(
    kind: str,
    target: str,
    kwargs: Optional[Mapping[str, Any]] = None,
    options: Optional[Mapping[str, Any]] = None,
) -> Any:
    """Build a flat environment.

    kind 'gym':  target is an id of Gymnasium's registry ('CartPole-v1', 'package:Id-v0')
    kind 'call': target is 'module.path:function' or 'path/file.py:function'; it is called with kwargs and
                 returns a Gymnasium environment or vector environment, a PettingZoo parallel environment, or a
                 flat one
    kind 'doom': target is a scenario's name

    An argument that is the text FREE_PORT becomes a port that nobody uses, another one for each environment; should
    somebody take it before the environment does, others are tried.
    """
    kwargs, options = dict(kwargs or {}), dict(options or {})
    ports = [name for name, value in kwargs.items() if value == FREE_PORT]
    tried: List[int] = []
    while True:
        here = dict(kwargs, **{name: free_port() for name in ports})
        try:
            return _make(kind, target, here, dict(options))
        except OSError as error:
            tried += [here[name] for name in ports]
            if error.errno != errno.EADDRINUSE or not ports:
                raise
            if len(tried) >= PORT_TRIES:
                raise ContractBroken("%s found every port in use: %s (%s)" % (target, tried, error)) from error


def free_port() -> int:
    """A port that neither TCP nor UDP uses on this machine now."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket() as tcp:
            udp.bind(("", 0))
            port: int = udp.getsockname()[1]
            try:
                tcp.bind(("", port))
                return port
            except OSError:
                continue


def _make(kind: str, target: str, kwargs: Dict[str, Any], options: Dict[str, Any]) -> Any:
    if kind == "doom":
        return _make_doom(target, kwargs, options)
    unknown = sorted(set(options) - set(GYM_OPTIONS))
    if unknown:
        raise ContractBroken("unknown environment options %s; there are %s" % (unknown, ", ".join(GYM_OPTIONS)))
    render, register = options.pop("render", False), options.pop("register", None)
    if kind == "gym":
        return GymnasiumEnv(_make_gym(target, kwargs, render, register), name=target, **options)
    if kind != "call":
        raise NotFound("no kind of environment is called %r; there are gym, call, doom" % (kind,))
    function = _named_imports(load, target)
    if render and _takes_render_mode(function):
        kwargs.setdefault("render_mode", "rgb_array")
    _require_arguments(function, target, kwargs)
    return flat(_named_imports(lambda _: function(**kwargs), target), target, options)


def flat(env: Any, name: str = "", options: Optional[Mapping[str, Any]] = None) -> Any:
    """`env` itself if it is flat already, else its Gymnasium adapter."""
    if isinstance(getattr(env, "spec", None), dict) and "observation" in env.spec:
        if options:
            raise ContractBroken("%s is a flat environment; the options %s do not apply" % (name, sorted(options)))
        return env
    if hasattr(env, "num_envs") and hasattr(env, "single_observation_space"):
        return GymnasiumVectorEnv(env, name=name, **(options or {}))
    if hasattr(env, "possible_agents"):
        if hasattr(env, "agent_iter"):
            raise ContractBroken(
                "%s takes turns (PettingZoo's AEC interface), which is not supported yet; give its parallel_env" % name
            )
        return ParallelEnv(env, name=name, **(options or {}))
    missing = [n for n in ("observation_space", "action_space", "reset", "step") if not hasattr(env, n)]
    if missing:
        raise ContractBroken(
            "%s returned a %s, which lacks %s; a Gymnasium environment is needed"
            % (name, type(env).__name__, ", ".join(missing))
        )
    return GymnasiumEnv(env, name=name, **(options or {}))


def _takes_render_mode(function: Callable[..., Any]) -> bool:
    try:
        return "render_mode" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _make_doom(target: str, kwargs: Dict[str, Any], options: Mapping[str, Any]) -> Any:
    from . import doom

    unknown = sorted(set(options) - {"render"})
    if unknown:
        raise ContractBroken("the options %s do not apply to doom:%s" % (unknown, target))
    _require_arguments(doom.DoomEnv, "doom:" + target, dict(kwargs, scenario=target))
    try:
        return _named_imports(lambda _: doom.DoomEnv(target, **kwargs), "doom:" + target)
    except ValueError as error:  # one of its own rules on the arguments
        raise ContractBroken(str(error)) from None


def _make_gym(target: str, kwargs: Dict[str, Any], render: bool, register: Optional[Dict[str, Any]]) -> Any:
    gymnasium = _named_imports(importlib.import_module, "gymnasium")
    import_plugin(target)
    if register is not None and target not in gymnasium.registry:
        gymnasium.register(**dict(register, entry_point=load(register["entry_point"])))
    if render:
        kwargs.setdefault("render_mode", "rgb_array")
    try:
        return gymnasium.make(target, disable_env_checker=True, **kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise _missing(error, "gym:" + target) from error
    except gymnasium.error.UnregisteredEnv as error:
        raise NotFound(unknown_id(gymnasium, target, str(error))) from None
    except ImportError as error:
        raise _missing(error, "gym:" + target) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ContractBroken("gym:%s: %s" % (target, error)) from None


def _require_arguments(function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that `function` does not take, before it runs, by naming those that it takes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it will say so itself
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        known = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        raise ContractBroken("%s: %s; its arguments are: %s" % (name, error, known or "none")) from None


def import_plugin(target: str) -> None:
    """Import the package that registers ids like `target`, where we know it."""
    for prefix, module, extra, distribution in PLUGINS:
        if target.startswith(prefix):
            if importlib.util.find_spec(module) is None:
                raise PackageMissing(distribution, extra, "gym:" + target)
            importlib.import_module(module)


def unknown_id(gymnasium: Any, target: str, reason: str) -> str:
    """Message for an id that no registry holds: the nearest ids, or how to import the plugin that has it."""
    if (
        ":" not in target
        and "/" in target
        and not any(k.startswith(target.split("/")[0] + "/") for k in gymnasium.registry)
    ):
        return "gym:%s: nothing has registered the namespace '%s'. Name the package that does: gym:PACKAGE:%s" % (
            target,
            target.split("/")[0],
            target,
        )
    near = difflib.get_close_matches(target.split(":")[-1], list(gymnasium.registry), 3, 0.5)
    return "gym:%s is not registered in Gymnasium%s" % (
        target,
        "; near: " + ", ".join(near) if near else " (%s)" % reason,
    )


def _missing(error: Exception, target: str) -> Exception:
    """`error`, or PackageMissing where it stands for a package that one of our extras installs."""
    is_gymnasiums = not isinstance(error, ImportError)  # its DependencyNotInstalled tells the package in words
    for module, extra in _EXTRAS.items():
        if (getattr(error, "name", None) or "").split(".")[0] == module or (is_gymnasiums and extra in str(error)):
            return PackageMissing(module, extra, target)
    return error


def _named_imports(function: Callable[..., Any], target: str, **kwargs: Any) -> Any:
    """Call function(target, **kwargs); a missing package that we have an extra for becomes PackageMissing."""
    try:
        return function(target, **kwargs)
    except ImportError as error:
        raise _missing(error, target) from error


def load(target: str) -> Any:
    """The object that 'module.path:name' or 'path/file.py:name' names."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise NotFound("%r names no function; write module.path:function or path/file.py:function" % target)
    module = _load_file(where) if where.endswith(".py") else _load_module(where)
    value = module
    for part in name.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, [n for n in dir(value) if not n.startswith("_")], 3, 0.5)
            raise NotFound("%s has no '%s'%s" % (where, name, "; near: " + ", ".join(near) if near else ""))
        value = getattr(value, part)
    return value


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise NotFound(
                "there is no module '%s' (searched: %s)" % (name, ", ".join(p for p in sys.path if p))
            ) from None
        raise


def _load_file(path: str) -> Any:
    """Run a file as a module of its own name, never as __main__, so that its main guard stays shut."""
    path = os.path.abspath(path)
    name = os.path.splitext(os.path.basename(path))[0]
    loaded = sys.modules.get(name)
    if loaded is not None and os.path.abspath(getattr(loaded, "__file__", None) or "") == path:
        return loaded
    if not os.path.exists(path):
        raise NotFound("there is no file '%s'" % path)
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module
