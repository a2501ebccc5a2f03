"""The worker's side of the protocol, spoken by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pronghorn.envworker import main as protocol
from pronghorn.types import Event

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")
ARRAYS = {
    "event": [0, "uint8", [1]],
    "reward": [64, "float32", [1]],
    "info": [128, "float32", [1, 0]],
    "terminated": [192, "bool", [1]],
    "truncated": [256, "bool", [1]],
    "episode_over": [320, "bool", [1]],
    "discrete": [384, "int64", [1, 1]],
    "continuous": [448, "float32", [1, 0]],
    "at_work": [512, "int32", [1]],
    "obs/obs": [576, "float32", [2, 1, 1]],
    "final/obs": [640, "float32", [1, 1]],
    "game": [704, "int64", [1]],
}
SIZE = 768


class Trainer:
    """The other end of one worker's socket and map."""

    def __init__(self, tmp_path):
        self.sock, child = socket.socketpair()
        self.memory = open(tmp_path / "map", "w+b")  # noqa: SIM115
        fds = (child.fileno(), self.memory.fileno())
        self.process = subprocess.Popen(
            [sys.executable, protocol.__file__, *map(str, fds)], pass_fds=fds, cwd=tmp_path, stderr=subprocess.PIPE
        )
        child.close()
        self.channel = protocol.Channel(self.sock)

    def start(self, **env):
        env = {"name": "toy", "kind": "call", "target": f"{TOYS}:Counter", "kwargs": {"length": 2}, "options": {}} | env
        self.channel.send_json(protocol.START, {"envs": [env], "sys_path": [], "cpus": [], "nice": 0})
        return self.channel.receive()

    def attach(self):
        self.memory.truncate(SIZE)
        self.arrays = protocol.Arrays(np.memmap(self.memory, np.uint8, "r+"), ARRAYS)
        self.channel.send_json(
            protocol.ATTACH,
            {"size": SIZE, "arrays": ARRAYS, "worker": 0, "rows": [0], "groups": [[0]], "seeds": [5], "info": []},
        )
        return self.channel.receive()

    def end(self):
        self.sock.close()
        self.memory.close()
        _, errors = self.process.communicate(timeout=10)
        return self.process.returncode, errors.decode()


@pytest.fixture
def trainer(tmp_path):
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.process.kill()
    trainer.end()


def test_event_numbers_are_those_of_the_trainer():
    numbers = protocol.many_rows
    assert (numbers.FIRST, numbers.STEPPED) == (Event.FIRST, Event.STEP)
    assert (numbers.LAST, numbers.INACTIVE) == (Event.LAST, Event.INACTIVE)


def test_a_whole_conversation(trainer):
    kind, _, _, payload = trainer.start()
    assert kind == protocol.SPEC
    description = json.loads(payload)
    assert description["env_specs"] == [0]
    assert description["specs"][0]["action"]["discrete"] == [3]
    assert trainer.attach() == (protocol.READY, 0, 0, b"")
    a = trainer.arrays
    assert (a.event[0], a.obs["obs"][:, 0, 0].tolist()) == (Event.FIRST, [0, 0])

    trainer.channel.send(protocol.STEP, group=0, slot=1)
    assert trainer.channel.receive() == (protocol.READY, 0, 1, b"")
    assert (a.event[0], a.reward[0], a.obs["obs"][:, 0, 0].tolist()) == (Event.STEP, 1, [0, 10])  # slot 0 untouched

    trainer.channel.send(protocol.STEP, group=0, slot=0)
    kind, group, slot, payload = trainer.channel.receive()
    assert (kind, group, slot) == (protocol.READY, 0, 0)
    assert json.loads(payload) == [{"row": 0, "return": 3.0, "length": 2, "count": 2.0}]
    assert (a.event[0], a.reward[0], a.terminated[0], a.episode_over[0]) == (Event.LAST, 2, True, True)
    assert a.obs["obs"][:, 0, 0].tolist() == [0, 10]

    trainer.channel.send_json(protocol.RESEED, {"seeds": [9]})
    assert trainer.channel.receive()[0] == protocol.READY
    assert a.event[0] == Event.FIRST
    trainer.channel.send(protocol.CLOSE)
    assert trainer.process.wait(10) == 0


@pytest.mark.parametrize("attached", [False, True])
def test_a_worker_ends_quietly_when_the_trainer_has_gone(trainer, attached):
    trainer.start()
    if attached:
        trainer.attach()
    assert trainer.end() == (0, "")


def test_an_error_is_told_with_its_place(trainer):
    kind, _, _, payload = trainer.start(target=f"{TOYS}:Failing", kwargs={"how": "raise", "at": 2})
    trainer.attach()
    for _ in range(2):
        trainer.channel.send(protocol.STEP)
        kind, _, _, payload = trainer.channel.receive()
    report = json.loads(payload)
    assert kind == protocol.ERROR
    assert {key: report[key] for key in ("code", "type", "message", "env", "phase", "steps")} == {
        "code": "crash", "type": "RuntimeError", "message": "the simulator broke at step 2", "env": 0, "phase": "step",
        "steps": 1,
    }  # fmt: skip
    assert "toy_envs.py" in report["traceback"]
    assert trainer.process.wait(10) == 1


@pytest.mark.parametrize("only", [None, 0, 1])
def test_a_setting_reaches_one_environment_or_all(only):
    """env: the number within the worker."""
    worker, settings = protocol.Worker(None, -1), []
    worker._envs = [SimpleNamespace(set_option=lambda *setting, n=n: settings.append((n, *setting))) for n in range(2)]
    worker._rare(protocol.OPTION, {"name": "pay", "value": 2.0, "env": only})
    assert settings == [(n, "pay", 2.0) for n in range(2) if only in (None, n)]
    assert worker._phase == "step"


def test_a_setting_that_is_refused_is_told_with_its_place(trainer):
    trainer.start()
    trainer.attach()
    trainer.channel.send_json(protocol.OPTION, {"name": "pay", "value": 2.0})
    kind, _, _, payload = trainer.channel.receive()
    report = json.loads(payload)
    assert (kind, report["env"], report["phase"]) == (protocol.ERROR, 0, "option")
    assert "'pay' cannot be changed while it runs: GymnasiumEnv has no method set_option" in report["message"]
    assert trainer.process.wait(10) == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are listed in /proc")
def test_nothing_that_an_environment_starts_inherits_the_socket(tmp_path, trainer):
    (tmp_path / "env.py").write_text(
        "import os\ndef inheritable(fd):\n    try:\n        return os.get_inheritable(fd)\n"
        "    except OSError:\n        return False\n"
        "assert [fd for fd in map(int, os.listdir('/proc/self/fd')) if fd > 2 and inheritable(fd)] == []\n"
        f"import sys\nsys.path.append({os.path.dirname(TOYS)!r})\nfrom toy_envs import Counter\n"
    )
    assert trainer.start(target=f"{tmp_path}/env.py:Counter")[0] == protocol.SPEC


def test_siblings_do_not_hide_the_users_own_modules(tmp_path, trainer):
    (tmp_path / "spaces.py").write_text("mine = True\n")
    (tmp_path / "env.py").write_text(
        f"import sys\nsys.path.append({str(tmp_path)!r})\nimport spaces\nassert spaces.mine\n"
        f"sys.path.append({os.path.dirname(TOYS)!r})\nfrom toy_envs import Counter\n"
    )
    assert trainer.start(target=f"{tmp_path}/env.py:Counter")[0] == protocol.SPEC
