"""How tests play with a pool of toy environments: name one, receive, answer, kill. Fixtures are in envs/conftest.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from pronghorn.envs.workers import ResolvedEnv

TOYS = str(Path(__file__).parent / "toy_envs.py")


def toy(name="Counter", options=None, **kwargs):
    return ResolvedEnv(f"toy:{name}", "worker", "call", f"{TOYS}:{name}", kwargs, options or {})


def receive(pool):
    ready = pool.recv(10.0)
    assert ready is not None, "nothing came within 10 s"
    return ready


def answer(pool, ready, action=0):
    n, spec = len(ready.rows), pool.spec.action
    pool.send(
        ready.rows, np.full((n, spec.num_discrete), action, np.int64), np.zeros((n, spec.num_continuous), np.float32)
    )


def play(pool, num_recvs):
    """(row, event, first value of obs, reward) of what comes, answering everything."""
    seen = []
    for _ in range(num_recvs):
        ready = receive(pool)
        obs = next(iter(ready.obs.values()))
        seen += zip(ready.rows.tolist(), ready.event.tolist(), obs[:, 0].tolist(), ready.reward.tolist(), strict=True)
        answer(pool, ready)
    return seen


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter while it is being removed
        return False


def wait_until(condition, timeout_s=10.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)


def answer_rows(pool, rows):
    pool.send(np.array(rows), np.zeros((len(rows), 1), np.int64), np.zeros((len(rows), 0), np.float32))


def kill_worker(pool, index, how=signal.SIGKILL):
    os.kill(pool._processes[index].popen.pid, how)
