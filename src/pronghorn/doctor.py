"""What this machine offers, what a run needs of it, and what to do where that is not enough. It trains nothing.

Needs are those of limits.py, by which a run is refused at its start. A check is 'ok', a 'note' (a run goes, but not all
of it or not as fast) or a 'problem' (a run would stop). Packages are looked for by their files, so that a broken or
absent one breaks nothing here; engines are started in a process of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pronghorn import __version__, limits, machine
from pronghorn.envworker.keeper import remove_stale_engine_files

EXTRAS = {
    "doom": "vizdoom", "atari": "ale-py", "envpool": "envpool", "pettingzoo": "pettingzoo", "minigrid": "minigrid",
    "box2d": "box2d", "mujoco": "mujoco", "cluster": "ray", "wandb": "wandb",
}  # fmt: skip
ENVS_PER_WORKER = 16  # of a run that is not told otherwise; some have fewer
ENGINE_S = 60.0
_CHECKPOINTS_BYTES = 256 << 20  # a few of an agent that sees pixels
_NVIDIA = Path("/proc/driver/nvidia/version")
_START_DOOM = """
import os, vizdoom
game = vizdoom.DoomGame()
game.load_config(os.path.join(vizdoom.scenarios_path, "basic.cfg"))
game.set_window_visible(False)
game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
game.init(); game.make_action([0] * game.get_available_buttons_size()); game.close()
"""
_START_ATARI = """
import ale_py
game = ale_py.ALEInterface()
game.loadROM(ale_py.roms.get_rom_path("pong")); game.reset_game(); game.act(0)
"""
_ENGINES = {  # by extra: the package, and what starts it
    "doom": ("vizdoom", _START_DOOM), "atari": ("ale-py", _START_ATARI), "envpool": ("envpool", "import envpool"),
}  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One line of the table. needed, available, fix: in words; empty where there is nothing to say."""

    name: str
    status: Literal["ok", "note", "problem"]
    available: str
    needed: str = ""
    fix: str = ""


def checks(run_dir: Path) -> list[Check]:
    """All that is looked at, for a run of default size whose directory is to be run_dir."""
    return [
        *_pythons(), _torch(), _gpu(), _cores(),
        *map(_of_need, limits.needs_of_workers(cores := machine.available_cores(), cores * ENVS_PER_WORKER)),
        _of_need(limits.need_of_disk(run_dir, _CHECKPOINTS_BYTES)), _writable("run directory", run_dir, "--run-dir"),
        _temporary(), _of_need(limits.need_of_engines(cores * ENVS_PER_WORKER)), _stale(),
        *map(_extra, EXTRAS), *map(_engine, _ENGINES),
    ]  # fmt: skip


def table(found: Sequence[Check]) -> str:
    """The checks in columns, and what stops a run at the end."""
    head = ("", "check", "available", "needed", "fix")
    rows = [head, *((_MARKS[c.status], c.name, c.available, c.needed, c.fix) for c in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
             for row in rows]  # fmt: skip
    problems = [c.name for c in found if c.status == "problem"]
    return "\n".join([*lines, "", f"to fix: {', '.join(problems)}" if problems else "nothing stops a run here"])


def to_json(found: Sequence[Check]) -> dict[str, Any]:
    """The same for programs."""
    return {"version": __version__, "ok": all(c.status != "problem" for c in found),
            "checks": [asdict(c) for c in found]}  # fmt: skip


_MARKS = {"ok": "ok", "note": "-", "problem": "FIX"}


def _of_need(need: limits.Need) -> Check:
    return Check(need.name, "ok" if need.met else "problem", need.left, need.words(need.needed),
                 "" if need.met else need.fix)  # fmt: skip


def _pythons() -> Iterator[Check]:
    yield Check("pronghorn", "ok", f"{__version__} on {sys.platform}")
    own = ".".join(map(str, sys.version_info[:3]))
    enough = sys.version_info >= (3, 11)
    yield Check("Python", "ok" if enough else "problem", own, "3.11", "" if enough else "Use a newer interpreter.")
    found = [f"3.{minor}" for minor in range(8, 16) if shutil.which(f"python3.{minor}")]
    yield Check("Pythons for workers", "ok", ", ".join(found) or "this one", "", "")


def _torch() -> Check:
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        return Check("torch", "problem", f"not to be imported: {error}", "2.9", "Install it: pip install torch")
    return Check("torch", "ok", torch.__version__, "2.9")


def _gpu() -> Check:
    try:
        import torch

        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception as error:
        return Check("GPU", "note", f"not to be asked for: {error}")
    if names:
        return Check("GPU", "ok", ", ".join(names))
    if _NVIDIA.exists() and torch.version.cuda is None:
        return Check("GPU", "note", "there is one, and this torch is built without CUDA", "",
                     "Install a CUDA build of torch (https://pytorch.org/get-started).")  # fmt: skip
    return Check("GPU", "ok", "none seen by torch: networks run on the CPU")


def _cores() -> Check:
    usable, there = machine.available_cores(), os.cpu_count() or 1
    if usable == there:
        return Check("cores", "ok", f"{usable} usable of {there}", "1")
    why = "The affinity mask (taskset) or a CPU quota (cpu.max) leaves out the others."
    return Check("cores", "note", f"{usable} usable of {there}", "1", why)


def _writable(name: str, path: Path, flag: str) -> Check:
    existing = machine.existing_parent(path)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Check(name, "ok", f"{path} can be written", "writable")
    except OSError as error:
        fix = f"Choose another with {flag}, or change to a directory that can be written."
        return Check(name, "problem", f"{existing}: {error.strerror}", "writable", fix)


def _temporary() -> Check:
    try:
        return _writable("temporary files", Path(tempfile.gettempdir()), "TMPDIR")
    except FileNotFoundError as error:
        return Check("temporary files", "problem", str(error.strerror), "writable", "Set TMPDIR to a directory.")


def _stale() -> Check:
    stale = remove_stale_engine_files()
    return Check("dead engines", "ok", f"removed {len(stale)} files of theirs" if stale else "left no files")


def _extra(name: str) -> Check:
    found = _installed(EXTRAS[name])
    if found:
        return Check(f"extra {name}", "ok", f"{EXTRAS[name]} {found}")
    return Check(f"extra {name}", "note", "absent", "", f"pip install 'pronghorn-rl[{name}]'")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _engine(name: str, run: Callable[..., Any] = subprocess.run) -> Check:
    """Whether an engine whose package is there starts."""
    package, code = _ENGINES[name]
    if not _installed(package):
        return Check(f"engine {name}", "ok", "not installed, so not started")
    fix = f"Install it anew: pip install --force-reinstall {package}; its own words: python -c 'import {package}'"
    with tempfile.TemporaryDirectory(prefix="pronghorn-") as directory:
        argv = [sys.executable, "-c", code]
        try:
            done = run(argv, cwd=directory, capture_output=True, text=True, timeout=ENGINE_S, check=False)
        except subprocess.TimeoutExpired:
            return Check(f"engine {name}", "problem", f"does not start within {ENGINE_S:g} s", "starts", fix)
    if done.returncode == 0:
        return Check(f"engine {name}", "ok", "starts", "starts")
    said = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
    return Check(f"engine {name}", "problem", said, "starts", fix)
