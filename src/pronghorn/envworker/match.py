"""The engines of one Doom match: started, restarted, advanced tic by tic and ended as one; it knows no rewards.

Each player has an engine process of his own. The first hosts, the others join it on a port of the loopback, and bots
are players of the host. Every engine runs the whole game: it does its tic t once it has everybody's command for t.

Order. A joiner makes one command more whenever it finds that the host's command for the tic has come already, and
then stays one ahead. So the host is always advanced first: it finds the joiners' commands waiting, and they find his.
No engine ever waits for another, and one thread calls them in turn. (Called at once from a thread each, an engine
spins until the others' packets come, which on a shared core takes its whole time slice, and whether a joiner is ahead
changes with the timing, so that no match repeats itself.) `_settle` brings the joiners ahead after each start of a
map. The price is that a joiner's action works one tic later than his call; the host's are held back as long.

Failures. A dead engine raises at its own call, as no other waits for it. Only starts and restarts of a map are made in
threads, with a time-out; if one fails, all engines are killed, for a joiner whose host is gone would wait in C++ for
ever. An engine that hangs between, blocks the caller: whoever runs this process has to watch it from outside.

Standard library only (the engines are given), Python 3.8 syntax.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any, Callable, List, Optional, Sequence

START_TRIES = 3
SETTLE_TICS = 12  # a joiner that is two commands ahead drops to one within five tics
MAX_SETTLE_TICS = 300
ALONE_S = 0.05  # a host that has not done its tic by then waits for a joiner's command
BOT_TICS = 20  # until bots that were added stand in the map
RESPAWN_TICS = 12

# As Sample Factory plays: no aiming help, no jumping, looking up or leaving; who dies is back at once, far away.
RULES = (
    "-deathmatch +sv_forcerespawn 1 +viz_respawn_delay 0 +sv_respawnprotect 1 +sv_spawnfarthest 1 +sv_noautoaim 1 "
    "+sv_nojump 1 +sv_nocrouch 1 +sv_nofreelook 1 +sv_noexit 1"
)


class MatchBroken(RuntimeError):
    """An engine died, or did not answer in time: the match cannot go on."""


def free_port() -> int:
    """A UDP port of the loopback that nobody uses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        port: int = udp.getsockname()[1]
        return port


class _Call(threading.Thread):
    """One call of an engine in a thread of its own; `error` is what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)  # one that is stuck must not keep the process
        self._call, self.error = call, None  # type: Any, Optional[BaseException]
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.error = error


class Match:
    """`num_players` engines that play one map against each other and against bots.

    name: of the environment, for messages.     make_game: an engine (`vizdoom.DoomGame`) set up but for the network.
    bots: names of the bots to add, of the engine's list.
    clear_first_lives: kill all players once after each start of the map, for maps whose scripts treat the first life
        in a way of their own.
    start_timeout_s: limit for one try to start all engines, and for a restart of the map.
    choose_port: called for each try.
    """

    def __init__(
        self,
        name: str,
        make_game: Callable[[], Any],
        num_players: int,
        bots: Sequence[str] = (),
        clear_first_lives: bool = False,
        start_timeout_s: float = 30.0,
        choose_port: Callable[[], int] = free_port,
    ) -> None:
        self._name, self._make_game, self.num_players = name, make_game, num_players
        self._bots, self._clear_first_lives = list(bots), clear_first_lives
        self._timeout_s, self._choose_port = start_timeout_s, choose_port
        self.games: List[Any] = []  # by player number, the host first; empty: not started
        self.tics = 0  # of the match under way
        self._broken = False

    # ------------------------------------------------------------------------------------------- start and end

    def start(self, player_number: Any) -> None:
        """Start all engines; a port that turns out to be taken, or a start that hangs, is tried again with another.

        player_number: the engine's variable of that name. Who joined first has the lowest, which depends on timing;
        so engines are put into its order. Raises MatchBroken when no try succeeded.
        """
        failures = []
        for _ in range(START_TRIES):
            port = self._choose_port()
            self.games = [self._make_networked(player, port) for player in range(self.num_players)]
            try:
                self._together([game.init for game in self.games])
            except MatchBroken as error:
                failures.append("port %d: %s" % (port, error))
                self.close()
                continue
            self.games.sort(key=lambda game: float(game.get_game_variable(player_number)))
            return
        raise MatchBroken(
            "%s: its %d engines did not start together in %d tries: %s. 'pronghorn doctor' starts one alone and shows "
            "what it prints" % (self._name, self.num_players, START_TRIES, "; ".join(failures))
        )

    def _make_networked(self, player: int, port: int) -> Any:
        game = self._make_game()
        role = "-host %d %s" % (self.num_players, RULES) if player == 0 else "-join 127.0.0.1"
        game.add_game_args("%s -port %d +viz_connect_timeout %d" % (role, port, max(1, int(self._timeout_s))))
        return game

    def close(self) -> None:
        """End all engines; safe to call twice. Those of a broken match are killed first."""
        games, self.games = self.games, []
        if self._broken:
            for game in games:
                _kill(game)
        for game in games:
            with contextlib.suppress(Exception):  # a dead engine complains; its memory is removed all the same
                game.close()
        if self._broken:
            for game in games:
                _remove_memory(game)
        self._broken = False

    def _together(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Make blocking calls of different engines at once. Raises MatchBroken at the first that fails, or in time."""
        until = time.monotonic() + self._timeout_s
        running = [_Call(call) for call in calls]
        while any(call.is_alive() for call in running) and time.monotonic() < until:
            if any(call.error for call in running):
                break
            for call in running:
                call.join(0.01)
        failed = [(i, call) for i, call in enumerate(running) if call.error or call.is_alive()]
        if not failed:
            return
        self._end_calls(running)
        raised = [(i, call.error) for i, call in failed if call.error]
        if not raised:
            rule = "%d of %d engines did not answer within %g s"
            raise MatchBroken(rule % (len(failed), len(calls), self._timeout_s))
        player, error = raised[0]
        raise MatchBroken(self._failure(player, error)) from error

    def _end_calls(self, running: Sequence[_Call]) -> None:
        """Kill the engines, which frees the threads that wait for them."""
        self._broken = True
        for game in self.games:
            _kill(game)
        for call in running:
            call.join(2.0)

    def _failure(self, player: int, error: Optional[BaseException]) -> str:
        role = "host" if player == 0 else "joiner"
        return "the engine of player %d (%s) failed: %s: %s" % (player, role, type(error).__name__, error)

    # ------------------------------------------------------------------------------------------------- the game

    def restart(self, seed: int) -> None:
        """Begin the map anew. Engines that draw from different seeds would fall out of step, so all get this one."""
        try:
            host = self.games[0]
            if self._bots:
                host.send_game_command("removebots")
            for game in self.games:
                game.set_seed(seed)
            self._together([game.new_episode for game in self.games])
            self._actions_before = self._idle = [0.0] * host.get_available_buttons_size()
            self._settle()
            if self._clear_first_lives:
                for game in self.games:
                    game.send_game_command("kill")
                self._idle_tics(RESPAWN_TICS)
            if self._bots:
                for bot in self._bots:
                    host.send_game_command("addbot " + bot)
                self._idle_tics(BOT_TICS)
        except MatchBroken as error:
            self._broken = True
            raise MatchBroken("%s: at the start of a match %s" % (self._name, error)) from error
        self.tics = 0

    def _settle(self) -> None:
        """Bring every joiner one command ahead of the host: idle tics in which the host is called first.

        It needs as many tics each time, unless this machine is so busy that the host's packet is late.
        """
        for game in self.games:
            game.set_action(self._idle)
        alone = 0
        for tic in range(MAX_SETTLE_TICS):
            host = _Call(self.games[0].advance_action)
            host.join(ALONE_S)
            alone = 0 if host.is_alive() else alone + 1
            self._together([host.join, *(game.advance_action for game in self.games[1:])])
            if host.error:
                raise MatchBroken(self._failure(0, host.error))
            if tic + 1 >= SETTLE_TICS and alone >= SETTLE_TICS // 2:
                return
        raise MatchBroken("the joiners' commands kept coming late for %d tics" % MAX_SETTLE_TICS)

    def _idle_tics(self, count: int) -> None:
        self.advance([self._idle] * self.num_players, count)

    def advance(self, actions: Sequence[Sequence[float]], tics: int) -> None:
        """Hold one action (the engine's vector of buttons) for each player for `tics` tics; update the last's picture.

        For everybody alike the first tic still plays the action before (see above). Raises MatchBroken.
        """
        for tic in range(tics):
            for player, game in enumerate(self.games):
                late = player == 0 and tic == 0 and self.num_players > 1
                try:
                    game.set_action(self._actions_before if late else actions[player])
                    game.advance_action(1, tic == tics - 1)
                except Exception as error:
                    self._broken = True
                    what = self._failure(player, error)
                    raise MatchBroken("%s: at tic %d of a match %s" % (self._name, self.tics + tic, what)) from error
        self._actions_before = actions[0]
        self.tics += tics


# --------------------------------------------------------------------------------------- engines from outside


def _engine_pid(game: Any) -> Optional[int]:
    """Process of a game's engine, by the id in its command line; None where there is none, or no /proc (macOS)."""
    wanted = str(game.get_instance_id()).encode()
    if not wanted or not os.path.isdir("/proc/self"):
        return None
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open("/proc/%s/cmdline" % name, "rb") as file:
                arguments = file.read().split(b"\0")
                if b"+viz_instance_id" in arguments and wanted in arguments:
                    return int(name)
    return None


def _kill(game: Any) -> None:
    pid = _engine_pid(game)
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _remove_memory(game: Any) -> None:
    """The three shared-memory files of a killed engine."""
    for kind in ("SM", "MQCtr", "MQDoom"):
        with contextlib.suppress(OSError):
            os.unlink("/dev/shm/ViZDoom%s%s" % (kind, game.get_instance_id()))
