from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from pronghorn.envworker.building import make
from pronghorn.envworker.single import GymnasiumEnv, inherent_frame_skip
from pronghorn.envworker.spaces import ContractBroken

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")
NOTHING = np.zeros(0, np.float32)
ZERO = np.zeros(1, np.int64)


def toy(name, **kwargs):
    return make("call", f"{TOYS}:{name}", kwargs)


def test_a_counter_steps_to_its_end():
    env = toy("Counter", length=2)
    assert env.reset(seed=5)["obs"].tolist() == [0.0]
    obs, *rest, _ = env.step(ZERO, NOTHING)
    assert (obs["obs"].tolist(), rest) == ([10.0], [1.0, False, False, False])
    obs, *rest, info = env.step(ZERO, NOTHING)
    assert (obs["obs"].tolist(), rest) == ([20.0], [2.0, True, False, True])
    assert info == {"count": 2}
    assert env.stats() == {"count": 2.0}


def test_truncation_is_not_termination():
    env = toy("Counter", length=1, truncate=True)
    env.reset()
    assert env.step(ZERO, NOTHING)[1:5] == (1.0, False, True, True)


def test_the_spec_says_what_the_environment_is():
    env = make("gym", "CartPole-v1", {}, {"info": ["x"]})
    assert env.spec["name"] == "CartPole-v1"
    tree = {"kind": "discrete", "at": 0, "start": 0}
    assert env.spec["action"] == {"discrete": [2], "low": [], "high": [], "tree": tree}
    assert env.spec["info"] == ["x"]
    assert env.spec["render_fps"] == 50.0
    assert env.spec["frame_skip"] == 1
    env.close()


def test_rendering_has_to_be_asked_for():
    env = make("gym", "CartPole-v1", {}, {"render": True})
    env.reset(0)
    frame = env.render()
    assert frame.dtype == np.uint8
    assert frame.shape == (400, 600, 3)
    env.close()


@pytest.mark.case("ENV-04")
def test_an_old_reset_is_explained():
    with pytest.raises(ContractBroken, match=r"OldApi.reset\(\) returned 1 value; 2 are needed: \(obs, info\)"):
        toy("OldApi").reset(0)


@pytest.mark.case("ENV-04")
def test_an_old_step_is_explained():
    env = toy("OldStep")
    env.reset(0)
    with pytest.raises(ContractBroken, match=r"OldStep.step\(\) returned 4 values; 5 are needed"):
        env.step(ZERO, NOTHING)


@pytest.mark.case("ENV-04")
def test_an_old_step_behind_a_gymnasium_wrapper_is_explained():
    class Old(gymnasium.Env):
        observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return 0, 0.0, False, {}

    env = GymnasiumEnv(gymnasium.wrappers.TimeLimit(Old(), 5))
    env.reset(0)
    with pytest.raises(ContractBroken, match=r"Old.step\(\) is of the old Gym interface .*expected 5, got 4"):
        env.step(ZERO, NOTHING)


class Skipping(gymnasium.Env):
    """As Atari: repeats each action itself, four times."""

    observation_space, action_space = spaces.Discrete(100), spaces.Discrete(2)

    def __init__(self, frameskip=4):
        self.frameskip, self.frames = frameskip, 0

    def reset(self, *, seed=None, options=None):
        self.frames = 0
        return 0, {}

    def step(self, action):
        self.frames += self.frameskip
        return self.frames, 1.0, self.frames >= 20, False, {}


@pytest.mark.case("ENV-11")
def test_a_second_frame_skip_is_refused_and_the_first_is_reported():
    assert GymnasiumEnv(Skipping()).spec["frame_skip"] == 4
    with pytest.raises(ContractBroken, match=r"already repeats each action 4 times, together .* 16 frames"):
        GymnasiumEnv(Skipping(), frame_skip=4)
    assert inherent_frame_skip(gymnasium.wrappers.TimeLimit(Skipping(2), 9)) == 2


def test_our_frame_skip_sums_rewards_and_stops_at_the_end():
    env = GymnasiumEnv(Skipping(frameskip=1), frame_skip=8)
    env.reset(0)
    assert env.spec["frame_skip"] == 8
    seen = [env.step(ZERO, NOTHING)[0]["obs"] for _ in range(2)]
    assert seen == [8, 16]
    obs, reward, terminated, *_ = env.step(ZERO, NOTHING)
    assert (obs["obs"], reward, terminated) == (20, 4.0, True)


@pytest.mark.case("ENV-16")
def test_reset_options_reach_every_reset():
    class Levels(Skipping):
        def reset(self, *, seed=None, options=None):
            self.calls = [*getattr(self, "calls", []), (seed, options)]
            return super().reset()

    raw = Levels()
    env = GymnasiumEnv(raw, reset_options={"level": 3})
    env.reset(5)
    env.reset(None)
    assert raw.calls == [(5, {"level": 3}), (None, {"level": 3})]


def test_a_reward_that_is_not_finite_is_refused():
    env = toy("Failing", how="nan", at=1)
    env.reset(0)
    with pytest.raises(ContractBroken, match=r"Failing.step\(\) returned the reward nan"):
        env.step(ZERO, NOTHING)
