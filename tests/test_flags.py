"""Flags: every way to write a switch or a whole number means the same."""

from __future__ import annotations

from typing import Optional

import pytest

from pronghorn.cli import parse_train
from pronghorn.errors import ConfigError
from pronghorn.flags import spelled

TYPES = {
    "resume": bool,
    "log.tensorboard": bool,
    "model.separate_critic": Optional[bool],  # noqa: UP045
    "steps": Optional[int],  # noqa: UP045
    "run_dir": str,
    "cluster.address": str,
    "cluster.actors": int,
    "cluster.cpus_per_actor": float,
}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("--log.tensorboard", "--log.tensorboard"),
        ("--log.tensorboard True", "--log.tensorboard"),
        ("--log.tensorboard False", "--log.no-tensorboard"),
        ("--log.tensorboard=false", "--log.no-tensorboard"),
        ("--log.no-tensorboard", "--log.no-tensorboard"),
        ("--log.no-tensorboard False", "--log.tensorboard"),
        ("--model.separate-critic", "--model.separate-critic True"),
        ("--model.separate_critic false", "--model.separate-critic False"),
        ("--model.no-separate-critic", "--model.separate-critic False"),
        ("--resume False --steps 1e3", "--no-resume --steps 1000"),
        ("--steps=2e6", "--steps=2000000"),
        ("--steps 9007199254740993", "--steps 9007199254740993"),  # no float holds it
        ("--run_dir my_runs/a_b", "--run-dir my_runs/a_b"),
        ("--run_dir=my_runs/a_b", "--run-dir=my_runs/a_b"),
        ("--cluster local --actors 2e1", "--cluster.address local --cluster.actors 20"),
        ("--cluster=10.0.0.1:6379 --actors=2", "--cluster.address=10.0.0.1:6379 --cluster.actors=2"),
        ("--cluster.cpus-per-actor 0.5", "--cluster.cpus-per-actor 0.5"),
        ("--resume runs/one", "--resume runs/one"),  # a word after a switch is no value of it
        ("--steps 1.5", "--steps 1.5"),  # left for the parser to refuse
        ("--what.ever True", "--what.ever True"),
        ("--env.args flag True", "--env.args flag True"),
    ],
)
def test_every_spelling_becomes_the_parsers(written: str, read: str) -> None:
    assert spelled(written.split(), TYPES) == read.split()


def test_a_switch_set_to_anything_else_says_how_to_write_it() -> None:
    with pytest.raises(ConfigError, match=r"'maybe': is a switch. Write --log.tensorboard or --log.tensorboard False"):
        spelled(["--log.tensorboard=maybe"], TYPES)


def test_the_command_line_takes_both_forms_of_every_switch() -> None:
    argv = ["gym:CartPole-v1", "--log.tensorboard", "False", "--model.no-separate-critic", "--deterministic", "true"]
    config = parse_train([*argv, "--learner.normalize-advantages"])[1]
    assert (config.log.tensorboard, config.model.separate_critic, config.deterministic) == (False, False, True)
    assert config.learner.normalize_advantages is True


def test_the_command_line_takes_a_cluster_by_its_short_name() -> None:
    argv = ["gym:CartPole-v1", "--cluster", "local", "--actors", "3", "--cluster.cpus-per-actor", "0.25"]
    config = parse_train(argv)[1]
    assert (config.cluster.address, config.cluster.actors, config.cluster.cpus_per_actor) == ("local", 3, 0.25)
    assert config.num_actors == 3
