"""A CPU whose graphs are as strict as those of a GPU: a list of operations on fixed tensors and numbers, done again.

What a GPU refuses while a graph is made is refused here too: asking for a number, sizes that depend on numbers, copying
from this side. So is drawing random numbers, which would make a graph depend on its size.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pronghorn.training.device import WARM_UPS, Fence, Queue

REFUSED = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "lift_fresh", "rand",
    "randn", "randint", "randperm", "uniform_", "normal_", "random_", "multinomial", "bernoulli_",
)  # fmt: skip


class Recorder(TorchDispatchMode):
    """Every operation that is done inside, with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_flags = name.startswith("index") and any(
            torch.is_tensor(x) and x.dtype == torch.bool for x in tree_leaves(args[1:2])
        )
        if name in REFUSED or by_flags:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, tree_leaves(out)))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, before in self.operations:
            for old, new in zip(before, tree_leaves(func(*args, **kwargs)), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():  # not a view, nor done in place
                    old.copy_(new)


class RecordingQueue(Queue):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_graphs = 0

    def graph(self, work):
        for _ in range(WARM_UPS):
            work()
        recorder = Recorder()
        with recorder:
            work()
        self.num_graphs, self.last = self.num_graphs + 1, recorder
        return recorder.replay


class LoggedFence(Fence):
    """Writes down what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def mark(self) -> None:
        self.log.append(f"{self.name} marked")

    def wait(self) -> None:
        self.log.append(f"{self.name} waited for")

    def sync(self) -> None:
        self.log.append(f"{self.name} synced")


def know_no_autocast(monkeypatch) -> None:
    """Autocast does not know the device that only knows shapes."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())


class AllOn(TorchDispatchMode):
    """Refuses operations on a tensor that lies on another device: on a GPU it would have to be brought there first."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.num_operations = torch.device(device), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        elsewhere = [x for x in tree_leaves((args, kwargs, out)) if torch.is_tensor(x) and x.device != self.device]
        if elsewhere:
            raise RuntimeError(f"{func} meets a tensor on {elsewhere[0].device}")
        self.num_operations += 1
        return out
