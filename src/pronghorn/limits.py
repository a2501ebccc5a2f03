"""Sizes that this machine cannot carry are refused before they are tried, with the numbers. Nothing is taken here.

Each need is a lower bound, so that nothing is refused that would work: a worker with an environment that does
nothing has 17 MiB of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pronghorn import machine
from pronghorn.config import Config
from pronghorn.errors import ConfigError

_WORKER_BYTES = 12 << 20
_ENV_BYTES = 1 << 10
_ENGINE_BYTES = 96 << 10  # used by one at 160x120 pixels; its file is 10 MiB, most of it holes
_FILES_PER_WORKER = 2  # its socket, and the descriptor of its exit
_FILES_OF_POOL = 8  # its map, selector and keeper, and what is open for a moment while a worker starts
_FILES_OF_RUN = 40  # logs, checkpoints, an evaluation beside training


@dataclass(frozen=True)
class Need:
    """What something takes at least, and what there is of it. available: None if there is no limit.

    fix: what to do where it is not enough.  in_bytes: else they are counts.
    """

    name: str
    needed: int
    available: int | None
    fix: str
    in_bytes: bool = False

    @property
    def met(self) -> bool:
        """Whether there is enough."""
        return self.available is None or self.needed <= self.available

    @property
    def left(self) -> str:
        """What there is, in words."""
        return "no limit" if self.available is None else self.words(self.available)

    def words(self, count: int) -> str:
        """The number with its unit."""
        if not self.in_bytes:
            return f"{count:,}"
        return _gib(count) if count >= 1 << 30 else f"{count / 2**20:,.1f} MiB"


def require_threads(threads: int | None) -> None:
    """Refuse more threads than the machine has cores: they would only wait for each other. Raises ConfigError."""
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        rule = f"must be at most {cores}, the cores of this machine"
        raise ConfigError("threads", threads, rule, "Leave it out for the default.")


def crowded(num_workers: int) -> str | None:
    """What to say of more workers than cores: they are slower than one a core, but no error, as some only wait."""
    cores = machine.available_cores()
    if num_workers <= cores:
        return None
    more = "--env.envs-per-worker gives more environments, pronghorn bench --tune measures what is fastest"
    return f"env.workers = {num_workers}, and this process has {cores} core(s): workers beyond one a core wait ({more})"


def needs_of_workers(num_workers: int, num_envs: int, *, evaluation: bool = False) -> list[Need]:
    """Files, processes and memory that so many workers take at least. evaluation: see `require_workers`."""
    beside = _FILES_OF_POOL + (0 if evaluation else _FILES_OF_RUN)
    files, num_bytes = _FILES_PER_WORKER * num_workers + beside, num_workers * _WORKER_BYTES + num_envs * _ENV_BYTES
    return [
        Need("open files", files, machine.free_files(), "raise the limit (ulimit -n)"),
        Need("processes", num_workers, machine.free_processes(), "raise the limit (ulimit -u, pids.max)"),
        Need("memory", num_bytes, machine.available_memory(), "free memory, or raise the limit (memory.max)", True),
    ]


def need_of_disk(path: Path, num_bytes: int) -> Need:
    """Room for a run's files in its directory."""
    return Need("disk", num_bytes, machine.free_disk(path), "free disk space, or choose another --run-dir", True)


def need_of_engines(num_engines: int) -> Need:
    """Shared memory of so many ViZDoom engines. Pages that are not there end an engine by SIGBUS at any later time."""
    fix = "enlarge it (docker run --shm-size 1g; mount -o remount,size=1g /dev/shm), or use fewer environments"
    return Need("/dev/shm", num_engines * _ENGINE_BYTES, machine.free_shared_memory(), fix, True)


def require_workers(num_workers: int, num_envs: int, *, evaluation: bool = False) -> None:
    """Refuse more worker processes than files, processes and memory allow. Raises ConfigError.

    evaluation: files for the run around the pool are not asked for: one that trains has opened its own, and must not
        be ended because few are left.
    """
    fewer = "Lower --env.workers (the default is one a core; --env.envs-per-worker gives more environments)"
    files, processes, memory = needs_of_workers(num_workers, num_envs, evaluation=evaluation)
    if not files.met:
        rule = f"needs {files.needed:,} open files, and {files.available:,} more may be opened"
        raise ConfigError("env.workers", num_workers, rule, f"{fewer}, or {files.fix}.")
    if not processes.met:
        rule = f"is more than the {processes.available:,} processes that may still be started here"
        raise ConfigError("env.workers", num_workers, rule, f"{fewer}, or {processes.fix}.")
    if not memory.met:
        rule = f"with {num_envs:,} environments in all needs at least {_gib(memory.needed)}, and "
        raise ConfigError("env.workers", num_workers, f"{rule}{_gib(memory.available or 0)} are free",
                          "Lower it or --env.envs-per-worker.")  # fmt: skip


def require_engines(num_engines: int) -> None:
    """Refuse more ViZDoom engines than /dev/shm has room for. Raises ConfigError."""
    need = need_of_engines(num_engines)
    if not need.met:
        rule = f"ViZDoom engines need {need.words(need.needed)} in /dev/shm, and {need.left} are free"
        raise ConfigError("number of environments", num_engines, rule, need.fix[0].upper() + need.fix[1:] + ".")


def require_disk(config: Config, num_bytes: int, *, resumed: bool) -> None:
    """Refuse a run whose checkpoints of num_bytes each do not fit where they are to be. Raises ConfigError.

    resumed: the others are there already.
    """
    keep = config.checkpoint.keep
    need = need_of_disk(config.run_path, num_bytes * (1 if resumed else keep + 1))  # one is written before one goes
    if not need.met:
        rule = f"checkpoints need {need.words(need.needed)} in {config.run_path}, and {need.left} are free"
        raise ConfigError("checkpoint.keep", keep, rule, f"Lower it, {need.fix}.")


def require_map(num_bytes: int, num_rows: int) -> None:
    """Refuse a map of observations, shared with the workers, that memory cannot hold. Raises ConfigError."""
    free = machine.available_memory()
    if num_bytes > free:
        rule = f"rows of observations need {_gib(num_bytes)} to be shared with workers, and {_gib(free)} are free"
        raise ConfigError("number of environments", num_rows, rule, "Lower --env.workers or --env.envs-per-worker.")


def require_store(config: Config, bytes_per_step: int, num_rows: int, free: int) -> None:
    """Refuse a store of unrolls, of a resolved config, that does not fit into `free` bytes. Raises ConfigError."""
    n, num_unrolls = config.learner, config.num_slots(num_rows) + config.learner.batch_unrolls  # and the batch's copy
    if n.replay_fraction:
        num_unrolls += n.replay_unrolls
    need = num_unrolls * (n.unroll_length + 1) * bytes_per_step
    if need > free:
        rule = f"makes {num_unrolls:,} unrolls that need {_gib(need)}, and {_gib(free)} are free"
        replay = ", --learner.replay-unrolls" if n.replay_fraction else ""
        fix = f"Lower it, --learner.batch-unrolls{replay} or the number of environments ({num_rows:,} rows)."
        raise ConfigError("learner.unroll_length", n.unroll_length, rule, fix)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
