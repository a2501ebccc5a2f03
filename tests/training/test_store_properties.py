"""Who owns a slot, in any interleaving of writers, learner, lost workers, replaced policies and waiting rows.

Two machines that take random turns: one is the store beside a model of it; the other is several policies whose rows
change hands, die and begin anew, where each slot that is being filled must have one writer who knows of it.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

import pronghorn.training.sampler as sampling
from members import make_members
from members import settings as member_settings
from pronghorn.errors import StoreError
from pronghorn.training.sampler import Sampler
from pronghorn.training.store import Slot, Store
from pronghorn.types import ActionSpec, LeafSpec, Ready
from scripted_pool import ScriptedPool

NUM_SLOTS, BATCH = 7, 2
QUICK = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class StoreModel(RuleBasedStateMachine):
    """The store and, beside it, what it must hold: {slot: version it was begun under} for each owner."""

    @initialize(max_lag=st.sampled_from((0, 1, 2, 2, 4)))
    def begin(self, max_lag: int) -> None:
        self.store = Store(
            {"obs": LeafSpec((1,), "float32", "vector")}, ActionSpec(discrete=(2,)), num_slots=NUM_SLOTS,
            unroll_length=2, state_size=1, batch_unrolls=BATCH, max_lag=max_lag, device=torch.device("cpu"),
        )  # fmt: skip
        self.turns, self.version, self.valid_from, self.tickets = max_lag <= 1, 0, -1, 0
        self.filling: dict[int, int] = {}
        self.full: dict[int, int] = {}  # in the order of their commits
        self.learning: list[list[int]] = []
        self.parked: set[int] = set()
        self.lost = self.void = 0

    @rule(count=st.integers(1, 4), behind=st.integers(0, 2))
    def acquire(self, count: int, behind: int) -> None:
        version = max(self.version - behind, self.valid_from, 0)
        slots = self.store.acquire(count, version)
        free = NUM_SLOTS - len(self.filling) - len(self.full) - sum(map(len, self.learning))
        assert (slots is None) == (free < count or (self.turns and self.tickets < count))
        if slots is not None:
            owned = {*self.filling, *self.full, *(slot for batch in self.learning for slot in batch)}
            assert len({*slots.tolist()}) == count
            assert not owned & {*slots.tolist()}, "it had an owner"
            self.filling |= dict.fromkeys(slots.tolist(), version)
            self.tickets -= count

    @precondition(lambda self: self.filling)
    @rule()
    def commit_all(self) -> None:
        for slot in sorted(self.filling, reverse=True):
            self._commit([slot])

    def _commit(self, slots: list[int]) -> None:
        self.store.commit(np.array(slots))
        self.parked -= {*slots}
        for slot in slots:
            started = self.filling.pop(slot)
            if started >= self.valid_from:
                self.full[slot] = started
            else:
                self._count_void()

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), what=st.sampled_from(("commit", "lost", "replaced", "restart", "park", "unpark")))
    def write(self, data: st.DataObject, what: str) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.filling)), min_size=1, max_size=3, unique=True))
        slots = np.array(chosen)
        if what == "commit":
            self._commit(chosen)
        elif what == "park":
            self.store.park(slots)
            self.parked |= {*chosen}
        elif what == "unpark":
            self.store.unpark(slots, self.version)
            for slot in self.parked & {*chosen}:
                self.filling[slot] = max(self.filling[slot], self.version)
            self.parked -= {*chosen}
        else:
            self.store.discard(slots, what)  # type: ignore[arg-type]
            self.lost += len(chosen) * (what == "lost")
            self.void += len(chosen) * (what == "replaced")
            self.tickets += len(chosen)
            for slot in chosen:
                del self.filling[slot]
            self.parked -= {*chosen}

    def _count_void(self) -> None:
        self.void += 1
        self.tickets += 1

    @rule(by=st.integers(1, 3))
    def train_without_batches(self, by: int) -> None:
        self.version += by

    @rule()
    def take(self) -> None:
        batch = self.store.take(self.version, 0.0)
        oldest = sorted(self.full, key=self.full.__getitem__)[:BATCH]  # stable: by commit where versions are equal
        waits = not self.turns and len(self.full) >= BATCH and not self._feasible(oldest)
        assert (batch is None) == (len(self.full) < BATCH or waits)
        if batch is not None:
            assert batch.tolist() == oldest
            self.learning.append(batch.tolist())
            for slot in oldest:
                del self.full[slot]

    def _feasible(self, batch: list[int]) -> bool:
        """Whether all that stay behind could still enter a batch in time: each deadline has room for those before."""
        waiting = {s: v for s, v in self.filling.items() if s not in self.parked} | self.full
        left = [v for s, v in waiting.items() if s not in batch and v >= self.valid_from]
        deadlines = [v + self.store.max_lag - self.version for v in left]
        return all(sum(other <= one for other in deadlines) <= one * BATCH for one in deadlines)

    @precondition(lambda self: self.learning)
    @rule()
    def release(self) -> None:
        self.store.release(np.array(self.learning.pop(0)))
        self.version += 1

    @rule()
    def grant(self) -> None:
        self.store.grant()
        self.tickets += BATCH

    @rule()
    def replace_policy(self) -> None:
        self.version += 1
        self.valid_from = self.version
        self.store.void_before(self.version)
        for slot in [slot for slot, started in self.full.items() if started < self.valid_from]:
            del self.full[slot]
            self._count_void()

    @rule(slot=st.integers(0, NUM_SLOTS - 1), what=st.sampled_from(("commit", "discard", "release", "park")))
    def misuse(self, slot: int, what: str) -> None:
        learning = {slot for batch in self.learning for slot in batch}
        if slot in (learning if what == "release" else self.filling):
            return
        with pytest.raises(StoreError, match=f"Slot {slot} is"):
            getattr(self.store, what)(np.array([slot]))

    @invariant()
    def each_slot_has_one_owner(self) -> None:
        if not hasattr(self, "store"):
            return
        learning = [slot for batch in self.learning for slot in batch]
        wanted = dict.fromkeys(self.filling, Slot.FILLING) | dict.fromkeys(self.full, Slot.FULL)
        wanted |= dict.fromkeys(learning, Slot.LEARNING)
        assert len(wanted) == len(self.filling) + len(self.full) + len(learning)
        state = [wanted.get(slot, Slot.FREE) for slot in range(NUM_SLOTS)]
        assert [Slot(s) for s in self.store._status.tolist()] == state
        assert (self.store.num_discarded, self.store.num_voided) == (self.lost, self.void)
        assert not self.turns or self.store._tickets == self.tickets


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = QUICK


# ------------------------------------------------------------------------------------------ policies and their rows


class RandomSeats:
    """Any policy may play any episode, and every fourth row takes no part in an exchange."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.rng = count, random.Random(seed)

    def take(self, ready: Ready, begins: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.array([self.rng.randrange(self.count) for _ in range(int(begins.sum()))], np.int64)


class Policies(RuleBasedStateMachine):
    """Three policies at six rows; rows wait, die, change hands and begin anew; policies are replaced and trained."""

    @initialize(seed=st.integers(0, 999), lengths=st.lists(st.integers(1, 9), min_size=6, max_size=6))
    def begin(self, seed: int, lengths: list[int]) -> None:
        self.pool = ScriptedPool(lengths, units=[0, 0, 1, 2, 2, 3], waits=(1, 3), truncated=(0,), per_recv=2)
        config = member_settings(**{"env.envs_per_worker": 6, "max_lag": 16})
        self.members = make_members(self.pool, config, 3)
        players = [member.player for member in self.members]
        self.sampler = Sampler(self.pool, players, seed=seed, seats=RandomSeats(3, seed))
        self.trained = 0

    @rule(times=st.integers(1, 12))
    def sample(self, times: int) -> None:
        for _ in range(times):
            self.sampler.step()

    @rule(unit=st.integers(0, 3))
    def kill(self, unit: int) -> None:
        self.pool.kill.add(unit)

    @rule(which=st.integers(0, 2))
    def learn(self, which: int) -> None:
        member = self.members[which]
        slots = member.store.take(member.learner.version, 0.0)
        if slots is not None:
            batch = member.store.gather(slots, member.learner.version)
            assert batch.policy_lag.min() >= 0
            member.store.release(slots)
            member.learner.version += 1  # as training does; weights are not what is asked about here
            member.newest = member._snapshot()
            member.publish(grant=False)
            self.trained += 1

    @rule(which=st.integers(0, 2), donor=st.integers(0, 2))
    def replace_policy(self, which: int, donor: int) -> None:
        if which != donor:
            self.members[which].become(self.members[donor])

    @rule(seed=st.integers(0, 99))
    def begin_anew(self, seed: int) -> None:
        self.sampler.request_reseed(seed)

    @invariant()
    def what_is_being_filled_has_one_writer_who_knows_of_it(self) -> None:
        for member in getattr(self, "members", ()):
            player, store = member.player, member.store
            own = [*player._slot[player._slot >= 0].tolist(), *(slot for slot, _ in player._left)]
            assert len(set(own)) == len(own), "a slot has two writers"
            assert sorted(own) == np.flatnonzero(store._status == Slot.FILLING).tolist(), "a slot is lost"
            assert (player._t[player._slot >= 0] <= store.unroll_length).all()
            assert sum(store.counts().values()) == store.num_slots


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "POLL_S", 0.0)


TestPolicies = Policies.TestCase
TestPolicies.settings = settings(QUICK, max_examples=15, stateful_step_count=30)
