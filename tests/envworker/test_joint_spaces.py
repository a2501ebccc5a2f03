"""Room for agents whose spaces differ in whatever way, with each one's own spaces declared; padding is in
test_parallel.py and test_turns.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

sys.path.insert(0, str(Path(__file__).parents[1]))

from pronghorn.envworker.joint_spaces import JointSpaces
from pronghorn.envworker.many_rows import require_agents
from pronghorn.envworker.spaces import ContractBroken


class Spaces:
    """Only the spaces of agents, in the order of their names."""

    def __init__(self, **pairs: Any) -> None:
        self.pairs, self.possible_agents = pairs, list(pairs)

    def observation_space(self, agent: str) -> Any:
        return self.pairs[agent][0]

    def action_space(self, agent: str) -> Any:
        return self.pairs[agent][1]


def joint(*, info_mask: bool = False, **pairs: Any) -> JointSpaces:
    return JointSpaces(Spaces(**pairs), "Toy", (), "", pad=False, info_mask=info_mask, by_spaces=True)


def box(*shape: int, low: float = -1, high: float = 1, dtype: Any = np.float32) -> Any:
    return spaces.Box(low, high, shape, dtype)


@pytest.mark.case("MAS-13")
def test_each_pair_of_spaces_is_a_signature_of_its_agents():
    both = joint(
        a=(box(4), spaces.Discrete(2)), b=(box(9), spaces.Discrete(6)), c=(box(4), spaces.Discrete(2)),
        d=(box(4), spaces.Discrete(3)),
    )  # fmt: skip
    assert [one["rows"] for one in both.signatures] == [[0, 2], [1], [3]]
    assert [one["observation"]["obs"]["shape"] for one in both.signatures] == [[4], [9], [4]]
    assert [one["action"]["discrete"] for one in both.signatures] == [[2], [6], [3]]
    assert [one["leaves"] for one in both.signatures] == [{"obs": "obs"}] * 3
    assert all("action_mask" not in one["observation"] for one in both.signatures)  # theirs is not added to
    assert both.observation["obs"]["shape"] == [9]
    assert both.action == {"discrete": [6], "low": [], "high": []}


def test_what_padding_cannot_join_has_a_place_of_its_own():
    """An image and a vector of one name; what stands in the place of the other is 0, or nearest to it within bounds."""
    both = joint(
        a=(box(40, 40, 3, low=0, high=255, dtype=np.uint8), spaces.Discrete(2)),
        b=(box(3, low=5, high=9), box(2, low=-3)),
    )
    assert {name: leaf["kind"] for name, leaf in both.observation.items()} == {
        "obs": "image", "obs#1": "vector", "action_mask": "mask",
    }  # fmt: skip
    assert [one["leaves"] for one in both.signatures] == [{"obs": "obs"}, {"obs": "obs#1"}]
    assert both.action == {"discrete": [2], "low": [-3.0, -3.0], "high": [1.0, 1.0]}
    image = np.full((40, 40, 3), 7, np.uint8)
    of_a = both.read(0, image, {})
    assert np.array_equal(of_a["obs"], image)
    assert of_a["obs#1"].tolist() == [5, 5, 5]
    assert of_a["action_mask"].tolist() == [1, 1]
    of_b = both.read(1, np.array([6, 7, 8], np.float32), {})
    assert not of_b["obs"].any()
    assert of_b["obs#1"].tolist() == [6, 7, 8]
    assert of_b["action_mask"].tolist() == [1, 0]  # it has no factor, so nothing of it is chosen
    action, rest = np.array([1]), np.array([0.25, 0.5], np.float32)
    assert both.native_action(0, action, rest) == 1
    assert both.native_action(1, action, rest).tolist() == [0.25, 0.5]


def test_places_of_one_agent_are_never_shared():
    """A name that looks like another's second place is the agent's own all the same."""
    both = joint(
        a=(spaces.Dict({"x": box(40, 40, 3, low=0, high=255, dtype=np.uint8)}), spaces.Discrete(2)),
        b=(spaces.Dict({"x": box(2), "x#1": box(2)}), spaces.Discrete(2)),
    )
    places = both.signatures[1]["leaves"]
    assert len(set(places.values())) == 2
    leaves = both.read(1, {"x": np.array([1, 2], np.float32), "x#1": np.array([3, 4], np.float32)}, {})
    assert [leaves[places[name]].tolist() for name in ("x", "x#1")] == [[1, 2], [3, 4]]


def test_factors_choices_and_masks_stand_in_front():
    """Joint factors have 4 and 3 choices; 'a' lacks the second, and 'b' has a mask of its own."""
    masked = spaces.Dict({"x": box(2), "action_mask": spaces.MultiBinary(5)})
    both = joint(a=(spaces.Dict({"x": box(1)}), spaces.Discrete(4)), b=(masked, spaces.MultiDiscrete([2, 3])))
    assert both.action["discrete"] == [4, 3]
    assert both.read(0, {"x": np.zeros(1)}, {})["action_mask"].tolist() == [1, 1, 1, 1, 1, 0, 0]
    seen = both.read(1, {"x": np.zeros(2), "action_mask": np.array([0, 1, 1, 0, 1], np.int8)}, {})
    assert seen["action_mask"].tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert both.signatures[1]["observation"]["action_mask"] == {"shape": [5], "dtype": "uint8", "kind": "mask"}
    assert both.signatures[1]["leaves"] == {"x": "x", "action_mask": "action_mask"}


def test_masks_in_infos_are_of_each_agents_own_choices():
    both = joint(info_mask=True, a=(box(2), spaces.Discrete(2)), b=(box(3), spaces.Discrete(3)))
    assert [one["observation"]["action_mask"]["shape"] for one in both.signatures] == [[2], [3]]
    info = {"action_mask": np.array([0, 1], np.int8)}
    assert both.read(0, np.zeros(2, np.float32), info)["action_mask"].tolist() == [0, 1, 0]


def test_equal_spaces_are_one_policys_and_bounds_make_no_difference():
    equal = joint(a=(box(2, low=-5), spaces.Discrete(2)), b=(box(2, high=7), spaces.Discrete(2)))
    assert equal.signatures == []
    assert equal.observation["obs"] == {"shape": [2], "dtype": "float32", "kind": "vector", "low": -5.0, "high": 7.0}
    assert equal.action["tree"] == {"kind": "discrete", "at": 0, "start": 0}


@pytest.mark.parametrize(("rows", "agents"), [(([0], [0]), "ab"), (([0],), "ab"), (([0], [1]), "")])
def test_a_flat_environments_own_signatures_must_hold_each_row_once(rows, agents):
    signatures = [{"rows": of_one} for of_one in rows]
    env = SimpleNamespace(spec={"rows_per_env": 2, "agents": list(agents), "signatures": signatures}, games=0)
    with pytest.raises(ContractBroken, match=r"spec\['signatures'\] names the rows"):
        require_agents(env)
    env.spec.update(agents=["a", "b"], signatures=[{"rows": [1]}, {"rows": [0]}])
    require_agents(env)


def test_the_error_of_unlike_spaces_names_both_ways_out():
    env = Spaces(a=(box(4), spaces.Discrete(2)), b=(box(9), spaces.Discrete(6)))
    with pytest.raises(ContractBroken, match=r"'a' and 'b' differ.*--env.pad-spaces. Or .*: --env.policies by_spaces"):
        JointSpaces(env, "Toy", (), "", pad=False, info_mask=False)
    env = Spaces(a=(box(4), spaces.Discrete(2)), b=(box(9), box(2)))
    for pad in (False, True):
        with pytest.raises(ContractBroken, match=r"equal in a wrapper. Or .*: --env.policies by_spaces"):
            JointSpaces(env, "Toy", (), "", pad=pad, info_mask=False)
