"""Guests: frozen policies and scripts at the rows that they play. They act; nothing of what they do is stored.

A guest is known by a name. All frozen ones share one network, which runs with the weights of each in turn, and one RNN
state a row: so a further snapshot costs its weights and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from pronghorn.config import Config
from pronghorn.errors import PronghornError
from pronghorn.models.actor_critic import ActorCritic
from pronghorn.ops.distributions import to_env
from pronghorn.training.player import ACTS, History, RowPlayer, Rows, begins_episode, no_actions
from pronghorn.training.store import stored_leaves
from pronghorn.types import LAST, STEP, Pool, Ready

Leaves = dict[str, NDArray[Any]]
Actions = tuple[NDArray[np.int64], NDArray[np.float32]]  # discrete [N, D], continuous [N, C]
Script = Callable[[Ready, NDArray[np.bool_]], Actions]  # of those rows of a delivery that the mask marks

NOBODY = -1


class Guests(RowPlayer):
    """All guests of a pool. The sampler's thread seats them and lets them act; any thread may add some."""

    def __init__(self, config: Config, pool: Pool, net: ActorCritic) -> None:
        """net: the network of the run in the precision in which it acts; its own weights do not matter."""
        self._net, self._spec = net.eval(), pool.spec
        self._types = {name: tensor.dtype for name, tensor in net.state_dict().items()}
        self._device = next(net.parameters()).device
        self._state = net.initial_state(pool.num_rows, self._device)
        self._history = History(pool.num_rows, pool.spec.action, stored_leaves(pool.spec, config.model))
        self._generator = torch.Generator(self._device)
        self._frozen: dict[str, dict[str, Tensor]] = {}
        self._scripts: dict[str, Script] = {}
        self._names: list[str] = []  # by number
        self._guest = np.full(pool.num_rows, NOBODY, np.int64)  # number of each row's guest

    # ------------------------------------------------------------ who is there

    def add(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """A frozen policy. weights: as of `ActorCritic.state_dict`, never written again."""
        self._frozen[name] = {key: w.to(self._device, self._types[key]) for key, w in weights.items()}

    def add_script(self, name: str, script: Script) -> None:
        """A player that is no network."""
        self._scripts[name] = script

    def keep(self, names: Collection[str]) -> None:
        """Forget all frozen policies but these (and all that play are among them)."""
        for name in [name for name in self._frozen if name not in names]:
            del self._frozen[name]

    def weights(self, name: str) -> dict[str, Tensor]:
        """Of a frozen policy."""
        return self._frozen[name]

    def seat(self, rows: Rows, name: str) -> None:
        """These rows begin an episode that this guest plays."""
        if name not in self._frozen and name not in self._scripts:
            known = ", ".join([*self._frozen, *self._scripts])
            raise PronghornError(f"No guest is called {name!r}; there are: {known}.")
        self._guest[rows] = self._number(name)

    def _number(self, name: str) -> int:
        """A name's number, one that no row uses being given anew."""
        if name in self._names:
            return self._names.index(name)
        free = set(range(len(self._names))) - set(self._guest.tolist())
        if free:
            number = min(free)
            self._names[number] = name
            return number
        self._names.append(name)
        return len(self._names) - 1

    # ------------------------------------------------------------ as the sampler sees them

    def record(self, ready: Ready) -> None:
        moved = (ready.event == STEP) | (ready.event == LAST)
        self._history.reward[ready.rows[moved]] = ready.reward[moved]
        self._history.forget(ready.rows[begins_episode(ready)])

    def needs_slot(self, ready: Ready) -> NDArray[np.bool_]:
        return np.zeros(len(ready.rows), np.bool_)

    def start_unrolls(self, ready: Ready) -> bool:
        return True

    def leave(self, rows: Rows) -> None:
        self._guest[rows] = NOBODY

    def restart(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def act(self, ready: Ready) -> Actions:
        discrete, continuous = no_actions(self._spec.action, len(ready.rows))
        guests, acting = self._guest[ready.rows], ACTS[ready.event]
        for number in np.unique(guests[acting]).tolist():
            where, name = acting & (guests == number), self._names[number]
            play = self._scripts[name] if name in self._scripts else self._frozen_play(self._frozen[name])
            discrete[where], continuous[where] = play(ready, where)
        return discrete, continuous

    def _frozen_play(self, weights: dict[str, Tensor]) -> Script:
        def play(ready: Ready, where: NDArray[np.bool_]) -> Actions:
            rows, first = ready.rows[where], begins_episode(ready)[where]
            obs = self._history.added_to({name: leaf[where] for name, leaf in ready.obs.items()}, rows)
            discrete, continuous, bounded = self._infer(weights, obs, first, rows)
            self._history.discrete[rows], self._history.continuous[rows] = discrete, continuous
            return discrete, bounded

        return play

    @torch.inference_mode()
    def _infer(self, weights: dict[str, Tensor], obs: Leaves, first: NDArray[np.bool_], rows: Rows) -> Any:
        leaves = {name: torch.from_numpy(np.ascontiguousarray(leaf)).to(self._device) for name, leaf in obs.items()}
        index = torch.from_numpy(rows).to(self._device)
        batch = {name: leaf.unsqueeze(0) for name, leaf in leaves.items()}
        begins = torch.from_numpy(first).to(self._device).unsqueeze(0)
        out = functional_call(self._net, weights, (batch, self._state[index], begins))
        self._state[index] = out.state
        discrete, continuous = self._net.distribution(out.params[0], leaves).sample(self._generator)
        bounded = to_env(continuous, self._spec.action, self._net.continuous)
        return tuple(x.cpu().numpy() for x in (discrete, continuous, bounded))
