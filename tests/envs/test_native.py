"""Atari through ale-py's vector environment: one transition stream, equal to a slow one on the bare emulator."""

import os
import sys
import time

import numpy as np
import pytest

from pronghorn.envs.lanes import LaneState
from pronghorn.envs.native import AtariPool, rom_name
from pronghorn.errors import ConfigError, EnvError, MissingExtraError, UnknownEnvError
from pronghorn.types import Event

ale_py = pytest.importorskip("ale_py")

NO_CONTINUOUS = None


@pytest.fixture
def make():
    pools = []

    def make_pool(games, num_rows, **options):
        options = {"num_groups": 1, "num_threads": 1, "seed": 3, **options}
        pools.append(AtariPool(games, num_rows, **options))
        return pools[-1]

    yield make_pool
    for pool in pools:
        pool.close()


def step(pool, ready, action):
    """Answer one unit with one action (or one per row) and receive the next unit."""
    discrete = np.broadcast_to(np.asarray(action, np.int64), len(ready.rows))[:, None]
    pool.send(ready.rows, discrete, np.zeros((len(ready.rows), 0), np.float32))
    return pool.recv(1.0)


class SlowBreakout:
    """The definition, written slowly on the bare emulator: fire at a start, 4 frames a step, max of the last two."""

    def __init__(self):
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(ale_py.roms.get_rom_path("breakout"))
        self.actions = self.ale.getMinimalActionSet()
        self._start()

    def _start(self):
        self.ale.reset_game()
        self.ale.act(ale_py.Action.FIRE)
        self.lives = self.ale.lives()

    def step(self, action):
        """(reward, terminated, episode_over, picture of the step)"""
        frames, reward = [], 0.0
        for _ in range(4):
            reward += self.ale.act(self.actions[action])
            frames.append(self.ale.getScreenGrayscale())
            if self.ale.game_over():
                break
        picture = np.maximum(*frames[-2:]) if len(frames) > 1 else None
        over = self.ale.game_over()
        life_lost = 0 < self.ale.lives() < self.lives
        self.lives = self.ale.lives()
        if over:
            self._start()
        return reward, life_lost or over, over, picture


def test_stream_is_that_of_the_bare_emulator(make):
    """Every reward, life and end of 600 random steps; a dummy transition or a shift by one would show at once."""
    cv2 = pytest.importorskip("cv2")
    pool, slow, rng = make(["Breakout"], 1, noop_max=0), SlowBreakout(), np.random.default_rng(0)
    ready = pool.recv(1.0)
    assert ready.event.tolist() == [Event.FIRST]
    num_lives_lost = num_games = 0
    for _ in range(600):
        action = rng.integers(4)
        ready = step(pool, ready, action)
        reward, terminated, over, picture = slow.step(action)
        assert ready.reward.tolist() == [reward]
        assert ready.terminated.tolist() == [terminated]
        assert ready.episode_over.tolist() == [over]
        assert ready.truncated.tolist() == [False]
        assert ready.event.tolist() == [Event.LAST if terminated else Event.STEP]
        assert ready.records == ([{"row": 0}] if over else [])
        num_lives_lost += terminated and not over
        num_games += over
        if not over:
            expected = cv2.resize(picture, (84, 84), interpolation=cv2.INTER_AREA)
            np.testing.assert_allclose(ready.obs["obs"][0, -1], expected, atol=1)
    assert num_games >= 2
    assert num_lives_lost >= 4 * num_games


def test_life_lost_is_a_boundary_inside_a_game_that_goes_on(make):
    pool = make(["Breakout"], 2)
    ready, num_lost = pool.recv(1.0), 0
    while num_lost < 2:
        before = ready.obs["obs"]
        ready = step(pool, ready, 0)
        for row in np.flatnonzero((ready.event == Event.LAST) & ~ready.episode_over):
            num_lost += 1
            assert ready.terminated[row]
            assert not ready.truncated[row]
            # The stack goes on: its older frames are the newer ones of before.
            np.testing.assert_array_equal(ready.obs["obs"][row, :3], before[row, 1:])
    assert len(ready.final_index) == 0


def test_without_life_loss_only_the_end_of_the_game_is_last(make):
    pool = make(["Breakout"], 1, life_loss=False)
    ready, rng = pool.recv(1.0), np.random.default_rng(0)
    while True:
        ready = step(pool, ready, rng.integers(4))
        if ready.event[0] == Event.LAST:
            break
    assert (ready.terminated[0], ready.episode_over[0]) == (True, True)
    assert ready.obs["obs"][0, :3].max() == 0  # the next game's first observation: no older frames


def test_truncation_has_its_real_final_observation(make):
    """Games of 100 frames. The final observation continues the stack; the observation begins the next game's."""
    pool = make(["Pong"], 2, max_frames=100, noop_max=5)
    ready, lengths, num_steps = pool.recv(1.0), [], 0
    while len(lengths) < 3:
        before = ready.obs["obs"]
        ready = step(pool, ready, 0)
        num_steps += 1
        if not ready.truncated.any():
            assert len(ready.final_index) == len(ready.final_obs["obs"]) == 0
            continue
        lengths.append(num_steps)
        num_steps = 0
        assert ready.truncated.tolist() == ready.episode_over.tolist() == [True, True]
        assert ready.terminated.tolist() == [False, False]
        assert ready.event.tolist() == [Event.LAST, Event.LAST]
        assert ready.final_index.tolist() == [0, 1]
        assert ready.records == [{"row": 0}, {"row": 1}]
        np.testing.assert_array_equal(ready.final_obs["obs"][:, :3], before[:, 1:])
        assert ready.obs["obs"][:, :3].max() == 0
        assert ready.obs["obs"][:, 3].max() > 0
    assert lengths == [25, 25, 25]  # 100 frames by 4; the no-ops do not count


def test_only_the_truncated_rows_have_final_observations(make):
    """Row 0 never serves the ball again and is cut at 130 steps; row 1 does and loses its game before."""
    pool = make(["Breakout"], 2, max_frames=520, life_loss=False)
    ready = pool.recv(1.0)
    game_over = False
    for _ in range(130):
        before = ready.obs["obs"]
        ready = step(pool, ready, [0, 1])
        game_over |= bool(ready.terminated[1])
        assert not ready.terminated[0]
    assert game_over
    assert ready.truncated.tolist() == [True, False]
    assert ready.event.tolist() == [Event.LAST, Event.STEP]
    assert ready.final_index.tolist() == [0]
    assert ready.final_obs["obs"].shape == (1, 4, 84, 84)
    np.testing.assert_array_equal(ready.final_obs["obs"][0, :3], before[0, 1:])
    assert ready.records == [{"row": 0}]


@pytest.mark.case("ENV-02")
def test_arrays_of_one_recv_are_not_overwritten_by_the_next(make):
    pool = make(["Breakout"], 2)
    kept = [pool.recv(1.0)]
    for _ in range(8):
        kept.append(step(pool, kept[-1], 2))
    copies = [ready.obs["obs"].copy() for ready in kept]
    ready = kept[-1]
    for _ in range(8):
        ready = step(pool, ready, 3)
    for ready, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(ready.obs["obs"], copy)


# --- seeds -----------------------------------------------------------------------------------------------


def play(pool, num_steps):
    """Observations and rewards of a pool of one unit under fixed random actions."""
    ready, rng, stream = pool.recv(1.0), np.random.default_rng(0), []
    for _ in range(num_steps):
        stream.append((ready.obs["obs"].copy(), ready.reward.copy()))
        ready = step(pool, ready, rng.integers(4, size=len(ready.rows)))
    return stream


def test_reseed_gives_the_stream_of_a_fresh_pool_whatever_was_played(make):
    fresh = play(make(["Breakout"], 2, sticky=0.25, seed=5), 40)
    pool = make(["Breakout"], 2, sticky=0.25, seed=9)
    other = play(pool, 40)
    pool.reseed(5)  # a unit waits for its actions
    again = play(pool, 40)
    for (obs, reward), (obs_again, reward_again) in zip(fresh, again, strict=True):
        np.testing.assert_array_equal(obs, obs_again)
        np.testing.assert_array_equal(reward, reward_again)
    assert any((a[0] != b[0]).any() for a, b in zip(fresh, other, strict=True))
    assert any((obs[0] != obs[1]).any() for obs, _ in fresh[1:])  # rows differ although their actions may not


def test_reseed_drops_what_is_in_flight(make):
    pool = make(["Pong"], 4, num_groups=2)
    first, second = pool.recv(1.0), pool.recv(1.0)
    pool.send(first.rows, np.zeros((2, 1), np.int64), NO_CONTINUOUS)
    pool.reseed(4)
    again = [pool.recv(1.0), pool.recv(1.0)]
    assert [ready.event.tolist() for ready in again] == [[Event.FIRST] * 2] * 2
    assert [ready.rows.tolist() for ready in again] == [first.rows.tolist(), second.rows.tolist()]
    assert pool.recv(0.0) is None


# --- units, tasks, actions -------------------------------------------------------------------------------


def test_groups_take_turns_and_nothing_comes_while_all_wait(make):
    pool = make(["Pong"], 6, num_groups=2)
    assert pool.unit_ids.tolist() == [0, 0, 0, 1, 1, 1]
    first, second = pool.recv(1.0), pool.recv(1.0)
    assert (first.rows.tolist(), second.rows.tolist()) == ([0, 1, 2], [3, 4, 5])
    assert pool.recv(0.0) is None
    ready = second
    for expected in ([3, 4, 5], [0, 1, 2], [3, 4, 5], [0, 1, 2]):
        answered = first if expected == [0, 1, 2] else second
        pool.send(answered.rows, np.zeros((3, 1), np.int64), NO_CONTINUOUS)
        ready = pool.recv(1.0)
        assert ready.rows.tolist() == expected
        assert ready.event.tolist() == [Event.STEP] * 3


def test_several_units_can_be_answered_at_once(make):
    pool = make(["Pong"], 2, num_groups=2)
    rows = np.concatenate([pool.recv(1.0).rows, pool.recv(1.0).rows])
    pool.send(rows, np.zeros((2, 1), np.int64), NO_CONTINUOUS)
    assert [pool.recv(1.0).rows.tolist() for _ in range(2)] == [[0], [1]]


def test_several_games_share_the_full_action_set(make):
    pool = make(["Pong", "breakout"], 5, num_groups=2)
    assert pool.tasks == ("atari:Pong", "atari:Breakout")
    assert pool.task_ids.tolist() == [0, 1, 0, 1, 0]
    assert pool.spec.action.discrete == (18,)
    assert "full set" in pool.describe()
    units = [pool.recv(1.0).rows for _ in range(4)]
    assert sorted(np.concatenate(units).tolist()) == [0, 1, 2, 3, 4]
    for rows in units:
        assert len(set(pool.task_ids[rows])) == 1
        assert len(set(pool.unit_ids[rows])) == 1
        pool.send(rows, np.full((len(rows), 1), 17), NO_CONTINUOUS)
    assert [pool.recv(1.0).event.max() for _ in range(4)] == [Event.STEP] * 4


@pytest.mark.parametrize(
    ("options", "shape", "num_actions"),
    [
        ({}, (4, 84, 84), 4),
        ({"full_actions": True, "stack": 1}, (1, 84, 84), 18),
        ({"grayscale": False, "stack": 2}, (6, 84, 84), 4),
    ],
)
def test_spec_says_what_comes(make, options, shape, num_actions):
    pool = make(["Breakout"], 1, frame_skip=2, **options)
    leaf = pool.spec.observation["obs"]
    assert (leaf.shape, leaf.dtype, leaf.kind, leaf.layout) == (shape, "uint8", "image", "chw")
    assert pool.spec.action.discrete == (num_actions,)
    assert (pool.spec.frame_skip, pool.spec.render_fps, pool.spec.name) == (2, 30.0, "atari:Breakout")
    obs = pool.recv(1.0).obs["obs"]
    assert (obs.shape, obs.dtype) == ((1, *shape), np.uint8)


def test_colours_are_channels_of_one_frame_after_another(make):
    """The luminance of the newest frame's three planes is the grey frame, so neither order is mixed up."""
    grey = make(["Seaquest"], 1, stack=1).recv(1.0).obs["obs"][0]
    colour = make(["Seaquest"], 1, stack=2, grayscale=False).recv(1.0).obs["obs"][0]
    assert colour[:3].max() == 0  # no older frame yet
    red, green, blue = (plane.astype(np.float64) for plane in colour[3:])
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    np.testing.assert_allclose(luminance, grey[0], atol=3)


# --- misuse ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [-1, 4])
def test_unknown_action_is_refused_before_it_hangs_the_emulator(make, action):
    pool = make(["Breakout"], 2)
    ready = pool.recv(1.0)
    with pytest.raises(EnvError, match=r"not all in 0 … 3"):
        pool.send(ready.rows, np.array([[0], [action]]), NO_CONTINUOUS)
    assert step(pool, ready, 0).event.tolist() == [Event.STEP] * 2  # nothing was sent by the failed call


def test_send_answers_whole_units_that_wait(make):
    pool = make(["Pong"], 2)
    with pytest.raises(EnvError, match=LaneState.UNSTARTED.value):
        pool.send(np.arange(2), np.zeros((2, 1), np.int64), NO_CONTINUOUS)
    ready = pool.recv(1.0)
    with pytest.raises(EnvError, match=r"rows \[0\].* waits for actions.*whole unit"):
        pool.send(ready.rows[:1], np.zeros((1, 1), np.int64), NO_CONTINUOUS)
    pool.send(ready.rows, np.zeros((2, 1), np.int64), NO_CONTINUOUS)
    with pytest.raises(EnvError, match=LaneState.STEPPING.value):
        pool.send(ready.rows, np.zeros((2, 1), np.int64), NO_CONTINUOUS)


@pytest.mark.parametrize("name", ["SpaceInvaders", "spaceinvaders", "space_invaders"])
def test_games_go_by_either_name(name):
    assert rom_name(name) == "space_invaders"


@pytest.mark.case("ENV-10")
def test_misspelt_game_and_absent_package_are_two_errors(monkeypatch):
    with pytest.raises(UnknownEnvError, match="atari:Breakout"):
        AtariPool(["Braekout"], 1)
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(MissingExtraError, match=r"pronghorn-rl\[atari\]"):
        AtariPool(["Breakout"], 1)


def test_fewer_rows_than_games_is_an_error():
    with pytest.raises(ConfigError, match="2 tasks need a row each"):
        AtariPool(["Pong", "Breakout"], 1)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_close_in_mid_step_ends_the_threads_and_may_be_called_twice():
    before = len(os.listdir("/proc/self/task"))
    pool = AtariPool(["Pong"], 2, num_groups=2, num_threads=2)
    ready = pool.recv(1.0)
    pool.send(ready.rows, np.zeros((1, 1), np.int64), NO_CONTINUOUS)
    assert len(os.listdir("/proc/self/task")) > before
    pool.close()
    pool.close()
    until = time.monotonic() + 20.0
    while len(os.listdir("/proc/self/task")) > before:  # a thread that was joined may be listed for a moment
        assert time.monotonic() < until
        time.sleep(0.01)


def test_settings_cannot_be_changed_while_it_runs(make):
    with pytest.raises(EnvError, match=r"set_option: 'rewards' of atari:Pong cannot be changed.* Give it in env.args"):
        make(["Pong"], 1).set_option("rewards", {"frag": 1.0})
