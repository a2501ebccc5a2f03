"""The watchdog: what stands still and what only waits, who waits for whom, and ends of runs that would never end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.errors import StallError
from pronghorn.training import watchdog as module
from pronghorn.training.checkpoint import list_checkpoints, load_latest
from pronghorn.training.watchdog import ENVIRONMENTS, Stage, Watchdog
from running import assert_gone, env


class Clock:
    """Stands in for `time`: it moves when it is told."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def dog(*stages: Stage, timeout_s: float = 100.0, environments_s: float = 50.0) -> Watchdog:
    return Watchdog(stages, tell_s=20.0, timeout_s=timeout_s, environments_s=environments_s,
                    on_stall=lambda error: None, state=lambda: ["worker 0: stepping"], run_dir=Path())  # fmt: skip


def stage(name: str, **options: float) -> Stage:
    return Stage(name, threading.current_thread().name, **options)  # type: ignore[arg-type]


def after(clock: Clock, watchdog: Watchdog, seconds: float) -> str:
    clock.now += seconds
    return watchdog.look(clock.now)


def worked(name: str, doing: str, **options: float) -> Stage:
    """A stage at its second piece of this kind."""
    one = stage(name, **options)
    one.works(doing)
    one.works(doing)
    return one


@pytest.mark.case("CLI-02")
def test_a_piece_of_work_is_told_once_and_ends_the_run_at_its_limit(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    learner = worked("learner", "trains")
    watchdog = dog(learner)
    assert [after(clock, watchdog, s) for s in (19, 1, 10, 60)] == ["", "", "", ""]
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("learner stands still.\n  learner: trains, for 20 s\n  worker 0: stepping\n  thread ")
    assert "test_watchdog.py" in told[0]
    assert after(clock, watchdog, 10) == "learner: trains, for 100 s (limit 100 s"
    learner.works("trains")  # another piece has its own time
    assert after(clock, watchdog, 99) == ""


def test_the_first_piece_of_a_kind_may_take_longer(clock: Clock) -> None:
    """CUDA graphs and kernels are made then."""
    learner = stage("learner")
    learner.works("trains")
    watchdog = dog(learner)
    assert after(clock, watchdog, 399) == ""
    assert "limit 400 s" in after(clock, watchdog, 1)
    learner.works("trains")
    assert "limit 100 s" in after(clock, watchdog, 100)


def test_environments_have_their_own_limits_first(clock: Clock) -> None:
    """A reset of minutes under a larger step time-out is the workers' matter; it is told, and not ended before that."""
    sampler, learner = stage("sampler"), stage("learner")
    sampler.waits("waits for rows", ENVIRONMENTS)
    learner.waits("waits for a batch", "sampler")
    watchdog = dog(sampler, learner, environments_s=720.0)
    assert [after(clock, watchdog, 100) for _ in range(8)] == [""] * 8
    assert after(clock, watchdog, 20).startswith("sampler: waits for rows, from environments, for 820 s (limit 820 s")


def test_who_waits_is_not_judged_but_whom_it_waits_for(clock: Clock) -> None:
    sampler, learner = stage("sampler"), stage("learner")
    sampler.waits("waits for slots", "learner")
    watchdog = dog(sampler, learner)
    for _ in range(10):  # steps of 90 s each
        learner.works("trains")
        sampler.waits("waits for slots", "learner")
        assert after(clock, watchdog, 90) == ""
    assert sampler.describe(clock.now) == "sampler: waits for slots, from learner, for 900 s"
    assert after(clock, watchdog, 10).startswith("learner: trains")


def test_those_that_wait_for_each_other_never_come(clock: Clock) -> None:
    """Judged by when the ring closed, not by when the first of them began to wait."""
    sampler, learner = stage("sampler"), stage("learner cuda:0")
    other = stage("learner cuda:1")
    learner.waits("waits for a batch", "sampler")
    watchdog = dog(sampler, learner, other)
    clock.now += 1000
    sampler.waits("waits for slots", "learner")
    other.works("trains")
    assert after(clock, watchdog, 50) == ""  # one of the learners is at work
    other.waits("waits for a batch", "sampler")
    assert after(clock, watchdog, 99) == ""
    assert "sampler: waits for slots, from learner" in after(clock, watchdog, 1)


def test_what_rests_has_ended_or_is_not_limited_ends_nothing(clock: Clock) -> None:
    rests, main = worked("evaluation", "plays"), worked("main", "reports", limited=False)
    rests.rests()
    ended = Stage("sampler", "no thread of that name")
    ended.works("acts")
    assert after(clock, dog(rests, main, ended), 1e6) == ""
    assert after(clock, dog(worked("learner", "trains"), timeout_s=0.0), 1e6) == ""


def test_time_in_which_the_process_was_stopped_does_not_count(clock: Clock) -> None:
    learner = worked("learner", "trains")
    watchdog = dog(learner)
    clock.now += 3600
    watchdog._excuse(3600.0)
    assert after(clock, watchdog, 99) == ""
    assert after(clock, watchdog, 1) != ""


# ------------------------------------------------------------------------------------------ whole runs

STUCK = """
import ctypes, sys
from pronghorn.envs.workers import WorkerPool
from pronghorn.training import watchdog
from pronghorn.training.learner import Learner
watchdog.GRACE_S = {grace}
native = ctypes.{library}(None)  # PyDLL keeps Python's lock, CDLL does not
def stuck_after(cls, name, count):
    real, calls = getattr(cls, name), [0]
    def call(*args, **options):
        calls[0] += 1
        if calls[0] == count:
            native.sleep(10_000)
        return real(*args, **options)
    setattr(cls, name, call)
stuck_after({where}, {count})
from pronghorn.cli import main
main(["train", {env!r}, "--run-dir", "run", "--env.workers", "2", "--env.envs-per-worker", "4", "--threads", "1",
      "--learner.unroll-length", "16", "--learner.batch-unrolls", "8", "--learner.minibatches", "1",
      "--log.no-tensorboard", "--stall-timeout-s", "8", *{flags}])
"""


def stuck(
    directory: Path, where: str, count: int, *, grace: float, flags: tuple[str, ...] = (), library: str = "CDLL",
    code: int = StallError.exit_code,
) -> str:  # fmt: skip
    """What a run says that ended because something in it was stuck; it left no process. code: that of its end."""
    script = STUCK.format(where=where, count=count, grace=grace, env=env("Match"), flags=flags, library=library)
    argv = [sys.executable, "-c", script]
    process = subprocess.Popen(argv, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seen: dict[int, psutil.Process] = {}
    for _ in range(100):
        if process.poll() is not None:
            break
        with contextlib.suppress(psutil.Error):
            seen |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        time.sleep(1.0)
    try:
        _, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == code, errors
    assert len(seen) >= 3
    assert_gone(list(seen.values()))
    assert not [name for name in os.listdir(directory) if name != "run"]
    return errors


@pytest.mark.case("CLI-02")
def test_a_sampler_stuck_in_native_code_ends_the_run_after_a_save(tmp_path: Path) -> None:
    errors = stuck(tmp_path, "WorkerPool, 'send'", 200, grace=60.0)
    assert "pronghorn: The run stands still: sampler: acts, for 8 s" in errors
    assert "Traceback" not in errors
    log = (tmp_path / "run" / "log.txt").read_text()
    for line in ("  learner: waits for a batch, from sampler, for ", "  worker 1 (process ", "  thread sampler:",
                 "    call, <string>:"):  # fmt: skip
        assert line in log
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) == 1


@pytest.mark.case("CLI-02")
def test_a_learner_stuck_with_its_policy_in_hand_ends_the_process_and_its_children(tmp_path: Path) -> None:
    """Nobody else may save what it holds; the checkpoint before stays."""
    errors = stuck(tmp_path, "Learner, '_update'", 20, grace=3.0, flags=("--checkpoint.every-updates", "5"))
    assert "pronghorn: The run stands still: learner: trains, for 8 s" in errors
    assert "thread learner:" in errors
    assert "The main thread did not end within 3 s: the process ends." in errors
    assert 5 <= load_latest(tmp_path / "run" / "checkpoints").state["updates"] < 20


@pytest.mark.case("CLI-02")
def test_native_code_that_keeps_pythons_lock_is_ended_from_outside_with_its_stacks(tmp_path: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    errors = stuck(tmp_path, "WorkerPool, 'send'", 200, grace=2.0, library="PyDLL", code=-signal.SIGABRT)
    assert "pronghorn: The run stands still: no Python code ran for 10 s" in errors
    stacks = (tmp_path / "run" / "stacks.txt").read_text()
    assert "Fatal Python error: Aborted" in stacks
    assert "in call" in stacks  # the line that called it
