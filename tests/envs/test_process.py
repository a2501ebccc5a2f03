"""One worker process: where it runs and what it inherits, how it ends, and its failures in words."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from playing import alive, answer_rows, kill_worker, play, receive, toy, wait_until
from pronghorn.envs import process
from pronghorn.envs.workers import ResolvedEnv
from pronghorn.errors import ConfigError, EnvError, MissingExtraError, SpaceError, UnknownEnvError
from pronghorn.types import Event

FIRST = Event.FIRST


def test_a_worker_knows_nothing_of_torch_and_of_gpus(start):
    import torch  # noqa: F401

    pool = start(toy("Facts"))
    torch_imported, num_cores, own_directory, gpus_hidden, num_threads, _ = receive(pool).obs["obs"][0].tolist()
    assert torch_imported == 0
    assert num_cores == (1 if "pinned to cores" in pool.describe() else len(os.sched_getaffinity(0)))
    assert (own_directory, gpus_hidden, num_threads) == (1, 1, 1)


@pytest.mark.case("PRF-02")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads of a process as Linux lists them")
def test_a_worker_computes_on_one_thread_unless_its_environment_says_otherwise(start, monkeypatch):
    """Each of several workers would else take a thread for each core, whatever the trainer was told itself."""
    for name in process._ONE_THREAD:
        monkeypatch.setenv(name, "3")
    pool = start(toy("Arithmetic"), num_workers=2, pin="off")
    facts = {}
    while len(facts) < 2:
        ready = receive(pool)
        facts |= dict(zip(ready.rows.tolist(), ready.obs["obs"].tolist(), strict=True))
    assert facts == {0: [1, 1], 1: [1, 1]}
    told = start(toy("Arithmetic", threads=2), pin="off")
    assert receive(told).obs["obs"][0, 0] == 2


def test_workers_run_in_another_interpreter(start, tmp_path):
    """A second environment that has NumPy and Gymnasium, but neither torch nor this package."""
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    site = next((tmp_path / "other" / "lib").glob("python*/site-packages"))
    for package in ("numpy", "gymnasium", "farama_notifications", "typing_extensions", "cloudpickle"):
        import_path = Path(sys.modules["numpy"].__file__).parents[1]
        for found in import_path.glob(package + "*"):
            (site / found.name).symlink_to(found)
    python = str(tmp_path / "other" / "bin" / "python")
    probe = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, check=False)
    assert "No module named 'torch'" in probe.stderr
    pool = start(toy("Facts"), python=python)
    facts = receive(pool).obs["obs"][0].tolist()
    assert facts[0] == 0
    answer_rows(pool, [0])
    assert receive(pool).reward.tolist() == [1.0]


@pytest.mark.case("CLI-02")  # a worker that dies at import
def test_an_interpreter_that_does_not_exist_or_lacks_numpy_is_refused(start, tmp_path):
    with pytest.raises(ConfigError, match=r"env.python = '/no/such/python'"):
        start(toy(), python="/no/such/python")
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    with pytest.raises(EnvError, match=r"ended with exit code 1(.|\n)*No module named 'numpy'"):
        start(toy(), python=str(tmp_path / "bare" / "bin" / "python"))


def test_the_worker_side_keeps_python_3_8_syntax():
    import ast

    for path in Path(process.protocol.__file__).parent.glob("*.py"):
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 8))


@pytest.mark.case("ENV-04")
@pytest.mark.parametrize(
    ("env", "error", "match"),
    [
        (toy("OldApi"), EnvError, r"OldApi.reset\(\) returned 1 value; 2 are needed"),
        (toy("Nothing"), UnknownEnvError, "has no 'Nothing'"),
        (ResolvedEnv("x", "worker", "gym", "CartPol-v1"), UnknownEnvError, "near: CartPole-v1"),
        (ResolvedEnv("x", "worker", "call", "no_such:f"), UnknownEnvError, "no module 'no_such'"),
        (toy(options={"obs_keys": ["a"]}), EnvError, "obs_keys names 'a'"),
        (toy(size=5), EnvError, r"unexpected keyword argument 'size'; its arguments are: length=5, truncate=False"),
        (ResolvedEnv("x", "worker", "gym", "CartPole-v1", {"size": 5}), EnvError, "unexpected keyword argument 'size'"),
        (toy("Unbuildable"), EnvError, r"worker \d .*raised RuntimeError: no licence found\nTraceback"),
    ],
)
def test_a_failing_start_is_one_clear_error(start, env, error, match):
    before = time.monotonic()
    with pytest.raises(error, match=match) as info:
        play(start(env, num_workers=2), 2)
    assert time.monotonic() - before < 10
    assert ("Traceback" in str(info.value)) == ("Traceback" in match)


def test_a_missing_package_names_its_extra(start, tmp_path):
    absent = "raise ModuleNotFoundError(\"No module named 'Box2D'\", name='Box2D')\n"
    (tmp_path / "at_import.py").write_text(absent)
    (tmp_path / "at_call.py").write_text("def make():\n    " + absent)
    for file in ("at_import.py", "at_call.py"):
        with pytest.raises(MissingExtraError, match=r"needs the package 'Box2D'.*pip install 'pronghorn-rl\[box2d\]'"):
            start(ResolvedEnv("x", "worker", "call", f"{tmp_path}/{file}:make"))
    (tmp_path / "other.py").write_text("import no_such_package_of_theirs\n")
    with pytest.raises(EnvError, match="No module named 'no_such_package_of_theirs'"):
        start(ResolvedEnv("x", "worker", "call", f"{tmp_path}/other.py:make"))


def test_a_space_that_is_not_supported_is_named(start, tmp_path):
    (tmp_path / "texts.py").write_text(
        "from gymnasium import Env, spaces\n\nclass Texts(Env):\n"
        "    observation_space = spaces.Dict({'mission': spaces.Text(4)})\n    action_space = spaces.Discrete(2)\n"
    )
    with pytest.raises(SpaceError, match=r"x.*'mission' is a Text space"):
        start(ResolvedEnv("x", "worker", "call", f"{tmp_path}/texts.py:Texts"))


@pytest.mark.parametrize("where", ["build", "reset"])
def test_a_start_that_never_ends_is_an_error_with_its_stack(start, tmp_path, where):
    # Without Gymnasium, whose import takes a while on a busy machine.
    (tmp_path / "slow.py").write_text(
        "import time\n\nclass Slow:\n"
        "    leaf = {'shape': [1], 'dtype': 'float32', 'kind': 'vector'}\n"
        "    spec = {'observation': {'obs': leaf}, 'action': {'discrete': [2], 'low': [], 'high': []}}\n"
        "    def __init__(self, where):\n        where == 'build' and time.sleep(600)\n"
        "    def reset(self, seed):\n        time.sleep(600)\n"
        "    step = render = close = reset\n"
    )
    with pytest.raises(EnvError, match=r"did not answer within 3 s(.|\n)*slow.py"):
        start(ResolvedEnv("x", "worker", "call", f"{tmp_path}/slow.py:Slow", {"where": where}), start_timeout_s=3.0)


@pytest.mark.case("FLT-07")
@pytest.mark.case("FLT-10")
def test_what_a_worker_started_ends_with_it(start, tmp_path):
    pids = tmp_path / "pids"
    pool = start(toy("WithChild", pid_file=str(pids)))
    play(pool, 1)
    worker, child = map(int, pids.read_text().split())
    kill_worker(pool, 0)  # its child is re-parented and lives
    while (0, FIRST, 0.0, 0.0) not in play(pool, 1):
        pass
    assert not alive(child)
    assert not alive(worker)
    _, second_child = map(int, pids.read_text().splitlines()[1].split())
    pool.close()
    assert not alive(second_child)


def test_a_worker_that_prints_does_not_fill_the_disk(start, monkeypatch):
    monkeypatch.setattr(process, "_MAX_LOG_BYTES", 1000)
    pool = start(toy())
    log = pool._processes[0].log_path
    with open(log, "a") as file:
        file.write("x" * 2000)
    wait_until(lambda: pool._poll(0.05) or log.stat().st_size == 0)


@pytest.mark.parametrize("inner", [False, True])
def test_a_syntax_error_shows_file_line_and_caret_and_no_frame_of_ours(start, tmp_path, inner):
    bad = tmp_path / "bad.py"
    bad.write_text("import os\n\ndef make(:\n    pass\n")
    (tmp_path / "outer.py").write_text("import bad\n")
    with pytest.raises(EnvError) as info:
        start(ResolvedEnv("mine", "worker", "call", f"{tmp_path}/{'outer' if inner else 'bad'}.py:make"),
              sys_path=[str(tmp_path)])  # fmt: skip
    first, *lines = str(info.value).splitlines()
    assert first == "worker 0 (mine, row 0) raised SyntaxError: invalid syntax (bad.py, line 3)"
    assert lines[-4:] == [f'  File "{bad}", line 3', "    def make(:", "             ^", "SyntaxError: invalid syntax"]
    above = [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/outer.py", line 1, in <module>',
        "    import bad",
    ]
    assert lines[:-4] == (above if inner else [])
