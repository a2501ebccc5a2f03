"""Pools of workers: what a recv carries, order and seeds, auto-reset modes, death and restart."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from playing import TOYS, alive, answer, answer_rows, kill_worker, play, receive, toy, wait_until
from pronghorn import limits, machine
from pronghorn.envs import layout, restarts, workers
from pronghorn.envs.workers import ResolvedEnv, derive_seed
from pronghorn.errors import ConfigError, EnvError, UsageError, WorkerDied
from pronghorn.types import Event

FIRST, STEP, LAST, LOST = Event.FIRST, Event.STEP, Event.LAST, Event.LOST


# ------------------------------------------------------------------------------------ what a recv carries


def test_an_episode_from_first_to_first(start):
    pool = start(toy(length=3))
    assert play(pool, 5) == [
        (0, FIRST, 0.0, 0.0),
        (0, STEP, 10.0, 1.0),
        (0, STEP, 20.0, 2.0),
        (0, LAST, 0.0, 3.0),  # the same record holds the last reward and the next episode's first observation
        (0, STEP, 10.0, 1.0),
    ]


def test_a_termination_has_no_final_observation_and_a_record(start):
    pool = start(toy(length=1))
    answer(pool, receive(pool))
    ready = receive(pool)
    assert (ready.terminated[0], ready.truncated[0], ready.episode_over[0]) == (True, False, True)
    assert ready.final_index.tolist() == []
    assert ready.final_obs["obs"].shape == (0, 1)
    assert ready.records == [{"row": 0, "task": "toy:Counter", "return": 1.0, "length": 1, "count": 1.0}]


def test_a_truncation_carries_its_real_final_observation(start):
    pool = start(toy(length=2), toy(length=2, truncate=True), envs_per_worker=2)
    for _ in range(2):
        answer(pool, receive(pool))
    ready = receive(pool)
    assert ready.event.tolist() == [LAST, LAST]
    assert ready.truncated.tolist() == [False, True]
    assert ready.final_index.tolist() == [1]
    assert ready.final_obs["obs"].tolist() == [[20.0]]
    assert ready.obs["obs"].tolist() == [[0.0], [0.0]]


def test_a_life_loss_is_a_boundary_without_reset_and_without_a_record(start):
    pool = start(toy("LifeLoss"))
    seen = []
    for _ in range(6):
        ready = receive(pool)
        seen.append(
            (ready.event[0], ready.terminated[0], ready.episode_over[0], ready.obs["obs"][0, 0], len(ready.records))
        )
        answer(pool, ready)
    assert seen == [
        (FIRST, False, False, 0.0, 0),
        (STEP, False, False, 10.0, 0),
        (LAST, True, False, 20.0, 0),  # a life is lost: the episode goes on at 20
        (STEP, False, False, 30.0, 0),
        (LAST, True, True, 0.0, 1),
        (STEP, False, False, 10.0, 0),
    ]


def test_declared_info_and_own_statistics(start):
    pool = start(toy("LifeLoss"))
    assert pool.spec.info == ("lives",)
    assert pool.spec.frame_skip == 4
    lives, records = [], []
    for _ in range(5):
        ready = receive(pool)
        lives.append(float(ready.info[0, 0]))
        records += ready.records
        answer(pool, ready)
    np.testing.assert_array_equal(lives, [np.nan, 2, 1, 1, 0])
    assert records == [{"row": 0, "task": "toy:LifeLoss", "return": 4.0, "length": 4, "steps_alive": 4.0}]


@pytest.mark.case("ENV-02")
@pytest.mark.parametrize("num_groups", [1, 2])
def test_every_observation_is_the_answer_to_the_action_of_its_row(start, num_groups):
    pool = start(toy("Echo"), num_workers=2, envs_per_worker=2, num_groups=num_groups)
    sent = {}
    for i in range(100):
        ready = receive(pool)
        for row, event, value in zip(
            ready.rows.tolist(), ready.event.tolist(), ready.obs["obs"][:, 0].tolist(), strict=True
        ):
            assert value == (-1 if event == FIRST else sent[row])
        actions = (ready.rows * 17 + i) % 100
        sent.update(zip(ready.rows.tolist(), actions.tolist(), strict=True))
        before = ready.obs["obs"].copy()
        pool.send(ready.rows, actions[:, None], np.zeros((len(actions), 0), np.float32))
        assert pool._selector.select(5.0)  # a worker has stepped; what was received stays until the next recv
        np.testing.assert_array_equal(ready.obs["obs"], before)


def test_one_slice_is_a_view_and_scattered_units_are_gathered(start):
    pool = start(toy(), num_workers=2, envs_per_worker=2, num_groups=2, ordered=True)
    ready = receive(pool)
    assert ready.rows.tolist() == [0, 1]
    assert np.shares_memory(ready.obs["obs"], pool._obs["obs"])
    assert not np.shares_memory(ready.reward, pool._reward)


def test_send_wants_exactly_the_rows_of_a_recv(start):
    pool = start(toy(), envs_per_worker=2)
    ready = receive(pool)
    with pytest.raises(UsageError, match="row 1 is not waiting"):
        answer_rows(pool, [1])
    answer(pool, ready)
    with pytest.raises(UsageError, match="row 0 is not waiting"):
        answer(pool, ready)


# ---------------------------------------------------------------------------------- auto-reset modes, many rows


def stream(pool, num_steps):
    """Per row: what the learner is to see, a tuple for each decision, however many recvs it took."""
    decisions = {row: [] for row in range(pool.num_rows)}
    open_ones, records = {}, []
    while min(map(len, decisions.values())) < num_steps:
        ready = receive(pool)
        records += ready.records
        final_rows = ready.rows[ready.final_index].tolist()
        final = {row: {k: v[m] for k, v in ready.final_obs.items()} for m, row in enumerate(final_rows)}
        actions = np.zeros((len(ready.rows), 1), np.int64)
        for i, row in enumerate(ready.rows.tolist()):
            if ready.event[i] == Event.INACTIVE:
                actions[i] = 2  # ignored
                continue
            obs = (*ready.obs["where"][i].tolist(), int(ready.obs["did"][i]))
            if ready.event[i] != FIRST:
                last_obs = (*final[row]["where"].tolist(), int(final[row]["did"])) if ready.truncated[i] else None
                outcome = float(ready.reward[i]), bool(ready.terminated[i]), bool(ready.truncated[i])
                decisions[row].append((*open_ones.pop(row), *outcome, ready.event[i] == LAST, last_obs, obs))
            actions[i] = sum(obs) % 3
            open_ones[row] = obs, int(actions[i, 0])
        pool.send(ready.rows, actions, np.zeros((len(ready.rows), 0), np.float32))
    return {row: steps[:num_steps] for row, steps in decisions.items()}, records


MODES = ["NextStep", "Unsaid", "SameStep", "OldName", "Arrays", "Disabled"]


@pytest.mark.case("EPI-06", "EPI-07")
@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_every_auto_reset_mode_gives_the_transitions_of_a_plain_environment(start, mode, num_envs):
    """Terminations, time limits and both at once, rows out of step: equal to rows that the worker resets itself."""
    pool = start(toy("vector_episodes", mode=mode), envs_per_worker=num_envs, num_groups=num_envs)
    assert (pool.num_rows, pool.spec.rows_per_env) == (3 * num_envs, 3)
    found, records = stream(pool, 40)
    for row in range(pool.num_rows):
        alone = start(toy("Episodes", row=row % 3))
        assert found[row] == stream(alone, 40)[0][0]
        lengths = [record["length"] for record in records if record["row"] == row]
        assert lengths == [1 + (n + row % 3) % 4 for n in range(len(lengths))]
    assert all(record["level"] == record["length"] for record in records)  # of the last step, not of the reset


@pytest.mark.case("LOG-02")
@pytest.mark.parametrize("mode", [*MODES, "one by one"])
def test_lengths_and_returns_are_right_from_the_first_episode_to_the_last(start, mode):
    env = toy("Episodes", length=3) if mode == "one by one" else toy("vector_episodes", mode=mode, length=3)
    _, records = stream(start(env), 30)
    assert len(records) >= 8
    assert {(record["length"], record["return"]) for record in records} == {(3, 3.0)}


def test_rows_of_a_vector_environment_come_back_after_a_death(start):
    pool = start(toy("vector_episodes", mode="NextStep"), num_workers=2)
    stream(pool, 5)
    kill_worker(pool, 1)
    seen = set()
    deadline = time.monotonic() + 60
    while not {(row, int(LOST)) for row in (3, 4, 5)} <= seen:
        assert time.monotonic() < deadline
        ready = receive(pool)
        seen |= {(int(row), int(event)) for row, event in zip(ready.rows, ready.event, strict=True)}
        keep = ready.event != LOST
        pool.send(ready.rows[keep], np.zeros((keep.sum(), 1), np.int64), np.zeros((keep.sum(), 0), np.float32))
    assert not {(row, int(LOST)) for row in (0, 1, 2)} & seen
    deadline = time.monotonic() + 20
    while not {(row, int(FIRST)) for row in (3, 4, 5)} <= seen:
        assert time.monotonic() < deadline
        ready = receive(pool)
        seen |= {(int(row), int(event)) for row, event in zip(ready.rows, ready.event, strict=True)}
        pool.send(ready.rows, np.zeros((len(ready.rows), 1), np.int64), np.zeros((len(ready.rows), 0), np.float32))


def test_tasks_of_vector_environments_are_dealt_by_environment(start):
    one, two = toy("vector_episodes", mode="SameStep"), toy("vector_episodes", mode="NextStep")
    pool = start(replace(one, name="a"), replace(two, name="b"), envs_per_worker=2)
    assert pool.task_ids.tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(EnvError, match="differ in the number of rows"):
        start(one, replace(toy("vector_episodes", mode="SameStep", count=2), name="b"), envs_per_worker=2)


@pytest.mark.case("SPA-12")
@pytest.mark.parametrize("name", ["Turns", "vector_turns"])
def test_an_active_row_without_a_choice_is_an_error_that_says_where(start, name):
    pool = start(toy(name, until=3), restart_budget=0)
    with pytest.raises(WorkerDied, match=rf"{name}, row 0.*'action_mask' allows nothing in factor 1 after step 3"):
        play(pool, 10)


@pytest.mark.case("SPA-12")
@pytest.mark.parametrize(
    "env", [toy("Turns", until=5), toy("Turns", until=5, truncate=True), toy("vector_turns", until=5)], ids=str
)
def test_the_mask_of_who_does_not_act_is_not_looked_at(start, env):
    """The last observation of an episode, and a row that waits for its reset, may forbid everything."""
    pool = start(env, restart_budget=0)
    events = []
    for _ in range(30):
        ready = receive(pool)
        events += ready.event.tolist()
        answer(pool, ready)
    assert events.count(LAST) >= 4
    assert pool.restarts == 0


PADDED = {"pad_spaces": True}


def lives(pool, num_recvs):
    """Per row: its trajectories, each a list of (obs, reward, terminated, truncated, final obs or None)."""
    rows = {row: [] for row in range(pool.num_rows)}
    open_obs, records = {}, []
    for _ in range(num_recvs):
        ready = receive(pool)
        records += ready.records
        final = dict(zip(ready.rows[ready.final_index].tolist(), ready.final_obs["x"].tolist(), strict=True))
        for i, row in enumerate(ready.rows.tolist()):
            event, obs = ready.event[i], ready.obs["x"][i].tolist()
            if event in (STEP, LAST):
                outcome = float(ready.reward[i]), bool(ready.terminated[i]), bool(ready.truncated[i])
                rows[row][-1].append((open_obs[row], *outcome, final.get(row)))
            if event in (FIRST, LAST):
                rows[row].append([])
            if event != Event.INACTIVE:
                open_obs[row] = obs
        answer(pool, ready)
    return {row: [life for life in trajectories if life] for row, trajectories in rows.items()}, records


@pytest.mark.case("MAS-03", "SPA-20")
def test_agents_that_end_at_different_times_have_trajectories_of_their_own(start):
    """'b' ends early, 'a' and 'c' on one step, 'c' misses every other episode. Shorter observations are padded."""
    pool = start(toy("Squad", PADDED))
    assert (pool.num_rows, pool.spec.observation["x"].shape) == (3, (4,))
    found, records = lives(pool, 41)
    assert [len(life) for life in found[0][:4]] == [5, 5, 5, 5]
    assert [len(life) for life in found[1][:4]] == [2, 2, 2, 2]
    assert [len(life) for life in found[2][:2]] == [5, 5]
    # of 'a': padded within its bounds [2, 99]; cut by a limit, with its final observation
    assert found[0][1][0] == ([11, 10, 2, 2], 1.0, False, False, None)
    assert found[0][1][4] == ([11, 14, 2, 2], 5.0, False, True, [11, 15, 2, 2])
    assert found[1][1] == [([11, 10, 7, 8], 1.0, False, False, None), ([11, 11, 7, 8], 2.0, True, False, None)]
    assert [life[0][0][0] for life in found[2][:2]] == [10, 12]  # episodes 0 and 2, padded by 0
    assert found[2][1][4] == ([12, 14, 0, 0], 5.0, True, False, None)
    assert {(r["row"], r["length"], r["return"]) for r in records} == {(0, 5, 15.0), (1, 2, 3.0), (2, 5, 15.0)}
    by_agent = [{key: x for key, x in r.items() if "/" in key} for r in records if r["row"] == 1]
    assert by_agent == [{"return/b": 3.0, "length/b": 2}] * len(by_agent)


@pytest.mark.case("MAS-04")
def test_an_agent_that_returns_begins_a_second_trajectory(start):
    found, _ = lives(start(toy("Squad", PADDED, returns=True)), 21)
    assert [len(life) for life in found[1][:4]] == [2, 1, 2, 1]
    assert found[1][1] == [([10, 14, 7, 8], 5.0, True, False, None)]
    assert [step[1] for step in found[1][0]] == [1.0, 2.0]


GAMES = str(Path(__file__).parents[1] / "turn_games.py")


def circle(**kwargs):
    pytest.importorskip("pettingzoo")
    return ResolvedEnv("Circle", "worker", "call", f"{GAMES}:Circle", kwargs, {})


def begun(pool, num_recvs):
    """Per row: (game, episode as its observation says), where it begins."""
    seen = {row: [] for row in range(pool.num_rows)}
    for _ in range(num_recvs):
        ready = receive(pool)
        assert ready.game.dtype == np.int64
        obs = next(iter(ready.obs.values()))
        for i, row in enumerate(ready.rows.tolist()):
            if ready.event[i] in (FIRST, LAST):
                assert ready.episode_over[i] == (ready.event[i] == LAST)
                seen[row].append((int(ready.game[i]), int(obs[i, 0])))
        answer(pool, ready)
    return seen


def test_agents_that_act_at_once_begin_in_the_game_of_that_number(start):
    """'b' leaves and is back within each game, 'c' is in every other one; the toy's episodes count from 10."""
    pool = start(toy("Squad", PADDED, returns=True))
    assert pool.spec.agents == ("a", "b", "c")
    assert begun(pool, 16) == {
        0: [(1, 10), (2, 11), (3, 12), (4, 13)],
        1: [(1, 10), (1, 10), (2, 11), (2, 11), (3, 12), (3, 12), (4, 13)],
        2: [(1, 10), (3, 12)],
    }


@pytest.mark.parametrize("num_groups", [1, 2])
def test_agents_in_turns_begin_in_different_recvs_of_one_game(start, num_groups):
    """Two environments whose games have 6 and 9 moves; in the second 'b' ends on move 2 and is back after move 5."""
    games = circle(num_agents=3), circle(num_agents=3, length=9, ends={"2": {"b": "terminated"}}, comes_back={"5": "b"})
    pool = start(*games, envs_per_worker=2, num_groups=num_groups, ordered=True)
    seen = begun(pool, 27 * num_groups)
    assert all(game == episode + 1 for row in seen.values() for game, episode in row)  # episodes count from 0
    games_of = {row: [game for game, _ in begins] for row, begins in seen.items()}
    assert games_of[0] == games_of[1] == games_of[2] == [1, 2, 3, 4, 5]
    assert games_of[3] == games_of[5] == [1, 2, 3]
    assert games_of[4] == [1, 1, 2, 2, 3, 3]


def test_a_restarted_worker_counts_its_games_from_anew(start):
    pool = start(toy("Duo"), num_workers=2, ordered=True)
    before = begun(pool, 7)
    kill_worker(pool, 0)
    wait_until(lambda: pool._poll(0.05) or pool.restarts == 1)
    after = begun(pool, 8)
    assert before == {row: [(1, 1), (2, 2), (3, 3)] for row in range(4)}
    assert after[0] == after[1]
    assert after[0][:2] == [(1, 1), (2, 2)]
    assert after[2] == after[3]
    assert after[2][0] == (4, 4)


def test_reseeding_begins_new_games(start):
    pool = start(toy("Duo"), ordered=True)
    assert begun(pool, 2)[0] == [(1, 1)]
    pool.reseed(3)
    assert begun(pool, 2)[0] == [(2, 2)]


@pytest.mark.parametrize(
    "env", [toy(), toy("Alone"), toy("one_row"), toy("vector_cart_poles"), toy("Duo", named=False)], ids=str
)
def test_rows_that_are_not_agents_of_one_game_have_no_games(start, env):
    pool = start(env)
    assert pool.spec.agents == ()
    assert receive(pool).game is None


def test_an_environment_that_names_agents_and_counts_no_games_is_named(start):
    with pytest.raises(EnvError, match=r"toy:Duo, row 1: .*attribute `games` has to be the number of games begun"):
        start(toy(length=0), toy("Duo", counts=False), envs_per_worker=2)


@pytest.mark.case("MAS-07")
def test_masks_of_absent_agents_are_not_asked_for(start):
    pool = start(toy("Squad", PADDED, masks=True), restart_budget=0)
    found, _ = lives(pool, 21)
    assert len(found[1]) >= 3
    assert pool.restarts == 0


@pytest.mark.parametrize("name", ["Alone", "one_row"])
def test_one_row_of_an_environment_of_rows(start, name):
    """A game for one agent, and a vector of one: what they say comes as a step of rows all the same."""
    seen = play(start(toy(name)), 4)
    assert [one[:3] for one in seen] == [(0, FIRST, 0), (0, STEP, 10), (0, STEP, 20), (0, STEP, 30)]


@pytest.mark.case("MAS-13")
def test_agents_that_cannot_share_a_policy_are_refused(start):
    with pytest.raises(EnvError, match=r"'a' and 'b' differ.* actions are Discrete\(3\) and Discrete\(4\).*pad-spaces"):
        start(toy("UnequalActions"))
    for options in ({}, PADDED):  # which would not help
        with pytest.raises(EnvError, match=r"differ: the observations are Box.* and Discrete.* equal in a wrapper"):
            start(toy("UnequalKinds", options))


@pytest.mark.case("ENV-17")
def test_every_environment_gets_a_free_port_of_its_own_and_another_after_a_clash(start):
    env = toy("Hosted", options={"info": ["port"]}, port="FREE_PORT", clashes=2)
    pool = start(env, num_workers=2, envs_per_worker=2)
    ports = {}
    for _ in range(1_000):  # which worker answers first, and how often, is left open
        ready = receive(pool)
        for row, event, info in zip(ready.rows, ready.event, ready.info, strict=True):
            if event == STEP:
                ports[int(row)] = int(info[0])
        answer(pool, ready)
        if len(ports) == 4:
            break
    assert len(ports) == len(set(ports.values())) == 4
    assert min(ports.values()) > 1023


@pytest.mark.case("ENV-17")
def test_no_free_port_is_an_error_that_names_those_tried(start):
    with pytest.raises(EnvError, match=r"found every port in use: \[\d+(, \d+){7}\]"):
        start(toy("Hosted", port="FREE_PORT", clashes=99))
    with pytest.raises(EnvError, match="Address already in use"):  # a port that was asked for is not replaced
        start(toy("Hosted", port=20_011, clashes=99))


# ------------------------------------------------------------------------------------------ order and seeds


def test_ordered_recvs_are_whole_groups_in_turn(start):
    pool = start(toy(), num_workers=2, envs_per_worker=3, num_groups=2, ordered=True)
    order = []
    for _ in range(5):
        ready = receive(pool)
        order.append(ready.rows.tolist())
        answer(pool, ready)
    # group 0: two rows of either worker; group 1: the third of either
    assert order == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]


def test_ordered_runs_repeat_exactly(start):
    def run():
        pool = start(toy("RandomWalk", length=4), num_workers=2, envs_per_worker=2, num_groups=2, ordered=True)
        return play(pool, 20)

    assert run() == run()


@pytest.mark.case("ENV-16")
@pytest.mark.case("DST-10")
def test_each_row_is_seeded_once_and_differently(start):
    pool = start(toy("Seeded", length=2), num_workers=2, envs_per_worker=2, ordered=True, num_groups=1)
    first = receive(pool).obs["obs"].copy()
    assert first[:, 0].tolist() == [derive_seed(7, row, 0) % 65536 for row in range(4)]
    assert len(set(first[:, 0])) == 4
    assert first[:, 1].tolist() == [1, 1, 1, 1]
    answer_rows(pool, range(4))
    answer(pool, receive(pool))
    later = receive(pool)
    assert later.event.tolist() == [LAST] * 4
    assert later.obs["obs"].tolist() == [[-1, 2]] * 4  # the second reset, without a seed


def test_reseed_starts_every_row_again_from_the_new_seed(start):
    def run(before):
        pool = start(toy("RandomWalk", length=0), num_workers=2, envs_per_worker=2, num_groups=2, ordered=True)
        play(pool, before)
        receive(pool)  # left unanswered
        pool.reseed(99)
        return play(pool, 8)

    one = run(before=0)
    assert [event for _, event, *_ in one] == [FIRST] * 4 + [STEP] * 12
    assert one == run(before=7)


def test_rows_are_dealt_to_the_tasks_in_turn(start):
    pool = start(toy(offset=0.0), toy(offset=0.5), num_workers=2, envs_per_worker=2, num_groups=2, ordered=True)
    assert pool.tasks == ("toy:Counter", "toy:Counter")
    assert pool.task_ids.tolist() == [0, 1, 0, 1]
    ready = receive(pool)
    assert ready.obs["obs"][:, 0].tolist() == [0.0, 0.5]


@pytest.mark.case("FLT-13")
@pytest.mark.parametrize("num_envs", [1, 255, 256, 257, 1025])
def test_any_number_of_environments_gives_the_same_results(start, num_envs):
    pool = start(toy("Seeded", length=2), envs_per_worker=num_envs, num_groups=1)
    first = receive(pool)
    assert first.obs["obs"][:, 0].tolist() == [derive_seed(7, row, 0) % 65536 for row in range(num_envs)]
    answer(pool, first)
    assert receive(pool).reward.tolist() == [1.0] * num_envs


# --------------------------------------------------------------------------------------------- the process


@pytest.mark.case("SHM-10")
def test_pinning_can_be_switched_off_and_is_off_where_workers_outnumber_cores(start):
    cores = len(os.sched_getaffinity(0))
    off = start(toy("Facts"), pin="off")
    assert receive(off).obs["obs"][0, 1] == cores
    assert "not pinned (off)" in off.describe()
    assert workers._cores("auto", cores + 1) == []
    assert workers._cores("auto", cores) == sorted(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=r"env.pin = 'on'"):
        start(toy(), pin="on")


def test_options_reach_every_environment_even_after_a_restart(start):
    pool = start(toy("LifeLoss"), num_workers=2)
    pool.set_option("bonus", 0.5)
    play(pool, 1)
    assert set(receive(pool).reward.tolist()) == {1.5}


def paid(pool):
    """What the rows got for the first step of those that stepped, of which there is one in each row."""
    got = {}
    while len(got) < pool.num_rows:
        for row, event, _, reward in play(pool, 1):
            if event in (STEP, LAST):
                got.setdefault(row, reward)
    return [got[row] for row in sorted(got)]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_an_option_reaches_one_environment_before_its_next_step(start, num_groups):
    """Four environments of two rows each; rows are numbered group by group."""
    pool = start(toy("Duo"), num_workers=2, envs_per_worker=2, num_groups=num_groups, ordered=True)
    assert pool.spec.rewards == {"pay": 1.0}
    for _ in range(num_groups):
        answer(pool, receive(pool))
    for env in range(4):
        pool.set_option("rewards", {"pay": 10.0 + env}, env=env)
    for _ in range(num_groups):  # the step that was under way may have been paid as before
        answer(pool, receive(pool))
    assert paid(pool) == [10, 10, 11, 11, 12, 12, 13, 13]
    pool.set_option("rewards", {"pay": 7.0}, env=2)
    for _ in range(num_groups):
        answer(pool, receive(pool))
    assert paid(pool) == [10, 10, 11, 11, 7, 7, 13, 13]


def test_options_of_one_environment_survive_restarts_until_one_is_set_for_all(start):
    def restarted(index):
        kill_worker(pool, index)
        before = pool.restarts
        wait_until(lambda: pool._poll(0.05) or pool.restarts == before + 1)
        assert LOST in [event for _, event, _, _ in play(pool, 1)]
        play(pool, 1)
        return paid(pool)

    pool = start(toy("Duo"), num_workers=2, ordered=True)
    table = {"pay": 2.0}
    pool.set_option("rewards", table)
    pool.set_option("rewards", {"pay": 3.0}, env=1)
    pool.set_option("rewards", {"pay": 4.0}, env=1)
    table["pay"] = 99.0  # the caller's own: not what was told
    assert restarted(1) == [2, 2, 4, 4]
    assert restarted(0) == [2, 2, 4, 4]
    pool.set_option("rewards", {"pay": 5.0})
    assert restarted(1) == [5, 5, 5, 5]
    assert list(pool._options) == [("rewards", None)]  # what single ones were told is not told again
    pool.set_option("rewards", {"pay": 6.0}, env=0)
    pool.reseed(3)
    assert paid(pool) == [6, 6, 5, 5]


def test_an_option_that_cannot_be_is_refused(start):
    pool = start(toy("Duo"), num_workers=2)
    for env in (-1, 2):
        with pytest.raises(UsageError, match=rf"set_option: env = {env}, and there are 2; .*rows_per_env \(0 to 1\)"):
            pool.set_option("rewards", {"pay": 1.0}, env=env)
    with pytest.raises(UsageError, match="settings travel to the workers as JSON"):
        pool.set_option("rewards", {"pay": object()})
    assert set(paid(pool)) == {1.0}


def test_an_option_that_an_environment_refuses_ends_the_run_and_is_not_tried_again(start):
    pool = start(toy("Duo"))
    play(pool, 3)
    pool.set_option("rewards", {"pay": -1.0})
    with pytest.raises(WorkerDied, match=r"(?s)Duo takes no rewards = \{'pay': -1.0\}.*It refused a setting"):
        play(pool, 3)
    with pytest.raises(WorkerDied, match="It refused a setting"):
        pool.set_option("rewards", {"pay": 1.0})
    assert pool.restarts == 0


def test_an_environment_without_options_says_so(start):
    pool = start(toy())
    pool.set_option("rewards", {"pay": 1.0})
    with pytest.raises(EnvError, match=r"'rewards' cannot be changed while it runs: GymnasiumEnv has no method set"):
        play(pool, 2)


def test_a_picture_of_one_row(start):
    pool = start(toy("LifeLoss"), num_workers=2)
    play(pool, 3)
    frame = pool.render(1)
    assert frame.shape == (4, 6, 3)
    assert frame.dtype == np.uint8
    assert start(toy()).render(0) is None


# ------------------------------------------------------------------------------------------ failure at start


@pytest.mark.case("ENV-04")
def test_a_rule_broken_at_the_first_step_ends_the_run_at_once(start):
    pool = start(toy("OldStep"))
    answer(pool, receive(pool))
    with pytest.raises(EnvError, match=r"toy:OldStep, row 0: OldStep.step\(\) returned 4 values"):
        receive(pool)
    with pytest.raises(EnvError, match="returned 4 values"):  # and says the same when asked again
        pool.recv(0.0)
    assert pool.restarts == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_workers": 0}, "env.num_workers = 0"),
        ({"num_groups": 0}, "env.num_groups = 0"),
    ],
)
def test_sizes_that_cannot_work_are_refused(start, settings, match):
    with pytest.raises(ConfigError, match=match):
        start(toy(), **settings)
    with pytest.raises(ConfigError, match="2 tasks cannot be dealt to 1 environments"):
        start(toy(), toy())
    with pytest.raises(ConfigError, match="arguments travel as JSON"):
        start(toy(thing=object()))


def test_more_workers_than_the_machine_can_carry_are_refused_before_one_is_started(start, monkeypatch):
    monkeypatch.setattr(machine, "free_files", lambda: 60)
    monkeypatch.setattr(workers, "WorkerProcess", None)
    with pytest.raises(ConfigError, match=r"env.workers = 7: needs 62 open files"):
        start(toy(), num_workers=7)


def test_observations_that_memory_cannot_hold_are_refused(start, monkeypatch):
    fits = layout.map_layout(start(toy()).spec, 1, 1)[0]
    monkeypatch.setattr(limits.machine, "available_memory", lambda: 64 << 20)
    assert start(toy())._size == fits
    monkeypatch.setattr(workers, "require_workers", lambda *sizes, **settings: None)
    monkeypatch.setattr(limits.machine, "available_memory", lambda: 64)
    with pytest.raises(ConfigError, match="number of environments = 1: rows of observations need"):
        start(toy())


@pytest.mark.case("CLI-07")
def test_a_script_without_a_main_guard_gets_one_message_and_no_fork_bomb(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "from pronghorn.envs.workers import ResolvedEnv, WorkerPool\n"
        "def make():\n    pass\n"
        "env = ResolvedEnv('mine', 'worker', 'call', __file__ + ':make')\n"
        "WorkerPool([env], num_workers=2, envs_per_worker=1, seed=1)\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "if __name__ == '__main__':" in result.stderr


# --------------------------------------------------------------------------------------- death and restart


@pytest.mark.parametrize("how", ["raise", "kill", "exit", "shape"])
@pytest.mark.case("FLT-04")
def test_a_dead_worker_is_lost_once_and_comes_back(start, tmp_path, caplog, how):
    once = str(tmp_path / "failed")
    pool = start(toy("Failing", how=how, at=3, once=once), envs_per_worker=2, num_groups=1)
    seen = play(pool, 6)
    assert [(row, event) for row, event, *_ in seen] == [
        (0, FIRST), (1, FIRST), (0, STEP), (1, STEP), (0, STEP), (1, STEP),  # step 3 of row 0 fails
        (0, LOST), (1, LOST), (0, FIRST), (1, FIRST), (0, STEP), (1, STEP),
    ]  # fmt: skip
    assert seen[-1] == (1, STEP, 10.0, 1.0)
    assert pool.restarts == 1
    message = caplog.messages[0]
    assert "worker 0 (toy:Failing, row 0)" in message
    expected = {"raise": "RuntimeError: the simulator broke at step 3", "kill": "was killed by SIGKILL",
                "exit": "exit code 7", "shape": "has shape (2,); its space declares (1,)"}  # fmt: skip
    assert expected[how] in message


@pytest.mark.parametrize(
    ("how", "words"),
    [("nan", "returned the reward nan; it must be finite"),
     ("obs nan", "leaf 'obs' holds a number that is not finite: [nan]"),
     ("obs inf", "leaf 'obs' holds a number that is not finite: [inf]")],
)  # fmt: skip
@pytest.mark.case("FLT-04", "FLT-12")
def test_numbers_that_are_not_finite_end_a_life_with_leaf_and_rule(start, tmp_path, caplog, how, words):
    """None of them reaches the trainer; the worker comes back, and it is counted."""
    pool = start(toy("Failing", how=how, at=3, once=str(tmp_path / "failed")))
    seen = play(pool, 6)
    assert [event for _, event, *_ in seen] == [FIRST, STEP, STEP, LOST, FIRST, STEP]
    assert np.isfinite([number for _, _, *numbers in seen for number in numbers]).all()
    assert pool.restarts == 1
    assert words in caplog.messages[0]


@pytest.mark.case("FLT-05")
def test_nothing_of_the_broken_episode_is_joined_to_the_next(start, tmp_path):
    pool = start(toy("Failing", how="raise", at=7, once=str(tmp_path / "failed")))
    seen = play(pool, 10)
    assert [event for _, event, *_ in seen] == [FIRST, *[STEP] * 6, LOST, FIRST, STEP]
    assert seen[7][3] == 0.0  # the LOST record carries no reward
    assert seen[8:] == [(0, FIRST, 0.0, 0.0), (0, STEP, 10.0, 1.0)]


@pytest.mark.case("FLT-01")
def test_a_hung_worker_is_killed_with_its_stack_shown(start, tmp_path, caplog):
    hanging = toy("Failing", how="hang", at=2, once=str(tmp_path / "hung"))
    pool = start(hanging, toy(length=0), num_workers=2, step_timeout_s=0.7)
    seen = []
    while not any(event == LOST for _, event in seen):
        seen += [(row, event) for row, event, *_ in play(pool, 1)]
    assert "did not answer within 0.7 s" in caplog.text
    assert "sleep_for_ever" in caplog.text
    assert "toy:Failing, row 0" in caplog.text
    assert [row for row, event in seen if event == LOST] == [0]
    assert seen.count((1, STEP)) > 20  # the other worker went on all the while


@pytest.mark.case("FLT-01")
def test_answers_that_lay_there_while_the_trainer_was_stopped_are_in_time(start):
    pool = start(toy(length=0), num_workers=2, step_timeout_s=0.6)
    play(pool, 4)  # answers all that it receives, so both workers step
    time.sleep(1.3)
    assert {event for _, event, *_ in play(pool, 4)} == {STEP}
    assert pool.restarts == 0


@pytest.mark.case("FLT-01")
def test_a_worker_that_was_stopped_with_the_trainer_has_its_time_afterwards(start):
    pool = start(toy(length=0), step_timeout_s=0.6)
    ready = receive(pool)
    kill_worker(pool, 0, signal.SIGSTOP)
    answer(pool, ready)
    time.sleep(1.3)
    assert pool.recv(0.0) is None
    kill_worker(pool, 0, signal.SIGCONT)
    assert {event for _, event, *_ in play(pool, 4)} == {STEP}
    assert pool.restarts == 0


@pytest.mark.case("FLT-01")
def test_a_stop_inside_the_wait_for_answers_does_not_count(start, monkeypatch):
    pool = start(toy(length=0), step_timeout_s=0.6)
    ready = receive(pool)
    kill_worker(pool, 0, signal.SIGSTOP)
    answer(pool, ready)
    with monkeypatch.context() as patch:
        patch.setattr(pool._selector, "select", lambda timeout: time.sleep(1.3) or [])
        pool._poll(0.0)
    pool._next_check = 0.0
    pool._poll(0.0)
    assert pool.restarts == 0
    kill_worker(pool, 0, signal.SIGCONT)
    assert receive(pool).event.tolist() == [STEP]


def test_a_picture_that_never_comes_is_a_hang(start, tmp_path, caplog):
    (tmp_path / "stuck.py").write_text(
        f"import sys\nsys.path.append({str(Path(TOYS).parent)!r})\nfrom toy_envs import Counter, sleep_for_ever\n"
        "class Stuck(Counter):\n    def render(self):\n        sleep_for_ever()\n"
    )
    pool = start(ResolvedEnv("x", "worker", "call", f"{tmp_path}/stuck.py:Stuck"), step_timeout_s=0.5)
    assert pool.render(0) is None
    assert "did not answer within 0.5 s" in caplog.text


def test_siblings_go_on_while_a_worker_is_replaced(start):
    pool = start(toy(length=0), num_workers=2, envs_per_worker=2, num_groups=2)
    play(pool, 10)
    kill_worker(pool, 0)
    events = {row: [] for row in range(4)}
    values = {row: [] for row in range(4)}
    while FIRST not in events[0] or FIRST not in events[2]:
        for row, event, value, _ in play(pool, 1):
            events[row].append(event)
            values[row].append(value)
    for row in (0, 2):  # worker 0: rows of its two groups
        assert events[row].count(LOST) == 1
        assert events[row].index(LOST) < events[row].index(FIRST)
    for row in (1, 3):
        assert set(events[row]) == {STEP}
        assert values[row] == [values[row][0] + 10 * i for i in range(len(values[row]))]


def test_rows_that_are_being_answered_become_lost_only_afterwards(start):
    pool = start(toy(), envs_per_worker=2, num_groups=2)
    taken = receive(pool)
    rest = [] if len(taken.rows) == 2 else [receive(pool)]
    kill_worker(pool, 0)
    wait_until(lambda: pool.recv(0.05) is None and pool.restarts == 1)  # nothing comes: both rows are unanswered
    for ready in [taken, *rest]:
        answer(pool, ready)  # goes nowhere
    lost = receive(pool)
    assert lost.event.tolist() == [LOST, LOST]
    assert receive(pool).event[0] == FIRST


def test_lost_rows_may_be_left_out_of_the_answer(start):
    pool = start(toy(), num_workers=2, ordered=True)
    answer(pool, receive(pool))
    kill_worker(pool, 1)
    wait_until(lambda: pool._poll(0.05) or pool.restarts == 1)
    ready = receive(pool)
    assert ready.event.tolist() in ([STEP, LOST], [FIRST, LOST])
    answer_rows(pool, [0])
    assert receive(pool).event.tolist() == [STEP, FIRST]


def test_a_restarted_worker_gets_new_derived_seeds(start):
    pool = start(toy("Seeded", length=0))
    play(pool, 2)
    kill_worker(pool, 0)
    first = next(ready for ready in iter(lambda: receive(pool), None) if ready.event[0] == FIRST or answer(pool, ready))
    assert first.obs["obs"][0, 0] == derive_seed(7, 0, 1) % 65536 != derive_seed(7, 0, 0) % 65536


def test_reseeding_after_a_restart_is_as_if_there_had_been_none(start):
    """A run that is resumed starts with fresh workers; the run that was not stopped may have replaced one."""

    def run(restarts):
        pool = start(toy("RandomWalk", length=3), num_workers=2, ordered=True)
        if restarts:
            kill_worker(pool, 1)
            wait_until(lambda: pool._poll(0.05) or pool.restarts == 1)
        pool.reseed(5)
        return [seen for seen in play(pool, 6) if seen[0] == 1 or not restarts]

    assert run(restarts=True) == [seen for seen in run(restarts=False) if seen[0] == 1]


def test_beyond_the_budget_the_workers_own_traceback_is_raised(start):
    pool = start(toy("Failing", how="raise", at=1), restart_budget=2)
    with pytest.raises(
        WorkerDied, match=r"the simulator broke at step 1(.|\n)*budget of 2 restarts within 600 s is used up"
    ):
        play(pool, 20)
    assert pool.restarts == 2
    with pytest.raises(WorkerDied, match="the simulator broke"):
        pool.recv(0.0)


@pytest.mark.case("FLT-04")
def test_a_worker_that_dies_again_waits_for_its_restart_while_others_go_on(start, monkeypatch, caplog):
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 3.0)
    pool = start(toy("Counter", length=0), num_workers=2)
    play(pool, 4)
    for count in (1, 2):
        kill_worker(pool, 0)
        wait_until(lambda count=count: pool._poll(0.05) or pool.restarts == count)
        if count == 1:
            wait_until(lambda: pool._poll(0.05) or pool._units[0].ready)
    assert pool.state()[0] == "worker 0: being replaced"
    assert "restarting it in 3 s: 2 of 10 restarts used" in caplog.text
    events = [(row, event) for row, event, *_ in play(pool, 8)]
    assert (0, LOST) in events
    assert (1, STEP) in events
    pool.reseed(3)  # also while it waits
    wait_until(lambda: pool._poll(0.05) or pool._units[0].ready)
    assert (0, FIRST) in [(row, event) for row, event, *_ in play(pool, 4)]
    assert pool.restarts == 2


@pytest.mark.case("FLT-04")
def test_a_failure_that_only_repeats_itself_ends_the_run_before_the_budget(start):
    pool = start(toy("Failing", how="raise", at=3), restart_budget=10)
    with pytest.raises(WorkerDied, match=r"the simulator broke at step 3(.|\n)*3 times in a row(.|\n)*same step"):
        play(pool, 40)
    assert pool.restarts == 2


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_other_deaths_have_the_whole_budget(start, how):
    pool = start(toy("Failing", how=how, at=1), restart_budget=4)
    with pytest.raises(WorkerDied, match="budget of 4 restarts"):
        play(pool, 40)
    assert pool.restarts == 4


def test_a_failure_after_whole_episodes_has_the_whole_budget(start):
    pool = start(toy("Fragile"), restart_budget=4)
    with pytest.raises(WorkerDied, match=r"fragile on purpose(.|\n)*budget of 4 restarts"):
        play(pool, 400)
    assert pool.restarts == 4


def test_old_deaths_do_not_count(start):
    pool = start(toy("Failing", how="raise", at=1), restart_budget=1, restart_window_s=0.0)
    play(pool, 10)
    assert pool.restarts >= 3


def test_close_twice_leaves_nothing(start):
    pool = start(toy("Failing", how="hang", at=1), num_workers=2)
    answer(pool, receive(pool))  # one worker hangs by now
    pids = [process.popen.pid for process in pool._processes] + [pool._keeper.process.pid]
    directory = pool._directory
    before = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - before < 5
    assert not any(alive(pid) for pid in pids)
    assert not directory.exists()


def test_a_keeper_that_died_is_replaced_soon(start):
    pool = start(toy(length=0))
    keeper = pool._keeper.process
    keeper.kill()
    keeper.wait()

    def replaced():
        play(pool, 1)
        return pool._keeper.process is not keeper and pool._keeper.process.poll() is None

    wait_until(replaced)


def test_a_keeper_that_died_is_replaced(start, caplog):
    pool = start(toy())
    keeper = pool._keeper.process
    keeper.kill()
    keeper.wait()
    play(pool, 1)
    kill_worker(pool, 0)
    play(pool, 2)
    assert "the keeper process ended" in caplog.text
    assert pool._keeper.process.poll() is None


@pytest.mark.case("SHM-02")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of maps here")
def test_maps_and_files_do_not_grow_with_environments_or_keys():
    """One map and one socket a worker, whatever is in it: systems have limits of tens of thousands."""
    script = """
import os, sys
from playing import receive, toy
from pronghorn.envs.workers import WorkerPool

def shared_maps():
    return sum("memfd" in line for line in open("/proc/self/maps"))

def added(envs_per_worker, name):
    before = shared_maps(), len(os.listdir("/proc/self/fd"))
    pool = WorkerPool([toy(name)], num_workers=1, envs_per_worker=envs_per_worker, num_groups=1, seed=7)
    receive(pool)
    after = shared_maps(), len(os.listdir("/proc/self/fd"))
    pool.close()
    return after[0] - before[0], after[1] - before[1]

print(added(2, "Counter"), added(256, "Episodes"))
"""
    # a process of its own: pools of other tests may be freed meanwhile in this one
    paths = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})"
    done = subprocess.run([sys.executable, "-c", paths + script], capture_output=True, text=True, check=True)
    few, many = re.findall(r"\((\d+), (\d+)\)", done.stdout)
    assert few[0] == "1"
    assert few == many
