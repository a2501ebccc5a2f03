"""One form of observations and actions for agents whose spaces may differ: equal, padded, or with room for each one's
own. It steps nothing.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from .spaces import ACTION_MASK, Actions, ContractBroken, Observations


class JointSpaces:
    """One form of observations and actions for all agents, each of which sees and acts in spaces of its own.

    Without padding these must be equal, but for bounds, of which the widest hold. With it, shorter vectors are padded
    at the end, by 0 or the nearest value within their bounds; a discrete factor has the most choices that an agent has,
    and an action mask, which is added where there is none, forbids those that an agent lacks.

    by_spaces: each agent keeps its own spaces, whatever they are, and `signatures` says who has which. What is the same
    up to padding shares a place, and what is not has one of its own, which means nothing for the other agents.

    observation, action, signatures: the parts of a spec (see `building`). info_mask: masks are read from the infos.
    """

    def __init__(
        self, env: Any, class_name: str, obs_keys: Sequence[str], image_layout: str, *, pad: bool, info_mask: bool,
        by_spaces: bool = False,
    ) -> None:  # fmt: skip
        self._class_name, self._agents, self._info_mask = class_name, list(env.possible_agents), info_mask
        self._spaces = [(env.observation_space(agent), env.action_space(agent)) for agent in self._agents]
        self._actions = [Actions(action) for _, action in self._spaces]
        self._observations = [
            Observations(observation, own.num_choices, obs_keys, image_layout)
            for (observation, _), own in zip(self._spaces, self._actions)
        ]
        self.signatures: List[Dict[str, Any]] = []
        self.observation, self.action = self._join_by_spaces() if by_spaces else self._join(pad)
        sizes = self.action["discrete"]
        if info_mask or self._needs_mask():
            self.observation[ACTION_MASK] = {"shape": [sum(sizes)], "dtype": "uint8", "kind": "mask"}
        starts = np.cumsum([0, *sizes[:-1]])
        # places of each agent's own choices among those of all
        self._places = [
            np.concatenate([np.arange(start, start + n) for start, n in zip(starts, own.discrete)] or [starts[:0]])
            for own in self._actions
        ]
        # of factors that an agent lacks, which it chooses nothing in, a mask allows the first choice
        self._lacking = [starts[len(own.discrete) :] for own in self._actions]
        self._fill = [self._fillings(row) for row in range(len(self._agents))]

    def empty(self) -> Dict[str, Any]:
        """Leaves [k, ...] of zeros."""
        count = len(self._agents)
        return {n: np.zeros((count, *leaf["shape"]), leaf["dtype"]) for n, leaf in self.observation.items()}

    def read(self, row: int, obs: Any, info: Mapping[str, Any]) -> Dict[str, Any]:
        """The leaves of what one agent observes, in the form of all."""
        leaves = dict(self._fill[row])
        for leaf in self._observations[row].leaves:
            if leaf.kind != "mask":
                place = self._place(row, leaf.name)
                leaves[place] = self._padded(leaf, leaf.read(obs), self.observation[place]["shape"])
        if ACTION_MASK in self.observation:
            mask = np.zeros(self.observation[ACTION_MASK]["shape"], np.uint8)
            mask[self._lacking[row]] = 1
            mask[self._places[row]] = self._own_mask(row, obs, info)
            leaves[ACTION_MASK] = mask
        elif ACTION_MASK in info:
            raise ContractBroken(
                "%s: the info of '%s' holds an action mask that is not read. Masks belong into observations, a Dict "
                "with the key '%s'; in games in turns also into all infos of agents on turn, from the first one on"
                % (self._class_name, self._agents[row], ACTION_MASK)
            )
        return leaves

    def native_action(self, row: int, discrete: Any, continuous: Any) -> Any:
        """One agent's action, of its own space. discrete: [D], continuous: [C]."""
        return self._actions[row].unflatten(discrete, continuous)

    def _own_mask(self, row: int, obs: Any, info: Mapping[str, Any]) -> Any:
        """[choices of the agent's own] uint8."""
        for leaf in self._observations[row].leaves:
            if leaf.kind == "mask":
                return leaf.read(obs)
        if not self._info_mask:
            return np.ones(len(self._places[row]), np.uint8)
        mask = np.ravel(np.asarray(info.get(ACTION_MASK, ())))
        if mask.size != len(self._places[row]) or mask.dtype.kind not in "biu":
            raise ContractBroken(
                "%s: info['%s'] of '%s' is %r; since the infos hold masks, each needs one, of %d integers or bools"
                % (self._class_name, ACTION_MASK, self._agents[row], info.get(ACTION_MASK), len(self._places[row]))
            )
        return mask != 0

    def _padded(self, leaf: Any, value: Any, shape: Sequence[int]) -> Any:
        if value.shape == tuple(shape):
            return value
        widths = [(0, full - own) for full, own in zip(shape, value.shape)]
        return np.pad(value, widths, constant_values=_nothing(leaf.extra))

    def _place(self, row: int, name: str) -> str:
        """The leaf of all in which a leaf of one agent lies."""
        own = [signature["leaves"] for signature in self.signatures if row in signature["rows"]]
        place: str = own[0][name] if own else name
        return place

    def _fillings(self, row: int) -> Dict[str, Any]:
        """What stands in the leaves that an agent has nothing in."""
        own = {self._place(row, leaf.name) for leaf in self._observations[row].leaves}
        return {
            name: np.full(leaf["shape"], _nothing(leaf), leaf["dtype"])
            for name, leaf in self.observation.items()
            if name not in own and leaf["kind"] != "mask"
        }

    def _needs_mask(self) -> bool:
        """Whether an agent has a mask, or lacks choices that another one has."""
        has_mask = any(leaf.kind == "mask" for own in self._observations for leaf in own.leaves)
        return has_mask or any(own.discrete != self.action["discrete"] for own in self._actions)

    def _join_by_spaces(self) -> Tuple[Dict[str, Any], Dict[str, Any]]:
        """(observation, action) with room for every agent's; `signatures` stays empty if there is only one."""
        described = [(o.to_json(), a.to_json()) for o, a in zip(self._observations, self._actions)]
        if self._info_mask:
            for observation, action in described:
                observation[ACTION_MASK] = {"shape": [sum(action["discrete"])], "dtype": "uint8", "kind": "mask"}
        signatures = _signatures(described)
        if len(signatures) == 1:
            return signatures[0]["observation"], signatures[0]["action"]
        self.signatures = signatures
        return _room_for_leaves(signatures), _room_for_actions([s["action"] for s in signatures])

    def _join(self, pad: bool) -> Tuple[Dict[str, Any], Dict[str, Any]]:
        """(observation, action) that hold every agent's. Raises ContractBroken that names two that differ."""
        described = [(o.to_json(), a.to_json()) for o, a in zip(self._observations, self._actions)]
        joint = described[0]
        for index, own in enumerate(described):
            observation, action = _joint_leaves(joint[0], own[0], pad), _joint_action(joint[1], own[1], pad)
            if observation is None or action is None:
                raise self._differ(index, described, pad)
            joint = observation, action
        return joint

    def _differ(self, index: int, described: Sequence[Any], padded: bool) -> ContractBroken:
        """What to say of two agents whose spaces differ, and what may be done."""
        first, other = described[0], described[index]
        parts = [
            "the %s are %s and %s" % (name, self._spaces[0][part], self._spaces[index][part])
            for part, name in enumerate(("observations", "actions"))
            if first[part] != other[part]
        ]
        mended = _joint_leaves(first[0], other[0], True), _joint_action(first[1], other[1], True)
        fix = "Pad shorter vectors, and mask actions that an agent lacks: --env.pad-spaces."
        if padded or None in mended:
            fix = "Padding only lengthens vectors and adds choices to factors; make the rest equal in a wrapper."
        fix += " Or give each kind of agents a policy of its own: --env.policies by_spaces."
        return ContractBroken(
            "%s: the spaces of '%s' and '%s' differ: %s. One policy plays all agents, so they must be equal. %s"
            % (self._class_name, self._agents[0], self._agents[index], ", ".join(parts), fix)
        )


def _signatures(described: Sequence[Tuple[Dict[str, Any], Dict[str, Any]]]) -> List[Dict[str, Any]]:
    """Agents by their spaces: {"rows", "observation", "action"} of each distinct pair, in the order of first rows.

    described: (observation, action) of each agent. Those that differ in bounds of observations only are of one pair, in
    which the widest hold, as everywhere.
    """
    found: List[Dict[str, Any]] = []
    for row, (observation, action) in enumerate(described):
        for signature in found:
            joint = _joint_leaves(signature["observation"], observation, False)
            if joint is not None and signature["action"] == action:
                signature["rows"].append(row)
                signature["observation"] = joint
                break
        else:
            found.append({"rows": [row], "observation": observation, "action": action})
    return found


def _room_for_leaves(signatures: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """The leaves that hold every signature's; each gets "leaves": {its own name: the leaf in which it lies}."""
    observation: Dict[str, Any] = {}
    for signature in signatures:
        places: Dict[str, str] = {}
        for name, leaf in signature["observation"].items():
            if leaf["kind"] == "mask":  # made anew, for the choices of all
                places[name] = ACTION_MASK
                continue
            for number in itertools.count():
                place = "%s#%d" % (name, number) if number else name
                joint = _joint_leaf(observation.get(place, leaf), leaf, True)
                if joint is not None and place not in places.values():
                    observation[place], places[name] = joint, place
                    break
        signature["leaves"] = places
    return observation


def _room_for_actions(actions: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """The most factors, choices and continuous dimensions that one has; it has no `tree` (see `_joint_action`)."""
    room: Dict[str, Any] = {}
    for key, most in (("discrete", max), ("low", min), ("high", max)):
        of_each_place = itertools.zip_longest(*(action[key] for action in actions))
        room[key] = [most(value for value in values if value is not None) for values in of_each_place]
    return room


def _nothing(leaf: Mapping[str, Any]) -> float:
    """0, or the nearest value within the bounds of a leaf."""
    nearest: float = min(max(0, leaf.get("low", -math.inf)), leaf.get("high", math.inf))
    return nearest


def _joint_action(one: Dict[str, Any], other: Dict[str, Any], pad: bool) -> Optional[Dict[str, Any]]:
    """The action that holds both, or None. Where they differ it has no `tree`: each agent's own puts it together."""
    if one == other:
        return one
    alike = len(one["discrete"]) == len(other["discrete"]) and all(one[key] == other[key] for key in ("low", "high"))
    if not (pad and alike):
        return None
    sizes: List[int] = [max(pair) for pair in zip(one["discrete"], other["discrete"])]
    return {"discrete": sizes, "low": one["low"], "high": one["high"]}


def _joint_leaves(one: Dict[str, Any], other: Dict[str, Any], pad: bool) -> Optional[Dict[str, Any]]:
    """The leaves that hold both, or None: equal names and kinds, the largest sizes, the widest bounds."""
    joint: Dict[str, Any] = {}
    for name in {**one, **other}:
        if name == ACTION_MASK and pad:
            continue  # made anew, for the choices of all
        a, b = one.get(name), other.get(name)
        leaf = _joint_leaf(a, b, pad) if a is not None and b is not None else None
        if leaf is None:
            return None
        joint[name] = leaf
    return joint


def _joint_leaf(one: Dict[str, Any], other: Dict[str, Any], pad: bool) -> Optional[Dict[str, Any]]:
    lengths_may_differ = pad and one["kind"] == "vector" and len(one["shape"]) == len(other["shape"])
    same = all(one.get(key) == other.get(key) for key in ("kind", "dtype", "layout", "n", "start"))
    if not same or not (lengths_may_differ or one["shape"] == other["shape"]):
        return None
    joint = {key: value for key, value in one.items() if key not in ("low", "high")}
    joint["shape"] = [max(pair) for pair in zip(one["shape"], other["shape"])]
    for key, widest in (("low", min), ("high", max)):
        if key in one and key in other:
            joint[key] = widest(one[key], other[key])
    return joint
