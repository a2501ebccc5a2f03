"""Doom matches as environments: what each player sees, may do and is rewarded for, and who won.

The agents of one match are the rows of one environment (`MatchEnv`); a single agent among bots is a plain one
(`BotsEnv`). The engines are match.py's. A match ends only by its time, and that is its rule, so it is `terminated`;
who dies is back at once, and his row goes on.

This module runs inside a worker: standard library, NumPy and vizdoom only, Python 3.8 syntax.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import doom, shaping
from .doom_scenarios import (
    ATTACK,
    SPEED,
    STRAFE,
    USE,
    WALK,
    WEAPON_7,
    Factor,
    Held,
    buttons_of,
    external_file,
    held,
    turns,
)
from .many_rows import VectorStep
from .match import Match, MatchBroken

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_AGENTS, MAX_PLAYERS = 8, 16
OUTCOME = "outcome"  # 1: more frags than every other player, bots included; 0: as many as the best; -1: fewer

FACTORS: Tuple[Factor, ...] = (WALK, STRAFE, WEAPON_7, ATTACK, SPEED, USE, turns(21, 12.5))

# What a player knows of himself: the engine's variable and the number that it is divided by.
MEASURED: Tuple[Tuple[str, float], ...] = (
    ("HEALTH", 100.0), ("ARMOR", 100.0), ("DEAD", 1.0), ("ATTACK_READY", 1.0), ("SELECTED_WEAPON_AMMO", 100.0),
    ("AMMO2", 100.0), ("AMMO3", 50.0), ("AMMO5", 50.0), ("AMMO6", 300.0),
    *((weapon, 1.0) for weapon in shaping.WEAPONS),
)  # fmt: skip
NUM_SLOTS = 8  # of weapons: which one is in hand follows MEASURED, one of 0 to 7 as 1
NUM_MEASUREMENTS = len(MEASURED) + NUM_SLOTS + 3  # and frags, lead over the best other player, share of time left


class Arena(NamedTuple):
    """A map. external: its file is the user's to bring. clear_first_lives: see `Match`."""

    wad: str
    doom_map: str = "map01"
    external: bool = False
    clear_first_lives: bool = False


ARENAS: Dict[str, Arena] = {
    # One room with obstacles, a pistol each. Its script gives 15 points of health to first lives and punishes the first
    # kill (it wants the map to end), so first lives are taken before the match begins.
    "multi_deathmatch": Arena("multi_deathmatch.wad", clear_first_lives=True),
    "multi_duel": Arena("multi_duel.wad"),  # rocket launchers over a pit; bots stand still in it
    "cig_map01": Arena("cig.wad"),  # of the 2016 competition: rocket launchers only
    "cig_map02": Arena("cig.wad", "map02"),  # weapons, armour and medkits to find
    "ssl2": Arena("ssl2.wad", external=True),
    "freedm": Arena("freedm.wad", external=True),
    "dwango5": Arena("dwango5.wad", external=True),
}


class MatchKind(NamedTuple):
    """A kind of match: the map it is played on, how many agents and bots by default, and how agents are rewarded."""

    summary: str
    arena: str
    agents: int
    bots: int
    rewards: Mapping[str, float]


MATCHES: Dict[str, MatchKind] = {
    "duel": MatchKind("one against one, both trained", "multi_deathmatch", 2, 0, shaping.SELF_PLAY),
    "duel_bots": MatchKind("one against a scripted bot", "multi_deathmatch", 1, 1, shaping.AGAINST_BOTS),
    "multi_deathmatch": MatchKind(
        "2 to 8 trained players, and bots if asked for (agents, bots)", "cig_map02", 4, 0, shaping.AGAINST_BOTS
    ),
    "multi_deathmatch_bots": MatchKind("one among scripted bots", "cig_map02", 1, 7, shaping.AGAINST_BOTS),
    "ssl2": MatchKind("the paper's duel; the map is yours to bring", "ssl2", 2, 0, shaping.SELF_PLAY),
    "ssl2_bots": MatchKind("the paper's duel with a bot; the map is yours", "ssl2", 1, 1, shaping.AGAINST_BOTS),
    "freedm": MatchKind("4 trained players, 4 bots; the map is yours", "freedm", 4, 4, shaping.SELF_PLAY),
    "dwango5": MatchKind("8 trained players; the map is yours to bring", "dwango5", 8, 0, shaping.SELF_PLAY),
    "dwango5_bots": MatchKind("the paper's deathmatch with 7 bots; the map is yours", "dwango5", 1, 7,
                              shaping.AGAINST_BOTS),
}  # fmt: skip


def make(name: str, **arguments: Any) -> Any:
    """The environment of a kind of match. Raises ValueError for an argument that breaks a rule."""
    players = Players(name, **arguments)
    return MatchEnv(players) if players.num_agents > 1 else BotsEnv(players)


class Players:
    """The agents of one match: their pictures, measurements, rewards and results. `make` gives it an interface.

    name: a key of MATCHES.
    agents: how many are trained (2 to 8, where the kind has several).        bots: how many scripted players join.
    map: a key of ARENAS, in place of the kind's.       scenarios_dir: folder of the .wad file that is not shipped.
    frame_skip: tics (35 a second) that one action is held for.
    timeout_tics: the length of a match.
    width, height: pixels of the observation 'obs', uint8 [height, width, 3]; the nearest pixel is taken.
    measurements: whether there is a second leaf 'measurements', float32 [NUM_MEASUREMENTS], scaled to about 1.
    rewards: weights of shaped rewards in place of the kind's of the same names (shaping.AMOUNTS).
    resolution: of the rendered screen.
    start_timeout_s: limit for the engines to come together, and to begin the next match.
    """

    def __init__(
        self,
        name: str,
        *,
        agents: Optional[int] = None,
        bots: Optional[int] = None,
        map: str = "",
        scenarios_dir: str = "",
        frame_skip: int = 2,
        timeout_tics: int = 4200,
        width: int = 128,
        height: int = 72,
        measurements: bool = True,
        rewards: Optional[Mapping[str, float]] = None,
        resolution: str = "160x120",
        start_timeout_s: float = 60.0,
    ) -> None:
        kind = MATCHES[name]
        self.name, self.frame_skip, self._timeout_tics = "doom:" + name, frame_skip, timeout_tics
        self.num_agents = kind.agents if agents is None else agents
        num_bots = kind.bots if bots is None else bots
        self._require_counts(kind, num_bots, width, height)
        self._arena = _arena(self.name, map or kind.arena)
        self._wad = self._path_of_wad(scenarios_dir)
        self._resolution = resolution
        self._resize = doom.nearest_resize(*doom.screen_size(resolution), out_height=height, out_width=width)
        self._buttons = buttons_of(FACTORS)
        self._held = [[self._numbered(value) for value in factor] for factor in FACTORS]
        self.num_players = self.num_agents + num_bots
        measured = [variable for variable, _ in MEASURED]
        frag_counts = ["PLAYER%d_FRAGCOUNT" % (i + 1) for i in range(self.num_players)]
        # Each once, or the engine's array would be shorter than this list; frag counts last.
        self._variables = list(dict.fromkeys([*shaping.VARIABLES, *measured, "SELECTED_WEAPON", *frag_counts]))
        self._shaped = [self._variables.index(name) for name in shaping.VARIABLES]
        self._measured = [self._variables.index(name) for name in measured]
        self._scales = np.array([scale for _, scale in MEASURED])
        self._has_measurements = measurements
        weights = shaping.weights(kind.rewards, rewards)
        self._shapings = [shaping.Shaping(weights) for _ in range(self.num_agents)]
        self._match = Match(
            self.name, self._make_game, self.num_agents, _bot_names(num_bots), self._arena.clear_first_lives,
            start_timeout_s,
        )  # fmt: skip
        self.spec = self._make_spec(height, width)

    def _require_counts(self, kind: MatchKind, num_bots: int, width: int, height: int) -> None:
        if min(self.frame_skip, self._timeout_tics, width, height) < 1:
            raise ValueError("%s: frame_skip, timeout_tics, width and height are counts of at least 1" % self.name)
        least, most = (1, 1) if kind.agents == 1 else (2, 2) if self.name == "doom:duel" else (2, MAX_AGENTS)
        if not least <= self.num_agents <= most:
            allowed = str(least) if least == most else "%d to %d" % (least, most)
            raise ValueError("%s: agents = %s, and it has %s" % (self.name, self.num_agents, allowed))
        if num_bots < 0 or not 2 <= self.num_agents + num_bots <= MAX_PLAYERS:
            rule = "%s: agents = %d and bots = %d, and a match has 2 to %d players"
            raise ValueError(rule % (self.name, self.num_agents, num_bots, MAX_PLAYERS))

    def _path_of_wad(self, scenarios_dir: str) -> str:
        if self._arena.external:
            return external_file(self.name, scenarios_dir, self._arena.wad)
        if scenarios_dir:
            raise ValueError("%s has its map in vizdoom: leave scenarios_dir out" % self.name)
        return os.path.join(doom.import_vizdoom().scenarios_path, self._arena.wad)

    def _make_spec(self, height: int, width: int) -> Dict[str, Any]:
        return {
            "observation": doom.leaves(height, width, NUM_MEASUREMENTS if self._has_measurements else 0),
            "action": {"discrete": [len(factor) for factor in FACTORS], "low": [], "high": []},
            "rows_per_env": self.num_agents,
            "rows_wait": False,
            "frame_skip": self.frame_skip,
            "info": [OUTCOME, "frags", "deaths"],
            "render_fps": doom.TICS_PER_SECOND / self.frame_skip,
            "name": self.name,
            "agents": ["player_%d" % agent for agent in range(self.num_agents)] if self.num_agents > 1 else [],
            "rewards": dict(self._shapings[0].weights),  # all begin with the same
        }

    # ------------------------------------------------------------------------------------------------ the match

    def begin(self, seed: Optional[int]) -> Dict[str, NDArray[Any]]:
        """Start a match; the leaves [A, ...] of the agents' first observations.

        A seed also seeds every later match: equal seeds and actions give equal sequences of matches. Engines take one
        only when they start, so with a seed they are started anew (seconds).
        """
        if seed is not None or not self._match.games:
            self._match.close()
            number = int(np.random.default_rng(seed).integers(doom.MAX_SEED))
            self._match.start(doom.import_vizdoom().GameVariable.PLAYER_NUMBER, number)
        self._match.restart()
        self._read()
        self._require_players()
        self._first = self._values.copy()
        for one, values in zip(self._shapings, self._values[:, self._shaped].tolist()):
            one.begin(values)
        return self._observe()

    def play(self, discrete: NDArray[Any]) -> Tuple[Dict[str, NDArray[Any]], NDArray[Any], bool]:
        """One decision of each agent, [A, D]: (leaves [A, ...], rewards [A], whether the match is over).

        The last step of a match is shorter where the skip does not divide its length. The leaves are then the real
        last observations.
        """
        tics = min(self.frame_skip, self._timeout_tics - self._match.tics)
        self._match.advance([self._vector(row) for row in discrete.tolist()], tics)
        self._read()
        rewards = [one(values) for one, values in zip(self._shapings, self._values[:, self._shaped].tolist())]
        return self._observe(), np.array(rewards), self._match.tics >= self._timeout_tics

    def results(self) -> List[Dict[str, float]]:
        """Of each agent so far in this match: outcome, frags, deaths, the damage that he did, and `Match.late_tics`."""
        frags = self._frags()
        column = {name: self._of_match(name) for name in ("DEATHCOUNT", "DAMAGECOUNT")}
        return [
            {
                OUTCOME: float(np.sign(frags[agent] - np.delete(frags, agent).max())),
                "frags": float(frags[agent]),
                "deaths": float(column["DEATHCOUNT"][agent]),
                "damage": float(column["DAMAGECOUNT"][agent]),
                "late_tics": float(self._match.late_tics),
            }
            for agent in range(self.num_agents)
        ]

    def set_rewards(self, weights: Mapping[str, float], agent: Optional[int] = None) -> None:
        """Set weights of shaped rewards by name, for one agent or for all, from the next step on; others stay."""
        for one in self._shapings if agent is None else [self._shapings[agent]]:
            one.weights = shaping.weights(one.weights, weights)

    def set_option(self, name: str, value: Any) -> None:
        """'rewards': a table of weights for all agents, or a list with a table for each."""
        if name != "rewards":
            rule = "%s has no setting '%s' that can change while it runs; there is rewards"
            raise ValueError(rule % (self.name, name))
        if isinstance(value, Mapping):
            self.set_rewards(value)
            return
        if len(value) != self.num_agents:
            raise ValueError("%s: rewards has %d tables for %d agents" % (self.name, len(value), self.num_agents))
        for agent, weights in enumerate(value):
            self.set_rewards(weights, agent)

    def render(self) -> NDArray[Any]:
        """What the engines drew: of two agents both pictures side by side, else the first agent's."""
        return np.concatenate(self._screens[:2], axis=1) if self.num_agents == 2 else self._screens[0]

    def close(self) -> None:
        self._match.close()

    # ------------------------------------------------------------------------------------------------- details

    def _make_game(self) -> Any:
        game = doom.import_vizdoom().DoomGame()
        game.set_doom_scenario_path(self._wad)
        game.set_doom_map(self._arena.doom_map)
        doom.set_up(game, self._resolution, self._buttons, self._variables)
        return game

    def _numbered(self, value: Tuple[Held, ...]) -> List[Tuple[int, float]]:
        return [(self._buttons.index(button), number) for button, number in held(value).items()]

    def _vector(self, choices: Sequence[int]) -> List[float]:
        """The engine's button vector of one choice in each factor."""
        vector = [0.0] * len(self._buttons)
        for factor, choice in zip(self._held, choices):
            if not 0 <= choice < len(factor):
                sizes = [len(values) for values in self._held]
                raise ValueError("%s: action %s outside the factors of %s values" % (self.name, choices, sizes))
            for button, number in factor[choice]:
                vector[button] = number
        return vector

    def _read(self) -> None:
        """Take pictures and variables off the engines."""
        states = [game.get_state() for game in self._match.games]
        if None in states:
            raise MatchBroken("%s: the map ended at tic %d, before the match" % (self.name, self._match.tics))
        self._screens = [state.screen_buffer for state in states]
        self._values = np.array([state.game_variables for state in states], np.float64)  # [A, number of variables]
        health = self._values[:, self._variables.index("HEALTH")]
        health.clip(0.0, out=health)  # that of the dead is below -999,900

    def _require_players(self) -> None:
        count = self._match.games[0].get_game_variable(doom.import_vizdoom().GameVariable.PLAYER_COUNT)
        if int(count) != self.num_players:
            rule = "%s: %d of %d players entered the map; does it have a place for each?"
            raise MatchBroken(rule % (self.name, count, self.num_players))

    def _of_match(self, variable: str) -> NDArray[Any]:
        """Of a counter that the engine never sets back: what was added in this match."""
        column = self._variables.index(variable)
        added: NDArray[Any] = self._values[:, column] - self._first[:, column]
        return added

    def _frags(self) -> NDArray[Any]:
        """Of every player in this match, bots last, as the host counts them."""
        frags: NDArray[Any] = (self._values[0] - self._first[0])[-self.num_players :]
        return frags

    def _observe(self) -> Dict[str, NDArray[Any]]:
        obs = {"obs": np.stack([self._resize(screen) for screen in self._screens])}
        if self._has_measurements:
            obs["measurements"] = np.stack([self._measure(agent) for agent in range(self.num_agents)])
        return obs

    def _measure(self, agent: int) -> NDArray[Any]:
        own = self._values[agent, self._measured] / self._scales
        in_hand = np.arange(NUM_SLOTS) == self._values[agent, self._variables.index("SELECTED_WEAPON")]
        frags = self._frags()
        lead = frags[agent] - np.delete(frags, agent).max()
        left = 1.0 - self._match.tics / self._timeout_tics
        return np.concatenate([own, in_hand, [frags[agent] / 10.0, lead / 10.0, left]]).astype(np.float32)


class MatchEnv:
    """Several agents in one match as the rows of one environment (many_rows.py); it starts the next match itself.

    games: matches begun so far.
    """

    def __init__(self, players: Players) -> None:
        self.games = 0
        self.players, self.spec = players, players.spec
        self.set_rewards, self.set_option = players.set_rewards, players.set_option
        self.render, self.close = players.render, players.close

    def reset(self, seed: Optional[int] = None) -> VectorStep:
        """Start a match and return its first observations."""
        step = VectorStep.first(self._begin(seed), self.players.num_agents)
        step.info = self._info(None)
        return step

    def step(self, discrete: NDArray[Any], continuous: Any = None) -> VectorStep:
        """One decision of each agent. With the end of a match comes the first observation of the next."""
        obs, rewards, over = self.players.play(discrete)
        results = self.players.results() if over else None
        if over:
            obs = self._begin(None)
        ends = np.full(self.players.num_agents, over)
        step = VectorStep(obs, rewards, ends, np.zeros_like(ends))
        step.info = self._info(results)
        step.stats = dict(enumerate(results or ()))
        if results is not None:
            step.games = {0: [result[OUTCOME] for result in results]}
        return step

    def _begin(self, seed: Optional[int]) -> Dict[str, NDArray[Any]]:
        self.games += 1
        return self.players.begin(seed)

    def _info(self, results: Optional[List[Dict[str, float]]]) -> Dict[str, NDArray[Any]]:
        """The declared columns [A]: of a match that ended its results, else nothing (NaN)."""
        nothing = np.full(self.players.num_agents, np.nan)
        if results is None:
            return dict.fromkeys(self.spec["info"], nothing)
        return {name: np.array([result[name] for result in results]) for name in self.spec["info"]}


class BotsEnv:
    """One agent among bots as a plain flat environment (building.py)."""

    def __init__(self, players: Players) -> None:
        self.players, self.spec = players, players.spec
        self.set_rewards, self.set_option = players.set_rewards, players.set_option
        self.render, self.close = players.render, players.close
        self._stats: Dict[str, float] = {}

    def reset(self, seed: Optional[int] = None) -> doom.Obs:
        return {name: leaf[0] for name, leaf in self.players.begin(seed).items()}

    def step(
        self, discrete: Sequence[int], continuous: Any = None
    ) -> Tuple[doom.Obs, float, bool, bool, bool, Dict[str, float]]:
        obs, rewards, over = self.players.play(np.asarray(discrete)[None])
        info: Dict[str, float] = {}
        if over:
            self._stats = self.players.results()[0]
            info = {name: self._stats[name] for name in self.spec["info"]}
        return {name: leaf[0] for name, leaf in obs.items()}, float(rewards[0]), over, False, over, info

    def stats(self) -> Dict[str, float]:
        """Of the match that ended last."""
        return dict(self._stats)


def is_match(name: str) -> bool:
    """Whether an environment ('doom:duel') is a match, whose engines may fail to start for no fault of its own."""
    prefix, _, kind = name.partition(":")
    return prefix == "doom" and kind in MATCHES


def fills_worker(name: str) -> bool:
    """Whether an environment is several engines that live and die together: a worker has only one."""
    return is_match(name) and MATCHES[name.partition(":")[2]].agents > 1


def _arena(name: str, arena: str) -> Arena:
    if arena not in ARENAS:
        raise ValueError("%s: there is no map '%s'; there are: %s" % (name, arena, ", ".join(ARENAS)))
    return ARENAS[arena]


def _bot_names(count: int) -> List[str]:
    """The first `count` of the engine's own bots; a name for each, so that which ones come is not left to chance."""
    if not count:
        return []
    with open(os.path.join(os.path.dirname(doom.import_vizdoom().__file__), "bots.cfg")) as file:
        names = re.findall(r"^\s*name\s+\"?([\w ]+?)\"?\s*$", file.read(), re.MULTILINE)
    if count > len(names):
        raise ValueError("bots = %d, and ViZDoom has %d" % (count, len(names)))
    return names[:count]
