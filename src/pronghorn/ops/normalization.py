"""Running statistics that bring observations and returns to unit scale. They see tensors, never an environment.

Statistics are float64 buffers, so they travel with the weights in a state_dict. A forward pass never changes
them: only `update` does, on the learner, once for each batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pronghorn.ops.losses import alone


class RunningNorm(nn.Module):
    """Observations to mean 0 and variance 1 by the moments of everything seen so far, then clipped.

    shape: of one observation; the moments are per entry.
    clip: bound of the result.  eps: added to the variance, so that an entry that never varies gives 0.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 5.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.clip, self.eps = clip, eps
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """[..., *shape] to float32 of the same shape, within ±clip. Changes nothing."""
        # in float64: observations may be large against their spread
        scaled = (x - self.mean) * (self.var + self.eps).rsqrt()
        return scaled.clamp(-self.clip, self.clip).float()

    @torch.no_grad()
    def update(
        self, x: Tensor, weights: Tensor | None = None, over_all: Callable[[Tensor], Tensor] = alone
    ) -> None:
        """Merge a batch [..., *shape] into the moments; `weights` [...] counts each observation (None: 1).

        over_all: sums of this learner's batch to those of all learners' batches.

        An observation with an entry that is not finite is left out: one would spoil the moments for good.
        """
        flat = x.reshape(-1, *self.mean.shape).double()
        counts = flat.reshape(len(flat), -1).isfinite().all(1).double()
        if weights is not None:
            counts = counts * weights.reshape(-1).double()
        counts = counts.reshape(-1, *[1] * self.mean.dim())
        flat = torch.where(counts > 0, flat, 0.0)
        num_new = over_all(counts.reshape(len(flat), -1)[:, 0].sum())
        batch_mean = over_all((flat * counts).sum(0)) / num_new.clamp(min=1e-12)
        batch_squares = over_all(((flat - batch_mean).square() * counts).sum(0))
        total = (self.count + num_new).clamp(min=1e-12)
        # Chan et al. 1979: M2 = M2_a + M2_b + delta^2 n_a n_b / n
        delta = batch_mean - self.mean
        squares = self.var * self.count + batch_squares + delta.square() * self.count * num_new / total
        # where: an update that counts nothing leaves everything as it was, without asking the device
        changed = num_new > 0
        self.mean.copy_(torch.where(changed, self.mean + delta * num_new / total, self.mean))
        self.var.copy_(torch.where(changed, squares / total, self.var))
        self.count.add_(num_new)


class ReturnNorm(nn.Module):
    """Value targets to mean 0 and standard deviation 1, keeping the critic's outputs (PopArt, van Hasselt et al.
    2016; Hessel et al. 2018, eq. 9-10).

    decay: of the exponential moving moments, per update. 0.99 remembers about 100 updates: long against the
        noise of one batch, short against the growth of returns while a policy improves.
    min_std: floor of the standard deviation in return units. While a sparse reward has not been met the spread
        is 0, and the floor bounds how large the first reward looks.

    The moments are divided by 1 - decay^updates, as in Adam, so they are right from the first update on.
    """

    first: Tensor
    second: Tensor
    weight: Tensor
    mean: Tensor  # [] float64; 0 before the first update
    std: Tensor  # [] float64, at least min_std; 1 before the first update

    def __init__(self, decay: float = 0.99, min_std: float = 1e-2) -> None:
        super().__init__()
        self.decay, self.min_std = decay, min_std
        # decayed sums of x, of x^2 and of 1; and what follows from them, kept because every forward pass asks for it
        for name, value in (("first", 0.0), ("second", 0.0), ("weight", 0.0), ("mean", 0.0), ("std", 1.0)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))

    def normalize(self, x: Tensor) -> Tensor:
        """Returns in raw units to normalised ones, in the dtype of x."""
        return (x - self.mean) / self.std

    def denormalize(self, x: Tensor) -> Tensor:
        """The inverse of `normalize`: what the critic says, in raw return units."""
        return x * self.std + self.mean

    @torch.no_grad()
    def update(
        self, targets: Tensor, weights: Tensor | None = None, head: nn.Linear | None = None,
        over_all: Callable[[Tensor], Tensor] = alone,
    ) -> None:  # fmt: skip
        """Take in raw targets [T, B], and rewrite the critic's last layer so that its raw outputs stay the same.

        head: its weight and bias are changed in place. An optimiser's running moments are not rescaled.
        over_all: sums of this learner's targets to those of all learners'.
        """
        old_mean, old_std = self.mean.clone(), self.std.clone()
        counts = torch.ones_like(targets) if weights is None else weights
        wide = torch.where(counts > 0, targets, 0.0).double()
        total = over_all(counts.double().sum())
        share = counts.double() / total.clamp(min=1e-12)
        step = torch.where(total > 0, 1.0 - self.decay, 0.0)  # nothing counted: nothing changes
        first, second = over_all(torch.stack(((wide * share).sum(), (wide.square() * share).sum())))
        # m <- decay m + (1 - decay) E[x]
        self.first.lerp_(first, step)
        self.second.lerp_(second, step)
        self.weight.lerp_(torch.ones_like(self.weight), step)
        known = self.weight > 0
        weight = self.weight.clamp(min=1e-12)
        self.mean.copy_(torch.where(known, self.first / weight, 0.0))
        variance = self.second / weight - self.mean.square()
        self.std.copy_(torch.where(known, variance.clamp(min=0.0).sqrt().clamp(min=self.min_std), 1.0))
        if head is not None:
            self._preserve(head, old_mean, old_std)

    def _preserve(self, head: nn.Linear, old_mean: Tensor, old_std: Tensor) -> None:
        new_mean, new_std = self.mean, self.std
        # w' = (sigma / sigma') w,  b' = (sigma b + mu - mu') / sigma'
        head.weight.mul_(old_std / new_std)
        head.bias.copy_((old_std * head.bias.double() + old_mean - new_mean) / new_std)
