"""Acting for several policies of one architecture: one pass after another, or one batched pass over stacked weights?

    python benchmarks/stacked.py

times both in turns, for small networks on vectors and for the Doom network on pixels, on one thread, and checks that
they agree. `torch.func.stack_module_state` and `torch.vmap` make the batched pass.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state

from pronghorn.models.actor_critic import ActorCritic
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec

ROUNDS, REPEATS = 7, 20


def networks(kind: str, count: int) -> tuple[list[ActorCritic], EnvSpec]:
    """`count` networks of one kind with different weights."""
    if kind == "pixels":
        leaf = LeafSpec((72, 128, 3), "uint8", "image", "hwc", low=0.0, high=255.0)
        spec, options = EnvSpec({"obs": leaf}, ActionSpec((3, 3))), {"core": "gru", "core_size": 512}
    else:
        spec = EnvSpec({"obs": LeafSpec((8,), "float32", "vector")}, ActionSpec((4,)))
        options = {"core": "none", "activation": "tanh", "separate_critic": True}
    return [ActorCritic(spec, **options).eval() for _ in range(count)], spec  # type: ignore[arg-type]


def inputs(spec: EnvSpec, nets: list[ActorCritic], rows: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Observations [P, 1, rows, …], states [P, rows, S], starts [P, 1, rows]."""
    leaf, count = spec.observation["obs"], len(nets)
    values = torch.rand(count, 1, rows, *leaf.shape)
    obs = {"obs": (255 * values).to(torch.uint8) if leaf.dtype == "uint8" else values}
    return obs, torch.zeros(count, rows, nets[0].state_size), torch.zeros(count, 1, rows, dtype=torch.bool)


def one_by_one(nets: list[ActorCritic], obs: dict[str, Tensor], state: Tensor, first: Tensor) -> list[Tensor]:
    return [net({"obs": obs["obs"][i]}, state[i], first[i]).params for i, net in enumerate(nets)]


def batched(nets: list[ActorCritic]) -> Callable[..., Tensor]:
    """The passes of all networks as one."""
    weights, buffers = stack_module_state(nets)
    skeleton = copy.deepcopy(nets[0]).to("meta")

    def one(weights: dict[str, Tensor], buffers: dict[str, Tensor], obs: Any, state: Tensor, first: Tensor) -> Tensor:
        params: Tensor = functional_call(skeleton, (weights, buffers), (obs, state, first)).params
        return params

    vectorised = torch.vmap(one)
    return lambda obs, state, first: vectorised(weights, buffers, obs, state, first)


def milliseconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(REPEATS):
        function()
    return 1e3 * (time.perf_counter() - start) / REPEATS


@torch.inference_mode()
def compare(kind: str, count: int, rows: int) -> None:
    """Print both times and their ratio, medians over rounds that alternate."""
    nets, spec = networks(kind, count)
    given = inputs(spec, nets, rows)
    label = f"{kind:7} {count} policies x {rows:4} rows"
    try:
        stacked = batched(nets)
        together = stacked(*given)
    except Exception as error:  # what cannot be vectorised is the result here
        print(f"{label}: cannot be batched: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        return
    worst = max(float((a - b).abs().max()) for a, b in zip(one_by_one(nets, *given), together, strict=True))
    times = [(milliseconds(lambda: one_by_one(nets, *given)), milliseconds(lambda: stacked(*given)))
             for _ in range(ROUNDS)]  # fmt: skip
    apart, at_once = np.median(times, axis=0)
    print(f"{label}: {apart:7.2f} ms one by one, {at_once:7.2f} ms batched, ratio {apart / at_once:.2f}, "
          f"largest difference {worst:.1e}")  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    for count in (4, 8):
        for rows in (2, 16, 64):
            compare("vectors", count, rows)
    for rows in (2, 16):
        compare("pixels", 4, rows)


if __name__ == "__main__":
    main()
