"""Settings: precedence, presets, TOML round trip, rules with field, value, rule and fix."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tomli_w

from pronghorn import config as c
from pronghorn.cli import parse_train
from pronghorn.errors import ConfigError, UsageError
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec

PIXELS = EnvSpec({"obs": LeafSpec((72, 128, 3), "uint8", "image", "hwc", 0, 255)}, ActionSpec((4,)), frame_skip=4)
VECTOR = EnvSpec({"obs": LeafSpec((4,), "float32", "vector")}, ActionSpec((2,)))


def resolved(spec: EnvSpec = VECTOR, **values: object) -> c.Config:
    base = c.replace(c.Config(env="gym:CartPole-v1"), {"env.workers": 2, "env.envs_per_worker": 8})
    return c.resolve(c.replace(base, values), spec)


def test_resolve_leaves_nothing_open_but_the_limits() -> None:
    for spec in (PIXELS, VECTOR):
        for algo in ("appo", "impala", "ppo", "a2c"):
            open_fields = {name for name, value in c.walk(resolved(spec, algo=algo)) if value is None}
            assert open_fields == {"steps", "frames", "minutes", "eval.until_return"}


def test_kind_of_observation_decides_the_network() -> None:
    assert resolved(PIXELS).model.core == "gru"
    assert resolved(VECTOR).model.core == "none"


def test_one_step_algorithms_take_small_batches_of_short_unrolls_on_vectors() -> None:
    appo, impala, a2c = (resolved(algo=algo).learner for algo in ("appo", "impala", "a2c"))
    assert (appo.unroll_length, appo.batch_unrolls, appo.epochs, appo.minibatches) == (128, 16, 4, 16)
    assert (impala.unroll_length, impala.batch_unrolls, impala.epochs, impala.minibatches) == (20, 4, 1, 1)
    assert (a2c.unroll_length, a2c.batch_unrolls, a2c.epochs, a2c.minibatches) == (8, 16, 1, 1)
    many = resolved(algo="impala", **{"env.envs_per_worker": 512})  # within the lag limit, whatever the number of rows
    assert many.learner.batch_unrolls == 256
    assert resolved(PIXELS, algo="impala").learner.unroll_length == 32


def test_minibatches_divide_what_there_is_and_stay_large_enough() -> None:
    assert resolved(**{"env.envs_per_worker": 3}).learner.minibatches == 6  # 768 samples, 128 each
    assert resolved(**{"model.core": "gru"}).learner.minibatches == 4  # 4 whole unrolls each
    assert resolved(PIXELS, **{"learner.batch_unrolls": 6}).learner.minibatches == 3


def test_a_value_that_was_set_wins_over_kind_and_algorithm() -> None:
    assert resolved(algo="ppo").learner.ppo_clip == 0.2
    assert resolved(algo="ppo", **{"learner.ppo_clip": 0.3}).learner.ppo_clip == 0.3


def test_precedence_is_command_line_over_file_over_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[learner]\nlr = 0.5\ngamma = 0.9\n")
    argv = ["doom:basic", "--preset", "sf-doom", "--config", str(file), "--learner.gamma", "0.8"]
    config = parse_train(argv)[1]
    assert (config.learner.gamma, config.learner.lr, config.learner.value_clip) == (0.8, 0.5, 0.2)
    assert config.preset == "sf-doom"


@pytest.mark.parametrize("preset", sorted(c.presets()))
def test_every_preset_resolves_and_survives_toml(preset: str, tmp_path: Path) -> None:
    config = c.resolve(c.apply_preset(c.Config(env="atari:Pong"), preset), PIXELS)
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(c.to_toml(config)))
    assert c.from_toml(file) == config


def test_impala_atari_is_table_g1() -> None:
    n = c.resolve(c.apply_preset(c.Config(env="atari:Pong"), "impala-atari"), PIXELS).learner
    assert (n.unroll_length, n.batch_unrolls, n.gamma, n.value_coef) == (20, 32, 0.99, 0.5)
    assert (n.lr, n.optimizer_eps, n.max_grad_norm, n.exploration_coef) == (6e-4, 0.01, 40.0, 0.01)
    assert (n.optimizer, n.reduction, n.reward_clip, n.lambda_) == ("rmsprop_tf", "sum", 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("learner.lr", -1.0, "greater than 0"),
        ("learner.gamma", 1.5, r"lie in \[0, 1\]"),
        ("learner.minibatches", 5, "divide the 2048 samples"),
        ("env.groups", 9, "at most env.envs_per_worker"),
        ("max_lag", 2, "at least"),
        ("eval.max_share", 0.0, "lie in"),
        ("env.python", "/nowhere/python", "executable"),
    ],
)
def test_a_broken_rule_is_named_with_field_value_and_fix(name: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as info:
        resolved(**{"learner.minibatches": 1, "learner.batch_unrolls": 4 if name == "max_lag" else 16, name: value})
    assert info.value.field == name
    assert str(value) in str(info.value)


def test_taking_turns_needs_whole_unrolls_of_all_rows() -> None:
    with pytest.raises(ConfigError, match=r"multiple of the 16 rows.*Try --learner.batch-unrolls 16"):
        resolved(algo="ppo", **{"learner.batch_unrolls": 20, "learner.minibatches": 1})
    assert resolved(algo="ppo").learner.batch_unrolls == 16


def test_deterministic_excludes_free_running() -> None:
    with pytest.raises(ConfigError, match="0 or 1"):
        resolved(deterministic=True)


@pytest.mark.case("CLI-08")
def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[learner]\nlearning_rat = 1.0\nunrol_length = 3\n")
    with pytest.raises(UsageError, match="Unknown setting"):
        c.from_toml(file)
    file.write_text("[learner]\nunrol_length = 3\n")
    with pytest.raises(UsageError, match=r"Did you mean 'learner.unroll_length'"):
        c.from_toml(file)
    with pytest.raises(UsageError, match=r"Did you mean 'sf-doom'"):
        c.apply_preset(c.Config(), "sf-dom")


@pytest.mark.parametrize("text", ["seed = 'three'", "[learner]\nlr = true", "[model]\nconv = 'vgg'", "seed = 1.5"])
def test_a_wrong_type_in_the_file_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="must be"):
        c.from_toml(file)


def test_structure_cannot_change_on_resume_and_other_changes_are_listed() -> None:
    before = resolved()
    after = dataclasses.replace(before, learner=dataclasses.replace(before.learner, lr=0.5))
    assert dict(c.changed_settings(before, after)) == {"learner.lr": (before.learner.lr, 0.5)}
    with pytest.raises(ConfigError, match="cannot change"):
        list(c.changed_settings(before, c.replace(before, {"model.core": "lstm"})))


def test_derived_seeds_differ_and_repeat() -> None:
    seeds = [c.derive_seed(7, *path) for path in [(0,), (1,), (0, 0), (0, 1), (1, 0)]]
    assert len(set(seeds)) == 5
    assert seeds == [c.derive_seed(7, *path) for path in [(0,), (1,), (0, 0), (0, 1), (1, 0)]]
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_short_form_of_the_api_names_an_environment() -> None:
    assert c.Config(env="doom:basic,doom:take_cover").env_names == ("doom:basic", "doom:take_cover")
