"""The store: ownership of slots, the lag rule, turns, and batches in time-major order."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.errors import StoreError
from pronghorn.training.store import Batch, Replay, Store
from pronghorn.types import ActionSpec, LeafSpec
from recorded_graphs import LoggedFence


def make_store(
    num_slots: int = 8, batch: int = 2, max_lag: int = 4, length: int = 3, changed: threading.Condition | None = None
) -> Store:
    return Store(
        {"obs": LeafSpec((2,), "float32", "vector")},
        ActionSpec(discrete=(3,)),
        num_slots=num_slots,
        unroll_length=length,
        state_size=1,
        batch_unrolls=batch,
        max_lag=max_lag,
        device=torch.device("cpu"),
        changed=changed,
    )


def fill(store: Store, count: int, version: int) -> np.ndarray:
    slots = store.acquire(count, version)
    assert slots is not None
    store.steps["version"][slots] = version
    return slots


def test_a_slot_goes_round_and_always_has_one_state() -> None:
    store = make_store(num_slots=4)
    slots = fill(store, 3, 0)
    assert store.counts() == {"free": 1, "filling": 3, "full": 0, "learning": 0}
    store.commit(slots[:2])
    taken = store.take(0, 0.0)
    assert taken is not None
    assert sorted(taken) == sorted(slots[:2])
    assert store.counts() == {"free": 1, "filling": 1, "full": 0, "learning": 2}
    store.release(taken)
    store.discard(slots[2:])
    assert store.counts()["free"] == 4
    assert store.num_discarded == 1


@pytest.mark.parametrize("misuse", ["commit", "discard", "release"])
def test_misuse_names_slot_and_states(misuse: str) -> None:
    store = make_store()
    with pytest.raises(StoreError, match=r"Slot 5 is FREE, but only a (FILLING|LEARNING) slot"):
        getattr(store, misuse)(np.array([5]))


def test_too_few_free_slots_give_none_and_take_nothing() -> None:
    store = make_store(num_slots=4)
    assert fill(store, 3, 0) is not None
    assert store.acquire(2, 0) is None
    assert store.counts()["free"] == 1


def test_batches_take_the_oldest_first() -> None:
    store = make_store()
    newer, older = fill(store, 2, 1), fill(store, 2, 0)
    store.commit(newer)
    store.commit(older)
    taken = store.take(1, 0.0)
    assert taken is not None
    assert sorted(taken) == sorted(older)


def test_the_learner_waits_for_an_unfinished_unroll_that_would_get_too_old() -> None:
    store = make_store(num_slots=8, batch=2, max_lag=4)
    old = fill(store, 1, 0)  # still being filled, started at version 0
    store.commit(fill(store, 2, 3))
    # At version 3 the next batch is taken at 4, where the old unroll is still within its lag of 4.
    assert store.take(3, 0.0) is not None
    store.commit(fill(store, 2, 4))
    # At version 4 the next batch would be taken at 5: the old unroll must be in this one.
    assert store.take(4, 0.0) is None
    store.commit(old)
    taken = store.take(4, 0.0)
    assert taken is not None
    assert old[0] in taken


def test_the_lag_rule_looks_ahead_when_many_unrolls_are_equally_old() -> None:
    store = make_store(num_slots=8, batch=2, max_lag=2)
    filling = fill(store, 4, 0)
    store.commit(fill(store, 2, 0))
    # 4 unrolls of version 0 stay behind; batches at versions 1 and 2 take 4: just feasible.
    taken = store.take(0, 0.0)
    assert taken is not None
    store.release(taken)
    store.commit(fill(store, 2, 1))
    # At version 1 only the batch at 2 is left for those 4, which takes 2: wait.
    assert store.take(1, 0.0) is None
    store.commit(filling[:2])
    assert store.take(1, 0.0) is not None


def test_no_interleaving_of_random_speeds_exceeds_the_lag_or_deadlocks() -> None:
    """Rows of very different speeds, a learner that is always hungry: lag ≤ max_lag, and training never stops."""
    rng = np.random.default_rng(0)
    rows, batch, length, max_lag = 6, 2, 3, 5
    store = make_store(num_slots=rows + 2 * batch, batch=batch, max_lag=max_lag, length=length)
    speed = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.02])
    slot, t, version, seen = np.full(rows, -1), np.zeros(rows, int), 0, []
    for _ in range(6000):
        for row in np.flatnonzero(rng.random(rows) < speed):
            if slot[row] < 0:
                got = store.acquire(1, version)
                if got is None:
                    continue
                slot[row], t[row] = got[0], 0
            store.steps["version"][slot[row], t[row]] = version
            t[row] += 1
            if t[row] == length:
                store.commit(slot[row : row + 1])
                slot[row] = -1
        taken = store.take(version, 0.0)
        if taken is not None:
            seen.append(store.gather(taken, version).policy_lag.max())
            store.release(taken)
            version += 1
    assert max(seen) <= max_lag
    assert max(seen) == max_lag  # the slow row really made the learner wait
    assert version > 100


def test_turns_need_tickets_and_lost_unrolls_give_theirs_back() -> None:
    store = make_store(num_slots=8, batch=2, max_lag=1)
    assert store.acquire(1, 0) is None
    store.grant()
    slots = store.acquire(2, 0)
    assert slots is not None
    assert store.acquire(1, 0) is None
    store.discard(slots[:1])
    assert store.acquire(1, 0) is not None


def test_gather_is_time_major_and_keeps_each_unroll_together() -> None:
    store = make_store()
    slots = fill(store, 2, 0)
    for slot in slots:
        for t in range(4):
            store.obs["obs"][slot, t] = torch.tensor([slot, t], dtype=torch.float32)
        store.steps["reward"][slot] = 10 * slot + np.arange(3)
        store.steps["version"][slot] = [0, 1, 1]
        store.state[slot] = float(slot)
    store.commit(slots)
    batch = store.gather(slots, version=3)
    assert batch.obs["obs"].shape == (4, 2, 2)
    for b, slot in enumerate(slots):
        assert batch.obs["obs"][:, b].tolist() == [[slot, t] for t in range(4)]
        assert batch.steps["reward"][:, b].tolist() == [10 * slot + t for t in range(3)]
        assert batch.state[b].item() == slot
    assert batch.steps["first"].shape == (4, 2)
    assert batch.policy_lag[:, 0].tolist() == [3, 2, 2]


def test_close_wakes_a_waiting_learner() -> None:
    store = make_store()
    store.close()
    assert store.take(0, 60.0) is None


def some_batch(version: int, number: int, count: int = 2, length: int = 3) -> Batch:
    """Unrolls that all carry `number`, the column in the second entry of the observation."""
    obs = torch.full((length + 1, count, 2), float(number))
    obs[..., 1] = torch.arange(count)
    steps = {
        "reward": torch.full((length, count), float(number)),
        "version": torch.full((length, count), version, dtype=torch.int64),
    }
    return Batch({"obs": obs}, steps, torch.full((count, 1), float(number)), np.zeros((length, count), np.int64))


def test_replay_follows_the_fresh_unrolls_and_never_repeats_them() -> None:
    replay = Replay(capacity=4, num_drawn=2, seed=0)
    assert replay.mix(some_batch(0, 10), 0).num_replayed == 0  # nothing to draw from yet
    for n in range(1, 30):
        mixed = replay.mix(some_batch(n, 10 + n), n)
        assert mixed.state.shape[0] == 4
        assert (mixed.num_replayed, mixed.num_samples, mixed.num_fresh) == (2, 12, 6)
        assert mixed.obs["obs"][:, :2, 0].unique().tolist() == [10.0 + n]
        old = mixed.obs["obs"][0, 2:, 0]
        assert set(old.tolist()) <= {9.0 + n, 8.0 + n}  # the two batches before: first in, first out
        # what belongs together stays together, and knows its age
        assert mixed.steps["reward"][0, 2:].tolist() == old.tolist() == mixed.state[2:, 0].tolist()
        assert mixed.policy_lag[0].tolist() == [0, 0, *(10 + n - old.numpy()).tolist()]


def test_replay_draws_every_kept_unroll_equally_often() -> None:
    replay, seen = Replay(capacity=8, num_drawn=2, seed=1), np.zeros(8)
    for n in range(4):
        replay.mix(some_batch(n, n), n)
    for _ in range(2_000):
        drawn = replay._draw(2, 4)
        assert drawn is not None
        np.add.at(seen, (2 * drawn.obs["obs"][0, :, 0] + drawn.obs["obs"][0, :, 1]).numpy().astype(int), 1)
    assert np.abs(seen - 500).max() < 100  # 4.8 standard deviations


def test_a_replay_smaller_than_a_batch_keeps_its_last_unrolls() -> None:
    replay = Replay(capacity=3, num_drawn=2, seed=0)
    replay.mix(some_batch(0, 0, count=5), 0)
    assert replay.size == 3
    drawn = replay._draw(200, 1)
    assert drawn is not None
    assert set(drawn.obs["obs"][0, :, 1].tolist()) == {2.0, 3.0, 4.0}


def test_tickets_come_back_from_every_unroll_that_is_given_up() -> None:
    """A reset of all rows may catch unrolls that were begun a moment ago; their batch must still be possible."""
    store = make_store(num_slots=4, max_lag=0)
    store.grant()
    slots = fill(store, 2, 0)
    store.discard(slots, "restart")
    assert store.num_discarded == 0
    assert store.acquire(2, 0) is not None


def test_a_packed_gather_is_the_same_batch() -> None:
    """As on a GPU: numbers in one packet, observations by their rows; values name their slot and step."""
    leaves = {
        "image": LeafSpec((4, 5, 2), "uint8", "image"),
        "x": LeafSpec((2,), "float32", "vector"),
        "level": LeafSpec((), "float32", "vector"),
    }
    action = ActionSpec(discrete=(3, 2), low=(-1.0,), high=(1.0,))
    stores = [
        Store(leaves, action, num_slots=7, unroll_length=3, state_size=2, batch_unrolls=3, max_lag=4,
              device=torch.device("cpu"), packed=packed) for packed in (False, True)
    ]  # fmt: skip
    for store in stores:
        rng = np.random.default_rng(0)
        for leaf in store.obs.values():
            leaf.copy_(torch.from_numpy(rng.integers(0, 200, leaf.shape)))
        store.state.copy_(torch.from_numpy(rng.random((7, 2))))
        for name, numbers in store.steps.items():
            numbers[...] = rng.integers(0, 2 if numbers.dtype == bool else 9, numbers.shape)
            assert store.flat_steps[name].base is not None
    for slots in (np.array([4, 0, 6]), np.array([1, 2, 3])):
        plain, packed = (store.gather(slots, 9) for store in stores)
        assert packed.obs["image"].is_contiguous()
        for name, leaf in plain.obs.items():
            assert torch.equal(leaf, packed.obs[name]), name
        assert plain.steps.keys() == packed.steps.keys()
        for name, numbers in plain.steps.items():
            assert numbers.dtype == packed.steps[name].dtype
            assert torch.equal(numbers, packed.steps[name]), name
        assert torch.equal(plain.state, packed.state)
        assert np.array_equal(plain.policy_lag, packed.policy_lag)


def test_a_packed_gather_comes_behind_what_was_written_and_before_what_comes_next() -> None:
    store = make_store()
    packed = Store(
        {"obs": LeafSpec((2,), "float32", "vector")}, ActionSpec(discrete=(3,)), num_slots=8, unroll_length=3,
        state_size=1, batch_unrolls=2, max_lag=4, device=torch.device("cpu"), packed=True,
    )  # fmt: skip
    log: list[str] = []
    packed.written, packed.read, packed._uploaded = (LoggedFence(n, log) for n in ("written", "read", "uploaded"))
    packed.gather(np.array([1, 2]), 0)
    assert log == ["uploaded synced", "uploaded marked", "written waited for", "read marked"]
    assert store.spare == 8 * 4
    assert store.flat_obs["obs"].shape[0] == 8 * 4 + 1  # one row that belongs to no slot


# ------------------------------------------------------------------------------------------ a policy that is replaced


def test_unrolls_of_a_policy_that_was_replaced_are_void_wherever_they_are_and_counted() -> None:
    """FULL ones at once, those that are being filled when they are committed; a batch on its way is its taker's."""
    store = make_store(num_slots=8)
    learning, full, filling = fill(store, 2, 0), fill(store, 2, 1), fill(store, 2, 2)
    store.commit(learning)
    assert store.take(2, 0.0) is not None
    store.commit(full)
    store.void_before(3)
    assert store.counts() == {"free": 4, "filling": 2, "full": 0, "learning": 2}
    assert store.num_voided == 2
    new = fill(store, 2, 3)
    store.commit(filling)
    assert store.num_voided == 4
    store.commit(new)
    assert store.counts() == {"free": 4, "filling": 0, "full": 2, "learning": 2}
    taken = store.take(3, 0.0)
    assert taken is not None
    assert sorted(taken) == sorted(new)
    store.release(learning)
    assert store.num_discarded == 0


def test_parked_unrolls_of_a_policy_that_was_replaced_do_not_count_as_begun_anew() -> None:
    """`unpark` counts an unroll as begun when it goes on, but not under another policy than the one that began it."""
    store = make_store(num_slots=4)
    slots = fill(store, 1, 0)
    store.park(slots)
    store.void_before(1)
    store.unpark(slots, 0)  # by a writer that has not heard of it yet
    store.commit(slots)
    assert store.counts()["full"] == 0
    assert store.num_voided == 1


@pytest.mark.parametrize(("why", "lost", "voided"), [("lost", 2, 0), ("replaced", 0, 2), ("restart", 0, 0)])
def test_what_is_discarded_is_counted_by_its_reason(why: Any, lost: int, voided: int) -> None:
    store = make_store()
    store.discard(fill(store, 2, 0), why)
    assert (store.num_discarded, store.num_voided) == (lost, voided)
    assert store.counts()["free"] == 8


def test_the_lag_rule_does_not_wait_for_unrolls_that_are_void() -> None:
    store = make_store(num_slots=8, batch=2, max_lag=4)
    fill(store, 1, 0)
    store.commit(fill(store, 2, 4))
    assert store.take(4, 0.0) is None  # waits for the old one
    store.void_before(5)
    store.commit(fill(store, 2, 5))
    assert store.take(5, 0.0) is not None
    assert store.counts()["filling"] == 1


@pytest.mark.parametrize("what", ["commit", "release", "discard", "void_before", "park", "close"])
def test_whoever_waits_for_several_stores_wakes_when_one_of_them_changes(what: str) -> None:
    changed = threading.Condition()
    stores = [make_store(changed=changed) for _ in range(2)]
    store = stores[1]
    slots = fill(store, 2, 0)
    if what == "release":
        store.commit(slots)
        assert store.take(0, 0.0) is not None
    waits, woken = threading.Event(), threading.Event()

    def wait() -> None:
        with changed:
            waits.set()
            if changed.wait(60.0):
                woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(60.0)
    with changed:  # so that it waits by now
        pass
    getattr(store, what)(*([1] if what == "void_before" else [] if what == "close" else [slots]))
    thread.join(60.0)
    assert woken.is_set()
    assert stores[0].counts()["free"] == 8


def test_unrolls_in_progress_tell_when_they_began_and_may_be_known_to_begin_later() -> None:
    """An unroll that begins later than was thought may be waited for longer; no knowledge makes it older."""
    store = make_store(num_slots=4, batch=2, max_lag=2)
    slots = fill(store, 2, 3)
    store.commit(slots)
    mine = store.acquire(2, 0)
    assert mine is not None
    assert [list(part) for part in store.filling()] == [list(mine), [0, 0]]
    assert store.take(3, 0.0) is None  # those of version 0 would be 4 iterations old in the next batch
    store.begun(mine, np.array([2, 3]))
    store.begun(mine, 1)
    assert list(store.filling()[1]) == [2, 3]
    assert list(store.take(3, 0.0)) == list(slots)
    with pytest.raises(StoreError, match="only a FILLING slot"):
        store.begun(slots, 3)


def test_unrolls_that_were_lost_elsewhere_are_counted_with_those_lost_here() -> None:
    store = make_store(num_slots=4)
    store.discard(fill(store, 1, 0))
    store.count_lost(3)
    assert store.num_discarded == 4
