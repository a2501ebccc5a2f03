"""How one hyper-parameter is changed: its range, its scale, and the arithmetic of a perturbation.

A perturbed value always lies in its range and always differs from the one before: a multiplication alone would leave
0 at 0 and 1 epoch at 1 epoch for ever, and would press values against the ends of their ranges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import numpy as np

from pronghorn.errors import ConfigError

Scale = Literal["log", "complement", "integer"]


@dataclass(frozen=True)
class Range:
    """Where a hyper-parameter may go, and how it moves.

    Both ends have one sign: a coefficient that changes its sign is another objective, not another setting.
    """

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    scale: Scale = "log"
    """log: the value is multiplied or divided. complement: 1 - value is (a discount: its horizon is 1 / (1 - γ)).
    integer: the value is, rounded, and moves by at least 1."""
    off_is: Literal["low", "high"] = "low"
    """Which end is nearest to a value of 0, which is on no log scale and means that the term is switched off: the low
    one for the weight of a loss, the high one for a clip. A 0 that is perturbed becomes this end."""
    start: tuple[float, float] | None = None
    """Range that first values are drawn from, log-uniformly; None: the whole range."""
    choices: tuple[float, ...] = ()
    """First values to choose from instead."""

    @property
    def ends(self) -> tuple[float, float]:
        """The ends as positive magnitudes on the scale, smaller first."""
        a, b = self.magnitude(self.low), self.magnitude(self.high)
        return min(a, b), max(a, b)

    @property
    def integer(self) -> bool:
        """Whether values are whole numbers."""
        return self.scale == "integer"

    def magnitude(self, value: float) -> float:
        """What is multiplied: 1 - value, or the value without its sign."""
        return 1.0 - value if self.scale == "complement" else abs(value)

    def value(self, magnitude: float) -> float:
        """The value of a magnitude, inside the range; a whole number where values are."""
        value = 1.0 - magnitude if self.scale == "complement" else math.copysign(magnitude, self.high)
        value = min(max(value, self.low), self.high)
        return round(value) if self.integer else value

    def holds(self, value: float) -> bool:
        """Whether a value lies in the range."""
        return self.low <= value <= self.high

    @staticmethod
    def parse(name: str, text: str, like: Range | None) -> Range:
        """The range that "LOW..HIGH" or "LOW..HIGH SCALE" says; the rest is as in `like`. Raises ConfigError.

        first values are drawn from the whole of it, as those of `like` need not lie inside.
        """
        ends, _, scale = text.strip().partition(" ")
        try:
            low, high = map(float, ends.split(".."))
        except ValueError:
            raise ConfigError(f"population.ranges {name}", text, "is not LOW..HIGH", "Try 1e-5..1e-2.") from None
        scale = scale.strip() or (like.scale if like else "log")
        if scale not in get_args(Scale):
            rule = f"ends in none of the scales {', '.join(get_args(Scale))}"
            raise ConfigError(f"population.ranges {name}", text, rule, "Leave the scale out for the usual one.")
        return Range(low, high, cast(Scale, scale), off_is=like.off_is if like else "low")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Range:
        """The range of `to_json`."""
        start = raw["start"]
        lists = {"start": None if start is None else (start[0], start[1]), "choices": tuple(raw["choices"])}
        return Range(**{**raw, **lists})


def check_range(name: str, r: Range) -> None:
    """Raises ConfigError if a range cannot be moved in."""
    shown, field = (r.low, r.high), f"the range of {name}"
    if not (math.isfinite(r.low) and math.isfinite(r.high) and r.low < r.high):
        raise ConfigError(field, shown, "must be two finite numbers, the smaller first", "Try (0.001, 0.1).")
    if r.scale == "complement" and r.high >= 1.0:
        raise ConfigError(field, shown, "must end below 1 on the scale of 1 - value", "Try (0.9, 0.9999).")
    if r.scale != "complement" and r.low * r.high <= 0.0:
        rule = "must lie on one side of 0, which multiplication neither reaches nor leaves"
        raise ConfigError(field, shown, rule, "Give the smallest value that is worth trying.")
    if r.integer and not (float(r.low).is_integer() and float(r.high).is_integer()):
        raise ConfigError(field, shown, "must have whole ends for a whole number", "Try (1, 8).")
    for value in (*(r.start or ()), *r.choices):
        if not r.holds(value):
            raise ConfigError(f"first values of {name}", value, f"must lie in its range {shown}", "Widen the range.")


def check_value(name: str, value: float, r: Range) -> None:
    """Raises ConfigError for a value outside its range. 0 passes: switched off, and perturbed into the range."""
    if value != 0 and not r.holds(value):
        rule = f"is mutable in the range {(r.low, r.high)}, and must begin in it"
        raise ConfigError(name, value, rule, "Widen the range, or begin inside it.")
    if r.integer and not float(value).is_integer():
        raise ConfigError(name, value, "is mutable as a whole number, and must begin as one", f"Try {round(value)}.")


def perturb(value: float, r: Range, factor: float, up: bool) -> float:
    """The value times `factor` (> 1), or divided by it, on the range's scale, inside the range, and never as before.

    up: whether the magnitude grows. At an end of the range the way out is closed, so it takes the other.
    """
    if not r.holds(value):  # 0, switched off
        return r.value(r.ends[0] if r.off_is == "low" else r.ends[1])
    moved = _moved(value, r, factor, up)
    return moved if moved != value else _moved(value, r, factor, not up)


def _moved(value: float, r: Range, factor: float, up: bool) -> float:
    # m' = m·f or m/f
    magnitude = r.magnitude(value)
    moved = magnitude * factor if up else magnitude / factor
    if r.integer and round(moved) == round(magnitude):
        moved = magnitude + (1 if up else -1)
    return r.value(moved)


def draw(r: Range, rng: np.random.Generator) -> float:
    """A first value: one of the choices, or log-uniform on the range's scale."""
    if r.choices:
        return r.choices[int(rng.integers(len(r.choices)))]
    low, high = sorted(r.magnitude(x) for x in (r.start or (r.low, r.high)))
    return r.value(math.exp(rng.uniform(math.log(low), math.log(high))))
