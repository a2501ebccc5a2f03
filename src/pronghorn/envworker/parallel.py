"""PettingZoo parallel environments: rows of agents that come and go. Agents that take turns are not supported."""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, Optional, Sequence

import numpy as np

from .many_rows import FIRST, INACTIVE, LAST, STEPPED, RowsEnv, VectorStep, is_number
from .spaces import Actions, ContractBroken, Observations


class ParallelEnv(RowsEnv):
    """A PettingZoo parallel environment as rows, one for each possible agent.

    An agent that ends while others play on is INACTIVE; its last record (reward, flags, final observation) comes
    together with the observation it begins anew with: when the environment is reset, or when the agent returns before.
    An agent that is absent is INACTIVE. Observations of agents may differ in length: shorter ones are padded at the
    end, by 0 or the nearest value within their bounds.
    """

    def __init__(self, env: Any, obs_keys: Sequence[str] = (), image_layout: str = "", **options: Any) -> None:
        """options: of RowsEnv."""
        self.agents = list(env.possible_agents)
        super().__init__(env, len(self.agents), **options)
        self._actions = [Actions(env.action_space(agent)) for agent in self.agents]
        for agent, actions in zip(self.agents, self._actions):
            if actions.to_json() != self._actions[0].to_json():
                raise ContractBroken(
                    "%s: the action spaces of '%s' and '%s' differ; one policy plays all agents, so they must be equal "
                    "(pettingzoo's and supersuit's wrappers can pad them)" % (self.class_name, self.agents[0], agent)
                )
        choices = self._actions[0].num_choices
        spaces = [env.observation_space(agent) for agent in self.agents]
        self._observations = [Observations(space, choices, obs_keys, image_layout) for space in spaces]
        self._leaves = _common_leaves([o.to_json() for o in self._observations], self.agents)
        self._held: Dict[int, Any] = {}  # row -> (reward, flags, final leaves, info) of its end, not delivered yet
        self.spec = self._spec(self._leaves, self._actions[0].to_json(), rows_wait=True)

    def reset(self, seed: Optional[int] = None) -> VectorStep:
        self._held = {}
        step = self._nothing()
        self._arrive(step, self._raw_reset(seed))
        return step

    def step(self, discrete: Any, continuous: Any) -> VectorStep:
        playing = [row for row, agent in enumerate(self.agents) if agent in self.env.agents]
        chosen = {self.agents[r]: self._actions[r].unflatten(discrete[r], continuous[r]) for r in playing}
        obs, rewards, terminated, truncated, infos = self.env.step(chosen)
        step = self._nothing()
        for row in playing:
            parts = (obs, rewards, terminated, truncated, infos)
            self._read(step, row, *[part.get(self.agents[row]) for part in parts])
        if self._is_over([agent for agent in chosen if terminated.get(agent) or truncated.get(agent)]):
            obs = self._raw_reset(None)
        self._arrive(step, {agent: x for agent, x in obs.items() if agent in self.env.agents})
        return step

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

    def _nothing(self) -> VectorStep:
        """A record of each row that says nothing."""
        step = VectorStep.first(self._empty(), self.count)
        step.event[:] = INACTIVE
        step.final_obs = self._empty()
        step.info = {name: np.full(self.count, np.nan) for name in self._info_names}
        return step

    def _read(
        self, step: VectorStep, row: int, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any
    ) -> None:
        """What one agent that played got; None for what the environment did not say of it."""
        reward, flags, info = float(reward or 0.0), (bool(terminated), bool(truncated)), info or {}
        if not math.isfinite(reward):
            raise ContractBroken("%s: the reward of '%s' is %r" % (self.class_name, self.agents[row], reward))
        leaves = None if obs is None else self._padded(row, obs)
        if any(flags):
            self._held[row] = reward, flags, leaves, info
            return
        if leaves is None:
            raise ContractBroken("%s.step() returned no observation of '%s'" % (self.class_name, self.agents[row]))
        step.event[row], step.reward[row] = STEPPED, reward
        self._put(step.obs, row, leaves)
        self._put_info(step, row, info)

    def _put_info(self, step: VectorStep, row: int, info: Mapping[str, Any]) -> None:
        for name, column in step.info.items():
            column[row] = info.get(name, np.nan)

    def _arrive(self, step: VectorStep, obs: Mapping[Any, Any]) -> None:
        """Rows whose agent is there but did not just step: they begin, after what was held of their last episode."""
        for row, agent in enumerate(self.agents):
            if agent not in obs or step.event[row] != INACTIVE:
                continue
            self._put(step.obs, row, self._padded(row, obs[agent]))
            step.event[row] = FIRST
            if row in self._held:
                step.reward[row], (step.terminated[row], step.truncated[row]), final, info = self._held.pop(row)
                step.event[row], step.episode_over[row] = LAST, True
                self._put(step.final_obs, row, final or {})
                self._put_info(step, row, info)
                step.stats[row] = {str(key): float(value) for key, value in info.items() if is_number(value)}

    def _empty(self) -> Dict[str, Any]:
        return {n: np.zeros((self.count, *leaf["shape"]), leaf["dtype"]) for n, leaf in self._leaves.items()}

    def _padded(self, row: int, obs: Any) -> Dict[str, Any]:
        leaves: Dict[str, Any] = {}
        for leaf in self._observations[row].leaves:
            value, shape = leaf.read(obs), tuple(self._leaves[leaf.name]["shape"])
            if value.shape != shape:
                low, high = leaf.extra.get("low", -math.inf), leaf.extra.get("high", math.inf)
                widths = [(0, full - own) for full, own in zip(shape, value.shape)]
                value = np.pad(value, widths, constant_values=min(max(0, low), high))
            leaves[leaf.name] = value
        return leaves

    @staticmethod
    def _put(arrays: Dict[str, Any], row: int, leaves: Mapping[str, Any]) -> None:
        for name, value in leaves.items():
            arrays[name][row] = value

    def render(self) -> Any:
        """The picture of all agents together."""
        frame = self._raw_render()
        return None if frame is None else np.asarray(frame, dtype=np.uint8)


def _common_leaves(described: Sequence[Dict[str, Any]], agents: Sequence[Any]) -> Dict[str, Any]:
    """The leaves that hold every agent's: equal names and kinds, the largest sizes, the widest bounds."""
    common: Dict[str, Any] = {name: dict(leaf) for name, leaf in described[0].items()}
    for agent, leaves in zip(agents, described):
        for name in {**common, **leaves}:
            if name not in common or name not in leaves or not _joinable(common[name], leaves[name]):
                both = common.get(name), leaves.get(name)
                raise ContractBroken(
                    "the observations of '%s' and '%s' differ in '%s' (%s and %s); one policy plays all agents, so "
                    "only the length of vectors may differ" % (agents[0], agent, name, *both)
                )
            one, other = common[name], leaves[name]
            one["shape"] = [max(pair) for pair in zip(one["shape"], other["shape"])]
            for key, widest in (("low", min), ("high", max)):
                if key in one and key in other:
                    one[key] = widest(one[key], other[key])
                else:
                    one.pop(key, None)
    return common


def _joinable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    same = all(one.get(key) == other.get(key) for key in ("kind", "dtype", "layout", "n", "start"))
    lengths_may_differ = one["kind"] == "vector" and len(one["shape"]) == len(other["shape"])
    return same and (lengths_may_differ or one["shape"] == other["shape"])
