"""Gradients of optimiser steps by graphs of a GPU: one for each shape of a batch. It knows no loss.

A step of the default network is some two thousand short operations (a memory goes through an unroll step by step, and
so do targets). Started one by one they take longer than they compute, and they hold Python, which acting needs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pronghorn.errors import PronghornError
from pronghorn.training.device import Queue, Work, cause

MAX_GRAPHS = 8  # each takes a second and memory; a run that needs more keeps changing sizes or hyper-parameters
TOLERANCE = {False: 1e-3, True: 3e-2}  # by the arithmetic, float32 or bfloat16: kernels may add up in any order

_LOG = logging.getLogger("pronghorn")


class Step(NamedTuple):
    """What an optimiser step is told before it is made; its gradients are in the parameters.

    names, numbers: what is reported, [K] float32 on the device.  targets: [T, b] value targets, raw return units.
    """

    names: tuple[str, ...]
    numbers: Tensor
    targets: Tensor


class Graphed(NamedTuple):
    """A graph, and the tensors that it reads and writes, which stay where they are. grads: as the parameters' go."""

    replay: Work
    inputs: list[Tensor]
    step: Step
    grads: list[Tensor | None]

    @property
    def outputs(self) -> list[Tensor]:
        return _outputs(self.step, self.grads)


class StepGraphs:
    """Does what a function does, which takes tensors and leaves gradients, by graphs of it.

    The first call with tensors of new shapes makes a graph and compares it with the function. Where none can be made,
    or where it differs, "auto" goes on with the function and says so; "on" raises PronghornError.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], queue: Queue, *, graphs: str, rough: bool) -> None:
        """rough: the arithmetic is bfloat16's."""
        self._parameters, self._queue = parameters, queue
        self._required, self._tolerance = graphs == "on", TOLERANCE[rough]
        self._graphs: dict[Hashable, Graphed] = {}
        self._given_up = False

    def __call__(self, function: Callable[[Sequence[Tensor]], Step], inputs: Sequence[Tensor], key: Hashable) -> Step:
        """`function(inputs)`, or the same by a graph. Gradients are valid until the next call.

        function: may leave no gradient graph alive.  key: what else than shapes the function depends on.
        """
        whole_key = (key, *((tuple(x.shape), x.dtype) for x in inputs))
        graph = self._graphs.get(whole_key)
        if graph is None:
            graph = self._try(function, inputs, whole_key)
        if graph is None:
            return function(inputs)
        torch._foreach_copy_(graph.inputs, list(inputs))
        graph.replay()
        for parameter, grad in zip(self._parameters, graph.grads, strict=True):
            parameter.grad = grad
        return graph.step._replace(targets=graph.step.targets.clone())  # the next replay writes there again

    def _try(
        self, function: Callable[[Sequence[Tensor]], Step], inputs: Sequence[Tensor], key: Hashable
    ) -> Graphed | None:
        if self._given_up:
            return None
        try:
            if len(self._graphs) == MAX_GRAPHS:
                raise PronghornError(f"more than {MAX_GRAPHS} sizes of batches or hyper-parameters")
            graph = self._make(function, inputs)
        except (RuntimeError, PronghornError) as error:
            why = f"learning by CUDA graphs failed: {cause(error)}"
            if self._required:
                raise PronghornError(f"{why} (--graphs auto goes on without them)") from error
            _LOG.warning("%s. Going on with single operations, which are slower (--graphs off: without this try).", why)
            self._given_up = True
            return None
        if graph is not None:
            self._graphs[key] = graph
        return graph

    def _make(self, function: Callable[[Sequence[Tensor]], Step], inputs: Sequence[Tensor]) -> Graphed | None:
        """A graph that does what the function does; None if its numbers are not finite, so that nothing can be told.

        Raises PronghornError if the graph gives others.
        """
        static = [x.clone() for x in inputs]
        expected = self._run(function, static)
        if not math.isfinite(sum(expected.step.numbers.tolist())):
            return None
        step = expected.step._replace(numbers=expected.step.numbers.clone(), targets=expected.step.targets.clone())
        outputs = _outputs(step, grads := [None if g is None else torch.zeros_like(g) for g in expected.grads])

        def work() -> None:
            torch._foreach_copy_(outputs, self._run(function, static).outputs)

        graph = Graphed(self._queue.graph(work), static, step, grads)
        for output in outputs:
            output.fill_(torch.nan)
        graph.replay()
        self._require_same(expected, graph)
        return graph

    def _run(self, function: Callable[[Sequence[Tensor]], Step], inputs: list[Tensor]) -> Graphed:
        """The function itself, with gradients that are new tensors: in a capture, the graph's own."""
        for parameter in self._parameters:
            parameter.grad = None
        step = function(inputs)
        # A graph of gradients that lives on would keep nodes of another stream, which a capture cannot follow.
        assert not any(tensor.requires_grad for tensor in (step.numbers, step.targets))
        return Graphed(lambda: None, inputs, step, [parameter.grad for parameter in self._parameters])

    def _require_same(self, expected: Graphed, graph: Graphed) -> None:
        pairs = [(a, b) for a, b in zip(expected.grads, graph.grads, strict=True) if a is not None and b is not None]
        # ||g - g'|| / ||g||, and each number against its size
        whole = torch.stack([a.norm() for a, _ in pairs]).norm()
        apart = torch.stack([(a - b).norm() for a, b in pairs]).norm() / (whole + 1e-12)
        numbers = expected.step.numbers
        numbers_apart = ((numbers - graph.step.numbers).abs() / (numbers.abs() + 1.0)).max()
        targets = expected.step.targets
        targets_apart = ((targets - graph.step.targets).abs() / (targets.abs() + 1.0)).max()
        worst = dict(zip(("gradients", "numbers", "targets"),
                         torch.stack((apart, numbers_apart, targets_apart)).tolist(), strict=True))  # fmt: skip
        differences = ", ".join(f"{name} by {value:.2g}" for name, value in worst.items())
        _LOG.debug("a graph of an optimiser step differs from single operations: %s", differences)
        if not all(value <= self._tolerance for value in worst.values()):  # nan is not
            raise PronghornError(
                f"a graph of an optimiser step differs from single operations: {differences} (at most "
                f"{self._tolerance:g})"
            )


def _outputs(step: Step, grads: Sequence[Tensor | None]) -> list[Tensor]:
    return [step.numbers, step.targets, *(grad for grad in grads if grad is not None)]


def gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[Tensor | None]:
    """Of a loss, in the memory formats of the parameters, which a fused optimiser goes through side by side.

    Not `backward()`: its nodes that add up gradients stay on the stream that first used the parameters, where a
    capture on another one cannot follow.
    """
    for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        formed = grad is None or grad.stride() == parameter.stride()
        yield grad if formed else torch.empty_like(parameter).copy_(grad)
