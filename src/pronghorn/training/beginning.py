"""What several learners begin with: the settings and the last checkpoint, which learner 0 reads and gives to all.

So one directory is enough: the others' machines need not see it. It decides nothing.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
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

_GIVEN, _SAVED, _CHECKPOINT, _PATH = "given.toml", "saved.toml", "checkpoint", "path"


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
    with _unpacked(data) as folder:
        before = from_toml(folder / _SAVED) if (folder / _SAVED).exists() else None
        theirs = Beginning(from_toml(folder / _GIVEN), _checkpoint_in(folder), before)
    if theirs.latest is None:
        _require_same(theirs.given, begin.given)
    return theirs


def shared_checkpoint(world: World, latest: Checkpoint | None) -> Checkpoint | None:
    """Learner 0's checkpoint, or that it has none, for all."""
    data = world.give(_bytes_of(_files_of(latest)) if world.leads else b"")
    if world.leads:
        return latest
    with _unpacked(data) as folder:
        return _checkpoint_in(folder)


def _packed(begin: Beginning) -> bytes:
    files = {_GIVEN: tomli_w.dumps(to_toml(begin.given)).encode(), **_files_of(begin.latest)}
    if begin.before is not None:
        files[_SAVED] = tomli_w.dumps(to_toml(begin.before)).encode()
    return _bytes_of(files)


def _files_of(latest: Checkpoint | None) -> dict[str, bytes]:
    """What a checkpoint is on the disk, and where it lies."""
    if latest is None:
        return {_PATH: b""}
    files = {f"{_CHECKPOINT}/{p.name}": p.read_bytes() for p in latest.path.iterdir() if p.is_file()}
    return {_PATH: str(latest.path).encode(), **files}


def _bytes_of(files: Mapping[str, bytes]) -> bytes:
    filled = {name: data for name, data in files.items() if data}
    return bytes(pack({name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in filled.items()}))


@contextlib.contextmanager
def _unpacked(data: bytes) -> Iterator[Path]:
    """A directory with the files, while this lasts."""
    with tempfile.TemporaryDirectory(prefix="pronghorn-") as name:
        folder = Path(name)
        (folder / _CHECKPOINT).mkdir()
        for file, content in unpack(data).items():
            (folder / file).write_bytes(content.numpy().tobytes())
        yield folder


def _checkpoint_in(folder: Path) -> Checkpoint | None:
    """Read where it lies here, and named by where learner 0 has it."""
    if not (folder / _PATH).exists():
        return None
    return replace(checkpoints.load(folder / _CHECKPOINT), path=Path((folder / _PATH).read_text()))


def _require_same(theirs: Config, mine: Config) -> None:
    """The command line must be one and the same for all."""
    other = dict(walk(mine))
    for name, value in walk(theirs):
        if other[name] != value:
            fix = "Start all learners with one command line."
            raise ConfigError(name, other[name], f"learner 0 was started with {value!r}", fix)
