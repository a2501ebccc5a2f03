"""Matches: exact counts of games whose winner is known, sides, shares, lost games, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from match_games import PAPER, ROCK, SCISSORS, constant
from playing import TOYS
from pronghorn.cli import run
from pronghorn.config import Config, EnvConfig, replace
from pronghorn.defaults import resolve
from pronghorn.errors import EnvError, UsageError
from pronghorn.evaluation.at_rows import PolicyAtRows
from pronghorn.evaluation.match import _make_pool, _Series, match_config, play_matches
from pronghorn.evaluation.players import PolicyPlayer, RandomPlayer, ScriptPlayer, load_player, unique_names
from pronghorn.evaluation.policy import Policy, build_model
from pronghorn.population.ratings import Ratings
from pronghorn.training.trainer import train
from pronghorn.types import ActionSpec, EnvSpec, Event, LeafSpec, Ready

GAMES = str(Path(__file__).parents[1] / "match_games.py")


def game(name: str = "Throw", **args: Any) -> Config:
    return Config(env=EnvConfig(id=f"{GAMES}:{name}", args=args))


def script(name: str, function: Any) -> ScriptPlayer:
    return ScriptPlayer(name, name, function)


rock, other_rock = script("rock", constant(ROCK)), script("other rock", constant(ROCK))
paper, scissors = script("paper", constant(PAPER)), script("scissors", constant(SCISSORS))


def counts(ratings: Ratings, first: str, second: str) -> tuple[int, int, int]:
    pair = ratings.pair(first, second)
    return pair.wins, pair.draws, pair.losses


# ------------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("games", [1, 2, 7])
def test_the_better_one_wins_every_game_on_both_sides(games: int) -> None:
    ratings = play_matches([rock, paper], game(), games=games, seed=1)
    assert counts(ratings, "rock", "paper") == (0, 0, games)
    first_sides = {(first, second): sum(results) for (first, second), results in ratings._games.items()}
    assert first_sides == {("rock", "paper"): -(-games // 2)} | ({("paper", "rock"): games // 2} if games > 1 else {})


def test_three_players_meet_in_every_pair_and_rate_the_same_in_a_circle() -> None:
    ratings = play_matches([rock, paper, scissors], game(), games=6, seed=1)
    assert [counts(ratings, *pair) for pair in (("rock", "paper"), ("rock", "scissors"), ("paper", "scissors"))] == [
        (0, 0, 6), (6, 0, 0), (0, 0, 6),
    ]  # fmt: skip
    assert [(round(one.elo), one.games) for one in ratings.fit().values()] == [(1500, 12)] * 3
    assert ratings.first_side_score() == 0.5


def test_equal_choices_are_draws() -> None:
    ratings = play_matches([rock, other_rock], game(), games=5, seed=1)
    assert counts(ratings, "rock", "other rock") == (0, 5, 0)


@pytest.mark.parametrize("num_envs", [2, 3, 5, None])
def test_the_advantage_of_the_first_side_is_given_to_both_equally_often(num_envs: int | None) -> None:
    """Whoever is on the first side wins. Of seven games the first player of the pair has it in four."""
    ratings = play_matches([rock, other_rock], game(first_wins=True), games=7, seed=1, num_envs=num_envs)
    assert counts(ratings, "rock", "other rock") == (4, 0, 3)
    assert ratings.first_side_score() == 1.0


def test_several_tasks_are_each_played_both_ways() -> None:
    """In one task the first side wins, in the other the higher number: of 8 games 4 are of each."""
    task = f"{GAMES}:first_side_throws"
    config = Config(env=EnvConfig(id=f"{GAMES}:Throw,{task}"))
    ratings = play_matches([rock, other_rock], config, games=8, seed=1)
    assert counts(ratings, "rock", "other rock") == (2, 4, 2)


@pytest.mark.case("EVL-08")
def test_short_games_are_not_counted_more_often_than_long_ones() -> None:
    """Games of 1 step are won by the first side, as many of 30 steps by the second. The first 64 games to end, of 64
    environments, would nearly all be short ones."""
    ratings = play_matches([rock, paper], game(lengths=[1, 30]), games=64, seed=1, num_envs=64)
    assert ratings.pair("rock", "paper").games == 64
    assert 0.3 < ratings.first_side_score() < 0.7  # 0.5 ± 3.2 deviations


def test_lost_games_are_played_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    died = tmp_path / "died"
    ratings = play_matches([rock, paper], game(dies=str(died)), games=12, seed=1, num_envs=2)
    assert died.exists()
    assert "restarting it: 1 of" in caplog.text
    assert counts(ratings, "rock", "paper") == (0, 0, 12)


def test_a_game_in_turns_counts_where_one_side_had_no_turn() -> None:
    """Who folds loses, though the other one never acts; who bids less than the other one loses, and equal bids draw."""
    folds, low, high = script("folds", constant(0)), script("low", constant(1)), script("high", constant(2))
    ratings = play_matches([folds, low, high, script("same", constant(1))], game("Bet"), games=8, seed=1, num_envs=3)
    for better in ("low", "high", "same"):
        assert counts(ratings, "folds", better) == (0, 0, 8)
    assert counts(ratings, "low", "high") == (0, 0, 8)
    assert counts(ratings, "low", "same") == (0, 8, 0)
    assert ratings.first_side_score() == 0.5


def test_pettingzoos_tic_tac_toe_of_random_players_favours_who_begins() -> None:
    pytest.importorskip("pygame")
    config = Config(env=EnvConfig(id="pettingzoo:classic.tictactoe_v3"))
    other = changed(RandomPlayer(), name="other", source="other")
    ratings = play_matches([RandomPlayer(), other], config, games=200, seed=1)
    assert ratings.pair("random", "other").games == 200
    # Of random games the first side wins 58.5 %, the second 28.8 %, and 12.7 % are drawn: it scores 0.648 ± 0.031.
    assert abs(ratings.first_side_score() - 0.648) < 0.11


def test_equal_seeds_play_equal_games_and_others_others() -> None:
    other = changed(RandomPlayer(), name="other", source="other")
    tables = [play_matches([RandomPlayer(), other], game(), games=40, seed=seed).state() for seed in (1, 1, 2)]
    assert tables[0] == tables[1] != tables[2]


def test_with_more_than_two_agents_every_second_one_is_of_a_side() -> None:
    """The highest number of four agents wins; two of a side that tie for it have won against the other side."""
    seen: dict[str, set[int]] = {"paper": set(), "scissors": set()}

    def noting(name: str, choice: int) -> Any:
        def function(spec: EnvSpec, seed: int) -> Any:
            def act(obs: Any, first: Any) -> Any:
                seen[name] |= set(obs["obs"][:, 0].astype(int).tolist())
                return np.full((len(first), 1), choice), None

            return act

        return function

    players = [script(name, noting(name, choice)) for name, choice in (("paper", PAPER), ("scissors", SCISSORS))]
    ratings = play_matches(players, game(rule="high", num_agents=4), games=3, seed=1)
    assert counts(ratings, "paper", "scissors") == (0, 0, 3)
    assert seen == {"paper": {0, 1, 2, 3}, "scissors": {0, 1, 2, 3}}


@pytest.mark.parametrize(
    ("rows_per_env", "players"),
    [(2, [0, 1, 1, 0]), (3, [0, 1, 0, 1, 0, 1]), (4, [0, 1, 0, 1, 1, 0, 1, 0])],
)
def test_sides_are_dealt_in_turn_and_mirrored(rows_per_env: int, players: list[int]) -> None:
    class Pool:
        spec = EnvSpec({}, ActionSpec((2,)), rows_per_env=rows_per_env)
        num_rows, tasks = 2 * rows_per_env, ("game",)
        task_ids = np.zeros(2 * rows_per_env, np.int64)

    series = _Series(Pool(), 5)  # type: ignore[arg-type]
    assert series.player.tolist() == players
    assert series.left.tolist() == [3, 2]
    assert [series.take(0) for _ in range(4)] == [True, True, True, False]
    assert series.left.tolist() == [0, 2]


def test_duels_on_engines_have_a_worker_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EnvConfig] = []
    monkeypatch.setattr("pronghorn.evaluation.match.make_pool", lambda config, **_: made.append(config.env))
    monkeypatch.setattr("pronghorn.evaluation.match.available_cores", lambda: 8)
    for games in (1, 5, 100):
        _make_pool(Config(env=EnvConfig(id="doom:duel")), games, 1, None)
        _make_pool(Config(env=EnvConfig(id="pettingzoo:classic.go_v5")), games, 1, None)
    assert [(env.workers, env.envs_per_worker) for env in made] == [(2, 1), (1, 2), (5, 1), (1, 5), (8, 1), (8, 13)]


# ------------------------------------------------------------------------------------------ players


def test_a_script_is_made_once_for_each_side_and_may_remember_its_rows() -> None:
    """A game takes 3 steps; each row counts its own, from the first of each game."""
    made: list[int] = []

    def function(spec: EnvSpec, seed: int) -> Callable[..., Any]:
        made.append(seed)
        time: dict[int, int] = {}

        def act(obs: Any, first: Any, rows: Any) -> Any:
            for row, begins, seen in zip(rows.tolist(), first, obs["obs"], strict=True):
                time[row] = 0 if begins else time[row] + 1
                assert time[row] == seen[1]
            assert len(set(obs["obs"][:, 0].tolist())) == 1  # of one side
            return np.zeros((len(rows), 1), np.int32), np.zeros((len(rows), 0))

        return act

    ratings = play_matches([script("counts", function), paper], game(length=3), games=10, seed=1)
    assert counts(ratings, "counts", "paper") == (0, 0, 10)
    assert len(set(made)) == len(made) == 2


def test_random_players_keep_to_masks() -> None:
    """Without rock, paper never wins; scissors would be refused rock (see the errors of scripts)."""
    ratings = play_matches([RandomPlayer(), paper], game(mask=True), games=30, seed=1)
    wins, draws, losses = counts(ratings, "random", "paper")
    assert losses == 0
    assert min(wins, draws) > 0
    assert wins + draws == 30


def test_players_of_one_name_are_numbered() -> None:
    named = [script(name, None) for name in ("duel", "random", "duel", "duel#1")]
    assert unique_names(named) == ["duel#2", "random", "duel#3", "duel#1"]


def test_players_are_named_by_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_players.py").write_text("def good(spec, seed):\n    return None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    by_module, by_file = load_player("own_players:good"), load_player("./own_players.py:good")
    assert [one.name for one in (by_module, by_file, load_player("random"))] == [*["own_players:good"] * 2, "random"]
    assert by_file.source == f"{tmp_path / 'own_players.py'}:good"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("runs/none", r"There is no run directory 'runs/none'\. A player is a run directory, RUN:1"),
        (f"{GAMES}:rok", "match_games.py has no 'rok'; near: rock"),
        (f"{GAMES}:not_a_function", "it is 3, not a function"),
        ("no_such_module:rock", "there is no module 'no_such_module'"),
        ("/none/players.py:rock", "there is no file '/none/players.py'"),
        ("runs/none:1", "There is no run directory 'runs/none:1'"),
    ],
)
def test_a_word_that_names_no_player_is_refused(word: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load_player(word)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda obs, first: np.zeros((len(first), 1), int), r"returned array\(.*; it is \(discrete, continuous\)"),
        (lambda obs, first: (np.zeros(len(first), int), None), r"discrete actions of shape \(\d+,\), int64; they are"),
        (lambda obs, first: (np.ones((len(first), 1)), None), r"float64; they are integers of shape \(\d+, 1\)"),
        (lambda obs, first: (None, None), r"discrete actions of shape \(\), object"),
        (lambda obs, first: (np.ones((len(first), 1), int), np.ones((len(first), 1))), "returned continuous actions"),
        (lambda obs, first: (np.full((len(first), 1), 3), None), "chose 3 for discrete action 0; its choices are 0 to"),
        (lambda obs, first: (np.full((len(first), 1), -1), None), "chose -1 for discrete action 0"),
        (lambda obs, first: (np.full((len(first), 1), ROCK), None), r"chose 0 .*'action_mask' allows \[1, 2\]"),
        (lambda obs: (None, None), r"act\(obs\) has to take \(obs, first\), or \(obs, first, rows\)"),
        (None, r"function\(spec, seed\) returned None"),
    ],
)  # fmt: skip
def test_what_a_script_does_wrong_is_said(act: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as info:
        play_matches([script("mine.py:wrong", lambda spec, seed: act), paper], game(mask=True), games=2, seed=1)
    assert "The player mine.py:wrong" in str(info.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [(1.5, "gave 1.5 for continuous action 0; the bounds are -1 to 1"), (math.nan, "gave nan for continuous action 0")],
)
def test_continuous_actions_of_scripts_stay_within_their_bounds(value: float, says: str) -> None:
    class Pool:
        spec = EnvSpec({}, ActionSpec((), (-1.0,), (1.0,)), rows_per_env=2)

    def act_of(number: float) -> Any:
        given = script("mine", lambda spec, seed: lambda obs, first: (None, np.full((len(first), 1), number)))
        return given.begin(Pool(), 0)  # type: ignore[arg-type]

    none = np.zeros(2, np.bool_)
    ready = Ready(np.arange(2), np.full(2, Event.FIRST, np.uint8), {}, none, none, none, none, none, {})  # type: ignore[arg-type]
    assert act_of(0.5)(ready, ~none)[1].tolist() == [[0.5], [0.5]]
    with pytest.raises(UsageError, match=says):
        act_of(value)(ready, ~none)


# ------------------------------------------------------------------------------------------ refusals


def test_fewer_than_two_players_or_games_and_one_player_twice_are_refused() -> None:
    with pytest.raises(UsageError, match="at least two players, and 1 was given"):
        play_matches([rock], game(), games=1, seed=1)
    with pytest.raises(UsageError, match="--games 0: must be at least 1"):
        play_matches([rock, paper], game(), games=0, seed=1)
    with pytest.raises(UsageError, match=r"rock was named twice\. A player against itself says nothing"):
        play_matches([rock, paper, rock], game(), games=1, seed=1)


def test_environments_that_are_no_game_are_refused() -> None:
    with pytest.raises(UsageError, match=r"has one agent, .* name one with --env ENV.*: pronghorn eval"):
        play_matches([rock, paper], Config(env=EnvConfig(id="gym:CartPole-v1")), games=1, seed=1)
    with pytest.raises(UsageError, match="are environments of their own, not the agents of one game"):
        play_matches([rock, paper], Config(env=EnvConfig(id=f"{TOYS}:vector_cart_poles")), games=1, seed=1)


@pytest.mark.case("MAS-19")
@pytest.mark.parametrize("declares", ["nothing", "first"])
def test_games_that_do_not_declare_who_won_are_an_error(declares: str) -> None:
    with pytest.raises(EnvError, match=r"who won was not declared for each agent: .*set info\['outcome'\] of each"):
        play_matches([rock, paper], game(declares=declares), games=4, seed=1)


def test_games_that_both_sides_win_are_an_error() -> None:
    with pytest.raises(EnvError, match=r"a game declared a win for both sides .*says nothing of who is stronger"):
        play_matches([rock, paper], game(rule="all win"), games=4, seed=1)


def policy_player(name: str, spec: EnvSpec, **env: Any) -> PolicyPlayer:
    config = resolve(replace(game(), {"model.mlp_layers": (8,), **{f"env.{key}": v for key, v in env.items()}}), spec)
    return PolicyPlayer(name, f"runs/{name}", Policy(build_model(config.model, spec), config, spec))


SEEN = {"obs": LeafSpec((2,), "float32", "vector", low=-1.0, high=99.0)}
SPEC = EnvSpec(SEEN, ActionSpec((3,)), rows_per_env=2, rows_wait=True)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (changed(SPEC, action=ActionSpec((4,))), r"the action \(discrete\) that it was trained with is \(4,\)"),
        (changed(SPEC, observation={"obs": LeafSpec((3,), "float32", "vector")}), "the observation 'obs' .*vector 3"),
        (changed(SPEC, observation={"obs": LeafSpec((2,), "float32", "vector")}), r"is LeafSpec\(.* low=-inf"),
        (changed(SPEC, rows_per_env=1), "has one agent"),
    ],
)
def test_runs_that_differ_from_each_other_or_from_the_environment_are_refused(other: EnvSpec, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        play_matches([policy_player("a", SPEC), policy_player("b", other)], game(), games=1, seed=1)
    with pytest.raises(UsageError, match=says):
        play_matches([policy_player("b", other), rock], game(), games=1, seed=1)


def test_who_learned_alone_or_among_more_agents_plays_where_it_sees_and_does_the_same() -> None:
    alone = policy_player("alone", changed(SPEC, rows_per_env=1), id="toys:alone")
    many = policy_player("many", changed(SPEC, rows_per_env=4), id="toys:many")
    ratings = play_matches([alone, many], game(), games=6, seed=1)
    assert ratings.pairs()[0].games == 6


def test_the_environment_is_that_of_the_runs_or_the_one_that_is_named() -> None:
    a, b = policy_player("a", SPEC), policy_player("b", SPEC, id="gym:Other-v0", args={"size": "3"})
    assert match_config([rock, a]) is a.policy.config
    with pytest.raises(UsageError, match=r"trained in different environments: env.id is .* say with --env ENV"):
        match_config([a, b])
    with pytest.raises(UsageError, match=r"env\.args is"):
        match_config([a, policy_player("c", SPEC, args={"rule": "high"})])
    assert match_config([a, b], "gym:Other-v0").env.args == {"size": "3"}
    assert match_config([a, b], "doom:duel") == Config(env=EnvConfig(id="doom:duel"))
    with pytest.raises(UsageError, match=r"None of the players is a trained run\. Say where they play: --env ENV"):
        match_config([rock, paper])


# ------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt that the highest number wins."""
    run_dir = tmp_path_factory.mktemp("runs") / "high"
    values = {
        "run_dir": str(run_dir), "steps": 4_096, "env.workers": 1, "env.envs_per_worker": 64, "log.live": "off",
        "env.args": {"rule": "high"}, "learner.unroll_length": 8, "learner.batch_unrolls": 32,
        "learner.minibatches": 1, "learner.lr": 0.01, "model.mlp_layers": (16,),
    }  # fmt: skip
    train(replace(game(), values))
    return run_dir


def test_a_trained_policy_never_loses_against_random_on_either_side(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["match", str(trained), "random", "--games", "60", "--deterministic", "--json"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert "high against random: 60 games" in captured.err
    assert record.keys() == {"env", "seed", "pairs", "ratings", "first_side_score"}
    (pair,) = record["pairs"]
    assert pair.keys() == {
        "players", "games", "wins", "draws", "losses", "wins_ci95", "draws_ci95", "losses_ci95", "score",
    }  # fmt: skip
    assert pair["players"] == ["high", "random"]
    assert (pair["games"], pair["losses"]) == (60, 0)
    assert pair["wins"] + pair["draws"] == 60
    assert pair["wins"] >= 25  # random plays less than the highest in two of three
    assert pair["wins_ci95"][0] < pair["wins"] / 60 < pair["wins_ci95"][1]
    ratings = record["ratings"]
    assert ratings["high"]["elo"] - ratings["random"]["elo"] > 100
    assert ratings["high"]["stderr"] > 0


def test_the_table_is_for_people_and_equal_names_are_numbered(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "high"
    shutil.copytree(trained, copy)
    assert run(["match", str(trained), str(copy), f"{GAMES}:rock", "--games", "4", "--deterministic"]) == 0
    out = capsys.readouterr().out
    assert "4 games a pair, each player on each side in half of them" in out
    assert "high#1 – high#2" in out
    assert "0 wins (0 to 49 %), 4 draws (51 to 100 %), 0 losses (0 to 49 %), score 0.500" in out
    assert out.count("4 wins (51 to 100 %), 0 draws (0 to 49 %), 0 losses (0 to 49 %), score 1.000") == 2
    assert "the first side scores 0.5" in out
    assert out.rindex(" high#1  ") < out.rindex(" match_games:rock  ")  # the best first


def test_one_run_by_two_paths_is_the_same_player(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(trained)
    with pytest.raises(UsageError, match=r"was named twice\. A player against itself says nothing"):
        run(["match", str(trained), str(tmp_path / "link")])


def test_runs_of_different_environments_are_refused_by_the_command(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    text = (other / "config.toml").read_text()
    assert 'rule = "high"' in text
    (other / "config.toml").write_text(text.replace('rule = "high"', 'rule = "cycle"'))
    with pytest.raises(UsageError, match=r"were trained in different environments: env\.args is"):
        run(["match", str(trained), str(other), "--games", "1"])


def test_both_players_rows_are_asked_once_a_batch(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a policy that are ready are one forward pass, on whichever side they are."""
    sizes: list[int] = []
    act = PolicyAtRows.act

    def counted(self: Any, ready: Ready, acts: Any) -> Any:
        sizes.append(int(acts.sum()))
        assert acts.sum() == len(ready.rows) / 2
        return act(self, ready, acts)

    monkeypatch.setattr(PolicyAtRows, "act", counted)
    player = load_player(str(trained))
    play_matches([player, rock], match_config([player]), games=8, seed=1, num_envs=8)
    assert sum(sizes) >= 8
    assert min(sizes) >= 2


def test_the_command_says_what_is_wrong_before_it_plays(trained: Path) -> None:
    with pytest.raises(UsageError, match=r"at least two players, and 1 was given\. A player is"):
        run(["match", str(trained)])
    with pytest.raises(UsageError, match="Say where they play: --env ENV"):
        run(["match", "random", f"{GAMES}:rock"])
