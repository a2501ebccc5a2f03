"""What learners decide together before each iteration: whether to train, to end, to save. It knows no batch.

Everyone brings a wish, and all get the same decision, so nobody stops, saves or waits alone. Whoever has no batch comes
all the same, again and again: so nobody waits for long in a call that another never makes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from pronghorn.errors import PronghornError
from pronghorn.training.world import World

ERROR = "error"
REASONS = ("", "minutes", "return", "output closed", "signal", ERROR)  # why a run ends: of two the later one is told
TOLD_AFTER_S = 60.0  # without a batch

_LOG = logging.getLogger("pronghorn")


@dataclass(frozen=True)
class Wish:
    """What one learner brings. ends: one of REASONS.  signal: number of the signal that asked for it.

    saves: a checkpoint after the next iteration.
    """

    has_batch: bool
    ends: str = ""
    signal: int = 0
    saves: bool = False


@dataclass(frozen=True)
class Decision:
    """What all do. trains: everyone has a batch, and nobody ends.  lacking: those without one."""

    trains: bool
    ends: str
    signal: int
    saves: bool
    lacking: tuple[int, ...]


class Rounds:
    """One learner's place in the rounds of all; it also tells who has had no batch for long while others had."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._trained_at = time.monotonic()
        self._told: tuple[int, ...] = ()

    def decide(self, wish: Wish) -> Decision:
        """The same for all. Raises LearnersLost if one does not come."""
        mine = (float(wish.has_batch), float(REASONS.index(wish.ends)), float(wish.signal), float(wish.saves))
        batches, ends, signals, saves = self._world.exchange(mine).T
        lacking = tuple(int(rank) for rank in (batches == 0.0).nonzero()[0])
        reason = REASONS[int(ends.max())]
        self._watch(lacking)
        return Decision(not lacking and not reason, reason, int(signals.max()), bool(saves.any()), lacking)

    def require_same(self, sha: str) -> None:
        """Refuse to go on if weights differ (PronghornError). sha: of this learner's, at most 16 hexadecimal digits."""
        # Two whole numbers below 2^32 each, which float64 holds exactly.
        shas = self._world.exchange([float(int(sha[:8] or "0", 16)), float(int(sha[8:16] or "0", 16))])
        others = [rank for rank in range(len(shas)) if (shas[rank] != shas[0]).any()]
        if others:
            names = ", ".join(map(str, others))
            raise PronghornError(
                f"The weights of learner(s) {names} are not those of learner 0 (params_sha), which are saved. All must "
                "run one version of this package and of torch, on processors of one kind."
            )

    def _watch(self, lacking: tuple[int, ...]) -> None:
        now = time.monotonic()
        if not lacking or len(lacking) == self._world.size:
            self._trained_at, self._told = now, ()
        elif now - self._trained_at >= TOLD_AFTER_S and lacking != self._told:
            self._told = lacking
            names = ", ".join(map(str, lacking))
            _LOG.warning("learner(s) %s: no batch for %.0f s, all others wait (their log says why)",
                         names, now - self._trained_at)  # fmt: skip
