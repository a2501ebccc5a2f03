"""Any space there and back: what an environment gives and takes is the same, whatever it is put together from."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from pronghorn.envworker.spaces import Actions, Observations
from pronghorn.spec_file import load_spec, spec_bytes
from pronghorn.types import EnvSpec

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)
shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
names = st.text("abcdefgh_", min_size=1, max_size=3)


@st.composite
def boxes(draw: st.DrawFn, dtypes: tuple[type, ...]) -> spaces.Box:
    dtype = draw(st.sampled_from(dtypes))
    low = draw(st.integers(0 if dtype is np.uint8 else -5, 5))
    return spaces.Box(low, low + draw(st.integers(1, 9)), draw(shapes), dtype)


codes = st.one_of(
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 6), st.integers(-4, 4)),
    st.builds(
        lambda sizes, start: spaces.MultiDiscrete(sizes, start=[start] * len(sizes)),
        st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(-3, 3),
    ),
    st.builds(spaces.MultiBinary, st.one_of(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=2))),
)  # fmt: skip


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Dictionaries and tuples of them, two levels deep."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(names, inner, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: spaces.Tuple(tuple(parts))),
        ),
        max_leaves=5,
    )


actions = nested(st.one_of(codes, boxes((np.float32, np.float64, np.int16, np.uint8))))
observations = nested(st.one_of(codes, boxes((np.float32, np.float64, np.int16, np.int64, np.uint8))))


def parts_of(space: Any, value: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """{path: (leaf space, its part of the value)}, in the order in which spaces are walked."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keys = space.spaces.keys() if isinstance(space, spaces.Dict) else range(len(space.spaces))
        found: dict[str, tuple[Any, Any]] = {}
        for key in keys:
            found |= parts_of(space[key], value[key], f"{path}/{key}")
        return found
    return {path.removeprefix("/") or "obs": (space, value)}


def start_of(space: Any) -> Any:
    """What a 0-based code lacks."""
    if isinstance(space, spaces.Box):
        return space.low.astype(np.int64)
    return getattr(space, "start", 0)


@SETTINGS
@given(actions, st.integers(0, 2**31))
def test_an_action_taken_apart_and_built_is_the_same(space: Any, seed: int) -> None:
    space.seed(seed)
    action, spec = space.sample(), Actions(space)
    discrete, continuous = [], []
    for part, value in parts_of(space, action).values():
        if isinstance(part, spaces.Box) and part.dtype.kind == "f":
            continuous += np.ravel(value).tolist()
        else:
            discrete += np.ravel(np.asarray(value, np.int64) - start_of(part)).tolist()
    assert all(0 <= d < n for d, n in zip(discrete, spec.discrete, strict=True))
    assert all(lo <= c <= hi for lo, c, hi in zip(spec.low, continuous, spec.high, strict=True))
    built = spec.unflatten(np.array(discrete, np.int64), np.array(continuous, np.float32))
    pairs = zip(parts_of(space, built).values(), parts_of(space, action).values(), strict=True)
    for (part, one), (_, other) in pairs:
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(one, other, rtol=1e-6)
        assert np.asarray(one).dtype.kind == np.asarray(other).dtype.kind, part


@SETTINGS
@given(observations, st.integers(0, 2**31))
def test_an_observation_is_in_its_leaves_and_nowhere_else(space: Any, seed: int) -> None:
    space.seed(seed)
    value = space.sample()
    parts = parts_of(space, value)
    if len({name.lower() for name in parts} | {"last_action"}) <= len(parts) or "action_mask" in parts:
        return  # names that would meet
    flattened = Observations(space, 0)
    flat, spec = flattened.flatten(value), flattened.to_json()
    assert flat.keys() == parts.keys() == spec.keys()
    for name, (_, part) in parts.items():
        start = np.reshape(spec[name].get("start", np.zeros(flat[name].shape)), flat[name].shape)
        own = flat[name] + start
        np.testing.assert_allclose(own.astype(np.float64), np.asarray(part, np.float64), rtol=1e-6)
        assert (list(flat[name].shape), flat[name].dtype.name) == (spec[name]["shape"], spec[name]["dtype"])


@SETTINGS
@given(observations, actions)
def test_what_a_worker_says_of_spaces_is_the_same_after_a_file(observed: Any, acted: Any) -> None:
    raw = {"observation": Observations(observed, 0).to_json(), "action": Actions(acted).to_json(), "name": "any"}
    spec = EnvSpec.from_json(json.loads(json.dumps(raw)))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "env.json").write_bytes(spec_bytes(spec))
        assert load_spec(Path(folder)) == spec
