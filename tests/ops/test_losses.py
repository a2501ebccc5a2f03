"""Losses by hand-checkable arithmetic, and the cases in which statistics degenerate."""

import math

import pytest
import torch

from pronghorn.errors import UsageError
from pronghorn.ops import losses

NAN = float("nan")


def test_reduce_counts_by_weight() -> None:
    per_step = torch.tensor([[1.0, 2.0], [3.0, 10.0]])
    weights = torch.tensor([[1.0, 1.0], [0.0, 0.5]])
    assert losses.reduce(per_step, weights, "sum").item() == 1 + 2 + 5
    assert losses.reduce(per_step, weights).item() == pytest.approx(8 / 2.5)
    assert losses.reduce(per_step).item() == 4.0
    assert losses.reduce(per_step, None, "sum").item() == 16.0


def test_a_step_that_does_not_count_may_hold_anything() -> None:
    per_step = torch.tensor([[1.0], [NAN], [math.inf]])
    weights = torch.tensor([[1.0], [0.0], [0.0]])
    assert losses.reduce(per_step, weights).item() == 1.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_counted_step_is_zero_with_zero_gradient(reduction: losses.Reduction) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    none = torch.zeros(2, 2)
    total = (
        losses.policy_gradient(x, x.detach(), none, reduction)
        + losses.ppo_clip(x, x.detach(), x.detach(), 0.1, "ratio", none, reduction).loss
        + losses.value(x, x.detach() + 1, none, reduction)
        + losses.entropy(x, none, reduction)
        + losses.symmetric_kl(x, none, reduction)
    )
    total.backward()
    assert total.item() == 0.0
    assert x.grad is not None
    assert x.grad.abs().sum().item() == 0.0


def test_policy_gradient_is_minus_advantage_times_score() -> None:
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages = torch.tensor([[3.0, -4.0]], requires_grad=True)
    loss = losses.policy_gradient(log_probs, advantages, reduction="sum")
    loss.backward()
    assert loss.item() == 3.0 - 8.0
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-3.0, 4.0]]
    assert advantages.grad is None


def ppo(ratio: float, advantage: float, kind: losses.ClipKind, clip: float = 0.25) -> tuple[float, float, float]:
    """(loss, clip fraction, gradient with respect to the log-prob) of one step."""
    log_prob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    result = losses.ppo_clip(log_prob, torch.zeros(1, 1), torch.tensor([[advantage]]), clip, kind)
    result.loss.backward()
    assert log_prob.grad is not None
    return result.loss.item(), result.clip_fraction.item(), log_prob.grad.item()


def test_ppo_clip_symmetric() -> None:
    assert ppo(1.5, 2.0, "symmetric") == pytest.approx((-2.5, 1.0, 0.0))  # held at 1.25 * 2
    assert ppo(1.5, -2.0, "symmetric") == pytest.approx((3.0, 1.0, 3.0))  # the worse one counts: 1.5 * 2
    assert ppo(0.5, -2.0, "symmetric") == pytest.approx((1.5, 1.0, 0.0))  # held at 0.75 * 2
    assert ppo(1.1, 2.0, "symmetric") == pytest.approx((-2.2, 0.0, -2.2))


def test_ppo_clip_ratio_is_symmetric_in_the_logarithm() -> None:
    assert ppo(0.5, -2.0, "ratio") == pytest.approx((1.6, 1.0, 0.0))  # held at 1 / 1.25 = 0.8
    assert ppo(0.79, -2.0, "ratio")[1] == 1.0
    assert ppo(0.79, -2.0, "symmetric")[1] == 0.0


def test_ppo_clip_takes_scheduled_tensors_and_absurd_ratios() -> None:
    log_probs = torch.tensor([[500.0, 0.0]], requires_grad=True)
    result = losses.ppo_clip(log_probs, torch.zeros(1, 2), torch.tensor([[-1.0, 0.0]]), torch.tensor(0.1))
    assert math.isfinite(result.loss.item())
    assert result.clip_fraction.item() == 0.5


@pytest.mark.case("SPA-06")
def test_ratio_one_has_the_policy_gradient() -> None:
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages = torch.tensor([[3.0, -4.0]])
    result = losses.ppo_clip(log_probs, log_probs.detach(), advantages, 0.1, reduction="sum")
    (by_ppo,) = torch.autograd.grad(result.loss, log_probs)
    (by_pg,) = torch.autograd.grad(losses.policy_gradient(log_probs, advantages, reduction="sum"), log_probs)
    torch.testing.assert_close(by_ppo, by_pg)
    assert result.clip_fraction.item() == 0.0


def test_value_is_half_the_squared_error() -> None:
    values = torch.tensor([[1.0, 5.0]], requires_grad=True)
    targets = torch.tensor([[4.0, 5.0]], requires_grad=True)
    loss = losses.value(values, targets, reduction="sum")
    loss.backward()
    assert loss.item() == 4.5
    assert values.grad is not None
    assert values.grad.tolist() == [[-3.0, 0.0]]
    assert targets.grad is None


@pytest.mark.case("COR-12")
def test_value_clip_is_absolute_and_takes_the_larger_error() -> None:
    def loss(value: float, target: float) -> float:
        old = torch.tensor([[1.0]])
        clipped = losses.value(torch.tensor([[value]]), torch.tensor([[target]]), old_values=old, clip=0.25)
        return clipped.item()

    assert loss(2.0, 3.0) == pytest.approx(0.5 * (1.25 - 3.0) ** 2)  # moved too far in the right direction
    assert loss(2.0, 0.0) == pytest.approx(0.5 * (2.0 - 0.0) ** 2)  # moved in the wrong one
    assert loss(1.125, 3.0) == pytest.approx(0.5 * (1.125 - 3.0) ** 2)  # inside: no clipping
    with pytest.raises(UsageError, match="both"):
        losses.value(torch.zeros(1, 1), torch.zeros(1, 1), clip=0.2)


def test_exploration_losses_fall_as_the_policy_spreads() -> None:
    assert losses.entropy(torch.tensor([[1.0, 3.0]])).item() == -2.0
    assert losses.symmetric_kl(torch.tensor([[1.0, 1000.0]])).item() == (1 + 30) / 2


def test_normalize_advantages() -> None:
    weights = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    result = losses.normalize_advantages(torch.tensor([[1.0, 2.0], [NAN, 3.0]]), weights)
    side = 1 / math.sqrt(2 / 3)
    torch.testing.assert_close(result, torch.tensor([[-side, 0.0], [0.0, side]]))


@pytest.mark.case("COR-09")
@pytest.mark.parametrize("constant", [0.0, 1000.1, -1e-6, 3.3e7])
def test_equal_advantages_become_zero(constant: float) -> None:
    result = losses.normalize_advantages(torch.full((128, 33), constant))
    assert result.abs().max().item() < 1e-3


@pytest.mark.case("COR-09")
def test_noise_in_the_last_bit_is_not_blown_up() -> None:
    advantages = torch.full((128, 2), 1000.1)
    advantages[:, 0] = torch.nextafter(advantages[:, 0], torch.tensor(math.inf))
    assert advantages.unique().numel() == 2
    assert losses.normalize_advantages(advantages).abs().max().item() < 0.1


@pytest.mark.case("COR-09")
def test_no_counted_advantage_is_zero() -> None:
    assert losses.normalize_advantages(torch.tensor([[NAN]]), torch.zeros(1, 1)).item() == 0.0


@pytest.mark.case("COR-09")
def test_constant_rewards_keep_the_weights_finite() -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(50):
        log_probs = weight.log_softmax(0)[torch.zeros(4, 2, dtype=torch.long)]
        loss = losses.policy_gradient(log_probs, losses.normalize_advantages(torch.full((4, 2), 0.7)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(loss.item()) < 1e-6
    assert weight.isfinite().all()


def test_epsilon_bounds_the_gradient_where_an_action_was_left() -> None:
    """d/d log pi of log(pi + eps) is pi / (pi + eps): 1/2 where pi = eps, 1 for likely actions, 0 for lost ones."""
    log_probs = torch.tensor([[math.log(1e-6), math.log(0.5), -60.0]], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(1, 3, dtype=torch.float64)
    loss = losses.policy_gradient(log_probs, ones, reduction="sum", epsilon=1e-6)
    assert loss.item() == pytest.approx(-(math.log(2e-6) + math.log(0.5 + 1e-6) + math.log(1e-6)))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == [pytest.approx([-0.5, -1.0, 0.0], abs=1e-5)]
