"""No process of ours is forked from the trainer's image: what CUDA and threads hold cannot be used after a fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# The processes of a training, an evaluation beside it, an evaluation after it and a video; children are looked at all
# the while. One that is between its fork and its new program (which subprocess makes without Python code in between)
# still has the trainer's maps for a moment, so only what is seen twice counts.
RUN = """
import json, os, sys, threading, time
import psutil
forks, seen, twice, commands = [], set(), set(), set()
os.register_at_fork(before=lambda: forks.append(1))  # called by every fork from Python code

def watch():
    own = psutil.Process()
    while True:
        for child in own.children(recursive=True):
            try:
                has_torch = any("libtorch" in m.path for m in child.memory_maps())
                commands.add(next((a for a in child.cmdline() if a.endswith(".py")), child.name()))
            except psutil.Error:
                continue
            if has_torch:
                (twice if child.pid in seen else seen).add(child.pid)
        time.sleep(0.2)

import torch
torch.set_num_threads(2)
torch.randn(400, 400) @ torch.randn(400, 400)  # threads of an operation are there
threading.Thread(target=watch, daemon=True).start()
from pronghorn.cli import run
env, small = sys.argv[1], ["--env.workers", "2", "--env.envs-per-worker", "2", "--learner.unroll-length", "16",
                           "--learner.minibatches", "1", "--log.live", "off"]
run(["train", "gym:CartPole-v1", "--run-dir", "run", "--minutes", "0.12", "--env.vector-rows", "0", "--eval.every-s",
     "1", "--eval.episodes", "2", *small])
run(["eval", "run", "--episodes", "2"])
before_video = len(forks)
if len(sys.argv) > 2:  # its library starts ffmpeg with one call between fork and program (os.setpgrp): no more
    run(["record", "run", "--out", "agent.mp4", "--seconds", "0.2"])
print(json.dumps({"forks": before_video, "forks_of_video": len(forks) - before_video, "torch": sorted(twice),
                  "commands": sorted(commands), "evaluated": os.path.isdir("run/eval")}))
"""


@pytest.mark.case("SHM-11")
def test_every_child_is_a_program_of_its_own_and_none_has_torch(tmp_path: Path) -> None:
    """On a CPU, with torch's threads live: a fork of this process is what would carry CUDA's state to a child."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    try:
        import pygame  # noqa: F401 - pictures of CartPole

        video = ["video"]
    except ImportError:
        video = []
    argv = [sys.executable, "-c", RUN, "gym:CartPole-v1", *video]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["forks"], found["torch"], found["evaluated"]) == (0, [], True)
    assert found["forks_of_video"] <= 1
    names = {Path(command).name for command in found["commands"]}
    assert {"main.py", "keeper.py"} <= names


def test_no_file_of_ours_forks_or_uses_multiprocessing() -> None:
    for path in (TESTS.parent / "src" / "pronghorn").rglob("*.py"):
        text = path.read_text()
        for word in ("os.fork(", "import multiprocessing", "from multiprocessing", "preexec_fn", "ProcessPoolExecutor"):
            assert word not in text, f"{path}: {word}"
