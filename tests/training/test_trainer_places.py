"""Where a run happens: a current directory that it must not touch, two at once, other sizes at a resume."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.training.metrics import read_metrics
from running import assert_gone, children_of, env, start, wait_for_steps

SIZES = ["--env.workers", "2", "--env.envs-per-worker", "4", "--learner.unroll-length", "16", "--log.no-tensorboard",
         "--learner.batch-unrolls", "8", "--learner.minibatches", "1", "--threads", "1"]  # fmt: skip


def pronghorn(*argv: str) -> list[str]:
    return [sys.executable, "-m", "pronghorn", *argv]


@pytest.mark.case("CLI-05")
@pytest.mark.parametrize("name", [env("Match"), "doom:basic"])
def test_a_current_directory_that_cannot_be_written_stays_untouched(name: str, tmp_path: Path) -> None:
    """VizDoom writes a file where it runs: that is a worker's own directory."""
    if name.startswith("doom"):
        pytest.importorskip("vizdoom")
    here, run_dir = tmp_path / "here", tmp_path / "run"
    here.mkdir()
    (here / "mine.txt").write_text("mine")
    sizes = [*SIZES, "--model.conv-features", "16", "--model.core-size", "16"]
    train = pronghorn("train", name, "--run-dir", str(run_dir), "--steps", "300", *sizes)
    if os.getuid():
        here.chmod(0o555)
        done = subprocess.run(train, cwd=here, capture_output=True, text=True, timeout=100, check=False)
    else:  # root may write everywhere but on what is mounted read-only, in a mount namespace of its own
        if shutil.which("unshare") is None:
            pytest.skip("needs unshare")
        mount = f"mount --bind {here} {here} && mount -o remount,bind,ro {here} && cd {here} && ! touch new 2>&- && "
        shell = ["unshare", "-m", "sh", "-c", mount + 'exec "$@"', "sh"]
        if subprocess.run([*shell, "true"], capture_output=True, check=False).returncode:
            pytest.skip("needs mounts")
        done = subprocess.run([*shell, *train], capture_output=True, text=True, timeout=100, check=False)
    here.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "reached its limit (steps)" in done.stdout
    assert [p.name for p in here.iterdir()] == ["mine.txt"]
    assert (run_dir / "checkpoints").is_dir()


@pytest.mark.case("SHM-04", "FLT-10")
@pytest.mark.parametrize("name", [env("Match"), "doom:basic"])
def test_of_two_runs_at_once_one_that_is_killed_takes_nothing_of_the_other(name: str, tmp_path: Path) -> None:
    """And the next start begins at once, beside the one that goes on."""
    if name.startswith("doom"):
        pytest.importorskip("vizdoom")
    small = ("--env.envs-per-worker", "2", "--learner.unroll-length", "8", "--learner.batch-unrolls", "4", "--threads",
             "1", "--model.core-size", "16", "--model.conv-features", "16")  # fmt: skip
    one, other = (start(tmp_path / run, *small, env_id=name) for run in ("one", "other"))
    try:
        for run, process in (("one", one), ("other", other)):
            wait_for_steps(tmp_path / run, 100, process)
        children = children_of(one)
        one.kill()
        one.communicate()
        assert_gone(children)
        again = start(tmp_path / "again", *small, "--steps", "200", env_id=name)
        output, _ = again.communicate(timeout=100)
        assert again.returncode == 0, output
        wait_for_steps(tmp_path / "other", read_metrics(tmp_path / "other")[-1]["steps"] + 200, other)
        others = children_of(other)
        other.send_signal(signal.SIGTERM)
        output, _ = other.communicate(timeout=60)
        assert other.returncode == 143, output
        assert_gone(others)
        assert read_metrics(tmp_path / "other")[-1]["worker_restarts"] == 0
    finally:
        one.kill()
        other.kill()


@pytest.mark.case("RES-07")
def test_a_run_goes_on_with_other_numbers_of_workers_and_environments(tmp_path: Path) -> None:
    sizes = SIZES[4:]
    for workers, envs, steps in ((2, 4, 2_000), (1, 3, 4_000), (3, 2, 6_000)):
        numbers = ["--env.workers", str(workers), "--env.envs-per-worker", str(envs), "--steps", str(steps)]
        resume = ["--resume"] if steps > 2_000 else []
        argv = pronghorn("train", env("Match"), "--run-dir", str(tmp_path / "run"), *sizes, *numbers, *resume)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "changed: env.workers 2 -> 1" in log
    assert "changed: env.envs_per_worker 3 -> 2" in log
    steps_of = [m["steps"] for m in read_metrics(tmp_path / "run")]
    assert steps_of == sorted(steps_of)
    assert steps_of[-1] >= 6_000
