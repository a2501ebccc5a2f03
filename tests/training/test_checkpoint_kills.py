"""Saves that are killed at any moment, again and again: what was saved before is whole, and the next start goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import pronghorn.training.checkpoint as checkpoints
from pronghorn.training.metrics import read_metrics
from running import assert_gone, children_of, start, wait_for_metric

SAVER = """
import itertools, os, random, signal, sys, time
import torch
import pronghorn.training.checkpoint as checkpoints
from pathlib import Path

torch.set_num_threads(1)
directory, rounds = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(0)
net = torch.nn.Linear(300, 300)
optimizer = torch.optim.Adam(net.parameters())
net(torch.ones(1, 300)).sum().backward()
optimizer.step()
real = checkpoints._write_durably
def slow(path, data):  # half a file is there for a while
    path.write_bytes(data[: len(data) // 2])
    time.sleep(rng.uniform(0.0, 0.004))
    real(path, data)
checkpoints._write_durably = slow

def saves(told):
    '''Save again and again from where the last one ended; say what is durable.'''
    checkpoints.remove_partial(directory)
    found = checkpoints.list_checkpoints(directory)
    first = checkpoints.load(found[-1]).state["updates"] + 1 if found else 1
    for updates in itertools.count(first):
        checkpoints.save(directory, updates, dict(net.state_dict()), optimizer.state_dict(),
                         {"learner": {"steps": updates}}, keep=2)
        os.write(told, b"%d\\n" % updates)

durable = 0
for round in range(rounds):
    out, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        try:
            saves(told)
        except BaseException as error:
            os.write(told, f"failed: {error!r}\\n".encode())
        os._exit(1)
    os.close(told)
    lines = b""
    while not lines.endswith(b"\\n"):  # at least one save
        got = os.read(out, 1 << 16)
        assert got, "the saver ended by itself"
        lines += got
    time.sleep(rng.uniform(0.0, 0.06))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while got := os.read(out, 1 << 16):
        lines += got
    os.close(out)
    assert b"failed" not in lines, lines
    durable = int(lines.split(b"\\n")[-2])
    left = [p.name for p in directory.glob(".*")]
    said = []
    state = checkpoints.load_latest(directory, said.append).state
    assert not said, said  # none was half there under its name
    assert state["updates"] in (durable, durable + 1), (state["updates"], durable)
    print(state["updates"], len(left), flush=True)
"""


@pytest.mark.case("RES-03")
@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_saves_killed_at_random_moments_lose_nothing_that_was_durable(rounds: int, tmp_path: Path) -> None:
    """Each round goes on from the newest checkpoint; it is the last durable one, or the one that was being written."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    directory = tmp_path / "checkpoints"
    argv = [sys.executable, "-c", SAVER, str(directory), str(rounds)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    seen = [line.split() for line in done.stdout.splitlines()]
    assert len(seen) == rounds
    assert [int(updates) for updates, _ in seen] == sorted(int(updates) for updates, _ in seen)
    assert sum(int(left) for _, left in seen) > 0  # some were killed in the middle of a save
    checkpoints.remove_partial(directory)
    assert all(path.name.isdigit() for path in directory.iterdir())


@pytest.mark.case("RES-03", "RES-07")
@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_run_killed_again_and_again_goes_on_and_loses_one_interval_at_most(rounds: int, tmp_path: Path) -> None:
    rng, run_dir, last = random.Random(rounds), tmp_path / "run", 0
    flags = ("--checkpoint.every-updates", "8", "--log.every-s", "0.1", "--threads", "1", "--model.mlp-layers", "16",
             "--learner.unroll-length", "8", "--learner.batch-unrolls", "8", "--learner.minibatches", "1")  # fmt: skip
    for number in range(rounds):
        process = start(run_dir, *flags, *(("--resume",) if number else ()))
        wait_for_metric(run_dir, "updates", last + 40, process)
        time.sleep(rng.uniform(0.0, 0.3))
        children = children_of(process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert_gone(children)
        told = read_metrics(run_dir)[-1]["updates"]
        saved = checkpoints.load_latest(run_dir / "checkpoints").state
        assert saved["updates"] > told - 2 * 8  # an iteration may end and be told before its save
        assert saved["learner"]["steps"] > 0
        last = saved["updates"]
    process = start(run_dir, *flags, "--resume", "--minutes", "0.01")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    lines = read_metrics(run_dir)
    assert [m["updates"] for m in lines] == sorted(m["updates"] for m in lines)
    assert json.loads((checkpoints.list_checkpoints(run_dir / "checkpoints")[-1] / "state.json").read_text())
