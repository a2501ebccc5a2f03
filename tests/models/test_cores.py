"""Cores against torch's own modules, against a step-by-step replay, and around episode starts."""

import pytest
import torch
from torch import Tensor, nn

from pronghorn.models.cores import Core, CoreKind, RecurrentCore, make_core

KINDS: list[CoreKind] = ["gru", "lstm"]
T, B, F, H = 7, 3, 5, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def never(num_steps: int = T, batch: int = B) -> Tensor:
    return torch.zeros(num_steps, batch, dtype=torch.bool)


def torch_state(core: Core, state: Tensor, layers: int) -> Tensor | tuple[Tensor, Tensor]:
    """Our flat state as torch's modules take it."""
    if isinstance(core.rnn, nn.GRU):
        return state.view(len(state), layers, H).transpose(0, 1).contiguous()
    h, c = state.view(len(state), layers, 2, H).permute(2, 1, 0, 3).contiguous()
    return h, c


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_equal_to_torch_without_resets(kind: CoreKind, layers: int) -> None:
    core = make_core(kind, F, H, layers)
    assert core.output_size == H
    assert core.state_size == layers * H * (2 if kind == "lstm" else 1)
    x, state = normal(T, B, F), normal(B, core.state_size, seed=1)
    y, after = core(x, state, never())
    expected, final = core.rnn(x, torch_state(core, state, layers))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    ours = torch_state(core, after, layers)
    torch.testing.assert_close(ours, final, rtol=1e-5, atol=1e-6)


@pytest.mark.case("RNN-04")
@pytest.mark.case("RNN-05")
@pytest.mark.case("RNN-10")
@pytest.mark.parametrize("kind", KINDS)
def test_an_unroll_is_its_steps_with_resets_anywhere(kind: CoreKind) -> None:
    core = make_core(kind, F, H, 2)
    x, state = normal(T, B, F), normal(B, core.state_size, seed=1)
    first = torch.rand(T, B, generator=torch.Generator().manual_seed(2)) < 0.4
    assert first.any()
    y, after = core(x, state, first)
    for b in range(B):  # each column alone, one step at a time, resetting by hand
        own = state[b : b + 1]
        for t in range(T):
            own = torch.zeros_like(own) if first[t, b] else own
            step, own = core(x[t : t + 1, b : b + 1], own, never(1, 1))
            torch.testing.assert_close(y[t, b], step[0, 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(after[b], own[0], rtol=1e-5, atol=1e-6)


@pytest.mark.case("RNN-05")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_crosses_an_episode_start(kind: CoreKind) -> None:
    core = make_core(kind, F, H)
    x = normal(4, 1, F).requires_grad_()
    first = never(4, 1)
    first[2] = True
    y, _ = core(x, normal(1, core.state_size, seed=1), first)
    (gradient,) = torch.autograd.grad(y[2:].sum(), x, retain_graph=True)
    assert gradient[:2].abs().sum().item() == 0.0
    assert gradient[2].abs().sum().item() > 0.0
    (gradient,) = torch.autograd.grad(y[1].sum(), x)
    assert gradient[0].abs().sum().item() > 0.0  # while within the episode it does


@pytest.mark.case("RNN-07")
@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_episodes_state_at_the_start_of_an_unroll_is_ignored(kind: CoreKind) -> None:
    core = make_core(kind, F, H)
    x, first = normal(8, 1, F), never(8, 1)
    first[0] = True
    y, after = core(x, torch.full((1, core.state_size), float("nan")), first)
    expected, expected_after = core(x, torch.zeros(1, core.state_size), never(8, 1))
    assert torch.equal(y, expected)
    assert torch.equal(after, expected_after)


@pytest.mark.case("RNN-04")
@pytest.mark.parametrize("kind", KINDS)
def test_the_returned_state_continues_the_sequence(kind: CoreKind) -> None:
    """Rollout of 16 in chunks of 4, each started from the state that the chunk before returned."""
    core = make_core(kind, F, H)
    x, first = normal(16, B, F), torch.rand(16, B, generator=torch.Generator().manual_seed(3)) < 0.2
    whole, final = core(x, torch.zeros(B, core.state_size), first)
    state, chunks = torch.zeros(B, core.state_size), []
    for start in range(0, 16, 4):
        y, state = core(x[start : start + 4], state, first[start : start + 4])
        chunks.append(y)
    torch.testing.assert_close(torch.cat(chunks), whole)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("kind", KINDS)
def test_initialised_as_torch(kind: CoreKind) -> None:
    torch.manual_seed(5)
    core = make_core(kind, F, H)
    torch.manual_seed(5)
    module = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](F, H)
    ours = {name.removeprefix("rnn."): tensor for name, tensor in core.state_dict().items()}
    assert ours.keys() == module.state_dict().keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in module.state_dict().items())


def test_none_has_no_state() -> None:
    core = make_core("none", F, H)
    x = normal(T, B, F)
    y, state = core(x, torch.zeros(B, 0), never())
    assert y is x
    assert (core.output_size, core.state_size, state.shape) == (F, 0, (B, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_weights_keep_a_float32_state(kind: CoreKind) -> None:
    core = make_core(kind, F, H)
    x, state = normal(T, B, F), normal(B, core.state_size, seed=1)
    expected, _ = core(x, state, never())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, after = core(x, state, never())
    assert (y.dtype, after.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(y, expected, rtol=0, atol=0.05)
    y, after = core.to(torch.bfloat16)(x, state, never())
    assert (y.dtype, after.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(y, expected, rtol=0, atol=0.05)


@pytest.mark.case("RNN-02")
def test_the_state_handed_on_is_that_after_the_episodes_own_steps() -> None:
    """A core that counts: rows whose episodes began 3 and 7 steps ago hand on 3 and 7, wherever the unroll ends."""

    class Counting(RecurrentCore):
        def _step(self, gates: Tensor, state: Tensor, weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
            return state + 1.0

    core = Counting(torch.nn.GRU(2, 1), states_per_layer=1)
    first = torch.zeros(7, 3, dtype=torch.bool)
    first[4, 0] = first[0, 1] = True
    outputs, state = core(torch.zeros(7, 3, 2), torch.full((3, 1), 10.0), first)
    assert state.flatten().tolist() == [3.0, 7.0, 17.0]
    assert outputs[:, 0, 0].tolist() == [11.0, 12.0, 13.0, 14.0, 1.0, 2.0, 3.0]
