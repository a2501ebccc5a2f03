"""Ray as the carrier of calls: starts or joins a cluster, finds room for actors, passes on what they are asked.

It knows no unrolls. Only here is Ray imported, and only once a run asks for it (core Ray; none of its libraries).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from pronghorn.cluster.actor import Failure, RemoteActor
from pronghorn.cluster.crew import ActorGone
from pronghorn.cluster.env_host import EnvHost
from pronghorn.cluster.wire import Bytes
from pronghorn.config_cluster import ClusterConfig
from pronghorn.envworker.keeper import Keeper
from pronghorn.errors import ClusterError, ConfigError, MissingExtraError
from pronghorn.machine import available_cores

MAX_SOCKET_PATH = 107  # bytes, of a Unix socket
_RAY_PATH = len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
_CAUSE_CHARS = 4000
CONNECT_S = 10.0  # to reach the head node
_REFUSALS = (ConnectionError, RuntimeError, ValueError, OSError)  # of ray.init

_LOG = logging.getLogger("pronghorn")


@dataclass(frozen=True)
class _Shared:
    """Weights in Ray's object store, which copies them once to each machine that asks. In a list, so that Ray passes
    on the reference itself."""

    reference: list[Any]


class CarriedActor:
    """What runs in an actor's process: the actor, made by its first call, so that what fails is told as any failure."""

    def __init__(self, index: int, incarnation: int) -> None:
        self._place = index, incarnation
        self._actor: RemoteActor | None = None

    def make(self, index: int, incarnation: int) -> RemoteActor:
        """The actor."""
        return RemoteActor(index, incarnation)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor."""
        import ray

        if self._actor is None:
            self._actor = self.make(*self._place)
        given = [ray.get(arg.reference[0]) if isinstance(arg, _Shared) else arg for arg in args]
        return getattr(self._actor, method)(*given)


class CarriedEnvHost(CarriedActor):
    """The same for central inference."""

    def make(self, index: int, incarnation: int) -> EnvHost:
        return EnvHost(index, incarnation)


class RayEngine:
    """An `Engine` (crew.py) on Ray."""

    def __init__(
        self, ray: Any, settings: ClusterConfig, close: contextlib.ExitStack, actor: type[CarriedActor] = CarriedActor
    ) -> None:
        """close: what ends the connection, and the cluster if it was started here. actor: what each process runs."""
        self._ray, self._settings, self._close = ray, settings, close
        options: dict[str, Any] = {
            "num_cpus": settings.cpus_per_actor, "num_gpus": 0, "max_restarts": 0, "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
        }  # fmt: skip
        self._actor_class = ray.remote(actor).options(**options)

    @staticmethod
    def open(settings: ClusterConfig, actor: type[CarriedActor] = CarriedActor) -> RayEngine:
        """Start or join the cluster, and see that it has room for all actors.

        Raises MissingExtraError, ClusterError: no cluster there; ConfigError: no room.
        """
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError("ray", "cluster", "Training with remote actors")
        with contextlib.ExitStack() as stack:
            ray = _start(settings, stack) if settings.address == "local" else _join(settings, stack)
            engine = RayEngine(ray, settings, stack, actor)
            engine.require_room()
            engine._close = stack.pop_all()
        return engine

    # ------------------------------------------------------------ room

    def room(self) -> int:
        free = float(self._ray.available_resources().get("CPU", 0.0))
        places = sum(_places(cpus, self._settings.cpus_per_actor) for cpus in self._nodes().values())
        return min(_places(free, self._settings.cpus_per_actor), places)

    def require_room(self) -> None:
        """Wait until all actors fit. Raises ConfigError with what is asked and what there is."""
        until = time.monotonic() + self._settings.room_s
        while (room := self.room()) < self._settings.actors:
            if time.monotonic() >= until or not self._may_come():
                raise self._no_room(room)
            time.sleep(0.2)

    def _may_come(self) -> bool:
        """Whether room may be made by who leaves, or by machines that join: not on a cluster of this one alone."""
        return self._settings.address != "local"

    def _no_room(self, room: int) -> ConfigError:
        asked, each = self._settings.actors, self._settings.cpus_per_actor
        nodes, free = self._nodes(), float(self._ray.available_resources().get("CPU", 0.0))
        in_all = sum(nodes.values())
        lines = ["", f"  {'':24}asked  available  in all", f"  {'CPUs':22}{asked * each:7g}{free:11g}{in_all:8g}"]
        lines += [f"  {'actors':22}{asked:7d}{room:11d}"]
        lines += [f"  {'CPUs of ' + name:22}{'':7}{'':11}{cpus:8g}" for name, cpus in list(nodes.items())[:20]]
        smaller = max(0.01, math.floor(100 * in_all / asked) / 100)
        shared = f"for smaller ones that share cores (--cluster.cpus-per-actor {smaller:g})"
        fix = f"Ask for fewer (--actors {room}), or {shared}" if room else f"Ask {shared}"
        rule = f"the cluster has room for {room} of {each:g} CPUs each" + "\n".join(lines) + "\n"
        return ConfigError("cluster.actors", asked, rule, f"{fix}, or add machines.")

    def _nodes(self) -> dict[str, float]:
        """CPUs of each living machine."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        return {f"{n['NodeManagerAddress']} {n['NodeID'][:6]}": float(n["Resources"].get("CPU", 0.0)) for n in alive}

    # ------------------------------------------------------------ calls

    def place(self, index: int, incarnation: int) -> Any:
        return self._actor_class.remote(index, incarnation)

    def call(self, handle: Any, method: str, *args: Any) -> Any:
        return handle.call.remote(method, *args)

    def ready(self, tokens: Sequence[Any], timeout_s: float) -> list[Any]:
        first, _ = self._ray.wait(list(tokens), num_returns=1, timeout=timeout_s)
        if not first:
            return []
        done: list[Any] = self._ray.wait(list(tokens), num_returns=len(tokens), timeout=0)[0]
        return done

    def result(self, token: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(token)
        except errors.RayTaskError as error:
            told = str(error)[-_CAUSE_CHARS:]
            return Failure(type(error.cause or error).__name__, str(error.cause or ""), told, False)
        except errors.RayError as error:
            raise ActorGone(f"is gone: {str(error)[-_CAUSE_CHARS:]}") from None

    def share(self, weights: Bytes) -> Any:
        return _Shared([self._ray.put(weights)])

    def kill(self, handle: Any) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(handle, no_restart=True)

    def describe(self) -> str:
        return f"on Ray {self._ray.__version__} ({self._settings.address})"

    def close(self) -> None:
        self._close.close()


# ---------------------------------------------------------------------------------------------- start or join


def _start(settings: ClusterConfig, stack: contextlib.ExitStack) -> Any:
    """A cluster of this machine alone, that ends with this process however it ends: bound to loopback, behind a token
    of its own, without usage statistics and dashboard."""
    directory = _short_directory()
    # Should this process be killed, the keeper removes the directory, and ends what Ray itself does not end then.
    keeper = Keeper(directory)
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    stack.callback(keeper.close)
    before = _descendants()
    variables = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a cluster of one machine: Ray listens on 127.0.0.1 only
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token(),
        # An actor's own keeper ends its environments, engines included; Ray would end the keeper.
        "RAY_kill_child_processes_on_worker_exit": "0",
    }  # fmt: skip
    with _environment(variables):
        ray: Any = importlib.import_module("ray")
        stack.callback(ray.shutdown)
        try:
            ray.init(
                address="local", num_cpus=available_cores(), num_gpus=0, include_dashboard=False,
                object_store_memory=settings.object_store_mb << 20, _temp_dir=directory, log_to_driver=False,
                logging_level=logging.WARNING,
            )  # fmt: skip
        except _REFUSALS as error:
            raise ClusterError(f"Ray does not start on this machine: {error}") from error
    for pid in _descendants() - before:
        keeper.add_process(pid)
    if ray.nodes()[0]["NodeManagerAddress"] != "127.0.0.1":
        _LOG.warning("Ray was imported before, and listens on other interfaces than loopback, too (behind a token)")
    return ray


def _join(settings: ClusterConfig, stack: contextlib.ExitStack) -> Any:
    """The cluster at the address. Raises ClusterError: there is none, or it has other versions of Python or Ray."""
    ray: Any = importlib.import_module("ray")
    variables = {
        "RAY_kill_child_processes_on_worker_exit": "0",  # as above
        **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
    }
    runtime: dict[str, Any] = {"env_vars": variables}
    if settings.working_dir:
        runtime["working_dir"] = settings.working_dir
    stack.callback(ray.shutdown)
    try:
        _require_listener(settings.address)
        ray.init(address=settings.address, runtime_env=runtime, log_to_driver=False, logging_level=logging.WARNING)
    except (*_REFUSALS, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"cannot join the Ray cluster {settings.address!r}: {error}\nIs it running there (ray status), can this "
            "machine reach it, and has it the same versions of Python and Ray? --cluster local starts one here."
        ) from error
    return ray


def _require_listener(address: str) -> None:
    """See that something listens at HOST:PORT, for which Ray would wait for minutes. Raises OSError, ValueError."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def _descendants() -> set[int]:
    """Numbers of all processes that this one started, and they in turn."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


@functools.cache
def _token() -> str:
    """A secret of this process's clusters, so that none is written into the home directory."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set for what is started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _short_directory() -> str:
    """A temporary directory in which the paths of Ray's sockets are not too long."""
    directory = tempfile.gettempdir()
    fits = len(os.fsencode(directory)) + len("/prh-12345678") + _RAY_PATH <= MAX_SOCKET_PATH
    return tempfile.mkdtemp(prefix="prh-", dir=directory if fits else "/tmp")


def _places(cpus: float, each: float) -> int:
    """How often `each` goes into `cpus`; sums of fractions come with roundings."""
    return math.floor(cpus / each + 1e-6)
