"""One stage of training alone, done over and over in processes of its own: copies, on a CPU one a core.

A stage is a generator of the steps that it did, made of training's own parts. `measure` starts the copies, waits until
all are warm, and measures all of them over the same time. What the numbers mean together is said in ceilings.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronghorn.config import Config, replace
from pronghorn.envs.registry import make_pool
from pronghorn.errors import EnvError, PronghornError
from pronghorn.evaluation.at_rows import random_actions
from pronghorn.evaluation.policy import build_model, make_actor
from pronghorn.machine import keep_memory_mapped, limit_threads, pick_device
from pronghorn.models.actor_critic import ActorCritic, ModelOutput
from pronghorn.ops.distributions import num_params
from pronghorn.settings_file import from_toml
from pronghorn.spec_file import load_spec
from pronghorn.training.acting import EagerActing, Snapshot, make_acting
from pronghorn.training.learner import Learner
from pronghorn.training.metrics import EpisodeTracker
from pronghorn.training.player import Player, Publisher
from pronghorn.training.sampler import Sampler
from pronghorn.training.store import make_replay, make_store, stored_leaves
from pronghorn.training.trainer import train
from pronghorn.types import EnvSpec, Event, LeafSpec, Pool, Ready

WARM_UP_SHARE = 0.25  # of the time measured that goes before it
END_S = 20.0  # that copies may take to end before they are killed


# ---------------------------------------------------------------- the stages, each a generator of steps done


def simulate(config: Config, spec: EnvSpec) -> Generator[int]:
    """One worker with as many environments as training gives it, under random actions."""
    num_envs = max(config.env.envs_per_worker, len(config.env_names))
    one_worker = replace(config, {"env.workers": 1, "env.envs_per_worker": num_envs})
    rng = np.random.default_rng(config.seed)
    with contextlib.closing(make_pool(one_worker, seed=config.seed, ordered=config.deterministic)) as pool:
        while True:
            ready = pool.recv(1.0)
            if ready is None:
                yield 0
                continue
            pool.send(ready.rows, *random_actions(spec, ready.obs, len(ready.rows), rng))
            yield int(((ready.event == Event.STEP) | (ready.event == Event.LAST)).sum())


def act(config: Config, spec: EnvSpec) -> Generator[int]:
    """The network's forward pass and the sampling of actions, for the rows of one group of all workers.

    On a GPU with the way there and back: observations up, actions down.
    """
    pool = MadeUpPool(spec, acting_rows(config, spec))
    _, player = _sampler(config, pool, make_actor(config, spec, pick_device(config.device)))
    leaves = stored_leaves(spec, config.model)
    acting, obs = player.acting, {name: pool.make_up(leaf) for name, leaf in leaves.items()}
    rows, first = np.arange(pool.num_rows), np.zeros(pool.num_rows, np.bool_)
    tensors = {name: torch.from_numpy(leaf) for name, leaf in obs.items()}
    while True:
        if isinstance(acting, EagerActing):
            acting.infer(tensors, torch.from_numpy(rows), torch.from_numpy(first))
        else:
            acting.act(obs, rows, first, rows)
        yield pool.num_rows


def learn(config: Config, spec: EnvSpec) -> Generator[int]:
    """One batch gathered from the store and trained on, again and again."""
    # The weights stand still, so that the numbers stay finite however often the batch is trained on.
    config = replace(config, {"learner.lr": 1e-12, "learner.lr_schedule": "constant"})
    device = pick_device(config.device)
    pool = MadeUpPool(spec, config.num_envs * spec.rows_per_env)
    sampler, player = _sampler(config, pool, make_actor(config, spec, device))
    store, learner = player.store, Learner(config, build_model(config.model, spec).to(device))
    replay = make_replay(config, config.seed)
    if store.turns:
        store.grant()
    while (slots := store.take(0, 0.0)) is None:
        sampler.step()
    while True:
        batch = store.gather(slots, 0)
        batch = replay.mix(batch, 0) if replay else batch
        learner.iterate(batch)
        yield batch.num_fresh


def transport(config: Config, spec: EnvSpec) -> Generator[int]:
    """Environments and sampler as in training, under a constant policy; full batches are freed, not trained on."""
    with contextlib.closing(make_pool(config, seed=config.seed, ordered=config.deterministic)) as pool:
        limit_threads(config.acting_threads)
        sampler, player = _sampler(config, pool, ConstantPolicy(pool.spec).to(pick_device(config.device)))
        store, batch_steps = player.store, config.fresh_unrolls * config.learner.unroll_length
        due = batch_steps
        if store.turns:
            store.grant()
        while True:
            before = sampler.num_steps
            sampler.step()
            # Asked only once there can be a batch: the question costs as much as serving some rows.
            if sampler.num_steps >= due and (slots := store.take(0, 0.0)) is not None:
                store.release(slots)
                due += batch_steps
                if store.turns:
                    store.grant()
            yield sampler.num_steps - before


STAGES = {"simulation": simulate, "acting": act, "learning": learn, "transport": transport}


class MadeUpPool:
    """A `Pool` without environments: all rows are ready at once, with noise to observe and an end now and then."""

    tasks: tuple[str, ...] = ("made up",)
    restarts = 0

    def __init__(self, spec: EnvSpec, num_rows: int) -> None:
        self.spec, self.num_rows = spec, num_rows
        self.task_ids = self.unit_ids = np.zeros(num_rows, np.int64)
        self._rng, self._begun = np.random.default_rng(0), False

    def recv(self, timeout_s: float, gather_s: float = 0.0) -> Ready:
        over = (self._rng.random(self.num_rows) < 0.01) & self._begun
        event = np.where(over, Event.LAST, Event.STEP if self._begun else Event.FIRST).astype(np.uint8)
        obs = {name: self.make_up(leaf) for name, leaf in self.spec.observation.items()}
        reward = self._rng.standard_normal(self.num_rows).astype(np.float32)
        self._begun = True
        return Ready(
            np.arange(self.num_rows), event, obs, reward, over, np.zeros_like(over), over, np.zeros(0, np.int64),
            {name: leaf[:0] for name, leaf in obs.items()},
        )  # fmt: skip

    def make_up(self, leaf: LeafSpec) -> NDArray[Any]:
        """[num_rows, …] values that the leaf may hold."""
        shape = (self.num_rows, *leaf.shape)
        if leaf.kind == "mask":
            return np.ones(shape, leaf.dtype)
        if leaf.n or leaf.kind == "binary":
            sizes = np.array(leaf.n).reshape(leaf.shape) if leaf.n else 2
            return self._rng.integers(0, sizes, shape).astype(leaf.dtype)
        if leaf.kind == "image" and np.isfinite((leaf.low, leaf.high)).all():
            return self._rng.uniform(leaf.low, leaf.high, shape).astype(leaf.dtype)
        return self._rng.standard_normal(shape).astype(leaf.dtype)

    def send(self, rows: NDArray[np.int64], discrete: NDArray[np.int64], continuous: NDArray[np.float32]) -> None:
        """Actions change nothing."""

    def set_option(self, name: str, value: Any, env: int | None = None) -> None:
        """See `Pool`. Raises EnvError."""
        raise EnvError(f"set_option: '{name}': what is made up for measurements has no settings; leave them out")

    def reseed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def close(self) -> None:
        """There is nothing to end."""


class ConstantPolicy(ActorCritic):
    """The same to every observation: all actions equally likely, a value of 0. No arithmetic on observations."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(
            spec, encoder="mlp", mlp_layers=(1,), core="none", normalize_obs=False, normalize_returns=False
        )

    def forward(self, obs: Mapping[str, Tensor], state: Tensor, first: Tensor) -> ModelOutput:
        params = torch.zeros(*first.shape, num_params(self.spec.action), device=first.device)
        return ModelOutput(params, torch.zeros(first.shape, device=first.device), state)


def acting_rows(config: Config, spec: EnvSpec) -> int:
    """Rows that act at once while the other groups step: those of one group of all workers."""
    return max(1, config.num_envs * spec.rows_per_env // config.env.groups)


def _sampler(config: Config, pool: Pool, actor: ActorCritic) -> tuple[Sampler, Player]:
    store = make_store(config, pool, actor.state_size, next(actor.parameters()).device)
    tracker = EpisodeTracker(pool.num_rows, pool.tasks, pool.task_ids)
    leaves = stored_leaves(pool.spec, config.model)
    acting = make_acting(actor, store, pool.num_rows, leaves, config.graphs)
    if acting.fallback:
        print(acting.fallback, file=sys.stderr)
    player = Player(pool, store, acting, Publisher(Snapshot.of(actor, 0)), tracker)
    return Sampler(pool, [player], seed=config.seed), player


# ---------------------------------------------------------------- copies: the process that does a stage, and its handle


def serve(stage: str, folder: Path, core: int | None, seconds: float) -> int:
    """What a copy's process does: warm up, wait for the word, measure, and keep the core busy until its input ends.

    stage: of STAGES, or "training", which trains until the input ends.  folder: holds config.toml and env.json.
    core: the one to stay on, with one thread; None: as the settings say. Returns the exit code.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever environments print goes to the log

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    go, stop = threading.Event(), threading.Event()
    threading.Thread(target=_listen, args=(go, stop, stage == "training"), daemon=True).start()
    keep_memory_mapped()
    if core is not None:
        limit_threads(1)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})
    try:
        config = from_toml(folder / "config.toml")
        if core is not None:
            config = replace(config, {"threads": 1})
        if stage == "training":
            train(config)
            return 0
        torch.use_deterministic_algorithms(config.deterministic)
        with contextlib.closing(STAGES[stage](config, load_spec(folder))) as work:
            _spend(work, WARM_UP_SHARE * seconds, stop)
            say(ready=True)
            while not (go.is_set() or stop.is_set()):
                next(work)
            say(steps_per_s=_spend(work, seconds, stop))
            while not stop.is_set():  # the other copies may not be done
                next(work)
    except PronghornError as error:
        say(error=str(error), code=error.exit_code)
        return error.exit_code
    return 0


def _listen(go: threading.Event, stop: threading.Event, training: bool) -> None:
    os.read(0, 64)  # past sys.stdin, whose lock a thread must not hold when the process ends
    go.set()
    while os.read(0, 64):
        pass
    stop.set()
    if training:
        os.kill(os.getpid(), signal.SIGTERM)


def _spend(work: Iterator[int], seconds: float, stop: threading.Event) -> float:
    """Steps per second of at least one piece of work."""
    start, steps, spent = time.perf_counter(), 0, 1e-9
    while (not steps or spent < seconds) and not stop.is_set():
        steps += next(work)
        spent = time.perf_counter() - start
    return steps / spent


class Copy:
    """The handle of a copy's process. It ends when its input is closed, so also when this process dies."""

    def __init__(self, stage: str, folder: Path, core: int | None, seconds: float) -> None:
        self.stage, self._log = stage, folder / f"{stage}-{core}.txt"
        argv = [sys.executable, "-m", __name__, stage, str(folder), "" if core is None else str(core), str(seconds)]
        with self._log.open("w") as log:
            # A session of its own: Ctrl-C is for this process, which then ends its copies.
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )

    def hear(self) -> dict[str, Any]:
        """Its next answer. Raises its error, or PronghornError if it died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-3000:].strip()
            raise PronghornError(f"measuring {self.stage}: the process ended with code {self.process.wait()}. {tail}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            error = PronghornError(answer["error"])
            error.exit_code = answer["code"]
            raise error
        return answer

    def say(self, word: str, *, last: bool = False) -> None:
        """Send a word; close its input behind the last one."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: the next `hear` tells
            self.process.stdin.write(word)
            self.process.stdin.close() if last else self.process.stdin.flush()

    def end(self, until: float) -> None:
        """Wait for its end until then (`time.monotonic()`); kill it if it does not come. A pool's keeper cleans up."""
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def started(stage: str, folder: Path, cores: Sequence[int | None], seconds: float) -> Iterator[list[Copy]]:
    """Copies of a stage, one for each core; all have ended afterwards."""
    copies: list[Copy] = []
    try:
        for core in cores:
            copies.append(Copy(stage, folder, core, seconds))  # noqa: PERF401  # those started must be known
        yield copies
    finally:
        for copy in copies:
            copy.say("\n", last=True)
        until = time.monotonic() + END_S
        for copy in copies:
            copy.end(until)


def measure(stage: str, folder: Path, cores: Sequence[int | None], seconds: float) -> list[float]:
    """Steps per second of each copy of a stage, all measured at the same time."""
    with started(stage, folder, cores, seconds) as copies:
        for copy in copies:
            copy.hear()
        for copy in copies:
            copy.say("go\n")
        return [copy.hear()["steps_per_s"] for copy in copies]


if __name__ == "__main__":
    _stage_name, _folder, _core, _seconds = sys.argv[1:]
    sys.exit(serve(_stage_name, Path(_folder), int(_core) if _core else None, float(_seconds)))
