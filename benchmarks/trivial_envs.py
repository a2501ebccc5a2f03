"""Environments that do nothing, so that what is measured is what brings their steps to the trainer."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

EPISODE_STEPS = 200
NUM_ROWS = 64


class Single(gym.Env[Any, Any]):
    """One agent; episodes of 200 steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (8,), np.float32)
        self.action_space = spaces.Discrete(4)
        self.count, self.obs = 0, np.zeros(8, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return self.obs, {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.obs, 0.0, self.count == EPISODE_STEPS, False, {}


class Rows(VectorEnv[Any, Any, Any]):
    """64 rows that step together and never end."""

    def __init__(self) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = NUM_ROWS
        self.single_observation_space = spaces.Box(-1.0, 1.0, (8,), np.float32)
        self.single_action_space = spaces.Discrete(4)
        self.observation_space = spaces.Box(-1.0, 1.0, (NUM_ROWS, 8), np.float32)
        self.action_space = spaces.MultiDiscrete([4] * NUM_ROWS)
        self.obs, self.reward = np.zeros((NUM_ROWS, 8), np.float32), np.zeros(NUM_ROWS, np.float32)
        self.never = np.zeros(NUM_ROWS, np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return self.obs, {}

    def step(self, actions: Any) -> Any:
        return self.obs, self.reward, self.never, self.never, {}
