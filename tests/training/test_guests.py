"""Guests act as the networks and scripts that they are, store nothing, and never change."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from members import ByRow, crew, make_members, settings, train
from pronghorn.config import Config
from pronghorn.errors import PronghornError, UsageError
from pronghorn.evaluation.players import load_player
from pronghorn.evaluation.policy import Policy, PolicyState, build_model, make_actor
from pronghorn.training.checkpoint import params_sha
from pronghorn.training.guests import NOBODY, Guests
from pronghorn.training.player import begins_episode
from pronghorn.training.sampler import Sampler
from pronghorn.types import FIRST, INACTIVE, LAST, LOST, STEP, ActionSpec, EnvSpec, LeafSpec, Ready
from scripted_pool import SPEC, ScriptedPool

MIXED = EnvSpec({"obs": LeafSpec((2,), "float32", "vector")}, ActionSpec((3, 2), (-1.0,), (2.0,)), name="mixed")
MASKED = EnvSpec(
    {"obs": LeafSpec((2,), "float32", "vector"), "action_mask": LeafSpec((3,), "int8", "mask")}, ActionSpec((3,))
)


def weights_of(config: Config, spec: EnvSpec, seed: int) -> dict[str, Tensor]:
    """Those of a network that nobody else has, its normalisers too."""
    torch.manual_seed(seed)
    model = build_model(config.model, spec)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "norm" not in name:
                tensor.mul_(3.0)  # so that what they see and remember makes a difference
        model.update_obs_norm({"obs": 20.0 * torch.rand(50, 4, 2) + seed}, None)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class BySeat:
    """All rows are the guests'; the k-th episode of row r is played by name(r, k)."""

    def __init__(self, guests: Guests, name: Callable[[int, int], str]) -> None:
        self.guests, self.name, self.episodes = guests, name, dict[int, int]()

    def take(self, ready: Ready, begins: NDArray[np.bool_]) -> NDArray[np.int64]:
        rows = ready.rows[begins]
        for row in rows.tolist():
            episode = self.episodes[row] = self.episodes.get(row, -1) + 1
            self.guests.seat(np.array([row]), self.name(row, episode))
        return np.zeros(len(rows), np.int64)


def listen(guests: Guests) -> list[tuple[Ready, NDArray[np.int64], NDArray[np.float32]]]:
    """What they are asked and answer from now on."""
    heard: list[tuple[Ready, NDArray[np.int64], NDArray[np.float32]]] = []
    act = guests.act

    def heard_act(ready: Ready) -> Any:
        answer = act(ready)
        copied = {name: leaf.copy() for name, leaf in ready.obs.items()}
        heard.append((Ready(**{**vars(ready), "obs": copied}), answer[0].copy(), answer[1].copy()))
        return answer

    guests.act = heard_act  # type: ignore[method-assign]
    return heard


# ------------------------------------------------------------------------------------------ frozen policies


@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
@pytest.mark.parametrize("spec", [SPEC, MIXED], ids=["discrete", "mixed"])
def test_frozen_policies_act_as_networks_with_their_weights(core: str, spec: EnvSpec) -> None:
    """Three in one delivery, rows that change hands, over many steps: action for action what `Policy` does."""
    memory = {"model.core": core, "model.last_action": True, "model.last_reward": True}
    config = settings(spec, **memory, **({"model.core_layers": 2} if core != "none" else {}))
    pool = ScriptedPool([3, 5, 40, 4, 7, 2], units=[0, 0, 0, 0, 1, 1], spec=spec)
    guests = Guests(config, pool, make_actor(config, spec, torch.device("cpu")))
    names = ["x", "y", "z"]
    weights = {name: weights_of(config, spec, i) for i, name in enumerate(names)}
    for name in names:
        guests.add(name, weights[name])
    seats = BySeat(guests, lambda row, episode: names[(row + episode) % 3])
    heard = listen(guests)
    sampler = Sampler(_bounded(pool, spec), [guests], seed=3, seats=seats)
    networks = {name: Policy.from_weights(config, spec, weights[name]) for name in names}
    generator = torch.Generator()
    generator.set_state(guests._generator.get_state())
    for network in networks.values():
        network._generator = generator
    states = networks["x"].initial_state(pool.num_rows)
    playing, several = dict[int, str](), 0
    for _ in range(60):
        sampler.step()
        ready, discrete, continuous = heard[-1]
        first = begins_episode(ready)
        for i in np.flatnonzero(first):
            playing[int(ready.rows[i])] = names[(int(ready.rows[i]) + seats.episodes[int(ready.rows[i])]) % 3]
        here = [playing[int(row)] for row in ready.rows]
        several += len(set(here)) > 2
        for name in sorted(set(here), key=guests._names.index):
            of = np.array([one == name for one in here])
            index = torch.from_numpy(ready.rows[of])
            part = PolicyState(*(getattr(states, k)[index] for k in ("core", "discrete", "continuous", "reward")))
            rewards = torch.from_numpy(np.where(first[of], 0.0, ready.reward[of]).astype(np.float32))
            obs = {k: leaf[of] for k, leaf in ready.obs.items()}
            expected, bounded, part = networks[name].step(obs, part, rewards, first[of])
            for k in ("core", "discrete", "continuous", "reward"):
                getattr(states, k)[index] = getattr(part, k)
            assert discrete[of].tolist() == expected.tolist(), name
            np.testing.assert_allclose(continuous[of], bounded, rtol=1e-5, atol=1e-6)
    assert several > 10
    torch.testing.assert_close(guests._state, states.core, rtol=1e-4, atol=1e-5)
    for name in names:
        assert params_sha(guests.weights(name)) == params_sha(weights[name])


def _bounded(pool: ScriptedPool, spec: EnvSpec) -> ScriptedPool:
    """The pool, which also checks that actions keep to their bounds."""
    send = pool.send

    def checked(rows: Any, discrete: Any, continuous: Any) -> None:
        assert ((discrete >= 0) & (discrete < np.array(spec.action.discrete))).all()
        assert (continuous >= np.array(spec.action.low) - 1e-6).all()
        assert (continuous <= np.array(spec.action.high) + 1e-6).all()
        send(rows, discrete, continuous)

    pool.send = checked  # type: ignore[method-assign]
    return pool


def test_a_frozen_policy_acts_in_the_precision_of_the_run() -> None:
    config = settings(precision="bfloat16", **{"model.core": "gru"})
    pool = ScriptedPool([50, 50])
    guests = Guests(config, pool, make_actor(config, SPEC, torch.device("cpu")))
    weights = weights_of(config, SPEC, 0)
    guests.add("x", weights)
    heard = listen(guests)
    sampler = Sampler(pool, [guests], seed=0, seats=BySeat(guests, lambda row, episode: "x"))
    actor = make_actor(config, SPEC, torch.device("cpu"))
    actor.load_state_dict(weights)
    assert {name: w.dtype for name, w in guests.weights("x").items()} == {
        name: w.dtype for name, w in actor.state_dict().items()
    }
    generator, state = torch.Generator(), actor.initial_state(2)
    generator.set_state(guests._generator.get_state())
    for t in range(20):
        sampler.step()
        ready, discrete, _ = heard[-1]
        obs = {"obs": torch.from_numpy(ready.obs["obs"])}
        with torch.inference_mode():
            out = actor({"obs": obs["obs"][None]}, state, torch.full((1, 2), t == 0))
            expected, _ = actor.distribution(out.params[0], obs).sample(generator)
        state = out.state
        assert discrete.tolist() == expected.tolist()


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop_tf"])
def test_a_frozen_policy_is_bitwise_what_it_was_while_its_learner_trains_on(optimizer: str) -> None:
    """Nothing is shared with the live model, its optimiser, its normalisers or the acting copy."""
    sampler, (member, _) = crew(**{"learner.optimizer": optimizer, "model.core": "gru"})
    guests = Guests(member.config, sampler.pool, make_actor(member.config, SPEC, torch.device("cpu")))
    train(sampler, member, 1)
    guests.add("then", member.newest.tensors)
    sha = params_sha(guests.weights("then"))
    assert sha == params_sha(member.model.state_dict())
    train(sampler, member, 5)
    assert params_sha(guests.weights("then")) == sha
    assert params_sha(member.model.state_dict()) != sha
    rows = np.arange(4)
    guests.seat(rows, "then")
    ready = _ready(rows, FIRST)
    for _ in range(5):
        guests.act(ready)
    assert params_sha(guests.weights("then")) == sha
    live = {t.data_ptr() for t in member.model.state_dict().values() if t.numel()}
    live |= {t.data_ptr() for t in member.acting.actor.state_dict().values() if t.numel()}
    assert not live & {t.data_ptr() for t in guests.weights("then").values() if t.numel()}


def _ready(rows: NDArray[np.int64], event: int, spec: EnvSpec = SPEC) -> Ready:
    none, n = np.zeros(len(rows), np.bool_), len(rows)
    obs = {name: np.ones((n, *leaf.shape), leaf.dtype) for name, leaf in spec.observation.items()}
    return Ready(
        rows, np.full(n, event, np.uint8), obs, np.zeros(n, np.float32), none, none, none, np.zeros(0, np.int64), {}
    )


# ------------------------------------------------------------------------------------------ how many


@pytest.mark.case("MAS-17")
def test_memory_is_that_of_the_guests_who_are_kept_however_many_there_were() -> None:
    """300 snapshots come and go; two are in games at a time, and three in the pool."""
    config, pool = settings(), ScriptedPool([9, 9, 9, 9])
    guests = Guests(config, pool, make_actor(config, SPEC, torch.device("cpu")))
    seen = list[weakref.ref[Tensor]]()
    for i in range(300):
        weights = weights_of(config, SPEC, i) if i < 3 else {k: w.clone() for k, w in guests.weights("s2").items()}
        guests.add(f"s{i}", weights)
        seen += map(weakref.ref, guests.weights(f"s{i}").values())
        guests.seat(np.array([i % 4]), f"s{i}")
        guests.act(_ready(np.arange(max(0, 4 - i), min(i + 1, 4)) if i < 4 else np.arange(4), STEP))
        guests.keep({"s2", *(f"s{j}" for j in range(max(0, i - 3), i + 1))})
    del weights
    gc.collect()
    assert len(guests._frozen) == 5
    assert sum(one() is not None for one in seen) == 5 * len(guests.weights("s2"))
    assert len(guests._names) <= 4 + 1  # numbers of those who play nowhere are given anew


def test_a_number_is_not_given_to_another_while_a_row_has_it() -> None:
    config, pool = settings(), ScriptedPool([9, 9])
    guests = Guests(config, pool, make_actor(config, SPEC, torch.device("cpu")))
    asked: list[str] = []

    def script(name: str) -> Any:
        def act(ready: Ready, where: NDArray[np.bool_]) -> Any:
            asked.extend([name] * int(where.sum()))
            return np.zeros((int(where.sum()), 1), np.int64), np.zeros((int(where.sum()), 0), np.float32)

        return act

    for name in ("a", "b", "c"):
        guests.add_script(name, script(name))
    guests.seat(np.array([0]), "a")
    guests.seat(np.array([1]), "b")
    guests.seat(np.array([1]), "c")  # b's number is free, a's is not
    guests.act(_ready(np.arange(2), STEP))
    assert sorted(asked) == ["a", "c"]
    guests.leave(np.array([0]))
    assert guests._guest.tolist() == [NOBODY, guests._names.index("c")]
    guests.seat(np.array([0]), "b")
    guests.act(_ready(np.arange(2), STEP))
    assert sorted(asked[2:]) == ["b", "c"]


def test_a_guest_that_nobody_knows_is_named_with_those_who_are_there() -> None:
    config, pool = settings(), ScriptedPool([9])
    guests = Guests(config, pool, make_actor(config, SPEC, torch.device("cpu")))
    guests.add("here", weights_of(config, SPEC, 0))
    with pytest.raises(PronghornError, match="No guest is called 'gone'; there are: here"):
        guests.seat(np.array([0]), "gone")


# ------------------------------------------------------------------------------------------ scripts, and the rest


def never_two(spec: EnvSpec, seed: int) -> Any:
    """A script's function: what it last chose in a row, and one more; 0 at the beginning."""
    last: dict[int, int] = {}

    def act(obs: Any, first: Any, rows: Any) -> Any:
        for row, begins in zip(rows.tolist(), first.tolist(), strict=True):
            last[row] = 0 if begins else (last[row] + 1) % 3
        return np.array([[last[row]] for row in rows.tolist()]), None

    return act


def test_scripts_play_their_rows_beside_frozen_policies(tmp_path: Path) -> None:
    config, pool = settings(), ScriptedPool([3, 4, 5, 6], units=[0, 0, 1, 1])
    guests = Guests(config, pool, make_actor(config, SPEC, torch.device("cpu")))
    script = f"{Path(__file__)}:never_two"
    guests.add_script("script", load_player(script).begin(pool, 5))  # type: ignore[arg-type]
    guests.add_script("random", load_player("random").begin(pool, 5))  # type: ignore[arg-type]
    guests.add("frozen", weights_of(config, SPEC, 0))
    names = ["script", "random", "frozen", "script"]
    sampler = Sampler(pool, [guests], seed=0, seats=BySeat(guests, lambda row, episode: names[row]))
    for _ in range(60):
        sampler.step()
    chosen: dict[int, list[int]] = {row: [] for row in range(4)}
    for rows, discrete in pool.sent:
        for row, choice in zip(rows.tolist(), discrete[:, 0].tolist(), strict=True):
            chosen[row].append(choice)
    assert chosen[0][:9] == [0, 1, 2] * 3  # episodes of three steps
    assert chosen[3][:8] == [0, 1, 2, 0, 1, 2, 0, 1]  # and of six
    assert set(chosen[1]) == {0, 1, 2}


def test_a_script_that_breaks_a_rule_is_named() -> None:
    config = settings(MASKED)
    pool = ScriptedPool([3], spec=MASKED)
    guests = Guests(config, pool, make_actor(config, MASKED, torch.device("cpu")))
    guests.add_script("script", load_player(f"{Path(__file__)}:never_two").begin(pool, 5))  # type: ignore[arg-type]
    guests.seat(np.array([0]), "script")
    ready = _ready(np.array([0]), FIRST, MASKED)
    ready.obs["action_mask"][:, 0] = 0
    with pytest.raises(UsageError, match=r"never_two.*chose 0 for discrete action 0; 'action_mask' allows \[1, 2\]"):
        guests.act(ready)


def test_rows_that_do_not_act_are_not_asked() -> None:
    config, pool = settings(), ScriptedPool([9] * 5)
    guests = Guests(config, pool, make_actor(config, SPEC, torch.device("cpu")))
    asked: list[list[int]] = []

    def script(ready: Ready, where: NDArray[np.bool_]) -> Any:
        asked.append(ready.rows[where].tolist())
        return np.full((int(where.sum()), 1), 2), np.zeros((int(where.sum()), 0), np.float32)

    guests.add_script("s", script)
    guests.seat(np.arange(5), "s")
    ready = _ready(np.arange(5), STEP)
    ready.event[:] = [FIRST, STEP, LAST, INACTIVE, LOST]
    discrete, continuous = guests.act(ready)
    assert asked == [[0, 1, 2]]
    assert discrete[:, 0].tolist() == [2, 2, 2, 0, 0]
    assert continuous.shape == (5, 0)


def test_what_guests_do_is_stored_nowhere_and_in_no_statistic() -> None:
    """Members play rows 0 and 2, guests the others: stores hold and trackers know only what members did."""
    pool = ScriptedPool([3, 5, 4, 6], units=[0, 0, 1, 1])
    config = settings(**{"learner.batch_unrolls": 8})
    (member,) = make_members(pool, config, 1)
    guests = Guests(config, pool, make_actor(config, SPEC, torch.device("cpu")))
    guests.add("g", member.newest.tensors)
    guests.seat(np.array([1, 3]), "g")
    seats = ByRow(2)
    sampler = Sampler(pool, [member.player, guests], seed=0, seats=seats)
    for _ in range(24):
        sampler.step()
    full = np.flatnonzero(member.store._status == 2)
    assert len(full) > 2
    assert set(member.store.obs["obs"][full, :, 0].flatten().tolist()) == {0.0, 2.0}
    assert set(member.tracker._returns.nonzero()[0].tolist()) <= {0, 2}
    assert {r for r, _ in member.tracker._finished} == {1 + 2 + 3, 1 + 2 + 3 + 4}
    assert guests.num_steps == 0
    assert sampler.num_steps == member.player.num_steps
    assert not any(isinstance(value, type(member.store)) for value in vars(guests).values())
