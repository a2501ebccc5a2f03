"""Running moments against the moments of all data at once; returns that keep the critic's outputs."""

import pytest
import torch
from torch import nn

from pronghorn.ops.normalization import ReturnNorm, RunningNorm


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_batches_give_the_moments_of_the_whole(shape: tuple[int, ...]) -> None:
    data = 1e4 + 3 * normal(50, 4, *shape)
    norm = RunningNorm(shape)
    for batch in data.split([1, 9, 40]):
        norm.update(batch)
    flat = data.reshape(-1, *shape)
    torch.testing.assert_close(norm.mean, flat.mean(0))
    torch.testing.assert_close(norm.var, flat.var(0, unbiased=False))
    assert norm.count.item() == 200


def test_forward_scales_clips_and_changes_nothing() -> None:
    norm = RunningNorm((2,), clip=1.5)
    norm.update(torch.tensor([[0.0, 7.0], [4.0, 7.0]]))  # means 2 and 7, variances 4 and 0
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    result = norm(torch.tensor([[4.0, 7.0], [100.0, 8.0]]))
    torch.testing.assert_close(result, torch.tensor([[1.0, 0.0], [1.5, 1.5]]), rtol=1e-5, atol=1e-5)
    assert result.dtype == torch.float32
    assert all(torch.equal(tensor, before[name]) for name, tensor in norm.state_dict().items())


def test_only_counted_observations_enter() -> None:
    norm, expected = RunningNorm((2,)), RunningNorm((2,))
    x = torch.tensor([[[1.0, 2.0], [float("nan"), 5.0]], [[3.0, 6.0], [9.0, 9.0]]])
    norm.update(x, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    expected.update(x[:, 0])
    for name, tensor in norm.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])


@pytest.mark.parametrize("batches_before", [0, 1])
def test_an_update_that_counts_nothing_is_none(batches_before: int) -> None:
    norm, returns = RunningNorm((2,)), ReturnNorm()
    for _ in range(batches_before):
        norm.update(normal(5, 2))
        returns.update(normal(5, 2))
    before = {**norm.state_dict(), "mean of returns": returns.mean, "std of returns": returns.std}
    before = {name: tensor.clone() for name, tensor in before.items()}
    norm.update(torch.full((3, 2), float("nan")), torch.zeros(3))
    returns.update(torch.full((3, 2), float("nan")), torch.zeros(3, 2))
    after = {**norm.state_dict(), "mean of returns": returns.mean, "std of returns": returns.std}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_return_moments_are_right_from_the_first_update() -> None:
    norm = ReturnNorm()
    assert (norm.mean.item(), norm.std.item()) == (0.0, 1.0)
    norm.update(torch.tensor([[10.0, 14.0], [99.0, 12.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert norm.mean.item() == pytest.approx(12.0)
    assert norm.std.item() == pytest.approx(2.0)
    assert norm.normalize(torch.tensor([10.0, 14.0])).tolist() == pytest.approx([-1.0, 1.0])


def test_return_moments_are_exponential_averages() -> None:
    norm = ReturnNorm(decay=0.5)
    for x in (0.0, 4.0, 8.0):
        norm.update(torch.tensor([[x]]))
    # weights 1/8, 1/4, 1/2 of 7/8
    mean = (0 / 8 + 4 / 4 + 8 / 2) / (7 / 8)
    second = (0 / 8 + 16 / 4 + 64 / 2) / (7 / 8)
    assert norm.mean.item() == pytest.approx(mean)
    assert norm.std.item() == pytest.approx((second - mean**2) ** 0.5)


@pytest.mark.case("COR-09")
def test_equal_returns_meet_the_floor() -> None:
    norm = ReturnNorm(min_std=0.25)
    norm.update(torch.full((4, 4), 1e6))
    assert norm.std.item() == 0.25
    assert norm.normalize(torch.tensor(1e6)).item() == 0.0


def test_denormalize_is_the_inverse() -> None:
    norm = ReturnNorm()
    norm.update(torch.tensor([[-3.0, 20.0, 5.0]]))
    x = torch.tensor([[1.0, -2.5]])
    torch.testing.assert_close(norm.denormalize(norm.normalize(x)), x)
    assert norm.normalize(x).dtype == torch.float32


def test_the_critic_says_the_same_after_every_update() -> None:
    torch.manual_seed(0)
    head, norm = nn.Linear(8, 1), ReturnNorm(decay=0.7)
    features = torch.randn(32, 8)
    for scale in (1.0, 300.0, 0.1, 50.0):
        before = norm.denormalize(head(features))
        spread = norm.std.item()
        norm.update(scale * (torch.randn(6, 4) + 2), None, head)
        assert norm.std.item() != spread
        torch.testing.assert_close(norm.denormalize(head(features)), before, rtol=1e-4, atol=1e-4)


def test_statistics_travel_with_the_state_dict() -> None:
    for norm, fresh in ((RunningNorm((2,)), RunningNorm((2,))), (ReturnNorm(), ReturnNorm())):
        norm.update(10 * normal(6, 2))
        fresh.load_state_dict(norm.state_dict())
        assert all(tensor.dtype == torch.float64 for tensor in fresh.state_dict().values())
        assert torch.equal(fresh.mean, norm.mean)
        assert fresh.mean.abs().max().item() > 0
