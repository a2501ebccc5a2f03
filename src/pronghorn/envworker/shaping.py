"""Shaped rewards of Doom: what happened to a player between two steps, weighed; it runs no game.

Amounts are read off the engine's counters, so that nothing which happens between two observations is missed. The
weights are configuration: they are given by name when an environment is made, and may be set anew while it runs.

Python 3.8 syntax, standard library only.
"""

from __future__ import annotations

import difflib
import math
from typing import Dict, List, Mapping, Optional, Sequence

AMMO = ("AMMO2", "AMMO3", "AMMO5", "AMMO6")  # bullets, shells, rockets, cells
WEAPONS = tuple("WEAPON%d" % slot for slot in range(1, 8))
# The engine's variables that amounts are made of, in the order in which `Shaping` takes their values.
VARIABLES = ("FRAGCOUNT", "DEATHCOUNT", "HITCOUNT", "DAMAGECOUNT", "DEAD", "HEALTH", "ARMOR", *AMMO, *WEAPONS)

# What can be weighed, each an amount >= 0 of one step; hits and damage are capped, so that one lucky rocket among many
# players does not outweigh a frag.
AMOUNTS: Dict[str, str] = {
    "frag": "frags won",
    "lost_frag": "frags lost, by killing oneself",
    "death": "deaths",
    "hit": "hits on others, at most 5 a step",
    "damage": "points of health and armour taken from others, at most 200 a step",
    "health_gained": "points of health found",
    "health_lost": "points of health lost, save by death",
    "armor_gained": "points of armour found",
    "armor_lost": "points of armour lost, save by death",
    "weapon_found": "weapons found that were not owned",
    "ammo_found": "kinds of ammunition of which there is more than before",
    "ammo_used": "rounds fired",
}
MAX_HITS, MAX_DAMAGE = 5.0, 200.0

# Sample Factory's ways to weigh them (reference: its paper's appendix and doom_utils): against bots everything that is
# useful counts a little; in self-play what one wins the other loses, and picking things up counts nothing.
AGAINST_BOTS: Dict[str, float] = {
    "frag": 1.0, "lost_frag": -1.5, "death": -0.75, "hit": 0.01, "damage": 0.003,
    "health_gained": 0.005, "health_lost": -0.003, "armor_gained": 0.005, "armor_lost": -0.001,
    "weapon_found": 0.1, "ammo_found": 0.02, "ammo_used": 0.0,
}  # fmt: skip
SELF_PLAY: Dict[str, float] = {
    "frag": 1.0, "lost_frag": 0.0, "death": -1.0, "hit": 0.0, "damage": 0.01,
    "health_gained": 0.01, "health_lost": -0.01, "armor_gained": 0.0, "armor_lost": 0.0,
    "weapon_found": 0.0, "ammo_found": 0.0, "ammo_used": 0.0,
}  # fmt: skip
SURVIVAL: Dict[str, float] = dict(
    dict.fromkeys(AMOUNTS, 0.0), health_gained=0.005, health_lost=-0.003, ammo_found=0.02
)  # fmt: skip


def weights(defaults: Mapping[str, float], given: Optional[Mapping[str, float]]) -> Dict[str, float]:
    """The defaults with those given in their place. Raises ValueError for an unknown name or a weight that is none."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError("rewards is a table of weights by name, such as {frag = 1.0}, not %r" % (given,))
    for name, weight in (given or {}).items():
        if name not in AMOUNTS:
            near = difflib.get_close_matches(str(name), AMOUNTS, n=3, cutoff=0.4) or list(AMOUNTS)
            raise ValueError("rewards: nothing is called '%s'. Did you mean: %s?" % (name, ", ".join(near)))
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError("rewards.%s = %r: a weight is a finite number (of a loss, negative)" % (name, weight))
    return {**defaults, **{name: float(weight) for name, weight in (given or {}).items()}}


class Shaping:
    """The shaped reward of one player, step by step. `weights` may be exchanged between steps."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)
        self._before: List[float] = []

    def begin(self, values: Sequence[float]) -> None:
        """Take the values of VARIABLES at an episode's start as those to compare the first step with."""
        self._before = list(values)

    def __call__(self, values: Sequence[float]) -> float:
        """The reward of the step that led to these values of VARIABLES: the sum of weight x amount."""
        return sum(self.weights[name] * amount for name, amount in self.amounts(values).items())

    def amounts(self, values: Sequence[float]) -> Dict[str, float]:
        """What happened since the call before, by the names of AMOUNTS (those that are 0 may be left out)."""
        before, self._before = self._before, list(values)
        if before == self._before:
            return {}
        frags, deaths, hits, damage = (now - then for now, then in zip(values[:4], before[:4]))
        found = {
            "frag": max(frags, 0.0),
            "lost_frag": max(-frags, 0.0),
            "death": max(deaths, 0.0),
            "hit": min(max(hits, 0.0), MAX_HITS),
            "damage": min(max(damage, 0.0), MAX_DAMAGE),
        }
        # Who died lost what he carried, and begins anew with what the map gives: neither was won or lost by skill.
        lived_through = deaths == 0 and not before[4] and not values[4]
        return dict(found, **self._carried(before, values)) if lived_through else found

    @staticmethod
    def _carried(before: Sequence[float], values: Sequence[float]) -> Dict[str, float]:
        """Changes of health, armour, ammunition and weapons."""
        health, armor = values[5] - before[5], values[6] - before[6]
        first_weapon = 7 + len(AMMO)
        rounds = [now - then for now, then in zip(values[7:first_weapon], before[7:first_weapon])]
        owned = zip(values[first_weapon:], before[first_weapon:])
        return {
            "health_gained": max(health, 0.0),
            "health_lost": max(-health, 0.0),
            "armor_gained": max(armor, 0.0),
            "armor_lost": max(-armor, 0.0),
            "weapon_found": float(sum(now > 0 >= then for now, then in owned)),
            "ammo_found": float(sum(change > 0 for change in rounds)),
            "ammo_used": float(-sum(min(change, 0.0) for change in rounds)),
        }
