"""Learners that meet: sums, exchanges, texts, and who is named when one is missing."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import pronghorn.training.world as worlds_module
from pronghorn.errors import LearnersLost, PronghornError
from pronghorn.launch import Launch
from pronghorn.training.world import World, join
from worlds import Store, meet_at, together


def test_alone_every_sum_is_the_number_itself() -> None:
    world = World()
    x = torch.tensor([1.0, 2.0])
    assert world.sums(x) is x
    assert world.exchange([3.0, 4.0]).tolist() == [[3.0, 4.0]]
    assert world.give(b"abc") == b"abc"
    assert world.leads
    assert world.told("x") == world.wait_told("x", 9.0) == {}


def test_sums_exchanges_and_bytes_are_the_same_for_all() -> None:
    def work(world: World) -> tuple[list[float], list[list[float]], bytes, bytes]:
        total = world.sums(torch.tensor([1.0, 10.0 * world.rank]))
        table = world.exchange([float(world.rank), 7.0])
        data = world.give(b"settings of 0" if world.leads else b"mine")
        return total.tolist(), table.tolist(), data, world.give(b"")

    for total, table, data, empty in together(3, work):
        assert total == [3.0, 30.0]
        assert table == [[0.0, 7.0], [1.0, 7.0], [2.0, 7.0]]
        assert data == b"settings of 0"
        assert empty == b""


def test_many_bytes_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds_module, "_BLOCK_BYTES", 1000)
    sent = np.random.default_rng(0).bytes(4321)
    assert together(2, lambda world: world.give(sent if world.leads else b"")) == [sent, sent]


def test_tensors_become_those_of_learner_0_to_the_last_bit() -> None:
    def work(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(world.rank)
        weight = torch.randn(3, 2, 4, 4, generator=generator).to(memory_format=torch.channels_last)
        moment = torch.tensor(0.1 + world.rank, dtype=torch.float64)
        world.align([weight, moment])
        return weight, moment

    (weight, moment), *others = together(3, work)
    assert torch.equal(weight, torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0)))
    for other_weight, other_moment in others:
        assert torch.equal(weight, other_weight)
        assert torch.equal(moment, other_moment)


def test_texts_are_left_for_whoever_looks() -> None:
    def work(world: World) -> tuple[dict[int, str], dict[int, str]]:
        early = world.told("episodes")
        world.exchange([0.0])
        world.tell("episodes", f"of {world.rank}")
        return early, world.wait_told("episodes", 60.0)

    first, second = together(2, work)
    assert first == ({}, {1: "of 1"})
    assert second == ({}, {0: "of 0"})


def test_who_fails_says_why_to_the_others() -> None:
    def work(world: World) -> str:
        if world.rank == 1:
            world.fail("3 its environments keep dying")
            return ""
        with pytest.raises(LearnersLost, match=r"Learner 1 .* error: its environments keep dying") as caught:
            world.exchange([0.0])
        with pytest.raises(LearnersLost):  # and again, at once
            world.sums(torch.zeros(1))
        assert caught.value.exit_code == 3
        return str(caught.value)

    assert "environments keep dying" in together(2, work)[0]


def test_who_lives_and_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds_module, "BEAT_S", 0.1)
    over = threading.Event()

    def work(world: World) -> None:
        if world.rank == 2:
            over.wait(60.0)
            return
        with pytest.raises(LearnersLost, match=r"Learner 2 \(on .*\) lives, and did not come within 1 s"):
            world.exchange([0.0])
        over.set()

    store, errors = Store(), []

    def run(rank: int) -> None:
        try:
            world = meet_at(store, rank, 3, 1.0 if rank < 2 else 60.0)
            work(world)
            world.close()
        except BaseException as error:
            errors.append((rank, error))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100.0)
    # one of the two waits for the other, which has given up already: whoever noticed first named the right one
    assert len(errors) <= 1, errors


def test_who_gives_no_sign_of_life_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds_module, "BEAT_S", 0.2)

    def work(world: World) -> None:
        if world.rank == 1:
            world.close()  # as a killed process: its connections close, its signs of life end
            return
        time.sleep(0.5)
        with pytest.raises(LearnersLost, match=r"Learner 1 .*has given no sign of life for"):
            world.exchange([0.0])

    together(2, work)


def test_who_never_started_is_named() -> None:
    with pytest.raises(LearnersLost, match=r"Of 3 learners these did not start within 0.2 s: 1, 2\."):
        meet_at(Store(), 0, 3, 0.2)


def test_a_store_that_is_not_there_is_an_error_that_names_it() -> None:
    alone = Launch(1, 2, 1, 2, 0, "127.0.0.1", 1, hosted=True)
    with pytest.raises(PronghornError, match=r"Learner 1 cannot reach the others' store at 127.0.0.1:1"):
        join(alone, torch.device("cpu"), 1.0)


def test_one_process_under_torchrun_is_alone() -> None:
    assert type(join(Launch(), torch.device("cpu"), 1.0)) is World
