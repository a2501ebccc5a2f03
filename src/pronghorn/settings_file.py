"""Settings as TOML: config.toml of a run, and the files of --config. Types are checked, rules are not (rules.py)."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pronghorn.config import Config, replace, walk
from pronghorn.errors import ConfigError, UsageError


def to_toml(config: Config, *, beyond: Config | None = None) -> dict[str, Any]:
    """The nested dictionary that config.toml holds; None (not set) is left out, and what is as in `beyond`."""
    tree: dict[str, Any] = {}
    known = {} if beyond is None else dict(walk(beyond))
    for name, value in walk(config):
        if value is None or (name in known and known[name] == value):
            continue
        *groups, leaf = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = list(value) if isinstance(value, tuple) else value
    return tree


def from_toml(path: Path, base: Config | None = None) -> Config:
    """Read a TOML file over `base`. Raises UsageError: unreadable file, unknown key (with the nearest), wrong type."""
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read the configuration {path}: {error}") from error
    base = base or Config()
    hints = leaf_types(Config)
    values = {name: _convert(name, value, hints, path) for name, value in _flatten(tree, hints)}
    config: Config = replace(base, values)
    return config


def _flatten(tree: Mapping[str, Any], hints: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = prefix + key
        if isinstance(value, dict) and name not in hints:
            yield from _flatten(value, hints, name + ".")
        else:
            yield name, value


def leaf_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """{dotted name: type} of every leaf field of a dataclass."""
    types_: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            types_ |= leaf_types(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            types_[prefix + name] = hint
    return types_


def _convert(name: str, value: Any, hints: Mapping[str, Any], path: Path) -> Any:
    """Check one TOML value against its field's type; lists become tuples and whole numbers become floats."""
    if name not in hints:
        return value  # `replace` names it
    options = options_of(hints[name])
    for option in options:
        origin = typing.get_origin(option)
        if origin is Literal and value in typing.get_args(option):
            return value
        if origin is tuple and isinstance(value, list):
            return tuple(value)
        if origin is dict and isinstance(value, dict):
            return {k: str(v) for k, v in value.items()}
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    wanted = " or ".join(_describe(o) for o in options if o is not type(None))
    raise ConfigError(name, value, f"must be {wanted}", f"It stands in {path}.")


def options_of(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows; of any other type, itself alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(o for arg in typing.get_args(hint) for o in options_of(arg))
    return (hint,)


def _describe(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(option)))
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(option, str(option))
