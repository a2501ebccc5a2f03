"""The alarm: it rings once for each stall, and says where threads are."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from pronghorn.training import stall
from pronghorn.training.live import LiveView
from pronghorn.training.stall import StallAlarm, places


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    monkeypatch.setattr(stall, "time", Clock)
    return iter([now])


def test_it_rings_once_for_each_stall(clock: Iterator[list[float]]) -> None:
    now = next(clock)
    alarm, rung = StallAlarm(60.0), []
    for at, progress in [(100, 1), (159, 1), (160, 1), (300, 1), (301, 2), (360, 2), (361, 2), (362, 3)]:
        now[0] = float(at)
        if alarm.rings((progress, 7)):
            rung.append(at)
    assert rung == [160, 361]


def test_a_thread_is_placed_by_its_innermost_line_of_this_package() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            entered.set()
            leave.wait(10)
            return len(text)

    view = LiveView("title", plain=True, console=Console(file=Slow()))
    thread = threading.Thread(target=view.message, args=("something",), name="sampler")
    thread.start()
    entered.wait(10)
    (place,) = places([thread])
    leave.set()
    thread.join()
    assert re.fullmatch(r"thread sampler: _print, .*/training/live\.py:\d+", place)
    assert places([thread]) == ["thread sampler: ended"]
