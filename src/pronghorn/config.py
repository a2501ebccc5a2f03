"""Every setting of a run, as frozen dataclasses. It fills, checks and reads nothing: defaults.py, rules.py and
settings_file.py do.

A value comes from, in rising order: the defaults of the kind of environment and of the algorithm, `--preset`,
`--config FILE`, the command line. Fields of type `Auto` are None until `resolve` fills them from the first two,
because they depend on what the environment looks like; everything behind `resolve` sees plain values.
What may change while a run goes on (learning rate, coefficients) is copied into `Hyperparameters`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar

import numpy as np
import tyro

from pronghorn.config_cluster import ClusterConfig
from pronghorn.config_population import PopulationConfig, SelfPlayConfig
from pronghorn.errors import UsageError

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
    vector_rows: Annotated[Auto[int], _AUTO_INT] = AUTO
    """Rows that each environment steps as one, for gym tasks with a vector entry point; 0: an environment for each row.
    Its rows wait for their resets, so it needs --max-lag 2 or more."""
    args: Annotated[dict[str, str], tyro.conf.arg(metavar="KEY VALUE …")] = field(default_factory=dict)
    """Arguments of the environment, e.g. --env.args frame_skip 2 actions flat. Values are TOML, else text."""
    obs_keys: tuple[str, ...] = ()
    """Keys of a Dict observation to keep; all of them when empty."""
    image_layout: Literal["auto", "hwc", "chw"] = "auto"
    """Where the channels of image observations are; needed only for ambiguous shapes."""
    pad_spaces: bool = False
    """Of agents whose spaces differ: pad shorter vector observations and mask the discrete actions that an agent lacks,
    so that one policy plays all. Off: such environments are refused, unless each kind of agents has a policy of its
    own (--env.policies by_spaces)."""
    policies: Literal["shared", "by_spaces"] = "shared"
    """Of a game of several agents. shared: one policy plays all. by_spaces: a policy of its own for each distinct pair
    of observation and action space among them, whose network sees just these."""
    team_reward: Literal["none", "sum", "mean"] = "none"
    """Give each agent the sum or the mean of what all agents in the game got at a step, instead of its own reward."""
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
        Auto[Literal["convnet_simple", "nature", "impala_shallow", "resnet_impala", "conv_tiny", "grid_codes"]],
        _auto_choice("convnet_simple", "nature", "impala_shallow", "resnet_impala", "conv_tiny", "grid_codes"),
    ] = AUTO
    """Convolutional encoder of image observations; grid_codes: small grids of bytes that name things."""
    conv_features: Annotated[Auto[int], _AUTO_INT] = AUTO
    """Units of the fully connected layer after the convolutions."""
    mlp_layers: tuple[int, ...] = (64, 64)
    """Units of each layer that encodes vector observations."""
    core: Annotated[Auto[Literal["none", "gru", "lstm"]], _auto_choice("none", "gru", "lstm")] = AUTO
    """Recurrent core."""
    core_size: Annotated[Auto[int], _AUTO_INT] = AUTO
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
    critic_only: tuple[str, ...] = ()
    """Observation leaves that only the value reads and the policy never sees, such as the whole state of a game; a name
    covers the leaves below it. Needs --model.separate-critic."""
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
    """B: unrolls per iteration; an iteration trains on T*B samples. Several learners (torchrun) share them equally."""
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
    passes, else over each minibatch. Off: they are in the critic's units, so divided by the deviation of returns if
    those are normalised. A batch must be large for it: in a small one that holds no success or failure, noise gets
    the size that they have in others."""
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
    critic_lr_scale: Annotated[Auto[float], _AUTO_FLOAT] = AUTO
    """Learning rate of what only the value depends on (its own network, or its head), as a multiple of lr. In one pass
    over the data a critic learns too little to judge a policy that moves as fast."""
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
    """Optimiser steps in a row that are skipped, and counted, because a loss or gradient was not finite; with one more
    the policy goes back to the last checkpoint. 0: with the first one."""
    max_rollbacks: int = 3
    """Times that a policy goes back to one and the same checkpoint; one more ends the run, and so does the first where
    nothing was saved yet. 0: never goes back."""
    peers_timeout_s: float = 240.0
    """Of several learners (torchrun): seconds that one waits for another, which may be saving, before the run ends with
    an error that names who is missing."""
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
    precision: Annotated[Auto[Literal["float32", "bfloat16"]], _auto_choice("float32", "bfloat16")] = AUTO
    """Arithmetic of encoders and memories; weights, heads and losses are always float32. auto: bfloat16 for images,
    where the processor or the GPU has instructions for it."""
    threads: Annotated[Auto[int], _AUTO_INT] = AUTO
    """Threads that learning may use on a CPU; acting beside it uses half of them. With a GPU they only copy."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """CUDA graphs of acting and of optimiser steps on a GPU, which start hundreds of operations as one. auto: single
    operations instead, with a warning, where a graph cannot be made or gives other results; on: that is an error."""
    stall_timeout_s: float = 300.0
    """Seconds that one piece of work of a thread (an optimiser step, a save) may take; then the run saves and ends with
    an error that shows who waits for whom. Environments have --env.step-timeout-s. 0: it is only told."""
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
    selfplay: SelfPlayConfig = field(default_factory=SelfPlayConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
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
        return self.num_actors * self.env.workers * self.env.envs_per_worker

    @property
    def num_actors(self) -> int:
        """Processes that step environments and act in them: this one, or remote actors."""
        return self.cluster.actors if self.cluster.address else 1

    @property
    def batch_samples(self) -> int:
        """Samples per iteration, T*B."""
        return self.learner.unroll_length * self.learner.batch_unrolls

    @property
    def acting_threads(self) -> int:
        """Threads that acting may use on a CPU. Learning, which sets the pace there, gets all of them; acting beside it
        is a few rows at a time and gains less.
        """
        return self.threads if self.max_lag == 0 else max(1, self.threads // 2)

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
        wait longer, that is get older, when learning is the slower side. Remote actors have as many as each may have in
        flight.
        """
        if self.cluster.address and self.cluster.inference == "actor":
            num_rows = self.num_actors * self.cluster.unrolls_per_actor(num_rows // self.num_actors)
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
    optimizer_eps: float
    epochs: int
    version: int = 0

    @staticmethod
    def from_config(config: Config) -> Hyperparameters:
        """The values at the start of a run."""
        names = [f.name for f in dataclasses.fields(Hyperparameters) if f.name != "version"]
        return Hyperparameters(**{name: getattr(config.learner, name) for name in names})


def derive_seed(seed: int, *path: int) -> int:
    """A 31-bit seed for one use, from the run's seed and the numbers that name the use (streams never overlap)."""
    return int(np.random.SeedSequence(entropy=seed, spawn_key=path).generate_state(1)[0] >> 1)


# ---------------------------------------------------------------- dotted names


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
