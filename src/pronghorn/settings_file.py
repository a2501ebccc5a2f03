"""Settings as TOML: config.toml of a run, and the files of --config. Types are checked, rules are not (rules.py)."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pronghorn.config import Config, replace, walk
from pronghorn.errors import ConfigError, UsageError
from pronghorn.untrusted import MAX_TEXT_BYTES, read_bytes, shortened

CONFIG_FILE = "config.toml"  # of a run


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
    return _checked(_read(path, leaf_types(Config)), base or Config(), str(path))


def from_tree(tree: Mapping[str, Any], where: str) -> Config:
    """What `to_toml` made, in another process. where: it stands, for messages. Raises as `from_toml`."""
    return _checked(dict(_flatten(tree, leaf_types(Config))), Config(), where)


def _checked(named: Mapping[str, Any], base: Config, where: str) -> Config:
    """The values of dotted names, each of its field's type, over `base`."""
    hints = leaf_types(Config)
    for name in named:
        if name not in hints:
            near = difflib.get_close_matches(name[:100], hints, 1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise UsageError(f"Unknown setting '{shortened(name)}'.{hint} It stands in {where}.")
    values = {name: _convert(name, value, hints[name], where) for name, value in named.items()}
    config: Config = replace(base, values)
    return config


def _read(path: Path, hints: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted name: value} of a TOML file. Raises UsageError."""
    try:
        return dict(_flatten(tomllib.loads(read_bytes(path, MAX_TEXT_BYTES).decode()), hints))
    except RecursionError:
        why = "it is nested too deeply"
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:  # no TOML, no UTF-8, or a whole number of thousands of digits
        why = shortened(str(error))
    raise UsageError(f"Cannot read the configuration {path}: {why}.")


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


def _convert(name: str, value: Any, hint: Any, where: str) -> Any:
    """Check one TOML value against its field's type; lists become tuples and whole numbers become floats."""
    options = options_of(hint)
    for option in options:
        origin = typing.get_origin(option)
        if origin is Literal and value in typing.get_args(option):
            return value
        if origin is tuple and isinstance(value, list):
            return _tuple_of(name, value, typing.get_args(option), where)
        if origin is dict and isinstance(value, dict):
            return {k: str(v) for k, v in value.items()}
        if option is float and type(value) in (int, float) and _is_in_range(value):
            return float(value)
        if isinstance(option, type) and type(value) is option and _is_in_range(value):
            return value
    wanted = " or ".join(_describe(o) for o in options if o is not type(None))
    raise ConfigError(name, value, f"must be {wanted}", f"It stands in {where}.")


def _tuple_of(name: str, values: list[Any], elements: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    """elements: the types of a tuple's entries; `...` behind one type: any number of entries of that."""
    if elements[-1] is Ellipsis:
        elements = elements[:1] * len(values)
    if len(elements) != len(values):
        raise ConfigError(name, values, f"must have {len(elements)} entries", f"It stands in {where}.")
    return tuple(_convert(name, value, element, where) for value, element in zip(values, elements, strict=True))


def _is_in_range(value: Any) -> bool:
    """Whether it is no number of a size that nothing can count in, nan, or text that no path and no name can be."""
    if isinstance(value, str):
        return "\0" not in value
    return not math.isnan(value) if isinstance(value, float) else abs(value) < 2**63


def options_of(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows; of any other type, itself alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(o for arg in typing.get_args(hint) for o in options_of(arg))
    return (hint,)


def _describe(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(option)))
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(option, str(option))
