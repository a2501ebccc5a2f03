"""The one network: encoders, a recurrent core, a policy head and a value head. It samples no action, has no loss.

Acting (T = 1) and learning (T = unroll length) run the same `forward`, so that both compute the same policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from pronghorn.errors import SpaceError, UsageError
from pronghorn.models.cores import Core, CoreKind, make_core
from pronghorn.models.encoders import (
    LAST_ACTION_CONTINUOUS,
    Activation,
    ConvName,
    EncoderKind,
    LastStepInput,
    MLPEncoder,
    ObservationEncoder,
    VectorInput,
    split_leaves,
)
from pronghorn.ops.distributions import ActionDistribution, ContinuousKind, num_params
from pronghorn.ops.losses import alone
from pronghorn.ops.normalization import ReturnNorm
from pronghorn.types import ACTION_MASK, LAST_ACTION, LAST_REWARD, EnvSpec, LeafSpec

HIDDEN_GAIN = math.sqrt(2.0)  # of the orthogonal initialisation of every layer but the heads


class ModelOutput(NamedTuple):
    """What the network says about T * B decisions.

    params: [T, B, P] of `ActionDistribution`.  values: [T, B], in normalised units when returns are normalised
    (`ActorCritic.denormalize_value`).  state: [B, S] after the last step. All float32.
    """

    params: Tensor
    values: Tensor
    state: Tensor


class Trunk(nn.Module):
    """Encoder, core and decoder: everything below one head or below both."""

    def __init__(self, encoder: ObservationEncoder, extra_size: int, core: Core, decoder: MLPEncoder) -> None:
        super().__init__()
        self.encoder, self.core, self.decoder = encoder, core, decoder
        self.extra_size = extra_size

    def forward(
        self, obs: Mapping[str, Tensor], vector: Tensor | None, extra: Tensor | None, state: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Leaves [T*B, ...], state [B, S] and first [T, B] -> features [T, B, O] in float32, and the state."""
        x = self.encoder(obs, vector)
        if extra is not None:
            x = torch.cat((x, extra), 1)
        y, state = self.core(x.view(*first.shape, x.shape[1]), state, first)  # [T*B, F] -> [T, B, F]
        # autocast ends here: the rest is small, and the log-probs of actor and learner must agree
        with torch.autocast(y.device.type, enabled=False):
            return self.decoder(y.float()), state


class ActorCritic(nn.Module):
    """Policy and value of an environment, from observations, the recurrent state and the starts of episodes.

    spec: what the environment looks like.
    encoder: "auto" sends images through convolutions and the rest through an MLP; "mlp" flattens images too.
    conv, conv_features: convolutions of images with sides of at least 36 pixels (smaller ones get "conv_tiny",
        unless it is "grid_codes": small grids of bytes that name things), and the width of the layer behind them.
    mlp_layers: widths of the MLP of all other leaves.
    core, core_size, core_layers: the memory.  decoder_layers: widths between core and heads.
    normalize_obs: real-valued leaves per entry, and images per channel, by running moments.
    normalize_returns: the critic learns returns of mean 0 and deviation 1 (PopArt).
    last_action, last_reward: fed to the core; their leaves must then be in `obs` (see `LastStepInput`).
    separate_critic: a trunk of its own for the value, so that its errors do not move the policy's features.
    critic_only: leaves that only this trunk reads, the policy's does not; a name covers the leaves below it, too.
    continuous: how Gaussian samples meet the bounds of actions.
    state_dependent_std: the policy head gives the log-std too; else it is one free vector.
    initial_std: of the Gaussians, in units of u.  policy_init_gain: small, so that the first policy is nearly
        uniform.  init: "orthogonal" or "torch".
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        encoder: EncoderKind = "auto",
        conv: ConvName = "convnet_simple",
        conv_features: int = 512,
        mlp_layers: Sequence[int] = (64, 64),
        core: CoreKind = "gru",
        core_size: int = 512,
        core_layers: int = 1,
        decoder_layers: Sequence[int] = (),
        activation: Activation = "elu",
        normalize_obs: bool = True,
        normalize_returns: bool = True,
        last_action: bool = False,
        last_reward: bool = False,
        separate_critic: bool = False,
        critic_only: Sequence[str] = (),
        continuous: ContinuousKind = "squashed",
        state_dependent_std: bool = False,
        initial_std: float = 1.0,
        policy_init_gain: float = 0.01,
        init: Literal["orthogonal", "torch"] = "orthogonal",
    ) -> None:
        super().__init__()
        self.spec, self.continuous = spec, continuous
        self.mask_leaf = _find_mask(spec)
        others = _step_leaves(spec, last_action, last_reward)
        self.critic_only = _critic_leaves(spec, critic_only, separate_critic)
        images, vectors = split_leaves(spec.observation, encoder, (*others, ACTION_MASK, *self.critic_only))
        own = {name: spec.observation[name] for name in self.critic_only}
        own_images, own_vectors = split_leaves(own, encoder, (*others, ACTION_MASK)) if own else ({}, {})
        self.leaves = (*images, *own_images, *vectors, *own_vectors, *others)  # what a forward pass reads
        self.vector = VectorInput(vectors, normalize_obs)
        self.critic_vector = VectorInput(own_vectors, normalize_obs)  # beside `vector`, what only the critic reads
        self.last_step = LastStepInput(spec.action, last_action, last_reward)

        def make_trunk(images: Mapping[str, LeafSpec], vector_size: int) -> Trunk:
            net = ObservationEncoder(
                images, vector_size, conv=conv, conv_features=conv_features,
                mlp_layers=mlp_layers, activation=activation, normalize=normalize_obs,
            )  # fmt: skip
            extra_size = self.last_step.output_size
            memory = make_core(core, net.output_size + extra_size, core_size, core_layers)
            return Trunk(net, extra_size, memory, MLPEncoder(memory.output_size, decoder_layers, activation))

        self.actor = make_trunk(images, self.vector.output_size)
        both = self.vector.output_size + self.critic_vector.output_size
        self.critic = make_trunk({**images, **own_images}, both) if separate_critic else None
        features = self.actor.decoder.output_size
        self.policy_head = nn.Linear(features, num_params(spec.action, state_dependent_std))
        self.value_head = nn.Linear((self.critic or self.actor).decoder.output_size, 1)
        fixed_std = spec.action.num_continuous > 0 and not state_dependent_std
        self.log_std = nn.Parameter(torch.empty(spec.action.num_continuous)) if fixed_std else None
        self.return_norm = ReturnNorm() if normalize_returns else None
        self._initialize(init, policy_init_gain, initial_std)

    @property
    def state_size(self) -> int:
        """S: entries of the recurrent state of one row; 0 without memory."""
        return sum(trunk.core.state_size for trunk in (self.actor, self.critic) if trunk is not None)

    @property
    def num_parameters(self) -> int:
        """Trainable numbers."""
        return sum(parameter.numel() for parameter in self.parameters())

    def critic_parameters(self) -> list[nn.Parameter]:
        """What only the value depends on: its head, and its own encoder and core if it has them."""
        own = [] if self.critic is None else list(self.critic.parameters())
        return [*own, *self.value_head.parameters()]

    def initial_state(self, batch_size: int, device: torch.device | str | None = None) -> Tensor:
        """The state at an episode's start: zeros, float32 [batch_size, S]."""
        return torch.zeros(batch_size, self.state_size, device=device)

    def forward(self, obs: Mapping[str, Tensor], state: Tensor, first: Tensor) -> ModelOutput:
        """Policy and value at T * B decisions.

        obs: leaves [T, B, ...] as stored.  state: [B, S] before the first step.
        first: bool [T, B], true where an episode starts: the state is zeroed before that step.
        """
        flat = {name: obs[name].flatten(0, 1) for name in self.leaves}  # [T*B, ...]
        vector = self.vector(flat) if self.vector.output_size else None
        extra = self.last_step(flat) if self.last_step.output_size else None
        if self.critic is None:
            features, state = self.actor(flat, vector, extra, state, first)
            return self._heads(features, features, state)
        own, critics = torch.chunk(state, 2, -1) if self.state_size else (state, state)
        features, own = self.actor(flat, vector, extra, own, first)
        value_features, critics = self.critic(flat, self._critics(flat, vector), extra, critics, first)
        return self._heads(features, value_features, torch.cat((own, critics), -1))

    def distribution(self, params: Tensor, obs: Mapping[str, Tensor]) -> ActionDistribution:
        """The policy of `params` [..., P], restricted by the mask among the leaves `obs` [..., ...]."""
        mask = None if self.mask_leaf is None else obs[self.mask_leaf]
        if mask is not None:
            mask = mask.reshape(*params.shape[:-1], self.spec.action.num_logits).bool()
        return ActionDistribution(params, self.spec.action, mask, self.continuous)

    def denormalize_value(self, values: Tensor) -> Tensor:
        """Values as `forward` gives them, in raw return units."""
        return values if self.return_norm is None else self.return_norm.denormalize(values)

    def normalize_value(self, returns: Tensor) -> Tensor:
        """Raw returns in the units of `forward`'s values."""
        return returns if self.return_norm is None else self.return_norm.normalize(returns)

    def update_return_norm(
        self, targets: Tensor, weights: Tensor | None = None, over_all: Callable[[Tensor], Tensor] = alone
    ) -> None:
        """Take raw targets [T, B] into the moments; what the critic says in raw units does not change.

        over_all: sums over one learner's batch to those over all learners'.
        """
        if self.return_norm is not None:
            self.return_norm.update(targets, weights, self.value_head, over_all)

    def update_obs_norm(
        self, obs: Mapping[str, Tensor], weights: Tensor | None = None, over_all: Callable[[Tensor], Tensor] = alone
    ) -> None:
        """Take observations [T, B, ...] into the running moments; weights [T, B] count them (None: all)."""
        for vector in (self.vector, self.critic_vector):
            flat = {name: obs[name].flatten(0, 1) for name in vector.real}
            vector.update(flat, None if weights is None else weights.flatten(), over_all)
        for trunk in (self.actor, self.critic):
            if trunk is not None:
                images = {name: obs[name].flatten(0, 1) for name in trunk.encoder.images}
                trunk.encoder.update_norm(images, over_all)

    def cast_trunk(self, dtype: torch.dtype) -> None:
        """Encoders and cores to `dtype` in place (bfloat16 for an acting copy); heads and statistics stay."""
        for trunk in (self.actor, self.critic):
            if trunk is not None:
                for parameter in (*trunk.encoder.parameters(), *trunk.core.parameters()):
                    parameter.data = parameter.data.to(dtype)

    def _critics(self, flat: Mapping[str, Tensor], vector: Tensor | None) -> Tensor | None:
        """The vector that the critic reads: the policy's, and behind it what only the critic may see."""
        if not self.critic_vector.output_size:
            return vector
        own: Tensor = self.critic_vector(flat)
        return own if vector is None else torch.cat((vector, own), 1)

    def _heads(self, features: Tensor, value_features: Tensor, state: Tensor) -> ModelOutput:
        with torch.autocast(features.device.type, enabled=False):
            params = self.policy_head(features)  # [T, B, P] or, without the log-std, [T, B, P - C]
            values = self.value_head(value_features).squeeze(-1)  # [T, B]
        if self.log_std is not None:
            params = torch.cat((params, self.log_std.expand(*params.shape[:-1], -1)), -1)
        return ModelOutput(params, values, state)

    @torch.no_grad()
    def _initialize(self, init: Literal["orthogonal", "torch"], policy_gain: float, initial_std: float) -> None:
        if init == "orthogonal":
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Conv2d):
                    _orthogonal(module, HIDDEN_GAIN)
                elif isinstance(module, nn.RNNBase):
                    _orthogonal_gates(module)
            _orthogonal(self.value_head, 1.0)
        _orthogonal(self.policy_head, policy_gain)
        if self.log_std is not None:
            self.log_std.fill_(math.log(initial_std))
        elif self.spec.action.num_continuous:
            self.policy_head.bias[-self.spec.action.num_continuous :] = math.log(initial_std)


def _orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Saxe et al. 2014; the bias to 0."""
    # through a plain copy: orthogonal_ cannot write to channels-last memory
    layer.weight.copy_(nn.init.orthogonal_(torch.empty(layer.weight.shape), gain))
    if layer.bias is not None:
        layer.bias.zero_()


def _orthogonal_gates(rnn: nn.RNNBase) -> None:
    """The matrices of each gate orthogonal, the biases 0: what a state holds is neither swollen nor worn away.

    A task that needs a cue of a few steps before took fewer samples than with torch's own (docs/performance.md).
    """
    for name, parameter in rnn.named_parameters():
        if name.startswith("weight"):
            for gate in torch.split(parameter, rnn.hidden_size):
                gate.copy_(nn.init.orthogonal_(torch.empty(gate.shape)))
        else:
            parameter.zero_()


def _find_mask(spec: EnvSpec) -> str | None:
    """The name of the leaf that says which discrete actions are allowed."""
    masks = [name for name, leaf in spec.observation.items() if leaf.kind == "mask" or name == ACTION_MASK]
    if not masks:
        return None
    leaf: LeafSpec = spec.observation[masks[0]]
    if len(masks) > 1 or math.prod(leaf.shape) != spec.action.num_logits:
        raise SpaceError(
            f"Action masks {masks} (the first of shape {leaf.shape}): there must be one mask with one entry for "
            f"each value of each discrete action, {spec.action.num_logits} here. Change the environment's mask."
        )
    return masks[0]


def _critic_leaves(spec: EnvSpec, names: Sequence[str], separate_critic: bool) -> tuple[str, ...]:
    """The leaves that only the critic reads. Raises UsageError if it shares its trunk, or for a name of no leaf."""
    if names and not separate_critic:
        raise UsageError(f"critic_only = {names} needs separate_critic = True: a shared trunk reads for both.")
    if unknown := [name for name in names if not spec.leaves_of([name])]:
        raise UsageError(f"critic_only names {unknown}; the observation has {', '.join(spec.observation)}.")
    return spec.leaves_of(names)


def _step_leaves(spec: EnvSpec, last_action: bool, last_reward: bool) -> tuple[str, ...]:
    """Names of the leaves of the last action and reward that the core reads."""
    names = []
    if last_action and spec.action.num_discrete:
        names.append(LAST_ACTION)
    if last_action and spec.action.num_continuous:
        names.append(LAST_ACTION_CONTINUOUS)
    return (*names, LAST_REWARD) if last_reward else tuple(names)
