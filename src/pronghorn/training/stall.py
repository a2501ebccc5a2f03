"""An alarm for a run that stands still, and where its threads are. It ends nothing: a long step may just be long."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

AFTER_S = 60.0
_OURS = str(Path(__file__).parents[1])


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
    frames = sys._current_frames()
    lines = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        ours = [call for call in stack if call.filename.startswith(_OURS)]
        where = f"{ours[-1].name}, {ours[-1].filename}:{ours[-1].lineno}" if ours else "ended"
        lines.append(f"thread {thread.name}: {where}")
    return lines
