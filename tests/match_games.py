"""Tiny games between two, and players of them, for tests of matches. Games run in workers, players here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv

ROCK, PAPER, SCISSORS = 0, 1, 2


class Throw:
    """All agents choose one of three at once, `length` times; the last choices decide. They see [own number, time].

    rule: 'cycle' is rock, paper, scissors between two; 'high': the highest number wins, among any number of agents.
    first_wins: equal choices are won by the first agent.      declares: what of a result is told in the last infos.
    lengths: the game is drawn to be short and won by the first, or long and won by the second, whatever they choose.
    dies: a file; the worker that finds it absent makes it, and ends in its third game.
    mask: rock is forbidden.
    """

    def __init__(
        self,
        rule: str = "cycle",
        num_agents: int = 2,
        length: int = 1,
        first_wins: bool = False,
        declares: str = "all",
        lengths: Any = (),
        dies: str = "",
        mask: bool = False,
    ) -> None:
        self.possible_agents, self.agents = list("abcdef"[:num_agents]), []
        self.rule, self.length, self.first_wins, self.declares = rule, length, first_wins, declares
        self.lengths, self.dies, self.mask = list(lengths), dies, mask
        self.rng, self.games = np.random.default_rng(), 0

    def observation_space(self, agent: str) -> Any:
        box = spaces.Box(-1, 99, (2,), np.float32)
        return spaces.Dict({"x": box, "action_mask": spaces.Box(0, 1, (3,), np.int8)}) if self.mask else box

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time, self.games = list(self.possible_agents), 0, self.games + 1
        self.drawn = int(self.rng.integers(2))
        if self.dies and self.games == 3 and not Path(self.dies).exists():
            Path(self.dies).touch()
            os._exit(7)
        return self.observe(), {}

    def observe(self) -> Any:
        seen = {agent: np.array([i, self.time], np.float32) for i, agent in enumerate(self.possible_agents)}
        mask = np.array([0, 1, 1], np.int8)
        return {a: {"x": x, "action_mask": mask} for a, x in seen.items()} if self.mask else seen

    def step(self, actions: dict[str, int]) -> Any:
        self.time += 1
        over = self.time >= (self.lengths[self.drawn] if self.lengths else self.length)
        outcomes = dict(zip(actions, self.outcomes([int(action) for action in actions.values()]), strict=True))
        told = {"all": list(outcomes), "first": ["a"], "nothing": []}[self.declares] if over else []
        infos = {agent: {"outcome": outcomes[agent]} if agent in told else {} for agent in actions}
        if over:
            self.agents = []
        rewards = {agent: float(outcome * over) for agent, outcome in outcomes.items()}
        return self.observe(), rewards, dict.fromkeys(actions, over), dict.fromkeys(actions, False), infos

    def outcomes(self, chosen: list[int]) -> list[int]:
        if self.lengths:
            return [1, -1] if self.drawn == 0 else [-1, 1]
        if self.rule == "all win":
            return [1] * len(chosen)
        if self.first_wins and len(set(chosen)) == 1:
            return [1] + [-1] * (len(chosen) - 1)
        if self.rule == "cycle":
            ahead = (chosen[0] - chosen[1]) % 3  # 0: the same, 1: the first one wins, 2: the second one
            return [0, 0] if ahead == 0 else [1, -1] if ahead == 1 else [-1, 1]
        best = [choice == max(chosen) for choice in chosen]
        return [-1 if not one else 1 if sum(best) == 1 else 0 for one in best]


class Bet(AECEnv):
    """In turns: 'a' folds (0) and has lost before 'b' had a turn; or bids 1 or 2, and wins if 'b' then chooses less."""

    metadata: dict[str, Any] = {"name": "bet"}  # noqa: RUF012

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 2, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def observe(self, agent: str) -> Any:
        return np.array([agent == "b", self.bid], np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.agent_selection, self.bid = ["a", "b"], "a", 0
        self.rewards, self._cumulative_rewards = dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0.0)
        self.terminations, self.truncations = dict.fromkeys("ab", False), dict.fromkeys("ab", False)
        self.infos, self._skip_agent_selection = {"a": {}, "b": {}}, None

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            return self._was_dead_step(action)
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        if agent == "a" and action > 0:
            self.bid = int(action)
        else:
            won = 0.0 if agent == "b" and action == self.bid else 1.0 if agent == "b" and action < self.bid else -1.0
            self.rewards = {"a": won, "b": -won}
            self.terminations = dict.fromkeys("ab", True)
        self.agent_selection = "b" if agent == "a" else "a"
        self._accumulate_rewards()
        return None


def constant(choice: int) -> Any:
    """A script's function that always chooses the same."""

    def function(spec: Any, seed: int) -> Any:
        return lambda obs, first: (np.full((len(first), spec.action.num_discrete), choice), None)

    return function


rock, paper, scissors, another_rock = constant(ROCK), constant(PAPER), constant(SCISSORS), constant(ROCK)
not_a_function = 3


def first_side_throws() -> Throw:
    """A task of its own, for runs of several."""
    return Throw(first_wins=True)
