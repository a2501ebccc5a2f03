"""The learning runs of a benchmark: each a process with a run directory and a log of its own, several at a time.

A run that reached its limit is left alone, so that a script that was stopped goes on when it is started again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.axes import Axes
from numpy.typing import NDArray

PRONGHORN = (sys.executable, "-m", "pronghorn")

Item = TypeVar("Item")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what all of these scripts take: --out, --lanes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the run directories go")
    parser.add_argument("--lanes", type=int, default=1, help="trainings at a time (1)")
    return parser


def in_lanes(make: Callable[[Item], object], items: Iterable[Item], lanes: int) -> None:
    """make(item) for each, so many at a time; raises the first error."""
    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(make, items))


def train(run: Path, *argv: str, go_on: bool = False, program: tuple[str, ...] = PRONGHORN) -> str:
    """Train into a run directory, unless that was done; the line that says how it ended, which is printed, too.

    argv: of `pronghorn train`, without directory.  go_on: resume what was stopped; else it is begun anew.
    """
    log = run.with_name(run.name + ".log")
    if not ended(log):
        if not go_on:
            shutil.rmtree(run, ignore_errors=True)
        run.parent.mkdir(parents=True, exist_ok=True)
        resume = ("--resume",) if (run / "config.toml").exists() else ()
        with log.open("w") as output:
            command = [*program, "train", *argv, *resume, "--run-dir", str(run), "--log.live", "off"]
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        print(f"{run.name}: exit code {code}: {ended(log) or log.read_text()[-2000:]}", flush=True)
    return ended(log)


def ended(log: Path) -> str:
    """The line that tells that a run reached its limit, or ''."""
    lines = log.read_text().splitlines() if log.exists() else []
    return next((line for line in lines if line.startswith("reached")), "")


def draw_arm(axis: Axes, x: NDArray[Any], curves: NDArray[Any], label: str) -> None:
    """An arm of a comparison: the mean of its curves [seeds, len(x)], and the range in which they are."""
    axis.plot(x, curves.mean(0), label=label)
    axis.fill_between(x, curves.min(0), curves.max(0), alpha=0.15)


def finish(axis: Axes, title: str, x: str, y: str) -> None:
    """Words, a grid and a legend."""
    axis.set(title=title, xlabel=x, ylabel=y)
    axis.grid(alpha=0.3)
    axis.legend()
