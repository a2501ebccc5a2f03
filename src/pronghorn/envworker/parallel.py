"""Agents that act at the same time, by PettingZoo's parallel interface or a class of its form, as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Dict, Optional, Sequence

from .agents import AgentsEnv, Game
from .many_rows import INACTIVE, VectorStep
from .spaces import ContractBroken

RESET = ("observations", "infos")
STEP = ("observations", "rewards", "terminations", "truncations", "infos")


class ParallelEnv(AgentsEnv):
    """An environment whose agents act at the same time, as rows: one for each possible agent.

    It needs nothing of PettingZoo's package, only its form (docs/agents.md). An agent that ends leaves `agents` in that
    step; the environment is reset when none is left.

    An agent that is absent, or has ended while others play on, is INACTIVE, and nothing is read of it.
    """

    def reset(self, seed: Optional[int] = None) -> VectorStep:
        self._held, self._game = {}, Game(self.count)
        step = self._nothing()
        self._arrive(step, *self._by_agent("reset", self._new_game(seed), RESET))
        return step

    def step(self, discrete: Any, continuous: Any) -> VectorStep:
        playing = [row for row, agent in enumerate(self.agents) if agent in self.env.agents]
        chosen = {self.agents[r]: self._spaces.native_action(r, discrete[r], continuous[r]) for r in playing}
        obs, rewards, terminated, truncated, infos = self._by_agent("step", self.env.step(chosen), STEP)
        own = {row: self._reward(row, rewards) for row in playing}
        step = self._nothing()
        for row, reward in self._shared(own).items():
            parts = (obs, terminated, truncated, infos)
            self._read(step, row, reward, *[part.get(self.agents[row]) for part in parts])
        if self._is_over([agent for agent in chosen if terminated.get(agent) or truncated.get(agent)]):
            self._keep_ending()
            self._game.over, self._game = True, Game(self.count)
            obs, infos = self._by_agent("reset", self._new_game(None), RESET)
        self._arrive(step, obs, infos)
        return step

    def _by_agent(self, method: str, result: Any, names: Sequence[str]) -> Any:
        """What a method returned, which has to be so many dictionaries."""
        if not (isinstance(result, tuple) and [isinstance(part, Mapping) for part in result] == [True] * len(names)):
            kinds = ", ".join(type(part).__name__ for part in result) if isinstance(result, tuple) else "no tuple"
            raise ContractBroken(
                "%s.%s() returned %s; %d dictionaries by agent are needed: %s"
                % (self.class_name, method, kinds, len(names), ", ".join(names))
            )
        return result

    def _is_over(self, ended: Sequence[Any]) -> bool:
        """Whether no agent plays on. ended: the agents that just did, which must have left the environment's list.

        That all ended and stayed is let pass: PettingZoo's own Atari games do so at their limit of cycles.
        """
        staying = [agent for agent in self.env.agents if agent in ended]
        if staying and len(staying) < len(self.env.agents):
            raise ContractBroken(
                "%s.step() ended '%s' and left it in `agents`. An agent that ends has to leave in that step, as the "
                "environment is reset when none is left: self.agents = [agent for agent in self.agents if not "
                "(terminations[agent] or truncations[agent])]" % (self.class_name, staying[0])
            )
        return len(staying) == len(self.env.agents)

    def _read(
        self, step: VectorStep, row: int, reward: float, obs: Any, terminated: Any, truncated: Any, info: Any
    ) -> None:
        """What one agent that played got; None for what the environment did not say of it."""
        flags, info = (bool(terminated), bool(truncated)), info or {}
        leaves: Dict[str, Any] = {} if obs is None else self._spaces.read(row, obs, info)
        if any(flags):
            self._hold(row, reward, flags, leaves, info)
        elif obs is None:
            raise ContractBroken("%s.step() returned no observation of '%s'" % (self.class_name, self.agents[row]))
        else:
            self._go_on(step, row, leaves, reward, info)

    def _arrive(self, step: VectorStep, obs: Mapping[Any, Any], infos: Mapping[Any, Any]) -> None:
        """Rows whose agent is there but did not just step begin."""
        for row, agent in enumerate(self.agents):
            if agent in obs and agent in self.env.agents and step.event[row] == INACTIVE:
                self._begin(step, row, self._spaces.read(row, obs[agent], infos.get(agent) or {}))
