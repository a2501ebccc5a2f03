"""Remote actors without Ray: what they send, grants and back-pressure, the bound of the lag, lost actors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from stand_in import LENGTHS, Clock, StandIn, make_learner

from pronghorn.cluster.actor import SEEDS, RemoteActor, pack_weights
from pronghorn.cluster.remote_sampler import NO_SLOT, RemoteSampler
from pronghorn.cluster.wire import Origin, encode
from pronghorn.config import derive_seed
from pronghorn.errors import ActorDied
from pronghorn.training.acting import make_acting
from pronghorn.training.member import Member
from pronghorn.training.player import Player, Publisher
from pronghorn.training.sampler import Sampler
from pronghorn.training.store import Slot, Store, stored_leaves
from scripted_pool import ScriptedPool


def train(remote: RemoteSampler, member: Member) -> np.ndarray[Any, Any]:
    """One iteration; the lag of its steps [T, B]."""
    for _ in range(1000):
        if member.has_batch():
            break
        remote.step()
    slots = member.store.take(member.learner.version, 0.0)
    assert slots is not None, "no batch came"
    batch = member.gather(slots)
    member.train(batch, lambda: False)
    member.publish(grant=False)
    return batch.policy_lag


def test_an_actor_collects_what_a_local_sampler_would(engine: StandIn) -> None:
    """The same seed and weights give the same unrolls, number for number."""
    remote, member = make_learner(engine, **{"cluster.actors": 1, "learner.batch_unrolls": 1})
    config, pool = member.config, ScriptedPool(LENGTHS, units=(0, 0, 1, 1))
    store = Store(
        stored_leaves(pool.spec, config.model), pool.spec.action, num_slots=member.store.num_slots, unroll_length=4,
        state_size=0, batch_unrolls=1, max_lag=16, device=member.device,
    )  # fmt: skip
    acting = make_acting(member.actor, store, 4, stored_leaves(pool.spec, config.model))
    player = Player(pool, store, acting, Publisher(member.newest), type(member.tracker)(4, pool.tasks, pool.task_ids))
    local = Sampler(pool, [player], seed=derive_seed(0, SEEDS, 0, 0))
    for _ in range(40):
        local.step()
        remote.step()
    compared = 0
    while (a := store.take(0, 0.0)) is not None and (b := member.store.take(0, 0.0)) is not None:
        one, other = store.gather(a, 0), member.store.gather(b, 0)
        np.testing.assert_array_equal(one.obs["obs"].numpy(), other.obs["obs"].numpy())
        for name, steps in one.steps.items():
            np.testing.assert_array_equal(steps.numpy(), other.steps[name].numpy(), err_msg=name)
        compared += 1
    assert compared >= 5


def test_training_on_remote_unrolls_keeps_the_lag_and_counts(engine: StandIn) -> None:
    remote, member = make_learner(engine)
    lags = np.concatenate([train(remote, member).ravel() for _ in range(30)])
    assert lags.min() >= 0
    assert 0 < lags.max() <= member.config.max_lag
    told = remote.counts()
    assert told["remote_unrolls"] >= 60
    assert told["remote_bytes"] > 60 * 4 * 8
    assert (told["actors"], told["actors_replaced"]) == (2, 0)
    assert member.store.num_discarded == 0
    assert remote.num_steps >= 60 * 4


def test_episodes_of_all_actors_are_counted(engine: StandIn) -> None:
    """Rows of 3, 5, 7 and 4 steps an episode on each of two actors; returns 1 + 2 + … + length."""
    remote, member = make_learner(engine)
    for _ in range(20):
        train(remote, member)
    episodes = member.tracker.snapshot()
    returns = {n * (n + 1) / 2 for n in LENGTHS}
    assert episodes["episodes"] > 20
    assert (episodes["return_min"], episodes["return_max"]) == (min(returns), max(returns))
    assert episodes["running_episode_length_max"] < 7


def test_where_actors_spend_their_time_is_told_of_all_together(engine: StandIn) -> None:
    remote, member = make_learner(engine)
    for _ in range(10):
        train(remote, member)
    own = [engine.of(index).actor._sampler.seconds for index in range(2)]
    assert 0.0 < remote.elsewhere["act"] <= own[0]["act"] + own[1]["act"]
    assert remote.elsewhere.keys() == remote.seconds.keys()


def test_a_learner_that_does_not_train_stops_all_actors_and_nothing_is_dropped(engine: StandIn) -> None:
    """Every slot is full or granted then, no order is sent any more, and each row goes on exactly where it stopped."""
    remote, member = make_learner(engine)
    for _ in range(200):
        remote.step()
    counts, orders, unrolls = member.store.counts(), len(engine.orders), remote.counts()["remote_unrolls"]
    assert counts["free"] == 0
    assert counts["full"] == unrolls >= member.config.fresh_unrolls
    assert counts["full"] + counts["filling"] == member.store.num_slots == 2 * 6 + 2
    for _ in range(50):
        remote.step()
    assert len(engine.orders) == orders
    lasts: dict[tuple[int, float], float] = {}
    for _ in range(30):  # unrolls of an actor's row follow each other without a gap: the last observation comes first
        while not member.has_batch():
            remote.step()
        slots = member.store.take(member.learner.version, 0.0)
        assert slots is not None
        for slot in slots:
            obs, first = member.store.obs["obs"][slot].numpy(), bool(member.store.steps["first"][slot, 0])
            row = float(obs[0, 0])
            before = [key for key, last in lasts.items() if key[1] == row and last == obs[0, 1]]
            assert before or first
            lasts[len(lasts), row] = float(obs[-1, 1])
        member.store.release(slots)


def test_an_actor_never_has_more_under_way_than_it_may(engine: StandIn) -> None:
    remote, member = make_learner(engine, **{"cluster.in_flight": 5})
    for _ in range(60):
        train(remote, member)
        assert all((book.held != NO_SLOT).sum() <= 5 for book in remote._books)
        held = np.concatenate([book.held[book.held != NO_SLOT] for book in remote._books])
        assert len(np.unique(held)) == len(held)
        assert (member.store._status[held] == Slot.FILLING).all()


def test_the_learner_waits_for_a_slow_actor_rather_than_let_its_unrolls_get_too_old(
    engine: StandIn, clock: Clock
) -> None:
    """Nothing of the silent one is in a batch yet, so the lag would be without bound if the learner went on."""
    remote, member = make_learner(engine, max_lag=7)
    for _ in range(4):
        train(remote, member)
    engine.of(1).silent = True
    for _ in range(300):
        remote.step()
        if member.has_batch():
            train(remote, member)
    stopped = member.learner.version
    assert stopped <= 4 + 7 + 1
    engine.of(1).silent = False
    lags = np.concatenate([train(remote, member).ravel() for _ in range(20)])
    assert member.learner.version == stopped + 20
    assert lags.max() <= 7


def test_weights_are_shared_once_a_version_and_sent_only_when_newer(engine: StandIn) -> None:
    remote, member = make_learner(engine)
    for _ in range(40):
        remote.step()
    assert len(engine.shared) == 1
    for _ in range(5):
        train(remote, member)
    assert len(engine.shared) <= 6
    weights = [order.version for index, order in engine.orders if index == 0]
    assert weights == sorted(weights)


def test_weights_may_be_sent_less_often_as_far_as_the_lag_allows(engine: StandIn) -> None:
    """An hour between two versions. A store of 14 slots is 7 batches of 2: of a lag of 10 at most, 3 are left."""
    remote, member = make_learner(engine, max_lag=10, **{"cluster.weights_every_s": 3600.0})
    lags = np.concatenate([train(remote, member).ravel() for _ in range(40)])
    assert lags.max() <= 10
    assert 40 / 4 - 2 <= len(engine.shared) <= 40 / 4 + 2


def test_new_weights_act_and_the_version_of_each_step_says_so(engine: StandIn) -> None:
    remote, member = make_learner(engine)
    for _ in range(10):
        train(remote, member)
    acting = engine.of(0).actor._player.acting
    assert acting.version > 3
    newest = pack_weights(engine.of(0).actor._publisher.latest.tensors)
    np.testing.assert_array_equal(newest, pack_weights(acting.actor.state_dict()))


@pytest.mark.parametrize("seed", range(2))
def test_no_interleaving_of_deaths_pauses_and_speeds_exceeds_the_lag_loses_a_slot_or_stops(
    seed: int, engine: StandIn, clock: Clock
) -> None:
    """Three actors that die, fall silent and come back at random beside a learner that trains at random times."""
    rng, budget = np.random.default_rng(seed), {"cluster.restart_budget": 1000, "cluster.actors": 3}
    every = {"cluster.weights_every_s": 0.0 if seed % 2 else 5.0}
    remote, member = make_learner(engine, max_lag=int(rng.integers(10, 14)), **budget, **every)
    for _ in range(150):
        clock.now += float(rng.random())
        remote.step()
        victim = engine.of(int(rng.integers(3)))
        victim.gone |= bool(rng.random() < 0.03)
        victim.silent = bool(rng.random() < 0.2)
        if rng.random() < 0.5 and member.has_batch():
            assert train(remote, member).max() <= member.config.max_lag
        held = np.concatenate([book.held[book.held != NO_SLOT] for book in remote._books])
        assert len(np.unique(held)) == len(held) == member.store.counts()["filling"]
        assert sum(member.store.counts().values()) == member.store.num_slots
    for handle in engine.handles:
        handle.silent = False
    before = member.learner.version
    for _ in range(10):
        clock.now += 1.0
        assert train(remote, member).max() <= member.config.max_lag
    assert member.learner.version == before + 10
    assert remote.counts()["actors_replaced"] > 0


# ------------------------------------------------------------ lost actors


def test_a_lost_actor_is_replaced_and_its_unrolls_are_counted(engine: StandIn, clock: Clock) -> None:
    remote, member = make_learner(engine)
    for _ in range(5):
        train(remote, member)
    first = engine.of(1)
    first.gone = True
    remote.step()
    assert member.store.num_discarded == 6  # all that it was granted
    assert remote.counts()["actors"] == 1
    clock.now += 1.0
    for _ in range(30):
        train(remote, member)
    second = engine.of(1)
    assert second is not first
    assert second.actor.incarnation == 1
    assert remote.counts()["actors_replaced"] == 1
    assert remote.counts()["actors"] == 2
    assert (remote._books[1].steps or 0) > 0
    assert second.actor._seed not in (first.actor._seed, engine.of(0).actor._seed)


@pytest.mark.case("DST-05")
def test_a_silent_actor_is_given_up_and_is_not_heard_when_it_comes_back(engine: StandIn, clock: Clock) -> None:
    remote, member = make_learner(engine)
    for _ in range(5):
        train(remote, member)
    zombie = engine.of(1)
    zombie.silent = True
    clock.now += 14.0  # more than half of the limit at once is taken for a pause of this process
    remote.step()
    assert remote.counts()["actors"] == 2
    for _ in range(4):
        clock.now += 10.0
        remote.step()
    assert zombie.gone
    clock.now += 1.0
    for _ in range(3):
        remote.step()
    zombie.silent, zombie.gone = False, False
    for _ in range(20):
        train(remote, member)
    assert remote.counts()["actors_replaced"] == 1
    assert engine.of(1).actor.incarnation == 1
    assert remote.counts()["actors"] == 2


def test_nobody_is_blamed_for_a_pause_of_the_learner_itself(engine: StandIn, clock: Clock) -> None:
    remote, member = make_learner(engine)
    for _ in range(3):
        train(remote, member)
    clock.now += 3600.0
    for _ in range(3):
        train(remote, member)
    assert remote.counts()["actors_replaced"] == 0


def test_after_the_budget_the_run_ends_with_the_last_ones_cause(engine: StandIn, clock: Clock) -> None:
    remote, member = make_learner(engine, **{"cluster.restart_budget": 2})
    train(remote, member)

    def lose_all() -> None:
        for _ in range(200):
            engine.of(1).gone = True
            clock.now += 1.0
            remote.step()

    with pytest.raises(ActorDied, match=r"(?s)actor 1 on .*was killed.*budget of 2.*cluster.restart_budget"):
        lose_all()


def test_without_room_the_others_go_on(engine: StandIn, clock: Clock) -> None:
    remote, member = make_learner(engine)
    train(remote, member)
    engine.places, engine.of(1).gone = 1, True
    for _ in range(20):
        clock.now += 1.0
        train(remote, member)
    assert remote.counts()["actors"] == 1
    engine.places = 2
    clock.now += 2.0
    for _ in range(10):
        train(remote, member)
    assert remote.counts()["actors"] == 2


@pytest.mark.parametrize(
    ("origin", "said"), [(Origin("another run", 1, 0), "another run"), (Origin("", 1, 7), "incarnation=7")]
)
def test_unrolls_of_a_stale_run_or_life_reach_no_batch(
    origin: Origin, said: str, engine: StandIn, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    remote, member = make_learner(engine)
    forged: list[int] = []

    def forge(actor: RemoteActor, method: str, result: Any) -> Any:
        if method == "exchange" and actor.index == 1 and actor.incarnation == 0 and result.block is not None:
            forged.append(actor.index)
            run = origin.run or remote.crew.run
            unrolls = actor._unrolls(np.arange(1))
            return dataclasses.replace(result, block=encode(actor._schema, Origin(run, *origin[1:]), unrolls))
        return result

    engine.changed = forge
    for _ in range(10):
        train(remote, member)
        clock.now += 1.0
    assert forged == [1]
    assert said in caplog.text
    assert remote.counts()["actors_replaced"] == 1
    assert member.store.num_discarded > 0


@pytest.mark.parametrize("slots", [[0, 0], [-1, 0], [0, 6], [5, 4]], ids=["twice", "below", "beyond", "not granted"])
def test_unrolls_for_slots_that_are_not_the_actors_are_refused(
    slots: list[int], engine: StandIn, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    remote, _ = make_learner(engine)

    def forge(actor: RemoteActor, method: str, result: Any) -> Any:
        if method == "exchange" and actor.index == 1 and actor.incarnation == 0:
            unrolls = dataclasses.replace(actor._unrolls(np.arange(2)), slots=np.array(slots))
            remote._books[1].held[4:] = NO_SLOT
            return dataclasses.replace(result, block=encode(actor._schema, actor._origin, unrolls))
        return result

    engine.changed = forge
    for _ in range(5):
        remote.step()
    assert "sent what is of no use: unrolls for slots" in caplog.text
    assert remote.counts()["actors_replaced"] <= 1


def test_losses_and_restarts_inside_an_actor_are_counted(engine: StandIn) -> None:
    """A dead environment worker costs the actor's unrolls, not the learner's grants."""
    remote, member = make_learner(engine)
    train(remote, member)
    engine.of(0).actor.pool.kill.add(0)
    engine.of(0).actor.pool.restarts += 1
    for _ in range(20):
        train(remote, member)
    assert member.store.num_discarded == 2  # the unit's two rows
    assert remote.crew.restarts == 1
    answers = [book.lost for book in remote._books]
    assert answers == [2, 0]
