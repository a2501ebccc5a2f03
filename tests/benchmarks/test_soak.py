"""The soak: each promise is judged broken where it is, and a minute of the real thing keeps all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import soak

ROWS = 8


def seen(seconds: int = 900) -> dict[str, Any]:
    """A run that keeps every promise, with a dip in all sums at each kill."""
    samples, lines = [], []
    for t in range(seconds):
        dip = t % 20 == 3
        warm = min(t, 200) / 200
        samples.append({"seconds": float(t), "pss_mib": 500.0 * warm - 80 * dip, "descriptors": 60 - 4 * dip,
                        "threads": 20 - 2 * dip, "processes": 5 - dip, "shm_files": 0})  # fmt: skip
        slots = {"slots_free": 4 + 4 * dip, "slots_filling": ROWS - 4 * dip, "slots_full": 0, "slots_learning": 0}
        lines.append({"time_s": float(t), "steps": 100 * t, "updates": 2 * t, "steps_per_s": 100.0, "policy_lag_max": 5,
                      "worker_restarts": t // 20, "unrolls_lost": 4 * (t // 20), "return_mean": 8.0 * warm,
                      **slots})  # fmt: skip
    kills = [{"seconds": 20.0 * n, "pid": n, "what": "worker"} for n in range(1, 1 + (seconds - 1) // 20)]
    return {"env": "x:y", "minutes": seconds / 60, "seed": 0, "cores": 2, "exit_code": 0, "samples": samples,
            "lines": lines, "kills": kills}  # fmt: skip


def broken(record: dict[str, Any]) -> list[str]:
    return [one.promise for one in soak.judge(record, max_lag=16, num_rows=ROWS) if not one.kept]


def test_a_run_that_keeps_its_promises_is_told_so() -> None:
    assert broken(seen()) == []


@pytest.mark.parametrize("name", soak.GROWTH)
def test_what_grows_behind_the_warm_up_is_named(name: str) -> None:
    record = seen()
    for sample in record["samples"]:
        sample[name] += sample["seconds"] / 8
    assert broken(record) == [f"{name} does not grow"]


def test_a_process_that_stays_behind_is_named_and_dips_are_no_growth() -> None:
    record = seen()
    for sample in record["samples"][500:]:
        sample["processes"] += 1
    assert broken(record)[0] == "processes do not grow"
    record = seen()
    for sample in record["samples"][1:700]:  # a worker less most of the time, until the end
        if sample["seconds"] > 30 and sample["seconds"] % 9:
            sample |= {"processes": 4, "pss_mib": 400.0, "descriptors": 40, "threads": 9}
    assert broken(record) == []


def test_a_slot_that_nobody_fills_is_lost() -> None:
    record = seen()
    for line in record["lines"][500:]:
        line["slots_filling"] += 1
        line["slots_free"] -= 1
    assert broken(record) == ["no slot is lost"]
    for line in record["lines"][500:]:
        line["slots_filling"] -= 1
    assert broken(record) == ["no slot is lost"]  # it is in no state at all


def test_the_other_promises_can_be_broken() -> None:
    record = seen()
    record["lines"][700]["policy_lag_max"] = 17
    assert broken(record) == ["lag is bounded"]
    record = seen()
    record["kills"].pop()
    assert broken(record) == ["each kill is one restart"]
    record = seen()
    record["exit_code"] = 1
    assert broken(record) == ["ends at its limit"]
    record = seen()
    for line in record["lines"][600:]:
        line["updates"] = 1200
    assert broken(record) == ["updates go on"]
    record = seen()
    for line in record["lines"][700:]:
        line["return_mean"] = 5.0
    assert broken(record) == ["learning goes on"]


def test_the_table_says_what_was_done() -> None:
    record = seen()
    text = soak.table(record, soak.judge(record, max_lag=16, num_rows=ROWS))
    assert "89,900 steps, 44 workers and 0 engines killed, 176 unrolls lost" in text
    assert "| lag is bounded | at most 5 of 16 iterations | yes |" in text
    assert len(soak.thinned(list(range(1000)))) == 335


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_kills_loses_nothing(tmp_path: Path) -> None:
    code = soak.main(["--out", str(tmp_path / "soak"), "--minutes", "1", "--kill-every-s", "5"])
    record = json.loads((tmp_path / "soak" / "soak.json").read_text())
    assert code == 0, record["verdicts"]
    assert len(record["kills"]) >= 3
