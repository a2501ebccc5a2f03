"""The run directory and its checkpoints: whole or absent, never half; safetensors and JSON, no pickle, no code.

    <run>/checkpoints/<updates, zero-padded>/
        weights.safetensors     parameters and normaliser statistics
        optimizer.safetensors   the optimiser's tensors, named "<parameter index>/<name>"
        state.json              counters, hyper-parameters, statistics, and a SHA-256 of each file, itself included
        policies/1/…            weights and optimiser of further policies of a population
        snapshots/0@1000.safetensors    frozen policies to play against: member 0 after 1,000 steps

Files of frozen policies are linked from one checkpoint to the next, since they never change. A checkpoint is written to
a temporary name, flushed to the disk, and renamed. It decides nothing: when to save and what to do with what was loaded
is the trainer's business.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from pronghorn.errors import CheckpointError, NotFiniteError, RunDirError
from pronghorn.training.optimizers import MOMENTS
from pronghorn.untrusted import MAX_TEXT_BYTES, parse_json, read_bytes, sealed_json, shortened, unseal, usable, whole

# 2: PopArt's mean and deviation beside the sums they come from; 3: two groups of the optimiser; 4: the state has a
# checksum of itself.
FORMAT = 4
_READABLE = (3, FORMAT)
STATE_FILE = "state.json"
_TEMPORARY, _REPLACED = ".partial-", ".replaced-"
_WEIGHTS, _OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
_SNAPSHOTS = "snapshots"
_SNAPSHOT = re.compile(rf"{_SNAPSHOTS}/([0-9]{{1,9}}@[0-9]{{1,18}})\.safetensors")  # a name that leads nowhere else


class SavedPolicy(NamedTuple):
    """One policy. optimizer: its state_dict; state: plain JSON values."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]


@dataclass
class Frozen:
    """Weights that never change again, and the file that holds them since they were first saved."""

    weights: dict[str, Tensor]
    file: Path | None = None
    sha256: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """What one checkpoint holds. state: plain JSON values, of the run and of its first policy.

    others: further policies.  snapshots: frozen policies by name, if they were asked for.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]
    path: Path
    others: tuple[SavedPolicy, ...] = ()
    snapshots: Mapping[str, Frozen] = field(default_factory=dict)

    @property
    def policies(self) -> list[SavedPolicy]:
        """All policies, by their numbers."""
        return [SavedPolicy(self.weights, self.optimizer, self.state), *self.others]


@contextlib.contextmanager
def locked(run_dir: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Create the run directory and hold its lock, so that two processes never write one run. Raises RunDirError.

    wait_s: seconds that whoever holds it may take to end.
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

            _lock(fcntl, lock, time.monotonic() + wait_s)
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


def _lock(fcntl: Any, file: Any, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[no-any-return]
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def previous(run_dir: Path, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to go on from, or None for a fresh start. Raises RunDirError if the directory says otherwise."""
    holds_run = (run_dir / "config.toml").exists() or (run_dir / "metrics.jsonl").exists()
    if holds_run and not resume:
        raise RunDirError(f"{run_dir} holds a run already. Add --resume to go on with it, or choose another --run-dir.")
    directory = run_dir / "checkpoints"
    remove_partial(directory)
    if list_checkpoints(directory):
        return load_latest(directory, warn=lambda text: print(text, file=sys.stderr), snapshots=True)
    if resume:
        print(f"Nothing to resume in {run_dir}: starting a fresh run.", file=sys.stderr)
    for name in ("metrics.jsonl", "population.jsonl", "ratings.jsonl"):  # of a run that ended before its first one
        (run_dir / name).unlink(missing_ok=True)
    return None


def save(
    directory: Path, updates: int, weights: dict[str, Tensor], optimizer: dict[str, Any], state: dict[str, Any], *,
    keep: int, others: Sequence[SavedPolicy] = (), snapshots: Mapping[str, Frozen] | None = None,
) -> Path:  # fmt: skip
    """Write one checkpoint into `directory`, durable before it gets its name; then remove all but the newest `keep`.

    others: policies besides the first.  snapshots: frozen ones by name, which learn here where their file is.
    """
    snapshots = snapshots or {}
    files, records = {}, []
    for index, policy in enumerate((SavedPolicy(weights, optimizer, state), *others)):
        tensors, numbers = _split_optimizer(policy.optimizer)
        files[_folder(index) + _WEIGHTS] = _saved(policy.weights)
        files[_folder(index) + _OPTIMIZER] = save_tensors(tensors)
        records.append({"optimizer": numbers, **policy.state})
    files |= {_snapshot_file(name): _saved(one.weights) for name, one in snapshots.items() if one.file is None}
    sha256 = {_snapshot_file(name): one.sha256 for name, one in snapshots.items()}
    sha256 |= {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    more = {"others": records[1:]} if others else {}
    record = {"format": FORMAT, "updates": updates, "sha256": sha256, **records[0], **more}
    files[STATE_FILE] = sealed_json(record)
    links = {_snapshot_file(name): one.file for name, one in snapshots.items() if one.file is not None}
    try:
        final = _write_checkpoint(directory, f"{updates:012d}", files, links, keep)
    except OSError as error:
        remove_partial(directory)
        raise CheckpointError(
            f"Cannot save into {directory}: {error.strerror or error}. Checkpoints saved before are intact; "
            "free disk space or choose another --run-dir."
        ) from error
    for name, one in snapshots.items():
        one.file, one.sha256 = final / _snapshot_file(name), sha256[_snapshot_file(name)]
    return final


def _folder(index: int) -> str:
    """Of a policy, inside a checkpoint; the first one's files lie at the top."""
    return f"policies/{index}/" if index else ""


def _snapshot_file(name: str) -> str:
    return f"{_SNAPSHOTS}/{name}.safetensors"


def _saved(weights: Mapping[str, Tensor]) -> bytes:
    return save_tensors({k: v.detach().cpu().contiguous() for k, v in weights.items()})


def _write_checkpoint(directory: Path, name: str, files: dict[str, bytes], links: dict[str, Path], keep: int) -> Path:
    """links: files of earlier checkpoints that belong to this one too."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_partial(directory)
    final, partial, replaced = (directory / f"{prefix}{name}" for prefix in ("", _TEMPORARY, _REPLACED))
    partial.mkdir()
    for file in (*files, *links):
        (partial / file).parent.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        _write_durably(partial / file, data)
    for file, source in links.items():
        _link(source, partial / file)
    for folder in {(partial / file).parent for file in (*files, *links)}:
        _sync_directory(folder)
    _sync_directory(partial)
    if final.exists():  # saved at this update already; it counts until the new one has its name
        final.rename(replaced)
    partial.rename(final)
    _sync_directory(directory)
    for old in (*replaced.parent.glob(replaced.name), *list_checkpoints(directory)[:-keep]):
        _remove(old)
    return final


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        _write_durably(target, source.read_bytes())


def list_checkpoints(directory: Path) -> list[Path]:
    """All that were given their name, oldest first, so whole unless they were damaged since.

    One that was being replaced is there as long as its successor is not.
    """
    if not directory.is_dir():
        return []
    named = {path.name: path for path in directory.iterdir()}
    replaced = {n.removeprefix(_REPLACED): p for n, p in named.items() if n.startswith(_REPLACED)}
    return [path for name, path in sorted((replaced | named).items()) if name.isascii() and name.isdigit()]


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


def load_latest(directory: Path, warn: Any = None, *, snapshots: bool = False) -> Checkpoint:
    """The newest checkpoint that is whole; each damaged one that is passed over is told to `warn(text)`.

    snapshots: read frozen policies too.
    Raises CheckpointError: there is none, or none is whole.
    """
    paths = list_checkpoints(directory)
    if not paths:
        raise CheckpointError(f"No checkpoint in {directory}. Train first, or give the directory of a run.")
    failures: list[str] = []
    for path in reversed(paths):
        try:
            checkpoint = load(path, snapshots=snapshots)
        except CheckpointError as error:
            failures.append(str(error))
            continue
        for text in failures if warn else ():
            warn(f"Passed over a damaged checkpoint, using {path.name} instead. {text}")
        return checkpoint
    raise CheckpointError("No checkpoint could be read. " + " ".join(failures))


def load(path: Path, *, snapshots: bool = False) -> Checkpoint:
    """Read and verify one checkpoint. Raises CheckpointError naming the file and the reason; executes no code.

    snapshots: read frozen policies too.
    """
    record = _read_state(path / STATE_FILE)
    sha256, others = record["sha256"], record.pop("others", [])
    policies = [_load_policy(path, index, state, sha256) for index, state in enumerate((record, *others))]
    frozen = {}
    for name in snapshot_names(record) if snapshots else ():
        file = _snapshot_file(name)
        frozen[name] = Frozen(_load_tensors(path, file, sha256), path / file, sha256[file])
    return Checkpoint(*policies[0], path, tuple(policies[1:]), frozen)


def load_snapshot(path: Path, name: str) -> dict[str, Tensor]:
    """Weights of one frozen policy of a checkpoint. Raises CheckpointError."""
    record = _read_state(path / STATE_FILE)
    names = snapshot_names(record)
    if name not in names:
        raise CheckpointError(f"{path} holds no snapshot {name!r}. It holds: {', '.join(names) or 'none'}.")
    return _load_tensors(path, _snapshot_file(name), record["sha256"])


def snapshot_names(state: Mapping[str, Any]) -> list[str]:
    """Names of the frozen policies that a checkpoint with this state holds."""
    return [found[1] for found in map(_SNAPSHOT.fullmatch, state["sha256"]) if found]


def _load_policy(path: Path, index: int, state: dict[str, Any], sha256: Mapping[str, str]) -> SavedPolicy:
    weights, tensors = (_load_tensors(path, _folder(index) + file, sha256) for file in (_WEIGHTS, _OPTIMIZER))
    with usable(path / STATE_FILE):
        optimizer = _join_optimizer(tensors, state.pop("optimizer"))
    return SavedPolicy(weights, optimizer, state)


def _load_tensors(path: Path, file: str, sha256: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a file that has the right checksum."""
    with usable(path / file):
        data = read_bytes(path / file)
    if hashlib.sha256(data).hexdigest() != sha256.get(file):
        why = f"differs from its checksum in {STATE_FILE}: it is damaged or was replaced"
        raise CheckpointError(f"{path / file} {why}.")
    try:
        return load_tensors(data)
    except Exception as error:  # whatever the reader stumbles over
        raise CheckpointError(f"{path / file} is not a safetensors file: {shortened(str(error))}") from error


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Put weights into a model. Raises CheckpointError when names or shapes differ; then nothing was loaded."""
    require_shapes(model, weights, where)
    model.load_state_dict(weights)


def require_shapes(model: torch.nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights whose names, shapes or kinds of numbers are not the model's. Raises CheckpointError."""
    wanted = model.state_dict()
    missing, extra = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    wrong = [f"{k} {tuple(weights[k].shape)} != {tuple(v.shape)}" for k, v in wanted.items()
             if k in weights and weights[k].shape != v.shape]  # fmt: skip
    wrong += [f"{k} {weights[k].dtype} for {v.dtype}" for k, v in wanted.items()
              if k in weights and weights[k].is_floating_point() != v.is_floating_point()]  # fmt: skip
    if missing or extra or wrong:
        shown = shortened(f"missing {missing[:3]}, unknown {extra[:3]}, shapes {wrong[:3]}")
        raise CheckpointError(
            f"{where} does not fit the model: {shown}. It was saved with other [model] settings or another environment."
        )


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], where: Path) -> None:
    """Give an optimiser its saved moments; its settings stay its own. where: the checkpoint.

    Raises CheckpointError when they are not those of its parameters; then nothing was loaded.
    """
    with usable(where / STATE_FILE):
        own, groups = optimizer.state_dict()["param_groups"], saved["param_groups"]
        if [group["params"] for group in own] != [group["params"] for group in groups]:
            raise ValueError("the optimiser's groups are not those of this model")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with usable(where / _OPTIMIZER):
        _require_moments(saved["state"], parameters, MOMENTS[type(optimizer).__name__])
        optimizer.load_state_dict({"state": saved["state"], "param_groups": own})


def _require_moments(
    state: Mapping[int, Mapping[str, Any]], parameters: Sequence[Tensor], moments: frozenset[str]
) -> None:
    """Parameters that were trained have the moments of their shape, and some a count of one number."""
    if not state.keys() <= set(range(len(parameters))):
        raise ValueError("the optimiser's state is not that of this model's parameters")
    for index, entries in state.items():
        if entries.keys() != moments:
            raise ValueError(f"parameter {index} has {shortened(str(sorted(entries)))} and needs {sorted(moments)}")
        for name, value in entries.items():
            shape = torch.Size() if name == "step" else parameters[index].shape
            if not torch.is_tensor(value) or value.shape != shape or not value.is_floating_point():
                raise ValueError(f"'{index}/{name}' is no such number of its parameter")


def require_finite(policies: Sequence[SavedPolicy]) -> None:
    """Refuse weights, statistics and optimisers with a number that is not finite. Raises NotFiniteError."""
    for index, policy in enumerate(policies):
        moments = {f"{i}/{k}": v for i, entries in policy.optimizer["state"].items() for k, v in entries.items()}
        for name, value in (*policy.weights.items(), *moments.items()):
            if isinstance(value, Tensor) and not value.isfinite().all():
                raise NotFiniteError(name, index)


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
    partial.unlink(missing_ok=True)  # a link would have its target written
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
    """The record of a state.json whose parts have their kinds; a plain dictionary."""
    with usable(path):
        data = read_bytes(path, MAX_TEXT_BYTES)
        record = parse_json(data)
        wanted = {"format": int, "sha256": dict, "optimizer": dict, "updates": int}
        if not isinstance(record, dict) or any(not isinstance(record.get(k), t) for k, t in wanted.items()):
            raise CheckpointError(f"{path} is not a Pronghorn checkpoint: it lacks {', '.join(wanted)}.")
        if record["format"] not in _READABLE:
            known = " and ".join(map(str, _READABLE))
            raise CheckpointError(f"{path} has format {record['format']}; this version reads the formats {known}.")
        if record["format"] == FORMAT:
            unseal(record, data)
        _check_record(record)
    return record


def _check_record(record: Mapping[str, Any]) -> None:
    """Raises ValueError, or what else a wrong kind of value raises, if its own parts are not what `save` writes."""
    whole(record["updates"])
    others = record.get("others", [])
    if not isinstance(others, list) or not all(isinstance(other["optimizer"], dict) for other in others):
        raise ValueError("its further policies are no list of records")
    files = {_folder(index) + file for index in range(1 + len(others)) for file in (_WEIGHTS, _OPTIMIZER)}
    foreign = [name for name in record["sha256"] if name not in files and not _SNAPSHOT.fullmatch(name)]
    if foreign or not files <= record["sha256"].keys():
        raise ValueError(f"its checksums are of other files than a checkpoint has: {shortened(str(foreign[:3]))}")


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
