"""Games between every two of several players, with sides swapped in half of them, and the table that they make.

An environment whose rows are the agents of one game is played by two players: row 0 and every second row from there is
the first side, the others are the second. Who plays which side of which environment is fixed as long as two players
meet, and each environment plays a fixed share of their games, so that short games are not counted more often than long
ones. Only whole games count, by what the environment declares (docs/agents.md, "Who won"); rewards are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from pronghorn.config import Config, EnvConfig, derive_seed
from pronghorn.envs.registry import make_pool
from pronghorn.envworker.deathmatch import fills_worker
from pronghorn.errors import EnvError, UsageError
from pronghorn.evaluation.evaluate import quota
from pronghorn.evaluation.players import KINDS, Act, Player, PolicyPlayer, unique_names
from pronghorn.machine import available_cores
from pronghorn.population.ratings import Outcome, Pair, Ratings, declared, pair_result
from pronghorn.types import EnvSpec, Event, Pool, Ready

ENVS_PER_WORKER = 16
_PLAYED_ENV = ("id", "args", "obs_keys", "image_layout", "pad_spaces")  # settings that decide what is played
_BEST: tuple[Outcome, ...] = ("win", "draw", "loss")


def play_matches(
    players: Sequence[Player],
    config: Config,
    *,
    games: int,
    seed: int,
    num_envs: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Ratings:
    """Play exactly `games` games between every two players, in the config's environments; results and ratings.

    Players that have the same name are numbered (`players.unique_names`). If the number of games is odd, the first
    player of a pair is once more on the first side.
    seed: of environments and actions; equal seeds give equal games, if the environment keeps to its seed.
    num_envs: environments that play at once; at least two for each task. None: by the number of cores and games.
    say: is told of each pair before it plays.
    Raises UsageError for players that cannot meet, and EnvError for games that declare no result.
    """
    _require_players(players, config, games)
    names, ratings = unique_names(players), Ratings()
    for name in names:
        ratings.add(name)
    pool = _make_pool(config, games, seed, num_envs)
    try:
        _require_fit(players, pool.spec)
        for number, (a, b) in enumerate(combinations(range(len(players)), 2)):
            say(f"{names[a]} against {names[b]}: {games} games, {pool.num_rows // pool.spec.rows_per_env} at once")
            if number:
                pool.reseed(derive_seed(seed, 7, number))
            acts = [players[one].begin(pool, derive_seed(seed, 8, number, side)) for side, one in enumerate((a, b))]
            for swapped, result in _play_pair(pool, acts, games):
                first, second = (names[b], names[a]) if swapped else (names[a], names[b])
                ratings.record(first, second, result)
    finally:
        pool.close()
    return ratings


def match_config(players: Sequence[Player], env: str = "") -> Config:
    """The settings of the environment that these players meet in. env: its name; "": the one of all runs.

    With a name, other settings of the environment are those of the first run that was trained in it, else the defaults.
    Raises UsageError if runs were trained in different ones and none is named, or nothing says which.
    """
    runs = [player for player in players if isinstance(player, PolicyPlayer)]
    if env:
        same = [run.policy.config for run in runs if run.policy.config.env.id == env]
        return same[0] if same else Config(env=EnvConfig(id=env))
    if not runs:
        raise UsageError("None of the players is a trained run. Say where they play: --env ENV.")
    first = runs[0]
    for other in runs[1:]:
        for name in _PLAYED_ENV:
            one, another = (getattr(run.policy.config.env, name) for run in (first, other))
            if one != another:
                raise UsageError(
                    f"{first.source} and {other.source} were trained in different environments: env.{name} is {one!r} "
                    f"and {another!r}. Players meet in one; say with --env ENV in which."
                )
    return first.policy.config


def table(ratings: Ratings) -> str:
    """Results of each pair and ratings, for people."""
    pairs, fitted = ratings.pairs(), ratings.fit()
    versus = {pair: f"{pair.first} – {pair.second}" for pair in pairs}
    width = max(len(text) for text in [*versus.values(), *fitted])
    lines = [f"  {versus[pair]:{width}}  {_results(pair)}" for pair in pairs]
    lines += [f"  the first side scores {ratings.first_side_score():.3f}", "ratings (Elo, their mean fixed at 1500)"]
    best_first = sorted(fitted.items(), key=lambda item: -item[1].elo)
    lines += [f"  {name:{width}}  {one.elo:6.0f} ± {one.stderr:.0f}, {one.games} games" for name, one in best_first]
    return "\n".join(lines)


def _results(pair: Pair) -> str:
    record = pair.to_json()
    shares = {name: [round(100 * bound) for bound in record[f"{name}_ci95"]] for name in ("wins", "draws", "losses")}
    counts = [f"{record[name]} {name} ({low} to {high} %)" for name, (low, high) in shares.items()]
    return f"{', '.join(counts)}, score {pair.score:.3f}"


# ---------------------------------------------------------------- what can be refused before a game


def _require_players(players: Sequence[Player], config: Config, games: int) -> None:
    if games < 1:
        raise UsageError(f"--games {games}: must be at least 1.")
    if len(players) < 2:
        raise UsageError(f"A match needs at least two players, and {len(players)} was given. {KINDS}")
    for one, other in combinations(players, 2):
        if one.source == other.source:
            raise UsageError(
                f"{one.source} was named twice. A player against itself says nothing of its strength: "
                "name each player once."
            )
    runs = [player for player in players if isinstance(player, PolicyPlayer)]
    for run in runs:
        if run.policy.config.env.id == config.env.id:
            _require_agents(run.policy.spec)
        _require_equal(run, runs[0].policy.spec, runs[0].source)


def _require_fit(players: Sequence[Player], spec: EnvSpec) -> None:
    """Refuse an environment that is no game, or is not what a run was trained on. Raises UsageError."""
    _require_agents(spec)
    if not spec.is_game:
        raise UsageError(
            f"The rows of {spec.name} are environments of their own, not the agents of one game. A match needs an "
            "environment of several agents (docs/agents.md)."
        )
    for player in players:
        if isinstance(player, PolicyPlayer):
            _require_equal(player, spec, spec.name)


def _require_agents(spec: EnvSpec) -> None:
    if spec.rows_per_env < 2:
        raise UsageError(
            f"{spec.name} has one agent, so nobody can play against another in it. A match needs an environment of two "
            "or more agents (docs/agents.md): name one with --env ENV, in which agents see and do the same as in "
            "training. Returns are compared with: pronghorn eval."
        )


def _require_equal(player: PolicyPlayer, spec: EnvSpec, whose: str) -> None:
    """What it sees and does decides; it may have learned alone, or with more agents, as against scripted bots."""
    own = player.policy.spec
    parts: list[tuple[str, Any, Any]] = [
        (f"observation '{name}'", own.observation.get(name), spec.observation.get(name))
        for name in sorted({*own.observation, *spec.observation})
    ]
    parts += [(f"action ({name})", getattr(own.action, name), getattr(spec.action, name))
              for name in ("discrete", "low", "high")]  # fmt: skip
    for what, one, other in parts:
        if one != other:
            shown = (one or "none", other or "none") if str(one) != str(other) else (repr(one), repr(other))
            raise UsageError(
                f"{player.source} cannot play here: the {what} that it was trained with is {shown[0]}, that of {whose} "
                f"is {shown[1]}. Players of one match need equal observations and actions."
            )


def _make_pool(config: Config, games: int, seed: int, num_envs: int | None) -> Pool:
    """Environments in a fixed order, so that a match can be repeated; an even number of each task, for both sides."""
    cores, least = available_cores(), 2 * len(config.env_names)
    workers = min(cores, max(1, games // 4))
    wanted = max(least, num_envs or min(games, workers * ENVS_PER_WORKER))
    if any(map(fills_worker, config.env_names)):
        workers, per_worker = max(least, num_envs or min(games, cores)), 1
    else:
        workers = min(workers, wanted)
        per_worker = -(-wanted // workers)
    env = replace(
        config.env, workers=workers, envs_per_worker=per_worker, groups=min(2, per_worker), vector_rows=0
    )
    return make_pool(replace(config, env=env), seed=derive_seed(seed, 7), ordered=True, evaluation=True)


# ---------------------------------------------------------------- the games of two players


def _play_pair(pool: Pool, acts: Sequence[Act], games: int) -> Iterator[tuple[bool, Outcome]]:
    """Of each game that counts: whether sides were swapped, and its result as the first side sees it."""
    series = _Series(pool, games)
    while series.left.any():
        ready = pool.recv(0.1)
        if ready is None:
            continue
        for env, outcomes in series.ended(ready):
            result = _result(outcomes, pool, env)
            if series.take(env):
                yield bool(series.swapped[env]), result
        _answer(pool, ready, series, acts)


def _answer(pool: Pool, ready: Ready, series: _Series, acts: Sequence[Act]) -> None:
    """Ask both players for the actions of all their rows, each once, and send them."""
    action, count = pool.spec.action, len(ready.rows)
    discrete = np.zeros((count, action.num_discrete), np.int64)
    continuous = np.zeros((count, action.num_continuous), np.float32)
    there = ready.event != Event.LOST
    for player, act in enumerate(acts):
        its_turn = there & (ready.event != Event.INACTIVE) & (series.player[ready.rows] == player)
        if its_turn.any():
            discrete[its_turn], continuous[its_turn] = act(ready, its_turn)
    pool.send(ready.rows[there], discrete[there], continuous[there])


class _Series:
    """The games of two players: who plays what, and what is still to be played.

    swapped: [E] bool, environments in which the second player is on the first side.
    player: [rows] 0 or 1.        left: [E] games that each environment has still to play; lost ones are played again.
    """

    def __init__(self, pool: Pool, games: int) -> None:
        self._rows_per_env = pool.spec.rows_per_env
        tasks = pool.task_ids[:: self._rows_per_env]  # [E]: rows of an environment are consecutive
        envs = np.arange(len(tasks))
        self.swapped = envs // len(pool.tasks) % 2 == 1  # both ways in each task, as tasks are dealt in turn
        sides = np.arange(pool.num_rows) % self._rows_per_env % 2
        self.player = (sides + self.swapped.repeat(self._rows_per_env)) % 2
        self.left = np.zeros(len(tasks), np.int64)
        for swapped, share in ((False, (games + 1) // 2), (True, games // 2)):
            where = np.flatnonzero(self.swapped == swapped)
            self.left[where] = quota(tasks[where], share)

    def take(self, env: int) -> bool:
        """A game of the environment ended; whether it counts."""
        counts = bool(self.left[env] > 0)
        self.left[env] -= counts
        return counts

    def ended(self, ready: Ready) -> list[tuple[int, list[float | None]]]:
        """(environment, outcome of each of its rows) of the games that ended."""
        told = [record for record in ready.records if "outcomes" in record]
        return [(record["row"] // self._rows_per_env, record["outcomes"]) for record in told]


def _result(outcomes: Sequence[float | None], pool: Pool, env: int) -> Outcome:
    """The result that the first side sees: the best outcome of its rows against the best of the others."""
    task = pool.tasks[pool.task_ids[env * pool.spec.rows_per_env]]
    sides = [[declared(outcome) for outcome in outcomes[side::2]] for side in (0, 1)]
    if None in sides[0] + sides[1]:
        raise EnvError(
            f"{task}: a game ended, and who won was not declared for each agent: {outcomes}. Ratings look at no "
            "rewards; set info['outcome'] of each agent's last step: 1 for a win, 0 for a draw, -1 for a loss "
            "(docs/agents.md, 'Who won')."
        )
    first, second = (next(one for one in _BEST if one in side) for side in sides)
    result = pair_result(first, second)
    if result is None:
        raise EnvError(
            f"{task}: a game declared a {first} for both sides ({outcomes}), which says nothing of who is stronger. "
            "Declare 0 for a draw; leave out bots and others who can win in their place; team mates cannot be "
            "opponents (sides are every second agent)."
        )
    return result
