"""What environments of several rows have in common: the record of one step, their options and their spec.

It steps no environment; `vector`, `parallel` and `turns` do.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np

from .spaces import ContractBroken

FIRST, STEPPED, LAST, INACTIVE = 0, 1, 2, 4  # the numbers of pronghorn.types.Event


class VectorStep:
    """What one step of an environment of k rows caused: a record a row, whatever the environment's auto-reset does.

    event [k]: STEPPED, LAST (obs is already the next episode's first) or INACTIVE (the row waits: nothing to record).
    final_obs: leaves [k, ...], valid where truncated.
    info: {name: [k]} of the declared names; stats: {row: numbers for the record of its episode}, where one ended.
        Both are of the step that the record is about, at an episode's end of its last one.
    games: {row: outcomes}, where the row's record is the first after the end of a game: what that game declared for
        each of the k rows, 1, 0, -1 or None. Each game is told once.
    """

    __slots__ = (
        "episode_over", "event", "final_obs", "games", "info", "obs", "reward", "stats", "terminated", "truncated",
    )  # fmt: skip

    def __init__(self, obs: Dict[str, Any], reward: Any, terminated: Any, truncated: Any) -> None:
        self.obs = obs
        self.reward = np.array(reward, np.float64)  # copies: the environment may write its own arrays again
        self.terminated, self.truncated = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        self.episode_over = self.terminated | self.truncated
        self.event = np.where(self.episode_over, LAST, STEPPED)
        self.final_obs = obs
        self.info: Dict[str, Any] = {}
        self.stats: Dict[int, Dict[str, float]] = {}
        self.games: Dict[int, List[Optional[float]]] = {}

    @classmethod
    def first(cls, obs: Dict[str, Any], count: int) -> "VectorStep":
        """The first observations of all k rows."""
        nothing = np.zeros(count)
        step = cls(obs, nothing, nothing, nothing)
        step.event[:] = FIRST
        return step


class RowsEnv:
    """The options and the spec of an environment of `count` rows.

    info: names of numeric info entries to report at every step; reset_options: given to every reset. There is no
    frame_skip: only the environment itself knows where its rows' episodes end.
    """

    def __init__(
        self,
        env: Any,
        count: int,
        frame_skip: int = 1,
        info: Sequence[str] = (),
        reset_options: Optional[Mapping[str, Any]] = None,
        name: str = "",
    ) -> None:
        self.env, self.count = env, count
        self.class_name = type(getattr(env, "unwrapped", env)).__name__
        if frame_skip != 1:
            raise ContractBroken(
                "frame_skip = %d: %s has several rows, so it has to repeat its actions itself"
                % (frame_skip, self.class_name)
            )
        self._info_names, self._options, self._name = tuple(info), dict(reset_options or {}), name

    def _spec(self, observation: Dict[str, Any], action: Dict[str, Any], rows_wait: bool) -> Dict[str, Any]:
        """rows_wait: rows may be INACTIVE."""
        metadata = getattr(self.env, "metadata", None) or {}
        return {
            "observation": observation,
            "action": action,
            "rows_per_env": self.count,
            "rows_wait": rows_wait,
            "frame_skip": 1,
            "info": list(self._info_names),
            "render_fps": float(metadata.get("render_fps") or 30.0),
            "name": self._name or self.class_name,
        }

    def _raw_reset(self, seed: Optional[int]) -> Any:
        """What the environment's reset of all rows returns."""
        options = {"options": dict(self._options)} if self._options else {}
        return self.env.reset(seed=seed, **options)

    def _raw_render(self) -> Any:
        """What the environment's render() gives; None where it has none."""
        render = getattr(self.env, "render", None)
        try:
            return None if render is None else render()
        except NotImplementedError:  # the base classes: this environment draws nothing
            return None

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()


def has_rows(env: Any) -> bool:
    """Whether a flat environment gives a VectorStep; one of several rows may have a single one."""
    return isinstance(env, RowsEnv) or env.spec.get("rows_per_env", 1) > 1


def require_agents(env: Any) -> None:
    """An environment that names the agents of its game names each row's, and counts games. Raises ContractBroken.

    If it says which of them have which spaces, it says so of all.
    """
    agents, count = env.spec.get("agents", ()), env.spec.get("rows_per_env", 1)
    own = sorted(row for signature in env.spec.get("signatures", ()) for row in signature["rows"])
    if own and (own != list(range(count)) or not agents):
        raise ContractBroken(
            "%s: spec['signatures'] names the rows %s of %d, and spec['agents'] %d agents; give each row to one "
            "signature only, and name each row's agent" % (type(env).__name__, own, count, len(agents))
        )
    if not agents or not has_rows(env):
        return
    if len(agents) != count:
        raise ContractBroken(
            "%s: spec['agents'] names %d agents of %d rows; give one name for each row, in their order, or none where "
            "the rows are not agents of one game" % (type(env).__name__, len(agents), count)
        )
    if not isinstance(getattr(env, "games", None), (int, np.integer)):
        raise ContractBroken(
            "%s names the agents of its game in spec['agents'], so its attribute `games` has to be the number of games "
            "begun so far: set it to 0, and add 1 at each reset" % type(env).__name__
        )


def is_number(value: Any) -> bool:
    """A plain, finite number, as the records of episodes hold them."""
    return isinstance(value, (bool, int, float, np.number, np.bool_)) and math.isfinite(float(value))
