"""Members of a population at a scripted pool, for tests: made in a line, trained an iteration at a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.training.member import Member
from pronghorn.training.sampler import Sampler, Seats
from pronghorn.types import FIRST, LAST, EnvSpec, Ready
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


class Arena:
    """A pool that is only asked for its facts and told settings: games of two, or worlds of one row each."""

    restarts = 0

    def __init__(self, num_envs: int = 2, agents: tuple[str, ...] = ("a", "b"), rewards: Any = None) -> None:
        self.spec = EnvSpec(
            SPEC.observation, SPEC.action, rows_per_env=max(1, len(agents)), rows_wait=bool(agents), name="arena",
            agents=agents, rewards=rewards or {},
        )  # fmt: skip
        self.num_rows = num_envs * self.spec.rows_per_env
        self.tasks, self.task_ids = ("arena",), np.zeros(self.num_rows, np.int64)
        self.unit_ids = np.arange(self.num_rows) // self.spec.rows_per_env
        self.told: list[tuple[str, Any, int | None]] = []

    def set_option(self, name: str, value: Any, env: int | None = None) -> None:
        self.told.append((name, copy.deepcopy(value), env))

    def seat(self, seats: Seats, rows: Sequence[int], event: int, game: int, outcomes: Any = None) -> list[int]:
        """Let these rows begin an episode in that game, after one that ended with these outcomes: who plays them."""
        numbers, n = np.array(rows, np.int64), len(rows)
        never, over = np.zeros(n, np.bool_), np.full(n, event == LAST)
        told = [] if outcomes is None else [{"row": rows[0], "outcomes": outcomes}]
        ready = Ready(
            numbers, np.full(n, event, np.uint8), {}, np.zeros(n, np.float32), never, never, over,
            np.zeros(0, np.int64), {}, records=told, game=np.full(n, game),
        )  # fmt: skip
        return seats.take(ready, np.full(n, event in (FIRST, LAST))).tolist()
