"""Turns names into environments: `doom:basic` into what a back end builds, and a config into a running pool.

It imports no environment package where a look at the installed files will do, and never torch. What only the
worker can know (does `make` work? is the level's name right?) the worker reports when it starts.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.envs.workers import ResolvedEnv, WorkerPool
from pronghorn.envworker import deathmatch, doom_scenarios
from pronghorn.envworker.loading import PLUGINS, unknown_id, vector_entry_point
from pronghorn.errors import ConfigError, EnvError, MissingExtraError, UnknownEnvError, UsageError
from pronghorn.types import Event, Pool, Ready

if TYPE_CHECKING:
    from pronghorn.config import Config

ADAPTER_PREFIX = "adapter."  # arguments for our adapter, not for the environment: adapter.frame_skip
_PLANNED = {"dmlab": "DeepMind Lab levels"}
_EXAMPLES = {"doom": "doom:basic", "atari": "atari:Pong", "gym": "gym:CartPole-v1", "envpool": "envpool:CartPole-v1",
             "pettingzoo": "pettingzoo:butterfly.pistonball_v6"}  # fmt: skip
_registered: dict[str, str] = {}  # the one registry of the package: name -> 'module:function'


@dataclass(frozen=True)
class Listing:
    """One line of `pronghorn envs`. extra: what to install when it is not available ('' where nothing is missing)."""

    name: str
    summary: str
    extra: str = ""

    def __str__(self) -> str:
        absent = f"  (absent: pip install 'pronghorn-rl[{self.extra}]')" if self.extra else ""
        return f"{self.name:42} {self.summary}{absent}"


# ------------------------------------------------------------------------------------------------- names


def register_env(name: str, target: str | Callable[..., Any]) -> None:
    """Give an environment of your own a name that configs and the command line know.

    target: 'my_package.envs:make', 'path/file.py:make', or a function or class at the top level of a module. It is
    called with the environment's keyword arguments and returns a Gymnasium (or flat) environment. Workers are
    fresh processes that import it by that path, so a lambda or an inner function will not do.
    Raises UsageError for such a target, and for a name with a colon, which the built-in kinds use.
    """
    if ":" in name or "," in name or not name:
        raise UsageError(f"register_env: the name {name!r} must not be empty nor hold ':' or ','. Try 'my_maze'.")
    _registered[name] = target if isinstance(target, str) else import_path(target)


def registered() -> dict[str, str]:
    """The names given by `register_env`, and what each stands for, so that another process can be told them."""
    return {name: _absolute(target) for name, target in _registered.items()}


def import_path(function: Callable[..., Any]) -> str:
    """'module:name' or 'path/file.py:name' by which another process can import a top-level function or class."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    if not name or "<" in name or module is None:
        raise UsageError(
            f"{function!r} cannot be imported by a worker process. Make it a function at the top level of a module "
            "and name it 'module:function'; give its arguments with --env.args or EnvConfig(args=...)."
        )
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    if module.__spec__ is not None:  # python -m package.module
        return f"{module.__spec__.name}:{name}"
    path = getattr(module, "__file__", None)
    if not path or not os.path.exists(path):
        raise UsageError(f"'{name}' was defined interactively, where a worker cannot import it. Put it into a file.")
    return f"{os.path.abspath(path)}:{name}"


def resolve(
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    python: str | None = None,
) -> ResolvedEnv:
    """What to build for a name. kwargs go to the environment, options to our adapter (building.GYM_OPTIONS).

    python: another interpreter that will run it; what is installed there is not looked up here.
    Raises UnknownEnvError with the nearest names, MissingExtraError with the extra to install.
    """
    kwargs, options, here = dict(kwargs or {}), dict(options or {}), python is None
    if name in _registered:
        return ResolvedEnv(name, "worker", "call", _absolute(_registered[name]), kwargs, options)
    prefix, colon, target = name.partition(":")
    if name.rstrip(":").endswith(".py"):
        raise UnknownEnvError(f"'{name}' lacks the function to call. Example: {name.rstrip(':')}:make")
    if prefix in _EXAMPLES and not target:
        raise UnknownEnvError(f"'{name}' lacks the name behind the colon. Example: {_EXAMPLES[prefix]}")
    if not colon or not target:
        own = " A name of your own is known only where register_env was called; elsewhere give module:function."
        hint = "" if colon else own
        raise UnknownEnvError(f"there is no environment '{name}'{_near(name)}{hint}")
    if prefix == "doom":
        if kwargs.get("scenarios_dir"):  # workers run in directories of their own
            kwargs["scenarios_dir"] = os.path.abspath(os.path.expanduser(str(kwargs["scenarios_dir"])))
        return ResolvedEnv(name, "worker", "doom", _doom_scenario(target, here), kwargs, options)
    if prefix == "atari":
        return ResolvedEnv(name, "atari", "atari", _atari_game(target), kwargs, options)
    if prefix == "envpool":
        if not _installed("envpool"):  # its ids are known only once it is imported, which takes seconds
            raise MissingExtraError("envpool", "envpool", name)
        return ResolvedEnv(name, "envpool", "envpool", target, kwargs, options)
    if prefix == "pettingzoo":
        return ResolvedEnv(name, "worker", "pettingzoo", _pettingzoo_game(target, here), kwargs, options)
    if prefix == "gym":
        extra_options = _gym_registration(target) if here else {}
        if options.get("vector_rows") and here and not vector_entry_point(target):
            rule = f"{name} has no vector entry point"
            raise ConfigError("env.vector_rows", options["vector_rows"], rule, "Leave it out, or give 0.")
        return ResolvedEnv(name, "worker", "gym", target, kwargs, {**options, **extra_options})
    if prefix in _PLANNED:
        raise UnknownEnvError(f"'{name}': {_PLANNED[prefix]} are not supported in this version.")
    return ResolvedEnv(name, "worker", "call", _user_target(name, here), kwargs, options)


def _near(name: str, names: Iterable[str] | None = None) -> str:
    """'. Did you mean ...?' with the nearest names, or where to look."""
    everything = [listing.name for listing in list_envs()] if names is None else list(names)
    lower = {known.lower(): known for known in everything}
    # With the prefix left out, 'CartPole-v1' should still find 'gym:CartPole-v1'.
    lower.update({known.partition(":")[2].lower(): known for known in everything if names is None and ":" in known})
    near = list(dict.fromkeys(lower[key] for key in difflib.get_close_matches(name.lower(), lower, 4, 0.5)))
    return f". Did you mean: {', '.join(near[:3])}?" if near else ". `pronghorn envs` lists the names."


def _doom_scenario(target: str, here: bool) -> str:
    names = _doom_names()
    if "doom:" + target not in names:
        raise UnknownEnvError(f"there is no Doom scenario '{target}'{_near('doom:' + target, names)}")
    if here and not _installed("vizdoom"):
        raise MissingExtraError("vizdoom", "doom", f"doom:{target}")
    return target


def _doom_names() -> dict[str, str]:
    """What each is, by name: scenarios of one player, and kinds of matches."""
    tables = (doom_scenarios.SCENARIOS, deathmatch.MATCHES, doom_scenarios.EXTERNAL)
    return {"doom:" + name: one.summary for table in tables for name, one in table.items()}


def _atari_game(target: str) -> str:
    """ROM name of a game: 'SpaceInvaders' and 'space_invaders' are the same."""
    games = _atari_games()
    if not games:
        raise MissingExtraError("ale-py", "atari", f"atari:{target}")
    plain = {game.replace("_", ""): game for game in games}
    game = plain.get(target.replace("_", "").lower())
    if game is not None:
        return game
    raise UnknownEnvError(f"there is no Atari game '{target}'{_near('atari:' + target, map(_atari_name, games))}")


def _atari_games() -> list[str]:
    """Names of the ROM files that ale-py ships; empty when it is not installed."""
    spec = importlib.util.find_spec("ale_py")
    places = spec.submodule_search_locations if spec is not None else None
    return sorted(path.stem for place in places or () for path in Path(place, "roms").glob("*.bin"))


def _atari_name(rom: str) -> str:
    return "atari:" + "".join(word.capitalize() for word in rom.split("_"))


def _pettingzoo_game(target: str, here: bool) -> str:
    if not here:
        return target
    games = _pettingzoo_games()
    if not games:
        raise MissingExtraError("pettingzoo", "pettingzoo", f"pettingzoo:{target}")
    if target in games:
        return target
    if target.startswith("mpe."):
        fix = f"They are a package of their own now: pip install mpe2, and name mpe2.{target[4:]}:parallel_env."
        raise UnknownEnvError(f"'pettingzoo:{target}': PettingZoo has no more mpe games. {fix}")
    near = _near("pettingzoo:" + target, ["pettingzoo:" + game for game in games])
    raise UnknownEnvError(f"there is no PettingZoo game '{target}'{near}")


def _pettingzoo_games() -> dict[str, str]:
    """Games by family and versioned name, from the installed files: "parallel" or "in turns"."""
    spec = importlib.util.find_spec("pettingzoo")
    places = spec.submodule_search_locations if spec is not None else None
    files = [path for place in places or () for path in sorted(Path(place).glob("*/*_v*.py"))]
    versioned = [path for path in files if re.fullmatch(r"\w+_v\d+", path.stem)]
    kinds = {path: "parallel" if "parallel_env" in path.read_text() else "in turns" for path in versioned}
    return {f"{path.parent.name}.{path.stem}": kind for path, kind in kinds.items()}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _importable(module: str) -> bool:
    """Installed, or in the current directory: the workers look there too."""
    return _installed(module) or PathFinder.find_spec(module.partition(".")[0], [os.getcwd()]) is not None


def _gym_registration(target: str) -> dict[str, Any]:
    """Check an id as far as this process can; for one that only this process registered, how to register it."""
    import gymnasium

    package, colon, _ = target.rpartition(":")
    if colon and not _importable(package):
        raise UnknownEnvError(f"gym:{target}: there is no package '{package}' to import.")
    for prefix, module, extra, distribution in PLUGINS:
        if target.startswith(prefix):
            if not _installed(module):
                raise MissingExtraError(distribution, extra, f"gym:{target}")
            return {}  # the worker imports the plugin, and knows its ids
    if colon:
        return {}
    spec = gymnasium.registry.get(target)
    if spec is None:
        if any(known.startswith(target + "-v") for known in gymnasium.registry):
            return {}  # Gymnasium takes the newest version
        raise UnknownEnvError(unknown_id(gymnasium, target, "pronghorn envs lists the ids"))
    return {} if str(spec.entry_point).startswith("gymnasium.") else _own_registration(target, spec)


def _own_registration(target: str, spec: Any) -> dict[str, Any]:
    if callable(spec.entry_point) and getattr(spec.entry_point, "__module__", "").startswith("gymnasium."):
        return {}  # Gymnasium's own notice for ids that moved to another package
    if spec.additional_wrappers or spec.entry_point is None:
        raise UsageError(
            f"gym:{target} was registered with wrappers of its own, which do not travel to the workers. "
            f"Register a function that builds it whole: pronghorn.register_env(name, 'module:function')."
        )
    entry = spec.entry_point if isinstance(spec.entry_point, str) else import_path(spec.entry_point)
    fields = ("reward_threshold", "nondeterministic", "max_episode_steps", "order_enforce", "kwargs")
    fields_given = {name: getattr(spec, name) for name in fields}
    vector = spec.vector_entry_point
    if vector is not None:
        fields_given["vector_entry_point"] = vector if isinstance(vector, str) else import_path(vector)
    return {"register": {"id": target, "entry_point": entry, **fields_given}}


def _user_target(name: str, here: bool) -> str:
    where, _, _ = name.rpartition(":")
    if where.endswith(".py"):
        if not os.path.exists(where):
            raise UnknownEnvError(f"'{name}': there is no file {os.path.abspath(where)}.")
    elif here and not _importable(where):
        raise UnknownEnvError(f"'{name}': there is no module '{where}' on the import path{_near(name)}")
    return _absolute(name)


def _absolute(target: str) -> str:
    """Workers run in directories of their own, so a file is named by its absolute path."""
    where, _, function = target.rpartition(":")
    return f"{os.path.abspath(where)}:{function}" if where.endswith(".py") else target


def list_envs() -> list[Listing]:
    """Every name that `resolve` knows without being told, in the order of the kinds."""
    import gymnasium

    doom_extra = "" if _installed("vizdoom") else "doom"
    found = [Listing(name, f"registered: {target}") for name, target in _registered.items()]
    found += [Listing(name, summary, doom_extra) for name, summary in _doom_names().items()]
    roms = _atari_games()
    found += [Listing(_atari_name(rom), "Atari 2600, 84 x 84 grey, 4 frames") for rom in roms]
    if not roms:
        found.append(Listing("atari:<Game>", "Atari 2600, 84 x 84 grey, 4 frames", "atari"))
    found.append(Listing("envpool:<Id>", "EnvPool (C++)", "" if _installed("envpool") else "envpool"))
    games = _pettingzoo_games()
    found += [Listing("pettingzoo:" + game, f"PettingZoo, {kind}") for game, kind in games.items()]
    if not games:
        found.append(Listing("pettingzoo:<family>.<game>", "PettingZoo", "pettingzoo"))
    for gym_id, spec in gymnasium.registry.items():
        if isinstance(spec.entry_point, str) and "/" not in gym_id:
            found.append(Listing("gym:" + gym_id, "Gymnasium", _gym_extra(spec.entry_point)))
    return found


def _gym_extra(entry_point: str) -> str:
    for part, module, extra in ((".box2d.", "Box2D", "box2d"), (".mujoco.", "mujoco", "mujoco")):
        if part in entry_point and not _installed(module):
            return extra
    return ""


# --------------------------------------------------------------------------------------- from a config


def make_pool(config: Config, *, seed: int, ordered: bool, evaluation: bool = False) -> Pool:
    """A running pool of the config's environments; how many and where is filled in where it is left open.

    ordered: whole groups in fixed order, for the deterministic modes.
    evaluation: the pool may run beside a training run, so its workers are not pinned to the cores of that run's,
        and it asks for no more files than it takes.
    """
    from pronghorn.defaults import resolve_env

    config = resolve_env(config)
    env = config.env
    resolved = [resolve(name, *_arguments(config), python=env.python or None) for name in config.env_names]
    backends = sorted({one.backend for one in resolved})
    if len(backends) > 1:
        raise ConfigError("env.id", env.id, "tasks of one run must share a back end", f"Choose one of: {backends}.")
    if backends[0] in _NATIVE:
        return _native_pool(config, resolved, seed, ordered=ordered)
    _require_one_match_a_worker(config)
    return WorkerPool(
        resolved,
        num_workers=env.workers,
        envs_per_worker=env.envs_per_worker,
        num_groups=min(env.groups, env.envs_per_worker),
        seed=seed,
        ordered=ordered,
        pin="off" if evaluation else env.pin,
        python=env.python or None,
        step_timeout_s=env.step_timeout_s,
        start_timeout_s=env.start_timeout_s,
        restart_budget=env.restart_budget,
        sys_path=None,
        evaluation=evaluation,
    )


def _require_one_match_a_worker(config: Config) -> None:
    """An engine that hangs can be ended only with its process, which must not take other matches with it."""
    for name in config.env_names:
        if config.env.envs_per_worker > 1 and deathmatch.fills_worker(name):
            rule = f"a match of {name} is an engine for each player, which live and die in a worker of their own"
            fix = "Leave it out, or give 1; --env.workers gives more matches."
            raise ConfigError("env.envs_per_worker", config.env.envs_per_worker, rule, fix)


def _atari_pool(config: Config, resolved: list[ResolvedEnv], seed: int, ordered: bool, render: bool) -> Pool:
    """render: changes nothing, as the observations are pictures."""
    from pronghorn.envs.native import AtariPool

    kwargs, options = _arguments(config)
    if options:
        raise ConfigError("env", sorted(options), "these settings do not apply to Atari", "Leave them out.")
    known = list(inspect.signature(AtariPool).parameters)[2:]
    for name in kwargs:
        if name not in known:
            raise ConfigError("env.args", name, "Atari has no such argument", f"It has: {', '.join(known)}.")
    pool: Pool = AtariPool(
        [one.target for one in resolved],
        config.env.workers * config.env.envs_per_worker,
        num_threads=config.env.workers,
        num_groups=config.env.groups,
        seed=seed,
        ordered=ordered,
        **kwargs,
    )
    return pool


def _envpool_pool(config: Config, resolved: list[ResolvedEnv], seed: int, ordered: bool, render: bool) -> Pool:
    """ordered: changes nothing, as there is one order."""
    from pronghorn.envs.envpool import EnvPoolPool

    kwargs, options = _arguments(config)
    known = ("obs_keys", "image_layout", "info")
    for name in options:
        if name not in known:
            fix = f"It has: {', '.join(known)}."
            raise ConfigError("env.args", ADAPTER_PREFIX + name, "EnvPool has no such option of the adapter", fix)
    pool: Pool = EnvPoolPool(
        [one.target for one in resolved],
        config.env.workers * config.env.envs_per_worker,
        num_threads=config.env.workers,
        num_groups=config.env.groups,
        seed=seed,
        render=render,
        options=options,
        settings=kwargs,
    )
    return pool


_NATIVE = {"atari": _atari_pool, "envpool": _envpool_pool}  # back ends that run in this process


def _native_pool(
    config: Config, resolved: list[ResolvedEnv], seed: int, *, ordered: bool = False, render: bool = False
) -> Pool:
    if config.env.python:
        rule = f"{resolved[0].name} runs inside the trainer, and so in its interpreter"
        raise ConfigError("env.python", config.env.python, rule, "Leave it out.")
    return _NATIVE[resolved[0].backend](config, resolved, seed, ordered, render)


def _arguments(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """(keyword arguments of the environment, options of our adapter) that the config gives."""
    values = {key: _value(text) for key, text in config.env.args.items()}
    kwargs = {key: value for key, value in values.items() if not key.startswith(ADAPTER_PREFIX)}
    options = {key[len(ADAPTER_PREFIX) :]: values[key] for key in values if key not in kwargs}
    if config.env.obs_keys:
        options["obs_keys"] = list(config.env.obs_keys)
    if config.env.image_layout != "auto":
        options["image_layout"] = config.env.image_layout
    if config.env.vector_rows:
        options["vector_rows"] = config.env.vector_rows
    if config.env.pad_spaces:
        options["pad_spaces"] = True
    if "policies" in options:
        fix = "Leave it out, and add --env.policies by_spaces."
        raise ConfigError("env.args", ADAPTER_PREFIX + "policies", "is no setting of the adapter alone", fix)
    if config.env.policies != "shared":
        options["policies"] = config.env.policies
    if config.env.team_reward != "none":
        options["team_reward"] = config.env.team_reward
    return kwargs, options


def _value(text: Any) -> Any:
    """An argument's text read as a TOML value, else as the text itself."""
    if not isinstance(text, str):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


class ShownEnv:
    """A pool of one environment that can be looked at: for videos and for watching.

    It lives in a worker of its own, as in training: in the interpreter asked for, and away from this directory. Of
    an environment of several rows it shows what that draws: the first row of a vector environment, all agents together.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool, self.spec = pool, pool.spec
        self._image: NDArray[np.uint8] | None = None

    def receive(self) -> Ready:
        """All rows, to be answered by `pool.send`. Raises EnvError when the environment was lost."""
        ready = self.pool.recv(600.0)
        if ready is None or (ready.event == Event.LOST).any():
            raise EnvError(f"{self.spec.name}: the environment was lost")
        self._image = self._image_observation(ready)
        return ready

    def render(self) -> NDArray[np.uint8] | None:
        """The environment's picture, or its first row's image observation where the back end draws none."""
        render = getattr(self.pool, "render", None)
        frame: NDArray[np.uint8] | None = render(0) if render is not None else None
        return frame if frame is not None else self._image

    def render_ending(self) -> NDArray[np.uint8] | None:
        """How an episode ended since the last call, once `render` was called; None where none did, or the back end has
        no picture of it (vector environments and native ones reset by themselves).
        """
        return self.pool.render(0, ending=True) if isinstance(self.pool, WorkerPool) else None

    def _image_observation(self, ready: Ready) -> NDArray[np.uint8] | None:
        if ready.event[0] == Event.INACTIVE:
            return self._image
        for name, leaf in self.spec.observation.items():
            if leaf.kind == "image":
                image = ready.obs[name][0] if leaf.layout == "hwc" else np.moveaxis(ready.obs[name][0], 0, -1)
                # A frame stack shows its newest frame.
                return image.copy() if image.shape[-1] == 3 else np.repeat(image[..., -1:], 3, axis=-1)
        return None

    def close(self) -> None:
        self.pool.close()


def make_env(config: Config, *, seed: int, render: bool = False) -> ShownEnv:
    """One environment of the config's first task. render: have it draw pictures."""
    name = config.env_names[0]
    config = _one_row(config)
    kwargs, options = _arguments(config)
    resolved = resolve(name, kwargs, options, python=config.env.python or None)
    if resolved.backend in _NATIVE:
        return ShownEnv(_native_pool(config, [resolved], seed, render=render))
    if render:
        resolved = resolve(name, kwargs, {**options, "render": True}, python=config.env.python or None)
    pool = WorkerPool(
        [resolved], num_workers=1, envs_per_worker=1, num_groups=1, seed=seed, restart_budget=0,
        python=config.env.python or None, step_timeout_s=config.env.step_timeout_s,
        start_timeout_s=config.env.start_timeout_s,
    )  # fmt: skip
    return ShownEnv(pool)


def _one_row(config: Config) -> Config:
    return replace(config, env=replace(config.env, workers=1, envs_per_worker=1, groups=1, vector_rows=0))
