"""A trained policy: loaded without executing any code, and asked for actions, one observation or a batch at a time.

policy = pronghorn.load("runs/doom_basic")
action, state = policy.act(obs, state)      # state=None at the start of an episode
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronghorn.config import Config, ModelConfig, derive_seed
from pronghorn.envworker.spaces import action_builder
from pronghorn.errors import CheckpointError, UsageError
from pronghorn.models.actor_critic import ActorCritic
from pronghorn.ops.distributions import to_env
from pronghorn.rules import validate_model
from pronghorn.settings_file import CONFIG_FILE, from_toml
from pronghorn.spec_file import ENV_FILE, load_spec
from pronghorn.training.checkpoint import (
    STATE_FILE,
    Checkpoint,
    load_latest,
    load_snapshot,
    load_weights,
    require_shapes,
)
from pronghorn.types import LAST_ACTION, LAST_REWARD, EnvSpec, LeafSpec
from pronghorn.untrusted import shortened, usable, whole


@dataclass(frozen=True)
class PolicyState:
    """What a policy remembers between decisions of N rows: RNN state [N, S] and the last actions and rewards."""

    core: Tensor
    discrete: Tensor
    continuous: Tensor
    reward: Tensor


class Policy:
    """Acts with fixed weights. Normaliser statistics are frozen; nothing it does changes training."""

    def __init__(
        self, model: ActorCritic, config: Config, spec: EnvSpec, *, checkpoint: str = "", seed: int = 0
    ) -> None:
        self.model, self.config, self.spec, self.checkpoint = model.eval(), config, spec, checkpoint
        self.device = next(model.parameters()).device
        self._build = action_builder(json.loads(spec.action.tree)) if spec.action.tree else None
        self._generator = torch.Generator(self.device).manual_seed(seed)

    @staticmethod
    def from_weights(
        config: Config, spec: EnvSpec, weights: Mapping[str, Tensor], *, device: str = "cpu", checkpoint: str = ""
    ) -> Policy:
        """A policy of a run's settings and weights. Raises CheckpointError if they do not fit."""
        require_fit(config, spec, weights, checkpoint or "the snapshot")
        model = build_model(config.model, spec).to(device)
        load_weights(model, {k: v.to(device) for k, v in weights.items()}, checkpoint or "the snapshot")
        return Policy(model, config, spec, checkpoint=checkpoint)

    def seed(self, seed: int) -> None:
        """Seed the sampling of actions."""
        self._generator.manual_seed(seed)

    def initial_state(self, num_rows: int) -> PolicyState:
        """The state at the start of an episode."""
        action = self.spec.action
        return PolicyState(
            self.model.initial_state(num_rows, self.device),
            torch.full((num_rows, action.num_discrete), -1, dtype=torch.int64, device=self.device),
            torch.zeros((num_rows, action.num_continuous), device=self.device),
            torch.zeros(num_rows, device=self.device),
        )

    def act(
        self, obs: Any, state: PolicyState | None = None, *, reward: Any = 0.0, deterministic: bool = False
    ) -> tuple[Any, PolicyState]:
        """The next action and the state to pass with the next observation.

        obs: one observation in the environment's own form (nested dictionaries and tuples are fine), or a batch of
            them with one more leading dimension. Leaves that only the critic reads may be left out.
        state: None at the start of an episode.  reward: of the last action (for models that are fed it).
        deterministic: the most probable action instead of a sample.
        Raises UsageError: a leaf is missing, has a shape that fits neither one observation nor a batch, or holds a code
            that its space does not.

        The action is in the environment's own form, as `env.step` takes it (for a batch every array of it has a leading
        dimension). For environments without a Gymnasium space (doom) it is an int, or an integer array [D].
        """
        leaves, batched = self._leaves(obs)
        num_rows = len(next(iter(leaves.values())))
        state = state or self.initial_state(num_rows)
        rewards = torch.as_tensor(np.broadcast_to(np.asarray(reward, np.float32), (num_rows,)).copy())
        discrete, continuous, state = self.step(leaves, state, rewards, None, deterministic=deterministic)
        return self._native(discrete, continuous, batched), state

    @torch.inference_mode()
    def step(
        self,
        obs: Mapping[str, NDArray[Any]],
        state: PolicyState,
        rewards: Tensor,
        first: NDArray[np.bool_] | None,
        *,
        deterministic: bool = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], PolicyState]:
        """Act on flat leaves [N, …]: discrete [N, D], continuous [N, C] within bounds, and the next state.

        first: [N] rows whose episode begins here; None when none does.
        """
        leaves = {k: torch.from_numpy(np.ascontiguousarray(v)).to(self.device) for k, v in obs.items()}
        num_rows = state.core.shape[0]
        begins = torch.zeros(num_rows, dtype=torch.bool) if first is None else torch.from_numpy(first)
        begins = begins.to(self.device)
        fresh = self.initial_state(num_rows)
        last_discrete = torch.where(begins[:, None], fresh.discrete, state.discrete)
        last_continuous = torch.where(begins[:, None], fresh.continuous, state.continuous)
        rewards = torch.where(begins, fresh.reward, rewards.to(self.device))
        if self.config.model.last_action:
            leaves |= {LAST_ACTION: last_discrete} if self.spec.action.num_discrete else {}
            leaves |= {LAST_ACTION + "_continuous": last_continuous} if self.spec.action.num_continuous else {}
        if self.config.model.last_reward:
            leaves[LAST_REWARD] = rewards
        out = self.model({k: v.unsqueeze(0) for k, v in leaves.items()}, state.core, begins.unsqueeze(0))
        distribution = self.model.distribution(out.params[0], leaves)
        discrete, continuous = distribution.mode() if deterministic else distribution.sample(self._generator)
        bounded = to_env(continuous, self.spec.action, self.model.continuous)
        return discrete.cpu().numpy(), bounded.cpu().numpy(), PolicyState(out.state, discrete, continuous, rewards)

    def _leaves(self, obs: Any) -> tuple[dict[str, NDArray[Any]], bool]:
        """Flat leaves [N, …] of one observation or a batch, and whether it was a batch."""
        found = dict(_flatten(obs)) if isinstance(obs, Mapping | tuple) else {"obs": obs}
        leaves: dict[str, NDArray[Any]] = {}
        batched: bool | None = None
        for name, leaf in self.spec.observation.items():
            if name not in found:
                if name in self.model.critic_only:
                    continue
                needed = [name for name in self.spec.observation if name not in self.model.critic_only]
                raise UsageError(f"The observation lacks '{name}'. This policy needs: {', '.join(needed)}.")
            value = np.asarray(found[name]).astype(leaf.dtype)
            if leaf.kind == "image" and value.shape[-2:] == leaf.shape[:2] and leaf.shape[2] == 1:
                value = value[..., None]  # a grey image without its channel axis
            if leaf.start:
                value = value - np.array(leaf.start).reshape(leaf.shape)
            if value.shape not in (leaf.shape, value.shape[:1] + leaf.shape):
                raise UsageError(
                    f"Observation '{name}' has shape {value.shape}; one is {leaf.shape}, a batch (N, *{leaf.shape})."
                )
            if leaf.kind == "discrete":
                _require_codes(name, leaf, value)
            batched = value.shape != leaf.shape
            leaves[name] = value if batched else value[None]
        num_rows = len(next(iter(leaves.values())))
        for name in self.model.critic_only:  # whose value is not asked for here
            leaf = self.spec.observation[name]
            leaves.setdefault(name, np.zeros((num_rows, *leaf.shape), leaf.dtype))
        return leaves, bool(batched)

    def _native(self, discrete: NDArray[np.int64], continuous: NDArray[np.float32], batched: bool) -> Any:
        if not batched:
            discrete, continuous = discrete[0], continuous[0]
        action = self.spec.action
        if self._build is not None:
            native = self._build(discrete, continuous)
            return int(native) if isinstance(native, np.integer) else native
        if action.num_continuous and action.num_discrete:
            return discrete, continuous
        if action.num_continuous:
            return continuous
        if action.num_discrete > 1:
            return discrete
        return discrete[..., 0] if batched else int(discrete[0])


class Policies:
    """The policies of a run whose agents have unlike spaces: each plays the agents of one signature, all in one game.

    spec: of all (`EnvSpec.signatures` says who plays whom).
    """

    def __init__(self, policies: Sequence[Policy], spec: EnvSpec, *, checkpoint: str = "") -> None:
        """policies: one for each signature, in their order."""
        self.policies, self.spec, self.checkpoint = list(policies), spec, checkpoint
        self.config = self.policies[0].config

    def seed(self, seed: int) -> None:
        """Seed the sampling of actions."""
        for number, policy in enumerate(self.policies):
            policy.seed(derive_seed(seed, number))


def from_weights(
    config: Config, spec: EnvSpec, weights: Sequence[Mapping[str, Tensor]], *, device: str = "cpu", checkpoint: str = ""
) -> Policy | Policies:
    """Who plays the whole game with these weights: of one policy, or of one for each signature.

    Raises CheckpointError if they do not fit.
    """
    if not spec.signatures:
        return Policy.from_weights(config, spec, weights[0], device=device, checkpoint=checkpoint)
    require_number(spec, len(weights), checkpoint or "the snapshot")
    policies = [
        Policy.from_weights(config, spec.of(number), one, device=device, checkpoint=f"{checkpoint}:{number}")
        for number, one in enumerate(weights)
    ]
    return Policies(policies, spec, checkpoint=checkpoint)


def require_fit(config: Config, spec: EnvSpec, weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights of another network, before any memory is taken for the one that the settings describe.

    Raises CheckpointError.
    """
    why = f"{where} does not fit the model that {CONFIG_FILE} and {ENV_FILE} beside it describe"
    if config.model.core_layers > len(weights) or len(config.model.mlp_layers) > len(weights):
        raise CheckpointError(f"{why}: it has fewer tensors than that has layers.")
    try:
        with torch.device("meta"):  # shapes only
            model = build_model(config.model, spec)
    except Exception as error:
        raise CheckpointError(f"{why}, since none can be built: {shortened(str(error))}") from error
    require_shapes(model, weights, where)


def require_number(spec: EnvSpec, count: int, where: str) -> None:
    """Refuse so many saved policies where there must be one for each signature. Raises CheckpointError."""
    if count != len(spec.signatures):
        raise CheckpointError(
            f"{where} has policies: {count}. The agents of {spec.name} need {len(spec.signatures)}, one for each pair "
            "of observation and action space. It was saved with other agents."
        )


def load(
    run_dir: str | Path, *, best: bool = False, device: str = "cpu", policy: int | None = None, snapshot: str = ""
) -> Policy:
    """The policy of a run's newest (or best evaluated) checkpoint. Reads no pickle and executes no code of the run.

    policy: which of a population; None: the one that was best by its objective when the checkpoint was saved. Of a run
        with a policy for each kind of agents (`env.policies` by_spaces), the one for these; it must be given.
    snapshot: instead, a frozen policy of self-play by its name, as "0@1000000".
    Raises CheckpointError: no run, no checkpoint, or one that is damaged, does not fit or holds no such policy;
        UsageError: a policy has to be named.
    """
    run_dir = Path(run_dir)
    config, spec = _load_config(run_dir), load_spec(run_dir)
    if spec.signatures and policy is None and not snapshot:
        raise UsageError(f"{run_dir} has a policy for each kind of agents: {who_plays(spec)}. Say which: policy=0.")
    saved = load_checkpoint(run_dir, best=best)
    weights, name = _chosen(saved, policy, snapshot)
    if spec.signatures and policy is not None:
        require_number(spec, len(saved.policies), str(saved.path))
        spec = spec.of(policy)
    return Policy.from_weights(config, spec, weights, device=device, checkpoint=f"{saved.path}{name}")


def who_plays(spec: EnvSpec) -> str:
    """Which agents each policy of a run plays: '0 plays a, c; 1 plays b'."""
    agents = [", ".join(spec.agents[row] for row in signature.rows) for signature in spec.signatures]
    return "; ".join(f"{number} plays {names}" for number, names in enumerate(agents))


def _load_config(run_dir: Path) -> Config:
    path = run_dir / CONFIG_FILE
    if not path.exists():
        raise CheckpointError(
            f"{run_dir} is not a run directory: it has no {CONFIG_FILE}. Give the --run-dir of a training run."
        )
    config = from_toml(path)
    with usable(path):
        validate_model(config)
    return config


def split_run(text: str) -> tuple[Path, str]:
    """A run directory, and which of its policies: "" or ":1" (of a population) or ":0@1000000" (a snapshot)."""
    found = re.fullmatch(r"(?P<run>.+?)(?P<part>:\d+(@\d+)?)?", text, re.DOTALL)
    return (Path(found["run"]), found["part"] or "") if found else (Path(text), "")


def load_named(text: str, *, best: bool = False, device: str = "cpu") -> Policy | Policies:
    """Who plays the whole game under the name RUN, RUN:1 or RUN:0@1000000 (see `load` and `split_run`).

    Raises CheckpointError; UsageError for a policy that plays some of the agents only.
    """
    run_dir, part = split_run(text)
    which, config = part.removeprefix(":"), _load_config(run_dir)
    spec = load_spec(run_dir)
    if spec.signatures:
        if which:
            why = f"{text} plays some of the agents only ({who_plays(spec)})"
            raise UsageError(f"{why}. Name the run, in which all play together: {run_dir}.")
        saved = load_checkpoint(run_dir, best=best)
        weights = [policy.weights for policy in saved.policies]
        return from_weights(config, spec, weights, device=device, checkpoint=str(saved.path))
    if "@" in which:
        return load(run_dir, best=best, device=device, snapshot=which)
    return load(run_dir, best=best, device=device, policy=int(which) if which else None)


def _chosen(saved: Checkpoint, policy: int | None, snapshot: str) -> tuple[Mapping[str, Tensor], str]:
    """Weights of the policy that is asked for, and what is added to the checkpoint's name for it."""
    if snapshot and policy is not None:
        raise UsageError(f"policy = {policy} and snapshot = {snapshot!r} name two policies. Give one of them.")
    if snapshot:
        return load_snapshot(saved.path, snapshot), f":{snapshot}"
    policies = saved.policies
    if policy is None:
        with usable(saved.path / STATE_FILE):
            policy = whole(saved.state.get("leader", 0))
    if not 0 <= policy < len(policies):
        raise CheckpointError(f"{saved.path} holds no policy {policy}: it has 0 to {len(policies) - 1}.")
    return policies[policy].weights, f":{policy}" if len(policies) > 1 else ""


def load_checkpoint(run_dir: Path, *, best: bool = False) -> Checkpoint:
    """The newest or the best checkpoint of a run. Raises CheckpointError."""
    if best and not (run_dir / "best").is_dir():
        raise CheckpointError(
            f"{run_dir} has no best checkpoint, as it was not evaluated while it trained. Leave --best out, "
            "or train with --eval.every-s 300."
        )
    return load_latest(run_dir / ("best" if best else "checkpoints"), warn=lambda text: print(text, file=sys.stderr))


def build_model(settings: ModelConfig, spec: EnvSpec) -> ActorCritic:
    """The network that the settings describe, freshly initialised from torch's global generator."""
    return ActorCritic(
        spec=spec,
        conv=settings.conv,
        conv_features=settings.conv_features,
        mlp_layers=settings.mlp_layers,
        core=settings.core,
        core_size=settings.core_size,
        core_layers=settings.core_layers,
        activation=settings.activation,
        normalize_obs=settings.normalize_obs,
        normalize_returns=settings.normalize_returns,
        last_action=settings.last_action,
        last_reward=settings.last_reward,
        separate_critic=settings.separate_critic,
        critic_only=settings.critic_only,
        continuous=settings.continuous,
        state_dependent_std=settings.state_dependent_std,
        initial_std=settings.initial_std,
    )


def make_actor(config: Config, spec: EnvSpec, device: torch.device) -> ActorCritic:
    """The network of a resolved config that acts, in the precision of training."""
    actor = build_model(config.model, spec).to(device)
    if config.precision == "bfloat16":
        actor.cast_trunk(torch.bfloat16)
    return actor


def _require_codes(name: str, leaf: LeafSpec, value: NDArray[Any]) -> None:
    """Refuse values, from which `start` was subtracted, that are not in [0, n) of their entry. Raises UsageError."""
    sizes = np.array(leaf.n).reshape(leaf.shape)
    wrong = np.argwhere((value < 0) | (value >= sizes))
    if len(wrong):
        where = tuple(wrong[0])
        entry = where[len(where) - len(leaf.shape) :]  # without the row of a batch
        start = int(np.array(leaf.start).reshape(leaf.shape)[entry]) if leaf.start else 0
        at = f" at {list(map(int, entry))}" if entry else ""
        top = start + int(sizes[entry]) - 1
        raise UsageError(f"Observation '{name}'{at} is {int(value[where]) + start}; its space holds {start} ... {top}.")


def _flatten(obs: Any, prefix: str = "") -> Any:
    items = obs.items() if isinstance(obs, Mapping) else enumerate(obs)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, Mapping | tuple):
            yield from _flatten(value, name + "/")
        else:
            yield name, value
