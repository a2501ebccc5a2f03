"""Shaped rewards: amounts by hand, what death hides, weights by name."""

import ast
from pathlib import Path

import pytest

from pronghorn.envworker import shaping
from pronghorn.envworker.shaping import AGAINST_BOTS, AMOUNTS, SELF_PLAY, VARIABLES, Shaping

START = {"HEALTH": 100, "AMMO2": 50, "WEAPON1": 1, "WEAPON2": 1}


def values(**changes):
    now = {**START, **changes}
    return [float(now.get(name, 0)) for name in VARIABLES]


def only(**weights):
    return {**dict.fromkeys(AMOUNTS, 0.0), **weights}


def begun(weights, **changes):
    one = Shaping(weights)
    one.begin(values(**changes))
    return one


def test_a_frag_and_what_led_to_it_is_the_sum_of_weights_times_amounts():
    one = begun(AGAINST_BOTS)
    # a frag 1, two hits 2 x 0.01, 60 points 60 x 0.003, three rounds 0
    assert one(values(FRAGCOUNT=1, HITCOUNT=2, DAMAGECOUNT=60, AMMO2=47)) == pytest.approx(1 + 0.02 + 0.18)
    assert one(values(FRAGCOUNT=1, HITCOUNT=2, DAMAGECOUNT=60, AMMO2=47)) == 0.0  # counters stay, nothing happened


def test_killing_oneself_loses_a_frag_and_a_life():
    one = begun(AGAINST_BOTS)
    assert one(values(FRAGCOUNT=-1, DEATHCOUNT=1, DEAD=1, HEALTH=0)) == pytest.approx(-1.5 - 0.75)


def test_what_one_carried_is_neither_lost_by_death_nor_won_by_coming_back():
    one = begun(only(health_lost=-1.0, health_gained=1.0, weapon_found=1.0, ammo_found=1.0, death=-7.0), HEALTH=30)
    assert one(values(DEATHCOUNT=1, DEAD=1, HEALTH=0, AMMO2=0, WEAPON2=0)) == -7.0
    assert one(values(DEATHCOUNT=1)) == 0.0  # back with 100 points of health, 50 rounds and a pistol
    assert one(values(DEATHCOUNT=1, HEALTH=90)) == -10.0


def test_a_death_and_the_return_within_one_step_count_as_a_death():
    one = begun(only(health_gained=1.0, death=-7.0), HEALTH=30)
    assert one(values(DEATHCOUNT=1)) == -7.0


@pytest.mark.parametrize(
    ("name", "before", "after", "amount"),
    [
        ("health_gained", {"HEALTH": 50}, {"HEALTH": 75}, 25),
        ("health_lost", {}, {"HEALTH": 75}, 25),
        ("armor_gained", {}, {"ARMOR": 100}, 100),
        ("armor_lost", {"ARMOR": 100}, {"ARMOR": 90}, 10),
        ("weapon_found", {}, {"WEAPON3": 1, "WEAPON5": 1, "WEAPON2": 2}, 2),  # a second pistol is no news
        ("ammo_found", {}, {"AMMO2": 60, "AMMO3": 8}, 2),
        ("ammo_used", {"AMMO3": 9}, {"AMMO2": 47, "AMMO3": 8}, 4),
        ("hit", {}, {"HITCOUNT": 9}, 5),  # capped
        ("damage", {}, {"DAMAGECOUNT": 900}, 200),  # capped
        ("lost_frag", {"FRAGCOUNT": 3}, {"FRAGCOUNT": 2}, 1),
    ],
)
def test_each_amount(name, before, after, amount):
    assert begun(only(**{name: 0.5}), **before)(values(**after)) == 0.5 * amount


def test_in_self_play_a_clean_fight_sums_to_nothing():
    """One takes 30 points off the other, then kills him: what one wins the other loses."""
    winner, loser = begun(SELF_PLAY), begun(SELF_PLAY)
    total = winner(values(DAMAGECOUNT=30)) + loser(values(HEALTH=70))
    total += winner(values(DAMAGECOUNT=30, FRAGCOUNT=1)) + loser(values(HEALTH=0, DEAD=1, DEATHCOUNT=1))
    assert total == pytest.approx(0.0)


def test_weights_are_given_by_name_and_the_rest_stays():
    given = shaping.weights(SELF_PLAY, {"frag": 2})
    assert given == {**SELF_PLAY, "frag": 2.0}
    assert SELF_PLAY["frag"] == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"frags": 1.0}, "nothing is called 'frags'. Did you mean: frag"),
        ({"frag": "much"}, "rewards.frag = 'much': a weight is a finite number"),
        ({"frag": float("nan")}, "finite"),
        ({"frag": True}, "finite"),
        (3.0, "a table of weights by name"),
    ],
)
def test_wrong_weights_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        shaping.weights(SELF_PLAY, given)


@pytest.mark.parametrize("name", ["shaping", "match", "deathmatch"])
def test_modules_keep_python_3_8_syntax(name):
    path = Path(shaping.__file__).with_name(name + ".py")
    ast.parse(path.read_text(), feature_version=(3, 8))


def test_every_preset_weighs_every_amount():
    for preset in (AGAINST_BOTS, SELF_PLAY, shaping.SURVIVAL):
        assert list(preset) == list(AMOUNTS)
