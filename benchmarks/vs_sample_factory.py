"""Measures training throughput of Pronghorn and of Sample Factory 2.1.1 side by side on doom:basic.

Both train the same work on the same cores: 160×120 rendered, resized to 128×72 RGB, action repeat 4,
convnet_simple + GRU 512, unrolls of 32 steps, 2048 samples a batch. Rounds are interleaved, so that a slow spell
of the machine meets both. It says nothing about learning: see docs/results for that.

    python benchmarks/vs_sample_factory.py --json result.json --install /tmp/sample-factory
    python benchmarks/vs_sample_factory.py --json result.json --peer-python /tmp/sample-factory/bin/python

Steady state: the slope of the least-squares line through (time, steps trained), from `--warmup` seconds after the
first batch to the end. Steps trained are counted alike: decisions that have entered training batches. Sample Factory
counts frames of whole batches, which are 4 a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

FRAMES_PER_STEP = 4
START_TIMEOUT_S = 180.0
Curve = list[tuple[float, int]]  # (seconds, steps trained)

OURS = [
    "-m", "pronghorn", "train", "doom:basic", "--algo", "appo", "--device", "cpu",
    "--learner.unroll-length", "32", "--learner.batch-unrolls", "64", "--model.conv", "convnet_simple",
    "--model.core", "gru", "--model.core-size", "512", "--learner.minibatches", "1",
    "--log.every-s", "1", "--log.live", "plain",
]  # fmt: skip
# Two workers with 16 environments each were its fastest setting at this batch on another 2-core machine.
THEIRS = [
    "-m", "sf_examples.vizdoom.train_vizdoom", "--env=doom_basic", "--device=cpu", "--num_workers=2",
    "--num_envs_per_worker=16", "--worker_num_splits=2", "--rollout=32", "--batch_size=2048",
    "--num_batches_per_epoch=1", "--num_epochs=1", "--encoder_conv_architecture=convnet_simple",
    "--use_rnn=True", "--rnn_type=gru", "--rnn_size=512", "--save_every_sec=100000",
]  # fmt: skip
PEER_PACKAGES = ("numpy<2", "sample-factory==2.1.1", "vizdoom", "opencv-python-headless<5")
_PROGRESS = re.compile(r"Fps is \(.*?Total num frames: (\d+)")


# ------------------------------------------------------------------------------------------ one run


class Training:
    """A training process in a process group of its own, with the end of its output kept for error messages."""

    def __init__(self, command: list[str], folder: Path, on_line: Callable[[str], None] = lambda _: None) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._tail: deque[str] = deque(maxlen=25)
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout, on_line), daemon=True)
        self._reader.start()

    def _read(self, output: IO[str], on_line: Callable[[str], None]) -> None:
        for line in output:
            self._tail.append(line)
            on_line(line)

    def watch(self, curve: Callable[[], Curve], seconds: float) -> Curve:
        """The curve `seconds` after the first batch was trained. Raises RuntimeError if the run ends before."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        started = False
        while time.monotonic() < deadline_s:
            if not started and any(steps > 0 for _, steps in curve()):
                started, deadline_s = True, time.monotonic() + seconds
            if self._process.poll() is not None:
                raise RuntimeError(f"the run ended with code {self._process.returncode}:\n{''.join(self._tail)}")
            time.sleep(0.2)
        if not started:
            raise RuntimeError(f"no batch was trained within {START_TIMEOUT_S:.0f} s:\n{''.join(self._tail)}")
        return curve()

    def end(self) -> None:
        """End the process, then all that it started, and remove their shared memory.

        Engines outlive a killed worker, and their shared memory outlives them, so both are looked for.
        """
        family = self._family()
        shared = {path for process in family for path in _shared_memory(process.pid)}
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)  # ours saves a checkpoint and ends its own children
        for process in family | self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(10)
        self._reader.join(10)
        for path in shared:
            path.unlink(missing_ok=True)

    def _family(self) -> set[psutil.Process]:
        """The descendants, and what is left of the session once they have lost their parents."""
        family = set()
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self._process.pid:
                    family.add(process)
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update(psutil.Process(self._process.pid).children(recursive=True))
        return family


def _shared_memory(pid: int) -> set[Path]:
    """The engine's files in /dev/shm that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {Path(name) for name in re.findall(r"/dev/shm/ViZDoom\S+", maps)}


def run_ours(python: str, seconds: float) -> Curve:
    """Train with Pronghorn; the curve comes from the run's metrics.jsonl."""
    with tempfile.TemporaryDirectory(prefix="bench_ours_") as folder:
        run_dir = Path(folder) / "run"
        command = [python, *OURS, "--run-dir", str(run_dir)]
        return _train(command, Path(folder), lambda: read_ours(run_dir / "metrics.jsonl"), seconds)


def read_ours(metrics: Path) -> Curve:
    """(time_s, steps) of every whole line."""
    if not metrics.exists():
        return []
    lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline may be half a line
    return [(record["time_s"], record["steps"]) for record in map(json.loads, lines)]


def run_theirs(python: str, seconds: float) -> Curve:
    """Train with Sample Factory; the curve comes from its rate lines, timed as they arrive."""
    curve: Curve = []

    def on_line(line: str) -> None:
        steps = parse_theirs(line)
        if steps is not None:
            curve.append((time.monotonic(), steps))

    with tempfile.TemporaryDirectory(prefix="bench_theirs_") as folder:
        command = [python, *THEIRS, "--experiment=bench", f"--train_dir={folder}"]
        return _train(command, Path(folder), lambda: list(curve), seconds, on_line)


def parse_theirs(line: str) -> int | None:
    """Steps trained, from a line `Fps is (10 sec: …). Total num frames: N. …`; None for any other line."""
    match = _PROGRESS.search(line)
    return int(match[1]) // FRAMES_PER_STEP if match else None


def _train(
    command: list[str],
    folder: Path,
    curve: Callable[[], Curve],
    seconds: float,
    on_line: Callable[[str], None] = lambda _: None,
) -> Curve:
    training = Training(command, folder, on_line)
    try:
        return training.watch(curve, seconds)
    finally:
        training.end()


def steady_steps_per_s(curve: Curve, warmup_s: float) -> float:
    """Slope of the least-squares line through the curve, without the first `warmup_s` after its first batch."""
    start_s = next(seconds for seconds, steps in curve if steps > 0) + warmup_s
    points = [(seconds, steps) for seconds, steps in curve if seconds >= start_s]
    if len(points) < 3:
        raise RuntimeError(f"only {len(points)} progress lines after the warm-up: measure for longer (--seconds)")
    return statistics.linear_regression(*zip(*points, strict=True)).slope


# ------------------------------------------------------------------------------------------ the benchmark


@dataclass(frozen=True)
class Round:
    """Steps per second of both in one round."""

    ours: float
    theirs: float


def measure(args: argparse.Namespace, peer_python: str) -> list[Round]:
    rounds = []
    for number in range(1, args.rounds + 1):
        rates: dict[str, float] = {}
        sides = [("ours", run_ours, args.python), ("theirs", run_theirs, peer_python)]
        for side, run, python in sides if number % 2 else sides[::-1]:  # neither always runs on the warmer machine
            rates[side] = steady_steps_per_s(run(python, args.seconds), args.warmup)
            print(f"round {number}/{args.rounds}: {side} {rates[side]:,.0f} steps/s", flush=True)
        rounds.append(Round(**rates))
    return rounds


def install_peer(folder: Path) -> str:
    """Sample Factory in a virtual environment of its own; returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # torch first and pinned, else a later package brings in another build; then all else in one resolve.
    subprocess.run([*pip, "torch==2.13.0", "numpy<2"], check=True)
    subprocess.run([*pip, *PEER_PACKAGES], check=True)
    return str(python)


def summarise(rounds: list[Round], cores: list[int], args: argparse.Namespace, peer_python: str) -> dict[str, Any]:
    ours = statistics.median(each.ours for each in rounds)
    theirs = statistics.median(each.theirs for each in rounds)
    return {
        "ratio": ours / theirs,
        "ours_steps_per_s": ours,
        "theirs_steps_per_s": theirs,
        "rounds": [{"ours": each.ours, "theirs": each.theirs} for each in rounds],
        "commands": {"ours": " ".join(["python", *OURS]), "theirs": " ".join(["python", *THEIRS])},
        "seconds": args.seconds,
        "warmup_s": args.warmup,
        "cores": cores,
        "machine": f"{platform.platform()}, {_cpu_model()}",
        "versions": {
            "ours": _versions(args.python, "pronghorn-rl", "torch", "numpy", "vizdoom"),
            "theirs": _versions(peer_python, "sample-factory", "torch", "numpy", "vizdoom"),
        },
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return match[1] if match else platform.processor()


def _versions(python: str, *packages: str) -> dict[str, str]:
    code = "import sys, importlib.metadata as m; print(*(m.version(name) for name in sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True).stdout
    return dict(zip(packages, found.split(), strict=True))


def pin(num_cores: int) -> list[int]:
    """Keep this process, and so every process that it starts, on the first `num_cores` cores that it may use."""
    if not hasattr(os, "sched_setaffinity"):
        return []  # not on this platform: both sides then use all cores
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    os.sched_setaffinity(0, cores)
    return cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="PATH", help="where the result is written")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each measures both (default: 3)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a run from its first batch (60)")
    parser.add_argument("--warmup", type=float, default=20.0, help="seconds cut from its beginning (20)")
    parser.add_argument("--cores", type=int, default=2, help="cores that both share (2)")
    parser.add_argument("--python", default=sys.executable, help="interpreter with Pronghorn (this one)")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter with Sample Factory 2.1.1")
    parser.add_argument("--install", type=Path, metavar="DIR", help="install Sample Factory there first")
    args = parser.parse_args()
    if not args.peer_python and not args.install:
        parser.error("give --peer-python PATH, or --install DIR to install Sample Factory")
    if args.seconds < args.warmup + 15:
        parser.error("--seconds must be at least 15 more than --warmup: the peer reports every 5 seconds")
    peer_python = install_peer(args.install) if args.install else args.peer_python
    for python in (args.python, peer_python):
        if shutil.which(python) is None:
            parser.error(f"{python}: no such program")
    cores = pin(args.cores)
    args.python, peer_python = os.path.abspath(args.python), os.path.abspath(peer_python)  # runs have own folders
    result = summarise(measure(args, peer_python), cores, args, peer_python)
    args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"ratio {result['ratio']:.2f}: ours {result['ours_steps_per_s']:,.0f} steps/s, "
          f"theirs {result['theirs_steps_per_s']:,.0f} steps/s → {args.json}")  # fmt: skip


if __name__ == "__main__":
    main()
