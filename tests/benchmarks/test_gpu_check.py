"""The check of a GPU, tried on a CPU: what it compares, what it says of what it could not measure, how it begins."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_check
from gpu_check import apart, lines_of, main, targets
from pronghorn.errors import PronghornError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIXED = "several leaves, LSTM, masks, continuous"
TINY = ["--device", "cpu", "--small", "--rows", "4", "--seconds", "0.1"]


@pytest.fixture
def one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "NETWORKS", {MIXED: gpu_check.NETWORKS[MIXED]})
    monkeypatch.setattr(gpu_check, "timed", lambda work, least_s=0.0: [work(), 0.5][1])


def test_differences_are_relative_to_size_and_nan_is_infinite() -> None:
    assert apart(np.array([0.0, 99.0]), np.array([0.5, 100.0])) == 0.5
    assert apart(np.array([1.0]), np.array([np.nan])) == np.inf
    assert apart(np.zeros(0), np.zeros(0)) == 0.0


def test_targets_are_met_missed_or_not_measured() -> None:
    record = {"doom": {"frames_per_s": 260_000.0, "share_of_simulation": 0.7}, "synthetic": None}
    assert [(row["part"], row["seen"], row["met"]) for row in targets(record)] == [
        ("doom", 260_000.0, True), ("doom", 0.7, False), ("synthetic", None, None)
    ]  # fmt: skip


def test_parity_and_the_sampler_are_measured_and_written_down(
    one_network: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--parts", "parity", "sampler", "--json", str(tmp_path / "out.json")]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    seen = record["parity"][MIXED]
    assert seen["passed"]
    assert seen["acting"]["difference"] <= seen["limit"]
    assert seen["learning"]["ms_graph"] == 1e3 * 0.5 / 4  # of four updates
    assert list(record["sampler"]) == ["4 rows", "16 rows", "64 rows"]
    assert record["machine"]["gpu"].startswith("none")
    shown = capsys.readouterr().out
    assert f"same (limit {seen['limit']:g})" in shown  # wider where the processor computes in bfloat16
    assert "doom, training, frames/s: not measured (target 250,000.00)" in shown


def test_a_difference_is_shown_and_fails(
    one_network: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learner by graphs gets another learning rate: only the comparison of weights can tell."""
    copied = copy.deepcopy

    def other(thing: Any) -> Any:
        twin = copied(thing)
        if hasattr(twin, "set_hyper"):
            twin.set_hyper(lr=0.1)
        return twin

    monkeypatch.setattr(gpu_check, "copy", SimpleNamespace(deepcopy=other))
    assert main([*TINY, "--parts", "parity"]) == 1
    assert "DIFFERENT (limit 0.0" in capsys.readouterr().out


def test_a_part_that_fails_is_null_with_its_reason_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_check: Any) -> dict[str, Any]:
        raise PronghornError("no engine here")

    speeds = {"steps_per_s": 5.0, "frames_per_s": 20.0, "warnings": []}
    monkeypatch.setattr(gpu_check, "PARTS", {"doom": fails, "synthetic": lambda _check: speeds, "atari": fails})
    monkeypatch.setattr(gpu_check, "LONGEST_S", {"atari": 1e9})
    assert main([*TINY, "--parts", "doom", "synthetic", "atari", "--json", str(tmp_path / "out.json")]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["doom"], record["doom_error"]) == (None, "no engine here")
    assert record["atari_error"].startswith("left out: ")
    assert record["synthetic"] == speeds
    assert "training: 5 steps/s, 20 frames/s" in capsys.readouterr().out


def test_warnings_of_a_training_are_shown() -> None:
    seen = {"steps_per_s": 5.0, "frames_per_s": 20.0, "warnings": ["acting by CUDA graphs failed"]}
    assert lines_of("synthetic", seen)[-1] == "  acting by CUDA graphs failed"


def test_the_script_installs_wheels_beside_what_is_there_without_a_network(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "some-1-py3-none-any.whl").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho "$PYTHONPATH" >> {tmp_path}/paths\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "WHEELS": str(tmp_path / "wheels"), "TMPDIR": str(tmp_path)}
    argv = ["bash", str(BENCHMARKS / "gpu_check.sh"), "--json", "x.json"]
    subprocess.run(argv, env=environment, check=True, timeout=60)
    install, check = (tmp_path / "calls").read_text().splitlines()
    assert install.startswith("-m pip install --quiet --no-index --no-deps ")
    assert install.endswith(f"{tmp_path}/wheels/some-1-py3-none-any.whl")
    assert check == f"{BENCHMARKS}/gpu_check.py --json x.json"
    source, site, *_ = (tmp_path / "paths").read_text().splitlines()[-1].split(":")
    assert source == str(BENCHMARKS.parent / "src")
    assert site in install
    assert not Path(site).exists()  # nothing is left behind


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_check_runs_on_a_cpu(tmp_path: Path) -> None:
    argv = ["bash", str(BENCHMARKS / "gpu_check.sh"), *TINY, "--seconds", "2", "--json", str(tmp_path / "out.json")]
    subprocess.run(argv, env=os.environ | {"PYTHON": sys.executable}, check=True, timeout=1000)
    record = json.loads((tmp_path / "out.json").read_text())
    assert all(record[part] for part in ("parity", "sampler", "synthetic", "doom", "atari")), record
    assert all(row["seen"] > 0 for row in record["targets"])
