"""Rules: each broken one is named with field, value, rule and fix."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pronghorn.config import replace
from pronghorn.errors import ConfigError
from pronghorn.rules import changed_settings
from specs import resolved


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("learner.lr", -1.0, "greater than 0"),
        ("learner.gamma", 1.5, r"lie in \[0, 1\]"),
        ("learner.minibatches", 5, "divide the 2048 samples"),
        ("env.groups", 9, "at most env.envs_per_worker"),
        ("max_lag", 2, "at least"),
        ("eval.max_share", 0.0, "lie in"),
        ("env.python", "/nowhere/python", "executable"),
    ],
)
def test_a_broken_rule_is_named_with_field_value_and_fix(name: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as info:
        resolved(**{"learner.minibatches": 1, "learner.batch_unrolls": 4 if name == "max_lag" else 16, name: value})
    assert info.value.field == name
    assert str(value) in str(info.value)


@pytest.mark.case("MAS-13")
@pytest.mark.parametrize(
    ("field", "values", "rule"),
    [
        ("env.pad_spaces", {"env.pad_spaces": True}, "unpadded"),
        ("population.members", {"population.members": 2}, "members of a population play the same agents"),
        ("env.policies", {"selfplay.snapshot_weight": 0.2}, "self-play against others"),
        ("learner.lr_schedule", {"learner.lr_schedule": "linear", "steps": 1000}, "what share of the steps"),
        ("max_lag", {"max_lag": 1, "learner.batch_unrolls": 16}, "at least 2 with several policies"),
        ("deterministic", {"deterministic": True}, "not possible with several policies"),
    ],
)
def test_what_a_policy_for_each_kind_of_agents_cannot_be_combined_with(
    field: str, values: dict[str, object], rule: str
) -> None:
    """Alone it is fine; each of these is refused before any environment is built."""
    chosen = {"learner.minibatches": 1, "learner.batch_unrolls": 16, "env.policies": "by_spaces"}
    resolved(**chosen)
    with pytest.raises(ConfigError, match=rule) as info:
        resolved(**(chosen | values))
    assert info.value.field == field


def test_taking_turns_needs_whole_unrolls_of_all_rows() -> None:
    with pytest.raises(ConfigError, match=r"multiple of the 16 rows.*Try --learner.batch-unrolls 16"):
        resolved(algo="ppo", **{"learner.batch_unrolls": 20, "learner.minibatches": 1})
    assert resolved(algo="ppo").learner.batch_unrolls == 16


def test_deterministic_excludes_free_running() -> None:
    with pytest.raises(ConfigError, match="0 or 1"):
        resolved(deterministic=True)


def test_structure_cannot_change_on_resume_and_other_changes_are_listed() -> None:
    before = resolved()
    after = dataclasses.replace(before, learner=dataclasses.replace(before.learner, lr=0.5))
    assert dict(changed_settings(before, after)) == {"learner.lr": (before.learner.lr, 0.5)}
    with pytest.raises(ConfigError, match="cannot change"):
        list(changed_settings(before, replace(before, {"model.core": "lstm"})))
