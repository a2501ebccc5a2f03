"""Games in turns as rows: each agent's transitions are those of PettingZoo's own loop, whoever moved in between."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from pronghorn.envworker.building import flat, make
from pronghorn.envworker.many_rows import FIRST, INACTIVE, LAST, STEPPED
from pronghorn.envworker.spaces import ContractBroken

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("pettingzoo")
games = pytest.importorskip("turn_games")
Circle, Mortals, Unlike, script = games.Circle, games.Mortals, games.Unlike, games.script
pytestmark = pytest.mark.filterwarnings("ignore:.*old environment creation API has been deprecated")


def choose(mask, rng):
    return int(rng.choice(np.flatnonzero(mask)))


def advance(env, row, action):
    """One step in which `row` acts and the others get any answer."""
    discrete = np.full((env.count, 1), 99, np.int64)
    discrete[row] = action
    return env.step(discrete, np.zeros((env.count, 0), np.float32))


def played(env, num_moves, pick=lambda leaves: 0):
    """({row: its trajectories, each a list of (obs, action, reward, terminated, truncated, final obs or None)},
    episode statistics by row in order), of moves picked from the leaves that the agent on turn sees."""
    lives, stats, waiting = defaultdict(list), [], {}
    step = env.reset(3)
    for _ in range(num_moves + 1):
        (row,) = np.flatnonzero(step.event != INACTIVE)  # one agent is on turn
        obs = {name: leaf[row].tolist() for name, leaf in step.obs.items() if name != "action_mask"}
        if step.event[row] in (STEPPED, LAST):
            final = {name: leaf[row].tolist() for name, leaf in step.final_obs.items() if name != "action_mask"}
            ended, cut = bool(step.terminated[row]), bool(step.truncated[row])
            what_came = float(step.reward[row]), ended, cut, final if cut else None
            lives[int(row)][-1].append((*waiting.pop(row), *what_came))
        if step.event[row] in (FIRST, LAST):
            lives[int(row)].append([])
        stats += [(int(row), numbers) for row, numbers in step.stats.items()]
        assert step.episode_over.tolist() == [step.event[r] == LAST for r in range(env.count)]
        action = pick({name: leaf[row] for name, leaf in step.obs.items()})
        waiting[row] = obs, action
        step = advance(env, row, action)
    return {row: [life for life in some if life] for row, some in lives.items()}, stats


def by_hand(raw, num_moves, pick, masked=True):
    """The same, by the loop of PettingZoo's documentation and its accumulated rewards."""
    lives, waiting, moves = defaultdict(list), {}, 0
    raw.reset(seed=3)
    for row in range(len(raw.possible_agents)):
        lives[row].append([])
    while True:
        for agent in raw.agent_iter():
            obs, reward, terminated, truncated, _ = raw.last()
            row, seen = raw.possible_agents.index(agent), obs["observation"] if masked else obs
            leaves = {"observation" if masked else "obs": seen.tolist()}
            over = terminated or truncated
            if row in waiting:
                final = leaves if truncated and not terminated else None
                lives[row][-1].append((*waiting.pop(row), float(reward), terminated, final is not None, final))
            if over:
                lives[row].append([])
                raw.step(None)
                continue
            if moves == num_moves:
                return {row: [life for life in some if life] for row, some in lives.items()}
            moves += 1
            action = pick({"action_mask": obs["action_mask"]} if masked else {})
            waiting[row] = leaves, action
            raw.step(action)
        raw.reset()


def without_waiting(lives):
    """Whole trajectories: which of an unfinished one has been told depends on who is on turn."""
    return {row: [life for life in some if life[-1][3] or life[-1][4]] for row, some in lives.items()}


@pytest.mark.case("MAS-11")
@pytest.mark.parametrize("game", ["tictactoe_v3", "connect_four_v3", "go_v5"])
def test_transitions_of_pettingzoos_games_are_those_of_its_own_loop(game):
    from importlib import import_module

    pytest.importorskip("pygame")
    options = {"board_size": 5} if game == "go_v5" else {}
    rng, other = np.random.default_rng(1), np.random.default_rng(1)
    env = make("pettingzoo", "classic." + game, options)
    ours, stats = played(env, 400, lambda leaves: choose(leaves["action_mask"], rng))
    raw = import_module("pettingzoo.classic." + game).env(**options)
    theirs = by_hand(raw, 400, lambda leaves: choose(leaves["action_mask"], other))
    ours, theirs = without_waiting(ours), without_waiting(theirs)
    for row in (0, 1):
        count = min(len(ours[row]), len(theirs[row]))  # an end is told with the next beginning
        assert count >= 5
        assert ours[row][:count] == theirs[row][:count]
    sums = np.array([[sum(step[2] for step in life) for life in ours[row]][: len(stats) // 2] for row in (0, 1)])
    assert np.isin(sums, (-1, 0, 1)).all()
    assert sums.any()
    for row in (0, 1):  # who won is the sign of the sum, as these games sum to 0
        assert [numbers["outcome"] for r, numbers in stats if r == row][:5] == sums[row][:5].tolist()


@pytest.mark.case("MAS-11")
def test_what_comes_on_the_moves_of_others_belongs_to_the_agents_own_last_action():
    """Moves 1 (a), 2 (b), 3 (a), 4 (b): 'a' gets 1 on the move of 'b'; the last move's rewards come at the end."""
    gifts = {"1": {"b": 10}, "2": {"a": 1}, "3": {"a": 2, "b": 20}, "4": {"a": 4, "b": 40}}
    lives, _ = played(flat(Circle(length=4, gifts=gifts)), 12)
    for of_a, of_b in zip(lives[0][:2], lives[1][:2], strict=True):
        assert [step[2] for step in of_a] == [0 + 1, 2 + 4]
        assert [step[2] for step in of_b] == [10 + 20, 40]  # what came before its first turn lies in its first reward
        assert [step[3] for step in of_a] == [step[3] for step in of_b] == [False, True]
    total = sum(sum(gift.values()) for gift in gifts.values())
    assert sum(step[2] for row in (0, 1) for step in lives[row][0]) == total


def test_how_a_game_ended_is_drawn_before_the_next_one_for_those_who_look():
    """Moves 1 to 3 belong to the first game; the step of move 3 begins the second."""
    env = flat(games.Drawn())
    env.reset(0)
    for move in range(3):
        advance(env, move % 2, 0)
    assert (env.env.num_drawn, env.env.move, env.ending()) == (0, 0, None)  # nobody looks
    assert (env.render() == 0).all()
    for move in range(3):
        assert env.ending() is None
        advance(env, move % 2, 0)
    assert env.games == 3
    assert (env.render() == 0).all()  # on the canvas of the picture that was kept
    assert (env.ending() == 3 * 80).all()
    assert env.ending() is None


def test_of_agents_that_end_one_by_one_the_last_ends_the_game():
    env = flat(Circle(num_agents=3, length=6, ends={"2": {"b": "terminated"}, "4": {"c": "truncated"}}, patient=True))
    drawn = []
    env.env.render = lambda: drawn.append(env.env.move) or np.full((1, 1, 3), env.env.move, np.uint8)
    step = env.reset(0)
    env.render()
    for move in range(1, 7):
        (row,) = np.flatnonzero(step.event != INACTIVE)
        step = advance(env, row, 0)
        assert drawn == ([0, 6] if move == 6 else [0])
    assert env.ending().tolist() == [[[6, 6, 6]]]


def test_only_the_agent_on_turn_acts_and_sees():
    env = flat(Circle(num_agents=3, length=7))
    step = env.reset(0)
    for move in range(20):
        (row,) = np.flatnonzero(step.event != INACTIVE)
        assert row == move % 7 % 3
        assert step.obs["obs"][row].tolist() == [move // 7, move % 7, row]
        step = advance(env, row, 0)
    assert env.spec["rows_wait"]
    assert env.spec["rows_per_env"] == 3


@pytest.mark.case("MAS-03")
def test_agents_that_end_at_different_times_live_as_long_as_the_script_says():
    """100 episodes; the script ends agents alone, two on a move, and all at once, also when they are not on turn."""
    lives, _ = played(flat(Mortals()), 5000)
    for number in range(100):
        expected = expected_lives(script(number))
        for row in range(4):
            found = lives[row]
            if expected[row]:  # one that ended before its first turn has no trajectory
                life = found.pop(0)
                assert [int(step[0]["obs"][1]) for step in life] == expected[row]
                assert {step[0]["obs"][0] for step in life} == {number}
                assert [step[3:5] for step in life[:-1]] == [(False, False)] * (len(life) - 1)
                cut = row == 3 and expected_end(script(number), "d") < 30
                assert life[-1][3:5] == (not cut, cut)
                assert (life[-1][5] is not None) == cut


def expected_lives(ends):
    """By row: numbers of moves before each of its turns, by the rules of the circle."""
    order, alive, turns, mover = "abcd", set("abcd"), {row: [] for row in range(4)}, 0
    for move in range(30):
        turns[mover].append(move)
        alive -= set(ends.get(str(move + 1), {}))
        others = [(mover + i) % 4 for i in range(1, 5)]
        mover = next((row for row in others if order[row] in alive), None)
        if mover is None:
            break
    return turns


def expected_end(ends, agent):
    return next(int(move) for move, agents in ends.items() if agent in agents)


@pytest.mark.case("MAS-04")
def test_an_agent_that_returns_begins_a_second_trajectory():
    """'b' ends on move 2, its own, and is back after move 5; 'a' and 'c' go on alone in between."""
    gifts = {str(move): {"a": move} for move in range(1, 9)}
    env = flat(Circle(num_agents=3, length=9, ends={"2": {"b": "terminated"}}, comes_back={"5": "b"}, gifts=gifts))
    lives, _ = played(env, 40)
    # a 0, b 1, c 2, a 3, c 4, then after move 5 (of c): a 5, b 6, c 7, a 8
    assert [[int(step[0]["obs"][1]) for step in life] for life in lives[1][:3]] == [[1], [6], [1]]
    assert [life[-1][3] for life in lives[1][:2]] == [True, True]
    assert [int(step[0]["obs"][1]) for step in lives[0][0]] == [0, 3, 5, 8]
    assert [step[2] for step in lives[0][0]] == [1 + 2 + 3, 4 + 5, 6 + 7 + 8, 0]


@pytest.mark.case("MAS-07")
@pytest.mark.parametrize("masks", ["obs", "info"])
def test_masks_lie_in_observations_or_infos_and_are_asked_for_agents_on_turn_only(masks):
    """The toy has no observation of an agent that is gone, and raises at an action that its mask forbids."""
    env = flat(Circle(num_agents=3, length=8, ends={"2": {"c": "terminated"}}, masks=masks))
    assert env.spec["observation"]["action_mask"] == {"shape": [3], "dtype": "uint8", "kind": "mask"}
    lives, _ = played(env, 50, lambda leaves: int(np.flatnonzero(leaves["action_mask"])[0]))
    assert [step[1] for step in lives[0][0]] == [1, 0, 2, 1]  # moves 1, 3, 5, 7
    assert 2 not in lives  # 'c' ended before its first turn, every time


def test_a_mask_that_is_missing_later_is_an_error():
    class Forgets(Circle):
        def _info(self):
            return super()._info() if self.move < 2 else {}

    env = flat(Forgets(masks="info"))
    with pytest.raises(ContractBroken, match=r"info\['action_mask'\] of 'a' is None; since the infos hold masks"):
        played(env, 3, lambda leaves: int(np.flatnonzero(leaves["action_mask"])[0]))


def test_a_mask_that_appears_only_later_is_an_error():
    class Late(Circle):
        def _info(self):
            return super()._info() if self.move >= 2 else {}

    env = flat(Late(masks="info"))
    with pytest.raises(ContractBroken, match="the info of 'a' holds an action mask that is not read"):
        played(env, 3, lambda leaves: int(env.env._mask().argmax()))


@pytest.mark.case("MAS-08")
def test_an_agent_that_dies_out_of_turn_leaves_by_a_move_that_no_row_hears_of():
    """'c' ends on the first move of 'a', after its own two turns at moves 3 and 6 in a game of three."""
    env = flat(Circle(num_agents=3, length=9, ends={"7": {"c": "truncated"}}, gifts={"7": {"c": 5}}))
    raw, actions = env.env, []
    step = raw.step
    raw.step = lambda action: (actions.append((raw.agent_selection, action)), step(action))[1]
    lives, _ = played(env, 9)
    assert actions[:8] == [("a", 0), ("b", 0), ("c", 0), ("a", 0), ("b", 0), ("c", 0), ("a", 0), ("c", None)]
    assert [agent for agent, action in actions if action is None] == ["c", "a", "b"]
    assert all(type(action) is np.int64 for _, action in actions if action is not None)
    # one transition for each of the two actions; the last holds what came as it died, and what it saw then
    lives, _ = played(env, 12)
    assert [(int(s[0]["obs"][1]), *s[2:]) for s in lives[2][0]] == [
        (2, 0.0, False, False, None),
        (5, 5.0, False, True, {"obs": [lives[2][0][0][0]["obs"][0], 7, 2]}),
    ]


def test_an_illegal_move_ends_the_game_for_both_as_the_wrapper_says():
    from pettingzoo.classic import tictactoe_v3

    env = flat(tictactoe_v3.env())
    env.reset(0)
    advance(env, 0, 4)
    step = advance(env, 1, 4)  # taken
    # the next episode has begun: 'player_1' is told that the last one is over; both flags are set, the end counts
    assert step.event.tolist() == [LAST, INACTIVE]
    assert (step.reward[0], step.terminated[0], step.truncated[0]) == (0.0, True, False)
    step = advance(env, 0, 0)
    assert step.event.tolist() == [INACTIVE, LAST]
    assert (step.reward[1], step.terminated[1]) == (-1.0, True)
    assert step.stats == {1: {}}  # -1 and 0 do not sum to 0: no outcome


@pytest.mark.case("MAS-10")
def test_what_an_environment_pads_its_gone_agents_with_is_not_read():
    ends, gifts = {"3": {"c": "terminated"}}, {"4": {"a": 1, "b": 3}}
    plain, padded = (
        played(
            flat(
                Circle(num_agents=3, length=9, ends=ends, gifts=gifts, padded=padding), options={"team_reward": "mean"}
            ),
            60,
        )
        for padding in (0.0, 7.0)
    )
    assert padded == plain
    assert sum(step[2] for step in plain[0][0][0]) == 2.0  # the mean of 1 and 3: 'c' is not in the game


@pytest.mark.parametrize(("team", "each"), [("sum", 12.0), ("mean", 4.0), ("none", None)])
def test_team_rewards(team, each):
    """Move 1 gives a, b, c 0, 4 and 8, before b and c had a turn; nothing else is given."""
    env = flat(Circle(num_agents=3, length=6, gifts={"1": {"b": 4, "c": 8}}), options={"team_reward": team})
    lives, _ = played(env, 20)
    assert [lives[row][0][0][2] for row in range(3)] == ([0, 4, 8] if each is None else [each] * 3)
    assert sum(step[2] for row in range(3) for step in lives[row][0][1:]) == 0


@pytest.mark.parametrize(("team", "of_a", "of_c"), [("none", 3.0, 7.0), ("mean", 3.0, 0.0), ("sum", 6.0, 0.0)])
def test_an_agent_that_has_ended_and_waits_to_leave_is_no_more_in_the_team(team, of_a, of_c):
    """'c' ends with move 4, of 'a', and leaves after move 5, of 'b', on which all get something. Without a team it gets
    what PettingZoo's last() says at its last turn."""
    settings = {"ends": {"4": {"c": "terminated"}}, "gifts": {"5": {"a": 3, "b": 3, "c": 7}}, "patient": True}
    lives, _ = played(flat(Circle(num_agents=3, length=9, **settings), options={"team_reward": team}), 30)
    assert [step[2] for step in lives[0][0]] == [0, of_a, 0, 0]
    assert [(int(step[0]["obs"][1]), step[2], step[3]) for step in lives[2][0]] == [(2, of_c, True)]


def test_an_unknown_team_reward_is_refused():
    with pytest.raises(ContractBroken, match="team_reward = 'max': it is one of none, sum, mean"):
        flat(Circle(), options={"team_reward": "max"})


# ------------------------------------------------------------------------------------------ outcomes


@pytest.mark.case("MAS-19")
def test_a_declared_outcome_is_taken_whatever_the_rewards_say():
    infos = {"a": {"outcome": -1}, "b": {"outcome": np.int64(1)}}
    _, stats = played(flat(Circle(gifts={"1": {"a": 5}}, infos=infos)), 14)
    assert [(row, numbers["outcome"]) for row, numbers in stats] == [(0, -1.0), (1, 1.0), (0, -1.0), (1, 1.0)]


@pytest.mark.case("MAS-19")
@pytest.mark.parametrize(
    ("gifts", "outcomes"),
    [
        ({"1": {"a": 1}, "2": {"b": 1}}, None),  # food for both: not the other's loss
        ({"1": {"a": 3}}, None),
        ({"1": {"a": 1, "b": -1}, "2": {"a": -3, "b": 3}}, (-1.0, 1.0)),  # the sums are -2 and 2
        ({}, (0.0, 0.0)),
    ],
)
def test_without_a_declared_one_only_rewards_that_sum_to_zero_tell_who_won(gifts, outcomes):
    _, stats = played(flat(Circle(gifts=gifts)), 14)
    assert [row for row, _ in stats] == [0, 1, 0, 1]
    if outcomes is None:
        assert all("outcome" not in numbers for _, numbers in stats)
    else:
        assert [numbers["outcome"] for _, numbers in stats] == [*outcomes, *outcomes]
        assert sum(numbers["outcome"] for _, numbers in stats) == 0


@pytest.mark.case("MAS-19")
def test_an_outcome_that_still_waits_is_not_that_of_the_game_after_it():
    """'b' wins episode 0 and gets no turn in episode 1, which 'a' wins at once; it hears of both in episode 2."""

    class Short(Circle):
        def reset(self, seed=None, options=None):
            super().reset(seed, options)
            self.length = 1 if self.episode == 1 else 4
            self.gifts = {"1": {"a": 1, "b": -1} if self.episode == 1 else {"a": -1, "b": 1}}

    lives, stats = played(flat(Short()), 8)
    assert stats == [(0, {"outcome": -1.0}), (0, {"outcome": 1.0}), (1, {"outcome": 1.0})]
    assert [[step[2] for step in life] for life in lives[0][:2]] == [[-1, 0], [1]]
    assert [step[2] for step in lives[1][0]] == [1, 0]  # the -1 of a game that it had no turn in belongs to no action


@pytest.mark.case("MAS-19")
@pytest.mark.parametrize("declares", [False, True])
def test_each_game_is_told_once_with_the_outcomes_also_of_who_had_no_turn(declares):
    """Games 0, 2, ... take 4 moves and 'b' wins; in the others 'a' wins with the first move."""

    class Folds(Circle):
        def reset(self, seed=None, options=None):
            super().reset(seed, options)
            self.length = 1 if self.episode % 2 else 4
            sign = 1 if self.episode % 2 else -1
            self.gifts = {"1": {"a": sign, "b": 0 if declares else -sign}}
            self.last_infos = {"a": {"outcome": sign}, "b": {"outcome": -sign}} if declares else {}

    assert games_told(flat(Folds()), 30) == [(0, [-1.0, 1.0]), (0, [1.0, -1.0])] * 6


def test_a_game_that_declares_nothing_is_told_without_outcomes():
    assert games_told(flat(Circle(num_agents=3)), 13) == [(0, [None, None, None])] * 2


@pytest.mark.case("MAS-04")
def test_the_end_of_an_agent_that_returns_is_no_end_of_a_game():
    """'b' ends on move 2 and on the last one, 9: what it declares then is what counts, and it is told once."""

    class Twice(Circle):
        def _info(self):
            self.last_infos = {agent: {"outcome": -1 if self.move < 9 else 1} for agent in "ab"}
            return super()._info()

    env = flat(Twice(num_agents=2, length=9, ends={"2": {"b": "terminated"}}, comes_back={"5": "b"}))
    assert games_told(env, 19) == [(0, [1.0, 1.0])] * 2


def games_told(env, num_moves):
    """(row, outcomes) of the games that records tell of."""
    step, told = env.reset(3), []
    for _ in range(num_moves + 1):
        (row,) = np.flatnonzero(step.event != INACTIVE)
        told += list(step.games.items())
        step = advance(env, row, 0)
    return told


def test_games_of_more_than_two_tell_no_outcome_of_their_own():
    _, stats = played(flat(Circle(num_agents=3, gifts={"1": {"a": 2, "b": -1, "c": -1}})), 14)
    assert stats
    assert all("outcome" not in numbers for _, numbers in stats)


def test_team_rewards_do_not_hide_who_won():
    _, stats = played(flat(Circle(gifts={"1": {"a": 1, "b": -1}}), options={"team_reward": "sum"}), 8)
    assert [numbers["outcome"] for _, numbers in stats] == [1.0, -1.0]


@pytest.mark.parametrize("outcome", [2, "win", float("nan"), [1, 0]])
def test_an_outcome_that_is_none_is_an_error(outcome):
    env = flat(Circle(infos={"a": {"outcome": outcome}}))
    with pytest.raises(ContractBroken, match=r"info\['outcome'\] of 'a' is .*; it is 1 for a win, 0 for a draw, -1"):
        played(env, 8)


# ------------------------------------------------------------------------------------------ faults, padding


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"fault": "counts twice", "gifts": {"2": {"a": 1}}, "length": 9}, r"says that 'a' got 1 since its last turn; "
                                                                           r"its `rewards` .* sum to 0"),
        ({"fault": "leaves"}, "'b' left the `agents` of Circle without a turn at its end"),
        ({"fault": "selects"}, r"Circle.agent_selection is 'z', and `agents` is \['a', 'b'\]"),
        ({"fault": "stays"}, r"Circle.step\(None\) left 'a', which has ended, in `agents`"),
        ({"fault": "strangers"}, "Circle: `agents` holds 'z', `possible_agents` does not"),
        ({"gifts": {"2": {"a": float("nan")}}}, "Circle: the reward of 'a' is nan; each agent in the game needs a"),
        ({"gifts": {"2": {"a": None}}, "fault": "silent"}, "Circle: the reward of 'a' is None"),
    ],
)  # fmt: skip
def test_faults_of_a_game_are_named(settings, match):
    env = flat(Circle(**settings))
    with pytest.raises(ContractBroken, match=match):
        played(env, 10)


def test_a_game_that_gives_nobody_a_turn_is_an_error():
    class Over(Circle):
        def reset(self, seed=None, options=None):
            super().reset(seed, options)
            self.terminations = dict.fromkeys(self.agents, True)

    with pytest.raises(ContractBroken, match="101 episodes in a row ended before any agent got a turn"):
        flat(Over()).reset(0)


@pytest.mark.case("MAS-13")
def test_agents_of_different_spaces_need_padding_and_the_error_says_so():
    names = r"Unlike: the spaces of 'a' and 'b' differ: the observations are Box\(1.0, 9.0, \(4,\).* and Box\(.*\(9,\)"
    with pytest.raises(ContractBroken, match=names + r".*are Discrete\(2\) and Discrete\(6\).*--env.pad-spaces"):
        flat(Unlike())


@pytest.mark.case("MAS-13", "SPA-20")
def test_padding_lengthens_vectors_and_masks_the_actions_that_an_agent_lacks():
    """The pad value lies within the bounds [1, 9]; the toy raises at an action that its space does not hold."""
    env = flat(Unlike(), options={"pad_spaces": True})
    assert env.spec["observation"]["obs"]["shape"] == [9]
    assert env.spec["action"] == {"discrete": [6], "low": [], "high": []}
    step, rng = env.reset(0), np.random.default_rng(0)
    assert step.obs["obs"][0].tolist() == [5, 5, 5, 5, 1, 1, 1, 1, 1]
    assert step.obs["action_mask"][0].tolist() == [1, 1, 0, 0, 0, 0]
    chosen = set()
    for move in range(200):
        row = move % 2
        action = choose(step.obs["action_mask"][row], rng)
        chosen.add((row, action))
        step = advance(env, row, action)
    assert step.obs["obs"][0].tolist() == [5, 5, 5, 5, 1, 1, 1, 1, 1]
    assert step.obs["action_mask"][0].tolist() == [1, 1, 0, 0, 0, 0]
    assert chosen == {(0, 0), (0, 1), *((1, n) for n in range(6))}


def test_options_of_agents_are_refused_elsewhere():
    toys = str(Path(__file__).parents[1] / "toy_envs.py")
    for name, value in {"pad_spaces": True, "team_reward": "sum"}.items():
        with pytest.raises(ContractBroken, match=f"{name} is an option of environments of several agents"):
            make("call", f"{toys}:Counter", {}, {name: value})
        with pytest.raises(ContractBroken, match=f"CartPole-v1: {name} is an option of environments of several agents"):
            make("gym", "CartPole-v1", {}, {name: value})


@pytest.mark.parametrize("masks", ["", "info"])
def test_games_are_counted_from_the_first_that_is_played(masks):
    """Not the reset by which the adapter looks whether there are masks in the infos."""
    env, counted = flat(Circle(length=4, masks=masks)), []
    env.reset(1)
    for move in range(8):
        counted.append(env.games)
        advance(env, env._on_turn, (move % 4 + 1) % 3)  # what the mask allows
    assert counted == [1] * 4 + [2] * 4
