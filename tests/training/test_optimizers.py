"""The optimisers by hand: TensorFlow's RMSProp, and that each goes on from a saved state."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from pronghorn.config import LearnerConfig
from pronghorn.training.optimizers import RMSPropTF, make_optimizer


def test_rmsprop_of_tensorflow_by_hand() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = RMSPropTF([p], lr=0.1, decay=0.9, eps=0.01)
    p.grad = torch.tensor([2.0])
    optimizer.step()
    # s = 0.9 * 1 + 0.1 * 4 = 1.3;  p = 1 - 0.1 * 2 / sqrt(1.3 + 0.01)
    assert p.item() == pytest.approx(1 - 0.2 / math.sqrt(1.31))


@pytest.mark.parametrize("name", ["adam", "rmsprop", "rmsprop_tf"])
def test_optimisers_step_and_restore(name: str) -> None:
    settings = LearnerConfig(optimizer=name, lr=0.1, optimizer_eps=1e-6)  # type: ignore[arg-type]
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(settings, [p])
    p.grad = torch.ones(3)
    optimizer.step()
    saved, at = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
    optimizer.step()
    q = torch.nn.Parameter(at)
    other = make_optimizer(settings, [q])
    other.load_state_dict(saved)
    q.grad = torch.ones(3)
    other.step()
    assert torch.equal(p, q)
