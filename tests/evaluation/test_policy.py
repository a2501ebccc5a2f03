"""A policy that was loaded: it speaks the environment's own language, and sees what the trainer saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Env, spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from pronghorn.config import Config, Hyperparameters, replace
from pronghorn.defaults import resolve
from pronghorn.envworker.spaces import Actions, Observations
from pronghorn.errors import CheckpointError, UsageError
from pronghorn.evaluation.policy import Policy, build_model, load, load_named, split_run
from pronghorn.spec_file import spec_to_json
from pronghorn.training.checkpoint import params_sha
from pronghorn.training.learner import compute_losses
from pronghorn.training.store import Batch
from pronghorn.training.trainer import train
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec

ENVS = Path(__file__).parents[1] / "learnable_envs.py"


def trained(name: str, run_dir: Path, steps: int, **values: Any) -> Policy:
    small = {
        "env.workers": 1, "env.envs_per_worker": 8, "learner.unroll_length": 16, "learner.batch_unrolls": 8,
        "learner.epochs": 2, "learner.lr": 1e-2, "model.mlp_layers": (16,), "threads": 1, "log.live": "off",
        "log.tensorboard": False, "env.pin": "off",
    }  # fmt: skip
    built: Config = replace(Config(env=f"{ENVS}:{name}", run_dir=str(run_dir), steps=steps), small | values)
    train(built)
    return load(run_dir)


def play(env: Env[Any, Any], policy: Policy, steps: int, deterministic: bool) -> tuple[float, list[Any]]:
    """Mean return an episode, and the actions, in the environment itself."""
    obs, _ = env.reset(seed=3)
    state, total, actions, episodes = None, 0.0, [], 0
    for _ in range(steps):
        action, state = policy.act(obs, state, deterministic=deterministic)
        actions.append(action)
        obs, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        if terminated or truncated:
            obs, _ = env.reset()
            state, episodes = None, episodes + 1
    return total / episodes, actions


@pytest.fixture
def envs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ENVS.parent))
    import learnable_envs

    yield learnable_envs
    sys.modules.pop("learnable_envs", None)


@pytest.mark.case("SPA-01")
def test_offsets_are_the_same_in_training_and_in_a_loaded_policy(tmp_path: Path, envs: Any) -> None:
    """Discrete(start != 0) as action and as observation: learned, then played with the environment's own numbers."""
    policy = trained("Offset", tmp_path, steps=8_000)
    mean, actions = play(envs.Offset(), policy, 400, deterministic=True)
    assert mean > 7.9
    assert set(actions) == {-1, 1}
    assert all(type(action) is int for action in actions)
    batch, _ = policy.act(np.array([5, 6, 7, 8]), deterministic=True)
    assert batch.tolist() == [1, 1, -1, -1]


@pytest.mark.case("SPA-01")
def test_an_untrained_policy_takes_every_value_about_equally_often(tmp_path: Path, envs: Any) -> None:
    policy = trained("Offset", tmp_path, steps=100, **{"learner.lr": 1e-6})
    _, actions = play(envs.Offset(), policy, 3_000, deterministic=False)
    counts = [actions.count(value) for value in (-1, 0, 1)]
    assert sum(counts) == 3_000
    assert min(counts) > 850  # 1,000 each; 6 standard deviations


@pytest.mark.case("SPA-04")
def test_a_dict_of_discrete_and_continuous_parts_is_learned_and_played(tmp_path: Path, envs: Any) -> None:
    policy = trained("Jumper", tmp_path, steps=12_000)
    mean, actions = play(envs.Jumper(), policy, 400, deterministic=True)
    assert mean > 7.5  # random: 4
    assert set(actions[0]) == {"jump", "move"}
    batch, _ = policy.act(({"x": np.array([[0.5], [-0.5]])}, np.array([1, 0])), deterministic=True)
    assert batch["jump"].tolist() == [1, 0]
    assert np.sign(batch["move"]).tolist() == [[1.0], [-1.0]]


NESTED = spaces.Dict(
    {
        "a": spaces.Tuple((spaces.Discrete(3, start=2), spaces.Box(-2, 2, (2, 2), np.float64))),
        "b": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [0, 5]]),
        "c": spaces.Dict({"keys": spaces.MultiBinary(3), "low": spaces.Box(-1, 2, (2,), np.int16)}),
    }
)


@pytest.mark.case("SPA-18")
def test_agents_and_weights_survive_the_way_there_and_back() -> None:
    raw = {"observation": {}, "action": {"discrete": [2], "low": [], "high": []}, "agents": ["a", "b"]}
    spec = EnvSpec.from_json({**raw, "rows_per_env": 2, "rewards": {"frag": 1}})
    assert (spec.agents, spec.rewards) == (("a", "b"), {"frag": 1.0})
    assert EnvSpec.from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
    own = {"rows": [1], "observation": raw["observation"], "action": raw["action"], "leaves": {"obs": "obs#1"}}
    unlike = EnvSpec.from_json({**raw, "rows_per_env": 2, "signatures": [own, {**own, "rows": [0]}]})
    assert [one.rows for one in unlike.signatures] == [(1,), (0,)]
    assert EnvSpec.from_json(json.loads(json.dumps(spec_to_json(unlike)))) == unlike
    assert EnvSpec.from_json({**raw, "rows_per_env": 1, "agents": ["a"]}).agents == ()  # there is no game of one
    del raw["agents"]  # as a run of before saved it
    assert (EnvSpec.from_json(raw).agents, EnvSpec.from_json(raw).rewards) == ((), {})


@pytest.mark.parametrize(
    "space",
    [NESTED, *NESTED.spaces.values(), spaces.Discrete(5, start=3), spaces.MultiDiscrete([4]), spaces.Box(-1, 1, (60,))],
    ids=str,
)
def test_spaces_survive_the_way_there_and_back(space: spaces.Space[Any]) -> None:
    """Observations reach the policy as they reach the worker; actions come out as the environment's space has them."""
    actions = Actions(space)
    spec = EnvSpec.from_json(
        {"observation": Observations(space, 0).to_json(), "action": actions.to_json(), "name": "x"}
    )
    assert EnvSpec.from_json(spec_to_json(spec)) == spec
    config = resolve(replace(Config(env="x:y"), {"env.workers": 1, "env.envs_per_worker": 1}), spec)
    policy = Policy(build_model(config.model, spec), config, spec)
    space.seed(1)
    samples = [space.sample() for _ in range(5)]
    for sample in samples:
        seen, batched = policy._leaves(sample)
        assert not batched
        for name, expected in Observations(space, 0).flatten(sample).items():
            assert seen[name].shape == (1, *expected.shape)
            np.testing.assert_array_equal(seen[name][0], expected)
        action, _ = policy.act(sample)
        assert space.contains(np.int64(action) if isinstance(action, int) else action), action
    for num in (1, 3):
        rows, batched = policy._leaves(concatenate(space, samples[:num], create_empty_array(space, num)))
        assert batched, "a batch of one is a batch"
        for name, expected in Observations(space, 0).flatten(samples[0]).items():
            assert rows[name].shape == (num, *expected.shape)
            np.testing.assert_array_equal(rows[name][0], expected)


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (spaces.Discrete(5, start=2), 99, "'obs' is 99; its space holds 2 ... 6"),
        (spaces.Discrete(5, start=2), 1, "'obs' is 1; its space holds 2 ... 6"),
        (spaces.Discrete(5), np.array([0, 4, 5]), "'obs' is 5; its space holds 0 ... 4"),
        (NESTED["b"], np.array([[2, 2], [3, 7]]), r"'obs' at \[1, 1\] is 7; its space holds 5 ... 6"),
        (
            NESTED["b"],
            np.array([[[2, 2], [3, 5]], [[0, 2], [3, 5]]]),
            r"'obs' at \[0, 0\] is 0; its space holds 1 ... 2",
        ),
    ],
    ids=str,
)
def test_a_code_that_the_space_does_not_hold_is_named(space: spaces.Space[Any], obs: Any, message: str) -> None:
    spec = EnvSpec.from_json(
        {"observation": Observations(space, 0).to_json(), "action": Actions(space).to_json(), "name": "x"}
    )
    config = resolve(replace(Config(env="x:y"), {"env.workers": 1, "env.envs_per_worker": 1}), spec)
    policy = Policy(build_model(config.model, spec), config, spec)
    with pytest.raises(UsageError, match=message):
        policy.act(obs)


@pytest.mark.case("EVL-12")
def test_the_player_scales_images_as_the_trainer_does() -> None:
    """One uint8 image through the learner's forward pass and through `Policy.act`: equal features, value and policy."""
    spec = EnvSpec({"obs": LeafSpec((40, 48, 3), "uint8", "image", "hwc", 0.0, 255.0)}, ActionSpec((4,)))
    config = resolve(
        replace(Config(env="x:y"), {"env.workers": 1, "env.envs_per_worker": 1, "model.core_size": 16}), spec
    )
    model = build_model(config.model, spec)
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 1, 40, 48, 3), np.uint8))
    model.update_obs_norm({"obs": image})  # statistics that are not the identity
    seen: list[torch.Tensor] = []
    model.actor.encoder.register_forward_hook(lambda _m, _i, out: seen.append(out.detach().clone()))
    zeros = torch.zeros(1, 1)
    steps = {
        "first": torch.ones(2, 1, dtype=torch.bool), "discrete": torch.zeros(1, 1, 1, dtype=torch.int64),
        "continuous": torch.zeros(1, 1, 0), "log_prob": zeros, "value": zeros, "reward": zeros,
        "terminated": zeros.bool(), "truncated": zeros.bool(), "truncation_value": zeros,
    }  # fmt: skip
    batch = Batch({"obs": image}, steps, model.initial_state(1), np.zeros((1, 1), np.int64))
    compute_losses(model, batch, Hyperparameters.from_config(config), config.learner)
    Policy(model, config, spec).act(image[0, 0].numpy())
    learner, player = seen
    torch.testing.assert_close(learner[:1], player, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "run", "part"),
    [
        ("runs/a", "runs/a", ""),
        ("runs/a:1", "runs/a", ":1"),
        ("runs/a:0@1000000", "runs/a", ":0@1000000"),
        ("C:/runs/a:2", "C:/runs/a", ":2"),
        ("runs/a:x", "runs/a:x", ""),
        ("runs/a:1@", "runs/a:1@", ""),
        ("runs/a:1:0@5", "runs/a:1", ":0@5"),
    ],
)
def test_the_name_of_a_policy_is_split_from_its_run(text: str, run: str, part: str) -> None:
    assert split_run(text) == (Path(run), part)


def test_a_run_of_one_policy_has_policy_0_and_no_other(tmp_path: Path) -> None:
    alone = trained("Offset", tmp_path / "run", steps=100)
    for named in (load(tmp_path / "run", policy=0), load_named(f"{tmp_path / 'run'}:0")):
        assert params_sha(named.model.state_dict()) == params_sha(alone.model.state_dict())
    with pytest.raises(CheckpointError, match="holds no policy 1: it has 0 to 0"):
        load_named(f"{tmp_path / 'run'}:1")
    with pytest.raises(CheckpointError, match="holds no policy -1"):
        load(tmp_path / "run", policy=-1)
    with pytest.raises(CheckpointError, match=r"holds no snapshot '0@100'\. It holds: none"):
        load_named(f"{tmp_path / 'run'}:0@100")
