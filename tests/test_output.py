"""Where nobody reads what a run says: a closed pipe, closed streams, a terminal that has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pronghorn.training.checkpoint import load_latest
from running import assert_gone, children_of, env, wait_for_steps

SMALL = ["--env.workers", "1", "--env.envs-per-worker", "4", "--log.every-s", "0.2", "--log.no-tensorboard"]


def command(run_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "pronghorn", "train", env("Match"), "--run-dir", str(run_dir), *SMALL, *flags]


def assert_saved_whole(run_dir: Path) -> None:
    saved = load_latest(run_dir / "checkpoints")  # its checksums agree
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [saved.path.name]  # and nothing is half made


@pytest.mark.case("FLT-10")
def test_a_reader_that_goes_away_stops_the_run_with_141_after_a_save(tmp_path: Path) -> None:
    """`pronghorn train … | head -1`: as a process that SIGPIPE ends, but whole."""
    process = subprocess.Popen(command(tmp_path / "run"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    children = children_of(process)
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 141, said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert_gone(children)
    assert_saved_whole(tmp_path / "run")
    assert "the reader of the output has gone" in (tmp_path / "run" / "log.txt").read_text()


def test_a_finished_run_keeps_its_code_when_nobody_reads_the_end(tmp_path: Path) -> None:
    argv = command(tmp_path / "run", "--steps", "500", "--log.live", "off")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


@pytest.mark.parametrize("argv", [["--help"], ["train", "x", "--help"], ["envs"]], ids=" ".join)
def test_a_listing_that_nobody_reads_is_no_failure(argv: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pronghorn", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


def test_closed_streams_stand_for_no_file_of_the_run(tmp_path: Path) -> None:
    """With descriptors 1 and 2 closed, files of the run would get these numbers, and what a signal says."""
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command(tmp_path / "run")]
    process = subprocess.Popen(closed)
    wait_for_steps(tmp_path / "run", 200, process)
    names = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in (1, 2)} if os.path.isdir("/proc") else {os.devnull}
    children = children_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert names == {os.devnull}
    assert_gone(children)
    assert_saved_whole(tmp_path / "run")


# Makes its standard input the controlling terminal of a session of its own, then becomes the command.
ON_TERMINAL = (
    "import fcntl, os, signal, sys, termios\n"
    "os.setsid()\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


def start_on_terminal(hangup: str, argv: list[str]) -> tuple[subprocess.Popen[str], int]:
    """(the process, the other end of its terminal)."""
    master, slave = os.openpty()
    launcher = [sys.executable, "-c", ON_TERMINAL, hangup, *argv]
    terminal = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(launcher, stdin=slave, stdout=slave, stderr=slave, env=terminal, text=True)
    os.close(slave)
    return process, master


def read_until(master: int, text: bytes) -> None:
    seen, deadline = b"", time.monotonic() + 60
    while text not in seen:
        assert time.monotonic() < deadline, seen
        seen += os.read(master, 4096)


@pytest.mark.case("RES-16")
def test_a_terminal_that_closes_stops_the_run_with_129_after_a_save(tmp_path: Path) -> None:
    process, master = start_on_terminal("SIG_DFL", command(tmp_path / "run"))
    read_until(master, b"steps/s")  # the panel is drawn
    children = children_of(process)
    os.close(master)
    process.send_signal(signal.SIGHUP)  # a shell between them passes its own on
    assert process.wait(30) == 129
    assert_gone(children)
    assert_saved_whole(tmp_path / "run")


def test_a_run_that_ignores_hangups_outlives_its_terminal(tmp_path: Path) -> None:
    process, master = start_on_terminal("SIG_IGN", command(tmp_path / "run", "--minutes", "0.2"))
    read_until(master, b"steps/s")
    os.close(master)
    assert process.wait(60) == 0
    assert_saved_whole(tmp_path / "run")
