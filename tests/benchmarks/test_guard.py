"""The guard's arithmetic on scripted clocks, its verdicts, and its files; no speed of this machine decides anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import guard
from guard import Measured, measure, verdict
from stages import STAGES


class Machine:
    """Clocks that only work moves: a unit takes 4 ms and a kernel's call 20 ms, times how slow the machine is then.

    shared: wall-clock time is so many times as long, since other processes have the rest of it.
    """

    def __init__(self, *slowness: float, change_s: float = 1.0, shared: tuple[float, ...] = (1.0,)) -> None:
        self.cpu_s = self.wall_s = 0.0
        self.slowness, self.change_s, self.shared = slowness, change_s, shared
        self.unit_s, self.waits_s = 0.004, 0.0

    def spend(self, seconds: float) -> None:
        phase = int(self.wall_s / self.change_s)
        spent = seconds * self.slowness[phase % len(self.slowness)]
        self.cpu_s += spent
        self.wall_s += spent * self.shared[phase % len(self.shared)]

    def work(self) -> Iterator[int]:
        while True:
            self.spend(10 * self.unit_s)
            self.wall_s += 10 * self.waits_s
            yield 10

    def measure(self, seconds: float = 20.0, *, by_wall: bool = False) -> Measured:
        clocks = (lambda: self.cpu_s, lambda: self.wall_s)
        return measure(self.work(), lambda: self.spend(0.02), seconds, clocks, by_wall=by_wall)


@pytest.mark.parametrize("by_wall", [False, True])
def test_a_ratio_is_the_units_done_in_the_time_of_one_call_of_the_kernel(by_wall: bool) -> None:
    found = Machine(1.0).measure(by_wall=by_wall)
    assert found.ratio == pytest.approx(20 / 4)
    assert found.wall_ratio == pytest.approx(20 / 4)
    assert found.time_s == pytest.approx(0.004)
    assert found.spread == pytest.approx(0.0, abs=1e-9)


@pytest.mark.case("PRF-06")
@pytest.mark.parametrize("by_wall", [False, True])
def test_a_slower_machine_has_the_same_ratio_and_slower_work_a_smaller_one(by_wall: bool) -> None:
    found = Machine(3.0).measure(by_wall=by_wall)
    assert (found.ratio, found.time_s) == (pytest.approx(5.0), pytest.approx(0.012))
    changed = Machine(3.0)
    changed.unit_s *= 1.3
    slower = changed.measure(by_wall=by_wall)
    assert slower.ratio == pytest.approx(5.0 / 1.3)
    assert verdict(slower, 5.0) == "SLOWER"


@pytest.mark.parametrize("by_wall", [False, True])
def test_a_machine_whose_speed_comes_and_goes_has_the_same_ratio(by_wall: bool) -> None:
    """Other work doubles or trebles every time for seconds, and once in a while for less than a slice."""
    assert Machine(1.0, 3.0, 2.0, change_s=1.7).measure(by_wall=by_wall).ratio == pytest.approx(5.0, rel=0.01)
    bursts = Machine(*[1.0] * 9, 5.0, change_s=0.13)
    assert bursts.measure(60.0, by_wall=by_wall).ratio == pytest.approx(5.0, rel=0.05)


def test_other_processes_do_not_count_but_waiting_does() -> None:
    """CPU time is what is compared; by the wall's, work that waits as long as it works has half of the ratio."""
    found = Machine(1.0, shared=(1.0, 9.0, 2.0, 5.0), change_s=0.17).measure()
    assert found.ratio == pytest.approx(5.0)
    assert verdict(found, 5.0) == "ok"
    waiting = Machine(1.0)
    waiting.waits_s = 1.1 * waiting.unit_s
    found = waiting.measure()
    assert (found.ratio, found.wall_ratio) == (pytest.approx(5.0), pytest.approx(5.0 / 2.1))
    assert verdict(found, 5.0) == "WAITS"


def test_a_piece_of_work_that_is_longer_than_the_time_is_still_done_five_times() -> None:
    machine = Machine(1.0)
    machine.unit_s = 0.3
    assert machine.measure(1.0).ratio == pytest.approx(0.02 / 0.3)
    assert machine.wall_s > 5 * 10 * 0.3


@pytest.mark.case("PRF-06")
@pytest.mark.parametrize(
    ("share", "wall_share", "word"),
    [(0.79, 1.0, "SLOWER"), (0.81, 1.0, "ok"), (1.0, 0.51, "ok"), (1.0, 0.49, "WAITS"), (1.2, 1.2, "ok"),
     (1.3, 1.0, "faster")],
)  # fmt: skip
def test_the_verdict_at_its_edges(share: float, wall_share: float, word: str) -> None:
    for baseline in (0.01, 1.0, 5000.0):
        assert verdict(Measured(1.0, share * baseline, wall_share * baseline, 0.0), baseline) == word


# ---------------------------------------------------------------- the command, with scripted ratios


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """What each stage measures: its list in turn, the last again and again; 10 where there is none."""
    script: dict[str, list[float]] = {}

    def measure_stage(name: str, seconds: float) -> Measured:
        left = script.get(name, [10.0])
        ratio = left.pop(0) if len(left) > 1 else left[0]
        return Measured(1.5e-5, ratio, ratio, 0.02)

    monkeypatch.setattr(guard, "measure_stage", measure_stage)
    monkeypatch.setattr(guard, "keep_memory_mapped", lambda: None)  # would change the process of all other tests
    return script


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"ratios": dict.fromkeys(STAGES, 10.0)}))
    return path


def run(baseline: Path, *flags: Any) -> int:
    return guard.main(["--baseline", str(baseline), *map(str, flags)])


@pytest.mark.case("PRF-06")
def test_one_line_a_stage_and_code_0_if_none_is_slower(
    ratios: dict[str, list[float]], baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios["sampler-16"] = [8.1]
    assert run(baseline) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(STAGES)
    assert lines[0].split() == ["sampler-16", "15", "µs", "a", "row", "8.1", "2%", "10", "0.81", "ok"]


@pytest.mark.case("PRF-06")
def test_code_1_names_the_stage_that_is_slower_in_every_try(
    ratios: dict[str, list[float]], baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios["gather-doom"], ratios["sampler-16"] = [7.9, 7.0, 7.8], [5.0, 9.0]
    assert run(baseline, "--json", tmp_path / "out.json") == 1
    shown = capsys.readouterr()
    assert shown.err == "under 0.8 of the baseline, or 0.5 by wall-clock time: gather-doom SLOWER\n"
    results = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert list(results) == list(STAGES)
    slow, noisy = results["gather-doom"], results["sampler-16"]
    assert (slow["verdict"], slow["ratio"], slow["baseline"], slow["tries"]) == ("SLOWER", 7.8, 10.0, 3)
    assert (noisy["verdict"], noisy["ratio"], noisy["tries"]) == ("ok", 9.0, 2)
    assert "ok (try 2)" in shown.out
    assert run(baseline, "--only", "sampler-16", "learn-doom") == 0


@pytest.mark.case("PRF-06")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{}", "cannot be read"),
        ('{"ratios": ', "cannot be read"),
        (json.dumps({"ratios": {name: 10.0 for name in STAGES if name != "gather-doom"}}), "no ratio of gather-doom"),
        (json.dumps({"ratios": dict.fromkeys(STAGES, 10.0) | {"gather-doom": 0.0}}), "no ratio of gather-doom"),
        (json.dumps({"ratios": dict.fromkeys(STAGES, 10.0) | {"renamed": 1.0}}), "there are not: renamed"),
    ],
    ids=["no-file", "empty", "broken", "missing", "zero", "unknown"],
)
def test_what_has_no_baseline_does_not_pass(
    content: str | None, said: str, ratios: dict[str, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as info:
        run(path)
    assert info.value.code == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""  # before anything was measured


def test_a_recorded_baseline_says_where_it_comes_from_and_is_met(
    ratios: dict[str, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new.json"
    ratios["learn-doom"] = [0.0123456]
    assert run(path, "--record", "--seconds", 20) == 0
    assert "recorded" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record.keys() == {"machine", "recorded", "command", "ratios"}
    assert record["command"] == "python benchmarks/guard.py --record --seconds 20"
    assert record["ratios"].keys() == STAGES.keys()
    assert record["ratios"]["learn-doom"] == 0.01235
    assert "torch" in record["machine"]
    assert run(path) == 0
    with pytest.raises(SystemExit):
        run(path, "--record", "--only", "learn-doom")


def test_the_committed_baseline_has_every_stage() -> None:
    assert guard.read_baseline(guard.BASELINE, list(STAGES)).keys() == STAGES.keys()
