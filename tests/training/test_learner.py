"""The learner: on-policy ratios, resets, normalisers as part of the version, skips, learning rates."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.errors import PronghornError
from pronghorn.evaluation.policy import build_model
from pronghorn.models.actor_critic import ActorCritic
from pronghorn.training import learner as learner_module
from pronghorn.training.learner import Learner, Part, compute_losses, learning_rewards
from pronghorn.training.store import Batch
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec

SPEC = EnvSpec(
    {"x": LeafSpec((3,), "float32", "vector"), "action_mask": LeafSpec((5,), "uint8", "mask")},
    ActionSpec(discrete=(2, 3), low=(-2.0, 0.0), high=(3.0, 1.0)),
)
T, B = 6, 4


def config_of(**values: Any) -> Config:
    base = {"env.workers": 1, "env.envs_per_worker": 4, "learner.unroll_length": T, "learner.batch_unrolls": B}
    values = base | {"model.core": "lstm", "model.core_size": 8, "learner.epochs": 1, "learner.minibatches": 1} | values
    return resolve(replace(Config(env="x:y"), values), SPEC)


def act_out(model: ActorCritic, seed: int = 0) -> Batch:
    """Unrolls as a sampler would have stored them, acting step by step with the model's present weights."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    first = torch.from_numpy(rng.random((T + 1, B)) < 0.3)
    mask = torch.zeros(T + 1, B, 5, dtype=torch.uint8)
    mask[..., 0] = mask[..., 2] = 1
    mask[..., 3:] = torch.from_numpy(rng.integers(0, 2, (T + 1, B, 2)).astype(np.uint8))
    obs = {"x": torch.from_numpy(rng.normal(3, 2, (T + 1, B, 3)).astype(np.float32)), "action_mask": mask}
    start = torch.from_numpy(rng.normal(size=(B, model.state_size)).astype(np.float32))
    state, rows = start, []
    with torch.no_grad():
        for t in range(T):
            now = {k: v[t] for k, v in obs.items()}
            out = model({k: v[None] for k, v in now.items()}, state, first[t][None])
            state = out.state
            distribution = model.distribution(out.params[0], now)
            discrete, continuous = distribution.sample(generator)
            log_prob = distribution.log_prob(discrete, continuous)
            rows.append((discrete, continuous, log_prob, model.denormalize_value(out.values[0])))
    discrete, continuous, log_prob, value = (torch.stack(x) for x in zip(*rows, strict=True))
    over = first[1:]
    steps: dict[str, Tensor] = {
        "first": first, "discrete": discrete, "continuous": continuous, "log_prob": log_prob, "value": value,
        "version": torch.zeros(T, B, dtype=torch.int64), "terminated": over, "truncated": torch.zeros_like(over),
        "reward": torch.from_numpy(rng.normal(size=(T, B)).astype(np.float32)), "truncation_value": torch.zeros(T, B),
        "task_id": torch.zeros(T, B, dtype=torch.int64),
    }  # fmt: skip
    return Batch(obs, steps, start, np.zeros((T, B), np.int64))


def learner_of(config: Config) -> Learner:
    torch.manual_seed(0)
    return Learner(config, build_model(config.model, SPEC))


@pytest.mark.case("SPA-06", "SPA-08", "RNN-05", "RNN-10")
@pytest.mark.parametrize("algo", ["appo", "impala", "ppo", "a2c"])
def test_before_the_first_update_the_ratio_is_one(algo: str) -> None:
    """With memory, resets inside the unroll, masks, composite actions and normalisers on: |log ratio| ≤ 1e-5."""
    config = config_of(algo=algo)
    learner = learner_of(config)
    for seed in range(3):  # from the second round on the normalisers hold statistics of their own
        batch = act_out(learner.model, seed)
        out = learner.model(batch.obs, batch.state, batch.steps["first"])
        distribution = learner.model.distribution(out.params[:-1], {k: v[:-1] for k, v in batch.obs.items()})
        log_prob = distribution.log_prob(batch.steps["discrete"], batch.steps["continuous"])
        assert (log_prob - batch.steps["log_prob"]).abs().max() <= 1e-5
        terms = compute_losses(learner.model, batch, learner.hyper, learner.settings).terms
        assert terms["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        learner.iterate(batch)
    assert learner.version == 3
    assert learner.steps == 3 * T * B


def test_statistics_change_with_the_version_and_only_then() -> None:
    learner = learner_of(config_of())
    batch = act_out(learner.model)
    before = {k: v.clone() for k, v in learner.model.state_dict().items() if "norm" in k}
    compute_losses(learner.model, batch, learner.hyper, learner.settings)
    assert all(torch.equal(v, learner.model.state_dict()[k]) for k, v in before.items())
    learner.iterate(batch)
    assert any(not torch.equal(v, learner.model.state_dict()[k]) for k, v in before.items())


@pytest.mark.case("COR-09")
def test_rewards_without_variance_leave_finite_weights() -> None:
    learner = learner_of(config_of())
    batch = act_out(learner.model)
    batch.steps["reward"].zero_()
    for _ in range(20):
        report = learner.iterate(batch)
    assert all(math.isfinite(value) for value in report.values())
    assert all(p.isfinite().all() for p in learner.model.parameters())


@pytest.mark.case("FLT-12")
def test_a_number_that_is_not_finite_is_a_counted_skip_and_then_an_error() -> None:
    learner = learner_of(config_of())
    batch = act_out(learner.model)
    batch.steps["reward"][2, 1] = float("nan")
    before = [p.clone() for p in learner.model.parameters()]
    learner.iterate(batch)
    assert learner.num_skipped == 1
    assert learner.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    for _ in range(18):
        learner.iterate(batch)
    with pytest.raises(PronghornError, match=r"20 optimiser steps in a row had a loss or gradient that is not finite"):
        learner.iterate(batch)


@pytest.mark.case("FLT-12")
@pytest.mark.parametrize("where", ["observation", "infinite observation", "reward", "gradient"])
@pytest.mark.parametrize("core", ["none", "gru"])
def test_what_is_not_finite_in_one_minibatch_reaches_neither_weights_nor_statistics(where: str, core: str) -> None:
    """Even when the minibatches after it are whole."""
    values = {"learner.epochs": 2 if core == "none" else 1, "learner.minibatches": 4, "model.core": core}
    learner = learner_of(config_of(**values))
    batch = act_out(learner.model)
    if "observation" in where:
        batch.obs["x"][2, 0, 1] = float("inf" if "infinite" in where else "nan")
    elif where == "reward":
        batch.steps["reward"][T - 1, 0] = float("nan")
    else:
        broken = iter([True] + 100 * [False])
        learner.model.policy_head.weight.register_hook(lambda g: g * float("nan") if next(broken) else g)
    learner.iterate(batch)
    assert (learner.num_skipped > 0) == (where != "infinite observation")  # which the normaliser clips
    assert all(tensor.isfinite().all() for tensor in learner.model.state_dict().values())
    learner.iterate(act_out(learner.model, 1))
    assert learner.updates > 0
    assert all(tensor.isfinite().all() for tensor in learner.model.state_dict().values())


@pytest.mark.case("FLT-12")
def test_the_first_skip_ends_the_run_when_none_is_allowed() -> None:
    learner = learner_of(config_of(**{"learner.max_skipped": 0}))
    batch = act_out(learner.model)
    batch.steps["reward"][2, 1] = float("nan")
    with pytest.raises(PronghornError, match="1 optimiser steps in a row"):
        learner.iterate(batch)


@pytest.mark.parametrize("algo", ["appo", "impala", "ppo", "a2c"])
def test_a_batch_of_one_step_learns_and_stays_finite(algo: str) -> None:
    learner = learner_of(config_of(algo=algo, **{"model.core": "none"}))
    batch = act_out(learner.model)
    one = Batch(
        {k: v[:2, :1] for k, v in batch.obs.items()},
        {k: v[: 2 if k == "first" else 1, :1] for k, v in batch.steps.items()},
        batch.state[:1],
        batch.policy_lag[:1, :1],
    )
    for _ in range(5):
        report = learner.iterate(one)
    assert learner.num_skipped == 0
    assert all(math.isfinite(x) for x in report.values())
    assert all(p.isfinite().all() for p in learner.model.parameters())


@pytest.mark.parametrize("core", ["gru", "none"])
@pytest.mark.parametrize("advantage", ["vtrace", "gae"])
def test_minibatches_are_a_partition_that_keeps_what_belongs_together(core: str, advantage: str) -> None:
    """The gradients of an epoch's minibatches, at fixed weights, add up to that of the whole batch."""
    config = config_of(
        **{"learner.epochs": 2, "learner.minibatches": 2, "learner.advantage": advantage, "model.core": core}
    )
    learner = learner_of(config)
    batch = act_out(learner.model)
    batch.steps["log_prob"] += 0.3 * torch.randn(T, B)  # off-policy, and different for each step
    weights = (torch.rand(T, B) < 2.0).float()
    estimate, _ = learner._estimate_once(batch, weights)
    parts = list(learner._minibatches(Part(batch, weights, estimate)))
    assert len(parts) == 4
    single = core == "none"
    assert all(part.batch.num_samples == T * B // 2 for part in parts)
    assert all(len(part.batch.steps["reward"]) == (1 if single else T) for part in parts)

    def gradient(part: Part) -> list[torch.Tensor]:
        args = (learner.model, part.batch, learner.hyper, learner.settings, part.weights, part.estimate)
        return list(torch.autograd.grad(compute_losses(*args).total, learner._parameters))

    whole = gradient(Part(batch, weights, estimate))
    for epoch in (parts[:2], parts[2:]):
        mean = [torch.stack(gradients).mean(0) for gradients in zip(*map(gradient, epoch), strict=True)]
        for ours, expected in zip(mean, whole, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)
    assert not torch.equal(parts[0].batch.steps["reward"], parts[2].batch.steps["reward"])  # drawn anew each epoch


@pytest.mark.case("RNN-09")
@pytest.mark.parametrize("core", ["gru", "none"])
def test_no_minibatch_is_much_smaller_than_the_others(core: str) -> None:
    config = config_of(**{"learner.epochs": 2, "learner.minibatches": 2, "model.core": core})
    learner = learner_of(dataclasses.replace(config, learner=dataclasses.replace(config.learner, minibatches=6)))
    rows = [act_out(learner.model, seed) for seed in range(10)]
    batch = Batch(
        {k: torch.cat([r.obs[k] for r in rows], 1)[:, :37] for k in rows[0].obs},
        {k: torch.cat([r.steps[k] for r in rows], 1)[:, :37] for k in rows[0].steps},
        torch.cat([r.state for r in rows])[:37],
        np.zeros((T, 37), np.int64),
    )
    estimate, _ = learner._estimate_once(batch, None)
    sizes = [part.batch.num_samples for part in learner._minibatches(Part(batch, None, estimate))][:6]
    assert sizes == ([7 * T, *[6 * T] * 5] if core == "gru" else [37 * T // 6] * 6)


def slow_estimate(column: dict[str, Any], config: Config) -> tuple[list[float], list[float]]:
    """(targets, advantages) of one column, an episode's piece at a time, in plain Python floats: the definitions."""
    n = config.learner
    gamma, lambda_, length = n.gamma, n.lambda_, len(column["reward"])
    targets, advantages = [0.0] * length, [0.0] * length
    start = 0
    for end in range(1, length + 1):
        terminated, truncated = column["terminated"][end - 1], column["truncated"][end - 1]
        if not (terminated or truncated or end == length):
            continue
        after = 0.0 if terminated else column["truncation_value"][end - 1] if truncated else column["value"][end]
        values = [*column["value"][start:end], after]
        trace = 0.0
        for t in reversed(range(start, end)):
            v, following = values[t - start], values[t - start + 1]
            delta = column["reward"][t] + gamma * following - v
            if n.advantage == "gae":
                trace = delta + gamma * lambda_ * trace
                targets[t], advantages[t] = v + trace, trace
            else:
                rho = min(1.0, math.exp(column["log_rho"][t]))
                advantages[t] = delta + gamma * trace  # r + gamma v_{t+1} - V(x_t)
                trace = rho * (delta + gamma * lambda_ * trace)
                targets[t] = v + trace
        start = end
    return targets, advantages


@pytest.mark.case("EPI-03", "COR-02", "COR-04")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
@pytest.mark.parametrize("advantage", ["vtrace", "gae"])
def test_targets_and_advantages_are_those_of_each_episode_alone(advantage: str, core: str, normalize: bool) -> None:
    """Ends, limits and both at once, anywhere in the unrolls; with and without memory and normalised returns."""
    config = config_of(
        **{"learner.epochs": 2, "learner.advantage": advantage, "model.core": core, "learner.gamma": 0.9,
           "model.normalize_returns": normalize, "learner.normalize_advantages": False}
    )  # fmt: skip
    learner = learner_of(config)
    for seed in range(4):
        batch = act_out(learner.model, seed)
        rng = np.random.default_rng(100 + seed)
        over = batch.steps["first"][1:]
        kind = torch.from_numpy(rng.integers(0, 3, (T, B)))
        batch.steps["terminated"] = over & (kind != 1)
        batch.steps["truncated"] = over & (kind == 1)  # the sampler stores what is both as terminated
        batch.steps["truncation_value"] = torch.from_numpy(rng.normal(0, 5, (T, B)).astype(np.float32))
        batch.steps["log_prob"] += torch.from_numpy(rng.normal(0, 0.3, (T, B)).astype(np.float32))
        estimate, _ = learner._estimate_once(batch, None)
        with torch.no_grad():
            out = learner.model(batch.obs, batch.state, batch.steps["first"])
            distribution = learner.model.distribution(out.params[:-1], {k: v[:-1] for k, v in batch.obs.items()})
            log_prob = distribution.log_prob(batch.steps["discrete"], batch.steps["continuous"])
            log_rho = log_prob - batch.steps["log_prob"]
            values = learner.model.denormalize_value(out.values)
        norm = learner.model.return_norm
        unit = 1.0 if norm is None else norm.std.item()  # of advantages; 1 before the first iteration
        assert (unit != 1.0) == (normalize and seed > 0)
        for b in range(B):
            names = ("reward", "terminated", "truncated", "truncation_value")
            column = {name: batch.steps[name][:, b].tolist() for name in names}
            column |= {"value": values[:, b].tolist(), "log_rho": log_rho[:, b].tolist()}
            targets, advantages = slow_estimate(column, config)
            assert estimate.targets[:, b].tolist() == pytest.approx(targets, abs=2e-5)
            assert estimate.advantages[:, b].tolist() == pytest.approx([a / unit for a in advantages], abs=2e-5)
        learner.iterate(batch)  # so that the normalisers hold something


def test_dropped_samples_reach_no_statistics() -> None:
    """PopArt and the explained variance see only what counts; replayed observations are counted once, when fresh."""
    learner = learner_of(config_of(**{"learner.drop_over_lag": True, "model.core": "none"}))
    batch = act_out(learner.model)
    batch.steps["reward"][:, 2:] = 1e6
    batch.policy_lag[:, 2:] = learner.max_lag + 1
    learner.iterate(batch)
    assert learner.model.return_norm is not None
    assert learner.model.return_norm.std < 100
    fresh = learner_of(config_of(**{"model.core": "none"}))
    mixed = act_out(fresh.model)
    mixed.num_replayed = 3
    fresh.iterate(mixed)
    (norm,) = (module for module in fresh.model.modules() if type(module).__name__ == "RunningNorm")
    assert norm.count == T * (B - 3)


def test_an_iteration_that_was_skipped_leaves_the_adaptive_learning_rate_alone() -> None:
    learner = learner_of(config_of(**{"learner.lr_schedule": "kl_adaptive", "learner.lr": 1e-3}))
    batch = act_out(learner.model)
    batch.steps["reward"].fill_(float("nan"))
    learner.iterate(batch)
    assert learner.num_skipped == 1
    assert learner.hyper.lr == pytest.approx(1e-3)


def test_a_stop_ends_the_iteration_after_its_present_step() -> None:
    learner = learner_of(config_of(**{"learner.epochs": 50, "learner.minibatches": 4}))
    asked = iter([False, False, True])
    report = learner.iterate(act_out(learner.model), lambda: next(asked))
    assert (learner.updates, learner.version) == (3, 1)
    assert math.isfinite(report["loss"])


@pytest.mark.parametrize(("advantage", "epochs"), [("vtrace", 1), ("vtrace", 2), ("gae", 1)])
def test_targets_are_made_once_an_iteration_unless_each_sample_is_used_once(
    advantage: str, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(**{"learner.epochs": epochs, "learner.minibatches": 2, "learner.advantage": advantage})
    learner = learner_of(config)
    sizes: list[int] = []
    made = learner_module._estimate

    def counted(log_rhos: torch.Tensor, *rest: Any) -> Any:
        sizes.append(log_rhos.shape[1])
        return made(log_rhos, *rest)

    monkeypatch.setattr(learner_module, "_estimate", counted)
    report = learner.iterate(act_out(learner.model))
    assert sizes == ([B // 2, B // 2] if (advantage, epochs) == ("vtrace", 1) else [B])
    assert learner.updates == 2 * epochs
    assert {"explained_variance", "value_mean", "kl", "grad_norm"} <= report.keys()


def test_advantages_are_normalised_over_the_batch_not_over_each_minibatch() -> None:
    """Where one half of a batch did badly, its minibatch must not hide that."""
    config = config_of(**{"learner.epochs": 2, "learner.minibatches": 2})
    learner = learner_of(config)
    batch = act_out(learner.model)
    batch.steps["reward"][:, : B // 2] = -10.0
    estimate, _ = learner._estimate_once(batch, None)
    assert estimate.advantages.mean().abs() < 1e-5
    assert estimate.advantages.std(correction=0) == pytest.approx(1.0, abs=1e-4)
    parts = learner._minibatches(Part(batch, None, estimate))
    means = [part.estimate.advantages.mean() for part in parts if part.estimate]
    assert max(abs(mean) for mean in means) > 0.05


def test_a_ppo_ratio_is_not_weighted_twice() -> None:
    """V-trace's advantage carries rho; PPO's ratio is that same weight, so its advantage must not carry it again."""
    config = config_of(**{"learner.normalize_advantages": False, "learner.ppo_clip": 0.1})
    learner = learner_of(config)
    batch = act_out(learner.model)
    batch.steps["log_prob"] += 0.05  # the behaviour policy was likelier: rho = exp(-0.05)
    gamma = replace(config, {"learner.lambda_": 0.0}).learner
    hyper = dataclasses.replace(learner.hyper, lambda_=0.0)
    with torch.no_grad():
        result = compute_losses(learner.model, batch, hyper, gamma)
        out = learner.model(batch.obs, batch.state, batch.steps["first"])
        values = learner.model.denormalize_value(out.values)
        alive = (~batch.steps["terminated"]).float()
        rho = torch.tensor(-0.05).exp()
        # With lambda = 0, v_t = V_t + rho (r + gamma V_{t+1} - V_t), so A_t = r + gamma v_{t+1} - V_t by hand.
        td = batch.steps["reward"] + hyper.gamma * alive * values[1:] - values[:-1]
        target = values[:-1] + rho * td
        following = torch.cat([target[1:], values[-1:]])
        advantage = batch.steps["reward"] + hyper.gamma * alive * following - values[:-1]
    assert result.terms["policy_loss"].item() == pytest.approx(-(rho * advantage).mean().item(), abs=1e-5)


@pytest.mark.case("ASY-05")
def test_the_old_lag_is_dropped_only_when_asked_and_counted() -> None:
    for drop, expected in ((False, 0), (True, B)):
        learner = learner_of(config_of(**{"learner.drop_over_lag": drop}))
        batch = act_out(learner.model)
        batch.policy_lag[0] = learner.max_lag + 1
        learner.iterate(batch)
        assert learner.num_dropped == expected


def test_learning_rewards_are_scaled_then_clipped_and_the_raw_ones_stay() -> None:
    settings = config_of(**{"learner.reward_scale": 0.5, "learner.reward_clip": 1.0}).learner
    raw = torch.tensor([-10.0, 1.0, 4.0])
    assert learning_rewards(raw, settings).tolist() == [-1.0, 0.5, 1.0]
    assert raw.tolist() == [-10.0, 1.0, 4.0]


@pytest.mark.parametrize("separate", [True, False])
def test_the_critic_takes_steps_of_its_own_size(separate: bool) -> None:
    values = {"model.separate_critic": separate, "model.normalize_returns": False, "learner.lr": 1e-3}
    moved: list[dict[str, Tensor]] = []
    for scale in (1.0, 8.0):
        learner = learner_of(config_of(**values, **{"learner.critic_lr_scale": scale}))
        before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
        learner.iterate(act_out(learner.model))
        moved.append({name: p.detach() - before[name] for name, p in learner.model.named_parameters()})
    for name, once in moved[0].items():
        scale = 8.0 if name.startswith(("critic.", "value_head.")) else 1.0
        torch.testing.assert_close(moved[1][name], scale * once, rtol=1e-3, atol=1e-7)


def test_linear_and_adaptive_learning_rates() -> None:
    values = {"learner.lr_schedule": "linear", "learner.lr": 1.0e-3, "learner.critic_lr_scale": 5.0}
    learner = learner_of(config_of(steps=10 * T * B, **values))
    for _ in range(4):
        learner.iterate(act_out(learner.model))
    assert learner.hyper.lr == pytest.approx(6e-4)
    assert [group["lr"] for group in learner.optimizer.param_groups] == pytest.approx([6e-4, 3e-3])
    adaptive = learner_of(config_of(**{"learner.lr_schedule": "kl_adaptive", "learner.lr": 1.0e-3}))
    adaptive._schedule_lr(kl=1.0)
    assert adaptive.hyper.lr == pytest.approx(1e-3 / 1.5)
    adaptive._schedule_lr(kl=0.008)
    assert adaptive.hyper.lr == pytest.approx(1e-3 / 1.5)
    adaptive._schedule_lr(kl=0.0)
    assert adaptive.hyper.lr == pytest.approx(1e-3)
    assert adaptive.hyper.version == 2
