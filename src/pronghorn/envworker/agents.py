"""What environments of several agents have in common: their options, team rewards, and ends that wait to be told.

It steps no environment; `parallel` and `turns` do.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .joint_spaces import JointSpaces
from .many_rows import FIRST, INACTIVE, LAST, STEPPED, RowsEnv, VectorStep, is_number
from .spaces import ContractBroken

METHODS = ("observation_space", "action_space", "reset", "step")
TEAM_REWARDS = ("none", "sum", "mean")
POLICIES = ("shared", "by_spaces")
OUTCOME = "outcome"  # the info entry, and the entry of an episode's record, that say who won: 1, 0 (a draw) or -1


class Game:
    """One game of all rows: what it declared for each (1, 0, -1, or None), whether it is over, and was told of."""

    __slots__ = ("outcomes", "over", "told")

    def __init__(self, count: int) -> None:
        self.outcomes: List[Optional[float]] = [None] * count
        self.over = self.told = False


class End(NamedTuple):
    """An agent's last record, which waits for the observation that the agent begins anew with."""

    reward: float
    terminated: bool
    truncated: bool
    leaves: Dict[str, Any]  # of the final observation; empty where it is not known and not needed
    info: Mapping[str, Any]
    stats: Dict[str, float]  # numbers for the record of the episode
    game: Game


class AgentsEnv(RowsEnv):
    """An environment as rows, one for each possible agent; rows whose agent does not act are INACTIVE.

    An agent's last record (reward, flags, final observation) comes together with the observation it begins anew with.

    games: resets so far, the number of the game that is being played.

    pad_spaces, policies ('shared', or 'by_spaces'): see JointSpaces.
    team_reward: 'sum' or 'mean' gives each agent that is in the game at a step the sum or mean of what they all got
    there; 'none' leaves each its own.
    """

    def __init__(
        self,
        env: Any,
        obs_keys: Sequence[str] = (),
        image_layout: str = "",
        pad_spaces: bool = False,
        policies: str = "shared",
        team_reward: str = "none",
        **options: Any,
    ) -> None:
        """options: of RowsEnv."""
        self.agents = list(env.possible_agents)
        self.games = 0
        super().__init__(env, len(self.agents), **options)
        missing = [name for name in METHODS if not callable(getattr(env, name, None))]
        if missing:
            raise ContractBroken(
                "%s has no method %s; docs/agents.md says what a game of several agents needs"
                % (self.class_name, " nor ".join(missing))
            )
        if team_reward not in TEAM_REWARDS:
            raise ContractBroken("team_reward = %r: it is one of %s" % (team_reward, ", ".join(TEAM_REWARDS)))
        if policies not in POLICIES or (pad_spaces and policies != "shared"):
            raise ContractBroken(
                "policies = %r, pad_spaces = %r: policies is one of %s, and nothing is padded by_spaces"
                % (policies, pad_spaces, ", ".join(POLICIES))
            )
        self._team = team_reward
        self._spaces = JointSpaces(
            env, self.class_name, obs_keys, image_layout, pad=pad_spaces, info_mask=self._masks_in_infos(),
            by_spaces=policies == "by_spaces",
        )  # fmt: skip
        self._held: Dict[int, End] = {}  # by row: ends that are not delivered yet
        self._game = Game(self.count)
        self._is_watched = False  # pictures of endings are drawn only for those who look
        self._ending: Any = None
        self.spec = self._spec(self._spaces.observation, self._spaces.action, rows_wait=True)
        self.spec["agents"] = [str(agent) for agent in self.agents]
        self.spec["signatures"] = self._spaces.signatures

    def _new_game(self, seed: Optional[int]) -> Any:
        """What the environment's reset returns, by which the next game begins."""
        self.games += 1
        return self._raw_reset(seed)

    def _masks_in_infos(self) -> bool:
        """Whether action masks are read from the infos, and not from observations."""
        return False

    def _nothing(self) -> VectorStep:
        """A record of each row that says nothing."""
        step = VectorStep.first(self._spaces.empty(), self.count)
        step.event[:] = INACTIVE
        step.info = {name: np.full(self.count, np.nan) for name in self._info_names}
        return step

    def _go_on(self, step: VectorStep, row: int, leaves: Mapping[str, Any], reward: float, info: Any) -> None:
        """The row's agent plays on: what its last action caused, and what it sees now."""
        step.event[row], step.reward[row] = STEPPED, reward
        _put(step.obs, row, leaves)
        self._put_info(step, row, info)

    def _begin(self, step: VectorStep, row: int, leaves: Mapping[str, Any]) -> None:
        """The row's agent begins an episode, after what was held of its last one."""
        _put(step.obs, row, leaves)
        step.event[row] = FIRST
        if row in self._held:
            end = self._held.pop(row)
            step.event[row], step.episode_over[row] = LAST, True
            step.reward[row], step.terminated[row], step.truncated[row] = end.reward, end.terminated, end.truncated
            if end.truncated:
                if step.final_obs is step.obs:  # as most steps have none
                    step.final_obs = self._spaces.empty()
                _put(step.final_obs, row, end.leaves)
            self._put_info(step, row, end.info)
            step.stats[row] = end.stats
            if end.game.over and not end.game.told:
                step.games[row], end.game.told = end.game.outcomes, True

    def _hold(
        self, row: int, reward: float, flags: Tuple[bool, bool], leaves: Dict[str, Any], info: Mapping[str, Any]
    ) -> None:
        """The row's agent has ended. flags: terminated, truncated. leaves: of what it saw last; empty if not known."""
        terminated, truncated = flags
        if truncated and not terminated and not leaves:
            raise ContractBroken(
                "%s truncated '%s' without an observation; the value of the last one stands for what was cut off"
                % (self.class_name, self.agents[row])
            )
        self._declare(row, info)
        stats = {str(key): float(value) for key, value in info.items() if is_number(value)}
        cut = truncated and not terminated
        self._held[row] = End(reward, terminated, cut, leaves, dict(info), stats, self._game)

    def _declare(self, row: int, info: Mapping[str, Any]) -> None:
        """Take what an agent's last info says of who won."""
        outcome = info.get(OUTCOME)
        if outcome is None:
            return
        if not (is_number(outcome) and float(outcome) in (-1.0, 0.0, 1.0)):
            raise ContractBroken(
                "%s: info['%s'] of '%s' is %r; it is 1 for a win, 0 for a draw, -1 for a loss"
                % (self.class_name, OUTCOME, self.agents[row], outcome)
            )
        self._game.outcomes[row] = float(outcome)

    def _put_info(self, step: VectorStep, row: int, info: Mapping[str, Any]) -> None:
        for name, column in step.info.items():
            column[row] = info.get(name, np.nan)

    def _shared(self, rewards: Dict[int, float]) -> Dict[int, float]:
        """What each agent gets for a step; rewards: {row: its own}, of all that were in the game at it."""
        if self._team == "none" or not rewards:
            return rewards
        total = sum(rewards.values())
        return dict.fromkeys(rewards, total / len(rewards) if self._team == "mean" else total)

    def _reward(self, row: int, rewards: Mapping[Any, Any]) -> float:
        """What one agent got, of the rewards of all."""
        agent = self.agents[row]
        reward = rewards.get(agent)
        if reward is None or not math.isfinite(reward):
            raise ContractBroken(
                "%s: the reward of '%s' is %r; each agent in the game needs a finite number"
                % (self.class_name, agent, reward)
            )
        return float(reward)

    def render(self) -> Any:
        """The picture of all agents together."""
        self._is_watched = True
        frame = self._raw_render()
        return None if frame is None else np.asarray(frame, dtype=np.uint8)

    def ending(self) -> Any:
        """The picture of how the last game ended, once; None where none did since the first picture."""
        frame, self._ending = self._ending, None
        return frame

    def _keep_ending(self) -> None:
        """The game is over, and still as its last move left it."""
        frame = self.render() if self._is_watched else None
        self._ending = None if frame is None else frame.copy()  # the environment may draw on the same array again


def _put(arrays: Dict[str, Any], row: int, leaves: Mapping[str, Any]) -> None:
    for name, value in leaves.items():
        arrays[name][row] = value
