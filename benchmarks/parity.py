"""Whether the fast arithmetic learns as plain float32 does: return against frames, arm beside arm.

    python benchmarks/parity.py --out runs/parity --lanes 2

trains every arm with every seed for equal steps (5 seeds on Catch in pixels, 3 on doom:basic), in run directories of
their own; goes on where it was stopped. Then it draws docs/results/parity.png, keeps the curves in docs/results/data,
and prints the table. Arms:

    plain     float32, whole batches, NCHW memory: the network as PyTorch runs it when nothing is done for speed
    fast      what training does on a CPU: pieces of a batch on a thread each, channels-last
    bfloat16  the same in bfloat16, the default where the processor has instructions for it; elsewhere it is emulated,
              which gives the same numbers slowly, so that there it is only run on Catch

It measures no speed: lanes share the cores.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import runs
from collect_results import RESULTS, thinned
from pronghorn.machine import computes_bfloat16
from pronghorn.training.metrics import read_metrics

ARMS = ("plain", "fast", "bfloat16")
LAST_SHARE = 0.25  # of the steps, over which the table's mean is taken


@dataclass(frozen=True)
class Task:
    """What is played, for how many steps, with how many seeds, by which arms, with which settings."""

    name: str
    env: str
    steps: int
    seeds: int
    arms: tuple[str, ...]
    flags: tuple[str, ...] = ()


SMALL = ("--env.envs-per-worker", "8", "--model.conv-features", "128", "--model.core-size", "128")
TASKS = (
    Task("doom_basic", "doom:basic", 150_000, 3, ARMS if computes_bfloat16("cpu") else ARMS[:2]),
    Task("catch", f"{Path(__file__).with_name('catch.py')}:Catch", 40_000, 5, ARMS, SMALL),
)


# ---------------------------------------------------------------- one run


def run_plainly() -> None:
    """Undo what is done for speed, in this process."""
    from unittest import mock

    from pronghorn.models import encoders
    from pronghorn.training import learner

    plain_conv = encoders.conv2d
    mock.patch.object(encoders, "_to_channels_last", return_value=None).start()
    mock.patch.object(encoders, "conv2d", lambda x, *rest: plain_conv(x.contiguous(), *rest)).start()
    mock.patch.object(learner, "Pieces", return_value=None).start()


def train(task: Task, arm: str, seed: int, folder: Path) -> None:
    """One run in a process of its own, unless it was made before."""
    runs.train(
        folder / f"{task.name}-{arm}-{seed}", task.env, *task.flags, "--steps", str(task.steps), "--seed", str(seed),
        "--precision", "bfloat16" if arm == "bfloat16" else "float32", "--log.every-s", "1",
        program=(sys.executable, __file__, "--train", arm),
    )  # fmt: skip


# ---------------------------------------------------------------- what came out


def curve(folder: Path, task: Task, arm: str, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Steps and mean training returns of a run; kept in docs/results/data."""
    lines = thinned(read_metrics(folder / f"{task.name}-{arm}-{seed}"))
    kept = RESULTS / "data" / f"parity-{task.name}-{arm}-{seed}.jsonl"
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = [line for line in lines if "return_mean" in line]
    return np.array([x["steps"] for x in known]), np.array([x["return_mean"] for x in known])


def report(folder: Path) -> None:
    """Picture and table of all runs."""
    figure, axes = plt.subplots(1, len(TASKS), figsize=(5 * len(TASKS), 3.6), layout="tight")
    print(f"| task | arm | return over the last {LAST_SHARE:.0%} of the steps, each seed | mean ± standard error |")
    print("|---|---|---|---|")
    for axis, task in zip(axes, TASKS, strict=True):
        grid = np.linspace(0.05, 1.0, 60) * task.steps
        for arm in task.arms:
            curves = np.array([np.interp(grid, *curve(folder, task, arm, seed)) for seed in range(1, task.seeds + 1)])
            runs.draw_arm(axis, grid / 1000, curves, arm)
            last = curves[:, grid >= (1.0 - LAST_SHARE) * task.steps].mean(1)
            error = last.std(ddof=1) / len(last) ** 0.5
            each = ", ".join(f"{x:.3f}" for x in last)
            print(f"| {task.name} | {arm} | {each} | {last.mean():.3f} ± {error:.3f} |")
        runs.finish(axis, f"{task.name}, {task.seeds} seeds", "thousand steps", "mean training return")
    figure.savefig(RESULTS / "parity.png", dpi=80)


def main() -> None:
    arguments = runs.arguments(__doc__).parse_args()
    each = [(task, arm, s) for task in TASKS for s in range(1, task.seeds + 1) for arm in task.arms]
    runs.in_lanes(lambda run: train(*run, arguments.out), each, arguments.lanes)
    report(arguments.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        from pronghorn.cli import main as pronghorn

        if sys.argv[2] == "plain":
            run_plainly()
        pronghorn(sys.argv[3:])
    else:
        main()
