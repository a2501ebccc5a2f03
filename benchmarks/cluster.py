"""Unrolls a second through the real transport of remote actors, without environments and without training.

    python benchmarks/cluster.py [--actors 1 2 4 8 16 32] [--seconds 20] [--json FILE]

A local Ray carries N actors, each of which answers every order at once with made-up unrolls: of DeepMind Lab's shape
(72x96x3 uint8, T = 100) and of Atari's (84x84x4 uint8, T = 20, a frame stack). They are encoded, sent, decoded and
written into the learner's store as in a run, with grants, weights and versions; the learner takes batches of 32, copies
each as it would for training, and publishes weights after every one. All of it shares this machine's cores: with more
actors than cores the numbers say how it behaves oversubscribed, not what N machines would do.

For each: unrolls/s, MB/s as sent and as they lie in the store, steps/s; and the learner's side alone, in ms an unroll:
received (checked, decoded and written into a slot) and gathered into a batch.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pronghorn.cluster.actor import Answer, Order, Plan, RemoteActor, versions
from pronghorn.cluster.crew import Crew
from pronghorn.cluster.engine import CarriedActor, RayEngine
from pronghorn.cluster.remote_sampler import RemoteSampler
from pronghorn.cluster.wire import Bytes
from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.machine import available_cores, limit_threads
from pronghorn.spec_file import spec_to_json
from pronghorn.training.acting import Snapshot
from pronghorn.training.member import Member
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec

ROWS = 8  # of each actor
BATCH = 32
SHAPES: dict[str, tuple[LeafSpec, int, dict[str, Any]]] = {
    "dmlab": (LeafSpec((72, 96, 3), "uint8", "image", "hwc", 0, 255), 100,
              {"model.conv": "resnet_impala", "model.core": "lstm", "model.core_size": 256}),
    "atari": (LeafSpec((4, 84, 84), "uint8", "image", "chw", 0, 255), 20,
              {"model.conv": "nature", "model.core": "none"}),
}  # fmt: skip


class MadeUpRows:
    """What is known of an actor's environments; there are none."""

    restarts, tasks = 0, ("made up",)

    def __init__(self, shape: str) -> None:
        self.spec = EnvSpec({"obs": SHAPES[shape][0]}, ActionSpec((9,)), frame_skip=4, name=shape)
        self.num_rows, self.task_ids = ROWS, np.zeros(ROWS, np.int64)
        self.unit_ids = self.task_ids

    def close(self) -> None: ...


class MadeUpActor(RemoteActor):
    """Has all that it may send finished at once."""

    def build(self, plan: Plan) -> dict[str, Any]:
        self.pool, self._seed = MadeUpRows(plan.settings["env"]["id"].partition(":")[2]), plan.seed
        limit_threads(1)
        return {
            "spec": spec_to_json(self.pool.spec), "num_rows": ROWS, "tasks": self.pool.tasks,
            "task_ids": self.pool.task_ids, "unit_ids": self.pool.unit_ids, "describe": f"{ROWS} rows made up",
        }  # fmt: skip

    def exchange(self, order: Order, weights: Bytes | None) -> Answer:
        if weights is not None:
            self._publisher.latest = Snapshot(order.version, {"bytes": torch.from_numpy(weights.copy())})
        self._store.release(order.grants)
        if len(order.grants):
            slots = self._store.acquire(len(order.grants), order.version)
            assert slots is not None
            self._fill(slots, order.version)
            self._store.commit(slots)
        return self._answer(self._take_full())

    def _fill(self, slots: np.ndarray[Any, Any], version: int) -> None:
        """Noise in every slot, drawn once; of a frame stack, each frame in as many rows as a stack has."""
        self._store.steps["version"][slots] = version
        leaf, obs = self.pool.spec.observation["obs"], self._store.obs["obs"].numpy()
        if obs[slots[0]].any():
            return
        rng = np.random.default_rng(self.index)
        for slot in range(len(obs)):
            if leaf.layout == "hwc":
                obs[slot] = rng.integers(0, 256, obs[slot].shape, np.uint8)
                continue
            frames = rng.integers(0, 256, (obs.shape[1] + leaf.shape[0] - 1, *leaf.shape[1:]), np.uint8)
            for t in range(obs.shape[1]):
                obs[slot, t] = frames[t : t + leaf.shape[0]]


class CarriedMadeUp(CarriedActor):
    """On Ray."""

    def make(self, index: int, incarnation: int) -> MadeUpActor:
        return MadeUpActor(index, incarnation)


def settings(shape: str, actors: int) -> Config:
    """Of a run of so many actors, which share the cores."""
    _, length, model = SHAPES[shape]
    cpus = min(1.0, int(1000 * available_cores() / actors) / 1000)
    values = {
        "cluster.address": "local", "cluster.actors": actors, "cluster.cpus_per_actor": cpus, "threads": 1,
        "cluster.object_store_mb": 1024, "env.workers": 1, "env.envs_per_worker": ROWS, "max_lag": 1000,
        "learner.unroll_length": length, "learner.batch_unrolls": BATCH, "learner.minibatches": 1, "device": "cpu",
        "precision": "float32",
    }  # fmt: skip
    return resolve(replace(Config(env=f"x:{shape}"), values | model), MadeUpRows(shape).spec)


class Learner:
    """Takes batches, trains on none, and publishes weights after each."""

    def __init__(self, member: Member) -> None:
        self.member, self.num_batches, self.gather_s, self.stop = member, 0, 0.0, threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        limit_threads(1)
        member = self.member
        while not self.stop.is_set():
            slots = member.store.take(member.learner.version, 0.1)
            if slots is None:
                continue
            start = time.perf_counter()
            member.gather(slots)
            self.gather_s += time.perf_counter() - start
            self.num_batches += 1
            member.learner.version += 1
            member.publisher.latest = Snapshot.of(member.model, member.learner.version)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.stop.set()


def measure(shape: str, actors: int, seconds: float) -> dict[str, float]:
    """One number of actors."""
    config = settings(shape, actors)
    crew = Crew(config, RayEngine.open(config.cluster, CarriedMadeUp), seed=0)
    try:
        member = Member(0, config, crew, torch.device("cpu"), seed=0, changed=threading.Condition())
        sampler = RemoteSampler(crew, config, member.store, member.start_publishing(), member.tracker)
        learner = Learner(member)
        threads = [threading.Thread(target=sampler.run, args=(learner.fail,)), threading.Thread(target=learner.run)]
        for thread in threads:
            thread.start()
        record = _watch(shape, sampler, learner, seconds)
        sampler.stop.set()
        learner.stop.set()
        for thread in threads:
            thread.join()
        if learner.error:
            raise learner.error
        member.learner.close()
        return {"actors": actors, **record}
    finally:
        crew.close()


def _watch(shape: str, sampler: RemoteSampler, learner: Learner, seconds: float) -> dict[str, float]:
    """From the first batch on."""
    while learner.num_batches < 1 and not learner.stop.is_set():
        time.sleep(0.05)
    before, marks = sampler.counts(), (sampler.seconds["record"], learner.gather_s, learner.num_batches)
    start = time.perf_counter()
    learner.stop.wait(seconds)
    span, after = time.perf_counter() - start, sampler.counts()
    unrolls, num_bytes = (after[name] - before[name] for name in ("remote_unrolls", "remote_bytes"))
    leaf, length, _ = SHAPES[shape]
    batches = max(1, learner.num_batches - marks[2])
    return {
        "unrolls_per_s": unrolls / span, "sent_mb_per_s": num_bytes / span / 1e6,
        "stored_mb_per_s": unrolls / span * (length + 1) * leaf.num_bytes / 1e6, "steps_per_s": unrolls * length / span,
        "kb_per_unroll": num_bytes / max(1, unrolls) / 1e3,
        "receive_ms": 1e3 * (sampler.seconds["record"] - marks[0]) / max(1, unrolls),
        "gather_ms": 1e3 * (learner.gather_s - marks[1]) / (batches * BATCH),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    for shape in args.shapes:
        for actors in args.actors:
            record = measure(shape, actors, args.seconds)
            results.setdefault(shape, []).append(record)
            print(shape, ", ".join(f"{name} {value:.4g}" for name, value in record.items()), flush=True)
    if args.json:
        facts = {"cores": available_cores(), "batch": BATCH, "rows": ROWS, "seconds": args.seconds, **versions()}
        args.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
