"""Self-play against training with a bot: both arms get the same, and only trainings that are done are compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import duel_self_play
import runs
from pronghorn.cli import parse_train
from pronghorn.config import walk

AGENTS_OF_A_GAME = {"self_play": 2, "bots": 1}


def test_both_arms_have_as_many_agents_at_a_time_and_learn_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, tuple[str, ...]] = {}
    monkeypatch.setattr(runs, "train", lambda run, *argv, go_on: asked.setdefault(run.name, argv))
    configs = {}
    for arm, agents in AGENTS_OF_A_GAME.items():
        duel_self_play.train(arm, 1000, tmp_path)
        config = configs[arm] = parse_train(list(asked[arm]))[1]
        assert config.env.workers is not None
        assert config.env.envs_per_worker == 1
        assert config.env.workers * agents == 16
    apart = {key for arm in configs for key, value in walk(configs[arm]) if value != dict(walk(configs["bots"]))[key]}
    assert apart == {
        "env.id", "env.workers", "selfplay.self_weight", "selfplay.snapshot_weight", "selfplay.add_every_steps"
    }  # fmt: skip


def test_a_training_that_ended_before_its_frames_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "train", lambda *_, **__: "")
    with pytest.raises(SystemExit, match=r"bots ended before 6,000 frames: start the script again"):
        duel_self_play.train("bots", 6000, tmp_path)
