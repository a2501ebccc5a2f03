"""env.json of a run: what its environment looked like, so that a policy is loaded without it. Values are checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pronghorn.envworker.spaces import action_builder
from pronghorn.types import EnvSpec, Signature
from pronghorn.untrusted import CHECKSUM, MAX_TEXT_BYTES, parse_json, read_bytes, sealed_json, unseal, usable, whole

ENV_FILE = "env.json"
_KINDS = ("image", "vector", "discrete", "binary", "mask")
_KEYS = {"observation", "action", "rows_per_env", "rows_wait", "frame_skip", "info", "render_fps", "name", "agents",
         "rewards", "signatures"}  # fmt: skip


def load_spec(run_dir: Path) -> EnvSpec:
    """What the run's environment looked like. Raises CheckpointError."""
    path = run_dir / ENV_FILE
    with usable(path):
        data = read_bytes(path, MAX_TEXT_BYTES)
        raw = parse_json(data)
        if CHECKSUM in raw:  # runs of earlier versions have none
            unseal(raw, data)
        _check(raw)
        return EnvSpec.from_json(raw)


def spec_bytes(spec: EnvSpec) -> bytes:
    """The content of env.json."""
    return sealed_json(spec_to_json(spec))


def spec_to_json(spec: EnvSpec) -> dict[str, Any]:
    """The JSON that `EnvSpec.from_json` reads."""
    return _spaces_to_json(spec) | {
        "rows_per_env": spec.rows_per_env,
        "rows_wait": spec.rows_wait,
        "frame_skip": spec.frame_skip,
        "info": spec.info,
        "render_fps": spec.render_fps,
        "name": spec.name,
        "agents": spec.agents,
        "rewards": dict(spec.rewards),
        "signatures": [
            _spaces_to_json(one) | {"rows": one.rows, "leaves": dict(one.leaves)} for one in spec.signatures
        ],
    }


def _spaces_to_json(of: EnvSpec | Signature) -> dict[str, Any]:
    return {
        "observation": {
            name: {"shape": leaf.shape, "dtype": leaf.dtype, "kind": leaf.kind, "layout": leaf.layout,
                   "low": str(leaf.low), "high": str(leaf.high), "n": leaf.n, "start": leaf.start}
            for name, leaf in of.observation.items()
        },
        "action": {"discrete": of.action.discrete, "low": of.action.low, "high": of.action.high,
                   "tree": json.loads(of.action.tree) if of.action.tree else None},
    }  # fmt: skip


# ---------------------------------------------------------------- what each value may be


def _check(raw: Mapping[str, Any]) -> None:
    if unknown := sorted(raw.keys() - _KEYS):
        raise ValueError(f"it has unknown names: {unknown[:3]}")
    _check_spaces(raw)
    num_rows = whole(raw.get("rows_per_env", 1), 1)
    whole(raw.get("frame_skip", 1), 1)
    agents, signatures = raw.get("agents", []), raw.get("signatures", [])
    _require(isinstance(raw.get("rows_wait", False), bool), "rows_wait is true or false")
    _require(all(isinstance(name, str) for name in (*raw.get("info", []), *agents)), "info and agents are names")
    _require(len(agents) in (0, num_rows), "agents has a name for each row, or none")
    for signature in signatures:
        _check_spaces(signature)
        _require(all(whole(row) < num_rows for row in signature["rows"]), "rows of signatures exist")
        _require(signature["leaves"].keys() == signature["observation"].keys(), "leaves has the observation's names")
        _require(all(place in raw["observation"] for place in signature["leaves"].values()), "leaves exist")


def _check_spaces(raw: Mapping[str, Any]) -> None:
    for name, leaf in raw["observation"].items():
        _check_leaf(name, leaf)
    action = raw["action"]
    discrete, low, high = ([*action[part]] for part in ("discrete", "low", "high"))
    _require(all(whole(n, 1) for n in discrete), "discrete factors have sizes")
    _require(len(low) == len(high), "low and high have an entry for each dimension")
    _require(all(bottom < top for bottom, top in zip(low, high, strict=True)), "low lies below high")
    if action.get("tree"):
        with np.errstate(all="ignore"):  # built once, as it will be when the policy acts
            action_builder(action["tree"])(np.zeros(len(discrete), np.int64), np.zeros(len(low), np.float32))


def _check_leaf(name: str, leaf: Mapping[str, Any]) -> None:
    shape, kind = [whole(side) for side in leaf["shape"]], leaf["kind"]
    num_entries = math.prod(shape)
    _require(num_entries < 2**40, f"'{name}' has a size that memory can hold")
    _require(np.dtype(leaf["dtype"]).kind in "biuf" and kind in _KINDS, f"'{name}' has a known dtype and kind")
    if kind == "image":
        _require(len(shape) == 3 and leaf.get("layout") in ("hwc", "chw"), f"'{name}' has an image's shape and layout")
    codes, start = [*leaf.get("n", [])], [*leaf.get("start", [])]
    _require(all(whole(n, 1) for n in codes) and all(type(s) is int for s in start), f"'{name}' has numbers of codes")
    if kind == "discrete":  # one number of codes may stand for all entries
        fits = num_entries < 2**22 and len(codes) in (1, num_entries)
        _require(fits, f"'{name}' has a number of codes for each entry")
    _require(len(start) in (0, num_entries), f"'{name}' has a start for each entry")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"the rule is broken that {rule}")
