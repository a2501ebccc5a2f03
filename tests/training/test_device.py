"""Packets bring all their arrays over in one copy; wide views are the same memory; a CPU's stand-ins do the work."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.training.device import (
    ALIGNMENT,
    Array,
    Fence,
    Packet,
    Queue,
    cause,
    columns,
    make_fence,
    make_queue,
    packet_bytes,
    wide,
)
from recorded_graphs import RecordingQueue

ARRAYS = {
    "rows": Array((3,), torch.int64),
    "first": Array((3,), torch.bool),
    "none": Array((3, 0), torch.float32),
    "image": Array((3, 5, 7), torch.uint8),
}


def packet() -> Packet:
    num_bytes = packet_bytes(ARRAYS)
    return Packet(ARRAYS, torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8))


def test_what_is_written_on_one_side_arrives_on_the_other() -> None:
    sent = packet()
    assert all(offset % ALIGNMENT == 0 for offset in sent.offsets.values())
    sent.here["rows"][:] = [7, -1, 2**40]
    sent.here["first"][:] = [True, False, True]
    sent.here["image"][:] = np.arange(105).reshape(3, 5, 7)
    assert not sent.there["rows"].any()
    sent.upload()
    for name, array in ARRAYS.items():
        assert sent.there[name].dtype == array.dtype
        assert sent.there[name].shape == array.shape
        assert np.array_equal(sent.there[name].numpy(), sent.here[name])
    sent.there["image"].neg_()
    sent.download()
    assert sent.here["image"].ravel().tolist() == [-i % 256 for i in range(105)]


def test_a_part_of_a_packet_is_its_beginning() -> None:
    sent = packet()
    for array in sent.here.values():
        array[...] = 1
    sent.upload(sent.offsets["image"] + 2 * 35)
    assert sent.there["rows"].tolist() == [1, 1, 1]
    assert sent.there["image"].flatten(1).float().mean(1).tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("shape", "dtype", "entries", "as_dtype"),
    [
        ((2, 8, 9, 3), torch.uint8, 27, torch.int64),
        ((2, 7, 7, 4), torch.uint8, 49, torch.int32),
        ((2, 3), torch.uint8, 3, torch.uint8),
        ((2, 5), torch.bool, 5, torch.uint8),
        ((2,), torch.float32, 1, torch.int32),
        ((2, 3), torch.float64, 3, torch.int64),
        ((2, 0), torch.float32, 0, torch.float32),
    ],
)
def test_a_wide_view_is_the_same_rows_in_as_few_entries_as_can_be(shape, dtype, entries, as_dtype) -> None:
    array = torch.arange(int(np.prod(shape))).to(dtype).view(shape)
    view = wide(array)
    assert view.shape == (2, entries)
    assert view.dtype == as_dtype
    assert view.data_ptr() == array.data_ptr()
    copy = torch.zeros_like(array)
    wide(copy).index_copy_(0, torch.tensor([1, 0]), view)
    assert torch.equal(copy, array.flip(0))


@pytest.mark.parametrize("shape", [(3, 5, 8, 9, 3), (3, 5, 7), (3, 5), (3, 5, 0)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64, torch.bool])
def test_columns_are_what_indexing_gives(shape, dtype) -> None:
    array, index = torch.arange(int(np.prod(shape))).view(shape).to(dtype), torch.tensor([4, 0, 0, 2])
    assert torch.equal(columns(array, index), array[:, index])
    assert columns(array, index).dtype == dtype


def test_a_cpu_has_stand_ins_that_need_no_waiting() -> None:
    cpu, done = torch.device("cpu"), []
    fence, queue = make_fence(cpu), make_queue(cpu)
    assert type(fence) is Fence
    assert type(queue) is Queue
    for call in (fence.mark, fence.wait, fence.sync):
        call()
    with queue:
        again = queue.graph(lambda: done.append(1))
    before = len(done)
    again()
    assert len(done) == before + 1


def fail_twice() -> None:
    try:
        raise RuntimeError("operation not permitted\nmore of it")
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_the_cause_of_an_error_is_the_first_one() -> None:
    """As of a capture: the operation that it refused, not that its end failed too."""
    with pytest.raises(RuntimeError) as info:
        fail_twice()
    assert cause(info.value) == "operation not permitted"
    assert cause(ValueError()) == "ValueError()"


def test_recorded_graphs_do_the_same_again_on_the_same_memory_with_the_same_numbers() -> None:
    x, y, factor = torch.ones(3), torch.zeros(3), [2.0]
    replay = RecordingQueue().graph(lambda: y.copy_(x * factor[0] + x.sum()))
    x.fill_(10.0)
    factor[0] = 100.0  # frozen in the graph
    replay()
    assert y.tolist() == [50.0] * 3


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.ones(3).sum().item(),
        lambda: torch.ones(3)[torch.tensor([True, False, True])],
        lambda: torch.ones(3) * torch.tensor(2.0),
        lambda: torch.rand(3),
        lambda: torch.ones(3).nonzero(),
    ],
    ids=["number", "flags", "upload", "random", "size"],
)
def test_recorded_graphs_refuse_what_a_gpu_refuses(work) -> None:
    with pytest.raises(RuntimeError, match="not permitted"):
        RecordingQueue().graph(work)
