"""The learners of one run, seen from one of them: sums over all, small exchanges, and who is missing.

A lone process is a world of size 1, in which every sum is the number itself. It knows no batch, loss or file.

All calls that need everyone are made by one thread of each process, in one order. A thread of its own tells the
others that this process lives and how many such calls it has begun, so that when one of them fails each can say who
did not come.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_distributed
from numpy.typing import NDArray
from torch import Tensor

from pronghorn.errors import LearnersLost, PronghornError
from pronghorn.launch import Launch

dist: Any = torch_distributed  # its stores and groups have no types
Store = Any  # a key-value store of torch.distributed

BEAT_S = 1.0  # between two signs of life
_SILENT_BEATS = 5  # waited for signs of life once a call has failed; who gave none in the last three and a half is gone
_BLOCK_BYTES = 1 << 24


class World:
    """The learners that train one policy together. Without arguments: one that is alone."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def leads(self) -> bool:
        """Whether this learner writes the run's files."""
        return self.rank == 0

    def sums(self, x: Tensor) -> Tensor:
        """The sum of every learner's x, which must have one shape and type in all, in place of x."""
        return x

    def exchange(self, numbers: Sequence[float]) -> NDArray[np.float64]:
        """[size, n] the numbers of every learner, by rank."""
        return np.array([numbers], np.float64)

    def give(self, data: bytes) -> bytes:
        """Learner 0's bytes, whatever the others pass."""
        return data

    def align(self, tensors: Sequence[Tensor]) -> None:
        """Make these floating-point tensors those of learner 0."""

    def tell(self, name: str, text: str) -> None:
        """Leave a text under a name, for whoever looks; nobody waits."""

    def told(self, name: str) -> dict[int, str]:
        """What the other learners have left under a name, by rank."""
        return {}

    def wait_told(self, name: str, timeout_s: float) -> dict[int, str]:
        """`told`, once all others have, or after timeout_s."""
        return {}

    def wait_told_by(self, rank: int, name: str, timeout_s: float) -> None:
        """Wait until a learner has left a text under a name, at most timeout_s."""

    def fail(self, text: str) -> None:
        """Say that this learner ends with an error, and leave: nobody's calls succeed any more.

        text: its exit code, a space, and why.
        """

    def close(self) -> None:
        """Leave; the others must need no call any more."""


class _Several(World):
    """Learners in processes of their own, or in threads of a test, that meet at a store."""

    def __init__(self, launch: Launch, store: Store, device: torch.device, timeout_s: float) -> None:
        super().__init__(launch.rank, launch.world_size)
        self._store, self._timeout_s = store, timeout_s
        self._calls = 0  # that need everyone, begun so far
        self._lost: LearnersLost | None = None
        self._beats: dict[int, tuple[bytes, float]] = {}  # of each: its latest sign of life, and when that came here
        store.set(f"who/{self.rank}", f"{socket.gethostname()}")
        self._beat(0)
        self._small: Any = _gloo(launch, store, timeout_s)
        self._large: Any = _nccl(launch, store, timeout_s) if device.type == "cuda" else self._small
        self._ended = threading.Event()
        self._beater = threading.Thread(target=self._beat_on, name="signs of life", daemon=True)
        self.exchange([0.0])  # connects now, so that an error comes before anything is built
        self._beater.start()

    # ------------------------------------------------------------ calls that need everyone

    def sums(self, x: Tensor) -> Tensor:
        """See World."""
        self._all(lambda: self._group_of(x).allreduce([x]))
        return x

    def exchange(self, numbers: Sequence[float]) -> NDArray[np.float64]:
        """See World."""
        table = torch.zeros(self.size, len(numbers), dtype=torch.float64)
        table[self.rank] = torch.tensor(numbers, dtype=torch.float64)
        self._all(lambda: self._small.allreduce([table]))
        result: NDArray[np.float64] = table.numpy()
        return result

    def give(self, data: bytes) -> bytes:
        """See World."""
        size = int(self.exchange([float(len(data))])[0, 0])
        whole = torch.zeros(size, dtype=torch.uint8)
        if self.leads:
            whole[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else whole
        for start in range(0, size, _BLOCK_BYTES):
            block = whole[start : start + _BLOCK_BYTES]
            self._all(partial(self._small.broadcast, block, 0))
        return whole.numpy().tobytes()

    def align(self, tensors: Sequence[Tensor]) -> None:
        """See World."""
        for tensor in tensors:
            plain = tensor.detach().contiguous()
            # x + 0 + 0 … = x, exactly
            tensor.detach().copy_(self.sums(plain if self.leads else torch.zeros_like(plain)))

    def _group_of(self, x: Tensor) -> Any:
        return self._large if x.is_cuda else self._small

    def _all(self, start: Any) -> None:
        """Begin a call of everyone and wait for it. Raises LearnersLost, which names who is missing."""
        if self._lost:
            raise self._lost
        self._calls += 1
        try:
            start().wait()
        except RuntimeError as error:
            self._lost = self._who_is_missing(error)
            raise self._lost from error

    # ------------------------------------------------------------ texts in the store

    def tell(self, name: str, text: str) -> None:
        """See World."""
        with contextlib.suppress(RuntimeError):  # its host has gone: so has the run
            self._store.set(f"{name}/{self.rank}", text)

    def told(self, name: str) -> dict[int, str]:
        """See World."""
        found = {}
        with contextlib.suppress(RuntimeError):
            for rank in self._others():
                if self._store.check([f"{name}/{rank}"]):
                    found[rank] = self._store.get(f"{name}/{rank}").decode()
        return found

    def wait_told(self, name: str, timeout_s: float) -> dict[int, str]:
        """See World."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.told(name)) < self.size - 1 and time.monotonic() < deadline and not self._lost:
            time.sleep(0.05)
        return found

    def wait_told_by(self, rank: int, name: str, timeout_s: float) -> None:
        """See World."""
        deadline = time.monotonic() + timeout_s
        while rank not in self.told(name) and time.monotonic() < deadline and not self._lost:
            time.sleep(0.05)

    def fail(self, text: str) -> None:
        """See World."""
        self.tell("failed", text)
        self._lost = self._lost or LearnersLost(text)
        self.close()

    def close(self) -> None:
        """See World."""
        self._ended.set()
        self._small = self._large = None  # closes the connections

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    # ------------------------------------------------------------ signs of life

    def _beat_on(self) -> None:
        number = 0
        while not self._ended.wait(BEAT_S):
            number += 1
            with contextlib.suppress(RuntimeError):
                self._beat(number)
                self._look()

    def _beat(self, number: int) -> None:
        self._store.set(f"beat/{self.rank}", f"{number} {self._calls}")

    def _look(self) -> None:
        """Note which signs of life are new."""
        beats = self._store.multi_get([f"beat/{rank}" for rank in self._others()])
        for rank, beat in zip(self._others(), beats, strict=True):
            if self._beats.get(rank, (b"", 0.0))[0] != beat:
                self._beats[rank] = (beat, time.monotonic())

    def _who_is_missing(self, error: RuntimeError) -> LearnersLost:
        """Why a call of everyone failed, in words that name processes."""
        calls = self._calls
        for _ in range(_SILENT_BEATS):
            if failed := self.told("failed"):
                rank, told = next(iter(failed.items()))
                code, _, text = told.partition(" ")
                return LearnersLost(f"{self._name(rank)} ended with an error: {text}", int(code))
            time.sleep(BEAT_S)
        now = time.monotonic()
        silent = [rank for rank, (_, at) in self._beats.items() if now - at > 3.5 * BEAT_S]
        late = [rank for rank, (beat, _) in self._beats.items() if int(beat.split()[1]) < calls]
        words = [f"{self._name(r)} has given no sign of life for {now - self._beats[r][1]:.0f} s" for r in silent]
        alive = [rank for rank in late if rank not in silent]
        words += [f"{self._name(r)} lives, and did not come within {self._timeout_s:g} s" for r in alive]
        broke = f"The connection between the learners broke: {str(error).splitlines()[0]}"
        return LearnersLost("; ".join(words) or broke)

    def _name(self, rank: int) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"who/{rank}"]):
                return f"Learner {rank} (on {self._store.get(f'who/{rank}').decode()})"
        return f"Learner {rank}"


def join(launch: Launch, device: torch.device, timeout_s: float) -> World:
    """Meet the other learners. timeout_s: that one may be waited for, now and in each call that needs everyone.

    Raises LearnersLost naming those who did not come, PronghornError if the store cannot be reached.
    """
    if launch.world_size == 1:
        return World()
    span = timedelta(seconds=timeout_s)
    try:
        hosts = launch.leads and not launch.hosted
        store = dist.TCPStore(launch.host, launch.port, None, hosts, timeout=span, wait_for_workers=False)
    except RuntimeError as error:
        where = f"{launch.host}:{launch.port}"
        raise PronghornError(f"Learner {launch.rank} cannot reach the others' store at {where}: {error}") from error
    return meet(launch, dist.PrefixStore(f"pronghorn/{launch.restart}", store), device, timeout_s)


def meet(launch: Launch, store: Store, device: torch.device, timeout_s: float) -> World:
    """`join` at a store that is open."""
    store.set(f"come/{launch.rank}", "")
    deadline = time.monotonic() + timeout_s
    while absent := [rank for rank in range(launch.world_size) if not store.check([f"come/{rank}"])]:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, absent))
            raise LearnersLost(f"Of {launch.world_size} learners these did not start within {timeout_s:g} s: {names}.")
        time.sleep(0.02)
    return _Several(launch, store, device, timeout_s)


def _gloo(launch: Launch, store: Store, timeout_s: float) -> Any:
    """Sums on CPUs. On one machine by its loopback, which works without a network, unless the user chose otherwise."""
    options = dist.ProcessGroupGloo._Options()
    chosen = {"interface": launch.interface} if launch.interface else {"hostname": "127.0.0.1"}
    if launch.interface or launch.on_one_machine:
        options._devices = [dist.ProcessGroupGloo.create_device(**chosen)]
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), launch.rank, launch.world_size, options)


def _nccl(launch: Launch, store: Store, timeout_s: float) -> Any:
    """Sums on GPUs. No run has used it yet."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), launch.rank, launch.world_size, options)
