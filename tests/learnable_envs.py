"""Tiny environments that a right learner solves in seconds and a wrong one does not. Worker-side syntax."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from gymnasium import Env, spaces


class Match(Env[Any, Any]):
    """Name the bit that is shown: 1 a step for the right action. Episodes of 8 steps: best return 8, random 4."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.count = self.bit = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        reward = float(action == self.bit)
        self.count += 1
        return self._observe(), reward, self.count == 8, False, {}

    def _observe(self) -> Any:
        self.bit = int(self.np_random.integers(2))
        return np.array([self.bit, 1 - self.bit], np.float32)


class Far(Match):
    """The same, shown as 5,000 or 6,000: nothing can be made of that without observation statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def _observe(self) -> Any:
        self.bit = int(self.np_random.integers(2))
        return np.array([5000 + 1000 * self.bit], np.float32)


class Picture(Match):
    """The same, shown as a small image whose left or right half is lit."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def _observe(self) -> Any:
        self.bit = int(self.np_random.integers(2))
        image = self.np_random.integers(0, 128, (8, 8, 3), np.uint8)
        image[:, 4 * self.bit : 4 * self.bit + 4] += 127
        return image


class Recall(Env[Any, Any]):
    """A cue is shown once and must be named at the last of `length` steps: return 1 with memory, 0.5 without."""

    def __init__(self, length: int = 3) -> None:
        self.length = length
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.count = self.cue = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count, self.cue = 0, int(self.np_random.integers(2))
        return np.array([2.0 * self.cue - 1.0, 0.0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        over = self.count == self.length
        reward = float(over and action == self.cue)
        return np.array([0.0, self.count / self.length], np.float32), reward, over, False, {}


class Masked(Env[Any, Any]):
    """One legal action of five, which changes every step; an illegal one raises."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {"action_mask": spaces.MultiBinary(5), "x": spaces.Box(-1, 1, (1,), np.float32)}
        )
        self.action_space = spaces.Discrete(5)
        self.count = self.legal = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        if action != self.legal:
            raise ValueError(f"illegal action {action}")
        self.count += 1
        return self._observe(), 1.0, self.count == 7, False, {}

    def _observe(self) -> Any:
        self.legal = int(self.np_random.integers(5))
        mask = np.zeros(5, np.int8)
        mask[self.legal] = 1
        return {"action_mask": mask, "x": np.zeros(1, np.float32)}


class Aim(Env[Any, Any]):
    """Point at a shown target in [-2, 3]: reward 1 - distance, one step an episode."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-2, 3, (1,), np.float64)
        self.action_space = spaces.Box(np.array([-2.0]), np.array([3.0]), (1,), np.float64)
        self.target = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.target = float(self.np_random.uniform(-1.5, 2.5))
        return np.array([self.target]), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"out of bounds: {action!r}")
        return np.array([self.target]), 1.0 - abs(float(action[0]) - self.target), True, False, {}


class Offset(Env[Any, Any]):
    """Discrete(3, start=-1) observed through Discrete(4, start=5): wants 1 at 5 and 6, and -1 else. 8 steps: best 8."""

    def __init__(self) -> None:
        self.observation_space = spaces.Discrete(4, start=5)
        self.action_space = spaces.Discrete(3, start=-1)
        self.count, self.code = 0, 5

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert action in (-1, 0, 1), action
        reward = float(action == (1 if self.code <= 6 else -1))
        self.count += 1
        return self._observe(), reward, self.count == 8, False, {"action": int(action)}

    def _observe(self) -> Any:
        self.code = 5 + int(self.np_random.integers(4))
        return self.code


class Jumper(Env[Any, Any]):
    """Dict action of a discrete and a continuous part, both right where the observation says so. Best return 8."""

    def __init__(self) -> None:
        position = spaces.Dict({"x": spaces.Box(-1, 1, (1,), np.float64)})
        self.observation_space = spaces.Tuple((position, spaces.Discrete(2)))
        self.action_space = spaces.Dict({"move": spaces.Box(-1, 1, (1,), np.float32), "jump": spaces.Discrete(2)})
        self.count = 0
        self.x, self.high = 0.0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert isinstance(action, dict), action
        assert self.action_space.contains(action), action
        reward = 0.5 * float(action["jump"] == self.high) + 0.5 * float(action["move"][0] * self.x > 0)
        self.count += 1
        return self._observe(), reward, self.count == 8, False, {}

    def _observe(self) -> Any:
        self.x, self.high = float(self.np_random.choice([-0.5, 0.5])), int(self.np_random.integers(2))
        return {"x": np.array([self.x])}, self.high


def matches(mode: str = "NextStep", count: int = 8) -> Any:
    """`count` of Match as one vector environment."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    return SyncVectorEnv([Match] * count, autoreset_mode=AutoresetMode(mode))


class SlowMatch(Match):
    """Match whose every step takes a while."""

    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        return super().step(action)


class Pair:
    """Two agents of a PettingZoo parallel environment, each to name its bit: 1 a step. 'b' ends after 2 of 120."""

    def __init__(self, length: int = 120) -> None:
        self.metadata: dict[str, Any] = {}
        self.possible_agents = ["a", "b"]
        self.agents = list(self.possible_agents)
        self.length, self.count = length, 0
        self.rng = np.random.default_rng(0)
        self.bits: dict[str, int] = {}

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.rng = self.rng if seed is None else np.random.default_rng(seed)
        self.agents, self.count = list(self.possible_agents), 0
        return self._observe(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.count += 1
        rewards = {agent: float(action == self.bits[agent]) for agent, action in actions.items()}
        over = {agent: self.count == self.length or (agent == "b" and self.count == 2) for agent in actions}
        obs = self._observe()
        self.agents = [agent for agent in self.agents if not over[agent]]
        return obs, rewards, over, dict.fromkeys(over, False), {}

    def _observe(self) -> Any:
        self.bits = {agent: int(self.rng.integers(2)) for agent in self.agents}
        return {agent: np.array([bit, 1 - bit], np.float32) for agent, bit in self.bits.items()}

    def close(self) -> None: ...
