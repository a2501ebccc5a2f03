"""Received unrolls in the learner's store, by the way of a CPU and by that of a GPU (whose fences do nothing here)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pronghorn.cluster.intake import Intake
from pronghorn.cluster.wire import Block, Origin, Schema, Unrolls, encode
from pronghorn.training.store import Store
from pronghorn.types import ActionSpec, LeafSpec

LEAVES = {
    "obs": LeafSpec((2,), "float32", "vector"), "flags": LeafSpec((3,), "bool", "binary"),
    "picture": LeafSpec((4, 6, 5), "uint8", "image", "chw"),
}  # fmt: skip
ACTION = ActionSpec(discrete=(3,), low=(-1.0,), high=(1.0,))


@pytest.mark.parametrize("way", ["_write_here", "_write_there"])
def test_unrolls_lie_in_their_slots_and_nowhere_else(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, rng = Schema(LEAVES, ACTION, 3, 2), np.random.default_rng(0)
    sent = {
        name: rng.integers(0, 2, shape).astype(dtype) if dtype.kind == "b" else rng.integers(1, 99, shape).astype(dtype)
        for name, shape, dtype in schema.arrays(2)
    }
    obs = {k: sent[f"obs/{k}"] for k in LEAVES}
    steps = {k: sent[f"steps/{k}"] for k in schema.fields}
    block = Block(schema, encode(schema, Origin("r", 0, 0), Unrolls(np.arange(2), obs, steps, sent["state"])))
    store = Store(
        LEAVES, ACTION, num_slots=4, unroll_length=3, state_size=2, batch_unrolls=2, max_lag=16,
        device=torch.device("cpu"),
    )  # fmt: skip
    intake, slots = Intake(store), np.array([3, 1])
    monkeypatch.setattr(intake, "_write_here", getattr(intake, way))
    intake.write(block, slots)
    for name, leaf in obs.items():
        np.testing.assert_array_equal(store.obs[name].numpy()[slots], leaf)
        assert not store.obs[name].numpy()[[0, 2]].any()
    for name, array in steps.items():
        np.testing.assert_array_equal(store.steps[name][slots], array)
    np.testing.assert_array_equal(store.state.numpy()[slots], sent["state"])
    assert not store.state.numpy()[[0, 2]].any()
