"""Toy environments that name themselves: an observation is 10 * step, a reward is the step. Worker-side syntax."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
from gymnasium import Env, spaces


class Counter(Env[Any, Any]):
    """Observation [10 * step + offset]; reward = step; ends after `length` steps (0: never)."""

    def __init__(self, length: int = 5, truncate: bool = False, offset: float = 0.0) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.length, self.truncate, self.offset, self.count = length, truncate, offset, 0
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seeds.append(seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        over = 0 < self.length <= self.count
        flags = over and not self.truncate, over and self.truncate
        return self._observe(), float(self.count), *flags, {"count": self.count}

    def _observe(self) -> Any:
        return np.array([10 * self.count + self.offset], np.float32)


class Echo(Env[Any, Any]):
    """Observes the action that it got, the one buffer being rewritten in place."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 100, (1,), np.int32)
        self.action_space = spaces.Discrete(100)
        self.buffer = np.zeros(1, np.int32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.buffer[:] = -1
        return self.buffer, {}

    def step(self, action: Any) -> Any:
        self.buffer[:] = action
        return self.buffer, 0.0, False, False, {}


class Ledger(Env[Any, Any]):
    """Observes [episode, step, the action that it got last], and takes a random little time for each step and reset."""

    def __init__(self, length: int = 5, sleep_ms: float = 2.0) -> None:
        self.observation_space = spaces.Box(-1, 1e6, (3,), np.float64)
        self.action_space = spaces.Discrete(1000)
        self.length, self.sleep_ms = length, sleep_ms
        self.episode, self.count = -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.count = self.episode + 1, 0
        return self._observe(-1), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self._observe(action), float(self.count), False, self.count == self.length, {}

    def _observe(self, action: Any) -> Any:
        time.sleep(float(np.random.default_rng().exponential(self.sleep_ms / 1000.0)))
        return np.array([self.episode, self.count, action], np.float64)


class Seeded(Counter):
    """Shows the seed of its latest reset (-1 for none) and the number of its resets."""

    def __init__(self, length: int = 2) -> None:
        super().__init__(length)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def _observe(self) -> Any:
        seed = self.seeds[-1]
        return np.array([-1 if seed is None else seed % 65536, len(self.seeds)], np.float64)


class RandomWalk(Counter):
    """Observations and rewards drawn from the seeded generator, moved by the action."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        Env.reset(self, seed=seed)
        self.count, self.position = 0, self.np_random.normal()
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.position += float(action) - 1 + self.np_random.normal()
        return super().step(action)

    def _observe(self) -> Any:
        return np.array([self.position], np.float32)


class Failing(Counter):
    """From step `at` of an episode on: 'raise', 'hang', 'kill' (SIGKILL itself), 'exit', 'shape', 'obs nan', 'obs inf'
    or 'nan' (the reward).

    once: a file that is made before the first failure; while it exists nothing fails.
    """

    def __init__(self, how: str = "raise", at: int = 3, once: str = "", length: int = 0) -> None:
        super().__init__(length)
        self.how, self.at, self.once = how, at, once

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if self.count < self.at or (self.once and os.path.exists(self.once)):
            return result
        if self.once:
            open(self.once, "w").close()
        if self.how == "raise":
            raise RuntimeError(f"the simulator broke at step {self.count}")
        if self.how == "hang":
            sleep_for_ever()
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            sys.exit(7)
        if self.how == "shape":
            return (np.zeros(2, np.float32), *result[1:])
        if self.how.startswith("obs "):
            return (np.full(1, float(self.how[4:]), np.float32), *result[1:])
        return (result[0], float("nan"), *result[2:])


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


class WithChild(Counter):
    """Starts a child process that outlives a killed parent, as game engines do; writes both pids into a file."""

    def __init__(self, pid_file: str) -> None:
        super().__init__(0)
        self.child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        with open(pid_file, "a") as file:
            file.write(f"{os.getpid()} {self.child.pid}\n")

    def close(self) -> None:
        self.child.kill()
        self.child.wait()


class Facts(Counter):
    """Observes its process: torch imported? cores, own directory? GPUs hidden? threads, minor version of Python."""

    def __init__(self) -> None:
        super().__init__(0)
        self.observation_space = spaces.Box(-np.inf, np.inf, (6,), np.float32)

    def _observe(self) -> Any:
        facts = (
            "torch" in sys.modules,
            len(os.sched_getaffinity(0)),
            "pronghorn-" in os.getcwd(),
            os.environ["CUDA_VISIBLE_DEVICES"] == "",
            int(os.environ["OMP_NUM_THREADS"]),
            sys.version_info[1],
        )
        return np.array(facts, np.float32)


class Arithmetic(Counter):
    """Multiplies matrices by NumPy and torch; observes torch's threads and all threads of its process.

    threads: what it tells torch itself; 0: nothing.
    """

    def __init__(self, threads: int = 0) -> None:
        super().__init__(0)
        import torch

        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.torch = torch
        if threads:
            torch.set_num_threads(threads)

    def _observe(self) -> Any:
        matrix = np.ones((512, 512), np.float32)
        self.torch.from_numpy(matrix @ matrix) @ self.torch.from_numpy(matrix)
        return np.array([self.torch.get_num_threads(), len(os.listdir("/proc/self/task"))], np.float32)


class OldApi:
    """The Gym interface before 0.26: reset gives the observation only, step four values."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self) -> Any:
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, {}


class OldStep(OldApi):
    """A new reset, but a step of four values."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        return np.zeros(2, np.float32), {}

    def close(self) -> None:
        pass


class Unbuildable(Counter):
    """Fails while it is built, for a reason of its own."""

    def __init__(self) -> None:
        raise RuntimeError("no licence found")


class LifeLoss:
    """A flat environment with two lives: [10 * step]; step 2 loses a life, step 4 ends the episode."""

    def __init__(self) -> None:
        leaf = {"shape": [1], "dtype": "float32", "kind": "vector"}
        self.spec = {
            "observation": {"obs": leaf},
            "action": {"discrete": [2], "low": [], "high": []},
            "frame_skip": 4,
            "info": ["lives"],
            "name": "LifeLoss",
        }
        self.count = self.bonus = 0

    def reset(self, seed: int | None = None) -> Any:
        self.count = 0
        return self._observe()

    def step(self, discrete: Any, continuous: Any) -> Any:
        self.count += 1
        over = self.count == 4
        return self._observe(), 1.0 + self.bonus, self.count in (2, 4), False, over, {"lives": 2 - self.count // 2}

    def set_option(self, name: str, value: Any) -> None:
        assert name == "bonus"
        self.bonus = value

    def stats(self) -> dict[str, float]:
        return {"steps_alive": float(self.count)}

    def render(self) -> Any:
        return np.full((4, 6, 3), self.count, np.uint8)

    def close(self) -> None:
        pass

    def _observe(self) -> Any:
        return {"obs": np.array([10 * self.count], np.float32)}


class Fragile(Counter):
    """Raises at its 40th step, every time it is built."""

    def step(self, action: Any) -> Any:
        self.total = getattr(self, "total", 0) + 1
        if self.total > 40:
            raise RuntimeError("fragile on purpose")
        return super().step(action)


class Episodes(Env[Any, Any]):
    """Observes row, episode, step and last action; episode n ends after 1 + (n + row) % 4 steps, by the end, by a limit
    or by both in turn; the reward says what was done where. With a length, every reward is 1."""

    def __init__(self, row: int = 0, length: int = 0) -> None:
        self.observation_space = spaces.Dict({"where": spaces.Box(-1, 999, (3,), np.int64), "did": spaces.Discrete(3)})
        self.action_space = spaces.Discrete(3)
        self.row, self.length, self.episode, self.count = row, length, -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.count = self.episode + 1, 0
        return self._observe(0), {"level": 0.5}

    def step(self, action: Any) -> Any:
        self.count += 1
        over = self.count == (self.length or 1 + (self.episode + self.row) % 4)
        kind = self.episode % 3
        reward = 1.0 if self.length else 100.0 * self.episode + 10.0 * self.count + action
        info = {"level": float(self.count)}
        return self._observe(int(action)), reward, over and kind != 1, over and kind != 0, info

    def _observe(self, action: int) -> Any:
        return {"where": np.array([self.row, self.episode, self.count]), "did": np.int64(action)}


def vector_episodes(mode: str, count: int = 3, length: int = 0) -> Any:
    """`count` of them as one vector environment of the given auto-reset mode."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    class Differently(SyncVectorEnv):
        """Final observations and infos as before Gymnasium 1.0, or final observations as a dictionary of arrays."""

        def step(self, actions: Any) -> Any:
            *rest, infos = super().step(actions)
            if "final_obs" in infos:
                final = infos.pop("final_obs")
                if mode == "OldName":
                    infos["final_observation"] = final
                    levels = infos.pop("final_info")["level"]
                    infos["final_info"] = [
                        None if obs is None else {"level": level} for obs, level in zip(final, levels, strict=True)
                    ]
                else:
                    ended = next(obs for obs in final if obs is not None)
                    infos["final_obs"] = {
                        key: np.stack([np.zeros_like(value) if obs is None else obs[key] for obs in final])
                        for key, value in ended.items()
                    }
            return (*rest, infos)

    makers = [lambda row=row: Episodes(row, length) for row in range(count)]
    if mode in ("OldName", "Arrays"):
        return Differently(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode("NextStep" if mode == "Unsaid" else mode))
    if mode == "Unsaid":  # as Gymnasium 1.0
        env.metadata = {k: v for k, v in env.metadata.items() if k != "autoreset_mode"}
    return env


def one_row() -> Any:
    """A vector environment of a single row."""
    from gymnasium.vector import SyncVectorEnv

    return SyncVectorEnv([Counter])


def vector_cart_poles(render_mode: str | None = None) -> Any:
    from gymnasium import make_vec

    return make_vec("CartPole-v1", 2, vectorization_mode="sync", render_mode=render_mode)


class Turns(Counter):
    """Two factors with a mask; from step `until` on it allows nothing in the second one. Episodes of 5 steps."""

    def __init__(self, until: int = 99, truncate: bool = False) -> None:
        super().__init__(length=5, truncate=truncate)
        self.until = until
        mask = spaces.MultiBinary(5)
        self.observation_space = spaces.Dict({"action_mask": mask, "x": spaces.Box(-1, 99, (1,), np.float32)})
        self.action_space = spaces.MultiDiscrete([2, 3])

    def _observe(self) -> Any:
        some = int(self.count < self.until)
        return {"action_mask": np.array([1, 0, 0, some, 0], np.int8), "x": np.array([self.count], np.float32)}


def vector_turns(until: int) -> Any:
    """Turns as rows that end in the next step: the mask of a row that waits for its reset does not matter."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    return SyncVectorEnv([lambda: Turns(until)] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)


class Hosted(Counter):
    """Holds a UDP port, as the host of a multiplayer game does; the first `clashes` that it is given are in use."""

    def __init__(self, port: int, clashes: int = 0) -> None:
        import socket

        super().__init__(length=5)
        names = Hosted.__dict__.get("given", [])
        Hosted.given = [*names, port]  # type: ignore[attr-defined]
        self.other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if len(Hosted.given) <= clashes:  # type: ignore[attr-defined]
            self.other.bind(("", port))
        self.port = port
        self.own.bind(("", port))

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"port": self.port}

    def close(self) -> None:
        self.own.close()
        self.other.close()


class Squad:
    """Three agents of one PettingZoo parallel environment, by a script: 'b' ends after 2 of 5 steps (and returns after
    4, if `returns`), 'c' is only there in even episodes. Observes episode and step, 'b' two more; reward = step.
    """

    def __init__(self, returns: bool = False, masks: bool = False) -> None:
        self.metadata = {"render_modes": [], "name": "squad"}
        self.possible_agents = ["a", "b", "c"]
        self.returns, self.masks, self.agents = returns, masks, list(self.possible_agents)
        self.episode, self.count = -1, 0

    def observation_space(self, agent: str) -> Any:
        box = spaces.Box(2 if agent == "a" else -1, 99, (4 if agent == "b" else 2,), np.float32)
        return spaces.Dict({"x": box, "action_mask": spaces.MultiBinary(3)}) if self.masks else spaces.Dict({"x": box})

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.count = self.episode + 1, 0
        self.agents = ["a", "b", "c"] if self.episode % 2 == 0 else ["a", "b"]
        return {agent: self._observe(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert sorted(actions) == sorted(self.agents), (actions, self.agents)
        self.count += 1
        played = list(self.agents)
        over = {agent: self.count == 5 or (agent == "b" and self.count == 2) for agent in played}
        limit = {agent: over[agent] and agent == "a" for agent in played}
        rewards = {agent: float(self.count) for agent in played}
        self.agents = [agent for agent in played if not over[agent]]
        if self.returns and self.count == 4:
            self.agents.append("b")
        obs = {agent: self._observe(agent) for agent in {*played, *self.agents}}
        ends = {agent: over[agent] and not limit[agent] for agent in played}
        return obs, rewards, ends, limit, {agent: {"hits": 2 * self.count, "who": agent} for agent in played}

    def _observe(self, agent: str) -> Any:
        x = np.array([10 + self.episode, 10 + self.count, 7, 8][: 4 if agent == "b" else 2], np.float32)
        return {"x": x, "action_mask": np.array([1, 0, 1], np.int8)} if self.masks else {"x": x}

    def close(self) -> None: ...


class Absent(Squad):
    """'b' never appears, and 'c' only in the first episode, whose end it therefore never gets told."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed, options)
        self.agents = ["a", "c"] if self.episode == 0 else ["a"]
        return {agent: self._observe(agent) for agent in self.agents}, {}


class Stays(Squad):
    """Keeps agents that have ended in `agents`, against PettingZoo's contract: all, or only those of the last step."""

    def __init__(self, at_the_end_only: bool = False) -> None:
        super().__init__()
        self.at_the_end_only = at_the_end_only

    def step(self, actions: dict[str, Any]) -> Any:
        before = list(self.agents)
        result = super().step(actions)
        if not self.at_the_end_only or not self.agents:
            self.agents = before
        return result


class UnequalActions(Squad):
    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4 if agent == "b" else 3)


class UnequalKinds(Squad):
    def observation_space(self, agent: str) -> Any:
        return spaces.Discrete(4) if agent == "b" else spaces.Box(0, 1, (1,), np.float32)


class Away:
    """Three agents that act at once for 9 steps and get 1 each; 'b' ends with step 2, is away at steps 3 to 6 and back
    at 7. While it is away it is padded in everything that `step` returns. Observes [episode, step, own number]."""

    def __init__(self, padding: float = 0.0) -> None:
        self.possible_agents, self.padding, self.episode, self.count = ["a", "b", "c"], padding, -1, 0
        self.agents = list(self.possible_agents)

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1, 9999, (3,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None) -> Any:
        self.episode, self.count, self.agents = self.episode + 1, 0, list(self.possible_agents)
        return self._observe(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.count += 1
        away = [agent for agent in self.possible_agents if agent not in actions]
        rewards = {agent: self.padding if agent in away else 1.0 for agent in self.possible_agents}
        ends = {agent: agent in away or self.count == 9 for agent in self.possible_agents}
        ends["b"] = ends["b"] or self.count == 2
        if self.count == 6:
            self.agents = list(self.possible_agents)
        else:
            self.agents = [agent for agent in self.agents if not ends[agent]]
        infos = {agent: {"hits": self.padding if agent in away else 1.0} for agent in self.possible_agents}
        return self._observe(), rewards, ends, dict.fromkeys(ends, False), infos

    def _observe(self) -> Any:
        here = {agent: [self.episode, self.count, n] for n, agent in enumerate("abc") if agent in self.agents}
        return {agent: np.array(here.get(agent, [0, 0, 0]), np.float32) for agent in "abc"}


class Alone:
    """A game of several agents that is played by one: observes 10 times the step."""

    possible_agents = ("a",)

    def __init__(self) -> None:
        self.agents, self.count = ["a"], 0

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1, 9999, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None) -> Any:
        self.agents, self.count = ["a"], 0
        return {"a": np.zeros(1, np.float32)}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.count += 1
        return {"a": np.array([10 * self.count], np.float32)}, {"a": 1.0}, {"a": False}, {"a": False}, {}


class Duo:
    """A flat environment of two agents in games of 3 steps: each observes [game, step] and gets `pay` a step.

    `pay` can be set while it runs, to 0 or more. named: whether its spec names the agents. counts: whether it has the
    attribute `games` that this asks for.
    """

    def __init__(self, named: bool = True, counts: bool = True) -> None:
        self.spec = {
            "observation": {"obs": {"shape": [2], "dtype": "float32", "kind": "vector"}},
            "action": {"discrete": [2], "low": [], "high": []},
            "rows_per_env": 2,
            "name": "Duo",
            "agents": ["left", "right"] if named else [],
            "rewards": {"pay": 1.0},
        }
        self.games = self.count = 0
        self.pay = 1.0
        if not counts:
            del self.games

    def reset(self, seed: int | None = None) -> Any:
        from pronghorn.envworker.many_rows import VectorStep

        self.games, self.count = self.games + 1, 0
        return VectorStep.first(self._observe(), 2)

    def step(self, discrete: Any, continuous: Any) -> Any:
        from pronghorn.envworker.many_rows import VectorStep

        self.count += 1
        over = self.count == 3
        if over:
            self.games, self.count = self.games + 1, 0
        return VectorStep(self._observe(), [self.pay] * 2, [over] * 2, [False] * 2)

    def set_option(self, name: str, value: Any) -> None:
        if name != "rewards" or value["pay"] < 0:
            raise ValueError(f"Duo takes no {name} = {value}")
        self.pay = value["pay"]

    def render(self) -> Any:
        return None

    def close(self) -> None: ...

    def _observe(self) -> Any:
        return {"obs": np.array([[self.games, self.count]] * 2, np.float32)}


class OnRank1(Counter):
    """Like its base, but where RANK is 1 its 50th step does what `does` says: raises, gives so large a reward that no
    loss of it is finite, or (the first of its process) waits 20 s. burst: such rewards in steps 200 to 250.
    """

    has_waited = False

    def __init__(self, does: str = "overflow") -> None:
        super().__init__(length=8)
        self.does, self.total = does if os.environ.get("RANK") == "1" else "", 0

    def step(self, action: Any) -> Any:
        self.total += 1
        observation, reward, *rest = super().step(action)
        if self.total == 50 and self.does == "wait" and not OnRank1.has_waited:
            OnRank1.has_waited = True
            time.sleep(20.0)
        if self.total >= 50 and self.does == "raise":
            raise RuntimeError("the environment of rank 1 broke")
        if self.does == "burst" and 200 <= self.total <= 250:
            reward = 3e38
        return (observation, 3e38 if self.total == 50 and self.does == "overflow" else reward, *rest)
