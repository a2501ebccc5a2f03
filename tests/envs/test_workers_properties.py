"""recv and send under random speeds of workers and of who answers: each row's stream is whole and in order."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from playing import toy
from pronghorn.types import FIRST, LAST, STEP

LENGTH = 5


class Ledgers:
    """What each row must show next, by what it was sent."""

    def __init__(self, num_rows):
        self.episode, self.step = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self.sent = np.full(num_rows, -1, np.int64)
        self.seen = Counter()

    def check(self, ready):
        finals = dict(zip(ready.final_index.tolist(), ready.final_obs["obs"].tolist(), strict=True))
        for i, row in enumerate(ready.rows.tolist()):
            obs, event = ready.obs["obs"][i].tolist(), ready.event[i]
            self.seen[int(event)] += 1
            if event == FIRST:
                assert self.sent[row] == -1, "a first observation in the middle"
                assert obs == [0, 0, -1]
                continue
            assert self.sent[row] >= 0, "an answer that nobody gave"
            self.step[row] += 1
            assert ready.reward[i] == self.step[row]
            came = [self.episode[row], self.step[row], self.sent[row]]
            if event == STEP:
                assert obs == came
                assert self.step[row] < LENGTH
                continue
            assert (event, self.step[row], bool(ready.truncated[i])) == (LAST, LENGTH, True)
            assert finals[i] == came
            self.episode[row], self.step[row] = self.episode[row] + 1, 0
            assert obs == [self.episode[row], 0, -1]

    def answer(self, rows, rng):
        self.sent[rows] = [rng.randrange(1000) for _ in rows]
        return self.sent[rows][:, None]


@pytest.mark.parametrize(
    ("seed", "workers", "envs", "groups"), [(0, 1, 1, 1), (1, 2, 3, 2), (2, 3, 2, 1), (3, 2, 4, 4), (4, 3, 5, 2)]
)
def test_no_step_is_lost_doubled_or_out_of_order(start, seed, workers, envs, groups):
    """Units are answered late, in parts and in another order than they came in."""
    rng = random.Random(seed)
    pool = start(
        toy("Ledger", length=LENGTH), num_workers=workers, envs_per_worker=envs, num_groups=groups, step_timeout_s=60.0
    )
    ledgers, held = Ledgers(pool.num_rows), []
    for _ in range(250):
        ready = pool.recv(0.0 if held and rng.random() < 0.5 else 60.0 if not held else 0.02)
        if ready is not None:
            ledgers.check(ready)
            units = pool.unit_ids[ready.rows]
            held += [ready.rows[units == unit].copy() for unit in np.unique(units)]
        rng.shuffle(held)
        answered = [held.pop() for _ in range(rng.randint(0, len(held)))]
        for part in (answered[::2], answered[1::2]):
            if part:
                rows = np.concatenate(part)
                pool.send(rows, ledgers.answer(rows, rng), np.zeros((len(rows), 0), np.float32))
    assert ledgers.seen[FIRST] == pool.num_rows
    assert ledgers.seen[STEP] > 3 * pool.num_rows
    assert ledgers.seen[LAST] >= pool.num_rows // 2
    assert pool.restarts == 0
