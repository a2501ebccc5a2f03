"""Who plays which row, told to the sampler: members dealt over rows that know nothing of each other, or matches.

It reads what environments deliver and asks the matchmaker; it trains nothing and keeps no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pronghorn.population.matchmaking import Match, Matchmaker, Player
from pronghorn.population.ratings import Outcome, declared
from pronghorn.types import LOST, Ready

Result = tuple[str, str, Outcome]  # player, other player, result seen by the first


class DealtSeats:
    """Rows of which each is a world of its own: of each task equally many for every member that trains now.

    A row changes hands only where the shares ask for it: whoever takes one over must wait for an episode to begin.
    """

    def __init__(
        self, task_ids: NDArray[np.int64], active: Callable[[], Sequence[int]], begin: Callable[[int, int], None], *,
        together: int = 1,
    ) -> None:  # fmt: skip
        """task_ids: [num_rows]. active: the members that train now. begin(row, member): is told of every episode.

        together: so many consecutive rows are one member's.
        """
        self._active, self._begin, self._together = active, begin, together
        self._task = task_ids[::together].tolist()  # of each group of rows
        self._member: list[int | None] = [None] * len(self._task)
        self._count: dict[tuple[int, int | None], int] = {}  # (task, member) → groups

    def take(self, ready: Ready, begins: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Indices of the members that play the rows which begin, in their order."""
        active, rows = self._active(), ready.rows[begins].tolist()
        taken = [self._seat(row // self._together, active) for row in rows]
        for row, member in zip(rows, taken, strict=True):
            self._begin(row, member)
        return np.array(taken, np.int64)

    def _seat(self, group: int, active: Sequence[int]) -> int:
        task, member = self._task[group], self._member[group]
        fewest = min(active, key=lambda other: self._count.get((task, other), 0))
        # It stays where it is, unless another has two groups fewer: then one changes hands, and none back.
        stays = member in active and self._count[task, member] <= self._count.get((task, fewest), 0) + 1
        if member is not None and stays:
            return member
        if member is not None:
            self._count[task, member] -= 1
        self._member[group] = fewest
        self._count[task, fewest] = self._count.get((task, fewest), 0) + 1
        return fewest


class Host(Protocol):
    """What a match needs done about those who play it."""

    def begin(self, env: int, match: Match) -> None:
        """A match begins in an environment."""

    def guest(self, player: Player) -> str:
        """The name under which a guest plays who does not learn in this match."""

    def seat(self, rows: NDArray[np.int64], guest: str) -> None:
        """The guest plays these rows from now on."""

    def results(self, games: Sequence[Result]) -> None:
        """What a match that ended says."""


@dataclass(frozen=True, eq=False)
class _Game:
    """One game of an environment, and the match that is played in it."""

    number: int
    key: str
    match: Match
    guests: dict[int, str]  # side → name of the guest who plays it


class MatchSeats:
    """Games between members, frozen snapshots and scripts, one match a game, pinned until it is over.

    A game's result comes with the first record after its end. In games in turns an agent that had no turn in it may
    begin the next one before that, so two games of an environment can be open at once.
    """

    def __init__(
        self, matchmaker: Matchmaker, host: Host, num_members: int, active: Callable[[], Sequence[int]]
    ) -> None:
        """active: the members that train now; all can be met. Guests are player number num_members."""
        self._matchmaker, self._host, self._num_members = matchmaker, host, num_members
        self._active, self._num_sides = active, matchmaker.num_sides
        self._games: dict[int, list[_Game]] = {}  # by environment: those without a result, the present one last
        self._game: dict[int, _Game] = {}  # that each row has begun last

    def take(self, ready: Ready, begins: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Indices of the players of the rows that begin, in their order."""
        for row in ready.rows[ready.event == LOST].tolist():
            self._lose(row // self._num_sides)
        for record in ready.records:
            if "outcomes" in record and record["row"] in self._game:
                self._finish(record["row"] // self._num_sides, self._game[record["row"]], record["outcomes"])
        assert ready.game is not None  # of games of several agents it is given
        numbers = ready.game[begins].tolist()
        taken = [self._begin(row, number) for row, number in zip(ready.rows[begins].tolist(), numbers, strict=True)]
        return np.array(taken, np.int64)

    def guests(self) -> set[str]:
        """Names of the guests in games that go on."""
        return {name for games in self._games.values() for game in games for name in game.guests.values()}

    def _lose(self, env: int) -> None:
        """The environment's worker died: its games have no result."""
        for game in self._games.pop(env, ()):
            self._matchmaker.abandon(game.key)
        for row in range(env * self._num_sides, (env + 1) * self._num_sides):
            self._game.pop(row, None)

    def _finish(self, env: int, game: _Game, outcomes: Sequence[object]) -> None:
        if game in self._games[env]:
            self._games[env].remove(game)
            self._host.results(self._matchmaker.finish(game.key, [declared(one) for one in outcomes]))

    def _begin(self, row: int, number: int) -> int:
        env, side = divmod(row, self._num_sides)
        games = self._games.setdefault(env, [])
        if not games or games[-1].number != number:
            games.append(self._new_game(env, number))
            for game in games[:-2]:  # nobody had a turn in it, so that nobody can tell its end
                games.remove(game)
                self._matchmaker.abandon(game.key)
        game = self._game[row] = games[-1]
        if side not in game.guests:
            return game.match.players[side].member
        self._host.seat(np.array([row]), game.guests[side])
        return self._num_members

    def _new_game(self, env: int, number: int) -> _Game:
        key = f"{env}/{number}"
        match = self._matchmaker.assign(key, self._active(), range(self._num_members))
        self._host.begin(env, match)
        guests = {s: self._host.guest(p) for s, p in enumerate(match.players) if not match.learns[s]}
        return _Game(number, key, match, guests)
