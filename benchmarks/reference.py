"""What the stages of training are compared with: fixed kernels of NumPy and torch, none of which knows this package.

A slower machine makes a stage and its kernel slower alike, so their ratio stays. Every change here makes the ratios in
baseline.json mean something else: record them anew (`python benchmarks/guard.py --record`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Kernel = Callable[[], None]


def calls() -> Kernel:
    """Small calls, whose own cost is most of the work: Python, and the way into NumPy and torch. On 16 numbers."""
    table, rows = np.ones((64, 4), np.float32), np.arange(0, 64, 4)
    flags, tensor, index = np.zeros(64, np.bool_), torch.ones(16, 4), torch.arange(16)

    def kernel() -> None:
        for _ in range(30):
            picked = table[rows]
            table[rows] = picked
            flags[rows] = picked[:, 0] > 2.0
            flags.any()
            total = torch.from_numpy(picked)[index] + tensor
            total.sum(-1).numpy()

    return kernel


def rows() -> Kernel:
    """1,024 numbers scattered into a table of 2,048 unrolls and gathered again, 40 times: NumPy's indexing."""
    table, slots = np.zeros((2048, 128), np.float32), np.random.default_rng(0).permutation(2048)[:1024]
    columns, values = np.arange(1024) % 128, np.ones(1024, np.float32)

    def kernel() -> None:
        for _ in range(40):
            table[slots, columns] = values
            table[slots, columns] += 1.0

    return kernel


def arithmetic() -> Kernel:
    """Matrix products in float32, 384 x 384: multiplications on data that fit the caches."""
    a, b, out = torch.full((384, 384), 0.5), torch.full((384, 384), 0.5), torch.empty(384, 384)

    def kernel() -> None:
        torch.mm(a, b, out=out)

    return kernel


def memory() -> Kernel:
    """4 MiB of bytes converted to 16 MiB of float32: what comes from and goes to memory."""
    source, out = torch.full((4 << 20,), 7, dtype=torch.uint8), torch.empty(4 << 20)

    def kernel() -> None:
        out.copy_(source)

    return kernel


KERNELS = {"calls": calls, "rows": rows, "arithmetic": arithmetic, "memory": memory}


def mixed(names: tuple[str, ...]) -> Kernel:
    """These kernels one after the other, as one."""
    kernels = [KERNELS[name]() for name in names]

    def kernel() -> None:
        for each in kernels:
            each()

    return kernel
