"""Builds environments and gives each the flat form that a worker runs; knows no processes and no shared memory.

A flat environment (`FlatEnv`, by duck typing) is any object with

    spec          dict: {"observation": {leaf: {"shape", "dtype", "kind", "layout", "low", "high", "n"}},
                         "action": {"discrete": [n, ...], "low": [...], "high": [...]}, "rows_per_env": 1,
                         "frame_skip": k, "info": [names], "render_fps": f, "name": s,
                         "agents": [names of rows that are agents of one game], "rewards": {name: weight},
                         "signatures": [{"rows": [i, ...], "observation", "action": those agents' own, "leaves":
                                         {own leaf: leaf above in which it lies}}, ...], where agents' spaces differ}
    reset(seed)   seed: int or None -> {leaf: array}
    step(discrete, continuous)      discrete: int64 [D], 0-based; continuous: float32 [C] ->
                  (obs, reward, terminated, truncated, episode_over, info)
                  episode_over is normally `terminated or truncated`; a life loss is terminated with
                  episode_over False, and no reset follows it
    render()      uint8 [H, W, 3], or None;      close()
    ending()      optional, of several rows: the picture of how the last game ended, once; else None
    stats()       optional: numbers for the record of the episode that just ended
    set_option(name, value)         optional: changes a named setting of the running environment; one whose spec has
                  "rewards" takes such a table under that name, and, where it has "agents", also a list of one for each
    games         where the spec has "agents": the number of games begun so far
"""

from __future__ import annotations

import errno
import importlib
import inspect
import socket
from typing import Any, Callable, Dict, List, Mapping, Optional

from .loading import NotFound, absent, import_plugin, load, naming_absent, unknown_id
from .parallel import ParallelEnv
from .single import GymnasiumEnv
from .spaces import ContractBroken
from .turns import TurnsEnv
from .vector import GymnasiumVectorEnv

FREE_PORT = "FREE_PORT"
PORT_TRIES = 8
GYM_OPTIONS = ("obs_keys", "image_layout", "frame_skip", "info", "reset_options", "render", "register",
               "vector_rows", "pad_spaces", "policies", "team_reward")  # fmt: skip
AGENTS_OPTIONS = ("pad_spaces", "policies", "team_reward")  # of environments of several agents only


def make(
    kind: str,
    target: str,
    kwargs: Optional[Mapping[str, Any]] = None,
    options: Optional[Mapping[str, Any]] = None,
) -> Any:
    """Build a flat environment.

    kind 'gym':  target is an id of Gymnasium's registry ('CartPole-v1', 'package:Id-v0')
    kind 'call': target is 'module.path:function' or 'path/file.py:function'; it is called with kwargs and
                 returns a Gymnasium environment or vector environment, one of several agents (PettingZoo's parallel
                 or AEC interface, or a class of that form), or a flat one
    kind 'pettingzoo': target is a game of PettingZoo, by family and versioned name ('butterfly.pistonball_v6')
    kind 'doom': target is the name of a scenario or of a kind of match

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
        rows = options.pop("vector_rows", 0)
        adapter = GymnasiumVectorEnv if rows else GymnasiumEnv
        _refuse_agents_options(target, options)
        return adapter(_make_gym(target, kwargs, render, register, rows), name=target, **options)
    if kind == "pettingzoo":
        return flat(_make_pettingzoo(target, kwargs, render), "pettingzoo:" + target, options)
    if kind != "call":
        raise NotFound("no kind of environment is called %r; there are gym, call, pettingzoo, doom" % (kind,))
    function = naming_absent(load, target)
    if render and _takes_render_mode(function):
        kwargs.setdefault("render_mode", "rgb_array")
    _require_arguments(function, target, kwargs)
    return flat(naming_absent(lambda _: function(**kwargs), target), target, options)


def flat(env: Any, name: str = "", options: Optional[Mapping[str, Any]] = None) -> Any:
    """`env` itself if it is flat already, else its adapter."""
    if isinstance(getattr(env, "spec", None), dict) and "observation" in env.spec:
        if options:
            raise ContractBroken("%s is a flat environment; the options %s do not apply" % (name, sorted(options)))
        return env
    if hasattr(env, "possible_agents"):
        adapter = TurnsEnv if hasattr(env, "agent_iter") or hasattr(env, "agent_selection") else ParallelEnv
        return adapter(env, name=name, **(options or {}))
    _refuse_agents_options(name, options or {})
    if hasattr(env, "num_envs") and hasattr(env, "single_observation_space"):
        return GymnasiumVectorEnv(env, name=name, **(options or {}))
    missing = [n for n in ("observation_space", "action_space", "reset", "step") if not hasattr(env, n)]
    if missing:
        raise ContractBroken(
            "%s returned a %s, which lacks %s; a Gymnasium environment is needed"
            % (name, type(env).__name__, ", ".join(missing))
        )
    return GymnasiumEnv(env, name=name, **(options or {}))


def _refuse_agents_options(name: str, options: Mapping[str, Any]) -> None:
    given = [option for option in AGENTS_OPTIONS if option in options]
    if given:
        raise ContractBroken(
            "%s: %s is an option of environments of several agents, which this is not; leave it out"
            % (name, " and ".join(given))
        )


def _takes_render_mode(function: Callable[..., Any]) -> bool:
    try:
        return "render_mode" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _make_doom(target: str, kwargs: Dict[str, Any], options: Mapping[str, Any]) -> Any:
    from . import deathmatch, doom

    unknown = sorted(set(options) - {"render"})
    if unknown:
        raise ContractBroken("the options %s do not apply to doom:%s" % (unknown, target))
    is_match = target in deathmatch.MATCHES
    _require_arguments(deathmatch.Players if is_match else doom.DoomEnv, "doom:" + target, dict(kwargs), target)
    build = deathmatch.make if is_match else doom.DoomEnv
    try:
        return naming_absent(lambda _: build(target, **kwargs), "doom:" + target)
    except ValueError as error:  # one of its own rules on the arguments
        raise ContractBroken(str(error)) from None


def _make_gym(
    target: str, kwargs: Dict[str, Any], render: bool, register: Optional[Dict[str, Any]], vector_rows: int
) -> Any:
    """vector_rows: of the one environment that its vector entry point makes; 0: a plain environment."""
    gymnasium = naming_absent(importlib.import_module, "gymnasium")
    import_plugin(target)
    if register is not None and target not in gymnasium.registry:
        points = {name: load(point) for name, point in register.items() if name.endswith("entry_point")}
        gymnasium.register(**dict(register, **points))
    if render:
        kwargs.setdefault("render_mode", "rgb_array")
    try:
        if vector_rows:
            return gymnasium.make_vec(target, vector_rows, vectorization_mode="vector_entry_point", **kwargs)
        return gymnasium.make(target, disable_env_checker=True, **kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise absent(error, "gym:" + target) from error
    except gymnasium.error.UnregisteredEnv as error:
        raise NotFound(unknown_id(gymnasium, target, str(error))) from None
    except ImportError as error:
        raise absent(error, "gym:" + target) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ContractBroken("gym:%s: %s" % (target, error)) from None


def _make_pettingzoo(target: str, kwargs: Dict[str, Any], render: bool) -> Any:
    """The game's parallel environment, or where its agents take turns, its AEC environment."""
    name, family = "pettingzoo:" + target, target.split(".")[0]
    naming_absent(lambda _: importlib.import_module("pettingzoo"), name)
    try:
        module = importlib.import_module("pettingzoo." + target)
    except ImportError as error:
        raise ContractBroken(
            "%s cannot be imported: %s. PettingZoo installs what its %s games need: pip install 'pettingzoo[%s]'"
            % (name, error, family, family)
        ) from error
    if render:
        kwargs.setdefault("render_mode", "rgb_array")
    build = getattr(module, "parallel_env", None) or module.env
    try:
        return build(**kwargs)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ContractBroken("%s: %s" % (name, error)) from None


def _require_arguments(function: Callable[..., Any], name: str, kwargs: Mapping[str, Any], *given: Any) -> None:
    """Refuse arguments that `function` does not take, before it runs, by naming those that it takes.

    given: those that come before the user's.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it will say so itself
        return
    try:
        signature.bind(*given, **kwargs)
    except TypeError as error:
        parameters = list(signature.parameters.values())[len(given) :]
        known = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
        raise ContractBroken("%s: %s; its arguments are: %s" % (name, error, known or "none")) from None
