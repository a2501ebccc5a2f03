"""The contract of an environment as a suite that users run on theirs: `pronghorn.check_env`. It trains nothing.

The environment is built and stepped in the calling process, so that a debugger reaches it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pronghorn.envs.process import typed_error
from pronghorn.envs.registry import resolve
from pronghorn.envworker import building, loading, spaces
from pronghorn.envworker.many_rows import has_rows, require_agents
from pronghorn.errors import EnvError, UsageError
from pronghorn.types import Event

Step = tuple[dict[str, NDArray[Any]], float, bool, bool, bool, Any]
NUM_STEPS = 20


def check_env(
    make: str | Callable[[], Any],
    *,
    seed: int = 0,
    num_steps: int = NUM_STEPS,
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Check one environment against the contract and return the rules that it keeps, in order.

    make: a name (`doom:basic`, `module:function`), or a function that builds a Gymnasium environment or vector
        environment, one of several agents (PettingZoo's parallel or AEC interface, or a class of that form, see
        docs/agents.md), or a flat one. It is called twice. Of several rows, each is checked.
    num_steps: random steps that each of the two environments takes, of the actions that masks allow.
    options: settings of the run that shape what a policy sees, by their names there, as {"pad_spaces": True}.

    Raises EnvError (SpaceError, UnknownEnvError, MissingExtraError) at the first rule that is broken, with the
    rule, what was seen and the fix.
    """
    with _own_directory(make):
        return _checked(make, seed, num_steps, dict(options or {}))


def _checked(make: str | Callable[[], Any], seed: int, num_steps: int, options: dict[str, Any]) -> list[str]:
    passed: list[str] = []
    first, second = _build(make, options), _build(make, options)
    try:
        passed += ["the spaces have a flat form", *_check_spec(first)]
        recordings = _play(_played(first), seed, num_steps)
        passed += _check_recordings(first, recordings)
        passed += _check_seeding(recordings, _play(_played(second), seed, num_steps), num_steps)
        passed += _check_raw(first, seed)
        passed += _check_episode_end(_played(first), seed)
    finally:
        first.close()
        second.close()
    return passed


@contextlib.contextmanager
def _own_directory(make: object) -> Iterator[None]:
    """A temporary directory for Doom's engine, which writes where it runs."""
    if not (isinstance(make, str) and make.startswith("doom:")):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="pronghorn-") as directory, contextlib.chdir(Path(directory)):
        yield


def _broken(rule: str, seen: str, fix: str) -> EnvError:
    return EnvError(f"the rule '{rule}' is broken: {seen}. {fix}")


def _translated(call: Callable[[], Any]) -> Any:
    """call(), with the worker-side errors turned into ours."""
    try:
        return call()
    except (spaces.ContractBroken, loading.NotFound, loading.PackageMissing) as error:
        raise typed_error(error.code, str(error), vars(error)) from error


def _build(make: str | Callable[[], Any], options: dict[str, Any]) -> Any:
    if isinstance(make, str):
        env = resolve(make, options=options)
        if env.backend != "worker":
            raise UsageError(f"check_env: {make} is not an environment of worker processes; there is nothing to check.")
        return _translated(lambda: building.make(env.kind, env.target, env.kwargs, env.options))
    return _translated(lambda: building.flat(make(), getattr(make, "__name__", "the function"), options))


def _actions(
    spec: dict[str, Any], rng: np.random.Generator, obs: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Random actions of one row, of those that a mask in its observation allows; 0 where it allows none."""
    action, low, high = spec["action"], *(np.array(spec["action"][name], np.float32) for name in ("low", "high"))
    masks = [obs[name] for name, leaf in spec["observation"].items() if leaf["kind"] == "mask"]
    if masks:
        factors = np.split(np.ravel(masks[0]), np.cumsum(action["discrete"])[:-1])
        allowed = [np.flatnonzero(factor) for factor in factors]
        discrete = np.array([rng.choice(choices) if len(choices) else 0 for choices in allowed], np.int64)
    else:
        discrete = np.array([rng.integers(n) for n in action["discrete"]], np.int64)
    return discrete, (low + (high - low) * rng.random(len(low), dtype=np.float32)).astype(np.float32)


class _Played(Protocol):
    """An environment of any number of rows, stepped at random: a step a row, None for a row with nothing to record."""

    spec: dict[str, Any]

    def reset(self, seed: int) -> list[Step | None]:
        """The first observations, as steps without reward."""

    def step(self, rng: np.random.Generator) -> list[Step | None]:
        """Random actions in every row; observations are the last of their episode where that is known."""


def _played(env: Any) -> _Played:
    return _ManyRows(env) if has_rows(env) else _OneRow(env)


class _OneRow:
    def __init__(self, env: Any) -> None:
        self.env, self.spec = env, env.spec
        self._obs: dict[str, NDArray[Any]] = {}  # that the next action answers

    def reset(self, seed: int) -> list[Step | None]:
        self._obs = _translated(lambda: self.env.reset(seed))
        return [(self._obs, 0.0, False, False, False, {})]

    def step(self, rng: np.random.Generator) -> list[Step | None]:
        step: Step = _translated(lambda: self.env.step(*_actions(self.spec, rng, self._obs)))
        self._obs = step[0]
        if step[4]:
            self._obs = _translated(lambda: self.env.reset(None))
            _check_obs(self.spec["observation"], self._obs)
        return [step]


class _ManyRows:
    """See envworker/many_rows.py. It resets its rows itself, so the next episodes' observations are checked here."""

    def __init__(self, env: Any) -> None:
        self.env, self.spec = env, env.spec
        self._obs: dict[str, NDArray[Any]] = {}

    def reset(self, seed: int) -> list[Step | None]:
        return self._rows(_translated(lambda: self.env.reset(seed)))

    def step(self, rng: np.random.Generator) -> list[Step | None]:
        seen = [{name: leaf[row] for name, leaf in self._obs.items()} for row in range(self.spec["rows_per_env"])]
        actions = [_actions(self.spec, rng, obs) for obs in seen]
        discrete, continuous = (np.stack(part) for part in zip(*actions, strict=True))
        return self._rows(_translated(lambda: self.env.step(discrete, continuous)))

    def _rows(self, step: Any) -> list[Step | None]:
        self._obs = step.obs
        return [self._row(step, row) for row in range(self.spec["rows_per_env"])]

    def _row(self, step: Any, row: int) -> Step | None:
        if step.event[row] == Event.INACTIVE:
            return None
        obs = {name: leaf[row] for name, leaf in step.obs.items()}
        if step.truncated[row]:  # only there the last observation is known
            _check_obs(self.spec["observation"], obs)
            obs = {name: leaf[row] for name, leaf in step.final_obs.items()}
        flags = step.terminated[row], step.truncated[row], step.episode_over[row]
        return obs, step.reward[row], *flags, {name: column[row] for name, column in step.info.items()}


def _play(env: _Played, seed: int, num_steps: int) -> list[list[Step]]:
    """A recording of each row: its first observation (as a step without reward) and what `num_steps` steps gave it."""
    rng = np.random.default_rng(seed)
    times = [env.reset(seed), *(env.step(rng) for _ in range(num_steps))]
    return [[step for step in row if step is not None] for row in zip(*times, strict=True)]


def _check_spec(env: Any) -> list[str]:
    rule = "spec names its observation leaves and its action"
    for key in ("observation", "action"):
        if not isinstance(env.spec.get(key), dict):
            raise _broken(rule, f"spec has no '{key}'", "See envworker/building.py for the form of a spec.")
    missing = [name for name in ("reset", "step", "render", "close") if not callable(getattr(env, name, None))]
    if missing:
        raise _broken("reset, step, render and close exist", f"{missing} are missing", "Add them.")
    _translated(lambda: require_agents(env))
    return [rule, "reset, step, render and close exist"]


def _check_recordings(env: Any, recordings: list[list[Step]]) -> list[str]:
    for recording in recordings:
        for obs, reward, terminated, truncated, over, info in recording:
            _check_obs(env.spec["observation"], obs)
            _check_reward(reward)
            for name, flag in (("terminated", terminated), ("truncated", truncated), ("episode_over", over)):
                if not isinstance(flag, (bool, np.bool_)):
                    raise _broken("flags are bools", f"{name} is {flag!r}", "Return True or False.")
            _check_info(env.spec, info)
        _check_aliasing(recording)
    return [
        "observations fit their space in shape, dtype and bounds",
        "rewards are finite numbers",
        "flags are bools",
        "declared info fields are numbers",
        "an observation stays as it was when the next one comes",
    ]


def _check_obs(leaves: dict[str, Any], obs: dict[str, NDArray[Any]]) -> None:
    rule = "observations fit their space in shape, dtype and bounds"
    if set(obs) != set(leaves):
        raise _broken(rule, f"leaves {sorted(obs)} came, {sorted(leaves)} are declared", "Return exactly these.")
    for name, leaf in leaves.items():
        value = obs[name]
        if value.shape != tuple(leaf["shape"]) or value.dtype != np.dtype(leaf["dtype"]):
            seen = f"leaf '{name}' is {value.dtype} {value.shape}, declared is {leaf['dtype']} {tuple(leaf['shape'])}"
            raise _broken(rule, seen, "Convert it, or declare what it is.")
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise _broken(rule, f"leaf '{name}' holds NaN or infinity", "Find the step that makes it.")
        _check_bounds(rule, name, leaf, value)


def _check_bounds(rule: str, name: str, leaf: dict[str, Any], value: NDArray[Any]) -> None:
    if not value.size or leaf["kind"] in ("discrete", "binary", "mask"):
        return
    low, high = float(leaf.get("low", "-inf")), float(leaf.get("high", "inf"))
    if value.min() < low or value.max() > high:
        seen = f"leaf '{name}' spans [{value.min():g}, {value.max():g}], declared is [{low:g}, {high:g}]"
        raise _broken(rule, seen, "Clip it or widen the bounds.")


def _check_reward(reward: Any) -> None:
    is_number = isinstance(reward, (int, float, np.number)) and not isinstance(reward, bool)
    if not is_number or not np.isfinite(reward):
        raise _broken("rewards are finite numbers", f"the reward {reward!r} came", "Return a finite float.")


def _check_info(spec: dict[str, Any], info: Any) -> None:
    for name in spec.get("info", ()):
        value = info.get(name, 0.0) if isinstance(info, dict) else None
        if not isinstance(value, (bool, int, float, np.number, np.bool_)):
            raise _broken("declared info fields are numbers", f"info['{name}'] is {value!r}", "Give a number.")


def _check_aliasing(recording: list[Step]) -> None:
    for (before, *_), (after, *_) in pairwise(recording):
        for name in before:
            if np.shares_memory(before[name], after[name]):
                raise _broken(
                    "an observation stays as it was when the next one comes",
                    f"leaf '{name}' of two successive steps shares memory",
                    "Return a copy: the earlier observation has become the later one.",
                )


def _check_seeding(ones: list[list[Step]], others: list[list[Step]], num_steps: int) -> list[str]:
    rule = f"the same seed and actions give the same {num_steps} steps"
    for row, (one, other) in enumerate(zip(ones, others, strict=True)):
        index = _first_difference(one, other)
        if index is not None:
            where = "the first observation differs" if index == 0 else f"step {index} differs"
            of_row = f" in row {row}" if len(ones) > 1 else ""
            raise _broken(
                rule,
                f"{where}{of_row} between two environments that were reset with one seed",
                "Draw every random number from self.np_random, and call super().reset(seed=seed) in reset().",
            )
    return [rule]


def _first_difference(one: list[Step], other: list[Step]) -> int | None:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a[1:5] != b[1:5] or not all(np.array_equal(a[0][name], b[0][name]) for name in a[0]):
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _check_raw(env: Any, seed: int) -> list[str]:
    """Rules on what an environment of Gymnasium or PettingZoo itself returns, before our adapter has mended it."""
    raw = getattr(env, "env", None)
    if raw is None or not hasattr(raw, "observation_space"):
        return []
    rule = "observation_space.contains() holds for what reset and step return"
    env.env, played = _Overheard(raw), _played(env)
    for name, act in (("reset", played.reset), ("step", lambda seed: played.step(np.random.default_rng(seed)))):
        act(seed)
        for space, part in _observed(raw, env.env.returned[name]):
            if not space.contains(part):
                seen = f"{name}() gave {_summary(part)}, the space is {space}"
                raise _broken(rule, seen, "Mend the space or the observation.")
    env.env = raw
    return [rule]


class _Overheard:
    """A raw environment in the hands of its adapter; what its methods returned last can be looked at."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.returned = raw, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def reset(self, **settings: Any) -> Any:
        self.returned["reset"] = self.raw.reset(**settings)
        return self.returned["reset"]

    def step(self, actions: Any) -> Any:
        self.returned["step"] = self.raw.step(actions)
        return self.returned["step"]


def _observed(raw: Any, returned: Any) -> list[tuple[Any, Any]]:
    """(space, observation) of what was observed: whole, or of each agent, or in turns, of the one on turn."""
    if returned is None:
        return [(raw.observation_space(raw.agent_selection), raw.observe(raw.agent_selection))]
    if hasattr(raw, "possible_agents"):
        return [(raw.observation_space(agent), part) for agent, part in returned[0].items()]
    return [(raw.observation_space, returned[0])]


def _summary(obs: Any) -> str:
    if isinstance(obs, np.ndarray):
        return f"{obs.dtype} {obs.shape} in [{obs.min():g}, {obs.max():g}]" if obs.size else f"{obs.dtype} {obs.shape}"
    return repr(obs) if sys.getsizeof(obs) < 500 else type(obs).__name__


def _check_episode_end(env: _Played, seed: int, max_steps: int = 2000) -> list[str]:
    """Play to one episode's end, if one comes; the reset after it is part of the step."""
    rng = np.random.default_rng(seed + 1)
    env.reset(seed)
    for _ in range(max_steps):
        steps = [step for step in env.step(rng) if step is not None]
        for obs, _, terminated, truncated, over, _ in steps:
            _check_obs(env.spec["observation"], obs)
            if over and not (terminated or truncated):
                raise _broken(
                    "an episode that is over was terminated or truncated", "it was neither", "Set one of the flags."
                )
        if any(step[4] for step in steps):
            return ["the last observation of an episode fits, and reset starts the next"]
    return [f"no episode ended within {max_steps} steps: its end was not checked"]
