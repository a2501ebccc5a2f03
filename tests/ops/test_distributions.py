"""Composite action distributions against torch.distributions, sampling statistics and hand-made corner cases."""

import math

import pytest
import torch
from torch import Tensor
from torch import distributions as reference

from pronghorn.ops.distributions import ActionDistribution, ContinuousKind, num_params, to_env
from pronghorn.types import ActionSpec

INF = math.inf
SINGLE = ActionSpec((5,))
EQUAL = ActionSpec((3, 3, 3))
FACTORED = ActionSpec((3, 2, 4))
BOX = ActionSpec((), (-1.0, 0.0, -INF), (1.0, 5.0, INF))
MIXED = ActionSpec((3, 2), (-2.0,), (2.0,))
ALL = [SINGLE, EQUAL, FACTORED, BOX, MIXED]
KINDS: list[ContinuousKind] = ["squashed", "clipped"]


def random_params(spec: ActionSpec, *lead: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    params = scale * torch.randn(*lead, num_params(spec), generator=generator)
    params[..., spec.num_logits + spec.num_continuous :].clamp_(-1.5, 1.0)  # well inside the log-std's limits
    return params


def categoricals(params: Tensor, spec: ActionSpec) -> list[reference.Categorical]:
    parts = params[..., : spec.num_logits].split(list(spec.discrete), -1)
    return [reference.Categorical(logits=part) for part in parts]


def gaussian(params: Tensor, spec: ActionSpec) -> reference.Normal:
    mean, log_std = params[..., spec.num_logits :].chunk(2, -1)
    return reference.Normal(mean, log_std.exp())


@pytest.mark.parametrize("spec", ALL)
def test_log_prob_is_that_of_torch(spec: ActionSpec) -> None:
    params = random_params(spec, 7, 3)
    policy = ActionDistribution(params, spec, continuous="clipped")
    discrete, continuous = policy.sample()
    assert discrete.shape == (7, 3, spec.num_discrete)
    assert discrete.dtype == torch.int64
    assert continuous.shape == (7, 3, spec.num_continuous)
    assert continuous.dtype == torch.float32
    expected = torch.zeros(7, 3)
    for index, factor in enumerate(categoricals(params, spec) if spec.discrete else []):
        expected = expected + factor.log_prob(discrete[..., index])
    expected = expected + gaussian(params, spec).log_prob(continuous).sum(-1)
    torch.testing.assert_close(policy.log_prob(discrete, continuous), expected, rtol=1e-5, atol=1e-5)


def test_squashed_log_prob_is_the_density_of_the_action() -> None:
    spec = ActionSpec((), (-1.0, 0.0), (1.0, 5.0))
    params = random_params(spec, 50)
    policy = ActionDistribution(params, spec, continuous="squashed")
    discrete, u = policy.sample()
    mean, log_std = params.double().chunk(2, -1)
    low, high = torch.tensor(spec.low).double(), torch.tensor(spec.high).double()
    squash = [
        reference.TanhTransform(),
        reference.AffineTransform(loc=0.5 * (low + high), scale=0.5 * (high - low)),
    ]
    expected = reference.TransformedDistribution(reference.Normal(mean, log_std.exp()), squash)
    action = 0.5 * (low + high) + u.double().tanh() * 0.5 * (high - low)
    torch.testing.assert_close(
        policy.log_prob(discrete, u).double(), expected.log_prob(action).sum(-1), rtol=1e-4, atol=1e-4
    )


def test_an_unbounded_dimension_is_not_squashed() -> None:
    spec = ActionSpec((), (-INF, 0.0), (INF, INF))
    params = random_params(spec, 4)
    squashed, clipped = (ActionDistribution(params, spec, continuous=kind) for kind in KINDS)
    discrete, u = squashed.sample()
    torch.testing.assert_close(squashed.log_prob(discrete, u), clipped.log_prob(discrete, u))
    torch.testing.assert_close(squashed.entropy(), clipped.entropy())
    assert squashed.to_env(torch.tensor([[7.0, -7.0]])).tolist() == [[7.0, 0.0]]


@pytest.mark.parametrize("spec", ALL)
def test_entropy_and_kl_are_those_of_torch(spec: ActionSpec) -> None:
    params, others = random_params(spec, 6, seed=1), random_params(spec, 6, seed=2)
    policy = ActionDistribution(params, spec, continuous="clipped")
    other = ActionDistribution(others, spec, continuous="clipped")
    entropy = gaussian(params, spec).entropy().sum(-1)
    kl = reference.kl_divergence(gaussian(params, spec), gaussian(others, spec)).sum(-1)
    if spec.discrete:
        pairs = zip(categoricals(params, spec), categoricals(others, spec), strict=True)
        for mine, yours in pairs:
            entropy = entropy + mine.entropy()
            kl = kl + reference.kl_divergence(mine, yours)
    torch.testing.assert_close(policy.entropy(), entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(policy.kl(other), kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(policy.kl(policy), torch.zeros(6), rtol=0, atol=1e-6)


@pytest.mark.parametrize("std", [0.1, 0.5, 1.0, 2.0])
def test_squashed_entropy_is_minus_the_mean_log_density(std: float) -> None:
    spec = ActionSpec((), (-1.0,), (3.0,))
    policy = ActionDistribution(torch.tensor([0.7, math.log(std)]).expand(200_000, 2), spec)
    sampled = -policy.log_prob(*policy.sample(torch.Generator().manual_seed(0))).mean()
    assert policy.entropy()[0].item() == pytest.approx(sampled.item(), abs=0.05)


def test_symmetric_kl_to_uniform_by_hand() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.25])
    policy = ActionDistribution(probabilities.log().unsqueeze(0), ActionSpec((3,)))
    to_uniform = sum(p * math.log(3 * p) for p in (0.5, 0.25, 0.25))
    from_uniform = sum(math.log(1 / (3 * p)) / 3 for p in (0.5, 0.25, 0.25))
    assert policy.symmetric_kl_to_uniform().item() == pytest.approx(0.5 * (to_uniform + from_uniform), rel=1e-5)


def test_symmetric_kl_counts_only_the_allowed_actions() -> None:
    mask = torch.tensor([[True, True, False, False, False], [True, False, False, False, False]])
    policy = ActionDistribution(torch.tensor([[1.0, 1.0, 9.0, 9.0, 9.0]]).expand(2, 5), SINGLE, mask)
    torch.testing.assert_close(policy.symmetric_kl_to_uniform(), torch.zeros(2))
    torch.testing.assert_close(policy.entropy(), torch.tensor([math.log(2.0), 0.0]))
    box = ActionDistribution(random_params(BOX, 3), BOX)
    assert box.symmetric_kl_to_uniform().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("spec", [SINGLE, FACTORED, MIXED])
def test_samples_have_the_stated_probabilities(spec: ActionSpec) -> None:
    params = random_params(spec, 1).expand(100_000, -1)
    discrete, continuous = ActionDistribution(params, spec).sample(torch.Generator().manual_seed(3))
    for index, factor in enumerate(categoricals(params[0], spec)):
        counts = discrete[:, index].bincount(minlength=spec.discrete[index]) / len(discrete)
        torch.testing.assert_close(counts, factor.probs, rtol=0, atol=0.01)
    if spec.low:
        normal = gaussian(params[0], spec)
        torch.testing.assert_close(continuous.mean(0), normal.mean, rtol=0, atol=0.02)
        torch.testing.assert_close(continuous.std(0), normal.stddev, rtol=0.02, atol=0)


def test_the_generator_decides_the_sample() -> None:
    policy = ActionDistribution(random_params(MIXED, 20), MIXED)
    first, second, third = (policy.sample(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], third[1])


@pytest.mark.case("SPA-09")
@pytest.mark.parametrize("spec", [SINGLE, FACTORED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forbidden_action_is_never_taken(spec: ActionSpec, dtype: torch.dtype) -> None:
    """A million samples with logits of ±80 and random masks, each leaving at least one value per factor."""
    generator = torch.Generator().manual_seed(4)
    shape = (250_000, spec.num_logits)
    logits = 80 * (2 * torch.rand(shape, generator=generator) - 1).sign().to(dtype)
    mask = torch.rand(shape, generator=generator) < 0.3
    start = 0
    for size in spec.discrete:  # one value is allowed for certain
        mask[:, start : start + size].scatter_(1, torch.randint(size, (len(mask), 1), generator=generator), True)
        start += size
    policy = ActionDistribution(logits, spec, mask)
    offsets = torch.tensor([0, *spec.discrete[:-1]]).cumsum(0)
    for discrete in (*(policy.sample(generator)[0] for _ in range(4)), policy.mode()[0]):
        assert mask.gather(1, discrete + offsets).all()


@pytest.mark.case("SPA-08")
def test_the_only_legal_action_has_log_prob_zero() -> None:
    legal = torch.tensor([0, 1, 2, 3, 4])
    mask = torch.nn.functional.one_hot(legal, 5).bool()
    policy = ActionDistribution(random_params(SINGLE, 5, scale=30.0), SINGLE, mask)
    discrete, continuous = policy.sample()
    assert discrete.squeeze(-1).tolist() == legal.tolist()
    assert policy.mode()[0].squeeze(-1).tolist() == legal.tolist()
    assert policy.log_prob(discrete, continuous).tolist() == [0.0] * 5


@pytest.mark.parametrize("spec", [SINGLE, FACTORED])
def test_no_legal_action_gives_no_nan_anywhere(spec: ActionSpec) -> None:
    params = random_params(spec, 2).requires_grad_()
    mask = torch.zeros(2, spec.num_logits, dtype=torch.bool)
    policy = ActionDistribution(params, spec, mask)
    discrete, continuous = policy.sample()
    assert (discrete < torch.tensor(spec.discrete)).all()
    total = policy.log_prob(discrete, continuous) + policy.entropy() + policy.symmetric_kl_to_uniform()
    total.sum().backward()
    assert total.isfinite().all()
    assert params.grad is not None
    assert params.grad.isfinite().all()


def test_a_mask_cuts_the_gradient_and_keeps_it_finite() -> None:
    params = random_params(SINGLE, 3).requires_grad_()
    mask = torch.tensor([True, False, True, True, False]).expand(3, 5)
    policy = ActionDistribution(params, SINGLE, mask)
    total = policy.log_prob(torch.zeros(3, 1, dtype=torch.int64), torch.empty(3, 0)) + policy.entropy()
    (total + policy.kl(policy) + policy.symmetric_kl_to_uniform()).sum().backward()
    assert params.grad is not None
    assert params.grad.isfinite().all()
    assert params.grad[:, [1, 4]].abs().sum().item() == 0.0
    assert params.grad[:, 0].abs().min().item() > 0.0


@pytest.mark.case("SPA-07")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("u", [20.0, -20.0])
def test_saturated_actions_are_finite(kind: ContinuousKind, u: float) -> None:
    spec = ActionSpec((), (-1.0,), (1.0,))
    params = torch.tensor([[u, -100.0], [0.0, 100.0]], requires_grad=True)
    policy = ActionDistribution(params, spec, continuous=kind)
    discrete, _ = policy.sample()
    total = policy.log_prob(discrete, torch.full((2, 1), u)) + policy.entropy() + policy.kl(policy)
    total.sum().backward()
    assert total.isfinite().all()
    assert params.grad is not None
    assert params.grad.isfinite().all()
    # the exact value of 2 (log 2 - 20 - softplus(-40)): log(1 - tanh(20)^2) is -inf in float32
    if kind == "squashed":
        plain = ActionDistribution(params, spec, continuous="clipped").log_prob(discrete, torch.full((2, 1), u))
        slope = plain - policy.log_prob(discrete, torch.full((2, 1), u))
        torch.testing.assert_close(slope, torch.full((2,), 2 * math.log(2) - 40.0), rtol=1e-3, atol=1e-3)


@pytest.mark.case("SPA-06")
def test_the_sample_is_left_as_it_was() -> None:
    u = torch.tensor([[30.0, -30.0, 30.0]])
    for kind in KINDS:
        action = to_env(u, BOX, kind)
        assert u.tolist() == [[30.0, -30.0, 30.0]]
        assert action.tolist() == [[1.0, 0.0, 30.0]]
        assert action.dtype == torch.float32


def test_to_env_spans_the_bounds() -> None:
    spec = ActionSpec((), (-0.4, 1.0), (0.4, 3.0))
    torch.testing.assert_close(to_env(torch.zeros(1, 2), spec), torch.tensor([[0.0, 2.0]]))
    half = torch.full((1, 2), 0.5)
    torch.testing.assert_close(to_env(half, spec, "clipped"), torch.tensor([[0.2, 2.5]]))
    torch.testing.assert_close(to_env(half.atanh(), spec, "squashed"), torch.tensor([[0.2, 2.5]]))
    many = to_env(20 * torch.randn(10_000, 2, generator=torch.Generator().manual_seed(5)), spec)
    low, high = torch.tensor(spec.low), torch.tensor(spec.high)
    assert ((many >= low) & (many <= high)).all()


@pytest.mark.parametrize("spec", ALL)
def test_bf16_parameters_are_computed_in_float32(spec: ActionSpec) -> None:
    params = random_params(spec, 4).bfloat16()
    half, full = ActionDistribution(params, spec), ActionDistribution(params.float(), spec)
    actions = full.mode()
    assert half.log_prob(*actions).dtype == torch.float32
    assert torch.equal(half.log_prob(*actions), full.log_prob(*actions))
    assert torch.equal(half.entropy(), full.entropy())


def test_the_sample_carries_no_gradient_and_works_after_inference_mode() -> None:
    spec = ActionSpec((2,), (-3.0,), (3.5,))  # a spec of this test only: its bounds are first built right here
    params = random_params(spec, 2).requires_grad_()
    with torch.inference_mode():
        ActionDistribution(params, spec).log_prob(*ActionDistribution(params, spec).sample())
    policy = ActionDistribution(params, spec)
    discrete, u = policy.sample()
    assert not u.requires_grad
    (policy.log_prob(discrete, u) + policy.entropy()).sum().backward()
    assert params.grad is not None


def test_num_params() -> None:
    assert num_params(MIXED) == 5 + 2
    assert num_params(MIXED, state_dependent_std=False) == 5 + 1
