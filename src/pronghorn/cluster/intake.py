"""Writes received unrolls into slots of the learner's store, in its memory or on its GPU. It owns no slot."""

from __future__ import annotations

import numpy as np
import torch

from pronghorn.cluster.wire import Block
from pronghorn.training.device import make_fence, make_queue, upload
from pronghorn.training.store import Slots, Store


class Intake:
    """One thread uses it."""

    def __init__(self, store: Store) -> None:
        self._store, self._queue = store, make_queue(store.device)
        self._uploaded = make_fence(store.device)

    def write(self, block: Block, slots: Slots) -> None:
        """All of a block's unrolls into FILLING slots [N]."""
        for name, array in self._store.steps.items():
            array[slots] = block.steps[name]
        if self._store.device.type == "cpu":
            self._write_here(block, slots)
        else:
            self._write_there(block, slots)

    def _write_here(self, block: Block, slots: Slots) -> None:
        self._store.state.numpy()[slots] = block.state
        for name, leaf in self._store.obs.items():
            there = leaf.numpy()
            for place, slot in enumerate(slots.tolist()):
                block.obs(name, place, there[slot])

    @torch.no_grad()
    def _write_there(self, block: Block, slots: Slots) -> None:
        """Behind the gathers that read the slots before, and ahead of those to come."""
        store, device = self._store, self._store.device
        rows = store.at(slots[:, None], np.arange(store.unroll_length + 1)).ravel()
        with self._queue:
            store.read.wait()
            leaves = {
                name: upload(torch.from_numpy(block.whole_obs(name).reshape(-1, *leaf.shape[2:]).copy()), device)
                for name, leaf in store.obs.items()
            }
            store.put(leaves, upload(torch.from_numpy(rows), device))
            state = upload(torch.from_numpy(block.state.copy()), device)
            store.state.index_copy_(0, upload(torch.from_numpy(slots), device), state)
            store.written.mark()
            self._uploaded.mark()
        self._uploaded.sync()  # pinned memory is read until then
