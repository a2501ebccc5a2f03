"""A member of a population: what it takes over from another, what stays its own, and what a checkpoint keeps of it."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import dropout

sys.path.insert(0, str(Path(__file__).parents[1]))

from members import crew, make_members, settings, train
from pronghorn.errors import CheckpointError
from pronghorn.evaluation.policy import Policy, make_actor
from pronghorn.models.actor_critic import ActorCritic, ModelOutput
from pronghorn.training.checkpoint import params_sha
from pronghorn.training.guests import Guests
from pronghorn.training.member import Member
from pronghorn.training.store import Slot
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec
from scripted_pool import ScriptedPool


def moments(member: Member) -> list[dict[str, torch.Tensor]]:
    """The optimiser's state, parameter by parameter, copied."""
    state = member.learner.optimizer.state
    return [{k: v.clone() for k, v in state[p].items()} for p in member.learner._parameters]


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in pairs)


def sha(member: Member) -> str:
    return params_sha(member.model.state_dict())


@pytest.mark.case("PBT-04")
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "rmsprop_tf"])
def test_a_member_becomes_its_donor_bit_by_bit_and_keeps_its_own_counters(optimizer: str) -> None:
    sampler, (target, donor) = crew(**{"learner.optimizer": optimizer, "learner.optimizer_eps": 0.01})
    train(sampler, target, 2)
    train(sampler, donor, 5)
    target.learner.set_hyper(lr=0.5, gamma=0.5)
    hyper, steps, updates, version = (
        target.learner.hyper, target.learner.steps, target.learner.updates, target.learner.version
    )  # fmt: skip
    before = sha(donor), moments(donor), donor.learner.version, donor.lineage, donor.newest
    assert sha(target) != sha(donor)
    target.become(donor)
    assert sha(target) == sha(donor) == params_sha(target.newest.tensors)  # normalisers are among these
    assert same(moments(target), moments(donor))
    assert (target.learner.steps, target.learner.updates) == (steps, updates)
    assert (target.learner.version, target.lineage) == (version + 1, 1)
    assert (target.newest.version, target.newest.lineage) == (version + 1, 1)
    assert target.publisher.latest is target.newest
    assert target.learner.hyper == hyper
    assert [g["lr"] for g in target.learner.optimizer.param_groups] == [0.5, 0.5]  # not the donor's
    assert (sha(donor), donor.learner.version, donor.lineage, donor.newest) == (before[0], *before[2:])
    assert same(moments(donor), before[1])


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "rmsprop_tf"])
def test_after_a_copy_both_go_their_own_ways(optimizer: str) -> None:
    """Nothing is shared, down to the optimiser's count of its steps, which Adam divides by."""
    sampler, (target, donor) = crew(**{"learner.optimizer": optimizer, "learner.optimizer_eps": 0.01})
    train(sampler, donor, 3)
    target.become(donor)
    copied, weights = moments(donor), sha(donor)
    train(sampler, target, 4)
    assert sha(donor) == weights
    assert same(moments(donor), copied)
    after, mine = sha(target), moments(target)
    assert after != weights
    train(sampler, donor, 2)
    assert sha(target) == after
    assert same(moments(target), mine)
    if optimizer != "rmsprop_tf":  # which counts none
        assert {int(state["step"]) for state in mine} == {3 + 4}
        assert {int(state["step"]) for state in moments(donor)} == {3 + 2}


def test_a_copy_learns_on_exactly_as_its_donor_would_have() -> None:
    """Weights, moments, step counts, normalisers: one more iteration on one batch gives the same weights."""
    sampler, (target, donor) = crew(**{"model.core": "gru"})
    train(sampler, donor, 3)
    target.become(donor)
    while not donor.has_batch():
        sampler.step()
    slots = donor.store.take(donor.learner.version, 0.0)
    assert slots is not None
    batch = donor.gather(slots)
    target.train(copy.deepcopy(batch), lambda: False)
    donor.train(batch, lambda: False)
    assert sha(target) == sha(donor)
    assert same(moments(target), moments(donor))


def test_moments_of_convolutions_are_copied_weight_for_weight() -> None:
    """Channels-last weights, plain memory: whatever the layout, each moment is that of its own weight."""
    spec = EnvSpec({"obs": LeafSpec((20, 24, 3), "uint8", "image", "hwc", 0, 255)}, ActionSpec((3,)))
    pool = ScriptedPool([4, 4], spec=spec)
    target, donor = make_members(pool, settings(spec, **{"model.conv": "conv_tiny", "model.conv_features": 8}), 2)
    rng = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p in donor.learner._parameters:
            p.grad = torch.randn(p.shape, generator=rng).to(memory_format=torch.preserve_format)
        donor.learner.optimizer.step()
    donor.model.to(memory_format=torch.channels_last)  # as a run on some devices has them
    target.become(donor)
    one, other = target.learner, donor.learner
    for p, q in zip(one._parameters, other._parameters, strict=True):
        for name, moment in other.optimizer.state[q].items():
            copied = one.optimizer.state[p][name]
            assert torch.equal(copied, moment), name
            assert copied.data_ptr() != moment.data_ptr(), name
            assert moment.shape != p.shape or copied.stride() == p.stride()


def test_what_was_under_way_of_a_policy_that_was_replaced_is_void_and_counted() -> None:
    sampler, (target, donor) = crew(**{"learner.batch_unrolls": 4})
    while target.store.counts()["full"] < 2:
        sampler.step()
    filling = target.store.counts()["filling"]
    assert filling > 0
    kept = donor.store.counts()
    target.become(donor)
    assert target.store.num_voided == 2
    assert target.store.counts()["full"] == 0
    assert donor.store.counts() == kept
    assert donor.store.num_voided == 0
    for _ in range(4 * 4):
        sampler.step()
    assert target.store.num_voided == 2 + filling
    assert target.store.num_discarded == 0
    used = np.flatnonzero(np.isin(target.store._status, (Slot.FILLING, Slot.FULL)))
    assert len(used)
    versions = target.store.steps["version"][np.flatnonzero(target.store._status == Slot.FULL)]
    assert (versions == 1).all()


def test_replay_of_a_policy_that_was_replaced_is_empty() -> None:
    sampler, (target, donor) = crew(**{"learner.batch_unrolls": 4, "learner.replay_fraction": 0.5})
    train(sampler, target, 3)
    assert target.replay is not None
    assert target.replay.size > 0
    drawn = target.replay
    target.become(donor)
    assert target.replay is not drawn
    assert target.replay is not None
    assert target.replay.size == 0
    assert drawn._generator.initial_seed() != target.replay._generator.initial_seed()
    train(sampler, target, 2)  # and goes on


def test_a_policy_that_was_replaced_has_the_statistics_of_its_donor_and_counts_of_its_own() -> None:
    sampler, (target, donor) = crew()
    train(sampler, target, 4)
    episodes, of_donor = target.tracker.num_episodes, donor.tracker.recent("return", 100)
    assert episodes > 0
    assert target.tracker.recent("return", 100) != of_donor
    target.become(donor)
    assert target.tracker.num_episodes == episodes
    assert target.tracker.recent("return", 100) == donor.tracker.recent("return", 100) == of_donor


def test_the_skipped_steps_of_a_policy_that_was_replaced_do_not_end_the_run() -> None:
    sampler, (target, donor) = crew()
    train(sampler, donor)
    target.learner._skipped_in_a_row = target.learner.settings.max_skipped
    target.become(donor)
    assert target.learner._skipped_in_a_row == 0


# ------------------------------------------------------------------------------------------ files


def test_all_of_a_member_comes_back_from_what_is_saved_of_it() -> None:
    sampler, (member, donor) = crew()
    train(sampler, donor, 2)
    train(sampler, member, 3)
    member.become(donor)
    train(sampler, member, 1)
    member.learner.set_hyper(lr=0.25)
    saved = member.saved()
    saved = saved._replace(state=json.loads(json.dumps(saved.state)))
    _, (again, _) = crew()
    again.restore(saved, Path("here"), {})
    assert sha(again) == sha(member)
    assert same(moments(again), moments(member))
    assert (again.lineage, again.learner.version) == (1, member.learner.version)
    assert again.learner.hyper.lr == 0.25
    assert again.tracker.state() == member.tracker.state()
    assert again.learner.counters()["steps"] == member.learner.counters()["steps"]


@pytest.mark.parametrize("damage", ["shape", "name"])
def test_weights_of_another_network_are_refused_by_name(damage: str) -> None:
    _, (member, _) = crew()
    saved = member.saved()
    weights: dict[str, Any] = dict(saved.weights)
    name = next(iter(weights))
    tensor = weights.pop(name)
    weights[name if damage == "shape" else "other"] = torch.zeros(99) if damage == "shape" else tensor
    with pytest.raises(CheckpointError, match=r"policy 1.*does not fit the model"):
        member.restore(saved._replace(weights=weights), Path("policy 1"), {})


# ------------------------------------------------------------------------------------------ modes


class Dropping(ActorCritic):
    """A network that acts and values by chance while it learns, and not once it is frozen."""

    def forward(self, obs: Any, state: Any, first: Any) -> ModelOutput:
        out: ModelOutput = super().forward(obs, state, first)
        return out._replace(params=dropout(out.params, 0.5, self.training))


@pytest.mark.case("MAS-20")
def test_all_members_learn_in_one_mode_and_all_that_is_frozen_is_in_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronghorn.evaluation.policy.ActorCritic", Dropping)
    sampler, members = crew(**{"model.core": "gru"})
    config, spec = members[0].config, sampler.pool.spec
    guests = Guests(config, sampler.pool, make_actor(config, spec, torch.device("cpu")))
    for member in members:
        train(sampler, member, 1)
        guests.add(f"member {member.index}", member.newest.tensors)
    members[1].become(members[0])
    for member in members:
        assert {module.training for module in member.model.modules()} == {True}
        assert {module.training for module in member.acting.actor.modules()} == {True}
        frozen = Policy.from_weights(config, spec, member.newest.tensors)
        assert {module.training for module in frozen.model.modules()} == {False}
        obs = np.full((5, 2), 3.0, np.float32)
        actions = {tuple(frozen.act(obs, deterministic=True)[0].tolist()) for _ in range(10)}
        assert len(actions) == 1
        assert {module.training for module in member.model.modules()} == {True}  # it is another network
    assert {module.training for module in guests._net.modules()} == {False}
    leaves, begins = {"obs": torch.full((1, 4, 2), 3.0)}, torch.ones(1, 4, dtype=torch.bool)
    for name in ("member 0", "member 1"):
        out = [functional_call(guests._net, guests.weights(name), (leaves, guests._state, begins)) for _ in range(5)]
        assert all(torch.equal(one.params, out[0].params) for one in out)
