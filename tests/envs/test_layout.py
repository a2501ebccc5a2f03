"""Rows: which of them step together, and where they lie in the shared map."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from playing import toy
from pronghorn.envs import layout
from pronghorn.errors import EnvError
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec


def test_groups_stay_together_only_in_fixed_order(start):
    """unit_ids say which rows a caller may not part: whole groups in fixed order, else those of one worker."""
    two_by_two = {"num_workers": 2, "envs_per_worker": 4, "num_groups": 2}
    assert start(toy(), ordered=True, **two_by_two).unit_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert start(toy(), ordered=False, **two_by_two).unit_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_tasks_that_differ_are_named(start):
    with pytest.raises(EnvError, match=r"tasks differ in the observation leaf 'obs': toy:Counter .* toy:Echo has"):
        start(toy(), toy("Echo"), num_workers=2)
    with pytest.raises(EnvError, match="number of frames per step: toy:Counter has 1, toy:Counter has 2"):
        start(toy(), toy(options={"frame_skip": 2}), num_workers=2)


def raw(name, **more):
    """What a worker says of an environment."""
    return {"name": name, "observation": {}, "action": {"discrete": [2], "low": [], "high": []}, **more}


def test_tasks_whose_agents_differ_are_named():
    games = [raw(name, rows_per_env=2, agents=agents) for name, agents in (("x", ["a", "b"]), ("y", ["b", "a"]))]
    with pytest.raises(EnvError, match="differ in the names of the agents of a game: x has a, b, y has b, a"):
        layout.merged(games)
    with pytest.raises(EnvError, match="agents of a game: x has a, b, y has none"):
        layout.merged([games[0], raw("y", rows_per_env=2)])
    assert layout.merged([games[0], {**games[0], "name": "y"}]).agents == ("a", "b")


def signature(size, tree):
    action = {"discrete": [size], "low": [], "high": [], "tree": {"kind": tree}}
    return {"rows": [0], "observation": {}, "action": action, "leaves": {}}


def test_tasks_whose_agents_have_other_spaces_are_named():
    """Where equal factors are only put together differently, it is not known how any more."""
    one, same, other = (
        raw(name, rows_per_env=2, agents=["a", "b"], signatures=[signature(*own)])
        for name, own in (("x", (2, "discrete")), ("y", (2, "factors")), ("z", (3, "discrete")))
    )
    with pytest.raises(EnvError, match=r"differ in the spaces of single agents: x has .*, z has"):
        layout.merged([one, other])
    with pytest.raises(EnvError, match=r"single agents: x has .*, z has none"):
        layout.merged([one, {**other, "signatures": []}])
    assert layout.merged([one, same]).signatures[0].action == ActionSpec((2,))
    assert layout.merged([one, one]).signatures[0].action.tree == '{"kind": "discrete"}'


def test_weights_are_declared_only_where_all_tasks_begin_with_the_same():
    assert layout.merged([raw("x", rewards={"hit": 1}), raw("y", rewards={"hit": 1.0})]).rewards == {"hit": 1.0}
    assert layout.merged([raw("x", rewards={"hit": 1}), raw("y", rewards={"hit": 2})]).rewards == {}
    assert layout.merged([raw("x", rewards={"hit": 1}), raw("y")]).rewards == {}


def test_the_rows_of_a_unit_are_consecutive_and_so_is_a_group_of_all_workers():
    units = layout.divide(num_workers=2, envs_per_worker=3, num_groups=2, rows_per_env=2)
    assert [(u.group, u.worker, u.start, u.stop) for u in units] == [
        (0, 0, 0, 4), (0, 1, 4, 8),  # two environments of two rows
        (1, 0, 8, 10), (1, 1, 10, 12),
    ]  # fmt: skip


def test_arrays_of_the_shared_map_begin_at_cache_lines_and_do_not_overlap():
    leaves = {"image": LeafSpec((5, 7, 3), "uint8", "image", "hwc", 0, 255), "x": LeafSpec((3,), "float32", "vector")}
    size, arrays = layout.map_layout(EnvSpec(leaves, ActionSpec((4, 2)), info=("lives",)), num_rows=3, num_workers=2)
    assert arrays["obs/image"][1:] == ["uint8", (2, 3, 5, 7, 3)]  # two slots of three rows
    assert arrays["final/x"][1:] == ["float32", (3, 3)]
    assert arrays["discrete"][1:] == ["int64", (3, 2)]
    assert arrays["game"][1:] == ["int64", (3,)]
    end = 0
    for offset, dtype, shape in arrays.values():
        assert offset % 64 == 0
        assert offset >= end
        end = offset + np.dtype(dtype).itemsize * int(np.prod(shape))
    assert size >= end
