"""Gymnasium vector environments: one record a row and step out of each of their auto-reset modes."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence

import numpy as np

from .many_rows import INACTIVE, LAST, RowsEnv, VectorStep, is_number
from .spaces import Actions, ContractBroken, Observations

MODES = ("NextStep", "SameStep", "Disabled")
_FINAL_OBS = ("final_obs", "final_observation")  # since Gymnasium 1.0; before


class GymnasiumVectorEnv(RowsEnv):
    """A Gymnasium 1.x vector environment as one environment of k rows that step together.

    Its three auto-reset modes give the same records: same-step, whose final observations and infos lie in the infos;
    disabled, where rows are reset here; and next-step, whose dummy step (last observation to first, action ignored)
    must not be trained on: a row that ended is INACTIVE, and its record comes with the reset observation, in the next
    step.
    """

    def __init__(self, env: Any, obs_keys: Sequence[str] = (), image_layout: str = "", **options: Any) -> None:
        """options: of RowsEnv."""
        super().__init__(env, int(env.num_envs), **options)
        self._actions = Actions(env.single_action_space)
        self._observations = Observations(
            env.single_observation_space, self._actions.num_choices, obs_keys, image_layout
        )
        # Gymnasium 1.0, before there was a choice, says nothing and resets in the next step
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode", "NextStep")
        self._mode = str(getattr(mode, "value", mode))
        if self._mode not in MODES:
            raise ContractBroken("%s has the unknown auto-reset mode %r" % (self.class_name, mode))
        self._held: Optional[VectorStep] = None  # next-step: the records of rows that ended in the last step
        self.spec = self._spec(self._observations.to_json(), self._actions.to_json(), self._mode == "NextStep")

    def reset(self, seed: Optional[int] = None) -> VectorStep:
        self._held = None
        return VectorStep.first(self._observations.flatten(self._raw_reset(seed)[0], self.count), self.count)

    def step(self, discrete: Any, continuous: Any) -> VectorStep:
        obs, reward, terminated, truncated, info = self.env.step(self._actions.unflatten(discrete, continuous))
        step = VectorStep(self._observations.flatten(obs, self.count), reward, terminated, truncated)
        if not np.isfinite(step.reward).all():
            raise ContractBroken("%s.step() returned the rewards %r; they must be finite" % (self.class_name, reward))
        self._read_info(step, info)
        if self._mode == "NextStep":
            return self._next_step(step)
        if step.episode_over.any():
            if self._mode == "SameStep":
                step.final_obs = self._final_obs(info, step)
            else:
                options = dict(self._options, reset_mask=step.episode_over.copy())
                step.final_obs = step.obs
                step.obs = self._observations.flatten(self.env.reset(options=options)[0], self.count)
        return step

    def _read_info(self, step: VectorStep, infos: Mapping[str, Any]) -> None:
        """The declared entries, and every number of rows that ended: of the step itself, not of a reset after it."""
        step.info = {name: _column(infos, name, self.count) for name in self._info_names}
        last = infos.get("final_info", {}) if self._mode == "SameStep" else infos
        for row in np.flatnonzero(step.episode_over).tolist():
            own = _own_info(last, row)
            step.stats[row] = {str(key): float(value) for key, value in own.items() if is_number(value)}
            for name, column in step.info.items():
                column[row] = own.get(name, np.nan)

    def _next_step(self, step: VectorStep) -> VectorStep:
        """Hold the records of rows that ended now; deliver those held, whose reset observation has come."""
        held, self._held = self._held, None
        was_over = np.zeros(self.count, np.bool_) if held is None else held.episode_over.copy()
        if step.episode_over.any():
            self._held = VectorStep(step.obs, step.reward, step.terminated, step.truncated)
            self._held.info = {name: column.copy() for name, column in step.info.items()}
            self._held.stats, step.stats = step.stats, {}
        for array in (step.reward, step.terminated, step.truncated):
            array[step.episode_over] = 0
        step.event[step.episode_over], step.episode_over[:] = INACTIVE, was_over
        if held is not None:
            step.event[was_over] = LAST
            for name in ("reward", "terminated", "truncated"):
                getattr(step, name)[was_over] = getattr(held, name)[was_over]
            for name, column in step.info.items():
                column[was_over] = held.info[name][was_over]
            step.final_obs, step.stats = held.final_obs, held.stats
        return step

    def _final_obs(self, info: Mapping[str, Any], step: VectorStep) -> Dict[str, Any]:
        """Leaves [k, ...] of the final observations, from the infos of a same-step reset."""
        key = next((key for key in _FINAL_OBS if key in info), None)
        if key is None:
            raise ContractBroken(
                "%s resets in the same step, but its infos hold no 'final_obs' of the rows that ended" % self.class_name
            )
        leaves = {name: array.copy() for name, array in step.obs.items()}
        for row in np.flatnonzero(step.episode_over).tolist():
            for name, value in self._observations.flatten(_row_of(info[key], row)).items():
                leaves[name][row] = value
        return leaves

    def render(self) -> Any:
        """The picture of the first row."""
        frames = self._raw_render()
        frame = frames[0] if frames is not None and len(frames) else None
        return None if frame is None else np.asarray(frame, dtype=np.uint8)


def _column(infos: Mapping[str, Any], name: str, count: int) -> Any:
    """[count] of one entry, nan where a row did not report it (mask '_name')."""
    if name not in infos:
        return np.full(count, np.nan)
    given = np.asarray(infos.get("_" + name, True), np.bool_)
    return np.where(given, np.asarray(infos[name], np.float64), np.nan)


def _own_info(infos: Any, row: int) -> Dict[Any, Any]:
    """What one row reported: its dictionary of a list of them, or its entries of a dictionary of columns and masks."""
    if not isinstance(infos, Mapping):
        return infos[row] or {}
    own = {}
    for key, column in infos.items():
        given = infos.get("_%s" % key)
        if getattr(column, "ndim", 0) == 1 and not str(key).startswith("_") and (given is None or given[row]):
            own[key] = column[row]
    return own


def _row_of(batch: Any, row: int) -> Any:
    """One row of final observations: of an array of whole observations, or of the arrays that a dictionary holds."""
    if isinstance(batch, Mapping):
        return {key: _row_of(value, row) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row_of(part, row) for part in batch)
    return batch[row]
