"""The stages of training that guard.py watches, each a generator of the units of work that it did. It times nothing.

They are made of training's own parts, as in pronghorn.bench.stages, but with fixed sizes, made-up data and one thread,
so that neither the environment nor the number of cores matters.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pronghorn.bench.stages import ConstantPolicy, MadeUpPool, act
from pronghorn.config import Config, EnvConfig, replace
from pronghorn.defaults import resolve
from pronghorn.envs.registry import make_pool
from pronghorn.evaluation.policy import build_model
from pronghorn.ops.distributions import ActionDistribution, num_params
from pronghorn.ops.returns import vtrace
from pronghorn.training.acting import EagerActing, Snapshot
from pronghorn.training.learner import Learner
from pronghorn.training.metrics import EpisodeTracker
from pronghorn.training.player import Player, Publisher
from pronghorn.training.sampler import Sampler
from pronghorn.training.store import Slots, Store, make_store, stored_leaves
from pronghorn.types import ActionSpec, EnvSpec, Event, LeafSpec, Ready

DOOM = EnvSpec({"obs": LeafSpec((72, 128, 3), "uint8", "image", "hwc", 0, 255)}, ActionSpec((3, 2)), frame_skip=4)
LANDER = EnvSpec({"obs": LeafSpec((8,), "float32", "vector")}, ActionSpec((4,)))
FACTORS = ActionSpec((3, 3, 2, 2, 2, 8), (-1.0,), (1.0,))
CPU = torch.device("cpu")
Work = Generator[int]


@dataclass(frozen=True)
class Stage:
    """work: makes the generator of units.  unit: what it counts.  bound_by: kernels of reference.py, alike in kind."""

    work: Callable[[], Work]
    unit: str
    bound_by: tuple[str, ...]
    by_wall: bool = False  # another process does a part of the work, so CPU time would not be all of it


def settings(spec: EnvSpec, num_rows: int, **values: Any) -> Config:
    """The defaults for such an environment, with `num_rows` rows that act together, on one thread."""
    fixed = {"device": "cpu", "precision": "float32", "threads": 1, "env.workers": 1, "env.envs_per_worker": num_rows,
             "env.groups": 1, "env.pin": "off"}  # fmt: skip
    fixed["learner.lr"] = 1e-12  # weights that stand still keep all numbers finite
    return resolve(replace(Config(env=EnvConfig(id="made_up:environment")), fixed | values), spec)


# ---------------------------------------------------------------- collecting


class ReplayedPool(MadeUpPool):
    """A pool that delivers a few Ready again and again, made beforehand, so that it takes no time itself."""

    NUM_DELIVERIES = 32

    def __init__(self, spec: EnvSpec, num_rows: int) -> None:
        super().__init__(spec, num_rows)
        make = super().recv
        self._first: Ready | None = make(0.0)
        self._deliveries = itertools.cycle([_with_truncation(make(0.0)) for _ in range(self.NUM_DELIVERIES)])

    def recv(self, *_timeouts: float) -> Ready:
        first, self._first = self._first, None
        return first or next(self._deliveries)


def _with_truncation(ready: Ready) -> Ready:
    """The first row that ends here is cut by a limit, as some always are, so its final observation is valued."""
    ready.final_index = np.flatnonzero(ready.event == Event.LAST)[:1]
    ready.truncated[ready.final_index], ready.terminated[ready.final_index] = True, False
    ready.final_obs = {name: leaf[ready.final_index] for name, leaf in ready.obs.items()}
    return ready


def sample(num_rows: int) -> Work:
    """The sampler's own cost: receive, record, act by a policy without arithmetic, write, send. Whole unrolls."""
    config, pool, policy = settings(LANDER, num_rows), ReplayedPool(LANDER, num_rows), ConstantPolicy(LANDER)
    store = make_store(config, pool, policy.state_size, CPU)
    tracker = EpisodeTracker(num_rows, pool.tasks, pool.task_ids)
    acting = EagerActing(policy, store, num_rows)
    sampler = Sampler(pool, [Player(pool, store, acting, Publisher(Snapshot.of(policy, 0)), tracker)], seed=0)
    while True:
        before = sampler.num_steps
        for _ in range(config.learner.unroll_length):
            sampler.step()
        slots = store.take(0, 0.0)
        if slots is not None:
            store.release(slots)
        yield sampler.num_steps - before


def transport(name: str, num_envs: int) -> Work:
    """One worker process with environments that do nothing, in two groups, answered at once.

    Both processes share one core, so that what is measured is the work of both whatever the number of cores.
    """
    target = f"{Path(__file__).with_name('trivial_envs.py')}:{name}"
    config = Config(env=EnvConfig(id=target, workers=1, envs_per_worker=num_envs, groups=2, pin="off"))
    with _on_one_core(), contextlib.closing(make_pool(config, seed=0, ordered=False)) as pool:
        discrete, continuous = np.zeros((pool.num_rows, 1), np.int64), np.zeros((pool.num_rows, 0), np.float32)
        while True:
            steps = 0
            for _ in range(50):
                ready = pool.recv(10.0)
                assert ready is not None
                pool.send(ready.rows, discrete[: len(ready.rows)], continuous[: len(ready.rows)])
                steps += len(ready.rows)
            yield steps


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """Keep this thread, and the processes that it starts, on one core, where the system allows that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def infer(spec: EnvSpec, num_rows: int) -> Work:
    """The forward pass of the default network, and its sampled actions with their log-probs: `EagerActing.infer`."""
    return act(settings(spec, num_rows), spec)


# ---------------------------------------------------------------- learning


def filled_store(
    config: Config, spec: EnvSpec, state_size: int, device: torch.device = CPU
) -> tuple[Store, Slots]:
    """A store, and the slots of a batch in it whose observations are noise."""
    store, rng = make_store(config, MadeUpPool(spec, config.num_envs), state_size, device), np.random.default_rng(0)
    slots = store.acquire(config.learner.batch_unrolls, 0)
    assert slots is not None
    made_up = MadeUpPool(spec, config.learner.unroll_length + 1)
    for name, leaf in stored_leaves(spec, config.model).items():
        for slot in slots.tolist():
            unroll = store.obs[name][slot]
            if leaf.kind == "image" and unroll.dtype == torch.uint8:
                unroll.random_(0, 256)
            elif unroll.is_floating_point():
                unroll.normal_()
            else:  # codes and masks
                unroll.copy_(torch.from_numpy(made_up.make_up(leaf)))
    steps, shape = store.steps, store.steps["reward"].shape
    steps["reward"][:] = rng.standard_normal(shape)
    steps["terminated"][:] = rng.random(shape) < 0.01
    steps["first"][:, 1:] = steps["terminated"]
    for factor, size in enumerate(spec.action.discrete):
        steps["discrete"][..., factor] = rng.integers(size, size=shape)
    steps["log_prob"][:] = -np.log(spec.action.discrete).sum()  # of a uniform policy, as a new network nearly is
    return store, slots


def gather() -> Work:
    """Batches of 64 unrolls of 33 Doom frames, copied out of the store."""
    store, slots = filled_store(settings(DOOM, 64, **{"learner.batch_unrolls": 64}), DOOM, 512)
    while True:
        store.gather(slots, 0)
        yield 1


def learn(spec: EnvSpec, num_unrolls: int) -> Work:
    """`Learner.iterate` of one batch, with all its epochs and minibatches, again and again."""
    torch.manual_seed(0)
    config = settings(spec, num_unrolls, **{"learner.batch_unrolls": num_unrolls})
    network = build_model(config.model, spec)
    store, slots = filled_store(config, spec, network.state_size)
    learner, batch = Learner(config, network), store.gather(slots, 0)
    while True:
        learner.iterate(batch)
        yield batch.num_samples


# ---------------------------------------------------------------- formulas


def correct(num_steps: int, num_unrolls: int) -> Work:
    """V-trace of [T, B]."""
    torch.manual_seed(0)
    log_rhos, rewards, values, following = torch.randn(4, num_steps, num_unrolls).unbind()
    terminated, truncated = (torch.rand(2, num_steps, num_unrolls) < 0.01).unbind()
    while True:
        for _ in range(10):
            vtrace(log_rhos, rewards, terminated, truncated, values, following, 0.99)
        yield 10


def draw(num_rows: int) -> Work:
    """A distribution of six factors and a bounded continuous dimension made from parameters, a sample, its log-prob."""
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(num_rows, num_params(FACTORS), generator=generator)
    with torch.inference_mode():
        while True:
            for _ in range(10):
                distribution = ActionDistribution(params, FACTORS)
                distribution.log_prob(*distribution.sample(generator))
            yield 10 * num_rows


STAGES = {
    "sampler-16": Stage(partial(sample, 16), "row", ("calls",)),
    "sampler-128": Stage(partial(sample, 128), "row", ("calls",)),
    "sampler-1024": Stage(partial(sample, 1024), "row", ("calls", "rows")),
    "transport-single": Stage(partial(transport, "Single", 32), "step", ("calls",), by_wall=True),
    "transport-vector": Stage(partial(transport, "Rows", 2), "step", ("calls",), by_wall=True),
    "act-doom-32": Stage(partial(infer, DOOM, 32), "row", ("arithmetic", "memory")),
    "act-mlp-512": Stage(partial(infer, LANDER, 512), "row", ("calls", "arithmetic")),
    "gather-doom": Stage(gather, "batch", ("memory",)),
    "learn-doom": Stage(partial(learn, DOOM, 64), "sample", ("arithmetic", "memory")),
    "learn-vector": Stage(partial(learn, LANDER, 64), "sample", ("calls",)),
    "vtrace-32x64": Stage(partial(correct, 32, 64), "call", ("calls",)),
    "vtrace-128x1024": Stage(partial(correct, 128, 1024), "call", ("calls", "memory")),
    "draw-factors-128": Stage(partial(draw, 128), "row", ("calls",)),
}
