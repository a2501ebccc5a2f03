"""Several policies at one pool: whose rows are whose, unrolls that change hands at episode ends, and nothing lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.config import ModelConfig
from pronghorn.models.actor_critic import ActorCritic
from pronghorn.training.acting import EagerActing, Snapshot
from pronghorn.training.metrics import EpisodeTracker
from pronghorn.training.player import Player, Publisher
from pronghorn.training.sampler import Sampler
from pronghorn.training.store import Store, stored_leaves
from pronghorn.types import Ready
from scripted_pool import SPEC, ScriptedPool


class ByEpisode:
    """The k-th episode of a row is played by player(row, k)."""

    def __init__(self, player: Callable[[int, int], int]) -> None:
        self.player, self.episodes = player, dict[int, int]()

    def take(self, ready: Ready, begins: NDArray[np.bool_]) -> NDArray[np.int64]:
        taken = []
        for row in ready.rows[begins].tolist():
            episode = self.episodes[row] = self.episodes.get(row, -1) + 1
            taken.append(self.player(row, episode))
        return np.array(taken, np.int64)


def make(
    pool: ScriptedPool, seats: ByEpisode, *, players: int = 2, length: int = 4, slots: int = 64, batch: int = 2,
    max_lag: int = 8,
) -> Sampler:  # fmt: skip
    """Player p acts as version 100 * p."""
    made = []
    for p in range(players):
        torch.manual_seed(p)
        net = ActorCritic(SPEC, core="gru", core_size=4, mlp_layers=(4,))
        store = Store(
            stored_leaves(SPEC, ModelConfig()), SPEC.action, num_slots=slots, unroll_length=length,
            state_size=net.state_size, batch_unrolls=batch, max_lag=max_lag, device=torch.device("cpu"),
        )  # fmt: skip
        tracker = EpisodeTracker(pool.num_rows, pool.tasks, pool.task_ids)
        acting = EagerActing(net, store, pool.num_rows)
        made.append(Player(pool, store, acting, Publisher(Snapshot.of(net, 100 * p)), tracker))
    return Sampler(pool, made, seed=0, seats=seats)


def unrolls(player: Player, status: int = 2) -> list[int]:
    """Slots in this status, in the order of commits."""
    store = player.store
    return sorted(np.flatnonzero(store._status == status).tolist(), key=lambda slot: store._order[slot])


def test_an_unroll_is_filled_under_one_policy_and_goes_on_with_its_next_episode() -> None:
    sampler = make(ScriptedPool([3]), ByEpisode(lambda row, episode: episode % 2))
    for _ in range(12):
        sampler.step()
    for p, player in enumerate(sampler.players):
        steps = player.store.steps
        (slot,) = unrolls(player)
        assert steps["version"][slot].tolist() == [100 * p] * 4
        assert steps["reward"][slot].tolist() == [1, 2, 3, 1]  # an episode, and the first step of the one after next
        assert steps["terminated"][slot].tolist() == [False, False, True, False]
        assert steps["first"][slot, :4].tolist() == [True, False, False, True]
        assert player.store.obs["obs"][slot, :, 1].tolist() == [0, 10, 20, 0, 10]
        assert player.tracker.num_episodes == (2 if p == 0 else 1)
        assert player.tracker.snapshot()["return_mean"] == 1 + 2 + 3


def test_an_unfinished_unroll_goes_on_in_another_row() -> None:
    """Row 0 plays its second episode, of which there is no end, for player 1; player 0 comes back in row 1."""
    pool = ScriptedPool([3, 5], units=[0, 1])
    sampler = make(pool, ByEpisode(lambda row, episode: [[0, 1, 1, 1], [1, 0, 0, 0]][row][episode]))
    for _ in range(14):
        sampler.step()
    player = sampler.players[0]
    (slot,) = unrolls(player)
    assert player.store.obs["obs"][slot, :, 0].tolist() == [0, 0, 0, 1, 1]  # the row
    assert player.store.steps["reward"][slot].tolist() == [1, 2, 3, 1]
    assert player.store.counts()["filling"] == 1


def test_the_value_at_a_truncation_is_the_policys_that_acted() -> None:
    pool = ScriptedPool([3], truncated=[0])
    sampler = make(pool, ByEpisode(lambda row, episode: episode % 2), length=3)
    for _ in range(7):
        sampler.step()
    for player in sampler.players:
        (slot,) = unrolls(player)
        final = {"obs": torch.tensor([[[0.0, 10.0 * t]] for t in range(4)])}
        first = torch.tensor([[True], [False], [False], [False]])
        acted = player.acting.actor(final, torch.zeros(1, player.acting.actor.state_size), first)
        expected = player.acting.actor.denormalize_value(acted.values)[3, 0].item()
        assert player.store.steps["truncation_value"][slot].tolist() == pytest.approx([0.0, 0.0, expected], rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_every_step_and_every_end_is_in_exactly_one_unroll(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 6).tolist()
    pool = ScriptedPool(lengths, units=[0, 0, 1, 1, 2, 2], per_recv=2, truncated=[1, 4])
    plays = rng.integers(0, 3, (6, 500))
    sampler = make(pool, ByEpisode(lambda row, episode: int(plays[row, episode])), players=3, slots=400, batch=4)
    for _ in range(120):
        sampler.step()
    stored = ends = episodes = 0
    for p, player in enumerate(sampler.players):
        steps = player.store.steps
        for slot in unrolls(player):
            stored += player.store.unroll_length
            assert (steps["version"][slot] == 100 * p).all()
            last = [lengths[int(r)] for r in player.store.obs["obs"][slot, :-1, 0]]
            over = steps["terminated"][slot] | steps["truncated"][slot]
            assert (over == (steps["reward"][slot] == last)).all()
            ends += int(over.sum())
        filling = [t for row, t in enumerate(player._t) if player._slot[row] >= 0] + [t for _, t in player._left]
        stored += sum(filling)
        episodes += player.tracker.num_episodes
        assert player.store.num_discarded == 0
        # no more unfinished ones than rows, however often the rows change hands
        assert player.store.counts()["filling"] <= pool.num_rows
    assert stored == sampler.num_steps
    assert ends <= episodes <= ends + 3 * pool.num_rows  # the others are in unfinished ones


def test_rows_of_one_policy_do_not_wait_for_ever_for_slots_of_another() -> None:
    """Two units hold rows of both players, and neither store has slots for all: each learner frees what it takes."""
    pool = ScriptedPool([3, 4, 5, 6], units=[0, 0, 1, 1])
    sampler = make(pool, ByEpisode(lambda row, episode: (row + episode) % 2), slots=6, max_lag=4)
    versions = [0, 100]
    for _ in range(400):
        sampler.step()
        for p, player in enumerate(sampler.players):
            taken = player.store.take(versions[p], 0.0)
            if taken is not None:
                player.store.release(taken)
                versions[p] += 1
                player.publisher.latest = Snapshot(versions[p], player.publisher.latest.tensors)
    assert min(versions[0], versions[1] - 100) > 40
    assert sampler.num_steps > 700


def test_a_lost_row_voids_its_unroll_and_a_restart_those_that_were_left_too() -> None:
    pool = ScriptedPool([3, 3], units=[0, 1])
    sampler = make(pool, ByEpisode(lambda row, episode: episode % 2))
    for _ in range(9):
        sampler.step()
    pool.kill = {0}
    for _ in range(2):
        sampler.step()
    assert sum(player.store.num_discarded for player in sampler.players) == 1
    sampler.request_reseed(5)
    sampler.step()
    assert sum(player.store.num_discarded for player in sampler.players) == 1  # uncounted: asked for
    assert sum(player.store.counts()["filling"] for player in sampler.players) <= 1
    assert not any(player._left for player in sampler.players)


# ------------------------------------------------------------------------------------------ a policy that is replaced


def replace_policy(player: Player, version: int) -> None:
    """As `Member.become` tells it: unrolls begun before are void, and a snapshot of another lineage is published."""
    player.store.void_before(version)
    old = player.publisher.latest
    other = {name: tensor + 1.0 for name, tensor in old.tensors.items()}
    player.publisher.latest = Snapshot(version, other, lineage=old.lineage + 1)


def acts_with(player: Player) -> float:
    """The first number of the weights that act."""
    return float(next(iter(player.acting.actor.state_dict().values())).flatten()[0])


def test_a_policy_that_was_replaced_leaves_nothing_in_the_unrolls_of_the_new_one() -> None:
    """Row 1 is another's; player 0 plays row 0, and has unrolls that other rows left."""
    pool = ScriptedPool([3, 5, 100, 4], units=[0, 1, 2, 3])
    sampler = make(pool, ByEpisode(lambda row, episode: (row + episode) % 2), slots=40, batch=30)
    for _ in range(4 * 9):
        sampler.step()
    player, other = sampler.players
    assert player._left, "an unroll that a row left is part of what is tested"
    filling, full = player.store.counts()["filling"], player.store.counts()["full"]
    of_other, others_state = other.store.counts(), other.acting._state.clone()
    recorded = player.num_steps
    in_flight = int(player._acted.sum())
    assert in_flight > 0
    replace_policy(player, 50)
    while player.acting.version != 50:
        sampler.step()
    assert player.store.num_voided >= filling + full
    assert player.store.num_discarded == other.store.num_voided == 0
    assert not player._left
    assert player.num_steps <= recorded + 2  # answers to the old policy's actions are not recorded, but for the first
    for _ in range(4 * 20):
        sampler.step()
    new = unrolls(player)
    assert len(new) > 3
    for slot in new:
        assert (player.store.steps["version"][slot] == 50).all()
    assert other.store.counts()["full"] >= of_other["full"]
    assert not torch.equal(other.acting._state, torch.zeros_like(others_state))


def test_the_memory_of_a_policy_that_was_replaced_is_empty_and_its_unrolls_can_be_replayed() -> None:
    """The learner's pass over a new unroll, from its stored state, gives the log-probs that acted, in mid-episode."""
    pool = ScriptedPool([100, 100], units=[0, 1])
    sampler = make(pool, ByEpisode(lambda row, episode: 0), players=1, batch=8)
    for _ in range(7):
        sampler.step()
    (player,) = sampler.players
    assert player.acting._state.abs().sum() > 0
    replace_policy(player, 9)
    sampler.step()
    others = np.setdiff1d(np.arange(2), pool.sent[-1][0])
    assert torch.equal(player.acting._state[others], torch.zeros_like(player.acting._state[others]))
    for _ in range(19):
        sampler.step()
    store = player.store
    for slot in unrolls(player):
        assert not store.steps["first"][slot].any()  # no episode began
        obs = {"obs": store.obs["obs"][slot][:, None]}
        first = torch.from_numpy(store.steps["first"][slot][:, None].copy())
        out = player.acting.actor(obs, store.state[slot][None], first)
        distribution = player.acting.actor.distribution(out.params[:-1], {})
        again = distribution.log_prob(torch.from_numpy(store.steps["discrete"][slot][:, None]), torch.zeros(4, 1, 0))
        assert again[:, 0].tolist() == pytest.approx(store.steps["log_prob"][slot].tolist(), abs=1e-5)
    assert len(unrolls(player)) == 4
    assert torch.equal(store.state[unrolls(player)[0]], torch.zeros(player.acting.actor.state_size))


def test_weights_that_replace_a_policy_are_never_loaded_between_an_unrolls_begin_and_its_act() -> None:
    """They come while the sampler is between the two; what is acted then is the old policy's, whole, and void."""
    pool = ScriptedPool([100, 100], units=[0, 1])
    sampler = make(pool, ByEpisode(lambda row, episode: 0), players=1)
    (player,) = sampler.players
    for _ in range(3):
        sampler.step()
    start, before, seen = player.start_unrolls, acts_with(player), list[tuple[int, float]]()

    def replaced_behind_it(ready: Ready) -> bool:
        started = start(ready)
        if player.publisher.latest.lineage == 0:
            replace_policy(player, 7)
        return started

    act = player.acting.act

    def watched(*args: Any) -> Any:
        seen.append((player.acting.version, acts_with(player)))
        return act(*args)

    player.start_unrolls = replaced_behind_it  # type: ignore[method-assign]
    player.acting.act = watched  # type: ignore[method-assign]
    for _ in range(3):
        sampler.step()
    assert seen[0] == (0, pytest.approx(before))
    assert [version for version, _ in seen[1:]] == [7, 7]
    assert seen[1][1] == pytest.approx(before + 1.0)
    assert player.store.num_voided == 2
    for _ in range(12):
        sampler.step()
    assert all((player.store.steps["version"][slot] == 7).all() for slot in unrolls(player))


def test_newer_weights_of_the_same_policy_are_loaded_before_each_act() -> None:
    sampler = make(ScriptedPool([100]), ByEpisode(lambda row, episode: 0), players=1, length=8)
    (player,) = sampler.players
    for version in range(1, 9):
        sampler.step()
        player.publisher.latest = Snapshot(version, player.publisher.latest.tensors)
    sampler.step()
    assert player.store.steps["version"][unrolls(player)[0]].tolist() == list(range(8))


def test_units_that_are_held_for_want_of_a_slot_go_on_under_the_policy_that_replaces_theirs() -> None:
    """All slots are full, so both units are held; the policy is replaced, which frees them."""
    pool = ScriptedPool([100, 100], units=[0, 1])
    sampler = make(pool, ByEpisode(lambda row, episode: 0), players=1, slots=4, batch=4)
    (player,) = sampler.players
    for _ in range(40):
        sampler.step()
    assert player.store.counts()["full"] == 4
    assert len(sampler._held) == 2
    sent = len(pool.sent)
    replace_policy(player, 3)
    for _ in range(20):
        sampler.step()
    assert len(pool.sent) > sent + 8
    assert player.store.num_voided == 4
    assert all((player.store.steps["version"][slot] == 3).all() for slot in unrolls(player))


def test_a_held_unit_with_rows_of_two_policies_goes_on_when_one_of_them_is_replaced() -> None:
    """The unit waits for slots of player 1, while player 0, whose unroll it has begun, is replaced."""
    pool = ScriptedPool([100, 100], units=[0, 0])
    sampler = make(pool, ByEpisode(lambda row, episode: row), slots=2, batch=1, length=2, max_lag=4)
    one, other = sampler.players
    for _ in range(30):
        taken = one.store.take(0, 0.0)
        if taken is not None:
            one.store.release(taken)
        sampler.step()
    assert len(sampler._held) == 1
    assert other.store.counts()["full"] == 2
    replace_policy(one, 5)
    slots = other.store.take(100, 0.0)
    assert slots is not None
    other.store.release(slots)
    before = len(pool.sent)
    for _ in range(8):
        sampler.step()
    assert len(pool.sent) > before
    assert (one.store.steps["version"][unrolls(one)] == 5).all()


def test_the_episodes_of_a_new_policy_count_from_the_first_that_it_began() -> None:
    """Row 0 is in the middle of an episode when the policy is replaced; row 1 is another's, and comes to it later."""
    pool = ScriptedPool([4, 6], units=[0, 1])
    sampler = make(pool, ByEpisode(lambda row, episode: 0 if row == 0 or episode == 1 else 1))
    player = sampler.players[0]
    for _ in range(5):
        sampler.step()
    assert player.tracker.num_episodes == 0
    replace_policy(player, 1)
    player.tracker.forget(1)
    while player.tracker.num_episodes < 1:
        sampler.step()
    assert player.tracker.recent("return", 9) is None  # begun by the old one: counted, and in no mean
    while player.tracker.num_episodes < 2:
        sampler.step()
    assert player.tracker.recent("return", 9) == 1 + 2 + 3 + 4
    while player.tracker._num_by_task["scripted"] < 4:
        sampler.step()
    assert player.tracker.snapshot()["return_max"] == 1 + 2 + 3 + 4 + 5 + 6  # the first that it played in row 1
