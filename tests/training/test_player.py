"""Several policies at one pool: whose rows are whose, unrolls that change hands at episode ends, and nothing lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

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
