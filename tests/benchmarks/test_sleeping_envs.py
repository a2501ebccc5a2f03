"""Step times of the environment that sleeps: drawn as it says. Nothing sleeps here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from sleeping_envs import Sleeping


@pytest.mark.parametrize("variation", [0.0, 0.5, 2.0])
def test_durations_have_the_mean_and_the_variation_asked_for(variation: float) -> None:
    env = Sleeping(mean_ms=10.0, variation=variation)
    env.reset(seed=1)
    drawn = np.array([env.duration_s() for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(0.010, rel=0.05)
    assert drawn.std() / drawn.mean() == pytest.approx(variation, rel=0.05, abs=1e-9)
