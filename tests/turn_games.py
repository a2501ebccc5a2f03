"""Toy games whose agents take turns, by PettingZoo's AEC interface: they name themselves, and obey a script."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv


class Circle(AECEnv):
    """Agents 'a', 'b', ... move in a circle and see [episode, moves so far, own number]. All end after `length` moves.

    gifts: {move: {agent: reward}}, moves counted from 1 and written as text, as are those of
    ends: {move: {agent: 'terminated' or 'truncated'}}, and comes_back: {move: agent}. infos: {agent: its last info}.
    padded: what agents that are gone get in `rewards` on every move, as some environments pad them.
    masks: 'obs' or 'info': move m allows only the action m % 3, and another is an error.
    patient: agents that have ended leave when the circle comes to them, not at once.
    fault: of its own code, see `step`.
    """

    metadata: dict[str, Any] = {"name": "circle"}  # noqa: RUF012

    def __init__(
        self,
        num_agents: int = 2,
        length: int = 6,
        gifts: Any = None,
        ends: Any = None,
        comes_back: Any = None,
        infos: Any = None,
        padded: float = 0.0,
        masks: str = "",
        patient: bool = False,
        fault: str = "",
    ) -> None:
        self.possible_agents = list("abcdef")[:num_agents]
        self.length, self.gifts, self.ends = length, gifts or {}, ends or {}
        self.comes_back, self.last_infos, self.padded = comes_back or {}, infos or {}, padded
        self.masks, self.patient, self.fault = masks, patient, fault
        self.episode = -2  # one reset is a look at the infos

    def observation_space(self, agent: str) -> Any:
        box = spaces.Box(-1, 9999, (3,), np.float32)
        mask = spaces.Box(0, 1, (3,), np.int8)
        return spaces.Dict({"x": box, "action_mask": mask}) if self.masks == "obs" else box

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.episode, self.move = self.episode + 1, 0
        self.agents = list(self.possible_agents)
        self.agent_selection = self.agents[0]
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: self._info() for agent in self.agents}
        self._skip_agent_selection = None

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self._over(agent):
            if self.fault != "stays":
                following = self._next(agent)
                self._was_dead_step(action)
                self.agent_selection = following if self.patient else self.agent_selection
            return
        assert not self.masks or self._mask()[action], f"action {action} on move {self.move + 1}"
        self.move += 1
        self.rewards = dict.fromkeys(self.agents, 0.0)
        if self.fault != "counts twice":
            self._cumulative_rewards[agent] = 0.0
        self.rewards.update(self.gifts.get(str(self.move), {}))
        if self.fault != "silent":
            self._accumulate_rewards()
        self._end_and_return()
        self.agent_selection = self._next(agent)
        if not self.patient:
            self._deads_step_first()
        self.rewards.update({gone: self.padded for gone in self.possible_agents if gone not in self.agents})
        if self.fault == "leaves" and self.move == 2:
            self.agents.remove("b")
        if self.fault == "selects":
            self.agent_selection = "z"
        if self.fault == "strangers":
            self.agents.append("z")
            self.terminations["z"] = self.truncations["z"] = False

    def observe(self, agent: str) -> Any:
        if agent not in self.agents:
            raise KeyError(agent)
        x = np.array([self.episode, self.move, self.possible_agents.index(agent)], np.float32)
        return {"x": x, "action_mask": self._mask()} if self.masks == "obs" else x

    def _mask(self) -> Any:
        mask = np.zeros(3, np.int8)
        mask[(self.move + 1) % 3] = 1
        return mask

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._mask()} if self.masks == "info" else {}

    def _end_and_return(self) -> None:
        for agent, how in self.ends.get(str(self.move), {}).items():
            getattr(self, {"terminated": "terminations", "truncated": "truncations"}[how])[agent] = True
        if self.move >= self.length:
            self.terminations = dict.fromkeys(self.agents, True)
        back = self.comes_back.get(str(self.move))
        if back is not None:
            self.agents.append(back)
            self.rewards[back] = self._cumulative_rewards[back] = 0.0
            self.terminations[back] = self.truncations[back] = False
        self.infos = {agent: {**self._info(), **self.last_infos.get(agent, {})} for agent in self.agents}

    def _next(self, agent: str) -> str:
        """The next in the circle that is on turn; anyone if nobody is."""
        order = self.possible_agents[self.possible_agents.index(agent) + 1 :] + self.possible_agents
        present = [one for one in order if one in self.agents and one != agent]
        return next((one for one in present if self.patient or not self._over(one)), agent)

    def _over(self, agent: str) -> bool:
        return self.terminations[agent] or self.truncations[agent]


class Bits(Circle):
    """Two agents, each to name its bit on its turn: 1 for it, which comes on the move of the other. 8 turns each."""

    def __init__(self) -> None:
        super().__init__(length=16)
        self.rng, self.bit, self.owed = np.random.default_rng(0), 0, 0.0

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self.rng = self.rng if seed is None else np.random.default_rng(seed)
        self.bit, self.owed = int(self.rng.integers(2)), 0.0

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if not self._over(agent):
            other = "b" if agent == "a" else "a"
            came, self.owed = self.owed, float(action == self.bit)
            last = self.move + 1 == self.length  # nobody moves after it
            self.gifts = {str(self.move + 1): {other: came, agent: self.owed if last else 0.0}}
            self.bit = int(self.rng.integers(2))
        super().step(action)

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> Any:
        return np.array([self.bit, 1 - self.bit], np.float32)


class Drawn(Circle):
    """Games of three moves that are drawn on one canvas, as 80 times the moves so far.

    'a' gets 1 for its first move and 5 for its last.
    """

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(length=3, gifts={"1": {"a": 1.0}, "3": {"a": 5.0}})
        self.canvas = np.zeros((16, 16, 3), np.uint8)
        self.num_drawn = 0

    def render(self) -> Any:
        self.num_drawn += 1
        self.canvas[:] = 80 * self.move
        return self.canvas


class Mortals(Circle):
    """Four agents of 30 moves; in each episode other ones end early, some on the same move: `script` says when."""

    def __init__(self) -> None:
        super().__init__(num_agents=4, length=30)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self.ends = script(self.episode)


def script(episode: int) -> dict[str, dict[str, str]]:
    """Who ends on which move. In every third episode two on the same one, in every fifth all."""
    rng = np.random.default_rng(episode + 10)
    moves = {agent: int(rng.integers(1, 30)) for agent in "abcd"}
    if episode % 3 == 0:
        moves["b"] = moves["c"]
    if episode % 5 == 0:
        moves = dict.fromkeys("abcd", moves["a"])
    ends: dict[str, dict[str, str]] = {}
    for agent, move in moves.items():
        ends.setdefault(str(move), {})[agent] = "truncated" if agent == "d" else "terminated"
    return ends


class Unlike(AECEnv):
    """One move each: 'a' sees 4 numbers and has 2 choices, 'b' sees 9 and has 6; each must stay within its own."""

    metadata: dict[str, Any] = {}  # noqa: RUF012
    sizes = {"a": (4, 2), "b": (9, 6)}  # noqa: RUF012

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(1, 9, (self.sizes[agent][0],), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(self.sizes[agent][1])

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.agent_selection = "a"
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self._skip_agent_selection = None

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            return self._was_dead_step(action)
        assert self.action_space(agent).contains(action), (agent, action)
        if agent == "b":
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = "b" if agent == "a" else "a"
        return None

    def observe(self, agent: str) -> Any:
        return np.full(self.sizes[agent][0], 5, np.float32)
