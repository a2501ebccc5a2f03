from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pronghorn.envworker import keeper

TOYS = Path(__file__).parents[1] / "toy_envs.py"

EXIT = {"x86_64": 60, "aarch64": 93}  # number of the system call that ends one thread

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked up in /proc")

# Maps files and sleeps, as an engine does; its child does the same in the same process group. Each line that it reads
# is one file more.
ENGINE = """
import mmap, os, sys, time
def make(path):
    with open(path, "w+b") as file:
        file.truncate(4096)
        globals()[path] = mmap.mmap(file.fileno(), 4096)
for path in sys.argv[1:]:
    make(path)
if os.fork() == 0:
    time.sleep(600)
print("ready", flush=True)
for line in sys.stdin:
    make(line.strip())
    print("made", flush=True)
"""


def start_engine(*files):
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", ENGINE, *map(str, files)],
        stdin=subprocess.PIPE,
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


def done(process):
    """Reap a killed engine."""
    assert process.wait() == -signal.SIGKILL
    process.stdin.close()
    process.stdout.close()


@pytest.fixture
def engine_files(monkeypatch):
    """Paths of engine files, where real ones lie too, under a prefix of this test."""
    prefix = f"/dev/shm/PronghornTest{os.getpid()}"
    monkeypatch.setattr(keeper, "ENGINE_FILE_PREFIX", prefix)
    paths = [Path(prefix + name) for name in ("MQ1", "MQ2", "SM1")]
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def test_a_group_is_killed_and_its_engine_files_go(engine_files, tmp_path):
    other = tmp_path / "other"
    process = start_engine(*engine_files, other)
    assert len(members(process.pid)) == 2
    assert keeper.kill_group(process.pid) == list(map(str, engine_files))
    assert not members(process.pid)
    done(process)
    assert not any(path.exists() for path in engine_files)
    assert other.exists()


def test_a_group_whose_leader_is_dead_is_killed_too(engine_files):
    process = start_engine(*engine_files)
    process.kill()
    assert keeper.kill_group(process.pid) == list(map(str, engine_files))
    done(process)
    assert not members(process.pid)
    assert keeper.kill_group(process.pid) == []  # nothing there: no error


@pytest.mark.case("SHM-04")
def test_files_of_a_group_in_which_nobody_lives_any_more_go(engine_files):
    """An engine that was killed, and then its worker: no process tells what they had mapped."""
    process = start_engine(*engine_files)
    os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not members(process.pid))
    assert keeper.kill_group(process.pid) == list(map(str, engine_files))
    done(process)


@pytest.mark.case("SHM-04")
def test_a_file_that_is_made_between_the_look_and_the_blow_goes(engine_files, monkeypatch):
    process = start_engine(*engine_files[:2])
    kill = keeper._kill

    def late(*blow):
        monkeypatch.setattr(keeper, "_kill", kill)
        process.stdin.write(f"{engine_files[2]}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "made\n"
        kill(*blow)

    monkeypatch.setattr(keeper, "_kill", late)
    assert keeper.kill_group(process.pid) == list(map(str, engine_files))
    done(process)


@pytest.mark.case("SHM-04")
def test_a_process_that_is_started_between_the_look_and_the_blow_is_killed(engine_files, monkeypatch):
    """In the session, but in a group of its own, which only the next look at all processes finds."""
    process = start_engine(*engine_files)
    before, listed = members(process.pid), []
    real = keeper._living

    def once_without(pgid):
        listed.append(real(pgid))
        return before[:1] if len(listed) == 1 else listed[-1]

    monkeypatch.setattr(keeper, "_living", once_without)
    monkeypatch.setattr(keeper.os, "killpg", lambda pgid, number: None)
    assert keeper.kill_group(process.pid) == list(map(str, engine_files))
    assert not members(process.pid)
    assert len(listed) == 3  # one that it was not shown, that one, none
    done(process)


def test_a_process_that_does_not_end_is_waited_for_only_so_long(engine_files, monkeypatch, caplog):
    process = start_engine()
    monkeypatch.setattr(keeper, "MAX_DYING_S", 0.05)
    monkeypatch.setattr(keeper, "_has_ended", lambda pid: False)
    assert keeper.kill_group(process.pid) == []
    assert str(process.pid) in caplog.text
    assert "do not end" in caplog.text
    done(process)


@pytest.mark.skipif(platform.machine() not in EXIT, reason="another number of the system call")
def test_a_process_has_not_ended_while_one_of_its_threads_runs():
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start();"
        f"ctypes.CDLL(None).syscall({EXIT[platform.machine()]}, 0)"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    wait_until(lambda: zombie(process.pid))
    assert not keeper._has_ended(process.pid)
    process.kill()
    wait_until(lambda: keeper._has_ended(process.pid))
    process.wait()
    assert keeper._has_ended(process.pid)


@pytest.mark.case("SHM-04")
def test_stale_files_are_those_that_nobody_has_open(engine_files):
    mapped, opened, stale = engine_files
    process = start_engine(mapped)
    stale.touch()
    with open(opened, "w+b"):  # its first moment: not mapped yet
        assert keeper.remove_stale_engine_files() == [str(stale)]
    assert mapped.exists()
    with open(opened, "rb"):  # another one looks for stale files too
        assert keeper.remove_stale_engine_files() == [str(opened)]
    assert keeper.kill_group(process.pid) == [str(mapped)]
    done(process)


def test_another_users_files_stay(engine_files, monkeypatch):
    engine_files[0].touch()
    monkeypatch.setattr(keeper.os, "getuid", lambda: os.geteuid() + 1)
    assert keeper.remove_stale_engine_files() == []
    assert engine_files[0].exists()


def test_who_opens_a_file_while_it_is_looked_at_does_no_harm(engine_files, monkeypatch):
    """The kernel makes him wait and sends a signal. It must not be SIGIO, which would end this process."""
    engine_files[0].touch()
    told, opener, close = [], [], os.close

    def meanwhile(fd):
        monkeypatch.setattr(keeper.os, "close", close)
        opener.append(threading.Thread(target=lambda: open(engine_files[0], "r+b").close()))
        opener[0].start()
        wait_until(lambda: told)
        close(fd)

    monkeypatch.setattr(keeper.os, "close", meanwhile)
    before = {n: signal.signal(n, lambda number, frame: told.append(number)) for n in (signal.SIGURG, signal.SIGIO)}
    try:
        keeper.remove_stale_engine_files()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert told == [signal.SIGURG]
    opener[0].join(10)
    assert not opener[0].is_alive()


def test_where_the_kernel_does_not_tell_what_is_open_files_stay_and_it_is_said(engine_files, monkeypatch, caplog):
    import fcntl

    def none(*arguments):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", none)
    engine_files[0].touch()
    assert keeper.remove_stale_engine_files() == []
    assert engine_files[0].exists()
    assert "does not say which files are in use" in caplog.text


@pytest.mark.parametrize("ends_well", [True, False])
def test_the_keeper_acts_only_when_the_trainer_vanished(tmp_path, ends_well):
    directory = tmp_path / "run"
    directory.mkdir()
    mine, ended = start_engine(), start_engine()
    process = subprocess.Popen([sys.executable, "-I", "-S", keeper.__file__], stdin=subprocess.PIPE, text=True)
    process.stdin.write(f"dir {directory}\nadd {mine.pid}\nadd {ended.pid}\nremove {ended.pid}\n")
    if ends_well:
        process.stdin.write("bye\n")
    process.stdin.close()
    assert process.wait(10) == 0
    assert bool(members(mine.pid)) == ends_well
    assert directory.exists() == ends_well
    assert len(members(ended.pid)) == 2
    for engine in (mine, ended):
        keeper.kill_group(engine.pid)
        done(engine)


@pytest.mark.parametrize("ends_well", [True, False])
def test_single_processes_are_ended_unless_their_number_is_anothers_by_now(ends_well: bool) -> None:
    """Two that share a group with others: of one the keeper is told another start, as if the number had been reused."""
    mine, other = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    process = subprocess.Popen([sys.executable, "-I", "-S", keeper.__file__], stdin=subprocess.PIPE, text=True)
    started = keeper._start_ticks(other.pid)
    assert process.stdin is not None
    assert started is not None
    process.stdin.write(f"process {mine.pid} {keeper._start_ticks(mine.pid)}\nprocess {other.pid} {started - 1}\n")
    process.stdin.write("bye\n" if ends_well else "")
    process.stdin.close()
    assert process.wait(60) == 0
    if not ends_well:
        assert mine.wait(60) == -signal.SIGKILL
    for one in (mine, other):
        assert (one.poll() is None) == (ends_well or one is other)
        one.kill()
        one.wait()


TRAINER = """
import signal, sys, time
import numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests were started in the background
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


@pytest.mark.case("SHM-04")
@pytest.mark.parametrize("order", [["trainer"], ["worker", "trainer"], ["engine", "worker", "trainer"]])
def test_engines_and_their_shared_memory_do_not_outlive_a_killed_trainer(tmp_path, order):
    pytest.importorskip("vizdoom")
    script = tmp_path / "train.py"
    script.write_text(DOOM_TRAINER)
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = int(trainer.stdout.readline())
    group = members(worker)
    files = {path for pid in group for path in keeper._engine_files(pid)}
    assert len(group) >= 2  # the worker and its engine
    assert len(files) == 3
    pids = {"trainer": trainer.pid, "worker": worker, "engine": next(pid for pid in group if pid != worker)}
    for name in order:
        os.kill(pids[name], signal.SIGKILL)
        wait_until(lambda pid=pids[name]: zombie(pid))
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
