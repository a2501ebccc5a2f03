"""A training that is left alone while its workers are killed: does it lose anything, does anything grow?

    python benchmarks/soak.py --out DIR [--env gym:CartPole-v1] [--minutes 60] [--kill-every-s 20] [--seed 0]

Trains asynchronously with the default settings. Every so often a random worker, or a game engine under one, is killed
with SIGKILL. Once a second the whole tree of processes is measured from outside: proportional memory (PSS),
descriptors, threads, processes, files of shared memory; slots, lag, speed and returns are read from metrics.jsonl. At
the end each promise is judged, and DIR gets soak.json and soak.md. The exit code is 1 if one is broken.

Growth is judged behind a warm-up (a third of the run, at most ten minutes), among the moments in which as many
processes ran as before the first kill, since each kill makes a dip: a line is fitted to the medians of twelve windows
of them, and what it gains over their time may be no more than a tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pronghorn.training.metrics import read_metrics

WARM_UP_SHARE, WARM_UP_MOST_S = 1 / 3, 600.0
WINDOWS = 12
LEAST_SAMPLES = 5
QUIET_S = 15.0  # before the end, so that the last kill's restart is counted
GROWTH = {"pss_mib": (0.05, 32.0), "descriptors": (0.02, 4.0), "threads": (0.02, 2.0), "shm_files": (0.02, 3.0)}
"""Measure: what it may gain, as a share of its median and in its unit, whichever is more."""
RETURN_DROP = 0.1  # of the range of returns seen
WORKER = "envworker/main.py"


@dataclass(frozen=True)
class Sample:
    """The tree of processes at one moment. seconds: since the start."""

    seconds: float
    pss_mib: float
    descriptors: int
    threads: int
    processes: int
    shm_files: int


@dataclass(frozen=True)
class Kill:
    """A process that was killed."""

    seconds: float
    pid: int
    what: str  # worker, engine


@dataclass(frozen=True)
class Verdict:
    """A promise, what was seen of it, and whether it was kept."""

    promise: str
    seen: str
    kept: bool


# ---------------------------------------------------------------- measuring


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def measure(pid: int, seconds: float) -> Sample:
    """The sums over the tree; a process that ends meanwhile counts as far as it was read."""
    pss, descriptors, threads, count, shared = 0, 0, 0, 0, set[str]()
    for process in tree(pid):
        with contextlib.suppress(psutil.Error, OSError):
            pss += process.memory_full_info().pss
            descriptors += process.num_fds()
            threads += process.num_threads()
            count += 1
            shared |= shared_files(process.pid)
    return Sample(round(seconds, 2), round(pss / 2**20, 1), descriptors, threads, count, len(shared))


def shared_files(pid: int) -> set[str]:
    """Files of shared memory that a process has mapped."""
    with open(f"/proc/{pid}/maps") as lines:
        return {line.split(maxsplit=5)[5].strip() for line in lines if "/dev/shm/" in line}


def victims(pid: int) -> list[tuple[psutil.Process, str]]:
    """Workers and the engines under them."""
    found: list[tuple[psutil.Process, str]] = []
    for process in tree(pid)[1:]:
        with contextlib.suppress(psutil.Error):
            if any(argument.endswith(WORKER) for argument in process.cmdline()):
                found.append((process, "worker"))
                found += [(engine, "engine") for engine in process.children(recursive=True)]
    return found


def kill_one(pid: int, seconds: float, rng: random.Random) -> Kill | None:
    """SIGKILL to a random worker, or to an engine where there are some; None if there is nobody."""
    found = victims(pid)
    if not found:
        return None
    what = rng.choice(sorted({kind for _, kind in found}))
    process = rng.choice([one for one, kind in found if kind == what])
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
        return Kill(round(seconds, 2), process.pid, what)
    return None


# ---------------------------------------------------------------- the run


@contextlib.contextmanager
def training(
    run_dir: Path, env: str, minutes: float, seed: int, extra: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A training, which is ended whatever happens here."""
    argv = [sys.executable, "-m", "pronghorn", "train", env, "--run-dir", str(run_dir), "--minutes", str(minutes),
            "--seed", str(seed), "--log.every-s", "1", "--log.no-tensorboard", "--log.live", "off",
            "--env.restart-budget", "1000000", *extra]  # fmt: skip
    with open(run_dir.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(120)
                process.kill()


def soak(
    run_dir: Path, env: str, minutes: float, kill_every_s: float, seed: int, extra: Sequence[str] = ()
) -> dict[str, Any]:
    """Train, measure and kill until the training has ended; all that was seen."""
    rng, samples, kills = random.Random(seed), list[Sample](), list[Kill]()
    with training(run_dir, env, minutes, seed, extra) as process:
        start, next_kill = time.monotonic(), kill_every_s
        while process.poll() is None:
            seconds = time.monotonic() - start
            samples.append(measure(process.pid, seconds))
            if next_kill <= seconds < 60.0 * minutes - QUIET_S and learns(run_dir):
                kills += [kill for kill in [kill_one(process.pid, seconds, rng)] if kill]
                next_kill = seconds + kill_every_s
            time.sleep(max(0.0, 1.0 - (time.monotonic() - start - seconds)))
        code = process.returncode
    return {"env": env, "minutes": minutes, "kill_every_s": kill_every_s, "seed": seed, "exit_code": code,
            "cores": len(os.sched_getaffinity(0)), "samples": [asdict(one) for one in samples],
            "kills": [asdict(one) for one in kills], "lines": told(run_dir)}  # fmt: skip


def learns(run_dir: Path) -> bool:
    """Whether the first lines are there: all workers are at work."""
    return (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) > 3


def told(run_dir: Path) -> list[dict[str, Any]]:
    """What is judged of metrics.jsonl."""
    names = ("time_s", "steps", "updates", "steps_per_s", "policy_lag_max", "worker_restarts", "unrolls_lost",
             "return_mean", "slots_free", "slots_filling", "slots_full", "slots_learning")  # fmt: skip
    return [{name: line[name] for name in names if name in line} for line in read_metrics(run_dir)]


# ---------------------------------------------------------------- judging


def growth(seconds: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """(what the fitted line gains over the time, median): least squares through the medians of equal windows."""
    windows = min(WINDOWS, len(values))
    times = [float(np.mean(part)) for part in np.array_split(np.array(seconds), windows)]
    medians = [float(np.median(part)) for part in np.array_split(np.array(values), windows)]
    slope = float(np.polyfit(times, medians, 1)[0]) if windows > 1 else 0.0
    return slope * (seconds[-1] - seconds[0]), float(np.median(medians))


def judge(seen: dict[str, Any], *, max_lag: int, num_rows: int) -> list[Verdict]:
    """Each promise. num_rows: rows of the run, each of which fills at most one slot."""
    lines, (full, samples) = seen["lines"], whole(seen)
    verdicts = [Verdict("ends at its limit", f"exit code {seen['exit_code']}", seen["exit_code"] == 0)]
    verdicts += [judge_processes(seen, full), *(judge_growth(name, samples) for name in GROWTH)]
    verdicts += [judge_slots(lines, num_rows), judge_lag(lines, max_lag), judge_restarts(seen), *judge_learning(lines)]
    return verdicts


def behind_warm_up(records: Sequence[dict[str, Any]], time_name: str) -> list[dict[str, Any]]:
    """Those behind the warm-up."""
    if not records:
        return []
    begins = min(WARM_UP_SHARE * records[-1][time_name], WARM_UP_MOST_S)
    return [record for record in records if record[time_name] >= begins]


def whole(seen: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """(processes before the first kill, moments behind the warm-up in which as many ran)."""
    first = seen["kills"][0]["seconds"] if seen["kills"] else float("inf")
    full = max(sample["processes"] for sample in seen["samples"] if sample["seconds"] < first)
    return full, [one for one in behind_warm_up(seen["samples"], "seconds") if one["processes"] == full]


def judge_processes(seen: dict[str, Any], full: int) -> Verdict:
    """Nobody stays behind: not more than before the first kill, but for moments."""
    most = float(np.percentile([one["processes"] for one in behind_warm_up(seen["samples"], "seconds")], 95))
    return Verdict("processes do not grow", f"{most:g}, and {full} before the first kill", most <= full)


def judge_growth(name: str, samples: Sequence[dict[str, Any]]) -> Verdict:
    """Whether a measure of the tree stays what it was. samples: those of `whole`."""
    if len(samples) < LEAST_SAMPLES:
        return Verdict(f"{name} does not grow", f"all workers ran in {len(samples)} seconds only", False)
    share, least = GROWTH[name]
    gained, median = growth([s["seconds"] for s in samples], [s[name] for s in samples])
    most = max(share * median, least)
    return Verdict(f"{name} does not grow", f"{gained:+.1f} around {median:.1f} (at most {most:+.1f})", gained <= most)


def judge_slots(lines: Sequence[dict[str, Any]], num_rows: int) -> Verdict:
    """A slot that is lost stays FILLING beside those that rows fill, and the sum of all states never changes."""
    sums = {sum(line[f"slots_{state}"] for state in ("free", "filling", "full", "learning")) for line in lines}
    most = max(line["slots_filling"] for line in lines)
    return Verdict("no slot is lost", f"{most} filled at once by {num_rows} rows, of {sorted(sums)} in all",
                   most <= num_rows and len(sums) == 1)  # fmt: skip


def judge_lag(lines: Sequence[dict[str, Any]], max_lag: int) -> Verdict:
    """The largest lag of all steps."""
    most = max(line.get("policy_lag_max", 0) for line in lines)
    return Verdict("lag is bounded", f"at most {most:g} of {max_lag} iterations", most <= max_lag)


def judge_restarts(seen: dict[str, Any]) -> Verdict:
    """Each kill is one restart, and no worker died otherwise."""
    kills, restarts = len(seen["kills"]), seen["lines"][-1]["worker_restarts"]
    return Verdict("each kill is one restart", f"{kills} kills, {restarts} restarts", kills == restarts and kills > 0)


def judge_learning(lines: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Updates in every interval of a minute (or tenth of the run), and returns that do not fall behind the warm-up."""
    steady = behind_warm_up(lines, "time_s")
    span = min(60.0, lines[-1]["time_s"] / 10)
    marks = [next(line for line in steady if line["time_s"] >= t)["updates"]
             for t in np.arange(steady[0]["time_s"], steady[-1]["time_s"], span)]  # fmt: skip
    least = int(min(np.diff(marks), default=0))
    returns = [line["return_mean"] for line in steady if line.get("return_mean") is not None]
    quarter = max(1, len(returns) // 4)
    first, last = float(np.mean(returns[:quarter])), float(np.mean(returns[-quarter:]))
    every = [line["return_mean"] for line in lines if line.get("return_mean") is not None]
    drop = RETURN_DROP * (max(every) - min(every))
    returned = f"return {first:.4g} behind the warm-up, {last:.4g} at the end"
    return [Verdict("updates go on", f"at least {least} in {span:g} s", least > 0),
            Verdict("learning goes on", returned, last >= first - drop)]  # fmt: skip


def table(seen: dict[str, Any], verdicts: Sequence[Verdict]) -> str:
    """The page's table, with what was done."""
    kinds = {kind: sum(kill["what"] == kind for kill in seen["kills"]) for kind in ("worker", "engine")}
    line = seen["lines"][-1]
    head = (f"`{seen['env']}`, {seen['minutes']:g} minutes, {seen['cores']} cores, seed {seen['seed']}: "
            f"{line['steps']:,} steps, {kinds['worker']} workers and {kinds['engine']} engines killed, "
            f"{line['unrolls_lost']} unrolls lost with them.\n")  # fmt: skip
    rows = [f"| {one.promise} | {one.seen} | {'yes' if one.kept else '**no**'} |" for one in verdicts]
    return "\n".join([head, "| promise | seen | kept |", "|---|---|---|", *rows, ""])


def thinned(records: list[dict[str, Any]], most: int = 400) -> list[dict[str, Any]]:
    """Evenly chosen records, the last included."""
    return records[:: -(-len(records) // most)] + records[-1:] if len(records) > most else records


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where run and results go; must be new")
    parser.add_argument("--env", default="gym:CartPole-v1", help="doom:basic, say")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-every-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args, extra = parser.parse_known_args(argv)
    args.out.mkdir(parents=True, exist_ok=False)
    seen = soak(args.out / "run", args.env, args.minutes, args.kill_every_s, args.seed, extra)
    max_lag, num_rows = sizes(args.out / "run")
    verdicts = judge(seen, max_lag=max_lag, num_rows=num_rows)
    record = seen | {"samples": thinned(seen["samples"]), "lines": thinned(seen["lines"]),
                     "verdicts": [asdict(one) for one in verdicts]}  # fmt: skip
    (args.out / "soak.json").write_text(json.dumps(record) + "\n")
    (args.out / "soak.md").write_text(text := table(seen, verdicts))
    print(text)
    return 0 if all(one.kept for one in verdicts) else 1


def sizes(run_dir: Path) -> tuple[int, int]:
    """(max_lag, rows) of the run."""
    from pronghorn.settings_file import from_toml

    config = from_toml(run_dir / "config.toml")
    lines = read_metrics(run_dir)
    slots = sum(lines[-1][f"slots_{state}"] for state in ("free", "filling", "full", "learning"))
    return config.max_lag, slots - config.fresh_unrolls  # a store has a slot for each row and each unroll of a batch


if __name__ == "__main__":
    sys.exit(main())
