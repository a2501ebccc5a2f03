"""A stand-in for Ray: actors are objects in this process, and a call is done when somebody asks for its result."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from members import settings
from pronghorn.cluster.actor import RemoteActor
from pronghorn.cluster.crew import ActorGone, Crew
from pronghorn.cluster.remote_sampler import RemoteSampler
from pronghorn.cluster.wire import Bytes
from pronghorn.config import Config
from pronghorn.training.member import Member
from scripted_pool import ScriptedPool

LENGTHS = (3, 5, 7, 4)  # of the episodes of an actor's rows


@dataclass
class Handle:
    """An actor, and the calls that it was asked for."""

    actor: RemoteActor
    gone: bool = False
    silent: bool = False
    calls: list[tuple[int, str, tuple[Any, ...]]] = field(default_factory=list)


@dataclass
class StandIn:
    """An `Engine` in this process. Tests set what goes wrong.

    places: room for so many actors.  changed: what becomes of each result before it is told.
    """

    places: int = 100
    actor: type[RemoteActor] = RemoteActor
    changed: Callable[[RemoteActor, str, Any], Any] = lambda actor, method, result: result
    handles: list[Handle] = field(default_factory=list)
    shared: list[Bytes] = field(default_factory=list)
    orders: list[tuple[int, Any]] = field(default_factory=list)  # (actor, order) of every exchange asked for
    closed: bool = False
    _numbers: Any = field(default_factory=itertools.count)
    _results: dict[int, Any] = field(default_factory=dict)

    def of(self, index: int) -> Handle:
        """The present actor of that number."""
        return [handle for handle in self.handles if handle.actor.index == index][-1]

    def room(self) -> int:
        return self.places - sum(not handle.gone for handle in self.handles)

    def place(self, index: int, incarnation: int) -> Handle:
        self.handles.append(Handle(self.actor(index, incarnation)))
        return self.handles[-1]

    def call(self, handle: Handle, method: str, *args: Any) -> int:
        token = next(self._numbers)
        handle.calls.append((token, method, copy.deepcopy(args)))
        if method == "exchange":
            self.orders.append((handle.actor.index, args[0]))
        return token

    def ready(self, tokens: Sequence[int], timeout_s: float) -> list[int]:
        """Every actor does one of its calls."""
        for handle in self.handles:
            if handle.gone:
                self._results |= {token: ActorGone("is gone: it was killed") for token, _, _ in handle.calls}
                handle.calls.clear()
            elif handle.calls and not handle.silent:
                token, method, args = handle.calls.pop(0)
                result = getattr(handle.actor, method)(*args)
                self._results[token] = self.changed(handle.actor, method, result)
        return [token for token in tokens if token in self._results]

    def result(self, token: int) -> Any:
        result = self._results.pop(token)
        if isinstance(result, ActorGone):
            raise result
        return result

    def share(self, weights: Bytes) -> Bytes:
        self.shared.append(weights)
        return weights

    def kill(self, handle: Handle) -> None:
        handle.gone = True

    def describe(self) -> str:
        return "in this process"

    def close(self) -> None:
        self.closed = True


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The crew's time; budgets look back in the same."""
    made = Clock()
    for module in ("pronghorn.cluster.crew", "pronghorn.envs.restarts"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=made.monotonic, sleep=made.sleep))
    return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> StandIn:
    """Actors whose environments are scripted."""

    def make_pool(config: Config, *, seed: int, ordered: bool) -> ScriptedPool:
        pool = ScriptedPool(LENGTHS, units=(0, 0, 1, 1))
        pool.seeds.append(seed)
        return pool

    monkeypatch.setattr("pronghorn.cluster.actor.make_pool", make_pool)
    monkeypatch.setattr("pronghorn.training.sampler.POLL_S", 0.0)  # nothing comes while an actor waits for slots here
    return StandIn()


def cluster_settings(**values: Any) -> Config:
    """A resolved config of two actors with four rows each."""
    return settings(**{"cluster.address": "local", "cluster.actors": 2, "log.tensorboard": False} | values)


def make_learner(engine: StandIn, **values: Any) -> tuple[RemoteSampler, Member]:
    """A crew at work, the learner's end of it, and the policy that learns."""
    config = cluster_settings(**values)
    crew = Crew(config, engine, seed=0)
    member = Member(0, config, crew, torch.device("cpu"), seed=0, changed=threading.Condition())
    return RemoteSampler(crew, config, member.store, member.start_publishing(), member.tracker), member
