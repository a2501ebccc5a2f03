"""The rows that one policy plays where agents have unlike spaces: numbered among themselves, each in its own spaces.

It translates what a pool delivers and what a policy answers. It receives and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.types import ACTION_MASK, ActionSpec, Pool, Ready, Signature

NOT_OWN = -1

Rows = NDArray[np.int64]
Actions = tuple[NDArray[np.int64], NDArray[np.float32]]  # discrete [N, D], continuous [N, C]


class OwnRows:
    """The rows of one signature (`EnvSpec.signatures`) of a pool, described as a pool of their own (`PoolRows`).

    rows: [num_rows] their numbers in the pool.
    """

    def __init__(self, pool: Pool, number: int) -> None:
        """number: of the signature, and of the policy that plays it."""
        joint, signature = pool.spec, pool.spec.signatures[number]
        self.spec = joint.of(number)
        self.rows: Rows = np.flatnonzero(np.isin(np.arange(pool.num_rows) % joint.rows_per_env, signature.rows))
        self.num_rows, self.tasks, self.task_ids = len(self.rows), pool.tasks, pool.task_ids[self.rows]
        self._number = np.full(pool.num_rows, NOT_OWN, np.int64)
        self._number[self.rows] = np.arange(self.num_rows)
        self._action, self._leaves = joint.action, signature.leaves
        self._choices = _choices(signature, joint.action)

    def holds(self, rows: Rows) -> NDArray[np.bool_]:
        """[N] which of a pool's rows are among these."""
        own: NDArray[np.bool_] = self._number[rows] != NOT_OWN
        return own

    def numbers(self, rows: Rows) -> Rows:
        """Their numbers here, of numbers in the pool; NOT_OWN of others."""
        numbers: Rows = self._number[rows]
        return numbers

    def narrowed(self, ready: Ready) -> Ready:
        """A delivery as these rows see it. Rows of others are numbered NOT_OWN, and what stands there means nothing."""
        own = self._number
        records = [{**record, "row": int(own[record["row"]])} for record in ready.records]
        return replace(
            ready, rows=own[ready.rows], obs=self._own(ready.obs), final_obs=self._own(ready.final_obs),
            records=[record for record in records if record["row"] != NOT_OWN],
        )  # fmt: skip

    def widened(self, actions: Actions) -> Actions:
        """Actions of N of these rows in the form of the pool."""
        discrete, continuous = actions
        wide_discrete = np.zeros((len(discrete), self._action.num_discrete), np.int64)
        wide_continuous = np.zeros((len(continuous), self._action.num_continuous), np.float32)
        wide_discrete[:, : discrete.shape[1]], wide_continuous[:, : continuous.shape[1]] = discrete, continuous
        return wide_discrete, wide_continuous

    def _own(self, obs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Leaves [N, ...] of all as these rows' own. Without final observations there are none."""
        return {name: self._own_leaf(name, obs[place]) for name, place in self._leaves.items() if place in obs}

    def _own_leaf(self, name: str, leaf: NDArray[Any]) -> NDArray[Any]:
        if name == ACTION_MASK:
            return leaf[:, self._choices]
        shape = self.spec.observation[name].shape
        return leaf if leaf.shape[1:] == shape else leaf[(slice(None), *map(slice, shape))]


def _choices(signature: Signature, joint: ActionSpec) -> Rows:
    """Places of a signature's own choices among those of all, in order: a factor's stand at the front of its place."""
    starts = np.cumsum([0, *joint.discrete])
    own = [np.arange(start, start + n) for start, n in zip(starts, signature.action.discrete, strict=False)]
    return np.concatenate([*own, starts[:0]])
