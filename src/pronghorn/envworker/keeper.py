"""Kills the process groups of a run and removes what they leave, when the trainer vanishes; restarts nothing.

`python keeper.py` reads lines from its standard input, which only the trainer holds open:

    add PGID       a worker's process group to look after          dir PATH   a directory to remove
    process PID START   one process alone, and when it started (ticks since boot, as /proc tells)
    remove PGID    the trainer has ended that group itself         bye        all is in order: just end

At the end of the input without `bye` the trainer is gone (SIGKILL, out of memory): every group is killed and
the shared-memory files of its game engines are removed. The trainer calls `kill_group` for the same work.

Whose file it is. ViZDoom makes three for each engine: the worker two (message queues) before the engine starts, the
engine one (its state) once it runs. What a living process of the group has mapped is the group's. That is not all: an
engine that is just starting has mapped none, and what an engine left that died is mapped by the worker alone, so by
nobody once that is dead too. Therefore the rest is found when all of them have ended: it is what nobody has open. A
file that is still needed is open somewhere from its first moment on.

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
from typing import IO, Callable, Iterator, List, Optional, Set, Tuple

log = logging.getLogger(__name__)

ENGINE_FILE_PREFIX = "/dev/shm/ViZDoom"  # ViZDoomSM... and ViZDoomMQ...: three files for each engine
MAX_DYING_S = 5.0  # a killed process that is stuck in the kernel may take long to end, or never do


def kill_group(pgid: int) -> List[str]:
    """SIGKILL every process of the group or session `pgid`, wait until none lives, and remove all shared memory of
    engines that is theirs or nobody's.

    Call it before the leader is reaped: until then its number cannot belong to anybody else.
    Returns the paths that were removed.
    """
    files: Set[str] = set()
    until = time.monotonic() + MAX_DYING_S
    while True:
        members = _living(pgid)
        for pid in members:
            files.update(_engine_files(pid))
        _kill(os.killpg, pgid)  # also where no process can be seen
        for pid in members:  # those that left the group, but not the session
            _kill(os.kill, pid)
        if not members:
            break
        # Files are removed only then: an engine on its way out may still make its own. Then once more, for what
        # was started while the processes were listed.
        if not _wait_ended(members, until):
            log.warning("of the killed processes %s some do not end; shared memory of engines may stay", members)
            break
    return [path for path in sorted(files) if _unlink(path)] + remove_stale_engine_files()


def remove_stale_engine_files() -> List[str]:
    """Remove ViZDoom shared memory of this user that no process has open or mapped; returns the paths."""
    directory, prefix = os.path.split(ENGINE_FILE_PREFIX)
    try:
        names = [name for name in sorted(os.listdir(directory)) if name.startswith(prefix)]
    except OSError:
        return []
    try:
        return [path for path in (os.path.join(directory, name) for name in names) if _is_stale(path) and _unlink(path)]
    except OSError as error:  # it grants no leases
        rule = "this system does not say which files are in use (%s): shared memory of dead game engines stays in %s"
        log.warning(rule, error, directory)
        return []


def _is_stale(path: str) -> bool:
    """Whether a file of this user is used by nobody. Raises OSError where the kernel does not tell.

    It grants a lease for reading on a file that no process, of whatever container, has open or mapped for writing, as
    both sides of an engine do. (/proc knows no processes of other containers, which may share /dev/shm.)
    """
    try:
        import fcntl
    except ImportError:  # Windows, where there are no such files either
        return False
    try:
        if os.lstat(path).st_uid != os.getuid():
            return False
        fd = os.open(path, os.O_RDONLY)
    except OSError:  # gone meanwhile
        return False
    try:
        # Who opened it in this moment would make the kernel send SIGIO, which ends a process; this one is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _processes() -> Iterator[Tuple[int, int, int]]:
    """(pid, process group, session) of every process that can be seen."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = _status(int(name))
                yield int(name), int(fields[2]), int(fields[3])


def _status(pid: int) -> List[bytes]:
    """State, parent, process group, session and more. Raises OSError."""
    with open("/proc/%d/stat" % pid, "rb") as file:
        # The second field, the command in brackets, may hold blanks and brackets itself.
        return file.read().rpartition(b")")[2].split()


def _start_ticks(pid: int) -> Optional[int]:
    """When a process started, in ticks since boot; None: there is none, or no /proc."""
    try:
        return int(_status(pid)[19])
    except (OSError, IndexError, ValueError):
        return None


def _living(pgid: int) -> List[int]:
    return [pid for pid, group, session in _processes() if pgid in (group, session) and not _has_ended(pid)]


def _has_ended(pid: int) -> bool:
    """Whether it runs no more, collected or not. Its first thread may have ended before others."""
    try:
        return _status(pid)[0] in (b"Z", b"X") and len(os.listdir("/proc/%d/task" % pid)) <= 1
    except OSError:
        return True


def _wait_ended(pids: List[int], until: float) -> bool:
    """Whether all ended in time."""
    while not all(map(_has_ended, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


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
        self._processes: Set[Tuple[int, int]] = set()
        self.process = self._launch()

    def add(self, pgid: int) -> None:
        self._groups.add(pgid)
        self._tell("add %d" % pgid)

    def add_process(self, pid: int) -> None:
        """Look after one process that shares its group with the trainer. Where there is no /proc: nothing is done."""
        started = _start_ticks(pid)
        if started is not None:
            self._processes.add((pid, started))
            self._tell("process %d %d" % (pid, started))

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
        _write(process, *("process %d %d" % one for one in self._processes))
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
    processes: Set[Tuple[int, int]] = set()
    directories: List[str] = []
    for line in lines:
        word, _, value = line.rstrip("\n").partition(" ")
        if word == "add":
            groups.add(int(value))
        elif word == "remove":
            groups.discard(int(value))
        elif word == "process":
            pid, _, started = value.partition(" ")
            processes.add((int(pid), int(started)))
        elif word == "dir":
            directories.append(value)
        elif word == "bye":
            return
    for pgid in groups:
        kill_group(pgid)
    for process, ticks in processes:
        if _start_ticks(process) == ticks:  # the number is not another's by now
            _kill(os.kill, process)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    watch(sys.stdin)
