"""How a crew begins: what it refuses, with one error that names the machine; and what each actor is told."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in import StandIn, cluster_settings, make_learner

import pronghorn
from pronghorn.cluster.actor import SEEDS, Failure, Plan, RemoteActor, pack_weights, versions
from pronghorn.cluster.crew import Crew, require_same
from pronghorn.config import Config, derive_seed
from pronghorn.config import replace as replaced
from pronghorn.envs import registry
from pronghorn.errors import ClusterError
from pronghorn.settings_file import to_toml

Change = Callable[[RemoteActor, str, Any], Any]


def with_versions(**other: str) -> Change:
    """What an actor says whose machine has other versions."""

    def change(actor: RemoteActor, method: str, result: Any) -> Any:
        return result | {"versions": versions() | other} if method == "hello" else result

    return change


@pytest.mark.case("DST-03")
@pytest.mark.parametrize(
    "other",
    [{"python": "3.99.1"}, {"torch": "1.2.0"}, {"pronghorn": "0.0.1"}, {"wire": "0"}],
    ids=["python", "torch", "pronghorn", "wire"],
)
def test_another_version_on_an_actors_machine_is_one_error(other: dict[str, str], engine: StandIn) -> None:
    engine.changed = with_versions(**other)
    [(name, version)] = other.items()
    with pytest.raises(ClusterError, match=rf"has other versions than the learner: {name} {version} \(here "):
        Crew(cluster_settings(), engine, seed=0)
    assert engine.closed


@pytest.mark.case("DST-03")
def test_another_last_number_of_a_version_is_only_told(engine: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    python = ".".join([*versions()["python"].split(".")[:2], "99"])
    engine.changed = with_versions(python=python)
    assert Crew(cluster_settings(), engine, seed=0).num_rows == 8
    assert f"python {python} (here" in caplog.text


def test_versions_that_are_equal_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    require_same(versions(), versions(), "a machine")
    assert caplog.text == ""


def test_an_environment_that_fails_to_build_names_host_and_traceback(engine: StandIn) -> None:
    def change(actor: RemoteActor, method: str, result: Any) -> Any:
        if method == "build" and actor.index == 1:
            return Failure("ZeroDivisionError", "no cake", "Traceback: line 3, in bake", ours=False)
        return result

    engine.changed = change
    with pytest.raises(ClusterError, match=r"(?s)actor 1 on .+ \(process \d+\) could not.*no cake.*line 3, in bake"):
        Crew(cluster_settings(), engine, seed=0)
    assert engine.closed


def test_an_exception_in_an_actor_becomes_a_failure_with_its_traceback() -> None:
    actor = RemoteActor(0, 0)
    failure = actor.build(plan(replaced(Config(env="nonsense:x"), {"cluster.address": "local"})))
    assert isinstance(failure, Failure)
    assert failure.type == "UnknownEnvError"
    assert failure.ours
    assert "make_pool" in failure.traceback
    assert "no module 'nonsense'" in str(failure)


def test_actors_with_other_environments_than_the_first_are_refused(engine: StandIn) -> None:
    def change(actor: RemoteActor, method: str, result: Any) -> Any:
        return result | {"num_rows": 4 + actor.index} if method == "build" else result

    engine.changed = change
    with pytest.raises(ClusterError, match=r"actor 1 on .* has other environments than the others: 5 rows"):
        Crew(cluster_settings(), engine, seed=0)


def test_a_crew_shows_the_rows_of_all_its_actors(engine: StandIn) -> None:
    crew = Crew(cluster_settings(), engine, seed=0)
    assert crew.num_rows == 8
    assert crew.rows_per_actor == 4
    assert crew.tasks == ("scripted",)
    np.testing.assert_array_equal(crew.task_ids, np.zeros(8))
    assert crew.spec == engine.of(0).actor.pool.spec
    assert "2 actors (2 on " in crew.describe()
    assert len(crew.state()) == 2
    crew.close()
    assert engine.closed


@pytest.mark.case("DST-10")
def test_every_actor_and_each_of_its_lives_has_seeds_of_its_own() -> None:
    """Three actors, two lives each, and evaluation: all differ, and the same run gives the same ones again."""
    lives = {(actor, life): derive_seed(7, SEEDS, actor, life) for actor in range(3) for life in range(2)}
    evaluation = {derive_seed(7, 5, version) for version in range(50)}
    assert len(set(lives.values())) == 6
    assert not set(lives.values()) & (evaluation | {7, derive_seed(7, 1), derive_seed(7, 4)})
    assert lives[2, 1] == derive_seed(7, SEEDS, 2, 1)
    assert derive_seed(8, SEEDS, 2, 1) != lives[2, 1]


@pytest.mark.case("DST-10")
def test_an_actors_environments_get_its_seed(engine: StandIn) -> None:
    Crew(cluster_settings(), engine, seed=7)
    assert [h.actor.pool.seeds for h in engine.handles] == [[derive_seed(7, SEEDS, i, 0)] for i in range(2)]


def plan(config: Config, **values: Any) -> Plan:
    made = Plan(to_toml(config), 0, {}, os.getcwd(), ())
    return dataclasses.replace(made, **values)


@pytest.mark.case("DST-01")
def test_names_given_by_register_env_are_known_to_actors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They travel with what they stand for; an actor's process has its own registry."""
    monkeypatch.setattr(registry, "_registered", {})
    pronghorn.register_env("mine", f"{tmp_path}/envs.py:make")
    told = registry.registered()
    assert told == {"mine": f"{tmp_path}/envs.py:make"}
    monkeypatch.setattr(registry, "_registered", {})
    seen: list[str] = []
    monkeypatch.setattr("pronghorn.cluster.actor.make_pool", lambda config, **_: seen.append(config.env.id) or 1 / 0)
    failure = RemoteActor(0, 0).build(plan(Config(env="mine"), registered=told))
    assert isinstance(failure, Failure)
    assert seen == ["mine"]
    assert registry.registered() == told


def test_an_actor_imports_from_where_the_learner_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    path = (str(tmp_path / "own"), str(tmp_path / "absent"), sys.path[0])
    monkeypatch.setattr("pronghorn.cluster.actor.make_pool", lambda *_, **__: 1 / 0)
    RemoteActor(0, 0).build(plan(Config(env="x:y"), directory="/", import_path=path))
    assert os.getcwd() == "/"
    assert sys.path[-1] == str(tmp_path / "own")
    assert str(tmp_path / "absent") not in sys.path


def test_weights_make_the_round_trip(engine: StandIn) -> None:
    remote, member = make_learner(engine)
    for _ in range(3):
        remote.step()
    actor = engine.of(0).actor
    np.testing.assert_array_equal(pack_weights(member.newest.tensors), pack_weights(actor._publisher.latest.tensors))
