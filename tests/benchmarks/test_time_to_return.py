"""When a run counts as having reached the goal, from what the programs say. Nothing is trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from side_by_side import Contender
from time_to_return import Progress


def test_the_goal_is_read_from_a_log_of_frames_and_returns(tmp_path: Path) -> None:
    progress = Progress(Contender("sample-factory", "sample-factory", ()), tmp_path)
    progress.on_line("[16:14] Fps is (10 sec: 1638.4). Total num frames: 8192. Throughput: 0: 1500.")
    progress.on_line("[16:14] Avg episode reward: [(0, '0.910')]")
    assert not progress.reached(0.7)  # of the short episodes that ended first
    progress.on_line("[16:15] Fps is (10 sec: 1638.4). Total num frames: 65536. Throughput: 0: 1500.")
    progress.on_line("[16:15] Avg episode reward: [(0, '-0.310')]")
    assert not progress.reached(0.7)
    progress.on_line("[16:19] Avg episode reward: [(0, '0.705')]")
    assert progress.reached(0.7)


def test_the_goal_is_read_from_metrics(tmp_path: Path) -> None:
    progress = Progress(Contender("pronghorn", "pronghorn", (), metrics="metrics.jsonl"), tmp_path)
    progress.look()
    assert not progress.reached(0.7)
    lines = [{"frames": 4096, "return_mean": 0.9}, {"frames": 61440, "return_mean": 0.71}, {"frames": 65536}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"frames": 7')
    progress.look()
    assert (progress.frames, progress.returns) == (61440, 0.71)
    assert progress.reached(0.7)
