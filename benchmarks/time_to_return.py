"""How long Pronghorn and Sample Factory 2.1.1 train until doom:basic is played well, one after the other in one run.

    python benchmarks/time_to_return.py --install PEERS --seeds 1 2 3 --json result.json

A run ends when the mean return of the last 100 training episodes, by the program's own count, reaches `--goal`; not
before 60,000 frames, since the first episodes to end are the short and so the good ones. Seconds
count from the start of the process, so start-up is in; frames are four a step. Pronghorn runs with its defaults, Sample
Factory with the settings that were fastest on two cores (benchmarks/peers.py), whose batch is 2,048 samples.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import OURS, PEERS, WORKS, install
from side_by_side import Contender, Training, machine, pin

PEER = "sample-factory"
FRAMES, RETURN = r"Total num frames: (\d+)", r"Avg episode reward: \[\(0, '(-?[\d.]+)'\)\]"  # in Sample Factory's log
FIRST_FRAMES = 60_000  # 100 episodes of at most 300 frames, twice
OUR_ARGUMENTS = (
    "-m", "pronghorn", "train", "doom:basic", "--device", "cpu", "--log.every-s", "1", "--run-dir", "{run}/run",
)  # fmt: skip


class Progress:
    """The newest return and frames of a run, by its log or its metrics."""

    def __init__(self, contender: Contender, folder: Path) -> None:
        self._metrics = folder / contender.metrics if contender.metrics else None
        self.frames, self.returns = 0, -float("inf")

    def on_line(self, line: str) -> None:
        """Sample Factory's: a line of frames, then a line of the mean return."""
        if match := re.search(FRAMES, line):
            self.frames = int(match[1])
        if match := re.search(RETURN, line):
            self.returns = float(match[1])

    def reached(self, goal: float) -> bool:
        """Whether the goal is reached, by a mean that can be believed."""
        return self.frames >= FIRST_FRAMES and self.returns >= goal

    def look(self) -> None:
        """Pronghorn's last line that has a return."""
        if self._metrics is None or not self._metrics.exists():
            return
        for line in map(json.loads, self._metrics.read_text(encoding="utf-8").split("\n")[:-1]):
            if "return_mean" in line:
                self.frames, self.returns = line["frames"], line["return_mean"]


def time_to(contender: Contender, python: str, seed: int, goal: float, most_s: float) -> dict[str, Any]:
    """One run: seconds and frames until the goal, or what was reached after `most_s`."""
    with tempfile.TemporaryDirectory(prefix="bench_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        progress = Progress(contender, folder)
        start = time.monotonic()
        training = Training([*contender.command(python, folder), f"--seed={seed}"], folder, progress.on_line)
        try:
            while not progress.reached(goal) and time.monotonic() - start < most_s:
                training.check(1.0)
                progress.look()
        finally:
            seconds = time.monotonic() - start
            training.end()
    reached = progress.reached(goal)
    return {"contender": contender.name, "seed": seed, "reached": reached, "seconds": round(seconds, 1),
            "frames": progress.frames, "return": progress.returns}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, required=True, metavar="DIR", help="virtual environments of peers")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has Pronghorn (this one)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--goal", type=float, default=0.70)
    parser.add_argument("--minutes", type=float, default=15.0, help="at most, for each run (15)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    cores = pin(2)
    pythons = {OURS: args.python, PEER: install(PEERS[PEER], args.install / PEER)}
    ours = Contender(OURS, OURS, OUR_ARGUMENTS, metrics="run/metrics.jsonl")
    theirs = next(each for each in WORKS["doom"].contenders if each.peer == PEER)
    runs = []
    for number, seed in enumerate(args.seeds):
        for contender in (ours, theirs)[:: 1 if number % 2 else -1]:
            runs.append(time_to(contender, pythons[contender.peer], seed, args.goal, 60.0 * args.minutes))
            print(json.dumps(runs[-1]), flush=True)
    found = {name: [r for r in runs if r["contender"] == name] for name in pythons}
    record: dict[str, Any] = {"goal": args.goal, "runs": runs, "cores": cores, "machine": machine(),
                              "commands": {each.name: each.shown() for each in (ours, theirs)}}  # fmt: skip
    if all(r["reached"] for r in runs):
        medians = {name: statistics.median(r["seconds"] for r in these) for name, these in found.items()}
        record |= {"median_s": medians, "ratio": medians[PEER] / medians[OURS]}
        print(f"median seconds: {medians}; {record['ratio']:.2f} times as fast")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))
    return 0 if all(r["reached"] for r in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
