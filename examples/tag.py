"""A game of two agents in one plain class, without PettingZoo: the least that Pronghorn needs (docs/agents.md).

Catch on a ring of cells: both move at once, the runner stumbles now and then. If the catcher meets it, or passes
through it, within 20 steps, the catcher wins; else the runner does. One policy learns both sides.

    pronghorn train examples/tag.py:Tag --minutes 2 --run-dir runs/tag
    pronghorn match runs/tag examples/tag.py:straight random
    python -c "import pronghorn; print(*pronghorn.check_env('examples/tag.py:Tag'), sep='\\n')"
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

CELLS, STEPS, STUMBLES = 12, 20, 0.3


class Tag:
    """Each agent sees whether it is the catcher, how far and on which side the other one is, and the time left."""

    possible_agents = ("catcher", "runner")

    def __init__(self) -> None:
        self.agents: list[str] = []  # those in the game now
        self.rng = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1.0, 1.0, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)  # left, stay, right

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """(observations, infos), by agent. seed: given once; later episodes go on with the same generator."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        self.gap = int(self.rng.integers(2, CELLS - 1))  # cells from the catcher to the runner, going right
        return self._observe(), {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """(observations, rewards, terminations, truncations, infos), by agent, of those that acted."""
        self.time += 1
        stumbles = self.rng.random() < STUMBLES
        moves = {agent: int(action) - 1 for agent, action in actions.items()}
        before, change = self.gap, (0 if stumbles else moves["runner"]) - moves["catcher"]
        self.gap = (before + change) % CELLS
        caught = not 0 < before + change < CELLS  # met, or passed through each other
        over = caught or self.time == STEPS
        obs = self._observe()
        won = 1.0 if caught else -1.0
        rewards = {"catcher": won * over, "runner": -won * over}
        infos = {agent: {"outcome": reward} if over else {} for agent, reward in rewards.items()}  # for ratings
        if over:
            self.agents = []  # who ends leaves; when none is left, the game is reset
        # The time is seen, and to hold out is to win: that is an end (terminated), not a cut (truncated).
        return obs, rewards, dict.fromkeys(rewards, over), dict.fromkeys(rewards, False), infos

    def _observe(self) -> dict[str, Any]:
        gap = self.gap if self.gap <= CELLS // 2 else self.gap - CELLS  # the shorter way, with its side
        left = 1.0 - self.time / STEPS
        seen = {"catcher": (1.0, 2 * gap / CELLS, left), "runner": (-1.0, -2 * gap / CELLS, left)}
        return {agent: np.array(x, np.float32) for agent, x in seen.items()}


def straight(spec: Any, seed: int) -> Any:
    """A scripted player for matches: the catcher takes the shorter way to the runner, which moves away from it."""

    def act(obs: dict[str, Any], first: Any) -> tuple[Any, None]:
        """obs: [N, 3] of the agents that act now. Actions: discrete [N, 1], and none that are continuous."""
        is_catcher, gap, _ = obs["obs"].T
        return (1 + np.sign(is_catcher * gap)).astype(np.int64)[:, None], None

    return act
