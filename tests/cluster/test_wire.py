"""The block of unrolls: what goes in comes out, each distinct frame goes once, and nothing malformed gets through."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pronghorn.cluster import wire
from pronghorn.cluster.wire import Block, Origin, Schema, Unrolls, encode
from pronghorn.errors import WireError
from pronghorn.types import ActionSpec, LeafSpec

ORIGIN = Origin("run-1", 3, 2)
ACTION = ActionSpec(discrete=(3, 2), low=(-1.0,), high=(1.0,))
VECTOR = LeafSpec((2,), "float32", "vector")
STACKED = LeafSpec((4, 6, 5), "uint8", "image", "chw")


def schema(length: int = 3, state: int = 2, **leaves: LeafSpec) -> Schema:
    return Schema(leaves or {"obs": VECTOR}, ACTION, length, state)


def unrolls(of: Schema, count: int = 2, seed: int = 0) -> Unrolls:
    """Each array filled with its own random values; slots 0, 1, …"""
    rng = np.random.default_rng(seed)
    made = {
        name: rng.integers(0, 2 if dtype.kind == "b" else 200, shape).astype(dtype)
        for name, shape, dtype in of.arrays(count)
    }
    return Unrolls(
        np.arange(count), {k: made[f"obs/{k}"] for k in of.leaves}, {k: made[f"steps/{k}"] for k in of.fields},
        made["state"],
    )  # fmt: skip


def stacks(length: int, begins: tuple[int, ...] = (0,), axis: int = 0, channels: int = 1, depth: int = 4) -> Any:
    """One unroll [1, T+1, …] of stacks of random frames; at each row of `begins` an episode begins with new ones."""
    rng, rows = np.random.default_rng(1), []
    for t in range(length + 1):
        if t in begins:
            frames = [rng.integers(0, 256, (channels, 6, 5)) for _ in range(depth)]
        else:
            frames = [*frames[1:], rng.integers(0, 256, (channels, 6, 5))]
        rows.append(np.moveaxis(np.concatenate(frames), 0, axis))
    return np.stack(rows)[None].astype(np.uint8)


def assert_same(block: Block, sent: Unrolls) -> None:
    np.testing.assert_array_equal(block.slots, sent.slots)
    np.testing.assert_array_equal(block.state, sent.state)
    for name, array in sent.steps.items():
        np.testing.assert_array_equal(block.steps[name], array)
    for name, leaf in sent.obs.items():
        np.testing.assert_array_equal(block.whole_obs(name), leaf)


def test_everything_comes_out_as_it_went_in() -> None:
    of = schema(obs=VECTOR, codes=LeafSpec((3,), "int64", "discrete", n=(4, 4, 4)), picture=STACKED)
    sent = unrolls(of, 5)
    block = Block(of, encode(of, ORIGIN, sent))
    assert block.origin == ORIGIN
    assert_same(block, sent)


@pytest.mark.parametrize(("axis", "channels", "depth"), [(0, 1, 4), (2, 1, 4), (0, 3, 2), (2, 3, 4)])
def test_each_frame_of_a_stack_is_sent_once(axis: int, channels: int, depth: int) -> None:
    """T = 20 steps of one episode have T + depth distinct frames; a reset in between brings depth - 1 more."""
    layout = "chw" if axis == 0 else "hwc"
    total = channels * depth
    leaf = LeafSpec((total, 6, 5) if axis == 0 else (6, 5, total), "uint8", "image", layout)
    of = schema(20, obs=leaf)
    for begins, frames in (((0,), 20 + depth), ((0, 7), 20 + 2 * depth - 1)):
        base = unrolls(of, 1)
        sent = Unrolls(base.slots, {"obs": stacks(20, begins, axis, channels, depth)}, base.steps, base.state)
        raw = encode(of, ORIGIN, sent)
        block = Block(of, raw)
        assert_same(block, sent)
        assert block._arrays["obs/obs"].shape == (frames, channels, 6, 5)
        whole = sum(int(np.prod(shape)) * dtype.itemsize for _, shape, dtype in of.arrays(1))
        assert len(raw) < whole - (21 * depth - frames) * channels * 30 + 2500


def test_pictures_that_are_no_stacks_are_sent_as_they_are() -> None:
    of = schema(4, obs=LeafSpec((6, 5, 3), "uint8", "image", "hwc"))
    sent = unrolls(of, 2)
    block = Block(of, encode(of, ORIGIN, sent))
    assert block._arrays["obs/obs"].shape == (2, 5, 6, 5, 3)
    assert_same(block, sent)


def test_a_still_picture_is_a_stack_like_any_other() -> None:
    of = schema(4, obs=LeafSpec((6, 5, 3), "uint8", "image", "hwc"))
    base = unrolls(of, 2)
    sent = Unrolls(base.slots, {"obs": np.full((2, 5, 6, 5, 3), 7, np.uint8)}, base.steps, base.state)
    assert_same(Block(of, encode(of, ORIGIN, sent)), sent)


def test_an_unroll_is_copied_into_a_slot_of_the_learner() -> None:
    of = schema(6, obs=STACKED)
    base = unrolls(of, 1)
    sent = Unrolls(base.slots, {"obs": stacks(6)}, base.steps, base.state)
    store = np.zeros((3, 7, 4, 6, 5), np.uint8)
    Block(of, encode(of, ORIGIN, sent)).obs("obs", 0, store[1])
    np.testing.assert_array_equal(store[1], sent.obs["obs"][0])
    assert not store[[0, 2]].any()


@settings(deadline=None, max_examples=60)
@example(length=1, count=0, state=0, seed=0, shape=[2, 1, 1], dtype="uint8", discrete=[], continuous=0)
@given(
    length=st.integers(1, 5), count=st.integers(0, 4), state=st.integers(0, 3), seed=st.integers(0, 99),
    shape=st.lists(st.integers(1, 4), max_size=3), dtype=st.sampled_from(["float32", "uint8", "int64", "bool"]),
    discrete=st.lists(st.integers(1, 4), max_size=2), continuous=st.integers(0, 2),
)  # fmt: skip
def test_any_spaces_and_sizes_make_the_round_trip(
    length: int, count: int, state: int, seed: int, shape: list[int], dtype: str, discrete: list[int], continuous: int
) -> None:
    kind = "image" if len(shape) == 3 and dtype == "uint8" else "vector"
    leaf = LeafSpec(tuple(shape), dtype, kind, "chw" if kind == "image" else "")
    action = ActionSpec(tuple(discrete), (-1.0,) * continuous, (1.0,) * continuous)
    of = Schema({"a": leaf}, action, length, state)
    sent = unrolls(of, count, seed)
    assert_same(Block(of, encode(of, ORIGIN, sent)), sent)


def good() -> tuple[Schema, NDArray[np.uint8]]:
    of = schema(3, obs=VECTOR, picture=STACKED)
    base = unrolls(of, 1)
    obs = {"obs": base.obs["obs"], "picture": stacks(3)}
    return of, encode(of, ORIGIN, Unrolls(base.slots, obs, base.steps, base.state))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_no_damage_gets_through(data: st.DataObject) -> None:
    """A block with changed, missing or additional bytes is refused by name, or the change lay in unused padding."""
    of, block = good()
    sent = Block(of, block)
    how = data.draw(st.sampled_from(["flip", "cut", "add"]))
    at = data.draw(st.integers(0, len(block) - 1))
    if how == "flip":
        broken = block.copy()
        broken[at] ^= data.draw(st.integers(1, 255))
    else:
        broken = block[:at] if how == "cut" else np.concatenate((block, block[: at + 1]))
    try:
        got = Block(of, broken)
    except WireError:
        return
    assert how == "flip"
    np.testing.assert_array_equal(got.whole_obs("picture"), sent.whole_obs("picture"))
    assert all(np.array_equal(got.steps[k], v) for k, v in sent.steps.items())


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_no_block(noise: bytes) -> None:
    with pytest.raises(WireError):
        Block(schema(), np.frombuffer(noise, np.uint8))


def with_header(text: bytes, payload: bytes = b"") -> NDArray[np.uint8]:
    """A block that is whole as far as checksums tell, with any header."""
    start = wire._START.pack(wire._MAGIC, len(text), zlib.crc32(text), 0)
    return np.frombuffer((start + text).ljust(wire._begin(len(text)), b"\0") + payload, np.uint8)


def header(**values: Any) -> bytes:
    """One that is right but for these values."""
    right = {"format": 1, "size": 0, "run": "", "actor": 0, "incarnation": 0, "count": 1, "arrays": [], "stacks": {}}
    return json.dumps(right | values).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000, b"{}", b"3", b"no json", b'{"format": 1, "size": 0}', header(actor="x"), header(count=1e99),
        header(arrays=[["slots", "O", [1], 0]]), header(arrays=[["slots", "<i8", [-1], 0]]),
        header(arrays=[["slots", "<i8", [1], 0]]), header(arrays=[["slots", "<i8", [0], 7]]), header(arrays=[3]),
        header(stacks={"obs": [0, 1]}), header(stacks=[1]),
    ],
    ids=["nested", "empty", "number", "text", "half", "kinds", "huge", "objects", "negative", "beyond", "unaligned",
         "no array", "no stack", "no table"],
)  # fmt: skip
def test_a_header_of_any_content_is_one_error(text: bytes) -> None:
    with pytest.raises(WireError, match="block of unrolls"):
        Block(schema(), with_header(text))


@pytest.mark.parametrize(
    "other",
    [
        Schema({"obs": VECTOR, "picture": STACKED}, ACTION, 4, 2),
        Schema({"obs": VECTOR, "picture": STACKED}, ACTION, 3, 1),
        Schema({"obs": LeafSpec((3,), "float32", "vector"), "picture": STACKED}, ACTION, 3, 2),
        Schema({"obs": LeafSpec((2,), "float64", "vector"), "picture": STACKED}, ACTION, 3, 2),
        Schema({"obs": VECTOR, "picture": LeafSpec((4, 6, 6), "uint8", "image", "chw")}, ACTION, 3, 2),
        Schema({"obs": VECTOR, "picture": LeafSpec((4, 6, 5), "uint8", "vector")}, ACTION, 3, 2),
        Schema({"obs": VECTOR, "more": VECTOR, "picture": STACKED}, ACTION, 3, 2),
        Schema({"obs": VECTOR, "picture": STACKED}, ActionSpec(discrete=(3,)), 3, 2),
    ],
    ids=["length", "state", "shape", "dtype", "frames", "no stack", "missing leaf", "action"],
)
def test_unrolls_of_another_run_are_refused(other: Schema) -> None:
    of, block = good()
    assert Block(of, block).count == 1
    with pytest.raises(WireError, match="a block of unrolls"):
        Block(other, block)


def test_another_format_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    of = schema()
    monkeypatch.setattr("pronghorn.cluster.wire.FORMAT", 0)
    old = encode(of, ORIGIN, unrolls(of))
    monkeypatch.undo()
    with pytest.raises(WireError, match="format 0, and this is format 1: run the same version"):
        Block(of, old)
