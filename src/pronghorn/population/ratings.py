"""How strong players are, from declared results only: a table of games, and Elo ratings with standard errors from it.

A result is what the environment declares (`info["outcome"]`: win, draw or loss). Rewards are never looked at: in a game
that is not zero-sum they say nothing about who won, and ratings made from them drift for everybody at once.

Ratings are the most probable ones under the Elo model (Bradley and Terry 1952) given *all* games, not a sum of small
steps after each: so they do not depend on the order of games, a frozen player's rating is not dragged along by an
opponent that learns, every rating has an error, and the mean of the founding players stays where it is put. A player
that learns is a chain of players, each constant over a span, whose neighbours are alike (as in Coulom's Whole-History
Rating, 2008): `freeze` ends a span when a snapshot is taken, `branch` when a policy is overwritten by another.

    ratings = Ratings()
    ratings.add("member:0")
    ratings.record("member:0", "script:random", "win")         # the first named player sat on the first side
    ratings.freeze("member:0", "snapshot:0@1000000")           # member:0 goes on from what is now a frozen player
    ratings.fit()["member:0"]                                  # Rating(elo=1562.3, stderr=141.0, games=0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pronghorn.errors import EnvError, PopulationError

Outcome = Literal["win", "draw", "loss"]
Results = tuple[int, int, int]  # wins, draws, losses

ANCHOR_ELO = 1500.0  # mean rating of the founding players, a convention
FOUNDER_SD_ELO = 350.0  # prior deviation of a founding player from the anchor: a new player's in Glicko
LINK_SD_ELO = 200.0  # prior deviation of a player from the one that it goes on from: one class of players
_ELO = 400.0 / math.log(10.0)  # Elo points of one unit of log odds
_SCORES: dict[Outcome, float] = {"win": 1.0, "draw": 0.5, "loss": 0.0}


# ---------------------------------------------------------------- declared results


def declared(value: object) -> Outcome | None:
    """The outcome that an environment declares for one side; None for one that declares nothing.

    value: "win", "draw" or "loss"; or 1, 0, -1, as a numeric info field must say it; None or NaN declares nothing.
    Raises EnvError for anything else.
    """
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        return None
    outcomes: dict[object, Outcome] = {"win": "win", "draw": "draw", "loss": "loss", 1: "win", 0: "draw", -1: "loss"}
    try:
        return outcomes[value]
    except (KeyError, TypeError):
        rule = "An outcome is 'win', 'draw' or 'loss' (as a number: 1, 0, -1), or absent."
        raise EnvError(f"The environment declared the outcome {value!r}. {rule} Correct info['outcome'].") from None


def pair_result(first: Outcome | None, second: Outcome | None) -> Outcome | None:
    """What one side's declared outcome and another's say of the two, seen by the first; None: nothing.

    The better outcome beats the worse one (win > draw > loss), and two that drew drew. Two that both won or both lost
    say nothing of each other: they are team mates, fellow losers to a third, or play a game without a winner.
    """
    if first is None or second is None:
        return None
    if first == second:
        return "draw" if first == "draw" else None
    return "win" if _SCORES[first] > _SCORES[second] else "loss"


def match_results(outcomes: Sequence[Outcome | None]) -> list[tuple[int, int, Outcome]]:
    """(side, other side, result seen by the first) of every pair of sides that a match says something of."""
    pairs = [(i, j, pair_result(outcomes[i], outcomes[j])) for i, j in combinations(range(len(outcomes)), 2)]
    return [(i, j, result) for i, j, result in pairs if result is not None]


# ---------------------------------------------------------------- the table of games


@dataclass(frozen=True)
class Pair:
    """The games of two players, both sides together, seen by `first`."""

    first: str
    second: str
    wins: int
    draws: int
    losses: int

    @property
    def games(self) -> int:
        """Number of games."""
        return self.wins + self.draws + self.losses

    @property
    def score(self) -> float:
        """Share of points, a draw being half a point; nan without a game."""
        return (self.wins + 0.5 * self.draws) / self.games if self.games else math.nan

    def to_json(self) -> dict[str, Any]:
        """Counts, shares with 95 % intervals, and the score."""
        counts = {"wins": self.wins, "draws": self.draws, "losses": self.losses}
        record: dict[str, Any] = {"players": [self.first, self.second], "games": self.games, **counts}
        if self.games:
            record |= {f"{name}_ci95": list(wilson(count, self.games)) for name, count in counts.items()}
            record["score"] = self.score
        return record


def wilson(count: int, games: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share, count of games (E. B. Wilson 1927); z = 1.96: 95 %.

    It stays inside [0, 1] and has a width also at 0 of n and n of n, where the plain one has none.
    """
    if not 0 <= count <= games or games < 1:
        raise PopulationError(f"{count} of {games} games is no share: count a part of at least one game.")
    # (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    share, extra = count / games, z * z / games
    middle, half = share + extra / 2, z * math.sqrt(share * (1 - share) / games + extra / (4 * games))
    return max(0.0, (middle - half) / (1 + extra)), min(1.0, (middle + half) / (1 + extra))


@dataclass(frozen=True)
class Rating:
    """One player's strength. stderr: around the mean of the founding players, which is fixed by convention."""

    elo: float
    stderr: float
    games: int


def expected_score(elo: float, other_elo: float) -> float:
    """The Elo model: points per game of a player against another, in [0, 1]."""
    # E = 1 / (1 + 10^((R' - R) / 400))
    return 1.0 / (1.0 + math.exp((other_elo - elo) / _ELO))


class Ratings:
    """All players, all their games, and the ratings that follow from them."""

    def __init__(self) -> None:
        self._parents: dict[str, str | None] = {}  # of every player, the one that it goes on from; in order of arrival
        self._games: dict[tuple[str, str], Results] = {}  # (first side, second side) -> results seen by the first side
        self._retired = 0

    @property
    def players(self) -> list[str]:
        """All players, in the order in which they came."""
        return list(self._parents)

    def add(self, player: str) -> None:
        """A founding player. Raises PopulationError if the name is taken."""
        if player in self._parents:
            raise PopulationError(f"Player {player!r} is rated already. A name stands for one policy.")
        self._parents[player] = None

    def record(self, first: str, second: str, outcome: Outcome) -> None:
        """One game, seen by the player on the first side. A player against itself says nothing and is left out.

        A player that was never added is one from now on.
        """
        if first == second:
            return
        for player in (first, second):
            self._parents.setdefault(player, None)
        wins, draws, losses = self._games.get((first, second), (0, 0, 0))
        self._games[first, second] = (
            wins + (outcome == "win"),
            draws + (outcome == "draw"),
            losses + (outcome == "loss"),
        )

    def freeze(self, player: str, snapshot: str) -> None:
        """A snapshot of a learning player was taken: the games so far are the snapshot's, and the player, which learns
        on, has none yet but is expected near it. Raises PopulationError for an unknown player or a taken name.
        """
        self._known(player)
        if snapshot in self._parents:
            raise PopulationError(f"Player {snapshot!r} is rated already. A name stands for one policy.")
        self._rename(player, snapshot)
        self._parents[player] = snapshot

    def branch(self, target: str, donor: str) -> None:
        """The target's policy was overwritten by the donor's: its games so far stay in the table under another name."""
        self._known(target)
        self._known(donor)
        if target == donor:
            raise PopulationError(f"Player {target!r} cannot take the place of itself.")
        self._retired += 1
        self._rename(target, f"{target}#{self._retired}")
        self._parents[target] = donor

    def forget(self, player: str) -> None:
        """Leave a player and its games out. Who went on from it goes on from the one that it went on from.

        So that what is kept of a long run, and the time that a fit takes, stay bounded.
        """
        self._known(player)
        parent = self._parents.pop(player)
        self._parents = {p: parent if q == player else q for p, q in self._parents.items()}
        self._games = {names: results for names, results in self._games.items() if player not in names}

    def pair(self, first: str, second: str) -> Pair:
        """All games of two players, both sides together."""
        wins, draws, losses = self._games.get((first, second), (0, 0, 0))
        other_wins, other_draws, other_losses = self._games.get((second, first), (0, 0, 0))
        return Pair(first, second, wins + other_losses, draws + other_draws, losses + other_wins)

    def pairs(self) -> list[Pair]:
        """Every two players that met, once each."""
        place = {player: i for i, player in enumerate(self._parents)}
        met = {tuple(sorted(names, key=place.__getitem__)) for names in self._games}
        return [self.pair(a, b) for a, b in sorted(met, key=lambda names: (place[names[0]], place[names[1]]))]

    def first_side_score(self) -> float:
        """Points per game of the first side, over all games: 0.5 where sides are equal; nan without a game."""
        wins, draws, losses = (sum(r[k] for r in self._games.values()) for k in range(3))
        games = wins + draws + losses
        return (wins + 0.5 * draws) / games if games else math.nan

    def fit(self) -> dict[str, Rating]:
        """The most probable rating of every player, given all games. A function of the table alone."""
        if not self._parents:
            return {}
        place = {player: i for i, player in enumerate(self._parents)}
        parents = [None if parent is None else place[parent] for parent in self._parents.values()]
        met = self.pairs()
        pairs = np.array([[place[pair.first], place[pair.second]] for pair in met], np.intp).reshape(-1, 2)
        points = np.array([[p.wins + p.draws / 2, p.losses + p.draws / 2] for p in met]).reshape(-1, 2)
        elo, stderr = fit_elo(pairs, points, parents)
        games = dict.fromkeys(place, 0)
        for pair in met:
            games[pair.first] += pair.games
            games[pair.second] += pair.games
        return {p: Rating(float(elo[i]), float(stderr[i]), games[p]) for p, i in place.items()}

    def to_json(self) -> dict[str, Any]:
        """What `pronghorn match --json` prints: results of each pair, and ratings."""
        return {
            "pairs": [pair.to_json() for pair in self.pairs()],
            "ratings": {player: asdict(rating) for player, rating in self.fit().items()},
            "first_side_score": self.first_side_score() if self._games else None,
        }

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Plain JSON values that hold all of it."""
        games = [[first, second, *results] for (first, second), results in self._games.items()]
        return {"parents": dict(self._parents), "games": games, "retired": self._retired}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._parents = dict(saved["parents"])
        self._games = {(first, second): (w, d, lost) for first, second, w, d, lost in saved["games"]}
        self._retired = int(saved["retired"])

    # ------------------------------------------------------------ names

    def _known(self, player: str) -> None:
        if player not in self._parents:
            raise PopulationError(f"Player {player!r} is not rated yet. Known: {', '.join(self._parents) or 'none'}.")

    def _rename(self, old: str, new: str) -> None:
        """The same player under another name, its place kept."""

        def name(player: str) -> str:
            return new if player == old else player

        self._parents = {name(p): None if q is None else name(q) for p, q in self._parents.items()}
        self._games = {(name(a), name(b)): results for (a, b), results in self._games.items()}


# ---------------------------------------------------------------- the most probable ratings


def fit_elo(
    pairs: NDArray[np.intp], points: NDArray[np.float64], parents: Sequence[int | None]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ratings and their standard errors [P] in Elo, by Newton's method on the log posterior, which is concave.

    pairs: [M, 2] two players that met; points: [M, 2] what each made of their games (win 1, draw ½).
    parents: [P] the player that each goes on from, or None for a founding one.

        log posterior(θ) = Σ_m points_m0 log σ(θ_i - θ_j) + points_m1 log σ(θ_j - θ_i) - ½ θᵀ Λ θ
        θ: log odds around the anchor;  i, j: the two of pair m

    where Λ holds founders within FOUNDER_SD_ELO of the anchor and the others within LINK_SD_ELO of their parents. A
    draw counts as half a win and half a loss, as in Elo: points then scatter less than the model has it, so errors are
    too large rather than too small where draws are many.
    """
    prior = _prior_precision(parents)
    theta = climb(np.zeros(len(parents)), pairs, points, prior)
    covariance: NDArray[np.float64] = np.linalg.inv(_slopes(theta, pairs, points, prior)[1]).astype(np.float64)
    return ANCHOR_ELO + _ELO * theta, _ELO * _deviations(covariance, parents)


def climb(
    theta: NDArray[np.float64], pairs: NDArray[np.intp], points: NDArray[np.float64], prior: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The top of the log posterior (see `fit_elo`), from any start: theta [P], prior [P, P] precision."""
    value, rises = _log_posterior(theta, pairs, points, prior), True
    while rises:  # strictly, so it ends; near the top each step squares the error
        gradient, curvature = _slopes(theta, pairs, points, prior)
        step = np.linalg.solve(curvature, gradient)
        while (new := _log_posterior(theta + step, pairs, points, prior)) < value and np.abs(step).max() > 1e-9:
            step = step / 2.0  # far from the top, where it is flat, a full step goes too far
        rises = new > value
        if rises:
            theta, value = theta + step, new
    return theta


def _prior_precision(parents: Sequence[int | None]) -> NDArray[np.float64]:
    """Λ [P, P], in log odds."""
    founder, link = (_ELO / FOUNDER_SD_ELO) ** 2, (_ELO / LINK_SD_ELO) ** 2
    precision = np.zeros((len(parents), len(parents)))
    for child, parent in enumerate(parents):
        if parent is None:
            precision[child, child] += founder
        else:
            pair = np.ix_([child, parent], [child, parent])
            precision[pair] += link * np.array([[1.0, -1.0], [-1.0, 1.0]])
    return precision


def _log_posterior(
    theta: NDArray[np.float64], pairs: NDArray[np.intp], points: NDArray[np.float64], prior: NDArray[np.float64]
) -> float:
    # log σ(x) = -log(1 + e^-x)
    ahead = theta[pairs[:, 0]] - theta[pairs[:, 1]]  # [M]
    log_scores = -points[:, 0] @ np.logaddexp(0.0, -ahead) - points[:, 1] @ np.logaddexp(0.0, ahead)
    return float(log_scores - 0.5 * theta @ prior @ theta)


def _slopes(
    theta: NDArray[np.float64], pairs: NDArray[np.intp], points: NDArray[np.float64], prior: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gradient [P] of the log posterior, and its curvature [P, P], the negative second derivative."""
    first, second, games = pairs[:, 0], pairs[:, 1], points.sum(axis=1)
    # E = σ(θ_i - θ_j);  ∂/∂θ_i = points_i - n E = -∂/∂θ_j;  -∂²/∂θ_i² = n E (1 - E) = ∂²/∂θ_i∂θ_j
    expected = 1.0 / (1.0 + np.exp(theta[second] - theta[first]))  # [M]
    surplus, weight = points[:, 0] - games * expected, games * expected * (1.0 - expected)
    gradient, curvature = -prior @ theta, prior.copy()
    for one, other, sign in ((first, second, 1.0), (second, first, -1.0)):
        np.add.at(gradient, one, sign * surplus)
        np.add.at(curvature, (one, one), weight)
        np.add.at(curvature, (one, other), -weight)
    return gradient, curvature


def _deviations(covariance: NDArray[np.float64], parents: Sequence[int | None]) -> NDArray[np.float64]:
    """Standard deviations [P] given that the founders' mean is the anchor: games say nothing of the common level."""
    # C - C u uᵀ C / (uᵀ C u)
    founders = np.array([float(parent is None) for parent in parents])
    shared = covariance @ founders
    variances: NDArray[np.float64] = np.diag(covariance) - shared**2 / (founders @ shared)
    deviations: NDArray[np.float64] = np.sqrt(variances.clip(min=0.0))  # a lone founder's is 0, but for rounding
    return deviations
