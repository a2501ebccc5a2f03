"""A ViZDoom scenario as a flat environment on the raw `DoomGame` API; knows nothing of workers or learning.

One `DoomEnv` is one engine process. It renders 160x120 RGB, repeats each action `frame_skip` tics (35 tics
are one second of game time) and returns frames resized to `width` x `height`. ViZDoom is imported when an
environment is made, so that this module can be imported without it. The engine writes `_vizdoom.ini` and an
empty `_vizdoom/` where it runs: run it in a directory of its own. The scenarios themselves are in
doom_scenarios.py; matches (deathmatch.py) set their engines and pictures up with the functions from `set_up` on.

This module runs inside a worker: standard library, NumPy and vizdoom only, Python 3.8 syntax.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from . import shaping
from .doom_scenarios import (
    EXTERNAL,
    Factor,
    Scenario,
    action_factors,
    buttons_of,
    find_scenario,
    held,
    require_external,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Obs = Dict[str, "NDArray[Any]"]

TICS_PER_SECOND = 35
START_TRIES = 3
MAX_SEED = 2**31


class DoomEnv:
    """One single-player scenario. `spec` is the JSON description that the trainer builds its EnvSpec from.

    scenario: a name of doom_scenarios.py.              frame_skip: tics that one action is held for.
    width, height: pixels of the observation 'obs', uint8 [height, width, 3]; the nearest pixel is taken.
    actions: 'default' (the scenario's), 'flat' (one Discrete), 'factored' (several at once) or 'all' (one
        factored space that every scenario shares).
    measurements: names of ViZDoom game variables for a second leaf 'measurements', float32 [K], in the game's
        own units; True: those that the scenario's .cfg lists; None: those of the scenario's entry in the table.
    reward_scale: instead of the scenario's.        timeout_tics: instead of the scenario's (0: none).
    resolution: of the rendered screen, one of ViZDoom's, such as '160x120'.
    scenarios_dir: folder of the .cfg and .wad files of a scenario of EXTERNAL.
    rewards: weights of shaped rewards (shaping.py) to add, in place of the scenario's of the same names.

    Raises ValueError for an option that breaks a rule and RuntimeError when the engine does not start.
    """

    def __init__(
        self,
        scenario: str,
        *,
        frame_skip: int = 4,
        width: int = 128,
        height: int = 72,
        actions: str = "default",
        measurements: Union[bool, Sequence[str], None] = None,
        reward_scale: Optional[float] = None,
        timeout_tics: Optional[int] = None,
        resolution: str = "160x120",
        scenarios_dir: str = "",
        rewards: Optional[Mapping[str, float]] = None,
    ) -> None:
        if frame_skip < 1 or width < 1 or height < 1:
            raise ValueError(
                "frame_skip, width and height are counts of at least 1, not %d, %d, %d" % (frame_skip, width, height)
            )
        self._scenario = find_scenario(scenario)
        self._directory = scenarios_dir
        if scenario in EXTERNAL:
            require_external("doom:" + scenario, scenarios_dir, self._scenario.cfg)
        elif scenarios_dir:
            raise ValueError("doom:%s has its files in vizdoom: leave scenarios_dir out" % scenario)
        given = self._scenario.rewards or dict.fromkeys(shaping.AMOUNTS, 0.0)
        weights = shaping.weights(given, rewards)
        self._shaping = shaping.Shaping(weights) if self._scenario.rewards or rewards else None
        self._name = "doom:" + scenario
        self._frame_skip = frame_skip
        self._resolution = resolution
        self._reward_scale = self._scenario.reward_scale if reward_scale is None else reward_scale
        self._timeout_tics = self._scenario.timeout_tics if timeout_tics is None else timeout_tics
        self._factors = action_factors(self._scenario, actions)
        self._sizes = [len(factor) for factor in self._factors]
        self._button_names = buttons_of(self._factors)
        self._button_table = _button_table(self._factors, self._button_names)
        self._variables = _measurement_names(scenario, self._scenario, scenarios_dir, measurements)
        self._resize = nearest_resize(*screen_size(resolution), out_height=height, out_width=width)
        self.spec = self._make_spec(height, width)

        self._game: Any = None  # the engine starts at the first reset: reading `spec` costs nothing
        self._rng = np.random.default_rng()
        self._over = True
        self._last_obs: Obs = {}
        self._stats: Dict[str, float] = {}

    def reset(self, seed: Optional[int] = None) -> Obs:
        """Start an episode and return its first observation.

        A seed also seeds every later episode of this environment: each takes the next number of a generator,
        so a seeded environment repeats exactly (the engine is deterministic) and no two episodes are alike.
        """
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        if self._game is None:
            self._game = self._start_engine()
        self._game.set_seed(int(self._rng.integers(MAX_SEED)))
        self._game.new_episode()
        self._over = False
        self._tics = 0
        self._game_return = 0.0
        self._health = self._read_health() if self._scenario.health_bonus else 0.0
        if self._shaping is not None:
            self._shaping.begin(self._read(shaping.VARIABLES))
        return self._observe(self._game.get_state())

    def step(
        self, discrete: Sequence[int], continuous: Optional[Sequence[float]] = None
    ) -> Tuple[Obs, float, bool, bool, bool, Dict[str, float]]:
        """Hold one action for `frame_skip` tics: (obs, reward, terminated, truncated, episode_over, info).

        `discrete` [D] has one value per factor; `continuous` is ignored (no scenario has any).
        The engine's own time limit is off, since a timed-out engine has no screen any more: here tics are
        counted, and a truncated step still shows its real final observation. Where the engine itself ended
        the episode (death, goal), the last frame that it rendered is returned again; nothing bootstraps from
        it, as the step is terminated.
        """
        if self._over:
            raise RuntimeError("%s: step() after the end of an episode; call reset() first" % self._name)
        buttons = self._button_table[self._action_index(discrete)]
        tics = self._frame_skip
        if self._timeout_tics:  # the last step is shorter where the skip does not divide the limit
            tics = min(tics, self._timeout_tics - self._tics)
        try:
            game_reward = self._game.make_action(buttons, tics)
            state = self._game.get_state()  # None once the engine has ended the episode
        except Exception as error:
            raise RuntimeError(
                "%s: the engine failed at tic %d of an episode: %s" % (self._name, self._tics, error)
            ) from error
        self._tics += tics
        self._game_return += game_reward
        terminated = state is None
        truncated = not terminated and 0 < self._timeout_tics <= self._tics
        self._over = terminated or truncated
        reward = game_reward * self._reward_scale + self._health_bonus()
        if self._shaping is not None:
            reward += self._shaping(self._read(shaping.VARIABLES))
        if self._over:
            self._stats = self._read_stats()
        return self._observe(state), reward, terminated, truncated, self._over, {}

    def render(self) -> NDArray[Any]:
        """The last frame as the engine drew it, before resizing: uint8 [120, 160, 3] by default."""
        frame: NDArray[Any] = self._screen
        return frame

    def set_option(self, name: str, value: Any) -> None:
        """'rewards': weights of shaped rewards, from the next step on."""
        if name != "rewards" or self._shaping is None:
            raise ValueError("%s has no setting '%s' that can change while it runs" % (self._name, name))
        self._shaping.weights = shaping.weights(self._shaping.weights, value)

    def stats(self) -> Dict[str, float]:
        """Of the episode that ended last: the scenario's own return, monsters killed and the final health.

        `game_return` is neither scaled nor shaped, so it compares with what others report.
        """
        return dict(self._stats)

    def close(self) -> None:
        """End the engine; safe to call twice."""
        if self._game is not None:
            self._game.close()
            self._game = None
        self._over = True

    def _make_spec(self, height: int, width: int) -> Dict[str, Any]:
        return {
            "observation": leaves(height, width, len(self._variables)),
            "action": {"discrete": list(self._sizes), "low": [], "high": []},
            "rows_per_env": 1,
            "frame_skip": self._frame_skip,
            "info": [],
            "render_fps": TICS_PER_SECOND / self._frame_skip,
            "name": self._name,
            "rewards": {} if self._shaping is None else dict(self._shaping.weights),
        }

    def _observe(self, state: Any) -> Obs:
        if state is None:
            return {name: leaf.copy() for name, leaf in self._last_obs.items()}
        self._screen = state.screen_buffer  # a copy that the state owns, so it stays valid while the game runs on
        obs = {"obs": self._resize(self._screen)}
        if self._variables:
            obs["measurements"] = np.asarray(state.game_variables, dtype=np.float32)
        self._last_obs = obs
        return obs

    def _action_index(self, discrete: Sequence[int]) -> int:
        """Row of the button table: the factors are digits of a mixed-radix number, the last one fastest."""
        index = 0
        for size, value in zip(self._sizes, discrete):
            if not 0 <= value < size:
                raise ValueError("%s: action %s outside the factors of %s values" % (self._name, discrete, self._sizes))
            index = index * size + int(value)
        return index

    def _health_bonus(self) -> float:
        if not self._scenario.health_bonus:
            return 0.0
        before, self._health = self._health, self._read_health()
        return self._scenario.health_bonus if self._health > before else 0.0

    def _read_health(self) -> float:
        return self._read(("HEALTH",))[0]

    def _read(self, names: Sequence[str]) -> List[float]:
        known = self._vizdoom.GameVariable
        return [float(self._game.get_game_variable(getattr(known, name))) for name in names]

    def _read_stats(self) -> Dict[str, float]:
        kills = self._game.get_game_variable(self._vizdoom.GameVariable.KILLCOUNT)
        # The health of the dead is negative by the strength of the last blow; 0 says it better.
        return {
            "game_return": self._game_return,
            "kills": float(kills),
            "health": max(0.0, self._read_health()),
        }

    def _start_engine(self) -> Any:
        self._vizdoom = import_vizdoom()
        last_error = None
        for attempt in range(START_TRIES):
            game = self._configured_game()
            try:
                game.init()
                return game
            except self._vizdoom.FileDoesNotExistException as error:
                raise RuntimeError("%s: %s" % (self._name, error)) from error
            except Exception as error:
                last_error = error
                game.close()
                time.sleep(0.5 * (attempt + 1))  # many engines starting at once on few cores can time out
        raise RuntimeError(
            "%s: ViZDoom's engine did not start in %d tries; the last error was %s: %s. 'pronghorn doctor' "
            "starts one alone and shows what it prints"
            % (self._name, START_TRIES, type(last_error).__name__, last_error)
        )

    def _configured_game(self) -> Any:
        game = _load(self._vizdoom, self._scenario, self._directory)
        set_up(game, self._resolution, self._button_names, self._variables)
        if self._scenario.doom_map:
            game.set_doom_map(self._scenario.doom_map)
        return game


def set_up(game: Any, resolution: str, buttons: Sequence[str], variables: Sequence[str]) -> None:
    """What every engine of ours has in common, whatever its .cfg file said: no window, no sound, no time limit."""
    vizdoom = import_vizdoom()
    game.set_screen_resolution(getattr(vizdoom.ScreenResolution, _resolution_name(resolution)))
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    game.set_available_buttons([getattr(vizdoom.Button, name) for name in buttons])
    game.set_available_game_variables([getattr(vizdoom.GameVariable, name) for name in variables])
    game.set_mode(vizdoom.Mode.PLAYER)
    game.set_window_visible(False)
    game.set_sound_enabled(False)
    game.set_audio_buffer_enabled(False)  # some .cfg files ask for buffers that cost time and are not read
    game.set_automap_buffer_enabled(False)
    game.set_episode_timeout(0)


def leaves(height: int, width: int, num_measurements: int) -> Dict[str, Any]:
    """What a player observes, as JSON: the picture, and a vector of measurements if there are any."""
    observation: Dict[str, Any] = {
        "obs": {
            "shape": [height, width, 3], "dtype": "uint8", "kind": "image", "layout": "hwc",
            "low": 0.0, "high": 255.0, "n": [],
        }
    }  # fmt: skip
    if num_measurements:
        observation["measurements"] = {
            "shape": [num_measurements], "dtype": "float32", "kind": "vector", "layout": "",
            "low": -math.inf, "high": math.inf, "n": [],
        }  # fmt: skip
    return observation


def nearest_resize(
    height: int, width: int, *, out_height: int, out_width: int
) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """A function from uint8 [height, width, 3] to uint8 [out_height, out_width, 3] by the nearest pixel.

    Output pixel (y, x) is input pixel (y·height // out_height, x·width // out_width), as OpenCV has it, and
    cheaper: 160x120 to 128x72 costs a third of `cv2.resize`. Where a group of columns loses just its last one
    (160 to 128 keeps 4 of each 5), whole groups are copied; else single pixels are.
    """
    if (height, width) == (out_height, out_width):
        return lambda frame: frame
    rows = np.arange(out_height) * height // out_height
    columns = np.arange(out_width) * width // out_width
    num_groups = math.gcd(width, out_width)
    if width // num_groups == out_width // num_groups + 1:
        kept = np.dtype((np.void, 3 * (out_width // num_groups)))
        group = np.dtype({"names": ["kept"], "formats": [kept], "itemsize": 3 * (width // num_groups)})

        def by_groups(frame: NDArray[Any]) -> NDArray[Any]:
            groups = frame.reshape(-1).view(group)["kept"].reshape(height, num_groups)
            return groups[rows].view(np.uint8).reshape(out_height, out_width, 3)

        return by_groups
    pixel = np.dtype((np.void, 3))
    flat = (rows[:, None] * width + columns).reshape(-1)

    def by_pixels(frame: NDArray[Any]) -> NDArray[Any]:
        pixels = np.take(frame.reshape(-1).view(pixel), flat)
        return pixels.view(np.uint8).reshape(out_height, out_width, 3)

    return by_pixels


def _button_table(factors: Tuple[Factor, ...], buttons: List[str]) -> List[List[float]]:
    """The engine's button vector of every combination of the factors' values (at most a few thousand)."""
    table = []
    for values in itertools.product(*factors):
        numbers: Dict[str, float] = {}
        for value in values:
            numbers.update(held(value))
        table.append([numbers.get(button, 0.0) for button in buttons])
    return table


def _measurement_names(
    name: str, scenario: Scenario, directory: str, measurements: Union[bool, Sequence[str], None]
) -> List[str]:
    if measurements is None:
        return list(scenario.measurements)
    if measurements is False:
        return []
    vizdoom = import_vizdoom()
    if measurements is True:
        names = [variable.name for variable in _load(vizdoom, scenario, directory).get_available_game_variables()]
        if not names:
            raise ValueError("doom:%s lists no measurements of its own; name them: ['HEALTH', 'AMMO2']" % name)
        return names
    known = vizdoom.GameVariable.__members__
    for variable in measurements:
        if variable not in known:
            near = difflib.get_close_matches(str(variable).upper(), known, n=3, cutoff=0.4)
            raise ValueError("no ViZDoom game variable '%s'. Did you mean: %s?" % (variable, ", ".join(near)))
    return list(measurements)


def import_vizdoom() -> Any:
    import vizdoom  # here, so that the table of scenarios can be read without it

    return vizdoom


def _load(vizdoom: Any, scenario: Scenario, directory: str) -> Any:
    """directory: of the scenario's files; empty: vizdoom's own."""
    game = vizdoom.DoomGame()
    game.load_config(os.path.join(directory or vizdoom.scenarios_path, scenario.cfg))
    return game


def _resolution_name(resolution: str) -> str:
    return "RES_" + resolution.upper()


def screen_size(resolution: str) -> Tuple[int, int]:
    """(height, width) of '160x120'; ValueError where ViZDoom has no such resolution."""
    known = import_vizdoom().ScreenResolution.__members__
    if _resolution_name(resolution) not in known:
        sizes = ", ".join(name[len("RES_") :].lower() for name in known)
        raise ValueError("resolution '%s' is none of ViZDoom's: %s" % (resolution, sizes))
    width, height = resolution.lower().split("x")
    return int(height), int(width)
