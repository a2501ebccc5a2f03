"""The sentinel: beats, silence, a trainer that is stopped, and one that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pronghorn.training import sentinel

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.fixture
def victim() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])


def watch(pid: int, silent_s: float) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", "-S", sentinel.__file__, str(pid), str(silent_s)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


def test_who_makes_no_beat_is_ended(victim: subprocess.Popen[bytes]) -> None:
    watcher = watch(victim.pid, 2.0)
    assert victim.wait(60) == -signal.SIGABRT
    _, said = watcher.communicate(timeout=60)
    assert b"no Python code ran for 2 s" in said


def test_who_beats_or_is_stopped_is_left_alone_and_so_is_who_has_ended(victim: subprocess.Popen[bytes]) -> None:
    watcher = watch(victim.pid, 4.0)
    assert watcher.stdin is not None
    for _ in range(6):
        watcher.stdin.write(b".")
        time.sleep(1.0)
    victim.send_signal(signal.SIGSTOP)
    time.sleep(7.0)
    assert victim.poll() is None
    watcher.stdin.close()  # as when the trainer ends
    assert watcher.wait(60) == 0
    victim.send_signal(signal.SIGCONT)
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    assert watcher.stderr is not None
    assert watcher.stderr.read() == b""
    watcher.stderr.close()


def test_a_run_that_ends_well_leaves_neither_process_nor_file(tmp_path: Path) -> None:
    with sentinel.started(tmp_path, 100.0) as beat:
        for _ in range(100_000):  # more than a pipe holds, should nobody read
            beat()
    assert os.listdir(tmp_path) == []
