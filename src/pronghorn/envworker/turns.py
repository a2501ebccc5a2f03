"""Agents that take turns, by PettingZoo's AEC interface: one row acts at a time, all others wait."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Set

import numpy as np

from .agents import OUTCOME, AgentsEnv, Game
from .many_rows import VectorStep
from .spaces import ACTION_MASK, ContractBroken

MAX_IDLE_EPISODES = 100  # in a row, in which nobody gets a turn


class TurnsEnv(AgentsEnv):
    """A game whose agents take turns, as rows: one for each possible agent, INACTIVE but when it is on turn.

    A step plays one move, gives agents that have ended the empty move by which they leave (an action None, of which no
    row hears), begins the next episode when none is left, and stops at the next agent that may choose.

    The reward of a row's transition is all that its agent got from its action until its next turn or its end, also on
    the moves of others. What it got before its first turn is added to its first transition, so that the rewards of an
    episode sum to the environment's. An agent that never gets a turn in an episode has no transition in it.

    Who won is taken from info['outcome'] of the last turns. Where none says so, two agents play, and the rewards of
    both over the episode sum to 0, it is the sign of each one's sum; elsewhere there is no outcome.
    """

    def __init__(self, env: Any, **options: Any) -> None:
        """options: of AgentsEnv and RowsEnv."""
        super().__init__(env, **options)
        self._row_of = {agent: row for row, agent in enumerate(self.agents)}
        self._on_turn = 0  # the row that acts next
        self._present: List[Any] = []  # agents that are there, in the environment's order
        self._over: Set[Any] = set()  # those of them that have ended
        self._acted: Set[int] = set()  # rows that have acted in this episode and not ended
        self._ended: Set[int] = set()  # rows that have ended in this episode, and not begun anew
        self._own = np.zeros(self.count)  # what each agent got since its last turn, by the rewards of each move
        self._given = np.zeros(self.count)  # the same with team rewards: what its row gets
        self._sums = np.zeros(self.count)  # own rewards of the episode

    def reset(self, seed: Optional[int] = None) -> VectorStep:
        self._held = {}
        self._start(seed)
        return self._until_a_turn()

    def step(self, discrete: Any, continuous: Any) -> VectorStep:
        row = self._on_turn
        in_game = [agent for agent in self._present if agent not in self._over]
        self._acted.add(row)
        self.env.step(self._spaces.native_action(row, discrete[row], continuous[row]))
        self._look()
        if len(self._over) == len(self._present):  # before the empty moves, by which agents leave
            self._keep_ending()
        self._add_rewards(in_game)
        return self._until_a_turn()

    def _masks_in_infos(self) -> bool:
        """There are no infos before a reset."""
        self._raw_reset(None)
        return ACTION_MASK in (self.env.infos.get(self.env.agent_selection) or {})

    def _start(self, seed: Optional[int]) -> None:
        self._new_game(seed)
        self._acted, self._ended, self._game = set(), set(), Game(self.count)
        for sums in (self._own, self._given, self._sums):
            sums[:] = 0.0
        self._look()

    def _look(self) -> None:
        """See who is there. Once a move, as each attribute is looked for in every wrapper, which takes its time."""
        terminated, truncated = self.env.terminations, self.env.truncations
        self._present = list(self.env.agents)
        self._over = {agent for agent in self._present if terminated[agent] or truncated[agent]}
        for agent in self._present:
            if agent not in self._row_of:
                raise ContractBroken("%s: `agents` holds %r, `possible_agents` does not" % (self.class_name, agent))

    def _until_a_turn(self) -> VectorStep:
        """Go on until an agent may choose."""
        step, idle_episodes = self._nothing(), 0
        while True:
            self._require_turn_at_the_end()
            if not self._present:
                self._judge()
                self._start(None)
                idle_episodes += 1
                if idle_episodes > MAX_IDLE_EPISODES:
                    raise ContractBroken(
                        "%s: %d episodes in a row ended before any agent got a turn" % (self.class_name, idle_episodes)
                    )
            agent = self._selected()
            if agent not in self._over:
                self._take_turn(step, self._row_of[agent])
                return step
            self._end(self._row_of[agent])

    def _take_turn(self, step: VectorStep, row: int) -> None:
        """Tell the row what its last action caused, if it has acted, and what it sees now."""
        agent = self.agents[row]
        info = self._last_info(row)
        leaves = self._spaces.read(row, self.env.observe(agent), info)
        if row in self._acted:
            self._go_on(step, row, leaves, self._take_reward(row), info)
        else:
            self._begin(step, row, leaves)
            self._ended.discard(row)
        self._on_turn = row

    def _end(self, row: int) -> None:
        """The agent on turn has ended: its last record, and the empty move by which it leaves."""
        agent = self.agents[row]
        terminated, truncated = flags = bool(self.env.terminations[agent]), bool(self.env.truncations[agent])
        info = self._last_info(row)
        reward = self._take_reward(row)
        if row in self._acted:
            is_cut = truncated and not terminated
            leaves = self._spaces.read(row, self.env.observe(agent), info) if is_cut else {}
            self._hold(row, reward, flags, leaves, info)
            self._acted.discard(row)
            self._ended.add(row)
        else:
            self._declare(row, info)  # it had no turn, so no record of its own tells it
        self.env.step(None)
        self._look()
        if agent in self._present:
            raise ContractBroken(
                "%s.step(None) left '%s', which has ended, in `agents`; step() has to begin with: if "
                "self.terminations[self.agent_selection] or self.truncations[self.agent_selection]: "
                "return self._was_dead_step(action)" % (self.class_name, agent)
            )

    def _selected(self) -> Any:
        agent = self.env.agent_selection
        if agent not in self._present:
            raise ContractBroken(
                "%s.agent_selection is %r, and `agents` is %s; after each reset and step it has to name one of these"
                % (self.class_name, agent, self._present)
            )
        return agent

    def _require_turn_at_the_end(self) -> None:
        for row in self._acted:
            if self.agents[row] not in self._present:
                raise ContractBroken(
                    "'%s' left the `agents` of %s without a turn at its end, so its last reward is unknown; set its "
                    "entry in `terminations` or `truncations`, and let _was_dead_step() take it out when it is selected"
                    % (self.agents[row], self.class_name)
                )

    # ------------------------------------------------------------ rewards

    def _add_rewards(self, in_game: Sequence[Any]) -> None:
        """Add what the last move gave. in_game: agents that had not ended before it."""
        rewards, rows = self.env.rewards, [self._row_of[agent] for agent in self._present]
        own = {row: self._reward(row, rewards) for row in rows}
        for row, reward in own.items():
            self._own[row] += reward
            self._sums[row] += reward
        if self._team != "none":
            own = self._shared({row: own[row] for row in map(self._row_of.__getitem__, in_game) if row in own})
        for row, reward in own.items():
            self._given[row] += reward

    def _take_reward(self, row: int) -> float:
        """What the row gets for its last action, once."""
        reward, self._given[row] = float(self._given[row]), 0.0
        return reward

    def _last_info(self, row: int) -> Dict[str, Any]:
        """The info of the agent on turn. Its accumulated reward must be the sum of its rewards of each move.

        Environments forget to clear one of the two, and then count rewards twice.
        """
        _, accumulated, _, _, info = self.env.last(observe=False)
        expected, self._own[row] = float(self._own[row]), 0.0
        if not math.isclose(accumulated, expected, rel_tol=1e-4, abs_tol=1e-4):  # float32 adds up roughly
            raise ContractBroken(
                "%s.last() says that '%s' got %g since its last turn; its `rewards` of each move since then sum to %g. "
                "step() has to begin a move with self._cumulative_rewards[self.agent_selection] = 0 and "
                "self._clear_rewards(), and to end it with self._accumulate_rewards()"
                % (self.class_name, self.agents[row], accumulated, expected)
            )
        return info or {}

    def _judge(self) -> None:
        """The episode is over: who won a game of two, where the environment does not say so."""
        outcomes = self._game.outcomes
        declared = any(outcome is not None for outcome in outcomes)
        if len(self.agents) == 2 and not declared and math.isclose(self._sums.sum(), 0.0, abs_tol=1e-5):
            outcomes[:] = [float(np.sign(total)) for total in self._sums]
            for row in self._ended:
                self._held[row].stats[OUTCOME] = float(np.sign(self._sums[row]))
        self._game.over = True
