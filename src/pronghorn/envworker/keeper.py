"""Kills the process groups of a run and removes what they leave, when the trainer vanishes; restarts nothing.

`python keeper.py` reads lines from its standard input, which only the trainer holds open:

    add PGID       a worker's process group to look after          dir PATH   a directory to remove
    remove PGID    the trainer has ended that group itself         bye        all is in order: just end

At the end of the input without `bye` the trainer is gone (SIGKILL, out of memory): every group is killed and
the shared-memory files of its game engines are removed. The trainer calls `kill_group` for the same work.

Standard library only, Python 3.8 syntax. Where there is no /proc (macOS) groups are killed all the same, and
shared-memory files, which cannot be found there, stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import IO, Callable, Iterator, List, Set, Tuple

log = logging.getLogger(__name__)

ENGINE_FILE_PREFIX = "/dev/shm/ViZDoom"  # ViZDoomSM... and ViZDoomMQ...: three files for each engine
MIN_STALE_AGE_S = 5.0  # a younger file may belong to an engine that has not mapped it yet


def kill_group(pgid: int) -> List[str]:
    """SIGKILL every process of the group or session `pgid` and remove its engines' shared memory.

    Call it before the leader is reaped: until then its number cannot belong to anybody else.
    Returns the paths that were removed.
    """
    members = [pid for pid, group, session in _processes() if pgid in (group, session)]
    files: Set[str] = set()
    for pid in members:
        files.update(_engine_files(pid))
    _kill(os.killpg, pgid)
    for pid in members:  # those that left the group, but not the session
        _kill(os.kill, pid)
    return [path for path in sorted(files) if _unlink(path)]


def remove_stale_engine_files() -> List[str]:
    """Remove ViZDoom shared memory of this user that no process maps any more; returns the paths."""
    directory, prefix = os.path.split(ENGINE_FILE_PREFIX)
    try:
        names = [name for name in os.listdir(directory) if name.startswith(prefix)]
    except OSError:
        return []
    stale = [path for path in (os.path.join(directory, name) for name in names) if _is_old_and_ours(path)]
    if not stale or not os.path.isdir("/proc/self"):
        return []
    in_use: Set[str] = set()
    for pid, _, _ in _processes():
        in_use.update(_engine_files(pid))
    return [path for path in sorted(stale) if path not in in_use and _unlink(path)]


def _is_old_and_ours(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_ctime > MIN_STALE_AGE_S


def _processes() -> Iterator[Tuple[int, int, int]]:
    """(pid, process group, session) of every process that can be seen."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % name, "rb") as file:
                # The second field, the command in brackets, may hold blanks and brackets itself.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        yield int(name), int(fields[2]), int(fields[3])


def _engine_files(pid: int) -> Set[str]:
    try:
        with open("/proc/%d/maps" % pid) as file:
            lines = [line for line in file if ENGINE_FILE_PREFIX in line]
    except OSError:
        return set()
    # A mapped file that has been unlinked already shows as 'PATH (deleted)'.
    return {line.split(None, 5)[5].strip() for line in lines if "(deleted)" not in line}


def _kill(kill: Callable[[int, int], None], number: int) -> None:
    # Gone already, or (macOS) only a zombie is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(number, signal.SIGKILL)


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


class Keeper:
    """The trainer's hold on a keeper process: starts it, tells it what to look after, and replaces it if it dies."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._groups: Set[int] = set()
        self.process = self._launch()

    def add(self, pgid: int) -> None:
        self._groups.add(pgid)
        self._tell("add %d" % pgid)

    def remove(self, pgid: int) -> None:
        self._groups.discard(pgid)
        self._tell("remove %d" % pgid)

    def check(self) -> None:
        """Start another if it died."""
        if self.process.poll() is not None:
            self._replace()

    def close(self) -> None:
        """All groups have been ended in order: let the keeper end too."""
        with contextlib.suppress(OSError):
            _write(self.process, "bye")
        self._end()

    def _launch(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # it must not get the signals of the trainer's group
            bufsize=0,
        )
        _write(process, "dir " + self._directory, *("add %d" % pgid for pgid in self._groups))
        return process

    def _tell(self, line: str) -> None:
        try:
            _write(self.process, line)
        except OSError:
            self._replace()

    def _replace(self) -> None:
        log.warning("the keeper process ended (status %s); starting another", self.process.poll())
        self._end()
        self.process = self._launch()

    def _end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()


def _write(process: subprocess.Popen[bytes], *lines: str) -> None:
    assert process.stdin is not None
    process.stdin.write("".join(line + "\n" for line in lines).encode())


def watch(lines: IO[str]) -> None:
    """Follow the trainer's lines to their end, then clean up unless it said `bye`."""
    groups: Set[int] = set()
    directories: List[str] = []
    for line in lines:
        word, _, value = line.rstrip("\n").partition(" ")
        if word == "add":
            groups.add(int(value))
        elif word == "remove":
            groups.discard(int(value))
        elif word == "dir":
            directories.append(value)
        elif word == "bye":
            return
    for pgid in groups:
        kill_group(pgid)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    watch(sys.stdin)
