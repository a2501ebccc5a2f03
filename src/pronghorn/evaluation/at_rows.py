"""Who plays the rows of a pool with fixed weights, and what has to be remembered of each row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pronghorn.envs.own_rows import Actions, OwnRows
from pronghorn.evaluation.policy import Policies, Policy
from pronghorn.types import EnvSpec, Event, Pool, PoolRows, Ready


class AtRows(ABC):
    """Who plays every row of a pool, and what has to be remembered of each: return and length so far."""

    def __init__(self, pool: PoolRows) -> None:
        self._action = pool.spec.action
        self.returns, self.lengths = np.zeros(pool.num_rows), np.zeros(pool.num_rows, np.int64)

    def observe(self, ready: Ready) -> list[tuple[int, float, int]]:
        """(row, return, length in steps) of the episodes that ended."""
        moved = (ready.event == Event.STEP) | (ready.event == Event.LAST)
        self.returns[ready.rows[moved]] += ready.reward[moved]
        self.lengths[ready.rows[moved]] += 1
        over = ready.rows[moved & ready.episode_over].tolist()
        ended = [(row, float(self.returns[row]), int(self.lengths[row])) for row in over]
        fresh = ready.rows[begins(ready) | (ready.event == Event.LOST)]  # what was lost does not count
        self.returns[fresh], self.lengths[fresh] = 0.0, 0
        return ended

    def answer(self, ready: Ready) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Rows, discrete and continuous actions to send: of all rows but those that were lost."""
        acts = (ready.event != Event.LOST) & (ready.event != Event.INACTIVE)
        discrete = np.zeros((len(ready.rows), self._action.num_discrete), np.int64)
        continuous = np.zeros((len(ready.rows), self._action.num_continuous), np.float32)
        if acts.any():
            discrete[acts], continuous[acts] = self.act(ready, acts)
        answer = ready.event != Event.LOST
        return ready.rows[answer], discrete[answer], continuous[answer]

    @abstractmethod
    def act(self, ready: Ready, acts: NDArray[np.bool_]) -> Actions:
        """Discrete [N, D] and continuous [N, C] actions of the rows that `acts` marks."""


class PolicyAtRows(AtRows):
    """One policy in every row, and what it remembers of each: RNN state and last reward."""

    def __init__(self, policy: Policy, pool: PoolRows, deterministic: bool) -> None:
        super().__init__(pool)
        self._policy, self._deterministic = policy, deterministic
        self._state = policy.initial_state(pool.num_rows)
        self._last_rewards = np.zeros(pool.num_rows, np.float32)

    def act(self, ready: Ready, acts: NDArray[np.bool_]) -> Actions:
        """See `AtRows`; all in one forward pass."""
        rows, state = ready.rows[acts], self._state
        self._last_rewards[rows] = ready.reward[acts]
        index = torch.from_numpy(rows)
        part = type(state)(state.core[index], state.discrete[index], state.continuous[index], state.reward[index])
        discrete, continuous, part = self._policy.step(
            {k: v[acts] for k, v in ready.obs.items()}, part, torch.from_numpy(self._last_rewards[rows]),
            begins(ready)[acts], deterministic=self._deterministic,
        )  # fmt: skip
        with torch.inference_mode():
            for name in ("core", "discrete", "continuous", "reward"):
                getattr(state, name)[index] = getattr(part, name)
        return discrete, continuous


class PoliciesAtRows(AtRows):
    """Each policy in the rows of its signature."""

    def __init__(self, policies: Policies, pool: Pool, deterministic: bool) -> None:
        super().__init__(pool)
        self._parts: list[tuple[OwnRows, PolicyAtRows]] = []
        for number, policy in enumerate(policies.policies):
            own = OwnRows(pool, number)
            self._parts.append((own, PolicyAtRows(policy, own, deterministic)))

    def act(self, ready: Ready, acts: NDArray[np.bool_]) -> Actions:
        """See `AtRows`; a forward pass for each policy that has rows."""
        discrete = np.zeros((len(acts), self._action.num_discrete), np.int64)
        continuous = np.zeros((len(acts), self._action.num_continuous), np.float32)
        for own, player in self._parts:
            where = acts & own.holds(ready.rows)
            if where.any():
                discrete[where], continuous[where] = own.widened(player.act(own.narrowed(ready), where))
        return discrete[acts], continuous[acts]


def at_rows(policy: Policy | Policies, pool: Pool, deterministic: bool) -> AtRows:
    """These policies in the rows of a pool."""
    if isinstance(policy, Policies):
        return PoliciesAtRows(policy, pool, deterministic)
    return PolicyAtRows(policy, pool, deterministic)


def begins(ready: Ready) -> NDArray[np.bool_]:
    """Rows whose observation is the first of an episode."""
    first: NDArray[np.bool_] = (ready.event == Event.FIRST) | ready.episode_over
    return first


def random_actions(
    spec: EnvSpec, obs: Mapping[str, NDArray[Any]], count: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Uniformly random actions of N rows: discrete [N, D], of those that a mask in obs allows; continuous [N, C]."""
    action, masks = spec.action, [name for name, leaf in spec.observation.items() if leaf.kind == "mask"]
    if masks:
        chances = rng.random((count, action.num_logits)) * obs[masks[0]].reshape(count, -1)
        factors = np.split(chances, np.cumsum(action.discrete)[:-1], axis=1)
        discrete = np.stack([factor.argmax(axis=1) for factor in factors], axis=1)
    else:
        sizes = np.array(action.discrete or [1])
        discrete = rng.integers(0, sizes, (count, len(sizes)))[:, : action.num_discrete]
    low, high = np.array(action.low, np.float32), np.array(action.high, np.float32)
    continuous = rng.uniform(np.maximum(low, -1e3), np.minimum(high, 1e3), (count, action.num_continuous))
    return discrete, continuous.astype(np.float32)
