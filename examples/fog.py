"""Tag in the fog, and a critic that sees both sides: the policy acts on its own view, the value knows everybody's.

Catcher and runner see each other from near only, the runner from farther. Training may use more than a player sees:
`SeesAll` adds everybody's views to each observation, and `--model.critic-only all` shows them to the value alone. It
is not needed any more once the policy plays (docs/agents.md).

    pronghorn train examples/fog.py:game --model.critic-only all --model.separate-critic --model.core gru --minutes 2
    python -c "import pronghorn; print(*pronghorn.check_env('examples/fog.py:game'), sep='\\n')"
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from tag import CELLS, Tag  # the game next to this file

SIGHT = {"catcher": 2, "runner": 4}  # cells, on either side


class FogTag(Tag):
    """Tag whose agents see: who they are, whether the other one is near, how far and on which side if so, time left."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1.0, 1.0, (4,), np.float32)

    def _observe(self) -> dict[str, Any]:
        return {agent: self._in_fog(view, SIGHT[agent]) for agent, view in super()._observe().items()}

    @staticmethod
    def _in_fog(view: Any, sight: int) -> Any:
        role, gap, left = view  # gap: 1 is half the ring
        near = abs(gap) * CELLS / 2 <= sight + 0.5
        return np.array((role, near, gap * near, left), np.float32)


class SeesAll:
    """A game of agents that act at once, in which each agent's observation is {"own": its own, "all": everybody's}.

    "all" has a leaf for each agent by its name, "all/catcher" and "all/runner" here. Of an agent that has ended it is
    the last one. All agents have to be there from the start.
    """

    def __init__(self, game: Any) -> None:
        self.game, self.possible_agents = game, game.possible_agents
        self.views: dict[str, Any] = {}  # what each agent saw last

    @property
    def agents(self) -> Any:
        return self.game.agents

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        views = {name: self.game.observation_space(name) for name in self.possible_agents}
        return spaces.Dict({"own": views[agent], "all": spaces.Dict(views)})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.game.action_space(agent)  # type: ignore[no-any-return]

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.views = {}
        obs, infos = self.game.reset(seed)
        return self._with_all(obs), infos

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        obs, *rest = self.game.step(actions)
        return self._with_all(obs), *rest

    def _with_all(self, obs: dict[str, Any]) -> dict[str, Any]:
        self.views |= obs
        return {agent: {"own": own, "all": self.views} for agent, own in obs.items()}


def game() -> SeesAll:
    return SeesAll(FogTag())
