"""Doom's scenarios of one player as data, with their lookup: what each is, and what its player may do. No engine.

What a player may do is a product of *factors*, each a choice among sets of buttons that are held. Matches
(deathmatch.py) put theirs together from the same ones. ViZDoom need not be installed.

This module runs inside a worker: standard library only, Python 3.8 syntax.
"""

from __future__ import annotations

import difflib
import os
import re
from typing import Dict, List, Mapping, NamedTuple, Tuple, Union

from . import shaping

Held = Union[str, Tuple[str, float]]  # a button that is held, or one that takes a number (degrees a tic) and the number
Factor = Tuple[Tuple[Held, ...], ...]  # one discrete factor: for each of its values, what is held

TURN_BUTTON = "TURN_LEFT_RIGHT_DELTA"  # takes degrees a tic, positive to the right
_TURN: Factor = ((), ("TURN_LEFT",), ("TURN_RIGHT",))
WALK: Factor = ((), ("MOVE_FORWARD",), ("MOVE_BACKWARD",))
STRAFE: Factor = ((), ("MOVE_LEFT",), ("MOVE_RIGHT",))
ATTACK: Factor = ((), ("ATTACK",))
SPEED: Factor = ((), ("SPEED",))
USE: Factor = ((), ("USE",))
_WEAPON_6: Factor = ((), *(("SELECT_WEAPON%d" % i,) for i in range(1, 7)))
WEAPON_7: Factor = ((), *(("SELECT_WEAPON%d" % i,) for i in range(1, 8)))


def turns(count: int, most: float) -> Factor:
    """`count` (odd) speeds of turning from `most` degrees a tic to the left to as much to the right; value 0 is none.

    The others follow in order, so that value 0 means 'no button' in every factor.
    """
    half = count // 2
    speeds = [most * step / half for step in range(-half, half + 1) if step]
    return ((), *(((TURN_BUTTON, speed),) for speed in speeds))


# One action space for several scenarios at once; buttons that a scenario has no use for act as in plain Doom.
ALL_FACTORS: Tuple[Factor, ...] = (_TURN, WALK, STRAFE, ATTACK, SPEED, USE)


class Scenario(NamedTuple):
    """What a scenario's own files do not say, plus its time limit (a test holds it to the .cfg file).

    factors: the factored action space; 'flat' is one choice among no button and each value of each factor.
    default: the layout taken when none is asked for.
    timeout_tics: decisions end after so many tics, by truncation; 0: the scenario ends by its own rules only.
    reward_scale: factor on the scenario's reward.
    health_bonus: added to the scaled reward of each step in which health rose.
    doom_map: instead of the map that the .cfg names.
    rewards: weights of shaped rewards (shaping.py) that are added; empty: none.
    measurements: those shown when none are asked for.
    """

    cfg: str
    summary: str
    factors: Tuple[Factor, ...]
    default: str
    timeout_tics: int
    reward_scale: float = 1.0
    health_bonus: float = 0.0
    doom_map: str = ""
    rewards: Mapping[str, float] = {}
    measurements: Tuple[str, ...] = ()


# Left out: cig, multi and multi_duel (several players); doom and doom2 (need the commercial .wad files);
# oblige (needs maps made by the PyOblige package); learning (basic, in grey); basic_audio and
# basic_notifications (basic, with a sound or text buffer that a network of pixels does not see).
SCENARIOS: Dict[str, Scenario] = {
    "basic": Scenario(
        "basic.cfg", "shoot the monster on the far wall of one room", (STRAFE, ATTACK), "flat", 300, 0.01
    ),
    "simpler_basic": Scenario(
        "simpler_basic.cfg", "basic with plainer walls and floor", (STRAFE, ATTACK), "flat", 300, 0.01
    ),
    "rocket_basic": Scenario(
        "rocket_basic.cfg", "basic with a slow rocket, no aiming help", (STRAFE, ATTACK), "flat", 300, 0.01
    ),
    "deadly_corridor": Scenario(
        "deadly_corridor.cfg",
        "reach the vest at the end of a corridor lined with shooters",
        (_TURN, WALK, STRAFE, ATTACK),
        "factored",
        2100,
        0.01,
    ),
    "deathmatch": Scenario(
        "deathmatch.cfg",
        "kill monsters in an arena with weapons and medkits to find",
        (_TURN, WALK, STRAFE, ATTACK, SPEED, _WEAPON_6),
        "factored",
        4200,
    ),
    "defend_the_center": Scenario(
        "defend_the_center.cfg",
        "turn on the spot and shoot what comes, with 26 rounds",
        (_TURN, ATTACK),
        "factored",
        2100,
    ),
    "defend_the_line": Scenario(
        "defend_the_line.cfg",
        "hold one wall against ever tougher monsters; ends by death only",
        (_TURN, ATTACK),
        "factored",
        0,
    ),
    "health_gathering": Scenario(
        "health_gathering.cfg",
        "stay alive on an acid floor by collecting medkits",
        (_TURN, WALK),
        "flat",
        2100,
        health_bonus=1.0,
    ),
    "health_gathering_supreme": Scenario(
        "health_gathering_supreme.cfg",
        "health_gathering in a maze, with vials of poison between",
        (_TURN, WALK),
        "flat",
        2100,
        health_bonus=1.0,
    ),
    "my_way_home": Scenario(
        "my_way_home.cfg", "find the vest in a maze of rooms; sparse reward", (_TURN, WALK), "factored", 2100
    ),
    "predict_position": Scenario(
        "predict_position.cfg", "hit a walking monster with one slow rocket", (_TURN, ATTACK), "flat", 300
    ),
    "take_cover": Scenario(
        "take_cover.cfg", "dodge fireballs; ends by death only", (STRAFE,), "flat", 0
    ),
    "freedoom1": Scenario(
        "freedoom1.cfg",
        "the free game's first map; +1 for its exit, nothing else",
        (*ALL_FACTORS, WEAPON_7),
        "factored",
        126000,
        doom_map="E1M1",  # the .cfg means map01, which this game lacks: the second episode would hang the engine
    ),
    "freedoom2": Scenario(
        "freedoom2.cfg",
        "the other free game's first map; +1 for its exit, nothing else",
        (*ALL_FACTORS, WEAPON_7),
        "factored",
        126000,
    ),
}  # fmt: skip


# Scenarios of the Sample Factory paper whose maps neither vizdoom nor this package ships.
EXTERNAL: Dict[str, Scenario] = {
    name: Scenario(
        name + "_continuous_turning.cfg",
        summary,
        (WALK, STRAFE, ATTACK, SPEED, turns(11, 10.0)),
        "factored",
        2100,
        rewards=shaping.SURVIVAL,
        measurements=("HEALTH", "SELECTED_WEAPON_AMMO", "USER2"),  # the map counts kills in USER2
    )
    for name, summary in (
        ("battle", "kill monsters in a maze, with medkits and clips to find; the map is yours to bring"),
        ("battle2", "battle in a maze with more rooms; the map is yours to bring"),
    )
}

WHERE_FROM = "Those of the paper are in the wheel of sample-factory, under sf_examples/vizdoom/doom/scenarios"


def find_scenario(name: str) -> Scenario:
    """Of SCENARIOS or EXTERNAL. Raises ValueError with the nearest names where neither has it."""
    known = {**SCENARIOS, **EXTERNAL}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)
    raise ValueError("no Doom scenario '%s'. Did you mean: %s?" % (name, ", ".join(near)))


def require_external(name: str, directory: str, cfg: str) -> None:
    """Raise ValueError unless the folder holds the .cfg file and the map that it names."""
    path = external_file(name, directory, cfg)
    with open(path) as file:
        maps = re.findall(r"^\s*doom_scenario_path\s*=\s*(\S+)", file.read(), re.MULTILINE)
    for wad in maps:
        external_file(name, directory, wad)


def external_file(name: str, directory: str, file: str) -> str:
    """Path of a file that the user brings. Raises ValueError that names it when it is not there."""
    if not directory:
        rule = "%s needs %s, which is not shipped. Name the folder that holds it: --env.args scenarios_dir DIR. %s"
        raise ValueError(rule % (name, file, WHERE_FROM))
    path = os.path.join(directory, file)
    if not os.path.isfile(path):
        raise ValueError("%s needs %s, which scenarios_dir = '%s' lacks. %s" % (name, file, directory, WHERE_FROM))
    return path


def action_factors(scenario: Scenario, actions: str) -> Tuple[Factor, ...]:
    """A scenario's factors in the layout 'default', 'flat', 'factored' or 'all'; ValueError for another."""
    layout = scenario.default if actions == "default" else actions
    if layout == "factored":
        return scenario.factors
    if layout == "all":
        return ALL_FACTORS
    if layout != "flat":
        raise ValueError("actions is one of default, flat, factored, all, not '%s'" % actions)
    single_values = [value for factor in scenario.factors for value in factor if value]
    return (((), *single_values),)


def held(value: Tuple[Held, ...]) -> Dict[str, float]:
    """By button: 1.0 where it is held, or the number that it takes."""
    return dict(map(_pair, value))


def _pair(button: Held) -> Tuple[str, float]:
    return (button, 1.0) if isinstance(button, str) else button


def buttons_of(factors: Tuple[Factor, ...]) -> List[str]:
    """Every button that a factor holds, once, in order of appearance: the order of the engine's vector."""
    return list(dict.fromkeys(button for factor in factors for value in factor for button in held(value)))
