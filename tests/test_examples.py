"""Tests of examples/: the one-file actor-learner computes IMPALA's loss, records what happened, and learns."""

from __future__ import annotations

import copy
import importlib.util
import math
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

import pronghorn

EXAMPLES = Path(__file__).parent.parent / "examples"
LOG2 = math.log(2.0)
SIDES = ("catcher", "runner")  # of examples/tag.py and examples/fog.py


@pytest.fixture
def example() -> Iterator[ModuleType]:
    """examples/vtrace_in_one_file.py, freshly imported."""
    spec = importlib.util.spec_from_file_location("vtrace_in_one_file", EXAMPLES / "vtrace_in_one_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    num_threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(num_threads)
    del sys.modules[spec.name]


def unroll(example: ModuleType, **changes: Any) -> Any:
    """Two decisions in one environment with rewards 1 and 2, on-policy under a fair coin."""
    no = torch.zeros(2, 1, dtype=torch.bool)
    fields: dict[str, Any] = {
        "version": 0,
        "obs": torch.zeros(3, 1, 4),
        "first": torch.zeros(3, 1, dtype=torch.bool),
        "actions": torch.tensor([[0], [1]]),
        "log_probs": torch.full((2, 1), -LOG2),
        "rewards": torch.tensor([[1.0], [2.0]]),
        "terminated": no,
        "truncated": no,
        "truncation_values": torch.zeros(2, 1),
    }
    return example.Unroll(**(fields | changes))


def coin(obs: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """A fair coin whose values are 3 and 4, and 8 at the bootstrap observation."""
    return torch.zeros(3, 1, 2), torch.tensor([[3.0], [4.0], [8.0]])


def terms(example: ModuleType, **changes: Any) -> dict[str, float]:
    found = example.losses(
        unroll(example, **changes), coin, gamma=0.5, value_coef=0.5, entropy_coef=0.1, rho_clip=1.0, c_clip=1.0
    )  # fmt: skip
    return {name: float(term) for name, term in found.items()}


def test_it_is_readable_in_one_sitting() -> None:
    assert len((EXAMPLES / "vtrace_in_one_file.py").read_text().splitlines()) <= 300


def test_losses_on_policy(example: ModuleType) -> None:
    # v_1 = 2 + 8/2 = 6, v_0 = 1 + 6/2 = 4; A_0 = 4 - 3 = 1, A_1 = 6 - 4 = 2
    found = terms(example)
    assert found["policy_loss"] == pytest.approx(LOG2 * (1 + 2) / 2)
    assert found["value_loss"] == pytest.approx((0.5 * 1 + 0.5 * 4) / 2)
    assert found["entropy"] == pytest.approx(LOG2)
    assert found["loss"] == pytest.approx(1.5 * LOG2 + 0.5 * 1.25 - 0.1 * LOG2)


@pytest.mark.case("COR-02")
def test_losses_at_a_time_limit_and_at_an_end(example: ModuleType) -> None:
    # Row 0 was cut at V = 10: v_0 = 1 + 10/2 = 6. Row 1 ended: v_1 = 2. Neither sees 4 or 8.
    found = terms(
        example,
        truncated=torch.tensor([[True], [False]]),
        terminated=torch.tensor([[False], [True]]),
        truncation_values=torch.tensor([[10.0], [0.0]]),
    )
    assert found["policy_loss"] == pytest.approx(LOG2 * ((6 - 3) + (2 - 4)) / 2)
    assert found["value_loss"] == pytest.approx((0.5 * 9 + 0.5 * 4) / 2)


def test_losses_off_policy(example: ModuleType) -> None:
    # ρ_0 = 1/2 from μ = 1; ρ_1 = 2 from μ = 1/4, clipped to 1. v_1 = 6 as on-policy, A_1 = 2;
    # v_0 = 3 + 1/2 (1 + 4/2 - 3) + 1/2 · 1/2 (6 - 4) = 3.5; A_0 = 1/2 (1 + 6/2 - 3) = 1/2
    found = terms(example, log_probs=torch.tensor([[0.0], [-2 * LOG2]]))
    assert found["policy_loss"] == pytest.approx(LOG2 * (0.5 + 2) / 2)
    assert found["value_loss"] == pytest.approx((0.5 * 0.25 + 0.5 * 4) / 2)


def test_gradients_reach_the_policy_and_the_value_but_not_the_targets(example: ModuleType) -> None:
    logits = torch.zeros(3, 1, 2, requires_grad=True)
    values = torch.tensor([[3.0], [4.0], [8.0]], requires_grad=True)
    found = example.losses(
        unroll(example), lambda obs, first: (logits, values), gamma=0.5, value_coef=1.0, entropy_coef=0.0
    )
    found["loss"].backward()
    # d/dV ½ (V - v)² / 2 rows: (3 - 4)/2 and (4 - 6)/2; the bootstrap is only ever a target
    assert values.grad is not None
    assert values.grad.flatten().tolist() == pytest.approx([-0.5, -1.0, 0.0])
    # d/dlogit of -A log π(a) / 2 rows: the action taken is pushed up by A/4, the other one down
    assert logits.grad is not None
    assert logits.grad[:2, 0].flatten().tolist() == pytest.approx([-0.25, 0.25, 0.5, -0.5])
    assert logits.grad[2].abs().sum() == 0


def test_an_actor_records_what_happened(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    short = copy.deepcopy(gymnasium.spec("CartPole-v1"))
    short.max_episode_steps = 7  # before the pole can fall, and no divisor of 32
    monkeypatch.setattr(example, "ENV", short)
    torch.manual_seed(0)
    model, _ = example.make_model()
    actor = example.Actor(example.Shared(model), seed=3)
    first, second = actor.unroll(), actor.unroll()
    actor.envs.close()

    assert torch.equal(second.obs[0], first.obs[-1])  # the bootstrap row is where the next unroll begins
    assert first.truncated.nonzero()[:, 0].unique().tolist() == [6, 13, 20, 27]
    assert not first.terminated.any()
    assert torch.equal(first.first[1:], first.truncated)
    assert first.rewards.unique().tolist() == [1.0]
    assert actor.shared.returns[0] == 7.0

    logits, values = (output.detach() for output in model(first.obs, first.first))
    log_probs = logits[:-1].log_softmax(-1).gather(-1, first.actions.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(first.log_probs, log_probs)
    # Where the limit cut, V is that of the state the cart really reached, not of the next episode's first.
    final = replay(first.obs[6, 0], int(first.actions[6, 0]))
    expected = model(final, torch.zeros(()))[1].detach()
    torch.testing.assert_close(first.truncation_values[6, 0], expected, atol=1e-5, rtol=0)
    assert abs(float(expected - values[7, 0])) > 1e-3
    assert first.truncation_values[~first.truncated].abs().sum() == 0


def replay(obs: Tensor, action: int) -> Tensor:
    """What CartPole shows after `action` in the state that it shows as `obs`."""
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    env.state = tuple(obs.double().tolist())  # type: ignore[attr-defined]
    return torch.tensor(env.step(action)[0])


def test_unrolls_are_joined_side_by_side(example: ModuleType) -> None:
    joined = example.join([unroll(example, version=5), unroll(example, version=3, rewards=torch.zeros(2, 1))])
    assert joined.version == 3
    assert joined.rewards.tolist() == [[1.0, 0.0], [2.0, 0.0]]
    assert joined.obs.shape == (3, 2, 4)


def test_it_learns_and_leaves_no_thread(example: ModuleType) -> None:
    before = threading.active_count()
    assert example.train(max_steps=150_000, solved_return=60.0) >= 60.0  # a random policy: about 22
    assert threading.active_count() == before


def test_an_actor_that_fails_ends_the_run(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(actor: Any) -> None:
        raise ValueError("the pole is on fire")

    monkeypatch.setattr(example.Actor, "step", fail)
    with pytest.raises(RuntimeError, match="an actor failed") as caught:
        example.train()
    assert "on fire" in str(caught.value.__cause__)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_solves_cartpole(example: ModuleType) -> None:
    assert example.train() >= example.SOLVED_RETURN


def test_trainer_and_example_compute_the_same_losses(example: ModuleType) -> None:
    """One memory-less network, the same off-policy unrolls with ends and limits: every term and gradient is equal."""
    from pronghorn.config import Config, Hyperparameters, replace
    from pronghorn.defaults import resolve
    from pronghorn.evaluation.policy import build_model
    from pronghorn.training.learner import compute_losses
    from pronghorn.training.store import Batch
    from pronghorn.types import ActionSpec, EnvSpec, LeafSpec

    T, B, A = 7, 3, 4
    rng = np.random.default_rng(1)
    spec = EnvSpec({"x": LeafSpec((5,), "float32", "vector")}, ActionSpec((A,)))
    values = {
        "env.workers": 1, "env.envs_per_worker": B, "env.groups": 1, "learner.unroll_length": T, "algo": "impala",
        "learner.batch_unrolls": B, "learner.normalize_advantages": False, "model.normalize_obs": False,
        "model.normalize_returns": False, "learner.gamma": 0.97, "learner.exploration_coef": 0.02,
        "learner.lambda_": 1.0,
    }  # fmt: skip
    config = resolve(replace(Config(env="x:y"), values), spec)
    torch.manual_seed(0)
    model = build_model(config.model, spec)
    with torch.no_grad():
        model.policy_head.weight.mul_(100.0)  # away from uniform
    tensor = lambda *shape: torch.from_numpy(rng.normal(size=shape).astype(np.float32))  # noqa: E731
    terminated = torch.from_numpy(rng.random((T, B)) < 0.2)
    truncated = torch.from_numpy(rng.random((T, B)) < 0.2) & ~terminated
    first = torch.cat([torch.ones(1, B, dtype=torch.bool), terminated | truncated])
    obs, rewards, log_probs = (
        tensor(T + 1, B, 5),
        tensor(T, B),
        -torch.from_numpy(rng.random((T, B)).astype(np.float32)) - 0.8,
    )
    cut = tensor(T, B) * truncated
    actions = torch.from_numpy(rng.integers(0, A, (T, B)))

    steps = {
        "first": first, "discrete": actions[..., None], "continuous": torch.zeros(T, B, 0), "log_prob": log_probs,
        "value": torch.zeros(T, B), "reward": rewards, "terminated": terminated, "truncated": truncated,
        "truncation_value": cut,
    }  # fmt: skip
    batch = Batch({"x": obs}, steps, torch.zeros(B, 0), np.zeros((T, B), np.int64))
    ours = compute_losses(model, batch, Hyperparameters.from_config(config), config.learner)
    ours_gradient = torch.autograd.grad(ours.total, list(model.parameters()))

    def network(x: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = model({"x": x}, torch.zeros(B, 0), starts)
        return out.params, out.values

    unroll = example.Unroll(0, obs, first, actions, log_probs, rewards, terminated, truncated, cut)
    theirs = example.losses(unroll, network, gamma=0.97, value_coef=0.5, entropy_coef=0.02)
    theirs_gradient = torch.autograd.grad(theirs["loss"], list(model.parameters()))
    assert ours.total.item() == pytest.approx(theirs["loss"].item(), rel=1e-5)
    for name in ("policy_loss", "value_loss", "entropy"):
        assert ours.terms[name].item() == pytest.approx(theirs[name].item(), rel=1e-5)
    for a, b in zip(ours_gradient, theirs_gradient, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


# ------------------------------------------------------------------------------------------ examples/tag.py


def test_a_game_in_one_plain_class_needs_no_pettingzoo() -> None:
    """As where it is not installed, the check plays the game, and a worker's adapter never asks for the package."""
    code = (
        "import sys; sys.modules['pettingzoo'] = None\n"
        "from pronghorn import check_env\n"
        f"print(check_env({str(EXAMPLES / 'tag.py:Tag')!r}, num_steps=60)[-1])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "the last observation of an episode fits, and reset starts the next\n"


@pytest.mark.timeout(60)
def test_the_scripted_player_of_tag_beats_random() -> None:
    from pronghorn.config import Config, EnvConfig
    from pronghorn.evaluation.match import play_matches
    from pronghorn.evaluation.players import load_player

    tag = str(EXAMPLES / "tag.py")
    players = [load_player(f"{tag}:straight"), load_player("random")]
    ratings = play_matches(players, Config(env=EnvConfig(id=f"{tag}:Tag")), games=40, seed=1)
    pair = ratings.pair("tag:straight", "random")
    assert pair.games == 40
    assert pair.wins > 30


def test_who_wins_at_tag() -> None:
    """The gap is that from the catcher to the runner, going right, of 12 cells in the ring."""
    tag = runpy.run_path(str(EXAMPLES / "tag.py"))
    left, stay, right = 0, 1, 2
    for gap, catcher, runner, caught in (
        (2, right, left, True), (1, right, right, False), (1, right, left, True), (11, left, stay, True),
        (6, right, left, False),
    ):  # fmt: skip
        game = tag["Tag"]()
        game.reset(seed=2)
        game.gap, game.rng = gap, SimpleNamespace(random=lambda: 0.99)  # the runner does not stumble
        obs, rewards, over, cut, infos = game.step({"catcher": catcher, "runner": runner})
        assert rewards == {"catcher": float(caught), "runner": -float(caught)}
        assert (set(over.values()), set(cut.values()), bool(game.agents)) == ({caught}, {False}, not caught)
        assert infos["catcher"] == ({"outcome": 1.0} if caught else {})
        assert obs["catcher"][1] == -obs["runner"][1]
    game.time = tag["STEPS"] - 1
    *_, infos = game.step({"catcher": stay, "runner": stay})
    assert {agent: info["outcome"] for agent, info in infos.items()} == {"catcher": -1.0, "runner": 1.0}


# ------------------------------------------------------------------------------------------ examples/fog.py


@pytest.fixture
def fog(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("fog")
    for name in ("fog", "tag"):
        sys.modules.pop(name, None)


def test_in_the_fog_agents_see_each_other_from_near_and_the_critic_sees_both_views(fog: ModuleType) -> None:
    game = fog.game()
    game.reset(seed=0)
    for gap, catcher, runner in ((2, 1 / 3, -1 / 3), (9, 0.0, 1 / 2), (6, 0.0, 0.0)):  # cells to the right, of 12
        inner = game.game
        inner.gap, inner.time = gap, 0
        obs = game._with_all(inner._observe())
        assert obs["catcher"]["own"].tolist() == pytest.approx([1.0, float(catcher != 0.0), catcher, 1.0])
        assert obs["runner"]["own"].tolist() == pytest.approx([-1.0, float(runner != 0.0), runner, 1.0])
        for agent, view in obs.items():
            assert game.observation_space(agent).contains(view)
            assert view["all"] == {name: one["own"] for name, one in obs.items()}
    assert pronghorn.check_env(str(EXAMPLES / "fog.py:game"), num_steps=60)


def test_a_policy_trained_with_a_critic_that_sees_both_sides_acts_on_its_own_view(tmp_path: Path) -> None:
    """From the command to a loaded policy: its choices do not depend on what only the critic read; the values do."""
    from pronghorn.cli import run
    from pronghorn.evaluation.evaluate import evaluate

    small = "--steps 600 --env.workers 1 --env.envs-per-worker 8 --threads 1 --log.live off --log.no-tensorboard"
    asked = "--model.critic-only all --model.separate-critic --model.core gru --model.core-size 16"
    game = str(EXAMPLES / "fog.py:game")
    assert run(["train", game, "--run-dir", str(tmp_path / "fog"), *asked.split(), *small.split()]) == 0
    policy = pronghorn.load(tmp_path / "fog")
    assert policy.model.critic_only == ("all/catcher", "all/runner")
    rng = np.random.default_rng(0)
    states: list[Any] = [None, None]
    values = []
    for _ in range(5):
        own = rng.uniform(-1, 1, (3, 4)).astype(np.float32)
        told = {"own": own, "all": {name: rng.uniform(-1, 1, (3, 4)).astype(np.float32) for name in SIDES}}
        actions = []
        for i, obs in enumerate(({"own": own}, told)):
            action, states[i] = policy.act(obs, states[i], deterministic=True)
            actions.append(action.tolist())
        values.append([state.core.chunk(2, 1) for state in states])
        assert actions[0] == actions[1]
    (acting, critics), (same, others) = values[-1]
    assert torch.equal(acting, same)
    assert not torch.allclose(critics, others)
    result = evaluate(policy, policy.config, episodes=4, seed=0)
    assert result is not None
    assert result.episodes == 4
