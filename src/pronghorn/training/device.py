"""Order, memory and graphs of work that is handed to a device, and stand-ins for a CPU. It computes nothing.

A GPU works behind the threads that ask it: what they asked for is done later, in the order of each one's queue. A CPU
has done it when the call returns, so there the same calls do nothing, and the code around them is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Work = Callable[[], None]

ALIGNMENT = 256  # bytes; of the arrays in a packet, as of what an allocator gives
WARM_UPS = 2  # runs before a capture: libraries choose their kernels and take their memory in the first ones


class Fence:
    """A point in one thread's work on the device that the work of another one must come after. On a CPU: nothing.

    Marked again, it means the newer point. What waits for a fence that was never marked does not wait.
    """

    def mark(self) -> None:
        """The point is behind all that this thread has asked for so far."""

    def wait(self) -> None:
        """What this thread asks for from now on is begun behind the point; the thread itself does not wait."""

    def sync(self) -> None:
        """Let this thread wait until the device has passed the point."""


class CudaFence(Fence):
    """On a GPU: an event of the streams that are current where it is called."""

    def __init__(self) -> None:
        # blocking: a thread that waits sleeps. By default it spins, on a core that an environment needs.
        self._event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._event.record()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def sync(self) -> None:
        self._event.synchronize()


class Queue:
    """What one thread asks of a device, done in that order beside the work of other threads. On a CPU: at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        """What this thread asks for inside goes into this queue."""

    def __exit__(self, *_error: object) -> None:
        """Back to the queue of before."""

    def graph(self, work: Work) -> Work:
        """What does `work` again when it is called, on the same tensors and with the same numbers.

        work: reads and writes tensors that stay where they are; asks the device for nothing, and copies nothing to it.
        It is done a few times before. Raises RuntimeError for work that cannot be made into a graph.
        """
        for _ in range(WARM_UPS):
            work()
        return work


class CudaQueue(Queue):
    """A stream of its own on a GPU, and CUDA graphs of its work, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # weights and buffers may still be on their way to the device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._inside: Any = nullcontext()
        # Safe to share: the graphs of a queue are never run at the same time, and what one leaves for others lies in
        # tensors that outlive it.
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __enter__(self) -> None:
        self._inside = torch.cuda.stream(self._stream)
        self._inside.__enter__()

    def __exit__(self, *error: object) -> None:
        self._inside.__exit__(*error)

    def graph(self, work: Work) -> Work:
        before, graph = torch.cuda.current_stream(self.device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(before)
        # A capture that fails leaves its stream current; this context does not.
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
            # thread_local: other threads may allocate and wait meanwhile, which would spoil a capture in global mode.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        before.wait_stream(self._stream)
        replay: Work = graph.replay
        return replay


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of this side on the device, without waiting for what the device still has to do."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Reader:
    """Brings a few float32 numbers of the device to this side; the thread sleeps meanwhile."""

    def __init__(self, device: torch.device, most: int = 64) -> None:
        self._here = torch.zeros(most, pin_memory=True) if device.type == "cuda" else None
        self._arrived = make_fence(device)

    def read(self, numbers: Tensor) -> list[float]:
        """[K], K at most `most`."""
        if self._here is not None:
            here = self._here[: len(numbers)]
            here.copy_(numbers, non_blocking=True)
            self._arrived.mark()
            self._arrived.sync()
            numbers = here
        values: list[float] = numbers.tolist()
        return values


def cause(error: BaseException) -> str:
    """The first line of what went wrong first: a capture that ends badly says only that something did before."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or repr(error)).splitlines()[0]


def make_fence(device: torch.device) -> Fence:
    """A fence in the work of that device."""
    return CudaFence() if device.type == "cuda" else Fence()


def make_queue(device: torch.device) -> Queue:
    """A queue of that device for one thread."""
    return CudaQueue(device) if device.type == "cuda" else Queue(device)


# ---------------------------------------------------------------- arrays that travel together


def pinned(device: torch.device, num_bytes: int) -> Tensor:
    """Memory of this side, uint8 [num_bytes] zeros, that the device copies from and to while the thread goes on."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Array(NamedTuple):
    """Shape and dtype of one array of a packet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Packet:
    """Arrays that lie in one block on this side and in one on the device, so that one copy brings all of them over.

    here: the arrays of this side, as NumPy's views of its block.  there: those of the device, as tensors.
    """

    def __init__(self, arrays: Mapping[str, Array], here: Tensor, there: Tensor) -> None:
        """here, there: uint8 [at least packet_bytes(arrays)]; other packets may lie in them too, one at a time."""
        self._here, self._there, end = here, there, 0
        self.here: dict[str, NDArray[Any]] = {}
        self.there: dict[str, Tensor] = {}
        self.offsets: dict[str, int] = {}
        for name, array in arrays.items():
            start, end = end, end + array.num_bytes
            self.here[name] = _view(here[start:end], array).numpy()
            self.there[name] = _view(there[start:end], array)
            self.offsets[name], end = start, _aligned(end)
        self.num_bytes = end

    def upload(self, num_bytes: int | None = None) -> None:
        """To the device, in the queue that is current; this side must not be changed until that is done.

        num_bytes: only so many, from the first one on.
        """
        self._there[:num_bytes or self.num_bytes].copy_(self._here[: num_bytes or self.num_bytes], non_blocking=True)

    def download(self) -> None:
        """From the device, in the queue that is current; this side holds it once that is done."""
        self._here[: self.num_bytes].copy_(self._there[: self.num_bytes], non_blocking=True)


def packet_bytes(arrays: Mapping[str, Array]) -> int:
    """The size of the blocks that a packet of these arrays needs."""
    return sum(_aligned(array.num_bytes) for array in arrays.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _view(block: Tensor, array: Array) -> Tensor:
    return block.view(array.dtype).view(array.shape)


def wide(array: Tensor) -> Tensor:
    """[N, ...] as a view [N, k] of the widest integers that a row is a whole number of.

    A kernel that moves rows moves an entry at a time, so with bytes it would move little.
    """
    rows = array.unsqueeze(1) if array.dim() == 1 else array.flatten(1)
    num_bytes = rows.shape[1] * rows.element_size()
    fitting = (d for d in (torch.int64, torch.int32, torch.int16, torch.uint8) if num_bytes % d.itemsize == 0)
    return rows.view(next(fitting)) if num_bytes else rows


def columns(array: Tensor, index: Tensor) -> Tensor:
    """`array[:, index]` of a contiguous [T, B, ...] on a device, moved in wide entries; index: [b] int64."""
    entries = wide(array.flatten(0, 1))
    taken = entries.view(*array.shape[:2], entries.shape[1]).index_select(1, index)  # [T, b, k]
    return taken.view(array.dtype).view(len(array), len(index), *array.shape[2:])


def torch_dtype(name: str) -> torch.dtype:
    """Of NumPy's name."""
    return torch.from_numpy(np.zeros(0, np.dtype(name))).dtype
