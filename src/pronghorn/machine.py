"""What this machine lets one process have: cores, memory, files, processes. It decides nothing.

A function that finds no limit where it looks says so by None, or by the next wider limit.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pronghorn.errors import PronghornError

if TYPE_CHECKING:
    import torch

_CGROUPS = Path("/sys/fs/cgroup")
_CPUS = Path("/proc/cpuinfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_SHARED = Path("/dev/shm")


def available_cores() -> int:
    """Cores that this process may use: its affinity mask, cut by the CPU quotas of control groups."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    return min([cores, *(max(1, int(quota)) for quota in map(_quota, _groups("cpu")) if quota is not None)])


def has_gpu(device: str) -> bool:
    """Whether a run with `device` ('auto', 'cpu', 'cuda') has a GPU here."""
    import torch

    return device != "cpu" and torch.cuda.is_available()


def computes_bfloat16(device: str) -> bool:
    """Whether `device` ('auto', 'cpu', 'cuda') has instructions for bfloat16, so that arithmetic in it is faster."""
    import torch

    if has_gpu(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool({"avx512_bf16", "amx_bf16"} & _cpu_flags())


def _cpu_flags() -> set[str]:
    """The instruction sets of the first core, where Linux tells them."""
    try:
        lines = _CPUS.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def take_share_of_cores(index: int, count: int) -> None:
    """Keep to this process's part of the cores that it may use, where `count` like it share them; `index` from 0.

    Where there are fewer cores than processes, or the platform cannot, all of them use all.
    """
    try:
        cores = sorted(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return
    if len(cores) >= count:
        os.sched_setaffinity(0, cores[index * len(cores) // count : (index + 1) * len(cores) // count])


def limit_threads(count: int) -> None:
    """Let torch's operations use `count` threads where they are called from the calling thread, and only there."""
    import torch

    torch.set_num_threads(count)
    # Asked for now: a thread takes its number when it first needs it, and that would be what any thread set last.
    torch.get_num_threads()


def pick_device(name: str) -> torch.device:
    """The device of that name; auto takes a GPU when there is one. Raises PronghornError if it is absent."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise PronghornError(
            "--device cuda: PyTorch sees no GPU here. Use --device cpu, or install a CUDA build of torch."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def pick_own_device(name: str, index: int) -> torch.device:
    """The device of one of several processes of this machine, each with a GPU of its own. index: from 0.

    Raises PronghornError if there are fewer GPUs.
    """
    import torch

    device = pick_device(name)
    if device.type != "cuda":
        return device
    if index >= torch.cuda.device_count():
        raise PronghornError(
            f"Learner {index} of this machine has no GPU: PyTorch sees {torch.cuda.device_count()} here. Start at most "
            "one learner a GPU (torchrun --nproc-per-node), or use --device cpu."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def pick_devices(name: str, count: int) -> list[torch.device]:
    """A device for each of `count` policies, dealt over the GPUs if there are several. Raises as `pick_device`."""
    import torch

    first = pick_device(name)
    num_gpus = torch.cuda.device_count() if first.type == "cuda" else 1
    if count == 1 or num_gpus == 1:
        return [first] * count
    return [torch.device("cuda", i % num_gpus) for i in range(count)]


def keep_memory_mapped() -> None:
    """Tell glibc to keep freed blocks: else each batch maps, zeroes and unmaps hundreds of MB of activations again.

    Whole-batch passes on a CPU took 1.3-1.8 times as long without it, in single runs (docs/performance.md).
    """
    mmap_threshold_max, trim_threshold, arena_max = -4, -1, -8  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(arena_max, 1)
    except (OSError, AttributeError):
        pass  # not glibc: nothing to tune


def available_memory() -> int:
    """Bytes that can be had without swapping: the machine's, and what control groups leave of their limit."""
    free = [int(psutil.virtual_memory().available)]
    for group in _groups("memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most, used = _number(group / limit), _number(group / usage)
            if most is not None and used is not None:
                free.append(max(0, most - used + _file_cache(group)))
    return min(free)


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def free_disk(path: Path) -> int:
    """Bytes that this user may still write where `path` is, or is to be."""
    return int(psutil.disk_usage(str(existing_parent(path))).free)


def free_shared_memory() -> int | None:
    """Bytes left in /dev/shm, where game engines have theirs; None where there is none."""
    return int(psutil.disk_usage(str(_SHARED)).free) if _SHARED.is_dir() else None


def free_files() -> int | None:
    """Files and sockets that this process may still open."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else max(0, most - int(psutil.Process().num_fds()))


def free_processes() -> int | None:
    """Processes that may still be started: by the user's limit (root has none) and by control groups."""
    free = []
    for group in _groups("pids"):
        most, used = _number(group / "pids.max"), _number(group / "pids.current")
        if most is not None and used is not None:
            free.append(max(0, most - used))
    by_user = _free_processes_of_user()
    return min(free if by_user is None else [*free, by_user], default=None)


def _free_processes_of_user() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    most, uid = resource.getrlimit(resource.RLIMIT_NPROC)[0], os.getuid()
    if uid == 0 or most == resource.RLIM_INFINITY:
        return None
    threads_count = sys.platform.startswith("linux")  # as processes do; macOS limits processes alone
    processes = psutil.process_iter(["uids", "num_threads"] if threads_count else ["uids"])
    own = [p.info.get("num_threads") or 1 for p in processes if p.info["uids"] and p.info["uids"].real == uid]
    return max(0, most - sum(own))


def _groups(controller: str) -> Iterator[Path]:
    """Directories of the control groups that bind this process: its own and those around it, of either version."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for _, names, path in (line.split(":", 2) for line in lines):
        if names and controller not in names.split(","):
            continue
        root = _CGROUPS / controller if names else _CGROUPS
        own = root / path.lstrip("/")  # in a container it may not exist: then the root is the container's own group
        yield from (group for group in (own, *own.parents) if group.is_relative_to(root))


def _quota(group: Path) -> float | None:
    """Cores' worth of time that a group may use; None if it has no quota."""
    try:
        quota, period = map(int, (group / "cpu.max").read_text().split())  # version 2; "max" is no quota
        return quota / period
    except (OSError, ValueError, ZeroDivisionError):
        pass
    most, each = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")  # version 1; -1 is no quota
    return most / each if most and each and most > 0 else None


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no file, or 'max' in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _file_cache(group: Path) -> int:
    """Bytes of a group's usage that are cached files, which the system gives back when asked for memory."""
    try:
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    of_tree = "total_" if "total_inactive_file" in fields else ""  # version 1 counts groups below apart
    return sum(int(fields.get(f"{of_tree}{kind}_file", 0)) for kind in ("active", "inactive"))
