"""What learners begin with is what learner 0 has read, also where the others see no run directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import pronghorn.training.checkpoint as checkpoints
from pronghorn.config import Config, replace
from pronghorn.errors import ConfigError
from pronghorn.training.beginning import Beginning, shared, shared_checkpoint
from pronghorn.training.world import World
from worlds import together

VALUES = {"seed": 7, "model.mlp_layers": (8, 4), "minutes": 1.5, "env.args": {"a": "1"}}
GIVEN: Config = replace(Config(env="x:y"), VALUES)


def saved(directory: Path) -> checkpoints.Checkpoint:
    weights = {"w": torch.arange(6.0).view(2, 3)}
    state = {0: {"step": torch.tensor(3.0)}}
    optimizer: dict[str, Any] = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return checkpoints.load(checkpoints.save(directory, 12, weights, optimizer, {"time_s": 4.5}, keep=1))


def test_alone_it_is_what_it_was() -> None:
    begin = Beginning(GIVEN)
    assert shared(World(), begin) is begin


def test_a_fresh_start_is_the_same_for_all() -> None:
    for begin in together(2, lambda world: shared(world, Beginning(GIVEN))):
        assert begin == Beginning(GIVEN)


def test_others_get_the_checkpoint_and_the_settings_of_the_run_before(tmp_path: Path) -> None:
    """Also where they were started with the flags alone: the settings of the run lie on learner 0's machine."""
    before = replace(GIVEN, {"seed": 3})

    def work(world: World) -> Beginning:
        mine = Beginning(GIVEN, saved(tmp_path), before) if world.leads else Beginning(Config(env="x:y"))
        return shared(world, mine)

    first, second = together(2, work)
    assert second.given == first.given == GIVEN
    assert second.before == before
    assert second.latest is not None
    assert second.latest.state["updates"] == 12
    assert second.latest.state["time_s"] == 4.5
    assert torch.equal(second.latest.weights["w"], torch.arange(6.0).view(2, 3))
    assert first.latest is not None
    assert second.latest.path == first.latest.path  # in what is said of it
    assert torch.equal(second.latest.optimizer["state"][0]["step"], torch.tensor(3.0))


def test_a_checkpoint_or_none_is_shared_while_a_run_goes_on(tmp_path: Path) -> None:
    def work(world: World) -> tuple[checkpoints.Checkpoint | None, checkpoints.Checkpoint | None]:
        return shared_checkpoint(world, saved(tmp_path) if world.leads else None), shared_checkpoint(world, None)

    for found, nothing in together(2, work):
        assert found is not None
        assert found.state["time_s"] == 4.5
        assert nothing is None


def test_other_settings_than_learner_0s_are_refused() -> None:
    def work(world: World) -> str:
        mine = GIVEN if world.leads else replace(GIVEN, {"seed": 8})
        if world.leads:
            shared(world, Beginning(mine))
            return ""
        with pytest.raises(ConfigError, match=r"seed = 8: learner 0 was started with 7\.") as caught:
            shared(world, Beginning(mine))
        return str(caught.value)

    assert "one command line" in together(2, work)[1]
