"""Several learners as processes: one policy, one end, and what happens when one of them is lost.

Most tests start the processes themselves, with the variables that torchrun would set, to see the exit code of each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pronghorn.training.metrics import read_metrics
from running import env, wait_for_steps

FLAGS = [
    "--log.every-s", "0.2", "--log.no-tensorboard", "--log.live", "plain", "--env.workers", "1", "--env.pin", "off",
    "--env.envs-per-worker", "4", "--threads", "1", "--learner.unroll-length", "16", "--learner.batch-unrolls", "8",
    "--learner.epochs", "1", "--learner.minibatches", "1", "--model.mlp-layers", "16",
]  # fmt: skip
Learners = list[subprocess.Popen[str]]


@contextmanager
def learners(run_dir: Path, *flags: str, size: int = 2, env_id: str = env("Match")) -> Iterator[Learners]:
    """One process for each learner of a run; ended here if they have not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "pronghorn", "train", env_id, "--run-dir", str(run_dir), *FLAGS, *flags]
    common = {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": f"{port}", "TORCHELASTIC_RUN_ID": "test"}  # fmt: skip
    started: Learners = []
    try:
        for rank in range(size):
            variables = os.environ | common | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
            started.append(
                subprocess.Popen(
                    argv, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=run_dir.parent
                )
            )
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                    child.kill()
            if process.stdout and not process.stdout.closed:
                process.communicate()


def ends(processes: Learners, timeout_s: float = 120.0) -> list[tuple[int, str]]:
    """(exit code, output) of each."""
    outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def state_of(run_dir: Path) -> dict[str, Any]:
    """The last checkpoint's."""
    newest = sorted((run_dir / "checkpoints").iterdir())[-1]
    state: dict[str, Any] = json.loads((newest / "state.json").read_text())
    return state


def last(run_dir: Path) -> dict[str, Any]:
    return read_metrics(run_dir)[-1]


def torchrun(run_dir: Path, *flags: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    options = ("--log-dir", str(run_dir.parent / "torchrun"), *options)  # else it leaves a directory in /tmp
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options, "-m",
            "pronghorn", "train", env("Match"), "--run-dir", str(run_dir), *FLAGS, *flags]  # fmt: skip
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent)


def test_torchrun_trains_one_policy_with_two_learners(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun(run, "--steps", "6000", "--eval.every-s", "2", "--eval.episodes", "4")
    output, _ = process.communicate(timeout=120.0)
    assert process.returncode == 0, output
    line = last(run)
    assert line["world_size"] == 2
    assert 6000 <= line["steps"] < 6000 + 8 * 16
    assert line["steps"] == 16 * 8 * line["iterations"]  # the batch of 8 unrolls is that of both together
    # An episode takes 8 steps. Neither learner's environments alone have played so many.
    assert line["episodes"] * 8 > 0.75 * line["steps"]
    assert line["params_sha"] == state_of(run)["params_sha"]
    assert len(state_of(run)["learners"]) == 1
    assert "learner 1 of 2" in (run / "log.rank1.txt").read_text()
    assert output.count("reached its limit (steps)") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_learner_ends_all_after_a_save(number: signal.Signals, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with learners(run) as processes:
        wait_for_steps(run, 500, processes[0])
        processes[1].send_signal(number)
        time.sleep(0.5)
        processes[1].send_signal(number)  # torchrun's own, a moment later: means nothing more
        results = ends(processes)
    assert [code for code, _ in results] == [{"SIGTERM": 143, "SIGUSR1": 138}[number.name]] * 2, results
    assert state_of(run)["reason"] == "signal"
    assert state_of(run)["learner"]["steps"] == last(run)["steps"]


@pytest.mark.slow
def test_a_killed_learner_ends_the_others_with_its_name_and_a_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with learners(run) as processes:
        wait_for_steps(run, 500, processes[0])
        processes[1].kill()
        code, output = ends(processes[:1])[0]
    assert code == 1
    assert "pronghorn: Learner 1 (on " in output
    assert "no sign of life" in output
    assert state_of(run)["learner"]["steps"] >= 500


def test_what_is_wrong_with_the_command_is_said_once(tmp_path: Path) -> None:
    """A batch that cannot be dealt, and settings that differ: exit code 2 for all, nothing written."""
    run = tmp_path / "run"
    with learners(run, "--learner.batch-unrolls", "9") as processes:
        results = ends(processes)
    assert [code for code, _ in results] == [2, 2]
    assert sum("must be a multiple of the 2 learners" in output for _, output in results) == 1, results
    assert not (run / "config.toml").exists()


@pytest.mark.slow
def test_a_directory_that_holds_a_run_ends_all_with_code_2(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    with learners(run) as processes:
        results = ends(processes)
    assert [code for code, _ in results] == [2, 2]
    assert "holds a run already" in results[0][1]
    assert "Learner 0 (on " in results[1][1]


@pytest.mark.slow
def test_who_reaches_its_minutes_first_ends_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with learners(run, "--minutes", "0.25") as processes:
        results = ends(processes)
    assert [code for code, _ in results] == [0, 0], results
    assert state_of(run)["reason"] == "minutes"


@pytest.mark.slow
def test_an_environment_that_breaks_on_one_learner_ends_all_after_a_save(tmp_path: Path) -> None:
    run, broken = tmp_path / "run", env("OnRank1", "toy_envs.py")
    with learners(run, "--env.args", "does", "raise", "--env.restart-budget", "0", env_id=broken) as processes:
        results = ends(processes)
    assert [code for code, _ in results] == [1, 1], results
    assert "the environment of rank 1 broke" in results[1][1]
    assert "Learner 1 ended with an error" in results[0][1]
    assert state_of(run)["reason"] == "error"


@pytest.mark.slow
def test_losses_that_are_not_finite_on_one_learner_are_skipped_and_counted_by_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--steps", "4000", "--env.args", "does", "overflow"]
    with learners(run, *flags, env_id=env("OnRank1", "toy_envs.py")) as processes:
        results = ends(processes)
    assert [code for code, _ in results] == [0, 0], results
    assert last(run)["updates_skipped"] >= 1
    assert last(run)["updates"] + last(run)["updates_skipped"] == last(run)["iterations"]


@pytest.mark.slow
def test_losses_that_stay_not_finite_on_one_learner_make_all_go_back(tmp_path: Path) -> None:
    """To learner 0's checkpoint, several times; they have the same weights when they save next."""
    run = tmp_path / "run"
    flags = ["--steps", "6000", "--env.args", "does", "burst", "--checkpoint.every-updates", "5"]
    flags += ["--learner.max-skipped", "0", "--learner.max-rollbacks", "100"]
    with learners(run, *flags, env_id=env("OnRank1", "toy_envs.py")) as processes:
        results = ends(processes)
    assert [code for code, _ in results] == [0, 0], results
    assert last(run)["rollbacks"] >= 1
    assert last(run)["steps"] >= 6000
    assert last(run)["params_sha"] == state_of(run)["params_sha"]
    assert "Back to" in (run / "log.rank1.txt").read_text()


@pytest.mark.slow
def test_others_wait_for_a_learner_that_has_no_batch_for_a_while(tmp_path: Path) -> None:
    """Longer than they would wait in a call of all: they meet in rounds meanwhile."""
    run = tmp_path / "run"
    flags = ["--steps", "4000", "--env.args", "does", "wait", "--learner.peers-timeout-s", "10"]
    with learners(run, *flags, env_id=env("OnRank1", "toy_envs.py")) as processes:
        results = ends(processes)
    assert [code for code, _ in results] == [0, 0], results
    assert last(run)["steps"] >= 4000


@pytest.mark.slow
def test_a_learner_that_hangs_is_named_after_the_timeout(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with learners(run, "--learner.peers-timeout-s", "8") as processes:
        wait_for_steps(run, 500, processes[0])
        processes[1].send_signal(signal.SIGSTOP)
        code, output = ends(processes[:1])[0]
    assert code == 1
    assert "Learner 1 (on " in output
    assert "no sign of life" in output
    assert state_of(run)["learner"]["steps"] >= 500


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_a_run_goes_on_with_another_number_of_learners(size: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ["--learner.batch-unrolls", "12"]
    with learners(run, "--steps", "3000", *more) as processes:
        assert [code for code, _ in ends(processes)] == [0, 0]
    before = last(run)
    with learners(run, "--steps", "6000", "--resume", *more, size=size) as processes:
        results = ends(processes)
    assert [code for code, _ in results] == [0] * size, results
    after = last(run)
    assert after["world_size"] == size
    assert after["steps"] >= 6000 > before["steps"]
    assert after["episodes"] > before["episodes"]
    assert after["episodes"] * 8 <= after["steps_sampled"] + before["steps_sampled"]


@pytest.mark.slow
def test_two_deterministic_runs_are_equal_and_so_is_one_that_was_resumed(tmp_path: Path) -> None:
    flags = ["--max-lag", "1", "--deterministic", "--checkpoint.every-updates", "10", "--log.every-s", "0"]
    shas = []
    for name, parts in (("one", ["5120"]), ("again", ["5120"]), ("resumed", ["2560", "5120"])):
        for i, steps in enumerate(parts):
            with learners(tmp_path / name, "--steps", steps, *flags, *(["--resume"] if i else [])) as processes:
                assert [code for code, _ in ends(processes)] == [0, 0]
        shas.append({m["iterations"]: m["params_sha"] for m in read_metrics(tmp_path / name) if "params_sha" in m})
    assert len(shas[0]) >= 40
    assert shas[0] == shas[1] == shas[2]


@pytest.mark.slow
def test_torchrun_starts_a_killed_learner_again_and_the_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun(run, "--steps", "60000", "--checkpoint.every-s", "1", options=("--max-restarts", "1"))
    wait_for_steps(run, 5000, process)
    killed = next(
        child for child in psutil.Process(process.pid).children(recursive=True)
        if "pronghorn" in child.cmdline() and child.environ().get("RANK") == "1"
    )  # fmt: skip
    killed.kill()
    output, _ = process.communicate(timeout=180.0)
    assert process.returncode == 0, output
    assert any(line.get("event") == "resume" for line in read_metrics(run))
    assert last(run)["steps"] >= 60000


@pytest.mark.slow
def test_each_learner_may_have_remote_actors_of_its_own(tmp_path: Path) -> None:
    """Two learners, each with a cluster of this machine and one actor: what all of them sent is counted together."""
    run = tmp_path / "run"
    flags = ["--steps", "2000", "--cluster", "local", "--actors", "1", "--cluster.cpus-per-actor", "0.5"]
    with learners(run, *flags) as processes:
        results = ends(processes, timeout_s=240.0)
    assert [code for code, _ in results] == [0, 0], results
    line = last(run)
    assert line["actors"] == 2
    assert line["remote_unrolls"] >= line["iterations"] * 8
    assert line["world_size"] == 2
