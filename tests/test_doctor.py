"""The doctor: a table, a code, JSON; problems are those that a run is refused for; nothing of it needs an extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pronghorn import doctor, limits, machine
from pronghorn.cli import run
from pronghorn.config import Config, replace
from pronghorn.errors import ConfigError
from pronghorn.training.trainer import train

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are started by a test of their own."""
    monkeypatch.setattr(doctor, "_ENGINES", {})


def by_name(run_dir: Path) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.checks(run_dir)}


def test_a_machine_that_is_fit_has_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--run-dir", str(tmp_path / "runs" / "mine")]) == 0
    table = capsys.readouterr().out
    for word in ("Python", "torch", "GPU", "cores", "open files", "processes", "memory", "disk", "run directory",
                 "temporary files", "/dev/shm", "extra doom", "Pythons for workers"):  # fmt: skip
        assert word in table
    assert table.endswith("nothing stops a run here\n")
    assert not (tmp_path / "runs").exists()
    assert run(["doctor", "--json", "--run-dir", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is True
    assert {"name", "status", "available", "needed", "fix"} == record["checks"][0].keys()


@pytest.mark.parametrize(
    ("function", "value", "name", "fix"),
    [
        ("free_files", 20, "open files", "ulimit -n"),
        ("free_processes", 0, "processes", "ulimit -u, pids.max"),
        ("available_memory", MIB, "memory", "memory.max"),
        ("free_disk", 100 * MIB, "disk", "--run-dir"),
        ("free_shared_memory", 1000, "/dev/shm", "--shm-size"),
    ],
)
def test_what_is_too_small_is_named_with_numbers_and_a_fix(
    function: str, value: int, name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, function, lambda *_: value)
    assert run(["doctor", "--run-dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("FIX")]
    assert name in line
    assert fix in line
    assert out.endswith(f"to fix: {name}\n")
    check = by_name(tmp_path)[name]
    assert check.needed
    assert check.available


def test_fewer_cores_than_the_machine_has_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: 1)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 8)
    check = by_name(tmp_path)["cores"]
    assert (check.status, check.available) == ("note", "1 usable of 8")


def test_a_directory_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the refusal of the system is put in."""

    def refuses(dir: Path) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuses)
    check = by_name(tmp_path / "new")["run directory"]
    assert (check.status, check.available) == ("problem", f"{tmp_path}: Read-only file system")
    assert "--run-dir" in check.fix


def test_an_engine_that_does_not_start_is_a_problem_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ENGINES", {"cluster": ("numpy", "raise SystemExit('no display')"),
                                             "atari": ("numpy", ""), "wandb": ("no-such-package", "")})  # fmt: skip
    broken, starts, absent = (doctor._engine(name) for name in ("cluster", "atari", "wandb"))
    assert (broken.status, broken.available) == ("problem", "no display")
    assert (starts.status, absent.status, absent.available) == ("ok", "ok", "not installed, so not started")
    monkeypatch.setattr(doctor, "ENGINE_S", 0.5)
    monkeypatch.setattr(doctor, "_ENGINES", {"atari": ("numpy", "import time; time.sleep(100)")})
    assert doctor._engine("atari").available == "does not start within 0.5 s"


def test_the_real_engines_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vizdoom")
    monkeypatch.undo()
    assert doctor._engine("doom").available == "starts"


def test_it_works_without_any_optional_package_and_says_what_is_absent(tmp_path: Path) -> None:
    code = (
        "import importlib.metadata as m, sys\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name in ('torch', 'numpy', 'psutil'): return real(name)\n"
        "    raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
        "for name in ('vizdoom', 'cv2', 'ale_py', 'envpool', 'pettingzoo', 'ray', 'wandb'): sys.modules[name] = None\n"
        "from pronghorn.cli import main\n"
        "main(['doctor', '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["extra doom"]["fix"] == "pip install 'pronghorn-rl[doom]'"
    assert found["engine doom"]["available"] == "not installed, so not started"
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ the same rules at a start


def test_a_run_is_refused_by_the_same_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_disk", lambda path: 1000)
    values = {"run_dir": str(tmp_path / "run"), "env.workers": 1, "env.envs_per_worker": 2, "log.live": "off"}
    with pytest.raises(ConfigError, match=r"checkpoint.keep = 2: checkpoints need 0\.\d MiB in .*, and 0.0 MiB are"):
        train(replace(Config(env="gym:CartPole-v1"), values))
    assert not (tmp_path / "run").exists()


def test_engines_need_their_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_shared_memory", lambda: 64 * MIB)
    limits.require_engines(600)
    with pytest.raises(ConfigError, match=r"= 700: ViZDoom engines need 65.6 MiB in /dev/shm, and 64.0 MiB are free"):
        limits.require_engines(700)
    monkeypatch.setattr(machine, "free_shared_memory", lambda: None)
    limits.require_engines(10**6)


def test_checkpoints_that_are_there_need_no_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(Config(env="x:y"), {"run_dir": str(tmp_path / "new" / "run"), "checkpoint.keep": 4})
    monkeypatch.setattr(machine, "free_disk", lambda path: 20 * MIB)
    limits.require_disk(config, 4 * MIB, resumed=False)
    limits.require_disk(config, 20 * MIB, resumed=True)
    with pytest.raises(ConfigError, match=r"checkpoint.keep = 4: checkpoints need 25.0 MiB"):
        limits.require_disk(config, 5 * MIB, resumed=False)
    monkeypatch.undo()
    assert machine.free_disk(tmp_path / "not" / "there") > 0
