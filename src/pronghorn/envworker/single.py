"""Any Gymnasium environment of one agent in flat form; the form itself is described in `building`."""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, Optional, Sequence

import numpy as np

from .many_rows import is_number
from .spaces import Actions, ContractBroken, Observations

_SKIP_NAMES = ("frameskip", "_frameskip", "frame_skip", "_frame_skip", "_skip")


class GymnasiumEnv:
    """Any Gymnasium 1.x environment in flat form.

    obs_keys: keys of a Dict observation to use; image_layout: 'hwc' or 'chw' where the sizes leave it open;
    frame_skip: repeats every action so often (rewards are summed); info: names of numeric info entries to
    report at every step; reset_options: given to every reset.
    """

    def __init__(
        self,
        env: Any,
        obs_keys: Sequence[str] = (),
        image_layout: str = "",
        frame_skip: int = 1,
        info: Sequence[str] = (),
        reset_options: Optional[Mapping[str, Any]] = None,
        name: str = "",
    ) -> None:
        self.env = env
        self.class_name = type(getattr(env, "unwrapped", env)).__name__
        self._actions = Actions(env.action_space)
        self._observations = Observations(env.observation_space, self._actions.num_choices, obs_keys, image_layout)
        self._repeat, self._info_names = int(frame_skip), tuple(info)
        self._options = {} if reset_options is None else {"options": dict(reset_options)}
        self._last_info: Dict[str, Any] = {}
        metadata = getattr(env, "metadata", None) or {}
        self.spec = {
            "observation": self._observations.to_json(),
            "action": self._actions.to_json(),
            "rows_per_env": 1,
            "frame_skip": self._effective_skip(),
            "info": list(self._info_names),
            "render_fps": float(metadata.get("render_fps") or 30.0),
            "name": name or self.class_name,
        }

    def reset(self, seed: Optional[int] = None) -> Dict[str, Any]:
        try:
            result = self.env.reset(seed=seed, **self._options)
        except TypeError as error:
            if "seed" not in str(error) and "options" not in str(error):
                raise
            need = "(obs, info), from reset(*, seed=None, options=None)"
            raise self._wrong("reset", self.env.reset(), 2, need) from None
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise self._wrong("reset", result, 2, "(obs, info)")
        self._last_info = result[1]
        return self._observations.flatten(result[0])

    def step(self, discrete: Any, continuous: Any) -> Any:
        action = self._actions.unflatten(discrete, continuous)
        total = 0.0
        for _ in range(self._repeat):
            obs, reward, terminated, truncated, info = self._step_once(action)
            total += float(reward)
            if terminated or truncated:
                break
        if not math.isfinite(total):
            raise ContractBroken("%s.step() returned the reward %r; it must be finite" % (self.class_name, total))
        self._last_info = info
        terminated, truncated = bool(terminated), bool(truncated)
        return self._observations.flatten(obs), total, terminated, truncated, terminated or truncated, info

    def _step_once(self, action: Any) -> Any:
        need = "(obs, reward, terminated, truncated, info)"
        try:
            result = self.env.step(action)
        except ValueError as error:  # a wrapper of Gymnasium unpacks an old environment's four values
            if "values to unpack (expected 5" not in str(error):
                raise
            raise ContractBroken(
                "%s.step() is of the old Gym interface (%s); 5 values are needed: %s" % (self.class_name, error, need)
            ) from None
        if not (isinstance(result, tuple) and len(result) == 5):
            raise self._wrong("step", result, 5, need)
        return result

    def _wrong(self, method: str, result: Any, needed: int, names: str) -> ContractBroken:
        came = len(result) if isinstance(result, tuple) else 1
        return ContractBroken(
            "%s.%s() returned %d value%s; %d are needed: %s. Port it to the Gymnasium 1.x interface, or wrap it "
            "with shimmy.GymV21CompatibilityV0."
            % (self.class_name, method, came, "" if came == 1 else "s", needed, names)
        )

    def _effective_skip(self) -> int:
        inner = inherent_frame_skip(self.env)
        if inner > 1 and self._repeat > 1:
            raise ContractBroken(
                "frame_skip = %d: %s already repeats each action %d times, together that would be %d frames a step. "
                "Leave frame_skip at 1, or build the environment with its own skip set to 1."
                % (self._repeat, self.class_name, inner, inner * self._repeat)
            )
        return inner * self._repeat

    def render(self) -> Any:
        try:
            frame = self.env.render()
        except NotImplementedError:  # Gymnasium's base class: this environment draws nothing
            return None
        if isinstance(frame, list):
            frame = frame[-1] if frame else None
        return None if frame is None else np.asarray(frame, dtype=np.uint8)

    def stats(self) -> Dict[str, float]:
        """The plain numbers of the last step's info (for instance is_success)."""
        return {str(key): float(x) for key, x in self._last_info.items() if is_number(x)}

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()


def inherent_frame_skip(env: Any) -> int:
    """Frames that one step of `env` covers: the product of the skips of its layers (1 when none says any)."""
    skip, layer = 1, env
    while layer is not None:
        inner = getattr(layer, "env", None)
        own = vars(layer) if hasattr(layer, "__dict__") else {}
        for name in _SKIP_NAMES:
            # Old wrappers forward attributes, so a wrapper is asked for its own only.
            value = own.get(name, getattr(type(layer), name, None) if inner is None else None)
            if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 1:
                skip *= int(value)
                break
        layer = inner
    return skip
