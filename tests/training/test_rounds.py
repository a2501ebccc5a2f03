"""Rounds: all learners get one decision, whoever brings what."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import pronghorn.training.rounds as rounds_module
from pronghorn.errors import PronghornError
from pronghorn.training.rounds import Decision, Rounds, Wish
from pronghorn.training.world import World
from worlds import together


def decide(*wishes: Wish) -> Decision:
    """The one decision of as many learners as there are wishes."""
    decisions = together(len(wishes), lambda world: Rounds(world).decide(wishes[world.rank]))
    assert all(decision == decisions[0] for decision in decisions)
    return decisions[0]


def test_all_train_if_all_have_a_batch() -> None:
    assert decide(Wish(True), Wish(True)) == Decision(True, "", 0, False, ())


def test_nobody_trains_if_one_has_no_batch() -> None:
    assert decide(Wish(True), Wish(False), Wish(True)) == Decision(False, "", 0, False, (1,))


def test_all_end_if_one_wants_to_and_know_the_signal() -> None:
    assert decide(Wish(True), Wish(False, "signal", 15)) == Decision(False, "signal", 15, False, (1,))
    assert decide(Wish(True, "minutes"), Wish(True)).ends == "minutes"


def test_of_two_reasons_the_graver_one_is_told() -> None:
    assert decide(Wish(True, "minutes"), Wish(True, "error")).ends == "error"
    assert decide(Wish(True, "signal", 2), Wish(True, "minutes")).ends == "signal"


def test_all_save_if_the_first_wants_to() -> None:
    assert decide(Wish(True, saves=True), Wish(True)).saves


def test_one_alone_decides_for_itself() -> None:
    assert Rounds(World()).decide(Wish(True, saves=True)) == Decision(True, "", 0, True, ())


def test_weights_that_differ_are_an_error_for_all_that_names_whose() -> None:
    def work(world: World) -> None:
        rounds = Rounds(world)
        rounds.require_same("00ff00ff12345678")
        with pytest.raises(PronghornError, match=r"learner\(s\) 2 are not those of learner 0 \(params_sha\)"):
            rounds.require_same("00ff00ff12345678" if world.rank < 2 else "00ff00ff12345679")

    together(3, work)


def test_who_has_no_batch_for_long_while_others_wait_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rounds_module, "TOLD_AFTER_S", 0.0)

    def work(world: World) -> None:
        rounds = Rounds(world)
        for _ in range(3):
            rounds.decide(Wish(world.rank == 0))

    with caplog.at_level(logging.WARNING, "pronghorn"):
        together(2, work)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2  # by each of the two, once
    assert all(text.startswith("learner(s) 1: no batch for") for text in told)


def test_nobody_is_blamed_where_all_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(rounds_module, "TOLD_AFTER_S", 0.0)
    with caplog.at_level(logging.WARNING, "pronghorn"):
        decide(Wish(False), Wish(False))
    assert not caplog.records
