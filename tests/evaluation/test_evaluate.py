"""Which episodes an evaluation plays."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from playing import TOYS
from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.evaluation.evaluate import BackgroundEvaluator, evaluate, quota
from pronghorn.evaluation.policy import Policy, build_model
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec


def test_episodes_are_dealt_to_all_tasks() -> None:
    """More rows than episodes, and rows of a task that lie together: both tasks are played."""
    together = np.repeat([0, 1], 32)
    shares = quota(together, 20)
    assert [shares[together == task].sum() for task in (0, 1)] == [10, 10]
    assert quota(np.array([0, 1, 0, 1]), 10).tolist() == [3, 3, 2, 2]
    assert quota(np.zeros(3, np.int64), 7).tolist() == [3, 2, 2]


@pytest.mark.timeout(60)
def test_agents_that_never_appear_are_not_waited_for() -> None:
    """Rows of 'b', and of 'c' after the first episode, end none: 'a' plays their share of the six episodes."""
    spec = EnvSpec({"x": LeafSpec((4,), "float32", "vector")}, ActionSpec((3,)), rows_per_env=3, rows_wait=True)
    values = {
        "env.workers": 1, "env.envs_per_worker": 1, "env.pin": "off", "env.pad_spaces": True, "model.mlp_layers": (8,),
    }  # fmt: skip
    config = resolve(replace(Config(env=f"{TOYS}:Absent"), values), spec)
    policy = Policy(build_model(config.model, spec), config, spec)
    result = evaluate(policy, config, episodes=6, seed=1, num_envs=1)
    assert result is not None
    assert result.returns == [15.0] * 6
    assert result.episode_length_mean == 5.0


@pytest.mark.parametrize(
    ("settings", "returns", "is_due", "asked"),
    [
        ({}, 9.0, False, 0),  # nothing asks for an evaluation: nobody gathers statistics ten times a second
        ({"eval.every_s": 1e-9}, 0.0, True, 0),
        ({"eval.until_return": 5.0}, 4.9, False, 1),
        ({"eval.until_return": 5.0}, 5.0, True, 1),
    ],
)
def test_statistics_are_gathered_only_where_an_evaluation_depends_on_them(
    settings: dict[str, float], returns: float, is_due: bool, asked: int
) -> None:
    calls: list[int] = []

    def training() -> dict[str, float]:
        calls.append(1)
        return {"episodes": 20, "return_mean": returns}

    config = replace(Config(env=f"{TOYS}:Count"), settings)
    spec = EnvSpec({}, ActionSpec((2,)))
    evaluator = BackgroundEvaluator(config, spec, threading.Event())
    assert evaluator.due(training) is is_due
    evaluator.due(training)  # not again within the second
    assert len(calls) == asked
