"""What the package needs of the system and of other packages: the core alone is enough, and what is absent is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pronghorn.envs.workers import ResolvedEnv, WorkerPool
from pronghorn.errors import PronghornError

ROOT = Path(__file__).parents[1]
EXTRAS = ("vizdoom", "cv2", "ale_py", "envpool", "pettingzoo", "minigrid", "Box2D", "mujoco", "ray", "wandb")
SYSTEM = ("pwd", "grp", "fcntl", "resource", "termios")

IMPORT_ALL = """
import importlib, pkgutil, sys
import psutil  # which needs `resource` where there is one
for name in {absent}:
    sys.modules[name] = None
import pronghorn
names = [m.name for m in pkgutil.walk_packages(pronghorn.__path__, "pronghorn.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
assert len(names) > 30
"""
TRAIN = """
from pronghorn.cli import main
main(["train", "gym:CartPole-v1", "--run-dir", "run", "--steps", "300", "--env.workers", "1",
      "--env.envs-per-worker", "4", "--learner.unroll-length", "16", "--learner.minibatches", "1"])
"""


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.case("CLI-04")
def test_the_core_is_python_only_and_its_dependencies_hold_no_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = {path.suffix for path in (ROOT / "src/pronghorn").rglob("*") if path.is_file()}
    assert files - {".pyc"} == {".py", ".toml", ".csv", ".typed"}
    assert "ext-modules" not in project["tool"]["setuptools"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=\[]", requirement)[0] for requirement in requirements}

    optional = project["project"]["optional-dependencies"]
    extras = set().union(*(names(packages) for extra, packages in optional.items() if extra != "dev"))
    assert names(project["project"]["dependencies"]) & extras == {"gymnasium"}  # with extras of its own


@pytest.mark.case("CLI-04", "CLI-05")
@pytest.mark.parametrize("absent", [EXTRAS, SYSTEM], ids=["extras", "system"])
def test_every_module_is_imported_and_a_run_goes_through_without(absent: tuple[str, ...], tmp_path: Path) -> None:
    done = run(IMPORT_ALL.format(absent=absent) + TRAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reached its limit (steps)" in done.stdout


@pytest.mark.case("CLI-04")
@pytest.mark.parametrize(
    ("env", "extra"),
    [("doom:basic", "doom"), ("atari:Pong", "atari"), ("gym:MiniGrid-Empty-5x5-v0", "minigrid"),
     ("envpool:CartPole-v1", "envpool"), ("pettingzoo:sisl.pursuit_v5", "pettingzoo")],
)  # fmt: skip
def test_an_extra_that_is_asked_for_and_absent_is_one_message(env: str, extra: str, tmp_path: Path) -> None:
    code = f"import sys\nfor name in {EXTRAS}:\n    sys.modules[name] = None\n"
    done = run(code + f"from pronghorn.cli import main\nmain(['train', {env!r}, '--run-dir', 'run'])\n", tmp_path)
    assert done.returncode == 1
    assert f"pip install 'pronghorn-rl[{extra}]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
COMMANDS = ("train", "bench", "eval", "match", "record", "watch", "report", "envs", "doctor")


@pytest.mark.case("CLI-04")
def test_every_command_explains_itself_without_optional_packages_and_without_torch(tmp_path: Path) -> None:
    """In one process: each --help, and the list of commands."""
    code = BLOCK.format(absent=(*EXTRAS, "torch", "tensorboard", "matplotlib", "imageio")) + f"""
from pronghorn.cli import run
for argv in [["--help"], *([command, "--help"] for command in {COMMANDS})]:
    try:
        code = run(argv)
    except SystemExit as end:
        code = end.code
    assert code == 0, argv
    print("explained:", *argv)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"explained: {command} --help" in done.stdout
        assert f"usage: pronghorn {command}" in done.stdout or command == "envs"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("CLI-08")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learner.lr", "-1"], ["learner.lr", "-1", "must be greater than 0"]),
        (["--learner.lrr", "1"], ["--learner.lr"]),
        (["--max-lag", "-1"], ["max_lag", "-1", "must not be negative", "0 takes turns"]),
        (["--preset", "sf-dom"], ["sf-doom"]),
    ],
)
def test_bad_configuration_is_refused_before_torch_is_imported(
    flags: list[str], words: list[str], tmp_path: Path
) -> None:
    """That is what makes it quick. Field, value, rule and fix are in the message; unknown flags name the nearest."""
    code = BLOCK.format(absent=(*EXTRAS, "torch"))
    done = run(code + f"from pronghorn.cli import main\nmain(['train', 'gym:CartPole-v1', *{flags}])\n", tmp_path)
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("CLI-05")
def test_a_system_without_process_groups_is_named_as_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "killpg")  # as on Windows
    with pytest.raises(PronghornError, match=r"need Linux or macOS.*On Windows use WSL 2"):
        WorkerPool([ResolvedEnv("x", "worker", "call", "x:make")], num_workers=1, envs_per_worker=1, seed=0)
