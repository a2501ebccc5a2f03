"""An environment whose steps take time without taking the processor, as long and as unevenly as one wants."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Sleeping(gym.Env[Any, Any]):
    """Episodes of 200 steps, each of which sleeps for a time drawn from a gamma distribution.

    mean_ms: its mean.  variation: its standard deviation over its mean; 0: always the same, 1: exponential.
    """

    def __init__(self, mean_ms: float = 2.0, variation: float = 0.0) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (8,), np.float32)
        self.action_space = spaces.Discrete(4)
        self.mean_s, self.variation = mean_ms / 1000.0, variation
        self.count, self.obs = 0, np.zeros(8, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.obs, {}

    def step(self, action: Any) -> Any:
        time.sleep(self.duration_s())
        self.count += 1
        return self.obs, 0.0, self.count == 200, False, {}

    def duration_s(self) -> float:
        """Of the next step."""
        if self.variation == 0.0:
            return self.mean_s
        # Gamma(k, theta): mean k theta, deviation / mean = k^(-1/2)
        shape = self.variation**-2
        return float(self.np_random.gamma(shape, self.mean_s / shape))
