"""A disk that is full for a while, or at the end: the run goes on or ends with one error; what was saved is whole."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.training.checkpoint import list_checkpoints, load_latest
from pronghorn.training.metrics import read_metrics
from running import assert_gone, children_of, start, wait_for_steps

TINY = ("--checkpoint.every-s", "0.5", "--model.mlp-layers", "16", "--threads", "1", "--log.live", "plain")


def limit_files(process: subprocess.Popen[str], num_bytes: int) -> None:
    """No file of the process may become larger: as on a full disk, writes fail, and each begins to fail at any byte."""
    psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (num_bytes, psutil.RLIM_INFINITY))



@pytest.fixture
def full(tmp_path: Path) -> tuple[subprocess.Popen[str], Path, list[psutil.Process]]:
    """A run that has saved, and whose disk is full now."""
    if not hasattr(psutil, "RLIMIT_FSIZE"):
        pytest.skip("needs Linux")
    run_dir = tmp_path / "run"
    process = start(run_dir, *TINY)
    wait_for_steps(run_dir, 3_000, process)
    deadline = time.monotonic() + 60.0
    while not list_checkpoints(run_dir / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.05)
    limit_files(process, 1_000)
    return process, run_dir, children_of(process)


@pytest.mark.case("RES-03")
def test_a_run_outlives_a_disk_that_is_full_for_a_while(
    full: tuple[subprocess.Popen[str], Path, list[psutil.Process]],
) -> None:
    process, run_dir, children = full
    before = load_latest(run_dir / "checkpoints").state["updates"]
    lines = len(read_metrics(run_dir))
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(6.0)
    assert process.poll() is None, process.communicate()[0]
    assert load_latest(run_dir / "checkpoints").state["updates"] >= before
    limit_files(process, psutil.RLIM_INFINITY)
    wait_for_steps(run_dir, read_metrics(run_dir)[-1]["steps"] + 5_000, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert "Logging error" not in output
    assert "cannot write metrics: File too large. The run goes on without." in output
    assert output.count("cannot write metrics") == 1
    assert "metrics can be written again; some may be missing" in output
    last = read_metrics(run_dir)[-1]
    assert last["saves_failed"] >= 1
    assert len(read_metrics(run_dir)) > lines
    assert load_latest(run_dir / "checkpoints").state["updates"] == last["updates"]
    assert_gone(children)


@pytest.mark.case("RES-03")
def test_a_run_that_ends_on_a_full_disk_says_so_and_keeps_what_was_saved(
    full: tuple[subprocess.Popen[str], Path, list[psutil.Process]],
) -> None:
    process, run_dir, children = full
    before = load_latest(run_dir / "checkpoints").state["updates"]
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    (said,) = [line for line in output.splitlines() if line.startswith("pronghorn: ")]
    assert "Cannot save into" in said
    assert "File too large. Checkpoints saved before are intact; free disk space" in said
    assert load_latest(run_dir / "checkpoints").state["updates"] >= before
    assert [p.name for p in (run_dir / "checkpoints").glob(".*")] == []
    assert_gone(children)
