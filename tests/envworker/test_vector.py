from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pronghorn.envworker.building import make
from pronghorn.envworker.many_rows import INACTIVE, LAST, STEPPED
from pronghorn.envworker.spaces import ContractBroken

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")
NOTHING = np.zeros((3, 0), np.float32)


def vector(mode, **options):
    return make("call", f"{TOYS}:vector_episodes", {"mode": mode}, options)


@pytest.mark.parametrize("mode", ["NextStep", "Unsaid", "SameStep", "OldName", "Arrays", "Disabled"])
def test_info_is_that_of_the_step_also_where_an_episode_ends(mode):
    """The toy's info is the number of the step, which its reward tells too; a reset reports 0.5."""
    env = vector(mode, info=["level", "never"])
    env.reset(3)
    ends = 0
    for _ in range(40):
        step = env.step(np.zeros((3, 1), np.int64), NOTHING)
        moved = (step.event == STEPPED) | (step.event == LAST)
        counts = step.reward % 100 // 10
        assert step.info["level"][moved].tolist() == counts[moved].tolist()
        assert np.isnan(step.info["never"]).all()
        over = np.flatnonzero(step.event == LAST).tolist()
        assert step.stats == {row: {"level": counts[row]} for row in over}
        ends += len(over)
    assert ends > 30


def test_only_what_a_row_reported_itself_is_its_info():
    sys.path.append(str(Path(TOYS).parent))
    from toy_envs import vector_episodes

    raw = vector_episodes("NextStep")
    step_of = raw.step

    def step(actions):
        *rest, _ = step_of(actions)
        given = np.array([True, False, True])
        return (*rest, {"score": np.array([1, 2, 3]), "_score": given, "image": np.zeros((3, 2)), "who": {"a": 1}})

    raw.step = step
    from pronghorn.envworker.building import flat

    env = flat(raw, options={"info": ["score"]})
    env.reset(0)
    first = env.step(np.zeros((3, 1), np.int64), NOTHING)
    assert first.event.tolist() == [INACTIVE, STEPPED, STEPPED]
    np.testing.assert_array_equal(first.info["score"][1:], [np.nan, 3])
    second = env.step(np.zeros((3, 1), np.int64), NOTHING)
    assert second.event[0] == LAST
    assert second.stats == {0: {"score": 1.0}}


def test_a_reset_drops_what_was_held():
    env = vector("NextStep")
    env.reset(0)
    assert env.step(np.zeros((3, 1), np.int64), NOTHING).event[0] == INACTIVE  # the first episode of row 0 is one step
    env.reset(0)
    assert env.step(np.zeros((3, 1), np.int64), NOTHING).event[0] == STEPPED


def test_actions_are_not_repeated_here():
    with pytest.raises(ContractBroken, match="frame_skip = 4: SyncVectorEnv has several rows, so it has to repeat"):
        vector("NextStep", frame_skip=4)
