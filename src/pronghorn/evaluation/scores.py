"""What returns say: a mean without the extremes, how uncertain it is, and how it stands beside people's scores."""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BOOTSTRAP_RESAMPLES = 2000


def interquartile_mean(values: NDArray[np.float64]) -> float:
    """Mean of what is left when a quarter of the values is cut off at each end (rounded down, as scipy's trim_mean)."""
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def bootstrap_iqm(
    values: NDArray[np.float64], strata: NDArray[np.int64] | None = None, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the interquartile mean (Agarwal et al. 2021).

    strata: [n] the task of each value; resampling keeps how many there are of each. None: one task.
    """
    rng = np.random.default_rng(seed)
    strata = np.zeros(len(values), np.int64) if strata is None else strata
    samples = np.concatenate(
        [rng.choice(values[strata == s], (BOOTSTRAP_RESAMPLES, (strata == s).sum())) for s in np.unique(strata)], axis=1
    )
    cut = len(values) // 4
    means = np.sort(samples, axis=1)[:, cut : len(values) - cut].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


@functools.cache
def _human_scores() -> dict[str, tuple[float, float]]:
    """(random, human) by 'benchmark:task', from human_scores.csv: Atari-57 (30 no-op starts) and DMLab-30."""
    with open(Path(__file__).with_name("human_scores.csv"), newline="") as file:
        return {f"{r['benchmark']}:{r['task']}": (float(r["random"]), float(r["human"])) for r in csv.DictReader(file)}


def human_normalized(task: str, score: float) -> float | None:
    """100 (score - random) / (human - random) of an environment's name, in percent; None where no scores are known.

    'atari:MontezumaRevenge' and 'atari:montezuma_revenge' are the same game.
    """
    benchmark, _, name = task.partition(":")
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    found = _human_scores().get(f"{benchmark}:{snake}")
    return None if found is None else 100.0 * (score - found[0]) / (found[1] - found[0])
