"""Tests of pronghorn.evaluation.charts: axes, places of points, labels that do not cover each other."""

from __future__ import annotations

import itertools
import re

import pytest

from pronghorn.evaluation import charts
from pronghorn.evaluation.charts import Dot, Frame, Level, Series, axis_around, line_chart, log_ticks, stairs

SQUARE = Frame(width=200, height=200, left=50, right=50, top=50, bottom=50)  # an area of 100 by 100


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (-0.3, 0.62, [-0.5, 0.0, 0.5, 1.0]),
        (0.0, 487_424.0, [0.0, 200_000.0, 400_000.0, 600_000.0]),
        (5.0, 5.0, [4.0, 6.0]),
        (0.0, 0.0, [0.0, 0.5]),
    ],
)
def test_ticks_are_round_and_enclose_the_data(low: float, high: float, expected: list[float]) -> None:
    ticks = charts.ticks(low, high, 4)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert ticks == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.0, 1.0, [1.0, 2.0]),
        (0.003, 0.04, [0.002, 0.005, 0.01, 0.02, 0.05]),
        (1e-4, 3e-2, [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]),
        (2e-7, 0.3, [1e-7, 1e-5, 1e-3, 1e-1, 1e1]),
        (-500.0, -20.0, [-500.0, -200.0, -100.0, -50.0, -20.0]),
    ],
)
def test_ticks_of_a_logarithmic_axis_enclose_the_data_and_are_few(
    low: float, high: float, expected: list[float]
) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)
    assert len(log_ticks(low, high)) <= 6


def test_equal_factors_are_equally_far_on_a_logarithmic_axis_and_greater_is_higher() -> None:
    rising = axis_around([1.0, 100.0], "log")
    assert [rising.share(v) for v in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 0.5, 1.0])
    negative = axis_around([-100.0, -1.0], "log")
    assert [negative.share(v) for v in (-100.0, -10.0, -1.0)] == pytest.approx([0.0, 0.5, 1.0])


def test_equal_factors_of_the_horizon_are_equally_far_on_the_axis_of_a_discount() -> None:
    axis = axis_around([0.9, 0.999], "complement")  # horizons of 10 and 1000
    assert (axis.ticks[0], axis.ticks[-1]) == (0.9, 0.999)
    assert [axis.share(v) for v in (0.9, 0.99, 0.999)] == pytest.approx([0.0, 0.5, 1.0])


def test_a_long_curve_is_thinned_evenly_to_its_ends() -> None:
    points = [(float(index), 0.0) for index in range(10_000)]
    thin = charts.thin(points)
    assert len(thin) == charts.MAX_POINTS
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert {round(b[0] - a[0]) for a, b in itertools.pairwise(thin)} == {25, 26}


def test_a_value_holds_until_the_next() -> None:
    assert stairs([(0, 1.0), (10, 1.0), (20, 3.0)], end=25) == [(0, 1.0), (20, 1.0), (20, 3.0), (25, 3.0)]
    assert stairs([(0, 1.0)], end=0) == [(0, 1.0)]
    assert stairs([], end=5) == []


def test_labels_keep_apart_and_stay_above_the_bottom() -> None:
    assert charts.spread([10.0, 12.0, 40.0], gap=12, bottom=100) == [10.0, 22.0, 40.0]
    assert charts.spread([90.0, 95.0, 99.0], gap=12, bottom=100) == [76.0, 88.0, 100.0]


def test_everything_of_a_series_is_drawn_to_scale() -> None:
    """x from 0 to 10; y from 0 to 20, which the error bar's end and the level stretch it to."""
    dot = Dot(5.0, 10.0, "a & b", error=10.0, is_pale=True)
    series = Series("k3", [(0.0, 10.0), (10.0, 15.0)], [(0.0, 12.0), (10.0, 12.0)], [dot], tag="7", title="seven")
    svg = line_chart([series], "y", "x", levels=[Level(5.0, "script")], frame=SQUARE)
    assert '<path class="line k3" d="M50.0 100.0L150.0 75.0"><title>seven</title></path>' in svg
    assert '<path class="band k3" d="M50.0 90.0L150.0 90.0Z"/>' in svg
    assert '<path class="bar k3 pale" d="M100.0 150.0L100.0 50.0"/>' in svg
    assert '<circle class="dot k3 pale" cx="100.0" cy="100.0" r="4"><title>a &amp; b</title></circle>' in svg
    assert '<path class=level d="M50.0 125.0H150"/><text x="54.0" y="121.0">script</text>' in svg
    assert re.search(r'<text class="value k3" x="156" y="78.5">7: 15</text>', svg)


def test_names_of_levels_close_together_do_not_cover_each_other() -> None:
    levels = [Level(10.0, "lower"), Level(10.2, "upper"), Level(0.0, "lowest")]
    svg = line_chart([Series("k0", [(0.0, 0.0), (1.0, 10.0)])], "y", "x", levels=levels, frame=SQUARE)
    names = re.findall(r'<text x="54.0" y="([\d.]+)">(\w+)</text>', svg)
    assert [name for _, name in names] == ["upper", "lower", "lowest"]
    heights = [float(y) for y, _ in names]
    assert heights[1] - heights[0] == pytest.approx(charts.LABEL_GAP)
    assert heights[2] == 146.0  # on its line


def test_a_series_without_an_end_has_no_last_value_and_an_empty_chart_says_so() -> None:
    svg = line_chart([Series("k0", [(0.0, 1.0), (1.0, 2.0)], has_end=False)], "y", "x")
    assert 'class="line k0"' in svg
    assert "value" not in svg
    assert "<circle" not in svg
    assert line_chart([Series("k0", [])], "y", "x", empty="none") == "<p class=empty>none</p>"


def test_more_series_than_colours_differ_by_their_dashes() -> None:
    assert len({charts.colour(index) for index in range(24)}) == 24
    assert charts.colour(9) == "k1 d1"


@pytest.mark.parametrize("value", [None, True, "3", float("nan"), float("inf"), -(10**400), [1]])
def test_what_is_no_finite_number_is_not_drawn(value: object) -> None:
    assert not charts.is_number(value)
    assert charts.is_number(3)
