"""Settings as TOML: unknown names and wrong types are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pronghorn.config import Config, replace
from pronghorn.defaults import apply_preset
from pronghorn.errors import ConfigError, UsageError
from pronghorn.settings_file import from_toml, to_toml


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
