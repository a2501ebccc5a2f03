"""Toy games whose agents have unlike spaces. Each kind has an own right answer. Worker-side syntax."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

sys.path.insert(0, str(Path(__file__).parent))

from turn_games import Bits

LENGTH = 8
WOLF = spaces.Box(-1, 99, (2,), np.float32), spaces.Discrete(2)
HARE = (
    spaces.Dict({"x": spaces.Box(-1, 99, (5,), np.float32), "action_mask": spaces.Box(0, 1, (3,), np.int8)}),
    spaces.Discrete(3),
)
MASK = np.array([0, 1, 1], np.int8)  # of a hare: it may not stay where it is (0)


def seen(agent: str, bit: int, last: int = 9) -> Any:
    """What agents see of the bit; a hare also what was done last."""
    if not agent.startswith("hare"):
        return np.array([bit, 1 - bit], np.float32)
    return {"x": np.array([0, last, 1 - bit, bit, 7], np.float32), "action_mask": MASK}


def right(agent: str, bit: int) -> int:
    """Wolves name the bit, hares jump to the other side, by the actions 1 and 2."""
    return 2 - bit if agent.startswith("hare") else bit


class Field:
    """Two wolves and a hare at once; 1 for each right answer. Episodes of 8 steps: best return 8 each, random 4."""

    metadata: dict[str, Any] = {"render_fps": 10}  # noqa: RUF012

    def __init__(self, agents: Any = ("wolf_0", "hare", "wolf_1"), outcomes: bool = False) -> None:
        self.possible_agents, self.agents, self.outcomes = list(agents), [], outcomes
        self.rng, self.bits, self.count = np.random.default_rng(0), {}, 0
        self.last: dict[str, int] = {}

    def observation_space(self, agent: str) -> Any:
        return (HARE if agent.startswith("hare") else WOLF)[0]

    def action_space(self, agent: str) -> Any:
        return (HARE if agent.startswith("hare") else WOLF)[1]

    def reset(self, seed: int | None = None) -> Any:
        self.rng = self.rng if seed is None else np.random.default_rng(seed)
        self.agents, self.count, self.last = list(self.possible_agents), 0, {}
        return self.observe(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        for agent, action in actions.items():
            assert agent == "arm" or self.action_space(agent).contains(action), (agent, action)
            assert not agent.startswith("hare") or action > 0, "a hare that stays"
        self.count, self.last = self.count + 1, {agent: int(action) for agent, action in actions.items()}
        rewards = {agent: float(action == right(agent, self.bits[agent])) for agent, action in self.last.items()}
        over = self.count == LENGTH
        self.agents = [] if over else self.agents
        infos = {agent: {"outcome": 0.0} if over and self.outcomes else {} for agent in actions}
        return self.observe(), rewards, dict.fromkeys(actions, over), dict.fromkeys(actions, False), infos

    def observe(self) -> Any:
        self.bits = {agent: int(self.rng.integers(2)) for agent in self.possible_agents}
        return {agent: seen(agent, self.bits[agent], self.last.get(agent, 9)) for agent in self.possible_agents}

    def render(self) -> Any:
        return np.full((32, 32, 3), 20 * self.count, np.uint8)


class Pack(Field):
    """Two wolves alone, whose spaces are equal."""

    def __init__(self) -> None:
        super().__init__(("wolf_0", "wolf_1"))


class Mixed(Field):
    """Nothing in common: 'eye' sees an image and has 2 choices, 'arm' sees 3 numbers and moves by 2 numbers in [-1, 1].
    The arm gets 1 where both have the sign of its first number, which is 1 or -1.
    """

    def __init__(self) -> None:
        super().__init__(("eye", "arm"))

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 255, (8, 8, 3), np.uint8) if agent == "eye" else spaces.Box(-1, 1, (3,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2) if agent == "eye" else spaces.Box(-1, 1, (2,), np.float32)

    def step(self, actions: dict[str, Any]) -> Any:
        arm = actions["arm"]
        assert self.action_space("arm").contains(arm), arm
        followed = (np.sign(arm) == 2 * self.bits["arm"] - 1).all()
        return super().step({"eye": actions["eye"], "arm": self.bits["arm"] if followed else 1 - self.bits["arm"]})

    def observe(self) -> Any:
        self.bits = {agent: int(self.rng.integers(2)) for agent in self.possible_agents}
        image = np.zeros((8, 8, 3), np.uint8)
        image[:, 4 * self.bits["eye"] :][:, :4] = 200
        return {"eye": image, "arm": np.array([2 * self.bits["arm"] - 1, 0, 0.5], np.float32)}


class Talk(Bits):
    """In turns: 'a' names its bit as a wolf does, and 'b' jumps as a hare. 8 turns each."""

    def observation_space(self, agent: str) -> Any:
        return (HARE if agent == "b" else WOLF)[0]

    def action_space(self, agent: str) -> Any:
        return (HARE if agent == "b" else WOLF)[1]

    def observe(self, agent: str) -> Any:
        return seen("hare" if agent == "b" else "wolf", self.bit)

    def step(self, action: Any) -> None:
        if action is not None and self.agent_selection == "b" and not self._over("b"):
            assert action in (1, 2), action
            action = 2 - action
        super().step(action)


class Counting:
    """'a' sees [number, step, last action], 'b' [number, step, last action, 7, 8] and a mask; which choices it allows
    goes round. The n-th environment of a process counts from 100 n. 'b' ends after 3 steps, 'a' after 5; 'b' is cut.
    """

    made = 0

    def __init__(self) -> None:
        self.possible_agents, self.agents = ["a", "b"], []
        self.number, Counting.made = 100 * Counting.made, Counting.made + 1

    def observation_space(self, agent: str) -> Any:
        box = spaces.Box(-1, 9999, (3 if agent == "a" else 5,), np.float32)
        mask = spaces.MultiBinary(4)
        return spaces.Dict({"x": box} if agent == "a" else {"x": box, "action_mask": mask})

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2 if agent == "a" else 4)

    def reset(self, seed: int | None = None) -> Any:
        self.agents, self.count = ["a", "b"], 0
        return {agent: self.observe(agent, -1) for agent in "ab"}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), (agent, action)
            assert agent == "a" or action % 2 == self.count % 2, (self.count, action)
        self.count += 1
        ends, cut = {"a": self.count == 5, "b": False}, {"a": False, "b": self.count == 3}
        obs = {agent: self.observe(agent, int(action)) for agent, action in actions.items()}
        self.agents = [agent for agent in self.agents if not (ends[agent] or cut[agent])]
        rewards = {agent: self.count + (0.5 if agent == "b" else 0.0) for agent in actions}
        return obs, rewards, ends, cut, {agent: {} for agent in actions}

    def observe(self, agent: str, last: int) -> Any:
        x = np.array([self.number, self.count, last], np.float32)
        if agent == "a":
            return {"x": x}
        mask = np.array([1, 0, 1, 0] if self.count % 2 == 0 else [0, 1, 0, 1], np.int8)
        return {"x": np.append(x, np.float32([7, 8])), "action_mask": mask}
