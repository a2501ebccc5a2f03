"""Runs with a policy for each kind of agents: learning, checkpoints, resume, evaluation, loading, what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn import cli
from pronghorn.config import Config, replace
from pronghorn.errors import CheckpointError, ConfigError, EnvError, UsageError
from pronghorn.evaluation.players import load_player
from pronghorn.evaluation.policy import Policies, from_weights, load, load_checkpoint, load_named
from pronghorn.settings_file import from_toml
from pronghorn.spec_file import load_spec
from pronghorn.training.metrics import read_metrics
from pronghorn.training.trainer import Result, train
from pronghorn.types import ActionSpec, EnvSpec
from running import env
from unlike_games import seen

SMALL: dict[str, Any] = {
    "env.workers": 1, "env.envs_per_worker": 16, "env.pin": "off", "env.policies": "by_spaces", "threads": 1,
    "learner.unroll_length": 16, "learner.batch_unrolls": 8, "learner.epochs": 2, "learner.minibatches": 1,
    "learner.lr": 1e-2, "learner.gamma": 0.5, "model.mlp_layers": (16,), "model.core_size": 16,
    "log.live": "off", "log.tensorboard": False,
}  # fmt: skip


def run(run_dir: Path, name: str, *, resume: bool = False, **values: Any) -> Result:
    config: Config = replace(Config(env=env(name, "unlike_games.py"), run_dir=str(run_dir)), SMALL | values)
    return train(config, resume=resume)


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Field that has learned, and was evaluated meanwhile. Tests do not change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "field"
    run(run_dir, "Field", steps=16_000, **{"eval.every_s": 0.05, "eval.episodes": 3, "log.every_s": 0.0})
    return run_dir


@pytest.mark.case("MAS-13")
@pytest.mark.timeout(120)
def test_each_kind_learns_its_own_right_answer(field: Path) -> None:
    """Random policies get 4. A hare that answers as a wolf does gets 0, and one that stays ends the run."""
    last = read_metrics(field)[-1]
    assert last["policy/0/return_mean"] > 7.0
    assert last["policy/1/return_mean"] > 7.0
    assert last["episode/return/hare"] == pytest.approx(last["policy/1/return_mean"])
    assert last["steps"] == last["policy/0/steps"] + last["policy/1/steps"]
    assert last["policy/0/steps"] == pytest.approx(2 * last["policy/1/steps"], rel=0.2)  # two wolves, one hare
    log = (field / "log.txt").read_text()
    assert "policy 0 plays wolf_0, wolf_1\n" in log
    assert "policy 1 plays hare\n" in log


@pytest.mark.timeout(120)
def test_in_turns_each_kind_learns_its_own_right_answer(tmp_path: Path) -> None:
    run(tmp_path / "run", "Talk", steps=5_000, **{"log.every_s": 0.0})
    last = read_metrics(tmp_path / "run")[-1]
    assert last["policy/0/return_mean"] > 6.5
    assert last["policy/1/return_mean"] > 6.5


@pytest.mark.timeout(60)
def test_a_loaded_policy_takes_its_agents_own_observations(field: Path) -> None:
    """And gives their own actions, by the environment's own numbers."""
    wolf, hare = load(field, policy=0), load(field, policy=1)
    assert (wolf.spec.agents, hare.spec.agents) == (("wolf_0", "wolf_1"), ("hare",))
    assert [wolf.act(seen("wolf_0", bit), deterministic=True)[0] for bit in (0, 1)] == [0, 1]
    assert [hare.act(seen("hare", bit), deterministic=True)[0] for bit in (0, 1)] == [2, 1]
    with pytest.raises(UsageError, match=r"0 plays wolf_0, wolf_1; 1 plays hare. Say which: policy=0"):
        load(field)
    with pytest.raises(CheckpointError, match="holds no policy 2: it has 0 to 1"):
        load(field, policy=2)
    with pytest.raises(CheckpointError, match="holds no snapshot"):
        load(field, snapshot="0@1")


@pytest.mark.timeout(120)
def test_all_policies_are_evaluated_together(field: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["eval", str(field), "--episodes", "12", "--random", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["episodes"] == 12
    assert result["mean"] > 7.0
    assert result["random_mean"] < 6.0  # masks allow two actions of each kind: 4 on average
    with pytest.raises(UsageError, match=r"field:1 plays some of the agents only .* Name the run, .*field\."):
        cli.run(["eval", f"{field}:1"])


@pytest.mark.timeout(60)
def test_evaluation_beside_training_keeps_the_best_of_all_policies(field: Path) -> None:
    best = load_named(str(field), best=True)
    assert isinstance(best, Policies)
    assert [policy.model.policy_head.out_features for policy in best.policies] == [2, 3]
    assert load(field, policy=1, best=True).model.policy_head.out_features == 3
    assert list((field / "eval").glob("*.json"))


@pytest.mark.timeout(60)
def test_a_video_shows_all_agents(field: Path, tmp_path: Path) -> None:
    assert cli.run(["record", str(field), "--out", str(tmp_path / "film.mp4"), "--seconds", "1"]) == 0
    assert (tmp_path / "film.mp4").stat().st_size > 0


@pytest.mark.timeout(120)
def test_agents_with_nothing_in_common_train_side_by_side(tmp_path: Path) -> None:
    """An image and a choice, three numbers and a continuous action: no padding could join them."""
    run(tmp_path / "run", "Mixed", steps=1_500, **{"model.conv_features": 16})
    last = read_metrics(tmp_path / "run")[-1]
    assert min(last["policy/0/steps"], last["policy/1/steps"]) > 500
    eye, arm = load(tmp_path / "run", policy=0), load(tmp_path / "run", policy=1)
    assert eye.act(np.zeros((8, 8, 3), np.uint8))[0] in (0, 1)
    action, _ = arm.act(np.array([[1, 0, 0.5], [-1, 0, 0.5]], np.float32))
    assert (action.shape, action.dtype) == ((2, 2), np.float32)
    assert cli.run(["eval", str(tmp_path / "run"), "--episodes", "2", "--random"]) == 0


@pytest.mark.timeout(120)
def test_a_resumed_run_goes_on_with_every_policy(tmp_path: Path) -> None:
    run(tmp_path / "run", "Field", steps=1_000)
    saved = load_checkpoint(tmp_path / "run")
    before = [policy.state["learner"]["steps"] for policy in saved.policies]
    assert sum(before) >= 1_000
    result = run(tmp_path / "run", "Field", steps=2_000, resume=True)
    after = [policy.state["learner"]["steps"] for policy in load_checkpoint(tmp_path / "run").policies]
    assert result.steps == sum(after) >= 2_000
    assert all(one < other for one, other in zip(before, after, strict=True))
    with pytest.raises(ConfigError, match=r"env.policies.*cannot change when a run is resumed"):
        run(tmp_path / "run", "Field", steps=3_000, resume=True, **{"env.policies": "shared"})


@pytest.mark.timeout(60)
def test_agents_of_equal_spaces_are_one_policys(tmp_path: Path) -> None:
    run(tmp_path / "run", "Pack", steps=500)
    last = read_metrics(tmp_path / "run")[-1]
    assert not [name for name in last if name.startswith("policy/")]
    assert load_spec(tmp_path / "run").signatures == ()
    assert load(tmp_path / "run").spec.agents == ("wolf_0", "wolf_1")


@pytest.mark.timeout(60)
def test_matches_and_other_agents_are_refused(field: Path) -> None:
    with pytest.raises(UsageError, match=r"a policy for each kind of agents \(0 plays wolf_0, wolf_1; 1 plays hare\)"):
        load_player(str(field))
    with pytest.raises(UsageError, match="plays some of the agents only"):
        load_player(f"{field}:0")
    config, spec, saved = from_toml(field / "config.toml"), load_spec(field), load_checkpoint(field)
    with pytest.raises(CheckpointError, match=r"has policies: 1. The agents of .* need 2,"):
        from_weights(config, spec, [saved.weights], checkpoint="x")
    (field / "nothing").mkdir()
    with pytest.raises(CheckpointError, match="is not a run directory"):
        load_named(str(field / "nothing"))


@pytest.mark.timeout(60)
def test_what_has_no_agents_is_refused(tmp_path: Path) -> None:
    values = {**SMALL, "steps": 100, "run_dir": str(tmp_path / "run")}
    with pytest.raises(EnvError, match="policies is an option of environments of several agents"):
        train(replace(Config(env=env("Match")), values))
    args = {"env.args": {"adapter.policies": "by_spaces"}, "env.policies": "shared"}
    with pytest.raises(ConfigError, match=r"adapter.policies.*add --env.policies by_spaces"):
        train(replace(Config(env=env("Field", "unlike_games.py")), values | args))


def test_seeds_of_the_policies_differ() -> None:
    """Equal draws would make agents of two kinds act alike."""
    seeds: list[int] = []

    class Recorded:
        config = Config()

        def seed(self, seed: int) -> None:
            seeds.append(seed)

    policies: Any = [Recorded(), Recorded()]
    Policies(policies, EnvSpec({}, ActionSpec())).seed(3)
    assert len(set(seeds)) == 2
