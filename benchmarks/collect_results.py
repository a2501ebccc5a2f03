"""Collects learning runs for docs/results: thinned numbers, one picture, table rows. It trains nothing.

    python benchmarks/collect_results.py NAME --goal 475 runs/a runs/b runs/c

writes docs/results/data/NAME-<label>-<seed>.jsonl (time_s, steps, frames, return_mean, eval/mean) for the given runs,
draws docs/results/NAME.png from all files of that name (a panel for each label, a line for each seed), and prints a
Markdown row for each given run. The label is the run's algorithm, or --label.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pronghorn.settings_file import from_toml
from pronghorn.training.metrics import read_metrics

RESULTS = Path(__file__).parents[1] / "docs" / "results"
KEPT = ("time_s", "steps", "frames", "return_mean", "eval/mean", "policy_lag_mean", "steps_per_s")
MAX_LINES = 120

Curve = list[dict[str, Any]]


def collect(name: str, goal: float, run_dirs: list[Path], label: str = "") -> None:
    """Write data and picture, print the rows."""
    (RESULTS / "data").mkdir(parents=True, exist_ok=True)
    print("| | seed | evaluated return | training return | steps | wall-clock s |\n|---|---|---|---|---|---|")
    for run_dir in run_dirs:
        config, lines = from_toml(run_dir / "config.toml"), thinned(read_metrics(run_dir))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (RESULTS / "data" / f"{name}-{label or config.algo}-{config.seed}.jsonl").write_text(text)
        last, result = lines[-1], final_evaluation(run_dir)
        numbers = f"{last.get('return_mean', float('nan')):.4g} | {last['steps']:,} | {last['time_s']:.0f}"
        print(f"| {label or config.algo} | {config.seed} | {result} | {numbers} |")
    draw(name, goal, saved_curves(name))


def thinned(lines: Curve) -> Curve:
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


def saved_curves(name: str) -> dict[str, dict[int, Curve]]:
    """Every curve of that name in docs/results/data, by label and seed."""
    curves: dict[str, dict[int, Curve]] = defaultdict(dict)
    for path in sorted((RESULTS / "data").glob(f"{name}-*-*.jsonl")):
        label, seed = path.stem.removeprefix(name + "-").rsplit("-", 1)
        curves[label][int(seed)] = [json.loads(line) for line in path.read_text().splitlines()]
    return curves


def draw(name: str, goal: float, curves: dict[str, dict[int, Curve]]) -> None:
    """Return against steps, a panel for each label, one line a seed, the goal dotted."""
    figure, all_axes = plt.subplots(
        1, len(curves), figsize=(1.5 + 3.2 * len(curves), 3.3), sharey=True, squeeze=False, layout="tight"
    )
    for axis, (label, seeds) in zip(all_axes[0], curves.items(), strict=True):
        for seed, lines in seeds.items():
            known = [line for line in lines if "return_mean" in line]
            axis.plot([x["steps"] / 1000 for x in known], [x["return_mean"] for x in known], label=f"seed {seed}")
        axis.axhline(goal, linestyle=":", color="grey")
        axis.set(title=label, xlabel="thousand steps")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    all_axes[0][0].set_ylabel("mean return of 100 training episodes")
    figure.suptitle(name)
    figure.savefig(RESULTS / f"{name}.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("run_dirs", type=Path, nargs="+")
    parser.add_argument("--goal", type=float, required=True)
    parser.add_argument("--label", default="", help="what the runs have in common; the algorithm when left out")
    arguments = parser.parse_args()
    collect(arguments.name, arguments.goal, arguments.run_dirs, arguments.label)
