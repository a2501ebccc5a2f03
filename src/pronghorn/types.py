"""Records that cross the borders between the parts, and the legend of shapes. No behaviour lives here.

Legend of shapes, used in every docstring:
    T  decisions in an unroll          B  unrolls in a batch           N  rows ready at once
    A  actions (logits) of a factor    D  discrete action factors      C  continuous action dimensions
    H  size of the recurrent state     [T, B, ...] is time-major; row t is one decision.

A *row* is one agent in one environment instance: the unit that acts. The words are those of docs/design.md.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ACTION_MASK = "action_mask"  # the observation leaf that holds the mask of allowed discrete actions
LAST_ACTION = "last_action"  # observation leaves that the sampler adds when the model asks for them
LAST_REWARD = "last_reward"


class Event(IntEnum):
    """What a row's record in one `recv` means. The worker side uses the same numbers (envworker/main.py)."""

    FIRST = 0  # first observation of an episode, nothing to record (start, or after LOST)
    STEP = 1  # reward and observation that the last action caused
    LAST = 2  # the same, and the action ended the episode; obs is already the next episode's first
    LOST = 3  # the row's worker died: nothing to record, its unfinished unroll is void
    INACTIVE = 4  # agent absent or not on turn: nothing to record, any answer will do


# The same as plain numbers, for hot loops: an array takes five times as long to compare with an enum's member.
FIRST, STEP, LAST, LOST, INACTIVE = map(int, Event)


@dataclass(frozen=True)
class LeafSpec:
    """One array of an observation (nested Dict and Tuple spaces are flattened to named leaves, 'inventory/0').

    kind: 'image' (rank 3, layout 'hwc' or 'chw'), 'vector' (any shape, flattened by the model),
          'discrete' (integer codes in [0, n) per entry, one-hot in the model), 'binary', 'mask'.
    low, high: bounds of the values (the scale of images and integers); ±inf where unbounded.
    start: what was subtracted from the environment's own codes, one per entry; () where they start at 0.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str
    layout: str = ""
    low: float = float("-inf")
    high: float = float("inf")
    n: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    def __str__(self) -> str:
        """'image 72x128x3 uint8 hwc'."""
        sizes = "x".join(map(str, self.shape)) or "1"
        return " ".join(word for word in (self.kind, sizes, self.dtype, self.layout) if word)

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ActionSpec:
    """A composite action as D discrete factors (sizes) followed by C bounded continuous dimensions.

    Factor values are 0-based here; `Discrete(n, start=k)` is shifted on the worker side.
    tree: how the environment's own action is put together (JSON of envworker/spaces.py); "" where it says nothing.
    """

    discrete: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    tree: str = ""

    def __str__(self) -> str:
        """'factors of 3, 3, 2 choices and 2 continuous'."""
        sizes = ", ".join(map(str, self.discrete))
        factors = f"{sizes} choices" if len(self.discrete) == 1 else f"factors of {sizes} choices" if sizes else ""
        continuous = f"{self.num_continuous} continuous" if self.low else ""
        return " and ".join(part for part in (factors, continuous) if part)

    @property
    def num_discrete(self) -> int:
        return len(self.discrete)

    @property
    def num_continuous(self) -> int:
        return len(self.low)

    @property
    def num_logits(self) -> int:
        return sum(self.discrete)


@dataclass(frozen=True)
class Signature:
    """The spaces of some agents of a game, where not all agents have the same. One policy plays those of one signature.

    rows: of one environment, whose agents have these spaces.
    leaves: by a leaf's name in `observation`, the leaf of `EnvSpec.observation` in which it is delivered: at its front,
        where that is longer; a mask, at the places of the agents' own choices among those of `EnvSpec.action`.
    Actions stand in front, too, in arrays of the size of `EnvSpec.action`.
    """

    rows: tuple[int, ...]
    observation: Mapping[str, LeafSpec]
    action: ActionSpec
    leaves: Mapping[str, str]

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Signature:
        """Build from the JSON that a worker sends."""
        leaves = {str(name): str(place) for name, place in raw["leaves"].items()}
        return Signature(tuple(map(int, raw["rows"])), _leaves(raw["observation"]), _action(raw["action"]), leaves)


@dataclass(frozen=True)
class EnvSpec:
    """What one environment looks like to the trainer; every task of a run has the same observations and actions."""

    observation: Mapping[str, LeafSpec]
    action: ActionSpec
    rows_per_env: int = 1
    rows_wait: bool = False  # rows may be INACTIVE: absent agents, next-step auto-reset
    frame_skip: int = 1  # emulator frames that one step covers
    info: tuple[str, ...] = ()  # names of the declared numeric info fields
    render_fps: float = 30.0
    name: str = ""
    agents: tuple[str, ...] = ()  # names of the agents of one game, by row; () of independent rows or a single one
    rewards: Mapping[str, float] = field(default_factory=dict)  # weights that `Pool.set_option("rewards", ...)` changes
    signatures: tuple[Signature, ...] = ()  # of each policy, by its number; () where one plays all agents

    @property
    def is_game(self) -> bool:
        """Whether the rows of an environment are the agents of one game, whose end is told in records."""
        return bool(self.agents)

    def leaves_of(self, names: Collection[str]) -> tuple[str, ...]:
        """The observation's leaves that `names` stand for: 'a' for the leaf 'a', or 'a/b' and all others below it."""
        return tuple(leaf for leaf in self.observation if any(f"{leaf}/".startswith(f"{name}/") for name in names))

    @property
    def most_rows(self) -> int:
        """Rows of one environment that one policy plays at most."""
        return max((len(signature.rows) for signature in self.signatures), default=self.rows_per_env)

    def of(self, number: int) -> EnvSpec:
        """What the environment looks like to the agents of one signature, and to the policy that plays them."""
        own = self.signatures[number]
        agents = tuple(self.agents[row] for row in own.rows)
        return replace(self, observation=own.observation, action=own.action, rows_per_env=len(own.rows), agents=agents,
                       signatures=())  # fmt: skip

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> EnvSpec:
        """Build from the JSON that a worker sends (envworker/spaces.py writes it)."""
        num_rows = int(raw.get("rows_per_env", 1))
        return EnvSpec(
            _leaves(raw["observation"]),
            _action(raw["action"]),
            num_rows,
            bool(raw.get("rows_wait", False)),
            int(raw.get("frame_skip", 1)),
            tuple(raw.get("info", ())),
            float(raw.get("render_fps", 30.0)),
            str(raw.get("name", "")),
            tuple(map(str, raw.get("agents", ()))) if num_rows > 1 else (),  # one agent alone has no game with others
            {str(name): float(weight) for name, weight in raw.get("rewards", {}).items()},
            tuple(map(Signature.from_json, raw.get("signatures", ()))),
        )


def _leaves(raw: Mapping[str, Any]) -> dict[str, LeafSpec]:
    return {
        name: LeafSpec(
            tuple(leaf["shape"]), leaf["dtype"], leaf["kind"], leaf.get("layout", ""),
            float(leaf.get("low", "-inf")), float(leaf.get("high", "inf")), tuple(leaf.get("n", ())),
            tuple(leaf.get("start", ())),
        )
        for name, leaf in raw.items()
    }  # fmt: skip


def _action(raw: Mapping[str, Any]) -> ActionSpec:
    tree = json.dumps(raw["tree"]) if raw.get("tree") else ""
    return ActionSpec(tuple(raw["discrete"]), tuple(raw["low"]), tuple(raw["high"]), tree)


@dataclass
class Ready:
    """Rows that are ready, from one `recv`. Arrays are [N, ...] in the order of `rows`, valid until the next recv.

    reward, terminated, truncated belong to the action that the row was sent last (ignored unless STEP or LAST).
    episode_over: the real end of an episode; differs from LAST at a life loss, which is a training boundary
        without reset and without statistics.
    final_index: [M] positions in `rows` whose episode was truncated; final_obs: their last observations [M, ...].
    records: of each episode that ended, its row and the environment's own numbers. Where the rows of an environment are
        the agents of a game, the first record after a game's end also has "outcomes": what the game declared for each
        row of the environment (1, 0, -1, or None), those included that had no turn in it and so no record.
    game: number of the game of its environment that a row's observation belongs to; None where rows are not the agents
        of one game (`spec.agents` is empty). A row that begins an episode (FIRST, or LAST with episode_over) begins it
        in that game, and those of one environment that begin in the same game, in whichever recv, carry the same
        number. Of INACTIVE and LOST rows it says nothing. Only whether two numbers of one environment are equal means
        something: it counts its resets, with gaps where nobody got to act, and a restarted worker counts from anew.
    """

    rows: NDArray[np.int64]
    event: NDArray[np.uint8]
    obs: dict[str, NDArray[Any]]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    episode_over: NDArray[np.bool_]
    final_index: NDArray[np.int64]
    final_obs: dict[str, NDArray[Any]]
    info: NDArray[np.float32] | None = None  # [N, len(spec.info)]
    records: list[dict[str, Any]] = field(default_factory=list)  # one {"row": r, **numbers} per episode end
    game: NDArray[np.int64] | None = None  # [N]


class PoolRows(Protocol):
    """What is known of a pool's rows before any is received."""

    spec: EnvSpec
    num_rows: int
    tasks: tuple[str, ...]  # names of the tasks
    task_ids: NDArray[np.int64]  # [num_rows] index into `tasks`


class Experience(PoolRows, Protocol):
    """Where a run's experience comes from: a pool in this process, or remote actors."""

    restarts: int  # environment workers restarted so far

    def close(self) -> None:
        """End every process and free every resource; safe to call twice."""


class Pool(Experience, Protocol):
    """The one interface to environments: worker processes, native vector environments and GPU environments.

    `send(rows, …)` answers rows of one `recv`, by whole units: rows that are stepped together. All of them at once,
    or a part now and a part later. LOST rows are not answered. A row is never in two unanswered recvs.
    Rows are numbered 0 … num_rows-1 and keep their number for the whole run.
    """

    unit_ids: NDArray[np.int64]  # [num_rows] rows of one unit are stepped and answered together

    def recv(self, timeout_s: float, gather_s: float = 0.0) -> Ready | None:
        """The rows that are ready, or None when none came within timeout_s. Raises WorkerDied past the budget.

        gather_s: how long the first may wait for others that are under way, where units come one by one.
        """

    def send(
        self, rows: NDArray[np.int64], discrete: NDArray[np.int64], continuous: NDArray[np.float32]
    ) -> None:
        """Answer rows of one recv, by whole units: discrete [N, D], continuous [N, C] (already within bounds)."""

    def set_option(self, name: str, value: Any, env: int | None = None) -> None:
        """Change a named setting of the running environments before their next step, such as "rewards".

        env: number of one environment, its first row // spec.rows_per_env; None: all. Call it from the thread that
        calls recv and send. Raises EnvError where the back end's environments have no settings that can change.
        """

    def reseed(self, seed: int) -> None:
        """Drop what is in flight, seed every row from (seed, row) and reset it; the next recvs give FIRST."""
