"""What the machine offers, read from control groups that tests write."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from pronghorn import machine

GIB = 1 << 30
Write = Callable[[str, object], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file of a control group; the process is in 'job/step' of version 2, and in 'old' of version 1."""
    (tmp_path / "own").write_text("4:memory:/old\n3:cpu,pids:/gone\n0::/job/step\n")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "groups")

    def write(name: str, value: object) -> None:
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")

    return write


def test_without_control_groups_memory_is_the_machines(write: Write) -> None:
    assert machine.available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    write("job/memory.max", "max")
    write("job/memory.current", 5)
    assert machine.available_memory() > 1 << 20


def test_the_narrowest_group_around_the_process_counts_and_cached_files_are_free(write: Write) -> None:
    write("job/memory.max", 100 << 20)
    write("job/memory.current", 80 << 20)
    assert machine.available_memory() == 20 << 20
    write("job/memory.stat", f"anon 1\nactive_file {3 << 20}\ninactive_file {4 << 20}")
    assert machine.available_memory() == 27 << 20
    write("job/step/memory.max", 9 << 20)
    write("job/step/memory.current", 10 << 20)  # over it: nothing is left
    assert machine.available_memory() == 0


def test_version_1_has_other_names(write: Write) -> None:
    write("memory/old/memory.limit_in_bytes", 64 << 20)
    write("memory/old/memory.usage_in_bytes", 60 << 20)
    write("memory/old/memory.stat", f"inactive_file 1\ntotal_inactive_file {2 << 20}\ntotal_active_file 0")
    assert machine.available_memory() == 6 << 20


def test_processes_left_by_a_group_of_a_container_whose_own_path_is_not_seen(write: Write) -> None:
    write("pids/pids.max", 100)
    write("pids/pids.current", 70)
    free = machine.free_processes()
    assert free is not None
    assert free <= 30
    assert os.getuid() != 0 or free == 30


def test_files_that_may_be_opened_become_fewer_by_each_that_is(tmp_path: Path) -> None:
    before = machine.free_files()
    assert before is not None
    with open(tmp_path / "one", "w"), open(tmp_path / "two", "w"):
        assert machine.free_files() == before - 2


def test_cores_follow_the_affinity_mask() -> None:
    assert 1 <= machine.available_cores() <= len(os.sched_getaffinity(0))


def _cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))


def test_cores_follow_the_narrowest_quota_of_the_groups_around_the_process(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cores(monkeypatch, 16)
    assert machine.available_cores() == 16
    write("cpu.max", "900000 100000")
    assert machine.available_cores() == 9
    write("job/step/cpu.max", "max 100000")
    assert machine.available_cores() == 9
    write("job/cpu.max", "350000 100000")
    assert machine.available_cores() == 3
    write("job/step/cpu.max", "50000 100000")
    assert machine.available_cores() == 1


def test_cores_follow_a_quota_of_version_1(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    _cores(monkeypatch, 16)
    write("cpu/gone/cpu.cfs_quota_us", -1)
    write("cpu/gone/cpu.cfs_period_us", 100000)
    assert machine.available_cores() == 16
    write("cpu/cpu.cfs_quota_us", 400000)
    write("cpu/cpu.cfs_period_us", 100000)
    assert machine.available_cores() == 4


def test_threads_of_native_environments_follow_the_quota_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.envs import lanes

    class Lanes(lanes.LanePool):
        _first = _act = _stepped = None  # type: ignore[assignment]

    Lanes.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    _cores(monkeypatch, 16)
    write("job/cpu.max", "200000 100000")
    assert Lanes(["one"], 8, 1, 0, 0)._num_threads == 2


@pytest.mark.parametrize(("platform", "used"), [("linux", 8), ("darwin", 2)])
def test_threads_count_as_processes_on_linux_only(platform: str, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes of the user, with 5 and 3 threads, and one of another."""
    import resource

    def processes(names: list[str]) -> list[SimpleNamespace]:
        every = [(1000, 5), (1000, 3), (7, 9)]
        infos = [{"uids": SimpleNamespace(real=uid), "num_threads": threads} for uid, threads in every]
        return [SimpleNamespace(info={name: info[name] for name in names}) for info in infos]

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 100))
    monkeypatch.setattr(psutil, "process_iter", processes)
    assert machine._free_processes_of_user() == 100 - used


def test_a_threads_number_of_torch_threads_is_its_own() -> None:
    """A thread that has not computed yet would take over what another sets meanwhile."""
    before, seen = torch.get_num_threads(), []
    chosen, go = threading.Event(), threading.Event()

    def compute() -> None:
        machine.limit_threads(1)
        chosen.set()
        go.wait(10.0)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    chosen.wait(10.0)
    machine.limit_threads(2)
    go.set()
    thread.join()
    assert (seen, torch.get_num_threads()) == ([1], 2)
    machine.limit_threads(before)


def test_bfloat16_is_known_from_the_instruction_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CPUS", tmp_path / "cpuinfo")
    assert not machine.computes_bfloat16("cpu")  # no such file: not Linux
    for flags, known in (("fpu avx2 avx512f", False), ("fpu avx512f avx512_bf16", True), ("amx_bf16 amx_tile", True)):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: avx512_bf16\n")
        assert machine.computes_bfloat16("cpu") == known
