"""The distribution of composite actions: D discrete factors and C continuous dimensions. It holds no network.

Parameters are one tensor [..., P], P = num_logits + 2 C: the logits of each discrete factor in order, then the
C means, then the C log standard deviations. Everything is computed in float32, whatever dtype they come in.

torch.distributions is not used: its validation and wrappers cost more than the arithmetic in the acting loop.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from pronghorn.types import ActionSpec

ContinuousKind = Literal["squashed", "clipped"]

LOG_STD_MIN, LOG_STD_MAX = -7.0, 2.0  # standard deviations from 0.0009 to 7.4; outside, the gradient is 0
NEVER = -1e30  # the logit of a forbidden action: exp(NEVER) is exactly 0, and unlike -inf it makes no nan
UNBOUNDED = 1e30  # a bound this large is no bound (spaces write the largest float32 for "none")
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_NUM_NODES = 9  # of the quadrature for the entropy of a squashed Gaussian


def num_params(spec: ActionSpec, state_dependent_std: bool = True) -> int:
    """Outputs that a policy head needs for `spec`; a state-independent log-std is appended by the model."""
    return spec.num_logits + spec.num_continuous * (2 if state_dependent_std else 1)


def to_env(continuous: Tensor, spec: ActionSpec, kind: ContinuousKind = "squashed") -> Tensor:
    """What the environment gets for the sample u: float32 [..., C], always within the bounds.

    "squashed": low + (tanh(u) + 1) / 2 * (high - low).
    "clipped":  centre + u * (high - low) / 2, clamped to [low, high].
    A dimension that is not bounded on both sides gets u itself, clamped to the bound it has.
    """
    u = continuous.float()
    if spec.num_continuous == 0:
        return u
    low, high, centre, half_width, bounded, _ = _bounds(spec, u.device)
    inside = u.tanh() if kind == "squashed" else u
    # the clamp also takes back what rounding pushed past a bound
    return torch.where(bounded, centre + inside * half_width, u).clamp(low, high)


class ActionDistribution:
    """The policy at each of a batch of states; "..." is any leading shape, [N] when acting, [T, B] when learning.

    params: [..., num_logits + 2 C].
    mask: bool [..., num_logits], True where an action is allowed, or None. A factor without any allowed action
        (which only a row that does not count may have) is treated as if all were allowed, so that nothing is nan.
    continuous: how the Gaussian sample u becomes an action within bounds (see `to_env`). "squashed" measures the
        density of the action after tanh, "clipped" that of u.
    """

    def __init__(
        self,
        params: Tensor,
        spec: ActionSpec,
        mask: Tensor | None = None,
        continuous: ContinuousKind = "squashed",
    ) -> None:
        self.spec, self.kind = spec, continuous
        params = params.float()
        self._lead = params.shape[:-1]
        num_logits, num_continuous = spec.num_logits, spec.num_continuous
        if num_logits:
            logits = params[..., :num_logits] if num_continuous else params
            self._log_probs = _factor_log_probs(logits, spec.discrete, mask)  # [..., D, largest factor]
        if num_continuous:
            self._mean = params[..., num_logits : num_logits + num_continuous]
            self._log_std = params[..., num_logits + num_continuous :].clamp(LOG_STD_MIN, LOG_STD_MAX)

    def sample(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """A random action: (discrete int64 [..., D], continuous float32 [..., C]).

        The continuous part is the Gaussian sample u itself: keep that, and give `to_env(u)` to the environment.
        """
        return self.sample_from(*self.noise(generator))

    def noise(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """What `sample_from` makes an action of: uniform [..., D] in [0, 1) and normal [..., C], float32."""
        source = self._log_probs if self.spec.discrete else self._mean
        uniform = torch.rand((*self._lead, self.spec.num_discrete), generator=generator, device=source.device)
        normal = torch.empty((*self._lead, self.spec.num_continuous), device=source.device)
        return uniform, normal.normal_(generator=generator) if self.spec.low else normal

    def sample_from(self, uniform: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        """The action as `sample` gives it that follows from this noise (see `noise`)."""
        return self._pick_discrete(uniform), self._shift_continuous(normal)

    def mode(self) -> tuple[Tensor, Tensor]:
        """The most probable value of each factor and the mean of each Gaussian, shaped as from `sample`."""
        discrete = self._log_probs.argmax(-1) if self.spec.discrete else self._no_discrete()
        return discrete, self._mean.detach().clone() if self.spec.low else self._no_continuous()

    def log_prob(self, discrete: Tensor, continuous: Tensor) -> Tensor:
        """Log-density [...] of actions as `sample` gives them: the sum over factors and dimensions."""
        total = None
        if self.spec.discrete:
            total = _sum_last(self._log_probs.gather(-1, discrete.unsqueeze(-1)).squeeze(-1))
        if self.spec.low:
            density = _sum_last(self._gaussian_log_density(continuous.float()))
            total = density if total is None else total + density
        return self._zeros() if total is None else total

    def entropy(self) -> Tensor:
        """Entropy [...] in nats, summed over factors and dimensions.

        "squashed": that of the action, H(N) + E[log |da/du|], the expectation by a 9-point Gauss-Hermite
        quadrature (within 0.05 nats for standard deviations up to 2). Unlike H(N) it falls again when the
        Gaussian grows so wide that the action sits on the bounds. "clipped": H(N), of the sample u.
        """
        total = self._zeros()
        if self.spec.discrete:
            # H = -sum_a p log p; a forbidden action adds 0 * NEVER = 0
            total = -(self._log_probs.exp() * self._log_probs).sum((-2, -1))
        if self.spec.low:
            # H(N) = log sigma + 1/2 log(2 pi e)
            per_dimension = self._log_std + (_LOG_SQRT_2PI + 0.5)
            if self.kind == "squashed":
                per_dimension = per_dimension + self._expected_log_slope()
            total = total + per_dimension.sum(-1)
        return total

    def kl(self, other: ActionDistribution) -> Tensor:
        """KL(self ‖ other) [...] in nats, exact; squashing changes nothing, as it is the same map for both."""
        total = self._zeros()
        if self.spec.discrete:
            total = (self._log_probs.exp() * (self._log_probs - other._log_probs)).sum((-2, -1))
        if self.spec.low:
            # log(s2 / s1) + (s1^2 + (m1 - m2)^2) / (2 s2^2) - 1/2
            precision = (-2.0 * other._log_std).exp()
            squares = (2.0 * self._log_std).exp() + (self._mean - other._mean).square()
            total = total + (other._log_std - self._log_std + 0.5 * squares * precision - 0.5).sum(-1)
        return total

    def symmetric_kl_to_uniform(self) -> Tensor:
        """½ [KL(pi ‖ U) + KL(U ‖ pi)] over the allowed actions, summed over factors; continuous adds 0."""
        if not self.spec.discrete:
            return self._zeros()
        allowed = self._log_probs > 0.5 * NEVER
        uniform = allowed / allowed.sum(-1, keepdim=True)
        # both divergences together: 1/2 sum_a (p_a - 1/n) log p_a, as the terms in log n cancel
        gaps = (self._log_probs.exp() - uniform) * self._log_probs
        return 0.5 * gaps.masked_fill(~allowed, 0.0).sum((-2, -1))

    def to_env(self, continuous: Tensor) -> Tensor:
        """`to_env` of this module for this distribution's spec and kind."""
        return to_env(continuous, self.spec, self.kind)

    def _pick_discrete(self, uniform: Tensor) -> Tensor:
        """The first value whose cumulative probability exceeds the uniform number of its factor."""
        if not self.spec.discrete:
            return self._no_discrete()
        cumulative = self._log_probs.detach().exp().cumsum(-1)
        # Below the whole sum, whatever that was rounded to; and a forbidden action adds exactly 0 to the sum, so that
        # no draw lies between it and the one before.
        draw = uniform.unsqueeze(-1) * (cumulative[..., -1:] * (1.0 - 2.0**-23))
        return (cumulative <= draw).sum(-1)

    def _shift_continuous(self, normal: Tensor) -> Tensor:
        if not self.spec.low:
            return self._no_continuous()
        return torch.addcmul(self._mean.detach(), self._log_std.detach().exp(), normal)

    def _gaussian_log_density(self, u: Tensor) -> Tensor:
        """[..., C], of u, or of the action that u becomes when squashed."""
        # log N(u) = -1/2 ((u - m) / s)^2 - log s - 1/2 log(2 pi)
        z = (u - self._mean) * (-self._log_std).exp()
        density = -0.5 * z.square() - self._log_std - _LOG_SQRT_2PI
        return density - _log_slope(u, self.spec) if self.kind == "squashed" else density

    def _expected_log_slope(self) -> Tensor:
        """E[log |da/du|] [..., C] under the Gaussian."""
        nodes, weights = _quadrature(self._mean.device)
        u = self._mean.unsqueeze(-1) + self._log_std.exp().unsqueeze(-1) * nodes  # [..., C, nodes]
        slopes = _log_slope(u.transpose(-1, -2), self.spec)  # [..., nodes, C]
        return (slopes * weights.unsqueeze(-1)).sum(-2)

    def _zeros(self) -> Tensor:
        source = self._log_probs if self.spec.discrete else self._mean
        return source.new_zeros(self._lead)

    def _no_discrete(self) -> Tensor:
        return torch.empty((*self._lead, 0), dtype=torch.int64, device=self._mean.device)

    def _no_continuous(self) -> Tensor:
        return torch.empty((*self._lead, 0), device=self._log_probs.device)


def _factor_log_probs(logits: Tensor, sizes: tuple[int, ...], mask: Tensor | None) -> Tensor:
    """log p of every value of every factor: [..., D, largest factor], NEVER where forbidden or padded."""
    factors = _per_factor(logits, sizes, NEVER)
    if mask is not None:
        allowed = _per_factor(mask, sizes, 0.0).bool()
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        # NEVER, not -inf, so that a padded entry of a factor without allowed actions stays NEVER as well
        factors = factors.masked_fill(~allowed, NEVER)
    return factors.log_softmax(-1)


def _per_factor(flat: Tensor, sizes: tuple[int, ...], fill: float) -> Tensor:
    """[..., sum(sizes)] as [..., D, largest]: a view when all sizes are equal, else padded with `fill`."""
    largest = max(sizes)
    if min(sizes) == largest:
        return flat.reshape(*flat.shape[:-1], len(sizes), largest)
    parts = torch.split(flat, list(sizes), -1)
    padded = [pad(part, (0, largest - size), value=fill) for part, size in zip(parts, sizes, strict=True)]
    return torch.stack(padded, -2)


def _sum_last(x: Tensor) -> Tensor:
    return x.squeeze(-1) if x.shape[-1] == 1 else x.sum(-1)


def _log_slope(u: Tensor, spec: ActionSpec) -> Tensor:
    """log |da/du| of a = centre + half_width * tanh(u), and 0 where a = u: [..., C], finite for every finite u."""
    _, _, _, _, bounded, log_half_width = _bounds(spec, u.device)
    # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)); the left side is log 0 for |u| > 9 in float32
    slope = 2.0 * (math.log(2.0) - u - softplus(-2.0 * u)) + log_half_width
    return torch.where(bounded, slope, 0.0)


@lru_cache(maxsize=64)
def _bounds(spec: ActionSpec, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """low, high, centre, half width, bounded on both sides (bool), log half width: [C] each, on the device.

    Kept, as building them copies to the device at every call; made outside inference mode, because a tensor made
    inside could never take part in a gradient.
    """
    low, high = np.array(spec.low, np.float64), np.array(spec.high, np.float64)
    bounded = (np.abs(low) < UNBOUNDED) & (np.abs(high) < UNBOUNDED)
    half_width = np.where(bounded, 0.5 * np.where(bounded, high - low, 2.0), 1.0)
    centre = np.where(bounded, np.where(bounded, low, 0.0) + half_width, 0.0)
    with torch.inference_mode(False):
        floats = [torch.tensor(x, dtype=torch.float32, device=device) for x in (low, high, centre, half_width)]
        flags = torch.tensor(bounded, device=device)
        log_half_width = torch.tensor(np.log(half_width), dtype=torch.float32, device=device)
        return floats[0], floats[1], floats[2], floats[3], flags, log_half_width


@lru_cache(maxsize=8)
def _quadrature(device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights of E[f(z)], z ~ N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NUM_NODES)
    with torch.inference_mode(False):
        return (
            torch.tensor(nodes, dtype=torch.float32, device=device),
            torch.tensor(weights / weights.sum(), dtype=torch.float32, device=device),
        )
