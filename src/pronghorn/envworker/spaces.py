"""Translates Gymnasium (and old Gym) spaces into flat named arrays and back; runs no environment.

Spaces are recognised by class name, so neither package is imported. Rules of the translation:

    observation   Box float16/32/64 -> float32 'vector'; integers -> int32 or int64 'vector'; bool -> 'binary'
                  Box uint8, rank 3 -> 'image' (layout decided by the sizes, or by `image_layout`)
                  Box uint8, rank 2, at least 16 x 16 -> 'image' with one channel; any other uint8 -> 'vector'
                  Discrete, MultiDiscrete -> 0-based int64 'discrete'; MultiBinary -> uint8 'binary'
                  Dict, Tuple -> leaves named by their path, 'inventory/0'; a lone space is the leaf 'obs'
                  top-level key 'action_mask' -> uint8 'mask', one entry per choice of every discrete factor
    action        Discrete, MultiDiscrete, MultiBinary -> discrete factors; Dict, Tuple -> all of their parts
                  Box float -> continuous dimensions (bounds must be finite)
                  Box integer -> one discrete factor per entry with the values low ... high (at most 1024)
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

Path = Tuple[Any, ...]  # the keys and indices that lead to a part of a space
Build = Callable[[Any, Any], Any]  # (discrete [..., D], continuous [..., C]) -> native action

ACTION_MASK = "action_mask"
RESERVED = ("last_action", "last_reward")  # leaves that the trainer adds itself
MAX_INTEGER_CHOICES = 1024
MIN_IMAGE_SIDE = 16
_KNOWN = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple")


class ContractBroken(Exception):
    """The environment breaks the contract of an environment; the message says what came and what is needed."""

    code = "contract"


class UnsupportedSpace(ContractBroken):
    """A space that has no flat form, named by its path."""

    code = "space"


def kind_of(space: Any, path: Path) -> str:
    """Name of the space's kind, by the class names of its bases (so that subclasses work)."""
    names = [base.__name__ for base in type(space).__mro__]
    for name in names:
        if name in _KNOWN:
            return name
    raise UnsupportedSpace(
        "%s is a %s space, which has no fixed-size array form. Leave it out by naming the keys to use "
        "(--env.obs-keys KEY ...), or convert it in a wrapper; supported are %s."
        % (_where(path), names[0], ", ".join(_KNOWN))
    )


def _where(path: Path) -> str:
    return "'%s'" % "/".join(str(key) for key in path) if path else "the space itself"


def decide_layout(shape: Sequence[int], setting: str = "", path: Path = ()) -> str:
    """'hwc' or 'chw' of a rank-3 image: the channel axis is the end whose size is much smaller than both others."""
    if setting:
        return setting
    height_first, channels_first = _looks_like_channels(shape[2], shape[:2]), _looks_like_channels(shape[0], shape[1:])
    if height_first == channels_first:
        raise UnsupportedSpace(
            "%s has the image shape %s, where the channel axis cannot be told from the sizes. "
            "Say which it is: --env.image-layout hwc|chw." % (_where(path), tuple(shape))
        )
    return "hwc" if height_first else "chw"


def _looks_like_channels(size: int, others: Sequence[int]) -> bool:
    side = min(others)
    return size < side and side > 4 and (size <= 4 or (size <= 16 and 2 * size <= side))


class Leaf:
    """One flat array of an observation: where it is found, what it must look like, what it becomes."""

    def __init__(
        self,
        name: str,
        path: Path,
        source_shape: Sequence[int],
        shape: Sequence[int],
        dtype: Any,
        kind: str,
        **extra: Any,
    ) -> None:
        self.name, self.path, self.source_shape, self.shape = name, path, tuple(source_shape), tuple(shape)
        self.dtype, self.kind, self.extra = np.dtype(dtype), kind, extra
        self.start: Any = 0  # subtracted, so that codes are 0-based
        self._accepts = "biuf" if self.dtype.kind == "f" else "biu"
        self._top = np.asarray(extra["n"]).reshape(self.shape) if kind == "discrete" else None

    def to_json(self) -> Dict[str, Any]:
        start = np.ravel(self.start)
        shifted = {"start": start.tolist()} if start.any() else {}
        return dict(self.extra, shape=list(self.shape), dtype=self.dtype.name, kind=self.kind, **shifted)

    def read(self, obs: Any, count: Optional[int] = None) -> Any:
        """A fresh array (never an alias of the environment's own memory) of the leaf's shape and dtype.

        count: obs is a batch of so many, and the result has that leading dimension.
        """
        lead = () if count is None else (count,)
        value = obs
        try:
            for key in self.path:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            raise ContractBroken("the observation lacks the leaf '%s' that its space declares" % self.name) from None
        array = np.asarray(value)  # lazy frame stacks become arrays here
        if array.shape != lead + self.source_shape:
            raise ContractBroken(
                "observation leaf '%s' has shape %s; its space declares %s"
                % (self.name, array.shape, lead + self.source_shape)
            )
        if array.dtype.kind not in self._accepts:
            raise ContractBroken(
                "observation leaf '%s' has dtype %s, which does not fit the %s that its space declares"
                % (self.name, array.dtype, self.dtype)
            )
        out = np.array(array, dtype=self.dtype).reshape(lead + self.shape)
        return out if self._top is None else self._checked_codes(out)

    def _checked_codes(self, codes: Any) -> Any:
        codes -= self.start
        if (codes < 0).any() or (codes >= self._top).any():
            raise ContractBroken(
                "observation leaf '%s' holds the 0-based codes %s; its space allows [0, n) with n = %s"
                % (self.name, codes.tolist(), self.extra["n"])
            )
        return codes


class Observations:
    """Flattens observations of one space. keys: the Dict keys (or 'a/b' paths) to use; empty means all."""

    def __init__(self, space: Any, num_choices: int, keys: Sequence[str] = (), image_layout: str = "") -> None:
        if image_layout not in ("", "hwc", "chw"):
            raise ContractBroken("image_layout = %r: it must be 'hwc' or 'chw'" % (image_layout,))
        self._num_choices, self._layout, self._keys = num_choices, image_layout, tuple(keys)
        self._seen: List[str] = []
        self.leaves: List[Leaf] = []
        self._walk(space, ())
        self._check_keys()

    def to_json(self) -> Dict[str, Any]:
        return {leaf.name: leaf.to_json() for leaf in self.leaves}

    def flatten(self, obs: Any, count: Optional[int] = None) -> Dict[str, Any]:
        """{leaf: array} of one observation, or of a batch of `count`; arrays are copies."""
        return {leaf.name: leaf.read(obs, count) for leaf in self.leaves}

    def _walk(self, space: Any, path: Path) -> None:
        name = "/".join(str(key) for key in path) or "obs"
        bases = [base.__name__ for base in type(space).__mro__]
        if "Dict" in bases:
            for key in space.spaces:
                self._walk(space.spaces[key], (*path, key))
        elif "Tuple" in bases:
            for index, part in enumerate(space.spaces):
                self._walk(part, (*path, index))
        else:
            self._seen.append(name)
            if self._selected(name):
                self._add(name, space, path)

    def _selected(self, name: str) -> bool:
        return not self._keys or any(name == key or name.startswith(key + "/") for key in self._keys)

    def _check_keys(self) -> None:
        for key in self._keys:
            if not any(name == key or name.startswith(key + "/") for name in self._seen):
                raise ContractBroken("obs_keys names '%s'; the observation has %s" % (key, ", ".join(self._seen)))
        if not self.leaves:
            raise UnsupportedSpace("the observation space has no leaves at all")

    def _add(self, name: str, space: Any, path: Path) -> None:
        if name in RESERVED or name in [leaf.name for leaf in self.leaves]:
            raise UnsupportedSpace("two observation leaves would be called '%s'; rename the key in a wrapper" % name)
        kind = kind_of(space, path)
        if path == (ACTION_MASK,):
            leaf = self._mask(space, path, kind)
        elif kind == "Box":
            leaf = self._box(name, space, path)
        else:
            leaf = _codes(name, space, path, kind)
        self.leaves.append(leaf)

    def _mask(self, space: Any, path: Path, kind: str) -> Leaf:
        if kind not in ("Box", "MultiBinary", "MultiDiscrete") or np.dtype(space.dtype).kind not in "biu":
            raise UnsupportedSpace("'action_mask' must be an integer or bool array, one entry per choice")
        size = int(np.prod(space.shape, dtype=np.int64))
        if size != self._num_choices:
            raise UnsupportedSpace(
                "'action_mask' has %d entries; the discrete factors of the action have %d choices together"
                % (size, self._num_choices)
            )
        return Leaf(ACTION_MASK, path, space.shape, (size,), np.uint8, "mask")

    def _box(self, name: str, space: Any, path: Path) -> Leaf:
        shape, source = tuple(space.shape), np.dtype(space.dtype)
        dtype = _flat_dtype(source, path)
        extra = _bounds(space)
        if len(shape) == 3 and (source == np.uint8 or self._layout):
            return Leaf(
                name, path, shape, shape, dtype, "image", layout=decide_layout(shape, self._layout, path), **extra
            )
        if len(shape) == 2 and source == np.uint8 and min(shape) >= MIN_IMAGE_SIDE:
            return Leaf(name, path, shape, (*shape, 1), dtype, "image", layout="hwc", **extra)
        return Leaf(name, path, shape, shape, dtype, "binary" if source.kind == "b" else "vector", **extra)


def _flat_dtype(source: Any, path: Path) -> Any:
    if source.kind == "f":
        return np.float32
    if source.kind in "iu":
        if source == np.uint8:
            return np.uint8
        return np.int64 if source.itemsize >= 8 or source == np.uint32 else np.int32
    if source.kind == "b":
        return np.uint8
    raise UnsupportedSpace("%s is a Box of dtype %s; supported are float, integer and bool" % (_where(path), source))


def _bounds(space: Any) -> Dict[str, float]:
    if np.dtype(space.dtype).kind == "b" or not np.size(space.low):
        return {}
    low, high = float(np.min(space.low)), float(np.max(space.high))
    bounds = {"low": low} if np.isfinite(low) else {}
    return dict(bounds, high=high) if np.isfinite(high) else bounds


def _codes(name: str, space: Any, path: Path, kind: str) -> Leaf:
    if kind == "MultiBinary":
        return Leaf(name, path, space.shape, space.shape, np.uint8, "binary")
    if kind == "Discrete":
        leaf = Leaf(name, path, (), (), np.int64, "discrete", n=[int(space.n)])
        leaf.start = int(getattr(space, "start", 0))
        return leaf
    sizes = np.asarray(space.nvec, dtype=np.int64)
    leaf = Leaf(name, path, sizes.shape, sizes.shape, np.int64, "discrete", n=[int(n) for n in sizes.ravel()])
    leaf.start = _starts(space, sizes)
    return leaf


def _starts(space: Any, sizes: Any) -> Any:
    start = getattr(space, "start", None)
    return np.zeros_like(sizes) if start is None else np.asarray(start, dtype=np.int64).reshape(sizes.shape)


class Actions:
    """Builds native actions of one space from D discrete factors and C continuous dimensions.

    tree: how they are put together, as JSON; `action_builder` reads it, also where the space itself is unknown.
    """

    def __init__(self, space: Any) -> None:
        self.discrete: List[int] = []
        self.low: List[float] = []
        self.high: List[float] = []
        self.tree = self._describe(space, ())
        if not self.discrete and not self.low:
            raise UnsupportedSpace("the action space has no parts at all")
        self._build = action_builder(self.tree)

    @property
    def num_choices(self) -> int:
        return sum(self.discrete)

    def to_json(self) -> Dict[str, Any]:
        return {"discrete": self.discrete, "low": self.low, "high": self.high, "tree": self.tree}

    def unflatten(self, discrete: Any, continuous: Any) -> Any:
        """The native action; its arrays are copies. discrete: [D] integers, 0-based; continuous: [C] floats."""
        return self._build(discrete, continuous)

    def _describe(self, space: Any, path: Path) -> Dict[str, Any]:
        kind = kind_of(space, path)
        if kind == "Dict":
            parts: List[Any] = [[key, self._describe(part, (*path, key))] for key, part in space.spaces.items()]
            return {"kind": "dict", "parts": parts}
        if kind == "Tuple":
            parts = [self._describe(part, (*path, index)) for index, part in enumerate(space.spaces)]
            return {"kind": "tuple", "parts": parts}
        if kind == "Discrete":
            self.discrete.append(int(space.n))
            return {"kind": "discrete", "at": len(self.discrete) - 1, "start": int(getattr(space, "start", 0))}
        if kind == "Box":
            return self._box(space, path)
        if kind == "MultiBinary":
            sizes = np.full(space.shape, 2, dtype=np.int64)
            return self._factors(sizes, np.zeros_like(sizes), space.dtype)
        sizes = np.asarray(space.nvec, dtype=np.int64)
        return self._factors(sizes, _starts(space, sizes), space.dtype)

    def _factors(self, sizes: Any, starts: Any, dtype: Any) -> Dict[str, Any]:
        at = len(self.discrete)
        self.discrete.extend(int(n) for n in sizes.ravel())
        return {"kind": "factors", "at": at, "starts": np.asarray(starts).ravel().tolist(),
                "shape": list(sizes.shape), "dtype": np.dtype(dtype).name}  # fmt: skip

    def _box(self, space: Any, path: Path) -> Dict[str, Any]:
        dtype, low, high = np.dtype(space.dtype), np.asarray(space.low), np.asarray(space.high)
        with np.errstate(over="ignore"):  # actions are float32, and some declare the largest float64 for 'no bound'
            finite = np.isfinite(low.astype(np.float32)).all() and np.isfinite(high.astype(np.float32)).all()
        if not finite:
            raise UnsupportedSpace(
                "%s is an action Box with infinite bounds, so its scale is unknown. Give it finite bounds, "
                "for instance with gymnasium.wrappers.RescaleAction or ClipAction." % _where(path)
            )
        if dtype.kind in "iub":
            return self._integer_box(low.astype(np.int64), high.astype(np.int64), dtype, path)
        at = len(self.low)
        self.low.extend(float(x) for x in low.ravel())
        self.high.extend(float(x) for x in high.ravel())
        return {"kind": "box", "at": at, "shape": list(space.shape), "dtype": dtype.name}

    def _integer_box(self, low: Any, high: Any, dtype: Any, path: Path) -> Dict[str, Any]:
        sizes = high - low + 1
        if sizes.size and sizes.max() > MAX_INTEGER_CHOICES:
            raise UnsupportedSpace(
                "%s is an integer action Box with %d values in one entry; at most %d can be a discrete factor. "
                "Make it a float Box and round in a wrapper." % (_where(path), sizes.max(), MAX_INTEGER_CHOICES)
            )
        return self._factors(sizes, low, dtype)


def action_builder(tree: Dict[str, Any]) -> Build:
    """The function that builds native actions from (discrete [..., D], continuous [..., C]), by `Actions.tree`.

    With leading dimensions, every part of the result has them too. Arrays of the result are copies.
    """
    kind = tree["kind"]
    if kind == "dict":
        named = [(key, action_builder(part)) for key, part in tree["parts"]]
        return lambda d, c: {key: build(d, c) for key, build in named}
    if kind == "tuple":
        builds = [action_builder(part) for part in tree["parts"]]
        return lambda d, c: tuple(build(d, c) for build in builds)
    at = tree["at"]
    if kind == "discrete":
        start = tree["start"]
        return lambda d, c: np.int64(d[at] + start) if d.ndim == 1 else d[..., at] + start
    shape, dtype = tuple(tree["shape"]), np.dtype(tree["dtype"])
    end = at + int(np.prod(shape, dtype=np.int64))
    if kind == "box":
        return lambda d, c: np.array(c[..., at:end], dtype=dtype).reshape(c.shape[:-1] + shape)
    starts = np.array(tree["starts"], np.int64)
    return lambda d, c: (np.asarray(d)[..., at:end] + starts).astype(dtype).reshape(d.shape[:-1] + shape)
