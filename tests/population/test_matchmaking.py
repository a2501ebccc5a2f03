"""Matchmaking: shares of opponents, sides, pinned matches, the pool's bound and eviction, sampling, exact state."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pronghorn.config_population import SelfPlayConfig
from pronghorn.errors import ConfigError, PopulationError
from pronghorn.population.matchmaking import Matchmaker, Player

MEMBER_0 = Player("member", "0")
SNAPSHOTS_ONLY: dict[str, Any] = {"self_weight": 0.0, "snapshot_weight": 1.0}


def maker(num_sides: int = 2, num_members: int = 1, seed: int = 0, snapshots: int = 0, **changes: Any) -> Matchmaker:
    """With snapshots of member 0 at 1000, 2000, ... steps."""
    matchmaker = Matchmaker(SelfPlayConfig(**{"snapshot_weight": 0.2, **changes}), num_sides, num_members, seed)
    for k in range(snapshots):
        matchmaker.add_snapshot(0, 1000 * (k + 1))
    return matchmaker


def opponents(matchmaker: Matchmaker, matches: int) -> Counter[str]:
    """Who member 0 met, over matches one after the other, without results."""
    met: Counter[str] = Counter()
    for _ in range(matches):
        players = list(matchmaker.assign("env", at_hand=range(matchmaker.num_members)).players)
        players.remove(MEMBER_0)
        met.update(map(str, players))
        matchmaker.abandon("env")
    return met


def steps(matchmaker: Matchmaker) -> list[int]:
    return [int(p.name.split("@")[1]) for p in matchmaker.pool]


# ---------------------------------------------------------------- matches


def test_opponents_come_in_the_shares_of_their_weights() -> None:
    matchmaker = maker(num_members=3, snapshots=2, self_weight=4, member_weight=3, snapshot_weight=2, script_weight=1,
                       scripts=("random", "bot"))  # fmt: skip
    met = opponents(matchmaker, 4000)
    shares = {k: sum(n for name, n in met.items() if name.startswith(k)) / 4000 for k in ("snapshot", "script")}
    assert met["member:0"] / 4000 == pytest.approx(0.4, abs=0.03)
    assert (met["member:1"] + met["member:2"]) / 4000 == pytest.approx(0.3, abs=0.03)
    assert shares == {"snapshot": pytest.approx(0.2, abs=0.03), "script": pytest.approx(0.1, abs=0.03)}
    assert min(met["member:1"], met["member:2"]) > 0.4 * (met["member:1"] + met["member:2"])
    assert min(met["script:random"], met["script:bot"]) > 100


def test_self_play_puts_the_learner_on_all_sides() -> None:
    assert maker(num_sides=3, snapshot_weight=0).assign("env").players == (MEMBER_0,) * 3


def test_the_learner_sits_on_every_side_equally_often() -> None:
    matchmaker = maker(num_sides=4, snapshots=1, **SNAPSHOTS_ONLY)
    places = Counter()
    for _ in range(2000):
        match = matchmaker.assign("env")
        assert match.players.count(MEMBER_0) == 1
        places[match.players.index(MEMBER_0)] += 1
        matchmaker.abandon("env")
    assert all(count == pytest.approx(500, abs=75) for count in places.values())
    assert len(places) == 4


def test_matches_are_played_for_the_given_members_in_turn() -> None:
    matchmaker = maker(num_members=8, snapshot_weight=0)
    learners = Counter(matchmaker.assign(env, learners=[2, 5]).learner for env in range(400))
    assert set(learners) == {2, 5}
    assert learners[2] == pytest.approx(200, abs=40)


def test_a_match_is_pinned_until_it_ends() -> None:
    matchmaker = maker(snapshots=3, **SNAPSHOTS_ONLY)
    match = matchmaker.assign(7)
    for at in range(10_000, 10_005):
        matchmaker.add_snapshot(0, at)
    assert matchmaker.match(7) is match
    with pytest.raises(PopulationError, match="Environment 7 plays a match already"):
        matchmaker.assign(7)
    matchmaker.finish(7, [None, None])
    with pytest.raises(PopulationError, match="Environment 7 plays no match"):
        matchmaker.match(7)
    matchmaker.abandon(7)  # nothing to abandon is no error: a worker may die between two episodes
    matchmaker.assign(7)


def test_a_finished_match_gives_the_games_to_rate() -> None:
    matchmaker = maker(num_sides=3, snapshots=1, **SNAPSHOTS_ONLY)
    match = matchmaker.assign("env")
    names = [str(player) for player in match.players]
    assert sorted(names) == ["member:0", "snapshot:0@1000", "snapshot:0@1000"]
    outcomes = ["win" if name == "member:0" else "loss" for name in names]
    games = matchmaker.finish("env", outcomes)
    assert len(games) == 2  # the two losers say nothing of each other
    for first, second, result in games:
        assert (first, result) == (("member:0", "win") if second == "snapshot:0@1000" else ("snapshot:0@1000", "loss"))
    # two wins: (0.99 · 1 + 1 + ½) / (0.99 · 1 + 1 + 1)
    assert matchmaker.win_rate(0, matchmaker.pool[0]) == pytest.approx(2.49 / 2.99)


def test_a_match_against_itself_is_no_game() -> None:
    matchmaker = maker(snapshot_weight=0)
    matchmaker.assign("env")
    assert matchmaker.finish("env", ["win", "loss"]) == []


def test_outcomes_are_one_for_each_side() -> None:
    matchmaker = maker(snapshot_weight=0)
    matchmaker.assign("env")
    with pytest.raises(PopulationError, match="2 sides and 3 outcomes"):
        matchmaker.finish("env", ["win", "loss", "loss"])


def test_members_that_train_learn_and_resting_members_snapshots_and_scripts_only_play() -> None:
    matchmaker = maker(num_members=4, num_sides=5, snapshots=1, self_weight=1, member_weight=1, snapshot_weight=1,
                       script_weight=1, scripts=("bot",))  # fmt: skip
    learned: dict[str, set[bool]] = {}
    for env in range(200):
        match = matchmaker.assign(env, learners=[0, 2], at_hand=[0, 1, 2])
        assert match.learns[match.players.index(Player("member", str(match.learner)))]
        for player, learns in zip(match.players, match.learns, strict=True):
            learned.setdefault(str(player), set()).add(learns)
    assert learned == {"member:0": {True}, "member:1": {False}, "member:2": {True}, "snapshot:0@1000": {False},
                       "script:bot": {False}}  # fmt: skip


def test_a_member_that_is_to_meet_another_needs_one_at_hand() -> None:
    matchmaker = maker(num_members=2, self_weight=0, snapshot_weight=0, member_weight=1)
    with pytest.raises(PopulationError, match="Member 1 is to meet another, and none is at hand"):
        matchmaker.assign("env", learners=[1])
    assert sorted(map(str, matchmaker.assign("env", [1], at_hand=[0, 1]).players)) == ["member:0", "member:1"]


def test_players_have_names() -> None:
    assert Player.from_str("snapshot:0@1000") == Player("snapshot", "0@1000")
    assert Player("member", "3").member == 3
    with pytest.raises(PopulationError, match="is a script, not a member"):
        _ = Player("script", "0").member
    with pytest.raises(PopulationError, match="'human:me' names no player"):
        Player.from_str("human:me")


# ---------------------------------------------------------------- sampling


def test_uniform_sampling_and_the_line_up_leaves_shares_as_they_are() -> None:
    """New matches draw on 4 snapshots at a time, and yet on all 10 equally often in the long run."""
    matchmaker = maker(snapshots=10, seat_matches=5, **SNAPSHOTS_ONLY)
    at_once = max(len(opponents(matchmaker, 5)) for _ in range(20))
    assert at_once <= 4 + 2
    met = opponents(matchmaker, 6000)
    assert len(met) == 10
    assert all(count == pytest.approx(600, rel=0.3) for count in met.values())


def test_recent_sampling_takes_the_newest() -> None:
    met = opponents(maker(snapshots=10, sample="recent", recent=3, seat_matches=1, **SNAPSHOTS_ONLY), 600)
    assert set(met) == {"snapshot:0@8000", "snapshot:0@9000", "snapshot:0@10000"}
    assert all(count == pytest.approx(200, abs=50) for count in met.values())


def play(matchmaker: Matchmaker, snapshot: str, wins: int, losses: int) -> None:
    """Results of member 0 against one snapshot, whoever else is drawn in between."""
    left = ["win"] * wins + ["loss"] * losses
    while left:
        players = [str(p) for p in matchmaker.assign("env").players]
        if snapshot not in players:
            matchmaker.abandon("env")
            continue
        mine = left.pop()
        other = {"win": "loss", "loss": "win"}[mine]
        matchmaker.finish("env", [mine if p == "member:0" else other for p in players])  # type: ignore[list-item]


def test_prioritized_sampling_weighs_by_one_minus_the_win_rate_to_the_power() -> None:
    matchmaker = maker(snapshots=3, sample="prioritized", power=2.0, win_rate_decay=1.0, seat_matches=1,
                       **SNAPSHOTS_ONLY)  # fmt: skip
    play(matchmaker, "snapshot:0@1000", 4, 0)  # x = 4.5 / 5
    play(matchmaker, "snapshot:0@2000", 0, 4)  # x = 0.5 / 5
    assert matchmaker.weights(0) == pytest.approx([0.1**2, 0.9**2, 0.5**2])  # the third was never met
    met = opponents(matchmaker, 3000)
    total = 0.01 + 0.81 + 0.25
    assert [met[f"snapshot:0@{k}000"] / 3000 for k in (1, 2, 3)] == [
        pytest.approx(w / total, abs=0.03) for w in (0.01, 0.81, 0.25)
    ]


def test_a_snapshot_that_always_loses_can_still_be_drawn() -> None:
    """Else its win rate could never be found to have fallen again."""
    matchmaker = maker(snapshots=1, sample="prioritized", **SNAPSHOTS_ONLY)
    play(matchmaker, "snapshot:0@1000", 1000, 0)
    assert matchmaker.weights(0)[0] > 1e-5


def test_an_earlier_result_counts_less_after_later_ones() -> None:
    matchmaker = maker(snapshots=1, win_rate_decay=0.5, **SNAPSHOTS_ONLY)
    play(matchmaker, "snapshot:0@1000", 1, 0)
    assert matchmaker.win_rate(0, matchmaker.pool[0]) == 1.5 / 2
    play(matchmaker, "snapshot:0@1000", 0, 1)
    assert matchmaker.win_rate(0, matchmaker.pool[0]) == (0.5 * 1 + 0.5) / (0.5 * 1 + 1 + 1)


# ---------------------------------------------------------------- pool


def test_the_pool_must_not_be_empty_when_it_is_drawn_from() -> None:
    with pytest.raises(PopulationError, match="pool of snapshots is empty"):
        maker(**SNAPSHOTS_ONLY).assign("env")


def test_a_snapshot_is_due_at_first_and_after_enough_steps() -> None:
    matchmaker = maker(num_members=2, add_every_steps=1000)
    assert matchmaker.snapshot_due(0, 0)
    matchmaker.add_snapshot(0, 0)
    assert not matchmaker.snapshot_due(0, 0)
    assert not matchmaker.snapshot_due(0, 999)
    assert matchmaker.snapshot_due(0, 1000)
    assert matchmaker.snapshot_due(1, 999)  # its own clock
    assert not maker(snapshot_weight=0).snapshot_due(0, 10**9)  # nobody would meet it


def test_a_snapshot_is_due_when_the_member_beats_all_of_the_pool() -> None:
    matchmaker = maker(snapshots=2, add_every_steps=0, add_win_rate=0.7, seat_matches=1, **SNAPSHOTS_ONLY)
    play(matchmaker, "snapshot:0@1000", 10, 0)
    assert not matchmaker.snapshot_due(0, 3000)  # the other one was not met: 0.5
    play(matchmaker, "snapshot:0@2000", 1, 0)  # 0.75
    assert matchmaker.snapshot_due(0, 3000)
    assert not matchmaker.snapshot_due(0, 2000)  # nothing was learned since


def test_a_member_is_added_once_at_a_count_of_steps() -> None:
    matchmaker = maker(snapshots=1)
    with pytest.raises(PopulationError, match=r"snapshot:0@1000 is in the pool already"):
        matchmaker.add_snapshot(0, 1000)


def test_the_oldest_makes_room_where_that_is_asked_for() -> None:
    matchmaker = maker(snapshots=3, size=3, evict="oldest")
    assert matchmaker.add_snapshot(0, 4000) == (Player("snapshot", "0@4000"), Player("snapshot", "0@1000"))
    assert steps(matchmaker) == [2000, 3000, 4000]


def test_spread_keeps_the_first_and_thins_out_where_it_is_most_crowded() -> None:
    matchmaker = maker(size=4)
    for at in (0, 10, 15, 100):
        matchmaker.add_snapshot(0, at)
    # neighbours of 10 are 15 apart, of 15 are 90 apart
    assert matchmaker.add_snapshot(0, 200)[1] == Player("snapshot", "0@10")
    assert steps(matchmaker) == [0, 15, 100, 200]


@given(st.lists(st.integers(1, 50), min_size=30, max_size=120), st.integers(3, 12))
def test_spread_covers_all_of_the_past_evenly(between: list[int], size: int) -> None:
    matchmaker, at = maker(size=size), 0
    for gap in between:
        matchmaker.add_snapshot(0, at)
        at += gap
    kept = steps(matchmaker)
    assert len(kept) == size
    assert kept == sorted(kept)
    assert kept[0] == 0
    assert kept[-1] == at - between[-1]
    # no hole is more than a few times what an even spread would leave (50: the largest step between two that came)
    assert max(np.diff(kept)) <= 3 * (kept[-1] / (size - 1)) + 2 * 50


def test_with_more_members_than_places_the_oldest_goes() -> None:
    matchmaker = maker(num_members=3, size=2)
    for member in range(3):
        matchmaker.add_snapshot(member, 0)
    assert [p.name for p in matchmaker.pool] == ["1@0", "2@0"]


def test_an_evicted_snapshot_plays_on_and_is_not_drawn_again() -> None:
    matchmaker = maker(snapshots=1, size=1, seat_matches=1000, **SNAPSHOTS_ONLY)
    old = matchmaker.pool[0]
    matchmaker.assign("env")
    new, evicted = matchmaker.add_snapshot(0, 2000)
    assert evicted == old
    assert old in matchmaker.match("env").players
    assert matchmaker.resident() == {old, new}
    matchmaker.finish("env", [None, None])
    assert matchmaker.resident() == {new}
    assert opponents(matchmaker, 50) == {str(new): 50}


@pytest.mark.case("MAS-17")
def test_two_hundred_snapshots_need_the_memory_of_the_pool_and_of_what_is_in_play() -> None:
    """16 environments, 200 snapshots in a pool of 20: the copies that are kept stay bounded, and do not grow."""
    matchmaker, weights, kept = maker(size=20, self_weight=0.5, snapshot_weight=0.5), {}, []
    for k in range(200):
        snapshot, _ = matchmaker.add_snapshot(0, 1000 * k)
        weights[snapshot] = bytes(1000)
        for env in range(16):
            matchmaker.abandon(env)
            matchmaker.assign(env)
        weights = {player: weights[player] for player in matchmaker.resident()}  # as the trainer forgets them
        kept.append(len(weights))
    assert max(kept) <= 20 + 16
    assert max(kept[100:]) <= max(kept[20:100]) + 2
    assert len(json.dumps(matchmaker.state())) < 20_000


def test_a_match_whose_policy_was_overwritten_in_the_middle_says_nothing() -> None:
    matchmaker = maker(num_members=2, snapshots=1, **SNAPSHOTS_ONLY)
    for env, member in (("of 0", 0), ("of 1", 1)):
        matchmaker.assign(env, [member])
    matchmaker.overwrite(1, 0)
    other = maker(num_members=2, **SNAPSHOTS_ONLY)
    other.load_state(json.loads(json.dumps(matchmaker.state())))
    assert matchmaker.finish("of 1", ["win", "loss"]) == other.finish("of 1", ["win", "loss"]) == []
    assert matchmaker.win_rate(1, matchmaker.pool[0]) == 0.5
    assert len(matchmaker.finish("of 0", ["win", "loss"])) == 1
    matchmaker.assign("of 1", [1])
    assert len(matchmaker.finish("of 1", ["win", "loss"])) == 1


def test_a_copied_policy_inherits_the_donors_win_rates() -> None:
    matchmaker = maker(num_members=2, snapshots=1, **SNAPSHOTS_ONLY)
    play(matchmaker, "snapshot:0@1000", 0, 3)
    frozen = matchmaker.pool[0]
    assert matchmaker.win_rate(1, frozen) == 0.5
    matchmaker.overwrite(1, 0)
    assert matchmaker.win_rate(1, frozen) == matchmaker.win_rate(0, frozen) < 0.2
    play(matchmaker, "snapshot:0@1000", 5, 0)
    assert matchmaker.win_rate(1, frozen) < matchmaker.win_rate(0, frozen)  # two records from here on


def test_after_a_copy_the_line_up_is_drawn_by_the_new_win_rates() -> None:
    """Member 1 would meet the first snapshot for a million matches; member 0 beats that one and loses to the second."""
    matchmaker = maker(num_members=2, snapshots=1, sample="prioritized", power=20, line_up=1, seat_matches=10**6,
                       **SNAPSHOTS_ONLY)  # fmt: skip
    first, met = matchmaker.pool[0], []
    for _ in range(2):
        met.append(matchmaker.assign("env", [1]).players)
        matchmaker.abandon("env")
        play(matchmaker, str(first), 20, 0)
        matchmaker.add_snapshot(0, 2000 + len(met))
        matchmaker.overwrite(1, 0)
    assert first in met[0]
    assert first not in met[1]


def test_a_win_rate_is_known_of_snapshots_in_the_pool_only() -> None:
    matchmaker = maker(snapshots=1)
    with pytest.raises(PopulationError, match="snapshot:0@7 is not in the pool"):
        matchmaker.win_rate(0, Player("snapshot", "0@7"))


# ---------------------------------------------------------------- state and settings


def test_the_state_is_restored_exactly_and_the_future_is_the_same() -> None:
    changes: dict[str, Any] = {"member_weight": 0.3, "sample": "prioritized", "seat_matches": 3, "size": 4}
    one, two = (maker(num_members=3, seed=seed, **changes) for seed in (5, 99))
    drive(one, np.random.default_rng(1), 60)
    saved = json.loads(json.dumps(one.state(), allow_nan=False))
    two.load_state(saved)
    assert two.state() == one.state()
    assert drive(one, np.random.default_rng(2), 60) == drive(two, np.random.default_rng(2), 60)
    assert two.state() == one.state()


def drive(matchmaker: Matchmaker, rng: np.random.Generator, count: int) -> list[Any]:
    """Some matches that begin and end, some snapshots; returns all that was decided."""
    said: list[Any] = []
    for _ in range(count):
        env, member = int(rng.integers(4)), int(rng.integers(3))
        at = max(matchmaker._last_added.values(), default=0) + 1
        if not matchmaker.pool or rng.random() < 0.2:
            said.append(matchmaker.add_snapshot(member, at))
        if env not in matchmaker._matches:
            said.append(matchmaker.assign(env, learners=range(3)))
        else:
            said.append(matchmaker.finish(env, ["win", "loss"]))
    return said


def test_a_smaller_pool_after_a_resume_evicts_and_another_population_is_refused() -> None:
    big = maker(snapshots=5, size=5)
    small = maker(size=3)
    small.load_state(big.state())
    assert len(small.pool) == 3
    with pytest.raises(ConfigError, match="cannot change when a run is resumed"):
        maker(num_members=2).load_state(big.state())


@pytest.mark.parametrize(
    ("changes", "sides", "rule"),
    [
        ({}, 1, "nobody meets anybody"),
        ({"self_weight": 0.0, "snapshot_weight": 0.0}, 2, "not all 0"),
        ({"self_weight": -1.0}, 2, "not negative"),
        ({"member_weight": 0.5}, 2, "needs other members"),
        ({"script_weight": 0.5}, 2, "given together"),
        ({"scripts": ("random",)}, 2, "given together"),
        ({"size": 0}, 2, "at least 1"),
        ({"line_up": 0}, 2, "at least 1"),
        ({"add_every_steps": 0}, 2, "say when snapshots are added"),
        ({"add_win_rate": 1.0}, 2, "say when snapshots are added"),
        ({"power": -1.0}, 2, r"lie in \[0, 20\]"),
        ({"win_rate_decay": 0.0}, 2, r"lie in \(0, 1\]"),
    ],
)
def test_a_broken_rule_is_named(changes: dict[str, Any], sides: int, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        maker(num_sides=sides, **changes)


def test_a_match_needs_a_learner() -> None:
    with pytest.raises(PopulationError, match="no member to play for"):
        maker(snapshot_weight=0).assign("env", learners=[])
