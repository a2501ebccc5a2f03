"""Per-step losses of actor-critic learning, reduced over the counted steps. No targets, network or optimiser.

Every tensor is [T, B], one number per decision. `weights` [T, B] says how much each step counts (0: not at
all, whatever number stands there; None: all count 1). `reduction` is "mean" (over the counted steps; 0 when
there are none) or "sum". Results are scalars to be minimised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pronghorn.errors import UsageError

Reduction = Literal["mean", "sum"]
ClipKind = Literal["ratio", "symmetric"]

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: past this the ratio of two policies says nothing and overflows the loss
MAX_SYMMETRIC_KL = 30.0  # past this the exploration loss would drown every other (as in Sample Factory)


class PPOClip(NamedTuple):
    """loss: scalar; clip_fraction: share of the counted steps whose ratio lies outside the clip range."""

    loss: Tensor
    clip_fraction: Tensor


def reduce(per_step: Tensor, weights: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
    """Weighted mean or sum over the counted steps; 0 when none is counted."""
    if weights is None:
        return per_step.mean() if reduction == "mean" else per_step.sum()
    # where, not a bare product: a step that does not count may hold inf or nan, and 0 * nan is nan
    total = torch.where(weights > 0, per_step * weights, 0.0).sum()
    if reduction == "sum":
        return total
    counted = weights.sum().to(total.dtype)
    return total / torch.where(counted > 0, counted, 1.0)


def policy_gradient(
    log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    epsilon: float = 0.0,
) -> Tensor:
    """The actor loss of IMPALA (Espeholt et al. 2018, §4.2).

    log_probs: log pi(a_t|x_t), with gradient.
    advantages: already times the clipped rho_t (see `returns.vtrace`).
    epsilon: added to pi, which bounds the gradient where the policy has left an action that was taken: the
        epsilon-correction of Babaeizadeh et al. 2017, which IMPALA's Table 2 compares with. 0: off.
    """
    if epsilon:
        log_probs = torch.logaddexp(log_probs, log_probs.new_full((), epsilon).log())
    # L = -A_t log(pi(a_t|x_t) + epsilon)
    return reduce(-advantages.detach() * log_probs, weights, reduction)


def ppo_clip(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    clip: float | Tensor,
    clip_kind: ClipKind = "ratio",
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> PPOClip:
    """The clipped surrogate of PPO (Schulman et al. 2017, eq. 7).

    clip_kind: "symmetric" keeps the ratio in [1 - clip, 1 + clip] as in the paper; "ratio" in
        [1 / (1 + clip), 1 + clip], which is symmetric in the log-ratio and never reaches 0.

    The log-ratio is limited to ±20 so that a policy that moved absurdly far gives a finite loss.
    """
    ratio = (log_probs - behaviour_log_probs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    high = 1.0 + clip
    low = 1.0 / high if clip_kind == "ratio" else 1.0 - clip
    advantages = advantages.detach()
    # L = -min(ratio A, clamp(ratio, low, high) A)
    loss = -torch.minimum(ratio * advantages, _clamp(ratio, low, high) * advantages)
    outside = ((ratio < low) | (ratio > high)).to(loss.dtype).detach()
    return PPOClip(reduce(loss, weights, reduction), reduce(outside, weights))


def value(
    values: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    old_values: Tensor | None = None,
    clip: float | Tensor | None = None,
) -> Tensor:
    """The critic loss: half the squared error, in the units of the inputs (normalised when returns are).

    clip: off when None. Else the prediction may move at most `clip` away from `old_values` (the behaviour
        network's), and the larger of the clipped and the plain error counts. `clip` is absolute, so it
        throttles learning when values are large against it: use it with normalised returns.
    """
    if (clip is None) != (old_values is None):
        raise UsageError("value: `clip` and `old_values` work together. Pass both, or neither.")
    targets = targets.detach()
    # L = 1/2 (V(x_t) - v_t)^2
    loss = 0.5 * (values - targets).square()
    if clip is not None and old_values is not None:
        moved = old_values.detach() + _clamp(values - old_values.detach(), -clip, clip)
        loss = torch.maximum(loss, 0.5 * (moved - targets).square())
    return reduce(loss, weights, reduction)


def entropy(entropies: Tensor, weights: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
    """The exploration loss -H, from the per-step entropies of `ActionDistribution.entropy`."""
    return reduce(-entropies, weights, reduction)


def symmetric_kl(divergences: Tensor, weights: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
    """The exploration loss ½[KL(pi‖U) + KL(U‖pi)], from `ActionDistribution.symmetric_kl_to_uniform`.

    Limited to 30 a step: KL(U‖pi) grows without bound when one action's probability vanishes.
    """
    return reduce(divergences.clamp(max=MAX_SYMMETRIC_KL), weights, reduction)


def alone(sums: Tensor) -> Tensor:
    """What one learner's sums are over all learners if there is no other."""
    return sums


@torch.no_grad()
def normalize_advantages(
    advantages: Tensor, weights: Tensor | None = None, over_all: Callable[[Tensor], Tensor] = alone
) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the counted steps; 0 where one does not count.

    over_all: sums of this learner's steps to those of all learners' steps.

    Equal advantages give zeros. The standard deviation is floored at the rounding error of the mean, so that
    noise in the last bit of equal advantages is not blown up to size 1.
    """
    counts = torch.ones_like(advantages) if weights is None else weights
    wide = torch.where(counts > 0, advantages, 0.0).double()
    # float64 statistics: in float32 the mean of 1e4 equal numbers already differs from them
    num, total = over_all(torch.stack((counts.sum().double(), (wide * counts).sum())))
    num = torch.where(num > 0, num, 1.0)
    mean = total / num
    std = (over_all(((wide - mean).square() * counts).sum()) / num).sqrt()
    scaled = (wide - mean) / (std + 1e-8 + 1e-6 * mean.abs())
    return torch.where(counts > 0, scaled, 0.0).to(advantages.dtype)


def _clamp(x: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """`x.clamp` for bounds that are both numbers or both tensors (schedules may pass either)."""
    return torch.clamp(x, low, high)  # type: ignore[arg-type]  # the stubs lack the mixed overloads
