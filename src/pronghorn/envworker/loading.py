"""Finds and imports what the name of an environment stands for, and says what is wrong with it; builds nothing."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from typing import Any, Callable

PLUGINS = (  # id prefix, module that registers it, our extra, distribution
    ("ALE/", "ale_py", "atari", "ale-py"),
    ("MiniGrid-", "minigrid", "minigrid", "minigrid"),
    ("BabyAI-", "minigrid", "minigrid", "minigrid"),
)
_EXTRAS = {"Box2D": "box2d", "mujoco": "mujoco", "ale_py": "atari", "minigrid": "minigrid", "vizdoom": "doom",
           "cv2": "doom", "pettingzoo": "pettingzoo"}  # fmt: skip


class NotFound(Exception):
    """No environment, module or function of that name."""

    code = "unknown"


class PackageMissing(Exception):
    """A package that the environment needs is absent from the worker's interpreter."""

    code = "missing"

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__("%s needs the package '%s'" % (purpose, package))
        self.package, self.extra, self.purpose = package, extra, purpose


def import_plugin(target: str) -> None:
    """Import the package that registers ids like `target`, where we know it."""
    for prefix, module, extra, distribution in PLUGINS:
        if target.startswith(prefix):
            if importlib.util.find_spec(module) is None:
                raise PackageMissing(distribution, extra, "gym:" + target)
            importlib.import_module(module)


def unknown_id(gymnasium: Any, target: str, reason: str) -> str:
    """Message for an id that no registry holds: the nearest ids, or how to import the plugin that has it."""
    if (
        ":" not in target
        and "/" in target
        and not any(k.startswith(target.split("/")[0] + "/") for k in gymnasium.registry)
    ):
        return "gym:%s: nothing has registered the namespace '%s'. Name the package that does: gym:PACKAGE:%s" % (
            target,
            target.split("/")[0],
            target,
        )
    near = difflib.get_close_matches(target.split(":")[-1], list(gymnasium.registry), 3, 0.5)
    return "gym:%s is not registered in Gymnasium%s" % (
        target,
        "; near: " + ", ".join(near) if near else " (%s)" % reason,
    )


def vector_entry_point(target: str) -> Any:
    """What steps many rows of a Gymnasium id as one, as far as this process knows; None: nothing does."""
    gymnasium = importlib.import_module("gymnasium")
    spec = gymnasium.registry.get(target)
    return None if spec is None else getattr(spec, "vector_entry_point", None)


def absent(error: Exception, target: str) -> Exception:
    """`error`, or PackageMissing where it stands for a package that one of our extras installs."""
    is_gymnasiums = not isinstance(error, ImportError)  # its DependencyNotInstalled tells the package in words
    for module, extra in _EXTRAS.items():
        if (getattr(error, "name", None) or "").split(".")[0] == module or (is_gymnasiums and extra in str(error)):
            return PackageMissing(module, extra, target)
    return error


def naming_absent(function: Callable[..., Any], target: str, **kwargs: Any) -> Any:
    """Call function(target, **kwargs); a missing package that we have an extra for becomes PackageMissing."""
    try:
        return function(target, **kwargs)
    except ImportError as error:
        raise absent(error, target) from error


def load(target: str) -> Any:
    """The object that 'module.path:name' or 'path/file.py:name' names."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise NotFound("%r names no function; write module.path:function or path/file.py:function" % target)
    module = _load_file(where) if where.endswith(".py") else _load_module(where)
    value = module
    for part in name.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, [n for n in dir(value) if not n.startswith("_")], 3, 0.5)
            raise NotFound("%s has no '%s'%s" % (where, name, "; near: " + ", ".join(near) if near else ""))
        value = getattr(value, part)
    return value


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise NotFound(
                "there is no module '%s' (searched: %s)" % (name, ", ".join(p for p in sys.path if p))
            ) from None
        raise


def _load_file(path: str) -> Any:
    """Run a file as a module of its own name, never as __main__, so that its main guard stays shut."""
    path = os.path.abspath(path)
    name = os.path.splitext(os.path.basename(path))[0]
    loaded = sys.modules.get(name)
    if loaded is not None and os.path.abspath(getattr(loaded, "__file__", None) or "") == path:
        return loaded
    if not os.path.exists(path):
        raise NotFound("there is no file '%s'" % path)
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module
