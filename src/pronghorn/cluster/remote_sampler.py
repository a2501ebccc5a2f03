"""The learner's end of remote actors: grants them slots, sends weights, and writes what they send into the slots.

To the store an actor is one more writer. A slot that is granted is FILLING here, with the version under which the
actor begins it at the earliest, from the moment of the grant until its unroll has come. So the rule that bounds the
lag, and the back-pressure of a full store, are those of any other writer (store.py); nothing is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pronghorn.cluster.actor import Answer, Order, pack_weights
from pronghorn.cluster.crew import Crew, Lost
from pronghorn.cluster.intake import Intake
from pronghorn.cluster.wire import Block, Bytes, Origin, Schema
from pronghorn.config import Config
from pronghorn.errors import ClusterError, WireError
from pronghorn.training.metrics import EpisodeTracker
from pronghorn.training.player import Publisher
from pronghorn.training.sampler import POLL_S, STAGES, StepLoop
from pronghorn.training.store import Slots, Store, stored_leaves
from pronghorn.training.watchdog import ENVIRONMENTS

NO_SLOT = -1
ORDERS = 2  # unanswered at a time: an actor has its next order before it has answered the last
ANSWER_S = 1.0  # an actor answers at least this often


@dataclass
class _Book:
    """What is known of one actor in its present life.

    held: [in_flight] slot of the store that backs each of its own; NO_SLOT: none does.
    version: of the weights that it was sent last.  blocked: it waits for grants.
    """

    held: Slots
    version: int = -1
    blocked: bool = True
    seconds: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0
    lost: int = 0
    restarts: int = 0


class RemoteSampler(StepLoop):
    """Stands where a `Sampler` would, for actors on other machines."""

    def __init__(self, crew: Crew, config: Config, store: Store, publisher: Publisher, tracker: EpisodeTracker) -> None:
        super().__init__(STAGES)
        self.elsewhere = dict.fromkeys(STAGES, 0.0)
        self.crew, self.store, self.publisher, self.tracker = crew, store, publisher, tracker
        self.num_steps, self._num_unrolls, self._num_bytes = 0, 0, 0
        leaves, state_size = stored_leaves(crew.spec, config.model), store.state.shape[1]
        self._schema = Schema(leaves, crew.spec.action, store.unroll_length, state_size)
        self._intake = Intake(store)
        self._in_flight = config.cluster.unrolls_per_actor(crew.rows_per_actor)
        self._books = [self._new_book() for _ in range(config.cluster.actors)]
        self._shared: tuple[int, Any] = (-1, None)  # version, and the weights as the engine passes them on
        self._shared_at, self._every_s = -np.inf, config.cluster.weights_every_s
        # Slots are granted under the version that is shared. One that lies further back would make them so old from the
        # start that a store full of them could not be trained on within max_lag (rules.validate_sizes).
        self._most_behind = config.max_lag - -(-store.num_slots // store.batch_unrolls)
        crew.begin(config)

    def _new_book(self) -> _Book:
        return _Book(np.full(self._in_flight, NO_SLOT, np.int64))

    def counts(self) -> dict[str, int]:
        """Of unrolls and actors, by their names in docs/metrics.md."""
        return {
            "remote_unrolls": self._num_unrolls, "remote_bytes": self._num_bytes, "actors": self.crew.num_ready,
            "actors_replaced": self.crew.num_replaced,
        }  # fmt: skip

    def request_reseed(self, seed: int) -> None:
        """Raises ClusterError: only runs that take turns begin anew at a save; with remote actors they are refused."""
        raise ClusterError("remote actors cannot begin anew at a save, as --max-lag 0 and 1 ask: add --max-lag 16")

    def step(self) -> None:
        """Send orders to actors that have too few, those with the fewest slots first; take what came back."""
        start = time.perf_counter()
        self.stage.works("sends orders")
        for index in sorted(self.crew.ready(ORDERS), key=lambda index: int((self._books[index].held >= 0).sum())):
            self._order(index)
        ordered, blocked = time.perf_counter(), all(book.blocked for book in self._books)
        self.stage.waits(*(("waits for slots", "learner") if blocked else ("waits for actors", ENVIRONMENTS)))
        events = self.crew.poll(POLL_S)
        polled = time.perf_counter()
        self.stage.works("receives")
        for index, event in events:
            if isinstance(event, Lost):
                self._lose(index)
            else:
                assert isinstance(event, Answer)
                self._take(index, event)
        self.seconds["act"] += ordered - start
        self.seconds["slots" if blocked else "envs"] += polled - ordered
        self.seconds["record"] += time.perf_counter() - polled

    # ------------------------------------------------------------ out

    def _order(self, index: int) -> None:
        """Weights if there are newer ones, and as many slots as the actor may have and the store has."""
        book, (version, weights) = self._books[index], self._newest()
        mine = np.flatnonzero(book.held == NO_SLOT)[: self.store.counts()["free"]]
        slots = self.store.acquire(len(mine), version) if len(mine) else None
        granted = mine if slots is not None else mine[:0]
        book.held[granted] = slots if slots is not None else NO_SLOT
        news = book.version != version
        if book.blocked and not len(granted) and not news:
            return  # it could only say that it waits
        book.version, book.blocked = version, False
        self.crew.order(index, Order(version, granted, ANSWER_S), weights if news else None)

    def _newest(self) -> tuple[int, Any]:
        """The newest weights, or those of before where they are new enough; shared once, whoever gets them."""
        snapshot, now = self.publisher.latest, time.monotonic()
        behind = snapshot.version - self._shared[0]
        if behind and (now - self._shared_at >= self._every_s or behind > self._most_behind):
            self._shared_at = now
            snapshot.ready.sync()
            self._shared = snapshot.version, self.crew.share(pack_weights(snapshot.tensors))
        return self._shared

    # ------------------------------------------------------------ in

    def _take(self, index: int, answer: Answer) -> None:
        book = self._books[index]
        try:
            if answer.block is not None:
                self._receive(index, answer.block)
        except WireError as error:
            self.crew.give_up(index, f"sent what is of no use: {error}")
            self._lose(index)
            return
        book.blocked = answer.blocked
        self._date(book, answer)
        self.num_steps += answer.steps - book.steps
        self.store.count_lost(answer.lost - book.lost)
        self.crew.restarts += answer.restarts - book.restarts
        for stage in STAGES:
            self.elsewhere[stage] += answer.seconds[stage] - book.seconds.get(stage, 0.0)
        book.steps, book.lost, book.restarts, book.seconds = answer.steps, answer.lost, answer.restarts, answer.seconds
        self.tracker.absorb(index * self.crew.rows_per_actor, answer.episodes)

    def _receive(self, index: int, raw: Bytes) -> None:
        """Unrolls into the slots that were granted for them. Raises WireError."""
        block, held = Block(self._schema, raw), self._books[index].held
        expected = Origin(self.crew.run, index, self.crew.incarnation(index))
        if block.origin != expected:
            raise WireError(f"unrolls of {block.origin} came, and {expected} was asked")
        mine = block.slots
        if len(np.unique(mine)) < len(mine) or (mine < 0).any() or (mine >= len(held)).any():
            raise WireError(f"unrolls for slots {mine.tolist()} came, and there are {len(held)} for each actor")
        slots = held[mine]
        if (slots == NO_SLOT).any():
            raise WireError(f"unrolls for slots {mine.tolist()} came, of which some were not granted")
        self._intake.write(block, slots)
        self.store.begun(slots, block.steps["version"][:, 0])
        self.store.commit(slots)
        held[mine] = NO_SLOT
        self._num_unrolls += len(mine)
        self._num_bytes += len(raw)

    def _date(self, book: _Book, answer: Answer) -> None:
        """When unrolls in progress began is known; what is not begun yet will begin under no older weights."""
        idle = np.flatnonzero(book.held != NO_SLOT)
        idle = idle[~np.isin(idle, answer.filling)]
        self.store.begun(book.held[idle], answer.version)
        self.store.begun(book.held[answer.filling], answer.began)

    def _lose(self, index: int) -> None:
        """All that the actor may have begun is lost with it; the next one begins without a slot."""
        held = self._books[index].held
        self.store.discard(held[held != NO_SLOT])
        self._books[index] = self._new_book()
