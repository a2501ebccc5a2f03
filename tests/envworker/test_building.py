from __future__ import annotations

from pathlib import Path

import pytest

from pronghorn.envworker.building import flat, make
from pronghorn.envworker.spaces import ContractBroken

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")


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
