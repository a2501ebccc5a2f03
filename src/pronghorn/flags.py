"""Flags as people write them, brought to the one form that the parser takes: names, switches and whole numbers.

It knows no command and parses nothing; what it does not understand it leaves as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pronghorn.errors import ConfigError
from pronghorn.settings_file import options_of

_WORDS = ("true", "false")


SHORT = {"--cluster": "--cluster.address", "--actors": "--cluster.actors"}


def spelled(argv: Sequence[str], types: Mapping[str, Any]) -> list[str]:
    """argv in the parser's spelling. types: {dotted name: type} of every setting that may be named.

    Names may have underscores (--run_dir), and some have a short form. A switch may be given as --x, --no-x, --x True,
    --x=false; a whole number as 2e6. Raises ConfigError for a switch that is set to anything else.
    """
    switches = _switches(types)
    whole = {_flag(name) for name, hint in types.items() if int in options_of(hint)}
    known = {_flag(name) for name in types}
    tokens, out = deque(argv), list[str]()
    while tokens:
        token = tokens.popleft()
        name, equals, value = token.partition("=")
        flag = name.replace("_", "-")
        flag = SHORT.get(flag, flag)
        if flag in known:
            name = flag
        if flag in switches:
            if not equals and tokens and tokens[0].lower() in _WORDS:
                value = tokens.popleft()
            out += switches[flag][_is_off(name, value)]
        elif flag in whole and equals:
            out.append(f"{name}={_whole(value)}")
        elif flag in whole and tokens:
            out += [name, _whole(tokens.popleft())]
        else:
            out.append(name + equals + value)
    return out


def _switches(types: Mapping[str, Any]) -> dict[str, tuple[list[str], list[str]]]:
    """{flag: (what the parser takes for it, what for its opposite)}.

    A switch whose default is not known yet is one that takes True or False to the parser; others come in pairs.
    """
    switches: dict[str, tuple[list[str], list[str]]] = {}
    for name, hint in types.items():
        if bool not in options_of(hint):
            continue
        on, off = _flag(name), _flag(name, "no-")
        forms = ([on], [off]) if hint is bool else ([on, "True"], [on, "False"])
        switches |= {on: forms, off: (forms[1], forms[0])}
    return switches


def _flag(name: str, negation: str = "") -> str:
    *groups, leaf = name.replace("_", "-").split(".")
    return "--" + ".".join([*groups, negation + leaf])


def _is_off(flag: str, value: str) -> bool:
    if value and value.lower() not in _WORDS:
        raise ConfigError(flag, value, "is a switch", f"Write {flag} or {flag} False.")
    return value.lower() == "false"


def _whole(text: str) -> str:
    """'1e6' as '1000000'; anything else as it is, whole numbers of any size among it."""
    try:
        int(text)
        return text
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return text
    return str(int(value)) if value.is_integer() else text
