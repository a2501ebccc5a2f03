"""Sample Factory's question of the duel (Petrenko et al. 2020, §4.3): who wins, self-play or training against the bot?

    python benchmarks/duel_self_play.py --out runs/duel --frames 6000000 --lanes 2

trains one agent by self-play in doom:duel and one against the scripted bot in doom:duel_bots, on one map, with one
network and equal frames (goes on where it was stopped). Then 100 matches of one against the other, 100 of each against
the bot, and 102 of each against three earlier selves of the first. Prints wins / draws / losses as the paper does
(there 78 / 19 / 3 for self-play), and keeps them in docs/results/data/duel.json.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

import runs
from collect_results import RESULTS
from pronghorn.config import Config
from pronghorn.envs.registry import make_pool
from pronghorn.evaluation.at_rows import PolicyAtRows
from pronghorn.evaluation.match import match_config, play_matches
from pronghorn.evaluation.players import load_player
from pronghorn.evaluation.policy import Policy, load
from pronghorn.training.checkpoint import list_checkpoints, snapshot_names

SECONDS = 60  # of a match
COMMON = ("--env.args", "timeout_tics", str(35 * SECONDS), "--model.core-size", "256", "--model.conv-features", "256",
          "--learner.batch-unrolls", "32", "--env.step-timeout-s", "600")  # patient where other work has the cores
ARMS = {
    "self_play": ("doom:duel", "--env.workers", "8", "--env.envs-per-worker", "1", "--env.groups", "1",
                  "--selfplay.self-weight", "0.7", "--selfplay.snapshot-weight", "0.3"),
    "bots": ("doom:duel_bots", "--env.workers", "16", "--env.envs-per-worker", "1", "--env.groups", "1"),
}  # fmt: skip  # as many agents at a time in both
PAST_SELVES = 3
ENVS = 8


def train(arm: str, frames: int, folder: Path) -> None:
    """One run, unless it was made before. SystemExit: it did not reach its frames, so there is nothing to compare."""
    every = ("--selfplay.add-every-steps", str(frames // 40)) if arm == "self_play" else ()
    if not runs.train(folder / arm, *ARMS[arm], *every, *COMMON, "--frames", str(frames), go_on=True):
        raise SystemExit(f"{arm} ended before {frames:,} frames: start the script again to go on, or ask for fewer")


def against_bot(policy: Policy, matches: int, seed: int = 3) -> dict[str, int]:
    """Wins, draws and losses in whole matches against the scripted bot; every environment plays an equal share."""
    env = replace(policy.config.env, id="doom:duel_bots", workers=ENVS, envs_per_worker=1, groups=1)
    pool = make_pool(replace(policy.config, env=env), seed=seed, ordered=False, evaluation=True)
    left, found = np.full(pool.num_rows, matches // pool.num_rows), Counter[float]()
    try:
        policy.seed(seed)
        player = PolicyAtRows(policy, pool, deterministic=False)
        while left.any():
            ready = pool.recv(1.0)
            if ready is None:
                continue
            for record in ready.records:
                if left[record["row"]] > 0:
                    left[record["row"]] -= 1
                    found[record["outcome"]] += 1
            player.observe(ready)
            pool.send(*player.answer(ready))
    finally:
        pool.close()
    return {"wins": found[1.0], "draws": found[0.0], "losses": found[-1.0]}


def head_to_head(first: str, second: str, config: Config, games: int) -> dict[str, int]:
    players = [load_player(first), load_player(second)]
    pair = play_matches(players, config, games=games, seed=1, num_envs=ENVS).pairs()[0]
    return {"wins": pair.wins, "draws": pair.draws, "losses": pair.losses}


def past_selves(run: Path) -> list[str]:
    """Names of snapshots, evenly taken from the untrained one on."""
    state = json.loads((list_checkpoints(run / "checkpoints")[-1] / "state.json").read_text())
    names = sorted(snapshot_names(state), key=lambda name: int(name.split("@")[1]))
    return [names[round(i * (len(names) - 1) / PAST_SELVES)] for i in range(PAST_SELVES)]


def compare(folder: Path, frames: int, games: int) -> None:
    """All matches; the table."""
    folders = {arm: str(folder / arm) for arm in ARMS}
    duel = match_config([load_player(folders["self_play"])])
    rows = {"self-play against bot-trained": head_to_head(folders["self_play"], folders["bots"], duel, games)}
    for arm, run in folders.items():
        rows[f"{arm} against the bot"] = against_bot(load(run), games)
    for name in past_selves(folder / "self_play"):
        for arm, run in folders.items():
            label = f"{arm} against self-play at {int(name.split('@')[1]):,} steps"
            past = f"{folders['self_play']}:{name}"
            rows[label] = head_to_head(run, past, duel, -(-games // PAST_SELVES))
    print("| | wins | draws | losses |\n|---|---|---|---|")
    for label, result in rows.items():
        print(f"| {label} | {result['wins']} | {result['draws']} | {result['losses']} |")
    (RESULTS / "data" / "duel.json").write_text(json.dumps({"frames": frames, "matches": rows}, indent=1) + "\n")


def main() -> None:
    parser = runs.arguments(__doc__)
    parser.add_argument("--frames", type=int, required=True, help="frames of each agent")
    parser.add_argument("--games", type=int, default=100, help="matches of each pair (100)")
    arguments = parser.parse_args()
    runs.in_lanes(lambda arm: train(arm, arguments.frames, arguments.out), ARMS, arguments.lanes)
    compare(arguments.out, arguments.frames, arguments.games)


if __name__ == "__main__":
    main()
