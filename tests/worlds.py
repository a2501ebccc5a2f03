"""Several learners in the threads of one process, that meet at a store of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as torch_distributed

from pronghorn.launch import Launch
from pronghorn.training.world import World, meet

dist: Any = torch_distributed
T = TypeVar("T")


class Store:
    """A store on a free port of the loopback; `client` opens one more connection to it."""

    def __init__(self) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client(self) -> Any:
        return dist.TCPStore("127.0.0.1", self.server.port, is_master=False)


def launch(rank: int, size: int) -> Launch:
    return Launch(rank, size, rank, size)


def meet_at(store: Store, rank: int, size: int, timeout_s: float = 60.0) -> World:
    return meet(launch(rank, size), store.client(), torch.device("cpu"), timeout_s)


def together(size: int, work: Callable[[World], T], timeout_s: float = 60.0) -> list[T]:
    """What `work` gives in each of `size` learners; the first error of any is raised."""
    store, results, errors = Store(), [None] * size, [None] * size

    def run(rank: int) -> None:
        try:
            world = meet_at(store, rank, size, timeout_s)
            try:
                results[rank] = work(world)  # type: ignore[call-overload]
            finally:
                world.close()
        except BaseException as error:
            errors[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive(), "a learner waits for ever"
    for error in errors:
        if error is not None:
            raise error
    return results  # type: ignore[return-value]
