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
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec
from specs import PIXELS, resolved


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


SIDES = EnvSpec(
    {
        "own": LeafSpec((2,), "float32", "vector"),
        "all/cards": LeafSpec((3,), "float32", "vector"),
        "all/action_mask": LeafSpec((2,), "int8", "mask"),
    },
    ActionSpec((2,)),
)


@pytest.mark.parametrize(
    ("names", "separate", "message"),
    [
        (("all/cards",), False, "needs model.separate_critic: a trunk .* Add --model.separate-critic"),
        (("al/card",), True, "has no leaf 'al/card'; the nearest is 'all/cards'. There are: own, all/cards"),
        (("own", "own/"), True, "has no leaf 'own/'; the nearest is 'own'"),
        (("all",), True, "'all' covers the action mask 'all/action_mask', which the policy needs"),
        (("own", "all/cards"), True, "leaves the policy nothing to see"),
    ],
)
def test_what_only_the_critic_reads_exists_and_leaves_the_policy_something(
    names: tuple[str, ...], separate: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        resolved(SIDES, **{"model.critic_only": names, "model.separate_critic": separate})
    assert info.value.field == "model.critic_only"
    # vectors have a critic of their own by default, pictures share one
    assert resolved(SIDES, **{"model.critic_only": ("all/cards",)}).model.separate_critic
    with pytest.raises(ConfigError, match=r"needs model\.separate_critic"):
        resolved(PIXELS, **{"model.critic_only": ("obs",)})
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


# ------------------------------------------------------------------------------------------ several policies


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        ({"population.members": 2, "max_lag": 1, "learner.batch_unrolls": 16}, "max_lag", "at least 2 with several"),
        ({"population.members": 2, "max_lag": 0, "learner.batch_unrolls": 16}, "max_lag", "at least 2 with several"),
        ({"population.members": 2, "deterministic": True}, "deterministic", "is not possible with several policies"),
        ({"selfplay.snapshot_weight": 0.2, "deterministic": True}, "deterministic", "is not possible"),
        ({"population.members": -1}, "population.members", "at least 1"),
        ({"population.members": 2, "population.slots": 3}, "population.slots", "0 .all at once. to population.members"),
        ({"population.members": 2, "population.perturb": (1.0, 2.0)}, "population.perturb", "two factors above 1"),
        ({"selfplay.scripts": ("random",)}, "selfplay.script_weight", "must be given together"),
        ({"selfplay.snapshot_weight": -0.1}, "selfplay: weights of self, member, snapshot, script", "not negative"),
        ({"selfplay.member_weight": 0.1}, "selfplay.member_weight", "needs other members"),
        ({"selfplay.snapshot_weight": 0.1, "selfplay.size": 0}, "selfplay.size", "at least 1"),
    ],
    ids=str,
)
def test_rules_of_several_policies_are_named(values: dict[str, object], field: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as info:
        resolved(**{"learner.minibatches": 1, **values})
    assert info.value.field == field


def test_a_resume_may_not_change_what_a_population_has_chosen() -> None:
    several = {"population.members": 2, "population.mutable": ("lr", "*_clip")}
    before = resolved(**several)
    for name in ("learner.lr", "learner.ppo_clip"):
        with pytest.raises(ConfigError, match=r"was left to the population .*Leave it out"):
            list(changed_settings(before, replace(before, {name: 0.123})))
    for name in ("population.members", "population.mutable", "population.ranges", "selfplay.line_up"):
        value: object = {"lr": "1e-5..1e-2"} if name.endswith("ranges") else ("lr",) if "mutable" in name else 3
        with pytest.raises(ConfigError, match="cannot change when a run is resumed"):
            list(changed_settings(before, replace(before, {name: value})))
    free = {"learner.gamma": 0.5, "population.mutation_rate": 0.5, "selfplay.size": 7}
    assert {name for name, _ in changed_settings(before, replace(before, free))} == free.keys()
    alone = resolved()
    assert [name for name, _ in changed_settings(alone, replace(alone, {"learner.lr": 0.123}))] == ["learner.lr"]


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        ({"cluster.address": "", "cluster.actors": 2}, "cluster.actors", "needs a cluster. Add --cluster local"),
        ({"cluster.actors": 0}, "cluster.actors", "greater than 0"),
        ({"cluster.cpus_per_actor": 0.0}, "cluster.cpus_per_actor", "greater than 0"),
        ({"cluster.in_flight": 3}, "cluster.in_flight", "must be at least 8, the rows of an actor"),
        ({"max_lag": 1}, "max_lag", "takes turns, which cannot be combined with remote actors"),
        ({"max_lag": 0, "deterministic": True}, "deterministic", "cannot be combined with remote actors"),
        ({"population.members": 2}, "population.members", "remote actors .*, which act with one policy"),
        ({"selfplay.snapshot_weight": 0.2}, "selfplay", "remote actors .*, which act with one policy"),
        ({"env.policies": "by_spaces"}, "env.policies", "remote actors .*, which act with one policy"),
        ({"max_lag": 2, "learner.batch_unrolls": 8}, "max_lag", "must be at least 4"),
    ],
)
def test_what_remote_actors_cannot_do_is_refused(values: dict[str, object], field: str, rule: str) -> None:
    two_of_eight = {"cluster.address": "local", "cluster.actors": 2, "env.workers": 2, "env.envs_per_worker": 4}
    with pytest.raises(ConfigError, match=rule) as info:
        resolved(**{"learner.minibatches": 1} | two_of_eight | values)
    assert info.value.field == field


def test_workers_are_those_of_one_actor_and_slots_those_of_all() -> None:
    """Two actors of 4 cores: 4 workers of 16 environments each. Each may have 96 unrolls under way for its 64 rows."""
    cluster = {"cluster.address": "local", "cluster.actors": 2, "cluster.cpus_per_actor": 4.0}
    config = resolved(**cluster | {"env.workers": None, "env.envs_per_worker": 16})
    assert (config.env.workers, config.num_envs) == (4, 128)
    assert config.num_slots(128) == 2 * 96 + config.learner.batch_unrolls
    assert replace(config, {"cluster.in_flight": 64}).num_slots(128) == 2 * 64 + config.learner.batch_unrolls
