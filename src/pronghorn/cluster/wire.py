"""The block that carries finished unrolls from an actor to the learner: one stretch of bytes, built and checked here.

It sends nothing. No pickle: a JSON header says what lies where, the arrays follow as they are in memory.

    magic 8 | length of the header, its CRC-32 (uint32 each), sum of the arrays (uint64) | header, JSON | arrays

Everything is little-endian, and each array is aligned to 64 bytes.

Frame stacks are the same frames again and again, so each distinct frame is sent once: what follows from the row before
by moving all frames up is told by where its first frame lies. That is found in the pixels themselves, so it is exact
for any environment: a row that does not follow from the one before is sent whole.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronghorn.errors import WireError
from pronghorn.training.store import step_fields
from pronghorn.types import ActionSpec, LeafSpec

FORMAT = 1  # of header and arrays; another one is refused
Bytes = NDArray[np.uint8]

_MAGIC = b"PRNGHRN\n"
_START = struct.Struct("<8sIIQ")
_ALIGN = 64
_MAX_HEADER = 1 << 20
_STARTS = "/starts"  # behind a stacked leaf's name: [N, T+1] int32, which of its frames each row begins with


class Origin(NamedTuple):
    """Who made a block: the run, the actor's number in it, and how often that one was replaced before."""

    run: str
    actor: int
    incarnation: int


@dataclass(frozen=True)
class Unrolls:
    """N finished unrolls.

    slots: [N] the actor's own numbers for them.  obs: leaf → [N, T+1, …].  steps: name → [N, T(+1), …].
    state: [N, S] float32, of the RNN before row 0.
    """

    slots: NDArray[np.int64]
    obs: Mapping[str, NDArray[Any]]
    steps: Mapping[str, NDArray[Any]]
    state: NDArray[np.float32]


class Stack(NamedTuple):
    """A frame stack: its axis within an observation, and how many channels of it are one frame."""

    axis: int
    channels: int


class Schema:
    """What unrolls of a run look like: the record of a step is declared in store.py, and everything derives from it."""

    def __init__(
        self, leaves: Mapping[str, LeafSpec], action: ActionSpec, unroll_length: int, state_size: int
    ) -> None:
        self.leaves, self.fields = dict(leaves), step_fields(action)
        self.unroll_length, self.state_size = unroll_length, state_size

    def arrays(self, count: int) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        """(name, shape, dtype) of the arrays of `count` unrolls, observations whole."""
        length = self.unroll_length
        yield "slots", (count,), np.dtype(np.int64)
        yield "state", (count, self.state_size), np.dtype(np.float32)
        for name, field in self.fields.items():
            yield f"steps/{name}", (count, length + field.bootstrap, *field.shape), np.dtype(field.dtype)
        for name, leaf in self.leaves.items():
            yield f"obs/{name}", (count, length + 1, *leaf.shape), np.dtype(leaf.dtype)

    def stacks(self, name: str) -> Iterator[Stack]:
        """How this leaf may be a stack of frames: of grey ones, or of colour."""
        leaf = self.leaves[name]
        if leaf.kind != "image" or len(leaf.shape) != 3:
            return
        axis = 0 if leaf.layout == "chw" else 2
        for channels in (1, 3):
            if leaf.shape[axis] % channels == 0 and leaf.shape[axis] > channels:
                yield Stack(axis, channels)


# ------------------------------------------------------------------------------------------------- writing


def encode(schema: Schema, origin: Origin, unrolls: Unrolls) -> Bytes:
    """The block of these unrolls; 1-D, uint8."""
    arrays, stacks = _arrays_to_send(schema, unrolls)
    table, size = list[list[Any]](), 0
    for name, array in arrays.items():
        table.append([name, array.dtype.str, list(array.shape), size])
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    header = {
        "format": FORMAT, "run": origin.run, "actor": origin.actor, "incarnation": origin.incarnation,
        "count": len(unrolls.slots), "arrays": table, "stacks": stacks, "size": size,
    }  # fmt: skip
    text = json.dumps(header).encode()
    begin = _begin(len(text))
    block = np.zeros(begin + size, np.uint8)
    for (_, _, _, offset), array in zip(table, arrays.values(), strict=True):
        _view(block[begin:], array.dtype.str, array.shape, offset)[...] = array
    start = _START.pack(_MAGIC, len(text), zlib.crc32(text), _sum(block[begin:]))
    block[: len(start) + len(text)] = np.frombuffer(start + text, np.uint8)
    return block


def _begin(header_length: int) -> int:
    """Where the arrays begin."""
    return -(-(_START.size + header_length) // _ALIGN) * _ALIGN


def _arrays_to_send(schema: Schema, unrolls: Unrolls) -> tuple[dict[str, NDArray[Any]], dict[str, list[int]]]:
    """Everything but stacks as it is; of stacks their distinct frames. And which leaves are stacks, and how."""
    arrays: dict[str, NDArray[Any]] = {"slots": unrolls.slots, "state": unrolls.state}
    arrays |= {f"steps/{name}": array for name, array in unrolls.steps.items()}
    stacks: dict[str, list[int]] = {}
    for name, leaf in unrolls.obs.items():
        found = next((packed for stack in schema.stacks(name) if (packed := _pack(leaf, stack))), None)
        if found is None:
            arrays[f"obs/{name}"] = leaf
        else:
            stack, frames, starts = found
            arrays[f"obs/{name}"], arrays[f"obs/{name}{_STARTS}"] = frames, starts
            stacks[name] = list(stack)
    return arrays, stacks


def _pack(leaf: NDArray[Any], stack: Stack) -> tuple[Stack, NDArray[Any], NDArray[np.int32]] | None:
    """Distinct frames [F, c, …] and where each row begins among them; None where stacks do not follow each other."""
    rows = np.moveaxis(leaf, 2 + stack.axis, 2)  # [N, T+1, C, …]
    step = stack.channels
    # A look at one line of pixels first: colours of one frame are no stack, and rarely look like one.
    line = rows[:1, :, :, :1]
    pairs = range(1, line.shape[1]) if len(line) else ()
    alike = [np.array_equal(line[0, t, :-step], line[0, t - 1, step:]) for t in pairs]
    if not alike or np.mean(alike) < 0.5:
        return None
    frames, starts = list[NDArray[Any]](), np.zeros(rows.shape[:2], np.int32)
    count, depth = 0, rows.shape[2] // step
    for n, t in np.ndindex(*starts.shape):
        follows = t > 0 and np.array_equal(rows[n, t, :-step], rows[n, t - 1, step:])
        new = rows[n, t, -step:] if follows else rows[n, t]
        frames.append(new.reshape(-1, step, *new.shape[1:]))
        count += 1 if follows else depth
        starts[n, t] = count - depth
    return stack, np.concatenate(frames), starts


def _sum(payload: Bytes) -> int:
    """A checksum at the speed of memory: the sum of its 64-bit words, modulo 2^64. Its size is a multiple of 64."""
    return int(np.add.reduce(payload.view(np.uint64), dtype=np.uint64))


# ------------------------------------------------------------------------------------------------- reading


class Block:
    """A received block, checked against what unrolls of this run look like.

    Arrays are views of the block, so it must stay as it is while they are used.
    """

    def __init__(self, schema: Schema, block: Bytes) -> None:
        """Raises WireError: not a block, another format, damaged, or not of this run's spaces and sizes."""
        header, payload = _split(block)
        self._schema = schema
        try:
            self.origin = Origin(str(header["run"]), int(header["actor"]), int(header["incarnation"]))
            self.count = len(range(int(header["count"])))
            arrays = {str(n): _view(payload, str(d), s, int(o)) for n, d, s, o in header["arrays"]}
            self._stacks = {str(name): Stack(*map(int, stack)) for name, stack in header["stacks"].items()}
        except (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError) as error:
            raise WireError(f"a block of unrolls has a header that says nothing of use ({error!r})") from None
        self._arrays = arrays
        self._check()
        self.slots: NDArray[np.int64] = arrays["slots"]
        self.state: NDArray[np.float32] = arrays["state"]
        self.steps = {name: arrays[f"steps/{name}"] for name in schema.fields}

    def _check(self) -> None:
        expected = {name: (shape, dtype) for name, shape, dtype in self._schema.arrays(self.count)}
        for name, (shape, dtype) in expected.items():
            array = self._arrays.get(name)
            leaf = name.removeprefix("obs/")
            if leaf in self._stacks and name != leaf:
                self._check_stack(leaf)
            elif array is None or array.shape != shape or array.dtype != dtype:
                found = "nothing" if array is None else f"{array.dtype} {array.shape}"
                raise WireError(f"a block of unrolls holds {found} as '{name}', and {dtype} {shape} is expected here")

    def _check_stack(self, leaf: str) -> None:
        stack, spec = self._stacks[leaf], self._schema.leaves[leaf]
        if stack not in self._schema.stacks(leaf):
            raise WireError(f"a block of unrolls sends '{leaf}' as {stack}, which it cannot be here")
        frames, starts = self._arrays.get(f"obs/{leaf}"), self._arrays.get(f"obs/{leaf}{_STARTS}")
        rest = tuple(size for axis, size in enumerate(spec.shape) if axis != stack.axis)
        depth = spec.shape[stack.axis] // stack.channels
        right = (
            frames is not None and starts is not None and frames.dtype == spec.dtype
            and frames.shape[1:] == (stack.channels, *rest) and starts.dtype == np.int32
            and starts.shape == (self.count, self._schema.unroll_length + 1)
        )  # fmt: skip
        if not right or frames is None or starts is None:
            raise WireError(f"a block of unrolls holds no frames of '{leaf}' as they are expected here")
        if starts.size and not (starts.min() >= 0 and starts.max() <= len(frames) - depth):
            raise WireError(f"a block of unrolls names frames of '{leaf}' that it does not hold")

    def obs(self, name: str, slot: int, out: NDArray[Any]) -> None:
        """Copy a leaf's rows [T+1, …] of one unroll, the one at place `slot` of `slots`, into `out`."""
        if name not in self._stacks:
            out[...] = self._arrays[f"obs/{name}"][slot]
            return
        stack, leaf = self._stacks[name], self._schema.leaves[name]
        frames, starts = self._arrays[f"obs/{name}"], self._arrays[f"obs/{name}{_STARTS}"][slot]
        depth, rows = leaf.shape[stack.axis] // stack.channels, np.moveaxis(out, 1 + stack.axis, 1)
        for t, start in enumerate(starts.tolist()):  # each row is one stretch of memory where channels come first
            rows[t] = frames[start : start + depth].reshape(rows.shape[1:])

    def whole_obs(self, name: str) -> NDArray[Any]:
        """A leaf of all unrolls [N, T+1, …], in one array."""
        if name not in self._stacks:
            return self._arrays[f"obs/{name}"]
        leaf = self._schema.leaves[name]
        out = np.empty((self.count, self._schema.unroll_length + 1, *leaf.shape), leaf.dtype)
        for slot in range(self.count):
            self.obs(name, slot, out[slot])
        return out


def _split(block: Bytes) -> tuple[dict[str, Any], Bytes]:
    """Header and payload. Raises WireError."""
    if block.dtype != np.uint8 or block.ndim != 1 or len(block) < _START.size:
        raise WireError(f"{block.dtype} {block.shape} is no block of unrolls")
    magic, length, crc, total = _START.unpack(block[: _START.size].tobytes())
    if magic != _MAGIC or length > _MAX_HEADER:
        raise WireError("these bytes are no block of unrolls")
    text = block[_START.size : _START.size + length].tobytes()
    if len(text) != length or zlib.crc32(text) != crc:
        raise WireError("a block of unrolls has a damaged header")
    header = _parsed(text)
    if header.get("format") != FORMAT:
        raise WireError(f"a block of unrolls has format {header.get('format')}, and this is format {FORMAT}: run the "
                        "same version of Pronghorn on all machines")  # fmt: skip
    payload = block[_begin(length) :]
    if len(payload) != header.get("size") or len(payload) % _ALIGN:
        raise WireError(f"a block of unrolls holds {len(payload)} bytes, and its header says {header.get('size')}")
    if _sum(payload) != total:
        raise WireError("a block of unrolls was damaged on its way: its checksum is another")
    return header, payload


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise WireError("a block of unrolls has a header that is no JSON object")
    return header


def _view(payload: Bytes, dtype: str, shape: Sequence[int], offset: int) -> NDArray[Any]:
    """An array of the block. Raises ValueError, IndexError or TypeError where it does not lie inside."""
    kind = np.dtype(dtype)
    if kind.hasobject or any(type(size) is not int or size < 0 for size in shape) or offset < 0 or offset % _ALIGN:
        raise ValueError(f"{dtype} {shape} at {offset}")
    num_bytes = kind.itemsize * int(np.prod(shape, dtype=object))
    if offset + num_bytes > len(payload):
        raise IndexError(f"{dtype} {shape} at {offset} lies outside")
    return payload[offset : offset + num_bytes].view(kind).reshape(tuple(shape))
