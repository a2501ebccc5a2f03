"""The VizDoom adapter on the real engine: ends of episodes, rewards, seeds, failures."""

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.envworker import doom, doom_scenarios
from pronghorn.envworker.doom import DoomEnv, nearest_resize
from pronghorn.envworker.doom_scenarios import SCENARIOS
from pronghorn.types import EnvSpec
from running import has_ended

vizdoom = pytest.importorskip("vizdoom")

NOOP = [0, 0, 0, 0, 0, 0, 0]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the engine writes its configuration where it runs


@pytest.fixture
def make():
    envs = []

    def make_env(*args, **kwargs):
        envs.append(DoomEnv(*args, **kwargs))
        return envs[-1]

    yield make_env
    for env in envs:
        env.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_steps_as_its_spec_says(name, make):
    env = make(name, measurements=["HEALTH", "AMMO2"])
    spec = EnvSpec.from_json(json.loads(json.dumps(env.spec)))
    assert spec.name == "doom:" + name
    assert spec.observation["obs"].shape == (72, 128, 3)
    assert spec.observation["obs"].layout == "hwc"
    assert (spec.frame_skip, spec.render_fps) == (4, 35 / 4)
    observations = [env.reset(1)]
    for action in (NOOP, [size - 1 for size in spec.action.discrete]):
        obs, reward, terminated, truncated, episode_over, info = env.step(action, [])
        assert (terminated, truncated, episode_over, info) == (False, False, False, {})
        assert isinstance(reward, float)
        observations.append(obs)
    for obs in observations:
        assert {name: (leaf.shape, str(leaf.dtype)) for name, leaf in obs.items()} == {
            name: (leaf.shape, leaf.dtype) for name, leaf in spec.observation.items()
        }
        assert obs["measurements"][0] > 0.0
    assert observations[0]["obs"].std() > 1.0  # a picture, not an empty buffer
    assert env.render().shape == (120, 160, 3)
    assert env.reset()["obs"].shape == (72, 128, 3)  # a second episode: a wrong map name hangs here


# --- ends of episodes ------------------------------------------------------------------------------------


@pytest.mark.case("ENV-14")
def test_death_is_terminated_and_shows_the_last_frame(make):
    env = make("deadly_corridor")
    before, steps = env.reset(3), 0
    while True:
        obs, _, terminated, truncated, episode_over, _ = env.step(NOOP)
        steps += 1
        if episode_over:
            break
        before = obs
    assert (terminated, truncated) == (True, False)
    assert steps < 2100 / 4
    assert obs["obs"].shape == (72, 128, 3)
    assert obs["obs"].dtype == np.uint8
    np.testing.assert_array_equal(obs["obs"], before["obs"])
    assert not np.shares_memory(obs["obs"], before["obs"])
    assert env.stats()["health"] == 0.0
    assert env.stats()["game_return"] <= -100.0  # the scenario's own penalty of death, unscaled
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(NOOP)


def test_time_limit_truncates_with_the_real_final_observation(make):
    """10 tics with a skip of 4 are steps of 4, 4 and 2 tics; a second engine without any limit agrees."""
    env = make("basic", timeout_tics=10)
    env.reset(7)
    flags = []
    for _ in range(3):
        obs, reward, *ends, _ = env.step([1])
        flags.append((reward, *ends))
    assert flags == [
        (pytest.approx(-0.04), False, False, False),
        (pytest.approx(-0.04), False, False, False),
        (pytest.approx(-0.02), False, True, True),
    ]
    endless = make("basic", timeout_tics=0, frame_skip=10)
    endless.reset(7)
    expected, *_ = endless.step([1])
    np.testing.assert_array_equal(obs["obs"], expected["obs"])


def test_episode_is_as_long_as_the_engine_would_have_it(make):
    """The cfg's 300 tics count from the first decision: 75 steps at a skip of 4, at -1 a tic."""
    env = make("basic")
    env.reset(1)
    rewards = []
    while True:
        _, reward, terminated, truncated, episode_over, _ = env.step(NOOP)
        rewards.append(reward)
        if episode_over:
            break
    assert (terminated, truncated) == (False, True)
    assert len(rewards) == 75
    assert sum(rewards) == pytest.approx(-3.0)  # -300 x 0.01
    assert env.stats() == {"game_return": -300.0, "kills": 0.0, "health": 100.0}


def test_goal_is_terminated_even_on_the_last_tic_of_the_limit(make):
    env = make("basic", timeout_tics=4)
    env.reset(1)
    env._game = FinishedGame()
    _, _, terminated, truncated, episode_over, _ = env.step(NOOP)
    assert (terminated, truncated, episode_over) == (True, False, True)


# --- rewards ---------------------------------------------------------------------------------------------


def test_reward_scale_can_be_set(make):
    env = make("basic", reward_scale=1.0)
    env.reset(1)
    assert env.step(NOOP)[1] == -4.0


def test_health_bonus_only_where_health_rose(make):
    env = make("health_gathering")
    env.reset(1)
    env._game = ScriptedHealthGame([90.0, 95.0, 95.0, 100.0])  # from 100
    rewards = [env.step(NOOP)[1] for _ in range(4)]
    assert rewards == [4.0, 5.0, 4.0, 5.0]  # +1 a tic of living, +1 a rise of health


# --- seeds -----------------------------------------------------------------------------------------------


def _two_episodes(env, seed):
    """The frames of two episodes under actions drawn from the seed: the second is seeded by the first."""
    rng = np.random.default_rng(seed)
    episodes = []
    for reset_seed in (seed, None):
        frames = [env.reset(reset_seed)["obs"]]
        for _ in range(15):
            obs, *_, episode_over, _ = env.step([rng.integers(3), rng.integers(2)])
            frames.append(obs["obs"])
            assert not episode_over
        episodes.append(np.stack(frames))
    return episodes


def test_seed_repeats_an_environment_exactly_and_episodes_differ(make):
    used = make("defend_the_center")
    first = _two_episodes(used, seed=11)
    again = _two_episodes(used, seed=11)  # the same engine, with a past
    fresh = _two_episodes(make("defend_the_center"), seed=11)
    other = _two_episodes(used, seed=12)
    for episode in range(2):
        np.testing.assert_array_equal(first[episode], again[episode])
        np.testing.assert_array_equal(first[episode], fresh[episode])
    assert (first[0] != first[1]).any()
    assert (first[0] != other[0]).any()


# --- measurements and resizing ---------------------------------------------------------------------------


def test_measurements_are_in_the_games_own_units(make):
    env = make("defend_the_center", measurements=True)  # its cfg lists AMMO2, HEALTH
    assert env.reset(1)["measurements"].tolist() == [26.0, 100.0]
    for _ in range(8):  # the weapon comes up first
        obs, *_ = env.step([0, 1])
    assert 20.0 <= obs["measurements"][0] < 26.0


@pytest.mark.parametrize(("height", "width"), [(72, 128), (84, 84), (60, 80), (120, 160), (50, 120)])
def test_nearest_resize_is_its_slow_definition(height, width):
    frame = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    expected = np.empty((height, width, 3), dtype=np.uint8)
    for y in range(height):
        for x in range(width):
            expected[y, x] = frame[y * 120 // height, x * 160 // width]
    resized = nearest_resize(120, 160, out_height=height, out_width=width)(frame)
    np.testing.assert_array_equal(resized, expected)


def test_nearest_resize_agrees_with_opencv():
    cv2 = pytest.importorskip("cv2")
    frame = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    resized = nearest_resize(120, 160, out_height=72, out_width=128)(frame)
    np.testing.assert_array_equal(resized, cv2.resize(frame, (128, 72), interpolation=cv2.INTER_NEAREST))


@pytest.mark.case("ENV-02")
def test_observations_are_not_overwritten_by_later_steps(make):
    env = make("basic", width=160, height=120)  # no resize, so nothing else makes the copy
    first = env.reset(1)["obs"]
    kept = first.copy()
    second = env.step([1])[0]["obs"]
    assert (second != kept).any()
    np.testing.assert_array_equal(first, kept)


# --- failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scenario": "basik"}, "Did you mean: basic"),
        ({"scenario": "basic", "actions": "many"}, "default, flat, factored, all"),
        ({"scenario": "basic", "resolution": "161x120"}, "160x120"),
        ({"scenario": "basic", "measurements": ["HELTH"]}, "HEALTH"),
        ({"scenario": "my_way_home", "measurements": True}, "lists no measurements"),
        ({"scenario": "basic", "frame_skip": 0}, "at least 1"),
    ],
)
def test_a_wrong_option_is_named_with_its_fix(arguments, message):
    with pytest.raises(ValueError, match=message):
        DoomEnv(**arguments)


def test_an_action_outside_its_factor_is_refused(make):
    env = make("my_way_home")
    env.reset(1)
    with pytest.raises(ValueError, match=r"outside the factors of \[3, 3\]"):
        env.step([0, 3])


def test_death_of_the_engine_is_told_with_its_place(make):
    env = make("basic")
    env.reset(1)
    env.step(NOOP)
    children = psutil.Process().children()
    assert len(children) == 1
    os.kill(children[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="doom:basic: the engine failed at tic 4"):
        env.step(NOOP)


def test_engine_is_started_again_then_given_up_with_one_clear_error(make, monkeypatch):
    env, games = make("basic"), []
    monkeypatch.setattr(doom.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(env, "_configured_game", lambda: games.append(GameThatWillNotStart()) or games[-1])
    with pytest.raises(RuntimeError, match="did not start in 3 tries; the last error was OSError: no engine"):
        env.reset(1)
    assert [game.closed for game in games] == [True, True, True]


def test_close_ends_the_engine_and_may_be_called_twice(make):
    env = make("basic")
    env.reset(1)
    (engine,) = psutil.Process().children()
    env.close()
    env.close()
    assert has_ended(engine)


def test_modules_need_neither_vizdoom_nor_torch_to_be_imported():
    folder = str(Path(doom.__file__).parent)
    code = (
        "import importlib.machinery, importlib.util, sys\n"
        "spec = importlib.machinery.ModuleSpec('package', None, is_package=True)\n"
        f"spec.submodule_search_locations.append({folder!r})\n"
        "sys.modules['package'] = importlib.util.module_from_spec(spec)\n"
        "from package import deathmatch, doom, doom_scenarios\n"
        "assert 'basic' in doom_scenarios.SCENARIOS and 'duel' in deathmatch.MATCHES\n"
        "loaded = {'vizdoom', 'torch', 'gymnasium', 'cv2', 'pronghorn'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("module", [doom, doom_scenarios])
def test_modules_keep_python_3_8_syntax(module):
    ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))


# --- stand-ins for the engine ----------------------------------------------------------------------------


class ScriptedGame:
    def make_action(self, buttons, tics):
        return float(tics)

    def get_game_variable(self, variable):
        return 0.0

    def close(self):
        pass


class FinishedGame(ScriptedGame):
    """The episode has ended: no state any more."""

    def get_state(self):
        return None


class ScriptedHealthGame(ScriptedGame):
    """A game whose health after each step is given."""

    def __init__(self, health):
        self._health = iter(health)

    def get_state(self):
        class State:
            screen_buffer = np.zeros((120, 160, 3), np.uint8)

        return State()

    def get_game_variable(self, variable):
        assert variable == vizdoom.GameVariable.HEALTH
        return next(self._health)


class GameThatWillNotStart:
    closed = False

    def init(self):
        raise OSError("no engine")

    def close(self):
        self.closed = True
