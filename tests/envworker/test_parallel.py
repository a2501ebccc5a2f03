from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pronghorn.envworker.building import make
from pronghorn.envworker.many_rows import FIRST, INACTIVE, LAST, STEPPED
from pronghorn.envworker.spaces import ContractBroken

TOYS = str(Path(__file__).parents[1] / "toy_envs.py")


def squad(**options):
    return make("call", f"{TOYS}:Squad", {}, {"pad_spaces": True, **options})


def test_info_of_an_agents_last_step_comes_with_its_last_record():
    """'b' ends at step 2 and waits until the others have ended at step 5; the toy's info is twice the step."""
    env = squad(info=["hits"])
    assert env.reset(0).event.tolist() == [FIRST] * 3
    steps = [env.step(np.zeros((3, 1), np.int64), np.zeros((3, 0), np.float32)) for _ in range(5)]
    assert [step.event[1] for step in steps] == [STEPPED, INACTIVE, INACTIVE, INACTIVE, LAST]
    assert [step.info["hits"][0] for step in steps] == [2, 4, 6, 8, 10]
    np.testing.assert_array_equal([step.info["hits"][1] for step in steps], [2, np.nan, np.nan, np.nan, 4])
    assert [step.stats for step in steps[:4]] == [{}] * 4
    # 'c' is not in the next episode: its record waits for the one after that
    assert steps[4].stats == {0: {"hits": 10.0}, 1: {"hits": 4.0}}


def test_an_agent_that_plays_on_without_an_observation_is_an_error():
    env = squad()
    env.reset(0)
    raw = env.env
    step = raw.step
    raw.step = lambda actions: ({}, *step(actions)[1:])
    with pytest.raises(ContractBroken, match=r"Squad.step\(\) returned no observation of 'a'"):
        env.step(np.zeros((3, 1), np.int64), np.zeros((3, 0), np.float32))


NOTHING = np.zeros((3, 1), np.int64), np.zeros((3, 0), np.float32)


def test_an_agent_that_ended_and_stays_in_the_list_is_an_error():
    env = make("call", f"{TOYS}:Stays", {}, {"pad_spaces": True})
    env.reset(0)
    env.step(*NOTHING)
    with pytest.raises(ContractBroken, match=r"Stays.step\(\) ended 'b' and left it in `agents`.* self.agents = \["):
        env.step(*NOTHING)


def test_an_environment_whose_agents_all_ended_is_reset_even_if_they_stay_in_the_list():
    """As PettingZoo's Atari games do at their limit of cycles."""
    stays, leaves = make("call", f"{TOYS}:Stays", {"at_the_end_only": True}, {"pad_spaces": True}), squad()
    for env in (stays, leaves):
        env.reset(0)
    for _ in range(12):
        one, other = stays.step(*NOTHING), leaves.step(*NOTHING)
        np.testing.assert_array_equal(one.event, other.event)
        np.testing.assert_array_equal(one.obs["x"], other.obs["x"])
    assert stays.env.episode == 2


@pytest.mark.filterwarnings("ignore:.*(API has been deprecated|unmaintained)")
@pytest.mark.parametrize("game", ["classic.rps_v2", "butterfly.knights_archers_zombies_v11", "sisl.pursuit_v5"])
def test_pettingzoos_own_games_take_agents_that_end_out_of_the_list(game):
    pytest.importorskip("pettingzoo")
    try:
        env = make("pettingzoo", game, {"max_cycles": 20}, {})
    except ContractBroken as error:
        pytest.skip(str(error))
    env.reset(1)
    ended = 0
    for _ in range(45):
        spec = env.spec["action"]
        discrete = np.zeros((env.count, len(spec["discrete"])), np.int64)
        ended += int(env.step(discrete, np.zeros((env.count, len(spec["low"])), np.float32)).episode_over.sum())
    env.close()
    assert ended >= 2 * env.count


