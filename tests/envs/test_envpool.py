"""EnvPool: one transition stream, equal to its own single environment played by hand, without its dummy steps."""

from __future__ import annotations

import os
import sys
import warnings

import numpy as np
import pytest

from pronghorn.config import Config, EnvConfig
from pronghorn.defaults import resolve
from pronghorn.envs.registry import make_env, make_pool
from pronghorn.errors import ConfigError, EnvError, MissingExtraError, SpaceError, UnknownEnvError
from pronghorn.types import Event

envpool = pytest.importorskip("envpool")

from pronghorn.envs.envpool import EnvPoolPool  # noqa: E402
from pronghorn.envs.workers import derive_seed  # noqa: E402

FIRST, STEP, LAST = Event.FIRST, Event.STEP, Event.LAST


@pytest.fixture
def make():
    pools = []

    def make_pool(task, num_rows, *, options=None, num_groups=1, seed=3, render=False, **settings):
        pool = EnvPoolPool(
            task.split(","), num_rows, num_groups=num_groups, num_threads=1, seed=seed, render=render, options=options,
            settings=settings,
        )  # fmt: skip
        pools.append(pool)
        return pool

    yield make_pool
    for pool in pools:
        pool.close()


def step(pool, ready, discrete, continuous=None):
    """Answer one unit with one action (or one per row) and receive the next unit."""
    n, spec = len(ready.rows), pool.spec.action
    discrete = np.broadcast_to(np.asarray(discrete, np.int64), (spec.num_discrete, n)).T
    pool.send(ready.rows, discrete, np.zeros((n, spec.num_continuous)) if continuous is None else continuous)
    return pool.recv(1.0)


class ByHand:
    """The definition, written slowly on one bare environment: its reset step is made after each end, and left out."""

    def __init__(self, task, seed, **settings):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.env = envpool.make_gymnasium(task, num_envs=1, num_threads=1, seed=[seed], **settings)
            self.first_obs = self.env.reset()[0][0]

    def step(self, action):
        """(obs, reward, terminated, truncated, final obs where truncated, infos)"""
        obs, reward, terminated, truncated, info = self.env.step(np.array([action], np.int32))
        final = obs[0] if truncated[0] else None
        if terminated[0] or truncated[0]:
            obs = self.env.step(np.zeros(1, np.int32))[0]
        return obs[0], reward[0], bool(terminated[0]), bool(truncated[0]), final, info


@pytest.mark.case("EPI-06", "EPI-07")
@pytest.mark.parametrize("limit", [7, 11, 500])
def test_the_stream_is_that_of_environments_reset_by_hand(make, limit):
    """Three rows that end by the task and by a limit, out of step; every number of every decision is compared."""
    pool = make("CartPole-v1", 3, max_episode_steps=limit)
    slow = [ByHand("CartPole-v1", derive_seed(3, row, 0), max_episode_steps=limit) for row in range(3)]
    rng, ready = np.random.default_rng(0), pool.recv(1.0)
    assert ready.event.tolist() == [FIRST] * 3
    for row in range(3):
        assert ready.obs["obs"][row].tolist() == slow[row].first_obs.tolist()
    ends = {"terminated": 0, "truncated": 0}
    for _ in range(150):
        actions = rng.integers(0, 2, 3)
        ready = step(pool, ready, actions)
        finals = dict(zip(ready.final_index.tolist(), ready.final_obs["obs"], strict=True))
        for row in range(3):
            obs, reward, terminated, truncated, final, _ = slow[row].step(actions[row])
            assert ready.obs["obs"][row].tolist() == obs.tolist()
            assert (ready.reward[row], ready.terminated[row], ready.truncated[row]) == (reward, terminated, truncated)
            assert ready.event[row] == (LAST if terminated or truncated else STEP)
            assert ready.episode_over[row] == (terminated or truncated)
            assert (row in finals) == truncated
            if truncated:
                assert finals[row].tolist() == final.tolist()
                assert finals[row].tolist() != obs.tolist()  # obs is of the next episode
            ends["terminated"] += terminated
            ends["truncated"] += truncated
    assert ends["truncated"] >= {7: 30, 11: 20, 500: 0}[limit]
    assert ends["terminated"] >= {7: 0, 11: 1, 500: 15}[limit]


@pytest.mark.case("EPI-06")
@pytest.mark.parametrize("num_groups", [1, 2])
def test_no_dummy_step_is_recorded(make, num_groups):
    """CartPole pays 1 a step: an episode's rewards sum up to its length, and nothing with reward 0 is ever seen."""
    pool = make("CartPole-v1", 4, num_groups=num_groups, max_episode_steps=30)
    steps, total, lengths, rng = np.zeros(4, np.int64), np.zeros(4), [], np.random.default_rng(1)
    ready = pool.recv(1.0)
    for _ in range(200 * num_groups):
        moved = ready.event != FIRST
        assert set(ready.event.tolist()) <= {FIRST, STEP, LAST}
        assert (ready.reward[moved] == 1).all()
        steps[ready.rows[moved]] += 1
        total[ready.rows[moved]] += ready.reward[moved]
        over = ready.rows[ready.episode_over]
        assert sorted(record["row"] for record in ready.records) == over.tolist()
        lengths += steps[over].tolist()
        assert total[over].tolist() == steps[over].tolist()
        steps[over], total[over] = 0, 0
        ready = step(pool, ready, rng.integers(0, 2, len(ready.rows)))
    assert max(lengths) == 30
    assert len(lengths) > 20


@pytest.mark.case("EPI-10")
def test_a_life_lost_is_a_boundary_inside_a_game_that_goes_on(make):
    pool = make("Breakout-v5", 2, episodic_life=True)
    slow = [ByHand("Breakout-v5", derive_seed(3, row, 0), episodic_life=True) for row in range(2)]
    ready, lost, games = pool.recv(1.0), 0, 0
    rng = np.random.default_rng(0)
    while games < 2:
        actions = rng.integers(0, 4, 2)
        ready = step(pool, ready, actions)
        for row in range(2):
            *_, terminated, _, _, info = slow[row].step(actions[row])
            assert ready.terminated[row] == terminated == (ready.event[row] == LAST)
            assert ready.episode_over[row] == (info["terminated"][0] == 1) == (terminated and info["lives"][0] == 0)
            lost += terminated and not ready.episode_over[row]
            games += ready.episode_over[row]
        assert [record["row"] for record in ready.records] == np.flatnonzero(ready.episode_over).tolist()
        assert not ready.truncated.any()
    assert lost >= 4 * games


@pytest.mark.case("EPI-10")
def test_a_time_limit_ends_a_game_whatever_lives_are_left(make):
    pool = make("Breakout-v5", 1, episodic_life=True, max_episode_steps=15)
    ready = pool.recv(1.0)
    for _ in range(15):
        before, ready = ready.obs["obs"], step(pool, ready, 0)
    assert (ready.event[0], ready.terminated[0], ready.truncated[0], ready.episode_over[0]) == (LAST, False, True, True)
    # the final observation continues the stack; the next one is a new game's, of one frame four times
    np.testing.assert_array_equal(ready.final_obs["obs"][0, :3], before[0, 1:])
    assert (ready.obs["obs"][0] == ready.obs["obs"][0, 0]).all()


@pytest.mark.case("FLT-13")
def test_a_rows_stream_does_not_depend_on_how_many_there_are(make):
    """255, 256 and 257 are where a byte would overflow."""

    def stream(num_rows):
        pool = make("CartPole-v1", num_rows, max_episode_steps=9)
        ready, seen = pool.recv(1.0), []
        for t in range(25):
            ready = step(pool, ready, (ready.rows + t) % 2)
            seen.append(np.column_stack([ready.obs["obs"], ready.reward, ready.event]))
        return np.array(seen)

    largest = stream(1025)
    for num_rows in (1, 255, 256, 257):
        np.testing.assert_array_equal(stream(num_rows), largest[:, :num_rows])
    assert len(np.unique(largest[0, :, 0])) > 1000  # all are seeded differently


def test_reseed_gives_the_stream_of_a_fresh_pool_whatever_was_played(make):
    def play(pool):
        ready, seen = pool.recv(1.0), []
        assert (ready.event == FIRST).all()
        for t in range(60):
            seen.append((ready.rows.tolist(), ready.obs["obs"].tolist(), ready.event.tolist()))
            ready = step(pool, ready, t % 2)
        return seen

    pool = make("CartPole-v1", 3, num_groups=2, seed=5)
    once = play(pool)
    pool.reseed(6)
    assert play(pool) != once
    pool.reseed(5)  # one unit is in mid-step here
    assert play(pool) == once


def test_arrays_of_one_recv_are_not_overwritten_by_the_next(make):
    pool = make("CartPole-v1", 2)
    ready = pool.recv(1.0)
    before = ready.obs["obs"].copy()
    for _ in range(3):
        after = step(pool, ready, 1)
    assert ready.obs["obs"].tolist() == before.tolist() != after.obs["obs"].tolist()


@pytest.mark.parametrize(
    ("task", "leaves", "action"),
    [
        ("Pendulum-v1", {"obs": ("vector", (3,))}, "1 continuous"),
        ("FrozenLake-v1", {"obs": ("discrete", ())}, "4 choices"),
        ("MiniGrid-Empty-5x5-v0", {"direction": ("discrete", ()), "image": ("image", (7, 7, 3)),
                                   "mission": ("vector", (96,))}, "7 choices"),
        ("HalfCheetah-v4", {"obs": ("vector", (17,))}, "6 continuous"),
        ("Pong-v5", {"obs": ("image", (4, 84, 84))}, "6 choices"),
    ],
)  # fmt: skip
def test_spaces_of_many_kinds(make, task, leaves, action):
    pool = make(task, 2, options={"image_layout": "hwc"} if "Grid" in task else None)
    assert {name: (leaf.kind, leaf.shape) for name, leaf in pool.spec.observation.items()} == leaves
    assert str(pool.spec.action) == action
    ready = pool.recv(1.0)
    low, high = np.array(pool.spec.action.low), np.array(pool.spec.action.high)
    for _ in range(3):
        ready = step(pool, ready, 1, np.tile(((low + high) / 2).astype(np.float32), (2, 1)))
    for name, leaf in pool.spec.observation.items():
        assert ready.obs[name].shape == (2, *leaf.shape)
        assert ready.obs[name].dtype == leaf.dtype
    assert not pool.spec.rows_wait


def test_continuous_actions_arrive(make):
    """Pendulum's cost of an action is 0.001 of its square."""
    rewards = []
    for torque in (0.0, 2.0):
        pool = make("Pendulum-v1", 2)
        rewards.append(step(pool, pool.recv(1.0), 0, np.array([[torque], [-torque]], np.float32)).reward)
    assert (rewards[0] - rewards[1]).tolist() == pytest.approx([0.004, 0.004], abs=1e-5)


def test_keys_and_infos_can_be_chosen(make):
    pool = make("HalfCheetah-v4", 2, options={"info": ["x_position", "never"]}, max_episode_steps=5)
    ready = pool.recv(1.0)
    assert ready.info.shape == (2, 2)
    for _ in range(5):
        ready = step(pool, ready, 0)
    assert np.isfinite(ready.info[:, 0]).all()
    assert np.isnan(ready.info[:, 1]).all()
    assert ready.records[1]["x_position"] == pytest.approx(float(ready.info[1, 0]))
    assert "lives" not in ready.records[1]
    grid = make("MiniGrid-Empty-5x5-v0", 1, options={"obs_keys": ["direction"]})
    assert list(grid.spec.observation) == ["direction"]


def test_tasks_share_a_policy_where_their_spaces_are_equal(make):
    pool = make("Pong-v5,Breakout-v5", 4, full_action_space=True)
    assert pool.task_ids.tolist() == [0, 1, 0, 1]
    assert (pool.spec.frame_skip, pool.spec.render_fps) == (4, 15.0)
    assert [pool.recv(1.0).rows.tolist() for _ in range(2)] == [[0, 2], [1, 3]]
    with pytest.raises(EnvError, match=r"tasks differ in the action \(discrete factors\): envpool:Pong-v5 has \(6,\)"):
        make("Pong-v5,Breakout-v5", 2)


def test_send_answers_whole_units_with_actions_that_exist(make):
    pool = make("CartPole-v1", 4, num_groups=2)
    one, two = pool.recv(1.0), pool.recv(1.0)
    assert (one.rows.tolist(), two.rows.tolist()) == ([0, 1], [2, 3])
    assert pool.recv(0.0) is None
    with pytest.raises(EnvError, match=r"actions .* are not all in \[0, n\) with n = \[2\]"):
        step(pool, one, 2)
    with pytest.raises(EnvError, match="Answer the whole unit"):
        pool.send(np.array([0]), np.zeros((1, 1), np.int64), np.zeros((1, 0), np.float32))
    rows = np.concatenate([two.rows, one.rows])
    pool.send(rows, np.zeros((4, 1), np.int64), np.zeros((4, 0), np.float32))
    assert [pool.recv(1.0).rows.tolist() for _ in range(2)] == [[2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("task", "settings", "error", "match"),
    [
        ("CartPol-v1", {}, UnknownEnvError, "no EnvPool task 'CartPol-v1'. Did you mean: .*envpool:CartPole-v1"),
        ("zzzzzzzzz", {}, UnknownEnvError, r"envpool.list_all_envs\(\) lists the ids"),
        ("CartPole-v1", {"max_steps": 3}, ConfigError, "no such argument. It has: max_episode_steps"),
        ("CartPole-v1", {"num_envs": 3}, ConfigError, "no such argument"),
        ("CartPole-v1", {"max_episode_steps": "x"}, ConfigError, "EnvPool does not take these values for CartPole-v1"),
        ("Go9x9-v1", {}, EnvError, "has 2 players .* not supported"),
        ("D1Basic-v1", {}, SpaceError, "envpool:D1Basic-v1: .* action Box with infinite bounds"),
    ],
)
def test_what_cannot_be_played_is_explained(make, task, settings, error, match):
    with pytest.raises(error, match=match):
        make(task, 2, **settings)


def test_the_absent_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pronghorn-rl\[envpool\]'"):
        EnvPoolPool(["CartPole-v1"], 1)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_close_in_mid_step_ends_the_threads_and_may_be_called_twice(make):
    def count():
        return len(os.listdir("/proc/self/task"))

    before = count()
    pool = EnvPoolPool(["CartPole-v1"], 8, num_groups=2, num_threads=4)
    one = pool.recv(1.0)
    assert count() > before
    pool.send(one.rows, np.zeros((4, 1), np.int64))
    pool.close()
    pool.close()
    assert count() == before


def config(env_id, **env):
    return Config(env=EnvConfig(**({"id": env_id, "workers": 1, "envs_per_worker": 2, "groups": 1} | env)))


def test_a_pool_and_a_picture_from_a_config():
    settings = {"max_episode_steps": "4", "adapter.info": "['elapsed_step']"}
    pool = make_pool(config("envpool:CartPole-v1", args=settings), seed=1, ordered=False)
    ready = pool.recv(1.0)
    for _ in range(4):
        ready = step(pool, ready, 1)
    assert (ready.truncated.tolist(), ready.info.tolist()) == ([True, True], [[4.0], [4.0]])
    assert pool.render(0) is None  # nobody asked for pictures
    pool.close()
    env = make_env(config("envpool:CartPole-v1"), seed=1, render=True)
    env.receive()
    assert env.render().shape == (400, 600, 3)
    env.close()
    with pytest.raises(ConfigError, match=r"adapter.frame_skip.*no such option of the adapter"):
        make_pool(config("envpool:CartPole-v1", args={"adapter.frame_skip": "2"}), seed=1, ordered=False)


def test_atari_games_get_the_defaults_of_atari(make):
    for name, reward_clip in (("Pong-v5", 1.0), ("CarRacing-v3", 0.0), ("HalfCheetah-v4", 0.0)):
        spec = make(name, 2).spec
        assert resolve(config("envpool:" + name), spec).learner.reward_clip == reward_clip


def test_a_task_whose_family_needs_an_absent_library_is_an_error_in_words(make, monkeypatch):
    def make_spec(task, **settings):
        raise ImportError("libQt5Gui.so.5: cannot open shared object file")

    monkeypatch.setattr(envpool, "make_spec", make_spec)
    with pytest.raises(EnvError, match=r"envpool:CartPole-v1 cannot be loaded .*libQt5Gui.so.5.*\. Install the lib"):
        make("CartPole-v1", 1)
