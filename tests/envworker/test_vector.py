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


def test_the_vector_of_a_task_is_the_task():
    """CartPole's own vector and its plain environment, put into the same states: the same steps and ends."""
    env, plain = make("gym", "CartPole-v1", {}, {"vector_rows": 5}), make("gym", "CartPole-v1").env.unwrapped
    assert (env.spec["rows_per_env"], env.spec["rows_wait"]) == (5, True)
    env.reset(7)
    plain.reset(seed=7)
    rng = np.random.default_rng(0)
    ends, starts = 0, env.env.state.T.copy()
    for _ in range(60):
        before, action = env.env.state.T.copy(), rng.integers(2, size=(5, 1))
        step = env.step(action, np.zeros((5, 0), np.float32))
        for row in np.flatnonzero(step.event == STEPPED):
            plain.state, plain.steps_beyond_terminated = before[row], None
            obs, reward, terminated, _, _ = plain.step(int(action[row, 0]))
            np.testing.assert_allclose(step.obs["obs"][row], obs, rtol=1e-6)
            assert (step.reward[row], terminated) == (reward, False)
        for row in np.flatnonzero(step.event == INACTIVE):  # it ended in this step; the record comes with its reset
            plain.state, plain.steps_beyond_terminated = before[row], None
            assert plain.step(int(action[row, 0]))[2]
        last = step.event == LAST
        assert step.terminated[last].all()
        assert (step.reward[last] == 1.0).all()
        ends += last.sum()
    assert ends > 5
    assert np.abs(starts).max() <= 0.05
    env.close()


def test_the_vector_of_a_task_cuts_its_episodes():
    env = make("gym", "CartPole-v1", {"max_episode_steps": 3}, {"vector_rows": 2})
    env.reset(0)
    steps = [env.step(np.array([[i % 2], [i % 2]]), np.zeros((2, 0), np.float32)) for i in range(4)]
    assert steps[2].event.tolist() == [INACTIVE, INACTIVE]
    assert steps[3].truncated.tolist() == [True, True]
    assert not steps[3].terminated.any()
    env.close()
