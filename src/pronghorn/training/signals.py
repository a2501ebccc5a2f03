"""Signals that end a run: the first one asks, a second one forces. It saves nothing; the trainer does.

A hang-up never forces: a terminal that closes sends one, and its shell passes on another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# SIGUSR1 is what schedulers send before their time limit, SIGHUP what a terminal sends that closes.
EXIT_CODES = {
    getattr(signal, name): code
    for name, code in (("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138), ("SIGHUP", 129))
    if hasattr(signal, name)
}
_HANGUP = getattr(signal, "SIGHUP", None)
READER_GONE = 141  # as a process that SIGPIPE ends


class StopSignals:
    """The signal that asked the run to stop, once there was one.

    force: what a second signal does before it ends the process at once, without saving.
    quiet: do not tell the terminal that a signal was understood.
    echo_s: the same signal once more within so many seconds means nothing: torchrun passes on what its processes got
        themselves, and ends all when one of them has ended.
    """

    def __init__(self, force: Callable[[], None], *, quiet: bool, echo_s: float = 0.0) -> None:
        self._force, self._quiet, self._echo_s = force, quiet, echo_s
        self._at = 0.0
        self.number = 0

    @property
    def exit_code(self) -> int:
        """That of the process, for the signal that came."""
        return EXIT_CODES[signal.Signals(self.number)]

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch them while this lasts; only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = [n for n in EXIT_CODES if n != _HANGUP or signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores it
        # Set explicitly: background jobs inherit SIGINT ignored.
        old = {number: signal.signal(number, self._on_signal) for number in wanted}
        try:
            yield
        finally:
            # An echo that came later would take the process's exit code.
            ends = self.number and self._echo_s
            for number, handler in old.items():
                signal.signal(number, signal.SIG_IGN if ends else handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.number:
            if number == _HANGUP or (number == self.number and time.monotonic() - self._at < self._echo_s):
                return
            self._force()
            os._exit(EXIT_CODES[signal.Signals(number)])
        self.number, self._at = number, time.monotonic()
        if not self._quiet and sys.stderr is not None:  # else descriptor 2 may be any file
            name = signal.Signals(number).name
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, f"\n{name}: saving and stopping; once more ends at once\n".encode())  # safe in a handler
