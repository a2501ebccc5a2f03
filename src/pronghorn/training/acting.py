"""How rows act: observations in, actions out, with the RNN states and the weights that act. It meets no environment.

`EagerActing` does each operation when it comes to it: on a CPU there is nothing to gain by more. `GraphActing` is for a
GPU, where starting operations one by one costs more than they do: one upload, one graph, one download a batch.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronghorn.errors import PronghornError
from pronghorn.models.actor_critic import ActorCritic
from pronghorn.ops.distributions import to_env
from pronghorn.training.device import (
    Array,
    Fence,
    Packet,
    Queue,
    Work,
    cause,
    make_fence,
    make_queue,
    packet_bytes,
    pinned,
    torch_dtype,
)
from pronghorn.training.store import Slots, Store
from pronghorn.types import LeafSpec

Rows = NDArray[np.int64]
Obs = Mapping[str, NDArray[Any]]

SMALLEST_BUCKET = 8
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of log-probs, values and states, by the trunk's arithmetic
OTHER_ACTIONS = 0.01  # share of rows whose draw may fall on the other side of a border that moved by a rounding

_LOG = logging.getLogger("pronghorn")


@dataclass(frozen=True)
class Snapshot:
    """Weights and normaliser statistics of one policy_version; never written again.

    ready: passed on the device once the copy is whole.
    lineage: how often the policy had been replaced by another. Unrolls of an earlier lineage are another policy's.
    """

    version: int
    tensors: dict[str, Tensor]
    ready: Fence = field(default_factory=Fence)
    lineage: int = 0

    @staticmethod
    def of(model: ActorCritic, version: int, lineage: int = 0) -> Snapshot:
        """Copy a model's state."""
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        device = next(iter(state.values())).device
        if device.type == "cpu":
            return Snapshot(version, {name: tensor.clone() for name, tensor in state.items()}, lineage=lineage)
        tensors, ready = {name: torch.empty_like(tensor) for name, tensor in state.items()}, make_fence(device)
        torch._foreach_copy_(list(tensors.values()), list(state.values()))  # a few kernels, not one for each tensor
        ready.mark()
        return Snapshot(version, tensors, ready, lineage)


class Acted(NamedTuple):
    """What N rows did. discrete [N, D] int64, continuous [N, C] the samples, bounded [N, C] as the environment gets
    them, log_prob [N] of the policy that acted, value [N] in raw return units."""

    discrete: NDArray[np.int64]
    continuous: NDArray[np.float32]
    bounded: NDArray[np.float32]
    log_prob: NDArray[np.float32]
    value: NDArray[np.float32]


class Acting(ABC):
    """One network that acts for the rows of a pool, the RNN state of each, and the store that it writes into.

    One thread uses it. Observations come as the model reads them, with the last action and reward if it wants them.
    """

    def __init__(self, actor: ActorCritic, store: Store) -> None:
        self.actor, self.store, self.version = actor, store, -1
        self.fallback = ""  # what did not work and what is done instead, to be told

    def describe(self) -> str:
        """In a few words, for the run's header."""
        return "by single operations"

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the sampling of actions."""

    @abstractmethod
    def load(self, snapshot: Snapshot) -> None:
        """Act with these weights from now on."""

    @abstractmethod
    def forget(self) -> None:
        """The RNN states of all rows are those of an episode's start."""

    @abstractmethod
    def begin(self, rows: Rows, slots: Slots) -> None:
        """These rows begin the unrolls of these slots with the next `act`: their RNN states of now are kept there."""

    @abstractmethod
    def act(self, obs: Obs, rows: Rows, first: NDArray[np.bool_], at: Rows) -> Acted:
        """One decision of N rows, whose RNN states go on.

        obs: leaves [N, …].  rows: [N].  first: [N], an episode begins.  at: [N], rows of the store that obs goes to.
        """

    @abstractmethod
    def write(self, obs: Obs, at: Rows) -> None:
        """Observations [N, …] into rows of the store; nobody acts on them."""

    @abstractmethod
    def values(self, obs: Obs, rows: Rows) -> NDArray[np.float32]:
        """V(obs) [N] in raw return units, from the RNN states of these rows; nothing goes on."""


class EagerActing(Acting):
    """Each operation at once, on exactly the rows that are ready."""

    def __init__(self, actor: ActorCritic, store: Store, num_rows: int) -> None:
        super().__init__(actor, store)
        self.device = store.device
        self._generator = torch.Generator(self.device)
        self._state = actor.initial_state(num_rows, self.device)

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def load(self, snapshot: Snapshot) -> None:
        with torch.no_grad():
            for name, tensor in self.actor.state_dict().items():
                tensor.copy_(snapshot.tensors[name])
        self.version = snapshot.version

    def forget(self) -> None:
        self._state.zero_()

    def begin(self, rows: Rows, slots: Slots) -> None:
        self.store.state[torch.from_numpy(slots)] = self._state[torch.from_numpy(rows)]

    def act(self, obs: Obs, rows: Rows, first: NDArray[np.bool_], at: Rows) -> Acted:
        leaves = self._write(obs, at)
        discrete, continuous, log_prob, value = self.infer(leaves, torch.from_numpy(rows), torch.from_numpy(first))
        bounded = to_env(continuous, self.actor.spec.action, self.actor.continuous)
        return Acted(*(x.cpu().numpy() for x in (discrete, continuous, bounded, log_prob, value)))

    @torch.inference_mode()
    def infer(self, obs: Mapping[str, Tensor], rows: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One forward pass of N rows: discrete [N, D], continuous [N, C], log_prob [N], value [N] in raw units.

        obs: leaves [N, …] on the device.  rows: [N] int64, whose RNN states go on.  first: [N] bool, an episode begins.
        """
        rows, first = rows.to(self.device), first.to(self.device)
        out = self.actor({k: v.unsqueeze(0) for k, v in obs.items()}, self._state[rows], first.unsqueeze(0))
        self._state[rows] = out.state
        distribution = self.actor.distribution(out.params[0], obs)
        discrete, continuous = distribution.sample(self._generator)
        value = self.actor.denormalize_value(out.values[0])
        return discrete, continuous, distribution.log_prob(discrete, continuous), value

    def write(self, obs: Obs, at: Rows) -> None:
        self._write(obs, at)

    @torch.inference_mode()
    def values(self, obs: Obs, rows: Rows) -> NDArray[np.float32]:
        state = self._state[torch.from_numpy(rows)]
        first = torch.zeros((1, len(rows)), dtype=torch.bool, device=self.device)
        out = self.actor({k: v.unsqueeze(0) for k, v in self._leaves(obs).items()}, state, first)
        values: NDArray[np.float32] = self.actor.denormalize_value(out.values[0]).cpu().numpy()
        return values

    def _leaves(self, obs: Obs) -> dict[str, Tensor]:
        return {name: torch.from_numpy(leaf).to(self.device) for name, leaf in obs.items()}

    def _write(self, obs: Obs, at: Rows) -> dict[str, Tensor]:
        leaves = self._leaves(obs)
        if self.device.type == "cpu":
            for name, leaf in obs.items():  # NumPy copies whole rows of bytes; index_copy_ takes 15 times as long
                self.store.flat_obs[name].numpy()[at] = leaf
        else:
            self.store.put(leaves, torch.from_numpy(at).to(self.device))
        return leaves


class GraphActing(Acting):
    """Batches padded to one of a few sizes (buckets), each with a graph of its own.

    Whatever a batch needs lies in one packet that goes up, what follows in one that comes down. Rows that only fill a
    bucket up read and write the spare row of states, of slots and of the store, and so do rows whose values alone are
    asked for. Draws come from a generator of this side, as many as there are rows, so they depend on no bucket, and are
    those of `EagerActing` on a CPU.

    Of one observation in T + 1 there are two uploads: the last of an unroll is the first of the next one.
    """

    def __init__(
        self, actor: ActorCritic, store: Store, num_rows: int, leaves: Mapping[str, LeafSpec], *,
        graphs: str = "auto", queue: Queue | None = None,
    ) -> None:  # fmt: skip
        """
        leaves: of the observations, as the store holds them.
        graphs: "auto" falls back to single operations (see `fallback`) where graphs cannot be made or act differently;
            "on" raises PronghornError then; "off" makes none.
        queue: on what to work; None: on a queue of the store's device.
        """
        super().__init__(actor, store)
        self.num_rows, self._leaves = num_rows, dict(leaves)
        self._queue = queue or make_queue(store.device)
        self._generator = torch.Generator()
        self._state = actor.initial_state(num_rows + 1, store.device)
        self._begins = np.full(num_rows, store.spare_slot, np.int64)  # the slot that a row begins with its next step
        self._weights = list(actor.state_dict().items())
        self._loaded, self._source = make_fence(store.device), Snapshot(-1, {})
        self._done, self._written = make_fence(store.device), make_fence(store.device)
        self.buckets = buckets(num_rows)
        self._make_packets()
        self._works: dict[int, Work] = {count: self._work(count) for count in self.buckets}
        self._graphed = graphs != "off" and self._capture(required=graphs == "on")

    # ------------------------------------------------------------ the interface

    def describe(self) -> str:
        how = "by CUDA graphs" if self._graphed else "by single operations"
        return f"{how} of {', '.join(map(str, self.buckets))} rows"

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    @torch.no_grad()
    def load(self, snapshot: Snapshot) -> None:
        # Memory of the snapshot before, which nobody else may still hold, must not be used again while it is read.
        self._loaded.sync()
        with self._queue:
            snapshot.ready.wait()
            torch._foreach_copy_([w for _, w in self._weights], [snapshot.tensors[name] for name, _ in self._weights])
            self._loaded.mark()
        self._source = snapshot
        self.version = snapshot.version

    def forget(self) -> None:
        with self._queue:
            self._state.zero_()
        self._begins[:] = self.store.spare_slot

    def begin(self, rows: Rows, slots: Slots) -> None:
        self._begins[rows] = slots

    def act(self, obs: Obs, rows: Rows, first: NDArray[np.bool_], at: Rows) -> Acted:
        count, up = self._pack(obs, rows)
        num, action = len(rows), self.actor.spec.action
        up["first"][:num], up["at"][:num], up["keep"][:num] = first, at, rows
        up["start"][:num] = self._begins[rows]
        self._begins[rows] = self.store.spare_slot
        # Discrete first, then continuous, each [N, ·]: the order and sizes in which `ActionDistribution.noise` draws.
        if action.num_discrete:
            torch.rand((num, action.num_discrete), generator=self._generator, out=torch.from_numpy(up["uniform"][:num]))
        if action.num_continuous:
            torch.from_numpy(up["normal"][:num]).normal_(generator=self._generator)
        down = self._run(count, num)
        return Acted(*(down[name][:num].copy() for name in Acted._fields))

    def values(self, obs: Obs, rows: Rows) -> NDArray[np.float32]:
        count, _ = self._pack(obs, rows)
        values: NDArray[np.float32] = self._run(count, len(rows))["value"][: len(rows)].copy()
        return values

    @torch.inference_mode()
    def write(self, obs: Obs, at: Rows) -> None:
        num = len(at)
        packet = self._writes[self._bucket(num)]
        self._written.sync()
        packet.here["at"][:num] = at
        self._stage(packet, obs, num)
        with self._queue:
            self.store.read.wait()
            packet.upload(self._used_bytes(packet, num))
            self._written.mark()
            self.store.put({name: packet.there[name][:num] for name in self._leaves}, packet.there["at"][:num])
            self.store.written.mark()

    # ------------------------------------------------------------ one batch

    def _pack(self, obs: Obs, rows: Rows) -> tuple[int, dict[str, NDArray[Any]]]:
        """Begin a packet: observations and states of these rows, and nothing of them written anywhere yet."""
        num, count = len(rows), self._bucket(len(rows))
        packet = self._ups[count]
        up, store = packet.here, self.store
        up["rows"][:num], up["rows"][num:] = rows, self.num_rows
        up["keep"][:], up["at"][:], up["start"][:] = self.num_rows, store.spare, store.spare_slot
        # Draws too: what another bucket left there may be no number in [0, 1), and would pick an action that is none.
        up["first"][:], up["uniform"][:], up["normal"][:] = False, 0.0, 0.0
        self._stage(packet, obs, num)
        return count, up

    def _stage(self, packet: Packet, obs: Obs, num: int) -> None:
        for name in self._leaves:
            # torch's copy takes several threads for large ones
            torch.from_numpy(packet.here[name][:num]).copy_(torch.from_numpy(obs[name]))
            if name in self._filled:
                packet.here[name][num:] = 0

    @torch.inference_mode()
    def _run(self, count: int, num: int) -> dict[str, NDArray[Any]]:
        """The packet up, the work, the answers down: [count, …], valid until the next run."""
        up, down = self._ups[count], self._downs[count]
        with self._queue:
            self.store.read.wait()
            up.upload(self._used_bytes(up, num))
            self._works[count]()
            down.download()
            self.store.written.mark()
            self._done.mark()
        self._done.sync()
        return down.here

    def _work(self, count: int) -> Work:
        """What a graph is made of, for `count` rows. It reads one packet and writes the other, states and the store."""
        x, y, actor, store = self._ups[count].there, self._downs[count].there, self.actor, self.store
        obs = {name: x[name] for name in self._leaves}

        def work() -> None:
            store.put(obs, x["at"])
            state = self._state.index_select(0, x["rows"])
            if actor.state_size:
                store.flat_state.index_copy_(0, x["start"], state)
            out = actor({name: leaf.unsqueeze(0) for name, leaf in obs.items()}, state, x["first"].unsqueeze(0))
            if actor.state_size:
                self._state.index_copy_(0, x["keep"], out.state)
            distribution = actor.distribution(out.params[0], obs)
            discrete, continuous = distribution.sample_from(x["uniform"], x["normal"])
            y["discrete"].copy_(discrete)
            y["continuous"].copy_(continuous)
            y["bounded"].copy_(to_env(continuous, actor.spec.action, actor.continuous))
            y["log_prob"].copy_(distribution.log_prob(discrete, continuous))
            y["value"].copy_(actor.denormalize_value(out.values[0]))

        return work

    # ------------------------------------------------------------ packets

    def _make_packets(self) -> None:
        """A packet each way for every bucket, in the same memory, and one for observations that are only written."""
        most, device = self.buckets[-1], self.store.device
        # Last lies a leaf whose rest may hold anything, so that no more of it goes up than there are rows: the largest
        # image. Codes must be codes, so the rest of all others is filled.
        images = [name for name, leaf in self._leaves.items() if leaf.kind == "image"]
        last = max(images, key=lambda name: self._leaves[name].num_bytes, default="")
        self._filled = {name for name in self._leaves if name != last}
        self._leaves = {name: self._leaves[name] for name in sorted(self._leaves, key=lambda name: name == last)}

        def make(arrays: Any) -> dict[int, Packet]:
            num_bytes = packet_bytes(arrays(most))
            here, there = pinned(device, num_bytes), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            return {count: Packet(arrays(count), here, there) for count in self.buckets}

        self._ups, self._downs, self._writes = make(self._up), make(self._down), make(self._write_only)

    def _observations(self, count: int) -> dict[str, Array]:
        return {name: Array((count, *leaf.shape), torch_dtype(leaf.dtype)) for name, leaf in self._leaves.items()}

    def _up(self, count: int) -> dict[str, Array]:
        """rows, keep: whose states are read, and written.  at: where obs goes.  start: the slot that begins."""
        action = self.actor.spec.action
        numbers = {name: Array((count,), torch.int64) for name in ("rows", "keep", "at", "start")}
        numbers["first"] = Array((count,), torch.bool)
        numbers["uniform"] = Array((count, action.num_discrete), torch.float32)
        numbers["normal"] = Array((count, action.num_continuous), torch.float32)
        return numbers | self._observations(count)

    def _down(self, count: int) -> dict[str, Array]:
        action = self.actor.spec.action
        continuous, one = Array((count, action.num_continuous), torch.float32), Array((count,), torch.float32)
        discrete = Array((count, action.num_discrete), torch.int64)
        return dict(zip(Acted._fields, (discrete, continuous, continuous, one, one), strict=True))

    def _write_only(self, count: int) -> dict[str, Array]:
        return {"at": Array((count,), torch.int64)} | self._observations(count)

    def _used_bytes(self, packet: Packet, num: int) -> int:
        """Of a packet with `num` rows: all but the rest of the last leaf."""
        last = next(reversed(self._leaves))
        if last in self._filled:
            return packet.num_bytes
        return packet.offsets[last] + num * self._leaves[last].num_bytes

    def _bucket(self, num: int) -> int:
        return next(count for count in self.buckets if count >= num)

    # ------------------------------------------------------------ graphs

    def _capture(self, *, required: bool) -> bool:
        """A graph for each bucket, if they act as single operations do. Before any row acts: it writes everywhere.

        Returns whether there are graphs now.
        """
        single = dict(self._works)
        try:
            with torch.inference_mode():
                for count in self.buckets:
                    self._make_up(count)  # first: what another packet left there may be no index and no code
                    graph = self._queue.graph(single[count])
                    self._require_same(count, graph, single[count])
                    self._works[count] = graph
        except (RuntimeError, PronghornError) as error:
            why = f"acting by CUDA graphs failed: {cause(error)}"
            if required:
                raise PronghornError(f"{why} (--graphs auto goes on without them)") from error
            self.fallback = f"{why}. Going on with single operations, which are slower (--graphs off: without this try)"
            self._works = single
            return False
        finally:
            self._forget()
        return True

    def _require_same(self, count: int, graph: Work, single: Work) -> None:
        """Raises PronghornError if the graph and single operations differ on made-up rows."""
        one, other = self._outcome(count, single), self._outcome(count, graph)
        same = (one["discrete"] == other["discrete"]).all(1)
        worst = {
            name: float(_difference(one[name][same], other[name][same]).max()) if same.any() else 0.0
            for name in ("continuous", "bounded", "log_prob", "value", "state")
        }
        name, difference = max(worst.items(), key=lambda item: item[1])
        limit = TOLERANCE[next(self.actor.actor.encoder.parameters(), torch.empty(0)).dtype]
        others = int((~same).sum())
        _LOG.debug("graph of %d rows: %d other actions, largest difference %.2g (%s)", count, others, difference, name)
        if difference > limit or others > OTHER_ACTIONS * count + 1:
            raise PronghornError(
                f"a graph of {count} rows acts differently from single operations: {others} other actions, "
                f"{name} by up to {difference:.2g} (at most {limit:g})"
            )
        if not all(torch.equal(one[name], other[name]) for name in (*self._leaves, "start")):
            raise PronghornError(f"a graph of {count} rows writes other observations or states into the store")

    @torch.inference_mode()
    def _outcome(self, count: int, work: Work) -> dict[str, Tensor]:
        """All that the work of made-up rows leaves behind, on this side."""
        num, store = min(count, self.num_rows), self.store
        with self._queue:
            self._state.copy_(torch.linspace(-1.0, 1.0, self._state.numel(), device=store.device).view_as(self._state))
            # what the work before left must not be taken for this one's
            for left_over in (store.flat_state, *store.flat_obs.values(), *self._downs[count].there.values()):
                left_over.zero_()
            work()
            self._downs[count].download()
            self._done.mark()
            left = {name: store.flat_obs[name][:num].clone().cpu() for name in self._leaves}
            left |= {"state": self._state[:num].sum(1).cpu(), "start": store.flat_state[:num].clone().cpu()}
        self._done.sync()
        return left | {name: torch.from_numpy(y[:num].copy()) for name, y in self._downs[count].here.items()}

    def _make_up(self, count: int) -> None:
        """On the device: rows that use all of a bucket that can be used, with noise to see."""
        rng, num = np.random.default_rng(count), min(count, self.num_rows)
        obs = {name: _noise(leaf, num, rng) for name, leaf in self._leaves.items()}
        _, up = self._pack(obs, np.arange(num))
        up["keep"][:num] = up["at"][:num] = up["start"][:num] = np.arange(num)
        up["first"][:num] = np.arange(num) % 2
        up["uniform"][:num], up["normal"][:num] = rng.random(up["uniform"][:num].shape), 0.5
        with self._queue:
            self._ups[count].upload()
            self._done.mark()
        self._done.sync()

    def _forget(self) -> None:
        with self._queue:
            for tensor in (self._state, self.store.flat_state, *self.store.flat_obs.values()):
                tensor.zero_()
            self.store.written.mark()


def _difference(one: Tensor, other: Tensor) -> Tensor:
    """|a - b| / (1 + |a|), infinite where one is not a number; one entry more, 0."""
    difference = ((one - other).abs() / (1.0 + one.abs())).nan_to_num(torch.inf)
    return torch.cat((difference.flatten(), torch.zeros(1)))


def buckets(num_rows: int) -> Sequence[int]:
    """Sizes that batches of at most num_rows rows are padded to: doubling, the last one all rows."""
    sizes = [SMALLEST_BUCKET]
    while 2 * sizes[-1] < num_rows:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] >= num_rows else [*sizes, num_rows]


def make_acting(
    actor: ActorCritic, store: Store, num_rows: int, leaves: Mapping[str, LeafSpec], graphs: str = "auto"
) -> Acting:
    """The way of acting for the store's device. Raises PronghornError for graphs = "on" where there are none."""
    if store.device.type == "cuda":
        return GraphActing(actor, store, num_rows, leaves, graphs=graphs)
    if graphs == "on":
        raise PronghornError("--graphs on: graphs are made for a GPU, and this run is on a CPU. Leave it out.")
    return EagerActing(actor, store, num_rows)


def _noise(leaf: LeafSpec, num: int, rng: np.random.Generator) -> NDArray[Any]:
    """[num, …] values that such a leaf may hold; codes and flags of 0, masks that allow everything."""
    shape = (num, *leaf.shape)
    if leaf.kind == "mask":
        return np.ones(shape, leaf.dtype)
    if np.dtype(leaf.dtype).kind == "f":
        return rng.standard_normal(shape).astype(leaf.dtype)
    if leaf.kind == "image":
        return rng.integers(0, 128, shape).astype(leaf.dtype)
    return np.zeros(shape, leaf.dtype)
