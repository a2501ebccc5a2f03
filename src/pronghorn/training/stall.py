"""An alarm for a run that stands still, and where its threads are. It ends nothing: watchdog.py does."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

AFTER_S = 60.0
_OURS = str(Path(__file__).parents[1])
_MAX_CALLS = 12


class StallAlarm:
    """Tells, once for each stall, that nothing has moved for `after_s` seconds."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self._last: tuple[int, ...] = ()
        self._since, self._told = time.monotonic(), False

    def rings(self, progress: tuple[int, ...]) -> bool:
        """progress: counts that change while the run goes on."""
        now = time.monotonic()
        if progress != self._last:
            self._last, self._since, self._told = progress, now, False
        elif not self._told and now - self._since >= self.after_s:
            self._told = True
            return True
        return False


def places(threads: Iterable[threading.Thread]) -> list[str]:
    """Where each thread is, a line each: the innermost line of this package that it has reached."""
    lines = []
    for thread in threads:
        ours = [call for call in _calls(thread) if call.filename.startswith(_OURS)]
        where = f"{ours[-1].name}, {ours[-1].filename}:{ours[-1].lineno}" if ours else "ended"
        lines.append(f"thread {thread.name}: {where}")
    return lines


def stacks(threads: Iterable[threading.Thread]) -> list[str]:
    """The innermost calls of each thread, outermost first, a line each under the thread's name."""
    lines = []
    for thread in threads:
        calls = _calls(thread)[-_MAX_CALLS:]
        lines += [f"thread {thread.name}:", *(f"  {call.name}, {call.filename}:{call.lineno}" for call in calls)]
    return lines


def _calls(thread: threading.Thread) -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(thread.ident or 0)
    return [] if frame is None else list(traceback.extract_stack(frame))
