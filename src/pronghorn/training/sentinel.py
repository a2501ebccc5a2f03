"""Ends a trainer in which no Python code runs any more: native code that keeps Python's lock stops its watchdog too.

`python sentinel.py PID SECONDS` reads beats from its standard input, which only the trainer holds open. It ends with
the input. Without a beat for so long it sends SIGABRT, at which `faulthandler` writes the stack of every thread, and
SIGKILL if that does not help. Time in which the trainer or this process is stopped does not count. Standard library
only; it needs /proc.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LOOK_S = 1.0
DYING_S = 10.0  # to write its stacks
STACKS_FILE = "stacks.txt"


def watch(pid: int, silent_s: float, beats: int = 0) -> None:
    """Follow the beats to their end, or end the process that makes them no more."""
    heard = looked = time.monotonic()
    while True:
        arrived = select.select([beats], [], [], LOOK_S)[0]
        now = time.monotonic()
        paused, looked = now - looked > LOOK_S + 4.0, now
        if arrived:
            if not os.read(beats, 1 << 16):
                return
            heard = now
        elif paused or _is_stopped(pid):
            heard = now
        elif now - heard > silent_s:
            _end(pid, silent_s)
            return


def _is_stopped(pid: int) -> bool:
    """By a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def _end(pid: int, silent_s: float) -> None:
    text = f"pronghorn: The run stands still: no Python code ran for {silent_s:g} s (native code keeps Python's lock, "
    with contextlib.suppress(OSError):
        os.write(2, f"{text}--stall-timeout-s). The process is ended; {STACKS_FILE} has the stacks.\n".encode())
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)
        until = time.monotonic() + DYING_S
        while time.monotonic() < until:
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def started(run_dir: Path, silent_s: float) -> Iterator[Callable[[], None]]:
    """A sentinel for this process, while this lasts; what is given is to be called well within silent_s.

    Stacks of a crash in native code go into a file of run_dir, unless this process has another place for them.
    """
    if not Path("/proc/self/stat").exists():
        yield lambda: None
        return
    with contextlib.ExitStack() as stack:
        _write_stacks(run_dir / STACKS_FILE, stack)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), str(silent_s)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True, bufsize=0,
        )  # fmt: skip
        assert process.stdin is not None
        stack.callback(process.wait)
        stack.callback(process.stdin.close)
        beats = process.stdin.fileno()
        os.set_blocking(beats, False)

        def beat() -> None:
            with contextlib.suppress(OSError):  # full, or gone: then nobody watches, which harms no run
                os.write(beats, b".")

        yield beat


def _write_stacks(path: Path, stack: contextlib.ExitStack) -> None:
    if faulthandler.is_enabled():
        return
    with contextlib.suppress(OSError):  # a full disk: then without
        file = stack.enter_context(open(path, "ab"))  # noqa: SIM115 - the stack closes it
        stack.callback(_remove_if_empty, path)
        faulthandler.enable(file)
        stack.callback(faulthandler.disable)


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    watch(int(sys.argv[1]), float(sys.argv[2]))
