"""Who plays rows: random actions keep to masks and bounds."""

from __future__ import annotations

import numpy as np

from pronghorn.evaluation.at_rows import random_actions
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec


def test_random_actions_are_uniform_over_what_the_mask_allows() -> None:
    leaves = {"x": LeafSpec((1,), "float32", "vector"), "action_mask": LeafSpec((5,), "uint8", "mask")}
    spec = EnvSpec(leaves, ActionSpec((3, 2), (-2.0,), (float("inf"),)))
    obs = {"action_mask": np.tile(np.array([1, 0, 1, 0, 1], np.uint8), (4000, 1))}  # 0 or 2 of three, 1 of two
    discrete, continuous = random_actions(spec, obs, 4000, np.random.default_rng(0))
    assert discrete.shape == (4000, 2)
    assert np.bincount(discrete[:, 0], minlength=3)[1] == 0
    assert abs(np.bincount(discrete[:, 0])[0] - 2000) < 150
    assert set(discrete[:, 1].tolist()) == {1}
    assert continuous.dtype == np.float32
    assert (continuous.min() >= -2.0, continuous.max() <= 1e3) == (True, True)
    free, nothing = random_actions(EnvSpec({}, ActionSpec((3,))), {}, 100, np.random.default_rng(0))
    assert set(free[:, 0].tolist()) == {0, 1, 2}
    assert nothing.shape == (100, 0)
