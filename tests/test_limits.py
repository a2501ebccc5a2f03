"""Sizes beyond the machine are refused with the numbers; what just fits is not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pronghorn import limits, machine
from pronghorn.errors import ConfigError
from specs import PIXELS, resolved

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 cores, 1 GiB, 1024 files, 300 processes."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine, "available_memory", lambda: GIB)
    monkeypatch.setattr(machine, "free_files", lambda: 1024)
    monkeypatch.setattr(machine, "free_processes", lambda: 300)


def test_threads_are_at_most_the_cores() -> None:
    limits.require_threads(4)
    limits.require_threads(None)
    with pytest.raises(ConfigError, match=r"^threads = 5: must be at most 4, the cores of this machine. Leave it out"):
        limits.require_threads(5)


@pytest.mark.case("PRF-07")
def test_more_workers_than_cores_are_named_but_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores of this process count, which may be fewer than the machine's 4."""
    monkeypatch.setattr(machine, "available_cores", lambda: 3)
    assert limits.crowded(3) is None
    said = limits.crowded(4)
    assert said is not None
    for part in ("env.workers = 4", "3 core(s)", "--env.envs-per-worker", "pronghorn bench --tune"):
        assert part in said


def test_workers_are_at_most_what_memory_holds() -> None:
    limits.require_workers(80, 1280)
    with pytest.raises(
        ConfigError, match=r"^env.workers = 90: .*1,440 environments.*at least 1.1 GiB, and 1.0 GiB are"
    ):
        limits.require_workers(90, 1440)
    with pytest.raises(ConfigError, match=r"Lower it or --env.envs-per-worker"):
        limits.require_workers(1, 10**7)


def test_workers_are_at_most_what_files_and_processes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1000 * GIB)
    limits.require_workers(300, 300)
    with pytest.raises(ConfigError, match=r"^env.workers = 301: is more than the 300 processes .*pids.max"):
        limits.require_workers(301, 301)
    monkeypatch.setattr(machine, "free_processes", lambda: None)
    limits.require_workers(488, 488)
    with pytest.raises(ConfigError, match=r"^env.workers = 489: needs 1,026 open files, and 1,024 more .*ulimit -n"):
        limits.require_workers(489, 489)


def test_an_evaluation_needs_only_the_files_of_its_own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_files", lambda: 12)
    limits.require_workers(2, 16, evaluation=True)
    with pytest.raises(ConfigError, match="needs 52 open files"):
        limits.require_workers(2, 16)
    with pytest.raises(ConfigError, match="needs 14 open files"):
        limits.require_workers(3, 24, evaluation=True)


def test_the_map_shared_with_workers_fits_into_memory() -> None:
    limits.require_map(GIB, 1000)
    with pytest.raises(ConfigError, match=r"= 1000: rows of observations need 2.0 GiB .* 1.0 GiB are free"):
        limits.require_map(2 * GIB, 1000)


def test_the_store_fits_into_memory_and_the_replay_counts() -> None:
    config = resolved(PIXELS, **{"learner.unroll_length": 31, "learner.batch_unrolls": 32})
    num_bytes = (16 + 32 + 32) * 32 * 1000  # slots: a row each and a batch; the copy of a batch; rows of 1000 bytes
    limits.require_store(config, 1000, 16, num_bytes)
    with pytest.raises(ConfigError, match=r"^learner.unroll_length = 31: makes 80 unrolls that need 0.0 GiB.*16 rows"):
        limits.require_store(config, 1000, 16, num_bytes - 1)
    replay = resolved(
        PIXELS, **{"learner.unroll_length": 31, "learner.batch_unrolls": 32, "learner.replay_fraction": 0.5}
    )
    with pytest.raises(ConfigError, match=r"makes 1,064 unrolls .*--learner.replay-unrolls"):
        limits.require_store(replay, 1000, 16, num_bytes)
