"""Board games by self-play: does it win against random, and does it get better against its own past?

    python benchmarks/self_play.py --out runs/self_play --lanes 2

trains every arm with every seed (goes on where it was stopped), plays games against uniformly random moves and a round
robin of the last policy and its past selves, draws docs/results/self_play.png, keeps the numbers in docs/results/data,
and prints the table. Arms:

    pool   every second match is against a frozen snapshot of the past
    self   both sides are always the learner; snapshots are kept only to be played against afterwards
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import runs
from collect_results import RESULTS
from pronghorn.config import Config
from pronghorn.evaluation.match import match_config, play_matches
from pronghorn.evaluation.players import load_player
from pronghorn.training.checkpoint import list_checkpoints, snapshot_names

ARMS = {"pool": ("0.5", "0.5"), "self": ("1.0", "1e-9")}
PAST_SELVES = 4  # beside the last policy
LEARNING = (
    "--learner.unroll-length", "16", "--learner.epochs", "4", "--learner.minibatches", "8", "--learner.lr", "0.0005",
    "--learner.lr-schedule", "linear", "--learner.gamma", "0.99", "--learner.lambda", "0.95",
    "--selfplay.line-up", "2", "--selfplay.seat-matches", "64",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A game, how long it is learned, and the share of games that must not be lost (or be won) against random."""

    name: str
    env: str
    steps: int
    goal: str
    arms: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @property
    def every(self) -> int:
        """Steps between two snapshots."""
        return self.steps // 20


TASKS = (
    Task("connect four", "pettingzoo:classic.connect_four_v3", 1_000_000, "95 % won", ("pool", "self"),
         ("--learner.batch-unrolls", "256", "--env.envs-per-worker", "128", "--env.image-layout", "hwc",
          "--model.conv-features", "128", "--learner.exploration-coef", "0.01")),
    Task("tic-tac-toe", "pettingzoo:classic.tictactoe_v3", 600_000, "99 % not lost", ("pool", "self"),
         ("--learner.batch-unrolls", "128", "--learner.exploration-coef", "0.03", "--model.mlp-layers", "256", "256",
          "--model.activation", "relu")),
)  # fmt: skip


def train(task: Task, arm: str, seed: int, folder: Path) -> None:
    """One run, unless it was made before."""
    itself, past = ARMS[arm]
    runs.train(
        run_of(task, arm, seed, folder), task.env, *LEARNING, *task.flags, "--steps", str(task.steps),
        "--seed", str(seed), "--selfplay.self-weight", itself, "--selfplay.snapshot-weight", past,
        "--selfplay.add-every-steps", str(task.every),
    )  # fmt: skip


def run_of(task: Task, arm: str, seed: int, folder: Path) -> Path:
    return folder / f"{task.name.replace(' ', '_')}-{arm}-{seed}"


# ---------------------------------------------------------------- games afterwards


def play(run: Path, games: int) -> dict[str, Any]:
    """The last policy against random, and a round robin with its past selves; kept beside the run."""
    kept = run / "self_play.json"
    if kept.exists():
        result: dict[str, Any] = json.loads(kept.read_text())
        return result
    last = load_player(str(run))
    config = match_config([last])
    names = past_selves(run)
    selves = [load_player(f"{run}:{name}") for name in names]
    ratings = play_matches([*selves, last], config, games=games, seed=2)
    fitted, final = ratings.fit(), ratings.players[-1]
    result = {
        "random": against_random(run, config, 16 * games, deterministic=False),
        "random_deterministic": against_random(run, config, 16 * games, deterministic=True),
        "steps": [int(name.split("@")[1]) for name in names] + [steps_of(run)],
        "elo": [fitted[player].elo for player in ratings.players],
        "stderr": [fitted[player].stderr for player in ratings.players],
        "scores": [ratings.pair(final, past).score for past in ratings.players[:-1]],
        "later_scores": later_scores(ratings),
    }
    kept.write_text(json.dumps(result))
    return result


def against_random(run: Path, config: Config, games: int, *, deterministic: bool) -> dict[str, int]:
    """Games against uniformly random moves, half of them on each side. deterministic: by most probable actions."""
    player = load_player(str(run), deterministic=deterministic)
    pair = play_matches([player, load_player("random")], config, games=games, seed=1).pairs()[0]
    return {"wins": pair.wins, "draws": pair.draws, "losses": pair.losses}


def past_selves(run: Path) -> list[str]:
    """Names of snapshots, evenly taken from the first (untrained) on."""
    state = json.loads((list_checkpoints(run / "checkpoints")[-1] / "state.json").read_text())
    names = sorted(snapshot_names(state), key=lambda name: int(name.split("@")[1]))
    return [names[round(i * (len(names) - 1) / PAST_SELVES)] for i in range(PAST_SELVES)]


def steps_of(run: Path) -> int:
    state = json.loads((list_checkpoints(run / "checkpoints")[-1] / "state.json").read_text())
    return int(state["learner"]["steps"])


def later_scores(ratings: Any) -> list[float]:
    """What each policy scores against every earlier one: below 0.5 where it was better before (a cycle)."""
    players = ratings.players
    return [ratings.pair(later, players[j]).score for i, later in enumerate(players) for j in range(i)]


# ---------------------------------------------------------------- what came out


def report(tasks: Sequence[Task], folder: Path, seeds: int, games: int) -> None:
    """Picture and table of all runs."""
    figure, axes = plt.subplots(1, len(tasks), figsize=(5 * len(tasks), 3.6), layout="tight", squeeze=False)
    heads = ("game", "arm", "seed", "against random: won / drawn / lost", "by most probable moves",
             "Elo above the first", "worst later score")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for axis, task in zip(axes[0], tasks, strict=True):
        for color, arm in zip(("C0", "C1"), task.arms, strict=False):
            for seed in range(1, seeds + 1):
                run = run_of(task, arm, seed, folder)
                result = play(run, games)
                (RESULTS / "data" / f"self_play-{run.name}.json").write_text(json.dumps(result) + "\n")
                gains = [elo - result["elo"][0] for elo in result["elo"]]
                axis.plot([s / 1000 for s in result["steps"]], gains, color=color, marker=".", alpha=0.8,
                          label=arm if seed == 1 else None)  # fmt: skip
                versus = f"{shares(result['random'])} | {shares(result['random_deterministic'])}"
                error = math.hypot(result["stderr"][0], result["stderr"][-1])
                print(f"| {task.name} | {arm} | {seed} | {versus} | {gains[-1]:.0f} ± {error:.0f} "
                      f"| {min(result['later_scores']):.2f} |")  # fmt: skip
        runs.finish(axis, f"{task.name}, {seeds} seeds", "thousand steps", "Elo above the first policy")
    figure.savefig(RESULTS / "self_play.png", dpi=80)


def shares(counts: dict[str, int]) -> str:
    """Wins / draws / losses in percent."""
    return " / ".join(f"{100 * counts[k] / sum(counts.values()):.1f} %" for k in ("wins", "draws", "losses"))


def main() -> None:
    parser = runs.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm (3)")
    parser.add_argument("--games", type=int, default=60, help="games of each pair of past selves (60)")
    parser.add_argument("--only", choices=[task.name for task in TASKS], help="one game")
    arguments = parser.parse_args()
    tasks = [task for task in TASKS if arguments.only in (None, task.name)]
    each = [(task, arm, s) for task in tasks for s in range(1, arguments.seeds + 1) for arm in task.arms]
    runs.in_lanes(lambda run: train(*run, arguments.out), each, arguments.lanes)
    report(tasks, arguments.out, arguments.seeds, arguments.games)


if __name__ == "__main__":
    main()
