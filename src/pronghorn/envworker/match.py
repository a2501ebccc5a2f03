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
threads, with a time-out; if a restart fails, all engines are killed, for a joiner whose host is gone would wait in C++
for ever. A start that fails cannot be undone: ViZDoom (1.3.2) reads memory that is not mapped yet when an engine ends
before its first message, which ends this process. An engine that hangs in a match blocks the caller. So whoever runs
this process has to watch it from outside, to kill it with all its engines, and to start another, with another port.

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

PORT_TRIES = 100
SETTLE_TICS = 12  # a joiner that is two commands ahead drops to one within five tics
MAX_SETTLE_TICS = 300
ALONE_S = 0.2  # a host that has not done its tic by then waits for a joiner's command
BOT_TICS = 20  # until bots that were added stand in the map
RESPAWN_TICS = 12

# As Sample Factory plays: no aiming help, no jumping, looking up or leaving; who dies is back at once, far away.
RULES = (
    "-deathmatch +sv_forcerespawn 1 +viz_respawn_delay 0 +sv_respawnprotect 1 +sv_spawnfarthest 1 +sv_noautoaim 1 "
    "+sv_nojump 1 +sv_nocrouch 1 +sv_nofreelook 1 +sv_noexit 1"
)

_abandoned: List[Any] = []  # engines whose start failed: not even their destructor may run


class MatchBroken(RuntimeError):
    """An engine died, or did not answer in time: the match cannot go on, another process may play the next."""

    code = "again"  # for the worker's report: nothing is wrong with the environment itself


class Port:
    """A UDP port that nobody uses now, and that no other match takes while this object lives.

    The engine opens it only later, so it is kept by its namesake among the TCP ports.
    """

    def __init__(self) -> None:
        for _ in range(PORT_TRIES):
            self._namesake = socket.socket()
            self._namesake.bind(("127.0.0.1", 0))
            self.number: int = self._namesake.getsockname()[1]
            if _is_free(self.number):
                return
            self._namesake.close()
        raise MatchBroken("none of %d UDP ports that were tried is free" % PORT_TRIES)

    def close(self) -> None:
        self._namesake.close()


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        try:
            udp.bind(("", port))  # as the engine does
        except OSError:
            return False
        return True


# ViZDoom's own start of an engine (its name, its shared memory, its process) is not made for several threads: at the
# very same time they have crashed the process. Each then waits for the others for much longer than this.
START_APART_S = 0.1


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
    start_timeout_s: limit for the start of all engines, and for a restart of the map.
    choose_port: gives the port that the host opens.
    """

    def __init__(
        self,
        name: str,
        make_game: Callable[[], Any],
        num_players: int,
        bots: Sequence[str] = (),
        clear_first_lives: bool = False,
        start_timeout_s: float = 60.0,
        choose_port: Callable[[], Any] = Port,
    ) -> None:
        self._name, self._make_game, self.num_players = name, make_game, num_players
        self._bots, self._clear_first_lives = list(bots), clear_first_lives
        self._timeout_s, self._choose_port = start_timeout_s, choose_port
        self.games: List[Any] = []  # by player number, the host first; empty: not started
        self._port: Any = None
        self._ids: List[str] = []  # of the engines, as in their command lines
        self.tics = 0  # of the match under way
        self.late_tics = 0  # that its start took beyond the usual number, on a machine that was too busy
        self._broken = False
        self._idle: Sequence[float] = ()  # the action that does nothing
        self._host_action: Sequence[float] = ()  # the host's, of the step before

    # ------------------------------------------------------------------------------------------- start and end

    def start(self, player_number: Any, seed: int) -> None:
        """Start all engines; `restart` then begins the first match. Raises MatchBroken if the engines do not come
        together; then this process has to end.

        seed: of all random numbers of this match and the later ones. An engine takes it only when it starts: a map
        that is begun anew goes on with the numbers of the one before.
        player_number: the engine's variable of that name. Who joined first has the lowest, which depends on timing;
        so engines are put into its order.
        """
        self._port = self._choose_port()
        games = [self._make_networked(player, self._port.number) for player in range(self.num_players)]
        for game in games:
            game.set_seed(seed)  # engines that draw different numbers would fall out of step
        try:
            self._together([game.init for game in games], apart_s=START_APART_S)
        except MatchBroken as error:
            _abandoned.extend(games)
            raise MatchBroken(
                "%s: its %d engines did not start together at port %d: %s. 'pronghorn doctor' starts one alone and "
                "shows what it prints" % (self._name, self.num_players, self._port.number, error)
            ) from error
        self.games = sorted(games, key=lambda game: float(game.get_game_variable(player_number)))
        self._ids = [str(game.get_instance_id()) for game in self.games]  # a dead engine does not tell it any more

    def _make_networked(self, player: int, port: int) -> Any:
        game = self._make_game()
        # Without this a joiner is shown where the command that is still to come will bring him, a tic ahead of all.
        role = "-host %d %s" % (self.num_players, RULES) if player == 0 else "-join 127.0.0.1 +cl_noprediction 1"
        patience_s = int(self._timeout_s) + 60  # an engine that gave up first would end this process: see above
        game.add_game_args("%s -port %d +viz_connect_timeout %d" % (role, port, patience_s))
        return game

    def close(self) -> None:
        """End all engines; safe to call twice. Those of a broken match are killed first."""
        games, self.games = self.games, []
        if self._broken:
            self._kill_engines()
        for game in games:
            with contextlib.suppress(Exception):  # a dead engine complains; its memory is removed all the same
                game.close()
        for number in self._ids if self._broken else ():
            _remove_memory(number)
        self._ids, self._broken = [], False
        if self._port is not None:
            self._port.close()

    def _together(self, calls: Sequence[Callable[[], Any]], apart_s: float = 0.0) -> None:
        """Make blocking calls of different engines at once. Raises MatchBroken at the first that fails, or in time.

        apart_s: between the beginnings of two calls.
        """
        until = time.monotonic() + self._timeout_s
        running: List[_Call] = []
        for function in calls:
            time.sleep(apart_s if running else 0.0)
            running.append(_Call(function))
        while any(call.is_alive() for call in running) and time.monotonic() < until:
            if any(call.error for call in running):
                break
            for call in running:
                call.join(0.01)
        raised = [(i, call.error) for i, call in enumerate(running) if call.error]  # before others fail by our own hand
        num_late = sum(call.is_alive() for call in running)
        if not raised and not num_late:
            return
        self._broken = True
        self._kill_engines()  # which frees the threads that wait for them
        for call in running if self.games else ():
            call.join(2.0)
        if not raised:
            rule = "%d of %d engines did not answer within %g s"
            raise MatchBroken(rule % (num_late, len(calls), self._timeout_s))
        player, error = raised[0]
        raise MatchBroken(self._failure(player, error)) from error

    def _kill_engines(self) -> None:
        for number in self._ids:
            pid = engine_pid(number)
            if pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _failure(self, player: int, error: Optional[BaseException]) -> str:
        role = "host" if player == 0 else "joiner"
        return "the engine of player %d (%s) failed: %s: %s" % (player, role, type(error).__name__, error)

    # ------------------------------------------------------------------------------------------------- the game

    def restart(self) -> None:
        """Begin the map anew: the next match."""
        try:
            host = self.games[0]
            if self._bots:
                host.send_game_command("removebots")
            self._together([game.new_episode for game in self.games])
            self._host_action = self._idle = [0.0] * int(host.get_available_buttons_size())
            self._settle()
            if self._clear_first_lives:
                for game in self.games:
                    game.send_game_command("kill")
                self._idle_tics(RESPAWN_TICS)
            if self._bots:
                for bot in self._bots:
                    host.send_game_command("addbot " + bot)
                self._idle_tics(BOT_TICS)
        except Exception as error:
            self._broken = True
            raise MatchBroken("%s: at the start of a match %s" % (self._name, error)) from error
        self.tics = 0

    def _settle(self) -> None:
        """Bring every joiner one command ahead of the host: idle tics in which the host is called first.

        It takes as many tics each time, unless this machine is so busy that the host's packet is late: `late_tics`.
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
            self.late_tics = max(0, tic + 1 - SETTLE_TICS)
            if tic + 1 >= SETTLE_TICS and alone >= SETTLE_TICS // 2:
                return
        raise MatchBroken("the joiners' commands kept coming late for %d tics" % MAX_SETTLE_TICS)

    def _idle_tics(self, count: int) -> None:
        self.advance([self._idle] * self.num_players, count)

    def advance(self, actions: Sequence[Sequence[float]], tics: int) -> None:
        """Hold one action (the engine's vector of buttons) for each player for `tics` tics; update the last's picture.

        Where there are joiners, everybody's first tic still plays the action before (see above). Raises MatchBroken.
        """
        for tic in range(tics):
            for player, game in enumerate(self.games):
                late = player == 0 and tic == 0 and self.num_players > 1
                try:
                    game.set_action(self._host_action if late else actions[player])
                    game.advance_action(1, tic == tics - 1)
                except Exception as error:
                    self._broken = True
                    what = self._failure(player, error)
                    raise MatchBroken("%s: at tic %d of a match %s" % (self._name, self.tics + tic, what)) from error
        self._host_action = actions[0]
        self.tics += tics


# --------------------------------------------------------------------------------------- engines from outside


def engine_pid(instance_id: str) -> Optional[int]:
    """Process of an engine, by the id in its command line; None where there is none, or no /proc (macOS)."""
    wanted = instance_id.encode()
    if not os.path.isdir("/proc/self"):
        return None
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open("/proc/%s/cmdline" % name, "rb") as file:
                arguments = file.read().split(b"\0")
                if b"+viz_instance_id" in arguments and wanted in arguments:
                    return int(name)
    return None


def _remove_memory(instance_id: str) -> None:
    """The three shared-memory files of a killed engine."""
    for kind in ("SM", "MQCtr", "MQDoom"):
        with contextlib.suppress(OSError):
            os.unlink("/dev/shm/ViZDoom%s%s" % (kind, instance_id))
