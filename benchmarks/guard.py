"""Guards the speed of each stage of training: `make bench` exits with 1 when one fell under 0.8 of its baseline.

    python benchmarks/guard.py [--only STAGE ...] [--seconds 8] [--json FILE] [--record]

Compared is not a speed but a ratio: units of a stage's work that are done in the time of a fixed kernel (reference.py),
timed in the same second on the same core, so that another or a busier machine does not fail it. The baseline is
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

from pronghorn.training.trainer import keep_memory_mapped
from reference import mixed
from stages import STAGES

BASELINE = Path(__file__).with_name("baseline.json")
LEAST_SHARE = 0.8  # of its baseline, under which a stage fails
MUCH_FASTER = 1.25  # from which on the baseline would no longer notice the loss of what was gained
TRIES = 3  # before a stage fails: noise makes a stage slow for a while, a change for good
SLICE_S, WARM_UP_S, LEAST_ROUNDS = 0.1, 0.5, 5

Clock = Callable[[], float]


@dataclass(frozen=True)
class Measured:
    """time_s: of one unit.  ratio: units done in the time of one call of the kernel.  spread: of the ratios, half of
    the range that the middle half of the rounds lies in, as a share of their median."""

    time_s: float
    ratio: float
    spread: float


def measure(
    work: Iterator[int], kernel: Callable[[], None], seconds: float, clock: Clock = time.perf_counter
) -> Measured:
    """Slices of work and of the kernel in turn, for `seconds`; medians over all rounds.

    A slice of work is compared with the slices of the kernel right before and after it, so what slows the machine
    for longer than a fraction of a second slows both, and what hits one slice alone is no median.
    """
    _per_unit(work, WARM_UP_S, clock)
    calls = _calls_of(kernel)
    before, end = _per_unit(calls, WARM_UP_S / 2, clock), clock() + seconds
    times: list[float] = []
    ratios: list[float] = []
    while len(times) < LEAST_ROUNDS or clock() < end:
        start = clock()
        times.append(_per_unit(work, SLICE_S, clock))
        after = _per_unit(calls, max(SLICE_S, clock() - start) / 2, clock)
        ratios.append((before + after) / 2 / times[-1])
        before = after
    low, high = np.quantile(ratios, (0.25, 0.75))
    return Measured(median(times), median(ratios), float(high - low) / 2 / median(ratios))


def _calls_of(kernel: Callable[[], None]) -> Iterator[int]:
    while True:
        kernel()
        yield 1


def _per_unit(work: Iterator[int], seconds: float, clock: Clock) -> float:
    """Seconds a unit, over whole pieces of work that take at least `seconds`."""
    start, units, spent = clock(), 0, 0.0
    while spent < seconds:
        units += next(work)
        spent = clock() - start
    return spent / units


def measure_stage(name: str, seconds: float) -> Measured:
    """One stage of STAGES, made for this."""
    stage = STAGES[name]
    gc.collect()  # what the stage before it left
    with contextlib.closing(stage.work()) as work:
        return measure(work, mixed(stage.bound_by), seconds)


def verdict(ratio: float, baseline: float) -> str:
    """'ok', 'SLOWER', or 'faster': then the baseline should be recorded anew."""
    share = ratio / baseline
    return "SLOWER" if share < LEAST_SHARE else "faster" if share > MUCH_FASTER else "ok"


def judged(name: str, baseline: float | None, seconds: float) -> dict[str, Any]:
    """A stage's result; with a baseline, what is too slow is measured again, and the best of the tries counts."""
    tries = [measure_stage(name, seconds)]
    while baseline and verdict(tries[-1].ratio, baseline) == "SLOWER" and len(tries) < TRIES:
        tries.append(measure_stage(name, seconds))
    best = max(tries, key=lambda each: each.ratio)
    word = verdict(best.ratio, baseline) if baseline else "recorded"
    return asdict(best) | {"unit": STAGES[name].unit, "baseline": baseline, "tries": len(tries), "verdict": word}


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
    again = f" (best of {result['tries']})" if result["tries"] > 1 else ""
    per_unit = f"{_time(result['time_s'])} a {result['unit']}"
    measured = f"{name:18} {per_unit:>20} {result['ratio']:10.4g} {result['spread']:4.0%}"
    return f"{measured} {against}  {result['verdict']}{again}"


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line for each stage, write what was asked for; 1 if a stage is slower."""
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
    slower = [name for name, result in results.items() if result["verdict"] == "SLOWER"]
    if slower:
        print(f"under {LEAST_SHARE:g} of the baseline: {', '.join(slower)}", file=sys.stderr)
    return 1 if slower else 0


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
