"""Does population-based training beat the same compute spent on the settings that it starts from, where these are bad?

    python benchmarks/pbt.py --out runs/pbt --lanes 2

trains every arm with every seed for equal steps in all (goes on where it was stopped), evaluates what came out, draws
docs/results/pbt.png, keeps the curves in docs/results/data, and prints the table. CartPole-v1, from an entropy bonus
of 2, which keeps the policy close to random (the default is 0.01). Arms:

    pbt     4 policies that are compared, copied and mutated
    fixed   4 policies with the settings of the start, never copied or changed: the best of 4 tries
    single  one policy with those settings, and all the steps
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

import runs
from collect_results import RESULTS
from pronghorn.training.metrics import read_lines, read_metrics

STEPS = 600_000
BAD = ("--learner.exploration-coef", "2")
ROWS = ("--env.workers", "1", "--env.envs-per-worker", "128", "--learner.unroll-length", "32",
        "--learner.batch-unrolls", "64", "--learner.minibatches", "4", "--log.every-s", "2")  # fmt: skip
POPULATION = (
    "--population.members", "4", "--population.burn-in-frames", "12000", "--population.period-frames", "12000",
    "--population.mutable", "exploration_coef", "--population.ranges", "exploration_coef", "1e-4..10",
    "--population.perturb", "1.5", "4.0", "--population.mutation-rate", "0.7",
)  # fmt: skip
ARMS: dict[str, tuple[str, ...]] = {
    "pbt": POPULATION,
    "fixed": (*POPULATION, "--population.mutation-rate", "0", "--population.gap-absolute", "1e9"),
    "single": (),
}


def train(arm: str, seed: int, folder: Path) -> None:
    """One run, unless it was made before, and its evaluation."""
    run = folder / f"{arm}-{seed}"
    runs.train(run, "gym:CartPole-v1", *BAD, *ROWS, *ARMS[arm], "--steps", str(STEPS), "--seed", str(seed))
    if not list(run.glob("eval/*.json")):
        command = [*runs.PRONGHORN, "eval", str(run), "--episodes", "100"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def curve(run: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Steps of the whole run, and the mean training return of the best policy."""
    points = []
    for line in read_metrics(run):
        means = [v for k, v in line.items() if k.startswith("policy/") and k.endswith("/return_mean")]
        if means or "return_mean" in line:
            points.append((line["steps"], max(means or [line["return_mean"]])))
    steps, returns = np.array(points).T
    return steps, returns


def evaluated(run: Path) -> tuple[float, float]:
    """Mean return and standard error of what came out: of a population, of its best policy."""
    record = json.loads(next(run.glob("eval/*.json")).read_text())
    return record["mean"], record["stderr"]


def schedule(run: Path) -> str:
    """Range of the entropy bonuses that the members ended with."""
    lines = read_lines(run / "population.jsonl")
    last = [line["hyper"]["exploration_coef"] for line in lines if line["round"] == lines[-1]["round"]]
    return f"{min(last):.1g} to {max(last):.1g}"


def report(folder: Path, seeds: int) -> None:
    """Picture and table of all runs."""
    grid = np.linspace(0.02, 1.0, 50) * STEPS
    figure, axis = plt.subplots(figsize=(6, 3.8), layout="tight")
    print("| arm | evaluated return of the best policy, each seed | entropy bonus at the end |\n|---|---|---|")
    for arm in ARMS:
        folders = [folder / f"{arm}-{seed}" for seed in range(1, seeds + 1)]
        curves = np.array([np.interp(grid, *curve(run)) for run in folders])
        kept = {"steps": grid.round().tolist(), "returns": curves.round(2).tolist()}
        (RESULTS / "data" / f"pbt-{arm}.json").write_text(json.dumps(kept) + "\n")
        runs.draw_arm(axis, grid / 1e6, curves, arm)
        scores = ", ".join(f"{mean:.0f} ± {error:.0f}" for mean, error in map(evaluated, folders))
        rates = "2" if arm != "pbt" else "; ".join(map(schedule, folders))
        print(f"| {arm} | {scores} | {rates} |")
    runs.finish(axis, f"CartPole-v1 from bad settings, {seeds} seeds", "million steps of all policies together",
                "mean training return of the best policy")  # fmt: skip
    figure.savefig(RESULTS / "pbt.png", dpi=80)


def main() -> None:
    parser = runs.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm (3)")
    arguments = parser.parse_args()
    each = [(arm, seed) for seed in range(1, arguments.seeds + 1) for arm in ARMS]
    runs.in_lanes(lambda run: train(*run, arguments.out), each, arguments.lanes)
    report(arguments.out, arguments.seeds)


if __name__ == "__main__":
    main()
