"""Tests of pronghorn.evaluation.report_population: what is drawn of a population that was really run, and of damage."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pronghorn.config_population import PopulationConfig
from pronghorn.evaluation import report_population
from pronghorn.evaluation.charts import stairs
from pronghorn.evaluation.report import read_run, write_report
from pronghorn.evaluation.report_population import (
    Population,
    between,
    copies,
    hyper_series,
    rating_series,
    script_levels,
    strengths,
    stretches,
    trunk,
)
from pronghorn.population.pbt import PBT, Decision, lineage
from pronghorn.population.ratings import Ratings, expected_score

BASE = {"lr": 1e-4, "gamma": 0.99, "exploration_coef": 0.003, "epochs": 1.0}
PERIOD, FRAMES_PER_STEP = 1000, 4


class World:
    """A population that learns a made-up task: skill grows the faster, the nearer the learning rate is to 1e-3.

    PBT and Ratings decide; what the trainer would write is written. Interval after interval, the members play a script,
    each other and frozen snapshots of member 0, with results drawn from their skills as Elo has it.
    """

    def __init__(self, run_dir: Path, members: int, **settings: Any) -> None:
        self.run_dir, self.rng = run_dir, np.random.default_rng(7)
        run_dir.mkdir(parents=True)
        (run_dir / "config.toml").write_text('[env]\nid = "gym:Made-up"\n[population]\nobjective = "win_rate"\n')
        rules = {"burn_in_frames": 2 * PERIOD, "period_frames": PERIOD, "mutation_rate": 0.5, "gap_relative": 0.0}
        rules |= {"mutable": ("lr", "gamma", "exploration_coef"), "keep_first": False}
        self.pbt = PBT(PopulationConfig(members=members, **(rules | settings)), BASE, seed=3)
        self.skill, self.ratings, self.pool = [1000.0] * members, Ratings(), list[str]()
        self.ratings.add("script:random")
        for member in range(members):
            self.ratings.add(f"member:{member}")
        self.steps, self.decisions = 0, list[Decision]()
        self.apply(self.pbt.start())

    def write(self, name: str, record: dict[str, Any]) -> None:
        with (self.run_dir / name).open("a") as file:
            file.write(json.dumps({"time_s": self.steps / 10, "steps": self.steps, **record}) + "\n")

    def apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self.write("population.jsonl", decision.to_json())
            if decision.donor is not None:
                self.skill[decision.member] = self.skill[decision.donor]
                self.ratings.branch(f"member:{decision.member}", f"member:{decision.donor}")
        self.decisions += decisions

    def interval(self, frames: int = PERIOD // 2) -> None:
        """All members train for so many frames; then a line is written, and then they are compared."""
        members, own_steps = len(self.skill), self.own_steps + frames // FRAMES_PER_STEP
        self.steps = members * own_steps
        for member in range(members):
            self.skill[member] += 60.0 / (1.0 + abs(math.log(self.pbt.hyper(member)["lr"] / 1e-3)))
        self.play()
        self.write_lines(own_steps)
        for member, skill in enumerate(self.skill):
            self.apply(self.pbt.report(member, own_steps * FRAMES_PER_STEP, own_steps, skill))

    @property
    def own_steps(self) -> int:
        return self.steps // len(self.skill)

    def play(self) -> None:
        strength = {"script:random": 1000.0} | {f"member:{i}": skill for i, skill in enumerate(self.skill)}
        for one, other in zip(strength, [*list(strength)[1:], "script:random"], strict=True):
            for _ in range(10):
                wins = self.rng.random() < expected_score(strength[one], strength[other])
                self.ratings.record(one, other, "win" if wins else "loss")

    def freeze(self) -> None:
        """A snapshot of member 0; the pool holds the newest two."""
        snapshot = f"snapshot:0@{self.own_steps}"
        self.ratings.freeze("member:0", snapshot)
        self.pool = [*self.pool, snapshot][-2:]

    def write_lines(self, own_steps: int) -> None:
        rated = self.ratings.fit()
        line: dict[str, Any] = {"frames": self.steps * FRAMES_PER_STEP, "updates": self.steps // 100}
        for member, skill in enumerate(self.skill):
            rating = rated[f"member:{member}"].elo
            of_policy = {"return_mean": skill / 100, "steps": own_steps, "win_rate": 0.5, "rating": rating}
            line |= {f"policy/{member}/{name}": value for name, value in of_policy.items()}
        self.write("metrics.jsonl", line | {"return_mean": sum(self.skill) / 100 / len(self.skill)})
        plain = {name: {"elo": r.elo, "stderr": r.stderr, "games": r.games} for name, r in rated.items()}
        self.write("ratings.jsonl", {"ratings": plain, "pool": self.pool})


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Four members at their own 6500 frames, five rounds, three snapshots."""
    world = World(tmp_path / "run", members=4)
    for interval in range(13):
        if interval % 5 == 2:
            world.freeze()
        world.interval()
    assert world.pbt.round == 5
    return world


def population_of(world: World) -> Population:
    return read_run(world.run_dir).population


def page(world: World) -> str:
    write_report([world.run_dir], world.run_dir / "report.html")
    return (world.run_dir / "report.html").read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def section(text: str, title: str) -> str:
    start = text.index(f"<h2>{title}</h2>")
    return text[start : text.index("</section>", start)]


# ---------------------------------------------------------------- who descends from whom


def test_lines_of_members_end_at_the_rounds_and_take_their_objectives(world: World) -> None:
    population = population_of(world)
    measured = {(d.member, float(d.member_frames)): d.objective for d in world.decisions if d.round > 0}
    parts = stretches(population)
    assert {(p.member, p.end): p.objective for p in parts if p.objective is not None} == measured
    for member in range(4):
        own = [part for part in parts if part.member == member]
        assert [part.start for part in own] == [0.0, *(part.end for part in own[:-1])]  # without a gap
        assert (own[-1].end, own[-1].objective) == (6500.0, None)  # half a period that nobody has compared yet


def test_colours_are_the_stronger_the_better_over_all_rounds(world: World) -> None:
    seen = [d.objective for d in world.decisions if d.objective is not None]
    strength = strengths(population_of(world))
    assert (strength(min(seen)), strength(max(seen))) == pytest.approx((0.15, 1.0))
    assert strength((min(seen) + max(seen)) / 2) == pytest.approx(0.575)
    drawn = re.findall(r'class="life k0" stroke-opacity="([\d.]+)"', page(world))
    assert sorted(drawn) == sorted(f"{strength(objective):.2f}" for objective in seen)


def test_every_copy_is_an_arrow_from_donor_to_member(world: World) -> None:
    assert [(c["round"], c["member"], c["donor"]) for c in copies(population_of(world))] == sorted(world.pbt.copies)
    assert len(world.pbt.copies) >= 4
    text = section(page(world), "Population")
    rows = {int(m): float(y) - 3.5 for y, m in re.findall(r'y="([\d.]+)" text-anchor="end">member (\d)<', text)}
    arrows = re.findall(
        r'<g class="arrow[ a-z]*"><path d="M([\d.]+) ([\d.]+)Q[\d.]+ [\d.]+ ([\d.]+) ([\d.]+)"/>', text
    )
    assert len(arrows) == len(world.pbt.copies)
    for (from_x, from_y, to_x, to_y), (_, member, donor) in zip(arrows, sorted(world.pbt.copies), strict=True):
        assert abs(float(from_y) - rows[donor]) <= 4.1
        assert abs(float(to_y) - rows[member]) <= 5.1
        assert from_x == to_x  # both had the same frames
    for round_, member, donor in world.pbt.copies:
        assert re.search(rf"round {round_}: member {member} \([\d.e+]+\) became a copy of member {donor} \(", text)


def test_the_descent_of_the_best_member_is_outlined(world: World) -> None:
    population = population_of(world)
    last = [d for d in world.decisions if d.round == 5]
    best = max(last, key=lambda d: d.objective or 0.0).member
    spans = lineage([d.to_json() for d in world.decisions], best)
    assert population.best == best
    assert list(population.descent) == spans
    assert len({span.member for span in spans}) > 1, "a descent within one member would show nothing"
    places = trunk(population)
    assert [place[0] for place in places] == [span.member for span in spans]
    assert [place[1] for place in places] == [span.from_frames for span in spans]
    assert [place[2] for place in places] == [*(span.from_frames for span in spans[1:]), 6500.0]
    text = page(world)
    moves = sum(a.member != b.member for a, b in itertools.pairwise(spans))
    assert text.count('class="arrow ours"') == moves
    assert text.count("<path class=trunk ") == moves + 1
    assert f"policy of member {best}, the best of the last round" in text
    assert "the higher its win_rate" in text


def test_members_that_take_turns_are_drawn_at_their_own_frames(tmp_path: Path) -> None:
    """Member 1 reaches the end of the round at 2300 frames of its own, member 0 at 2000."""
    world = World(tmp_path / "run", members=2, slots=1)
    world.apply(world.pbt.report(0, 2000, 10, 5.0))
    world.apply(world.pbt.report(1, 2300, 10, 1.0))
    world.write("metrics.jsonl", {"frames": 0, "updates": 0})
    population = population_of(world)
    assert [(p.member, p.end) for p in stretches(population)] == [(0, 2000), (1, 2300)]
    text = section(page(world), "Population")
    arrow = re.search(r'<g class="arrow"><path d="M([\d.]+) [\d.]+Q[\d.]+ [\d.]+ ([\d.]+) ', text)
    assert arrow is not None
    from_x, to_x = (float(x) - 86 for x in arrow.groups())
    assert from_x / to_x == pytest.approx(2000 / 2300, abs=1e-3)


def test_of_very_many_rounds_some_are_coloured_and_the_page_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_population, "MAX_ROUNDS", 3)
    population = population_of(world)
    ends = [part.end for part in stretches(population) if part.member == 0]
    assert ends == [3000.0, 6000.0, 6500.0]  # rounds 0, 2 and 5, and now
    members, best = hyper_series(population, "lr")[:4], hyper_series(population, "lr")[4]
    assert {x for series in members for x, _ in series.curve} <= {0, 3000, 6000, 6500}
    assert {x for x, _ in best.curve} <= {0.0, *(span.from_frames for span in population.descent), 6500.0}
    assert "Of 5 rounds, 3 evenly taken ones" in page(world)


def test_of_very_many_copies_only_those_of_the_descent_are_arrows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_population, "MAX_ARROWS", 3)
    assert len(world.pbt.copies) > 3
    text = page(world)
    descent = population_of(world).descent
    moves = sum(a.member != b.member for a, b in itertools.pairwise(descent))
    assert (text.count('class="arrow ours"'), text.count('class="arrow')) == (moves, moves)
    assert f"Of {len(world.pbt.copies)} copies only those along the descent" in text


def test_of_a_line_that_is_written_twice_the_later_one_counts(world: World) -> None:
    again = {**world.decisions[-1].to_json(), "objective": 9999.0, "time_s": 1, "steps": 1}
    with (world.run_dir / "population.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    population = population_of(world)
    assert population.best == again["member"]
    assert len([part for part in stretches(population) if part.objective == 9999.0]) == 1


def test_before_the_first_round_members_are_lines_without_an_objective(tmp_path: Path) -> None:
    world = World(tmp_path / "run", members=3)
    world.interval()
    population = population_of(world)
    assert [(p.member, p.end, p.objective) for p in stretches(population)] == [(i, 500.0, None) for i in range(3)]
    assert (population.best, population.descent) == (None, ())
    assert "No round has ended yet" in page(world)


# ---------------------------------------------------------------- hyper-parameters


def test_a_panel_shows_what_each_member_had_and_the_schedule_of_the_best(world: World) -> None:
    population = population_of(world)
    *members, best = hyper_series(population, "lr")
    assert len(members) == 4
    for member, series in enumerate(members):
        at = dict(series.curve)  # the last value at each x holds from there
        held = BASE["lr"]
        for decision in sorted((d for d in world.decisions if d.member == member), key=lambda d: d.round):
            if decision.hyper["lr"] != held:
                assert at[decision.member_frames] == decision.hyper["lr"]
            held = decision.hyper["lr"]
        assert series.curve[-1] == (6500.0, world.pbt.hyper(member)["lr"])
    assert best.colour == "best"
    values = [(span.from_frames, span.hyper["lr"]) for span in population.descent]
    assert len({y for _, y in values}) > 1
    assert best.curve == stairs(values, end=6500.0)


def test_only_hyper_parameters_that_changed_have_a_panel(world: World) -> None:
    text = section(page(world), "Population")
    panels = re.findall(r"<figcaption>(\w+)</figcaption>", text)
    assert panels == ["exploration_coef", "gamma", "lr"]  # epochs is not mutable
    assert text.count('class="line best"') == 3
    assert text.count(" thin") == 3 * 4


@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [
        ("lr", [1e-4, 1e-3], "log"),
        ("lr", [1e-4, 2e-4], "linear"),  # hardly moved
        ("lr", [0.0, 1e-3], "linear"),  # switched off: on no logarithmic scale
        ("reward.death", [-100.0, -5.0], "log"),
        ("reward.death", [-1.0, 5.0], "linear"),
        ("gamma", [0.9, 0.99], "complement"),
        ("gamma", [0.99, 0.992], "linear"),
        ("gamma", [0.9, 1.0], "linear"),
        ("epochs", [1.0, 8.0], "linear"),
    ],
)
def test_a_value_is_drawn_on_the_scale_that_it_moves_on(name: str, values: list[float], scale: str) -> None:
    assert report_population._scale(name, values) == scale


# ---------------------------------------------------------------- ratings


def test_ratings_of_learning_members_have_a_band_and_snapshots_stand_where_they_were_frozen(world: World) -> None:
    population = population_of(world)
    series, newest = rating_series(population), population.ratings[-1]["ratings"]
    assert [one.title for one in series] == [f"member {i}" for i in range(4)]
    for member, one in enumerate(series):
        rated = [(line["steps"], line["ratings"][f"member:{member}"]) for line in population.ratings]
        assert one.curve == [(steps, r["elo"]) for steps, r in rated]
        assert one.band == [(x, r["elo"] + r["stderr"]) for x, r in rated] + [
            (x, r["elo"] - r["stderr"]) for x, r in reversed(rated)
        ]
        assert one.tag == str(member)
    assert [one.dots for one in series[1:]] == [[], [], []]
    frozen = {"snapshot:0@250": 1000, "snapshot:0@875": 3500, "snapshot:0@1500": 6000}  # own steps -> of the run
    assert len(series[0].dots) == len(frozen)
    for dot, (name, steps) in zip(series[0].dots, frozen.items(), strict=True):
        assert (dot.x, dot.y, dot.error) == (steps, newest[name]["elo"], newest[name]["stderr"])
        assert dot.is_pale == (name not in world.pool)
        assert name in dot.title
    assert [dot.is_pale for dot in series[0].dots] == [True, False, False]


def test_scripts_are_level_lines_at_their_newest_rating(world: World) -> None:
    elo = population_of(world).ratings[-1]["ratings"]["script:random"]["elo"]
    assert [(level.y, level.label) for level in script_levels(population_of(world))] == [(elo, f"random {elo:.0f}")]
    text = section(page(world), "Ratings")
    assert text.count("<path class=level ") == 1
    assert f">random {elo:.0f}</text>" in text
    assert text.count('class="band ') == 4
    assert text.count('class="dot ') == 3


def test_policies_that_were_overwritten_are_no_players_any_more(world: World) -> None:
    assert any("#" in player for player in population_of(world).ratings[-1]["ratings"])
    assert "#" not in section(page(world), "Ratings")


def test_a_snapshot_stands_at_its_first_rating_if_no_line_tells_the_steps_of_its_member(tmp_path: Path) -> None:
    rating = {"elo": 1500.0, "stderr": 50.0, "games": 3}
    (tmp_path / "metrics.jsonl").write_text('{"time_s": 1, "steps": 500, "frames": 500, "updates": 1}\n')
    lines = [{"steps": steps, "ratings": {"member:0": rating}, "pool": []} for steps in (100, 200, 300)]
    for line in lines[1:]:
        line["ratings"] = {"member:0": rating, "snapshot:0@90": rating}
    (tmp_path / "ratings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (one,) = rating_series(read_run(tmp_path).population)
    assert [dot.x for dot in one.dots] == [200.0]
    assert one.tag == ""  # the only one needs no name


def test_steps_of_a_member_become_steps_of_the_run_on_a_line_between_what_was_written() -> None:
    known = [(0.0, 0.0), (100.0, 1000.0), (100.0, 1200.0), (200.0, 1400.0)]
    assert [between(known, x) for x in (0.0, 50.0, 100.0, 150.0, 300.0)] == [0.0, 500.0, 1000.0, 1300.0, 1400.0]


def test_of_very_many_lines_of_ratings_some_are_drawn_and_the_last_is_among_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_population, "MAX_POINTS", 4)
    assert [line["steps"] for line in population_of(world).ratings] == [500, 2500, 4500, 6500]


# ---------------------------------------------------------------- each policy's curves


def test_each_of_several_policies_has_its_curve_over_its_own_steps(world: World) -> None:
    population = population_of(world)
    assert population.policies == [0, 1, 2, 3]
    assert population.points("policy/2/steps", "policy/2/return_mean")[-1][0] == 6500 / FRAMES_PER_STEP
    text = section(page(world), "Policies")
    for title in ("Mean return of each policy", "Win rate of each policy"):
        figure = text[text.index(title) : text.index("</figure>", text.index(title))]
        assert figure.count('class="line k') == 4
        assert [f">{i}: " in figure for i in range(5)] == [True] * 4 + [False]


# ---------------------------------------------------------------- what is missing or damaged


def test_a_run_without_a_population_shows_nothing_of_one(world: World) -> None:
    for name in ("population.jsonl", "ratings.jsonl"):
        (world.run_dir / name).unlink()
    lines = [json.loads(line) for line in (world.run_dir / "metrics.jsonl").read_text().splitlines()]
    alone = [{k: v for k, v in line.items() if not k.startswith("policy/") or k[7] == "0"} for line in lines]
    (world.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in alone))
    text = page(world)
    for title in ("Policies", "Population", "Ratings", "Notes"):
        assert f"<h2>{title}</h2>" not in text


def test_the_page_of_a_population_is_well_formed_and_loads_nothing(world: World) -> None:
    text = page(world)
    Tags(text)
    assert "nan" not in text.lower()
    assert not re.search(r"(src|href)=|url\(", text)
    assert "<h2>Notes</h2>" not in text  # nothing was wrong


def test_several_runs_have_their_names_before_their_figures(world: World, tmp_path: Path) -> None:
    other = World(tmp_path / "<other>", members=2)
    other.interval()
    write_report([world.run_dir, other.run_dir], tmp_path / "both.html")
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    Tags(text)
    assert "<figcaption>run: Members, and who" in text
    assert "<figcaption>&lt;other&gt;: Members, and who" in text
    assert "<figcaption>&lt;other&gt;: Ratings" in text


def test_a_line_that_a_crash_tore_and_the_rest_of_its_round_are_left_out(world: World) -> None:
    lines = (world.run_dir / "population.jsonl").read_text().splitlines()
    (world.run_dir / "population.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    with (world.run_dir / "ratings.jsonl").open("a") as file:
        file.write('{"steps": 7000, "rat')
    whole = [d.to_json() for d in world.decisions if d.round < 5]
    population = population_of(world)
    assert {round_ for round_, _ in population.decisions} == {0, 1, 2, 3, 4}
    best = population.best
    assert best is not None
    assert list(population.descent) == lineage(whole, best)
    assert len(population.ratings) == 13
    assert "population.jsonl: round 5 is left out" in page(world)


def test_a_missing_line_costs_the_descent_and_no_more(world: World) -> None:
    population = population_of(world)
    holder = next(span.member for span in reversed(population.descent) if span.round <= 2)
    lines = (world.run_dir / "population.jsonl").read_text().splitlines(keepends=True)
    kept = [x for x in lines if not {"round": 2, "member": holder}.items() <= json.loads(x).items()]
    assert len(kept) == len(lines) - 1
    (world.run_dir / "population.jsonl").write_text("".join(kept))
    damaged, text = population_of(world), page(world)
    assert damaged.descent == ()
    assert damaged.best == population.best
    assert f"no line of member {holder} in round 2" in section(text, "Notes")
    assert '<g class="arrow' in text
    assert 'class="line best"' not in text


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record.pop(name)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *(("population.jsonl", without(name)) for name in ("round", "member", "member_frames", "hyper", "objective")),
        ("population.jsonl", lambda record: record.update(donor=99)),
        ("population.jsonl", lambda record: record.update(member=-1)),
        ("population.jsonl", lambda record: record.update(member_frames=10**400)),
        ("population.jsonl", lambda record: record.update(hyper={"lr": "fast"})),
        ("population.jsonl", lambda record: record.update(hyper={"lr": float("nan")})),
        ("population.jsonl", lambda record: record.update(objective=float("inf"))),
        ("population.jsonl", lambda record: record.update(changed=None)),
        ("ratings.jsonl", without("ratings")),
        ("ratings.jsonl", without("pool")),
        ("ratings.jsonl", lambda record: record.update(ratings=[])),
        ("ratings.jsonl", lambda record: record["ratings"]["member:0"].pop("elo")),
        ("ratings.jsonl", lambda record: record["ratings"].update({"member:1": 1500.0})),
    ],
)
def test_a_line_of_another_shape_is_noted_and_the_rest_is_drawn(
    world: World, file: str, damage: Callable[[dict[str, Any]], Any]
) -> None:
    lines = (world.run_dir / file).read_text().splitlines()
    record = json.loads(lines[5])
    damage(record)
    (world.run_dir / file).write_text("\n".join([*lines[:5], json.dumps(record), *lines[6:]]) + "\n")
    text = page(world)
    Tags(text)
    assert f"{file}: 1 line is" in section(text, "Notes")
    assert '<g class="arrow' in section(text, "Population")
    assert text.count('class="band ') == 4


@pytest.mark.parametrize("file", ["population.jsonl", "ratings.jsonl"])
def test_a_file_of_anything_breaks_no_report(world: World, file: str) -> None:
    (world.run_dir / file).write_bytes(b"\xff\xfe\x00 [1, 2]\nnull\n{}\n\xc3")
    text = page(world)
    Tags(text)
    assert f"{file}: 1 line is not what this page expects" in section(text, "Notes")
    assert "<h2>Policies</h2>" in text
