"""Shared by the tests of environments: pools that are closed whatever the test did."""

from __future__ import annotations

import pytest

from pronghorn.envs.workers import WorkerPool


@pytest.fixture
def start():
    pools = []

    def make(*envs, num_workers=1, envs_per_worker=1, num_groups=1, seed=7, **settings):
        pool = WorkerPool(
            envs, num_workers=num_workers, envs_per_worker=envs_per_worker, num_groups=num_groups, seed=seed,
            step_timeout_s=settings.pop("step_timeout_s", 10.0), **settings,
        )  # fmt: skip
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()
