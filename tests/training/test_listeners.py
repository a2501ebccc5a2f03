"""What a training opens to the network: nothing, but the ports by which engines of one Doom match find each other."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from running import children_of, start, wait_for_steps


def network_sockets(process: subprocess.Popen[str]) -> list[tuple[str, int, str]]:
    """(process name, socket type, address) of each socket that is not of this machine alone."""
    found = []
    for one in [psutil.Process(process.pid), *children_of(process)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = one.net_connections("inet")
            found += [(one.name(), s.type, s.laddr.ip) for s in sockets if s.laddr and s.laddr.ip[:4] != "127."]
    return found


def stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 143


def test_a_training_listens_nowhere(tmp_path: Path) -> None:
    """Trainer, keeper and workers speak over pairs of sockets that have no address."""
    process = start(tmp_path / "run", "--minutes", "3")
    try:
        wait_for_steps(tmp_path / "run", 500, process)
        assert network_sockets(process) == []
        assert [s.laddr for s in psutil.Process(process.pid).net_connections("unix") if s.laddr] == []
        stopped(process)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_only_the_engines_of_a_doom_match_have_ports_and_only_for_datagrams(tmp_path: Path) -> None:
    """ZDoom opens its UDP port on all addresses and has no setting for it (docs/reliability.md)."""
    pytest.importorskip("vizdoom")
    flags = ["--minutes", "3", "--env.workers", "1", "--env.envs-per-worker", "1"]
    process = start(tmp_path / "run", *flags, env_id="doom:duel")
    try:
        wait_for_steps(tmp_path / "run", 1, process)
        found = network_sockets(process)
        assert {(name, kind) for name, kind, _ in found} == {("vizdoom", socket.SOCK_DGRAM)}
        assert len(found) == 2  # the host's and the joiner's
        stopped(process)
    finally:
        process.kill()
        process.communicate()
