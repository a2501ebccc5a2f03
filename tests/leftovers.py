"""What a test session leaves behind: processes, files of shared memory, temporary files, files where it was started.

Whatever the tests start inherits a mark and a directory for temporary files, so that neither the processes nor the
files of others on this machine are taken for the session's. conftest.py fails the session for what is found.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from fnmatch import fnmatch
from pathlib import Path

import psutil

from pronghorn.envworker.keeper import _is_stale

MARK = "PRONGHORN_TEST_SESSION"
GRACE_S = 10.0  # keepers remove what the dead have left
SHARED = Path("/dev/shm")
# Caches of others, which outlive a process on purpose.
TOLERATED_FILES = ("ray", "torchinductor_*", "matplotlib-*", "pymp-*")
TOLERATED_HERE = (".pytest_cache", ".hypothesis", ".coverage*", "__pycache__", ".mypy_cache", ".ruff_cache")


class Leftovers:
    """From its making to `found`."""

    def __init__(self) -> None:
        self._here = Path.cwd()
        self._files_here = set(os.listdir(self._here))
        self._shared = _shared()
        self._mark = uuid.uuid4().hex
        self._before = {name: os.environ.get(name) for name in (MARK, "TMPDIR", "PYTEST_DEBUG_TEMPROOT")}
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps the last directories
        self._temporary = Path(tempfile.mkdtemp(prefix="pt-"))  # short: paths of sockets are made below it
        os.environ |= {MARK: self._mark, "TMPDIR": str(self._temporary)}
        tempfile.tempdir = None  # asked for anew

    def found(self) -> list[str]:
        """A line for each thing that is still there after a grace; its own directory is removed."""
        deadline = time.monotonic() + GRACE_S
        while (found := self._look()) and time.monotonic() < deadline:
            time.sleep(0.2)
        shutil.rmtree(self._temporary, ignore_errors=True)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        return found

    def _look(self) -> list[str]:
        files = _without(TOLERATED_FILES, set(os.listdir(self._temporary)))
        here = _without(TOLERATED_HERE, set(os.listdir(self._here)) - self._files_here)
        return [
            *(f"process {text}" for text in self._processes()),
            *(f"temporary file {name}" for name in files),
            *(f"{self._here / name}" for name in here),
            # those of others on this machine are in use
            *(f"{SHARED / name}" for name in sorted(_shared() - self._shared) if _is_stale(str(SHARED / name))),
        ]

    def _processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(MARK) == self._mark:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            except psutil.Error:  # it has ended, or is not ours to look at
                pass
        return found


def _without(patterns: tuple[str, ...], names: set[str]) -> list[str]:
    return sorted(name for name in names if not any(fnmatch(name, pattern) for pattern in patterns))


def _shared() -> set[str]:
    return {path.name for path in SHARED.glob("*") if path.is_file()} if SHARED.is_dir() else set()
