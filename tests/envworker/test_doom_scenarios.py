"""The table of Doom scenarios against the files that VizDoom ships, and what its players may do."""

import re
from pathlib import Path

import numpy as np
import pytest

from pronghorn.envworker.doom import DoomEnv
from pronghorn.envworker.doom_scenarios import SCENARIOS, TURN_BUTTON, held, turns
from pronghorn.types import EnvSpec

vizdoom = pytest.importorskip("vizdoom")

NOT_SINGLE_PLAYER = {"cig", "multi", "multi_duel"}
NOT_PLAYABLE_AS_SHIPPED = {"doom", "doom2", "oblige"}
VARIANTS_OF_BASIC = {"learning", "basic_audio", "basic_notifications"}


def _cfg_files():
    return {path.stem: path for path in Path(vizdoom.scenarios_path).glob("*.cfg")}


def test_table_holds_every_scenario_of_the_package_or_names_it_as_left_out():
    left_out = NOT_SINGLE_PLAYER | NOT_PLAYABLE_AS_SHIPPED | VARIANTS_OF_BASIC
    assert set(_cfg_files()) == set(SCENARIOS) | left_out
    assert not set(SCENARIOS) & left_out


@pytest.mark.parametrize("name", SCENARIOS)
def test_time_limit_is_the_one_of_the_cfg_file(name):
    text = (Path(vizdoom.scenarios_path) / SCENARIOS[name].cfg).read_text()
    limits = re.findall(r"^\s*episode_timeout\s*=\s*(\d+)", text, re.MULTILINE)
    assert SCENARIOS[name].timeout_tics == int(limits[0] if limits else 0)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("basic", (4,)),
        ("deadly_corridor", (3, 3, 3, 2)),
        ("defend_the_center", (3, 2)),
        ("defend_the_line", (3, 2)),
        ("health_gathering", (5,)),
        ("health_gathering_supreme", (5,)),
        ("my_way_home", (3, 3)),
    ],
)
def test_default_action_spaces_are_those_of_the_field(name, sizes):
    assert EnvSpec.from_json(DoomEnv(name).spec).action.discrete == sizes


@pytest.mark.parametrize(("name", "size"), [("my_way_home", 5), ("defend_the_center", 4), ("basic", 4)])
def test_flat_action_spaces_hold_one_button_at_a_time(name, size):
    env = DoomEnv(name, actions="flat")
    assert EnvSpec.from_json(env.spec).action.discrete == (size,)
    assert [sum(buttons) for buttons in env._button_table] == [0] + [1] * (size - 1)


def test_action_layout_all_is_the_same_for_every_scenario():
    specs = [EnvSpec.from_json(DoomEnv(name, actions="all").spec).action for name in SCENARIOS]
    assert set(specs) == {specs[0]}
    assert specs[0].discrete == (3, 3, 3, 2, 2, 2)


def test_factors_press_the_buttons_that_they_name():
    env = DoomEnv("deadly_corridor")  # turn, walk, strafe, attack
    row = env._button_table[env._action_index([2, 1, 0, 1])]
    pressed = {name for name, down in zip(env._button_names, row, strict=True) if down}
    assert pressed == {"TURN_RIGHT", "MOVE_FORWARD", "ATTACK"}


def test_turns_are_even_to_both_sides_and_0_is_none():
    factor = turns(21, 12.5)
    speeds = sorted(held(value).get(TURN_BUTTON, 0.0) for value in factor)
    np.testing.assert_allclose(speeds, np.linspace(-12.5, 12.5, 21))
    assert factor[0] == ()
