"""What a report shows of several policies: their curves, who was copied from whom, the schedules found, and ratings.

It reads population.jsonl, ratings.jsonl and the policy/<i>/ numbers of metrics.jsonl, and decides nothing: descent is
`pronghorn.population.pbt:lineage`'s. A part without its file or numbers is not shown. Lines that cannot be used are
left out, and a note on the page says how many.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from pronghorn.errors import PopulationError
from pronghorn.evaluation.charts import (
    LABEL_GAP,
    MAX_POINTS,
    Area,
    Axis,
    Dot,
    Frame,
    Level,
    Points,
    Scale,
    Series,
    axis_from_zero,
    colour,
    is_number,
    line_chart,
    short,
    stairs,
    svg,
    text,
    thin,
    x_axis,
)
from pronghorn.population.pbt import RANGES, Span, lineage
from pronghorn.training.metrics import POPULATION_FILE, RATINGS_FILE, read_lines

MAX_ARROWS = 300
MAX_ROUNDS = 300  # whose values are drawn of every member: more only make the page heavy
SMALL, WIDE = Frame(width=330, height=210), Frame(width=970, height=320, right=84)
POLICY = re.compile(r"policy/(\d+)/return_mean")
MEMBER, SNAPSHOT, SCRIPT = (re.compile(p) for p in (r"member:(\d+)", r"snapshot:(\d+)@(\d+)", r"script:(.+)"))
RATING = ("elo", "stderr", "games")

Record = Mapping[str, Any]


# ---------------------------------------------------------------------------------------------- what a run wrote


@dataclass(frozen=True)
class Population:
    """What a run wrote of its policies."""

    lines: Sequence[Record]
    """Of metrics.jsonl."""
    decisions: dict[tuple[int, int], Record] = field(default_factory=dict)
    """Lines of population.jsonl by (round, member)."""
    descent: Sequence[Span] = ()
    """Of the policy that the best member holds, oldest first; empty if no round has ended or lines are missing."""
    best: int | None = None
    """The member with the highest objective in the last round."""
    objective: str = "objective"
    """What members are compared by."""
    ratings: Sequence[Record] = ()
    """Lines of ratings.jsonl, at most MAX_POINTS."""

    @cached_property
    def of_member(self) -> dict[int, list[Record]]:
        """Each member's decisions, oldest first; the members in order."""
        members = sorted({member for _, member in self.decisions})
        ordered = [self.decisions[at] for at in sorted(self.decisions)]
        return {member: [record for record in ordered if record["member"] == member] for member in members}

    @cached_property
    def shown_of_member(self) -> dict[int, list[Record]]:
        """The same of evenly taken rounds, where there are very many."""
        rounds = set(thin(sorted({round_ for round_, _ in self.decisions}), MAX_ROUNDS))
        return {member: [r for r in records if r["round"] in rounds] for member, records in self.of_member.items()}

    @cached_property
    def descended(self) -> frozenset[tuple[int, int]]:
        """(round, member) of the decisions that the descent goes through."""
        return frozenset((span.round, span.member) for span in self.descent)

    @cached_property
    def policies(self) -> list[int]:
        """All policies that have a return of their own, in order."""
        names = {name for line in self.lines for name in line}
        return sorted(int(found[1]) for name in names if (found := POLICY.fullmatch(name)))

    def points(self, x: str, y: str) -> Points:
        """(x, y) of every line of the metrics that has both."""
        return [(line[x], line[y]) for line in self.lines if is_number(line.get(x)) and is_number(line.get(y))]

    def frames_now(self, member: int) -> float:
        """How far a member has come: its newest steps as frames, or its last decision's where there are none."""
        decided = max(record["member_frames"] for record in self.of_member[member])
        for line in reversed(self.lines):
            steps = line.get(f"policy/{member}/steps")
            if all(map(is_number, (steps, line.get("steps"), line.get("frames")))) and line["steps"]:
                return float(max(decided, steps * line["frames"] / line["steps"]))
        return float(decided)


def read_population(run_dir: Path, lines: Sequence[Record], config: Record, notes: list[str]) -> Population:
    """What the files of a run say of its policies. lines: of metrics.jsonl. What cannot be used becomes a note."""
    decisions = _read_decisions(run_dir / POPULATION_FILE, notes)
    population = Population(
        lines,
        decisions,
        objective=str(config.get("population.objective", "objective")),
        ratings=_usable(run_dir / RATINGS_FILE, _is_rating, notes, MAX_POINTS),
    )
    best = _best(decisions)
    if best is None:
        return population
    try:
        return replace(population, best=best, descent=lineage(decisions.values(), best))
    except PopulationError as error:
        notes.append(f"the descent of member {best}, the best, is not shown: {error}")
        return replace(population, best=best)


def _usable(path: Path, is_usable: Callable[[Record], bool], notes: list[str], most: int | None = None) -> list[Record]:
    """The lines that can be used, evenly taken if there are more than `most`."""
    lines: list[Record] = [*read_lines(path)]
    lines = thin(lines, most or len(lines))
    usable = [line for line in lines if is_usable(line)]
    if len(usable) < len(lines):
        notes.append(f"{path.name}: {_lines(len(lines) - len(usable))} not what this page expects, and left out")
    return usable


def _lines(count: int) -> str:
    return f"{count} line is" if count == 1 else f"{count} lines are"


def _read_decisions(path: Path, notes: list[str]) -> dict[tuple[int, int], Record]:
    records = _usable(path, _is_decision, notes)
    members = {record["member"] for record in records}
    known = [record for record in records if record["donor"] is None or record["donor"] in members]
    if len(known) < len(records):
        notes.append(f"{path.name}: {_lines(len(records) - len(known))} of a donor that has none, and left out")
    at = {_key(record): record for record in known}  # the later line, if one is written twice
    last = max((round_ for round_, _ in at), default=0)
    if last > 0 and {member for round_, member in at if round_ == last} != members:
        notes.append(f"{path.name}: round {last} is left out: it lacks the lines of some members, as after a crash")
        at = {key: record for key, record in at.items() if key[0] != last}
    return at


def _is_decision(record: Record) -> bool:
    counts = [record.get(name) for name in ("round", "member", "member_frames", "frames")]
    donor, hyper = record.get("donor"), record.get("hyper")
    counts += [] if donor is None else [donor]
    return (
        all(isinstance(count, int) and is_number(count) and count >= 0 for count in counts)
        and isinstance(hyper, dict)
        and all(map(is_number, hyper.values()))
        and isinstance(record.get("changed"), dict)
        and {"donor", "objective"} <= record.keys()
        and (record["objective"] is None or is_number(record["objective"]))
    )


def _is_rating(record: Record) -> bool:
    ratings = record.get("ratings")
    return (
        is_number(record.get("steps"))
        and isinstance(record.get("pool"), list)
        and isinstance(ratings, dict)
        and all(isinstance(r, dict) and all(is_number(r.get(n)) for n in RATING) for r in ratings.values())
    )


def _best(decisions: Mapping[tuple[int, int], Record]) -> int | None:
    """The member with the highest objective of the last round that has ended, the first of equals."""
    last = max((round_ for round_, _ in decisions), default=0)
    ranked = [(r["objective"], -m) for (k, m), r in decisions.items() if k == last and r["objective"] is not None]
    return -max(ranked)[1] if last > 0 and ranked else None


# ---------------------------------------------------------------------------------------------- each policy's curves


def policy_charts(population: Population, of_run: str) -> str:
    """Figures of each policy's returns and win rates over its own steps; '' for fewer than two policies.

    of_run: HTML that captions begin with, to tell runs apart.
    """
    policies = population.policies
    if len(policies) < 2:
        return ""
    figures = [
        f"<figure><figcaption>{of_run}{title}</figcaption>{drawn}</figure>"
        for title, name in (("Mean return of each policy", "return_mean"), ("Win rate of each policy", "win_rate"))
        if (drawn := _policy_chart(population, policies, title, name))
    ]
    return f"<div class='grid pair'>{''.join(figures)}</div>" if figures else ""


def _policy_chart(population: Population, policies: Sequence[int], title: str, name: str) -> str:
    curves = {i: thin(population.points(f"policy/{i}/steps", f"policy/{i}/{name}")) for i in policies}
    series = [Series(colour(i), curve, tag=str(i), title=f"policy {i}") for i, curve in curves.items() if curve]
    frame = Frame(height=_height(len(series), 250), right=72)
    return line_chart(series, title, "steps of each policy", frame=frame) if series else ""


def _height(num_labels: int, least: float) -> float:
    """Of a picture whose labels at the right edge are to have room for a line each."""
    return max(least, LABEL_GAP * num_labels + Frame.top + Frame.bottom)


# ---------------------------------------------------------------------------------------------- who descends from whom


@dataclass(frozen=True)
class Stretch:
    """A part of a member's line, between the ends of two rounds; start and end in frames of the member."""

    member: int
    start: float
    end: float
    objective: float | None
    """At its end; None: no round has ended there yet."""
    title: str = ""


def stretches(population: Population) -> list[Stretch]:
    """The lines of all members, in parts. Of very many rounds, evenly taken ones bound them."""
    parts: list[Stretch] = []
    for member, records in population.shown_of_member.items():
        at = 0.0
        for record in records:
            if record["member_frames"] > at:
                parts.append(Stretch(member, at, record["member_frames"], record["objective"], _about(record)))
                at = record["member_frames"]
        if population.frames_now(member) > at:
            parts.append(Stretch(member, at, population.frames_now(member), None))
    return parts


def copies(population: Population) -> list[Record]:
    """The decisions by which a member was overwritten, oldest first."""
    return [record for _, record in sorted(population.decisions.items()) if record["donor"] is not None]


def shown_copies(population: Population) -> list[Record]:
    """All copies, if one can tell so many apart; else those that the best member's policy came from."""
    every = copies(population)
    return every if len(every) <= MAX_ARROWS else [r for r in every if _key(r) in population.descended]


def _key(record: Record) -> tuple[int, int]:
    return record["round"], record["member"]


def _about(record: Record) -> str:
    objective = "no objective" if record["objective"] is None else f"objective {record['objective']:.4g}"
    return f"member {record['member']}, round {record['round']}: {objective}"


def population_charts(population: Population, of_run: str) -> str:
    """Figures of the descent of members and of their hyper-parameters; '' for a run without a population."""
    if not population.decisions:
        return ""
    return _lineage_figure(population, of_run) + _hyper_figures(population, of_run)


def _lineage_figure(population: Population, of_run: str) -> str:
    caption = f"<figcaption>{of_run}Members, and who was overwritten by whom</figcaption>"
    return f"<figure class=wide>{caption}{_lineage(population)}{_how_to_read(population)}</figure>"


def _how_to_read(population: Population) -> str:
    seen = [r["objective"] for r in population.decisions.values() if r["objective"] is not None]
    if not seen:
        return "<p class=about>No round has ended yet: nobody has been compared.</p>"
    name = text(population.objective)
    words = [
        f"A line is a member; the stronger its colour, the higher its {name} at the end of the round, from "
        f"{short(min(seen))} to {short(max(seen))}; grey: not compared yet. At the right: in the last round. "
        "An arrow leads from the member that was copied to the one that it overwrote."
    ]
    num_rounds = max(round_ for round_, _ in population.decisions)
    if num_rounds > MAX_ROUNDS:
        words.append(f"Of {num_rounds:,} rounds, {MAX_ROUNDS} evenly taken ones give colours, and thin curves below.")
    if population.descent:
        words.append(f"Outlined: how the policy of member {population.best}, the best of the last round, came to be.")
    if (num_copies := len(copies(population))) > MAX_ARROWS:
        words.append(f"Of {num_copies:,} copies only those along the descent of the best member have arrows.")
    return f"<p class=about>{' '.join(words)}</p>"


def _lineage(population: Population) -> str:
    parts, row = stretches(population), {member: index for index, member in enumerate(population.of_member)}
    frame = Frame(WIDE.width, 26.0 * len(row) + 56, left=86, right=WIDE.right)
    rows = Axis(len(row) - 0.5, -0.5, ())  # the first member at the top
    area = Area(frame, axis_from_zero(max((part.end for part in parts), default=0.0)), rows)
    drawn = [_row_names(population, row, area), _trunk(population, row, area)]
    strength = strengths(population)
    drawn += [_stretch(part, row[part.member], strength, area) for part in parts]
    ours = population.descended
    drawn += [_arrow(record, row, _key(record) in ours, area) for record in shown_copies(population)]
    drawn.append(x_axis(area, "frames of each member"))
    return svg(frame, "Members over their frames, with arrows from each that was copied to the one overwritten", drawn)


def _row_names(population: Population, row: Mapping[int, int], area: Area) -> str:
    """Each member's name at the left and its last objective at the right."""
    parts = []
    for member, index in row.items():
        objective = population.of_member[member][-1]["objective"]
        y, mark = area.place(0.0, index)[1] + 3.5, " class=strong" if member == population.best else ""
        parts.append(f'<text{mark} x="{area.frame.left - 9:g}" y="{y:g}" text-anchor="end">member {member}</text>')
        if objective is not None:
            x = area.frame.width - area.frame.right + 9
            parts.append(f'<text{mark} x="{x:g}" y="{y:g}">{short(objective)}</text>')
    return "".join(parts)


def strengths(population: Population) -> Callable[[float], float]:
    """How strong the colour of an objective is: 0.15 for the lowest of all, 1 for the highest."""
    seen = [r["objective"] for r in population.decisions.values() if r["objective"] is not None]
    low, high = (min(seen), max(seen)) if seen else (0.0, 0.0)
    return lambda value: 1.0 if high == low else 0.15 + 0.85 * (value - low) / (high - low)


def _stretch(part: Stretch, row: int, strength: Callable[[float], float], area: Area) -> str:
    line = area.path([(part.start, row), (part.end, row)])
    if part.objective is None:
        return f'<path class=wait d="{line}"/>'
    opacity = f'stroke-opacity="{strength(part.objective):.2f}"'
    return f'<path class="life k0" {opacity} d="{line}"><title>{text(part.title)}</title></path>'


def trunk(population: Population) -> list[tuple[int, float, float]]:
    """(member, from, to) of the places that the best member's policy was in, in frames of that member."""
    spans = population.descent
    begun = [population.decisions[span.round, span.member] for span in spans]
    starts = [float(record["member_frames"]) for record in begun]
    ends = [start if r["donor"] is None else _donor_frames(r) for r, start in zip(begun[1:], starts[1:], strict=True)]
    ends += [population.frames_now(span.member) for span in spans[-1:]]
    return [(span.member, start, end) for span, start, end in zip(spans, starts, ends, strict=True)]


def _trunk(population: Population, row: Mapping[int, int], area: Area) -> str:
    """An outline under the lines: wide in ink, and less wide in the card's colour, so that pale lines stay pale."""
    stays = [(row[member], list(places)) for member, places in groupby(trunk(population), key=lambda place: place[0])]
    paths = [area.path([(places[0][1], at), (places[-1][2], at)]) for at, places in stays]
    return "".join(f'<path class={layer} d="{path}"/>' for layer in ("trunk", "hollow") for path in paths)


def _arrow(record: Record, row: Mapping[int, int], is_ours: bool, area: Area) -> str:
    """A bow from the donor to the member, wider the farther they are apart, so that those of one round differ."""
    from_x, from_y = area.place(_donor_frames(record), row[record["donor"]])
    to_x, to_y = area.place(record["member_frames"], row[record["member"]])
    sign = 1.0 if to_y > from_y else -1.0
    from_y, to_y = from_y + 4 * sign, to_y - 5 * sign
    bow_x = max(from_x, to_x) + min(26.0, 6.0 + 0.12 * abs(to_y - from_y))
    line = f"M{from_x} {from_y:.1f}Q{bow_x:.1f} {(from_y + to_y) / 2:.1f} {to_x} {to_y:.1f}"
    mark, about = "arrow ours" if is_ours else "arrow", f"<title>{text(_about_copy(record))}</title>"
    return f'<g class="{mark}"><path d="{line}"/>{_head(bow_x, (from_y + to_y) / 2, to_x, to_y)}{about}</g>'


def _head(from_x: float, from_y: float, x: float, y: float) -> str:
    """A triangle with its tip at (x, y), pointing away from the first point."""
    length = math.hypot(x - from_x, y - from_y) or 1.0
    ahead_x, ahead_y = (x - from_x) / length, (y - from_y) / length
    back_x, back_y = x - 6 * ahead_x, y - 6 * ahead_y
    sides = [(back_x + side * ahead_y, back_y - side * ahead_x) for side in (-3, 3)]
    return f'<path class=head d="M{x} {y:.1f}{"".join(f"L{a:.1f} {b:.1f}" for a, b in sides)}Z"/>'


def _donor_frames(record: Record) -> float:
    frames = record.get("donor_frames")
    return float(frames if is_number(frames) else record["frames"])


def _about_copy(record: Record) -> str:
    own, other = (f" ({v:.4g})" if is_number(v := record.get(n)) else "" for n in ("objective", "donor_objective"))
    return f"round {record['round']}: member {record['member']}{own} became a copy of member {record['donor']}{other}"


# ---------------------------------------------------------------------------------------------- hyper-parameters


def _hyper_figures(population: Population, of_run: str) -> str:
    names = changed_names(population)
    if not names:
        return f"<p class=about>{of_run}No hyper-parameter has changed.</p>"
    figures = (f"<figure><figcaption>{text(n)}</figcaption>{_hyper_chart(population, n)}</figure>" for n in names)
    words = f"{of_run}Hyper-parameters of each member over its frames; those that no member changed are left out."
    if population.descent:
        words += (
            f" Bold: along the descent of member {population.best}, the best of the last round; that is the schedule "
            "which population-based training found for its policy."
        )
    return f"<p class=about>{words}</p><div class='grid small'>{''.join(figures)}</div>"


def changed_names(population: Population) -> list[str]:
    """Hyper-parameters that some member changed, in order."""
    return sorted({name for r in population.decisions.values() for name in r["changed"] if name in r["hyper"]})


def hyper_series(population: Population, name: str) -> list[Series]:
    """The values of one hyper-parameter: of each member, and last the schedule of the best member's policy."""
    series = []
    for member, records in population.shown_of_member.items():
        values = [(r["member_frames"], r["hyper"][name]) for r in records if name in r["hyper"]]
        curve = stairs(values, population.frames_now(member))
        series.append(Series(f"{colour(member)} thin", curve, title=f"member {member}", has_end=False))
    if population.descent:
        path = zip(trunk(population), population.descent, strict=True)
        values = [(start, span.hyper[name]) for (_, start, _), span in path if name in span.hyper]
        curve = stairs(values, trunk(population)[-1][2])
        series.append(Series("best", curve, title=f"descent of member {population.best}"))
    return series


def _hyper_chart(population: Population, name: str) -> str:
    series = hyper_series(population, name)
    values = [y for one in series for _, y in one.curve]
    form = "{:.5g}".format if _moves_on(name) == "complement" else short  # 0.9995 is not 1
    label = f"{name} of each member"
    return line_chart(series, label, "frames of each member", scale=_scale(name, values), form=form, frame=SMALL)


def _scale(name: str, values: Sequence[float]) -> Scale:
    """The scale that the value moves on, if it moved far; 0, switched off, has no place on a logarithmic one."""
    if _moves_on(name) == "integer" or any(value == 0 for value in values):
        return "linear"
    if _moves_on(name) == "complement":
        return "complement" if max(values) < 1 and 1 - min(values) > 3 * (1 - max(values)) else "linear"
    sizes = [abs(value) for value in values]
    return "log" if min(values) * max(values) > 0 and max(sizes) > 3 * min(sizes) else "linear"


def _moves_on(name: str) -> str:
    return RANGES[name].scale if name in RANGES else "log"


# ---------------------------------------------------------------------------------------------- ratings


def rating_charts(population: Population, of_run: str) -> str:
    """A figure of who is how strong; '' for a run that rates nobody."""
    series, levels = rating_series(population), script_levels(population)
    if not any(s.curve or s.dots for s in series) and not levels:
        return ""
    frame = replace(WIDE, height=_height(len(series), WIDE.height))
    drawn = line_chart(series, "Ratings", "steps of the run", levels=levels, form="{:.0f}".format, frame=frame)
    words = (
        "Curves: policies that learn, with their standard errors, as they were rated at the time. Points: frozen "
        "snapshots where they were taken, with their newest rating and its standard error; pale ones have left the "
        "pool. Dashed lines: scripts. 1500 is the mean of the players that it began with."
    )
    caption = f"<figcaption>{of_run}Ratings, Elo</figcaption>"
    return f"<figure class=wide>{caption}{drawn}<p class=about>{words}</p></figure>"


def rating_series(population: Population) -> list[Series]:
    """Each member's rating over the steps of the run, with the snapshots that were taken of it."""
    newest = _newest(population)
    members = {int(found[1]) for player in newest for kind in (MEMBER, SNAPSHOT) if (found := kind.fullmatch(player))}
    series = []
    for member in sorted(members):
        rated = [(line["steps"], line["ratings"].get(f"member:{member}")) for line in population.ratings]
        points = [(steps, rating) for steps, rating in rated if rating is not None]
        curve = [(steps, rating["elo"]) for steps, rating in points]
        upper = [(steps, rating["elo"] + rating["stderr"]) for steps, rating in points]
        lower = [(steps, rating["elo"] - rating["stderr"]) for steps, rating in points]
        tag, dots = str(member) if len(members) > 1 else "", _snapshots(population, member, newest)
        series.append(Series(colour(member), curve, upper + lower[::-1], dots, tag, f"member {member}"))
    return series


def script_levels(population: Population) -> list[Level]:
    """The newest rating of each script."""
    rated = [(SCRIPT.fullmatch(player), rating["elo"]) for player, rating in _newest(population).items()]
    return [Level(elo, f"{found[1]} {elo:.0f}") for found, elo in rated if found]


def _newest(population: Population) -> dict[str, Record]:
    """Every player's newest rating. (A policy that was overwritten is no player any more: "member:0#1".)"""
    return {player: rating for line in population.ratings for player, rating in line["ratings"].items()}


def _snapshots(population: Population, member: int, newest: Mapping[str, Record]) -> list[Dot]:
    pool = population.ratings[-1]["pool"]
    when = _when(population, member)
    dots = []
    for player, r in newest.items():
        found = SNAPSHOT.fullmatch(player)
        if found and int(found[1]) == member:
            about = f"{player}: {r['elo']:.0f} ± {r['stderr']:.0f}, {r['games']:.0f} games"
            dots.append(Dot(when(player, float(found[2])), r["elo"], about, r["stderr"], player not in pool))
    return dots


def _when(population: Population, member: int) -> Callable[[str, float], float]:
    """Steps of the run at which a snapshot was frozen, from its name, which has the steps of its member.

    Where no line tells how the two go together, it is the first line that rates the snapshot.
    """
    known = [(0.0, 0.0), *population.points(f"policy/{member}/steps", "steps")]

    def when(player: str, steps: float) -> float:
        if len(known) > 1:
            return between(known, steps)
        return float(next(line["steps"] for line in population.ratings if player in line["ratings"]))

    return when


def between(points: Iterable[tuple[float, float]], x: float) -> float:
    """y at x on the line through points of rising x; the last y beyond them."""
    before = (0.0, 0.0)
    for point in points:
        if point[0] >= x:
            run = point[0] - before[0]
            return point[1] if run <= 0 else before[1] + (point[1] - before[1]) * (x - before[0]) / run
        before = point
    return before[1]


STYLE = """
.wide{overflow-x:auto}.wide svg{min-width:640px}
.pair{grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr))}
.small{grid-template-columns:repeat(auto-fill,minmax(min(100%,290px),1fr));margin-top:10px}
.about{color:var(--dim);font-size:13.5px}figure+.about{margin-top:20px}
.life{stroke:var(--k);stroke-width:5;fill:none}.wait{stroke:var(--rule);stroke-width:5;fill:none}
.trunk{stroke:var(--ink);stroke-width:10;stroke-linecap:square;fill:none}
.hollow{stroke:var(--card);stroke-width:6;stroke-linecap:square;fill:none}
.arrow path{stroke:var(--c1);stroke-width:1.3;fill:none}.arrow .head{fill:var(--c1);stroke:none}
.ours path{stroke:var(--ink);stroke-width:2}.ours .head{fill:var(--ink)}svg .strong{font-weight:700;fill:var(--ink)}
"""
