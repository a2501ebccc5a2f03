"""Central inference without Ray: environments of two actors as one pool, its contract, and lost actors."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from stand_in import LENGTHS, Clock, StandIn, cluster_settings

from pronghorn.cluster.crew import Crew
from pronghorn.cluster.env_host import EnvHost
from pronghorn.cluster.remote_pool import RemotePool
from pronghorn.errors import EnvError
from pronghorn.training.member import Member
from pronghorn.training.sampler import Sampler
from pronghorn.types import FIRST, LAST, LOST, STEP, Ready


@pytest.fixture
def pool(engine: StandIn) -> RemotePool:
    engine.actor = EnvHost
    config = cluster_settings(**{"cluster.inference": "learner"})
    return RemotePool(Crew(config, engine, seed=0), config)


def answer(pool: RemotePool, ready: Ready) -> None:
    pool.send(ready.rows, np.ones((len(ready.rows), 1), np.int64), np.zeros((len(ready.rows), 0), np.float32))


def receive(pool: RemotePool) -> Ready:
    for _ in range(20):
        ready = pool.recv(0.1)
        if ready is not None:
            return ready
    raise AssertionError("nothing came")


def test_rows_of_all_actors_are_numbered_one_after_another(pool: RemotePool) -> None:
    assert pool.num_rows == 8
    assert pool.unit_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert pool.task_ids.tolist() == [0] * 8
    assert "acting for all of them here" in pool.describe()


def test_every_row_goes_on_exactly_by_its_answers_and_is_delivered_once_at_a_time(pool: RemotePool) -> None:
    """Row r of an actor observes [r, 10 * step], and gets its step as reward; its episodes are of known lengths."""
    steps, out, answers = np.full(8, -1), set[int](), list[Ready]()
    for _ in range(200):
        ready = receive(pool)
        assert not out & set(ready.rows.tolist())
        for i, row in enumerate(ready.rows.tolist()):
            if ready.event[i] == FIRST:
                assert steps[row] == -1
                steps[row] = 0
            else:
                assert ready.event[i] in (STEP, LAST)
                steps[row] += 1
                assert ready.reward[i] == steps[row]
                steps[row] = 0 if ready.event[i] == LAST else steps[row]
                assert (ready.event[i] == LAST) == (ready.reward[i] == LENGTHS[row % 4])
            assert ready.obs["obs"][i].tolist() == [row % 4, 10 * steps[row]]
        answers.append(ready)
        out |= set(ready.rows.tolist())
        if len(out) > 4:  # until then they are held, as the sampler holds rows without a slot
            oldest = answers.pop(0)
            answer(pool, oldest)
            out -= set(oldest.rows.tolist())
    assert (steps >= 0).all()


def test_the_ordinary_sampler_and_learner_train_on_it(pool: RemotePool) -> None:
    config = cluster_settings(**{"cluster.inference": "learner"})
    member = Member(0, config, pool, torch.device("cpu"), seed=0, changed=threading.Condition())
    sampler = Sampler(pool, [member.start_acting(pool)], seed=0)
    assert member.store.num_slots == 8 + config.fresh_unrolls
    for _ in range(30):
        while not member.has_batch():
            sampler.step()
        slots = member.store.take(member.learner.version, 0.0)
        assert slots is not None
        batch = member.gather(slots)
        assert batch.policy_lag.max() <= config.max_lag
        member.train(batch, lambda: False)
        member.publish(grant=False)
    assert member.tracker.snapshot()["episodes"] > 20
    assert member.store.num_discarded == 0


def test_a_lost_actors_rows_are_lost_and_begin_anew_once_they_were_answered(
    pool: RemotePool, engine: StandIn, clock: Clock
) -> None:
    ready = receive(pool)
    while len(set(ready.rows // 4)) < 2:
        answer(pool, ready)
        ready = receive(pool)
    taken = ready.rows[ready.rows >= 4]
    engine.of(1).gone = True
    pool._ask()
    events: dict[int, int] = {}
    for _ in range(5):
        clock.now += 1.0
        more = pool.recv(0.1)
        if more is not None:
            events |= dict(zip(more.rows.tolist(), more.event.tolist(), strict=True))
    others = set(range(4, 8)) - set(taken.tolist())
    assert {row for row, event in events.items() if event == LOST} == others
    answer(pool, ready)
    rows: dict[int, list[int]] = {row: [] for row in range(4, 8)}
    for _ in range(20):
        clock.now += 1.0
        more = pool.recv(0.1)
        if more is None:
            continue
        for row, event in zip(more.rows.tolist(), more.event.tolist(), strict=True):
            if row >= 4:
                rows[row].append(event)
        keep = more.event != LOST
        if keep.any():
            pool.send(more.rows[keep], np.ones((keep.sum(), 1), np.int64), np.zeros((keep.sum(), 0), np.float32))
    for row, seen in rows.items():
        begins = [LOST, FIRST, STEP] if row in taken else [FIRST, STEP]
        assert seen[: len(begins)] == begins
    assert engine.of(1).actor.incarnation == 1
    assert pool.crew.num_replaced == 1


def test_workers_that_were_restarted_are_counted_over_the_lives_of_actors(pool: RemotePool, engine: StandIn) -> None:
    for restarts in (1, 3):
        engine.of(0).actor.pool.restarts = restarts
        for _ in range(3):
            answer(pool, receive(pool))
    assert pool.restarts == 3


def test_settings_of_running_environments_cannot_be_changed_from_here(pool: RemotePool) -> None:
    with pytest.raises(EnvError, match="rewards: settings of running environments cannot be changed"):
        pool.set_option("rewards", {})
