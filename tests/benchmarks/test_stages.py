"""Every guarded stage does the work that it is said to do, on made-up data that show each kind of event."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import stages
from pronghorn.types import Event
from reference import KERNELS, mixed
from stages import DOOM, LANDER, STAGES, ReplayedPool, filled_store, settings

UNITS = {
    "transport-single": {50 * 16, 50 * 32}, "transport-vector": {50 * 64, 50 * 128},
    "act-doom-32": {32}, "act-mlp-512": {512}, "gather-doom": {1}, "learn-vector": {8192},
    "vtrace-32x64": {10}, "vtrace-128x1024": {10}, "draw-factors-128": {1280},
}  # fmt: skip


@pytest.mark.parametrize("name", UNITS)
def test_every_stage_yields_the_units_that_it_did(name: str) -> None:
    with contextlib.closing(STAGES[name].work()) as work:
        units = next(work)
    low, high = min(UNITS[name]), max(UNITS[name])
    assert low <= units <= high


def test_learning_counts_the_samples_of_its_batch() -> None:
    """Of a small batch of frames: the stage's own takes seconds. That every stage is tested is tested here too."""
    with contextlib.closing(stages.learn(DOOM, 4)) as work:
        assert [next(work) for _ in range(2)] == [4 * 32] * 2
    assert STAGES.keys() - UNITS.keys() == {"learn-doom", "sampler-16", "sampler-128", "sampler-1024"}


@pytest.mark.parametrize("num_rows", [16, 128, 1024])
def test_the_sampler_is_never_held_up_for_slots(num_rows: int) -> None:
    """The first of the 128 deliveries only begins episodes; each later one is a step of every row."""
    with contextlib.closing(STAGES[f"sampler-{num_rows}"].work()) as work:
        assert [next(work) for _ in range(4)] == [127 * num_rows, *[128 * num_rows] * 3]


def test_the_sizes_are_those_of_the_defaults() -> None:
    doom, lander = settings(DOOM, 64, **{"learner.batch_unrolls": 64}), settings(LANDER, 64)
    assert (doom.model.conv, doom.model.core, doom.model.core_size) == ("convnet_simple", "gru", 512)
    assert (doom.batch_samples, doom.updates_per_iteration, doom.threads) == (2048, 4, 1)
    assert (lander.batch_samples, lander.learner.epochs, lander.learner.minibatches) == (8192, 4, 64)
    assert lander.single_steps


def test_what_is_replayed_has_ends_and_truncations_with_their_final_observations() -> None:
    pool = ReplayedPool(LANDER, 128)
    first, *later = [pool.recv(0.0) for _ in range(1 + 2 * ReplayedPool.NUM_DELIVERIES)]
    assert set(first.event.tolist()) == {Event.FIRST}
    assert later[0] is later[ReplayedPool.NUM_DELIVERIES]
    assert any(ready.terminated.any() for ready in later)
    for ready in later:
        assert set(ready.event.tolist()) <= {Event.STEP, Event.LAST}
        assert (ready.event == Event.LAST).tolist() == (ready.terminated ^ ready.truncated).tolist()
        assert np.flatnonzero(ready.truncated).tolist() == ready.final_index.tolist()
        assert ready.final_obs["obs"].shape == (len(ready.final_index), 8)


def test_a_batch_that_is_learned_from_is_noise_within_the_space() -> None:
    config = settings(DOOM, 4, **{"learner.batch_unrolls": 4})
    store, slots = filled_store(config, DOOM, 512)
    batch = store.gather(slots, 0)
    assert batch.obs["obs"].float().std() > 50
    assert batch.steps["discrete"].amax((0, 1)).tolist() == [2, 1]
    assert batch.steps["log_prob"].unique().numpy() == pytest.approx([-np.log(6)])
    assert (batch.steps["first"][1:] == batch.steps["terminated"]).all()


def test_transport_leaves_the_process_on_the_cores_that_it_had() -> None:
    before = os.sched_getaffinity(0)
    with contextlib.closing(stages.transport("Single", 2)) as work:
        next(work)
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_kernels_can_be_called_again_and_again() -> None:
    kernel = mixed(tuple(KERNELS))
    kernel()
    kernel()
    assert {name for stage in STAGES.values() for name in stage.bound_by} == KERNELS.keys()
