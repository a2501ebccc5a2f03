"""One policy in training: its network, learner, store, acting copy and statistics, and all that is saved of it.

A run has one, or a population of them. It starts no thread and decides nothing about others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import pronghorn.training.checkpoint as checkpoints
from pronghorn.config import Config, derive_seed
from pronghorn.errors import CheckpointError, ConfigError
from pronghorn.evaluation.policy import build_model, make_actor
from pronghorn.training.acting import Snapshot, make_acting
from pronghorn.training.checkpoint import SavedPolicy
from pronghorn.training.learner import Learner
from pronghorn.training.metrics import EpisodeTracker, merged
from pronghorn.training.player import Player, Publisher
from pronghorn.training.store import Batch, Slots, make_replay, make_store, stored_leaves
from pronghorn.training.world import World
from pronghorn.types import PoolRows
from pronghorn.untrusted import number, usable, whole


class Member:
    """The threads of sampler and learner meet in its store and its publisher; `lock` keeps a policy whole.

    Who changes the policy or saves it holds the lock.
    """

    def __init__(
        self, index: int, config: Config, pool: PoolRows, device: torch.device, *, seed: int,
        changed: threading.Condition, kept: int = 0, world: World | None = None,
    ) -> None:  # fmt: skip
        """seed: of what may differ in a resumed run. changed: what the thread that trains this member waits at.

        kept: episodes that its objective looks back on. world: who else trains it; None: nobody.
        """
        self.index, self.config, self.device, self.lock = index, config, device, threading.RLock()
        spec = pool.spec
        torch.manual_seed(derive_seed(config.seed, 0, index) if index else derive_seed(config.seed, 0))
        try:
            self.model, self.actor = build_model(config.model, spec).to(device), make_actor(config, spec, device)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            sizes = f"core_size {config.model.core_size}, conv_features {config.model.conv_features}"
            why = f"the network does not fit into memory ({error})"
            raise ConfigError("model", sizes, why, "Lower the sizes of the [model] settings.") from None
        self.learner = Learner(config, self.model, world)
        self.learner.seed = derive_seed(config.seed, 6, index) if index else config.seed
        limit = config.step_limit(spec.frame_skip)  # of all members together
        self.learner.total_steps = None if limit is None else -(-limit // config.population.members)
        self.tracker = EpisodeTracker(pool.num_rows, pool.tasks, pool.task_ids, kept=kept)
        self.store = make_store(config, pool, self.actor.state_size, device, changed)
        self._replay_seed = derive_seed(seed, 4, index) if index else derive_seed(seed, 4)
        self.replay = make_replay(config, self._replay_seed)
        self.lineage = 0  # how often its policy was replaced or went back
        self.num_rollbacks = 0  # how often it went back to what was saved
        self.reports: list[dict[str, float]] = []  # of iterations that were not told yet
        self.seconds = {"gather": 0.0, "train": 0.0, "publish": 0.0}

    def start_publishing(self) -> Publisher:
        """Hand out the weights from now on, which are those to begin with."""
        self.newest = self._snapshot()
        self.publisher = Publisher(self.newest)
        return self.publisher

    def start_acting(self, pool: PoolRows) -> Player:
        """Its player, once the weights are those to begin with. While graphs are made nobody may use the device."""
        self.start_publishing()
        leaves = stored_leaves(pool.spec, self.config.model)
        self.acting = make_acting(self.actor, self.store, pool.num_rows, leaves, self.config.graphs)
        self.player = Player(pool, self.store, self.acting, self.publisher, self.tracker)
        return self.player

    def _snapshot(self) -> Snapshot:
        return Snapshot.of(self.model, self.learner.version, self.lineage)

    # ------------------------------------------------------------ training (a learner's thread)

    def has_batch(self) -> bool:
        """Whether there is a batch to train on."""
        return self.store.has_batch(self.learner.version)

    def gather(self, slots: Slots) -> Batch:
        """The batch in these slots, which are free then, and what replay adds to it."""
        start, version = time.perf_counter(), self.learner.version
        batch = self.store.gather(slots, version)
        self.store.release(slots)
        if self.replay:
            batch = self.replay.mix(batch, version)
        self.seconds["gather"] += time.perf_counter() - start
        return batch

    def train(self, batch: Batch, stopping: Callable[[], bool]) -> dict[str, float]:
        """All training on one batch, and a copy of the weights that came of it; what is reported of it."""
        start = time.perf_counter()
        report = self.learner.iterate(batch, stopping)
        trained = time.perf_counter()
        self.newest = self._snapshot()
        self.seconds["train"] += trained - start
        self.seconds["publish"] += time.perf_counter() - trained
        return report

    def publish(self, *, grant: bool) -> None:
        """The player acts with the newest copy from its next decision on.

        grant: when taking turns, that is also the word to collect a batch.
        """
        self.publisher.latest = self.newest
        if grant:
            self.store.grant()

    def report(self, reports: list[dict[str, float]]) -> dict[str, float]:
        """What is told of it among others. reports: of its iterations since the last time."""
        episodes, iterations = self.tracker.snapshot(), merged(reports)
        known = episodes | iterations
        told = ("return_mean", "episode_length_mean", "episodes", "loss", "entropy", "kl", "policy_lag_mean",
                "policy_lag_max")  # fmt: skip
        out = {name: known[name] for name in told if name in known}
        return out | {"steps": self.learner.steps, "updates": self.learner.updates, "lr": self.learner.hyper.lr}

    # ------------------------------------------------------------ a population

    def become(self, donor: Member) -> None:
        """Take over the donor's policy: weights, normalisers and optimiser, as they are now. Its counters stay its own.

        Whatever is under way of the policy that it was is void, and counted. Both locks are held by the caller.
        """
        self.learner.become(donor.learner)
        self._begin_lineage()
        self.tracker.inherit(donor.tracker, self.lineage)

    def go_back(self, saved: SavedPolicy, where: str) -> None:
        """Be the policy that was saved: weights, normalisers, optimiser, adapted learning rate. Counters go on.

        Whatever is under way of the policy that it was is void, and counted. Its lock is held by the caller.
        Raises CheckpointError if it does not fit; then nothing has changed.
        """
        checkpoints.load_weights(self.model, saved.weights, where)
        self.learner.go_back(saved.optimizer, float(saved.state["learner"]["hyper"]["lr"]))
        self.num_rollbacks += 1
        self._begin_lineage()
        self.tracker.follow(self.lineage)

    def _begin_lineage(self) -> None:
        """The policy is another one from the learner's present version on: void what was begun before, act with it."""
        self.lineage += 1
        self.store.void_before(self.learner.version)
        self.replay = make_replay(self.config, derive_seed(self._replay_seed, self.lineage))
        self.newest = self._snapshot()
        self.publish(grant=False)

    # ------------------------------------------------------------ files

    @property
    def num_bytes(self) -> int:
        """Of its files in a checkpoint, at least: weights, and a moment of each."""
        return 2 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def saved(self) -> SavedPolicy:
        """All that a checkpoint keeps of it."""
        weights = self.model.state_dict()
        state = {
            "learner": self.learner.counters(),
            "lineage": self.lineage,
            "num_rollbacks": self.num_rollbacks,
            "episodes": self.tracker.state(),
            "params_sha": checkpoints.params_sha(weights),
        }
        return SavedPolicy(weights, self.learner.optimizer.state_dict(), state)

    def restore(self, saved: SavedPolicy, where: Path, changed: Mapping[str, Any]) -> None:
        """Be what was saved. where: the checkpoint. changed: settings, by dotted name, that this resume changes.

        Raises CheckpointError.
        """
        state, learner = saved.state, self.learner
        checkpoints.load_weights(self.model, saved.weights, str(where))
        checkpoints.load_optimizer(learner.optimizer, saved.optimizer, where)
        learner.configure_optimizer()  # the saved state brings its own settings along
        with usable(where / checkpoints.STATE_FILE):
            self._restore_state(state, changed)
        sha = checkpoints.params_sha(self.model.state_dict())
        if sha != state["params_sha"]:
            raise CheckpointError(f"{where}: restored weights have params_sha {sha}, saved was {state['params_sha']}.")

    def _restore_state(self, state: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        learner = self.learner
        learner.load_counters(state["learner"])
        # Saved values win, since schedules and populations moved them, except those that were changed on purpose.
        chosen, kept = vars(learner.hyper), state["learner"]["hyper"]
        kept = {k: number(v) for k, v in kept.items() if f"learner.{k}" not in changed}
        learner.set_hyper(**{k: v for k, v in (chosen | kept).items() if k != "version"})
        self.lineage, self.num_rollbacks = whole(state.get("lineage", 0)), whole(state.get("num_rollbacks", 0))
        self.tracker.load_state(state["episodes"])
