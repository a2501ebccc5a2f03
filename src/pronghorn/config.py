"""Every setting of a run: frozen dataclasses, validated once, saved in full as config.toml. It starts nothing.

A value comes from, in rising order: the defaults of the kind of environment and of the algorithm, `--preset`,
`--config FILE`, the command line. Fields of type `Auto` are None until `resolve` fills them from the first two,
because they depend on what the environment looks like; everything behind `resolve` sees plain values.
What may change while a run goes on (learning rate, coefficients) is copied into `Hyperparameters`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar

import numpy as np
import tyro

from pronghorn.errors import ConfigError, UsageError
from pronghorn.types import EnvSpec

T = TypeVar("T")
AUTO: Any = None
if TYPE_CHECKING:
    # After `resolve` no field is None; the type checker is told so, the command line sees Optional.
    Auto = Annotated[T, "filled by resolve()"]
else:
    Auto = Optional

_AUTO_HINT = "(default: auto)"
_AUTO_INT = tyro.conf.arg(metavar="INT", help_behavior_hint=_AUTO_HINT)
_AUTO_FLOAT = tyro.conf.arg(metavar="FLOAT", help_behavior_hint=_AUTO_HINT)
_AUTO_BOOL = tyro.conf.arg(metavar="True|False", help_behavior_hint=_AUTO_HINT)
_NO_LIMIT = "(default: no limit)"


def _auto_choice(*names: str) -> Any:
    return tyro.conf.arg(metavar="{" + ",".join(names) + "}", help_behavior_hint=_AUTO_HINT)


@dataclass(frozen=True)
class EnvConfig:
    """Where experience comes from: environments, worker processes, their cores."""

    id: Annotated[str, tyro.conf.Suppress] = ""
    """Name of the environment, or several joined by commas (one policy learns all of them)."""
    workers: Annotated[Auto[int], _AUTO_INT] = AUTO
    """Worker processes (for atari and envpool: threads of the C++ environment)."""
    envs_per_worker: Annotated[Auto[int], _AUTO_INT] = AUTO
    """Environments that each worker steps."""
    groups: Annotated[Auto[int], _AUTO_INT] = AUTO
    """Groups per worker: one group steps while the other waits for actions (double buffering)."""
    args: Annotated[dict[str, str], tyro.conf.arg(metavar="KEY VALUE …")] = field(default_factory=dict)
    """Arguments of the environment, e.g. --env.args frame_skip 2 actions flat. Values are TOML, else text."""
    obs_keys: tuple[str, ...] = ()
    """Keys of a Dict observation to keep; all of them when empty."""
    image_layout: Literal["auto", "hwc", "chw"] = "auto"
    """Where the channels of image observations are; needed only for ambiguous shapes."""
    python: str = ""
    """Path of another Python interpreter that runs the workers (old or conflicting dependencies); empty: this one."""
    pin: Literal["auto", "off"] = "auto"
    """Pin each worker and its engine to one core of this process's affinity mask; off where workers outnumber cores."""
    step_timeout_s: float = 60.0
    """Seconds after which a worker that does not answer is killed and restarted."""
    start_timeout_s: float = 120.0
    """Seconds that the environments may take to be built."""
    restart_budget: int = 10
    """Worker restarts allowed in ten minutes; beyond it the run saves and ends with the worker's own error."""


@dataclass(frozen=True)
class ModelConfig:
    """The network: encoder, recurrent core, heads."""

    conv: Annotated[
        Auto[Literal["convnet_simple", "nature", "impala_shallow", "resnet_impala", "conv_tiny"]],
        _auto_choice("convnet_simple", "nature", "impala_shallow", "resnet_impala", "conv_tiny"),
    ] = AUTO
    """Convolutional encoder of image observations."""
    conv_features: int = 512
    """Units of the fully connected layer after the convolutions."""
    mlp_layers: tuple[int, ...] = (64, 64)
    """Units of each layer that encodes vector observations."""
    core: Annotated[Auto[Literal["none", "gru", "lstm"]], _auto_choice("none", "gru", "lstm")] = AUTO
    """Recurrent core."""
    core_size: int = 512
    """Units of the recurrent core."""
    core_layers: int = 1
    """Layers of the recurrent core."""
    activation: Annotated[Auto[Literal["elu", "relu", "tanh"]], _auto_choice("elu", "relu", "tanh")] = AUTO
    """Nonlinearity of encoders and decoders."""
    last_action: bool = False
    """Feed the last action to the core."""
    last_reward: bool = False
    """Feed the last reward, clipped to [-1, 1], to the core."""
    separate_critic: Annotated[Auto[bool], _AUTO_BOOL] = AUTO
    """Give the value its own encoder and core instead of sharing the policy's."""
    normalize_obs: bool = True
    """Normalise observations by running mean and standard deviation: vectors per entry, images per channel."""
    normalize_returns: bool = True
    """Let the critic predict returns normalised by running mean and standard deviation (PopArt)."""
    continuous: Literal["squashed", "clipped"] = "squashed"
    """Gaussian squashed by tanh into the action bounds, or Gaussian clipped at them."""
    state_dependent_std: bool = False
    """Predict the standard deviation of continuous actions from the state instead of learning one vector."""
    initial_std: float = 1.0
    """Standard deviation of continuous actions at the start (before squashing)."""


@dataclass(frozen=True)
class LearnerConfig:
    """Unrolls, losses and the optimiser."""

    unroll_length: Annotated[Auto[int], _AUTO_INT] = AUTO
    """T: consecutive decisions in an unroll, and the length of backpropagation through time (steps)."""
    batch_unrolls: Annotated[Auto[int], _AUTO_INT] = AUTO
    """B: unrolls per iteration; an iteration trains on T*B samples."""
    epochs: Annotated[Auto[int], _AUTO_INT] = AUTO
    """Passes over each batch."""
    minibatches: Annotated[Auto[int], _AUTO_INT] = AUTO
    """Optimiser steps per pass; each takes B / minibatches whole unrolls, or single steps if the model has no memory
    and targets are made once a batch (several passes, or GAE)."""
    advantage: Annotated[
        Auto[Literal["vtrace", "gae", "one_step", "epsilon", "none"]],
        _auto_choice("vtrace", "gae", "one_step", "epsilon", "none"),
    ] = AUTO
    """Estimator of value targets and advantages. The last three are what IMPALA compares V-trace with: importance
    weights on the advantages only; no correction, but log(pi + 1e-6) in the policy gradient; no correction at all."""
    policy_loss: Annotated[
        Auto[Literal["ppo_clip", "policy_gradient"]], _auto_choice("ppo_clip", "policy_gradient")
    ] = AUTO
    """PPO's clipped surrogate, or the plain policy gradient of A2C and IMPALA."""
    gamma: Annotated[Auto[float], _AUTO_FLOAT] = AUTO
    """Discount per step."""
    lambda_: Annotated[Auto[float], tyro.conf.arg(name="lambda", metavar="FLOAT", help_behavior_hint=_AUTO_HINT)] = AUTO
    """Trace decay of GAE and V-trace."""
    rho_clip: float = 1.0
    """V-trace's clip of the TD errors' importance weights (rho-bar): sets the fixed point."""
    c_clip: float = 1.0
    """V-trace's clip of the traces' importance weights (c-bar): sets the speed."""
    pg_rho_clip: float = 1.0
    """Clip of the importance weight in V-trace's policy-gradient advantage."""
    ppo_clip: Annotated[Auto[float], _AUTO_FLOAT] = AUTO
    """PPO's epsilon: the ratio is clipped to [1 / (1 + epsilon), 1 + epsilon]."""
    value_clip: float = 0.0
    """Largest unpunished change of the value, in normalised return units; 0 switches value clipping off."""
    value_coef: float = 0.5
    """Weight of the value loss, which is half the squared error."""
    exploration: Literal["entropy", "symmetric_kl"] = "entropy"
    """Exploration term: entropy bonus, or symmetric KL divergence to the uniform policy."""
    exploration_coef: Annotated[Auto[float], _AUTO_FLOAT] = AUTO
    """Weight of the exploration term."""
    kl_coef: float = 0.0
    """Weight of the KL divergence of the policy from the one that acted (the sampled estimate)."""
    normalize_advantages: Annotated[Auto[bool], _AUTO_BOOL] = AUTO
    """Shift and scale the advantages to mean 0 and deviation 1: over the batch if they are made once for several
    passes, else over each minibatch."""
    reduction: Annotated[Auto[Literal["mean", "sum"]], _auto_choice("mean", "sum")] = AUTO
    """Mean or sum of the losses over a batch (IMPALA's learning rates belong to the sum)."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before learning; reported returns stay raw."""
    reward_clip: Annotated[Auto[float], _AUTO_FLOAT] = AUTO
    """Scaled rewards are clipped to this absolute value before learning; 0 switches it off."""
    optimizer: Annotated[
        Auto[Literal["adam", "rmsprop", "rmsprop_tf"]], _auto_choice("adam", "rmsprop", "rmsprop_tf")
    ] = AUTO
    """Adam; RMSProp with epsilon outside the root (PyTorch), or inside with accumulators from 1 (TensorFlow)."""
    lr: Annotated[Auto[float], _AUTO_FLOAT] = AUTO
    """Learning rate at the start."""
    lr_schedule: Annotated[
        Auto[Literal["constant", "linear", "kl_adaptive"]], _auto_choice("constant", "linear", "kl_adaptive")
    ] = AUTO
    """Constant, linear to 0 over the run's steps, or adapted to keep the KL divergence near --learner.lr-kl-target."""
    lr_kl_target: float = 0.008
    """KL divergence per iteration that the adaptive learning rate aims at."""
    optimizer_eps: Annotated[Auto[float], _AUTO_FLOAT] = AUTO
    """The optimiser's epsilon."""
    rmsprop_decay: float = 0.99
    """RMSProp's decay of squared gradients."""
    max_grad_norm: Annotated[Auto[float], _AUTO_FLOAT] = AUTO
    """Largest global L2 norm of the gradient; 0 switches clipping off."""
    replay_fraction: float = 0.0
    """Share of each batch that is drawn from the last replay_unrolls unrolls instead of being fresh; 0: none."""
    replay_unrolls: int = 1000
    """Unrolls that the replay keeps, first in, first out (not saved: a resumed run starts with an empty one)."""
    max_skipped: int = 19
    """Optimiser steps in a row that are skipped, and counted, because a loss or gradient was not finite; one more ends
    the run. 0: the first one does."""
    drop_over_lag: bool = False
    """Drop (and count) steps that are older than --max-lag instead of making the learner wait."""

    @property
    def estimates_once(self) -> bool:
        """Whether targets and advantages are made once an iteration, under the weights at its start.

        Over several epochs they must be: made anew in each step, V-trace's clipped traces would shorten as the policy
        leaves the one that acted, and advantages would chase a critic that is being fitted to them. In a single pass
        each sample is used once, so making them in the step is as fresh and saves a forward pass.
        """
        return self.epochs > 1 or (self.advantage == "gae" and self.minibatches != 1)


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and when."""

    every_s: float = 120.0
    """Seconds between checkpoints; 0 switches it off (the end of a run always saves)."""
    every_updates: int = 0
    """Optimiser steps between checkpoints; 0 switches it off. The deterministic modes save by iterations only."""
    keep: int = 2
    """Newest checkpoints to keep."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation while training, in environments and with seeds of its own. It never changes training."""

    every_s: float = 0.0
    """Seconds between evaluations; 0 switches them off."""
    episodes: int = 20
    """Episodes per evaluation."""
    until_return: Annotated[Optional[float], tyro.conf.arg(metavar="FLOAT", help_behavior_hint="(default: off)")] = None  # noqa: UP045
    """Stop the run once the mean return of --eval.episodes evaluation episodes reaches this."""
    max_share: float = 0.15
    """Largest share of wall-clock time that evaluation may take; later evaluations are put off to keep it."""


@dataclass(frozen=True)
class LogConfig:
    """What is written while training. metrics.jsonl always is."""

    every_s: float = 5.0
    """Seconds between lines of metrics.jsonl; 0 writes one per iteration."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases as well (extra: wandb)."""
    live: Literal["auto", "rich", "plain", "off"] = "auto"
    """Progress on the terminal; auto: a live panel on a terminal, plain lines elsewhere."""


@dataclass(frozen=True)
class Config:
    """All settings of one training run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    algo: Literal["appo", "impala", "ppo", "a2c"] = "appo"
    """Algorithm: a set of defaults over one learner (PPO clip + V-trace, IMPALA, PPO, A2C)."""
    max_lag: Annotated[Auto[int], _AUTO_INT] = AUTO
    """Largest policy lag in iterations. 0: take turns, on-policy. 1: overlapped, lag exactly 1. More: free-running."""
    steps: Annotated[Optional[int], tyro.conf.arg(metavar="INT", help_behavior_hint=_NO_LIMIT)] = None  # noqa: UP045
    """Stop after this many steps (decisions) in total, over resumes."""
    frames: Annotated[Optional[int], tyro.conf.arg(metavar="INT", help_behavior_hint=_NO_LIMIT)] = None  # noqa: UP045
    """Stop after this many environment frames (steps times the action repeat) in total, over resumes."""
    minutes: Annotated[Optional[float], tyro.conf.arg(metavar="FLOAT", help_behavior_hint=_NO_LIMIT)] = None  # noqa: UP045
    """Stop this many minutes after the process started."""
    seed: int = 0
    """Seed of everything random: environments, actions, initial weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the networks run."""
    threads: Annotated[Auto[int], _AUTO_INT] = AUTO
    """Threads that learning may use on a CPU; acting beside it uses half of them."""
    deterministic: bool = False
    """Bitwise reproducible on a CPU from the seed; needs --max-lag 0 or 1."""
    run_dir: str = ""
    """Directory of the run; empty: runs/<environment>."""
    preset: str = ""
    """Settings of a paper or of a peer (see `pronghorn train --preset list`)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if isinstance(self.env, str):  # Config(env="doom:basic"): the short form of the API
            object.__setattr__(self, "env", EnvConfig(id=self.env))

    # Derived values (of a resolved config).
    @property
    def env_names(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(name.strip() for name in self.env.id.split(",") if name.strip())

    @property
    def num_envs(self) -> int:
        """Environment instances of the whole run."""
        return self.env.workers * self.env.envs_per_worker

    @property
    def batch_samples(self) -> int:
        """Samples per iteration, T*B."""
        return self.learner.unroll_length * self.learner.batch_unrolls

    @property
    def updates_per_iteration(self) -> int:
        """Optimiser steps per iteration."""
        return self.learner.epochs * self.learner.minibatches

    @property
    def single_steps(self) -> bool:
        """Whether minibatches are drawn step by step. A memory needs whole unrolls, and so do targets that are made
        in the optimiser step. Where neither holds, a few whole unrolls would be a few trajectories: a noisy gradient.
        """
        return self.learner.estimates_once and self.model.core == "none"

    @property
    def run_path(self) -> Path:
        """The run directory."""
        return Path(self.run_dir or "runs/" + "_".join(self.env_names).replace(":", "_").replace("/", "_"))

    def step_limit(self, frame_skip: int) -> int | None:
        """Steps after which the run ends, by --steps and --frames; None: neither is given."""
        by_frames = None if self.frames is None else -(-self.frames // frame_skip)
        limits = [limit for limit in (self.steps, by_frames) if limit is not None]
        return min(limits) if limits else None

    @property
    def fresh_unrolls(self) -> int:
        """Unrolls of a batch that come from the environments, not from replay."""
        return self.learner.batch_unrolls - round(self.learner.batch_unrolls * self.learner.replay_fraction)

    def num_slots(self, num_rows: int) -> int:
        """Slots of the store: one for each row to fill, and one full batch that waits for the learner.

        A batch is copied when it is taken, so it needs no slots while it trains. More slots would only let unrolls
        wait longer, that is get older, when learning is the slower side.
        """
        return num_rows + self.fresh_unrolls


@dataclass(frozen=True)
class Hyperparameters:
    """The few values that schedules and populations change while a run goes on; a new version per change."""

    lr: float
    gamma: float
    lambda_: float
    rho_clip: float
    c_clip: float
    pg_rho_clip: float
    ppo_clip: float
    value_clip: float
    value_coef: float
    exploration_coef: float
    kl_coef: float
    max_grad_norm: float
    version: int = 0

    @staticmethod
    def from_config(config: Config) -> Hyperparameters:
        """The values at the start of a run."""
        names = [f.name for f in dataclasses.fields(Hyperparameters) if f.name != "version"]
        return Hyperparameters(**{name: getattr(config.learner, name) for name in names})


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
    defaults = {"env.workers": available_cores(), "env.envs_per_worker": 16 if pixels else 32}
    config = with_defaults(config, defaults)
    return with_defaults(config, {"env.groups": max(1, min(2, config.env.envs_per_worker))})


def resolve(config: Config, spec: EnvSpec) -> Config:
    """Fill every Auto field from the kind of environment and the algorithm, then validate. Raises ConfigError."""
    tables, kind = _tables(), kind_of(spec)
    kinds = [kind]
    if kind == "vector" and spec.action.num_continuous:
        kinds.append("vector-continuous")
    if _plays_atari(config, kind):
        kinds.append("atari")
    defaults = dict(tables["common"])
    for name in kinds:
        defaults |= tables["kind"][name]
    defaults |= tables["algorithm"][config.algo] | tables["pair"].get(f"{kind}-{config.algo}", {})
    config = with_defaults(resolve_env(config), defaults)
    config = with_defaults(config, {"threads": available_cores()})
    num_rows = config.num_envs * spec.rows_per_env
    if spec.rows_wait and config.max_lag <= 1:
        rule = "must be at least 2 here: rows of this environment may wait (absent agents, next-step auto-reset)"
        raise ConfigError("max_lag", config.max_lag, rule, "Add --max-lag 16, or use a same-step auto-reset.")
    # Taking turns needs whole unrolls of all rows in each batch. Several passes over a batch want a large one; a single
    # optimiser step wants a small one, so that there are many.
    if config.max_lag <= 1 or (kind == "vector" and config.learner.epochs > 1):
        fresh_unrolls = num_rows
    else:
        fresh_unrolls = max(1, num_rows // 4) if kind == "vector" else max(32, num_rows // 2)
    batch_unrolls = round(fresh_unrolls / (1.0 - min(config.learner.replay_fraction, 0.99)))
    config = with_defaults(config, {"learner.batch_unrolls": batch_unrolls})
    validate(config)
    config = with_defaults(config, {"learner.minibatches": _default_minibatches(config, kind)})
    validate_sizes(config, num_rows)
    return config


def _plays_atari(config: Config, kind: str) -> bool:
    """Of EnvPool's tasks with pixels, those of version 5 are the Atari games."""
    names = config.env_names
    through_envpool = kind == "pixels" and any(re.fullmatch(r"envpool:\w+-v5", name) for name in names)
    return through_envpool or any(name.startswith("atari:") for name in names)


def _default_minibatches(config: Config, kind: str) -> int:
    """Few for pixels, whose optimiser steps are dear; else so many that each holds 128 single steps or 4 unrolls."""
    n = config.learner
    total = n.batch_unrolls * n.unroll_length if config.single_steps else n.batch_unrolls
    most = 4 if kind == "pixels" else total // (128 if config.single_steps else 4)
    return max(count for count in range(1, max(1, min(most, total)) + 1) if total % count == 0)


def validate(config: Config) -> None:
    """Check every rule on values that are set; Auto fields that are still None are skipped. Raises ConfigError."""
    c, n, e = config, config.learner, config.env
    if not c.env_names:
        raise UsageError("No environment was named. Example: pronghorn train doom:basic")
    _positive("env.workers", e.workers)
    _positive("env.envs_per_worker", e.envs_per_worker)
    _positive("env.groups", e.groups)
    _positive("env.step_timeout_s", e.step_timeout_s)
    for name in ("conv_features", "core_size", "core_layers", "initial_std"):
        _positive(f"model.{name}", getattr(c.model, name))
    for width in c.model.mlp_layers:
        _positive("model.mlp_layers", width)
    if c.seed < 0:
        raise ConfigError("seed", c.seed, "must not be negative", "Give any whole number from 0 on.")
    for name in ("unroll_length", "batch_unrolls", "epochs", "minibatches", "lr", "reward_scale",
                 "rho_clip", "c_clip", "pg_rho_clip", "ppo_clip", "lr_kl_target"):  # fmt: skip
        _positive(f"learner.{name}", getattr(n, name))
    for name in ("value_clip", "value_coef", "exploration_coef", "kl_coef", "reward_clip", "max_grad_norm"):
        _not_negative(f"learner.{name}", getattr(n, name))
    for name in ("gamma", "lambda_"):
        value = getattr(n, name)
        if value is not None and not 0.0 <= value <= 1.0:
            raise ConfigError(f"learner.{name.strip('_')}", value, "must lie in [0, 1]", "Try 0.99 or 0.95.")
    for name, limit in (("steps", c.steps), ("frames", c.frames), ("minutes", c.minutes), ("threads", c.threads)):
        _positive(name, limit)
    _not_negative("max_lag", c.max_lag, "0 takes turns, 1 overlaps, more runs free.")
    _positive("checkpoint.keep", c.checkpoint.keep)
    _not_negative("checkpoint.every_s", c.checkpoint.every_s)
    _not_negative("checkpoint.every_updates", c.checkpoint.every_updates)
    _positive("eval.episodes", c.eval.episodes)
    _not_negative("log.every_s", c.log.every_s)
    if not 0.0 < c.eval.max_share <= 1.0:
        raise ConfigError("eval.max_share", c.eval.max_share, "must lie in (0, 1]", "Try 0.15.")
    if not 0.0 <= n.replay_fraction < 1.0:
        raise ConfigError("learner.replay_fraction", n.replay_fraction, "must lie in [0, 1)", "Try 0.5.")
    _positive("learner.replay_unrolls", n.replay_unrolls)
    _not_negative("learner.max_skipped", n.max_skipped, "0 ends the run at the first one.")
    if n.replay_fraction and c.deterministic:
        rule = "must be 0 with --deterministic: the replay is not saved, so a resumed run would differ"
        raise ConfigError("learner.replay_fraction", n.replay_fraction, rule, "Drop one of the two.")
    if n.advantage == "epsilon" and n.policy_loss == "ppo_clip":
        rule = "needs learner.policy_loss = policy_gradient, whose log(pi) it changes"
        raise ConfigError("learner.advantage", "epsilon", rule, "Try --algo impala.")
    if e.python and not os.access(e.python, os.X_OK):
        raise ConfigError(
            "env.python", e.python, "must be an executable file", "Give the path of a Python interpreter."
        )
    if c.deterministic and c.max_lag is not None and c.max_lag > 1:
        raise ConfigError("max_lag", c.max_lag, "must be 0 or 1 with --deterministic", "Add --max-lag 1.")


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


def available_cores() -> int:
    """Cores that this process may use: its affinity mask, cut by a cgroup's CPU quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def derive_seed(seed: int, *path: int) -> int:
    """A 31-bit seed for one use, from the run's seed and the numbers that name the use (streams never overlap)."""
    return int(np.random.SeedSequence(entropy=seed, spawn_key=path).generate_state(1)[0] >> 1)


# ---------------------------------------------------------------- dotted names, presets, TOML


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf field."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value


def replace(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy with dotted names set. Raises UsageError for an unknown name, with the nearest one."""
    known = dict(walk(config))
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(f"Unknown setting '{name}'." + (f" Did you mean '{near[0]}'?" if near else ""))
    return _replace(config, values, "")


def _replace(config: Any, values: Mapping[str, Any], prefix: str) -> Any:
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        name, value = prefix + f.name, getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            changes[f.name] = _replace(value, values, name + ".")
        elif name in values:
            changes[f.name] = values[name]
    return dataclasses.replace(config, **changes)


def with_defaults(config: Config, defaults: Mapping[str, Any]) -> Config:
    """Fill the fields that are still None."""
    current = dict(walk(config))
    filled: Config = replace(config, {k: v for k, v in defaults.items() if current.get(k, 0) is None})
    return filled


def apply_preset(config: Config, name: str) -> Config:
    """The config with a preset's values. Raises UsageError for an unknown preset, with the nearest one."""
    known = presets()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UsageError(f"Unknown preset '{name}'.{hint} There are: {', '.join(sorted(known))}.")
    preset: Config = replace(config, known[name] | {"preset": name})
    return preset


# Settings that a resumed run cannot change: its weights would not fit, or would mean something else.
# what the weights depend on, and the algorithm, whose other settings were filled in when the run began
_STRUCTURAL = ("env.id", "env.args", "env.obs_keys", "env.image_layout", "model.", "algo", "learner.optimizer")


def changed_settings(before: Config, after: Config) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(name, (old, new)) of what a resumed run changes. Raises ConfigError for what it may not change."""
    old = dict(walk(before))
    for name, value in walk(after):
        if old[name] == value or value is None:  # None: left open, to be filled in
            continue
        if name.startswith(_STRUCTURAL) and not name.startswith("learner.optimizer_"):
            raise ConfigError(name, value, f"cannot change when a run is resumed (it was {old[name]!r})",
                              "Start a new run in another --run-dir.")  # fmt: skip
        yield name, (old[name], value)


def to_toml(config: Config) -> dict[str, Any]:
    """The nested dictionary that config.toml holds; None (not set) is left out."""
    tree: dict[str, Any] = {}
    for name, value in walk(config):
        if value is None:
            continue
        *groups, leaf = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = list(value) if isinstance(value, tuple) else value
    return tree


def from_toml(path: Path, base: Config | None = None) -> Config:
    """Read a TOML file over `base`. Raises UsageError: unreadable file, unknown key (with the nearest), wrong type."""
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read the configuration {path}: {error}") from error
    base = base or Config()
    hints = _leaf_types(Config)
    values = {name: _convert(name, value, hints, path) for name, value in _flatten(tree, hints)}
    config: Config = replace(base, values)
    return config


def _flatten(tree: Mapping[str, Any], hints: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = prefix + key
        if isinstance(value, dict) and name not in hints:
            yield from _flatten(value, hints, name + ".")
        else:
            yield name, value


def _leaf_types(cls: type, prefix: str = "") -> dict[str, Any]:
    types_: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            types_ |= _leaf_types(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            types_[prefix + name] = hint
    return types_


def _convert(name: str, value: Any, hints: Mapping[str, Any], path: Path) -> Any:
    """Check one TOML value against its field's type; lists become tuples and whole numbers become floats."""
    if name not in hints:
        return value  # `replace` names it
    options = _options(hints[name])
    for option in options:
        origin = typing.get_origin(option)
        if origin is Literal and value in typing.get_args(option):
            return value
        if origin is tuple and isinstance(value, list):
            return tuple(value)
        if origin is dict and isinstance(value, dict):
            return {k: str(v) for k, v in value.items()}
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    wanted = " or ".join(_describe(o) for o in options if o is not type(None))
    raise ConfigError(name, value, f"must be {wanted}", f"It stands in {path}.")


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(o for arg in typing.get_args(hint) for o in _options(arg))
    return (hint,)


def _describe(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(option)))
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(option, str(option))
