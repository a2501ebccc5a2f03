"""Doom matches under the real pool of workers: an engine that dies or hangs costs its match, and no other."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from playing import answer, kill_worker, wait_until
from pronghorn.config import Config, EnvConfig, replace
from pronghorn.defaults import resolve_env
from pronghorn.envs.registry import list_envs, make_pool, resolve
from pronghorn.envs.workers import ResolvedEnv
from pronghorn.envworker import keeper
from pronghorn.errors import ConfigError, UnknownEnvError, WorkerDied
from pronghorn.types import Event
from running import has_ended

pytest.importorskip("vizdoom")

FIRST, LAST, LOST = Event.FIRST, Event.LAST, Event.LOST


def duel(**arguments):
    return resolve("doom:duel", arguments)


def engines(pool, worker, role=""):
    """Engine processes of a worker's match; role: '-host' or '-join'."""
    process = pool._processes[worker]
    if process is None:
        return []
    wanted = {"+viz_instance_id", role or "-port"}
    try:
        children = psutil.Process(process.popen.pid).children(recursive=True)
        return [child for child in children if wanted <= set(child.cmdline())]
    except psutil.Error:  # one is just ending
        return []


def instance_ids(pool):
    found = []
    for worker in range(pool._num_workers):
        for engine in engines(pool, worker):
            with contextlib.suppress(psutil.Error, ValueError):  # it is just ending
                arguments = engine.cmdline()
                found.append(arguments[arguments.index("+viz_instance_id") + 1])
    return found


@pytest.fixture
def ids_of_killed(monkeypatch):
    """Filled with the instance ids of engines that live when the group of their worker is killed."""
    ids, kill_group = set(), keeper.kill_group

    def recorded(pgid):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                arguments = process.cmdline()
                if os.getsid(process.pid) == pgid and "+viz_instance_id" in arguments:
                    ids.add(arguments[arguments.index("+viz_instance_id") + 1])
        return kill_group(pgid)

    monkeypatch.setattr(keeper, "kill_group", recorded)
    return ids


def left_behind(ids):
    return [name for name in os.listdir("/dev/shm") if name.startswith("ViZDoom") and name[-10:] in ids]


def events_of(pool, num_recvs, timeout_s=60.0):
    """By row, the events of so many recvs, all of which are answered."""
    seen = {row: [] for row in range(pool.num_rows)}
    for _ in range(num_recvs):
        ready = pool.recv(timeout_s)
        assert ready is not None, "nothing came in time"
        for row, event in zip(ready.rows.tolist(), ready.event.tolist(), strict=True):
            seen[row].append(event)
        answer(pool, ready)
    return seen


def until_begun(pool, rows, most=20_000):
    """Play on until rows that were lost begin anew; the events of all rows meanwhile."""
    seen = {row: [] for row in range(pool.num_rows)}
    for _ in range(most):
        for row, events in events_of(pool, 1).items():
            seen[row] += events
        if all(FIRST in seen[row] for row in rows):
            return seen
    raise AssertionError("the match was not started again")


# ---------------------------------------------------------------------------------------- deaths in a match


@pytest.mark.case("FLT-07")
@pytest.mark.parametrize("role", ["-host", "-join"])
def test_an_engine_killed_in_mid_match_costs_its_match_and_no_other(start, caplog, role):
    pool = start(duel(), num_workers=2, start_timeout_s=60.0, step_timeout_s=30.0)
    assert pool.task_ids.tolist() == [0] * 4
    events_of(pool, 20)
    victims = pool._units_of(0)[0].rows.tolist()
    others = pool._units_of(1)[0].rows.tolist()
    (engine,) = engines(pool, 0, role)
    engine.kill()
    seen = until_begun(pool, victims)
    for row in victims:
        assert seen[row].count(LOST) == 1
    for row in others:
        assert LOST not in seen[row]
        assert len(seen[row]) > 5  # it went on meanwhile
    assert pool.restarts == 1
    name = r"player 0 \(host\)" if role == "-host" else r"player 1 \(joiner\)"
    assert re.search(rf"doom:duel: at tic \d+ of a match the engine of {name} failed", caplog.text)
    assert len(engines(pool, 0)) == len(engines(pool, 1)) == 2


@pytest.mark.case("FLT-07")
def test_an_engine_that_hangs_is_ended_with_its_worker_after_the_time_out(start, caplog):
    """The worker is blocked inside C++, where no signal of Python's reaches it."""
    pool = start(duel(), num_workers=2, start_timeout_s=60.0, step_timeout_s=4.0)
    events_of(pool, 10)
    (engine,) = engines(pool, 0, "-join")
    engine.suspend()
    seen = until_begun(pool, [0, 1])
    assert [seen[row].count(LOST) for row in range(4)] == [1, 1, 0, 0]
    assert "did not answer within 4 s" in caplog.text
    wait_until(lambda: has_ended(engine))


def test_nothing_is_left_after_close(start):
    pool = start(duel(), num_workers=2, start_timeout_s=60.0)
    events_of(pool, 6)
    ids = instance_ids(pool)
    assert len(ids) == 4
    processes = [engine for worker in range(2) for engine in engines(pool, worker)]
    pool.close()
    assert all(map(has_ended, processes))
    assert not left_behind(ids)


@pytest.mark.case("SHM-04")
def test_an_engine_that_is_dead_before_its_worker_leaves_nothing(start):
    """The worker, which waits for actions, has not noticed it and is killed: no process maps its memory any more."""
    pool = start(duel(), start_timeout_s=60.0)
    assert pool.recv(60.0) is not None
    ids = instance_ids(pool)
    (engine,) = engines(pool, 0, "-host")
    engine.kill()
    wait_until(lambda: has_ended(engine))
    assert len(left_behind(ids)) == 6
    kill_worker(pool, 0)
    pool.close()
    assert not left_behind(ids)


def test_matches_that_are_reseeded_repeat_themselves(start):
    pool = start(duel(timeout_tics=20), num_workers=1, ordered=True, start_timeout_s=60.0, step_timeout_s=60.0)

    def play():
        sums, rng = [], np.random.default_rng(0)
        for _ in range(15):  # beyond the end of the first match
            ready = pool.recv(60.0)
            sums.append((ready.event.tolist(), int(ready.obs["obs"].astype(np.int64).sum())))
            discrete = rng.integers(3, size=(2, 7)) % np.array(pool.spec.action.discrete)
            pool.send(ready.rows, discrete, np.zeros((2, 0), np.float32))
        return sums

    pool.reseed(5)
    first = play()
    pool.reseed(5)
    assert play() == first
    assert [LAST, LAST] in [events for events, _ in first]
    pool.reseed(6)
    assert play() != first


# -------------------------------------------------------------------------------------------------- starts


def clashing_duel(marker: str):
    """A duel whose port is taken in the worker's first life, after it was found to be free."""
    from pronghorn.envworker import deathmatch, match

    env = deathmatch.make("duel")
    if not Path(marker).exists():
        Path(marker).touch()
        port = match.Port()
        holder = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        holder.bind(("", port.number))
        env.players._match._choose_port = lambda: port
        env.players._match.holder = holder
    return env


@pytest.mark.case("ENV-17")
def test_a_match_whose_port_was_taken_starts_again_with_another(start, tmp_path, caplog):
    env = ResolvedEnv("doom:duel", "worker", "call", f"{__file__}:clashing_duel", {"marker": str(tmp_path / "seen")})
    pool = start(env, start_timeout_s=60.0, step_timeout_s=30.0)
    assert pool.restarts == 1
    assert events_of(pool, 3)[0][0] == FIRST
    assert "restarting it: 1 of 10 restarts used" in caplog.text


def lonely_duel():
    """A duel whose joiner looks for its host at another port."""
    from pronghorn.envworker import deathmatch

    env = deathmatch.make("duel", start_timeout_s=2.0)
    one = env.players._match
    networked = one._make_networked
    one._make_networked = lambda player, port: networked(player, port - player)
    return env


@pytest.mark.case("SHM-04")
def test_engines_that_never_come_together_use_up_the_budget_and_leave_nothing(start, ids_of_killed):
    env = ResolvedEnv("doom:duel", "worker", "call", f"{__file__}:lonely_duel", {})
    with pytest.raises(WorkerDied, match=r"did not start together at port \d+: 2 of 2 engines did not answer"):
        start(env, start_timeout_s=60.0, restart_budget=1)
    assert len(ids_of_killed) == 4
    assert not left_behind(ids_of_killed)


# ------------------------------------------------------------------------------------------------- settings


def test_a_worker_has_one_match():
    config = Config(env=EnvConfig(id="doom:duel", envs_per_worker=2, workers=1))
    with pytest.raises(ConfigError, match=r"env.envs_per_worker = 2: a match of doom:duel is an engine for each"):
        make_pool(config, seed=0, ordered=False)
    filled = resolve_env(Config(env="doom:duel")).env
    assert (filled.envs_per_worker, filled.groups) == (1, 1)
    assert filled.workers >= 2
    assert resolve_env(replace(Config(env="doom:duel"), {"env.workers": 3})).env.workers == 3
    assert resolve_env(Config(env="doom:duel_bots")).env.envs_per_worker == 16  # one engine, as in other scenarios


def test_kinds_of_matches_are_listed_and_named():
    names = {listing.name for listing in list_envs()}
    matches = {"doom:duel", "doom:multi_deathmatch", "doom:duel_bots", "doom:multi_deathmatch_bots"}
    assert matches | {"doom:battle", "doom:ssl2", "doom:freedm", "doom:dwango5"} <= names
    with pytest.raises(UnknownEnvError, match="Did you mean: doom:duel"):
        resolve("doom:duels")
    assert resolve("doom:deathmatch").target == "deathmatch"  # still the scenario of one player


def test_a_folder_of_maps_is_named_from_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    env = EnvConfig(id="doom:ssl2", args={"scenarios_dir": "maps"})
    assert resolve("doom:ssl2", env.args).kwargs["scenarios_dir"] == str(tmp_path / "maps")


def test_options_reach_matches(start):
    pool = start(duel(), start_timeout_s=60.0, restart_budget=0)
    pool.set_option("rewards", {"frag": 3.0})
    events_of(pool, 3)
    pool.set_option("rewards", {"frags": 3.0})
    with pytest.raises(WorkerDied, match="nothing is called 'frags'"):
        events_of(pool, 3)


# ----------------------------------------------------------------------------------------------------- soak


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_four_duels_go_on_for_three_minutes_of_random_kills(start):
    """Each second or so an engine is killed or stopped, a worker is, or both; every match comes back each time."""
    pool = start(
        duel(timeout_tics=400), num_workers=4, start_timeout_s=60.0, step_timeout_s=10.0, restart_budget=10_000
    )
    rng = random.Random(0)
    until, next_kill, kills = time.monotonic() + 180.0, time.monotonic() + 2.0, 0
    steps, matches, ids = np.zeros(pool.num_rows, np.int64), 0, set()
    while time.monotonic() < until:
        ready = pool.recv(120.0)
        assert ready is not None
        steps[ready.rows[(ready.event != LOST)]] += 1
        matches += len(ready.records)
        answer(pool, ready)
        if (ready.event == FIRST).any():
            ids.update(instance_ids(pool))
        if time.monotonic() > next_kill:
            next_kill = time.monotonic() + rng.uniform(0.5, 2.5)
            kills += strike(pool, rng)
    until_begun_or_steady(pool)
    assert kills >= 30
    assert pool.restarts >= kills // 2  # two blows may hit one match before it is started again
    assert (steps > 100).all()
    assert matches > 0
    ids.update(instance_ids(pool))
    pool.close()
    assert not left_behind(ids)


def until_begun_or_steady(pool):
    """Every match steps again once nothing is harmed any more."""
    deadline, recent = time.monotonic() + 60.0, np.zeros(pool.num_rows, np.int64)
    while (recent < 20).any():
        assert time.monotonic() < deadline
        for row, events in events_of(pool, 1).items():
            recent[row] += sum(event != LOST for event in events)


def strike(pool, rng):
    """Harm one worker, if it has begun; whether a process was hit."""
    worker = rng.randrange(4)
    process = pool._processes[worker]
    targets = engines(pool, worker)
    if process is None or not process.begun or not targets:
        return 0
    how = rng.choice(["engine", "engine", "engine", "stop", "worker", "both"])
    if how != "worker":
        os.kill(rng.choice(targets).pid, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    if how in ("worker", "both"):
        os.kill(process.popen.pid, signal.SIGKILL)
    return 1
