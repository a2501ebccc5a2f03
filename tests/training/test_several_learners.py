"""Several learners on parts of a batch take the steps that one takes on the whole, to float tolerance."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.evaluation.policy import build_model
from pronghorn.training.learner import Learner, Part
from pronghorn.training.store import Batch
from pronghorn.training.world import World
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec
from worlds import together

SPEC = EnvSpec({"x": LeafSpec((3,), "float32", "vector")}, ActionSpec(discrete=(4,)))
T, B = 5, 8
_BUILDING = threading.Lock()  # initial weights come from a generator that threads share
SPLITS = {2: (3, 5), 3: (2, 5, 1)}  # unequal parts, as only lost samples make them in a run


def config_of(**values: Any) -> Config:
    base = {"env.workers": 1, "env.envs_per_worker": 8, "learner.unroll_length": T, "learner.batch_unrolls": B,
            "learner.epochs": 1, "learner.minibatches": 1, "model.core": "gru", "model.core_size": 8, "threads": 1,
            "max_lag": 16, "learner.lr": 1e-2}  # fmt: skip
    return resolve(replace(Config(env="x:y"), base | values), SPEC)


def made_up(seed: int) -> Batch:
    """Unrolls of a policy that is not the learner's, some steps of them too old."""
    rng = np.random.default_rng(seed)
    first = torch.from_numpy(rng.random((T + 1, B)) < 0.2)
    numbers = {k: torch.from_numpy(rng.normal(size=(T, B)).astype(np.float32)) for k in ("reward", "value", "noise")}
    steps = {
        "first": first, "discrete": torch.from_numpy(rng.integers(0, 4, (T, B, 1))), "continuous": torch.zeros(T, B, 0),
        "log_prob": -1.3 + 0.2 * numbers["noise"], "value": numbers["value"], "reward": 3.0 * numbers["reward"] + 1.0,
        "version": torch.zeros(T, B, dtype=torch.int64), "terminated": first[1:],
        "truncated": torch.zeros_like(first[1:]),
        "truncation_value": torch.zeros(T, B), "task_id": torch.zeros(T, B, dtype=torch.int64),
    }  # fmt: skip
    obs = {"x": torch.from_numpy(rng.normal(3.0, 2.0, (T + 1, B, 3)).astype(np.float32))}
    return Batch(obs, steps, torch.from_numpy(rng.normal(size=(B, 8)).astype(np.float32)), rng.integers(0, 20, (T, B)))


def part_of(batch: Batch, rank: int, size: int) -> Batch:
    """The unrolls of one learner; parts lie side by side in the whole."""
    if size == 1:
        return batch
    end = int(np.cumsum(SPLITS[size])[rank])
    index = np.arange(end - SPLITS[size][rank], end)
    state = batch.state if batch.state.shape[1] == 8 else torch.zeros(B, 0)
    return dataclasses.replace(batch, state=state).columns(torch.from_numpy(index), index)


def learner_of(config: Config, world: World | None, kind: type[Learner] = Learner) -> Learner:
    with _BUILDING:
        torch.manual_seed(0)
        return kind(config, build_model(config.model, SPEC), world)


def train(config: Config, world: World | None, seeds: range, change: Callable[[Batch], None] | None = None) -> Learner:
    """A learner after an iteration on its part of each batch."""
    size, rank = (world.size, world.rank) if world else (1, 0)
    learner = learner_of(config, world)
    for seed in seeds:
        batch = made_up(seed)
        if config.model.core == "none":
            batch.state = torch.zeros(B, 0)
        if change:
            change(batch)
        learner.last_report = learner.iterate(part_of(batch, rank, size))  # type: ignore[attr-defined]
    return learner


def assert_same(one: Learner, other: Learner, atol: float = 3e-5) -> None:
    for (name, a), b in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=atol), (name, (a - b).abs().max())


def assert_told_the_same(one: Learner, other: Learner) -> None:
    left, right = one.last_report, other.last_report  # type: ignore[attr-defined]
    assert left.keys() == right.keys()
    for name in left.keys() - {"policy_lag_min", "policy_lag_mean", "policy_lag_max"}:  # of its own part
        assert left[name] == pytest.approx(right[name], rel=2e-3, abs=2e-4), name


ALGORITHMS: dict[str, dict[str, Any]] = {
    "appo": {"algo": "appo"},
    "appo, advantages normalised": {"algo": "appo", "learner.normalize_advantages": True},
    "appo, no memory": {"algo": "appo", "model.core": "none"},
    "impala, sums": {"algo": "impala", "learner.reduction": "sum", "learner.lr": 1e-3},
    "ppo": {"algo": "ppo", "max_lag": 0, "learner.epochs": 3, "learner.max_grad_norm": 0.1},
    "ppo, adaptive": {"algo": "ppo", "max_lag": 0, "learner.epochs": 2, "learner.lr_schedule": "kl_adaptive"},
    "rmsprop": {"algo": "a2c", "max_lag": 0, "learner.optimizer": "rmsprop"},
    "plain returns": {"algo": "appo", "model.normalize_returns": False, "model.normalize_obs": False},
    "too old": {"algo": "appo", "max_lag": 12, "learner.drop_over_lag": True, "learner.normalize_advantages": True},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_learners_of_parts_are_one_learner_of_the_whole(name: str, size: int) -> None:
    """Weights, normalisers, learning rate and all that is told, after several batches of unequal parts."""
    config = config_of(**ALGORITHMS[name])
    one = train(config, None, range(4))
    several = together(size, lambda world: train(config, world, range(4)))
    for learner in several:
        assert_same(one, learner)
        assert_told_the_same(one, learner)
        assert learner.hyper.lr == one.hyper.lr
        assert learner.updates == one.updates
    first = several[0].model.state_dict()
    for learner in several[1:]:  # not only close: the same
        assert all(torch.equal(a, first[k]) for k, a in learner.model.state_dict().items())


def test_samples_that_do_not_count_on_one_learner_alone() -> None:
    """All of learner 0's samples are too old, so the mean is that of learner 1's."""
    config = config_of(max_lag=12, **{"learner.drop_over_lag": True})

    def age(batch: Batch) -> None:
        batch.policy_lag[:, :3], batch.policy_lag[:, 3:] = 15, 1

    one = train(config, None, range(2), age)
    several = together(2, lambda world: train(config, world, range(2), age))
    for learner in several:
        assert_same(one, learner)
    assert [learner.num_dropped for learner in several] == [2 * 3 * T, 0]


def test_steps_count_the_samples_of_all() -> None:
    config = config_of()
    half = dataclasses.replace(config, learner=dataclasses.replace(config.learner, batch_unrolls=B // 2))

    def work(world: World) -> int:
        learner = learner_of(half, world)
        batch, index = made_up(0), np.arange(B // 2) + world.rank * B // 2
        learner.iterate(batch.columns(torch.from_numpy(index), index))
        return learner.steps

    assert together(2, work) == [T * B, T * B]


@pytest.mark.case("FLT-12")
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_nan_in_one_learners_batch_is_a_step_that_all_skip(epochs: int) -> None:
    """Weights and statistics stay; the next batch is learned by all."""
    config = config_of(**{"learner.epochs": epochs})

    def work(world: World) -> Learner:
        learner = train(config, world, range(1))
        before = {k: v.clone() for k, v in learner.model.state_dict().items()}
        updates, batch = learner.updates, made_up(1)
        batch.steps["reward"][2, -1] = math.nan  # in the last learner's part
        learner.iterate(part_of(batch, world.rank, world.size))
        assert all(torch.equal(v, before[k]) for k, v in learner.model.state_dict().items())
        assert learner.updates == updates
        learner.iterate(part_of(made_up(2), world.rank, world.size))
        assert learner.updates == updates + epochs
        return learner

    several = together(2, work)
    assert [learner.num_skipped for learner in several] == [epochs, epochs]
    assert_same(several[0], several[1], 0.0)


def test_one_who_stops_ends_the_iteration_of_all() -> None:
    config = config_of(**{"learner.epochs": 3})

    def work(world: World) -> int:
        learner = learner_of(config, world)
        learner.iterate(part_of(made_up(0), world.rank, world.size), lambda: world.rank == 1)
        return learner.updates

    assert together(2, work) == [1, 1]


@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_minibatch_is_one_of_each_learner(core: str) -> None:
    """Each draws its own; the step is that of one learner on all of them side by side."""
    values = {"model.core": core, "learner.epochs": 2, "learner.minibatches": 2 if core == "gru" else 4, "algo": "ppo",
              "max_lag": 0}  # fmt: skip
    config = config_of(**values)
    parts: dict[int, list[Part]] = {0: [], 1: []}

    class Noting(Learner):
        def _minibatches(self, whole: Part) -> Iterator[Part]:
            for part in super()._minibatches(whole):
                parts[self._world.rank].append(part)
                yield part

    class Replaying(Learner):
        def _minibatches(self, whole: Part) -> Iterator[Part]:
            for a, b in zip(parts[0], parts[1], strict=True):
                yield side_by_side(a, b)

    def learn(kind: type[Learner], world: World | None) -> Learner:
        learner = learner_of(config, world, kind)
        learner.seed = 7 if world is None else world.rank
        batch = made_up(0)
        batch.state = batch.state if core == "gru" else torch.zeros(B, 0)
        learner.iterate(batch if world is None else part_of(batch, world.rank, world.size))
        return learner

    several = together(2, lambda world: learn(Noting, world))
    one = learn(Replaying, None)
    for learner in several:
        assert_same(one, learner)


def side_by_side(a: Part, b: Part) -> Part:
    joined = {k: torch.cat((v, dict(b.tensors())[k]), 0 if k == "state" else 1) for k, v in a.tensors()}
    whole = a.with_tensors(joined)
    lag = np.concatenate((a.batch.policy_lag, b.batch.policy_lag), 1)
    return whole._replace(batch=dataclasses.replace(whole.batch, policy_lag=lag))


def test_a_bug_that_forgets_the_weights_of_parts_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance above is no blindfold: a plain mean over learners of unequal parts is told apart."""
    config = config_of()
    one = train(config, None, range(3))

    def halved(learner: Learner, step: Any, part: Part, stops: bool) -> tuple[Any, bool]:
        for parameter in learner._parameters:
            learner._world.sums(parameter.grad).div_(2.0)
        norm = learner._clip().reshape(1)
        return step._replace(names=(*step.names, "grad_norm"), numbers=torch.cat((step.numbers, norm))), False

    monkeypatch.setattr(Learner, "_add_up", halved)
    several = together(2, lambda world: train(config, world, range(3)))
    with pytest.raises(AssertionError):
        assert_same(one, several[0])
