"""The comparison of Doom matches with raw engines: what it runs in which order, what it says, and one short match."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import duels
from running import has_ended


class Clock:
    """Time that passes only when a scripted measurement is made: a second for each match."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, list[tuple[str, int]]()
        monkeypatch.setattr(duels.time, "monotonic", lambda: self.now)
        for name, per_match in (("raw", 100.0), ("ours", 300.0)):
            monkeypatch.setattr(duels, name, self._driver(name, per_match))

    def _driver(self, name: str, per_match: float):  # type: ignore[no-untyped-def]
        def drive(num_matches: int, num_players: int, seconds: float) -> float:
            self.calls.append((name, num_matches))
            self.now += num_matches
            return per_match * num_matches + len(self.calls)

        return drive


def test_each_round_is_all_contenders_in_turn_and_the_ratio_is_of_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    one, eight = duels.measure([1, 8], 2, 5.0, rounds=3)
    assert clock.calls == [("raw", 1), ("ours", 1), ("raw", 8), ("ours", 8)] * 3
    assert one["rounds"] == {"raw": [101.0, 105.0, 109.0], "ours": [302.0, 306.0, 310.0]}
    assert one["ratio"] == 306.0 / 105.0
    assert (eight["matches"], eight["steps_per_s"]) == (8, {"raw": 807.0, "ours": 2408.0})
    assert duels.line(one) == (
        "1 match of 2: raw 105 steps/s (101, 105, 109), ours 306 steps/s (302, 306, 310), ratio 2.91"
    )


@pytest.mark.parametrize(("minutes", "made"), [(0.0, 1), (0.5, 1), (0.6, 2), (0.89, 2), (0.9, 3), (9.0, 3)])
def test_no_round_begins_that_would_not_be_over_in_time(
    minutes: float, made: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A round takes 2 x (1 + 8) = 18 s."""
    Clock(monkeypatch)
    found = duels.measure([1, 8], 2, 5.0, rounds=3, minutes=minutes)
    assert [len(one["rounds"]["ours"]) for one in found] == [made, made]
    assert ("of 3 rounds" in capsys.readouterr().out) == (made < 3)


def test_a_raw_match_that_does_not_begin_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "child"
    script = tmp_path / "hangs.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(duels, "__file__", str(script))
    monkeypatch.setattr(duels, "START_S", 10.0)
    with pytest.raises(RuntimeError, match="not ready after 10 s"):
        duels.raw(1, 2, 0.1)
    assert has_ended(int(started.read_text()))


def test_one_short_match_of_each_kind_plays() -> None:
    pytest.importorskip("vizdoom")
    script = Path(duels.__file__)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = [sys.executable, str(script), "--seconds", "0.5", "--rounds", "1", "--matches", "1"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=110, env=environ, check=True)
    number = r"([\d,]+)"
    pattern = rf"1 match of 2: raw {number} steps/s \({number}\), ours {number} steps/s \({number}\), ratio ([\d.]+)\n"
    found = re.fullmatch(pattern, result.stdout)
    assert found, result.stdout
    assert all(float(number.replace(",", "")) > 0 for number in found.groups())
