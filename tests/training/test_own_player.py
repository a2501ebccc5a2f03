"""Agents of unlike spaces in real workers: what each policy's store holds is what its agents saw, did and got."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.envs.own_rows import OwnRows
from pronghorn.envs.registry import make_pool
from pronghorn.training.member import Member
from pronghorn.training.own_player import OwnPlayer
from pronghorn.training.sampler import Sampler
from pronghorn.training.store import Slot
from running import env

SETTINGS: dict[str, Any] = {
    "env.workers": 1, "env.envs_per_worker": 4, "env.pin": "off", "env.policies": "by_spaces", "threads": 1,
    "learner.unroll_length": 8, "learner.batch_unrolls": 24, "model.mlp_layers": (8,), "model.core": "gru",
    "model.core_size": 4, "model.last_action": True,
}  # fmt: skip


@contextlib.contextmanager
def sampled(steps: int) -> Iterator[tuple[Sampler, list[Member]]]:
    """Members at the rows of Counting's two agents, after so many steps of the sampler."""
    config: Config = replace(Config(env=env("Counting", "unlike_games.py")), SETTINGS)
    pool = make_pool(config, seed=1, ordered=False)
    try:
        config = resolve(config, pool.spec)
        own = [OwnRows(pool, number) for number in range(2)]
        changed, cpu = threading.Condition(), torch.device("cpu")
        members = [Member(i, config, rows, cpu, seed=0, changed=changed) for i, rows in enumerate(own)]
        players = [OwnPlayer(rows, m.start_acting(rows)) for rows, m in zip(own, members, strict=True)]
        playing = np.array([0, 1] * 4)
        sampler = Sampler(pool, players, seed=0, playing=playing)
        for _ in range(steps):
            sampler.step()
        yield sampler, members
    finally:
        pool.close()


def full(member: Member) -> list[tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]]:
    """(observations, steps) of each unroll that is complete."""
    store = member.store
    slots = np.flatnonzero(store._status == Slot.FULL)
    assert len(slots) >= 4
    return [
        ({k: v[slot].numpy() for k, v in store.obs.items()}, {k: v[slot] for k, v in store.steps.items()})
        for slot in slots
    ]


@pytest.mark.case("MAS-13")
@pytest.mark.timeout(60)
def test_each_store_holds_what_its_agents_saw_did_and_got() -> None:
    """'a' ends after 5 steps, 'b' is cut after 3 and waits for 'a'; each step's number is in the next reward."""
    with sampled(90) as (sampler, members):
        numbers = set[float]()
        for member, length, extra, more in ((members[0], 5, [], 0.0), (members[1], 3, [7.0, 8.0], 0.5)):
            for obs, steps in full(member):
                x, count = obs["x"], obs["x"][:, 1]
                assert x.shape == (9, 3 + len(extra))
                assert len(set(x[:, 0])) == 1
                numbers.add(x[0, 0])
                assert (np.diff(count) % length == 1).all()
                assert (x[:, 3:] == extra).all()
                assert np.array_equal(steps["reward"], count[:-1] + 1 + more)
                how = "terminated" if member.index == 0 else "truncated"
                assert np.array_equal(steps[how], count[:-1] == length - 1)
                assert np.array_equal(steps["first"], count == 0)
                last = np.where(steps["first"][1:], -1, steps["discrete"][:, 0])
                assert np.array_equal(x[1:, 2], last)
                assert np.array_equal(obs["last_action"][1:, 0], last)
        assert numbers == {0.0, 100.0, 200.0, 300.0}
        assert sampler.num_steps == sum(player.num_steps for player in sampler.players) > 2 * 4 * 8 * 2


@pytest.mark.timeout(60)
def test_each_network_sees_its_own_spaces_and_nothing_else() -> None:
    """No mask is added to 'a', and the mask of 'b' is its own; its 4 choices are not cut to 2, nor 2 made 4."""
    with sampled(60) as (_, members):
        a, b = members
        assert (a.model.policy_head.out_features, b.model.policy_head.out_features) == (2, 4)
        assert (a.model.mask_leaf, b.model.mask_leaf) == (None, "action_mask")
        assert (set(a.store.obs), set(b.store.obs)) == ({"x", "last_action"}, {"x", "action_mask", "last_action"})
        assert (a.store.num_slots, b.store.num_slots) == (4 + 24, 4 + 24)  # of its own rows only
        chosen = set[int]()
        for obs, steps in full(b):
            parity = obs["x"][:-1, 1] % 2
            assert np.array_equal(obs["action_mask"][:-1, :2], np.stack([1 - parity, parity], 1))
            assert np.array_equal(steps["discrete"][:, 0] % 2, parity)
            chosen |= set(steps["discrete"][:, 0].tolist())
        assert chosen == {0, 1, 2, 3}


@pytest.mark.timeout(60)
def test_the_value_of_a_cut_episode_is_of_the_agents_own_last_observation() -> None:
    with sampled(60) as (_, members):
        model, checked = members[1].model, 0
        for obs, steps in full(members[1]):
            for t in np.flatnonzero(steps["truncated"]):
                if t < 2:  # its episode, and so its memory, began before the unroll
                    continue
                last = np.append(obs["x"][t, :1], [3, steps["discrete"][t, 0], 7, 8]).astype(np.float32)
                x = torch.from_numpy(np.concatenate((obs["x"][t - 2 : t + 1], last[None])))
                mask = torch.ones(4, 4, dtype=torch.uint8)
                actions = torch.tensor([[-1], *steps["discrete"][t - 2 : t + 1].tolist()])
                leaves = {"x": x[:, None], "action_mask": mask[:, None], "last_action": actions[:, None]}
                first = torch.tensor([[True], [False], [False], [False]])
                with torch.no_grad():
                    value = model.denormalize_value(model(leaves, model.initial_state(1), first).values)[-1, 0]
                assert steps["truncation_value"][t] == pytest.approx(float(value), abs=1e-5)
                checked += 1
        assert checked > 4
