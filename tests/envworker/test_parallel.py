from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pronghorn.envworker.building import flat, make
from pronghorn.envworker.many_rows import FIRST, INACTIVE, LAST, STEPPED
from pronghorn.envworker.spaces import ContractBroken

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")


def squad(**options):
    return make("call", f"{TOYS}:Squad", {}, options)


def test_info_of_an_agents_last_step_comes_with_its_last_record():
    """'b' ends at step 2 and waits until the others have ended at step 5; the toy's info is twice the step."""
    env = squad(info=["hits"])
    assert env.reset(0).event.tolist() == [FIRST] * 3
    steps = [env.step(np.zeros((3, 1), np.int64), np.zeros((3, 0), np.float32)) for _ in range(5)]
    assert [step.event[1] for step in steps] == [STEPPED, INACTIVE, INACTIVE, INACTIVE, LAST]
    assert [step.info["hits"][0] for step in steps] == [2, 4, 6, 8, 10]
    np.testing.assert_array_equal([step.info["hits"][1] for step in steps], [2, np.nan, np.nan, np.nan, 4])
    assert [step.stats for step in steps[:4]] == [{}] * 4
    # 'c' is not in the next episode: its record waits for the one after that
    assert steps[4].stats == {0: {"hits": 10.0}, 1: {"hits": 4.0}}


def test_an_agent_that_plays_on_without_an_observation_is_an_error():
    env = squad()
    env.reset(0)
    raw = env.env
    step = raw.step
    raw.step = lambda actions: ({}, *step(actions)[1:])
    with pytest.raises(ContractBroken, match=r"Squad.step\(\) returned no observation of 'a'"):
        env.step(np.zeros((3, 1), np.int64), np.zeros((3, 0), np.float32))


def test_agents_that_take_turns_are_refused_in_words():
    class Turns:
        possible_agents, agent_iter = ["a"], None

    with pytest.raises(ContractBroken, match=r"mine takes turns .* give its parallel_env"):
        flat(Turns(), "mine")
