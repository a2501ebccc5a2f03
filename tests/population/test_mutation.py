"""Ranges and perturbations: by hand, and what holds for every value, factor and direction."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pronghorn.errors import ConfigError
from pronghorn.population.mutation import Range, check_range, check_value, draw, perturb


@pytest.mark.parametrize(
    ("value", "r", "factor", "up", "after"),
    [
        (1e-3, Range(1e-5, 1e-1), 1.2, True, 1.2e-3),
        (1e-3, Range(1e-5, 1e-1), 1.2, False, 1e-3 / 1.2),
        (0.09, Range(1e-5, 0.1), 1.2, True, 0.1),  # cut off at the end
        (0.1, Range(1e-5, 0.1), 1.25, True, 0.08),  # at the end: the other way
        (0.99, Range(0.9, 0.9999, "complement"), 1.25, True, 0.9875),  # 1 - γ: 0.01 -> 0.0125
        (0.99, Range(0.9, 0.9999, "complement"), 1.25, False, 0.992),  # 1 - γ: 0.01 -> 0.008
        (1, Range(1, 16, "integer"), 1.2, True, 2),  # round(1.2) = 1 would stay
        (1, Range(1, 16, "integer"), 1.2, False, 2),
        (3, Range(1, 16, "integer"), 1.1, False, 2),
        (10, Range(1, 16, "integer"), 1.5, True, 15),
        (16, Range(1, 16, "integer"), 1.1, True, 15),
        (-2.0, Range(-100.0, -0.1), 1.5, True, -3.0),  # a penalty grows
        (0.0, Range(0.01, 10.0), 1.2, True, 0.01),  # a loss that was off: the mild end
        (0.0, Range(0.01, 10.0, off_is="high"), 1.2, False, 10.0),  # a clip that was off
    ],
)
def test_perturbations_by_hand(value: float, r: Range, factor: float, up: bool, after: float) -> None:
    assert perturb(value, r, factor, up) == pytest.approx(after)


@st.composite
def ranges(draw_: st.DrawFn) -> Range:
    scale = draw_(st.sampled_from(["log", "negative", "complement", "integer"]))
    if scale == "integer":
        low = draw_(st.integers(1, 20))
        return Range(low, low + draw_(st.integers(1, 50)), "integer", draw_(st.sampled_from(["low", "high"])))
    low, span = 10 ** draw_(st.floats(-8, 2)), 10 ** draw_(st.floats(0.1, 4))
    if scale == "complement":
        return Range(1 - 10 ** draw_(st.floats(-2, -0.1)), 1 - 10 ** draw_(st.floats(-6, -3)), "complement")
    return Range(low, low * span) if scale == "log" else Range(-low * span, -low)


@given(ranges(), st.floats(0, 1), st.floats(1.01, 2.0), st.booleans())
def test_every_perturbation_stays_in_range_and_changes_the_value(r: Range, at: float, factor: float, up: bool) -> None:
    check_range("x", r)
    value = min(max(r.low + at * (r.high - r.low), r.low), r.high)
    value = round(value) if r.integer else value
    after = perturb(value, r, factor, up)
    assert r.holds(after)
    assert after != value
    assert not r.integer or (isinstance(after, int) and abs(after - value) >= 1)
    assert r.holds(perturb(0, r, factor, up))


def test_first_values_come_from_their_range_log_uniformly() -> None:
    rng = np.random.default_rng(0)
    values = [draw(Range(1e-9, 1.0, start=(1e-4, 1e-2)), rng) for _ in range(2000)]
    assert all(1e-4 <= v <= 1e-2 for v in values)
    assert np.median(values) == pytest.approx(1e-3, rel=0.15)  # halfway on the log scale
    picked = {draw(Range(1e-9, 1.0, choices=(0.1, 0.001)), rng) for _ in range(50)}
    assert picked == {0.1, 0.001}
    horizons = [1 / (1 - draw(Range(0.9, 0.999, "complement"), rng)) for _ in range(2000)]
    assert min(horizons) >= 10 - 1e-9
    assert np.median(horizons) == pytest.approx(100, rel=0.15)
    assert {draw(Range(1, 3, "integer"), rng) for _ in range(100)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("r", "rule"),
    [
        (Range(0.1, 0.1), "smaller first"),
        (Range(0.0, math.inf), "two finite numbers"),
        (Range(0.0, 1.0), "one side of 0"),
        (Range(-1.0, 1.0), "one side of 0"),
        (Range(0.5, 1.0, "complement"), "end below 1"),
        (Range(1.5, 3, "integer"), "whole ends"),
        (Range(0.1, 1.0, start=(0.01, 0.5)), "must lie in its range"),
        (Range(0.1, 1.0, choices=(0.5, 2.0)), "must lie in its range"),
    ],
)
def test_a_range_that_cannot_be_moved_in_is_refused_with_its_name(r: Range, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as info:
        check_range("value_clip", r)
    assert "value_clip" in info.value.field


def test_values_begin_in_their_range_or_switched_off() -> None:
    check_value("x", 0.0, Range(0.1, 1.0))
    check_value("x", 0.1, Range(0.1, 1.0))
    with pytest.raises(ConfigError, match=r"x = 2.0: is mutable in the range \(0.1, 1.0\)"):
        check_value("x", 2.0, Range(0.1, 1.0))
    with pytest.raises(ConfigError, match=r"whole number.*Try 2"):
        check_value("epochs", 1.7, Range(1, 4, "integer"))


def test_a_range_survives_json() -> None:
    for r in (Range(0.1, 1.0, start=(0.2, 0.3)), Range(1, 3, "integer", "high", choices=(1, 2))):
        assert Range.from_json(json.loads(json.dumps(r.to_json()))) == r


def test_a_range_is_read_from_text_with_what_is_usual_for_the_rest() -> None:
    discount = Range(0.9, 0.999, "complement", off_is="high", start=(0.95, 0.99))
    assert Range.parse("gamma", "0.8..0.99", discount) == Range(0.8, 0.99, "complement", off_is="high")
    assert Range.parse("epochs", "2..4 integer", None) == Range(2.0, 4.0, "integer")
    for text, rule in (("0.1", "LOW..HIGH"), ("a..b", "LOW..HIGH"), ("1..2 cubic", "none of the scales log, comp")):
        with pytest.raises(ConfigError, match=rule):
            Range.parse("lr", text, None)
