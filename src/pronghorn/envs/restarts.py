"""How often dead workers are replaced: a budget of deaths, and an end to those that repeat. It ends no process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

FIRST_DELAY_S, MAX_DELAY_S = 0.25, 30.0  # before the second restart in a row of one worker, and at most
NUM_EQUAL = 3  # equal failures of one worker after which another restart is taken for useless


class RestartBudget:
    """Says when a death is one too many.

    budget: restarts allowed within window_s, over all workers.

    An environment that raises the same error in the same step of its life, although each life has new seeds, will
    raise it again: after NUM_EQUAL such lives in a row of one worker, in none of which an episode ended, the rest of
    the budget would only put the end off. Failures that depend on chance (another step, another text), kills and hangs
    have the whole budget, and so has a failure in the first step of a life: all lives that end there are equal, also
    those that end by chance or because something outside is not there yet. A setting that was refused (`set_option`)
    would be refused again, as each life is told it, so its first refusal is the last.

    The first restart of a worker is made at once. While no episode ends in its lives the next ones wait, twice as long
    each time: what is wrong outside (a full disk, a server that is away) may pass, and the machine is left alone.
    """

    def __init__(self, budget: int, window_s: float) -> None:
        self.budget, self.window_s = budget, window_s
        self._deaths: deque[float] = deque()
        self._equal: dict[int, tuple[tuple[object, ...], list[float]]] = {}  # by worker: (failure, when)
        self._useless: dict[int, list[float]] = {}  # by worker: when its lives ended since an episode did

    @property
    def num_used(self) -> int:
        """Deaths within the window that ends now."""
        while self._deaths and self._deaths[0] < time.monotonic() - self.window_s:
            self._deaths.popleft()
        return len(self._deaths)

    def episode_ended(self, worker: int) -> None:
        """The worker's present life is of use."""
        self._equal.pop(worker, None)
        self._useless.pop(worker, None)

    def delay_s(self, worker: int) -> float:
        """Seconds to wait before this worker is replaced, after `why_not` has counted its death."""
        deaths = len(self._useless.get(worker, []))
        # 0, then d, 2d, 4d, ... up to the most
        return 0.0 if deaths < 2 else min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(deaths - 2, 30))

    def why_not(self, worker: int, report: Mapping[str, Any] | None) -> str:
        """Count a death. '' if the worker is to be replaced, else why not.

        report: what the worker said of its failure (`envworker.main`), None if it could say nothing.
        """
        if self.num_used >= self.budget:
            return (
                f"The budget of {self.budget} restarts within {self.window_s:g} s is used up "
                "(restart_budget, restart_window_s)."
            )
        now = time.monotonic()
        self._deaths.append(now)
        recent = [t for t in self._useless.get(worker, []) if t >= now - self.window_s]
        self._useless[worker] = [*recent, now]
        if report is not None and report["phase"] == "option":
            return "It refused a setting (set_option), which its successor would be told and refuse as well."
        if self._num_equal(worker, report) >= NUM_EQUAL:
            return (
                f"{NUM_EQUAL} times in a row this worker failed so in the same step and before any episode ended: "
                "no more of its restarts were tried."
            )
        return ""

    def _num_equal(self, worker: int, report: Mapping[str, Any] | None) -> int:
        """Equal failures of the worker in a row, within the window."""
        if report is None or report["phase"] != "step" or report["steps"] == 0:
            self._equal.pop(worker, None)
            return 0
        failure = tuple(report[name] for name in ("env", "steps", "type", "message", "traceback"))
        before, times = self._equal.get(worker, (failure, []))
        now = time.monotonic()
        recent = [t for t in times if t >= now - self.window_s] if before == failure else []
        self._equal[worker] = failure, [*recent, now]
        return len(recent) + 1
