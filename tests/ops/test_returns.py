"""V-trace and GAE against slow per-episode definitions, hand-computed numbers and identities."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pronghorn.errors import UsageError
from pronghorn.ops.returns import GAE, VTrace, gae, next_values, one_step, vtrace


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)


def flags(num_steps: int, *rows: int) -> Tensor:
    flag = torch.zeros(num_steps, 1, dtype=torch.bool)
    flag[list(rows)] = True
    return flag


def random_case(generator: torch.Generator) -> dict[str, Tensor]:
    """An unroll [T, B] with several episodes a column, consistent next values, and any mix of endings."""
    num_steps, num_columns = (int(torch.randint(1, high, (), generator=generator)) for high in (12, 5))
    shape = (num_steps, num_columns)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    ends = torch.rand(shape, generator=generator) < 0.3
    by_limit = torch.rand(shape, generator=generator) < 0.5
    truncated = ends & by_limit
    values = 3 * normal(num_steps + 1, num_columns)
    return {
        "log_rhos": 0.8 * normal(*shape),
        "rewards": normal(*shape),
        "terminated": ends & ~by_limit,
        "truncated": truncated,
        "values": values[:-1],
        "next_values": next_values(values, truncated, 5 + 3 * normal(*shape)),
    }


Column = dict[str, list[float]]


def column_of(case: dict[str, Tensor], b: int) -> Column:
    """Column b of every tensor as plain numbers."""
    return {name: tensor[:, b].tolist() for name, tensor in case.items()}


def episodes(column: Column) -> Iterator[tuple[int, int]]:
    """(first row, row after the last) of each piece of an episode."""
    start = 0
    num_steps = len(column["rewards"])
    for t in range(num_steps):
        if column["terminated"][t] or column["truncated"][t] or t == num_steps - 1:
            yield start, t + 1
            start = t + 1


def bootstrap(column: Column, t: int) -> float:
    return 0.0 if column["terminated"][t] else column["next_values"][t]


def td_error(column: Column, t: int, gamma: float) -> float:
    return column["rewards"][t] + gamma * bootstrap(column, t) - column["values"][t]


def slow_gae(case: dict[str, Tensor], gamma: float, lambda_: float) -> Tensor:
    """A_s = sum_k (gamma lambda)^k delta_{s+k} to the end of the episode: the definition as written."""
    advantages = torch.zeros_like(case["rewards"])
    for b in range(advantages.shape[1]):
        rows = column_of(case, b)
        for start, stop in episodes(rows):
            for s in range(start, stop):
                advantages[s, b] = sum((gamma * lambda_) ** (t - s) * td_error(rows, t, gamma) for t in range(s, stop))
    return advantages


def slow_vtrace(
    case: dict[str, Tensor], gamma: float, rho_clip: float, c_clip: float, pg_rho_clip: float, lambda_: float
) -> VTrace:
    """v_s = V(x_s) + sum_t gamma^{t-s} (prod_{i<t} c_i) delta_t, and A_s with the next state's target."""
    targets, advantages = torch.zeros_like(case["rewards"]), torch.zeros_like(case["rewards"])
    for b in range(targets.shape[1]):
        rows = column_of(case, b)
        ratio = [math.exp(x) for x in rows["log_rhos"]]
        for start, stop in episodes(rows):
            target = {}
            for s in range(start, stop):
                target[s] = rows["values"][s]
                for t in range(s, stop):
                    trace = math.prod(lambda_ * min(c_clip, ratio[i]) for i in range(s, t))
                    delta = min(rho_clip, ratio[t]) * td_error(rows, t, gamma)
                    target[s] += gamma ** (t - s) * trace * delta
            for s in range(start, stop):
                following = target.get(s + 1, bootstrap(rows, s))
                weight = min(pg_rho_clip, ratio[s])
                targets[s, b] = target[s]
                advantages[s, b] = weight * (rows["rewards"][s] + gamma * following - rows["values"][s])
    return VTrace(targets, advantages)


def run_gae(case: dict[str, Tensor], gamma: float | Tensor, lambda_: float | Tensor) -> GAE:
    return gae(
        case["rewards"],
        case["terminated"],
        case["truncated"],
        case["values"],
        case["next_values"],
        gamma,
        lambda_,
    )


@pytest.mark.case("COR-06")
@pytest.mark.parametrize("as_tensor", [False, True])
def test_gae_is_its_definition_in_random_cases(as_tensor: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(1000):
        case = random_case(generator)
        gamma, lambda_ = (float(torch.rand((), generator=generator)) for _ in range(2))
        wrap = (lambda x: torch.tensor(x, dtype=torch.float64)) if as_tensor else float
        targets, advantages = run_gae(case, wrap(gamma), wrap(lambda_))
        expected = slow_gae(case, gamma, lambda_)
        torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(targets, expected + case["values"], rtol=0, atol=1e-9)


@pytest.mark.case("COR-06")
def test_vtrace_is_its_definition_in_random_cases() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(1000):
        case = random_case(generator)
        gamma, lambda_, *clips = (float(x) for x in torch.rand(5, generator=generator))
        rho_clip, c_clip, pg_rho_clip = (0.3 + 2 * clip for clip in clips)
        result = vtrace(**case, gamma=gamma, rho_clip=rho_clip, c_clip=c_clip, pg_rho_clip=pg_rho_clip, lambda_=lambda_)
        expected = slow_vtrace(case, gamma, rho_clip, c_clip, pg_rho_clip, lambda_)
        torch.testing.assert_close(result.targets, expected.targets, rtol=0, atol=1e-9)
        torch.testing.assert_close(result.advantages, expected.advantages, rtol=0, atol=1e-9)


def n1g(*, terminated: bool) -> dict[str, Tensor]:
    """Oracle N1g: three steps with V = 2, 3, 4; the final observation is worth 5, the next first 50."""
    end, never = flags(3, 2), flags(3)
    truncated = never if terminated else end
    following = next_values(column(2, 3, 4, 50), truncated, column(-7, -7, 5))
    return {
        "rewards": column(1, 1, 1),
        "terminated": end if terminated else never,
        "truncated": truncated,
        "values": column(2, 3, 4),
        "next_values": following,
    }


@pytest.mark.case("EPI-03")
def test_gae_oracle_truncated_bootstraps_from_the_final_observation() -> None:
    advantages = run_gae(n1g(terminated=False), 0.9, 0.8).advantages
    # delta = 1 + .9*3 - 2, 1 + .9*4 - 3, 1 + .9*5 - 4 = 1.7, 1.6, 1.5; A_1 = 1.6 + .72 * 1.5 = 2.68
    torch.testing.assert_close(advantages, column(3.6296, 2.68, 1.5))


@pytest.mark.case("EPI-03")
def test_gae_oracle_terminated_has_no_future() -> None:
    advantages = run_gae(n1g(terminated=True), 0.9, 0.8).advantages
    torch.testing.assert_close(advantages, column(1.2968, -0.56, -3.0))


@pytest.mark.case("EPI-03")
def test_two_episodes_in_one_unroll_do_not_touch() -> None:
    """The first episode is truncated; the second is worth 50 and more, none of which may leak back."""
    first, second = n1g(terminated=False), n1g(terminated=True)
    both = {name: torch.cat([first[name], 100 * second[name] if name == "rewards" else second[name]]) for name in first}
    advantages = run_gae(both, 0.9, 0.8).advantages
    torch.testing.assert_close(advantages[:3], column(3.6296, 2.68, 1.5))
    # V-trace with ratios 1: targets are sums that stop at the truncation, 1 + .9 * 5 = 5.5 in its row
    result = vtrace(torch.zeros_like(both["rewards"]), **both, gamma=0.9)
    torch.testing.assert_close(result.targets[:3], column(1 + 0.9 * (1 + 0.9 * 5.5), 1 + 0.9 * 5.5, 5.5))
    # TorchRL's bug: the advantage of the truncated row looked at the next episode's target
    torch.testing.assert_close(result.advantages[2], column(5.5 - 4)[0])


@pytest.mark.case("COR-02")
def test_a_terminated_step_earns_nothing_from_the_next_start_state() -> None:
    case = {
        "rewards": column(0, -2, 0),
        "terminated": flags(3, 1),
        "truncated": flags(3),
        "values": column(0, 1, 60),
        "next_values": column(1, 60, 60),
    }
    assert run_gae(case, 0.95, 1.0).advantages[1].item() == -3.0
    assert vtrace(column(0, 0, 0), **case, gamma=0.95).advantages[1].item() == -3.0


@pytest.mark.case("COR-03")
def test_a_reward_in_the_last_row_is_counted_in_every_row() -> None:
    values = torch.zeros(5, 1, dtype=torch.float64)
    args = (column(0, 0, 0, 0, 1), flags(5), flags(5), values, values)
    discounted = column(*(0.5**k for k in (4, 3, 2, 1, 0)))
    torch.testing.assert_close(gae(*args, 0.5, 1.0).advantages, discounted)
    result = vtrace(torch.zeros_like(values), *args, 0.5)
    assert result.targets.shape == (5, 1)
    torch.testing.assert_close(result.targets, discounted)
    torch.testing.assert_close(result.advantages, discounted)


def test_the_last_td_error_is_not_identically_zero() -> None:
    """A last row bootstrapped from (V - r) / gamma, as in Sample Factory, would always have an error of 0."""
    result = vtrace(column(0), column(1), flags(1), flags(1), column(3), column(10), 0.5)
    assert result.advantages.item() == 1 + 0.5 * 10 - 3
    assert result.targets.item() == 6.0


@pytest.mark.case("COR-04")
def test_the_bootstrap_counts_once() -> None:
    """With lambda = 1 and ratios 1: advantage + V = discounted rewards + gamma^k V_last."""
    generator = torch.Generator().manual_seed(4)
    rewards, values = (torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    last = torch.randn(3, generator=generator, dtype=torch.float64)
    following = torch.cat([values[1:], last.unsqueeze(0)])
    never = torch.zeros(5, 3, dtype=torch.bool)
    args = (rewards, never, never, values, following, 0.9)
    expected = torch.stack(
        [sum(0.9 ** (t - s) * rewards[t] for t in range(s, 5)) + 0.9 ** (5 - s) * last for s in range(5)]
    )
    result = vtrace(torch.zeros_like(rewards), *args)
    torch.testing.assert_close(gae(*args, 1.0).targets, expected)
    torch.testing.assert_close(result.targets, expected)
    torch.testing.assert_close(result.advantages + values, expected)


@pytest.mark.case("EPI-04")
def test_only_the_truncated_column_changes() -> None:
    limits = (5, 7, 11, 13)
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(13, 4, generator=generator, dtype=torch.float64)
    truncated = torch.tensor([[(t + 1) % limit == 0 for limit in limits] for t in range(12)])
    case = {
        "rewards": torch.ones(12, 4, dtype=torch.float64),
        "terminated": torch.zeros(12, 4, dtype=torch.bool),
        "truncated": truncated,
        "values": values[:-1],
        "next_values": next_values(values, truncated, torch.full((12, 4), 100.0, dtype=torch.float64)),
    }
    advantages = run_gae(case, 0.9, 0.8).advantages
    for b in range(4):
        alone = run_gae({name: tensor[:, b : b + 1] for name, tensor in case.items()}, 0.9, 0.8).advantages
        torch.testing.assert_close(advantages[:, b : b + 1], alone)
    torch.testing.assert_close(advantages, slow_gae(case, 0.9, 0.8))


@pytest.mark.case("EPI-05")
def test_truncation_uses_the_value_after_the_action() -> None:
    """V(x) = counter; the episode is cut when the counter reaches 10, in the row that acted at 9."""
    values = torch.arange(11, dtype=torch.float64).unsqueeze(1)  # V of rows 0 … 9 and of the bootstrap row
    values[10] = 0.0  # the next episode starts at 0
    truncated = flags(10, 9)
    following = next_values(values, truncated, torch.full((10, 1), 10.0))
    result = gae(torch.ones(10, 1).double(), flags(10), truncated, values[:-1], following, 0.9, 0.95)
    assert result.targets[9].item() == pytest.approx(1 + 0.9 * 10)


def test_vtrace_on_policy_is_the_n_step_return() -> None:
    generator = torch.Generator().manual_seed(6)
    case = random_case(generator) | {}
    case["log_rhos"] = torch.zeros_like(case["rewards"])
    torch.testing.assert_close(vtrace(**case, gamma=0.97).targets, slow_gae(case, 0.97, 1.0) + case["values"])


def test_lambda_scales_the_trace_only() -> None:
    """With lambda = 0 the target is the one-step target, and the advantage still looks at the next target."""
    generator = torch.Generator().manual_seed(7)
    rewards, values = (torch.randn(4, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    never = torch.zeros(4, 2, dtype=torch.bool)
    following = torch.cat([values[1:], torch.ones(1, 2).double()])
    result = vtrace(torch.zeros_like(rewards), rewards, never, never, values, following, 0.9, lambda_=0.0)
    torch.testing.assert_close(result.targets, rewards + 0.9 * following)
    torch.testing.assert_close(result.advantages[:-1], (rewards + 0.9 * (result.targets.roll(-1, 0)) - values)[:-1])


def test_split_is_whole() -> None:
    """Two halves, the first bootstrapped from the second's target, give the targets of the whole."""
    generator = torch.Generator().manual_seed(8)
    rewards, log_rhos = (torch.randn(6, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    values = torch.randn(7, 1, generator=generator, dtype=torch.float64)
    never = flags(6)
    whole = vtrace(log_rhos, rewards, never, never, values[:-1], values[1:], 0.9)
    late = vtrace(log_rhos[3:], rewards[3:], never[3:], never[3:], values[3:-1], values[4:], 0.9)
    torch.testing.assert_close(late.targets, whole.targets[3:])
    # v_2 = V(x_2) + delta_2 + gamma c_2 (v_3 - V(x_3)), with what the late half found
    c_2 = log_rhos[2].exp().clamp(max=1)
    delta_2 = c_2 * (rewards[2] + 0.9 * values[3] - values[2])
    torch.testing.assert_close(whole.targets[2], values[2] + delta_2 + 0.9 * c_2 * (late.targets[0] - values[3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_no_gradient_leaves(dtype: torch.dtype) -> None:
    x = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    never = torch.zeros(3, 2, dtype=torch.bool)
    for output in (*vtrace(x, x, never, never, x, x, 0.9), *gae(x, never, never, x, x, 0.9, 0.95)):
        assert output.dtype == dtype
        assert not output.requires_grad


def test_terminated_ignores_even_a_nan() -> None:
    nan = column(math.nan)
    assert gae(column(1), flags(1, 0), flags(1), column(0), nan, 0.9, 0.9).advantages.item() == 1.0
    assert vtrace(column(0), column(1), flags(1, 0), flags(1), column(0), nan, 0.9).targets.item() == 1.0


def test_huge_ratios_stay_finite() -> None:
    result = vtrace(column(1000).float(), column(1).float(), flags(1), flags(1), column(0), column(0), 0.9)
    assert result.advantages.item() == 1.0


def test_shapes_that_would_broadcast_are_refused() -> None:
    never = flags(3)
    with pytest.raises(UsageError, match="one shape"):
        gae(column(1, 2, 3), never, never, column(1, 2, 3).squeeze(1), column(1, 2, 3), 0.9, 0.9)
    with pytest.raises(UsageError, match="one row more"):
        next_values(column(1, 2, 3), never, column(1, 2, 3))


def test_one_step_corrects_the_advantage_only() -> None:
    """Targets are the uncorrected n-step returns; each advantage carries its own clipped weight."""
    for seed in range(20):
        case = random_case(torch.Generator().manual_seed(100 + seed))
        on_policy = vtrace(**(case | {"log_rhos": torch.zeros_like(case["log_rhos"])}), gamma=0.9, lambda_=0.8)
        result = one_step(**case, gamma=0.9, lambda_=0.8, pg_rho_clip=2.0)
        torch.testing.assert_close(result.targets, on_policy.targets)
        torch.testing.assert_close(result.advantages, case["log_rhos"].exp().clamp(max=2.0) * on_policy.advantages)
    terminal = one_step(column(math.log(0.5)), column(3), flags(1, 0), flags(1), column(1), column(9), 0.9)
    assert terminal.targets.item() == 3.0  # r
    assert terminal.advantages.item() == 1.0  # 0.5 * (3 - 1)


@pytest.mark.parametrize(("rho_clip", "c_clip"), [(0.3, 0.3), (1.0, 1.0), (1.0, 0.5), (math.inf, 1.0)])
def test_vtrace_converges_to_the_value_of_the_clipped_policy(rho_clip: float, c_clip: float) -> None:
    """Its fixed point is V of pi_rho(a|x) ∝ min(rho_clip mu(a|x), pi(a|x)), whatever c_clip (the paper's eq. 3)."""
    rng = np.random.default_rng(3)
    num_states, num_actions, length, columns, gamma = 3, 2, 10, 500, 0.8
    # strongly different policies, so that the clipped policy is far from both
    mu = np.array([[0.8, 0.2], [0.5, 0.5], [0.1, 0.9]])
    pi = np.array([[0.1, 0.9], [0.9, 0.1], [0.7, 0.3]])
    leads = rng.dirichlet(np.ones(num_states), (num_states, num_actions))  # P(x'|x, a)
    pays = rng.normal(size=(num_states, num_actions))
    clipped = np.minimum(rho_clip * mu, pi)
    clipped /= clipped.sum(1, keepdims=True)

    def value_of(policy: np.ndarray) -> np.ndarray:
        # V = (1 - gamma P)^-1 r
        transitions = np.einsum("xa,xay->xy", policy, leads)
        solved: np.ndarray = np.linalg.solve(np.eye(num_states) - gamma * transitions, (policy * pays).sum(1))
        return solved

    def draw(p: np.ndarray) -> np.ndarray:
        return (p.cumsum(-1) < rng.random(p.shape[:-1])[..., None]).sum(-1)

    values, late = np.zeros(num_states), []
    never = torch.zeros(length, columns, dtype=torch.bool)
    state = rng.integers(num_states, size=columns)
    for i in range(180):
        states, actions = np.empty((length + 1, columns), np.int64), np.empty((length, columns), np.int64)
        states[0] = state
        for t in range(length):
            actions[t] = draw(mu[states[t]])
            states[t + 1] = draw(leads[states[t], actions[t]])
        state = states[-1]
        seen = states[:-1]
        log_rhos = np.log(pi[seen, actions] / mu[seen, actions])
        args = (torch.from_numpy(x) for x in (log_rhos, pays[seen, actions]))
        v = torch.from_numpy(values[states])
        targets = vtrace(*args, never, never, v[:-1], v[1:], gamma, rho_clip=rho_clip, c_clip=c_clip).targets.numpy()
        for x in range(num_states):
            values[x] = targets[seen == x].mean()
        if i >= 100:
            late.append(values.copy())
    expected = value_of(clipped)
    assert np.abs(np.mean(late, 0) - expected).max() < 0.015
    if rho_clip < math.inf:  # which the value of neither policy would pass
        assert min(np.abs(value_of(mu) - expected).max(), np.abs(value_of(pi) - expected).max()) > 0.05
