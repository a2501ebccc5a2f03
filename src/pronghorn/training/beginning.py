"""What several learners begin with: the settings and the last checkpoint, which learner 0 reads and gives to all.

So one directory is enough: the others' machines need not see it. It decides nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import tomli_w
import torch
from safetensors.torch import load as unpack
from safetensors.torch import save as pack

import pronghorn.training.checkpoint as checkpoints
from pronghorn.config import Config, walk
from pronghorn.errors import ConfigError
from pronghorn.settings_file import from_toml, to_toml
from pronghorn.training.checkpoint import Checkpoint
from pronghorn.training.world import World

_GIVEN, _SAVED, _CHECKPOINT = "given.toml", "saved.toml", "checkpoint"


class Beginning(NamedTuple):
    """given: settings, not yet resolved.  latest: what to go on from, and before: settings of the run that saved it."""

    given: Config
    latest: Checkpoint | None = None
    before: Config | None = None


def shared(world: World, begin: Beginning) -> Beginning:
    """Learner 0's beginning, for all. Raises ConfigError where another was started with other settings."""
    if world.size == 1:
        return begin
    data = world.give(_packed(begin) if world.leads else b"")
    if world.leads:
        return begin
    theirs = _unpacked(data)
    if theirs.latest is None:
        _require_same(theirs.given, begin.given)
    return theirs


def _packed(begin: Beginning) -> bytes:
    files = {_GIVEN: tomli_w.dumps(to_toml(begin.given)).encode()}
    if begin.latest is not None and begin.before is not None:
        files[_SAVED] = tomli_w.dumps(to_toml(begin.before)).encode()
        folder = begin.latest.path
        files |= {f"{_CHECKPOINT}/{p.name}": p.read_bytes() for p in folder.iterdir() if p.is_file()}
    tensors = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in files.items() if data}
    return bytes(pack(tensors))


def _unpacked(data: bytes) -> Beginning:
    with tempfile.TemporaryDirectory(prefix="pronghorn-") as name:
        folder = Path(name)
        (folder / _CHECKPOINT).mkdir()
        for file, content in unpack(data).items():
            (folder / file).write_bytes(content.numpy().tobytes())
        given = from_toml(folder / _GIVEN)
        if not (folder / _SAVED).exists():
            return Beginning(given)
        return Beginning(given, checkpoints.load(folder / _CHECKPOINT), from_toml(folder / _SAVED))


def _require_same(theirs: Config, mine: Config) -> None:
    """The command line must be one and the same for all."""
    other = dict(walk(mine))
    for name, value in walk(theirs):
        if other[name] != value:
            fix = "Start all learners with one command line."
            raise ConfigError(name, other[name], f"learner 0 was started with {value!r}", fix)
