"""Plays episodes with fixed weights: for a score with its uncertainty, for a video, or to watch. It never trains.

Every row plays a fixed share of the episodes, so that short ones are not counted more often than long ones.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronghorn.config import Config, derive_seed
from pronghorn.defaults import kind_of
from pronghorn.envs.own_rows import Actions, OwnRows
from pronghorn.envs.registry import make_env, make_pool
from pronghorn.envworker.deathmatch import fills_worker
from pronghorn.errors import EnvError, UsageError
from pronghorn.evaluation.policy import Policies, Policy, from_weights
from pronghorn.machine import available_cores
from pronghorn.training.checkpoint import write_atomically
from pronghorn.types import EnvSpec, Event, Pool, PoolRows, Ready

BOOTSTRAP_RESAMPLES = 2000
ABSENT_EPISODES = 5  # of others in its environment, after which a row that did not act in them is not waited for
VIDEO_SUFFIXES = (".mp4", ".mkv", ".mov")


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

    def due(self, training: Mapping[str, float]) -> bool:
        """By the schedule, or because training returns suggest that the return to stop at is reached."""
        settings = self.config.eval
        if self._thread is not None or time.monotonic() < self._next_s:
            return False
        until = settings.until_return
        looks_solved = until is not None and training["episodes"] >= 20 and training["return_mean"] >= until
        return looks_solved or settings.every_s > 0

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

    def join(self) -> None:
        """Wait for the thread, which ends soon after `stop` was set."""
        if self._thread is not None:
            self._thread.join()

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


def random_actions(
    spec: EnvSpec, obs: Mapping[str, NDArray[Any]], count: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Uniformly random actions of N rows: discrete [N, D], of those that a mask in obs allows; continuous [N, C]."""
    action, masks = spec.action, [name for name, leaf in spec.observation.items() if leaf.kind == "mask"]
    if masks:
        chances = rng.random((count, action.num_logits)) * obs[masks[0]].reshape(count, -1)
        factors = np.split(chances, np.cumsum(action.discrete)[:-1], axis=1)
        discrete = np.stack([factor.argmax(axis=1) for factor in factors], axis=1)
    else:
        sizes = np.array(action.discrete or [1])
        discrete = rng.integers(0, sizes, (count, len(sizes)))[:, : action.num_discrete]
    low, high = np.array(action.low, np.float32), np.array(action.high, np.float32)
    continuous = rng.uniform(np.maximum(low, -1e3), np.minimum(high, 1e3), (count, action.num_continuous))
    return discrete, continuous.astype(np.float32)


class AtRows(ABC):
    """Who plays every row of a pool, and what has to be remembered of each: return and length so far."""

    def __init__(self, pool: PoolRows) -> None:
        self._action = pool.spec.action
        self.returns, self.lengths = np.zeros(pool.num_rows), np.zeros(pool.num_rows, np.int64)

    def observe(self, ready: Ready) -> list[tuple[int, float, int]]:
        """(row, return, length in steps) of the episodes that ended."""
        moved = (ready.event == Event.STEP) | (ready.event == Event.LAST)
        self.returns[ready.rows[moved]] += ready.reward[moved]
        self.lengths[ready.rows[moved]] += 1
        over = ready.rows[moved & ready.episode_over].tolist()
        ended = [(row, float(self.returns[row]), int(self.lengths[row])) for row in over]
        fresh = ready.rows[begins(ready) | (ready.event == Event.LOST)]  # what was lost does not count
        self.returns[fresh], self.lengths[fresh] = 0.0, 0
        return ended

    def answer(self, ready: Ready) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Rows, discrete and continuous actions to send: of all rows but those that were lost."""
        acts = (ready.event != Event.LOST) & (ready.event != Event.INACTIVE)
        discrete = np.zeros((len(ready.rows), self._action.num_discrete), np.int64)
        continuous = np.zeros((len(ready.rows), self._action.num_continuous), np.float32)
        if acts.any():
            discrete[acts], continuous[acts] = self.act(ready, acts)
        answer = ready.event != Event.LOST
        return ready.rows[answer], discrete[answer], continuous[answer]

    @abstractmethod
    def act(self, ready: Ready, acts: NDArray[np.bool_]) -> Actions:
        """Discrete [N, D] and continuous [N, C] actions of the rows that `acts` marks."""


class PolicyAtRows(AtRows):
    """One policy in every row, and what it remembers of each: RNN state and last reward."""

    def __init__(self, policy: Policy, pool: PoolRows, deterministic: bool) -> None:
        super().__init__(pool)
        self._policy, self._deterministic = policy, deterministic
        self._state = policy.initial_state(pool.num_rows)
        self._last_rewards = np.zeros(pool.num_rows, np.float32)

    def act(self, ready: Ready, acts: NDArray[np.bool_]) -> Actions:
        """See `AtRows`; all in one forward pass."""
        rows, state = ready.rows[acts], self._state
        self._last_rewards[rows] = ready.reward[acts]
        index = torch.from_numpy(rows)
        part = type(state)(state.core[index], state.discrete[index], state.continuous[index], state.reward[index])
        discrete, continuous, part = self._policy.step(
            {k: v[acts] for k, v in ready.obs.items()}, part, torch.from_numpy(self._last_rewards[rows]),
            begins(ready)[acts], deterministic=self._deterministic,
        )  # fmt: skip
        with torch.inference_mode():
            for name in ("core", "discrete", "continuous", "reward"):
                getattr(state, name)[index] = getattr(part, name)
        return discrete, continuous


class PoliciesAtRows(AtRows):
    """Each policy in the rows of its signature."""

    def __init__(self, policies: Policies, pool: Pool, deterministic: bool) -> None:
        super().__init__(pool)
        self._parts: list[tuple[OwnRows, PolicyAtRows]] = []
        for number, policy in enumerate(policies.policies):
            own = OwnRows(pool, number)
            self._parts.append((own, PolicyAtRows(policy, own, deterministic)))

    def act(self, ready: Ready, acts: NDArray[np.bool_]) -> Actions:
        """See `AtRows`; a forward pass for each policy that has rows."""
        discrete = np.zeros((len(acts), self._action.num_discrete), np.int64)
        continuous = np.zeros((len(acts), self._action.num_continuous), np.float32)
        for own, player in self._parts:
            where = acts & own.holds(ready.rows)
            if where.any():
                discrete[where], continuous[where] = own.widened(player.act(own.narrowed(ready), where))
        return discrete[acts], continuous[acts]


def at_rows(policy: Policy | Policies, pool: Pool, deterministic: bool) -> AtRows:
    """These policies in the rows of a pool."""
    if isinstance(policy, Policies):
        return PoliciesAtRows(policy, pool, deterministic)
    return PolicyAtRows(policy, pool, deterministic)


def begins(ready: Ready) -> NDArray[np.bool_]:
    """Rows whose observation is the first of an episode."""
    first: NDArray[np.bool_] = (ready.event == Event.FIRST) | ready.episode_over
    return first


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


def interquartile_mean(values: NDArray[np.float64]) -> float:
    """Mean of what is left when a quarter of the values is cut off at each end (rounded down, as scipy's trim_mean)."""
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def bootstrap_iqm(
    values: NDArray[np.float64], strata: NDArray[np.int64] | None = None, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the interquartile mean (Agarwal et al. 2021).

    strata: [n] the task of each value; resampling keeps how many there are of each. None: one task.
    """
    rng = np.random.default_rng(seed)
    strata = np.zeros(len(values), np.int64) if strata is None else strata
    samples = np.concatenate(
        [rng.choice(values[strata == s], (BOOTSTRAP_RESAMPLES, (strata == s).sum())) for s in np.unique(strata)], axis=1
    )
    cut = len(values) // 4
    means = np.sort(samples, axis=1)[:, cut : len(values) - cut].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


@functools.cache
def _human_scores() -> dict[str, tuple[float, float]]:
    """(random, human) by 'benchmark:task', from human_scores.csv: Atari-57 (30 no-op starts) and DMLab-30."""
    with open(Path(__file__).with_name("human_scores.csv"), newline="") as file:
        return {f"{r['benchmark']}:{r['task']}": (float(r["random"]), float(r["human"])) for r in csv.DictReader(file)}


def human_normalized(task: str, score: float) -> float | None:
    """100 (score - random) / (human - random) of an environment's name, in percent; None where no scores are known.

    'atari:MontezumaRevenge' and 'atari:montezuma_revenge' are the same game.
    """
    benchmark, _, name = task.partition(":")
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    found = _human_scores().get(f"{benchmark}:{snake}")
    return None if found is None else 100.0 * (score - found[0]) / (found[1] - found[0])


# ---------------------------------------------------------------- pictures


class Shown(NamedTuple):
    """One picture of play. frame: uint8 RGB [H, W, 3].  episode_return: of the first row so far.  episodes: how many of
    its episodes were over before."""

    frame: NDArray[np.uint8]
    episode_return: float
    episodes: int


def play_frames(
    policy: Policy | Policies, config: Config, *, seed: int, deterministic: bool
) -> Generator[Shown, None, None]:
    """Pictures of play without end: one a step, and before it one of how an episode ended that was over in this step.

    Close it, to end its environment. Raises EnvError if nothing renders.
    """
    env = make_env(config, seed=seed, render=True)
    try:
        policy.seed(seed)
        player, episodes = at_rows(policy, env.pool, deterministic), 0
        while True:
            ready = env.receive()
            ended = {row: total for row, total, _ in player.observe(ready)}
            ending = env.render_ending()
            if ending is not None:
                yield Shown(_as_image(ending), ended.get(0, float(player.returns[0])), episodes)
            episodes += 0 in ended
            frame = env.render()
            if frame is None:
                raise EnvError(f"{policy.spec.name} renders no frames: its render() gives None. Nothing was recorded.")
            yield Shown(_as_image(frame), float(player.returns[0]), episodes)
            env.pool.send(*player.answer(ready))
    finally:
        env.close()


def _as_image(frame: NDArray[Any]) -> NDArray[np.uint8]:
    """uint8 RGB with even sides, as video codecs want; small frames are enlarged by whole factors."""
    if frame.dtype.kind == "f":
        frame = np.clip(frame * (255.0 if frame.max(initial=0.0) <= 1.0 else 1.0), 0, 255)
    image = np.atleast_3d(frame.astype(np.uint8))
    image = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image[:, :, :3]
    factor = max(1, 320 // max(image.shape[:2]))
    image = image.repeat(factor, 0).repeat(factor, 1)
    return np.ascontiguousarray(np.pad(image, ((0, image.shape[0] % 2), (0, image.shape[1] % 2), (0, 0)), mode="edge"))


def record(
    policy: Policy | Policies, config: Config, out: Path, *, seconds: float = 20.0, seed: int = 0,
    deterministic: bool = False,
) -> int:  # fmt: skip
    """Write an mp4 of the policy playing (no display needed). Returns the number of frames; at least 1.

    Raises UsageError for a length without a frame, EnvError if the environment renders nothing.
    """
    import imageio.v2 as imageio  # type: ignore[import-untyped,unused-ignore]

    fps = max(1.0, policy.spec.render_fps)
    max_frames = round(seconds * fps)
    if max_frames < 1:
        raise UsageError(f"--seconds {seconds}: a video needs at least one frame ({1 / fps:.3g} s).")
    if out.suffix not in VIDEO_SUFFIXES:
        raise UsageError(f"--out {out}: must end in {', '.join(VIDEO_SUFFIXES)}. Try {out.with_suffix('.mp4')}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(".partial-" + out.name)
    count = 0
    try:
        writer: Any = imageio.get_writer(partial, fps=fps, macro_block_size=1, format="FFMPEG")
        with writer, closing(play_frames(policy, config, seed=seed, deterministic=deterministic)) as play:
            for shown in islice(play, max_frames):
                writer.append_data(shown.frame)
                count += 1
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return count


def watch(
    policy: Policy | Policies, config: Config, *, seed: int = 0, deterministic: bool = False, episodes: int = 3
) -> None:
    """Show the policy playing in the terminal, in colour blocks, at the environment's own speed."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with (
        Live(console=console, refresh_per_second=20, screen=console.is_terminal) as live,
        closing(play_frames(policy, config, seed=seed, deterministic=deterministic)) as play,
    ):
        for shown in takewhile(lambda shown: shown.episodes < episodes, play):
            picture = _half_blocks(shown.frame, console.width, console.height - 2)
            live.update(Text.assemble(picture, f"\nreturn {shown.episode_return:.3g}   Ctrl-C ends"))
            time.sleep(1.0 / max(1.0, policy.spec.render_fps))


def _half_blocks(frame: NDArray[np.uint8], width: int, height: int) -> Any:
    """Two pixels a character: the upper half block in one colour on the other."""
    from rich.text import Text

    scale = max(frame.shape[1] / width, frame.shape[0] / (2 * height))
    rows = (np.arange(0, frame.shape[0], scale)).astype(int)[: 2 * height // 2 * 2]
    small = frame[rows][:, (np.arange(0, frame.shape[1], scale)).astype(int)[:width]]
    text = Text()
    for top, bottom in zip(small[0::2], small[1::2], strict=False):
        for a, b in zip(top, bottom, strict=True):
            text.append("▀", f"rgb({a[0]},{a[1]},{a[2]}) on rgb({b[0]},{b[1]},{b[2]})")
        text.append("\n")
    return text
