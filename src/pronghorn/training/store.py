"""The unroll store: preallocated unrolls `[slots, T+1, …]` that writers fill and learners take. It moves no weights.

A slot always has one owner and one state:

    FREE ──acquire──▶ FILLING ──commit──▶ FULL ──take──▶ LEARNING ──release──▶ FREE
                         └──discard (its row was lost, or its policy replaced; counted)──▶ FREE
                                            └──void_before (its policy was replaced or went back; counted)──▶ FREE

Pixels and recurrent states live where the learner computes; the small per-step numbers live in NumPy, because they
are written a few rows at a time and read once. The record of an unroll is declared once, in `step_fields`.

Writers and the learner ask a GPU for their work in queues of their own. Two fences keep their order: a gather comes
after what was written before the commit, and what is written into a slot that was freed comes after its gather.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronghorn.config import Config, ModelConfig
from pronghorn.errors import StoreError
from pronghorn.training.device import (
    Array,
    Packet,
    columns,
    make_fence,
    packet_bytes,
    pinned,
    torch_dtype,
    wide,
)
from pronghorn.types import LAST_ACTION, LAST_REWARD, ActionSpec, EnvSpec, LeafSpec, PoolRows

Slots = NDArray[np.int64]


class Slot(IntEnum):
    """States of a slot."""

    FREE = 0
    FILLING = 1
    FULL = 2
    LEARNING = 3


class Field(NamedTuple):
    """One small per-step number of the record: shape behind [slots, T(+1)], dtype, whether row T exists."""

    shape: tuple[int, ...]
    dtype: type
    bootstrap: bool = False

    @property
    def num_bytes(self) -> int:
        """Of one step."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def step_fields(action: ActionSpec) -> dict[str, Field]:
    """The record of one decision besides the observation. Buffers, batches and the wire format derive from it."""
    return {
        "first": Field((), np.bool_, bootstrap=True),  # obs[t] begins an episode: the RNN state is reset before it
        "discrete": Field((action.num_discrete,), np.int64),  # the action taken at obs[t] …
        "continuous": Field((action.num_continuous,), np.float32),  # … the sample itself, before it meets the bounds
        "log_prob": Field((), np.float32),  # log mu(a_t | x_t) of the policy that acted
        "value": Field((), np.float32),  # V(x_t) of the policy that acted, raw return units
        "version": Field((), np.int64),  # policy_version that acted
        "reward": Field((), np.float32),  # raw reward that the action caused
        "terminated": Field((), np.bool_),
        "truncated": Field((), np.bool_),
        "truncation_value": Field((), np.float32),  # V(final observation) at a truncation, raw return units, else 0
        "task_id": Field((), np.int64),
    }


@dataclass
class Batch:
    """B unrolls, time-major, on the learner's device.

    obs: leaf → [T+1, B, …]; steps: name of `step_fields` → [T(+1), B, …]; state: [B, S] before row 0.
    policy_lag: [T, B] int64, learner's version when the batch was taken minus the version that acted.
    num_replayed: how many of the unrolls, the last ones, come from replay.
    """

    obs: dict[str, Tensor]
    steps: dict[str, Tensor]
    state: Tensor
    policy_lag: NDArray[np.int64]
    num_replayed: int = 0

    @property
    def num_samples(self) -> int:
        """T*B."""
        return int(self.policy_lag.size)

    @property
    def num_fresh(self) -> int:
        """Samples that were not trained on before."""
        return self.num_samples - len(self.policy_lag) * self.num_replayed

    def columns(self, index: Tensor, here: NDArray[np.int64]) -> Batch:
        """The unrolls of a minibatch; index: [b] int64 on the batch's device, and the same on this side."""
        take = columns if self.state.is_cuda else lambda leaf, index: leaf[:, index]
        return Batch(
            {k: take(v, index) for k, v in self.obs.items()},
            {k: v[:, index] for k, v in self.steps.items()},
            self.state[index],
            self.policy_lag[:, here],
        )


class Store:
    """Preallocated unrolls of one policy, with the bookkeeping of who owns which slot.

    The lag rule lives in `take`: a batch is only handed out if every unroll that stays behind can still enter a
    later batch within `max_lag` (with `waits` off they may get older). With `turns` (max_lag 0 and 1) writers start an
    unroll only against a ticket.
    """

    def __init__(
        self,
        observation: Mapping[str, LeafSpec],
        action: ActionSpec,
        *,
        num_slots: int,
        unroll_length: int,
        state_size: int,
        batch_unrolls: int,
        max_lag: int,
        waits: bool = True,
        device: torch.device,
        packed: bool | None = None,
        changed: threading.Condition | None = None,
    ) -> None:
        """packed: gather as it is done on a GPU; None: on a GPU.
        changed: what everyone waits at, shared by the stores that one learner's thread serves; None: one of its own.
        """
        self.num_slots, self.unroll_length = num_slots, unroll_length
        self.batch_unrolls, self.max_lag, self.device = batch_unrolls, max_lag, device
        # The same memory by one index, `at(slots, t)`: with two, writing takes NumPy and torch several times as long.
        num_rows = num_slots * (unroll_length + 1)
        # One row and one state more than the slots hold, for what must be written somewhere and is read by nobody.
        self.spare, self.spare_slot = num_rows, num_slots
        self.flat_obs = {
            name: torch.zeros((num_rows + 1, *leaf.shape), dtype=torch_dtype(leaf.dtype), device=device)
            for name, leaf in observation.items()
        }
        self.obs = {
            name: self.flat_obs[name][:-1].view(num_slots, unroll_length + 1, *leaf.shape)
            for name, leaf in observation.items()
        }
        self.flat_state = torch.zeros((num_slots + 1, state_size), device=device)
        self.state = self.flat_state[:-1]
        fields = step_fields(action)
        buffers: dict[str, NDArray[Any]] = {
            name: np.zeros((num_slots, unroll_length + 1, *f.shape), f.dtype) for name, f in fields.items()
        }
        self.steps: dict[str, NDArray[Any]] = {
            name: buffer if fields[name].bootstrap else buffer[:, :-1] for name, buffer in buffers.items()
        }
        self.flat_steps = {name: buffer.reshape(num_rows, *buffer.shape[2:]) for name, buffer in buffers.items()}
        self._wide_obs = {name: wide(leaf) for name, leaf in self.flat_obs.items()}
        self.written, self.read, self._uploaded = (make_fence(device) for _ in range(3))
        self.turns = max_lag <= 1
        self._waits = waits and not self.turns
        self.num_discarded = 0  # unrolls of rows that were lost
        self.num_voided = 0  # unrolls of a policy that was replaced
        self._valid_from = -1  # policy_version from which on unrolls are the present policy's
        self.closed = False
        self._tickets = 0
        self._status = np.zeros(num_slots, np.uint8)
        self._started = np.zeros(num_slots, np.int64)  # policy_version of the unroll's first step
        self._parked = np.zeros(num_slots, np.bool_)  # its row does not act now, so the learner must not wait for it
        self._order = np.zeros(num_slots, np.int64)  # running number of commits: ties are taken oldest first
        self._commits = 0
        self._buffers: dict[str, Tensor] = {}  # the batch's observations, reused
        packed = device.type == "cuda" if packed is None else packed
        self._packet = self._batch_packet() if packed else None
        self._changed = changed or threading.Condition()

    # ------------------------------------------------------------ writers

    def at(self, slots: Slots, t: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where row t of each slot lies in `flat_steps` and `flat_obs`."""
        return slots * (self.unroll_length + 1) + t

    def put(self, obs: Mapping[str, Tensor], at: Tensor) -> None:
        """Write observations [N, …] that lie on the device into the rows `at` [N] int64 of the slots."""
        for name, leaf in obs.items():
            self._wide_obs[name].index_copy_(0, at, wide(leaf))

    def acquire(self, count: int, version: int) -> Slots | None:
        """`count` FREE slots for unrolls whose first step acts under `version`, or None if there are too few."""
        with self._changed:
            if self.turns and self._tickets < count:
                return None
            free = np.flatnonzero(self._status == Slot.FREE)[:count]
            if len(free) < count:
                return None
            self._tickets -= count if self.turns else 0
            self._status[free] = Slot.FILLING
            self._started[free], self._parked[free] = version, False
            return free

    def park(self, slots: Slots) -> None:
        """The rows of these FILLING slots do not act for now: the lag rule leaves them out."""
        with self._changed:
            self._expect(slots, Slot.FILLING)
            if not self._parked[slots].all():
                self._parked[slots] = True
                self._changed.notify_all()

    def unpark(self, slots: Slots, version: int) -> None:
        """They go on, and count as begun now: what they hold may get older than max_lag by the time they waited."""
        with self._changed:
            parked = slots[self._parked[slots]]
            self._parked[parked] = False
            self._started[parked] = np.maximum(self._started[parked], version)

    def filling(self) -> tuple[Slots, NDArray[np.int64]]:
        """The FILLING slots, and the policy_version that each began under."""
        with self._changed:
            slots = np.flatnonzero(self._status == Slot.FILLING)
            return slots, self._started[slots]

    def begun(self, slots: Slots, versions: NDArray[np.int64] | int) -> None:
        """The unrolls of these FILLING slots begin under these versions or later ones."""
        with self._changed:
            self._expect(slots, Slot.FILLING)
            self._started[slots] = np.maximum(self._started[slots], versions)
            self._changed.notify_all()

    def wait_for_slots(self, timeout_s: float) -> None:
        """Sleep until a slot was freed or a ticket granted, or timeout_s passed."""
        with self._changed:
            self._changed.wait(timeout_s)

    def batch_waits(self) -> bool:
        """Whether the learner has a whole batch before it."""
        with self._changed:
            return int((self._status == Slot.FULL).sum()) >= self.batch_unrolls

    def grant(self) -> None:
        """Let the writers start one more batch of unrolls (turns only)."""
        with self._changed:
            self._tickets += self.batch_unrolls
            self._changed.notify_all()

    def commit(self, slots: Slots) -> None:
        """The unrolls are complete: FILLING → FULL."""
        with self._changed:
            self._expect(slots, Slot.FILLING)
            self._status[slots] = Slot.FULL
            self._order[slots] = self._commits + np.arange(len(slots))
            self._commits += len(slots)
            self._void(slots)
            self._changed.notify_all()

    def discard(self, slots: Slots, why: Literal["lost", "replaced", "restart"] = "lost") -> None:
        """The unrolls are void: FILLING → FREE, counted if their rows were lost or their policy replaced.

        Tickets go back.
        """
        with self._changed:
            self._expect(slots, Slot.FILLING)
            self._status[slots] = Slot.FREE
            self.num_discarded += len(slots) if why == "lost" else 0
            self.num_voided += len(slots) if why == "replaced" else 0
            self._tickets += len(slots) if self.turns else 0
            self._changed.notify_all()

    def count_lost(self, num_unrolls: int) -> None:
        """So many more were lost before they reached a slot."""
        with self._changed:
            self.num_discarded += num_unrolls

    # ------------------------------------------------------------ learner

    def void_before(self, version: int) -> None:
        """The policy was replaced or went back, and is itself from this version on: FULL unrolls begun before are void.

        So are those that are still being filled, at their commit, unless their writer discards them before.
        """
        with self._changed:
            self._valid_from = version
            self._void(np.flatnonzero(self._status == Slot.FULL))
            self._changed.notify_all()

    def has_batch(self, version: int) -> bool:
        """Whether `take` would give a batch now."""
        with self._changed:
            return self._batch(version) is not None

    def take(self, version: int, timeout_s: float) -> Slots | None:
        """The next B FULL slots, oldest first, now LEARNING; None if the batch was not to be had within timeout_s.

        `version` is the learner's. The wait also covers the lag rule (see `_within_lag`).
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.closed or self._batch(version) is not None, timeout_s):
                return None
            batch = self._batch(version)
            if batch is not None:
                self._status[batch] = Slot.LEARNING
            return batch

    def gather(self, slots: Slots, version: int) -> Batch:
        """Copy LEARNING slots into a time-major batch on the device; it is valid until the next gather."""
        lag = version - self.steps["version"][slots].T
        if self._packet is not None:
            return self._gather_packed(self._packet, slots, lag)
        index = torch.from_numpy(slots).to(self.device)
        steps = {
            k: torch.from_numpy(np.ascontiguousarray(v[slots].swapaxes(0, 1))).to(self.device)
            for k, v in self.steps.items()
        }
        obs = {k: self._time_major(k, v, slots) for k, v in self.obs.items()}
        return Batch(obs, steps, self.state[index], lag)

    def _gather_packed(self, packet: Packet, slots: Slots, lag: NDArray[np.int64]) -> Batch:
        """One upload for all numbers, one pass on the device for each leaf of the observations."""
        self._uploaded.sync()
        for name, buffer in self.steps.items():
            packet.here[name][...] = buffer[slots].swapaxes(0, 1)
        packet.here["slots"][...] = slots
        packet.here["rows"][...] = self.at(slots, np.arange(self.unroll_length + 1)[:, None]).ravel()  # time-major
        packet.upload()
        self._uploaded.mark()
        self.written.wait()
        shape = (self.unroll_length + 1, len(slots))
        rows = packet.there["rows"]
        obs = {
            name: leaf.index_select(0, rows).view(self.obs[name].dtype).view(*shape, *self.obs[name].shape[2:])
            for name, leaf in self._wide_obs.items()
        }
        state = self.state.index_select(0, packet.there["slots"])
        self.read.mark()
        return Batch(obs, {name: packet.there[name] for name in self.steps}, state, lag)

    def _batch_packet(self) -> Packet:
        """Room for the numbers of a batch, [T(+1), B, …] each, and for where its observations lie."""
        length, count = self.unroll_length, self.batch_unrolls
        arrays = {
            name: Array((v.shape[1], count, *v.shape[2:]), torch_dtype(v.dtype.name)) for name, v in self.steps.items()
        }
        arrays |= {"slots": Array((count,), torch.int64), "rows": Array(((length + 1) * count,), torch.int64)}
        num_bytes = packet_bytes(arrays)
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return Packet(arrays, pinned(self.device, num_bytes), there)

    def release(self, slots: Slots) -> None:
        """The batch was copied or trained on: LEARNING → FREE."""
        with self._changed:
            self._expect(slots, Slot.LEARNING)
            self._status[slots] = Slot.FREE
            self._changed.notify_all()

    # ------------------------------------------------------------ both

    def still(self) -> AbstractContextManager[Any]:
        """While this is held, no other thread begins, completes or takes an unroll."""
        return self._changed

    def close(self) -> None:
        """Wake everyone who waits; `take` then returns None."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def counts(self) -> dict[str, int]:
        """Slots in each state."""
        with self._changed:
            return {state.name.lower(): int((self._status == state).sum()) for state in Slot}

    def _time_major(self, name: str, leaf: Tensor, slots: Slots) -> Tensor:
        """[slots, T+1, …] → [T+1, B, …] in one copy."""
        # On a CPU one plain copy a slot, into memory that is already mapped, is several times faster than index_select.
        shape = (self.unroll_length + 1, len(slots), *leaf.shape[2:])
        out = self._buffers.get(name)
        if out is None or out.shape != shape:
            out = self._buffers[name] = torch.empty(shape, dtype=leaf.dtype)
        for b, slot in enumerate(slots.tolist()):
            out[:, b].copy_(leaf[slot])
        return out

    def _batch(self, version: int) -> Slots | None:
        full = np.flatnonzero(self._status == Slot.FULL)
        if len(full) < self.batch_unrolls:
            return None
        oldest_first = full[np.lexsort((self._order[full], self._started[full]))]
        batch = oldest_first[: self.batch_unrolls]
        return batch if not self._waits or self._within_lag(batch, version) else None

    def _within_lag(self, batch: Slots, version: int) -> bool:
        """Whether every unroll left behind can still enter a batch at a lag of at most max_lag.

        One that started at version v must be taken at v + max_lag or before, and each later version takes B of them:
        for all j ≥ 0, #{left behind, v ≤ version + j - max_lag} ≤ j·B  (earliest deadline first is feasible).
        """
        waiting = ((self._status == Slot.FILLING) & ~self._parked) | (self._status == Slot.FULL)
        waiting[batch] = False
        waiting &= self._started >= self._valid_from  # what is void enters none
        versions_left = np.sort(self._started[waiting]) + self.max_lag - version  # later iterations each may wait for
        return bool((np.arange(1, len(versions_left) + 1) <= versions_left * self.batch_unrolls).all())

    def _void(self, full: Slots) -> None:
        """FULL → FREE for those begun under a policy that was replaced."""
        void = full[self._started[full] < self._valid_from]
        self._status[void] = Slot.FREE
        self.num_voided += len(void)
        self._tickets += len(void) if self.turns else 0

    def _expect(self, slots: Slots, state: Slot) -> None:
        wrong = slots[self._status[slots] != state]
        if len(wrong):
            seen = Slot(self._status[wrong[0]]).name
            raise StoreError(f"Slot {wrong[0]} is {seen}, but only a {state.name} slot may be passed on here.")


class Replay:
    """The last unrolls that were trained on, first in, first out, to be drawn again (Espeholt et al. 2018, §5.2.2).

    It holds copies on the learner's device, [capacity, ...] for each tensor of a batch.
    """

    def __init__(self, capacity: int, num_drawn: int, seed: int) -> None:
        self.capacity, self.num_drawn, self.size = capacity, num_drawn, 0
        self._next = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._tensors: dict[tuple[str, str], Tensor] = {}

    def mix(self, batch: Batch, version: int) -> Batch:
        """The fresh batch followed by `num_drawn` unrolls drawn from those before it, with replacement.

        None are drawn while there are none. The fresh ones are kept for the batches to come.
        """
        drawn = self._draw(self.num_drawn, version)
        self._keep(batch)
        if drawn is None:
            return batch
        return Batch(
            {k: torch.cat((v, drawn.obs[k]), 1) for k, v in batch.obs.items()},
            {k: torch.cat((v, drawn.steps[k]), 1) for k, v in batch.steps.items()},
            torch.cat((batch.state, drawn.state)),
            np.concatenate((batch.policy_lag, drawn.policy_lag), 1),
            num_replayed=drawn.state.shape[0],
        )

    def _draw(self, count: int, version: int) -> Batch | None:
        if self.size == 0 or count == 0:
            return None
        index = torch.randint(self.size, (count,), generator=self._generator)
        parts: dict[str, dict[str, Tensor]] = {"obs": {}, "steps": {}, "state": {}}
        for (kind, name), kept in self._tensors.items():
            parts[kind][name] = kept[index.to(kept.device)]
        obs, steps = ({k: v.transpose(0, 1) for k, v in parts[kind].items()} for kind in ("obs", "steps"))
        return Batch(obs, steps, parts["state"][""], version - steps["version"].cpu().numpy())

    def _keep(self, batch: Batch) -> None:
        count = batch.state.shape[0]
        where = (torch.arange(self._next, self._next + count) % self.capacity)[-self.capacity :]
        columns = {("obs", k): v.transpose(0, 1) for k, v in batch.obs.items()}
        columns |= {("steps", k): v.transpose(0, 1) for k, v in batch.steps.items()} | {("state", ""): batch.state}
        for name, fresh in columns.items():
            if name not in self._tensors:
                self._tensors[name] = fresh.new_zeros((self.capacity, *fresh.shape[1:]))
            self._tensors[name][where.to(fresh.device)] = fresh[-self.capacity :]
        self._next = (self._next + count) % self.capacity
        self.size = min(self.size + count, self.capacity)


def stored_leaves(spec: EnvSpec, model: ModelConfig) -> dict[str, LeafSpec]:
    """The observation as the model sees it: the environment's leaves and the last action and reward if asked for."""
    leaves = dict(spec.observation)
    if model.last_action and spec.action.num_discrete:
        leaves[LAST_ACTION] = LeafSpec((spec.action.num_discrete,), "int64", "last_action", n=spec.action.discrete)
    if model.last_action and spec.action.num_continuous:
        leaves[LAST_ACTION + "_continuous"] = LeafSpec((spec.action.num_continuous,), "float32", "last_action")
    if model.last_reward:
        leaves[LAST_REWARD] = LeafSpec((), "float32", "last_reward")
    return leaves


def make_store(
    config: Config, pool: PoolRows, state_size: int, device: torch.device, changed: threading.Condition | None = None
) -> Store:
    """The store of a resolved config for the rows of a pool. state_size: S of the network that acts."""
    return Store(
        stored_leaves(pool.spec, config.model),
        pool.spec.action,
        num_slots=config.num_slots(pool.num_rows),
        unroll_length=config.learner.unroll_length,
        state_size=state_size,
        batch_unrolls=config.fresh_unrolls,
        max_lag=config.max_lag,
        waits=not config.learner.drop_over_lag,
        device=device,
        changed=changed,
    )


def make_replay(config: Config, seed: int) -> Replay | None:
    """The replay of a resolved config; None if its batches take nothing from one."""
    num_drawn = config.learner.batch_unrolls - config.fresh_unrolls
    return Replay(config.learner.replay_unrolls, num_drawn, seed) if num_drawn else None
