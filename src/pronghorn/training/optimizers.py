"""The optimisers that a run may choose, and the one of them that PyTorch lacks. It knows no loss and no network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pronghorn.config import LearnerConfig

MOMENTS = {  # what each optimiser knows of a parameter, once it was trained
    "Adam": frozenset(("step", "exp_avg", "exp_avg_sq")),
    "RMSprop": frozenset(("step", "square_avg")),
    "RMSPropTF": frozenset(("square_avg",)),
}


class RMSPropTF(torch.optim.Optimizer):
    """RMSProp as TensorFlow 1 has it, which IMPALA's ε belongs to: ε inside the root, accumulators start at 1."""

    def __init__(self, params: Iterable[Any], lr: float, decay: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """s ← decay s + (1 - decay) g²;  θ ← θ - lr g / sqrt(s + ε)."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["square_avg"] = torch.ones_like(p)
                square = state["square_avg"]
                square.mul_(group["decay"]).addcmul_(p.grad, p.grad, value=1.0 - group["decay"])
                p.addcdiv_(p.grad, (square + group["eps"]).sqrt_(), value=-group["lr"])


def make_optimizer(settings: LearnerConfig, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimiser that `settings` names, of parameters or of groups of them."""
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=settings.lr, eps=settings.optimizer_eps, fused=True)
    if settings.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=settings.lr, alpha=settings.rmsprop_decay, eps=settings.optimizer_eps)
    return RMSPropTF(parameters, settings.lr, settings.rmsprop_decay, settings.optimizer_eps)
