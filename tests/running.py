"""How tests run the command as a process: start it, wait for its numbers, see that it leaves no child."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from pronghorn.training.metrics import read_metrics

TESTS = Path(__file__).parent


def env(name: str, file: str = "learnable_envs.py") -> str:
    return f"{TESTS / file}:{name}"


def start(run_dir: Path, *flags: str, env_id: str = env("Match")) -> subprocess.Popen[str]:
    fixed = ["--log.every-s", "0.5", "--env.workers", "2", "--env.envs-per-worker", "8", "--log.no-tensorboard"]
    argv = [sys.executable, "-m", "pronghorn", "train", env_id, "--run-dir", str(run_dir), *fixed, *flags]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent)


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen[str]) -> None:
    wait_for_metric(run_dir, "steps", steps, process)


def wait_for_metric(
    run_dir: Path, name: str, value: float, process: subprocess.Popen[str], timeout_s: float = 60.0
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        lines = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
        if lines and lines[-1][name] >= value:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no progress")


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while (alive := [p for p in processes if not has_ended(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive == []


def has_ended(process: psutil.Process | int) -> bool:
    """Whether a process, or the one of that number, runs no more. Where who started it is dead too, it may stay
    listed: process 1 need not collect it.
    """
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
