"""Matches as environments on real engines: rows, actions, frags and what they are worth, outcomes, options."""

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn import check_env
from pronghorn.envworker import building, deathmatch, doom_scenarios
from pronghorn.envworker.many_rows import FIRST, LAST, STEPPED
from pronghorn.envworker.spaces import ContractBroken
from pronghorn.types import EnvSpec

vizdoom = pytest.importorskip("vizdoom")

VARIABLE = vizdoom.GameVariable
WALK, STRAFE, WEAPON, ATTACK, SPEED, USE, TURN = range(7)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the engine writes its configuration where it runs


@pytest.fixture
def make():
    envs = []

    def make_env(name="duel", **arguments):
        envs.append(building.make("doom", name, arguments))
        return envs[-1]

    yield make_env
    for env in envs:
        env.close()


def noop(env):
    return np.zeros((env.players.num_agents, 7), np.int64)


def place(env, agent):
    game = env.players._match.games[agent]
    return [game.get_game_variable(v) for v in (VARIABLE.POSITION_X, VARIABLE.POSITION_Y, VARIABLE.ANGLE)]


def aimed(env, agent=0, target=1):
    """The action that turns the agent towards the target, and shoots once he looks at it."""
    x, y, angle = place(env, agent)
    other = place(env, target)
    left = (math.degrees(math.atan2(other[1] - y, other[0] - x)) - angle + 180) % 360 - 180  # degrees to turn left by
    speeds = [doom_scenarios.held(value).get(doom_scenarios.TURN_BUTTON, 0.0) for value in deathmatch.FACTORS[TURN]]
    action = np.zeros(7, np.int64)
    action[TURN] = int(np.argmin([abs(speed * 2 + left) for speed in speeds]))  # two tics; a positive speed turns right
    action[ATTACK] = abs(left) < 6
    return action


def duel_until_frag(env, most=1200):
    """Agent 0 shoots at agent 1, who stands still; the steps until the first frag."""
    steps = []
    for _ in range(most):
        actions = noop(env)
        actions[0] = aimed(env)
        steps.append(env.step(actions))
        if env.players.results()[0]["frags"] or steps[-1].episode_over.any():
            return steps
    raise AssertionError("no frag came")


# --- what the rows get -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rows"), [("duel", 2), ("multi_deathmatch", 4), ("duel_bots", 1)])
def test_every_kind_steps_as_its_spec_says(make, name, rows):
    env = make(name, timeout_tics=6)
    spec = EnvSpec.from_json(json.loads(json.dumps(env.spec)))
    assert (spec.name, spec.rows_per_env, spec.rows_wait) == ("doom:" + name, rows, False)
    assert spec.action.discrete == (3, 3, 8, 2, 2, 2, 21)
    assert (spec.frame_skip, spec.info) == (2, ("outcome", "frags", "deaths"))
    first = env.reset(1)
    leaves = first.obs if rows > 1 else {name: leaf[None] for name, leaf in first.items()}
    shapes = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in leaves.items()}
    assert shapes == {n: ((rows, *leaf.shape), leaf.dtype) for n, leaf in spec.observation.items()}
    assert leaves["obs"].std() > 1.0  # a picture, not an empty buffer
    assert env.render().shape == (120, 320 if rows == 2 else 160, 3)


def test_the_time_limit_of_a_match_is_terminated_for_all_and_the_next_begins_at_once(make):
    """5 tics with a skip of 2 are three steps, the last of one tic."""
    env = make(timeout_tics=5)
    first = env.reset(1)
    assert first.event.tolist() == [FIRST] * 2
    steps = [env.step(noop(env)) for _ in range(4)]
    assert [step.event.tolist() for step in steps] == [[STEPPED] * 2, [STEPPED] * 2, [LAST] * 2, [STEPPED] * 2]
    assert steps[2].terminated.all()
    assert not steps[2].truncated.any()
    assert np.isnan(steps[1].info["outcome"]).all()
    assert steps[2].info["outcome"].tolist() == [0.0, 0.0]
    assert {row: (stats["outcome"], stats["frags"]) for row, stats in steps[2].stats.items()} == {0: (0, 0), 1: (0, 0)}
    assert [step.games for step in steps[:3]] == [{}, {}, {0: [0.0, 0.0]}]
    left = [step.obs["measurements"][0, -1] for step in (first, *steps)]
    np.testing.assert_allclose(left, [1.0, 3 / 5, 1 / 5, 1.0, 3 / 5], rtol=1e-6)


def test_a_single_agent_among_bots_is_a_plain_environment(make):
    env = make("duel_bots", timeout_tics=4)
    env.reset(1)
    *_, info = env.step(np.zeros(7, np.int64))
    assert info == {}
    obs, reward, terminated, truncated, over, info = env.step(np.zeros(7, np.int64))
    assert (terminated, truncated, over) == (True, False, True)
    assert isinstance(reward, float)
    assert set(info) == {"outcome", "frags", "deaths"}
    assert env.stats()["outcome"] == info["outcome"]
    assert obs["obs"].shape == (72, 128, 3)


def test_players_see_each_other_and_not_the_same(make):
    env = make(width=160, height=120)
    obs = env.reset(1).obs["obs"]
    assert (obs[0] != obs[1]).any()


@pytest.mark.case("ENV-02")
def test_observations_are_not_overwritten_by_later_steps(make):
    env = make(width=160, height=120)  # no resize, so nothing else makes the copy
    first = env.reset(1).obs["obs"]
    kept = first.copy()
    actions = noop(env)
    actions[:, TURN] = 3
    second = env.step(actions).obs["obs"]
    assert (second != kept).any()
    np.testing.assert_array_equal(first, kept)


def test_measurements_are_scaled_and_say_who_leads(make):
    env = make()
    env.reset(1)
    steps = duel_until_frag(env)
    own = {name: i for i, (name, _) in enumerate(deathmatch.MEASURED)}
    winner, loser = steps[-1].obs["measurements"]
    assert winner[own["HEALTH"]] == 1.0
    health = [step.obs["measurements"][1, own["HEALTH"]] for step in steps]
    assert all(later <= earlier for earlier, later in pairwise(health[:-1]))
    assert 0.0 < health[-2] < 1.0  # wounded before the last blow
    assert 0.0 < winner[own["AMMO2"]] < 0.5  # of 50 rounds
    assert winner[len(own) + 2] == 1.0  # slot 2, the pistol, is in hand
    np.testing.assert_allclose([winner[-3:-1], loser[-3:-1]], [[0.1, 0.1], [0.0, -0.1]])  # frags, lead
    assert np.abs(np.stack([step.obs["measurements"] for step in steps])).max() <= 2.0


# --- frags, rewards, outcomes ------------------------------------------------------------------------------


def test_a_frag_is_worth_its_weight_and_what_one_wins_the_other_loses(make):
    """Rewards of SELF_PLAY: damage done and taken 0.01 a point, a frag 1 and a death -1."""
    env = make()
    env.reset(1)
    rewards = np.array([step.reward for step in duel_until_frag(env)])
    assert rewards[-1, 0] >= 1.0
    assert rewards[-1, 1] == pytest.approx(-1.0)
    # The last blow takes more points than are left of 100, and only the loss of those before it counts.
    assert 1.0 + 0.99 <= rewards[:, 0].sum() <= 1.0 + 1.3
    assert -2.0 <= rewards[:, 1].sum() <= -1.0
    result = env.players.results()[1]
    assert [result[name] for name in ("outcome", "frags", "deaths", "damage")] == [-1.0, 0.0, 1.0, 0.0]
    # Who died is back soon, and his row went on.
    for _ in range(30):
        step = env.step(noop(env))
        assert step.event.tolist() == [STEPPED] * 2
    assert env.players._values[1, env.players._variables.index("HEALTH")] == 100.0


def test_outcomes_of_a_duel_sum_to_nothing_and_tell_the_winner(make):
    env = make(timeout_tics=900)
    env.reset(1)
    duel_until_frag(env)
    while not (step := env.step(noop(env))).episode_over.any():
        pass
    assert step.info["outcome"].tolist() == [1.0, -1.0]
    assert step.info["frags"].tolist() == [1.0, 0.0]
    assert step.info["deaths"].tolist() == [0.0, 1.0]
    assert step.stats[0]["damage"] >= 100.0


@pytest.mark.parametrize(
    ("frags", "outcomes"),
    [
        ([3, 1], [1, -1]),
        ([2, 2], [0, 0]),
        ([-1, 0], [-1, 1]),
        ([4, 4, 1], [0, 0, -1]),
        ([4, 5, 1], [-1, 1, -1]),
    ],
)
def test_outcome_is_won_against_the_best_of_the_others(make, frags, outcomes):
    env = make("multi_deathmatch", agents=len(frags))
    players = env.players
    players._values = np.zeros((len(frags), len(players._variables)))
    players._first = np.full_like(players._values, 10.0)  # counters of earlier matches
    players._values += 10.0
    players._values[:, -len(frags) :] += frags
    assert [result["outcome"] for result in players.results()] == outcomes


def test_a_bot_that_is_ahead_has_beaten_all_agents(make):
    players = make("multi_deathmatch", agents=2, bots=1).players
    players._values = np.zeros((2, len(players._variables)))
    players._first = np.zeros_like(players._values)
    players._values[:, -3:] = [2, 1, 3]
    assert [result["outcome"] for result in players.results()] == [-1.0, -1.0]


def test_rewards_change_while_a_match_runs(make):
    env = make()
    env.reset(1)
    env.set_option("rewards", {"damage": 0.0, "frag": 5.0})
    env.set_rewards({"health_lost": 0.0, "health_gained": 0.0, "death": -3.0}, agent=1)
    rewards = np.array([step.reward for step in duel_until_frag(env)])
    assert rewards.sum(0).tolist() == [5.0, -3.0]
    env.set_option("rewards", [{"frag": 1.0}, {"frag": 2.0}])
    assert [one.weights["frag"] for one in env.players._shapings] == [1.0, 2.0]


def test_players_are_named_and_matches_counted():
    """By stubs: a match of two steps."""
    leaves = {"obs": np.zeros((2, 1), np.float32)}

    class Stub:
        num_agents, spec, count = 2, {"info": []}, 0
        set_rewards = set_option = render = close = None

        def begin(self, seed):
            return leaves

        def play(self, discrete):
            self.count += 1
            return leaves, np.zeros(2), self.count % 2 == 0

        def results(self):
            return [{"outcome": 1.0}, {"outcome": -1.0}]

    env = deathmatch.MatchEnv(Stub())
    assert env.games == 0
    env.reset(1)
    counted = [env.games]
    for _ in range(4):
        env.step(np.zeros((2, 1), np.int64))
        counted.append(env.games)
    assert counted == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(("name", "agents"), [("duel", ("player_0", "player_1")), ("duel_bots", ())])
def test_a_match_declares_its_agents_and_the_weights_that_can_be_set(make, name, agents):
    spec = EnvSpec.from_json(json.loads(json.dumps(make(name, rewards={"frag": 2.5}).spec)))
    kind = deathmatch.MATCHES[name]
    assert spec.agents == agents
    assert spec.rewards == {**kind.rewards, "frag": 2.5}
    make(name).set_option("rewards", spec.rewards)  # it takes what it declares


# --- the contract ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["duel", "duel_bots"])
def test_a_match_keeps_the_contract_of_environments(name):
    kept = check_env(lambda: deathmatch.make(name, timeout_tics=60), num_steps=10)
    assert "the last observation of an episode fits, and reset starts the next" in kept
    assert "the same seed and actions give the same 10 steps" in kept


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("duel", {"agents": 3}, "doom:duel: agents = 3, and it has 2"),
        ("duel_bots", {"agents": 2}, "agents = 2, and it has 1"),
        ("duel_bots", {"bots": 0}, "a match has 2 to 16 players"),
        ("multi_deathmatch", {"agents": 9}, "agents = 9, and it has 2 to 8"),
        ("multi_deathmatch", {"agents": 1}, "agents = 1, and it has 2 to 8"),
        ("multi_deathmatch", {"agents": 8, "bots": 9}, "a match has 2 to 16 players"),
        ("duel", {"map": "dm1"}, "there is no map 'dm1'; there are: multi_deathmatch, multi_duel"),
        ("duel", {"frame_skip": 0}, "at least 1"),
        ("duel", {"rewards": {"frags": 1.0}}, "nothing is called 'frags'"),
        ("duel", {"resolution": "161x120"}, "160x120"),
        ("duel", {"scenarios_dir": "/tmp"}, "leave scenarios_dir out"),
        ("duel", {"tics": 4}, "doom:duel: got an unexpected keyword argument 'tics'; its arguments are: "),
    ],
)
def test_a_wrong_argument_is_named_with_its_rule(name, arguments, message):
    with pytest.raises(ContractBroken, match=message):
        building.make("doom", name, arguments)


def test_an_action_outside_its_factor_is_refused(make):
    env = make()
    env.reset(1)
    actions = noop(env)
    actions[1, TURN] = 21
    with pytest.raises(ValueError, match=r"outside the factors of \[3, 3, 8, 2, 2, 2, 21\]"):
        env.step(actions)


def test_only_rewards_can_change_while_it_runs(make):
    env = make()
    with pytest.raises(ValueError, match="no setting 'skill'"):
        env.set_option("skill", 5)
    with pytest.raises(ValueError, match="1 tables for 2 agents"):
        env.set_option("rewards", [{}])


# --- maps that a user brings -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ssl2", "ssl2_bots", "freedm", "dwango5", "dwango5_bots", "battle", "battle2"])
def test_a_missing_map_is_named_with_where_to_find_it(name, tmp_path):
    with pytest.raises(ContractBroken, match=rf"doom:{name} needs \w+\.\w+, which is not shipped. Name the folder"):
        building.make("doom", name)
    with pytest.raises(ContractBroken, match=r"which scenarios_dir = '.*' lacks.*sample-factory"):
        building.make("doom", name, {"scenarios_dir": str(tmp_path)})


def test_a_cfg_without_its_map_names_the_map(tmp_path):
    (tmp_path / "battle_continuous_turning.cfg").write_text("doom_scenario_path = battle.wad\n")
    with pytest.raises(ContractBroken, match=r"needs battle\.wad, which scenarios_dir"):
        building.make("doom", "battle", {"scenarios_dir": str(tmp_path)})


def test_scenarios_of_the_paper_play_from_the_users_folder(tmp_path, make):
    """With maps that are shipped in place of the paper's: the definitions and the folder are what is tested."""
    shipped = Path(vizdoom.scenarios_path)
    (tmp_path / "ssl2.wad").write_bytes((shipped / "cig.wad").read_bytes())
    (tmp_path / "battle.wad").write_bytes((shipped / "defend_the_center.wad").read_bytes())
    (tmp_path / "battle_continuous_turning.cfg").write_text("doom_scenario_path = battle.wad\ndoom_map = map01\n")
    duel = make("ssl2_bots", scenarios_dir=str(tmp_path), timeout_tics=4)
    assert duel.reset(1)["obs"].shape == (72, 128, 3)
    battle = make("battle", scenarios_dir=str(tmp_path))
    assert battle.spec["action"]["discrete"] == [3, 3, 2, 2, 11]
    assert battle.reset(1)["measurements"].shape == (3,)
    battle.step([0, 0, 0, 0, 0])
    battle.step([0, 0, 0, 0, 0])  # nobody can move in the first tics
    before = battle._game.get_game_variable(VARIABLE.ANGLE)
    battle.step([0, 0, 0, 0, 1])  # the fastest turn to the left: 10 degrees a tic
    assert (battle._game.get_game_variable(VARIABLE.ANGLE) - before) % 360 == pytest.approx(40.0, abs=0.1)
