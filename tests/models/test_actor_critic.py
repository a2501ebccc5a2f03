"""The whole network: acting and learning compute the same, and its size is the papers'."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.errors import SpaceError, UsageError
from pronghorn.models.actor_critic import ActorCritic
from pronghorn.models.encoders import LAST_ACTION_CONTINUOUS
from pronghorn.types import ACTION_MASK, LAST_ACTION, LAST_REWARD, ActionSpec, EnvSpec, LeafSpec

T, B = 6, 4


def image(*shape: int) -> LeafSpec:
    return LeafSpec(shape, "uint8", "image", "hwc", 0.0, 255.0)


def real(size: int) -> LeafSpec:
    return LeafSpec((size,), "float32", "vector")


VECTOR = EnvSpec({"obs": real(3)}, ActionSpec((4,)))
RICH = EnvSpec(
    {
        "screen": image(40, 44, 3),
        "health": real(2),
        "weapon": LeafSpec((), "int64", "discrete", n=(5,)),
        ACTION_MASK: LeafSpec((5,), "int8", "mask"),
    },
    ActionSpec((3, 2), (-2.0,), (2.0,)),
)
SMALL: dict[str, Any] = {"core_size": 16, "conv_features": 16, "mlp_layers": (8,)}


def observations(spec: EnvSpec, num_steps: int = T, batch: int = B) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lead = (num_steps, batch)
    obs = {}
    for name, leaf in spec.observation.items():
        if leaf.kind == "image":
            obs[name] = torch.randint(0, 256, (*lead, *leaf.shape), dtype=torch.uint8, generator=generator)
        elif leaf.kind == "discrete":
            obs[name] = torch.randint(0, leaf.n[0], (*lead, *leaf.shape), generator=generator)
        elif leaf.kind == "mask":
            mask = torch.rand(*lead, *leaf.shape, generator=generator) < 0.5
            mask[..., [0, 3]] = True  # one value of each factor
            obs[name] = mask.to(torch.int8)
        else:
            obs[name] = 3 + 2 * torch.randn(*lead, *leaf.shape, generator=generator)
    action = spec.action
    codes = torch.randint(0, 2, (*lead, action.num_discrete), generator=generator)
    obs[LAST_ACTION] = codes - 1 * (torch.rand(*lead, 1, generator=generator) < 0.3) * (codes + 1)
    obs[LAST_ACTION_CONTINUOUS] = torch.randn(*lead, action.num_continuous, generator=generator)
    obs[LAST_REWARD] = torch.randn(*lead, generator=generator)
    return obs


def starts(num_steps: int = T, batch: int = B) -> Tensor:
    return torch.rand(num_steps, batch, generator=torch.Generator().manual_seed(1)) < 0.3


def row(obs: Mapping[str, Tensor], t: int) -> dict[str, Tensor]:
    return {name: leaf[t : t + 1] for name, leaf in obs.items()}


@pytest.mark.case("RNN-10")
@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
@pytest.mark.parametrize("separate_critic", [False, True])
@pytest.mark.parametrize("spec", [VECTOR, RICH], ids=["vector", "rich"])
def test_the_learners_pass_is_the_actors_steps(spec: EnvSpec, core: Any, separate_critic: bool) -> None:
    """Parameters, values, states and masked log-probs, with normalisation, last action and resets."""
    torch.manual_seed(0)
    model = ActorCritic(
        spec, core=core, separate_critic=separate_critic, last_action=True, last_reward=True,
        policy_init_gain=1.0, decoder_layers=(8,), **SMALL,
    )  # fmt: skip
    obs, first = observations(spec), starts()
    model.update_obs_norm(obs)
    model.update_return_norm(5 + torch.randn(T, B))
    start = torch.randn(B, model.state_size)

    state, rows = start, []
    with torch.inference_mode():
        for t in range(T):
            output = model(row(obs, t), state, first[t : t + 1])
            policy = model.distribution(output.params, row(obs, t))
            action = policy.sample()
            rows.append((output.params, output.values, policy.log_prob(*action), *action))
            state = output.state
    params, values, log_probs, discrete, continuous = (torch.cat(parts) for parts in zip(*rows, strict=True))

    whole = model(obs, start, first)
    policy = model.distribution(whole.params, obs)
    torch.testing.assert_close(whole.params, params, rtol=0, atol=1e-5)
    torch.testing.assert_close(whole.values, values, rtol=0, atol=1e-5)
    torch.testing.assert_close(whole.state, state, rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.log_prob(discrete, continuous), log_probs, rtol=0, atol=1e-5)
    if spec is RICH:
        assert obs[ACTION_MASK].gather(-1, discrete + torch.tensor([0, 3])).all()
    assert whole.params.shape == (T, B, spec.action.num_logits + 2 * spec.action.num_continuous)


@pytest.mark.parametrize("separate_critic", [False, True])
def test_every_parameter_learns(separate_critic: bool) -> None:
    model = ActorCritic(RICH, separate_critic=separate_critic, last_action=True, last_reward=True, **SMALL)
    obs, first = observations(RICH), starts()
    output = model(obs, model.initial_state(B), first)
    policy = model.distribution(output.params, obs)
    (policy.log_prob(*policy.sample()).sum() + output.values.sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_a_separate_critic_leaves_the_policys_trunk_alone() -> None:
    model = ActorCritic(VECTOR, separate_critic=True, **SMALL)
    assert model.state_size == 32
    model(observations(VECTOR), model.initial_state(B), starts()).values.sum().backward()
    assert all(parameter.grad is None for parameter in model.actor.parameters())
    assert model.critic is not None
    assert all(parameter.grad is not None for parameter in model.critic.parameters())


CRITICS = {
    "state/map": image(9, 9, 3),
    "state/view": image(40, 36, 1),
    "state/health": real(2),
    "state/weapon": LeafSpec((), "int64", "discrete", n=(5,)),
}
SEES_MORE = EnvSpec({**RICH.observation, **CRITICS}, RICH.action)


def sees_more(core: Any = "gru", **settings: Any) -> ActorCritic:
    """A model with a critic that alone reads the leaves below 'state', and statistics that are not the identity."""
    torch.manual_seed(0)
    model = ActorCritic(
        SEES_MORE, core=core, separate_critic=True, critic_only=["state"], last_action=True, last_reward=True,
        policy_init_gain=1.0, **SMALL, **settings,
    )  # fmt: skip
    model.update_obs_norm(observations(SEES_MORE))
    return model


@pytest.mark.parametrize("encoder", ["auto", "mlp"])
@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
def test_what_only_the_critic_reads_never_reaches_the_policy(core: Any, encoder: Any) -> None:
    """Bit by bit, its memory included; and each of the leaves does reach the value."""
    model = sees_more(core, encoder=encoder)
    assert model.critic_only == tuple(CRITICS)
    obs, first, start = observations(SEES_MORE), starts(), model.initial_state(B)
    out = model(obs, start, first)
    for name in CRITICS:
        changed = model({**obs, name: 1 + obs[name] % 4}, start, first)
        assert torch.equal(changed.params, out.params), name
        assert torch.equal(*(state[:, : model.state_size // 2] for state in (changed.state, out.state))), name
        assert not torch.allclose(changed.values, out.values, atol=1e-6), name
    obs["state/health"].requires_grad_()
    out = model(obs, start, first)
    of_policy, of_value = (
        torch.autograd.grad(y.sum(), obs["state/health"], retain_graph=True, allow_unused=True)[0]
        for y in (out.params, out.values)
    )
    assert of_policy is None  # there is no path
    assert of_value.abs().sum() > 0


def test_a_critic_may_see_all_that_a_policy_of_pictures_does_not() -> None:
    """The policy reads no vector, the critic no picture of its own; and the other way round."""
    for hidden in ("screen", "health"):
        spec = EnvSpec({name: RICH.observation[name] for name in ("screen", "health")}, ActionSpec((3,)))
        model = ActorCritic(spec, separate_critic=True, critic_only=[hidden], **SMALL)
        obs, first = observations(spec), starts()
        model.update_obs_norm(obs)
        model(obs, model.initial_state(B), first).values.sum().backward()
        assert model.critic is not None
        assert [len(trunk.encoder.convs) for trunk in (model.actor, model.critic)] == [int(hidden == "health"), 1]
        assert (model.vector.output_size, model.critic_vector.output_size) == ((2, 0) if hidden == "screen" else (0, 2))
        assert all(parameter.grad is not None for parameter in model.critic.parameters())


def test_what_only_the_critic_reads_is_normalised_and_saved() -> None:
    model, fresh = sees_more(), sees_more()
    obs, first = observations(SEES_MORE), starts()
    obs["state/health"] = 100 * obs["state/health"]
    weights = torch.ones(T, B)
    weights[:, 0] = 0
    for _ in range(3):
        model.update_obs_norm(obs, weights)
    norm = model.critic_vector.norm
    assert norm is not None
    assert norm.count.item() == T * B + 3 * T * (B - 1)
    assert model.vector.norm is not None
    assert norm.mean.min() > 50 * model.vector.norm.mean.max()
    state = model.initial_state(B)
    before = fresh(obs, state, first).values
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(obs, state, first).values, model(obs, state, first).values)
    assert not torch.equal(fresh(obs, state, first).values, before)


def test_without_leaves_for_the_critic_alone_nothing_is_added() -> None:
    torch.manual_seed(0)
    plain = ActorCritic(RICH, separate_critic=True, **SMALL)
    assert not [name for name in plain.state_dict() if name.startswith("critic_vector")]
    assert plain.leaves == ("screen", "health", "weapon")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"critic_only": ["health"]}, "needs separate_critic = True"),
        ({"critic_only": ["healt"], "separate_critic": True}, r"names \['healt'\]; the observation has screen, health"),
    ],
)
def test_leaves_for_the_critic_alone_need_one_and_exist(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ActorCritic(RICH, **SMALL, **settings)


# Without language: reference counts of the nets with it, less its embedding (1000 x 20), its LSTM
# (20 -> 64, one bias) and its 64 inputs to the core's four gates.
LANGUAGE = 1000 * 20 + 4 * 64 * (20 + 64 + 1) + 64 * 4 * 256
SECOND_BIAS = 4 * 256  # torch's LSTM has two bias vectors


@pytest.mark.parametrize(
    ("shape", "conv", "features", "core", "num_actions", "expected"),
    [
        ((72, 96, 3), "resnet_impala", 256, "lstm", 9, 1_520_714 + SECOND_BIAS),
        ((72, 96, 3), "resnet_impala", 256, "lstm", 9, 1_628_010 - LANGUAGE + SECOND_BIAS),
        ((72, 96, 3), "resnet_impala", 256, "lstm", 15, 1_635_696 - LANGUAGE + SECOND_BIAS),
        ((72, 96, 3), "impala_shallow", 256, "lstm", 9, 1_230_426 - LANGUAGE + SECOND_BIAS),
        ((84, 84, 4), "resnet_impala", 256, "none", 18, 1_094_115),
        ((84, 84, 4), "resnet_impala", 256, "none", 4, 1_090_517),
        ((84, 84, 4), "resnet_impala", 256, "lstm", 18, 1_638_883 + SECOND_BIAS),
        ((84, 84, 4), "nature", 512, "none", 18, 1_693_875),
        ((84, 84, 4), "impala_shallow", 256, "none", 18, 681_027),
    ],
)
def test_parameter_counts_of_the_papers(
    shape: tuple[int, ...], conv: Any, features: int, core: Any, num_actions: int, expected: int
) -> None:
    spec = EnvSpec({"obs": image(*shape)}, ActionSpec((num_actions,)))
    extras = core == "lstm"  # IMPALA's recurrent nets see the last action and reward
    model = ActorCritic(
        spec, conv=conv, conv_features=features, core=core, core_size=256, activation="relu",
        last_action=extras, last_reward=extras, init="torch",
    )  # fmt: skip
    assert model.num_parameters == expected


def test_the_first_policy_is_nearly_uniform() -> None:
    model = ActorCritic(VECTOR, **SMALL)
    output = model(observations(VECTOR), model.initial_state(B), starts())
    assert model.distribution(output.params, {}).log_prob(
        torch.zeros(T, B, 1, dtype=torch.int64), torch.empty(T, B, 0)
    ).exp().sub(0.25).abs().max().item() < 0.02  # fmt: skip
    assert output.values.abs().max().item() > 0.02  # the value head has no small gain


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_the_gates_of_a_memory_start_orthogonal(core: Any) -> None:
    """W W^T = 1 for each gate, on the side of the state and of the input; "torch" leaves torch's own."""
    spec = EnvSpec({"obs": real(16)}, ActionSpec((2,)))
    model = ActorCritic(spec, core=core, core_size=8, mlp_layers=(16,))
    for name, parameter in model.actor.core.named_parameters():
        if "weight" in name:
            for gate in parameter.detach().split(8):
                torch.testing.assert_close(gate @ gate.T, torch.eye(8), rtol=0, atol=1e-5)
        else:
            assert not parameter.any()
    plain = ActorCritic(spec, core=core, core_size=8, mlp_layers=(16,), init="torch")
    assert all(parameter.any() for parameter in plain.actor.core.parameters())


@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_the_initial_std(state_dependent_std: bool) -> None:
    spec = EnvSpec({"obs": real(3)}, ActionSpec((), (-1.0, -1.0), (1.0, 1.0)))
    model = ActorCritic(spec, state_dependent_std=state_dependent_std, initial_std=0.5, **SMALL)
    params = model(observations(spec), model.initial_state(B), starts()).params
    assert params.shape == (T, B, 4)
    torch.testing.assert_close(params[..., 2:].exp(), torch.full((T, B, 2), 0.5), rtol=0.05, atol=0)
    assert (model.log_std is None) == state_dependent_std


def test_return_normalisation_keeps_raw_values() -> None:
    model = ActorCritic(VECTOR, **SMALL)
    obs, first = observations(VECTOR), starts()
    before = model.denormalize_value(model(obs, model.initial_state(B), first).values)
    targets = 100 + 50 * torch.randn(T, B)
    model.update_return_norm(targets)
    values = model(obs, model.initial_state(B), first).values
    torch.testing.assert_close(model.denormalize_value(values), before, rtol=1e-4, atol=1e-4)
    assert model.normalize_value(targets).mean().item() == pytest.approx(0.0, abs=1e-4)
    plain = ActorCritic(VECTOR, normalize_returns=False, **SMALL)
    plain.update_return_norm(targets)
    assert plain.denormalize_value(values) is values
    assert plain.normalize_value(values) is values


def test_observations_are_normalised_by_counted_rows() -> None:
    model = ActorCritic(VECTOR, **SMALL)
    obs = observations(VECTOR)
    weights = torch.ones(T, B)
    weights[:, 0] = 0
    obs["obs"][:, 0] = float("nan")
    model.update_obs_norm(obs, weights)
    norm = model.vector.norm
    assert norm is not None
    torch.testing.assert_close(norm.mean.float(), obs["obs"][:, 1:].mean((0, 1)), rtol=1e-5, atol=1e-5)
    assert norm.count.item() == T * (B - 1)
    untouched = ActorCritic(VECTOR, normalize_obs=False, **SMALL)
    untouched.update_obs_norm(obs)
    assert untouched.vector.norm is None


def test_everything_that_is_learned_or_counted_is_saved() -> None:
    model, fresh = (ActorCritic(RICH, separate_critic=True, **SMALL) for _ in range(2))
    obs, first = observations(RICH), starts()
    model.update_obs_norm(obs)
    model.update_return_norm(7 + torch.randn(T, B))
    fresh.load_state_dict(model.state_dict())
    state = model.initial_state(B)
    mine, yours = model(obs, state, first), fresh(obs, state, first)
    assert torch.equal(mine.params, yours.params)
    assert torch.equal(model.denormalize_value(mine.values), fresh.denormalize_value(yours.values))
    pointers = [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert len(set(pointers)) == len(pointers)  # no tensor twice: safetensors refuses that


def test_heads_stay_float32_under_bf16() -> None:
    torch.manual_seed(0)
    model = ActorCritic(RICH, **SMALL)
    obs, first = observations(RICH), starts()
    state = model.initial_state(B)
    with torch.no_grad():
        expected = model(obs, state, first)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = [model(obs, state, first)]
        model.cast_trunk(torch.bfloat16)
        outputs.append(model(obs, state, first))
    for output in outputs:
        assert {part.dtype for part in output} == {torch.float32}
        torch.testing.assert_close(output.values, expected.values, rtol=0, atol=0.1)
        assert not torch.equal(output.values, expected.values)  # the trunk did run in bf16
    assert model.policy_head.weight.dtype == torch.float32
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.float64}  # statistics stay as they are


@pytest.mark.case("SPA-08")
def test_the_mask_may_have_any_name_but_must_fit() -> None:
    def with_mask(**masks: int) -> EnvSpec:
        leaves = {name: LeafSpec((size,), "int8", "mask") for name, size in masks.items()}
        return EnvSpec({"obs": real(3), **leaves}, ActionSpec((4,)))

    model = ActorCritic(with_mask(allowed=4), **SMALL)
    obs = observations(VECTOR)
    obs["allowed"] = torch.zeros(T, B, 4, dtype=torch.int8)
    obs["allowed"][..., 2] = 1
    policy = model.distribution(model(obs, model.initial_state(B), starts()).params, obs)
    assert (policy.sample()[0] == 2).all()
    assert (policy.mode()[0] == 2).all()
    for masks in ({"allowed": 5}, {"allowed": 4, "more": 4}):
        with pytest.raises(SpaceError, match="4 here"):
            ActorCritic(with_mask(**masks), **SMALL)


def test_a_leaf_of_the_environment_may_be_called_last_action() -> None:
    """Only when the model asks for the sampler's leaf is the name taken."""
    spec = EnvSpec({"obs": real(3), LAST_ACTION: real(2)}, ActionSpec((4,)))
    assert ActorCritic(spec, **SMALL).vector.output_size == 5
    assert ActorCritic(spec, last_action=True, **SMALL).vector.output_size == 3
