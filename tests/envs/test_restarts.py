"""The budget of restarts: deaths in a window, and failures that repeat themselves."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pronghorn.envs import restarts
from pronghorn.envs.restarts import RestartBudget


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(restarts, "time", clock)
    return clock


def report(**changes: Any) -> dict[str, Any]:
    fixed = {"env": 0, "steps": 7, "type": "ValueError", "message": "broken", "traceback": "in step", "phase": "step"}
    return {**fixed, **changes}


def test_the_next_death_after_the_budget_is_one_too_many() -> None:
    budget = RestartBudget(2, 600.0)
    assert [budget.why_not(worker, None) for worker in (0, 1)] == ["", ""]
    assert "budget of 2 restarts within 600 s is used up" in budget.why_not(0, None)


def test_deaths_leave_the_window(clock: Clock) -> None:
    budget = RestartBudget(1, 60.0)
    for _ in range(5):
        assert budget.why_not(0, None) == ""
        assert budget.num_used == 1
        clock.now += 61.0
    assert budget.num_used == 0


def test_the_third_equal_failure_in_a_row_is_the_last() -> None:
    budget = RestartBudget(10, 600.0)
    assert [budget.why_not(0, report()) for _ in range(2)] == ["", ""]
    assert budget.why_not(1, report()) == ""  # of another worker
    assert "3 times in a row" in budget.why_not(0, report())


@pytest.mark.parametrize(
    "changes",
    [{"steps": 8}, {"message": "broken at 0x7f"}, {"traceback": "elsewhere"}, {"env": 1}, {"phase": "reset"}, None],
    ids=str,
)
def test_any_difference_begins_the_count_again(changes: dict[str, Any] | None) -> None:
    budget = RestartBudget(10, 600.0)
    other = None if changes is None else report(**changes)
    for failure in (report(), report(), other, report(), report()):
        assert budget.why_not(0, failure) == ""


@pytest.mark.parametrize(
    "failure",
    [None, report(phase="reset"), report(phase="start"), report(steps=0)],
    ids=["killed", "reset", "start", "first step"],
)
def test_what_may_come_from_outside_has_the_whole_budget(failure: dict[str, Any] | None) -> None:
    budget = RestartBudget(10, 600.0)
    assert [budget.why_not(0, failure) for _ in range(10)] == [""] * 10


def test_an_episode_that_ended_begins_the_count_again() -> None:
    budget = RestartBudget(10, 600.0)
    for _ in range(9):
        assert budget.why_not(0, report()) == ""
        budget.episode_ended(0)


def test_equal_failures_far_apart_are_not_in_a_row(clock: Clock) -> None:
    budget = RestartBudget(10, 60.0)
    for _ in range(5):
        assert budget.why_not(0, report()) == ""
        clock.now += 40.0  # two of them in any minute


def test_first_steps_that_fail_by_chance_have_the_whole_budget(clock: Clock) -> None:
    """A first step that works every other time: among 1,000 runs of lives that then live on, none ends early."""
    rng = random.Random(1)
    num_unlucky = 0
    for _ in range(1000):
        budget, deaths = RestartBudget(10, 600.0), 0
        while deaths < 10 and rng.random() < 0.5:
            assert budget.why_not(0, report(steps=0)) == ""
            deaths += 1
        num_unlucky += deaths >= restarts.NUM_EQUAL
    assert num_unlucky > 50  # so three in a row did happen


def test_the_first_setting_that_is_refused_is_the_last() -> None:
    budget = RestartBudget(10, 600.0)
    assert budget.why_not(0, report()) == ""
    assert "It refused a setting" in budget.why_not(0, report(phase="option"))


def test_restarts_in_a_row_wait_twice_as_long_each_time_up_to_a_bound(clock: Clock) -> None:
    budget, seen = RestartBudget(100, 600.0), []
    for _ in range(11):
        assert budget.why_not(0, None) == ""
        seen.append(budget.delay_s(0))
    assert seen == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert budget.why_not(1, None) == ""
    assert budget.delay_s(1) == 0.0  # another worker's first
    budget.episode_ended(0)
    assert budget.why_not(0, None) == ""
    assert budget.delay_s(0) == 0.0
    assert budget.why_not(0, None) == ""
    assert budget.delay_s(0) == 0.25
    clock.now += 601.0  # deaths that are long past
    assert budget.why_not(0, None) == ""
    assert budget.delay_s(0) == 0.0
