"""Speed of Doom matches through our workers beside raw engines, driven the plain way: one match, and eight at once.

    python benchmarks/duels.py [--seconds 5] [--rounds 3] [--minutes 4] [--matches 1 8] [--players 2] [--out FILE.json]

A raw match is one process: an engine for each player on the same map, one thread an engine, `make_action` of two tics
with random buttons, the picture and the variables read, nothing resized, no rewards. Ours is the pool that training
uses, with random actions: measurements, rewards, resized observations in shared memory, and the round trip to the
worker. A round is each number of matches, raw and ours in turn, so that all meet the same machine; there are as many
as asked for, or fewer where one more would not be over in `--minutes`. A step is one decision of one player: two tics.

It prints a line for each number of matches: the median steps per second (all of them) of raw engines and of ours, and
the ratio of the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pronghorn.envworker.keeper import kill_group

TICS = 2
WARM_UP_S = 1.0
START_S = 120.0  # that so many raw engines may take to be ready


def raw_match(num_players: int, seconds: float) -> NoReturn:
    """Write the steps per second of one match on raw engines, from when the file `go` appears here on; then exit."""
    import vizdoom

    from pronghorn.envworker.deathmatch import Players
    from pronghorn.envworker.match import Match, _remove_memory

    # The engines are made and joined as ours, so that map, screen, buttons and rules are the same; then driven raw.
    players = Players("duel") if num_players == 2 else Players("multi_deathmatch", agents=num_players)
    match = Match("raw", players._make_game, num_players, clear_first_lives=players._arena.clear_first_lives)
    match.start(vizdoom.GameVariable.PLAYER_NUMBER, seed=1)
    match.restart()
    counts = [0] * num_players

    def play(player: int) -> None:
        game, rng = match.games[player], np.random.default_rng(player)
        actions = [rng.integers(2, size=game.get_available_buttons_size()).tolist() for _ in range(512)]
        with contextlib.suppress(Exception):  # the engines are killed in the end
            while True:
                game.make_action(actions[counts[player] % 512], TICS)
                state = game.get_state()
                state.screen_buffer, state.game_variables  # noqa: B018
                counts[player] += 1

    for player in range(num_players):
        threading.Thread(target=play, args=(player,), daemon=True).start()
    Path("ready").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    time.sleep(WARM_UP_S)
    before, steps = time.perf_counter(), sum(counts)
    time.sleep(seconds)
    speed = (sum(counts) - steps) / (time.perf_counter() - before)
    Path("speed").write_text(str(speed))
    # Not closed: engines that are called at once may wait for each other's next call, with a thread inside each.
    match._kill_engines()
    for number in match._ids:
        _remove_memory(number)
    os._exit(0)


def raw(num_matches: int, num_players: int, seconds: float) -> float:
    """Steps per second of so many raw matches at once, each in a process of its own; they begin when all are ready."""
    command = [sys.executable, os.path.abspath(__file__), "--raw", "--seconds", str(seconds),
               "--players", str(num_players)]  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        folders = [Path(directory, str(i)) for i in range(num_matches)]
        for folder in folders:
            folder.mkdir()  # each engine writes its configuration where it runs
        processes = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder, start_new_session=True)
            for folder in folders
        ]
        try:
            _wait_until_ready(folders, processes)
            for folder in folders:
                (folder / "go").touch()
            for process in processes:
                if process.wait(timeout=seconds + WARM_UP_S + START_S):
                    raise RuntimeError(f"a raw match ended with exit code {process.returncode}")
        finally:
            for process in processes:
                if process.poll() is None:
                    kill_group(process.pid)  # with its engines
                    process.wait()
        return sum(float((folder / "speed").read_text()) for folder in folders)


def _wait_until_ready(folders: list[Path], processes: list[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + START_S
    while not all((folder / "ready").exists() for folder in folders):
        time.sleep(0.05)
        if any(process.poll() is not None for process in processes):
            raise RuntimeError("a raw match ended before it began; what it wrote is above")
        if time.monotonic() > until:
            raise RuntimeError(f"raw matches were not ready after {START_S:g} s")


def ours(num_matches: int, num_players: int, seconds: float) -> float:
    """Steps per second of so many matches in our workers, answered with random actions."""
    from pronghorn.envs.registry import resolve
    from pronghorn.envs.workers import WorkerPool

    env = resolve("doom:duel") if num_players == 2 else resolve("doom:multi_deathmatch", {"agents": num_players})
    pool = WorkerPool([env], num_workers=num_matches, envs_per_worker=1, num_groups=1, seed=1, restart_budget=0)
    try:
        _play(pool, WARM_UP_S)
        before = time.perf_counter()
        steps = _play(pool, seconds)
        return steps / (time.perf_counter() - before)
    finally:
        pool.close()


def _play(pool: Any, seconds: float) -> int:
    sizes, rng, steps = np.array(pool.spec.action.discrete), np.random.default_rng(0), 0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        ready = pool.recv(60.0)
        rows = len(ready.rows)
        pool.send(ready.rows, rng.integers(sizes, size=(rows, len(sizes))), np.zeros((rows, 0), np.float32))
        steps += rows
    return steps


def measure(
    counts: Sequence[int], num_players: int, seconds: float, rounds: int, minutes: float = math.inf
) -> list[dict[str, Any]]:
    """For each number of matches the medians over the rounds, and all of their numbers.

    The first round is always made, another one only if it will be over within `minutes`, by the longest so far.
    """
    speeds: dict[int, dict[str, list[float]]] = {count: {"raw": [], "ours": []} for count in counts}
    began, longest_s = time.monotonic(), 0.0
    for number in range(rounds):
        start = time.monotonic()
        if number and start - began + longest_s > 60.0 * minutes:
            print(f"{number} of {rounds} rounds: one more would not be over in {minutes:g} minutes", flush=True)
            break
        for count, both in speeds.items():
            both["raw"].append(raw(count, num_players, seconds))
            both["ours"].append(ours(count, num_players, seconds))
        longest_s = max(longest_s, time.monotonic() - start)
    return [_summary(count, num_players, both) for count, both in speeds.items()]


def _summary(num_matches: int, num_players: int, both: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(speeds) for name, speeds in both.items()}
    return {"matches": num_matches, "players": num_players, "steps_per_s": medians, "rounds": both,
            "ratio": medians["ours"] / medians["raw"]}  # fmt: skip


def line(one: dict[str, Any]) -> str:
    """'8 matches of 2: raw 130 steps/s (127, 134), ours 1,006 steps/s (962, 1,050), ratio 7.74'."""
    shown = ", ".join(
        f"{name} {speed:,.0f} steps/s ({', '.join(f'{x:,.0f}' for x in one['rounds'][name])})"
        for name, speed in one["steps_per_s"].items()
    )
    return f"{one['matches']} match{'es' * (one['matches'] > 1)} of {one['players']}: {shown}, ratio {one['ratio']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=4.0, help="of all rounds together")
    parser.add_argument("--matches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--players", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the numbers there as JSON")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.raw:
        raw_match(given.players, given.seconds)
    results = measure(given.matches, given.players, given.seconds, given.rounds, given.minutes)
    for one in results:
        print(line(one), flush=True)
    if given.out:
        given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
