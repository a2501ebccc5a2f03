"""Guards the speed of each stage of training: `make bench` exits with 1 when one fell under 0.8 of its baseline.

    python benchmarks/guard.py [--only STAGE ...] [--seconds 8] [--json FILE] [--record]

Compared is not a speed but a ratio: units of a stage's work that are done in the time of a fixed kernel (reference.py),
timed in the same second on the same thread, so that another or a busier machine does not fail it. The baseline is
benchmarks/baseline.json; --record writes it anew. docs/performance.md says how it is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from pronghorn.machine import keep_memory_mapped
from reference import mixed
from stages import STAGES

BASELINE = Path(__file__).with_name("baseline.json")
LEAST_SHARE = 0.8  # of its baseline, under which a stage fails
LEAST_WALL_SHARE = 0.5  # the same by wall-clock time: what waits takes no CPU time, and other processes must not count
FAILS = ("SLOWER", "WAITS")
MUCH_FASTER = 1.25  # from which on the baseline would no longer notice the loss of what was gained
TRIES = 3  # before a stage fails: noise makes a stage slow for a while, a change for good
SLICE_S, WARM_UP_S, LEAST_ROUNDS = 0.1, 0.5, 5
LONGEST_KERNEL_S = 0.5  # that the kernel is timed for between pieces of work, which may take seconds

Times = NDArray[np.float64]  # [2]: CPU time of this process, wall-clock time
Clocks = tuple[Callable[[], float], Callable[[], float]]
CLOCKS: Clocks = (time.process_time, time.perf_counter)


@dataclass(frozen=True)
class Measured:
    """time_s: wall-clock time of one unit.  ratio: units done in the time of one call of the kernel; wall_ratio: the
    same by wall-clock time.  spread: half of the range of the middle half of the ratios, as a share of their median."""

    time_s: float
    ratio: float
    wall_ratio: float
    spread: float


def measure(
    work: Iterator[int], kernel: Callable[[], None], seconds: float, clocks: Clocks = CLOCKS, *, by_wall: bool = False
) -> Measured:
    """Slices of work and of the kernel in turn, for `seconds`; medians over all rounds.

    A slice of work is compared with the slices of the kernel right before and after it, so what slows the machine
    for longer than a fraction of a second slows both, and what hits one slice alone is no median. The ratio is by CPU
    time, in which other processes count only for what they take of caches and memory; by_wall: where the work is done
    by several processes.
    """
    calls = _calls_of(kernel)
    _per_unit(work, WARM_UP_S, clocks)
    before, end = _per_unit(calls, WARM_UP_S / 2, clocks), clocks[1]() + seconds
    times: list[float] = []
    rounds: list[Times] = []
    while len(times) < LEAST_ROUNDS or clocks[1]() < end:
        start = clocks[1]()
        of_work = _per_unit(work, SLICE_S, clocks)
        after = _per_unit(calls, min((clocks[1]() - start) / 2, LONGEST_KERNEL_S), clocks)
        times.append(float(of_work[1]))
        rounds.append((before + after) / 2 / of_work)
        before = after
    by_cpu, wall = np.transpose(rounds)
    ratios = wall if by_wall else by_cpu
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    return Measured(median(times), middle, float(np.median(wall)), (high - low) / 2 / middle)


def _calls_of(kernel: Callable[[], None]) -> Iterator[int]:
    while True:
        kernel()
        yield 1


def _per_unit(work: Iterator[int], seconds: float, clocks: Clocks) -> Times:
    """Time of a unit by both clocks, over whole pieces of work that take at least `seconds` of the wall's."""
    start, units = _now(clocks), 0
    while True:
        units += next(work)
        spent = _now(clocks) - start
        if spent[1] >= seconds:
            return spent / units


def _now(clocks: Clocks) -> Times:
    return np.array([clock() for clock in clocks])


def measure_stage(name: str, seconds: float) -> Measured:
    """One stage of STAGES, made for this."""
    stage = STAGES[name]
    gc.collect()  # what the stage before it left
    with contextlib.closing(stage.work()) as work:
        return measure(work, mixed(stage.bound_by), seconds, by_wall=stage.by_wall)


def verdict(measured: Measured, baseline: float) -> str:
    """'ok', one of FAILS, or 'faster': then the baseline should be recorded anew."""
    if measured.ratio < LEAST_SHARE * baseline:
        return "SLOWER"
    if measured.wall_ratio < LEAST_WALL_SHARE * baseline:
        return "WAITS"
    return "faster" if measured.ratio > MUCH_FASTER * baseline else "ok"


def judged(name: str, baseline: float | None, seconds: float) -> dict[str, Any]:
    """A stage's result. With a baseline, one that fails is measured again; it passes if it does in one of TRIES."""
    tries, word = 0, FAILS[0]
    while word in FAILS and tries < TRIES:
        measured = measure_stage(name, seconds)
        tries, word = tries + 1, verdict(measured, baseline) if baseline else "recorded"
    return asdict(measured) | {"unit": STAGES[name].unit, "baseline": baseline, "tries": tries, "verdict": word}


# ---------------------------------------------------------------- the baseline


def read_baseline(path: Path, names: Sequence[str]) -> dict[str, float]:
    """The ratios of these stages. Ends the program with code 2 if one is missing: nothing known is no pass."""
    try:
        ratios: dict[str, float] = json.loads(path.read_text())["ratios"]
    except (OSError, ValueError, KeyError) as error:
        _refuse(f"{path} cannot be read as a baseline ({type(error).__name__}: {error})")
    missing, unknown = [n for n in names if not ratios.get(n)], [n for n in ratios if n not in STAGES]
    if missing:
        _refuse(f"{path} has no ratio of {', '.join(missing)}")
    if unknown:
        _refuse(f"{path} has ratios of stages that there are not: {', '.join(unknown)}")
    return ratios


def _refuse(why: str) -> NoReturn:
    print(f"guard: {why}. --record writes a new baseline.", file=sys.stderr)
    raise SystemExit(2)


def write_baseline(path: Path, results: dict[str, dict[str, Any]], seconds: float) -> None:
    """The ratios, and where they come from."""
    record = {
        "machine": machine(),
        "recorded": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python benchmarks/guard.py --record --seconds {seconds:g}",
        "ratios": {name: float(f"{result['ratio']:.4g}") for name, result in results.items()},
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


def machine() -> str:
    """What the ratios depend on a little all the same."""
    return (
        f"{_processor()}, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"NumPy {np.__version__}"
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# ---------------------------------------------------------------- the command


def line(name: str, result: dict[str, Any]) -> str:
    """A stage's line of the table."""
    baseline = result["baseline"]
    against = f"{baseline:10.4g} {result['ratio'] / baseline:6.2f}" if baseline else 17 * " "
    again = f" (try {result['tries']})" if result["tries"] > 1 else ""
    per_unit = f"{_time(result['time_s'])} a {result['unit']}"
    measured = f"{name:18} {per_unit:>20} {result['ratio']:10.4g} {result['spread']:4.0%}"
    return f"{measured} {against}  {result['verdict']}{again}"


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line for each stage, write what was asked for; 1 if a stage fails."""
    args = parse(argv)
    names = args.only or list(STAGES)
    known = {} if args.record else read_baseline(args.baseline, names)
    torch.set_num_threads(1)
    keep_memory_mapped()  # as training does
    results: dict[str, dict[str, Any]] = {}
    print(f"{'stage':18} {'time':>20} {'ratio':>10}   +- {'baseline':>10}  share  verdict", flush=True)
    for name in names:
        results[name] = judged(name, known.get(name), args.seconds)
        print(line(name, results[name]), flush=True)
    if args.record:
        write_baseline(args.baseline, results, args.seconds)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "stages": results}, indent=2) + "\n")
    failed = [f"{name} {result['verdict']}" for name, result in results.items() if result["verdict"] in FAILS]
    if failed:
        print(f"under {LEAST_SHARE:g} of the baseline, or {LEAST_WALL_SHARE:g} by wall-clock time: {', '.join(failed)}",
              file=sys.stderr)  # fmt: skip
    return 1 if failed else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Exits with code 2 for wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=f"of: {', '.join(STAGES)}")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each stage and its kernel (default 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--record", action="store_true", help="write the ratios as the new baseline, compare nothing")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE", help="the file of the baseline")
    args = parser.parse_args(argv)
    if args.record and args.only:
        parser.error("--record measures every stage: a baseline is of one machine and one day. Leave --only out.")
    if not args.seconds > 0.0:
        parser.error("--seconds must be greater than 0.")
    return args


if __name__ == "__main__":
    sys.exit(main())
