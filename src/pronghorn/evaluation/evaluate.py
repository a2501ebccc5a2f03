"""Plays episodes with fixed weights for a score with its uncertainty, at once or in the background. It never trains.

Every row plays a fixed share of the episodes, so that short ones are not counted more often than long ones.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pronghorn.config import Config, derive_seed
from pronghorn.defaults import kind_of
from pronghorn.envs.registry import make_pool
from pronghorn.envworker.deathmatch import fills_worker
from pronghorn.evaluation.at_rows import at_rows, random_actions
from pronghorn.evaluation.policy import Policies, Policy, from_weights
from pronghorn.evaluation.scores import bootstrap_iqm, human_normalized, interquartile_mean
from pronghorn.machine import available_cores
from pronghorn.training.checkpoint import write_atomically
from pronghorn.types import EnvSpec, Event, Pool, Ready

ASK_S = 1.0  # between two looks at whether training returns have reached the goal
ABSENT_EPISODES = 5  # of others in its environment, after which a row that did not act in them is not waited for


@dataclass(frozen=True)
class Evaluation:
    """Raw, undiscounted returns of finished episodes and what they say. policy: 'sampled' or 'deterministic'.

    human_normalized: mean return of each task that has published scores, 0 random and 100 human (percent).
    """

    mean: float
    stderr: float
    median: float
    iqm: float
    iqm_ci95: tuple[float, float]
    episodes: int
    returns: list[float]
    checkpoint: str
    policy: str
    episode_length_mean: float
    per_task: dict[str, float]
    human_normalized: dict[str, float]

    def write(self, path: Path, *, checkpoint: str = "") -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        record = asdict(replace(self, checkpoint=checkpoint or self.checkpoint))
        write_atomically(path, json.dumps(record, indent=1).encode())


def evaluate(
    policy: Policy | Policies,
    config: Config,
    *,
    episodes: int,
    seed: int,
    deterministic: bool = False,
    stop: threading.Event | None = None,
    num_envs: int | None = None,
) -> Evaluation | None:
    """Play exactly `episodes` episodes per run in environments of their own; None if `stop` was set before the end.

    seed: of environments and actions. Statistics of normalisers are frozen.
    """
    workers = min(available_cores(), max(1, episodes // 4)) if stop is None else 1
    single_rows = policy.spec.rows_per_env == 1 or config.env.vector_rows
    most = 32 if kind_of(policy.spec) == "vector" and single_rows else 8  # cheap ones are best served many at a time
    per_worker = num_envs or min(most, -(-episodes // workers))
    if any(map(fills_worker, config.env_names)):
        workers, per_worker = min(workers * per_worker, available_cores()), 1
    groups = min(config.env.groups, per_worker)
    env = replace(config.env, workers=workers, envs_per_worker=per_worker, groups=groups, vector_rows=0)
    pool = make_pool(replace(config, env=env), seed=derive_seed(seed, 7), ordered=False, evaluation=True)
    try:
        policy.seed(derive_seed(seed, 8))
        return _play(policy, pool, episodes, deterministic, stop)
    finally:
        pool.close()


@dataclass(frozen=True)
class Finished:
    """An evaluation in the background that ended: the result, and the weights that were evaluated."""

    result: Evaluation
    weights: Sequence[Mapping[str, Tensor]]  # of the policy, or of one for each signature
    version: int
    steps: int
    policy: int = 0


class BackgroundEvaluator:
    """Evaluates snapshots in a thread beside training, one at a time, within its share of wall-clock time.

    It has environments, seeds and a copy of the network of its own, so it cannot change training.
    """

    def __init__(self, config: Config, spec: EnvSpec, stop: threading.Event) -> None:
        self.config, self.spec, self._stop = config, spec, stop
        self._thread: threading.Thread | None = None
        self._finished: Finished | None = None
        self._error: BaseException | None = None
        self._next_s = time.monotonic() + config.eval.every_s

    def due(self, training: Callable[[], Mapping[str, float]]) -> bool:
        """By the schedule, or because training returns suggest that the return to stop at is reached.

        training: statistics of episodes. Asked for only where they matter, and once a second at most: they are means
        over many episodes, made while the other threads wait for the interpreter.
        """
        now, settings = time.monotonic(), self.config.eval
        if self._thread is not None or now < self._next_s:
            return False
        if settings.every_s > 0 or settings.until_return is None:
            return settings.every_s > 0
        self._next_s = now + ASK_S
        found = training()
        return found["episodes"] >= 20 and found["return_mean"] >= settings.until_return

    def start(self, weights: Sequence[Mapping[str, Tensor]], version: int, steps: int, policy: int = 0) -> None:
        """Evaluate these weights, of that policy of a population or of one for each signature of agents.

        They must never be written again.
        """
        self._thread = threading.Thread(
            target=self._run, args=(weights, version, steps, policy), name="evaluation", daemon=True
        )
        self._thread.start()

    def finished(self) -> Finished | None:
        """The evaluation that ended since the last call, once. Raises what went wrong in it."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        if self._error is not None:
            raise self._error
        done, self._finished = self._finished, None
        return done

    @property
    def threads(self) -> list[threading.Thread]:
        """Its thread, if it has one now, which ends soon after `stop` was set."""
        return [] if self._thread is None else [self._thread]

    def _run(self, weights: Sequence[Mapping[str, Tensor]], version: int, steps: int, policy_number: int) -> None:
        start, settings = time.monotonic(), self.config.eval
        try:
            policy = from_weights(self.config, self.spec, weights)
            seed = derive_seed(self.config.seed, 5, version)
            result = evaluate(policy, self.config, episodes=settings.episodes, seed=seed, stop=self._stop)
        except BaseException as error:
            self._error = error
            return
        if result is not None:
            self._finished = Finished(result, weights, version, steps, policy_number)
        spent = time.monotonic() - start
        self._next_s = time.monotonic() + max(settings.every_s, spent / settings.max_share) - spent


def random_return(config: Config, like: Policy | Policies, *, episodes: int, seed: int) -> float:
    """Mean return of uniformly random actions over `episodes` episodes: what a score has to be read against."""
    each = [_Random(one) for one in (like.policies if isinstance(like, Policies) else [like])]
    random = Policies(each, like.spec) if isinstance(like, Policies) else each[0]
    result = evaluate(random, config, episodes=episodes, seed=seed)
    assert result is not None
    return result.mean


class _Random(Policy):
    """Uniform actions with a policy's interface."""

    def __init__(self, like: Policy) -> None:
        super().__init__(like.model, like.config, like.spec)
        self._rng = np.random.default_rng(0)

    def seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def step(self, obs: Any, state: Any, rewards: Any, first: Any, *, deterministic: bool = False) -> Any:
        return *random_actions(self.spec, obs, len(rewards), self._rng), state


def _play(
    policy: Policy | Policies, pool: Pool, episodes: int, deterministic: bool, stop: threading.Event | None
) -> Evaluation | None:
    shares = _Shares(pool, episodes)
    player = at_rows(policy, pool, deterministic)
    done: list[tuple[float, int, int]] = []
    while shares.left.any():
        if stop is not None and stop.is_set():
            return None
        ready = pool.recv(0.1)
        if ready is None:
            continue
        for row, episode_return, length in player.observe(ready):
            if shares.take(row):
                done.append((episode_return, length, int(pool.task_ids[row])))
        shares.pass_on(ready)
        pool.send(*player.answer(ready))
    return _summarise(done, pool.tasks, policy, deterministic)


class _Shares:
    """Episodes that each row has still to play: `left` [rows].

    A row that does not act for long (an agent that its environment never lets appear) would be waited for without end:
    its share goes to the rows of its environment that act.
    """

    def __init__(self, pool: Pool, episodes: int) -> None:
        self.left = quota(pool.task_ids, episodes)
        self._rows_per_env = pool.spec.rows_per_env
        self._ended = np.zeros(pool.num_rows, np.int64)  # episodes of each row, also those beyond its share
        self._seen = np.zeros(pool.num_rows, np.int64)  # `_env_ended` when the row acted last

    def take(self, row: int) -> bool:
        """An episode of the row ended; whether it counts."""
        self._ended[row] += 1
        counts = bool(self.left[row] > 0)
        self.left[row] -= counts
        return counts

    def pass_on(self, ready: Ready) -> None:
        """Note who acts, once the episodes that ended were taken; deal what those owe who have not for long."""
        env_ended = self._env_ended()
        acts = ready.rows[(ready.event != Event.INACTIVE) & (ready.event != Event.LOST)]
        self._seen[acts] = env_ended[acts]
        absent_for = env_ended - self._seen
        for row in np.flatnonzero((absent_for >= ABSENT_EPISODES) & (self.left > 0)).tolist():
            start = row - row % self._rows_per_env
            present = start + np.flatnonzero(absent_for[start : start + self._rows_per_env] == 0)
            for i in range(int(self.left[row])):
                self.left[present[i % len(present)]] += 1
            self.left[row] = 0

    def _env_ended(self) -> NDArray[np.int64]:
        """[rows] the most episodes that a row of the same environment has ended; one that ends its own is present."""
        most: NDArray[np.int64] = self._ended.reshape(-1, self._rows_per_env).max(axis=1).repeat(self._rows_per_env)
        return most


def quota(task_ids: NDArray[np.int64], episodes: int) -> NDArray[np.int64]:
    """Episodes of each row: equally many, and what is left over dealt to the tasks in turn."""
    num_rows = len(task_ids)
    rank = np.zeros(num_rows, np.int64)  # of a row among those of its task
    for task in np.unique(task_ids):
        rank[task_ids == task] = np.arange((task_ids == task).sum())
    in_turn = np.lexsort((task_ids, rank))
    shares = np.full(num_rows, episodes // num_rows)
    shares[in_turn[: episodes % num_rows]] += 1
    return shares


def _summarise(
    done: list[tuple[float, int, int]], tasks: tuple[str, ...], policy: Policy | Policies, deterministic: bool
) -> Evaluation:
    returns = np.array([d[0] for d in done])
    task_ids = np.array([d[2] for d in done])
    means = {task: float(returns[task_ids == i].mean()) for i, task in enumerate(tasks) if (task_ids == i).any()}
    normalized = {task: human_normalized(task, mean) for task, mean in means.items()}
    return Evaluation(
        mean=float(returns.mean()),
        stderr=float(returns.std(ddof=1) / np.sqrt(len(returns))) if len(returns) > 1 else 0.0,
        median=float(np.median(returns)),
        iqm=interquartile_mean(returns),
        iqm_ci95=bootstrap_iqm(returns, task_ids),
        episodes=len(returns),
        returns=returns.tolist(),
        checkpoint=policy.checkpoint,
        policy="deterministic" if deterministic else "sampled",
        episode_length_mean=float(np.mean([d[1] for d in done])),
        per_task=means,
        human_normalized={task: score for task, score in normalized.items() if score is not None},
    )
