"""Runs trainings in alternating rounds and counts the steps that each trains. It knows no peer by name.

A training is a command in a process group of its own. Its count of trained steps is read from what it prints or from
a file that it writes. Steady state: the rate between the first and the last change of that count after the warm-up,
which begins with the first batch; so neither start-up nor the wait for a batch that is not full yet is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import psutil

BENCHMARKS = Path(__file__).resolve().parent
SHARED_MEMORY = Path("/dev/shm")
START_TIMEOUT_S = 300.0
POLL_S = 0.2
MEMORY_EVERY_S = 5.0
NEEDED_CHANGES = 3  # of the count, between which a rate is taken

Curve = list[tuple[float, int]]  # (seconds, steps trained)


@dataclass(frozen=True)
class Contender:
    """A program that trains, and where it says how many steps it has trained.

    peer: whose interpreter runs it.  arguments: those after the interpreter; {run} stands for a folder of the run's
    own, {scripts} for benchmarks/peer_scripts.  counter: matches the lines of its output that hold the count.
    metrics: a file in {run} of JSON lines with time_s and steps, which then is read instead.
    counted_per_step: what its count grows by at each step (frames, if it counts those).
    """

    name: str
    peer: str
    arguments: tuple[str, ...]
    counter: str = r"^steps (\d+)$"
    metrics: str = ""
    counted_per_step: int = 1

    def command(self, python: str, folder: Path) -> list[str]:
        """What to run, with the run's own folder in it."""
        return [python, *self._filled(str(folder), str(BENCHMARKS / "peer_scripts"))]

    def shown(self) -> str:
        """The same for a reader: no path of this machine in it."""
        return " ".join(["python", *self._filled("RUN", "benchmarks/peer_scripts")])

    def _filled(self, run: str, scripts: str) -> list[str]:
        return [argument.replace("{run}", run).replace("{scripts}", scripts) for argument in self.arguments]

    def steps_in(self, line: str) -> int | None:
        """Steps trained, from a line of its output that holds the count; None for any other line."""
        match = re.search(self.counter, line)
        return int(match[1]) // self.counted_per_step if match else None


# ------------------------------------------------------------------------------------------ one run


class Training:
    """A training process in a process group of its own, with the end of its output kept for error messages."""

    def __init__(self, command: list[str], folder: Path, on_line: Callable[[str], None] = lambda _: None) -> None:
        self._started_at = time.time()
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder)},  # what it leaves in temporary files goes with the folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.peak_memory_bytes = 0
        self._seen: set[psutil.Process] = set()  # of the run, whether or not they are still there
        self._tail: deque[str] = deque(maxlen=25)
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout, on_line), daemon=True)
        self._reader.start()

    def _read(self, output: IO[str], on_line: Callable[[str], None]) -> None:
        with output:
            for line in output:
                self._tail.append(line)
                on_line(line)

    def watch(self, curve: Callable[[], Curve], seconds: float, warmup_s: float) -> Curve:
        """The curve when `seconds` have passed since `warmup_s` after the first batch, and the count has changed often
        enough since, for which up to four times as long is allowed. Raises RuntimeError if the run ends before.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not changes(curve()):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"no batch was trained within {START_TIMEOUT_S:.0f} s:\n{''.join(self._tail)}")
            self.check(POLL_S)
            self._seen |= self._family()
        steady_at_s = time.monotonic() + warmup_s
        while (left_s := steady_at_s + seconds - time.monotonic()) > -3 * seconds:
            if left_s <= 0 and len(steady_part(curve(), warmup_s)) >= NEEDED_CHANGES:
                break
            self.check(min(MEMORY_EVERY_S, left_s) if left_s > 0 else POLL_S)
            self._look_at_memory()
        return curve()

    def _look_at_memory(self) -> None:
        family = self._family()
        self._seen |= family
        memory_bytes = sum(_pss_bytes(process.pid) for process in family)
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory_bytes)

    def check(self, seconds: float) -> None:
        """Wait so long. Raises RuntimeError if the process ends meanwhile."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(seconds)
            self._reader.join(10)
            raise RuntimeError(f"the run ended with code {code}:\n{''.join(self._tail)}")

    def end(self) -> None:
        """End the process, then all that it started, and remove their shared memory.

        Engines outlive a killed worker, and their shared memory outlives them, so both are looked for.
        """
        shared = self._mapped(self._seen | self._family())
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)  # ours saves a checkpoint and ends its own children
        while family := {process for process in self._seen | self._family() if _is_alive(process)}:
            self._seen |= family  # a worker may have started an engine meanwhile, so it is looked for again
            shared |= self._mapped(family)
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            until = time.monotonic() + 10.0
            while any(map(_is_alive, family)) and time.monotonic() < until:
                time.sleep(0.02)
        self._process.wait(10)
        self._reader.join(10)
        self._remove(shared)

    def _mapped(self, family: set[psutil.Process]) -> set[Path]:
        return {path for process in family for path in _shared_memory(process.pid)}

    def _family(self) -> set[psutil.Process]:
        """The process and its descendants, and what is left of the session once they have lost their parents."""
        family = set()
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self._process.pid:
                    family.add(process)
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update(psutil.Process(self._process.pid).children(recursive=True))
        return family

    def _remove(self, shared: set[Path]) -> None:
        """Remove files of shared memory that a process of the run had mapped, or that bear its number."""
        numbers = {str(process.pid) for process in self._seen}
        for path in SHARED_MEMORY.glob("*"):
            with contextlib.suppress(FileNotFoundError):
                of_run = path in shared or numbers & set(re.findall(r"\d+", path.name))
                if of_run and path.is_file() and path.stat().st_ctime >= self._started_at - 1.0:
                    path.unlink()


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs: what nobody has waited for yet is listed, but dead."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _pss_bytes(pid: int) -> int:
    """A process's memory, what it shares divided by those who share it; 0 where that cannot be read."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.M)
    return int(match[1]) * 1024 if match else 0


def _shared_memory(pid: int) -> set[Path]:
    """The files in /dev/shm that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, re.M)}


def train(contender: Contender, python: str, seconds: float, warmup_s: float) -> tuple[Curve, int]:
    """Train for `seconds` after the warm-up; the curve, and the largest sum of memory in bytes."""
    curve: Curve = []

    def on_line(line: str) -> None:
        steps = contender.steps_in(line)
        if steps is not None:
            curve.append((time.monotonic(), steps))

    with tempfile.TemporaryDirectory(prefix="bench_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        metrics = folder / contender.metrics
        training = Training(contender.command(python, folder), folder, on_line)
        try:
            found = training.watch(
                lambda: read_metrics(metrics) if contender.metrics else list(curve), seconds, warmup_s
            )
            return found, training.peak_memory_bytes
        finally:
            training.end()


def read_metrics(metrics: Path) -> Curve:
    """(time_s, steps) of every whole line."""
    if not metrics.exists():
        return []
    lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline may be half a line
    return [(record["time_s"], record["steps"]) for record in map(json.loads, lines)]


def changes(curve: Curve) -> Curve:
    """The points at which the count changed."""
    return [point for before, point in pairwise([(0.0, 0), *curve]) if point[1] != before[1]]


def steady_part(curve: Curve, warmup_s: float) -> Curve:
    """The changes of the count from `warmup_s` after the first batch on."""
    changed = changes(curve)
    return [point for point in changed if point[0] >= changed[0][0] + warmup_s]


# ------------------------------------------------------------------------------------------ rounds


@dataclass(frozen=True)
class Run:
    """What one run of a contender gave."""

    round: int
    contender: str
    steps_per_s: float
    seconds: float  # between the first and the last change of the count after the warm-up
    steps: int  # between the same
    changes: int
    peak_memory_bytes: int


def run(contender: Contender, python: str, number: int, seconds: float, warmup_s: float) -> Run:
    """One run, measured for `seconds` after the warm-up. Raises RuntimeError if it fails."""
    curve, memory_bytes = train(contender, python, seconds, warmup_s)
    return measured(contender.name, number, steady_part(curve, warmup_s), memory_bytes)


def measured(name: str, number: int, steady: Curve, memory_bytes: int) -> Run:
    """The rate between the first and the last change. Raises RuntimeError if there are too few."""
    if len(steady) < NEEDED_CHANGES:
        raise RuntimeError(f"the count changed only {len(steady)} times after the warm-up: measure longer (--seconds)")
    span_s, steps = steady[-1][0] - steady[0][0], steady[-1][1] - steady[0][1]
    return Run(number, name, steps / span_s, span_s, steps, len(steady), memory_bytes)


def in_turn(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of a round: every second round goes backwards, and each pair of rounds begins one further on."""
    start = (number - 1) // 2 % len(contenders)
    ordered = [*contenders[start:], *contenders[:start]]
    return ordered if number % 2 else ordered[::-1]


def rounds(
    contenders: Sequence[Contender], pythons: dict[str, str], num_rounds: int, seconds: float, warmup_s: float
) -> Iterator[Run | tuple[Contender, RuntimeError]]:
    """Every run as it ends, or the error with which it failed; who has failed does not run again.

    pythons: the interpreter of each contender's peer.
    """
    failed: set[str] = set()
    for number in range(1, num_rounds + 1):
        for contender in in_turn(contenders, number):
            if contender.name in failed:
                continue
            try:
                yield run(contender, pythons[contender.peer], number, seconds, warmup_s)
            except RuntimeError as error:
                failed.add(contender.name)
                yield contender, error


def medians(runs: Sequence[Run]) -> dict[str, float]:
    """Steps per second of each contender, the median of its rounds."""
    names = dict.fromkeys(each.contender for each in runs)
    return {name: statistics.median(each.steps_per_s for each in runs if each.contender == name) for name in names}


# ------------------------------------------------------------------------------------------ the machine


def pin(num_cores: int) -> list[int]:
    """Keep this process, and so every process that it starts, on the first `num_cores` cores that it may use."""
    if not hasattr(os, "sched_setaffinity"):
        return []  # not on this platform: all sides then use all cores
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    os.sched_setaffinity(0, cores)
    return cores


def machine() -> str:
    """System, processor and memory in words."""
    return f"{platform.platform()}, {_cpu_model()}, {psutil.virtual_memory().total / 2**30:.0f} GiB"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return match[1] if match else platform.processor()


def versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Versions of the given packages, and of Python, as that interpreter has them."""
    code = (
        "import sys, json, importlib.metadata as m\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
        "names = {name: found[name.lower()] for name in sys.argv[1:] if name.lower() in found}\n"
        "print(json.dumps({'python': sys.version.split()[0], **names}))"
    )
    answer = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(answer)
    return found
