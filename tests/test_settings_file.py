"""Settings as TOML: unknown names and wrong types are named."""

from __future__ import annotations

import tempfile
import typing
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from pronghorn.config import Config, replace
from pronghorn.defaults import apply_preset
from pronghorn.errors import ConfigError, UsageError
from pronghorn.settings_file import from_toml, leaf_types, options_of, to_toml


@pytest.mark.case("CLI-08")
def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[learner]\nlearning_rat = 1.0\nunrol_length = 3\n")
    with pytest.raises(UsageError, match="Unknown setting"):
        from_toml(file)
    file.write_text("[learner]\nunrol_length = 3\n")
    with pytest.raises(UsageError, match=r"Did you mean 'learner.unroll_length'"):
        from_toml(file)
    with pytest.raises(UsageError, match=r"Did you mean 'sf-doom'"):
        apply_preset(Config(), "sf-dom")


@pytest.mark.parametrize("text", ["seed = 'three'", "[learner]\nlr = true", "[model]\nconv = 'vgg'", "seed = 1.5"])
def test_a_wrong_type_in_the_file_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="must be"):
        from_toml(file)


def test_only_what_differs_can_be_written() -> None:
    config = replace(Config(env="gym:CartPole-v1"), {"threads": 2, "learner.lr": 0.1, "learner.rho_clip": 1.0})
    tree = {"env": {"id": "gym:CartPole-v1"}, "threads": 2, "learner": {"lr": 0.1}}
    assert to_toml(config, beyond=Config()) == tree
    assert to_toml(config)["learner"]["rho_clip"] == 1.0


# ------------------------------------------------------------------------------------------ any settings


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Whatever a field of this type may hold."""
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
    whole = st.integers(-(2**63) + 1, 2**63 - 1)
    plain = {int: whole, float: st.floats(allow_nan=False), bool: st.booleans(), str: text}
    choices: list[st.SearchStrategy[Any]] = []
    for option in options_of(hint):
        origin, inner = typing.get_origin(option), typing.get_args(option)
        if origin is typing.Literal:
            choices.append(st.sampled_from(inner))
        elif origin is tuple and inner[-1] is Ellipsis:
            choices.append(st.lists(values_of(inner[0]), max_size=3).map(tuple))
        elif origin is tuple:
            choices.append(st.tuples(*map(values_of, inner)))
        elif origin is dict:
            choices.append(st.dictionaries(text, text, max_size=3))
        else:
            choices.append(st.none() if option is type(None) else plain[option])
    return st.one_of(choices)


HINTS = leaf_types(Config)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.fixed_dictionaries({}, optional={name: values_of(hint) for name, hint in HINTS.items()}))
def test_any_settings_are_the_same_after_a_file(values: dict[str, Any]) -> None:
    config = replace(Config(), values)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_bytes(tomli_w.dumps(to_toml(config)).encode())
        assert from_toml(path) == config
