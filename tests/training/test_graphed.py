"""Optimiser steps by graphs are those of single operations; the graphs are as strict as those of a GPU."""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from test_learner import act_out, config_of, learner_of

from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.errors import PronghornError
from pronghorn.evaluation.policy import build_model
from pronghorn.training.device import Queue
from pronghorn.training.graphed import MAX_GRAPHS, Step, StepGraphs, gradients
from pronghorn.training.learner import Learner, Part
from pronghorn.training.store import Batch
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec
from recorded_graphs import AllOn, RecordingQueue, know_no_autocast

PIXELS = EnvSpec({"obs": LeafSpec((40, 48, 3), "uint8", "image", "hwc", 0.0, 255.0)}, ActionSpec((4,)))


def graphed(learner: Learner, graphs: str = "on", queue: Any = None) -> Learner:
    """The same learner with graphs, and without threads of its own, as on a GPU."""
    twin = copy.deepcopy(learner)
    twin._graphs = StepGraphs(twin._parameters, queue or RecordingQueue(), graphs=graphs, rough=False)
    return twin


def pixel_batch(seed: int) -> Batch:
    rng, length, count = np.random.default_rng(seed), 4, 4
    steps = {name: torch.from_numpy(rng.standard_normal((length, count)).astype(np.float32))
             for name in ("reward", "value", "truncation_value")}  # fmt: skip
    steps["log_prob"] = torch.full((length, count), -np.log(4))
    steps["discrete"] = torch.from_numpy(rng.integers(0, 4, (length, count, 1)))
    steps["continuous"] = torch.zeros(length, count, 0)
    for name in ("first", "terminated", "truncated"):
        steps[name] = torch.from_numpy(rng.random((length + (name == "first"), count)) < 0.2)
    obs = {"obs": torch.from_numpy(rng.integers(0, 256, (length + 1, count, 40, 48, 3)).astype(np.uint8))}
    return Batch(obs, steps, torch.zeros(count, 8), np.zeros((length, count), np.int64))


def pixel_learner(**values: Any) -> Learner:
    small = {"env.workers": 1, "env.envs_per_worker": 4, "learner.unroll_length": 4, "learner.batch_unrolls": 4,
             "model.core_size": 8, "model.conv_features": 16, "threads": 1, "learner.minibatches": 2}  # fmt: skip
    config = resolve(replace(Config(env="x:y"), small | values), PIXELS)
    torch.manual_seed(0)
    return Learner(config, build_model(config.model, PIXELS))


def assert_same(one: Learner, other: Learner, batches: list[Batch], tolerance: float = 1e-5) -> None:
    for batch in batches:
        expected, seen = one.iterate(batch), other.iterate(batch)
        assert expected.keys() == seen.keys()
        for name, value in expected.items():
            assert seen[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    for (name, a), b in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), name
    assert other.updates == one.updates > 0


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"algo": "impala"},
        {"algo": "impala", "learner.advantage": "epsilon"},
        {"algo": "ppo", "learner.minibatches": 2},
        {"model.core": "none", "learner.epochs": 2, "learner.minibatches": 4},
        {"learner.drop_over_lag": True, "learner.value_clip": 0.2, "learner.kl_coef": 0.1},
        {"learner.exploration": "symmetric_kl", "learner.optimizer": "rmsprop_tf", "model.core": "gru"},
    ],
    ids=["appo-lstm", "impala", "epsilon", "ppo-minibatches", "single-steps", "weights", "symmetric-kl"],
)
def test_learning_by_graphs_is_learning(values: dict[str, Any]) -> None:
    """Masks, composite actions, normalisers and resets inside the unrolls included."""
    one = learner_of(config_of(threads=1, **values))
    other = graphed(one)
    batches = [act_out(one.model, seed) for seed in range(3)]
    batches[1].policy_lag[2] = 99  # over any limit
    assert_same(one, other, batches)
    assert other._graphs is not None
    assert len(other._graphs._graphs) == 1  # one shape, so made once


def test_the_stand_in_of_a_cpu_leaves_what_a_graph_leaves() -> None:
    """So that a script can be tried without a GPU."""
    one = learner_of(config_of(threads=1))
    assert_same(one, graphed(one, queue=Queue(torch.device("cpu"))), [act_out(one.model, seed) for seed in range(3)])


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-3)])
def test_images_in_either_precision(precision: str, tolerance: float) -> None:
    one = pixel_learner(precision=precision)
    other = graphed(one)
    assert_same(one, other, [pixel_batch(seed) for seed in range(3)], tolerance)
    for parameter in other._parameters:
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()  # else fused Adam would mix up weights


def test_gradients_have_the_memory_format_of_their_parameters() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    unused = nn.Parameter(torch.ones(2))
    grad, nothing = gradients((weight.contiguous() * torch.arange(48.0).view(4, 3, 2, 2)).sum(), [weight, unused])
    assert grad is not None
    assert nothing is None
    assert grad.stride() == weight.stride()
    assert torch.equal(grad, torch.arange(48.0).view(4, 3, 2, 2))


def test_hyper_parameters_make_a_new_graph_and_the_learning_rate_does_not() -> None:
    one = learner_of(config_of(threads=1))
    other = graphed(one)
    batches = [act_out(one.model, seed) for seed in range(2)]
    assert_same(one, other, batches)
    for learner in (one, other):
        learner.set_hyper(lr=0.01)
    assert_same(one, other, batches)
    assert len(other._graphs._graphs) == 1
    for learner in (one, other):
        learner.set_hyper(value_coef=3.0, exploration_coef=0.2)
    assert_same(one, other, batches)
    assert len(other._graphs._graphs) == 2


@pytest.mark.parametrize("algo", ["appo", "impala", "ppo"])
@pytest.mark.parametrize("kind", ["mixed", "pixels"])
def test_the_work_of_a_step_meets_nothing_that_lies_on_this_side(
    algo: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that only knows shapes, so that every tensor is either there or here."""
    know_no_autocast(monkeypatch)
    one, batch = (pixel_learner(algo=algo), pixel_batch(0)) if kind == "pixels" else (learner_of(
        config_of(algo=algo, threads=1, **{"learner.value_clip": 0.2})), act_out(learner_of(config_of()).model))
    there = graphed(one)
    there.model.to("meta")
    there._parameters = list(there.model.parameters())
    part = Part(batch, torch.ones(batch.policy_lag.shape), None)
    part = part.with_tensors({name: tensor.to("meta") for name, tensor in part.tensors()})
    there._differentiate(part)  # what depends on the device alone is made once
    with AllOn("meta") as seen:
        step = there._differentiate(part)
    assert seen.num_operations > 100
    assert step.numbers.shape == (len(step.names),)


# ---------------------------------------------------------------- where graphs fail


class Doubled(RecordingQueue):
    """Graphs whose gradients, the last of their outputs, are twice as large."""

    def graph(self, work: Any) -> Any:
        replay = super().graph(work)
        outputs = next(args[0] for func, args, _, _ in self.last.operations[::-1] if "foreach_copy" in str(func))

        def twice() -> None:
            replay()
            for grad in outputs[2:]:
                grad.mul_(2.0)

        return twice


def test_a_graph_with_other_gradients_is_an_error_or_a_stated_fallback(caplog: pytest.LogCaptureFixture) -> None:
    one, batches = pixel_learner(), [pixel_batch(seed) for seed in range(2)]
    strict = graphed(one)
    strict._graphs._queue = Doubled()
    with pytest.raises(PronghornError, match=r"differs from single operations: gradients by 1\b"):
        strict.iterate(batches[0])
    other = graphed(one, "auto")
    other._graphs._queue = Doubled()
    with caplog.at_level(logging.WARNING, "pronghorn"):
        assert_same(one, other, batches)
    assert caplog.text.count("Going on with single operations") == 1


def test_what_cannot_be_a_graph_is_an_error_or_a_stated_fallback(caplog: pytest.LogCaptureFixture) -> None:
    weight = nn.Parameter(torch.ones(2))

    def asks(inputs: Any) -> Step:
        loss = (weight * inputs[0]).sum()
        (weight.grad,) = gradients(loss, [weight])
        return Step(("loss",), torch.tensor([loss.item()]), inputs[0])

    with pytest.raises(PronghornError, match="not permitted when stream is capturing"):
        StepGraphs([weight], RecordingQueue(), graphs="on", rough=False)(asks, [torch.ones(2)], ())
    graphs = StepGraphs([weight], RecordingQueue(), graphs="auto", rough=False)
    with caplog.at_level(logging.WARNING, "pronghorn"):
        for value in (1.0, 3.0):
            step = graphs(asks, [torch.full((2,), value)], ())
            assert step.numbers.tolist() == [2 * value]
            assert weight.grad.tolist() == [value, value]
    assert caplog.text.count("Going on with single operations") == 1


def linear_step(weight: nn.Parameter) -> Any:
    def function(inputs: Any) -> Step:
        loss = (weight * inputs[0]).sum()
        (weight.grad,) = gradients(loss, [weight])
        return Step(("loss",), loss.detach()[None], inputs[0])

    return function


def test_numbers_that_are_not_finite_make_no_graph_yet() -> None:
    weight = nn.Parameter(torch.ones(2))
    graphs, function = StepGraphs([weight], RecordingQueue(), graphs="on", rough=False), linear_step(weight)
    step = graphs(function, [torch.tensor([1.0, float("nan")])], ())
    assert step.numbers.isnan().all()
    assert not graphs._graphs
    step = graphs(function, [torch.tensor([1.0, 2.0])], ())
    assert (step.numbers.tolist(), weight.grad.tolist()) == ([3.0], [1.0, 2.0])
    assert len(graphs._graphs) == 1


def test_what_a_step_returns_stays_when_the_next_one_is_made() -> None:
    weight = nn.Parameter(torch.ones(2))
    graphs, function = StepGraphs([weight], RecordingQueue(), graphs="on", rough=False), linear_step(weight)
    first = graphs(function, [torch.tensor([1.0, 2.0])], ()).targets
    second = graphs(function, [torch.tensor([5.0, 7.0])], ()).targets
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [5.0, 7.0])
    assert weight.grad.tolist() == [5.0, 7.0]


def test_there_are_never_more_graphs_than_pay(caplog: pytest.LogCaptureFixture) -> None:
    weight = nn.Parameter(torch.ones(()))
    graphs, function = StepGraphs([weight], RecordingQueue(), graphs="auto", rough=False), linear_step(weight)
    with caplog.at_level(logging.WARNING, "pronghorn"):
        for size in range(1, MAX_GRAPHS + 4):
            assert graphs(function, [torch.ones(size)], ()).numbers.tolist() == [size]
    assert len(graphs._graphs) == MAX_GRAPHS
    assert "more than 8 sizes" in caplog.text
