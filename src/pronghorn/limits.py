"""Sizes that this machine cannot carry are refused before they are tried, with the numbers. Nothing is taken here.

Each need is a lower bound, so that nothing is refused that would work: a worker with an environment that does
nothing has 17 MiB of its own.
"""

from __future__ import annotations

import os

from pronghorn import machine
from pronghorn.config import Config
from pronghorn.errors import ConfigError

_WORKER_BYTES = 12 << 20
_ENV_BYTES = 1 << 10
_FILES_PER_WORKER = 2  # its socket, and the descriptor of its exit
_FILES_OF_POOL = 8  # its map, selector and keeper, and what is open for a moment while a worker starts
_FILES_OF_RUN = 40  # logs, checkpoints, an evaluation beside training


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


def require_workers(num_workers: int, num_envs: int, *, evaluation: bool = False) -> None:
    """Refuse more worker processes than files, processes and memory allow. Raises ConfigError.

    evaluation: files for the run around the pool are not asked for: one that trains has opened its own, and must not
        be ended because few are left.
    """
    fewer = "Lower --env.workers (the default is one a core; --env.envs-per-worker gives more environments)"
    beside = _FILES_OF_POOL + (0 if evaluation else _FILES_OF_RUN)
    files, need = machine.free_files(), _FILES_PER_WORKER * num_workers + beside
    if files is not None and need > files:
        rule = f"needs {need:,} open files, and {files:,} more may be opened"
        raise ConfigError("env.workers", num_workers, rule, f"{fewer}, or raise the limit (ulimit -n).")
    processes = machine.free_processes()
    if processes is not None and num_workers > processes:
        rule = f"is more than the {processes:,} processes that may still be started here"
        raise ConfigError("env.workers", num_workers, rule, f"{fewer}, or raise the limit (ulimit -u, pids.max).")
    need, free = num_workers * _WORKER_BYTES + num_envs * _ENV_BYTES, machine.available_memory()
    if need > free:
        rule = f"with {num_envs:,} environments in all needs at least {_gib(need)}, and {_gib(free)} are free"
        raise ConfigError("env.workers", num_workers, rule, "Lower it or --env.envs-per-worker.")


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
