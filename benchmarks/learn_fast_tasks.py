"""Makes the learning runs of the fast tasks, as docs/results/learning.md lists them, of each algorithm that claims one.

    python benchmarks/learn_fast_tasks.py --out runs/fast --lanes 2

trains each with its command and its limit of minutes in a run directory of its own, `--lanes` at a time, and prints a
line for each as it ends. A finished run is left alone and an unfinished one begun anew, so that the script goes on
where it was stopped. Pictures and tables are made by collect_results.py. It measures no speed: lanes share the cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

LEARNABLE = Path(__file__).parents[1] / "tests" / "learnable_envs.py"
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Run:
    """One training: the name of its directory, what it plays, the return to stop at, its other flags."""

    name: str
    env: str
    goal: float
    minutes: int
    flags: tuple[str, ...]

    def command(self, folder: Path) -> list[str]:
        """What a user would type."""
        return [
            sys.executable, "-m", "pronghorn", "train", self.env, *self.flags, "--eval.until-return", f"{self.goal:g}",
            "--eval.episodes", "100", "--minutes", str(self.minutes), "--run-dir", str(folder / self.name),
            "--log.live", "off",
        ]  # fmt: skip


def all_runs() -> Iterator[Run]:
    """In the order in which they are begun: the long ones first."""
    claims = {
        "LunarLander-v3": (200.0, ("ppo", "appo")),
        "Acrobot-v1": (-100.0, ("ppo", "appo", "a2c", "impala")),
        "CartPole-v1": (475.0, ("a2c", "impala", "ppo", "appo")),
    }
    for task, (goal, algorithms) in claims.items():
        for algo in algorithms:
            for seed in SEEDS:
                flags = ("--algo", algo, "--seed", str(seed))
                yield Run(f"{task}-{algo}-{seed}", f"gym:{task}", goal, 20, flags)
    for core in ("none", "gru"):
        for seed in SEEDS:
            flags = ("--env.args", "length", "20", "--model.core", core, "--seed", str(seed))
            yield Run(f"Recall-{core}-{seed}", f"{LEARNABLE}:Recall", 0.95, 4, flags)


def make(run: Run, folder: Path) -> str:
    """Train if that was not done; what came out, in a line."""
    log = folder / f"{run.name}.log"
    if not log.exists() or not log.read_text().startswith("reached"):
        shutil.rmtree(folder / run.name, ignore_errors=True)
        with log.open("w") as output:
            subprocess.run(run.command(folder), stdout=output, stderr=subprocess.STDOUT, check=False)
    evaluations = sorted((folder / run.name / "eval").glob("*.json"))
    means = [json.loads(path.read_text())["mean"] for path in evaluations]
    said = log.read_text().partition("\n")[0]
    return f"{run.name}: {said} | evaluations: {', '.join(f'{mean:.4g}' for mean in means) or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the run directories go")
    parser.add_argument("--lanes", type=int, default=1, help="trainings at a time (1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name holds it")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = [run for run in all_runs() if args.only in run.name]
    with ThreadPoolExecutor(args.lanes) as lanes:
        for line in lanes.map(lambda run: make(run, args.out), runs):
            print(line, flush=True)


if __name__ == "__main__":
    main()
