"""One worker process: how it is started, spoken to and ended, and what its failure means in words.

It restarts nothing and knows no rows; that is the pool's work (workers.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from pronghorn.envworker import keeper as keeper_module
from pronghorn.envworker import main as protocol
from pronghorn.errors import ConfigError, EnvError, MissingExtraError, PronghornError, SpaceError, UnknownEnvError

_MAX_LOG_BYTES = 1 << 24  # a worker's log is emptied beyond that: environments that print must not fill the disk
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
               "VECLIB_MAXIMUM_THREADS", "BLIS_NUM_THREADS")  # fmt: skip


class WorkerProcess:
    """One worker process: its handle, socket, log and working directory. It restarts nothing."""

    def __init__(self, index: int, command: str, memory_fd: int, directory: Path) -> None:
        self.index, self.directory = index, directory
        directory.mkdir()
        self.log_path = directory / "log.txt"
        self.sock, child_sock = socket.socketpair()
        self.buffer = b""
        self.report: dict[str, Any] | None = None  # the ERROR message, when it has sent one
        self.spec: dict[str, Any] | None = None
        self.attached = False
        self.begun = False  # has done its first resets
        self.deadline = math.inf
        with child_sock, open(self.log_path, "ab") as log_file:
            fds = (child_sock.fileno(), memory_fd)
            self.popen = subprocess.Popen(
                [command, protocol.__file__, *map(str, fds)],
                stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, cwd=directory,
                env=_child_environment(), pass_fds=fds, start_new_session=True,
            )  # fmt: skip
        self.exit_fd = _exit_descriptor(self.popen.pid)

    @property
    def status(self) -> str:
        """As the system calls it (running, sleeping, stopped, zombie); the process is not reaped by the question."""
        try:
            return str(psutil.Process(self.popen.pid).status())
        except psutil.Error:
            return "gone"

    def send(self, kind: int, group: int = 0, slot: int = 0, payload: bytes = b"") -> None:
        # A worker that has just died is noticed by its socket's end in the next poll, not here.
        with contextlib.suppress(OSError):
            self.sock.sendall(protocol.HEADER.pack(kind, group, slot, len(payload)) + payload)

    def send_json(self, kind: int, value: Any) -> None:
        self.send(kind, payload=json.dumps(value).encode())

    def stack_of_hang(self) -> str:
        """Ask for the Python stack (faulthandler writes it into the log) and wait for it a moment."""
        before = self.log_path.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.popen.pid, signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while time.monotonic() < until and self.log_path.stat().st_size == before:
            time.sleep(0.02)
        time.sleep(0.02)  # the writer is inside write(2) now
        return self.log_tail(before) or "(no answer: the process is stopped, or stuck outside Python)"

    def log_tail(self, offset: int = 0, max_chars: int = 3000) -> str:
        with contextlib.suppress(OSError), open(self.log_path, errors="replace") as file:
            file.seek(offset)
            return file.read()[-max_chars:].strip()
        return ""

    def messages(self) -> Iterator[protocol.Message]:
        """Every whole message that has been received."""
        size = protocol.HEADER.size
        while len(self.buffer) >= size:
            kind, group, slot, length = protocol.HEADER.unpack_from(self.buffer)
            if len(self.buffer) < size + length:
                return
            payload, self.buffer = self.buffer[size : size + length], self.buffer[size + length :]
            yield kind, group, slot, payload

    def wait_end(self, until: float) -> None:
        """Wait until the worker closes its socket, which it does last."""
        with contextlib.suppress(OSError):  # TimeoutError is one
            while (remaining := until - time.monotonic()) > 0:
                self.sock.settimeout(remaining)
                if not self.sock.recv(1 << 16):
                    return

    def wait_exit(self, timeout_s: float) -> None:
        """Wait for the exit; where possible without reaping, so that the process number stays ours until `kill`."""
        if self.exit_fd >= 0:
            poller = select.poll()
            poller.register(self.exit_fd, select.POLLIN)
            poller.poll(timeout_s * 1000)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout_s)

    def kill(self) -> int:
        """Kill the process and all that it started, remove what they left, reap it; returns its exit status."""
        keeper_module.kill_group(self.popen.pid)
        status = self.popen.wait()
        self.sock.close()
        if self.exit_fd >= 0:
            os.close(self.exit_fd)
        return status

    def discard(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def limit_log(self) -> None:
        with contextlib.suppress(OSError):
            if self.log_path.stat().st_size > _MAX_LOG_BYTES:
                os.truncate(self.log_path, 0)  # the worker appends, so it goes on at the start

    def epitaph(self, status: int) -> str:
        """How it ended, in words."""
        if self.report is not None:
            # Engines that break say where and which; the frames around are ours.
            trace = "" if self.report["code"] == "again" else self.report["traceback"].strip("\n")
            return f"raised {self.report['type']}: {self.report['message']}\n{trace}"
        tail = self.log_tail()
        said = f". The last that it wrote:\n{tail}" if tail else "."
        if status >= 0:
            return f"ended with exit code {status}{said}"
        name = signal.Signals(-status).name
        hint = " (by hand, or by the kernel for want of memory)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}{said}"

    @property
    def broke_contract_at_once(self) -> bool:
        """Its environment failed by a rule, not by chance, before its first step was done."""
        return self.report is not None and self.report["code"] not in ("crash", "again") and self.report["steps"] == 0

    def may_start_again(self, has_match: bool) -> bool:
        """Whether a failure before the first step was one of engines that did not come together, which chance decides.

        has_match: it plays a Doom match. The library ends the process by a signal when an engine of one ends too
        early, before anything can be reported.
        """
        by_signal = self.report is None and (self.popen.returncode or 0) < 0 and self.attached
        return (has_match and by_signal) or (self.report is not None and self.report["code"] == "again")


def _exit_descriptor(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where the system has none (macOS)."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _child_environment() -> dict[str, str]:
    """The trainer's environment, without its GPUs and with one thread for each mathematics library."""
    env = dict(os.environ)
    for name in ("PYTHONHOME", "__PYVENV_LAUNCHER__"):
        env.pop(name, None)  # would tie another interpreter to ours
    env.update(dict.fromkeys(_ONE_THREAD, "1"), CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1")
    return env


def start_error(report: dict[str, Any] | None, site: str, cause: str) -> PronghornError:
    """A broken rule is explained by its own message; only a crash needs the worker's traceback."""
    if report is None or report["code"] == "crash":
        return EnvError(cause)
    names_itself = report["code"] in ("unknown", "missing")
    return typed_error(report["code"], report["message"] if names_itself else f"{site}: {report['message']}", report)


def typed_error(code: str, message: str, fields: Mapping[str, Any]) -> PronghornError:
    """The error of ours that a worker-side error (its `code`) stands for."""
    if code == "missing":
        return MissingExtraError(fields["package"], fields["extra"], fields["purpose"])
    kinds: dict[str, type[PronghornError]] = {"space": SpaceError, "unknown": UnknownEnvError}
    return kinds.get(code, EnvError)(message)


def interpreter(python: str | None) -> str:
    found = sys.executable if python is None else shutil.which(python)
    if not found:
        raise ConfigError("env.python", python, "there is no such program", "Give the path of a Python interpreter.")
    return os.path.abspath(found)


def import_path(sys_path: Sequence[str] | None, python: str | None) -> list[str]:
    """What comes first on the workers' path. Another interpreter must not see this one's packages: it gets only
    the directory of the script and the current one."""
    if sys_path is None:
        sys_path = [*(sys.path if python is None else sys.path[:1]), ""]
    return list(dict.fromkeys(os.path.abspath(entry) for entry in sys_path))
