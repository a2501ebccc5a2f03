"""Who plays each side of each environment's episode, and which frozen snapshots there are to play against.

A match is drawn when an episode begins and pinned until it ends. One side, drawn at random, is the learner's; each
other side is played by the learner's own policy, by another member of the population, by a frozen snapshot out of a
bounded pool, or by a script. Members that train act and learn; others, snapshots and scripts act and store nothing. Not
for several threads at once. The trainer's part:

    if matchmaker.snapshot_due(member, steps):                     # also before the first match
        snapshot, evicted = matchmaker.add_snapshot(member, steps)       # keep a frozen copy of the weights
        ratings.freeze(f"member:{member}", str(snapshot))
    match = matchmaker.assign(env, learners=pbt.active(...))       # match.players[side] until the episode is over,
                                                                   # to be stored where match.learns[side]
    for first, second, outcome in matchmaker.finish(env, outcomes):      # what info["outcome"] declared for each side
        ratings.record(first, second, outcome)
    matchmaker.abandon(env)                                        # instead: the environment was lost or reset
    forget every frozen copy whose snapshot is not in matchmaker.resident()

To act for many frozen policies costs one small pass of a network each, so matches draw on a line-up of a few snapshots;
each seat of it is drawn anew from the whole pool after some matches, which leaves the shares of opponents as they are.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pronghorn.config_population import SelfPlayConfig
from pronghorn.errors import ConfigError, PopulationError
from pronghorn.population.ratings import Outcome, match_results

Kind = Literal["member", "snapshot", "script"]
_SCORES: dict[Outcome, float] = {"win": 1.0, "draw": 0.5, "loss": 0.0}


@dataclass(frozen=True)
class Player:
    """Who plays a side. str() is its name in ratings and metrics."""

    kind: Kind
    name: str
    """Number of a member, "<member>@<steps>" of a snapshot, name of a script."""

    @property
    def member(self) -> int:
        """Number of a member."""
        if self.kind != "member":
            raise PopulationError(f"{self} is a {self.kind}, not a member.")
        return int(self.name)

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @staticmethod
    def from_str(text: str) -> Player:
        """The player of that name."""
        kind, _, name = text.partition(":")
        kinds: dict[str, Kind] = {"member": "member", "snapshot": "snapshot", "script": "script"}
        if kind not in kinds or not name:
            raise PopulationError(f"{text!r} names no player. Names are member:0, snapshot:0@1000 or script:random.")
        return Player(kinds[kind], name)


@dataclass(frozen=True)
class Match:
    """Who plays the sides of one episode."""

    learner: int
    """The member that it is played for."""
    players: tuple[Player, ...]
    """Of each side."""
    learns: tuple[bool, ...]
    """Whether what each side does is stored and trained on."""
    counts: bool = True
    """Whether its result will count: not if a policy in it was overwritten since it began."""


@dataclass
class _Snapshot:
    """A frozen policy of the pool."""

    member: int
    steps: int
    results: dict[str, list[float]] = field(default_factory=dict)  # of each member against it: [points, games], decayed

    @property
    def player(self) -> Player:
        return Player("snapshot", f"{self.member}@{self.steps}")

    def win_rate(self, member: int) -> float:
        """Points per game of a member against it, with one drawn game more than were played: 0.5 where none was."""
        # x = (points + ½) / (games + 1): below 1, so that no snapshot is dropped from (1 - x)^p for ever
        points, games = self.results.get(str(member), (0.0, 0.0))
        return (points + 0.5) / (games + 1.0)

    def record(self, member: int, points: float, decay: float) -> None:
        before = self.results.get(str(member), [0.0, 0.0])
        self.results[str(member)] = [decay * before[0] + points, decay * before[1] + 1.0]


@dataclass
class _Seat:
    """A place in the line-up. It holds its snapshot until the matches are played or the snapshot is evicted."""

    player: str = ""
    left: int = 0  # matches


class Matchmaker:
    """The matches in progress and the pool of snapshots."""

    def __init__(self, settings: SelfPlayConfig, num_sides: int, num_members: int, seed: int) -> None:
        """num_sides: of one environment; the rows of a team are one side. Raises ConfigError."""
        check_settings(settings, num_sides, num_members)
        self.settings, self.num_sides, self.num_members = settings, num_sides, num_members
        self._pool: dict[Player, _Snapshot] = {}  # in the order in which they came
        self._last_added: dict[int, int] = {}  # member -> its steps
        self._matches: dict[Hashable, Match] = {}
        self._members = [Player("member", str(i)) for i in range(num_members)]
        self._scripts = [Player("script", name) for name in settings.scripts]
        self._weights = [settings.self_weight, settings.member_weight, settings.snapshot_weight, settings.script_weight]
        # Each member has a line-up of its own, since its win rates are.
        self._seats = [[_Seat() for _ in range(settings.line_up)] for _ in range(num_members)]
        self._rng = np.random.default_rng(seed)

    # ------------------------------------------------------------ matches

    def assign(self, env: Hashable, learners: Sequence[int] = (0,), at_hand: Sequence[int] | None = None) -> Match:
        """Draw who plays the episode that begins in an environment, for one of the learners.

        env: whatever names the environment (an int or a string where the state is to be saved).
        learners: the members that train now. at_hand: those that can be met, which may rest and then store nothing
        (they keep their weights loaded until another needs the slot); None: the learners.
        Raises PopulationError: its last match has not ended, or nobody is there of the kind that was drawn.
        """
        if env in self._matches:
            raise PopulationError(f"Environment {env} plays a match already, pinned until its episode ends.")
        if not learners:
            raise PopulationError(f"Environment {env} has no member to play for: name at least one learner.")
        learner = int(learners[int(self._rng.integers(len(learners)))])
        others = [i for i in (learners if at_hand is None else at_hand) if i != learner]
        players = [self._opponent(learner, others) for _ in range(self.num_sides - 1)]
        players.insert(int(self._rng.integers(self.num_sides)), self._members[learner])
        learns = tuple(player.kind == "member" and player.member in learners for player in players)
        self._matches[env] = Match(learner, tuple(players), learns)
        return self._matches[env]

    def match(self, env: Hashable) -> Match:
        """The match in progress. Raises PopulationError if there is none."""
        if env not in self._matches:
            raise PopulationError(f"Environment {env} plays no match: assign one when its episode begins.")
        return self._matches[env]

    def finish(self, env: Hashable, outcomes: Sequence[Outcome | None]) -> list[tuple[str, str, Outcome]]:
        """The episode is over. outcomes: what was declared for each side (`pronghorn.population.ratings:declared`).

        Returns (player, other player, result seen by the first), the lower side first, of what the match says: nothing
        if it does not count.
        """
        match = self.match(env)
        if len(outcomes) != len(match.players):
            raise PopulationError(f"Environment {env} has {len(match.players)} sides and {len(outcomes)} outcomes.")
        del self._matches[env]
        if not match.counts:
            return []
        games = [(match.players[i], match.players[j], result) for i, j, result in match_results(outcomes)]
        for first, second, result in games:
            self._note(first, second, _SCORES[result])
            self._note(second, first, 1.0 - _SCORES[result])
        return [(str(first), str(second), result) for first, second, result in games if first != second]

    def abandon(self, env: Hashable) -> None:
        """The episode ended without a result: its environment was lost or reset. No match is no error."""
        self._matches.pop(env, None)

    def _note(self, player: Player, opponent: Player, points: float) -> None:
        if player.kind == "member" and opponent in self._pool:  # else it was evicted in the meantime
            self._pool[opponent].record(player.member, points, self.settings.win_rate_decay)

    def _opponent(self, learner: int, others: Sequence[int]) -> Player:
        kind = ("self", "member", "snapshot", "script")[self._pick(self._weights)]
        if kind == "snapshot":
            return self._seated(learner)
        if kind == "script":
            return self._scripts[int(self._rng.integers(len(self._scripts)))]
        if kind == "member":
            if not others:
                raise PopulationError(f"Member {learner} is to meet another, and none is at hand: keep two loaded.")
            return self._members[others[int(self._rng.integers(len(others)))]]
        return self._members[learner]

    def _pick(self, weights: Sequence[float]) -> int:
        """An index with a chance in proportion to its weight."""
        ends = list(itertools.accumulate(weights))
        last = ends.index(ends[-1])  # that has a weight: rounding must not lead past it
        return bisect.bisect_right(ends, self._rng.random() * ends[-1], hi=last)

    # ------------------------------------------------------------ line-up

    def _seated(self, learner: int) -> Player:
        """A snapshot out of the learner's line-up."""
        seat = self._seats[learner][int(self._rng.integers(self.settings.line_up))]
        if seat.left == 0:
            seat.player, seat.left = str(self._drawn(learner)), self.settings.seat_matches
        seat.left -= 1
        return Player.from_str(seat.player)

    def _drawn(self, learner: int) -> Player:
        """A snapshot out of the whole pool."""
        if not self._pool:
            raise PopulationError("The pool of snapshots is empty: add one of each member before the first match.")
        return self.pool[self._pick(self.weights(learner))]

    def weights(self, learner: int) -> list[float]:
        """How likely each snapshot of the pool is to be drawn for a learner, in the order of the pool, unnormalised."""
        s, count = self.settings, len(self._pool)
        if s.sample == "recent":
            return [float(i >= count - s.recent) for i in range(count)]
        if s.sample == "prioritized":
            # f(x) = (1 - x)^p
            return [float((1.0 - snapshot.win_rate(learner)) ** s.power) for snapshot in self._pool.values()]
        return [1.0] * count

    # ------------------------------------------------------------ pool

    @property
    def pool(self) -> list[Player]:
        """The snapshots that matches are drawn from, in the order in which they came."""
        return list(self._pool)

    def resident(self) -> set[Player]:
        """Snapshots whose weights are needed: those of the pool, and evicted ones in matches that have not ended."""
        playing = {p for match in self._matches.values() for p in match.players if p.kind == "snapshot"}
        return playing | set(self.pool)

    def win_rate(self, member: int, snapshot: Player) -> float:
        """Recent points per game of a member against a snapshot of the pool; 0.5 before the first."""
        if snapshot not in self._pool:
            raise PopulationError(f"{snapshot} is not in the pool: {', '.join(map(str, self.pool)) or 'empty'}.")
        return self._pool[snapshot].win_rate(member)

    def snapshot_due(self, member: int, steps: int) -> bool:
        """Whether a member should be added to the pool: at first, after enough steps, or when it beats all of the pool.

        steps: the member's total.
        """
        s, last = self.settings, self._last_added.get(member)
        if s.snapshot_weight == 0 or steps == last:
            return False
        if last is None or (s.add_every_steps and steps - last >= s.add_every_steps):
            return True
        return s.add_win_rate > 0 and all(x.win_rate(member) >= s.add_win_rate for x in self._pool.values())

    def add_snapshot(self, member: int, steps: int) -> tuple[Player, Player | None]:
        """Add a member as it is now: (the snapshot, the one that made room or None).

        An evicted one is not drawn any more, and plays on where it is in a match (see `resident`).
        """
        new = _Snapshot(member, steps)
        if new.player in self.resident():
            raise PopulationError(f"{new.player} is in the pool already: a member is added once at a count of steps.")
        evicted = self._evict() if len(self._pool) == self.settings.size else None
        self._pool[new.player] = new
        self._last_added[member] = steps
        return new.player, evicted

    def _evict(self) -> Player:
        pool = list(self._pool.values())
        player = pool[0 if self.settings.evict == "oldest" else _most_crowded(pool)].player
        del self._pool[player]
        for seat in (seat for seats in self._seats for seat in seats if seat.player == str(player)):
            seat.left = 0
        return player

    def overwrite(self, target: int, donor: int) -> None:
        """The target's policy is now the donor's, and so are its win rates; its matches in progress do not count."""
        for env, match in self._matches.items():
            if self._members[target] in match.players:
                self._matches[env] = replace(match, counts=False)
        for snapshot in self._pool.values():
            snapshot.results.pop(str(target), None)
            if str(donor) in snapshot.results:
                snapshot.results[str(target)] = snapshot.results[str(donor)]  # `record` makes a new list
        for seat in self._seats[target]:
            seat.left = 0

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Plain JSON values that hold all of it, matches in progress included.

        Where environments begin anew at a save, abandon their matches first.
        """
        matches = [
            [env, m.learner, [str(p) for p in m.players], list(m.learns), m.counts] for env, m in self._matches.items()
        ]
        return {
            "pool": [asdict(snapshot) for snapshot in self._pool.values()],
            "last_added": list(self._last_added.items()),
            "matches": matches,
            "seats": [[asdict(seat) for seat in seats] for seats in self._seats],
            "generator": self._rng.bit_generator.state,
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state` gave. Raises ConfigError if sizes that it depends on are others."""
        before = (len(saved["seats"]), len(saved["seats"][0]))
        if before != (self.num_members, self.settings.line_up):
            rule = f"cannot change when a run is resumed (they were {before})"
            raise ConfigError("members, line_up", (self.num_members, self.settings.line_up), rule, "Start a new run.")
        snapshots = [_Snapshot(**raw) for raw in saved["pool"]]
        self._pool = {snapshot.player: snapshot for snapshot in snapshots}
        self._last_added = {int(member): int(steps) for member, steps in saved["last_added"]}
        self._matches = {
            env: Match(learner, tuple(map(Player.from_str, players)), tuple(learns), counts)
            for env, learner, players, learns, counts in saved["matches"]
        }
        self._seats = [[_Seat(**raw) for raw in seats] for seats in saved["seats"]]
        self._rng.bit_generator.state = saved["generator"]
        while len(self._pool) > self.settings.size:  # resumed with a smaller pool
            self._evict()


def _most_crowded(pool: Sequence[_Snapshot]) -> int:
    """Place of the snapshot whose neighbours in age, of the same member, are closest together; the oldest of equals.

    A member's first and last snapshot have no two neighbours; where a pool has nothing else the oldest goes.
    """
    gaps: dict[int, int] = {}
    for member in {s.member for s in pool}:
        own = [i for i, s in enumerate(pool) if s.member == member]
        gaps |= {own[k]: pool[own[k + 1]].steps - pool[own[k - 1]].steps for k in range(1, len(own) - 1)}
    return min(gaps, key=lambda i: (gaps[i], i)) if gaps else 0


def check_settings(s: SelfPlayConfig, num_sides: int, num_members: int) -> None:
    """Every rule of the settings. Raises ConfigError."""
    _check_weights(s, num_members)
    if num_sides < 2:
        rule = "has one side, so that nobody meets anybody"
        raise ConfigError("environment", num_sides, rule, "Use an environment of two rows or more for self-play.")
    for name in ("size", "recent", "line_up", "seat_matches"):
        if getattr(s, name) < 1:
            raise ConfigError(f"selfplay.{name}", getattr(s, name), "must be at least 1", "Raise it.")
    if s.add_every_steps < 0 or not 0.0 <= s.add_win_rate < 1.0 or not (s.add_every_steps or s.add_win_rate):
        rule = "must say when snapshots are added: add_every_steps ≥ 0 and add_win_rate in [0, 1), not both 0"
        raise ConfigError("selfplay.add_every_steps, add_win_rate", (s.add_every_steps, s.add_win_rate), rule,
                          "Try 1000000 and 0.")  # fmt: skip
    if not 0.0 <= s.power <= 20.0:
        raise ConfigError("selfplay.power", s.power, "must lie in [0, 20]: more would round weights to 0", "Try 2.")
    if not 0.0 < s.win_rate_decay <= 1.0:
        raise ConfigError("selfplay.win_rate_decay", s.win_rate_decay, "must lie in (0, 1]", "Try 0.99.")


def _check_weights(s: SelfPlayConfig, num_members: int) -> None:
    weights = (s.self_weight, s.member_weight, s.snapshot_weight, s.script_weight)
    if not all(0.0 <= w < math.inf for w in weights) or not sum(weights) > 0.0:
        rule = "must be finite, not negative, and not all 0"
        raise ConfigError("selfplay: weights of self, member, snapshot, script", weights, rule, "Try 0.8, 0, 0.2, 0.")
    if s.member_weight and num_members < 2:
        rule = f"needs other members, and the population has {num_members}"
        raise ConfigError("selfplay.member_weight", s.member_weight, rule, "Set it to 0, or train more members.")
    if bool(s.script_weight) != bool(s.scripts):
        rule = f"and selfplay.scripts = {s.scripts} must be given together"
        raise ConfigError("selfplay.script_weight", s.script_weight, rule, "Give both, or neither.")
