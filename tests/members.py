"""Members of a population at a scripted pool, for tests: made in a line, trained an iteration at a time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.training.member import Member
from pronghorn.training.sampler import Sampler
from pronghorn.types import EnvSpec, Ready
from scripted_pool import SPEC, ScriptedPool

SMALL: dict[str, Any] = {
    "env.workers": 1, "env.envs_per_worker": 4, "learner.unroll_length": 4, "learner.batch_unrolls": 2,
    "learner.epochs": 1, "learner.minibatches": 1, "learner.lr": 1e-2, "threads": 1, "max_lag": 16,
    "model.mlp_layers": (8,), "model.core_size": 8, "precision": "float32",
}  # fmt: skip


class ByRow:
    """Row r is played by player r % count, always."""

    def __init__(self, count: int) -> None:
        self.count = count

    def take(self, ready: Ready, begins: NDArray[np.bool_]) -> NDArray[np.int64]:
        taken: NDArray[np.int64] = ready.rows[begins] % self.count
        return taken


def settings(spec: EnvSpec = SPEC, **values: Any) -> Config:
    """A resolved config of four rows and tiny networks."""
    return resolve(replace(Config(env="x:y"), SMALL | values), spec)


def make_members(pool: Any, config: Config, count: int) -> list[Member]:
    """Members that act from the beginning."""
    changed = threading.Condition()
    members = [Member(i, config, pool, torch.device("cpu"), seed=0, changed=changed) for i in range(count)]
    for member in members:
        member.start_acting(pool)
    return members


def crew(count: int = 2, lengths: tuple[int, ...] = (3, 5, 7, 4), **values: Any) -> tuple[Sampler, list[Member]]:
    """Members and the sampler that serves them, each unit of the pool being one row."""
    pool = ScriptedPool(lengths, units=range(len(lengths)))
    members = make_members(pool, settings(**values), count)
    return Sampler(pool, [m.player for m in members], seed=0, seats=ByRow(count)), members


def train(sampler: Sampler, member: Member, iterations: int = 1) -> None:
    """Sample until the member has a batch, train on it, publish; so many times."""
    for _ in range(iterations):
        for _ in range(1_000):
            if member.has_batch():
                break
            sampler.step()
            discard_others(sampler, member)
        slots = member.store.take(member.learner.version, 0.0)
        assert slots is not None, "no batch came"
        member.train(member.gather(slots), lambda: False)
        member.publish(grant=False)


def discard_others(sampler: Sampler, member: Member) -> None:
    """Make room in full stores of the other players, whom nobody trains meanwhile."""
    for player in sampler.players:
        store = getattr(player, "store", None)
        if store is not None and store is not member.store and store.batch_waits():
            full = np.flatnonzero(store._status == 2)
            store._status[full] = 0
