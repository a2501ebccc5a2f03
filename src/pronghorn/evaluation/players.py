"""Who can play in a match: a trained run, or one of its policies; uniformly random actions; or a function of a script.

It plays no game.

A script's function is called once for each agent of a game that it is to play (in a game of two: for each side), as
`function(spec, seed)`, and returns

    act(obs, first) -> discrete, continuous                    or act(obs, first, rows), if it remembers anything

    obs         dict of the leaves of spec.observation, [N, ...]: of the N rows that act now, of any games
    first       [N] bool: rows whose episode begins here
    rows        [N] int64: a number for each row, the same in all calls, by which to remember what belongs to it
    discrete    [N, D] integers: for each factor a choice in [0, size), which masks must allow; None where D is 0
    continuous  [N, C] numbers within the bounds of spec.action; None where C is 0
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pronghorn.config import derive_seed
from pronghorn.envworker.loading import NotFound
from pronghorn.envworker.loading import load as load_function
from pronghorn.errors import UsageError
from pronghorn.evaluation.at_rows import PolicyAtRows, begins, random_actions
from pronghorn.evaluation.policy import Policies, Policy, load_named, split_run, who_plays
from pronghorn.types import EnvSpec, Pool, Ready

RANDOM = "random"
_SCRIPT = re.compile(r"(?P<where>.+):(?P<function>[A-Za-z_][\w.]*)")
KINDS = (
    "A player is a run directory, RUN:1 (of a population, policy 1) or RUN:0@1000000 (policy 0, frozen after so many "
    "steps), 'random', or a script's function: module.path:function or path/file.py:function."
)

Actions = tuple[NDArray[np.int64], NDArray[np.float32]]  # discrete [N, D], continuous [N, C]
Act = Callable[[Ready, NDArray[np.bool_]], Actions]  # of those rows of a recv that the mask marks, all of which act


class Player(Protocol):
    """One who can play any side of a game."""

    @property
    def name(self) -> str:
        """Short, for tables."""

    @property
    def source(self) -> str:
        """What it is: two players of one source are the same."""

    def begin(self, pool: Pool, seed: int) -> Act:
        """What acts for it in one series of games; it knows of no earlier one. seed: of its actions."""


@dataclass(frozen=True)
class PolicyPlayer:
    """A trained policy. deterministic: the most probable action instead of a sample."""

    name: str
    source: str
    policy: Policy
    deterministic: bool = False

    def begin(self, pool: Pool, seed: int) -> Act:
        """See `Player`."""
        self.policy.seed(seed)
        return PolicyAtRows(self.policy, pool, self.deterministic).act


@dataclass(frozen=True)
class RandomPlayer:
    """Uniformly random actions among those that masks allow."""

    name: str = RANDOM
    source: str = RANDOM

    def begin(self, pool: Pool, seed: int) -> Act:
        """See `Player`."""
        rng, spec = np.random.default_rng(seed), pool.spec

        def act(ready: Ready, acts: NDArray[np.bool_]) -> Actions:
            return random_actions(spec, {name: leaf[acts] for name, leaf in ready.obs.items()}, int(acts.sum()), rng)

        return act


@dataclass(frozen=True)
class ScriptPlayer:
    """A function of a script, as the head of this file describes it."""

    name: str
    source: str
    function: Callable[[EnvSpec, int], Callable[..., Any]]

    def begin(self, pool: Pool, seed: int) -> Act:
        """See `Player`."""
        return _Script(self, pool.spec, seed)


def load_player(text: str, *, best: bool = False, deterministic: bool = False) -> Player:
    """The player that a word of the command line names.

    best, deterministic: of runs, the best evaluated checkpoint, and most probable actions.
    Raises UsageError for a word that names none, CheckpointError for a run that cannot be loaded.
    """
    if text == RANDOM:
        return RandomPlayer()
    folder, part = split_run(text)
    if folder.is_dir():
        path, policy = folder.resolve(), load_named(text, best=best)
        if isinstance(policy, Policies):
            raise UsageError(
                f"{folder} has a policy for each kind of agents ({who_plays(policy.spec)}), of which none can play any "
                "side of a game. A match takes runs in which one policy plays all (--env.pad-spaces)."
            )
        return PolicyPlayer(f"{path.name}{part}", f"{path}{part}", policy, deterministic)
    if match := _SCRIPT.fullmatch(text):
        return _load_script(text, match["where"], match["function"])
    raise UsageError(f"There is no run directory '{text}'. {KINDS}")


def unique_names(players: Sequence[Player]) -> list[str]:
    """A name for each player: its own, numbered ('duel#1') where several have the same."""
    own, names = [player.name for player in players], list[str]()
    for name in own:
        numbered = (f"{name}#{i}" for i in itertools.count(1))
        free = (one for one in numbered if one not in own and one not in names)
        names.append(name if own.count(name) == 1 else next(free))
    return names


def _load_script(text: str, where: str, name: str) -> ScriptPlayer:
    is_file = where.endswith(".py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module may lie here, as may one of an environment
    try:
        function = load_function(text)
    except NotFound as error:
        raise UsageError(f"'{text}' is no player: {error}. {KINDS}") from None
    if not callable(function):
        raise UsageError(f"'{text}' is no player: it is {function!r}, not a function(spec, seed) that returns act.")
    module = Path(where).stem if is_file else where.rpartition(".")[2]
    return ScriptPlayer(f"{module}:{name}", f"{os.path.abspath(where) if is_file else where}:{name}", function)


class _Script:
    """What a script made for each agent of the game, when it is first to act, and the check of what it returns."""

    def __init__(self, player: ScriptPlayer, spec: EnvSpec, seed: int) -> None:
        self._player, self._spec, self._seed = player, spec, seed
        self._masks = [name for name, leaf in spec.observation.items() if leaf.kind == "mask"]
        self._acts: dict[int, tuple[Callable[..., Any], bool]] = {}  # by agent: act, and whether it takes rows

    def __call__(self, ready: Ready, acts: NDArray[np.bool_]) -> Actions:
        positions, first = np.flatnonzero(acts), begins(ready)
        agents = ready.rows[positions] % self._spec.rows_per_env
        discrete = np.zeros((len(positions), self._spec.action.num_discrete), np.int64)
        continuous = np.zeros((len(positions), self._spec.action.num_continuous), np.float32)
        for agent in np.unique(agents).tolist():
            of_agent = agents == agent
            at = positions[of_agent]
            obs = {name: leaf[at] for name, leaf in ready.obs.items()}  # copies, which are the script's
            result = self._ask(agent, obs, first[at], ready.rows[at])
            mask = ready.obs[self._masks[0]][at] if self._masks else None
            discrete[of_agent], continuous[of_agent] = self._checked(agent, result, mask, len(at))
        return discrete, continuous

    def _ask(self, agent: int, obs: Any, first: NDArray[np.bool_], rows: NDArray[np.int64]) -> Any:
        if agent not in self._acts:
            act = self._player.function(self._spec, derive_seed(self._seed, agent))
            self._acts[agent] = act, _takes_rows(act, self._player.name)
        act, takes_rows = self._acts[agent]
        return act(obs, first, rows) if takes_rows else act(obs, first)

    def _checked(self, agent: int, result: Any, mask: NDArray[Any] | None, count: int) -> Actions:
        """The actions as the environment takes them. Raises UsageError for whatever breaks the rules."""
        spec = self._spec.action
        if not (isinstance(result, tuple) and len(result) == 2):
            raise self._error(agent, f"returned {_short(result)}; it is (discrete, continuous)")
        discrete = self._array(agent, "discrete", result[0], (count, spec.num_discrete), "iu").astype(np.int64)
        continuous = self._array(agent, "continuous", result[1], (count, spec.num_continuous), "iuf").astype(np.float32)
        self._require_choices(agent, discrete, mask)
        low, high = np.array(spec.low, np.float32), np.array(spec.high, np.float32)
        wrong = np.argwhere(~((continuous >= low) & (continuous <= high)))  # NaN is neither
        if len(wrong):
            row, i = wrong[0].tolist()
            rule = f"the bounds are {low[i]:g} to {high[i]:g}"
            raise self._error(agent, f"gave {continuous[row, i]:g} for continuous action {i}; {rule}")
        return discrete, continuous

    def _array(self, agent: int, what: str, value: Any, shape: tuple[int, int], kinds: str) -> NDArray[Any]:
        """value as an array of that shape; None stands for one without columns."""
        if value is None and shape[1] == 0:
            return np.zeros(shape)
        array = np.asarray(value)
        if array.shape != shape or (array.dtype.kind not in kinds and array.size):
            numbers = "integers" if what == "discrete" else "numbers"
            raise self._error(
                agent,
                f"returned {what} actions of shape {array.shape}, {array.dtype}; they are {numbers} of shape {shape}: "
                "a row for each that acts, a column for each action",
            )
        return array

    def _require_choices(self, agent: int, discrete: NDArray[np.int64], mask: NDArray[Any] | None) -> None:
        sizes = np.array(self._spec.action.discrete, np.int64)
        wrong = np.argwhere((discrete < 0) | (discrete >= sizes))
        if len(wrong):
            row, factor = wrong[0].tolist()
            rule = f"its choices are 0 to {sizes[factor] - 1}"
            raise self._error(agent, f"chose {discrete[row, factor]} for discrete action {factor}; {rule}")
        if mask is None:
            return
        starts = np.cumsum([0, *sizes[:-1]])
        allowed = mask.reshape(len(discrete), -1)  # [N, choices of all factors]
        forbidden = np.argwhere(np.take_along_axis(allowed, starts + discrete, axis=1) == 0)
        if len(forbidden):
            row, factor = forbidden[0].tolist()
            of_factor = allowed[row, starts[factor] : starts[factor] + sizes[factor]]
            rule = f"'{self._masks[0]}' allows {np.flatnonzero(of_factor).tolist()}"
            raise self._error(agent, f"chose {discrete[row, factor]} for discrete action {factor}; {rule}")

    def _error(self, agent: int, what: str) -> UsageError:
        who = f"The player {self._player.source}, as agent {agent} of the game (from 0),"
        return UsageError(f"{who} {what}. docs/agents.md, 'Matches', says what act returns.")


def _takes_rows(act: Any, name: str) -> bool:
    """Whether act takes (obs, first, rows) and not only (obs, first). Raises UsageError if it takes neither."""
    if not callable(act):
        raise UsageError(f"The player {name}: function(spec, seed) returned {_short(act)}; it returns act(obs, first).")
    try:
        signature = inspect.signature(act)
    except ValueError:  # of a built-in function nothing is known
        return False
    for arguments in (3, 2):
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            continue
        return arguments == 3
    raise UsageError(f"The player {name}: act{signature} has to take (obs, first), or (obs, first, rows).")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
