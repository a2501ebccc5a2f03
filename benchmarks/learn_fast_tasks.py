"""Makes the learning runs of the fast tasks, as docs/results/learning.md lists them, of each algorithm that claims one.

    python benchmarks/learn_fast_tasks.py --out runs/fast --lanes 2

trains each with its command and its limit of minutes in a run directory of its own, `--lanes` at a time, and prints a
line for each as it ends. A finished run is left alone and an unfinished one begun anew, so that the script goes on
where it was stopped. Pictures and tables are made by collect_results.py. It measures no speed: lanes share the cores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import runs

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

    def arguments(self) -> tuple[str, ...]:
        """Of `pronghorn train`."""
        return (
            self.env, *self.flags, "--eval.until-return", f"{self.goal:g}", "--eval.episodes", "100",
            "--minutes", str(self.minutes),
        )  # fmt: skip


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
    said = runs.train(folder / run.name, *run.arguments())
    evaluations = sorted((folder / run.name / "eval").glob("*.json"))
    means = [json.loads(path.read_text())["mean"] for path in evaluations]
    return f"{run.name}: {said} | evaluations: {', '.join(f'{mean:.4g}' for mean in means) or 'none'}"


def main() -> None:
    parser = runs.arguments(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name holds it")
    args = parser.parse_args()
    chosen = [run for run in all_runs() if args.only in run.name]
    runs.in_lanes(lambda run: print(make(run, args.out), flush=True), chosen, args.lanes)


if __name__ == "__main__":
    main()
