"""Who plays which row: shares that are equal by task, and games pinned to their players, by scripted deliveries."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.config_population import SelfPlayConfig
from pronghorn.errors import EnvError
from pronghorn.population.matchmaking import Match, Matchmaker, Player
from pronghorn.training.seats import DealtSeats, MatchSeats, Result
from pronghorn.types import FIRST, INACTIVE, LAST, LOST, STEP, Ready

NONE = np.zeros(0, np.int64)


def deliver(
    rows: Sequence[int], event: int | Sequence[int], games: Sequence[int] = (), records: Sequence[dict[str, Any]] = ()
) -> Ready:
    """Rows that are ready, all LAST being ends of episodes."""
    numbers = np.array(rows, np.int64)
    events = np.broadcast_to(np.array(event, np.uint8), numbers.shape).copy()
    none = np.zeros(len(numbers), np.bool_)
    return Ready(
        numbers, events, {}, np.zeros(len(numbers), np.float32), none, none, events == LAST, NONE, {},
        records=list(records), game=np.array(games, np.int64) if len(games) else None,
    )  # fmt: skip


def begins(ready: Ready) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = (ready.event == FIRST) | (ready.event == LAST)
    return mask


# ------------------------------------------------------------------------------------------ rows that are dealt


def deal(task_ids: Sequence[int], active: list[int], **options: Any) -> tuple[DealtSeats, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    seats = DealtSeats(np.array(task_ids), lambda: active, lambda row, member: told.append((row, member)), **options)
    return seats, told


@pytest.mark.parametrize(
    "task_ids",
    [
        [0] * 12,
        [0, 1] * 12,
        [0, 1, 2] * 12,
        [0, 0, 1, 1] * 6,  # environments of two rows each, as vector environments have them
        [0] * 6 + [1] * 6,
    ],
    ids=str,
)
@pytest.mark.parametrize("members", [1, 2, 3])
def test_every_member_gets_equally_many_rows_of_each_task(task_ids: list[int], members: int) -> None:
    seats, told = deal(task_ids, list(range(members)))
    rows = np.arange(len(task_ids))
    ready = deliver(rows, FIRST)
    taken = seats.take(ready, begins(ready))
    assert told == list(zip(rows.tolist(), taken.tolist(), strict=True))
    shares = Counter(zip(task_ids, taken.tolist(), strict=True))
    for task in set(task_ids):
        assert {shares[task, member] for member in range(members)} == {task_ids.count(task) // members}


def test_rows_of_one_environment_go_together_where_they_share_its_settings() -> None:
    seats, _ = deal([0, 0, 1, 1] * 4, [0, 1], together=2)
    ready = deliver(range(16), FIRST)
    taken = seats.take(ready, begins(ready)).tolist()
    assert taken[::2] == taken[1::2]
    assert Counter(zip([0, 0, 1, 1] * 4, taken, strict=True)) == {(t, m): 4 for t in (0, 1) for m in (0, 1)}


def test_rows_change_hands_when_they_begin_an_episode_and_only_then() -> None:
    active = [0, 1]
    seats, told = deal([0] * 4, active)
    ready = deliver(range(4), FIRST)
    assert seats.take(ready, begins(ready)).tolist() == [0, 1, 0, 1]
    active[:] = [2]
    ready = deliver([0, 1, 2, 3], [STEP, LAST, INACTIVE, LAST])
    assert seats.take(ready, begins(ready)).tolist() == [2, 2]
    assert told[4:] == [(1, 2), (3, 2)]


# ------------------------------------------------------------------------------------------ matches


class Noting:
    """A host that writes everything down."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, Match]] = []
        self.seated: dict[int, str] = {}
        self.games: list[list[Result]] = []

    def begin(self, env: int, match: Match) -> None:
        self.begun.append((env, match))

    def guest(self, player: Player) -> str:
        return f"the {player}"

    def seat(self, rows: NDArray[np.int64], guest: str) -> None:
        self.seated |= dict.fromkeys(rows.tolist(), guest)

    def results(self, games: Sequence[Result]) -> None:
        self.games.append(list(games))


class Table:
    """Seats of matches with a host, and deliveries to them in short."""

    def __init__(self, sides: int = 2, members: int = 1, active: Sequence[int] = (0,), **settings: Any) -> None:
        weights = settings or {"self_weight": 0.0, "script_weight": 1.0, "scripts": ("s",)}
        self.maker = Matchmaker(SelfPlayConfig(**weights), sides, members, seed=0)
        self.host, self.sides, self.active = Noting(), sides, list(active)
        self.seats = MatchSeats(self.maker, self.host, members, lambda: self.active)

    def __call__(self, rows: Sequence[int], event: int | Sequence[int], *games: int, **outcomes: Any) -> list[int]:
        """Players of the rows that begin. outcomes: told=(row, outcomes)."""
        records = [{"row": row, "outcomes": list(all_of)} for row, all_of in outcomes.get("told", ())]
        records += [{"row": row, "length": 3.0} for row in outcomes.get("silent", ())]
        ready = deliver(rows, event, games or [0] * len(rows), records)
        return self.seats.take(ready, begins(ready)).tolist()

    def open(self) -> int:
        """Matches that have not ended."""
        return len(self.maker._matches)


GUEST = 1  # with one member


def test_a_game_of_two_is_pinned_to_its_players_and_rated_once() -> None:
    table = Table()
    taken = table([0, 1], FIRST, 1, 1)
    assert sorted(taken) == [0, GUEST]
    assert table.host.seated == {taken.index(GUEST): "the script:s"}
    (match,) = [match for _, match in table.host.begun]
    for _ in range(3):
        assert table([0, 1], STEP, 1, 1) == []
    assert table.seats.guests() == {"the script:s"}
    assert len(table.host.begun) == 1
    table([0, 1], LAST, 2, 2, told=[(0, [1, -1])], silent=[1])
    assert len(table.host.begun) == 2
    assert table.host.games == [[(str(match.players[0]), str(match.players[1]), "win")]]
    assert table.open() == 1


@pytest.mark.parametrize("teller", [0, 1, 2])
def test_a_game_of_three_is_one_match_whoever_tells_its_end(teller: int) -> None:
    """Its agents end one by one; the record that comes first after the game's end has the outcomes of all."""
    table = Table(sides=3)
    taken = table([0, 1, 2], FIRST, 5, 5, 5)
    assert sorted(taken) == [0, GUEST, GUEST]
    others = [row for row in range(3) if row != teller]
    table(others, LAST, 6, 6, silent=others[:1])  # as an AEC game has them: before the third is told
    assert table.host.games == []
    assert table.open() == 2
    (taken_next,) = table([teller], LAST, 6, told=[(teller, [1, 0, -1])])
    assert taken_next == (0 if table.host.begun[1][1].players[teller].kind == "member" else GUEST)
    players = [str(p) for p in table.host.begun[0][1].players]
    expected = {(0, 1, "win"), (0, 2, "win"), (1, 2, "win")}
    named = {(players[i], players[j], result) for i, j, result in expected if players[i] != players[j]}
    assert set(table.host.games[0]) == named
    assert len(table.host.begun) == 2
    assert table.open() == 1


def test_an_agent_that_had_no_turn_in_a_game_joins_the_next_one() -> None:
    """In turns: 'a' plays game 1, 2 and 3 alone; 'b' comes to the board in the third, and tells of the first then."""
    table = Table()
    table([0, 1], [FIRST, INACTIVE], 1, 0)
    for game in (2, 3):
        table([0, 1], [LAST, INACTIVE], game, 0, told=[(0, [-1, 1])])
    assert len(table.host.games) == 2
    (taken,) = table([1], FIRST, 3)
    match = table.host.begun[-1][1]
    assert taken == (0 if match.players[1].kind == "member" else GUEST)
    assert len(table.host.begun) == 3
    assert table.open() == 1


def test_two_games_are_open_at_once_and_each_result_is_its_own() -> None:
    """'a' begins game 2 before 'b', who had the last move of game 1, is told of its end."""
    for seed in range(20):  # until the learner has the other side in the second game
        table = Table()
        table.maker._rng = np.random.default_rng(seed)
        table([0], FIRST, 1)
        table([1], FIRST, 1)
        table([0], LAST, 2, silent=[0])
        if table.host.begun[0][1].players != table.host.begun[1][1].players:
            break
    assert table.open() == 2
    assert table.seats.guests() == {"the script:s"}
    table([1], LAST, 2, told=[(1, [-1, 1])])
    first = [str(p) for p in table.host.begun[0][1].players]
    assert table.host.games == [[(*first, "loss")]]
    table([0], LAST, 3, told=[(0, [1, -1])])
    second = [str(p) for p in table.host.begun[1][1].players]
    assert table.host.games[1:] == [[(*second, "win")]]
    assert first == second[::-1]


def test_a_game_whose_end_nobody_can_tell_is_given_up_and_a_late_word_of_it_is_no_result() -> None:
    table = Table()
    table([0], FIRST, 1)
    table([0], LAST, 2, silent=[0])
    table([0], LAST, 3, silent=[0])
    table([0], LAST, 4, silent=[0])
    assert table.open() == 2  # the last two: the others can have no result any more
    assert table.host.games == []


def test_an_agent_that_comes_back_within_a_game_keeps_its_player() -> None:
    for seed in range(8):
        table = Table(members=2, active=(0, 1), self_weight=0.0, member_weight=1.0)
        table.maker._rng = np.random.default_rng(seed)
        before = table([0, 1], FIRST, 1, 1)
        assert sorted(before) == [0, 1]
        assert table([1], LAST, 1, silent=[1]) == [before[1]]
        assert table([0], LAST, 1, silent=[0]) == [before[0]]
        assert len(table.host.begun) == 1


def test_games_of_a_worker_that_died_have_no_result_and_the_numbers_begin_anew() -> None:
    """Environment 1 of two; its restarted worker counts games from 1, as before."""
    table = Table()
    table([0, 1, 2, 3], FIRST, 1, 1, 1, 1)
    table([2], LAST, 2, silent=[2])
    assert table.open() == 3
    table([2, 3], LOST, 0, 0)
    assert table.open() == 1
    table([2, 3], FIRST, 1, 1)
    assert table.open() == 2
    assert [env for env, _ in table.host.begun] == [0, 1, 1, 1]
    table([0, 1], LAST, 2, 2, told=[(0, [1, -1])], silent=[1])
    table([2, 3], LAST, 2, 2, told=[(3, [1, -1])], silent=[2])
    assert len(table.host.games) == 2


def test_a_game_that_declares_nothing_ends_without_a_result() -> None:
    table = Table()
    table([0, 1], FIRST, 1, 1)
    table([0, 1], LAST, 2, 2, told=[(0, [None, None])], silent=[1])
    assert table.host.games == [[]]
    assert table.open() == 1


def test_an_outcome_that_is_none_is_an_error_of_the_environment() -> None:
    table = Table()
    table([0, 1], FIRST, 1, 1)
    with pytest.raises(EnvError, match="declared the outcome 7"):
        table([0, 1], LAST, 2, 2, told=[(0, [7, -1])])


def test_members_that_rest_are_met_as_guests_and_do_not_learn() -> None:
    """Of three members one trains. The others' names go to the host, who makes guests of them."""
    table = Table(members=3, active=(1,), self_weight=0.0, member_weight=1.0)
    for game in range(1, 40):
        event = FIRST if game == 1 else LAST
        taken = table([0, 1], event, game, game, told=[] if game == 1 else [(0, [1, -1])])
        match = table.host.begun[-1][1]
        assert [t for t, p in zip(taken, match.players, strict=True) if p.name == "1"] == [1]
        assert sum(t == 3 for t in taken) == 1
    seen = set(table.host.seated.values())
    assert seen <= {"the member:0", "the member:2"}
    games = {name for results in table.host.games for first, second, _ in results for name in (first, second)}
    assert games == {"member:0", "member:1", "member:2"}


def test_who_trains_is_asked_anew_for_each_game() -> None:
    table = Table(members=2, active=(0,), self_weight=1.0)
    assert table([0, 1], FIRST, 1, 1) == [0, 0]
    table.active[:] = [1]
    assert table([0, 1], STEP, 1, 1) == []
    assert table([0, 1], LAST, 2, 2, told=[(0, [1, -1])]) == [1, 1]
    assert table.host.games == [[]]  # against itself it says nothing


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_ends_gives_each_game_that_was_told_of_exactly_one_result(seed: int) -> None:
    """Three environments of two agents in turns, by chance: who begins when, who tells, whose worker dies."""
    rng, table, told = np.random.default_rng(seed), Table(), 0
    number, playing = [0] * 3, [set[int]() for _ in range(3)]
    table.maker._rng = np.random.default_rng(seed)
    for _ in range(600):
        env = int(rng.integers(3))
        rows = [2 * env, 2 * env + 1]
        if rng.random() < 0.03:
            table(rows, LOST, 0, 0)
            playing[env], number[env] = set(), 0
            continue
        absent = [row for row in rows if row not in playing[env]]
        if absent and number[env] and rng.random() < 0.5:
            table(absent[:1], FIRST, number[env])
            playing[env].add(absent[0])
            continue
        number[env] += 1
        if not playing[env]:
            table(rows[:1], FIRST, number[env])
            playing[env].add(rows[0])
            continue
        teller = int(rng.choice(sorted(playing[env])))
        table([teller], LAST, number[env], told=[(teller, [1, -1])])
        playing[env], told = {teller}, told + 1
    assert len(table.host.games) == told
    assert all(len(games) <= 1 for games in table.host.games)
    assert table.open() <= 3
