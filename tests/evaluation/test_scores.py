"""Statistics of returns: against scipy, by hand, and against published medians."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pronghorn.evaluation.scores import bootstrap_iqm, human_normalized, interquartile_mean


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 100, 101])
def test_interquartile_mean_is_scipys(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25))


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, 3.0, -50.0, 4.0, 5.0, 6.0])) == 3.5  # (2 + 3 + 4 + 5) / 4


def test_the_interval_is_that_of_scipys_bootstrap() -> None:
    values = np.random.default_rng(1).gamma(2.0, 3.0, size=60)
    low, high = bootstrap_iqm(values)
    expected = stats.bootstrap(
        (values,), lambda x, axis: stats.trim_mean(x, 0.25, axis=axis), n_resamples=5_000, method="percentile", rng=0
    ).confidence_interval
    width = expected.high - expected.low
    assert abs(low - expected.low) < 0.1 * width
    assert abs(high - expected.high) < 0.1 * width


def test_resampling_keeps_the_number_of_values_of_each_task() -> None:
    """Two tasks of very different level: by strata only the noise inside a task is left, and a slow loop agrees."""
    rng = np.random.default_rng(2)
    values = np.concatenate([rng.normal(0, 1, 20), rng.normal(100, 1, 20)])
    tasks = np.repeat([0, 1], 20)
    low, high = bootstrap_iqm(values, tasks)
    slow = []
    for _ in range(2_000):
        parts = [rng.choice(values[tasks == task], 20) for task in (0, 1)]
        slow.append(stats.trim_mean(np.concatenate(parts), 0.25))
    expected = np.percentile(slow, [2.5, 97.5])
    assert [low, high] == pytest.approx(expected.tolist(), abs=0.15)
    unstratified = bootstrap_iqm(values)
    assert high - low < 0.1 * (unstratified[1] - unstratified[0])


def test_a_single_episode_has_an_interval_of_no_width() -> None:
    assert bootstrap_iqm(np.array([3.0])) == (3.0, 3.0)


@pytest.mark.parametrize(("column", "median"), [("deep", 191.82), ("shallow", 93.23), ("multitask", 59.71)])
def test_the_published_medians_come_out_of_the_score_table(column: str, median: float) -> None:
    """IMPALA's per-game scores (Table C.1), normalised by our table, have the medians of its Table 4."""
    with open(Path(__file__).parent / "data" / "impala_atari57.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    scores = [human_normalized(f"atari:{row['game']}", float(row[column])) for row in rows]
    assert len(scores) == 57
    assert None not in scores
    assert np.median(np.array(scores, np.float64)) == pytest.approx(median, abs=0.005)


def test_names_of_games_and_levels() -> None:
    assert human_normalized("atari:Pong", -20.7) == pytest.approx(0.0)
    assert human_normalized("atari:pong", 14.6) == pytest.approx(100.0)
    assert human_normalized("atari:MontezumaRevenge", 4753.3) == human_normalized("atari:montezuma_revenge", 4753.3)
    assert human_normalized("dmlab:rooms_watermaze", 54.0) == pytest.approx(100.0)
    assert human_normalized("gym:CartPole-v1", 500.0) is None
    assert human_normalized("atari:Unheard", 1.0) is None
