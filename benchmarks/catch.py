"""A task in pixels that is learned within a minute."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class Catch(gym.Env[Any, Any]):
    """A ball falls through a grid of 9 x 9 cells, the paddle below goes left, stays or goes right: 1 or -1 at the end.

    Shown as 36 x 36 pixels, so that the network for pixels plays it.
    """

    SIZE, CELL = 9, 4

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (self.SIZE * self.CELL, self.SIZE * self.CELL, 1), np.uint8)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.ball, self.column, self.paddle = 0, int(self.np_random.integers(self.SIZE)), self.SIZE // 2
        return self._picture(), {}

    def step(self, action: Any) -> Any:
        self.paddle = int(np.clip(self.paddle + action - 1, 0, self.SIZE - 1))
        self.ball += 1
        over = self.ball == self.SIZE - 1
        reward = (1.0 if self.paddle == self.column else -1.0) if over else 0.0
        return self._picture(), reward, over, False, {}

    def _picture(self) -> NDArray[np.uint8]:
        grid = np.zeros((self.SIZE, self.SIZE), np.uint8)
        grid[self.ball, self.column] = grid[-1, self.paddle] = 255
        return grid.repeat(self.CELL, 0).repeat(self.CELL, 1)[..., None]
