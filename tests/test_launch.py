"""What torchrun's variables say, and what one of several learners makes of the settings."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.errors import ConfigError, UsageError
from pronghorn.launch import Launch, launch_of, refuse_several, share_of
from pronghorn.machine import take_share_of_cores
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec

VARIABLES = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SPEC = EnvSpec({"x": LeafSpec((3,), "float32", "vector")}, ActionSpec(discrete=(2,)))


def config(**values: Any) -> Config:
    built: Config = replace(Config(env="x:y"), {"env.workers": 1, "env.envs_per_worker": 8} | values)
    return built


def test_the_variables_of_torchrun() -> None:
    assert launch_of(VARIABLES) == Launch(5, 8, 1, 4, 2, "node-0", 29500, True, "")
    assert launch_of(VARIABLES | {"GLOO_SOCKET_IFNAME": "eth1"}).interface == "eth1"
    assert not launch_of(VARIABLES).leads
    assert not launch_of(VARIABLES).on_one_machine


def test_without_them_a_process_is_alone() -> None:
    assert launch_of({}) == launch_of({"RANK": "1", "WORLD_SIZE": "2"}) == Launch()
    assert Launch().leads
    assert share_of(config(), Launch()) == config()


def test_a_variable_that_is_no_number_is_an_error_that_shows_it() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE=eight"):
        launch_of(VARIABLES | {"WORLD_SIZE": "eight"})


@pytest.mark.case("DST-10")
def test_each_learner_has_its_part_of_the_batch_and_seeds_of_its_own() -> None:
    whole = config(**{"learner.batch_unrolls": 12, "eval.every_s": 60.0, "seed": 7})
    shares = [share_of(whole, Launch(rank, 3)) for rank in range(3)]
    assert [share.learner.batch_unrolls for share in shares] == [4, 4, 4]
    assert shares[0].seed == 7
    assert len({share.seed for share in shares}) == 3
    assert shares == [share_of(whole, Launch(rank, 3)) for rank in range(3)]
    assert [share.eval.every_s for share in shares] == [60.0, 0.0, 0.0]
    assert [share.log.live for share in shares] == ["auto", "off", "off"]


def test_a_batch_that_cannot_be_dealt_is_an_error_that_says_what_can() -> None:
    with pytest.raises(ConfigError, match=r"batch_unrolls = 10: must be a multiple of the 3 learners.*unrolls 9\."):
        share_of(config(**{"learner.batch_unrolls": 10}), Launch(0, 3))
    with pytest.raises(ConfigError, match="must be a multiple of the 3 learners"):
        resolve(config(**{"learner.batch_unrolls": 10}), SPEC, 3)


@pytest.mark.parametrize(("algo", "max_lag"), [("appo", None), ("ppo", None), ("a2c", 0), ("impala", 16)])
def test_a_batch_left_open_grows_with_the_rows_of_all(algo: str, max_lag: int | None) -> None:
    settings = config(algo=algo, max_lag=max_lag)
    one, three = resolve(settings, SPEC), resolve(settings, SPEC, 3)
    assert three.learner.batch_unrolls >= 3 * one.learner.batch_unrolls
    share = share_of(three, Launch(1, 3))
    assert share.learner.batch_unrolls * 3 == three.learner.batch_unrolls
    parts = share.batch_samples if share.single_steps else share.learner.batch_unrolls
    assert parts % share.learner.minibatches == 0


def test_a_batch_that_was_given_stays_what_it_is() -> None:
    given = config(**{"learner.batch_unrolls": 32})
    assert resolve(given, SPEC, 4).learner.batch_unrolls == 32


def test_minibatches_that_a_share_cannot_deal_are_refused() -> None:
    given = config(**{"learner.batch_unrolls": 8, "learner.minibatches": 4, "model.core": "gru"})
    assert resolve(given, SPEC, 2).learner.minibatches == 4
    with pytest.raises(ConfigError, match=r"learner.minibatches = 4: must divide"):
        resolve(given, SPEC, 4)


@pytest.mark.parametrize(
    ("values", "field"),
    [({"population.members": 2}, "population.members"), ({"env.policies": "by_spaces"}, "env.policies"),
     ({"selfplay.snapshot_weight": 0.5}, "selfplay"), ({"graphs": "on"}, "graphs")],
)  # fmt: skip
def test_what_several_learners_cannot_do_is_refused(values: dict[str, Any], field: str) -> None:
    refuse_several(config(**values), Launch())
    with pytest.raises(ConfigError, match=rf"^{field} = .*several learners"):
        refuse_several(config(**values), Launch(0, 2))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_processes_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 3, 4, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: taken.append(cores))
    for index in range(2):
        take_share_of_cores(index, 2)
    assert taken == [[0, 2], [3, 4, 7]]
    take_share_of_cores(3, 6)  # too few to share
    assert len(taken) == 2
