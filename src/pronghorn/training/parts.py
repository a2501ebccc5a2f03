"""What a run is made of, built from its settings: environments, policies, who plays whom, the sampler.

It starts no thread, writes no file and decides nothing while the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pronghorn.cluster.crew import Crew
from pronghorn.cluster.remote_pool import RemotePool
from pronghorn.cluster.remote_sampler import RemoteSampler
from pronghorn.config import Config, derive_seed, walk
from pronghorn.defaults import resolve
from pronghorn.envs.own_rows import OwnRows
from pronghorn.envs.registry import make_pool
from pronghorn.errors import CheckpointError
from pronghorn.evaluation.policy import make_actor, require_number
from pronghorn.launch import Launch, share_of
from pronghorn.limits import crowded, require_disk, require_store
from pronghorn.machine import available_memory, keep_memory_mapped, limit_threads, pick_devices, pick_own_device
from pronghorn.rules import changed_settings
from pronghorn.training.beginning import Beginning
from pronghorn.training.checkpoint import STATE_FILE, Checkpoint
from pronghorn.training.guests import Guests
from pronghorn.training.league import League
from pronghorn.training.member import Member
from pronghorn.training.metrics import episodes_of, pooled
from pronghorn.training.own_player import OwnPlayer
from pronghorn.training.player import RowPlayer
from pronghorn.training.sampler import Sampler
from pronghorn.training.store import step_fields, stored_leaves
from pronghorn.training.world import World
from pronghorn.types import Experience, Pool, PoolRows
from pronghorn.untrusted import number, usable


class Parts:
    """The parts of one process's run, and the sums over its policies."""

    def __init__(
        self, begin: Beginning, started_at: float, world: World | None = None, launch: Launch | None = None
    ) -> None:
        """started_at: `time.time()` from which the run's seconds count.

        world: who else trains the policy; None: nobody. launch: which of them this process is.
        """
        config, latest, self._before = begin
        self.started_at, self.latest = started_at, latest
        self.world, self.launch = world or World(), launch or Launch()
        self.previous_s = 0.0
        if latest is not None:
            with usable(latest.path / STATE_FILE):
                self.previous_s = number(latest.state["time_s"])
        self.notes: list[str] = []  # to be said once the log is open
        keep_memory_mapped()
        if config.log.live != "off" and self.launch.leads:
            with contextlib.suppress(OSError):
                print(f"starting {', '.join(config.env_names)} ...", file=sys.stderr)  # engines take seconds to start
        with contextlib.ExitStack() as cleanup:
            own_seed = share_of(config, self.launch).seed
            seed = own_seed if latest is None else derive_seed(own_seed, 3, latest.state["updates"])
            pool = self._open(config, seed)
            self.pool: Experience = pool
            cleanup.callback(self.pool.close)
            # What all learners share, and this one's part of it.
            self.whole = resolve(config, self.pool.spec, self.world.size)
            self.config = share_of(self.whole, self.launch)
            given = dict(walk(config))
            chosen = [f"{k}={v}" for k, v in walk(self.whole) if given[k] is None and v is not None]
            self.defaults = ", ".join(chosen).replace("learner.", "")  # those that were filled in
            self._build(self.config, pool, seed)
            cleanup.pop_all()

    @staticmethod
    def _open(config: Config, seed: int) -> Pool | Crew:
        """Where experience comes from: environments of this process, or remote actors."""
        if not config.cluster.address:
            return make_pool(config, seed=seed, ordered=config.deterministic)
        from pronghorn.cluster.engine import CarriedActor, CarriedEnvHost, RayEngine

        acts_here = config.cluster.inference == "learner"
        crew = Crew(config, RayEngine.open(config.cluster, CarriedEnvHost if acts_here else CarriedActor), seed=seed)
        return RemotePool(crew, config) if acts_here else crew

    def _build(self, config: Config, pool: Pool | Crew, seed: int) -> None:
        """seed: of what may differ in a resumed run."""
        torch.use_deterministic_algorithms(config.deterministic)
        limit_threads(config.threads)
        self.own = [] if isinstance(pool, Crew) else [OwnRows(pool, i) for i in range(len(pool.spec.signatures))]
        # The rows that each member may play.
        self.views: list[PoolRows] = list(self.own) or [pool] * config.population.members
        self.members = self._make_members(config, seed)
        require_disk(config, sum(member.num_bytes for member in self.members), resumed=self.latest is not None)
        if config.threads > (os.cpu_count() or 1):
            self.notes.append(f"{config.threads} threads are more than the cores of this machine: --threads sets them")
        if not isinstance(pool, Crew) and (note := crowded(config.env.workers)):
            self.notes.append(note)
        if self.latest:
            self._restore(self.latest)
        for member in self.members:
            self.world.align(list(member.model.state_dict().values()))
        self.league: League | None = None
        self.sampler = self._make_sampler(config, pool, seed)

    def _make_sampler(self, config: Config, pool: Pool | Crew, seed: int) -> Sampler | RemoteSampler:
        """What fills the members' stores."""
        if isinstance(pool, Crew):
            [member] = self.members
            return RemoteSampler(pool, config, member.store, member.start_publishing(), member.tracker)
        players: list[RowPlayer] = [m.start_acting(view) for m, view in zip(self.members, self.views, strict=True)]
        self.notes += [m.acting.fallback for m in self.members if m.acting.fallback][:1]
        self.league = None if self.own else self._make_league(config, pool, seed, players)
        if self.own:
            players = [OwnPlayer(own, player) for own, player in zip(self.own, players, strict=True)]
        seats = self.league.seats if self.league else None
        return Sampler(pool, players, seed=seed, seats=seats, playing=self._who_plays())

    def _make_members(self, config: Config, seed: int) -> list[Member]:
        """Each policy on its device, with room for its unrolls."""
        several = self.world.size > 1
        own = [pick_own_device(config.device, self.launch.local_rank)] if several else []
        devices = own or pick_devices(config.device, len(self.views))
        self._require_memory(config, devices)
        self.waits = {device: threading.Condition() for device in devices}  # what each learner's thread waits at
        return [
            Member(i, config, view, device, seed=seed, changed=self.waits[device],
                   kept=config.population.objective_episodes if len(devices) > 1 else 0, world=self.world)
            for i, (view, device) in enumerate(zip(self.views, devices, strict=True))
        ]  # fmt: skip

    def _require_memory(self, config: Config, devices: Sequence[torch.device]) -> None:
        """Refuse stores that do not fit where they are to be."""
        for view, device in dict.fromkeys(zip(self.views, devices, strict=True)):
            numbers = sum(f.num_bytes for f in step_fields(view.spec.action).values())
            leaves = stored_leaves(view.spec, config.model).values()
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
            bytes_per_step = sum(leaf.num_bytes for leaf in leaves) + numbers
            require_store(config, bytes_per_step, view.num_rows, free // devices.count(device))

    def _restore(self, saved: Checkpoint) -> None:
        """Every policy as it was saved."""
        changed = dict(changed_settings(self._before, self.whole)) if self._before else {}
        self.notes += [f"changed: {name} {old} -> {new}" for name, (old, new) in changed.items()]
        if self.own:
            require_number(self.pool.spec, len(saved.policies), str(saved.path))
        if len(saved.policies) != len(self.members):
            why = f"has policies: {len(saved.policies)}, and this run trains {len(self.members)}"
            raise CheckpointError(f"{saved.path / STATE_FILE} {why}.")
        for member, policy in zip(self.members, saved.policies, strict=True):
            member.restore(policy, saved.path, changed)
            with usable(saved.path / STATE_FILE):
                member.tracker.load_state(episodes_of(policy.state, self.world.rank, self.world.size))

    def _who_plays(self) -> NDArray[np.int64]:
        """[rows] index of the player of each row when the run begins: of its signature, or the first."""
        playing = np.zeros(self.pool.num_rows, np.int64)
        for player, own in enumerate(self.own):
            playing[own.rows] = player
        return playing

    def _make_league(self, config: Config, pool: Pool, seed: int, players: list[RowPlayer]) -> League | None:
        """Who plays whom, where there is more than one policy playing for itself."""
        if config.population.members == 1 and not config.selfplay.meets_others:
            return None
        guests = Guests(config, pool, make_actor(config, pool.spec, self.members[0].device))
        players.append(guests)
        league = League(config, pool, self.members, guests, seed, self.time_s)
        league.start(self.latest)
        return league

    # ------------------------------------------------------------ all policies together, of this learner

    @property
    def steps(self) -> int:
        """Samples that have entered batches, of all learners."""
        return sum(member.learner.steps for member in self.members)

    @property
    def updates(self) -> int:
        """Optimiser steps."""
        return sum(member.learner.updates for member in self.members)

    def episodes(self) -> dict[str, float]:
        """Statistics of finished episodes, by their names in docs/metrics.md."""
        return pooled([member.tracker.snapshot() for member in self.members])

    def time_s(self) -> float:
        """Seconds that the run has taken, over resumes."""
        return self.previous_s + time.time() - self.started_at
