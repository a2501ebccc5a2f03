from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pronghorn.envworker import keeper

TOYS = Path(__file__).parents[1] / "toy_envs.py"

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked up in /proc")

# Maps a file and sleeps, as an engine does; its child does the same in the same process group.
ENGINE = """
import mmap, os, sys, time
for path in sys.argv[1:]:
    with open(path, "w+b") as file:
        file.truncate(4096)
        globals()[path] = mmap.mmap(file.fileno(), 4096)
if os.fork() == 0:
    time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""


def start_engine(*files):
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", ENGINE, *map(str, files)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def members(pgid):
    return [pid for pid, group, session in keeper._processes() if pgid in (group, session) and not zombie(pid)]


def zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def engine_files(tmp_path, monkeypatch):
    """The prefix of engine files, moved to where the test may make some."""
    prefix = str(tmp_path / "ViZDoom")
    monkeypatch.setattr(keeper, "ENGINE_FILE_PREFIX", prefix)
    return [Path(prefix + name) for name in ("SM1", "MQ1", "MQ2")]


def test_a_group_is_killed_and_its_engine_files_go(engine_files, tmp_path):
    other = tmp_path / "other"
    process = start_engine(*engine_files, other)
    assert len(members(process.pid)) == 2
    assert keeper.kill_group(process.pid) == sorted(map(str, engine_files))
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not members(process.pid))
    assert not any(path.exists() for path in engine_files)
    assert other.exists()
    process.stdout.close()


def test_a_group_whose_leader_is_dead_is_killed_too(engine_files):
    process = start_engine(*engine_files)
    process.kill()
    assert keeper.kill_group(process.pid) == sorted(map(str, engine_files))
    process.wait()
    wait_until(lambda: not members(process.pid))
    assert keeper.kill_group(process.pid) == []  # nothing there: no error
    process.stdout.close()


@pytest.mark.case("SHM-04")
def test_stale_files_are_those_that_nobody_maps(engine_files, monkeypatch):
    monkeypatch.setattr(keeper, "MIN_STALE_AGE_S", -1.0)
    in_use, stale = engine_files[0], engine_files[1]
    process = start_engine(in_use)
    stale.touch()
    assert keeper.remove_stale_engine_files() == [str(stale)]
    assert in_use.exists()
    keeper.kill_group(process.pid)
    process.wait()
    process.stdout.close()


def test_a_young_file_is_left_alone(engine_files):
    engine_files[0].touch()
    assert keeper.remove_stale_engine_files() == []


@pytest.mark.parametrize("ends_well", [True, False])
def test_the_keeper_acts_only_when_the_trainer_vanished(tmp_path, ends_well):
    directory = tmp_path / "run"
    directory.mkdir()
    mine, done = start_engine(), start_engine()
    process = subprocess.Popen([sys.executable, "-I", "-S", keeper.__file__], stdin=subprocess.PIPE, text=True)
    process.stdin.write(f"dir {directory}\nadd {mine.pid}\nadd {done.pid}\nremove {done.pid}\n")
    if ends_well:
        process.stdin.write("bye\n")
    process.stdin.close()
    assert process.wait(10) == 0
    assert bool(members(mine.pid)) == ends_well
    assert directory.exists() == ends_well
    assert len(members(done.pid)) == 2
    for engine in (mine, done):
        keeper.kill_group(engine.pid)
        engine.wait()
        engine.stdout.close()


TRAINER = """
import sys, time
import numpy as np
from pronghorn.envs.workers import ResolvedEnv, WorkerPool
if __name__ == "__main__":
    env = ResolvedEnv("toy", "worker", "call", sys.argv[1] + ":WithChild", {"pid_file": sys.argv[2]})
    pool = WorkerPool([env], num_workers=2, envs_per_worker=1, seed=1)
    pool.recv(10.0)
    print(pool._directory, pool._keeper.process.pid, flush=True)
    time.sleep(600)
"""


DOOM_TRAINER = """
import time
from pronghorn.envs.workers import ResolvedEnv, WorkerPool
if __name__ == "__main__":
    pool = WorkerPool([ResolvedEnv("doom", "worker", "doom", "basic")], num_workers=1, envs_per_worker=1, seed=1)
    print(pool._processes[0].popen.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("worker_first", [False, True])
def test_engines_and_their_shared_memory_do_not_outlive_a_killed_trainer(tmp_path, worker_first):
    pytest.importorskip("vizdoom")
    script = tmp_path / "train.py"
    script.write_text(DOOM_TRAINER)
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = int(trainer.stdout.readline())
    group = members(worker)
    files = {path for pid in group for path in keeper._engine_files(pid)}
    assert len(group) >= 2  # the worker and its engine
    assert len(files) == 3
    for pid in [worker, trainer.pid] if worker_first else [trainer.pid]:
        os.kill(pid, signal.SIGKILL)
    trainer.wait(60)
    wait_until(lambda: not members(worker) and not any(os.path.exists(path) for path in files))
    trainer.stdout.close()


@pytest.mark.case("FLT-10")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_killed_trainer(tmp_path, how):
    script, pid_file = tmp_path / "train.py", tmp_path / "pids"
    script.write_text(TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(TOYS), str(pid_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    directory, keeper_pid = trainer.stdout.readline().split()
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert len(pids) == 4
    assert not any(zombie(pid) for pid in pids)
    trainer.send_signal(how)
    trainer.wait(60)
    wait_until(lambda: all(zombie(pid) for pid in [*pids, int(keeper_pid)]))
    assert not os.path.exists(directory)
    trainer.stdout.close()
