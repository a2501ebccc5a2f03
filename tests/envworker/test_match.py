"""The engines of a match on real engines: starts, ports, order, fairness, repetition, and every way to break."""

import math
import os
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from playing import wait_until
from pronghorn.envworker import deathmatch, match
from pronghorn.envworker.match import Match, MatchBroken
from running import has_ended

vizdoom = pytest.importorskip("vizdoom")

VARIABLE = vizdoom.GameVariable
TURN = [0.0] * 15 + [5.0]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the engine writes its configuration where it runs


@pytest.fixture
def make():
    made = []

    def make_match(num_players=2, arena="multi_duel", **options):
        players = deathmatch.Players("multi_deathmatch", agents=max(2, num_players), map=arena)
        made.append(Match("doom:test", players._make_game, num_players, **options))
        return made[-1]

    yield make_match
    ids = [number for one in made for number in one._ids]
    for one in made:
        one.close()
    assert not any(map(left_behind, ids))


def started(one, seed=1):
    one.start(VARIABLE.PLAYER_NUMBER, seed)
    one.restart()
    return one


def engines():
    return [p for p in psutil.Process().children(recursive=True) if not has_ended(p)]


def left_behind(instance_id):
    """Files of an engine's shared memory."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("ViZDoom") and name.endswith(instance_id)]


def angles(one):
    return [game.get_game_variable(VARIABLE.ANGLE) for game in one.games]


def idle(one):
    return [0.0] * one.games[0].get_available_buttons_size()


def vector(one, **buttons):
    names = [button.name for button in one.games[0].get_available_buttons()]
    return [buttons.get(name, 0.0) for name in names]


def record(one, num_steps=25):
    """Pictures and positions of all players under given actions."""
    rng, seen = np.random.default_rng(0), []
    for _ in range(num_steps):
        turn = rng.uniform(-10, 10, one.num_players)
        walk, attack = rng.integers(2, size=(2, one.num_players))
        one.advance(
            [
                vector(one, MOVE_FORWARD=float(w), ATTACK=float(a), TURN_LEFT_RIGHT_DELTA=t)
                for w, a, t in zip(walk, attack, turn, strict=True)
            ],
            2,
        )
        for game in one.games:
            where = [game.get_game_variable(v) for v in (VARIABLE.POSITION_X, VARIABLE.POSITION_Y, VARIABLE.ANGLE)]
            seen.append((where, game.get_state().screen_buffer.tobytes()))
    return seen


# --- order, fairness and repetition ------------------------------------------------------------------------


def test_an_action_works_equally_late_for_host_and_joiner(make):
    """Both turn by 5 degrees a tic from one call on: the first tic of a step still plays the action before."""
    one = started(make())
    before = angles(one)
    turning = vector(one, TURN_LEFT_RIGHT_DELTA=5.0)
    one.advance([turning] * 2, 2)
    first = angles(one)
    one.advance([turning] * 2, 2)
    second = angles(one)
    one.advance([idle(one)] * 2, 2)
    last = angles(one)
    for a, b in ((before, first), (second, last)):
        np.testing.assert_allclose(np.subtract(a, b) % 360, 5.0, atol=0.01)
    np.testing.assert_allclose(np.subtract(first, second) % 360, 10.0, atol=0.01)


def test_engines_are_put_into_the_order_of_their_numbers(make):
    one = started(make(4, "cig_map02"))
    assert [game.get_game_variable(VARIABLE.PLAYER_NUMBER) for game in one.games] == [0, 1, 2, 3]
    assert {game.get_game_variable(VARIABLE.PLAYER_COUNT) for game in one.games} == {4}


@pytest.mark.parametrize(("num_players", "arena", "bots"), [(2, "multi_duel", []), (3, "cig_map01", ["Rambo"])])
def test_equal_seeds_and_actions_give_equal_matches(make, num_players, arena, bots):
    one, same = (started(make(num_players, arena, bots=bots), seed=5) for _ in range(2))
    first = record(one)
    assert first == record(same)
    one.restart()
    same.restart()
    second = record(one)  # of the next match
    assert second == record(same)
    assert second != first


def test_another_seed_gives_another_match(make):
    assert record(started(make(), seed=5)) != record(started(make(), seed=6))


def test_all_engines_play_the_same_game(make):
    """Each says of itself where it is; the host's list of objects says the same of everybody."""
    one = make()
    make_game = one._make_game

    def with_objects():
        game = make_game()
        game.set_objects_info_enabled(True)
        return game

    one._make_game = with_objects
    started(one)
    for _ in range(40):
        one.advance([vector(one, MOVE_LEFT=1.0), vector(one, MOVE_RIGHT=1.0)], 2)
    own = sorted((round(g.get_game_variable(VARIABLE.POSITION_X)), round(g.get_game_variable(VARIABLE.POSITION_Y)))
                 for g in one.games)  # fmt: skip
    for game in one.games:
        objects = [o for o in game.get_state().objects if o.name == "DoomPlayer"]
        assert sorted((round(o.position_x), round(o.position_y)) for o in objects) == own


def test_no_call_waits_for_a_later_one(make):
    """After a start every joiner is one command ahead, and stays so: the host's tic is done before theirs begins."""
    one = started(make(3, "cig_map01"))
    for _ in range(200):
        host = match._Call(one.games[0].advance_action)
        host.join(5.0)
        assert not host.is_alive()
        for game in one.games[1:]:
            game.advance_action(1)


# --- ports -------------------------------------------------------------------------------------------------


@pytest.mark.case("ENV-17")
def test_a_port_that_somebody_uses_is_passed_over(monkeypatch):
    """The first namesake that the system offers has a UDP port that is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("0.0.0.0", 0))
        taken, asked = holder.getsockname()[1], []
        is_free = match._is_free

        def first_is_taken(port):
            asked.append(port)
            return is_free(taken if len(asked) == 1 else port)

        monkeypatch.setattr(match, "_is_free", first_is_taken)
        port = match.Port()
    assert len(asked) == 2
    assert port.number == asked[1]
    port.close()


@pytest.mark.case("ENV-17")
def test_a_port_is_kept_for_its_match_before_the_engine_opens_it():
    port = match.Port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))
    port.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port.number))


def test_no_free_port_at_all_is_said(monkeypatch):
    monkeypatch.setattr(match, "_is_free", lambda port: False)
    with pytest.raises(MatchBroken, match="none of 100 UDP ports"):
        match.Port()


# --- deaths of engines -------------------------------------------------------------------------------------


@pytest.mark.case("FLT-07")
@pytest.mark.parametrize(("player", "role"), [(0, "host"), (1, "joiner"), (2, "joiner")])
def test_an_engine_that_dies_in_a_match_is_named_and_the_others_end_with_it(make, player, role):
    one = started(make(3, "cig_map01"))
    one.advance([idle(one)] * 3, 2)
    ids = list(one._ids)
    os.kill(match.engine_pid(one._ids[player]), signal.SIGKILL)
    with pytest.raises(MatchBroken, match=rf"doom:test: at tic \d of a match the engine of player {player} \({role}\)"):
        one.advance([idle(one)] * 3, 6)
    one.close()
    wait_until(lambda: not engines())
    assert not any(map(left_behind, ids))


@pytest.mark.case("FLT-07")
@pytest.mark.parametrize("player", [0, 1])
def test_an_engine_that_dies_between_matches_does_not_hold_up_the_next(make, player):
    """There the others do wait for it, inside C++: they are killed, and their threads come back."""
    one = started(make())
    ids = list(one._ids)
    os.kill(match.engine_pid(one._ids[player]), signal.SIGKILL)
    with pytest.raises(MatchBroken, match=rf"doom:test: at the start of a match the engine of player {player}"):
        one.restart()
    one.close()
    wait_until(lambda: not engines())
    assert not any(map(left_behind, ids))


def test_an_engine_that_hangs_between_matches_is_given_up_in_time(make):
    one = started(make())
    one._timeout_s = 1.0
    os.kill(match.engine_pid(one._ids[1]), signal.SIGSTOP)
    with pytest.raises(MatchBroken, match="engines did not answer within 1 s"):
        one.restart()
    one.close()
    wait_until(lambda: not engines())


def test_a_match_can_be_started_again_after_it_broke(make):
    one = started(make())
    os.kill(match.engine_pid(one._ids[0]), signal.SIGKILL)
    with pytest.raises(MatchBroken):
        one.advance([idle(one)] * 2, 2)
    one.close()
    started(one)
    one.advance([idle(one)] * 2, 2)
    assert one.tics == 2


def test_closing_twice_ends_all_engines(make):
    one = started(make(3, "cig_map01"))
    assert len(engines()) == 3
    one.close()
    one.close()
    wait_until(lambda: not engines())


# --- scripts of maps ---------------------------------------------------------------------------------------


def test_first_lives_are_cleared_where_the_map_treats_them_in_a_way_of_its_own(make):
    one = started(make(2, "multi_deathmatch", clear_first_lives=True))
    assert [game.get_game_variable(VARIABLE.HEALTH) for game in one.games] == [100.0, 100.0]
    for _ in range(5):
        one.advance([idle(one)] * 2, 2)
    places = [[g.get_game_variable(v) for v in (VARIABLE.POSITION_X, VARIABLE.POSITION_Y)] for g in one.games]
    assert math.dist(*places) > 300  # at the two ends of the room


def test_bots_enter_every_match_anew(make):
    one = started(make(1, "multi_deathmatch", bots=["Rambo"], clear_first_lives=True))
    for _ in range(3):
        one.restart()
        assert one.games[0].get_game_variable(VARIABLE.PLAYER_COUNT) == 2
        assert one.tics == 0
