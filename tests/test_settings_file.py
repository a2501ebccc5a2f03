"""Settings as TOML: unknown names and wrong types are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pronghorn.config import Config
from pronghorn.defaults import apply_preset
from pronghorn.errors import ConfigError, UsageError
from pronghorn.settings_file import from_toml


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
