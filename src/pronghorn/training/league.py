"""The league: carries out what matchmaker, ratings and population-based training decide about the members of a run.

They take numbers and return decisions (pronghorn.population); here are the policies that these are about. Threads: the
sampler's asks for seats, a learner's reports after each iteration, the main one writes ratings. One lock keeps the
decisions in order. Where a member's lock is needed too, it is taken first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.config import Config, Hyperparameters, derive_seed
from pronghorn.config_population import PopulationConfig
from pronghorn.errors import ConfigError
from pronghorn.evaluation.players import load_player
from pronghorn.population.matchmaking import Match, Matchmaker, Player
from pronghorn.population.pbt import PBT, REWARD, Decision, check_layout
from pronghorn.population.ratings import Outcome, Rating, Ratings
from pronghorn.training.checkpoint import STATE_FILE, Checkpoint, Frozen, write_atomically
from pronghorn.training.guests import Guests
from pronghorn.training.member import Member
from pronghorn.training.metrics import POPULATION_FILE, RATINGS_FILE, read_lines
from pronghorn.training.sampler import Seats
from pronghorn.training.seats import DealtSeats, MatchSeats, Result
from pronghorn.types import EnvSpec, Pool, Ready
from pronghorn.untrusted import number, usable, whole

RATINGS_EVERY_S = 10.0
EPISODES_PER_ROW = 2  # of a round: with fewer, the short ones, which end first, would speak for all
RATINGS_SHARE = 0.02  # of time, at most
MAX_RATED = 200  # players; beyond it those that left the pool longest ago are forgotten
_LOG = logging.getLogger("pronghorn")
_POINTS: dict[Outcome, float] = {"win": 1.0, "draw": 0.5, "loss": 0.0}


class League:
    """All that members of a run have to do with each other and with those who are not trained."""

    def __init__(
        self, config: Config, pool: Pool, members: Sequence[Member], guests: Guests, seed: int,
        time_s: Callable[[], float],
    ) -> None:  # fmt: skip
        """seed: of what may differ in a resumed run. time_s: seconds that the run has taken, over resumes.

        Raises ConfigError for what this environment cannot do.
        """
        self.config, self.pool, self.members, self.guests = config, pool, list(members), guests
        self.run_dir, self._time_s = config.run_path, time_s
        self._lock = threading.RLock()
        spec, plays_games = pool.spec, bool(pool.spec.agents)
        check_population(config, spec)
        self._names = [f"member:{i}" for i in range(len(members))]
        self._base = base_values(config, spec)
        self.pbt = PBT(self._rules(), self._base, derive_seed(config.seed, 10)) if len(members) > 1 else None
        self.matchmaker: Matchmaker | None = None
        self.ratings = Ratings()
        if plays_games:
            seeds = derive_seed(seed, 11)
            self.matchmaker = Matchmaker(config.selfplay, spec.rows_per_env, len(members), seeds)
        self.active = list(range(len(members)))
        self.snapshots: dict[str, Frozen] = {}
        self._points: list[deque[float]] = [deque(maxlen=config.population.objective_episodes) for _ in members]
        # Whole episodes that each had had when it was overwritten last; None: it never was.
        self._whole_at_copy: list[int | None] = [None] * len(members)
        self._rewards: list[dict[str, float]] = [{} for _ in members]
        self._rewards_of_env: dict[int, Any] = {}
        self._fitted: dict[str, Rating] = {}
        self._next_ratings_s = 0.0
        self._warned = False
        self._matches: MatchSeats | None = None
        if self.matchmaker:
            self._matches = MatchSeats(self.matchmaker, self, len(members), lambda: self.active)
        together = spec.rows_per_env if spec.rewards else 1  # an environment has one table of them for all its rows
        dealt = DealtSeats(pool.task_ids, lambda: self.active, self._begin_row, together=together)
        self.seats: Seats = _Locked(self._matches or dealt, self._lock)

    def _rules(self) -> PopulationConfig:
        """The settings of the population, with the episodes of a round filled in."""
        settings = self.config.population
        rows = -(-self.pool.num_rows // settings.num_slots)  # of each member that trains
        return replace(settings, period_episodes=settings.period_episodes or EPISODES_PER_ROW * rows)

    def start(self, saved: Checkpoint | None) -> None:
        """Begin, or go on from a checkpoint; before anybody acts."""
        for i, name in enumerate(self.config.selfplay.scripts):
            script = load_player(name).begin(self.pool, derive_seed(self.config.seed, 12, i))
            self.guests.add_script(f"script:{name}", script)
        if saved is not None:
            self._load(saved)
            for member in self.members:  # where this resume begins with snapshots
                self._take_snapshot(member)
            return
        for name in self._names if self.matchmaker else ():
            self.ratings.add(name)
        for name in self.config.selfplay.scripts:
            self.ratings.add(f"script:{name}")
        if self.pbt:
            self._apply(self.pbt.start())
            self.active = self.pbt.active()
        for member in self.members:
            self._take_snapshot(member)

    # ------------------------------------------------------------ matches (the sampler's thread)

    def begin(self, env: int, match: Match) -> None:
        """See `seats.Host`."""
        sides = [p.member if learns else match.learner for p, learns in zip(match.players, match.learns, strict=True)]
        tables = [self._rewards[member] for member in sides]
        self._set_rewards(env, tables)

    def guest(self, player: Player) -> str:
        """See `seats.Host`. A member that rests plays with the weights that it has now."""
        if player.kind != "member":
            return str(player)
        newest = self.members[player.member].newest  # read once: its learner may still have a batch to train on
        newest.ready.sync()
        name = f"{player}#{newest.lineage}.{newest.version}"
        self.guests.add(name, newest.tensors)
        return name

    def seat(self, rows: NDArray[np.int64], guest: str) -> None:
        """See `seats.Host`."""
        self.guests.seat(rows, guest)

    def results(self, games: Sequence[Result]) -> None:
        """See `seats.Host`."""
        for first, second, outcome in games:
            self.ratings.record(first, second, outcome)
            for player, points in ((first, _POINTS[outcome]), (second, 1.0 - _POINTS[outcome])):
                if player in self._names:
                    self._points[self._names.index(player)].append(points)

    def _begin_row(self, row: int, member: int) -> None:
        self._set_rewards(row // self.pool.spec.rows_per_env, [self._rewards[member]])

    def _set_rewards(self, env: int, tables: list[dict[str, float]]) -> None:
        """Weights of shaped rewards for each side of an environment, where they differ from what it has."""
        if any(tables) and self._rewards_of_env.get(env) != tables:
            self._rewards_of_env[env] = [dict(table) for table in tables]
            same = all(table == tables[0] for table in tables)  # one is enough, for games that know no other
            self.pool.set_option("rewards", tables[0] if same else tables, env=env)

    # ------------------------------------------------------------ after an iteration (a learner's thread)

    def after_iteration(self, member: Member) -> None:
        """Keep a snapshot if one is due; end a round of the population if this member was the last to arrive."""
        with contextlib.ExitStack() as stack:
            if self.pbt:  # its decisions copy members, so all must stand still
                for other in self.members:
                    stack.enter_context(other.lock)
            stack.enter_context(self._lock)
            self._take_snapshot(member)
            self._forget_absent()
            if self.pbt:
                frames = member.learner.steps * self.pool.spec.frame_skip
                objective = self.objective(member) if frames >= self.pbt.round_frames else None
                self._warn_of_waiting(member, frames, objective)
                self._apply(self.pbt.report(member.index, frames, member.tracker.num_whole, objective))
                self.active = self.pbt.active(self.active) or self.active

    def _warn_of_waiting(self, member: Member, frames: int, objective: float | None) -> None:
        """Once, if a round cannot end because nothing tells the objective, such as a misspelt name."""
        assert self.pbt is not None
        settings = self.config.population
        late, episodes = frames >= self.pbt.round_frames, member.tracker.num_episodes
        if late and objective is None and episodes >= settings.objective_episodes and not self._warned:
            self._warned = True
            text = "the population cannot compare its policies: no episode of policy %d told %r so far (%d have ended)"
            _LOG.warning(text + "; --population.objective names it", member.index, settings.objective, episodes)

    def objective(self, member: Member) -> float | None:
        """What members are compared by; None while there is none."""
        settings = self.config.population
        if settings.objective == "win_rate":
            points = self._points[member.index]
            return float(np.mean(points)) if points else None
        if settings.objective == "rating":
            return self.ratings.fit()[self._names[member.index]].elo
        return member.tracker.recent(settings.objective, settings.objective_episodes)

    def _take_snapshot(self, member: Member) -> None:
        if self.matchmaker is None or not self.matchmaker.snapshot_due(member.index, member.learner.steps):
            return
        snapshot, _ = self.matchmaker.add_snapshot(member.index, member.learner.steps)
        member.newest.ready.sync()
        self._freeze(snapshot, Frozen(member.newest.tensors))
        self.ratings.freeze(self._names[member.index], str(snapshot))

    def _freeze(self, snapshot: Player, frozen: Frozen) -> None:
        self.snapshots[snapshot.name] = frozen
        self.guests.add(str(snapshot), frozen.weights)

    def _forget_absent(self) -> None:
        """Forget the weights of those who are neither in the pool nor in a game; of many, the oldest results too."""
        if self.matchmaker is None or self._matches is None:
            return
        pool = {player.name for player in self.matchmaker.pool}
        for name in self.snapshots.keys() - pool:
            del self.snapshots[name]
        self.guests.keep({f"snapshot:{name}" for name in pool} | self._matches.guests())
        present = {f"snapshot:{name}" for name in pool} | set(self._names) | self._matches.guests()
        past = [p for p in self.ratings.players if p not in present and not p.startswith("script:")]
        for player in past[: max(0, len(self.ratings.players) - MAX_RATED)]:
            self.ratings.forget(player)

    def _apply(self, decisions: Sequence[Decision]) -> None:
        """Write them down, then carry them out in their order. All locks are held, or no thread runs yet."""
        if not decisions:
            return
        steps = sum(member.learner.steps for member in self.members)
        lines = [json.dumps({"time_s": round(self._time_s(), 3), "steps": steps, **d.to_json()}) for d in decisions]
        _append(self.run_dir / POPULATION_FILE, lines)
        for decision in decisions:
            member = self.members[decision.member]
            if decision.donor is not None:
                member.become(self.members[decision.donor])
                self._points[member.index] = self._points[decision.donor].copy()
                self._whole_at_copy[member.index] = member.tracker.num_whole
                if self.matchmaker:
                    self.matchmaker.overwrite(member.index, decision.donor)
                    self.ratings.branch(self._names[member.index], self._names[decision.donor])
            self._set_hyper(member, decision.hyper)

    def _set_hyper(self, member: Member, hyper: Mapping[str, float]) -> None:
        assert self.pbt is not None
        # The others are not the population's: schedules move them, and a resume may change them.
        own = {name: value for name, value in hyper.items() if name in self.pbt.ranges}
        member.learner.set_hyper(**{k: v for k, v in own.items() if not k.startswith(REWARD)})
        self._rewards[member.index] = {k[len(REWARD) :]: v for k, v in hyper.items() if k.startswith(REWARD)}

    # ------------------------------------------------------------ what it says (the main thread)

    @property
    def leader(self) -> int:
        """The member that is best by the objective, as far as known.

        One that was overwritten is known by its donor's episodes at first. It may have become worse since, with
        hyper-parameters of its own, so it comes behind all who are known by their own.
        """

        def known(member: Member) -> float:
            if self.config.population.objective == "rating":  # as they were fitted last
                rating = self._fitted.get(self._names[member.index])
                return rating.elo if rating else -np.inf
            objective = self.objective(member)
            return -np.inf if objective is None else objective

        def is_itself(member: Member) -> bool:
            since, enough = self._whole_at_copy[member.index], self.config.population.objective_episodes
            return since is None or member.tracker.num_whole - since >= enough

        with self._lock:
            return max(self.members, key=lambda m: (is_itself(m), known(m), -m.index)).index

    def describe(self) -> str:
        """In a few words, for the run's header."""
        s, words = self.config.selfplay, []
        if self.pbt:
            p = self.config.population
            words.append(f"{p.members}, {p.num_slots} at a time, compared by {p.objective}")
            words.append(f"first after {p.burn_in_frames:,} frames each, then every {p.period_frames:,}")
        if self.matchmaker:
            kinds = {"itself": s.self_weight, "other policies": s.member_weight, "snapshots": s.snapshot_weight,
                     "scripts": s.script_weight}  # fmt: skip
            total = sum(kinds.values())
            words.append("opponents: " + ", ".join(f"{w / total:.0%} {kind}" for kind, w in kinds.items() if w))
        return "; ".join(words)

    def report(self) -> dict[str, float]:
        """Of each policy, by its number: what metrics.jsonl has of it."""
        out: dict[str, float] = {}
        with self._lock:
            for i, name in enumerate(self._names):
                if self._points[i]:
                    out[f"policy/{i}/win_rate"] = float(np.mean(self._points[i]))
                if name in self._fitted:
                    out[f"policy/{i}/rating"] = self._fitted[name].elo
            if self.matchmaker:
                out["pool_size"] = len(self.snapshots)
            if self.pbt:
                out["population_round"] = self.pbt.round
        return out

    def write_ratings(self, *, last: bool = False) -> None:
        """A line of ratings.jsonl if it is time: to fit all games again takes milliseconds, of many players seconds."""
        if self.matchmaker is None or (time.monotonic() < self._next_ratings_s and not last):
            return
        with self._lock:
            games = self.ratings.state()
            pool = [str(player) for player in self.matchmaker.pool]
        if not games["games"]:
            return
        copy, start = Ratings(), time.monotonic()
        copy.load_state(games)
        self._fitted = copy.fit()
        now = time.monotonic()
        known = {name: {"elo": r.elo, "stderr": r.stderr, "games": r.games} for name, r in self._fitted.items()}
        steps = sum(member.learner.steps for member in self.members)
        line = {"time_s": round(self._time_s(), 3), "steps": steps, "ratings": known, "pool": pool}
        _append(self.run_dir / RATINGS_FILE, [json.dumps(line)])
        # The fit grows with the cube of the players, and takes cores from training.
        self._next_ratings_s = now + max(RATINGS_EVERY_S, (now - start) / RATINGS_SHARE)

    # ------------------------------------------------------------ files

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON values. Matches in progress are left out: their games begin anew."""
        with self._lock:
            out: dict[str, Any] = {"points": [list(points) for points in self._points], "active": self.active,
                                   "whole_at_copy": self._whole_at_copy}
            if self.matchmaker:
                out |= {"matchmaker": self.matchmaker.state() | {"matches": []}, "ratings": self.ratings.state()}
            if self.pbt:
                out["pbt"] = self.pbt.state()
            return out

    def _load(self, saved: Checkpoint) -> None:
        with usable(saved.path / STATE_FILE):
            self._restore(saved)

    def _restore(self, saved: Checkpoint) -> None:
        state = saved.state.get("league")
        if state is None or len(state["points"]) != len(self.members):
            rule = "cannot change when a run is resumed"
            raise ConfigError("population.members, selfplay", len(self.members), rule, "Start a new run.")
        for own, points in zip(self._points, state["points"], strict=True):
            own.extend(map(number, points))
        self.active = [whole(i) for i in state["active"]]
        self._whole_at_copy = [None if n is None else whole(n) for n in state.get("whole_at_copy", self._whole_at_copy)]
        if len(self._whole_at_copy) != len(self.members) or not {*self.active} <= {*range(len(self.members))}:
            raise ValueError("its members are not those of this run")
        if self.pbt:
            self.pbt.load_state(state["pbt"])
            for member in self.members:
                self._set_hyper(member, self.pbt.hyper(member.index))
            rounds = self.pbt.round
            _cut(self.run_dir / POPULATION_FILE, lambda line: line["round"] <= rounds)
        if self.matchmaker:
            self.matchmaker.load_state(state["matchmaker"])
            self.ratings.load_state(state["ratings"])
            for name in self.config.selfplay.scripts:
                if f"script:{name}" not in self.ratings.players:  # new with this resume
                    self.ratings.add(f"script:{name}")
            for player in self.matchmaker.pool:
                self._freeze(player, saved.snapshots[player.name])
            steps = sum(policy.state["learner"]["steps"] for policy in saved.policies)
            _cut(self.run_dir / RATINGS_FILE, lambda line: line["steps"] <= steps)


class _Locked:
    """Seats that are taken under the league's lock."""

    def __init__(self, seats: Seats, lock: AbstractContextManager[Any]) -> None:
        self._seats, self._lock = seats, lock

    def take(self, ready: Ready, begins: NDArray[np.bool_]) -> NDArray[np.int64]:
        """See `Seats`."""
        with self._lock:
            return self._seats.take(ready, begins)


def base_values(config: Config, spec: EnvSpec) -> dict[str, float]:
    """All values that may change while a run goes on, at its start."""
    hyper = {k: float(v) for k, v in vars(Hyperparameters.from_config(config)).items() if k != "version"}
    return hyper | {REWARD + name: float(weight) for name, weight in spec.rewards.items()}


def check_population(config: Config, spec: EnvSpec) -> None:
    """Rules between the sections of a resolved config and its environment. Raises ConfigError."""
    selfplay, population = config.selfplay, config.population
    if selfplay.meets_others and not spec.agents:
        rule = "has no several agents that could meet each other"
        raise ConfigError("env.id", config.env.id, rule, "Use a game of several agents, or drop the selfplay settings.")
    if population.members > 1:
        # Games draw their learner from all members; else each task's rows, or environments, are dealt among them.
        dealt = config.num_envs * (1 if spec.rewards else spec.rows_per_env) // len(config.env_names)
        num_envs, schedule = config.num_envs if spec.agents else dealt, config.learner.lr_schedule
        check_layout(population, num_envs=num_envs, lr_schedule=schedule, has_matches=selfplay.meets_others,
                     member_weight=selfplay.member_weight)  # fmt: skip
    if "epochs" in population.mutable and population.members > 1 and config.learner.epochs < 2:
        rule = "is mutable, and must then begin at 2 or more"
        raise ConfigError("learner.epochs", config.learner.epochs, rule, "Add --learner.epochs 2.")


def _append(path: Path, lines: Sequence[str]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def _cut(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Leave out the lines of what will be done again, and any that a crash tore."""
    if path.exists():
        with usable(path):
            kept = [json.dumps(line) + "\n" for line in read_lines(path) if keep(line)]
        write_atomically(path, "".join(kept).encode())
