"""The run directory and its checkpoints: whole or absent, never half; safetensors and JSON, no pickle, no code.

    <run>/checkpoints/<updates, zero-padded>/
        weights.safetensors     parameters and normaliser statistics
        optimizer.safetensors   the optimiser's tensors, named "<parameter index>/<name>"
        state.json              counters, hyper-parameters, statistics, and a SHA-256 of the two files

A checkpoint is written to a temporary name, flushed to the disk, and renamed. It decides nothing: when to save and
what to do with what was loaded is the trainer's business.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from pronghorn.errors import CheckpointError, RunDirError

FORMAT = 3  # 2: PopArt's mean and deviation beside the sums they come from; 3: two groups of the optimiser
_TEMPORARY, _REPLACED = ".partial-", ".replaced-"
_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """What one checkpoint holds. state: plain JSON values."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]
    path: Path


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Create the run directory and hold its lock, so that two processes never write one run. Raises RunDirError.

    A start that fails before it has written anything leaves no directory behind.
    """
    with contextlib.ExitStack() as stack:
        try:
            is_new = not run_dir.exists()
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(run_dir / "lock", "a"))
        except OSError as error:
            why = f"Cannot write the run directory {run_dir}: {error.strerror}. Choose another with --run-dir."
            raise RunDirError(why) from error
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # no file locks on this platform
        except OSError as error:
            raise RunDirError(f"{run_dir} is in use by another process. Choose another with --run-dir.") from error
        try:
            yield
        except BaseException:
            if [path.name for path in run_dir.iterdir()] == ["lock"]:
                (run_dir / "lock").unlink()
                if is_new:
                    run_dir.rmdir()
            raise


def previous(run_dir: Path, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to go on from, or None for a fresh start. Raises RunDirError if the directory says otherwise."""
    holds_run = (run_dir / "config.toml").exists() or (run_dir / "metrics.jsonl").exists()
    if holds_run and not resume:
        raise RunDirError(f"{run_dir} holds a run already. Add --resume to go on with it, or choose another --run-dir.")
    directory = run_dir / "checkpoints"
    remove_partial(directory)
    if list_checkpoints(directory):
        return load_latest(directory, warn=lambda text: print(text, file=sys.stderr))
    if resume:
        print(f"Nothing to resume in {run_dir}: starting a fresh run.", file=sys.stderr)
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)  # of a run that ended before its first checkpoint
    return None


def save(directory: Path, updates: int, weights: dict[str, Tensor], optimizer: dict[str, Any], state: dict[str, Any],
         *, keep: int) -> Path:  # fmt: skip
    """Write one checkpoint into `directory`, durable before it gets its name; then remove all but the newest `keep`."""
    tensors, numbers = _split_optimizer(optimizer)
    files = {
        _WEIGHTS: save_tensors({k: v.detach().cpu().contiguous() for k, v in weights.items()}),
        _OPTIMIZER: save_tensors(tensors),
    }
    sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    record = {"format": FORMAT, "updates": updates, "sha256": sha256, "optimizer": numbers, **state}
    files[_STATE] = json.dumps(record, indent=1, allow_nan=False).encode()
    try:
        return _write_checkpoint(directory, f"{updates:012d}", files, keep)
    except OSError as error:
        remove_partial(directory)
        raise CheckpointError(
            f"Cannot save into {directory}: {error.strerror or error}. Checkpoints saved before are intact; "
            "free disk space or choose another --run-dir."
        ) from error


def _write_checkpoint(directory: Path, name: str, files: dict[str, bytes], keep: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    remove_partial(directory)
    final, partial, replaced = (directory / f"{prefix}{name}" for prefix in ("", _TEMPORARY, _REPLACED))
    partial.mkdir()
    for file, data in files.items():
        _write_durably(partial / file, data)
    _sync_directory(partial)
    if final.exists():  # saved at this update already; it counts until the new one has its name
        final.rename(replaced)
    partial.rename(final)
    _sync_directory(directory)
    for old in (*replaced.parent.glob(replaced.name), *list_checkpoints(directory)[:-keep]):
        shutil.rmtree(old)
    return final


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first. One that was being replaced is there as long as its successor is not."""
    if not directory.is_dir():
        return []
    named = {p.name: p for p in directory.iterdir() if (p / _STATE).is_file()}
    replaced = {n.removeprefix(_REPLACED): p for n, p in named.items() if n.startswith(_REPLACED)}
    return [path for name, path in sorted((replaced | named).items()) if name.isdigit()]


def remove_partial(directory: Path) -> None:
    """Remove what a killed save left behind, and give what it was replacing its name again."""
    for stray in directory.glob(_TEMPORARY + "*"):
        shutil.rmtree(stray, ignore_errors=True)
    for replaced in directory.glob(_REPLACED + "*"):
        final = directory / replaced.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(final)


def load_latest(directory: Path, warn: Any = None) -> Checkpoint:
    """The newest checkpoint that is whole; each damaged one that is passed over is told to `warn(text)`.

    Raises CheckpointError: there is none, or none is whole.
    """
    paths = list_checkpoints(directory)
    if not paths:
        raise CheckpointError(f"No checkpoint in {directory}. Train first, or give the directory of a run.")
    failures: list[str] = []
    for path in reversed(paths):
        try:
            checkpoint = load(path)
        except CheckpointError as error:
            failures.append(str(error))
            continue
        for text in failures if warn else ():
            warn(f"Passed over a damaged checkpoint, using {path.name} instead. {text}")
        return checkpoint
    raise CheckpointError("No checkpoint could be read. " + " ".join(failures))


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint. Raises CheckpointError naming the file and the reason; executes no code."""
    record = _read_state(path / _STATE)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in (_WEIGHTS, _OPTIMIZER):
        data = _read(path / name)
        if hashlib.sha256(data).hexdigest() != record["sha256"].get(name):
            raise CheckpointError(
                f"{path / name} differs from its checksum in {_STATE}: it is damaged or was replaced."
            )
        try:
            tensors[name] = load_tensors(data)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path / name} is not a safetensors file: {error}") from error
    optimizer = _join_optimizer(tensors[_OPTIMIZER], record.pop("optimizer"))
    return Checkpoint(tensors[_WEIGHTS], optimizer, record, path)


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Put weights into a model. Raises CheckpointError when names or shapes differ; then nothing was loaded."""
    wanted = model.state_dict()
    missing, extra = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    wrong = [f"{k} {tuple(weights[k].shape)} != {tuple(v.shape)}" for k, v in wanted.items()
             if k in weights and weights[k].shape != v.shape]  # fmt: skip
    if missing or extra or wrong:
        raise CheckpointError(
            f"{where} does not fit the model: missing {missing[:3]}, unknown {extra[:3]}, shapes {wrong[:3]}. "
            "It was saved with other [model] settings or another environment."
        )
    model.load_state_dict(weights)


def params_sha(tensors: dict[str, Tensor]) -> str:
    """First 16 hex digits of the SHA-256 over a state_dict: all parameters and buffers, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all."""
    partial = path.with_name(_TEMPORARY + path.name)
    _write_durably(partial, data)
    os.replace(partial, path)


def _split_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state_dict as named tensors and JSON numbers."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {"groups": state["param_groups"], "numbers": {}}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}/{name}"] = value.detach().cpu().contiguous()
            else:
                numbers["numbers"][f"{index}/{name}"] = value
    return tensors, numbers


def _join_optimizer(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *numbers["numbers"].items()]:
        index, name = key.split("/", 1)
        state.setdefault(int(index), {})[name] = value
    return {"state": state, "param_groups": numbers["groups"]}


def _read_state(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(_read(path))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    wanted = {"format": int, "sha256": dict, "optimizer": dict, "updates": int}
    if not isinstance(record, dict) or any(not isinstance(record.get(k), t) for k, t in wanted.items()):
        raise CheckpointError(f"{path} is not a Pronghorn checkpoint: it lacks {', '.join(wanted)}.")
    if record["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {record['format']}; this version reads format {FORMAT}.")
    return record


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
