"""A remote actor: the ordinary environment side and sampler on another machine, with a copy of the policy.

It trains nothing and knows no Ray: what calls it is engine.py, or a test. Its store holds as many unrolls as the
learner lets it have in flight. A slot that is FREE here is a slot that the learner has set aside for it there:

    learner's ──order grants──▶ FREE ──▶ FILLING ──▶ FULL ──answer carries──▶ learner's
"""

from __future__ import annotations

import functools
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

import pronghorn
from pronghorn.cluster.wire import FORMAT, Bytes, Origin, Schema, Unrolls, encode
from pronghorn.config import derive_seed, replace
from pronghorn.envs.registry import make_pool, register_env
from pronghorn.errors import PronghornError
from pronghorn.evaluation.policy import make_actor
from pronghorn.machine import limit_threads
from pronghorn.settings_file import from_tree
from pronghorn.spec_file import spec_to_json
from pronghorn.training.acting import Snapshot, make_acting
from pronghorn.training.metrics import EpisodeTracker
from pronghorn.training.player import Player, Publisher
from pronghorn.training.sampler import Sampler
from pronghorn.training.store import Slots, Store, stored_leaves

SEEDS = 14  # path of the actors' seeds below the run's, besides those of evaluation, replay and others

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What an actor needs to build its environments.

    settings: of the run, as nested tables.  registered: names given by `register_env`.
    directory, import_path: of the learner's process, to be used where they exist.
    """

    settings: Mapping[str, Any]
    seed: int
    registered: Mapping[str, str]
    directory: str
    import_path: tuple[str, ...]


@dataclass(frozen=True)
class Order:
    """Go on sampling. version: of the weights that come with it, or that the actor has.

    grants: [n] its slots that it may fill again.  wait_s: answer after so long, also without a finished unroll.
    """

    version: int
    grants: Slots
    wait_s: float


@dataclass(frozen=True)
class Answer:
    """What came of it.

    block: finished unrolls (wire.py), or None.  filling, began: [m] slots in progress, the versions they began under.
    version: of the weights that whatever begins from now on is begun under, or later ones.
    blocked: no row can go on without more grants.
    steps, lost, restarts: decisions recorded, unrolls lost with their workers, workers restarted, since it began.
    episodes: what `EpisodeTracker.absorb` takes.  seconds: of its sampler's stages, since it began.
    """

    block: Bytes | None
    filling: Slots
    began: NDArray[np.int64]
    version: int
    blocked: bool
    steps: int
    lost: int
    restarts: int
    episodes: dict[str, Any]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Failure:
    """An actor could not do what it was told. ours: the error is one of Pronghorn's own, whose message says it all."""

    type: str
    message: str
    traceback: str
    ours: bool

    def __str__(self) -> str:
        return self.message if self.ours else f"{self.type}: {self.message}\n{self.traceback}"


def reported(method: Callable[..., T]) -> Callable[..., T | Failure]:
    """An exception becomes a `Failure`, which carries its traceback and can be read wherever it arrives."""

    @functools.wraps(method)
    def wrapper(*args: Any) -> T | Failure:
        try:
            return method(*args)
        except Exception as error:
            told, ours = traceback.format_exc().strip(), isinstance(error, PronghornError)
            return Failure(type(error).__name__, str(error), told, ours)

    return wrapper


def versions() -> dict[str, str]:
    """Of what must agree between the learner and its actors."""
    return {
        "pronghorn": pronghorn.__version__, "wire": str(FORMAT), "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
    }  # fmt: skip


class RemoteActor:
    """One actor. Its methods are called one after another, in the order in which they stand here."""

    def __init__(self, index: int, incarnation: int) -> None:
        """incarnation: how often the actor of this number was replaced before."""
        self.index, self.incarnation = index, incarnation

    def hello(self) -> dict[str, Any]:
        """Who it is: host, process, versions."""
        return {"host": socket.gethostname(), "pid": os.getpid(), "versions": versions()}

    @reported
    def build(self, plan: Plan) -> dict[str, Any]:
        """Start the environments; what they look like: spec (JSON), num_rows, tasks, task_ids, describe."""
        _become_like(plan)
        config = from_tree(plan.settings, "the learner's settings")
        # Other actors on this machine see the same cores and would pin to the same ones.
        config = replace(config, {"env.pin": "off"})
        limit_threads(max(1, int(config.cluster.cpus_per_actor)))
        self._seed = derive_seed(plan.seed, SEEDS, self.index, self.incarnation)
        self.pool = pool = make_pool(config, seed=self._seed, ordered=False)
        return {
            "spec": spec_to_json(pool.spec), "num_rows": pool.num_rows, "tasks": pool.tasks,
            "task_ids": pool.task_ids, "unit_ids": pool.unit_ids, "describe": getattr(pool, "describe", str)(),
        }  # fmt: skip

    @reported
    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        """Make the network and the store of a resolved config; nothing moves before the first order."""
        config, pool = from_tree(settings, "the learner's settings"), self.pool
        cpu, leaves = torch.device("cpu"), stored_leaves(pool.spec, config.model)
        model = make_actor(config, pool.spec, cpu)
        self._store = Store(
            leaves, pool.spec.action, num_slots=config.cluster.unrolls_per_actor(pool.num_rows),
            unroll_length=config.learner.unroll_length, state_size=model.state_size, batch_unrolls=1,
            max_lag=config.max_lag, waits=False, device=cpu,
        )  # fmt: skip
        self._give_up_slots()
        self._schema = Schema(leaves, pool.spec.action, config.learner.unroll_length, model.state_size)
        self._origin = Origin(run, self.index, self.incarnation)
        self._publisher = Publisher(Snapshot(-1, {}))
        self._episodes = EpisodeReport(pool.num_rows, pool.tasks, pool.task_ids)
        acting = make_acting(model, self._store, pool.num_rows, leaves)
        self._player = Player(pool, self._store, acting, self._publisher, self._episodes)
        self._sampler = Sampler(pool, [self._player], seed=self._seed)

    @reported
    def exchange(self, order: Order, weights: Bytes | None) -> Answer:
        """Sample until unrolls are finished, none can go on, or the time is up. weights: see `pack_weights`."""
        if weights is not None:
            self._publisher.latest = Snapshot(order.version, safetensors.torch.load(weights.tobytes()))
        self._store.release(order.grants)
        until = time.monotonic() + order.wait_s
        while not self._store.batch_waits() and time.monotonic() < until:
            self._sampler.step()
            if self._sampler.blocked:
                break
        return self._answer(self._take_full())

    def close(self) -> None:
        """End the environments."""
        if hasattr(self, "pool"):
            self.pool.close()

    def _answer(self, full: Slots) -> Answer:
        block = encode(self._schema, self._origin, self._unrolls(full)) if len(full) else None
        filling, began = self._store.filling()
        return Answer(
            block, filling, began, self._publisher.latest.version, self._sampler.blocked, self._player.num_steps,
            self._store.num_discarded, self.pool.restarts, self._episodes.told(), dict(self._sampler.seconds),
        )  # fmt: skip

    def _give_up_slots(self) -> None:
        """No slot is granted before the first order: all begin as the learner's."""
        slots = self._store.acquire(self._store.num_slots, 0)
        assert slots is not None
        self._store.commit(slots)
        self._take_full()

    def _take_full(self) -> Slots:
        """All finished unrolls, oldest first, which are the learner's from now on."""
        taken = iter(lambda: self._store.take(0, 0.0), None)
        return np.concatenate([np.empty(0, np.int64), *taken])

    def _unrolls(self, slots: Slots) -> Unrolls:
        store = self._store
        return Unrolls(
            slots, {k: v.numpy()[slots] for k, v in store.obs.items()}, {k: v[slots] for k, v in store.steps.items()},
            store.state.numpy()[slots],
        )  # fmt: skip


class EpisodeReport(EpisodeTracker):
    """Finished episodes, kept until they are told to the learner, who makes the statistics."""

    def __init__(self, num_rows: int, tasks: tuple[str, ...], task_ids: NDArray[np.int64]) -> None:
        super().__init__(num_rows, tasks, task_ids)
        self._episodes: list[tuple[int, float, int]] = []
        self._ends: list[dict[str, Any]] = []

    def told(self) -> dict[str, Any]:
        """What `EpisodeTracker.absorb` takes: what ended since the last call, and how long what goes on has lasted."""
        report = {"episodes": self._episodes, "records": self._ends, "lengths": self._lengths.copy()}
        self._episodes, self._ends = [], []
        return report

    def _count_episode(self, row: int, episode_return: float, length: int) -> None:
        self._episodes.append((row, episode_return, length))

    def _keep_record(self, record: Mapping[str, Any]) -> None:
        self._ends.append({k: v for k, v in record.items() if isinstance(v, int | float)})


def pack_weights(tensors: Mapping[str, torch.Tensor]) -> Bytes:
    """A snapshot's tensors as bytes, which `exchange` takes (safetensors)."""
    packed = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return np.frombuffer(packed, np.uint8)


def _become_like(plan: Plan) -> None:
    """Find modules and files where the learner finds them, as far as this machine has them."""
    if plan.directory and os.path.isdir(plan.directory):
        os.chdir(plan.directory)
    sys.path += [path for path in plan.import_path if path not in sys.path and os.path.exists(path)]
    for name, target in plan.registered.items():
        register_env(name, target)
