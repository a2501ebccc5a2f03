"""Runs a network over a batch in pieces, several at the same time, and puts their gradients together. It knows no loss.

An operation that is spread over several threads waits at its end for the slowest of them, and where environments and
acting share the cores some thread is always late. Pieces of a batch on one thread each wait for one another only once
a pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pronghorn.machine import limit_threads
from pronghorn.models.actor_critic import ActorCritic, ModelOutput
from pronghorn.training.store import Batch


def arithmetic(precision: str, device: str) -> torch.autocast:
    """Within it encoders and cores compute in `precision`, from float32 weights."""
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16")


class Pieces:
    """The passes of one network over batches of whole unrolls, on threads of its own.

    `forward` gives outputs that are leaves; after a loss of them was differentiated, `backward` carries their gradients
    to the weights. Results do not depend on which thread takes which piece.
    """

    def __init__(self, model: ActorCritic, num_threads: int, precision: str = "float32") -> None:
        self.model, self.num_threads, self.precision = model, num_threads, precision
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._threads = ThreadPoolExecutor(num_threads, "learner", initializer=limit_threads, initargs=(1,))
        self._outputs: list[ModelOutput] = []  # of the last forward pass, one a piece
        self._leaves: ModelOutput | None = None
        self._turn, self._turned = 0, threading.Condition()

    def forward(self, batch: Batch) -> ModelOutput:
        """The model's output for the whole batch; with leaves for `backward` if gradients are enabled here."""
        grad = torch.is_grad_enabled()
        count = batch.state.shape[0]
        # One for each thread. More would balance better, but a memory steps through the unrolls of a piece together.
        columns = torch.arange(count).tensor_split(min(self.num_threads, count))
        self._outputs = self._run(lambda i: self._forward(batch, columns[i], grad), len(columns))
        params = torch.cat([o.params.detach() for o in self._outputs], 1)
        values = torch.cat([o.values.detach() for o in self._outputs], 1)
        state = torch.cat([o.state.detach() for o in self._outputs])
        output = ModelOutput(params.requires_grad_(grad), values.requires_grad_(grad), state)
        self._leaves = output if grad else None
        return output

    def backward(self) -> None:
        """Add the gradients of the leaves' losses to those of the weights, piece after piece."""
        leaves, self._leaves = self._leaves, None
        assert leaves is not None, "backward() belongs to one forward()"
        sizes = [o.values.shape[1] for o in self._outputs]
        params = _split(leaves.params, sizes)
        values = _split(leaves.values, sizes)
        self._turn = 0
        self._run(lambda i: self._backward(i, params[i], values[i]), len(sizes))
        self._outputs = []

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _run(self, job: Callable[[int], object], count: int) -> list:  # type: ignore[type-arg]
        return list(self._threads.map(job, range(count)))

    def _forward(self, batch: Batch, columns: Tensor, grad: bool) -> ModelOutput:
        piece = slice(int(columns[0]), int(columns[-1]) + 1)
        with torch.set_grad_enabled(grad), arithmetic(self.precision, "cpu"):  # each thread has modes of its own
            obs = {name: leaf[:, piece] for name, leaf in batch.obs.items()}
            output: ModelOutput = self.model(obs, batch.state[piece], batch.steps["first"][:, piece])
        return output

    def _backward(self, index: int, params: Tensor, values: Tensor) -> None:
        output = self._outputs[index]
        grads: Sequence[Tensor] = ()
        try:
            grads = torch.autograd.grad((output.params, output.values), self._parameters, (params, values))
        finally:
            self._add(index, grads)

    def _add(self, index: int, grads: Sequence[Tensor]) -> None:
        """In the order of the pieces: a sum in another order differs in its last bits. None where a pass failed."""
        with self._turned:
            self._turned.wait_for(lambda: self._turn == index)
            for parameter, grad in zip(self._parameters, grads, strict=False):
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
            self._turn = index + 1
            self._turned.notify_all()


def _split(leaf: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """The gradient of a leaf for each piece; zeros if the loss did not depend on it."""
    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return torch.split(grad, sizes, 1)
