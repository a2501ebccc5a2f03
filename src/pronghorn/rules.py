"""The rules that settings must keep, each explained where it is checked. It changes no setting."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from pronghorn.config import Config, walk
from pronghorn.errors import ConfigError, UsageError
from pronghorn.population import matchmaking, pbt
from pronghorn.types import ACTION_MASK, EnvSpec


def validate(config: Config) -> None:
    """Check every rule on values that are set; Auto fields that are still None are skipped. Raises ConfigError."""
    if not config.env_names:
        raise UsageError("No environment was named. Example: pronghorn train doom:basic")
    _check_env(config)
    validate_model(config)
    _check_run(config)
    _check_learner(config)
    _check_replay(config)
    _check_population(config)
    _check_cluster(config)
    if config.deterministic and config.max_lag is not None and config.max_lag > 1:
        raise ConfigError("max_lag", config.max_lag, "must be 0 or 1 with --deterministic", "Add --max-lag 1.")


def _check_env(config: Config) -> None:
    for name in ("workers", "envs_per_worker", "groups", "step_timeout_s"):
        _positive(f"env.{name}", getattr(config.env, name))
    _not_negative("env.vector_rows", config.env.vector_rows, "0 makes an environment for each row.")
    if config.env.python and not os.access(config.env.python, os.X_OK):
        fix = "Give the path of a Python interpreter."
        raise ConfigError("env.python", config.env.python, "must be an executable file", fix)


def validate_model(config: Config) -> None:
    """Check the sizes of the network. Raises ConfigError."""
    for name in ("conv_features", "core_size", "core_layers", "initial_std"):
        _positive(f"model.{name}", getattr(config.model, name))
    for width in config.model.mlp_layers:
        _positive("model.mlp_layers", width)


def validate_critic_only(config: Config, spec: EnvSpec) -> None:
    """What only the critic reads exists, is no mask, and leaves the policy something to see. Raises ConfigError."""
    names, leaves = config.model.critic_only, spec.observation
    if not names:
        return
    if not config.model.separate_critic:
        rule = "needs model.separate_critic: a trunk that the value shares with the policy would show it to both"
        raise ConfigError("model.critic_only", names, rule, "Add --model.separate-critic.")
    masks = [name for name, leaf in leaves.items() if leaf.kind == "mask" or name == ACTION_MASK]
    for name in names:
        covered = spec.leaves_of([name])
        if not covered:
            near = difflib.get_close_matches(name, leaves, 1, 0.0)[0]
            rule = f"the observation has no leaf '{name}'; the nearest is '{near}'"
            raise ConfigError("model.critic_only", names, rule, f"There are: {', '.join(leaves)}.")
        if mask := next((leaf for leaf in covered if leaf in masks), None):
            rule = f"'{name}' covers the action mask '{mask}', which the policy needs"
            raise ConfigError("model.critic_only", names, rule, "Name the other leaves one by one.")
    if {*spec.leaves_of(names), *masks} == {*leaves}:
        raise ConfigError("model.critic_only", names, "leaves the policy nothing to see", "Name fewer leaves.")


def _check_run(config: Config) -> None:
    c = config
    if c.seed < 0:
        raise ConfigError("seed", c.seed, "must not be negative", "Give any whole number from 0 on.")
    for name in ("steps", "frames", "minutes", "threads"):
        _positive(name, getattr(c, name))
    _not_negative("max_lag", c.max_lag, "0 takes turns, 1 overlaps, more runs free.")
    _not_negative("stall_timeout_s", c.stall_timeout_s, "0 ends nothing.")
    _positive("checkpoint.keep", c.checkpoint.keep)
    _not_negative("checkpoint.every_s", c.checkpoint.every_s)
    _not_negative("checkpoint.every_updates", c.checkpoint.every_updates)
    _positive("eval.episodes", c.eval.episodes)
    _not_negative("log.every_s", c.log.every_s)
    if not 0.0 < c.eval.max_share <= 1.0:
        raise ConfigError("eval.max_share", c.eval.max_share, "must lie in (0, 1]", "Try 0.15.")


def _check_learner(config: Config) -> None:
    n = config.learner
    for name in ("unroll_length", "batch_unrolls", "epochs", "minibatches", "lr", "critic_lr_scale", "reward_scale",
                 "replay_unrolls", "rho_clip", "c_clip", "pg_rho_clip", "ppo_clip", "lr_kl_target",
                 "peers_timeout_s"):  # fmt: skip
        _positive(f"learner.{name}", getattr(n, name))
    for name in ("value_clip", "value_coef", "exploration_coef", "kl_coef", "reward_clip", "max_grad_norm"):
        _not_negative(f"learner.{name}", getattr(n, name))
    _not_negative("learner.max_skipped", n.max_skipped, "0 goes back to the last checkpoint at the first one.")
    _not_negative("learner.max_rollbacks", n.max_rollbacks, "0 ends the run where it would go back.")
    for name in ("gamma", "lambda_"):
        value = getattr(n, name)
        if value is not None and not 0.0 <= value <= 1.0:
            raise ConfigError(f"learner.{name.strip('_')}", value, "must lie in [0, 1]", "Try 0.99 or 0.95.")
    if n.advantage == "epsilon" and n.policy_loss == "ppo_clip":
        rule = "needs learner.policy_loss = policy_gradient, whose log(pi) it changes"
        raise ConfigError("learner.advantage", "epsilon", rule, "Try --algo impala.")


def _check_replay(config: Config) -> None:
    share = config.learner.replay_fraction
    if not 0.0 <= share < 1.0:
        raise ConfigError("learner.replay_fraction", share, "must lie in [0, 1)", "Try 0.5.")
    if share and config.deterministic:
        rule = "must be 0 with --deterministic: the replay is not saved, so a resumed run would differ"
        raise ConfigError("learner.replay_fraction", share, rule, "Drop one of the two.")


def _check_population(config: Config) -> None:
    selfplay, members = config.selfplay, config.population.members
    if members > 1:
        pbt.check_settings(config.population)
    elif members < 1:
        raise ConfigError("population.members", members, "must be at least 1", "1 trains one policy.")
    matchmaking.check_settings(selfplay, 2, members)  # also where it is off: scripts without a weight play nowhere
    by_spaces = config.env.policies == "by_spaces"
    if by_spaces:
        _check_by_spaces(config)
    if members == 1 and not selfplay.meets_others and not by_spaces:
        return
    rule = "must be at least 2 with several policies: each trains when it has a batch of its own"
    if config.deterministic:
        raise ConfigError("deterministic", True, rule.replace("must be at least 2", "is not possible"), "Drop it.")
    if config.max_lag is not None and config.max_lag <= 1:
        raise ConfigError("max_lag", config.max_lag, rule, "Add --max-lag 16.")


def _check_by_spaces(config: Config) -> None:
    """A policy for each kind of agents: what it cannot be combined with."""
    fix = "Drop one of the two."
    if config.env.pad_spaces:
        rule = "cannot be combined with env.policies = by_spaces, in which each policy sees its own spaces unpadded"
        raise ConfigError("env.pad_spaces", True, rule, fix)
    if config.population.members > 1:
        rule = "cannot be combined with env.policies = by_spaces: members of a population play the same agents"
        raise ConfigError("population.members", config.population.members, rule, fix)
    if config.selfplay.meets_others:
        rule = "cannot be combined with self-play against others, who need the learner's own spaces"
        raise ConfigError("env.policies", "by_spaces", rule, "Leave the selfplay weights of others at 0.")
    if config.learner.lr_schedule == "linear":
        rule = "has no known end with env.policies = by_spaces: nobody knows what share of the steps each policy gets"
        raise ConfigError("learner.lr_schedule", "linear", rule, "Add --learner.lr-schedule constant.")


def _check_cluster(config: Config) -> None:
    """Remote actors: their numbers, and what they cannot be combined with."""
    c = config.cluster
    for name in ("actors", "cpus_per_actor", "silent_s", "object_store_mb"):
        _positive(f"cluster.{name}", getattr(c, name))
    _not_negative("cluster.in_flight", c.in_flight, "0 is one and a half for each row.")
    _not_negative("cluster.restart_budget", c.restart_budget, "0 ends the run with the first actor that is lost.")
    _not_negative("cluster.weights_every_s", c.weights_every_s, "0 sends each version.")
    _not_negative("cluster.room_s", c.room_s, "0 does not wait.")
    if not c.address:
        if c.actors != 1:
            fix = "Add --cluster local, or --cluster ADDRESS."
            raise ConfigError("cluster.actors", c.actors, "needs a cluster", fix)
        return
    rule = "cannot be combined with remote actors (--cluster), which run free"
    if config.deterministic:
        raise ConfigError("deterministic", True, rule, "Drop one of the two.")
    if config.max_lag is not None and config.max_lag <= 1:
        raise ConfigError("max_lag", config.max_lag, f"takes turns, which {rule}", "Add --max-lag 16.")
    rule = "cannot be combined with remote actors (--cluster), which act with one policy"
    if config.population.members > 1:
        raise ConfigError("population.members", config.population.members, rule, "Drop one of the two.")
    if config.selfplay.meets_others:
        raise ConfigError("selfplay", "weights of others", rule, "Leave the selfplay weights of others at 0.")
    if config.env.policies == "by_spaces":
        raise ConfigError("env.policies", "by_spaces", rule, "Drop one of the two.")


def validate_sizes(config: Config, num_rows: int) -> None:
    """Refuse sizes that cannot work or would deadlock, of a resolved config. Raises ConfigError."""
    n = config.learner
    envs, groups, num_unrolls = config.env.envs_per_worker, config.env.groups, n.batch_unrolls
    num_fresh = config.fresh_unrolls
    if envs < groups:
        rule = f"must be at most env.envs_per_worker = {envs}"
        raise ConfigError("env.groups", groups, rule, "Lower --env.groups or raise --env.envs-per-worker.")
    if config.single_steps and num_unrolls * n.unroll_length % n.minibatches:
        rule = f"must divide the {num_unrolls * n.unroll_length} samples of a batch"
        raise ConfigError("learner.minibatches", n.minibatches, rule, "Try a power of two.")
    if not config.single_steps and num_unrolls % n.minibatches:
        rule = f"must divide learner.batch_unrolls = {num_unrolls}"
        fix = "Here minibatches are made of whole unrolls: the model has a memory, or each sample is used once."
        raise ConfigError("learner.minibatches", n.minibatches, rule, fix)
    if num_fresh == 0:
        rule = f"leaves no fresh unroll in a batch of {num_unrolls}"
        raise ConfigError("learner.replay_fraction", n.replay_fraction, rule, "Lower it.")
    if config.max_lag <= 1 and num_fresh % num_rows:
        rule = f"must be a multiple of the {num_rows} rows when --max-lag is 0 or 1 (whole unrolls of all rows)"
        if n.replay_fraction:
            rule = f"leaves {num_fresh} fresh ones, which {rule}"
        fresh = num_rows * max(1, round(num_fresh / num_rows))
        fix = f"Try --learner.batch-unrolls {round(fresh / (1.0 - n.replay_fraction))}."
        raise ConfigError("learner.batch_unrolls", num_unrolls, rule, fix)
    if config.cluster.address and config.cluster.inference == "actor":
        own = num_rows // config.num_actors
        if config.cluster.unrolls_per_actor(own) < own:
            rule = f"must be at least {own}, the rows of an actor: each fills an unroll of its own"
            raise ConfigError("cluster.in_flight", config.cluster.in_flight, rule, "Leave it out for the default.")
    # A batch takes B of the at most num_slots unrolls that are older than it, oldest first.
    need = -(-config.num_slots(num_rows) // num_fresh)
    if config.max_lag > 1 and config.max_lag < need:
        rule = f"must be at least {need}: {num_rows} rows can have that many batches of {num_fresh} unrolls in flight"
        fix = "Raise --max-lag or --learner.batch-unrolls, or lower the number of environments."
        raise ConfigError("max_lag", config.max_lag, rule, fix)
    if n.lr_schedule == "linear" and not (config.steps or config.frames):
        rule = "needs an end of the run in steps or frames"
        raise ConfigError("learner.lr_schedule", "linear", rule, "Add --steps or --frames.")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError(name, value, "must be greater than 0", "Leave it out for the default.")


def _not_negative(name: str, value: float | None, fix: str = "0 switches it off.") -> None:
    if value is not None and not value >= 0:
        raise ConfigError(name, value, "must not be negative", fix)


# Settings that a resumed run cannot change: what the weights depend on, which would not fit or would mean something
# else, and the algorithm, whose other settings were filled in when the run began.
_STRUCTURAL = ("env.id", "env.args", "env.obs_keys", "env.image_layout", "env.policies", "model.", "algo",
               "learner.optimizer", "population.members", "population.mutable", "population.ranges",
               "selfplay.line_up")  # fmt: skip


def changed_settings(before: Config, after: Config) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(name, (old, new)) of what a resumed run changes. Raises ConfigError for what it may not change."""
    old = dict(walk(before))
    for name, value in walk(after):
        if old[name] == value or value is None:  # None: left open, to be filled in
            continue
        if name.startswith(_STRUCTURAL) and not name.startswith("learner.optimizer_"):
            raise ConfigError(name, value, f"cannot change when a run is resumed (it was {old[name]!r})",
                              "Start a new run in another --run-dir.")  # fmt: skip
        if _is_mutable(name, after):
            rule = "was left to the population (population.mutable), and cannot change when a run is resumed"
            raise ConfigError(name, value, rule, "Leave it out: each policy has a value of its own by now.")
        yield name, (old[name], value)


def _is_mutable(name: str, config: Config) -> bool:
    """Whether the population chooses this setting's values."""
    section, _, field = name.partition(".")
    if section != "learner" or config.population.members == 1:
        return False
    return any(fnmatchcase(field, pattern) for pattern in config.population.mutable)
