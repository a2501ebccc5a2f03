"""Whole runs of several policies, with real worker processes: self-play, populations, resumes, accidents."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.config import Config, replace
from pronghorn.errors import CheckpointError, ConfigError, PronghornError, UsageError
from pronghorn.evaluation.evaluate import evaluate
from pronghorn.evaluation.policy import load
from pronghorn.population.pbt import lineage
from pronghorn.training.checkpoint import load_latest, params_sha
from pronghorn.training.member import Member
from pronghorn.training.metrics import read_lines, read_metrics
from pronghorn.training.trainer import train
from running import children_of, env, wait_for_metric

ROOT = Path(__file__).parents[2]
TAG = f"{ROOT / 'examples' / 'tag.py'}:Tag"
STRAIGHT = f"{ROOT / 'examples' / 'tag.py'}:straight"
SMALL: dict[str, Any] = {
    "env.workers": 2, "env.envs_per_worker": 4, "learner.unroll_length": 8, "learner.batch_unrolls": 8,
    "learner.epochs": 1, "learner.minibatches": 1, "learner.lr": 3e-3, "threads": 1, "log.every_s": 0.5,
    "model.mlp_layers": (16,), "model.core_size": 16, "log.live": "off", "log.tensorboard": False, "env.pin": "off",
}  # fmt: skip
LEAGUE: dict[str, Any] = {
    "model.core": "gru", "population.members": 2, "population.burn_in_frames": 1_500,
    "population.period_frames": 500, "population.objective": "win_rate", "population.mutation_rate": 1.0,
    "population.gap_relative": 0.0, "selfplay.self_weight": 0.2, "selfplay.member_weight": 0.3,
    "selfplay.snapshot_weight": 0.3, "selfplay.script_weight": 0.2, "selfplay.scripts": (STRAIGHT,),
    "selfplay.size": 5, "selfplay.add_every_steps": 800, "selfplay.seat_matches": 4,
}  # fmt: skip


def config(run_dir: Path, name: str = env("Match"), **values: Any) -> Config:
    built: Config = replace(Config(env=name, run_dir=str(run_dir)), SMALL | values)
    return built


def decisions(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / "population.jsonl")


def shas(run_dir: Path) -> dict[str, str]:
    """Of the frozen policies of the newest checkpoint."""
    saved = load_latest(run_dir / "checkpoints", snapshots=True)
    return {name: params_sha(frozen.weights) for name, frozen in saved.snapshots.items()}


# ------------------------------------------------------------------------------------------ self-play


@pytest.mark.parametrize("game", [TAG, env("Bits", "turn_games.py")], ids=["at once", "in turns"])
def test_a_policy_plays_itself_its_past_and_a_script_and_learns_from_its_own_moves_only(
    game: str, tmp_path: Path
) -> None:
    if "turn_games" in game:
        pytest.importorskip("pettingzoo")
    values = {name: value for name, value in LEAGUE.items() if name.startswith(("model", "selfplay"))}
    values |= {"selfplay.member_weight": 0.0, "selfplay.scripts": ("random",), "selfplay.size": 3,
               "selfplay.add_every_steps": 500}  # fmt: skip
    result = train(config(tmp_path / "run", game, steps=4_000, **values))
    assert (result.reason, result.exit_code) == ("steps", 0)
    lines = read_metrics(tmp_path / "run")
    last = lines[-1]
    assert (last["worker_restarts"], last["unrolls_lost"], last["unrolls_voided"]) == (0, 0, 0)
    assert last["pool_size"] == 3
    assert last["policy_lag_max"] <= 16
    state = load_latest(tmp_path / "run" / "checkpoints").state
    pool = [f"{raw['member']}@{raw['steps']}" for raw in state["league"]["matchmaker"]["pool"]]
    assert list(shas(tmp_path / "run")) == pool
    assert len(set(shas(tmp_path / "run").values())) == 3
    if game == TAG:  # which declares who won
        rated = read_lines(tmp_path / "run" / "ratings.jsonl")[-1]["ratings"]
        assert {"member:0", "script:random", "snapshot:0@0"} <= rated.keys()
        assert sum(rating["games"] for rating in rated.values()) > 40
        assert 0.0 <= last["policy/0/win_rate"] <= 1.0
    # Sampled are decisions of the learner alone, and all but those under way have entered batches.
    assert last["steps_sampled"] - last["steps"] <= (16 + 8) * 8 + 8 * 8
    assert not (tmp_path / "run" / "population.jsonl").exists()


def test_learning_against_a_script_beats_it(tmp_path: Path) -> None:
    """Match of two sides: each names its own bit; the script names them at random, and its moves teach nothing."""
    pytest.importorskip("pettingzoo")
    values = {"selfplay.self_weight": 0.0, "selfplay.script_weight": 1.0, "selfplay.scripts": ("random",),
              "learner.gamma": 0.0}  # fmt: skip
    result = train(config(tmp_path / "run", env("Bits", "turn_games.py"), steps=6_000, **values))
    assert (result.return_mean or 0) > 6.5  # of its own rows; random: 4, best: 8


# ------------------------------------------------------------------------------------------ populations


@pytest.mark.case("PBT-01")
def test_a_good_learning_rate_wins_from_bad_ones(tmp_path: Path) -> None:
    """Member 0 has it and keeps it; the others begin with a thousandth of it, learn nothing, and become what it is."""
    values = {
        "population.members": 3, "population.burn_in_frames": 2_500, "population.period_frames": 500,
        "population.objective_episodes": 40, "population.mutation_rate": 1.0, "population.reset_rate": 0.0,
        "population.perturb": (1000.0, 1000.0), "population.mutable": ("lr",), "population.replace_fraction": 0.34,
        "population.ranges": {"lr": "1e-5..1e-2"}, "learner.lr": 1e-2, "env.envs_per_worker": 6,
    }  # fmt: skip
    result = train(config(tmp_path / "run", steps=9_000, **values))
    assert result.exit_code == 0
    lines = decisions(tmp_path / "run")
    assert [line["member"] for line in lines[:3]] == [0, 1, 2]
    assert {line["hyper"]["lr"] for line in lines if line["member"] == 0} == {1e-2}
    assert [line["hyper"]["lr"] for line in lines[1:3]] == pytest.approx([1e-5, 1e-5])  # it was at its range's end
    copies = [line for line in lines if line["donor"] is not None]
    assert copies
    assert copies[0]["donor"] == 0
    assert all(line["donor_objective"] > line["objective"] for line in copies)
    assert all(line["source"] == "live" for line in copies)
    assert lineage(lines, copies[0]["member"])[0].member == 0
    last = read_metrics(tmp_path / "run")[-1]
    assert last["policy/0/return_mean"] > 6.5  # random: 4, best: 8
    assert last[f"policy/{copies[0]['member']}/return_mean"] > 5.5  # by weights that it did not learn itself
    assert last["unrolls_voided"] > 0  # of those that were replaced, in flight
    assert last["population_round"] >= 1
    saved = load_latest(tmp_path / "run" / "checkpoints")
    assert [policy.state["lineage"] for policy in saved.policies] == [
        sum(line["member"] == i for line in copies) for i in range(3)
    ]
    evaluation = evaluate(load(tmp_path / "run"), load(tmp_path / "run").config, episodes=10, seed=0)
    assert evaluation is not None
    assert evaluation.mean > 6.5


@pytest.mark.case("PBT-01")
def test_a_population_starts_from_the_command_line(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pronghorn", "train", env("Match"), "--run-dir", str(tmp_path / "run"),
            "--population.members", "2", "--population.burn-in-frames", "500", "--population.period-frames", "500",
            "--population.ranges", "lr", "1e-5..1e-2", "--steps", "3000", "--env.workers", "1",
            "--env.envs-per-worker", "4", "--learner.unroll-length", "8", "--learner.batch-unrolls", "4",
            "--log.live", "plain", "--log.no-tensorboard"]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "2, 2 at a time, compared by return" in done.stdout + done.stderr
    assert {line["round"] for line in decisions(tmp_path / "run")} >= {0, 1}


@pytest.mark.case("PBT-09")
def test_members_that_take_turns_train_equally_long(tmp_path: Path) -> None:
    values = {"population.members": 3, "population.slots": 1, "population.burn_in_frames": 1_000,
              "population.period_frames": 1_000}  # fmt: skip
    train(config(tmp_path / "run", steps=7_500, **values))
    saved = load_latest(tmp_path / "run" / "checkpoints")
    steps = [policy.state["learner"]["steps"] for policy in saved.policies]
    assert sum(steps) >= 7_500
    assert min(steps) >= 2_000
    assert max(steps) <= 4_000
    rounds = [line for line in decisions(tmp_path / "run") if line["round"] > 0]
    assert {line["round"] for line in rounds} >= {1, 2}
    for line in rounds:  # compared at the end of the round; what was under way then is less than another one
        assert line["frames"] <= line["member_frames"] < line["frames"] + 1_000


# ------------------------------------------------------------------------------------------ both, and what comes of it


@pytest.fixture(scope="module")
def league_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two members who play each other, their past and a script."""
    torch.set_num_threads(1)
    run_dir = tmp_path_factory.mktemp("league") / "run"
    result = train(config(run_dir, TAG, steps=6_000, **LEAGUE))
    assert result.exit_code == 0
    return run_dir


def test_a_league_writes_all_that_became_of_its_members(league_run: Path) -> None:
    last = read_metrics(league_run)[-1]
    assert last["policy/0/steps"] + last["policy/1/steps"] == last["steps"]
    assert min(last["policy/0/steps"], last["policy/1/steps"]) > 2_000
    assert last["population_round"] >= 1
    lines = decisions(league_run)
    assert [line["round"] for line in lines] == sorted(line["round"] for line in lines)
    assert len(lines) == 2 * (1 + last["population_round"])
    assert all(0.0 <= line["objective"] <= 1.0 for line in lines if line["round"])
    rated = read_lines(league_run / "ratings.jsonl")[-1]
    assert {"member:0", "member:1", f"script:{STRAIGHT}"} <= rated["ratings"].keys()
    assert len(rated["pool"]) == 5
    copies = sum(line["donor"] is not None for line in lines)
    assert sum("#" in name for name in rated["ratings"]) == copies
    assert "policies: 2, 2 at a time, compared by win_rate" in (league_run / "log.txt").read_text()


def test_a_league_goes_on_where_it_was(league_run: Path, tmp_path: Path) -> None:
    """Its round, pool and ratings, its frozen policies bit by bit, and the lines that belong to the checkpoint."""
    run_dir = tmp_path / "run"
    shutil.copytree(league_run, run_dir)
    before, state = shas(run_dir), load_latest(run_dir / "checkpoints").state["league"]
    kept, rounds = decisions(run_dir), state["pbt"]["round"]
    with open(run_dir / "population.jsonl", "a") as file:  # of a round that no checkpoint knows
        file.write(json.dumps(kept[-1] | {"round": rounds + 1}) + "\n")
    result = train(config(run_dir, TAG, steps=6_800, **LEAGUE), resume=True)
    assert result.steps >= 6_800
    after = shas(run_dir)
    common = before.keys() & after.keys()
    assert common
    assert {name: after[name] for name in common} == {name: before[name] for name in common}
    now = load_latest(run_dir / "checkpoints").state["league"]
    assert now["pbt"]["round"] >= rounds
    assert now["pbt"]["ranges"] == state["pbt"]["ranges"]
    lines = decisions(run_dir)
    assert lines[: len(kept)] == kept
    assert len(lines) == 2 * (1 + now["pbt"]["round"])
    games = [sum(sum(game[2:]) for game in one["ratings"]["games"]) for one in (state, now)]
    assert games[1] > games[0]
    assert set(state["ratings"]["parents"]) <= set(now["ratings"]["parents"])
    steps = [line["steps"] for line in read_metrics(run_dir)]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"population.members": 3}, r"population\.members = 3: cannot change when a run is resumed \(it was 2\)"),
        ({"population.mutable": ("lr",)}, r"population\.mutable .*cannot change"),
        ({"selfplay.line_up": 2}, r"selfplay\.line_up = 2: cannot change"),
        ({"learner.lr": 0.1}, r"learner\.lr = 0\.1: was left to the population"),
    ],
    ids=str,
)
def test_a_resume_refuses_what_would_be_another_run_and_changes_no_file(
    values: dict[str, Any], message: str, league_run: Path
) -> None:
    def contents() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(league_run.rglob("*")) if p.is_file()}

    before = contents()
    with pytest.raises(ConfigError, match=message):
        train(config(league_run, TAG, steps=99_000, **(LEAGUE | values)), resume=True)
    assert contents() == before


def test_each_policy_of_a_league_can_be_loaded_by_its_name(league_run: Path) -> None:
    saved = load_latest(league_run / "checkpoints", snapshots=True)
    for index, policy in enumerate(saved.policies):
        loaded = load(league_run, policy=index)
        assert params_sha(loaded.model.state_dict()) == params_sha(policy.weights) == policy.state["params_sha"]
        assert loaded.checkpoint.endswith(f":{index}")
    leader = load(league_run)
    assert params_sha(leader.model.state_dict()) == saved.policies[saved.state["leader"]].state["params_sha"]
    name, frozen = next(iter(saved.snapshots.items()))
    assert params_sha(load(league_run, snapshot=name).model.state_dict()) == params_sha(frozen.weights)
    with pytest.raises(CheckpointError, match="holds no policy 2: it has 0 to 1"):
        load(league_run, policy=2)
    with pytest.raises(CheckpointError, match=f"holds no snapshot '0@7'. It holds: .*{name}"):
        load(league_run, snapshot="0@7")
    with pytest.raises(UsageError, match="name two policies"):
        load(league_run, policy=0, snapshot=name)


def test_policies_of_a_league_are_evaluated_and_play_each_other_by_name(league_run: Path) -> None:
    name = next(iter(load_latest(league_run / "checkpoints", snapshots=True).snapshots))
    argv = [sys.executable, "-m", "pronghorn"]
    done = subprocess.run(
        [*argv, "eval", f"{league_run}:1", "--episodes", "6", "--json"], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["episodes"] == 6
    done = subprocess.run(
        [*argv, "match", f"{league_run}:0", f"{league_run}:{name}", "--games", "6", "--json"], capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (pair,) = json.loads(done.stdout)["pairs"]
    assert (pair["players"], pair["games"]) == (["run:0", f"run:{name}"], 6)


# ------------------------------------------------------------------------------------------ accidents


@pytest.mark.case("FLT-05")
def test_a_worker_killed_in_the_middle_of_its_games_is_replaced_and_the_league_goes_on(tmp_path: Path) -> None:
    flags = ["--selfplay.self-weight", "0.5", "--selfplay.snapshot-weight", "0.3", "--selfplay.script-weight", "0.2",
             "--selfplay.scripts", STRAIGHT, "--selfplay.add-every-steps", "500", "--log.every-s", "0.3",
             "--env.workers", "2", "--env.envs-per-worker", "4", "--log.no-tensorboard", "--model.core", "gru",
             "--learner.unroll-length", "8", "--learner.batch-unrolls", "8", "--log.live", "plain"]  # fmt: skip
    argv = [sys.executable, "-m", "pronghorn", "train", TAG, "--run-dir", str(tmp_path / "run"), *flags]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_metric(tmp_path / "run", "steps", 1_000, process)
    next(c for c in children_of(process) if "envworker/main.py" in " ".join(c.cmdline())).kill()
    wait_for_metric(tmp_path / "run", "worker_restarts", 1, process)
    wait_for_metric(tmp_path / "run", "steps", read_metrics(tmp_path / "run")[-1]["steps"] + 1_500, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    last = read_metrics(tmp_path / "run")[-1]
    assert (last["worker_restarts"], last["unrolls_voided"]) == (1, 0)
    assert last["unrolls_lost"] >= 1
    rated = read_lines(tmp_path / "run" / "ratings.jsonl")[-1]["ratings"]
    assert sum(rating["games"] for rating in rated.values()) > 20


def test_a_batch_that_is_gone_when_its_turn_comes_is_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another device's thread replaces the policy between the look and the taking."""
    monkeypatch.setattr(Member, "has_batch", lambda self: True)
    result = train(config(tmp_path / "run", steps=600, **{"population.members": 2}))
    assert (result.reason, result.updates) == ("steps", 10)


# ------------------------------------------------------------------------------------------ what is refused

SEVERAL = {"population.members": 2}
META = {"selfplay.snapshot_weight": 0.2}


@pytest.mark.case("PBT-08")
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("Match", SEVERAL | {"max_lag": 0}, r"max_lag = 0: must be at least 2 with several policies"),
        ("Match", SEVERAL | {"max_lag": 1}, r"max_lag = 1: must be at least 2"),
        ("Match", SEVERAL | {"algo": "ppo"}, r"max_lag = 0: must be at least 2"),
        ("Match", SEVERAL | {"deterministic": True}, r"deterministic = True: is not possible with several policies"),
        ("Tag", META | {"max_lag": 1}, r"max_lag = 1: must be at least 2"),
        ("Match", META, r"env\.id = .*has no several agents"),
        ("Match", {"population.members": 9}, r"environments = 8: is too few for 9 members"),
        ("Tag", {"population.members": 9}, r"environments = 8: is too few for 9 members"),
        ("Match", SEVERAL | {"population.mutable": ("epochs",)}, r"learner\.epochs = 1: is mutable"),
        ("Match", SEVERAL | {"population.mutable": ("lrr",)}, r"'lrr': names no hyper-parameter.*Did you mean 'lr'"),
        ("Match", {"population.members": 0}, r"population\.members = 0: must be at least 1"),
        ("Match", SEVERAL | {"population.slots": 3}, r"population\.slots = 3: must be 0 .* to population\.members = 2"),
        ("Match", SEVERAL | {"population.objective": "win_rate"}, r"needs matches with a declared outcome"),
        ("Tag", {"selfplay.member_weight": 0.5}, r"needs other members, and the population has 1"),
        ("Tag", {"selfplay.scripts": ("random",)}, r"must be given together"),
        ("Tag", {"selfplay.script_weight": 0.5}, r"must be given together"),
        ("Tag", META | {"selfplay.scripts": ("nobody.py:at_all",), "selfplay.script_weight": 1.0}, r"nobody\.py"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_together_are_refused_before_anything_is_written(
    name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    built = config(tmp_path / "run", TAG if name == "Tag" else env(name), steps=100, **{"env.workers": 1,
                   "env.envs_per_worker": 8} | values)  # fmt: skip
    with pytest.raises(PronghornError, match=message):
        train(built)
    assert not (tmp_path / "run").exists()
