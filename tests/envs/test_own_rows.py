"""Rows of one signature: their numbers, their own form of what comes, and the pool's form of what they answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from pronghorn.envs.own_rows import OwnRows
from pronghorn.types import ActionSpec, EnvSpec, Event, LeafSpec, Ready, Signature


def mask(size: int) -> LeafSpec:
    return LeafSpec((size,), "uint8", "mask")


SPEC = EnvSpec(
    {"x": LeafSpec((3,), "float32", "vector"), "x#1": LeafSpec((2, 2), "float32", "vector"), "action_mask": mask(7)},
    ActionSpec((4, 3), (-2.0,), (2.0,)),
    rows_per_env=3,
    rows_wait=True,
    agents=("a", "b", "c"),
    signatures=(
        Signature((0, 2), {"x": LeafSpec((2,), "float32", "vector")}, ActionSpec((4,), (-1.0,), (1.0,)), {"x": "x"}),
        Signature(
            (1,),
            {"x": LeafSpec((2, 2), "float32", "vector"), "y": LeafSpec((3,), "float32", "vector"),
             "action_mask": mask(5)},
            ActionSpec((2, 3)),
            {"x": "x#1", "y": "x", "action_mask": "action_mask"},
        ),
    ),
)  # fmt: skip
POOL: Any = SimpleNamespace(spec=SPEC, num_rows=6, tasks=("one", "two"), task_ids=np.array([0, 0, 0, 1, 1, 1]))


def ready() -> Ready:
    """Two environments; the rows of 'b' (1 and 4) were cut."""
    rows, cut = np.arange(6), np.array([0, 1, 0, 0, 1, 0], bool)
    x = np.arange(18, dtype=np.float32).reshape(6, 3)
    square = 100 + np.arange(24, dtype=np.float32).reshape(6, 2, 2)
    masks = np.tile(np.array([1, 0, 9, 9, 0, 1, 1], np.uint8), (6, 1))
    obs = {"x": x, "x#1": square, "action_mask": masks}
    final = {name: -leaf[[1, 4]].astype(np.float32) for name, leaf in obs.items()}
    return Ready(
        rows, np.where(cut, Event.LAST, Event.STEP).astype(np.uint8), obs, np.arange(6, dtype=np.float32),
        np.zeros(6, bool), cut, cut, np.array([1, 4]), final,
        records=[{"row": 1, "return": 1.0}, {"row": 4, "return": 4.0}],
    )  # fmt: skip


def test_rows_are_numbered_among_themselves():
    wolves, hares = OwnRows(POOL, 0), OwnRows(POOL, 1)
    assert (wolves.rows.tolist(), hares.rows.tolist()) == ([0, 2, 3, 5], [1, 4])
    assert (wolves.num_rows, hares.num_rows) == (4, 2)
    assert (wolves.task_ids.tolist(), hares.task_ids.tolist()) == ([0, 0, 1, 1], [0, 1])
    assert wolves.numbers(np.array([5, 0, 1])).tolist() == [3, 0, -1]
    assert hares.holds(np.arange(6)).tolist() == [False, True, False, False, True, False]
    assert (wolves.spec.agents, wolves.spec.rows_per_env, wolves.spec.signatures) == (("a", "c"), 2, ())
    assert (hares.spec.agents, hares.spec.action) == (("b",), ActionSpec((2, 3)))
    assert wolves.spec.rows_wait


def test_a_delivery_is_narrowed_to_own_leaves_choices_and_numbers():
    hares, whole = OwnRows(POOL, 1), ready()
    narrow = hares.narrowed(whole)
    own = hares.holds(whole.rows)
    assert list(narrow.obs) == ["x", "y", "action_mask"]
    assert narrow.rows[own].tolist() == [0, 1]
    assert narrow.obs["x"][own].tolist() == [[[104, 105], [106, 107]], [[116, 117], [118, 119]]]
    assert narrow.obs["y"][own].tolist() == [[3, 4, 5], [12, 13, 14]]
    assert narrow.obs["action_mask"][own].tolist() == [[1, 0, 0, 1, 1]] * 2  # 9: choices that it lacks
    assert narrow.final_obs["x"].tolist() == [[[-104, -105], [-106, -107]], [[-116, -117], [-118, -119]]]
    assert narrow.records == [{"row": 0, "return": 1.0}, {"row": 1, "return": 4.0}]
    wolves = OwnRows(POOL, 0).narrowed(whole)
    assert wolves.obs["x"][~own].tolist() == [[0, 1], [6, 7], [9, 10], [15, 16]]
    assert (list(wolves.obs), wolves.records) == (["x"], [])


def test_answers_are_widened():
    discrete, continuous = OwnRows(POOL, 0).widened((np.array([[3], [1]]), np.array([[0.5], [-0.5]], np.float32)))
    assert (discrete.tolist(), continuous.tolist()) == ([[3, 0], [1, 0]], [[0.5], [-0.5]])
    discrete, continuous = OwnRows(POOL, 1).widened((np.array([[1, 2]]), np.zeros((1, 0), np.float32)))
    assert (discrete.tolist(), continuous.tolist()) == ([[1, 2]], [[0.0]])
