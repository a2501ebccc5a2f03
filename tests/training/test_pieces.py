"""A batch in pieces: the same outputs and the same gradients as in one pass, whichever thread takes which piece."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from pronghorn.models.actor_critic import ActorCritic
from pronghorn.training.pieces import Pieces
from pronghorn.training.store import Batch
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec

T = 5
SPEC = EnvSpec(
    {"image": LeafSpec((40, 40, 3), "uint8", "image", "hwc", 0, 255), "speed": LeafSpec((2,), "float32", "vector")},
    ActionSpec((3, 2), (-1.0,), (2.0,)),
)


def made(core: str = "gru", unrolls: int = 11) -> tuple[ActorCritic, Batch]:
    torch.manual_seed(0)
    model = ActorCritic(SPEC, conv="nature", conv_features=16, core=core, core_size=8)  # type: ignore[arg-type]
    obs = {
        "image": torch.randint(0, 255, (T + 1, unrolls, 40, 40, 3), dtype=torch.uint8),
        "speed": torch.randn(T + 1, unrolls, 2),
    }
    first = torch.rand(T + 1, unrolls) < 0.2
    state = torch.randn(unrolls, model.state_size)
    return model, Batch(obs, {"first": first}, state, np.zeros((T, unrolls), np.int64))


def loss(params: Tensor, values: Tensor) -> Tensor:
    """Not a sum over columns: what one column gives depends on all others, as with normalised advantages."""
    return (params.square().mean() * values.std() + values[:-1].pow(3).mean()) * 10.0


@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
@pytest.mark.parametrize(("num_threads", "unrolls"), [(1, 11), (2, 11), (3, 2), (2, 40)])
def test_outputs_and_gradients_are_those_of_one_pass(core: str, num_threads: int, unrolls: int) -> None:
    model, batch = made(core, unrolls)
    whole = model(batch.obs, batch.state, batch.steps["first"])
    loss(whole.params, whole.values).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    pieces = Pieces(model, num_threads)
    out = pieces.forward(batch)
    torch.testing.assert_close(out.params, whole.params)
    torch.testing.assert_close(out.values, whole.values)
    torch.testing.assert_close(out.state, whole.state)
    loss(out.params, out.values).backward()
    pieces.backward()
    pieces.close()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_repeats_to_the_last_bit() -> None:
    model, batch = made(unrolls=33)
    pieces, seen = Pieces(model, 4), []
    for _ in range(5):
        model.zero_grad()
        out = pieces.forward(batch)
        loss(out.params, out.values).backward()
        pieces.backward()
        seen.append([p.grad.clone() for p in model.parameters()])
    pieces.close()
    for grads in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, seen[0], strict=True))


def test_gradients_add_to_what_is_there_and_a_pass_without_them_leaves_none() -> None:
    model, batch = made()
    pieces = Pieces(model, 2)
    with torch.no_grad():
        assert not pieces.forward(batch).values.requires_grad
    for _ in range(2):
        pieces.forward(batch).values.sum().backward()
        pieces.backward()
    twice = model.value_head.bias.grad.clone()
    model.zero_grad()
    pieces.forward(batch).values.sum().backward()
    pieces.backward()
    pieces.close()
    torch.testing.assert_close(twice, 2 * model.value_head.bias.grad)
    assert not model.policy_head.bias.grad.any()  # the loss did not depend on it


@pytest.mark.timeout(30)
def test_an_error_in_a_piece_is_raised_and_leaves_nobody_waiting() -> None:
    model, batch = made(unrolls=16)
    pieces = Pieces(model, 2)
    out = pieces.forward(batch)
    out.values.sum().backward()
    with torch.no_grad():
        model.value_head.weight.add_(1.0)  # backward needs it as it was
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pieces.backward()
    pieces.forward(batch).values.sum().backward()  # and the threads live on
    pieces.backward()
    batch.state = batch.state[:, :3]
    with pytest.raises(RuntimeError):
        pieces.forward(batch)
    pieces.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("learner")]


def test_each_thread_computes_on_one_core() -> None:
    before = torch.get_num_threads()
    model, _ = made()
    pieces = Pieces(model, 2)
    assert pieces._run(lambda _: torch.get_num_threads(), 8) == [1] * 8
    pieces.close()
    assert torch.get_num_threads() == before
