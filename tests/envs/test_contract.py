from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gymnasium import Env, spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from pronghorn.envs.contract import check_env
from pronghorn.envworker.loading import load
from pronghorn.errors import EnvError, MissingExtraError, SpaceError, UnknownEnvError, UsageError

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")


class Good(Env):
    """Keeps every rule; the faulty ones below break one each."""

    observation_space = spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def step(self, action):
        self.count += 1
        return self.observe(), 1.0, self.count >= 7, False, {}


def faulty(**methods):
    return type("Faulty", (Good,), methods)


def test_a_good_environment_passes_every_rule():
    passed = check_env(Good)
    assert "the same seed and actions give the same 20 steps" in passed
    assert "an observation stays as it was when the next one comes" in passed
    assert passed[-1] == "the last observation of an episode fits, and reset starts the next"
    assert len(passed) == 11


@pytest.mark.parametrize("name", ["gym:CartPole-v1", f"{TOYS}:RandomWalk", f"{TOYS}:LifeLoss"])
def test_names_are_checked_too(name):
    assert len(check_env(name)) >= 10


def test_doom_is_checked_away_from_the_current_directory(tmp_path, monkeypatch):
    pytest.importorskip("vizdoom")
    monkeypatch.chdir(tmp_path)
    assert "rewards are finite numbers" in check_env("doom:basic", num_steps=3)
    assert list(tmp_path.iterdir()) == []


def test_an_episode_without_end_is_said_to_be_unchecked():
    assert check_env(lambda: load(f"{TOYS}:Counter")(length=0))[-1].startswith("no episode ended within")


RNG = np.random.default_rng()
BUFFER = np.zeros(2, np.float32)


def refill(self):
    BUFFER[:] = self.np_random.uniform(-1, 1, 2)
    return BUFFER


@pytest.mark.parametrize(
    ("env", "match"),
    [
        (faulty(observe=lambda self: np.full(2, 101.0, np.float32)), r"leaf 'obs' spans \[101, 101\], declared is"),
        (faulty(observe=lambda self: np.full(2, np.nan, np.float32)), "leaf 'obs' holds NaN or infinity"),
        (faulty(observe=lambda self: np.zeros(3, np.float32)), r"has shape \(3,\); its space declares \(2,\)"),
        (faulty(observe=lambda self: RNG.uniform(-1, 1, 2).astype(np.float32)), "the first observation differs"),
        (faulty(observe=lambda self: np.zeros(2, np.float64)), r"observation_space.contains.*float64 \(2,\)"),
        (faulty(step=lambda self, a: (self.observe(), float("inf"), False, False, {})), "returned the reward inf"),
        (faulty(step=lambda self, a: (self.observe(), RNG.normal(), False, False, {})), "step 1 differs"),
        (faulty(step=lambda self, a: (self.observe(), 0.0, False, {})), "returned 4 values; 5 are needed"),
        (faulty(reset=lambda self: self.observe()), "returned 1 value; 2 are needed"),
        (faulty(observation_space=spaces.Dict({"a": spaces.Discrete(2)})), "lacks the leaf 'a'"),
    ],
)
def test_each_broken_rule_is_named_with_what_was_seen(env, match):
    with pytest.raises(EnvError, match=match):
        check_env(env)


class Flat:
    """A flat environment that keeps every rule."""

    def __init__(self):
        self.spec = {
            "observation": {"obs": {"shape": [1], "dtype": "float32", "kind": "vector"}},
            "action": {"discrete": [2], "low": [-1.0], "high": [1.0]},
            "info": ["lives"],
        }

    def reset(self, seed=None):
        return {"obs": np.zeros(1, np.float32)}

    def step(self, discrete, continuous):
        return {"obs": np.zeros(1, np.float32)}, 0.0, False, True, True, {"lives": 1}

    def render(self): ...

    def close(self): ...


def flat_step(**changes):
    names = ("obs", "reward", "terminated", "truncated", "episode_over", "info")

    def step(self, discrete, continuous):
        return tuple(changes.get(name, value) for name, value in zip(names, Flat.step(self, 0, 0), strict=True))

    return type("Faulty", (Flat,), {"step": step})


def test_a_good_flat_environment_passes():
    assert len(check_env(Flat)) == 10


@pytest.mark.case("ENV-02")
@pytest.mark.parametrize(
    ("env", "match"),
    [
        (flat_step(truncated=1), "flags are bools.*truncated is 1"),
        (flat_step(truncated=False), "an episode that is over was terminated or truncated"),
        (flat_step(reward="much"), "the reward 'much' came"),
        (flat_step(reward=True), "the reward True came"),
        (flat_step(info={"lives": "three"}), r"info\['lives'\] is 'three'"),
        (flat_step(obs={"obs": BUFFER[:1]}), "leaf 'obs' of two successive steps shares memory"),
        (flat_step(obs={"obs": np.zeros(1)}), r"leaf 'obs' is float64 \(1,\), declared is float32"),
        (flat_step(obs={}), r"leaves \[\] came, \['obs'\] are declared"),
        (type("NoRender", (Flat,), {"render": None}), r"\['render'\] are missing"),
    ],
)
def test_flat_environments_are_held_to_the_same_rules(env, match):
    with pytest.raises(EnvError, match=match):
        check_env(env)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda env: env.spec.update(agents=["left"]), r"Duo: spec\['agents'\] names 1 agents of 2 rows"),
        (lambda env: vars(env).pop("games"), "its attribute `games` has to be the number of games"),
    ],
)
def test_an_environment_that_names_agents_has_one_for_each_row_and_counts_games(change, match):
    def changed():
        env = load(f"{TOYS}:Duo")()
        change(env)
        return env

    assert len(check_env(load(f"{TOYS}:Duo"))) == 10
    with pytest.raises(EnvError, match=match):
        check_env(changed)


def test_errors_have_their_own_class():
    with pytest.raises(SpaceError, match="Text space"):
        check_env(faulty(observation_space=spaces.Text(3)))
    with pytest.raises(UnknownEnvError, match="near: Counter"):
        check_env(f"{TOYS}:Countr")
    with pytest.raises(MissingExtraError, match="box2d"):
        check_env(f"{__file__}:broken_import")
    with pytest.raises(EnvError, match="lacks observation_space"):
        check_env(dict)
    if pytest.importorskip("ale_py"):
        with pytest.raises(UsageError, match="not an environment of worker processes"):
            check_env("atari:Pong")


def broken_import():
    raise ModuleNotFoundError("No module named 'Box2D'", name="Box2D")


ALL_RULES = [
    "the spaces have a flat form",
    "spec names its observation leaves and its action",
    "reset, step, render and close exist",
    "observations fit their space in shape, dtype and bounds",
    "rewards are finite numbers",
    "flags are bools",
    "declared info fields are numbers",
    "an observation stays as it was when the next one comes",
    "the same seed and actions give the same 20 steps",
    "observation_space.contains() holds for what reset and step return",
    "the last observation of an episode fits, and reset starts the next",
]


def walks(mode="NextStep", **methods):
    """A vector environment of three good or faulty ones."""

    def make():
        return SyncVectorEnv([faulty(**methods)] * 3, autoreset_mode=AutoresetMode(mode))

    return make


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_every_row_of_a_vector_environment_is_checked(mode):
    assert check_env(walks(mode)) == ALL_RULES


def test_every_agent_of_a_parallel_environment_is_checked():
    assert check_env(f"{TOYS}:Squad", options={"pad_spaces": True}) == ALL_RULES
    assert check_env(load(f"{TOYS}:Squad"), options={"pad_spaces": True}) == ALL_RULES


def test_agents_of_unlike_spaces_are_checked_by_actions_of_their_own():
    """The toys raise at actions that an agent's space does not hold or its mask forbids."""
    for name in ("Field", "Talk"):
        target = f"{Path(TOYS).parent / 'unlike_games.py'}:{name}"
        assert check_env(target, options={"policies": "by_spaces"}) == ALL_RULES


@pytest.mark.filterwarnings("ignore:.*old environment creation API has been deprecated")
@pytest.mark.parametrize("game", ["tictactoe_v3", "connect_four_v3"])
def test_every_agent_of_a_game_in_turns_is_checked_by_legal_moves(game):
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    assert check_env(f"pettingzoo:classic.{game}") == ALL_RULES


def test_masks_are_kept_to_in_every_kind_of_environment():
    """Each raises at an action that its mask forbids."""

    class Masked(Good):
        observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(2), "x": Good.observation_space})

        def observe(self):
            return {"action_mask": np.array([self.count % 2, 1 - self.count % 2], np.int8), "x": super().observe()}

        def step(self, action):
            assert action == 1 - self.count % 2
            return super().step(action)

    assert check_env(Masked) == ALL_RULES
    assert check_env(lambda: SyncVectorEnv([Masked] * 2)) == ALL_RULES


class Loud(load(f"{TOYS}:Squad")):
    """'b' observes what its space does not hold."""

    def _observe(self, agent):
        return {"x": super()._observe(agent)["x"] + (900 if agent == "b" else 0)}


class Early(load(f"{TOYS}:Squad")):
    """'c' is there by chance."""

    def reset(self, seed=None, options=None):
        obs, infos = super().reset(seed, options)
        self.agents = [agent for agent in self.agents if agent != "c" or next(CHANCE)]
        return {agent: obs[agent] for agent in self.agents}, infos


CHANCE = iter([True, False] * 100)


def truncated_step(self, action):
    obs, reward, over, _, info = Good.step(self, action)
    return obs, reward, False, over, info


def worse_second_reset(self, *, seed=None, options=None):
    obs, info = Good.reset(self, seed=seed)
    self.resets = getattr(self, "resets", 0) + 1
    return obs if self.resets == 1 else np.full(2, 101.0, np.float32), info


@pytest.mark.parametrize("make", [walks("SameStep", step=truncated_step, reset=worse_second_reset),
                                  walks("Disabled", step=truncated_step, reset=worse_second_reset),
                                  faulty(step=truncated_step, reset=worse_second_reset)])  # fmt: skip
def test_the_first_observation_after_a_truncation_is_checked(make):
    with pytest.raises(EnvError, match=r"leaf 'obs' spans \[101, 101\]"):
        check_env(make)


@pytest.mark.parametrize(
    ("env", "match"),
    [
        (walks(observe=lambda self: np.full(2, 101.0, np.float32)), r"leaf 'obs' spans \[101, 101\]"),
        (walks(observe=lambda self: RNG.uniform(-1, 1, 2).astype(np.float32)), "first observation differs in row 0"),
        (walks(step=lambda self, a: (self.observe(), RNG.normal(), False, False, {})), "step 1 differs in row 0"),
        (walks(step=lambda self, a: (self.observe(), np.inf, False, False, {})), "returned the rewards .*inf"),
        (Loud, "leaf 'x' spans .* declared is"),
        (Early, "the first observation differs in row 2"),
    ],
)
def test_rules_broken_in_one_of_several_rows_are_named(env, match):
    with pytest.raises(EnvError, match=match):
        check_env(env, options={"pad_spaces": True} if env in (Loud, Early) else {})
