"""Turns rewards and values into targets and advantages: V-trace, its ablations, GAE. It computes no value and no loss.

All arguments are time-major [T, B]. Row t is one decision: `rewards[t]`, `terminated[t]` and `truncated[t]`
are what the action of row t caused, so nothing is shifted here or by the caller. Rows of one column may
belong to several episodes; `next_values[t]` is V of the state that really followed (see the function of that
name).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.errors import UsageError


class VTrace(NamedTuple):
    """targets: v_t, what V(x_t) is regressed to; advantages: the weight of grad log pi(a_t). Both [T, B]."""

    targets: Tensor
    advantages: Tensor


class GAE(NamedTuple):
    """targets: A_t + V(x_t), the lambda-return; advantages: A_t. Both [T, B]."""

    targets: Tensor
    advantages: Tensor


def next_values(values_with_bootstrap: Tensor, truncated: Tensor, truncation_values: Tensor) -> Tensor:
    """V of the state that followed each action: [T, B], in the dtype of the values.

    values_with_bootstrap: [T+1, B], V(x_0) … V(x_T), the last being the bootstrap observation's.
    truncated: [T, B] bool.
    truncation_values: [T, B], V(final observation) where truncated; any number elsewhere.

    At a terminated row the result is the next episode's first value, which `vtrace` and `gae` ignore.
    """
    if len(values_with_bootstrap) != len(truncated) + 1:
        raise UsageError(
            f"next_values: {len(values_with_bootstrap)} rows of values for {len(truncated)} rows of flags: "
            "the values need one row more, V of the bootstrap observation. Append it."
        )
    _check_shapes("next_values", truncated=truncated, truncation_values=truncation_values)
    followed = values_with_bootstrap[1:]
    return torch.where(truncated, truncation_values.to(followed.dtype), followed)


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    values: Tensor,
    next_values: Tensor,
    gamma: float | Tensor,
    *,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    pg_rho_clip: float = 1.0,
    lambda_: float | Tensor = 1.0,
) -> VTrace:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, §4, Remark 1), [T, B] each.

    log_rhos: [T, B], log pi(a_t|x_t) - log mu(a_t|x_t).
    terminated, truncated: [T, B] bool, true at the row whose action ended the episode.
    values: [T, B], V(x_t).  next_values: [T, B], V of the state that followed a_t, ignored where terminated.
    rho_clip, c_clip: the paper's rho-bar (fixes what is learned) and c-bar (only how fast).
    pg_rho_clip: the clip of the weight on the advantage.  lambda_: scales the trace c only (Remark 2).

    Computed in the input dtype; the outputs carry no gradient.
    """
    _check_shapes(
        "vtrace", log_rhos=log_rhos, rewards=rewards, terminated=terminated, truncated=truncated,
        values=values, next_values=next_values,
    )  # fmt: skip
    boundary = terminated | truncated
    discounted_next = _discounted(gamma, next_values, terminated)
    rhos = log_rhos.exp()

    # delta_t = min(rho_bar, rho_t) (r_t + gamma V(x_{t+1}) - V(x_t))
    deltas = rhos.clamp(max=rho_clip) * (rewards + discounted_next - values)
    # v_t - V(x_t) = delta_t + gamma c_t (v_{t+1} - V(x_{t+1})), c_t = lambda min(c_bar, rho_t), cut at ends
    decays = (gamma * lambda_ * rhos.clamp(max=c_clip)).masked_fill(boundary, 0.0)
    targets = values + _backward_sum(deltas, decays)

    # A_t = rho_t (r_t + gamma v_{t+1} - V(x_t)); the next row has a v only inside the episode and the unroll
    inside = discounted_next.clone()
    inside[:-1] = torch.where(boundary[:-1], discounted_next[:-1], gamma * targets[1:])
    advantages = rhos.clamp(max=pg_rho_clip) * (rewards + inside - values)
    return VTrace(targets, advantages)


@torch.no_grad()
def one_step(
    log_rhos: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    values: Tensor,
    next_values: Tensor,
    gamma: float | Tensor,
    *,
    pg_rho_clip: float = 1.0,
    lambda_: float | Tensor = 1.0,
) -> VTrace:
    """1-step importance sampling (Espeholt et al. 2018, §5.2.2): uncorrected targets, rho_t on each advantage.

    Arguments as in `vtrace`. With log_rhos of 0 it is no correction at all: the plain n-step return. The weight is
    clipped like V-trace's (the paper does not say whether it clips here).
    """
    zeros = torch.zeros_like(log_rhos)
    plain = vtrace(zeros, rewards, terminated, truncated, values, next_values, gamma, lambda_=lambda_)
    # A_t = min(pg_rho_bar, rho_t) (r_t + gamma v_{t+1} - V(x_t))
    return VTrace(plain.targets, log_rhos.exp().clamp(max=pg_rho_clip) * plain.advantages)


@torch.no_grad()
def gae(
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    values: Tensor,
    next_values: Tensor,
    gamma: float | Tensor,
    lambda_: float | Tensor,
) -> GAE:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), [T, B] each.

    Arguments as in `vtrace`. Computed in the input dtype; the outputs carry no gradient.
    """
    _check_shapes(
        "gae", rewards=rewards, terminated=terminated, truncated=truncated,
        values=values, next_values=next_values,
    )  # fmt: skip
    # delta_t = r_t + gamma V(x_{t+1}) - V(x_t)
    deltas = rewards + _discounted(gamma, next_values, terminated) - values
    # A_t = delta_t + gamma lambda A_{t+1}, cut at boundaries
    decays = torch.zeros_like(deltas).add(gamma * lambda_).masked_fill(terminated | truncated, 0.0)
    advantages = _backward_sum(deltas, decays)
    return GAE(advantages + values, advantages)


def _discounted(gamma: float | Tensor, next_values: Tensor, terminated: Tensor) -> Tensor:
    """gamma V(x_{t+1}), exactly 0 where terminated, whatever number stands there (0 * nan would be nan)."""
    return gamma * next_values.masked_fill(terminated, 0.0)


def _backward_sum(terms: Tensor, decays: Tensor) -> Tensor:
    """s_t = terms_t + decays_t s_{t+1}, with s_T = 0: [T, B]."""
    total = torch.zeros_like(terms[0])
    sums = []
    for term, decay in zip(reversed(terms.unbind()), reversed(decays.unbind()), strict=True):
        total = torch.addcmul(term, decay, total)
        sums.append(total)
    return torch.stack(sums[::-1])


def _check_shapes(where: str, **tensors: Tensor) -> None:
    """Refuse shapes that would broadcast without a word: every tensor must be [T, B], all with equal T, B."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
        raise UsageError(f"{where}: every tensor must have one shape [T, B], got {shapes}. Reshape the inputs.")
