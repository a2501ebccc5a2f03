"""How the rows of a pool are described, divided into units, and laid out in the shared map. It moves no data."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronghorn.envworker import main as protocol
from pronghorn.errors import EnvError
from pronghorn.types import EnvSpec, Signature


@dataclass(slots=True, eq=False)
class Unit:
    """The rows [start, stop) that one worker steps together. The flags are those of workers.py."""

    worker: int
    group: int
    start: int
    stop: int
    rows: NDArray[np.int64]
    slot: int = 0  # where the observations of the last READY lie
    ready: bool = False
    taken: bool = False
    lost: bool = False
    void: bool = False  # taken from a worker that has died since: the answer goes nowhere
    excused: bool = False  # delivered as LOST: an answer is allowed and ignored
    deadline: float = math.inf  # when a busy unit counts as hung
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def state(self) -> str:
        """In words, for people."""
        if self.taken:
            return "waiting for actions"
        if self.lost:
            return "lost with its worker"
        return "ready" if self.ready else "stepping or being reset"

    @property
    def deliverable(self) -> bool:
        return (self.ready or self.lost) and not self.taken


def divide(num_workers: int, envs_per_worker: int, num_groups: int, rows_per_env: int) -> list[Unit]:
    """Units in the order of their rows: all workers' group 0, then all workers' group 1, ..."""
    units: list[Unit] = []
    start = 0
    for group in range(num_groups):
        size = rows_per_env * (envs_per_worker // num_groups + (group < envs_per_worker % num_groups))
        for worker in range(num_workers):
            units.append(Unit(worker, group, start, start + size, np.arange(start, start + size)))
            start += size
    return units


def anonymous_file() -> int:
    """Descriptor of shared memory without a name: nothing is left behind, however the processes end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pronghorn")
    with tempfile.TemporaryFile(prefix="pronghorn-") as file:
        return os.dup(file.fileno())


def map_layout(spec: EnvSpec, num_rows: int, num_workers: int) -> tuple[int, dict[str, Any]]:
    """(bytes, {name: [offset, dtype, shape]}) of the shared map; every array starts at a cache line."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "event": ("uint8", (num_rows,)),
        "reward": ("float32", (num_rows,)),
        "terminated": ("bool", (num_rows,)),
        "truncated": ("bool", (num_rows,)),
        "episode_over": ("bool", (num_rows,)),
        "game": ("int64", (num_rows,)),
        "info": ("float32", (num_rows, len(spec.info))),
        "discrete": ("int64", (num_rows, spec.action.num_discrete)),
        "continuous": ("float32", (num_rows, spec.action.num_continuous)),
        "at_work": ("int32", (num_workers,)),
    }
    for name, leaf in spec.observation.items():
        shapes["obs/" + name] = (leaf.dtype, (protocol.NUM_SLOTS, num_rows, *leaf.shape))
        shapes["final/" + name] = (leaf.dtype, (num_rows, *leaf.shape))
    offset, layout = 0, {}
    for name, (dtype, shape) in shapes.items():
        layout[name] = [offset, dtype, shape]
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        offset += -(-size // 64) * 64
    return offset, layout


def merged(raw: Sequence[Mapping[str, Any]]) -> EnvSpec:
    """The one spec of all tasks. Raises EnvError that names the first difference and both tasks.

    Weights of shaped rewards are in it only if all tasks begin with the same: what one lacks cannot be set in all.
    """
    specs = [EnvSpec.from_json(one) for one in raw]
    first = specs[0]
    for other in specs[1:]:
        _require_equal(first, other)
    info = tuple(dict.fromkeys(name for spec in specs for name in spec.info))
    if any(spec.action.tree != first.action.tree for spec in specs):  # equal factors, put together differently
        first = replace(first, action=replace(first.action, tree=""))
    if any(spec.signatures != first.signatures for spec in specs):
        first = replace(first, signatures=_without_trees(first.signatures))
    if any(spec.rewards != first.rewards for spec in specs):
        first = replace(first, rewards={})
    return replace(first, info=info, name=",".join(dict.fromkeys(spec.name for spec in specs)))


def _require_equal(a: EnvSpec, b: EnvSpec) -> None:
    parts: list[tuple[str, object, object]] = [
        (f"observation leaf '{name}'", a.observation.get(name), b.observation.get(name))
        for name in sorted({*a.observation, *b.observation})
    ]
    parts += [
        ("action (discrete factors)", a.action.discrete, b.action.discrete),
        ("action (lower bounds)", a.action.low, b.action.low),
        ("action (upper bounds)", a.action.high, b.action.high),
        ("number of frames per step", a.frame_skip, b.frame_skip),
        ("number of rows of an environment", a.rows_per_env, b.rows_per_env),
        ("names of the agents of a game", ", ".join(a.agents), ", ".join(b.agents)),
        ("spaces of single agents", _without_trees(a.signatures), _without_trees(b.signatures)),
    ]
    for what, one, other in parts:
        if one != other:
            raise EnvError(
                f"the tasks differ in the {what}: {a.name} has {one or 'none'}, {b.name} has {other or 'none'}. "
                "What plays one task of a run plays all, so their observations, actions and agents must be equal."
            )


def _without_trees(signatures: Sequence[Signature]) -> tuple[Signature, ...]:
    """As far as tasks must agree in them."""
    return tuple(replace(one, action=replace(one.action, tree="")) for one in signatures)
