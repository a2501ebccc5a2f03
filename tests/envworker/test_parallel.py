from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from pronghorn.envworker import main as protocol
from pronghorn.envworker.building import flat, make
from pronghorn.envworker.many_rows import FIRST, INACTIVE, LAST, STEPPED, VectorStep
from pronghorn.envworker.spaces import ContractBroken

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")


def squad(**options):
    return make("call", f"{TOYS}:Squad", {}, {"pad_spaces": True, **options})


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


def test_how_a_game_of_agents_who_act_at_once_ended_is_drawn_before_the_reset():
    """The toy's games last five steps."""
    env = squad()
    env.reset(0)
    canvas = np.zeros((2, 2, 3), np.uint8)
    env.env.render = lambda: np.copyto(canvas, env.env.count) or canvas
    env.render()
    for step in range(1, 6):
        assert env.ending() is None
        env.step(np.zeros((3, 1), np.int64), np.zeros((3, 0), np.float32))
        assert (env.render() == step % 5).all()
    assert (env.ending() == 5).all()
    assert env.ending() is None


def test_an_agent_that_plays_on_without_an_observation_is_an_error():
    env = squad()
    env.reset(0)
    raw = env.env
    step = raw.step
    raw.step = lambda actions: ({}, *step(actions)[1:])
    with pytest.raises(ContractBroken, match=r"Squad.step\(\) returned no observation of 'a'"):
        env.step(np.zeros((3, 1), np.int64), np.zeros((3, 0), np.float32))


NOTHING = np.zeros((3, 1), np.int64), np.zeros((3, 0), np.float32)


def test_an_agent_that_ended_and_stays_in_the_list_is_an_error():
    env = make("call", f"{TOYS}:Stays", {}, {"pad_spaces": True})
    env.reset(0)
    env.step(*NOTHING)
    with pytest.raises(ContractBroken, match=r"Stays.step\(\) ended 'b' and left it in `agents`.* self.agents = \["):
        env.step(*NOTHING)


def test_an_environment_whose_agents_all_ended_is_reset_even_if_they_stay_in_the_list():
    """As PettingZoo's Atari games do at their limit of cycles."""
    stays, leaves = make("call", f"{TOYS}:Stays", {"at_the_end_only": True}, {"pad_spaces": True}), squad()
    for env in (stays, leaves):
        env.reset(0)
    for _ in range(12):
        one, other = stays.step(*NOTHING), leaves.step(*NOTHING)
        np.testing.assert_array_equal(one.event, other.event)
        np.testing.assert_array_equal(one.obs["x"], other.obs["x"])
    assert stays.env.episode == 2


@pytest.mark.filterwarnings("ignore:.*(API has been deprecated|unmaintained)")
@pytest.mark.parametrize("game", ["classic.rps_v2", "butterfly.knights_archers_zombies_v11", "sisl.pursuit_v5"])
def test_pettingzoos_own_games_take_agents_that_end_out_of_the_list(game):
    pytest.importorskip("pettingzoo")
    try:
        env = make("pettingzoo", game, {"max_cycles": 20}, {})
    except ContractBroken as error:
        pytest.skip(str(error))
    env.reset(1)
    ended = 0
    for _ in range(45):
        spec = env.spec["action"]
        discrete = np.zeros((env.count, len(spec["discrete"])), np.int64)
        ended += int(env.step(discrete, np.zeros((env.count, len(spec["low"])), np.float32)).episode_over.sum())
    env.close()
    assert ended >= 2 * env.count




class Mortals:
    """Four agents, of which each episode's script ends some alone, some together, some all at once; a plain class."""

    def __init__(self):
        self.possible_agents, self.agents, self.episode, self.count = list("abcd"), [], -1, 0

    def observation_space(self, agent):
        return spaces.Box(-1, 9999, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None):
        self.episode, self.count, self.agents = self.episode + 1, 0, list(self.possible_agents)
        return self.observe(), {}

    def step(self, actions):
        assert sorted(actions) == sorted(self.agents)
        self.count += 1
        ends = {agent: script(self.episode)[agent] == self.count for agent in self.agents}
        limit = {agent: ends[agent] and agent == "d" for agent in self.agents}
        obs, rewards = self.observe(), {agent: float(self.count) for agent in self.agents}
        self.agents = [agent for agent in self.agents if not ends[agent]]
        return obs, rewards, {a: ends[a] and not limit[a] for a in ends}, limit, {a: {} for a in ends}

    def observe(self):
        return {agent: np.array([self.episode, self.count], np.float32) for agent in self.agents}


def script(episode):
    """The length of each agent's episode. In every third two end together, in every fifth all."""
    lengths = dict(zip("abcd", np.random.default_rng(episode).integers(1, 12, 4).tolist(), strict=True))
    if episode % 3 == 0:
        lengths["b"] = lengths["c"]
    return dict.fromkeys("abcd", lengths["a"]) if episode % 5 == 0 else lengths


def zeros(env):
    return np.zeros((env.count, 1), np.int64), np.zeros((env.count, 0), np.float32)


@pytest.mark.case("MAS-03")
def test_agents_that_end_at_different_times_live_as_long_as_the_script_says():
    """100 episodes; rewards are the steps, so that a return tells which ones were counted."""
    env = flat(Mortals())
    env.reset(0)
    length, returns, episodes = np.zeros(4, int), np.zeros(4), np.full(4, -1)
    while episodes.min() < 99:
        step = env.step(*zeros(env))
        moved = step.event != INACTIVE
        length[moved] += 1
        returns[moved] += step.reward[moved]
        for row in np.flatnonzero(step.event == LAST):
            episodes[row] += 1
            expected = script(int(episodes[row]))["abcd"[row]]
            assert length[row] == expected
            assert returns[row] == expected * (expected + 1) / 2
            assert (step.terminated[row], step.truncated[row]) == (row != 3, row == 3)
            assert step.obs["obs"][row].tolist() == [episodes[row] + 1, 0]
            if row == 3:
                assert step.final_obs["obs"][row].tolist() == [episodes[row], expected]
            length[row] = returns[row] = 0


def test_a_truncation_without_an_observation_is_an_error():
    class Blind(Mortals):
        def step(self, actions):
            _, rewards, ends, limit, infos = super().step(actions)
            self.agents = []
            return {}, rewards, dict.fromkeys(ends, False), dict.fromkeys(limit, True), infos

    env = flat(Blind())
    env.reset(0)
    with pytest.raises(ContractBroken, match=r"Blind truncated 'a' without an observation"):
        env.step(*zeros(env))


def test_a_mask_in_the_infos_of_a_parallel_environment_is_not_overlooked():
    class Masked(Mortals):
        def reset(self, seed=None):
            obs, _ = super().reset()
            return obs, {agent: {"action_mask": np.array([1, 0])} for agent in obs}

    with pytest.raises(ContractBroken, match=r"info of 'a' holds an action mask that is not read. Masks belong into"):
        flat(Masked()).reset(0)


class Unlike(Mortals):
    """'a' sees 4 numbers and has factors of 2 and 3 choices, 'd' sees 9 and has 4 and 2, with a mask; [1, 9] bounds."""

    def observation_space(self, agent):
        box = spaces.Box(1, 9, (4 if agent == "a" else 9,), np.float32)
        mask = {"action_mask": spaces.MultiBinary(6)} if agent == "d" else {}
        return spaces.Dict({"x": box, **mask})

    def action_space(self, agent):
        return spaces.MultiDiscrete([2, 3] if agent == "a" else [4, 2], start=[0, 5 if agent == "a" else 0])

    def observe(self):
        obs = {agent: {"x": np.full(4 if agent == "a" else 9, 5, np.float32)} for agent in self.agents}
        if "d" in obs:
            obs["d"]["action_mask"] = np.array([0, 1, 0, 1, 0, 1], np.int8)
        return obs

    def step(self, actions):
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), (agent, action)
        self.chosen = actions
        return super().step(actions)


@pytest.mark.case("MAS-13", "SPA-20")
def test_padding_joins_vectors_factors_and_masks():
    """Joint factors have 4 and 3 choices. The pad value is the nearest to 0 within [1, 9]."""
    with pytest.raises(ContractBroken, match=r"Unlike: the spaces of 'a' and 'b' differ: .*--env.pad-spaces"):
        flat(Unlike())
    env = flat(Unlike(), options={"pad_spaces": True})
    assert env.spec["action"] == {"discrete": [4, 3], "low": [], "high": []}
    assert {name: leaf["shape"] for name, leaf in env.spec["observation"].items()} == {"x": [9], "action_mask": [7]}
    step = env.reset(0)
    assert step.obs["x"][[0, 1]].tolist() == [[5] * 4 + [1] * 5, [5] * 9]
    assert step.obs["action_mask"].tolist() == [
        [1, 1, 0, 0, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [0, 1, 0, 1, 0, 1, 0],
    ]
    env.step(np.array([[1, 2], [3, 1], [0, 0], [3, 1]]), np.zeros((4, 0), np.float32))
    assert {agent: action.tolist() for agent, action in env.env.chosen.items()} == {
        "a": [1, 2 + 5], "b": [3, 1], "c": [0, 0], "d": [3, 1],
    }  # fmt: skip


@pytest.mark.parametrize(("team", "each"), [("none", [2, 2, 2, 2]), ("sum", [8] * 4), ("mean", [2] * 4)])
def test_team_rewards_are_of_the_agents_that_are_in_the_game(team, each):
    """Each gets the number of the step; with a script that ends 'a', 'b' and 'c' with the first, 'd' is alone in it."""

    class Last(Mortals):
        def step(self, actions):
            obs, rewards, ends, limit, infos = super().step(actions)
            if self.count == 2:
                self.agents, ends = ["d"], {agent: agent != "d" for agent in "abcd"}
                limit = dict.fromkeys("abcd", False)
            return obs, {**dict.fromkeys("abc", 7.0), **rewards}, ends, limit, infos  # 7 for those that are gone

    env = flat(Last(), options={"team_reward": team})
    env.env.episode = 3  # whose script is long enough
    assert min(script(4).values()) > 3
    env.reset(0)
    steps = [env.step(*zeros(env)) for _ in range(4)]
    assert steps[0].reward.tolist() == [1 if x == 2 else 4 for x in each]
    assert [env._held[row].reward for row in range(3)] == each[:3]
    assert [step.reward[3] for step in steps[2:]] == [3, 4]


@pytest.mark.case("MAS-19")
def test_agents_that_act_at_once_declare_their_outcome_or_have_none():
    class Duel(Mortals):
        def __init__(self, outcome):
            super().__init__()
            self.outcome = outcome

        def step(self, actions):
            obs, _, ends, limit, infos = super().step(actions)
            return obs, dict.fromkeys(obs, 0.0), ends, limit, {agent: dict(self.outcome) for agent in infos}

    for outcome, expected in (({"outcome": -1}, {"outcome": -1.0}), ({}, {})):
        env = flat(Duel(outcome))
        env.reset(0)
        stats = [numbers for _ in range(15) for numbers in env.step(*zeros(env)).stats.values()]
        assert stats
        assert all(numbers == expected for numbers in stats)


@pytest.mark.case("MAS-19")
def test_each_game_is_told_once_with_the_outcome_of_every_row():
    """Agents end on moves of their own; all records come with the reset, the outcomes with the first of them."""

    class Numbered(Mortals):
        def step(self, actions):
            obs, rewards, ends, limit, infos = super().step(actions)
            outcomes = {agent: {"outcome": 1 if self.possible_agents.index(agent) == 2 else -1} for agent in infos}
            return obs, rewards, ends, limit, outcomes

    env = flat(Numbered())
    env.reset(0)
    told, ended = [], 0
    for _ in range(60):
        step = env.step(*zeros(env))
        assert step.games.keys() <= step.stats.keys()
        told += step.games.values()
        ended += step.episode_over.any()
    assert ended >= 2
    assert told == [[-1.0 if row != 2 else 1.0 for row in range(env.count)]] * ended


@pytest.mark.parametrize(
    ("methods", "match"),
    [
        ({"observation_space": spaces.Discrete(2)}, "Mine has no method observation_space; docs/agents.md says"),
        ({"step": None, "action_space": None}, "Mine has no method action_space nor step"),
        ({"reset": lambda self, seed=None: {"a": 1, "b": 2}}, r"Mine.reset\(\) returned no tuple; 2 dict"),
        ({"step": lambda self, actions: ({}, 0.0, False, {})}, r"Mine.step\(\) returned dict, float, bool, dict; 5"),
        ({"step": lambda self, actions: ({}, {"a": 1}, {}, {}, {})}, r"the reward of 'b' is None"),
    ],
)
def test_a_class_that_lacks_something_is_told_what(methods, match):
    mine = type("Mine", (Mortals,), methods)

    def play():
        env = flat(mine())
        env.reset(0)
        env.step(*zeros(env))

    with pytest.raises(ContractBroken, match=match):
        play()


class Many(Mortals):
    def __init__(self, count):
        super().__init__()
        self.possible_agents = list(range(count))


@pytest.mark.parametrize("count", [16, 17])
def test_agents_are_named_in_the_order_of_their_rows_and_only_a_game_of_few_has_statistics_of_each(count):
    env = flat(Many(count))
    assert env.spec["agents"] == [str(n) for n in range(count)]
    shapes = {name: [0, "bool", [1]] for name in ("event", "reward", "info", "terminated", "truncated", "episode_over",
                                                  "game", "discrete", "continuous", "at_work")}  # fmt: skip
    rows = protocol.ManyRows(env, 0, protocol.Arrays(bytearray(1), shapes), ())
    step = VectorStep.first({}, count)
    step.stats = {3: {"hits": 2.0}}
    assert rows._record(3, step) == {
        "row": 3, "hits": 2.0, "length": 0, "return": 0.0, **({"return/3": 0.0, "length/3": 0} if count == 16 else {})
    }  # fmt: skip


def test_games_are_counted_by_resets():
    """Two of Squad's games, of 5 steps each: an agent that returns within a game is still in the same."""
    env, counted = squad(pad_spaces=True), []
    assert env.games == 0
    env.reset(1)
    for _ in range(10):
        counted.append(env.games)
        env.step(np.zeros((3, 1), np.int64), np.zeros((3, 0), np.float32))
    assert counted == [1] * 5 + [2] * 5
    assert env.games == 3
