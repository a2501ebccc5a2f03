"""Settings as data: names, derived seeds, the short form."""

from __future__ import annotations

from pronghorn.config import Config, derive_seed


def test_derived_seeds_differ_and_repeat() -> None:
    seeds = [derive_seed(7, *path) for path in [(0,), (1,), (0, 0), (0, 1), (1, 0)]]
    assert len(set(seeds)) == 5
    assert seeds == [derive_seed(7, *path) for path in [(0,), (1,), (0, 0), (0, 1), (1, 0)]]
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_short_form_of_the_api_names_an_environment() -> None:
    assert Config(env="doom:basic,doom:take_cover").env_names == ("doom:basic", "doom:take_cover")
