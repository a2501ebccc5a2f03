"""Signals in this very process: what is caught, what is left alone, and what a second one does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from pronghorn.training.signals import EXIT_CODES, StopSignals


@pytest.fixture
def asked() -> Iterator[StopSignals]:
    signals = StopSignals(force=lambda: None, quiet=True)
    with signals.caught():
        yield signals


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGHUP, 129)],
)
def test_the_first_signal_only_asks(asked: StopSignals, number: int, code: int) -> None:
    os.kill(os.getpid(), number)
    assert asked.number == number
    assert asked.exit_code == code


def test_a_second_signal_forces_with_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(os, "_exit", done.append)
    with StopSignals(force=lambda: done.append("workers ended"), quiet=True).caught():
        os.kill(os.getpid(), signal.SIGINT)
        assert done == []
        os.kill(os.getpid(), signal.SIGTERM)
    assert done == ["workers ended", 143]


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_hangup_forces_nothing(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closing terminal sends one, and its shell another."""
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"forced with {code}"))
    signals = StopSignals(force=lambda: pytest.fail("forced"), quiet=True)
    with signals.caught():
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGHUP)
    assert signals.number == first


def test_handlers_are_those_of_before_afterwards() -> None:
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    with StopSignals(force=lambda: None, quiet=True).caught():
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in EXIT_CODES} == before


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = StopSignals(force=lambda: None, quiet=True)
        with signals.caught():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.number == 0
    finally:
        signal.signal(signal.SIGHUP, old)


def test_outside_the_main_thread_nothing_is_caught() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def run() -> None:
        with StopSignals(force=lambda: None, quiet=True).caught():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
