"""Going back to the last checkpoint when a policy's losses stay not finite. It neither trains nor saves.

What makes the policy goes back: weights, normalisers, the optimiser's moments, an adapted learning rate. Counters go
on: the steps were taken. What was collected by the policy that broke is void, and counted.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import pronghorn.training.checkpoint as checkpoints
from pronghorn.errors import CheckpointError, DivergedError
from pronghorn.training.beginning import shared_checkpoint
from pronghorn.training.checkpoint import Checkpoint
from pronghorn.training.member import Member
from pronghorn.training.world import World

_LOG = logging.getLogger("pronghorn")
_ADVICE = "Lower --learner.lr, or look at the environment's observations and rewards."


class _Tried(NamedTuple):
    """A checkpoint that a member went back to, how often, and the member's lineage since then."""

    path: Path
    times: int
    lineage: int


class Rollbacks:
    """What each member of a run may still go back to.

    max_rollbacks: times to one and the same checkpoint. A newer one is progress, and begins the count anew.
    """

    def __init__(self, run_dir: Path, max_rollbacks: int, world: World | None = None) -> None:
        """world: who else trains the policy, and goes back at the same time; None: nobody."""
        self._world = world or World()
        self._directory, self._max = run_dir / "checkpoints", max_rollbacks
        self._tried: dict[int, _Tried] = {}  # by the member's number

    def undo(self, member: Member, error: DivergedError) -> None:
        """Let the member be what was saved last. Its lock is held by the caller, so that nobody saves meanwhile.

        Raises DivergedError, with the reason, where it cannot.
        """
        saved = self._saved(error)
        times = self._times(member, saved, error)
        member.go_back(saved.policies[member.index], str(saved.path))
        self._tried[member.index] = _Tried(saved.path, times, member.lineage)
        text = "policy %d: %s Back to %s (%d of %d rollbacks to it)."
        _LOG.warning(text, member.index, error, saved.path, times, self._max)

    def _saved(self, error: DivergedError) -> Checkpoint:
        """The newest checkpoint that is whole. Of several learners the first one reads it, for all."""
        if self._world.size == 1:
            return self._read(error)
        saved, none = None, DivergedError(f"{error} Learner 0 has no checkpoint to go back to. {_ADVICE}")
        if self._world.leads:
            try:
                saved = self._read(error)
            except DivergedError as why:
                none = why
        saved = shared_checkpoint(self._world, saved)
        if saved is None:
            raise none
        return saved

    def _read(self, error: DivergedError) -> Checkpoint:
        if not checkpoints.list_checkpoints(self._directory):
            raise DivergedError(f"{error} No checkpoint to go back to was saved yet. {_ADVICE}") from error
        try:
            return checkpoints.load_latest(self._directory, _LOG.warning)
        except CheckpointError as unreadable:
            raise DivergedError(f"{error} The last checkpoint cannot be gone back to: {unreadable}") from error

    def _times(self, member: Member, saved: Checkpoint, error: DivergedError) -> int:
        """Which rollback of the member to this checkpoint it is. Raises DivergedError if there may be none."""
        before = self._tried.get(member.index)
        again = before is not None and before.path == saved.path
        lineage = before.lineage if before and again else int(saved.policies[member.index].state.get("lineage", 0))
        if member.lineage != lineage:
            why = f"Policy {member.index} was replaced by another's since the last checkpoint, so it has none yet."
            raise DivergedError(f"{error} {why} {_ADVICE}")
        times = before.times + 1 if before and again else 1
        if times > self._max:
            why = f"{self._max} rollbacks to {saved.path} did not help (learner.max_rollbacks)."
            raise DivergedError(f"{error} {why} That checkpoint is kept as it is. {_ADVICE}")
        return times
