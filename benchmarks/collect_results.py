"""Collects learning runs for docs/results: thinned numbers, one picture, one table row. It trains nothing.

    python benchmarks/collect_results.py NAME --goal 475 runs/a runs/b runs/c

writes docs/results/data/NAME-<seed>.jsonl (time_s, steps, frames, return_mean, eval/mean), docs/results/NAME.png with
every seed against steps and against wall-clock time, and prints a Markdown table of when each seed reached the goal.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pronghorn.settings_file import from_toml
from pronghorn.training.metrics import read_metrics

RESULTS = Path(__file__).parents[1] / "docs" / "results"
KEPT = ("time_s", "steps", "frames", "return_mean", "eval/mean", "policy_lag_mean", "steps_per_s")
MAX_LINES = 200


def collect(name: str, goal: float, run_dirs: list[Path]) -> None:
    """Write data and picture, print the table."""
    curves = {from_toml(d / "config.toml").seed: thinned(read_metrics(d)) for d in run_dirs}
    (RESULTS / "data").mkdir(parents=True, exist_ok=True)
    for seed, lines in curves.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (RESULTS / "data" / f"{name}-{seed}.jsonl").write_text(text)
    draw(name, goal, curves)
    print("| seed | evaluated return | training return | steps | frames | wall-clock s |\n|---|---|---|---|---|---|")
    for seed, run_dir in zip(curves, run_dirs, strict=True):
        last = curves[seed][-1]
        result = final_evaluation(run_dir)
        numbers = f"{last['steps']:,} | {last['frames']:,} | {last['time_s']:.0f}"
        print(f"| {seed} | {result} | {last.get('return_mean', float('nan')):.4g} | {numbers} |")


def thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MAX_LINES lines, the last one among them, with the names that curves need."""
    lines = [line for line in lines if "event" not in line]
    stride = -(-len(lines) // MAX_LINES)
    picked = lines[:-1:stride] + lines[-1:]
    return [{k: round(line[k], 4) for k in KEPT if k in line} for line in picked]


def final_evaluation(run_dir: Path) -> str:
    """'mean ± stderr (episodes)' of the run's last evaluation."""
    files = sorted((run_dir / "eval").glob("*.json"))
    if not files:
        return "–"
    found = json.loads(files[-1].read_text())
    return f"{found['mean']:.4g} ± {found['stderr']:.2g} ({found['episodes']} episodes)"


def draw(name: str, goal: float, curves: dict[int, list[dict[str, Any]]]) -> None:
    """Return against steps and against minutes, one line a seed, the goal dotted."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for seed, lines in curves.items():
        known = [line for line in lines if "return_mean" in line]
        returns = [line["return_mean"] for line in known]
        axes[0].plot([line["steps"] for line in known], returns, label=f"seed {seed}")
        axes[1].plot([line["time_s"] / 60 for line in known], returns, label=f"seed {seed}")
    for axis, label in zip(axes, ("steps", "minutes"), strict=True):
        axis.axhline(goal, linestyle=":", color="grey")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean return of 100 training episodes")
    axes[0].legend()
    figure.suptitle(name)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("run_dirs", type=Path, nargs="+")
    parser.add_argument("--goal", type=float, required=True)
    arguments = parser.parse_args()
    collect(arguments.name, arguments.goal, arguments.run_dirs)
