"""Writes what a run leaves in its directory besides metrics: settings, checkpoints, the best policy.

checkpoint.py knows how; here is what belongs together. When to save is said by the trainer. Of several learners the
first one writes; the others add what only they know.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tomli_w

import pronghorn.training.checkpoint as checkpoints
from pronghorn.errors import CheckpointError, NotFiniteError
from pronghorn.evaluation.evaluate import Finished
from pronghorn.settings_file import to_toml
from pronghorn.spec_file import ENV_FILE, spec_bytes
from pronghorn.training.checkpoint import Checkpoint, SavedPolicy
from pronghorn.training.parts import Parts
from pronghorn.training.rounds import Rounds
from pronghorn.untrusted import number, usable

_LOG = logging.getLogger("pronghorn")


@dataclass
class Evaluated:
    """Mean returns of evaluations."""

    last: float | None = None
    best: float = -float("inf")

    @staticmethod
    def of(saved: Checkpoint | None) -> Evaluated:
        """As they were when a run was saved, or before the first evaluation."""
        if saved is None:
            return Evaluated()
        with usable(saved.path / checkpoints.STATE_FILE):
            last, best = (None if value is None else number(value)
                          for value in (saved.state["eval_mean"], saved.state["best_return"]))  # fmt: skip
        return Evaluated(last, -float("inf") if best is None else best)


class Saver:
    """The files of one run."""

    def __init__(self, parts: Parts, evaluated: Evaluated) -> None:
        """evaluated: changes while the run goes on, and is saved as it is then."""
        self._parts, self._evaluated = parts, evaluated
        self._directory = parts.config.run_path
        self._last_save = time.monotonic()
        self.num_failed = 0  # checkpoints that could not be written or were refused
        self._without: set[str] = set()  # kinds of other files that cannot be written now

    @property
    def seconds_since(self) -> float:
        """Since the last checkpoint, or since the run began."""
        return time.monotonic() - self._last_save

    def write_settings(self) -> None:
        """What others need to know of the run: its settings and its environment."""
        if not self._parts.world.leads:
            return
        config = tomli_w.dumps(to_toml(self._parts.whole)).encode()
        checkpoints.write_atomically(self._directory / "config.toml", config)
        checkpoints.write_atomically(self._directory / ENV_FILE, spec_bytes(self._parts.pool.spec))

    @contextlib.contextmanager
    def going_on_without(self, what: str) -> Iterator[None]:
        """Where a file of the run cannot be written (a full disk), say so once, and let the run go on."""
        try:
            yield
        except OSError as error:
            if what not in self._without:
                self._without.add(what)
                _LOG.error("cannot write %s: %s. The run goes on without.", what, error.strerror or error)
        else:
            if what in self._without:
                self._without.discard(what)
                _LOG.warning("%s can be written again; some may be missing", what)

    def save_if_possible(self, reason: str) -> int | None:
        """The same while the run goes on: a failure is said and counted, and the next save may succeed.

        Returns the number of a policy that was refused because it holds a number that is not finite.
        """
        try:
            self.save(reason)
        except CheckpointError as error:
            self._last_save = time.monotonic()
            _LOG.error("%s The run goes on without this checkpoint (%d failed so far).", error, self.num_failed)
            return error.policy if isinstance(error, NotFiniteError) else None
        return None

    def save(self, reason: str, *, alone: bool = False) -> None:
        """A checkpoint of one moment of all policies. reason: why the run ends, or empty.

        Of several learners all call it, in one place of their work. alone: without the others, who are lost; what they
        told last of their episodes is saved.
        Raises CheckpointError: it cannot be written, or holds a number that is not finite; those before stay.
        """
        try:
            self._save(reason, alone=alone)
        except CheckpointError:
            self.num_failed += 1
            raise

    def _save(self, reason: str, *, alone: bool) -> None:
        parts = self._parts
        others = self._from_others(alone=alone) if parts.world.size > 1 else {}
        self._last_save = time.monotonic()
        with contextlib.ExitStack() as stack:
            for member in parts.members:
                stack.enter_context(member.lock)
            first, *more = [member.saved() for member in parts.members]
            checkpoints.require_finite([first, *more])
            if not parts.world.leads:
                return
            snapshots = dict(parts.league.snapshots) if parts.league else None
            path = checkpoints.save(
                self._directory / "checkpoints", parts.updates, first.weights, first.optimizer,
                first.state | self._state(reason) | others, keep=parts.config.checkpoint.keep, others=more,
                snapshots=snapshots,
            )  # fmt: skip
        self._last_save = time.monotonic()
        _LOG.debug("saved %s, params_sha %s", path, first.state["params_sha"])

    def _from_others(self, *, alone: bool) -> dict[str, Any]:
        """Episodes of the other learners, once it is sure that all have the same weights. Raises LearnersLost."""
        world, member = self._parts.world, self._parts.members[0]
        world.tell("episodes", json.dumps(member.tracker.state()))
        if not alone:
            Rounds(world).require_same(checkpoints.params_sha(member.model.state_dict()))
        return {"learners": [json.loads(text) for _, text in sorted(world.told("episodes").items())]}

    def save_best(self, done: Finished) -> None:
        """The weights whose evaluation was the best one yet."""
        state = {"steps": done.steps, "eval_mean": done.result.mean, "version": done.version, "policy": done.policy}
        nothing: dict[str, Any] = {"state": {}, "param_groups": []}
        first, *others = [SavedPolicy(dict(weights), nothing, state) for weights in done.weights]
        try:
            checkpoints.require_finite([first, *others])
            checkpoints.save(self._directory / "best", done.steps, *first, keep=1, others=others)
        except CheckpointError as error:
            self.num_failed += 1
            _LOG.error("%s The run goes on; the best policy before stays saved.", error)

    def _state(self, reason: str) -> dict[str, Any]:
        """Of the run, besides its policies."""
        parts, league = self._parts, self._parts.league
        state = {
            "best_return": self._evaluated.best if np.isfinite(self._evaluated.best) else None,
            "eval_mean": self._evaluated.last,
            "time_s": parts.time_s(),
            "frame_skip": parts.pool.spec.frame_skip,
            "reason": reason,
        }
        return state | ({"league": league.state(), "leader": league.leader} if league else {})
