from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from pronghorn.envworker.spaces import Actions, ContractBroken, Observations, UnsupportedSpace, decide_layout


def leaves(space, num_choices=0, **options):
    return Observations(space, num_choices, **options).to_json()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float64", "float32"), ("float16", "float32"), ("int8", "int32"), ("int64", "int64"), ("uint32", "int64"),
     ("uint16", "int32"), ("uint8", "uint8"), ("bool", "uint8")],
)  # fmt: skip
def test_box_of_every_dtype_and_rank_becomes_a_vector(dtype, expected):
    low, high = (0, 1) if dtype == "bool" else (0, 9)
    space = spaces.Box(low, high, (2, 1, 3, 2), dtype)
    obs = Observations(space, 0)
    leaf = obs.to_json()["obs"]
    assert (leaf["shape"], leaf["dtype"]) == ([2, 1, 3, 2], expected)
    assert leaf["kind"] == ("binary" if dtype == "bool" else "vector")
    sample = space.sample()
    flat = obs.flatten(sample)["obs"]
    assert flat.dtype == expected
    np.testing.assert_array_equal(flat, sample.astype(expected))


def test_bounds_are_given_only_where_they_are_finite():
    leaf = leaves(spaces.Box(np.array([0, -1], np.float32), np.array([np.inf, 2], np.float32)))["obs"]
    assert leaf["low"] == -1.0
    assert "high" not in leaf


@pytest.mark.case("SPA-15")
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((3, 40, 48), "chw"), ((40, 48, 3), "hwc"), ((1, 84, 84), "chw"), ((84, 84, 4), "hwc"), ((7, 7, 3), "hwc"),
     ((12, 64, 64), "chw"), ((210, 160, 1), "hwc")],
)  # fmt: skip
def test_image_layout_is_read_from_the_sizes(shape, layout):
    leaf = leaves(spaces.Box(0, 255, shape, np.uint8))["obs"]
    assert (leaf["kind"], leaf["layout"], leaf["shape"]) == ("image", layout, list(shape))


@pytest.mark.case("SPA-15")
@pytest.mark.parametrize("shape", [(3, 40, 3), (8, 8, 8), (4, 84, 3)])
def test_an_ambiguous_image_asks_for_the_setting_and_takes_it(shape):
    space = spaces.Dict({"camera": spaces.Box(0, 255, shape, np.uint8)})
    with pytest.raises(UnsupportedSpace, match=r"'camera' has the image shape .*--env.image-layout hwc\|chw"):
        leaves(space)
    assert leaves(space, image_layout="hwc")["camera"]["layout"] == "hwc"
    assert decide_layout(shape, "chw") == "chw"
    with pytest.raises(ContractBroken, match="'hwc' or 'chw'"):
        leaves(space, image_layout="nchw")


def test_the_setting_makes_a_float_box_an_image():
    space = spaces.Box(0, 1, (32, 32, 3), np.float32)
    assert leaves(space)["obs"]["kind"] == "vector"
    assert leaves(space, image_layout="hwc")["obs"] == {
        "kind": "image", "layout": "hwc", "shape": [32, 32, 3], "dtype": "float32", "low": 0.0, "high": 1.0,
    }  # fmt: skip


def test_a_grey_picture_gets_a_channel_and_a_small_table_does_not():
    obs = Observations(spaces.Box(0, 255, (16, 20), np.uint8), 0)
    assert obs.to_json()["obs"] == {
        "kind": "image", "layout": "hwc", "shape": [16, 20, 1], "dtype": "uint8", "low": 0.0, "high": 255.0,
    }  # fmt: skip
    picture = np.arange(320, dtype=np.uint8).reshape(16, 20)
    np.testing.assert_array_equal(obs.flatten(picture)["obs"][..., 0], picture)
    assert leaves(spaces.Box(0, 255, (15, 20), np.uint8))["obs"]["kind"] == "vector"


def test_codes_are_zero_based():
    obs = Observations(
        spaces.Tuple((spaces.Discrete(3, start=5), spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]))),
        0,
    )
    json = obs.to_json()
    assert json["0"] == {"kind": "discrete", "shape": [], "dtype": "int64", "n": [3], "start": [5]}
    shifted = {"n": [2, 3, 4, 5], "start": [0, 1, 2, 3]}
    assert json["1"] == {"kind": "discrete", "shape": [2, 2], "dtype": "int64", **shifted}
    flat = obs.flatten((7, np.array([[1, 3], [2, 7]])))
    assert flat["0"].tolist() == 2
    assert flat["1"].tolist() == [[1, 2], [0, 4]]


def test_a_code_outside_its_range_is_refused():
    obs = Observations(spaces.Discrete(3, start=5), 0)
    with pytest.raises(ContractBroken, match=r"leaf 'obs' holds the 0-based codes 3;"):
        obs.flatten(8)


def test_nested_spaces_are_named_by_path():
    space = spaces.Dict(
        {
            "inventory": spaces.Tuple((spaces.MultiBinary(4), spaces.Discrete(2))),
            "self": spaces.Dict({"speed": spaces.Box(-1, 1, (3,), np.float64)}),
        }
    )
    obs = Observations(space, 0)
    assert list(obs.to_json()) == ["inventory/0", "inventory/1", "self/speed"]
    value = {"inventory": (np.array([0, 1, 1, 0], np.int8), 1), "self": {"speed": np.array([0.5, 0.25, -1.0])}}
    flat = obs.flatten(value)
    assert flat["inventory/0"].tolist() == [0, 1, 1, 0]
    assert flat["inventory/1"].tolist() == 1
    assert flat["self/speed"].tolist() == [0.5, 0.25, -1.0]


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (spaces.Text(5), "Text"),
        (spaces.Sequence(spaces.Discrete(2)), "Sequence"),
        (spaces.Graph(spaces.Discrete(2), None), "Graph"),
        (spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))), "OneOf"),
    ],
)
@pytest.mark.case("ENV-09")
def test_spaces_without_a_flat_form_are_named_and_can_be_left_out(space, name):
    whole = spaces.Dict(
        {"image": spaces.Box(0, 255, (7, 7, 3), np.uint8), "direction": spaces.Discrete(4), "note": space}
    )
    with pytest.raises(UnsupportedSpace, match=rf"'note' is a {name} space.*--env.obs-keys"):
        leaves(whole)
    assert set(leaves(whole, keys=["image", "direction"])) == {"image", "direction"}
    with pytest.raises(UnsupportedSpace, match=name):
        Actions(spaces.Tuple((spaces.Discrete(2), space)))


def test_keys_that_do_not_exist_are_refused():
    space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({"c": spaces.Discrete(3)})})
    assert list(leaves(space, keys=["b"])) == ["b/c"]
    with pytest.raises(ContractBroken, match="obs_keys names 'x'; the observation has a, b/c"):
        leaves(space, keys=["a", "x"])


def test_the_mask_must_cover_every_choice():
    action = Actions(spaces.MultiDiscrete([3, 2]))
    space = spaces.Dict({"action_mask": spaces.Box(0, 1, (5,), np.int8), "x": spaces.Discrete(2)})
    obs = Observations(space, action.num_choices)
    assert obs.to_json()["action_mask"] == {"kind": "mask", "shape": [5], "dtype": "uint8"}
    flat = obs.flatten({"action_mask": np.array([1, 0, 1, 1, 0], np.int8), "x": 0})
    assert flat["action_mask"].tolist() == [1, 0, 1, 1, 0]
    with pytest.raises(UnsupportedSpace, match=r"has 5 entries.*have 4 choices"):
        Observations(space, 4)
    with pytest.raises(UnsupportedSpace, match="integer or bool"):
        Observations(spaces.Dict({"action_mask": spaces.Box(0, 1, (5,), np.float32)}), 5)


def test_leaves_that_the_trainer_adds_cannot_be_taken():
    with pytest.raises(UnsupportedSpace, match="last_action"):
        leaves(spaces.Dict({"last_action": spaces.Discrete(2)}))
    with pytest.raises(UnsupportedSpace, match="two observation leaves would be called 'a/b'"):
        leaves(spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)}), "a/b": spaces.Discrete(2)}))


@pytest.mark.case("ENV-02")
def test_values_are_copied():
    obs = Observations(
        spaces.Dict({"v": spaces.Box(-1, 1, (2,), np.float32), "i": spaces.Box(0, 9, (20, 20), np.uint8)}), 0
    )
    value = {"v": np.zeros(2, np.float32), "i": np.zeros((20, 20), np.uint8)}
    flat = obs.flatten(value)
    value["v"][:] = 1
    value["i"][:] = 1
    assert flat["v"].tolist() == [0, 0]
    assert not flat["i"].any()


@pytest.mark.case("SHM-07")
def test_lazy_frames_are_read_at_each_step():
    class LazyFrames:
        def __init__(self, frames):
            self.frames = frames

        def __array__(self, dtype=None, copy=None):
            return np.stack(self.frames, axis=-1)

    obs = Observations(spaces.Box(0, 255, (20, 20, 2), np.uint8), 0)
    frames = [np.full((20, 20), 1, np.uint8), np.full((20, 20), 2, np.uint8)]
    assert obs.flatten(LazyFrames(frames))["obs"][0, 0].tolist() == [1, 2]
    frames[0] = np.full((20, 20), 3, np.uint8)
    assert obs.flatten(LazyFrames(frames))["obs"][0, 0].tolist() == [3, 2]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.zeros(2, np.float32), r"leaf 'obs' has shape \(2,\); its space declares \(3,\)"),
        (np.zeros((1, 3), np.float32), r"has shape \(1, 3\)"),
        ([0, 1], r"has shape \(2,\)"),
        (np.array(["a", "b", "c"]), "has dtype <U1"),
        (np.array([None] * 3), "has dtype object"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused(value, match):
    with pytest.raises(ContractBroken, match=match):
        Observations(spaces.Box(-1, 1, (3,), np.float32), 0).flatten(value)


def test_floats_for_an_integer_space_are_not_truncated_silently():
    with pytest.raises(ContractBroken, match=r"dtype float64.*uint8"):
        Observations(spaces.Box(0, 255, (2,), np.uint8), 0).flatten(np.array([0.5, 0.9]))


def test_a_missing_leaf_is_named():
    with pytest.raises(ContractBroken, match="lacks the leaf 'b'"):
        Observations(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}), 0).flatten({"a": 1})


ACTION_SPACES = [
    spaces.Discrete(4),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([3, 2, 5]),
    spaces.MultiDiscrete([[3, 2], [2, 2]], start=[[1, 0], [0, 7]]),
    spaces.MultiBinary([2, 3]),
    spaces.Box(-2, 3, (2, 2), np.float32),
    spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 10.0]), dtype=np.float64),
    spaces.Box(-1, 2, (3,), np.int16),
    spaces.Dict(
        {
            "move": spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (1,), np.float32))),
            "keys": spaces.MultiBinary(3),
        }
    ),
]


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
def test_every_built_action_lies_in_its_space(space):
    actions, rng = Actions(space), np.random.default_rng(1)
    for _ in range(30):
        discrete = np.array([rng.integers(n) for n in actions.discrete], np.int64)
        low, high = np.array(actions.low), np.array(actions.high)
        continuous = rng.uniform(low, high).astype(np.float32)
        action = actions.unflatten(discrete, continuous)
        assert space.contains(action), action
        create_empty_array(space)  # the space itself is a valid one


@pytest.mark.case("SPA-04")
def test_actions_keep_their_order_and_their_starts():
    actions = Actions(spaces.Dict({"a": spaces.Discrete(3, start=10), "b": spaces.Box(-1, 1, (2,), np.float64),
                                   "c": spaces.MultiDiscrete([2, 4], start=[5, 6])}))  # fmt: skip
    assert (actions.discrete, actions.low, actions.high) == ([3, 2, 4], [-1, -1], [1, 1])
    action = actions.unflatten(np.array([2, 1, 3]), np.array([0.5, -0.25], np.float32))
    assert action["a"] == 12
    assert action["b"].tolist() == [0.5, -0.25]
    assert action["b"].dtype == np.float64
    assert action["c"].tolist() == [6, 9]


def test_integer_boxes_are_factors_within_reason():
    assert Actions(spaces.Box(-1, 2, (3,), np.int16)).discrete == [4, 4, 4]
    with pytest.raises(UnsupportedSpace, match="with 1025 values in one entry"):
        Actions(spaces.Box(0, 1024, (1,), np.int32))


def test_actions_without_bounds_are_refused():
    with pytest.raises(UnsupportedSpace, match="'push' is an action Box with infinite bounds"):
        Actions(spaces.Dict({"push": spaces.Box(-np.inf, np.inf, (2,), np.float32)}))


def test_built_actions_do_not_alias_the_trainers_memory():
    actions = Actions(spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.MultiDiscrete([5, 5]))))
    discrete, continuous = np.array([1, 2]), np.array([0.5, 0.5], np.float32)
    box, codes = actions.unflatten(discrete, continuous)
    discrete[:], continuous[:] = 0, 0
    assert box.tolist() == [0.5, 0.5]
    assert codes.tolist() == [1, 2]


def test_spaces_of_other_packages_are_known_by_class_name():
    class Discrete:  # as in the old gym: no start
        n = 3

    class MyBox(spaces.Box):
        pass

    assert Actions(Discrete()).discrete == [3]
    assert leaves(MyBox(-1, 1, (2,), np.float32))["obs"]["kind"] == "vector"
