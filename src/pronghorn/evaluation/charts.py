"""Line charts, and the parts that charts are made of, as SVG elements.

Colours come from the page's style (`STYLE`), so that they follow the reader's light or dark theme. It knows numbers
and words only: which file they came from and what they mean is its callers' business.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeGuard, TypeVar

MAX_POINTS = 400  # of a curve: more than a chart has pixels only makes the page heavy
MAX_NUMBER = 1e300  # so that a difference of two is finite
NUM_COLOURS = 8
LABEL_GAP = 12.0  # between the lines of two labels, in units of the picture

Points = list[tuple[float, float]]
Form = Callable[[float], str]
Scale = Literal["linear", "log", "complement"]
T = TypeVar("T")


# ---------------------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Frame:
    """Size of a picture, and the room around its area, in units that are pixels at full size."""

    width: float = 440
    height: float = 250
    left: float = 52
    """Room for tick labels."""
    right: float = 58
    """Room for last values."""
    top: float = 12
    bottom: float = 38
    """Room for tick labels and the title of the axis."""


@dataclass(frozen=True)
class Dot:
    """A point of its own."""

    x: float
    y: float
    title: str
    """What a pointer held over it shows."""
    error: float = 0.0
    """Drawn as a bar from y - error to y + error."""
    is_pale: bool = False


@dataclass(frozen=True)
class Series:
    """One curve, and what belongs to it."""

    colour: str
    """Class of the style: `colour(index)`, or best."""
    curve: Points
    band: Points | None = None
    """Outline of an area."""
    dots: Sequence[Dot] = ()
    tag: str = ""
    """Short name, written before the last value."""
    title: str = ""
    """What a pointer held over the curve shows."""
    has_end: bool = True
    """Whether the last point is marked and its value written."""


@dataclass(frozen=True)
class Level:
    """A line across the whole area at one height, with its name on it."""

    y: float
    label: str


def colour(index: int) -> str:
    """The class of the index-th of several alike; after NUM_COLOURS they repeat, dashed."""
    dashes = ("", " d1", " d2")[index // NUM_COLOURS % 3]
    return f"k{index % NUM_COLOURS}{dashes}"


# ---------------------------------------------------------------------------------------------- axes


@dataclass(frozen=True)
class Axis:
    """Where values lie between two ends."""

    low: float
    high: float
    ticks: Sequence[float]
    scale: Scale = "linear"

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = self._ends
        return (_along(value, self.scale) - low) / (high - low)

    @cached_property
    def _ends(self) -> tuple[float, float]:
        return _along(self.low, self.scale), _along(self.high, self.scale)


def _along(value: float, scale: Scale) -> float:
    """A rising function of the value that the scale makes even: v, ±log |v|, or -log(1 - v) (the log of a horizon)."""
    if scale == "log":
        return math.log(value) if value > 0 else -math.log(-value)
    return -math.log(1.0 - value) if scale == "complement" else value


def axis_from_zero(high: float) -> Axis:
    """From 0 to exactly `high`, or to 1 if that is 0."""
    high = high or 1.0
    return Axis(0.0, high, [tick for tick in ticks(0.0, high, 5) if tick <= high])


def axis_around(values: Sequence[float], scale: Scale = "linear") -> Axis:
    """From a tick below all values to one above. log: values of one sign; complement: values below 1."""
    low, high = min(values), max(values)
    if scale == "log":
        at = log_ticks(low, high)
    elif scale == "complement":
        at = [round(1.0 - tick, 12) for tick in reversed(log_ticks(1.0 - high, 1.0 - low))]
    else:
        at = ticks(low, high, 4)
    return Axis(at[0], at[-1], at, scale)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers that enclose [low, high], about `count` steps of 1, 2 or 5 times a power of ten apart."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * count >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` numbers that enclose [low, high], of one sign: 1, 2, 5 times powers of ten; or 1, 3; or 1."""
    if high < 0:
        return [-tick for tick in reversed(log_ticks(-high, -low, most))]
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        row = [float(f"{mantissa}e{power}") for power in range(first, last + 2) for mantissa in mantissas]
        below = max(index for index, tick in enumerate(row) if tick <= low * (1 + 1e-9))
        above = min(index for index, tick in enumerate(row) if tick >= high * (1 - 1e-9))
        found = row[below : max(above, below + 1) + 1]
        if len(found) <= most:
            return found
    stride = -(-(last - first) // (most - 1))
    return [10.0**power for power in range(first, last + stride, stride)]


@dataclass(frozen=True)
class Area:
    """Maps data to the coordinates of a picture, whose y grows downwards."""

    frame: Frame
    x: Axis
    y: Axis

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies in the picture."""
        f = self.frame
        across, down = self.x.share(x), 1.0 - self.y.share(y)
        return (
            round(f.left + across * (f.width - f.left - f.right), 1),
            round(f.top + down * (f.height - f.top - f.bottom), 1),
        )

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """A line through points, as the `d` of an SVG path."""
        return "M" + "L".join("{} {}".format(*self.place(x, y)) for x, y in points)


# ---------------------------------------------------------------------------------------------- charts


def line_chart(
    series: Sequence[Series],
    title: str,
    x_label: str,
    *,
    levels: Sequence[Level] = (),
    scale: Scale = "linear",
    from_zero: bool = False,
    form: Form | None = None,
    frame: Frame | None = None,
    empty: str = "nothing recorded",
) -> str:
    """Curves over an x axis that begins at 0, as an SVG element; a paragraph that says `empty` without a point.

    from_zero: whether 0 is on the y axis. form: how values of y are written (default: `short`).
    """
    frame, form = frame or Frame(), form or short
    shown = [point for one in series for point in _points(one)]
    if not shown:
        return f"<p class=empty>{empty}</p>"
    heights = [y for _, y in shown] + [level.y for level in levels] + [0.0] * from_zero
    area = Area(frame, axis_from_zero(max(x for x, _ in shown)), axis_around(heights, scale))
    parts = [rules(area, form), x_axis(area, x_label), _levels(levels, area)]
    for layer in (_band, _line, _dots):  # of all series, so that no band or line hides the points of another
        parts += [layer(one, area) for one in series]
    parts.append(_last_values(series, area, form))
    return svg(frame, f"{title} against {x_label}", parts)


def svg(frame: Frame, label: str, parts: Iterable[str]) -> str:
    """The picture of these parts. label: what it shows, for readers who cannot see it."""
    view = f'viewBox="0 0 {frame.width:g} {frame.height:g}"'
    return f'<svg {view} role="img" aria-label="{text(label)}">{"".join(parts)}</svg>'


def _points(series: Series) -> Points:
    """All points that must lie inside the chart."""
    ends = [(dot.x, dot.y + sign * dot.error) for dot in series.dots for sign in (-1, 1)]
    return [*series.curve, *(series.band or ()), *ends]


def rules(area: Area, form: Form) -> str:
    """Lines across at the ticks of the y axis, with their values."""
    parts = []
    for tick in area.y.ticks:
        x, y = area.place(area.x.low, tick)
        parts.append(f'<path class=rule d="M{x} {y}H{area.frame.width - area.frame.right:g}"/>')
        parts.append(f'<text x="{x - 7}" y="{y + 3.5}" text-anchor="end">{form(tick)}</text>')
    return "".join(parts)


def x_axis(area: Area, label: str) -> str:
    """Values at the ticks of the x axis, and what they are."""
    frame, parts = area.frame, []
    for tick in area.x.ticks:
        x, y = area.place(tick, area.y.low)
        parts.append(f'<text x="{x}" y="{y + 15:g}" text-anchor="middle">{short(tick)}</text>')
    middle = (frame.left + frame.width - frame.right) / 2
    at = f'x="{middle:g}" y="{frame.height - 5:g}"'
    return "".join(parts) + f'<text class=axis {at} text-anchor="middle">{text(label)}</text>'


def _levels(levels: Sequence[Level], area: Area) -> str:
    """The lines, with their names on them, or below those that they would cover."""
    ranked = sorted(levels, key=lambda level: -level.y)
    places = [area.place(area.x.low, level.y) for level in ranked]
    heights = spread([y - 4 for _, y in places], LABEL_GAP, area.frame.height - area.frame.bottom)
    parts = []
    for level, (x, y), height in zip(ranked, places, heights, strict=True):
        parts.append(f'<path class=level d="M{x} {y}H{area.frame.width - area.frame.right:g}"/>')
        parts.append(f'<text x="{x + 4}" y="{height:.1f}">{text(level.label)}</text>')
    return "".join(parts)


def _band(series: Series, area: Area) -> str:
    return f'<path class="band {series.colour}" d="{area.path(series.band)}Z"/>' if series.band else ""


def _line(series: Series, area: Area) -> str:
    if len(series.curve) < 2:
        return ""
    line = f'class="line {series.colour}" d="{area.path(series.curve)}"'
    return f"<path {line}><title>{text(series.title)}</title></path>" if series.title else f"<path {line}/>"


def _dots(series: Series, area: Area) -> str:
    parts = [_dot(dot, series.colour, area) for dot in series.dots]
    if series.curve and series.has_end:
        x, y = area.place(*series.curve[-1])
        parts.append(f'<circle class="end {series.colour}" cx="{x}" cy="{y}" r="3"/>')
    return "".join(parts)


def _dot(dot: Dot, colour: str, area: Area) -> str:
    classes, bar = f"{colour} pale" if dot.is_pale else colour, ""
    if dot.error:
        bar = f'<path class="bar {classes}" d="{area.path((dot.x, dot.y + s * dot.error) for s in (-1, 1))}"/>'
    x, y = area.place(dot.x, dot.y)
    return f'{bar}<circle class="dot {classes}" cx="{x}" cy="{y}" r="4"><title>{text(dot.title)}</title></circle>'


def _last_values(series: Sequence[Series], area: Area, form: Form) -> str:
    """Each curve's last value at the right edge, moved where it would cover another."""
    frame, ends = area.frame, [(area.place(*s.curve[-1])[1] + 3.5, s) for s in series if s.curve and s.has_end]
    ends.sort(key=lambda end: end[0])
    heights = spread([y for y, _ in ends], LABEL_GAP, frame.height - frame.bottom + 3.5)
    parts = []
    for y, (_, one) in zip(heights, ends, strict=True):
        words = (f"{one.tag}: " if one.tag else "") + form(one.curve[-1][1])
        at = f'x="{frame.width - frame.right + 6:g}" y="{y:.1f}"'
        parts.append(f'<text class="value {one.colour}" {at}>{text(words)}</text>')
    return "".join(parts)


def spread(heights: Sequence[float], gap: float, bottom: float) -> list[float]:
    """Rising heights, moved down to lie `gap` apart, and then up from `bottom` where they went below it."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], bottom)
        bottom = placed[index] - gap
    return placed


# ---------------------------------------------------------------------------------------------- points and words


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value that was read from a file can be drawn: a number, finite as a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def thin(items: Sequence[T], most: int = MAX_POINTS) -> list[T]:
    """At most that many of the items, evenly taken, the first and the last one among them."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(index * last / (most - 1))] for index in range(most)]


def stairs(points: Iterable[tuple[float, float]], end: float) -> Points:
    """The curve of a value that holds from each point to the next, and from the last one to `end`."""
    curve: Points = []
    for x, y in points:
        if not curve:
            curve.append((x, y))
        elif y != curve[-1][1]:
            curve += [(x, curve[-1][1]), (x, y)]
    if curve and end > curve[-1][0]:
        curve.append((end, curve[-1][1]))
    return curve


def text(value: object) -> str:
    """A value as text of a page."""
    return html.escape(str(value))


def short(value: float) -> str:
    """Three digits and a letter: 1.2k, 3M; small numbers plainly, the smallest with two digits."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.2g}"


STYLE = """
svg text{font-size:11px;fill:var(--dim);font-variant-numeric:tabular-nums}svg .axis{font-size:11.5px}
.rule{stroke:var(--rule);fill:none}.line{stroke:var(--k);stroke-width:2;fill:none;stroke-linejoin:round}
.band{fill:var(--k);opacity:.16}.end{fill:var(--k)}.dot{fill:var(--card);stroke:var(--k);stroke-width:2}
.bar{stroke:var(--k);stroke-width:1.5;fill:none}.pale{opacity:.4}
.level{stroke:var(--dim);stroke-dasharray:5 4;fill:none}
svg .value{fill:var(--k);font-weight:600}.line.thin{stroke-width:1.2;opacity:.6}.line.best{stroke-width:3}
.line.d1{stroke-dasharray:6 3}.line.d2{stroke-dasharray:2 2}
.k0{--k:var(--c0)}.k1{--k:var(--c1)}.k2{--k:var(--c2)}.k3{--k:var(--c3)}
.k4{--k:var(--c4)}.k5{--k:var(--c5)}.k6{--k:var(--c6)}.k7{--k:var(--c7)}.best{--k:var(--ink)}
"""
