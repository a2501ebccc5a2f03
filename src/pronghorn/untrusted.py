"""Reads files that may be damaged, foreign or hostile, as data: nothing in them is executed, waited for or trusted.

What is wrong with a file is an OSError or a ValueError of a few words here; `usable` makes one CheckpointError of it,
with the file's name. What the content means is the caller's business.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pronghorn.errors import CheckpointError, PronghornError
from pronghorn.machine import available_memory

MAX_TEXT_BYTES = 32 * 2**20  # of JSON or TOML: as objects it takes up to thirty times as much memory
CHECKSUM = "checksum"
_NONE_YET = "0" * 64
_ALWAYS_FITS_BYTES = 16 * 2**20
_SHOWN = 300


@contextlib.contextmanager
def usable(path: Path) -> Iterator[None]:
    """Inside, content of the file `path` is read or put to use. What fails there is a CheckpointError that names it."""
    try:
        yield
    except PronghornError:
        raise
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # what a foreign content breaks is not known before
        words = str(error).split("\n")[0]
        missing = "it lacks " if isinstance(error, LookupError) else ""
        raise CheckpointError(
            f"{path} is damaged or was not written by Pronghorn: {missing}{shortened(words or type(error).__name__)}."
        ) from error


def shortened(text: str) -> str:
    """A text of whatever size as a part of a message."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The whole content of a regular file. most: bytes that it may have; None: as many as half of the memory holds.

    Raises OSError: it cannot be read, is too large, or is no file but a directory, pipe, socket or device.
    """
    _require_file(os.stat(path), most)  # before it is opened: that alone would wait for a pipe, or move a tape
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        _require_file(os.fstat(descriptor), most)
        return file.read()


def _require_file(found: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a directory, a pipe or a device, not a file")
    if most is None and found.st_size > _ALWAYS_FITS_BYTES:
        most = available_memory() // 2
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, where at most {most:,} can be")


# ---------------------------------------------------------------- JSON


def parse_json(data: bytes) -> Any:
    """The value of a JSON text. Raises ValueError: no JSON, a number that is not finite, a name twice, too deep."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None


def sealed_json(record: Mapping[str, Any]) -> bytes:
    """JSON with a checksum of itself: the SHA-256 of these bytes with zeros in the checksum's place."""
    data = json.dumps({CHECKSUM: _NONE_YET, **record}, indent=1, allow_nan=False).encode()
    return data.replace(_NONE_YET.encode(), hashlib.sha256(data).hexdigest().encode(), 1)


def unseal(record: dict[str, Any], data: bytes) -> None:
    """Take its checksum out of a record that was parsed from `data`. Raises ValueError: none, or a wrong one."""
    checksum = record.pop(CHECKSUM, None)
    if not isinstance(checksum, str) or len(checksum) != len(_NONE_YET):
        raise ValueError("it has no checksum of itself")
    if hashlib.sha256(data.replace(checksum.encode(), _NONE_YET.encode(), 1)).hexdigest() != checksum:
        raise ValueError("it differs from its own checksum")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one JSON object")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shortened(text)} is not a finite number")
    return value


# ---------------------------------------------------------------- values


def whole(value: Any, least: int = 0) -> int:
    """A whole number that a counter or a size may be. Raises ValueError."""
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{_shown(value)} is not a whole number of {least} or more")
    return value


def number(value: Any) -> float:
    """A finite number. Raises ValueError."""
    if type(value) not in (int, float) or not abs(value) < 1e308:
        raise ValueError(f"{_shown(value)} is not a finite number")
    return float(value)


def _shown(value: Any) -> str:
    return shortened(repr(value)) if type(value) in (str, float, bool, type(None)) else f"a {type(value).__name__}"
