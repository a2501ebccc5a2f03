from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pronghorn.envworker.building import flat, make
from pronghorn.envworker.loading import PackageMissing, load
from pronghorn.envworker.parallel import ParallelEnv
from pronghorn.envworker.spaces import ContractBroken
from pronghorn.envworker.turns import TurnsEnv

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")
GAMES = str(Path(__file__).parents[1] / "turn_games.py")


def test_a_flat_environment_is_taken_as_it_is():
    env = make("call", f"{TOYS}:LifeLoss")
    assert type(env).__name__ == "LifeLoss"
    with pytest.raises(ContractBroken, match=r"flat environment; the options \['obs_keys'\] do not apply"):
        make("call", f"{TOYS}:LifeLoss", {}, {"obs_keys": ["a"]})


def test_what_is_no_environment_is_told_so():
    with pytest.raises(
        ContractBroken, match="returned a dict, which lacks observation_space, action_space, reset, step"
    ):
        flat({}, "my.module:make")


def test_bad_arguments_of_doom_are_explained():
    pytest.importorskip("vizdoom")
    with pytest.raises(ContractBroken, match="actions is one of default, flat"):
        make("doom", "basic", {"actions": "flt"})
    with pytest.raises(ContractBroken, match=r"doom:basic: .*'widht'; its arguments are: .*width=128"):
        make("doom", "basic", {"widht": 3})


def test_an_unknown_option_is_refused():
    with pytest.raises(ContractBroken, match=r"unknown environment options \['obs_key'\]"):
        make("call", f"{TOYS}:Counter", {}, {"obs_key": "a"})


@pytest.fixture
def games(monkeypatch):
    """A family of PettingZoo games in the place of an installed one."""
    pytest.importorskip("pettingzoo")
    asked = {}

    def parallel_env(returns=False, render_mode=None):
        asked.update(returns=returns, render_mode=render_mode)
        return load(f"{TOYS}:Squad")(returns)

    def turns(render_mode=None):
        asked.update(render_mode=render_mode)
        return load(f"{GAMES}:Circle")()

    monkeypatch.setitem(sys.modules, "pettingzoo.toys", SimpleNamespace(__path__=[], __spec__=None))
    monkeypatch.setitem(sys.modules, "pettingzoo.toys.squad_v0", SimpleNamespace(parallel_env=parallel_env))
    monkeypatch.setitem(sys.modules, "pettingzoo.toys.turns_v0", SimpleNamespace(env=turns))
    return asked


def test_a_game_of_pettingzoo_is_its_parallel_environment(games):
    padded = {"pad_spaces": True}
    env = make("pettingzoo", "toys.squad_v0", {"returns": True}, {"render": True, "info": ["hits"], **padded})
    assert isinstance(env, ParallelEnv)
    assert (env.spec["rows_per_env"], env.spec["info"], env.spec["name"]) == (3, ["hits"], "pettingzoo:toys.squad_v0")
    assert games == {"returns": True, "render_mode": "rgb_array"}
    make("pettingzoo", "toys.squad_v0", {}, padded)
    assert games == {"returns": False, "render_mode": None}


def test_a_game_of_pettingzoo_in_turns_is_its_own_environment(games):
    env = make("pettingzoo", "toys.turns_v0", {}, {"render": True})
    assert isinstance(env, TurnsEnv)
    assert (env.spec["rows_per_env"], env.spec["name"]) == (2, "pettingzoo:toys.turns_v0")
    assert games == {"render_mode": "rgb_array"}


def test_a_game_of_pettingzoo_that_cannot_be_played_is_explained(games, monkeypatch):
    with pytest.raises(ContractBroken, match=r"toys.squad_v0: .*unexpected keyword argument 'size'"):
        make("pettingzoo", "toys.squad_v0", {"size": 3})
    with pytest.raises(ContractBroken, match=r"toys.gone_v0 cannot be imported: .* pip install 'pettingzoo\[toys\]'"):
        make("pettingzoo", "toys.gone_v0")
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(PackageMissing, match=r"pettingzoo:toys.squad_v0 needs the package 'pettingzoo'"):
        make("pettingzoo", "toys.squad_v0")
