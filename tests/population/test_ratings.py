"""Ratings: declared results only, the Elo model by hand and against its slow definition, errors, spans and state."""

from __future__ import annotations

import json
import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from pronghorn.config_population import SelfPlayConfig
from pronghorn.errors import EnvError, PopulationError
from pronghorn.population.matchmaking import Matchmaker
from pronghorn.population.ratings import (
    ANCHOR_ELO,
    FOUNDER_SD_ELO,
    LINK_SD_ELO,
    Ratings,
    climb,
    declared,
    expected_score,
    fit_elo,
    match_results,
    pair_result,
    wilson,
)

UNIT_ELO = 400 / math.log(10)  # 173.7 points are one unit of log odds


def played(*games: tuple[str, str, str, int]) -> Ratings:
    ratings = Ratings()
    for first, second, outcome, count in games:
        for _ in range(count):
            ratings.record(first, second, outcome)  # type: ignore[arg-type]
    return ratings


# ---------------------------------------------------------------- declared results


@pytest.mark.parametrize(
    ("value", "outcome"),
    [("win", "win"), ("draw", "draw"), ("loss", "loss"), (1, "win"), (np.float32(0), "draw"), (-1.0, "loss"),
     (None, None), (math.nan, None), (np.float32("nan"), None)],
)  # fmt: skip
def test_what_an_environment_may_declare(value: object, outcome: str | None) -> None:
    assert declared(value) == outcome


@pytest.mark.parametrize("value", ["won", 2, 0.5, [1]])
def test_anything_else_is_an_error_with_the_rule(value: object) -> None:
    with pytest.raises(EnvError, match=r"declared the outcome .*'win', 'draw' or 'loss'.*Correct info\['outcome'\]"):
        declared(value)


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [("win", "loss", "win"), ("loss", "win", "loss"), ("draw", "draw", "draw"), ("draw", "loss", "win"),
     ("win", "win", None), ("loss", "loss", None), ("win", None, None), (None, None, None)],
)  # fmt: skip
def test_the_better_outcome_beats_the_worse_and_equals_say_nothing(first, second, result) -> None:
    assert pair_result(first, second) == result


def test_a_match_of_many_sides_is_the_winner_against_each_loser() -> None:
    assert match_results(["loss", "win", None, "loss"]) == [(0, 1, "loss"), (1, 3, "win")]


@pytest.mark.case("MAS-19")
def test_a_game_that_rewards_both_moves_no_rating_and_a_declared_result_keeps_the_sum() -> None:
    """Both eat and get +1 in every episode. Only `info["outcome"]` moves a rating, and what one gains others lose."""
    ratings = Ratings()
    matchmaker = Matchmaker(SelfPlayConfig(self_weight=0, member_weight=1, snapshot_weight=0), 2, 3, seed=0)
    for member in range(3):
        ratings.add(f"member:{member}")

    def episode(infos: list[dict[str, object]]) -> None:
        matchmaker.assign("env", learners=range(3))
        for game in matchmaker.finish("env", [declared(info.get("outcome")) for info in infos]):
            ratings.record(*game)

    for _ in range(50):
        episode([{"reward": 1.0}, {"reward": 1.0}])
    assert [r.elo for r in ratings.fit().values()] == [ANCHOR_ELO] * 3
    assert [r.games for r in ratings.fit().values()] == [0, 0, 0]
    for _ in range(50):
        episode([{"reward": 1.0, "outcome": "loss"}, {"reward": 1.0, "outcome": "win"}])
    fitted = ratings.fit()
    assert sum(r.games for r in fitted.values()) == 2 * 50
    assert max(abs(r.elo - ANCHOR_ELO) for r in fitted.values()) > 1.0
    assert sum(r.elo for r in fitted.values()) == pytest.approx(3 * ANCHOR_ELO)


# ---------------------------------------------------------------- the model


def test_expected_scores_are_elos() -> None:
    assert expected_score(1500, 1500) == 0.5
    assert expected_score(1900, 1500) == pytest.approx(10 / 11)  # 400 points: ten to one
    assert expected_score(1500, 1900) == pytest.approx(1 / 11)


def test_many_games_give_the_difference_that_their_score_stands_for() -> None:
    """Three to one: 400 log10(3) = 190.8 points. The prior holds a few points of it back."""
    fitted = played(("a", "b", "win", 7500), ("a", "b", "loss", 2500)).fit()
    assert fitted["a"].elo - fitted["b"].elo == pytest.approx(400 * math.log10(3), abs=0.1)
    assert fitted["a"].elo + fitted["b"].elo == pytest.approx(2 * ANCHOR_ELO)
    assert fitted["a"].games == 10000


def test_a_rating_can_be_redone_by_hand() -> None:
    """a, b at ±x log odds: 3 - 4/(1 + e^-2x) = x Λ, with Λ = (173.7 / 350)² of the prior."""
    x = (played(("a", "b", "win", 3), ("a", "b", "loss", 1)).fit()["a"].elo - ANCHOR_ELO) / UNIT_ELO
    assert 3 - 4 / (1 + math.exp(-2 * x)) == pytest.approx(x * (UNIT_ELO / FOUNDER_SD_ELO) ** 2)
    assert 0.3 < x < math.log(3) / 2


def test_an_error_can_be_redone_by_hand() -> None:
    """100 even games say n/4 = 25 of the difference, the prior Λ/2; a rating is half of the difference."""
    fitted = played(("a", "b", "win", 50), ("a", "b", "loss", 50)).fit()
    prior = (UNIT_ELO / FOUNDER_SD_ELO) ** 2
    assert fitted["a"].elo == pytest.approx(ANCHOR_ELO)
    assert fitted["a"].stderr == pytest.approx(UNIT_ELO / 2 / math.sqrt(100 / 4 + prior / 2))  # 17.3 points


def test_the_error_is_that_of_many_repeated_matches() -> None:
    """Two players, 40 games at 60 %: over 400 such matches the ratings scatter as the error says."""
    rng = np.random.default_rng(0)
    elos, errors = [], []
    for wins in rng.binomial(40, 0.6, size=400):
        rating = played(("a", "b", "win", int(wins)), ("a", "b", "loss", 40 - int(wins))).fit()["a"]
        elos.append(rating.elo), errors.append(rating.stderr)
    assert np.std(elos) == pytest.approx(np.mean(errors), rel=0.1)


def slow_log_posterior(theta, points, parents) -> float:
    total = 0.0
    for i in range(len(theta)):
        for j in range(len(theta)):
            total += points[i][j] * math.log(1 / (1 + math.exp(theta[j] - theta[i])))
        origin, deviation = (0.0, FOUNDER_SD_ELO) if parents[i] is None else (theta[parents[i]], LINK_SD_ELO)
        total -= 0.5 * ((theta[i] - origin) / (deviation / UNIT_ELO)) ** 2
    return total


def test_ratings_are_the_top_of_the_slow_definition() -> None:
    rng = np.random.default_rng(3)
    parents = [None, 0, 1, None, 2]
    table = rng.integers(0, 12, (5, 5)) / 2.0  # [player, opponent] points
    np.fill_diagonal(table, 0.0)
    top = minimize(lambda theta: -slow_log_posterior(theta, table, parents), np.zeros(5), options={"gtol": 1e-9})
    pairs = np.array(list(combinations(range(5), 2)))
    elo, _ = fit_elo(pairs, np.array([[table[i, j], table[j, i]] for i, j in pairs]), parents)
    np.testing.assert_allclose(elo, ANCHOR_ELO + UNIT_ELO * top.x, atol=1e-3)


@pytest.mark.parametrize("start", [0.0, 2.0, 10.0, -30.0])
def test_the_top_is_found_from_any_start(start: float) -> None:
    """Where the score is nearly sure the slope is even: a full step from there would go a thousand units too far."""
    pairs, points, prior = np.array([[0, 1]]), np.array([[500.0, 500.0]]), 0.1 * np.eye(2)
    np.testing.assert_allclose(climb(np.array([start, -start]), pairs, points, prior), [0.0, 0.0], atol=1e-9)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"), st.sampled_from(["win", "draw", "loss"])),
                max_size=40), st.randoms())  # fmt: skip
def test_order_and_names_of_sides_change_nothing_and_the_sum_is_constant(games, random) -> None:
    ratings, again, mirror = Ratings(), Ratings(), {"win": "loss", "draw": "draw", "loss": "win"}
    for player in "abcd":
        ratings.add(player), again.add(player)
    shuffled = [(b, a, mirror[r]) if random.random() < 0.5 else (a, b, r) for a, b, r in games]
    random.shuffle(shuffled)
    for game in games:
        ratings.record(*game)
    for game in shuffled:
        again.record(*game)
    fitted = ratings.fit()
    assert again.fit() == fitted
    assert sum(r.elo for r in fitted.values()) == pytest.approx(4 * ANCHOR_ELO)
    assert all(0.0 < r.stderr < 1.01 * FOUNDER_SD_ELO for r in fitted.values())


def test_one_sided_matches_have_finite_ratings_and_the_wider_error() -> None:
    sure, open_ = played(("a", "b", "win", 100)).fit()["a"], played(("a", "b", "draw", 100)).fit()["a"]
    assert math.isfinite(sure.elo)
    assert sure.elo > ANCHOR_ELO + 300
    assert sure.stderr > 3 * open_.stderr


def test_no_player_no_rating_and_one_player_is_the_anchor() -> None:
    ratings = Ratings()
    assert ratings.fit() == {}
    ratings.add("a")
    ratings.record("a", "a", "win")  # against itself: says nothing
    assert ratings.fit()["a"].elo == ANCHOR_ELO
    assert ratings.fit()["a"].games == 0


# ---------------------------------------------------------------- players that learn


def test_a_player_that_learns_is_rated_by_what_it_is_now() -> None:
    ratings = played(("member:0", "script:bot", "loss", 30))
    ratings.freeze("member:0", "snapshot:0@1000")
    fresh = ratings.fit()
    assert fresh["member:0"].elo == pytest.approx(fresh["snapshot:0@1000"].elo)  # no games yet: like its snapshot ...
    assert fresh["member:0"].stderr > fresh["snapshot:0@1000"].stderr  # ... but less certain
    for _ in range(30):
        ratings.record("member:0", "script:bot", "win")
    later = ratings.fit()
    assert later["snapshot:0@1000"].elo < later["script:bot"].elo < later["member:0"].elo
    assert ratings.pair("snapshot:0@1000", "script:bot").losses == 30
    assert ratings.pair("member:0", "script:bot").wins == 30


def test_a_frozen_player_is_not_dragged_down_by_one_that_learns() -> None:
    """Two snapshots are equal by 100 games. The learner then beats one of them 100 times: they stay equal, nearly."""
    ratings = played(("a", "b", "win", 50), ("a", "b", "loss", 50))
    before = ratings.fit()
    for _ in range(100):
        ratings.record("learner", "a", "win")
    after = ratings.fit()
    assert abs(after["a"].elo - after["b"].elo) < 15 < 300 < after["learner"].elo - after["a"].elo
    assert before["a"].elo == pytest.approx(before["b"].elo)


def test_an_overwritten_player_starts_from_its_donor_and_its_old_games_stay_the_old_players() -> None:
    ratings = played(("member:0", "member:1", "win", 20))
    ratings.branch("member:1", "member:0")
    fitted = ratings.fit()
    assert fitted["member:1"].elo == pytest.approx(fitted["member:0"].elo)
    assert fitted["member:1"].games == 0
    assert ratings.players == ["member:0", "member:1#1", "member:1"]
    assert ratings.pair("member:0", "member:1#1").wins == 20
    ratings.freeze("member:0", "snapshot:0@5")  # what the target goes on from is this, not what the donor becomes
    for _ in range(50):
        ratings.record("member:0", "script:bot", "loss")
    later = ratings.fit()
    assert later["member:1"].elo == pytest.approx(later["snapshot:0@5"].elo)
    assert later["member:0"].elo < later["snapshot:0@5"].elo - 20


def test_misuse_names_the_player() -> None:
    ratings = Ratings()
    ratings.add("a")
    with pytest.raises(PopulationError, match="'a' is rated already"):
        ratings.add("a")
    with pytest.raises(PopulationError, match=r"'b' is not rated yet. Known: a"):
        ratings.freeze("b", "c")
    with pytest.raises(PopulationError, match="'a' is rated already"):
        ratings.freeze("a", "a")
    with pytest.raises(PopulationError, match="cannot take the place of itself"):
        ratings.branch("a", "a")


# ---------------------------------------------------------------- the table


def test_wilsons_interval_by_hand() -> None:
    # 0 of 10: [0, z² / (n + z²)]; 5 of 10: ½ ± ½ z / sqrt(n + z²)
    z2 = 1.959964**2
    assert wilson(0, 10) == pytest.approx((0.0, z2 / (10 + z2)))  # [0, 0.278]
    half = 0.5 * math.sqrt(z2 / (10 + z2))
    assert wilson(5, 10) == pytest.approx((0.5 - half, 0.5 + half))  # [0.237, 0.763]
    assert wilson(10, 10) == pytest.approx((10 / (10 + z2), 1.0))


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_lies_in_the_unit_interval_around_the_share(numbers: tuple[int, int]) -> None:
    low, high = wilson(*numbers)
    assert 0.0 <= low <= numbers[0] / numbers[1] + 1e-12
    assert numbers[0] / numbers[1] - 1e-12 <= high <= 1.0
    assert low < high


@pytest.mark.parametrize("numbers", [(1, 0), (3, 2), (-1, 2)])
def test_a_count_that_is_no_share_is_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(PopulationError, match="is no share"):
        wilson(*numbers)


def test_a_pair_joins_games_on_both_sides() -> None:
    ratings = played(("a", "b", "win", 3), ("b", "a", "win", 2), ("b", "a", "loss", 4), ("a", "b", "draw", 1))
    pair = ratings.pair("a", "b")
    assert (pair.wins, pair.draws, pair.losses, pair.games) == (7, 1, 2, 10)
    assert pair.score == 0.75
    assert ratings.pairs() == [pair]
    assert (ratings.pair("b", "a").wins, ratings.pair("b", "a").losses) == (2, 7)
    assert ratings.first_side_score() == pytest.approx((3 + 2 + 0.5) / 10)


def test_json_has_what_scripts_rely_on() -> None:
    out = json.loads(json.dumps(played(("a", "b", "win", 78), ("a", "b", "draw", 3), ("a", "b", "loss", 19)).to_json()))
    (pair,) = out["pairs"]
    assert {name: pair[name] for name in ("players", "games", "wins", "draws", "losses", "score")} == {
        "players": ["a", "b"], "games": 100, "wins": 78, "draws": 3, "losses": 19, "score": 0.795,
    }  # fmt: skip
    assert pair["wins_ci95"] == list(wilson(78, 100))
    assert set(out["ratings"]) == {"a", "b"}
    assert set(out["ratings"]["a"]) == {"elo", "stderr", "games"}
    assert out["first_side_score"] == 0.795
    assert json.loads(json.dumps(Ratings().to_json(), allow_nan=False)) == {
        "pairs": [], "ratings": {}, "first_side_score": None,
    }  # fmt: skip


def test_the_state_is_restored_exactly() -> None:
    ratings = played(("a", "b", "win", 3), ("b", "c", "draw", 2))
    ratings.freeze("a", "a@1")
    ratings.branch("b", "a")
    other = Ratings()
    other.load_state(json.loads(json.dumps(ratings.state())))
    assert other.fit() == ratings.fit()
    for each in (ratings, other):
        each.branch("c", "b")
        each.record("a", "c", "loss")
    assert other.players == ratings.players
    assert other.fit() == ratings.fit()


def test_a_player_that_is_forgotten_leaves_no_games_and_its_child_goes_on_from_its_parent() -> None:
    ratings = Ratings()
    ratings.add("member:0")
    ratings.add("script:random")
    for snapshot in ("snapshot:0@1", "snapshot:0@2"):
        ratings.record("member:0", "script:random", "win")
        ratings.freeze("member:0", snapshot)
    ratings.forget("snapshot:0@2")
    assert ratings.players == ["snapshot:0@1", "script:random", "member:0"]
    assert ratings.state()["parents"]["member:0"] == "snapshot:0@1"
    assert ratings.pair("snapshot:0@1", "script:random").wins == 1
    assert ratings.fit()["member:0"].games == 0
    ratings.forget("snapshot:0@1")
    assert ratings.state()["parents"] == {"script:random": None, "member:0": None}
    assert ratings.pairs() == []
    with pytest.raises(PopulationError, match="is not rated yet"):
        ratings.forget("snapshot:0@1")
