"""IMPALA's comparison of off-policy corrections (Espeholt et al. 2018, Table 2) on a task of seconds: Catch.

    python benchmarks/off_policy.py --seeds 10 --processes 2

Each arm is an advantage estimator of the learner; each setting makes the data old on purpose: the policy that acts is k
iterations behind, or half of each batch comes from replay. Nothing else differs, and nothing is asynchronous, so a run
depends on its seed alone. Writes docs/results/data/off_policy.json and off_policy.png, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.evaluation.policy import build_model
from pronghorn.evaluation.scores import bootstrap_iqm, interquartile_mean
from pronghorn.models.actor_critic import ActorCritic
from pronghorn.training.learner import Learner
from pronghorn.training.store import Batch, Replay
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec

RESULTS = Path(__file__).parents[1] / "docs" / "results"
ARMS = {"vtrace": "V-trace", "one_step": "1-step", "epsilon": "ε-correction", "none": "no correction"}
ROWS, COLUMNS = 10, 5
SPEC = EnvSpec({"board": LeafSpec((ROWS * COLUMNS,), "float32", "vector")}, ActionSpec((3,)))
LENGTH, NUM_ENVS, ITERATIONS, EVALUATIONS = 20, 32, 300, 15


@dataclass(frozen=True)
class Setting:
    """How the data of a run are made old."""

    name: str
    delay: int = 0  # iterations between the policy that acts and the one that learns
    replay: float = 0.0  # share of each batch


SETTINGS = (
    Setting("on-policy"),
    Setting("weights 5 iterations old", delay=5),
    Setting("weights 20 iterations old", delay=20),
    Setting("weights 50 iterations old", delay=50),
    Setting("half from replay", replay=0.5),
    Setting("20 old and half from replay", delay=20, replay=0.5),
)


class Catch:
    """N boards at once: a ball falls from a random column, the paddle below must be under it. +1 or -1 at the end.

    Osband et al. 2020 (bsuite), Mnih et al. 2014. Nine steps an episode; a new one starts at once.
    """

    def __init__(self, num: int, rng: np.random.Generator) -> None:
        self.num, self.rng = num, rng
        self.row, self.ball, self.paddle = (np.zeros(num, np.int64) for _ in range(3))
        self._start(np.arange(num))

    def _start(self, which: NDArray[np.int64]) -> None:
        self.row[which], self.paddle[which] = 0, COLUMNS // 2
        self.ball[which] = self.rng.integers(COLUMNS, size=len(which))

    def boards(self) -> NDArray[np.float32]:
        """[N, ROWS * COLUMNS]."""
        boards = np.zeros((self.num, ROWS, COLUMNS), np.float32)
        n = np.arange(self.num)
        boards[n, self.row, self.ball] = boards[n, ROWS - 1, self.paddle] = 1.0
        return boards.reshape(self.num, -1)

    def step(self, actions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Rewards and ends [N]; where an episode ended the board is that of the next one."""
        self.paddle = np.clip(self.paddle + actions - 1, 0, COLUMNS - 1)
        self.row += 1
        over = self.row == ROWS - 1
        reward = np.where(over, np.where(self.paddle == self.ball, 1.0, -1.0), 0.0).astype(np.float32)
        self._start(np.flatnonzero(over))
        return reward, over


@torch.no_grad()
def collect(actor: ActorCritic, env: Catch, version: int, lag: int, generator: torch.Generator) -> Batch:
    """One unroll of every board under `actor`."""
    board, rows = env.boards(), []
    empty, first = torch.zeros(env.num, 0), np.zeros(env.num, np.bool_)
    boards, firsts = [board], [first]
    for _ in range(LENGTH):
        obs = {"board": torch.from_numpy(board)}
        out = actor({"board": obs["board"].unsqueeze(0)}, empty, torch.from_numpy(first).unsqueeze(0))
        distribution = actor.distribution(out.params[0], obs)
        discrete, continuous = distribution.sample(generator)
        reward, over = env.step(discrete[:, 0].numpy())
        log_prob = distribution.log_prob(discrete, continuous)
        value = actor.denormalize_value(out.values[0])
        rows.append((discrete, continuous, log_prob, value, torch.from_numpy(reward), torch.from_numpy(over)))
        board, first = env.boards(), over
        boards.append(board)
        firsts.append(first)
    names = ("discrete", "continuous", "log_prob", "value", "reward", "terminated")
    steps = {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    steps |= {
        "first": torch.from_numpy(np.stack(firsts)),
        "truncated": torch.zeros_like(steps["terminated"]),
        "truncation_value": torch.zeros_like(steps["reward"]),
        "version": torch.full_like(steps["terminated"], version - lag, dtype=torch.int64),
    }
    lags = np.full((LENGTH, env.num), lag, np.int64)
    return Batch({"board": torch.from_numpy(np.stack(boards))}, steps, empty, lags)


@torch.no_grad()
def evaluate(model: ActorCritic, seed: int, num: int = 500) -> float:
    """Mean return of the target policy over `num` episodes of its own."""
    batch = collect(model, Catch(num, np.random.default_rng([seed, 9])), 0, 0, torch.Generator().manual_seed(seed))
    over = batch.steps["terminated"]
    return float(batch.steps["reward"][over].mean())


def run(arm: str, setting: Setting, seed: int, values: dict[str, Any]) -> dict[str, Any]:
    """One run: the target policy's return at equal distances."""
    config = resolve(
        replace(
            Config(env="catch:catch"),
            {
                "algo": "impala", "learner.advantage": arm, "learner.unroll_length": LENGTH, "seed": seed,
                "learner.batch_unrolls": NUM_ENVS, "env.workers": 1, "env.envs_per_worker": NUM_ENVS,
                "model.normalize_obs": False, "learner.gamma": 0.95,
                "learner.lambda_": 1.0, "learner.exploration_coef": 0.01, **values,
            },
        ),
        SPEC,
    )  # fmt: skip
    torch.manual_seed(seed)
    model, actor = build_model(config.model, SPEC), build_model(config.model, SPEC)
    learner = Learner(config, model)
    replay = Replay(config.learner.replay_unrolls, setting.replay, seed) if setting.replay else None
    env, generator = Catch(NUM_ENVS, np.random.default_rng([seed, 1])), torch.Generator().manual_seed(seed)
    past: deque[dict[str, torch.Tensor]] = deque(maxlen=setting.delay + 1)
    curve = []
    for i in range(ITERATIONS):
        past.append({k: v.clone() for k, v in model.state_dict().items()})
        actor.load_state_dict(past[0])
        batch = collect(actor, env, i, len(past) - 1, generator)
        learner.iterate(batch if replay is None else replay.mix(batch, i))
        if (i + 1) % (ITERATIONS // EVALUATIONS) == 0:
            curve.append(evaluate(model, seed + 1000 * i))
    return {"arm": arm, "setting": setting.name, "seed": seed, "curve": curve}


def _job(job: tuple[str, Setting, int, dict[str, Any]]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return run(*job)


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Interquartile mean over seeds of the mean return of the last third of each run, with its 95 % interval."""
    table = []
    for setting in SETTINGS:
        for arm in ARMS:
            curves = np.array([r["curve"] for r in runs if r["arm"] == arm and r["setting"] == setting.name])
            if len(curves):
                late = curves[:, -EVALUATIONS // 3 :].mean(1)
                low, high = bootstrap_iqm(late)
                row = {"setting": setting.name, "arm": arm, "iqm": interquartile_mean(late), "low": low, "high": high}
                table.append(row | {"worst": float(late.min()), "seeds": len(late)})
    return table


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Interquartile mean and interval of every arm against samples, one panel a setting."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6), sharex=True, sharey=True)
    x = np.arange(1, EVALUATIONS + 1) * (ITERATIONS // EVALUATIONS) * LENGTH * NUM_ENVS / 1000
    for axis, setting in zip(axes.flat, SETTINGS, strict=True):
        for arm, label in ARMS.items():
            curves = np.array([r["curve"] for r in runs if r["arm"] == arm and r["setting"] == setting.name])
            if len(curves):
                middle = [interquartile_mean(column) for column in curves.T]
                ends = np.array([bootstrap_iqm(column) for column in curves.T])
                axis.plot(x, middle, label=label)
                axis.fill_between(x, ends[:, 0], ends[:, 1], alpha=0.15)
        axis.set_title(setting.name, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    figure.supxlabel("thousand fresh steps")
    figure.supylabel("return of the target policy")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--settings", type=int, nargs="*", help="numbers of the settings, all without")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    start = time.monotonic()
    settings = SETTINGS if args.settings is None else [SETTINGS[i] for i in args.settings]
    jobs = [(arm, s, seed, {"learner.lr": args.lr}) for seed in range(args.seeds) for s in settings for arm in ARMS]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        runs = list(pool.imap_unordered(_job, jobs))
    runs.sort(key=lambda r: (r["setting"], r["arm"], r["seed"]))
    table = summarize(runs)
    (args.out / "data").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"lr": args.lr, "table": table, "runs": runs}, indent=None)
    (args.out / "data" / "off_policy.json").write_text(text + "\n")
    draw(runs, args.out / "off_policy.png")
    print("| setting | arm | return, last third (IQM) | 95 % interval | worst seed |\n|---|---|---|---|---|")
    for row in table:
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        print(f"| {row['setting']} | {ARMS[row['arm']]} | {row['iqm']:.3f} | {interval} | {row['worst']:.3f} |")
    print(f"\n{len(runs)} runs in {time.monotonic() - start:.0f} s on {args.processes} processes")


if __name__ == "__main__":
    main()
