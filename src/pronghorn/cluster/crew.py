"""The actors of a run: placed, watched, and replaced within a budget. It knows neither unrolls nor weights.

    launched ──hello──▶ ──build──▶ ──begin──▶ READY ──order──▶ … ──answer──▶ …
       any ──ended, failed, or silent for too long──▶ DOWN ──back-off, and room──▶ launched, as another incarnation

Whatever an actor says after it was given up is not heard: nobody waits for its calls any more, and what it sends names
its incarnation. An actor of another run has no calls here at all, and what it sends names its run.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

from pronghorn.cluster.actor import Answer, Failure, Order, Plan, versions
from pronghorn.cluster.env_host import Actions, Rows
from pronghorn.cluster.wire import Bytes
from pronghorn.config import Config
from pronghorn.defaults import resolve_env
from pronghorn.envs.registry import registered
from pronghorn.envs.restarts import RestartBudget
from pronghorn.errors import ActorDied, ClusterError
from pronghorn.settings_file import to_toml
from pronghorn.types import EnvSpec

WINDOW_S = 600.0  # of the restart budget
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before an actor is replaced; doubled each time it does not come to work
STARTING_S = 60.0  # that an actor may take to start, besides its environments

_LOG = logging.getLogger("pronghorn")


class Engine(Protocol):
    """What carries calls to actors and brings results back: Ray (engine.py), or a stand-in for tests."""

    def room(self) -> int:
        """How many more actors there is room for now."""

    def place(self, index: int, incarnation: int) -> Any:
        """A handle of a new actor, which starts somewhere."""

    def call(self, handle: Any, method: str, *args: Any) -> Hashable:
        """Ask an actor to call a method of its own after those that it was asked for before; a token of the call."""

    def ready(self, tokens: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those of the calls that have ended, in their order; waits so long for the first of them."""

    def result(self, token: Any) -> Any:
        """What the call returned. Raises ActorGone."""

    def share(self, weights: Bytes) -> Any:
        """Make an argument of `exchange` known, once, however many actors get it."""

    def kill(self, handle: Any) -> None:
        """End an actor, whatever it does."""

    def describe(self) -> str:
        """In a few words, for the run's header."""

    def close(self) -> None:
        """End all that was started; safe to call twice."""


class ActorGone(Exception):
    """An actor's process has ended, or its machine is lost; says how."""


class Phase(Enum):
    """Of an actor's life."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "being replaced"


@dataclass
class _Seat:
    """An actor's place in the crew. heard: when it last said something, or was first asked to."""

    index: int
    incarnation: int = -1
    phase: Phase = Phase.DOWN
    handle: Any = None
    host: str = "a machine unknown yet"
    heard: float = 0.0
    due: float = 0.0  # when it is to be replaced
    num_failed: int = 0  # lives in a row without an answer
    num_calls: int = 0  # unanswered
    num_orders: int = 0  # of these, orders
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lost:
    """An actor was given up, and with it all that it had under way."""

    cause: str


class Crew:
    """An `Experience` (types.py) of remote actors, by number 0 … N-1. One thread calls it once the run has begun."""

    def __init__(self, config: Config, engine: Engine, *, seed: int) -> None:
        """Start all actors and wait until their environments run.

        Raises ClusterError: an actor's machine has other versions, or its environments do not start; names the host.
        """
        config = resolve_env(config)
        self.run, self.restarts, self.num_replaced = uuid.uuid4().hex, 0, 0
        self._config, self._engine, self._cluster = config, engine, config.cluster
        self._plan = Plan(to_toml(config), seed, registered(), os.getcwd(), tuple(map(os.path.abspath, sys.path)))
        self._resolved: dict[str, Any] | None = None
        self._budget = RestartBudget(config.cluster.restart_budget, WINDOW_S)
        self._calls: dict[Any, tuple[int, str]] = {}  # by token, oldest first: whose, and which method
        self._seats = [_Seat(index) for index in range(config.cluster.actors)]
        self._looked = self._had_one = time.monotonic()
        self._waits_for_room = False
        try:
            for seat in self._seats:
                self._launch(seat)
            while not all(seat.facts for seat in self._seats):
                self.poll(0.1)
        except BaseException:
            self.close()
            raise
        self._know_rows()

    def _know_rows(self) -> None:
        """The rows of all actors, one actor after another."""
        facts = self._seats[0].facts
        self.spec, self.rows_per_actor = EnvSpec.from_json(facts["spec"]), int(facts["num_rows"])
        self.num_rows = len(self._seats) * self.rows_per_actor
        self.tasks = tuple(facts["tasks"])
        self.task_ids = np.tile(np.asarray(facts["task_ids"], np.int64), len(self._seats))
        units = np.asarray(facts["unit_ids"], np.int64)
        self.unit_ids = np.concatenate([units + i * (int(units.max()) + 1) for i in range(len(self._seats))])

    def begin(self, config: Config) -> None:
        """Tell the resolved settings to all actors, which are ready for orders then."""
        self._resolved = to_toml(config)
        for seat in self._seats:
            if seat.facts:
                self._call(seat, "begin", self.run, self._resolved)

    # ------------------------------------------------------------ orders and answers

    @property
    def num_ready(self) -> int:
        """Actors at work."""
        return sum(seat.phase is Phase.READY for seat in self._seats)

    def ready(self, most: int) -> list[int]:
        """Actors at work that have fewer than `most` orders unanswered."""
        return [seat.index for seat in self._seats if seat.phase is Phase.READY and seat.num_orders < most]

    def incarnation(self, index: int) -> int:
        """Of the actor of that number: how often it was replaced."""
        return self._seats[index].incarnation

    def order(self, index: int, order: Order | Actions, weights: Any) -> None:
        """Send an order, and weights that the engine shared, or None."""
        self._call(self._seats[index], "exchange", order, weights)

    def poll(self, timeout_s: float) -> list[tuple[int, Answer | Rows | Lost]]:
        """Answers that have come, oldest order first, and actors that were lost; replaces those that are due.

        Raises ActorDied past the budget, ClusterError for an actor that cannot start at all.
        """
        self._replace_due()
        self._excuse()
        done = self._engine.ready(list(self._calls), timeout_s) if self._calls else []
        if not self._calls:
            time.sleep(timeout_s)
        events: list[tuple[int, Answer | Rows | Lost]] = []
        for token in done:
            if token in self._calls:  # not of an actor that was given up in this round
                events += self._hear(token)
        for seat in self._seats:
            if self._is_silent(seat):
                why = f"said nothing for {self._limit_s(seat):g} s"
                events.append((seat.index, self._lose(seat, why, final=False)))
        return events

    def give_up(self, index: int, cause: str) -> Lost:
        """Replace an actor whose answers are of no use."""
        return self._lose(self._seats[index], cause, final=False)

    def share(self, weights: Bytes) -> Any:
        """See `Engine.share`."""
        return self._engine.share(weights)

    # ------------------------------------------------------------ lives of actors

    def _launch(self, seat: _Seat) -> None:
        seat.incarnation += 1
        seat.phase, seat.handle = Phase.STARTING, self._engine.place(seat.index, seat.incarnation)
        seat.heard, seat.facts, seat.host = time.monotonic(), {}, "a machine unknown yet"
        self._call(seat, "hello")
        self._call(seat, "build", self._plan)
        if self._resolved is not None:
            self._call(seat, "begin", self.run, self._resolved)

    def _call(self, seat: _Seat, method: str, *args: Any) -> None:
        if not seat.num_calls:
            seat.heard = time.monotonic()
        seat.num_calls += 1
        seat.num_orders += method == "exchange"
        self._calls[self._engine.call(seat.handle, method, *args)] = seat.index, method

    def _hear(self, token: Any) -> list[tuple[int, Answer | Rows | Lost]]:
        """What a call came to."""
        index, method = self._calls.pop(token)
        seat = self._seats[index]
        seat.num_calls -= 1
        seat.num_orders -= method == "exchange"
        try:
            result = self._engine.result(token)
        except ActorGone as gone:
            # One that ends again and again before anything was trained will not come to work.
            hopeless = self._resolved is None and seat.num_failed >= 2
            return [(index, self._lose(seat, str(gone), final=hopeless))]
        seat.heard = time.monotonic()
        if isinstance(result, Failure):
            # What fails by a rule when the run begins would fail on each of its replacements.
            final = method != "exchange" and self._resolved is None
            return [(index, self._lose(seat, f"could not go on: {result}", final=final))]
        if method == "hello":
            seat.host = f"{result['host']} (process {result['pid']})"
            require_same(versions(), result["versions"], seat.host)
        elif method == "build":
            self._built(seat, result)
        elif method == "begin":
            seat.phase = Phase.READY
        else:
            seat.num_failed = 0
            return [(index, result)]
        return []

    def _built(self, seat: _Seat, facts: dict[str, Any]) -> None:
        first = next((other.facts for other in self._seats if other.facts), facts)
        if (facts["spec"], facts["num_rows"]) != (first["spec"], first["num_rows"]):
            raise ClusterError(
                f"actor {seat.index} on {seat.host} has other environments than the others: {facts['num_rows']} rows "
                f"of {facts['spec']}, and not {first['num_rows']} of {first['spec']}. Install the same versions "
                "everywhere."
            )
        seat.facts = facts

    def _lose(self, seat: _Seat, cause: str, *, final: bool) -> Lost:
        """Give an actor up. final: another one would do no better."""
        cause = f"actor {seat.index} on {seat.host} {cause}"
        self._calls = {token: call for token, call in self._calls.items() if call[0] != seat.index}
        seat.num_calls = seat.num_orders = 0
        self._engine.kill(seat.handle)
        if final:
            raise ClusterError(f"{cause}\nThe run needs it to begin: nothing was trained.")
        reason = self._budget.why_not(seat.index, None)
        if reason:
            raise ActorDied(f"{cause}\n{reason.replace('restart_budget, restart_window_s', 'cluster.restart_budget')}")
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**seat.num_failed)
        seat.phase, seat.due, seat.num_failed = Phase.DOWN, time.monotonic() + pause, seat.num_failed + 1
        used = f"{self._budget.num_used} of {self._budget.budget}"
        _LOG.warning("%s\nreplacing it in %g s: %s replacements used", cause, pause, used)
        return Lost(cause)

    def _replace_due(self) -> None:
        now = time.monotonic()
        due = [seat for seat in self._seats if seat.phase is Phase.DOWN and seat.due <= now]
        if self.num_ready or not due:
            self._had_one = now
        if not due:
            return
        room = self._engine.room()
        for seat in due[: max(0, room)]:
            self.num_replaced += 1
            self._launch(seat)
        if room < len(due):
            self._wait_for_room(now, due[max(0, room) :])

    def _wait_for_room(self, now: float, due: Sequence[_Seat]) -> None:
        """Others go on meanwhile; a run without any actor ends."""
        for seat in due:
            seat.due = now + 1.0
        if not self._waits_for_room:
            _LOG.warning("the cluster has no room to replace %d actor(s); the others go on", len(due))
            self._waits_for_room = True
        if now - self._had_one > STARTING_S:
            raise ActorDied(f"no actor is left, and for {STARTING_S:g} s the cluster had no room to replace one")

    def _limit_s(self, seat: _Seat) -> float:
        """How long an actor may say nothing."""
        starting = STARTING_S + self._config.env.start_timeout_s
        return self._cluster.silent_s if seat.phase is Phase.READY else starting

    def _is_silent(self, seat: _Seat) -> bool:
        asked = seat.num_calls > 0 and seat.phase is not Phase.DOWN
        return asked and time.monotonic() - seat.heard > self._limit_s(seat)

    def _excuse(self) -> None:
        """Nobody is blamed for a time in which this process did not listen, as when it was stopped (Ctrl-Z)."""
        now = time.monotonic()
        away_s, self._looked = now - self._looked, now
        if away_s > self._cluster.silent_s / 2:
            for seat in self._seats:
                seat.heard += away_s

    # ------------------------------------------------------------ what is told of it

    def describe(self) -> str:
        """One line for the run's header."""
        hosts = Counter(seat.host.partition(" ")[0] for seat in self._seats)
        where = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        return f"{len(self._seats)} actors ({where}) {self._engine.describe()}, each {self._seats[0].facts['describe']}"

    def state(self) -> list[str]:
        """What every actor is doing, a line each. Any thread may ask."""
        now = time.monotonic()
        return [
            f"actor {seat.index} on {seat.host}: {seat.phase.value}, {seat.num_calls} calls unanswered, last heard "
            f"{now - seat.heard:.0f} s ago"
            for seat in self._seats
        ]

    def close(self) -> None:
        """End all actors, their environments first, as far as they still listen."""
        self._calls = {}
        with_handle = [seat for seat in self._seats if seat.handle is not None and seat.phase is not Phase.DOWN]
        for seat in self._seats:
            seat.phase = Phase.DOWN
        closing = [self._engine.call(seat.handle, "close") for seat in with_handle]
        until = time.monotonic() + 5.0
        while closing and (remaining := until - time.monotonic()) > 0:
            done = self._engine.ready(closing, remaining)
            closing = [token for token in closing if token not in done]
        self._engine.close()


def require_same(own: dict[str, str], theirs: dict[str, str], host: str) -> None:
    """Refuse an actor whose versions do not fit; a difference in the last number alone is only told.

    Raises ClusterError that names all that differs.
    """
    differ = {name: (version, theirs.get(name, "none")) for name, version in own.items() if theirs.get(name) != version}
    wrong = [name for name, (a, b) in differ.items() if name in ("pronghorn", "wire") or _minor(a) != _minor(b)]
    text = ", ".join(f"{name} {theirs_} (here {own_})" for name, (own_, theirs_) in differ.items())
    if wrong:
        raise ClusterError(
            f"{host} has other versions than the learner: {text}. An actor must have the same version of Pronghorn, "
            "and of Python and torch the same but for the last number: install the same on all machines."
        )
    if differ:
        _LOG.warning("%s has other versions than the learner, which should do: %s", host, text)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
