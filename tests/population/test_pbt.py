"""Population-based training: both presets by hand, rounds at equal frames, mutations, descent, exact state, rules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pronghorn.config import Config, Hyperparameters, LearnerConfig
from pronghorn.config_population import PopulationConfig
from pronghorn.defaults import apply_preset, presets
from pronghorn.errors import ConfigError, PopulationError
from pronghorn.population.mutation import check_value
from pronghorn.population.pbt import (
    ALL_PARTS,
    PBT,
    RANGES,
    Decision,
    Span,
    check_layout,
    lineage,
    resolve_ranges,
    select,
)

BASE = {"lr": 1e-4, "exploration_coef": 0.003, "value_coef": 0.5, "max_grad_norm": 4.0, "ppo_clip": 0.1,
        "value_clip": 1.0, "gamma": 0.99, "optimizer_eps": 1e-6, "epochs": 1}  # fmt: skip
ALWAYS = {"mutation_rate": 1.0, "reset_rate": 0.0, "perturb": (1.2, 1.2)}


def quick(**changes: Any) -> PopulationConfig:
    """Rounds at 100, 150, 200, ... frames."""
    return PopulationConfig(**{"members": 8, "burn_in_frames": 100, "period_frames": 50, **changes})


def preset(name: str, **changes: Any) -> PopulationConfig:
    return replace(apply_preset(Config(), name).population, **changes)


def run_round(pbt: PBT, objectives: Sequence[float]) -> dict[int, Decision]:
    """All members go to the end of the round and report."""
    frames, episodes, decisions = pbt.round_frames, pbt.round + 1, []
    for member, objective in enumerate(objectives):
        decisions = pbt.report(member, frames, episodes, objective)
    assert decisions
    return {d.member: d for d in decisions}


# ---------------------------------------------------------------- the presets


def test_the_defaults_are_sample_factorys() -> None:
    """pbt_* of its command line, and stats_avg."""
    s = preset("pbt-sample-factory")
    assert s == PopulationConfig(members=8)
    assert (s.burn_in_frames, s.period_frames) == (2e7, 5e6)
    assert (s.replace_fraction, s.mutation_rate) == (0.3, 0.15)
    assert (s.gap_relative, s.gap_absolute) == (0.1, 1e-6)
    assert (s.perturb, s.perturb_complement, s.reset_rate) == ((1.1, 1.5), (1.01, 1.2), 0.01)
    assert s.objective_episodes == 100
    assert s.keep_first
    assert sorted(s.mutable) == ["exploration_coef", "lr", "max_grad_norm", "ppo_clip", "value_clip", "value_coef"]


def test_impalas_preset_is_its_appendix_f() -> None:
    s = preset("pbt-impala")
    assert (s.members, s.selection, s.burn_in_frames) == (24, "rival", 2e7)
    assert (s.period_frames, s.period_episodes, s.objective_episodes) == (0, 5000, 5000)
    assert (s.gap_absolute, s.gap_relative) == (0.05, 0.0)
    assert (s.mutation_rate, s.perturb, s.reset_rate) == (0.33, (1.2, 1.2), 0.0)
    assert set(s.mutable) == {"exploration_coef", "lr", "optimizer_eps"}
    ranges = resolve_ranges(s, BASE)
    assert ranges["exploration_coef"].start == (5e-5, 1e-2)
    assert ranges["lr"].start == (5e-6, 5e-3)
    assert ranges["optimizer_eps"].choices == (1e-1, 1e-3, 1e-5, 1e-7)


def test_sample_factory_starts_from_the_runs_settings_and_one_mutation_of_all_but_the_first() -> None:
    pbt = PBT(PopulationConfig(members=40), BASE, seed=0)
    decisions = pbt.start()
    assert [d.member for d in decisions] == list(range(40))
    assert all(d.round == 0 and d.donor is None and d.copied == () for d in decisions)
    assert decisions[0].hyper == BASE
    assert pbt.hyper(7) == decisions[7].hyper == BASE | {n: new for n, (_, new) in decisions[7].changed.items()}
    changed = sum(len(d.changed) for d in decisions[1:])
    assert changed / (39 * 6) == pytest.approx(0.15, abs=0.06)
    assert all("gamma" not in d.changed and "epochs" not in d.changed for d in decisions)
    factors = [max(b / a, a / b) for d in decisions for a, b in d.changed.values()]
    assert 1.1 <= min(factors) <= max(factors) <= 1.5
    with pytest.raises(PopulationError, match="has started already"):
        pbt.start()


def test_impala_starts_from_draws() -> None:
    decisions = PBT(preset("pbt-impala"), BASE, seed=0).start()
    assert len({d.hyper["lr"] for d in decisions}) == 24
    assert all(5e-6 <= d.hyper["lr"] <= 5e-3 and 5e-5 <= d.hyper["exploration_coef"] <= 1e-2 for d in decisions)
    assert {d.hyper["optimizer_eps"] for d in decisions} == {1e-1, 1e-3, 1e-5, 1e-7}
    assert all(d.hyper["gamma"] == 0.99 for d in decisions)


def test_sample_factorys_round_by_hand() -> None:
    """Ten members, 0 the worst, 9 the best: k = ceil(0.3 · 10) = 3. The gap asks for more than 0.1 · |donor|."""
    pbt = PBT(quick(members=10, **ALWAYS), BASE, seed=0)
    before = [pbt.hyper(i) for i in range(10)]
    decisions = run_round(pbt, [10.0 * i for i in range(10)])
    for i in (7, 8, 9):  # the best: untouched
        assert (decisions[i].donor, decisions[i].changed, decisions[i].hyper) == (None, {}, before[i])
    for i in (3, 4, 5, 6):  # the middle: own weights, own values mutated
        assert decisions[i].donor is None
        assert set(decisions[i].changed) == set(pbt.settings.mutable)
    for i in (1, 2):  # the worst: the donor's weights, the donor's values mutated
        assert decisions[i].donor in (7, 8, 9)
        assert decisions[i].copied == ALL_PARTS
    assert decisions[0].donor in (7, 8, 9)  # the first may be overwritten, but keeps the run's settings
    assert decisions[0].copied == ("weights", "optimizer", "normalizers")
    assert (decisions[0].hyper, decisions[0].changed) == (BASE, {})
    assert decisions[1].objective == 10.0
    assert decisions[1].donor_objective == 10.0 * decisions[1].donor
    assert decisions[1].donor_frames == 100


@pytest.mark.parametrize(
    ("objectives", "relative", "absolute", "copies"),
    [
        ([100.0, 91.0], 0.1, 1e-6, False),  # 9 % of the better one
        ([100.0, 89.0], 0.1, 1e-6, True),
        ([-100.0, -109.0], 0.1, 1e-6, False),  # negative returns: 9 % of 100
        ([-100.0, -111.0], 0.1, 1e-6, True),
        ([0.0, -1e-7], 0.1, 1e-6, False),  # below the absolute gap
        ([0.0, -1e-5], 0.1, 1e-6, True),
        ([0.54, 0.5], 0.0, 0.05, False),  # IMPALA's 5 % absolute
        ([0.56, 0.5], 0.0, 0.05, True),
        ([3.0, 3.0], 0.0, 0.0, False),  # not better is never enough
    ],
)
@pytest.mark.parametrize("selection", ["truncation", "rival"])
def test_gaps_by_hand(objectives, relative: float, absolute: float, copies: bool, selection: str) -> None:
    settings = PopulationConfig(members=2, selection=selection, gap_relative=relative, gap_absolute=absolute)  # type: ignore[arg-type]
    donors, untouched = select(objectives, settings, np.random.default_rng(0))
    assert donors == ({1: 0} if copies else {})
    assert untouched == ({0} if selection == "truncation" else set())


@pytest.mark.parametrize(("members", "k"), [(2, 1), (3, 1), (4, 2), (7, 3), (8, 3), (10, 3), (20, 6)])
def test_how_many_are_best_and_worst(members: int, k: int) -> None:
    donors, untouched = select([float(i) for i in range(members)], PopulationConfig(members=members, gap_relative=0.0),
                               np.random.default_rng(0))  # fmt: skip
    assert (set(donors), untouched) == (set(range(k)), set(range(members - k, members)))


def test_impalas_members_meet_a_random_other_and_mutate_even_without_a_copy() -> None:
    pbt = PBT(preset("pbt-impala", members=6, burn_in_frames=100, period_episodes=1, mutation_rate=1.0), BASE, seed=0)
    pbt.start()
    before, met = [pbt.hyper(i) for i in range(6)], set()
    decisions = run_round(pbt, [0.0, 0.01, 0.02, 0.5, 0.51, 0.52])
    for i, d in decisions.items():
        start = before[i if d.donor is None else d.donor]
        for name in pbt.settings.mutable:  # ×1.2 or ÷1.2
            assert any(d.hyper[name] / start[name] == pytest.approx(factor) for factor in (1.2, 1 / 1.2))
        met |= {(i, d.donor)} if d.donor is not None else set()
    assert met  # seed 0: some of the lower three drew one of the upper three
    assert all(target < 3 <= donor for target, donor in met)


def test_a_rival_is_any_other_member_equally_often() -> None:
    rng, settings = np.random.default_rng(0), preset("pbt-impala", members=4)
    drawn = [select([0.0, 1.0, 1.0, 1.0], settings, rng)[0][0] for _ in range(900)]
    assert sorted(set(drawn)) == [1, 2, 3]
    assert all(drawn.count(i) == pytest.approx(300, abs=60) for i in (1, 2, 3))


# ---------------------------------------------------------------- mutations


def test_a_reset_goes_back_to_the_first_value_and_only_where_it_differs() -> None:
    pbt = PBT(quick(members=4, mutation_rate=1.0, reset_rate=1.0, mutable=("lr",)), BASE, seed=0)
    pbt.start()
    assert all(pbt.hyper(i)["lr"] != 1e-4 for i in (1, 2, 3))  # at the start nothing differs: mutated
    run_round(pbt, [4.0, 3.0, 2.0, 1.0])
    assert pbt.hyper(2)["lr"] != 1e-4  # overwritten by 0 or 1; from 0's value it is mutated, or from 1's reset
    assert pbt.hyper(1)["lr"] != 1e-4  # among the best


def test_gamma_moves_by_its_horizon_where_it_is_asked_for() -> None:
    pbt = PBT(quick(members=4, mutation_rate=1.0, reset_rate=0.0, mutable=("gamma",)), BASE, seed=0)
    for d in pbt.start()[1:]:
        factor = (1 - d.hyper["gamma"]) / (1 - 0.99)
        assert 1.01 <= max(factor, 1 / factor) <= 1.2


@pytest.mark.case("PBT-05")
def test_fifty_mutations_leave_zero_and_one_and_keep_the_ranges_over_a_resume() -> None:
    """Clip 0.0, epochs 1, entropy 0.0, and a penalty: each mutation changes each of them, inside its range."""
    base = {"value_clip": 0.0, "epochs": 1, "exploration_coef": 0.0, "reward.death": -2.0}
    settings = quick(members=2, **ALWAYS, mutable=("value_clip", "epochs", "exploration_coef", "reward.*"),
                     ranges={"epochs": "1..4 integer"}, gap_relative=0.0, keep_first=False)  # fmt: skip
    pbt = PBT(settings, base, seed=0)
    pbt.start()
    ranges, seen = dict(pbt.ranges), []
    assert (ranges["reward.death"].low, ranges["reward.death"].high) == (-200.0, -0.02)
    for mutation in range(50):
        if mutation == 25:
            saved = json.loads(json.dumps(pbt.state(), allow_nan=False))
            pbt = PBT(settings, base | {"reward.death": -50.0}, seed=1)  # as changed since: the saved ranges win
            pbt.load_state(saved)
            assert pbt.ranges == ranges
        worse, better = mutation % 2, 1 - mutation % 2  # in turns, so that each mutation goes on from the one before
        assert run_round(pbt, [float(i == better) for i in range(2)])[worse].donor == better
        before, after = pbt.hyper(better), pbt.hyper(worse)  # the better one is left as it is
        assert all(ranges[name].holds(value) and value != before[name] for name, value in after.items())
        assert abs(after["epochs"] - before["epochs"]) >= 1
        assert isinstance(after["epochs"], int)
        seen.append(after)
    assert {h["epochs"] for h in seen} == {1, 2, 3, 4}
    assert all(len({h[name] for h in seen}) > 5 for name in ("value_clip", "exploration_coef", "reward.death"))


# ---------------------------------------------------------------- rounds


def test_nothing_is_decided_before_the_burn_in_and_until_all_have_arrived() -> None:
    pbt = PBT(quick(members=2), BASE, seed=0)
    assert pbt.report(0, 99, 5, 1.0) == []
    assert pbt.report(1, 99, 5, 100.0) == []
    assert pbt.report(0, 101, 5, 1.0) == []
    assert pbt.active() == [1]
    decisions = pbt.report(1, 100, 5, 100.0)
    assert [(d.member, d.donor, d.frames) for d in decisions] == [(0, 1, 100), (1, None, 100)]
    assert pbt.round_frames == 150
    assert pbt.active() == [0, 1]


def test_after_a_round_everybody_trains_before_the_next() -> None:
    """One iteration may be longer than a period: the periods that passed in it are skipped, not made up for."""
    pbt = PBT(quick(members=2), BASE, seed=0)
    pbt.report(0, 430, 1, 1.0)
    assert pbt.report(1, 120, 1, 1.0)
    assert pbt.round_frames == 450
    assert pbt.report(1, 460, 2, 1.0) == []
    assert pbt.report(0, 449, 2, 1.0) == []
    assert pbt.report(0, 450, 3, 1.0)


def test_the_objective_that_counts_is_that_at_the_end_of_the_round() -> None:
    pbt = PBT(quick(members=2), BASE, seed=0)
    pbt.report(0, 100, 1, 5.0)
    pbt.report(0, 110, 2, 500.0)  # what was in flight when it had to rest
    assert [d.objective for d in pbt.report(1, 100, 1, 6.0)] == [5.0, 6.0]


def test_a_member_without_an_episode_takes_the_others_on_to_its_frames() -> None:
    pbt = PBT(quick(members=3), BASE, seed=0)
    pbt.report(0, 100, 1, 1.0)
    pbt.report(1, 104, 1, 2.0)
    assert pbt.report(2, 100, 0, None) == []  # there, but with nothing to compare
    assert pbt.active() == [2]
    assert pbt.report(2, 108, 1, 3.0) == []
    assert pbt.round_frames == 108
    assert pbt.active() == [0, 1]
    pbt.report(0, 109, 2, 1.5)
    decisions = pbt.report(1, 108, 2, 2.5)
    assert sorted((d.member, d.objective, d.member_frames) for d in decisions) == [
        (0, 1.5, 109), (1, 2.5, 108), (2, 3.0, 108),
    ]  # fmt: skip


def test_by_episodes_alone_the_slowest_sets_the_frames() -> None:
    """IMPALA's clock. Member 1's episodes are four times as long: the other plays on until it has as many frames."""
    pbt = PBT(preset("pbt-impala", members=2, burn_in_frames=0, period_episodes=10), BASE, seed=0)
    frames, episodes = [0, 0], [0, 0]
    for _ in range(2):
        decisions: list[Decision] = []
        while not decisions:
            for i in pbt.active():
                frames[i], episodes[i] = frames[i] + 8, episodes[i] + (4, 1)[i]
                decisions = decisions or pbt.report(i, frames[i], episodes[i], 0.5)
        assert frames[0] == frames[1] == decisions[0].frames
    assert frames == [160, 160]
    assert episodes == [80, 20]


@pytest.mark.parametrize(
    ("report", "rule"),
    [((0, 40, 3, 1.0), "totals never fall"), ((0, 60, 1, 1.0), "totals never fall"),
     ((0, 60, 3, float("nan")), "finite numbers"), ((2, 60, 3, 1.0), "There is no member 2")],
)  # fmt: skip
def test_numbers_that_no_member_can_have_are_refused(report: tuple[int, int, int, float], rule: str) -> None:
    pbt = PBT(quick(members=2), BASE, seed=0)
    pbt.report(0, 50, 2, 1.0)
    with pytest.raises(PopulationError, match=rule):
        pbt.report(*report)


@pytest.mark.case("PBT-09")
def test_eight_members_take_turns_on_two_slots_and_are_compared_at_equal_frames() -> None:
    """No round waits for a member that has no slot, each trains equally long, and a slot changes hands once a round."""
    pbt = PBT(quick(members=8, slots=2), BASE, seed=0)
    frames, training, changes, rounds = [0] * 8, [], 0, 0
    for _ in range(1000):
        now = pbt.active(training)
        assert len(now) <= 2
        changes += len(set(now) - set(training))
        training = now
        for i in now:
            frames[i] += 10
            if decisions := pbt.report(i, frames[i], frames[i] // 10, float(i)):
                rounds += 1
                assert frames == [decisions[0].frames] * 8
                assert [d.member_frames for d in decisions] == frames
        if rounds == 4:
            break
    assert frames == [100 + 3 * 50] * 8
    assert changes <= 8 * 4 + 2


@st.composite
def populations(draw: st.DrawFn) -> dict[str, Any]:
    members = draw(st.integers(2, 7))
    return {
        "members": members,
        "slots": draw(st.integers(0, members)),
        "selection": draw(st.sampled_from(["truncation", "rival"])),
        "burn_in_frames": draw(st.integers(0, 60)),
        "period_frames": draw(st.integers(0, 40)),
        "period_episodes": draw(st.integers(1, 3)),
        "gap_relative": 0.0,
        "keep_first": draw(st.booleans()),
        "start": draw(st.sampled_from(["mutate", "draw"])),
    }


def play_round(
    pbt: PBT, rng: np.random.Generator, frames: list[int], episodes: list[int], lengths: Sequence[int]
) -> list[Decision]:
    """Batches of any size until the round ends. An episode ends with probability 1 / its mean length a frame."""
    training: list[int] = []
    for _ in range(2000):
        training = pbt.active(training)
        assert 0 < len(training) <= pbt.settings.num_slots
        for i in training:
            batch = int(rng.integers(1, 12))
            frames[i], episodes[i] = frames[i] + batch, episodes[i] + int(rng.binomial(batch, 1 / lengths[i]))
            if decisions := pbt.report(i, frames[i], episodes[i], float(rng.normal()) if episodes[i] else None):
                return decisions
    raise AssertionError("no round ended")


@given(populations(), st.integers(0, 10**6))
def test_every_population_goes_on_fairly_and_its_decisions_can_be_carried_out_one_by_one(changes, seed: int) -> None:
    """Batches and episodes of any length. A round always ends, at frames that all have; donors are never overwritten
    before they are copied; what a lineage says is what became of the weights.
    """
    rng, pbt = np.random.default_rng(seed), PBT(PopulationConfig(**{"members": 8, **changes}), BASE, seed)
    count = changes["members"]
    frames, episodes, lengths = [0] * count, [0] * count, rng.integers(5, 60, count).tolist()
    records = [d.to_json() for d in pbt.start()]
    weights: list[list[tuple[int, int]]] = [[(0, i)] for i in range(count)]  # who trained them, since which round
    for _ in range(4):
        decisions = play_round(pbt, rng, frames, episodes, lengths)
        assert sorted(d.member for d in decisions) == list(range(count))
        assert min(frames) >= decisions[0].frames
        old = [list(w) for w in weights]
        for d in decisions:
            assert all(pbt.ranges[n].holds(d.hyper[n]) for n in pbt.ranges)
            if d.donor is not None:
                assert weights[d.donor] == old[d.donor], "the donor was overwritten before it was copied"
                assert d.objective < d.donor_objective
                weights[d.member] = [*weights[d.donor], (d.round, d.member)]
        records += [d.to_json() for d in decisions]
    for i in range(count):
        spans = lineage(json.loads(json.dumps(records)), i)
        moves = [(s.round, s.member) for k, s in enumerate(spans) if k == 0 or s.member != spans[k - 1].member]
        assert moves == weights[i]
        assert spans[-1].hyper == pbt.hyper(spans[-1].member)


# ---------------------------------------------------------------- what is copied, and descent


@pytest.mark.case("PBT-04")
def test_the_first_exchange_copies_what_is_in_memory_and_no_member_needs_to_have_saved() -> None:
    """No member ever saves here. The worst get the weights of the best as they are now, after 100 frames."""
    members = [{"weights": 0.0, "optimizer": 0.0, "normalizers": 0.0, "hyperparameters": 0.0} for _ in range(4)]
    pbt = PBT(quick(members=4, keep_first=False), BASE, seed=0)
    decisions: list[Decision] = []
    for step in range(1, 11):
        for i, member in enumerate(members):
            member |= dict.fromkeys(member, (i + 1) * step * 1.0)  # training: further for later members
            decisions = decisions or pbt.report(i, 10 * step, step, member["weights"])
    copies = [d for d in decisions if d.donor is not None]
    assert {d.member for d in copies} == {0, 1}
    for d in copies:
        assert d.to_json()["source"] == "live"
        assert d.donor_frames == 100
        members[d.member] |= {part: members[d.donor][part] for part in d.copied}
        assert members[d.member] == members[d.donor]
        assert set(members[d.member].values()) == {(d.donor + 1) * 10.0}


def test_a_lineage_is_the_schedule_that_made_the_weights() -> None:
    """Member 0 is overwritten by 1 in round 1; what 1 did before is how its weights came to be."""
    pbt = PBT(quick(members=2, **ALWAYS, mutable=("lr",), gap_relative=0.0, keep_first=False), BASE, seed=0)
    records = [d.to_json() for d in pbt.start()]
    for objectives in ([1.0, 2.0], [1.0, 1.0], [5.0, 3.0]):
        records += [d.to_json() for d in run_round(pbt, objectives).values()]
    assert pbt.copies == [(1, 0, 1), (3, 1, 0)]
    first, second, third = lineage(records, 1)
    start, at_1, at_3 = (r["hyper"] for r in records if (r["round"], r["member"]) in {(0, 1), (1, 0), (3, 1)})
    assert first == Span(0, 0, 1, start)
    assert second == Span(1, 100, 0, at_1)  # kept through round 2, in which both were equal: 0 is among the best
    assert third == Span(3, 200, 1, at_3)
    assert lineage(records, 0) == [first, second]
    with pytest.raises(PopulationError, match="no line of member 1 in round 3"):
        lineage([r for r in records if (r["round"], r["member"]) != (3, 1)], 1)


def test_a_record_is_json_with_everything_that_was_decided() -> None:
    pbt = PBT(quick(members=4, **ALWAYS), BASE, seed=0)
    record = json.loads(json.dumps(run_round(pbt, [1.0, 2.0, 3.0, 4.0])[1].to_json(), allow_nan=False))
    assert set(record) == {"round", "frames", "member", "donor", "copied", "source", "hyper", "changed", "objective",
                           "donor_objective", "member_frames", "donor_frames"}  # fmt: skip
    assert record["changed"]["lr"] == [1e-4, pbt.hyper(1)["lr"]]
    assert record["copied"] == list(ALL_PARTS)


@pytest.mark.parametrize("selection", ["truncation", "rival"])
def test_a_population_finds_the_learning_rate_that_fixed_ones_lack(selection: str) -> None:
    """Each frame takes x to (1 - lr) x, from 1 towards 0, at a rate far too small: alone it would stay above 0.98."""
    pbt = PBT(quick(members=6, selection=selection, gap_relative=0.0, mutation_rate=1.0, perturb=(1.5, 2.5),
                    mutable=("lr",)), BASE | {"lr": 1e-5}, seed=0)  # fmt: skip
    x, records = [1.0] * 6, [d.to_json() for d in pbt.start()]
    for _ in range(30):
        frames = 50 if pbt.round else 100
        x = [value * (1 - pbt.hyper(i)["lr"]) ** frames for i, value in enumerate(x)]
        decisions = run_round(pbt, [-value for value in x])
        for d in sorted(decisions.values(), key=lambda d: d.objective):
            x[d.member] = x[d.member if d.donor is None else d.donor]
        records += [d.to_json() for d in decisions.values()]
    assert (1 - 1e-5) ** (100 + 29 * 50) > 0.98
    best = min(range(1, 6), key=x.__getitem__)  # not 0, which keeps the run's rate
    assert x[best] < 0.5
    rates = [span.hyper["lr"] for span in lineage(records, best)]
    assert rates[-1] > 50 * rates[0]


# ---------------------------------------------------------------- state


def test_a_state_saved_in_the_middle_of_a_round_is_restored_exactly() -> None:
    settings = quick(members=5, slots=2, mutable=("lr", "gamma", "reward.*"), ranges={"reward.frag": "0.1..5.0"})
    base = BASE | {"reward.frag": 1.0, "reward.death": -0.3}
    one, two = PBT(settings, base, seed=3), PBT(settings, base, seed=4)
    one.start()
    run_round(one, [3.0, 1.0, 4.0, 1.5, 5.0])
    one.report(0, 150, 9, 2.0)
    one.report(3, 151, 1, None)
    two.load_state(json.loads(json.dumps(one.state(), allow_nan=False)))
    assert two.state() == one.state()
    assert two.active([3]) == one.active([3]) == [1, 3]
    for pbt in (one, two):
        pbt.report(3, 160, 9, 7.0)  # it was late: the rest go to 160 frames
        assert pbt.round_frames == 160
    for i, objective in ((0, 2.5), (1, 6.0), (2, 1.0)):
        assert one.report(i, 160, 9, objective) == two.report(i, 160, 9, objective) == []
    decisions = one.report(4, 160, 9, 3.0)
    assert decisions == two.report(4, 160, 9, 3.0)
    assert any(d.donor is not None for d in decisions)
    assert two.state() == one.state()
    with pytest.raises(PopulationError, match="has started already"):
        two.start()


def test_another_number_of_members_is_refused_on_a_resume() -> None:
    with pytest.raises(ConfigError, match=r"population.members = 3: cannot change .*it was 2"):
        PBT(quick(members=3), BASE, 0).load_state(PBT(quick(members=2), BASE, 0).state())


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"members": 1}, "at least 2"),
        ({"slots": 9}, "0 .all at once. to population.members = 8"),
        ({"burn_in_frames": -1}, "at least 0"),
        ({"period_episodes": -1}, "at least 0"),
        ({"mutation_rate": 1.5}, "a chance"),
        ({"gap_absolute": -0.1}, "must not be negative"),
        ({"replace_fraction": 0.6}, r"in \(0, 0.5\]"),
        ({"perturb": (0.8, 1.2)}, "two factors above 1"),
        ({"perturb_complement": (1.2, 1.1)}, "two factors above 1"),
        ({"mutable": ("learning_rate",)}, "names no hyper-parameter .*Did you mean|There are"),
        ({"mutable": ("max_grad_nrm",)}, "Did you mean 'max_grad_norm'"),
        ({"mutable": ("reward.*",)}, "names no hyper-parameter"),
        ({"ranges": {"gamma": "0.9..0.99"}}, "not among the mutable ones"),
        ({"ranges": {"lr": "0.01..0.1"}}, "must begin in it"),
        ({"ranges": {"lr": "0..0.1"}}, "one side of 0"),
    ],
)
def test_a_broken_rule_is_named_with_its_fix(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        PBT(PopulationConfig(**{"members": 8, **changes}), BASE, seed=0)


@pytest.mark.parametrize(("name", "value"), [("reward.frag", 0.0), ("bonus", 1.0)])
def test_a_mutable_value_without_a_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=r"has no range.*population.ranges"):
        PBT(PopulationConfig(members=8, mutable=(name,)), {name: value}, seed=0)


def test_the_layout_is_checked_before_the_start_and_explained() -> None:
    settings = PopulationConfig(members=4)
    check_layout(settings, num_envs=4, lr_schedule="constant", has_matches=False)  # on however many workers
    rule = r"environments = 2: is too few for 4 members.*on whatever workers.*slots = 2"
    with pytest.raises(ConfigError, match=rule):
        check_layout(settings, num_envs=2, lr_schedule="constant", has_matches=False)
    check_layout(PopulationConfig(members=4, slots=2), num_envs=2, lr_schedule="constant", has_matches=False)
    with pytest.raises(ConfigError, match="would overwrite the learning rates"):
        check_layout(settings, num_envs=4, lr_schedule="linear", has_matches=False)
    check_layout(PopulationConfig(members=8, mutable=("gamma",)), num_envs=8, lr_schedule="linear", has_matches=False)
    alone = PopulationConfig(members=4, slots=1)
    with pytest.raises(ConfigError, match="one member loaded at a time"):
        check_layout(alone, num_envs=4, lr_schedule="constant", has_matches=True, member_weight=0.2)
    by_rating = PopulationConfig(members=8, objective="rating")
    with pytest.raises(ConfigError, match="needs matches with a declared outcome"):
        check_layout(by_rating, num_envs=8, lr_schedule="constant", has_matches=False)


def test_the_presets_name_hyperparameters_that_a_run_has_and_the_ranges_hold_what_runs_begin_with() -> None:
    names = {f.name for f in dataclasses.fields(Hyperparameters) if f.name != "version"}
    assert set(PopulationConfig().mutable) <= names
    assert set(preset("pbt-impala").mutable) <= names
    assert set(RANGES) <= {f.name for f in dataclasses.fields(LearnerConfig)}
    for given_name in presets():
        learner = apply_preset(Config(), given_name).learner
        for name, r in RANGES.items():
            if (value := getattr(learner, name)) is not None and (name, value) != ("epochs", 1):
                check_value(f"{given_name} {name}", value, r)
