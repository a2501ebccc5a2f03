"""Defaults as data: fills what a user left open, from defaults.toml and from what the environment looks like.

`resolve` is the one way from given settings to those of a run; behind it no field is open.
"""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronghorn.config import Config, replace, walk
from pronghorn.envworker.deathmatch import fills_worker
from pronghorn.envworker.loading import vector_entry_point
from pronghorn.errors import ConfigError, UsageError
from pronghorn.launch import unrolls_of_one
from pronghorn.machine import available_cores, computes_bfloat16, has_gpu
from pronghorn.rules import validate, validate_critic_only, validate_sizes
from pronghorn.types import EnvSpec

GPU_THREADS = 4  # of learning, where a GPU does the arithmetic; acting has half
VECTOR_ROWS = 512  # of an environment that steps its rows as one


@functools.cache
def _tables() -> dict[str, Any]:
    """defaults.toml: the defaults of algorithms and kinds of environment, and the presets, by dotted names."""
    return tomllib.loads(Path(__file__).with_name("defaults.toml").read_text())


def presets() -> dict[str, dict[str, Any]]:
    """Settings by the name of the preset that gives them."""
    return {name: {k: _frozen(v) for k, v in values.items()} for name, values in _tables()["preset"].items()}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def kind_of(spec: EnvSpec) -> str:
    """'pixels' if any observation is an image of at least 36 pixels a side, else 'vector'."""
    images = [leaf for leaf in spec.observation.values() if leaf.kind == "image"]
    sides = [leaf.shape[:2] if leaf.layout == "hwc" else leaf.shape[1:] for leaf in images]
    return "pixels" if any(min(side) >= 36 for side in sides) else "vector"


def resolve_env(config: Config) -> Config:
    """Fill the settings that are needed before the environment is known: how many of them, and where."""
    pixels = any(name.startswith(("doom:", "atari:", "dmlab:")) for name in config.env_names)
    config = with_defaults(config, {"env.vector_rows": VECTOR_ROWS if _steps_rows_as_one(config) else 0})
    if config.env.vector_rows:  # one worker, as a step of all rows costs little; two environments that take turns
        config = with_defaults(config, {"env.workers": 1, "env.envs_per_worker": 2 * len(config.env_names)})
    # A GPU acts on twice the rows in little more time, and the sampler serves half as many batches for as many steps.
    per_worker = 32 if not pixels or has_gpu(config.device) else 16
    cores = max(1, int(config.cluster.cpus_per_actor)) if config.cluster.address else available_cores()
    batch = config.learner.batch_unrolls
    if batch and _runs_free(config) and not config.cluster.address:
        # As many rows as a large batch has unrolls: the lag is the same, and acting on more rows at once is cheaper.
        per_worker = max(per_worker, min(32, batch // (config.env.workers or cores)))
    defaults = {"env.workers": cores, "env.envs_per_worker": per_worker}
    if any(map(fills_worker, config.env_names)):  # so workers, not groups of a worker, take turns
        defaults = {"env.workers": max(2 * cores, len(config.env_names)), "env.envs_per_worker": 1}
    config = with_defaults(config, defaults)
    return with_defaults(config, {"env.groups": max(1, min(2, config.env.envs_per_worker))})


def _runs_free(config: Config) -> bool:
    """Whether sampling and learning will not take turns."""
    return config.algo in ("appo", "impala") and (config.max_lag is None or config.max_lag > 1)


def _steps_rows_as_one(config: Config) -> bool:
    """Whether Gymnasium has a vector entry point for every task, and nothing was asked for that it cannot do.

    Ids with a namespace (phys2d/CartPole-v1, which runs on JAX) have vectors of their own kind.
    """
    env = config.env
    if env.workers or env.envs_per_worker or env.args or env.python:
        return False
    # Its rows wait for their resets, so they cannot take turns; and the others' defaults are those of few rows.
    if config.algo != "appo" or not _runs_free(config):
        return False
    ids = [name.removeprefix("gym:") for name in config.env_names if name.startswith("gym:")]
    plain = len(ids) == len(config.env_names) and not any("/" in one or ":" in one for one in ids)
    return plain and all(vector_entry_point(one) is not None for one in ids)


def resolve(config: Config, spec: EnvSpec, num_learners: int = 1) -> Config:
    """Fill every Auto field from the kind of environment and the algorithm, then validate. Raises ConfigError.

    num_learners: processes with environments like these, whose unrolls are one batch together.
    """
    tables, kind = _tables(), kind_of(spec)
    config = resolve_env(config)
    kinds = _kinds(config, spec, kind)
    defaults = dict(tables["common"])
    for name in kinds:
        defaults |= tables["kind"][name]
    defaults |= tables["algorithm"][config.algo] | tables["pair"].get(f"{kind}-{config.algo}", {})
    config = with_defaults(config, defaults)
    # In fewer bits, rows that act alone and in company differ more; the deterministic modes are for checking.
    fast_in_bits = kind == "pixels" and not config.deterministic and computes_bfloat16(config.device)
    precision = "bfloat16" if fast_in_bits else "float32"
    # With a GPU threads only copy frames to where it fetches them; more would take cores from environments.
    threads = min(GPU_THREADS, available_cores()) if has_gpu(config.device) else available_cores()
    config = with_defaults(config, {"threads": threads, "precision": precision})
    num_rows = config.num_envs * spec.rows_per_env
    if spec.rows_wait and config.max_lag <= 1:
        rule = "must be at least 2 here: rows of this environment may wait (agents in turns, next-step auto-reset)"
        raise ConfigError("max_lag", config.max_lag, rule, "Add --max-lag 16, or use a same-step auto-reset.")
    # Members of a population share the rows, and so do the policies of agents with unlike spaces.
    num_rows = max(1, num_rows // max(1, config.population.num_slots, len(spec.signatures))) * num_learners
    # Taking turns needs whole unrolls of all rows in each batch. Several passes over a batch want a large one; a single
    # optimiser step wants a small one, so that there are many.
    if config.max_lag <= 1 or (kind == "vector" and config.learner.epochs > 1) or "vector-native" in kinds:
        fresh_unrolls = num_rows
    else:
        fresh_unrolls = max(1, num_rows // 4) if kind == "vector" else max(32, num_rows // 2)
    batch_unrolls = round(fresh_unrolls / (1.0 - min(config.learner.replay_fraction, 0.99)))
    config = with_defaults(config, {"learner.batch_unrolls": -(-batch_unrolls // num_learners) * num_learners})
    validate(config)
    validate_critic_only(config, spec)
    unrolls = unrolls_of_one(config.learner.batch_unrolls, num_learners)
    minibatches = _default_minibatches(config, kind, "vector-native" in kinds, unrolls)
    config = with_defaults(config, {"learner.minibatches": minibatches})
    validate_sizes(replace(config, {"learner.batch_unrolls": unrolls}), config.num_envs * spec.most_rows)
    return config


def _kinds(config: Config, spec: EnvSpec, kind: str) -> list[str]:
    """The tables of defaults that apply, the general one first."""
    is_vector = kind == "vector"
    more = {
        "vector-native": is_vector and config.env.vector_rows,
        "vector-continuous": is_vector and spec.action.num_continuous > 0,
        "vector-image": is_vector and any(leaf.kind == "image" for leaf in spec.observation.values()),
        "grid-codes": is_vector and _shows_grids_of_codes(config, spec),
        "vector-memory": is_vector and config.model.core not in (None, "none"),
        "atari": _plays_atari(config, kind),
    }
    return [kind, *(name for name, applies in more.items() if applies)]


def _shows_grids_of_codes(config: Config, spec: EnvSpec) -> bool:
    """MiniGrid and BabyAI, with observations that the encoder for such grids can read."""
    images = [leaf for leaf in spec.observation.values() if leaf.kind == "image"]
    named = all(re.search(r"\b(MiniGrid|BabyAI)-", name) for name in config.env_names)
    return named and bool(images) and all(leaf.dtype == "uint8" for leaf in images)


def _plays_atari(config: Config, kind: str) -> bool:
    """Of EnvPool's tasks with pixels, those of version 5 are the Atari games."""
    names = config.env_names
    through_envpool = kind == "pixels" and any(re.fullmatch(r"envpool:\w+-v5", name) for name in names)
    return through_envpool or any(name.startswith("atari:") for name in names)


def _default_minibatches(config: Config, kind: str, native: bool, unrolls: int) -> int:
    """Few for pixels, whose optimiser steps are dear; else so many that each holds 128 single steps, or 4 unrolls, or
    16 unrolls that a memory goes through step by step. native: of a thousand rows, so many that each holds 4,096 steps.

    unrolls: of each learner, which deals them into as many.
    """
    n = config.learner
    each = unrolls * n.unroll_length if config.single_steps else unrolls
    total = each * n.batch_unrolls // unrolls
    if native:
        size = 4096 if config.single_steps else max(1, 4096 // n.unroll_length)
    else:
        size = 128 if config.single_steps else 4 if config.model.core == "none" else 16
    most = 4 if kind == "pixels" else total // size
    return max(count for count in range(1, max(1, min(most, each)) + 1) if each % count == 0)


def with_defaults(config: Config, defaults: Mapping[str, Any]) -> Config:
    """Fill the fields that are still None."""
    current = dict(walk(config))
    filled: Config = replace(config, {k: v for k, v in defaults.items() if current.get(k, 0) is None})
    return filled


def apply_preset(config: Config, names: str) -> Config:
    """The config with the values of a preset, or of several joined by commas (the last one wins).

    Raises UsageError for an unknown preset, with the nearest one.
    """
    known, values = presets(), dict[str, Any]()
    for name in names.split(","):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise UsageError(f"Unknown preset '{name}'.{hint} There are: {', '.join(sorted(known))}.")
        values |= known[name]
    preset: Config = replace(config, values | {"preset": names})
    return preset
