"""The league: what is decided about members is done to them, written down, and goes on after a resume."""

from __future__ import annotations

import gc
import json
import logging
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import pronghorn.training.checkpoint as checkpoints
from members import Arena, make_members, settings
from pronghorn.errors import ConfigError, UsageError
from pronghorn.evaluation.policy import make_actor
from pronghorn.population.matchmaking import Player
from pronghorn.population.pbt import ALL_PARTS
from pronghorn.training.checkpoint import params_sha
from pronghorn.training.guests import Guests
from pronghorn.training.league import League, check_population
from pronghorn.training.member import Member
from pronghorn.training.metrics import read_lines
from pronghorn.types import FIRST, LAST, LOST

ROUNDS = {"population.burn_in_frames": 100, "population.period_frames": 100, "population.objective_episodes": 5,
          "population.period_episodes": 1}  # fmt: skip
ALONE: tuple[str, ...] = ()


def make(
    run_dir: Path, members: int = 1, *, num_envs: int = 4, agents: tuple[str, ...] = ("a", "b"), rewards: Any = None,
    saved: checkpoints.Checkpoint | None = None, **values: Any,
) -> League:  # fmt: skip
    """A league at an arena; of a resumed run, if `saved` is given."""
    run_dir.mkdir(exist_ok=True)
    arena = Arena(num_envs, agents, rewards)
    given = {"env.envs_per_worker": num_envs, "run_dir": str(run_dir), "population.members": members} | values
    config = settings(arena.spec, **(ROUNDS if members > 1 else {}), **given)
    made = make_members(arena, config, members)
    if saved is not None:
        for member, policy in zip(made, saved.policies, strict=True):
            member.restore(policy, Path("here"), {})
            member.start_acting(arena)
    guests = Guests(config, arena, make_actor(config, arena.spec, torch.device("cpu")))
    league = League(config, arena, made, guests, seed=0, time_s=lambda: 12.5)
    league.start(saved)
    return league


def did(member: Member, steps: int, *returns: float) -> None:
    """So many more steps, and episodes with these returns, of a member whose weights moved a little."""
    with torch.no_grad():
        for parameter in member.model.parameters():
            parameter.add_(0.01 * (member.index + 1))
    member.learner.steps += steps
    member.learner.version += 1
    member.newest = member._snapshot()
    member.publish(grant=False)
    for value in returns:
        member.tracker._finished.append((value, 1))
        member.tracker._num_episodes += 1
        member.tracker._num_whole += 1


def save(league: League, updates: int = 1) -> checkpoints.Checkpoint:
    """A checkpoint of it, as it is read again."""
    first, *others = [member.saved() for member in league.members]
    path = checkpoints.save(
        league.run_dir / "checkpoints", updates, first.weights, first.optimizer,
        first.state | {"league": league.state()}, keep=2, others=others, snapshots=dict(league.snapshots),
    )  # fmt: skip
    return checkpoints.load(path, snapshots=True)


def play(league: League, env: int, game: int, outcomes: Any = None) -> list[int]:
    """Who plays the game that begins, after one with these outcomes."""
    arena: Any = league.pool
    rows = [2 * env, 2 * env + 1]
    return list(arena.seat(league.seats, rows, FIRST if outcomes is None else LAST, game, outcomes))


# ------------------------------------------------------------------------------------------ snapshots

POOL = {"selfplay.snapshot_weight": 1.0, "selfplay.self_weight": 0.0, "selfplay.size": 3,
        "selfplay.add_every_steps": 100, "selfplay.seat_matches": 1}  # fmt: skip


def test_a_member_is_added_to_the_pool_when_it_is_due_and_frozen_there(tmp_path: Path) -> None:
    league = make(tmp_path, **POOL)
    (member,) = league.members
    assert list(league.snapshots) == ["0@0"]
    shas = {"0@0": params_sha(league.snapshots["0@0"].weights)}
    for _ in range(4):
        did(member, 60)
        league.after_iteration(member)
        for name in league.snapshots.keys() - shas.keys():
            shas[name] = params_sha(member.model.state_dict())
    assert list(league.snapshots) == ["0@0", "0@120", "0@240"]
    assert len(set(shas.values())) == 3
    did(member, 5)
    for name, frozen in league.snapshots.items():
        assert params_sha(frozen.weights) == shas[name] == params_sha(league.guests.weights(f"snapshot:{name}"))
    assert league.ratings.players == ["snapshot:0@0", "snapshot:0@120", "snapshot:0@240", "member:0"]


@pytest.mark.case("MAS-17")
def test_an_evicted_snapshot_plays_its_game_to_the_end_and_is_forgotten_then(tmp_path: Path) -> None:
    league = make(tmp_path, **POOL, **{"selfplay.evict": "oldest"})
    (member,) = league.members
    taken = play(league, 0, 1)
    assert sorted(taken) == [0, 1]
    assert league.guests._frozen.keys() == {"snapshot:0@0"}
    weights = weakref.ref(next(iter(league.guests.weights("snapshot:0@0").values())))
    for _ in range(3):
        did(member, 100)
        league.after_iteration(member)
    assert list(league.snapshots) == ["0@100", "0@200", "0@300"]
    assert "snapshot:0@0" in league.guests._frozen  # it plays
    play(league, 0, 2, [1, -1])
    assert "snapshot:0@0" not in league._matches.guests()  # type: ignore[union-attr]
    did(member, 1)
    league.after_iteration(member)
    assert "snapshot:0@0" not in league.guests._frozen
    gc.collect()
    assert weights() is None
    assert league.ratings.pair("snapshot:0@0", "member:0").games == 1  # what it did stays in the table


@pytest.mark.case("MAS-17")
def test_weights_in_memory_are_those_of_the_pool_however_many_snapshots_there_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 snapshots of a pool of three, games in four environments, one worker of which dies now and then."""
    monkeypatch.setattr("pronghorn.training.league.MAX_RATED", 50)
    league = make(tmp_path, **POOL)
    (member,) = league.members
    seen, game = list[weakref.ref[torch.Tensor]](), [0] * 4
    for i in range(200):
        did(member, 100)
        league.after_iteration(member)
        newest = list(league.snapshots.values())[-1]
        seen += map(weakref.ref, newest.weights.values())
        env = i % 4
        if i % 37 == 36:
            arena: Any = league.pool
            arena.seat(league.seats, [2 * env, 2 * env + 1], LOST, 0)
            game[env] = 0
        game[env] += 1
        play(league, env, game[env], [1, -1] if game[env] > 1 else None)
    league.after_iteration(member)
    gc.collect()
    assert len(league.snapshots) == 3
    assert len(league.guests._frozen) <= 3 + 4
    alive = [one for one in seen if one() is not None]
    assert 0 < len(alive) <= (3 + 4) * len(league.guests.weights(f"snapshot:0@{member.learner.steps}"))
    assert len(league.matchmaker._matches) == 4  # type: ignore[union-attr]
    assert len(league.ratings.players) == 50
    assert {"member:0", *map(str, league.matchmaker.pool)} <= set(league.ratings.players)  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------ rounds

SURE = {"population.mutation_rate": 1.0, "population.reset_rate": 0.0, "population.replace_fraction": 0.34,
        "population.mutable": ("lr", "exploration_coef")}  # fmt: skip


@pytest.mark.case("PBT-04")
def test_a_round_copies_the_best_over_the_worst_writes_it_down_and_changes_its_settings(tmp_path: Path) -> None:
    league = make(tmp_path, 3, agents=ALONE, num_envs=6, **SURE)
    first, best, worst = league.members
    begun = read_lines(tmp_path / "population.jsonl")
    assert [(line["round"], line["member"], line["donor"]) for line in begun] == [(0, i, None) for i in range(3)]
    assert begun[0]["changed"] == {}  # the first keeps what the run was given
    assert begun[1]["changed"].keys() == begun[2]["changed"].keys() == {"lr", "exploration_coef"}
    for line, member in zip(begun, league.members, strict=True):
        assert member.learner.hyper.lr == line["hyper"]["lr"]
        assert {g["lr"] for g in member.learner.optimizer.param_groups} == {line["hyper"]["lr"]}
    for member, value in ((first, 5.0), (worst, 1.0), (best, 9.0)):
        did(member, 100, value, value)
        before = [params_sha(m.model.state_dict()) for m in league.members]
        league.after_iteration(member)
    lines = read_lines(tmp_path / "population.jsonl")[3:]
    assert [(line["member"], line["donor"], line["source"]) for line in lines] == [
        (2, 1, "live"), (0, None, None), (1, None, None)]  # fmt: skip
    copy = lines[0]
    assert copy.keys() == {"time_s", "steps", "round", "frames", "member", "donor", "copied", "source", "hyper",
                           "changed", "objective", "donor_objective", "member_frames", "donor_frames"}  # fmt: skip
    assert (copy["time_s"], copy["steps"], copy["round"], copy["frames"]) == (12.5, 300, 1, 100)
    assert (copy["objective"], copy["donor_objective"]) == (1.0, 9.0)
    assert copy["copied"] == list(ALL_PARTS)
    now = [params_sha(m.model.state_dict()) for m in league.members]
    assert now == [before[0], before[1], before[1]]
    assert (first.lineage, best.lineage, worst.lineage) == (0, 0, 1)
    for line in lines:
        hyper = league.members[line["member"]].learner.hyper
        assert {name: getattr(hyper, name) for name in line["hyper"]} == line["hyper"]
    assert worst.learner.hyper.lr == copy["changed"]["lr"][1] != best.learner.hyper.lr
    assert first.learner.hyper.lr == begun[0]["hyper"]["lr"]
    assert league.report()["population_round"] == 1


def test_a_copy_leads_only_by_episodes_of_its_own(tmp_path: Path) -> None:
    """Its donor's returns are better than what the donor gets now, and say nothing of the copy, which went on alone."""
    league = make(tmp_path, 3, agents=ALONE, num_envs=6, **SURE)
    first, best, copy = league.members
    for member, value in ((first, 5.0), (copy, 1.0), (best, 9.0)):
        did(member, 100, value, value)
        league.after_iteration(member)
    assert copy.lineage == 1
    did(best, 10, 8.0)
    did(copy, 10, *[0.5] * 4)
    assert league.objective(copy) == pytest.approx((9.0 + 4 * 0.5) / 5)
    did(first, 10, *[0.1] * 5)
    assert league.leader == 1
    did(copy, 10, *[9.5] * 2)
    copy.tracker._finished.extend([(20.0, 1)] * 5)  # as if they were inherited: they do not count as its own
    resumed = make(tmp_path, 3, agents=ALONE, num_envs=6, saved=save(league), **SURE)
    for now in (league, resumed):
        assert now.leader == 2  # six of its own
    league._whole_at_copy[2] = copy.tracker.num_whole - 4
    assert league.leader == 1
    assert make(tmp_path, 3, agents=ALONE, num_envs=6, saved=save(league, 2), **SURE).leader == 1


def test_what_the_population_does_not_choose_is_left_to_schedules(tmp_path: Path) -> None:
    """A learning rate that follows a schedule is not set back by a round."""
    values = {"population.mutable": ("exploration_coef",), "learner.lr_schedule": "linear", "steps": 3_000}
    league = make(tmp_path, 3, agents=ALONE, num_envs=6, **values)
    for member in league.members:
        assert member.learner.total_steps == 1_000  # each takes a third of the run's
        did(member, 100, 1.0)
        member.learner._schedule_lr(0.0)
        league.after_iteration(member)
    assert league.pbt is not None
    assert league.pbt.round == 1
    assert [member.learner.hyper.lr for member in league.members] == pytest.approx([0.01 * 0.9] * 3)


def test_a_population_that_can_never_be_compared_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    league = make(tmp_path, 2, agents=ALONE, **{"population.objective": "fargs"})
    with caplog.at_level(logging.WARNING, "pronghorn"):
        for _ in range(8):
            for member in league.members:
                did(member, 50, 1.0)
                league.after_iteration(member)
    assert len(caplog.records) == 1
    assert "no episode of policy 0 told 'fargs' so far (5 have ended)" in caplog.text


@pytest.mark.case("PBT-09")
def test_members_that_take_turns_rest_until_all_have_arrived(tmp_path: Path) -> None:
    league = make(tmp_path, 3, agents=ALONE, num_envs=4, **{"population.slots": 1})
    seen = []
    for _ in range(9):
        (index,) = league.active
        seen.append(index)
        did(league.members[index], 50, float(index))
        league.after_iteration(league.members[index])
    # Each trains until it has arrived; the one that arrives last keeps its slot, as that saves a change.
    assert seen == [0, 0, 1, 1, 2, 2, 2, 2, 0]
    arena: Any = league.pool
    assert arena.seat(league.seats, [0, 1, 2, 3], LAST, 0) == [0] * 4


# ------------------------------------------------------------------------------------------ rewards


def rewarded(tmp_path: Path, **values: Any) -> tuple[League, Arena]:
    tables = {"frag": 1.0, "hit": 0.5}
    mutable = {"population.mutable": ("reward.*",), "population.mutation_rate": 1.0, "population.reset_rate": 0.0}
    league = make(tmp_path, 2, rewards=tables, **(mutable | values))
    arena = league.pool
    assert isinstance(arena, Arena)
    return league, arena


def test_each_side_of_a_game_has_the_reward_weights_of_who_plays_it_told_only_when_they_change(tmp_path: Path) -> None:
    league, arena = rewarded(tmp_path, **{"selfplay.self_weight": 0.0, "selfplay.member_weight": 1.0})
    assert league.pbt is not None
    weights = [{name: league.pbt.hyper(i)[f"reward.{name}"] for name in ("frag", "hit")} for i in range(2)]
    assert weights[0] == {"frag": 1.0, "hit": 0.5}
    assert weights[1]["frag"] != 1.0
    last: list[dict[str, float]] = []
    for game in range(1, 30):
        taken, before = play(league, 1, game, None if game == 1 else [1, -1]), len(arena.told)
        now = [weights[member] for member in taken]
        assert (before, arena.told[-1]) == (len(arena.told), ("rewards", now, 1))
        assert (len(arena.told) - getattr(league, "seen", 0) == 1) == (now != last)
        league.seen = len(arena.told)  # type: ignore[attr-defined]
        last = now
    assert {env for _, _, env in arena.told} == {1}
    assert 2 < len(arena.told) < 29


def test_a_side_that_does_not_learn_has_the_weights_of_the_learner_and_one_table_is_told_where_all_agree(
    tmp_path: Path,
) -> None:
    league, arena = rewarded(
        tmp_path, **{"selfplay.self_weight": 0.5, "selfplay.script_weight": 0.5, "selfplay.scripts": ("random",)}
    )
    for game in range(1, 30):
        taken = play(league, 0, game, None if game == 1 else [1, -1])
        learner = min(taken)
        name, value, env = arena.told[-1]
        assert (name, env) == ("rewards", 0)
        assert value == league._rewards[learner]


def test_rows_that_share_an_environment_are_one_members_if_it_has_reward_weights(tmp_path: Path) -> None:
    """Four environments of one row: each is told of its member's weights once, and again when these have changed."""
    league, arena = rewarded(tmp_path, agents=ALONE)
    assert arena.seat(league.seats, [0, 1, 2, 3], FIRST, 0) == [0, 1, 0, 1]
    assert arena.told == [("rewards", league._rewards[row % 2], row) for row in range(4)]
    arena.seat(league.seats, [0, 1, 2, 3], LAST, 0)
    assert len(arena.told) == 4
    league._rewards[1] = {"frag": 7.0, "hit": 7.0}
    arena.seat(league.seats, [2, 3], LAST, 0)
    assert arena.told[4:] == [("rewards", {"frag": 7.0, "hit": 7.0}, 3)]


def test_an_environment_without_reward_weights_is_told_nothing(tmp_path: Path) -> None:
    league = make(tmp_path, 2, agents=ALONE)
    arena: Any = league.pool
    arena.seat(league.seats, [0, 1, 2, 3], FIRST, 0)
    assert arena.told == []


# ------------------------------------------------------------------------------------------ matches

MEET = {"selfplay.self_weight": 0.0, "selfplay.member_weight": 1.0, "population.slots": 2}


def test_a_member_that_rests_is_met_with_the_weights_that_it_has(tmp_path: Path) -> None:
    """Of three members two train; the third plays as a guest, who does not change while a game goes on."""
    league = make(tmp_path, 3, **MEET)
    resting = league.members[2]
    assert league.active == [0, 1]
    game = 0
    for version in range(3):
        sha = params_sha(resting.model.state_dict())
        seen: set[str] = set()
        while not any(name.startswith("member:2") for name in seen):
            game += 1
            play(league, 0, game, None if game == 1 else [0, 0])
            seen = league._matches.guests()  # type: ignore[union-attr]
        (name,) = seen
        assert name == f"member:2#0.{version}"
        assert params_sha(league.guests.weights(name)) == sha
        did(resting, 0)  # a batch that it had collected before it rested
        assert params_sha(league.guests.weights(name)) == sha
    assert league.ratings.pair("member:0", "member:2").games + league.ratings.pair("member:1", "member:2").games > 0


def test_the_name_of_a_resting_member_says_whose_weights_they_are(tmp_path: Path) -> None:
    """Its learner has counted a version up whose weights are not copied yet: the name is that of the copy."""
    league = make(tmp_path, 3, **MEET)
    resting = league.members[2]
    resting.learner.version += 1
    assert league.guest(Player("member", "2")) == "member:2#0.0"


def test_results_rate_players_and_are_the_objective_of_those_that_train(tmp_path: Path) -> None:
    league = make(tmp_path, 2, **(MEET | {"population.slots": 2, "population.objective": "win_rate"}))
    one, other = league.members
    assert league.objective(one) is None
    outcome: list[int] | None = None
    for game in range(1, 9):  # member 0 wins all, on either side
        outcome = [1 if member == 0 else -1 for member in play(league, 0, game, outcome)]
    assert (league.objective(one), league.objective(other)) == (1.0, 0.0)
    assert league.ratings.pair("member:0", "member:1").wins == 7
    assert league.leader == 0
    league.write_ratings(last=True)
    (line,) = read_lines(tmp_path / "ratings.jsonl")
    assert line.keys() == {"time_s", "steps", "ratings", "pool"}
    assert line["ratings"]["member:0"]["elo"] > 1500 > line["ratings"]["member:1"]["elo"]
    assert line["ratings"]["member:0"]["games"] == 7
    report = league.report()
    assert (report["policy/0/win_rate"], report["policy/1/win_rate"]) == (1.0, 0.0)
    assert report["policy/0/rating"] == line["ratings"]["member:0"]["elo"]
    league.write_ratings()  # not again so soon
    assert len(read_lines(tmp_path / "ratings.jsonl")) == 1


def test_a_policy_that_is_overwritten_has_the_results_of_its_donor(tmp_path: Path) -> None:
    """Its own games stay in the table under another name; the one that goes on while it happens has no result."""
    values = MEET | {"population.objective": "win_rate", **SURE, "population.replace_fraction": 0.5}
    league = make(tmp_path, 2, **values)
    outcome: list[int] | None = None
    for game in range(1, 9):
        outcome = [1 if member == 0 else -1 for member in play(league, 0, game, outcome)]
    for member in league.members:
        did(member, 100, 0.0)
        league.after_iteration(member)
    assert league.members[1].lineage == 1
    assert league.ratings.players == ["member:0", "member:1#1", "member:1"]
    assert league.ratings.pair("member:0", "member:1#1").wins == 7
    assert league.objective(league.members[1]) == league.objective(league.members[0]) == 1.0
    play(league, 0, 9, outcome)
    assert league.ratings.pair("member:0", "member:1").games == 0
    assert league.ratings.pair("member:0", "member:1#1").games == 7


# ------------------------------------------------------------------------------------------ resume


@pytest.mark.case("PBT-05")
def test_clocks_ranges_pool_ratings_and_points_come_back(tmp_path: Path) -> None:
    values = MEET | POOL | SURE | {"selfplay.member_weight": 0.5, "selfplay.snapshot_weight": 0.5,
                                   "population.ranges": {"lr": "1e-4..1e-1"}}  # fmt: skip
    league = make(tmp_path, 3, **values)
    outcome: list[int] | None = None
    for game in range(1, 30):
        outcome = [1, -1] if play(league, 0, game, outcome)[0] < 3 else [0, 0]
    for _ in range(2):
        for member in league.members:
            did(member, 60, float(member.index))
            league.after_iteration(member)
    assert league.pbt is not None
    assert league.matchmaker is not None
    assert league.pbt.round == 1
    saved = save(league)
    shas = {name: params_sha(frozen.weights) for name, frozen in league.snapshots.items()}
    again = make(tmp_path, 3, saved=saved, **values)
    assert json.dumps(again.state()) == json.dumps(league.state())
    assert {name: params_sha(frozen.weights) for name, frozen in again.snapshots.items()} == shas
    assert set(again.guests._frozen) == {f"snapshot:{name}" for name in shas}
    assert [m.learner.hyper for m in again.members] == [m.learner.hyper for m in league.members]
    assert [m.lineage for m in again.members] == [m.lineage for m in league.members]
    assert again._points == league._points
    # and both go on alike
    for one in (league, again):
        for member in one.members:
            did(member, 100, float(member.index))
            one.after_iteration(member)
    assert again.pbt is not None
    assert (again.pbt.round, league.pbt.round) == (2, 2)
    assert again.pbt.state() == league.pbt.state()
    assert list(again.snapshots) == list(league.snapshots)
    files = {name: frozen.file for name, frozen in again.snapshots.items()}
    assert all((file is not None) == (name in shas) for name, file in files.items())  # linked, not written again


def test_lines_beyond_the_checkpoint_are_cut_and_torn_ones_too(tmp_path: Path) -> None:
    values = SURE | MEET | {"population.objective": "win_rate"}
    league = make(tmp_path, 2, **values)
    outcome: list[int] | None = None
    for game in range(1, 9):
        outcome = [1 if member == 0 else -1 for member in play(league, 0, game, outcome)]
    league.write_ratings(last=True)
    saved = save(league)
    for member in league.members:
        did(member, 100, 0.0)
        league.after_iteration(member)
    league.write_ratings(last=True)
    with open(tmp_path / "population.jsonl", "a") as file:
        file.write('{"round": 2, "memb')
    assert {line["round"] for line in read_lines(tmp_path / "population.jsonl")} == {0, 1}
    assert len(read_lines(tmp_path / "ratings.jsonl")) == 2
    again = make(tmp_path, 2, saved=saved, **values)
    lines = (tmp_path / "population.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 0]
    assert [line["steps"] for line in read_lines(tmp_path / "ratings.jsonl")] == [0]
    for member in again.members:
        did(member, 100, 0.0)
        again.after_iteration(member)
    rounds = [line["round"] for line in read_lines(tmp_path / "population.jsonl")]
    assert rounds == [0, 0, 1, 1]


def test_a_resume_may_begin_with_snapshots_or_scripts_and_shrink_the_pool(tmp_path: Path) -> None:
    scripts = {"selfplay.self_weight": 1.0, "selfplay.script_weight": 1.0, "selfplay.scripts": ("random",)}
    league = make(tmp_path, **scripts)
    did(league.members[0], 30)
    league.after_iteration(league.members[0])
    assert league.snapshots == {}
    more = POOL | {"selfplay.script_weight": 1.0, "selfplay.scripts": ("random", "random_too:player")}
    (tmp_path / "random_too.py").write_text("def player(spec, seed): ...\n")
    sys.path.insert(0, str(tmp_path))
    try:
        again = make(tmp_path, saved=save(league), **more)
    finally:
        sys.path.remove(str(tmp_path))
    assert list(again.snapshots) == ["0@30"]
    assert again.ratings.players == ["snapshot:0@30", "script:random", "script:random_too:player", "member:0"]
    play(again, 0, 1)
    for _ in range(2):
        did(again.members[0], 100)
        again.after_iteration(again.members[0])
    small = make(tmp_path, saved=save(again, 2), **(POOL | {"selfplay.size": 1}))
    assert len(small.snapshots) == 1
    assert small.guests._frozen.keys() == {f"snapshot:{name}" for name in small.snapshots}


def test_a_run_without_a_league_is_not_resumed_with_one(tmp_path: Path) -> None:
    league = make(tmp_path, **POOL)
    saved = save(league)
    del saved.state["league"]
    with pytest.raises(ConfigError, match="cannot change when a run is resumed"):
        make(tmp_path, saved=saved, **POOL)


# ------------------------------------------------------------------------------------------ what it refuses


def test_a_script_that_nobody_finds_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    values = {"selfplay.script_weight": 1.0, "selfplay.scripts": ("nowhere.py:player",), "population.members": 2}
    with pytest.raises(UsageError, match=r"nowhere\.py:player"):
        make(tmp_path, 2, **values)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("PBT-08")
@pytest.mark.parametrize(
    ("arena", "values", "message"),
    [
        ({"num_envs": 2, "agents": ALONE}, {}, "environments = 2: is too few for 4 members"),
        ({"num_envs": 2, "agents": ALONE}, {"population.slots": 3}, "environments = 2: is too few for 3 members"),
        ({"num_envs": 3}, {}, "environments = 3: is too few for 4 members"),
        ({"agents": ALONE}, {"selfplay.snapshot_weight": 0.5}, "has no several agents"),
        ({"agents": ALONE}, {"population.objective": "win_rate"}, "needs matches with a declared outcome"),
        ({}, {"population.objective": "rating"}, "needs matches with a declared outcome"),
        ({}, {"population.mutable": ("epochs",)}, "learner.epochs = 1: is mutable.*Add --learner.epochs 2"),
        ({}, {"learner.lr_schedule": "kl_adaptive"}, "would overwrite the learning rates"),
        ({}, {"selfplay.member_weight": 0.5, "population.slots": 1}, "leaves one member loaded at a time"),
    ],
    ids=str,
)
def test_layouts_that_cannot_work_are_refused_with_the_rule(
    arena: dict[str, Any], values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, 4, **arena, **values)
    assert list(tmp_path.iterdir()) == []


def test_each_task_needs_a_row_for_each_member_that_trains(tmp_path: Path) -> None:
    """Four environments of two tasks are two of each: of four members two would never play."""
    both = settings(**{"env.id": "x:y,x:z", "population.members": 4})
    with pytest.raises(ConfigError, match="environments = 2: is too few for 4 members"):
        check_population(both, Arena(agents=ALONE).spec)
    check_population(settings(**{"env.id": "x:y,x:z", "population.members": 2}), Arena(agents=ALONE).spec)
    assert np.count_nonzero(Arena(4, ALONE).task_ids) == 0
