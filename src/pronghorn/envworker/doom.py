"""ViZDoom scenarios as flat environments on the raw `DoomGame` API; knows nothing of workers or learning.

One `DoomEnv` is one engine process. It renders 160x120 RGB, repeats each action `frame_skip` tics (35 tics
are one second of game time) and returns frames resized to `width` x `height`. ViZDoom is imported when an
environment is made, so that the table of scenarios can be listed without it. The engine writes
`_vizdoom.ini` and an empty `_vizdoom/` where it runs: run it in a directory of its own.

This module runs inside a worker: standard library, NumPy and vizdoom only, Python 3.8 syntax.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Obs = Dict[str, "NDArray[Any]"]
Factor = Tuple[Tuple[str, ...], ...]  # one discrete factor: for each of its values, the buttons that it holds

TICS_PER_SECOND = 35
_START_TRIES = 3
_MAX_SEED = 2**31

_TURN: Factor = ((), ("TURN_LEFT",), ("TURN_RIGHT",))
_WALK: Factor = ((), ("MOVE_FORWARD",), ("MOVE_BACKWARD",))
_STRAFE: Factor = ((), ("MOVE_LEFT",), ("MOVE_RIGHT",))
_ATTACK: Factor = ((), ("ATTACK",))
_SPEED: Factor = ((), ("SPEED",))
_USE: Factor = ((), ("USE",))
_WEAPON_6: Factor = ((), *(("SELECT_WEAPON%d" % i,) for i in range(1, 7)))
_WEAPON_7: Factor = ((), *(("SELECT_WEAPON%d" % i,) for i in range(1, 8)))

# One action space for several scenarios at once; buttons that a scenario has no use for act as in plain Doom.
ALL_FACTORS: Tuple[Factor, ...] = (_TURN, _WALK, _STRAFE, _ATTACK, _SPEED, _USE)


class Scenario(NamedTuple):
    """What a scenario's own files do not say, plus its time limit (a test holds it to the .cfg file).

    factors: the factored action space; 'flat' is one choice among no button and each value of each factor.
    default: the layout taken when none is asked for.
    timeout_tics: decisions end after so many tics, by truncation; 0: the scenario ends by its own rules only.
    reward_scale: factor on the scenario's reward.
    health_bonus: added to the scaled reward of each step in which health rose.
    doom_map: instead of the map that the .cfg names.
    """

    cfg: str
    summary: str
    factors: Tuple[Factor, ...]
    default: str
    timeout_tics: int
    reward_scale: float = 1.0
    health_bonus: float = 0.0
    doom_map: str = ""


# Left out: cig, multi and multi_duel (several players); doom and doom2 (need the commercial .wad files);
# oblige (needs maps made by the PyOblige package); learning (basic, in grey); basic_audio and
# basic_notifications (basic, with a sound or text buffer that a network of pixels does not see).
SCENARIOS: Dict[str, Scenario] = {
    "basic": Scenario(
        "basic.cfg", "shoot the monster on the far wall of one room", (_STRAFE, _ATTACK), "flat", 300, 0.01
    ),
    "simpler_basic": Scenario(
        "simpler_basic.cfg", "basic with plainer walls and floor", (_STRAFE, _ATTACK), "flat", 300, 0.01
    ),
    "rocket_basic": Scenario(
        "rocket_basic.cfg", "basic with a slow rocket, no aiming help", (_STRAFE, _ATTACK), "flat", 300, 0.01
    ),
    "deadly_corridor": Scenario(
        "deadly_corridor.cfg",
        "reach the vest at the end of a corridor lined with shooters",
        (_TURN, _WALK, _STRAFE, _ATTACK),
        "factored",
        2100,
        0.01,
    ),
    "deathmatch": Scenario(
        "deathmatch.cfg",
        "kill monsters in an arena with weapons and medkits to find",
        (_TURN, _WALK, _STRAFE, _ATTACK, _SPEED, _WEAPON_6),
        "factored",
        4200,
    ),
    "defend_the_center": Scenario(
        "defend_the_center.cfg",
        "turn on the spot and shoot what comes, with 26 rounds",
        (_TURN, _ATTACK),
        "factored",
        2100,
    ),
    "defend_the_line": Scenario(
        "defend_the_line.cfg",
        "hold one wall against ever tougher monsters; ends by death only",
        (_TURN, _ATTACK),
        "factored",
        0,
    ),
    "health_gathering": Scenario(
        "health_gathering.cfg",
        "stay alive on an acid floor by collecting medkits",
        (_TURN, _WALK),
        "flat",
        2100,
        health_bonus=1.0,
    ),
    "health_gathering_supreme": Scenario(
        "health_gathering_supreme.cfg",
        "health_gathering in a maze, with vials of poison between",
        (_TURN, _WALK),
        "flat",
        2100,
        health_bonus=1.0,
    ),
    "my_way_home": Scenario(
        "my_way_home.cfg", "find the vest in a maze of rooms; sparse reward", (_TURN, _WALK), "factored", 2100
    ),
    "predict_position": Scenario(
        "predict_position.cfg", "hit a walking monster with one slow rocket", (_TURN, _ATTACK), "flat", 300
    ),
    "take_cover": Scenario(
        "take_cover.cfg", "dodge fireballs; ends by death only", (_STRAFE,), "flat", 0
    ),
    "freedoom1": Scenario(
        "freedoom1.cfg",
        "the free game's first map; +1 for its exit, nothing else",
        (*ALL_FACTORS, _WEAPON_7),
        "factored",
        126000,
        doom_map="E1M1",  # the .cfg means map01, which this game lacks: the second episode would hang the engine
    ),
    "freedoom2": Scenario(
        "freedoom2.cfg",
        "the other free game's first map; +1 for its exit, nothing else",
        (*ALL_FACTORS, _WEAPON_7),
        "factored",
        126000,
    ),
}  # fmt: skip


class DoomEnv:
    """One single-player scenario. `spec` is the JSON description that the trainer builds its EnvSpec from.

    scenario: a key of SCENARIOS.        frame_skip: tics that one action is held for.
    width, height: pixels of the observation 'obs', uint8 [height, width, 3]; the nearest pixel is taken.
    actions: 'default' (the scenario's), 'flat' (one Discrete), 'factored' (several at once) or 'all' (one
        factored space that every scenario shares).
    measurements: names of ViZDoom game variables for a second leaf 'measurements', float32 [K], in the game's
        own units; True: those that the scenario's .cfg lists.
    reward_scale: instead of the scenario's.        timeout_tics: instead of the scenario's (0: none).
    resolution: of the rendered screen, one of ViZDoom's, such as '160x120'.

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
    ) -> None:
        if frame_skip < 1 or width < 1 or height < 1:
            raise ValueError(
                "frame_skip, width and height are counts of at least 1, not %d, %d, %d" % (frame_skip, width, height)
            )
        self._scenario = _scenario(scenario)
        self._name = "doom:" + scenario
        self._frame_skip = frame_skip
        self._resolution = resolution
        self._reward_scale = self._scenario.reward_scale if reward_scale is None else reward_scale
        self._timeout_tics = self._scenario.timeout_tics if timeout_tics is None else timeout_tics
        self._factors = _action_factors(self._scenario, actions)
        self._sizes = [len(factor) for factor in self._factors]
        self._button_names = _buttons_of(self._factors)
        self._button_table = _button_table(self._factors, self._button_names)
        self._variables = _measurement_names(scenario, self._scenario, measurements)
        self._resize = nearest_resize(*_screen_size(resolution), out_height=height, out_width=width)
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
        self._game.set_seed(int(self._rng.integers(_MAX_SEED)))
        self._game.new_episode()
        self._over = False
        self._tics = 0
        self._game_return = 0.0
        self._health = self._read_health() if self._scenario.health_bonus else 0.0
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
        if self._over:
            self._stats = self._read_stats()
        return self._observe(state), reward, terminated, truncated, self._over, {}

    def render(self) -> NDArray[Any]:
        """The last frame as the engine drew it, before resizing: uint8 [120, 160, 3] by default."""
        frame: NDArray[Any] = self._screen
        return frame

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
        observation: Dict[str, Any] = {
            "obs": {
                "shape": [height, width, 3], "dtype": "uint8", "kind": "image", "layout": "hwc",
                "low": 0.0, "high": 255.0, "n": [],
            }
        }  # fmt: skip
        if self._variables:
            observation["measurements"] = {
                "shape": [len(self._variables)], "dtype": "float32", "kind": "vector", "layout": "",
                "low": -math.inf, "high": math.inf, "n": [],
            }  # fmt: skip
        return {
            "observation": observation,
            "action": {"discrete": list(self._sizes), "low": [], "high": []},
            "rows_per_env": 1,
            "frame_skip": self._frame_skip,
            "info": [],
            "render_fps": TICS_PER_SECOND / self._frame_skip,
            "name": self._name,
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
        return float(self._game.get_game_variable(self._vizdoom.GameVariable.HEALTH))

    def _read_stats(self) -> Dict[str, float]:
        kills = self._game.get_game_variable(self._vizdoom.GameVariable.KILLCOUNT)
        # The health of the dead is negative by the strength of the last blow; 0 says it better.
        return {
            "game_return": self._game_return,
            "kills": float(kills),
            "health": max(0.0, self._read_health()),
        }

    def _start_engine(self) -> Any:
        self._vizdoom = _import_vizdoom()
        last_error = None
        for attempt in range(_START_TRIES):
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
            % (self._name, _START_TRIES, type(last_error).__name__, last_error)
        )

    def _configured_game(self) -> Any:
        vizdoom = self._vizdoom
        game = _load(vizdoom, self._scenario)
        game.set_screen_resolution(getattr(vizdoom.ScreenResolution, _resolution_name(self._resolution)))
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_available_buttons([getattr(vizdoom.Button, name) for name in self._button_names])
        game.set_available_game_variables([getattr(vizdoom.GameVariable, name) for name in self._variables])
        if self._scenario.doom_map:
            game.set_doom_map(self._scenario.doom_map)
        game.set_mode(vizdoom.Mode.PLAYER)
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.set_audio_buffer_enabled(False)  # some .cfg files ask for buffers that cost time and are not read
        game.set_automap_buffer_enabled(False)
        game.set_episode_timeout(0)
        return game


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


def _scenario(name: str) -> Scenario:
    if name in SCENARIOS:
        return SCENARIOS[name]
    near = difflib.get_close_matches(name, SCENARIOS, n=3, cutoff=0.4) or sorted(SCENARIOS)
    raise ValueError("no Doom scenario '%s'. Did you mean: %s?" % (name, ", ".join(near)))


def _action_factors(scenario: Scenario, actions: str) -> Tuple[Factor, ...]:
    layout = scenario.default if actions == "default" else actions
    if layout == "factored":
        return scenario.factors
    if layout == "all":
        return ALL_FACTORS
    if layout != "flat":
        raise ValueError("actions is one of default, flat, factored, all, not '%s'" % actions)
    single_values = [value for factor in scenario.factors for value in factor if value]
    return (((), *single_values),)


def _buttons_of(factors: Tuple[Factor, ...]) -> List[str]:
    """Every button that a factor holds, once, in order of appearance: the order of the engine's vector."""
    return list(dict.fromkeys(button for factor in factors for value in factor for button in value))


def _button_table(factors: Tuple[Factor, ...], buttons: List[str]) -> List[List[bool]]:
    """The engine's button vector of every combination of the factors' values (at most a few thousand)."""
    table = []
    for values in itertools.product(*factors):
        held = {button for value in values for button in value}
        table.append([button in held for button in buttons])
    return table


def _measurement_names(name: str, scenario: Scenario, measurements: Union[bool, Sequence[str], None]) -> List[str]:
    if measurements is None or measurements is False:
        return []
    vizdoom = _import_vizdoom()
    if measurements is True:
        names = [variable.name for variable in _load(vizdoom, scenario).get_available_game_variables()]
        if not names:
            raise ValueError("doom:%s lists no measurements of its own; name them: ['HEALTH', 'AMMO2']" % name)
        return names
    known = vizdoom.GameVariable.__members__
    for variable in measurements:
        if variable not in known:
            near = difflib.get_close_matches(str(variable).upper(), known, n=3, cutoff=0.4)
            raise ValueError("no ViZDoom game variable '%s'. Did you mean: %s?" % (variable, ", ".join(near)))
    return list(measurements)


def _import_vizdoom() -> Any:
    import vizdoom  # here, so that the table of scenarios can be read without it

    return vizdoom


def _load(vizdoom: Any, scenario: Scenario) -> Any:
    game = vizdoom.DoomGame()
    game.load_config(os.path.join(vizdoom.scenarios_path, scenario.cfg))
    return game


def _resolution_name(resolution: str) -> str:
    return "RES_" + resolution.upper()


def _screen_size(resolution: str) -> Tuple[int, int]:
    """(height, width) of '160x120'; ValueError where ViZDoom has no such resolution."""
    known = _import_vizdoom().ScreenResolution.__members__
    if _resolution_name(resolution) not in known:
        sizes = ", ".join(name[len("RES_") :].lower() for name in known)
        raise ValueError("resolution '%s' is none of ViZDoom's: %s" % (resolution, sizes))
    width, height = resolution.lower().split("x")
    return int(height), int(width)
