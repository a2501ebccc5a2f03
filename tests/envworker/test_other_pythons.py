"""The worker side in other Python versions: every file compiles there, and where NumPy is, a worker plays there.

Interpreters are looked for in PATH and among those of pyenv. A version that is not found is a skip that says so.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import pronghorn.envworker as worker_side
from pronghorn.envs.workers import ResolvedEnv, WorkerPool
from pronghorn.types import FIRST, LAST

VERSIONS = [f"3.{minor}" for minor in range(8, 14)]
FOLDER = Path(worker_side.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))

COUNTER = '''
import sys
import numpy as np

class Counter:
    """A flat environment that needs nothing but NumPy; it shows its interpreter and its step."""

    def __init__(self):
        self.spec = {"observation": {"obs": {"shape": [2], "dtype": "float32", "kind": "vector"}},
                     "action": {"discrete": [3], "low": [], "high": []}, "name": "counter"}
        self.count = 0

    def reset(self, seed=None):
        self.count = 0
        return self.see()

    def step(self, discrete, continuous):
        self.count += 1
        over = self.count == 4
        return self.see(), float(self.count), over, False, over, {}

    def see(self):
        return {"obs": np.array([sys.version_info[1], self.count], np.float32)}

    def render(self):
        return None

    def close(self):
        pass
'''


@functools.cache
def interpreters() -> dict[str, str]:
    """{version: path} of those that run, this one left out."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += sorted((Path.home() / ".pyenv" / "versions").glob("*/bin"))
    found: dict[str, str] = {}
    for version in VERSIONS:
        for path in (folder / f"python{version}" for folder in folders):
            if version not in found and version_of(path) == version and version != f"3.{sys.version_info[1]}":
                found[version] = str(path)
    return found


def version_of(path: Path) -> str:
    """What it says it is; nothing if it does not run (pyenv's stand-ins, say, where no version is chosen)."""
    if not os.access(path, os.X_OK):
        return ""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([str(path), "-I", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.fixture(params=VERSIONS)
def python(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    if version not in interpreters():
        what = "is the one that runs the tests" if version == f"3.{sys.version_info[1]}" else "was not found here"
        pytest.skip(f"Python {version} {what}; found: {', '.join(interpreters()) or 'none'}")
    return interpreters()[version]


def needs(path: Path) -> set[str]:
    """Names of the modules that a file imports at its top, its siblings' own included."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {need for name in names for need in needs(FOLDER / f"{name}.py")}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return found


def test_the_files_need_numpy_at_most() -> None:
    for path in FILES:
        assert needs(path) - sys.stdlib_module_names <= {"numpy"}, path


def test_every_file_compiles(python: str, tmp_path: Path) -> None:
    code = "import sys\nfor p in sys.argv[1:]: compile(open(p, encoding='utf-8').read(), p, 'exec')\nprint('ok')"
    argv = [python, "-I", "-W", "error", "-c", code, *map(str, FILES)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.stdout.strip(), done.returncode) == ("ok", 0), done.stderr


def test_what_needs_no_numpy_is_imported(python: str, tmp_path: Path) -> None:
    """Run by path, as workers are."""
    names = [path.stem for path in FILES if path.stem != "__init__" and "numpy" not in needs(path)]
    assert "keeper" in names
    code = "import importlib, sys\nsys.path.append(sys.argv[1])\n" + "\n".join(
        f"importlib.import_module('envworker.{name}')" for name in names
    )
    argv = [python, "-B", "-W", "error", "-c", code, str(FOLDER.parent)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def plays(python: str, folder: Path) -> None:
    """A pool with a worker in that interpreter plays whole episodes."""
    (folder / "counter_env.py").write_text(COUNTER)
    env = ResolvedEnv("counter", "worker", "call", f"{folder / 'counter_env.py'}:Counter", {}, {})
    pool = WorkerPool(
        (env,), num_workers=1, envs_per_worker=2, num_groups=1, seed=1, python=python, step_timeout_s=60.0
    )
    try:
        minor, steps, ends = int(version_of(Path(python)).split(".")[1]), [], 0
        for _ in range(10):
            ready = pool.recv(60.0)
            assert ready is not None
            assert (ready.obs["obs"][:, 0] == minor).all()
            steps += ready.reward[ready.event != FIRST].tolist()
            ends += int((ready.event == LAST).sum())
            pool.send(ready.rows, np.zeros((len(ready.rows), 1), np.int64), np.zeros((len(ready.rows), 0), np.float32))
        assert (sorted(set(steps)), ends) == ([1.0, 2.0, 3.0, 4.0], 4)
    finally:
        pool.close()


def test_a_worker_plays_where_numpy_is(python: str, tmp_path: Path) -> None:
    if subprocess.run([python, "-I", "-c", "import numpy"], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} has no NumPy; the slow test makes it an environment that has")
    plays(python, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_plays_in_an_environment_that_is_made_for_it(python: str, tmp_path: Path) -> None:
    """NumPy comes from the package index."""
    own, env = tmp_path / "venv" / "bin" / "python", os.environ | {"TMPDIR": str(tmp_path)}  # pip leaves files there
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True, capture_output=True, env=env)
    argv = [str(own), "-m", "pip", "install", "-q", "numpy"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        pytest.skip(f"NumPy cannot be had for {python}: {done.stderr.strip()[-200:]}")
    plays(str(own), tmp_path)
