"""What is left open is filled: by kind of environment, algorithm, preset; what was given wins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

sys.path.insert(0, str(Path(__file__).parent))

from pronghorn import defaults
from pronghorn.cli import parse_train
from pronghorn.config import Config, replace, walk
from pronghorn.defaults import apply_preset, presets, resolve, resolve_env
from pronghorn.settings_file import from_toml, to_toml
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec
from specs import PIXELS, VECTOR, resolved


def test_resolve_leaves_nothing_open_but_the_limits() -> None:
    for spec in (PIXELS, VECTOR):
        for algo in ("appo", "impala", "ppo", "a2c"):
            open_fields = {name for name, value in walk(resolved(spec, algo=algo)) if value is None}
            assert open_fields == {"steps", "frames", "minutes", "eval.until_return"}


def test_kind_of_observation_decides_the_network() -> None:
    assert resolved(PIXELS).model.core == "gru"
    assert resolved(VECTOR).model.core == "none"
    grid = EnvSpec({"image": LeafSpec((7, 7, 3), "uint8", "image", "hwc", 0, 255)}, ActionSpec((7,)))
    assert not resolved(grid).model.separate_critic  # convolutions are dear
    assert resolved(VECTOR).model.separate_critic
    assert (resolved(VECTOR, **{"model.core": "gru"}).model.core_size, resolved(PIXELS).model.core_size) == (128, 512)
    assert resolved(VECTOR, **{"model.core": "lstm"}).learner.unroll_length == 32


@pytest.mark.parametrize(
    ("env", "conv"),
    [
        ("gym:MiniGrid-MemoryS7-v0", "grid_codes"),
        ("gym:BabyAI-GoToObj-v0", "grid_codes"),
        ("gym:Tiles-v0", "nature"),
        ("gym:MiniGrid-Empty-5x5-v0,gym:Tiles-v0", "nature"),
    ],
)
def test_grids_of_codes_are_known_by_the_names_of_their_tasks(env: str, conv: str) -> None:
    grid = EnvSpec({"image": LeafSpec((7, 7, 3), "uint8", "image", "hwc", 0, 255)}, ActionSpec((7,)))
    assert resolved(grid, **{"env.id": env}).model.conv == conv  # "nature" becomes conv_tiny for so small an image
    assert resolved(grid, **{"env.id": env, "model.conv": "conv_tiny"}).model.conv == "conv_tiny"
    assert resolved(grid, **{"env.id": env}).learner.exploration_coef == (0.02 if conv == "grid_codes" else 0.01)
    assert resolved(PIXELS, **{"env.id": env}).model.conv == "convnet_simple"
    floats = EnvSpec({"image": LeafSpec((7, 7, 3), "float32", "image", "hwc", 0, 1)}, ActionSpec((7,)))
    assert resolved(floats, **{"env.id": env}).model.conv == "nature"  # which such an encoder could not read
    assert resolved(VECTOR, **{"env.id": env}).learner.exploration_coef == 0.01


@pytest.mark.case("PRF-01")
@pytest.mark.parametrize("cores", [1, 2, 16])
def test_workers_and_threads_follow_the_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker a core with at least two groups of environments, so that one steps while the other waits."""
    monkeypatch.setattr(defaults, "available_cores", lambda: cores)
    for name, spec, threads in (("doom:basic", PIXELS, cores), ("gym:Acrobot-v1", VECTOR, 1)):
        found = resolve(Config(env=name), spec)
        assert (found.env.workers, found.env.groups, found.threads) == (cores, 2, threads)
        assert found.env.envs_per_worker >= 16
        assert found.learner.batch_unrolls * 2 >= found.num_envs  # batches grow with the rows, so lag does not
    assert resolve(replace(Config(env="doom:basic"), {"env.workers": 3}), PIXELS).env.workers == 3


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ({}, 32),
        ({"learner.batch_unrolls": 16}, 32),
        ({"learner.batch_unrolls": 48}, 48),
        ({"learner.batch_unrolls": 500}, 64),  # not more than memory and start-up bear
        ({"learner.batch_unrolls": 64, "env.workers": 4}, 64),
        ({"learner.batch_unrolls": 64, "env.envs_per_worker": 4}, 8),
        ({"learner.batch_unrolls": 64, "max_lag": 1}, 32),  # taking turns: whole unrolls of all rows
        ({"learner.batch_unrolls": 64, "algo": "ppo"}, 32),
    ],
)
def test_a_larger_batch_of_pixels_comes_from_as_many_rows(
    asked: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "available_cores", lambda: 2)
    found = resolve(replace(Config(env="doom:basic"), asked), PIXELS)
    assert found.num_envs == rows


def test_one_step_algorithms_take_small_batches_of_short_unrolls_on_vectors() -> None:
    appo, impala, a2c = (resolved(algo=algo).learner for algo in ("appo", "impala", "a2c"))
    assert (appo.unroll_length, appo.batch_unrolls, appo.epochs, appo.minibatches) == (128, 16, 4, 16)
    assert (impala.unroll_length, impala.batch_unrolls, impala.epochs, impala.minibatches) == (20, 4, 1, 1)
    assert (a2c.unroll_length, a2c.batch_unrolls, a2c.epochs, a2c.minibatches) == (8, 16, 1, 1)
    many = resolved(algo="impala", **{"env.envs_per_worker": 512})  # within the lag limit, whatever the number of rows
    assert many.learner.batch_unrolls == 256
    assert resolved(PIXELS, algo="impala").learner.unroll_length == 32


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ({}, 512),
        ({"max_lag": 4}, 512),
        ({"env.id": "gym:CartPole-v1,gym:CartPole-v0"}, 512),
        ({"env.vector_rows": 64}, 64),
        ({"env.vector_rows": 0}, 0),
        ({"env.workers": 2}, 0),
        ({"env.envs_per_worker": 8}, 0),
        ({"env.args": {"adapter.frame_skip": "2"}}, 0),
        ({"env.id": "gym:Acrobot-v1"}, 0),  # has no vector entry point
        ({"env.id": "gym:CartPole-v1,gym:Acrobot-v1"}, 0),
        ({"env.id": "gym:phys2d/CartPole-v1"}, 0),
        ({"env.id": "doom:basic"}, 0),
        ({"max_lag": 1}, 0),
        ({"algo": "ppo"}, 0),  # waits for nobody
        ({"algo": "impala"}, 0),
    ],
)
def test_rows_step_as_one_where_gymnasium_can_and_nothing_else_was_asked_for(values: dict, rows: int) -> None:
    env = resolve_env(replace(Config(env="gym:CartPole-v1"), values)).env
    assert env.vector_rows == rows
    if rows:
        num_tasks = env.id.count(",") + 1
        assert (env.workers, env.envs_per_worker, env.groups) == (1, 2 * num_tasks, 2)


def test_a_thousand_cheap_rows_learn_in_one_pass_of_large_minibatches() -> None:
    spec = EnvSpec({"obs": LeafSpec((4,), "float32", "vector")}, ActionSpec((2,)), rows_per_env=512, rows_wait=True)
    config = resolve(Config(env="gym:CartPole-v1"), spec)
    n = config.learner
    assert (n.unroll_length, n.batch_unrolls, n.epochs, n.minibatches) == (32, 1024, 1, 8)
    several = resolve(replace(Config(env="gym:CartPole-v1"), {"learner.epochs": 2}), spec)
    assert several.single_steps
    assert several.batch_samples // several.learner.minibatches == 4096


def test_minibatches_divide_what_there_is_and_stay_large_enough() -> None:
    assert resolved(**{"env.envs_per_worker": 3}).learner.minibatches == 6  # 768 samples, 128 each
    assert resolved(**{"model.core": "gru", "env.envs_per_worker": 32}).learner.minibatches == 4  # of 16 unrolls
    assert resolved(PIXELS, **{"learner.batch_unrolls": 6}).learner.minibatches == 3


def test_images_are_computed_in_bfloat16_where_there_are_instructions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast in (False, True):
        monkeypatch.setattr("pronghorn.defaults.computes_bfloat16", lambda device, fast=fast: fast)
        assert resolved(PIXELS).precision == ("bfloat16" if fast else "float32")
        assert resolved(PIXELS, deterministic=True, max_lag=1).precision == "float32"
        assert resolved(PIXELS, precision="float32").precision == "float32"
        assert resolved(VECTOR).precision == "float32"  # too small for it to pay


@pytest.mark.parametrize("cores", [2, 16])
def test_a_gpu_gets_more_rows_and_few_threads(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """512 rows for 16 cores: the sampler serves up to 256 at once, the learner updates from 2,048 steps."""
    for question in ("has_gpu", "computes_bfloat16"):
        monkeypatch.setattr(f"pronghorn.defaults.{question}", lambda device: device != "cpu")
    monkeypatch.setattr("pronghorn.defaults.available_cores", lambda: cores)
    seen = {}
    for device in ("cpu", "cuda"):
        config = resolve(Config(env="doom:basic", device=device), PIXELS)
        n = config.learner
        seen[device] = (config.env.workers, config.env.envs_per_worker, config.env.groups, config.threads)
        assert config.precision == ("float32" if device == "cpu" else "bfloat16")
        update = config.batch_samples // n.minibatches
        assert update == {(2, "cpu"): 256, (2, "cuda"): 256, (16, "cpu"): 1024, (16, "cuda"): 2048}[cores, device]
    assert seen == {"cpu": (cores, 16, 2, cores), "cuda": (cores, 32, 2, min(4, cores))}
    vector = resolve(Config(env="gym:LunarLander-v3", device="cuda"), VECTOR)
    assert (vector.env.envs_per_worker, vector.threads) == (32, 1)


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


@pytest.mark.parametrize("preset", sorted(presets()))
def test_every_preset_resolves_and_survives_toml(preset: str, tmp_path: Path) -> None:
    config = resolve(apply_preset(Config(env="atari:Pong"), preset), PIXELS)
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(to_toml(config)))
    assert from_toml(file) == config


def test_impala_atari_is_table_g1() -> None:
    n = resolve(apply_preset(Config(env="atari:Pong"), "impala-atari"), PIXELS).learner
    assert (n.unroll_length, n.batch_unrolls, n.gamma, n.value_coef) == (20, 32, 0.99, 0.5)
    assert (n.lr, n.optimizer_eps, n.max_grad_norm, n.exploration_coef) == (6e-4, 0.01, 40.0, 0.01)
    assert (n.optimizer, n.reduction, n.reward_clip, n.lambda_) == ("rmsprop_tf", "sum", 1.0, 1.0)
