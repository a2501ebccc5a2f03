"""The trainer knows the whole picture: it builds the parts, starts the threads, watches them, and ends the run.

Threads: one samples, one learns, the main one handles signals, the live view and the files. Everything that may go
wrong in a thread is raised in the main one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from numpy.typing import NDArray
from rich.console import Console

import pronghorn.training.checkpoint as checkpoints
import pronghorn.training.stall as stall
from pronghorn.config import Config, derive_seed, walk
from pronghorn.defaults import resolve
from pronghorn.envs.own_rows import OwnRows
from pronghorn.envs.registry import make_pool
from pronghorn.envs.registry import resolve as resolve_name
from pronghorn.errors import MissingExtraError
from pronghorn.evaluation.evaluate import BackgroundEvaluator, Finished
from pronghorn.evaluation.policy import make_actor, require_number, spec_to_json
from pronghorn.limits import crowded, require_store, require_threads
from pronghorn.machine import available_memory, keep_memory_mapped, limit_threads, pick_devices
from pronghorn.rules import changed_settings, validate
from pronghorn.settings_file import from_toml, to_toml
from pronghorn.training.checkpoint import Checkpoint, SavedPolicy
from pronghorn.training.guests import Guests
from pronghorn.training.league import League
from pronghorn.training.live import LiveView, logging_to
from pronghorn.training.member import Member
from pronghorn.training.metrics import MetricsWriter, limiting_stage, merged, pooled
from pronghorn.training.own_player import OwnPlayer
from pronghorn.training.player import RowPlayer
from pronghorn.training.sampler import Sampler
from pronghorn.training.signals import READER_GONE, StopSignals
from pronghorn.training.store import step_fields, stored_leaves
from pronghorn.types import Pool, PoolRows

POLL_S = 0.1

_LOG = logging.getLogger("pronghorn")


@dataclass(frozen=True)
class Result:
    """How a run ended. reason: 'steps', 'frames', 'minutes', 'return', 'signal', 'output closed' (a pipe without its
    reader), or 'finished already'."""

    run_dir: Path
    steps: int
    frames: int
    updates: int
    seconds: float
    reason: str
    return_mean: float | None
    eval_mean: float | None
    exit_code: int


def train(config: Config, *, resume: bool = False, started_at: float | None = None) -> Result:
    """Train until a limit is reached or the process is told to stop; the last state is always saved.

    resume: go on with the run in `config.run_path` (an empty directory starts fresh and says so).
    started_at: `time.time()` from which `config.minutes` counts; now when None.
    Raises PronghornError: bad configuration or environment, a run directory that holds a run, workers that keep dying.
    """
    started_at = time.time() if started_at is None else started_at
    validate(config)
    for name in config.env_names:  # before anything is written
        resolve_name(name, python=config.env.python or None)
    if config.log.wandb and find_spec("wandb") is None:
        raise MissingExtraError("wandb", "wandb", "Logging to Weights & Biases")
    with checkpoints.locked(config.run_path):
        latest = checkpoints.previous(config.run_path, resume=resume)
        if latest:
            list(changed_settings(from_toml(config.run_path / "config.toml"), config))  # refuses what may not change
        else:  # a run may go on where there are fewer cores, with the threads that it was begun with
            require_threads(config.threads)
        finished = _already_finished(config, latest)
        if finished:
            return finished
        return _Run(config, latest, started_at).run()


@dataclass
class Evaluated:
    """Mean returns of evaluations."""

    last: float | None = None
    best: float = -float("inf")


class _Run:
    """One process's share of a run, from its parts to its end."""

    def __init__(self, config: Config, latest: Checkpoint | None, started_at: float) -> None:
        self.started_at, self.latest = started_at, latest
        self.run_dir = config.run_path
        keep_memory_mapped()
        if config.log.live != "off":
            with contextlib.suppress(OSError):
                print(f"starting {', '.join(config.env_names)} ...", file=sys.stderr)  # engines take seconds to start
        with contextlib.ExitStack() as cleanup:
            seed = config.seed if latest is None else derive_seed(config.seed, 3, latest.state["updates"])
            self.pool: Pool = make_pool(config, seed=seed, ordered=config.deterministic)
            cleanup.callback(self.pool.close)
            given, self.config = dict(walk(config)), resolve(config, self.pool.spec)
            config = self.config
            chosen = [f"{k}={v}" for k, v in walk(config) if given[k] is None and v is not None]
            self._defaults = ", ".join(chosen).replace("learner.", "")
            self._build(config, seed)
            cleanup.pop_all()

    def _build(self, config: Config, seed: int) -> None:
        pool, spec = self.pool, self.pool.spec
        torch.use_deterministic_algorithms(config.deterministic)
        limit_threads(config.threads)
        self._views: list[PoolRows] = [pool] * config.population.members  # the rows that each member may play
        self._own = [OwnRows(pool, number) for number in range(len(spec.signatures))]
        if self._own:
            self._views = list(self._own)
        devices = pick_devices(config.device, len(self._views))
        self._require_memory(config, devices)
        self._waits = {device: threading.Condition() for device in devices}  # what each learner's thread waits at
        self.members = [
            Member(i, config, view, device, seed=seed, changed=self._waits[device],
                   kept=config.population.objective_episodes if len(devices) > 1 else 0)
            for i, (view, device) in enumerate(zip(self._views, devices, strict=True))
        ]  # fmt: skip
        self.previous_s = 0.0
        self.evaluated = Evaluated()
        self._notes: list[str] = []  # to be said once the log is open
        if config.threads > (os.cpu_count() or 1):
            self._notes.append(f"{config.threads} threads are more than the cores of this machine: --threads sets them")
        if note := crowded(config.env.workers):
            self._notes.append(note)
        if self.latest:
            self._restore(self.latest)
        players: list[RowPlayer] = [m.start_acting(view) for m, view in zip(self.members, self._views, strict=True)]
        self._notes += [m.acting.fallback for m in self.members if m.acting.fallback][:1]
        self.league = None if self._own else self._make_league(config, seed, players)
        if self._own:
            players = [OwnPlayer(own, player) for own, player in zip(self._own, players, strict=True)]
        seats = self.league.seats if self.league else None
        self.sampler = Sampler(pool, players, seed=seed, seats=seats, playing=self._who_plays())
        self._speed = 0.0
        self._wait_s = 0.0  # of learners, for a batch
        self._lock = threading.Lock()  # of what learners' threads leave for the main one
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._reason = ""
        self.signals = StopSignals(force=self.pool.close, quiet=config.log.live == "off")
        self.evaluator = BackgroundEvaluator(config, spec, self._stop)
        self._last_save = time.monotonic()

    def _require_memory(self, config: Config, devices: Sequence[torch.device]) -> None:
        """Refuse stores that do not fit where they are to be."""
        for view, device in dict.fromkeys(zip(self._views, devices, strict=True)):
            numbers = sum(f.num_bytes for f in step_fields(view.spec.action).values())
            leaves = stored_leaves(view.spec, config.model).values()
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
            bytes_per_step = sum(leaf.num_bytes for leaf in leaves) + numbers
            require_store(config, bytes_per_step, view.num_rows, free // devices.count(device))

    def _who_plays(self) -> NDArray[np.int64]:
        """[rows] index of the player of each row when the run begins: of its signature, or the first."""
        playing = np.zeros(self.pool.num_rows, np.int64)
        for number, own in enumerate(self._own):
            playing[own.rows] = number
        return playing

    def _make_league(self, config: Config, seed: int, players: list[RowPlayer]) -> League | None:
        """Who plays whom, where there is more than one policy playing for itself."""
        if config.population.members == 1 and not config.selfplay.meets_others:
            return None
        guests = Guests(config, self.pool, make_actor(config, self.pool.spec, self.members[0].device))
        players.append(guests)
        league = League(config, self.pool, self.members, guests, seed, self._time_s)
        league.start(self.latest)
        return league

    # ------------------------------------------------------------ the run

    def run(self) -> Result:
        """Start the threads, watch them to the end, save, clean up."""
        config = self.config
        self._write_config()
        resume_steps = self.steps if self.latest else None
        with contextlib.ExitStack() as stack:
            stack.callback(self.pool.close)
            for member in self.members:
                stack.callback(member.learner.close)
            self.writer = stack.enter_context(
                MetricsWriter(
                    self.run_dir,
                    tensorboard=config.log.tensorboard,
                    wandb=config.log.wandb,
                    config=to_toml(config),
                    resume_steps=resume_steps,
                )
            )
            self.view = self._make_view()
            stack.callback(self.view.stop)
            stack.enter_context(logging_to(self.run_dir / "log.txt", self.view, quiet=config.log.live == "off"))
            stack.enter_context(self.signals.caught())
            self._say_what_runs()
            self.view.start()
            self._mark_interval()
            self._watch()
        return self._result()

    def _watch(self) -> None:
        """The main thread's loop, and the end of the run whatever ended it."""
        threads = [threading.Thread(target=self._sample_until_stopped, name="sampler", daemon=True)]
        for device in self._waits:
            members = [member for member in self.members if member.device == device]
            name = "learner" if len(self._waits) == 1 else f"learner {device}"
            threads.append(threading.Thread(target=self._learn_until_stopped, args=(members,), name=name, daemon=True))
        for thread in threads:
            thread.start()
        alarm = stall.StallAlarm(stall.AFTER_S)
        try:
            while not self._stop.wait(POLL_S):
                self._check_limits()
                if self.config.log.every_s and time.monotonic() >= self._interval["next"]:
                    self._report()
                self._evaluate_when_due()
                if alarm.rings((self.sampler.num_steps, self.updates)):
                    self._say_what_stands_still(alarm.after_s, threads)
        except BaseException as error:
            self._fail(error)
        self._stop.set()
        self.sampler.stop.set()
        for member in self.members:
            member.store.close()
        for thread in threads:
            thread.join()
        self.evaluator.join()
        try:
            self._report(last=True)
        finally:
            self._save()
        if self._error:
            raise self._error

    def _sample_until_stopped(self) -> None:
        limit_threads(self.config.acting_threads)
        self.sampler.run(self._fail)

    def _learn_until_stopped(self, members: Sequence[Member]) -> None:
        try:
            limit_threads(self.config.threads)
            self._learn(members)
        except BaseException as error:
            self._fail(error)

    def _learn(self, members: Sequence[Member]) -> None:
        """What one device does: train whoever has a batch and was trained longest ago, until a limit.

        With max_lag 0 and 1, where there is one member, it also says when sampling may go on.
        """
        in_turn = deque(members)
        for member in members:
            if member.store.turns:
                member.store.grant()
        while not self._stop.is_set():
            following = self._next(in_turn)
            if following is not None and self._iterate(following):
                return

    def _next(self, in_turn: deque[Member]) -> Member | None:
        """The member that has a batch and was trained longest ago; None if none had one for a while."""
        start, wait = time.perf_counter(), self._waits[in_turn[0].device]
        with wait:
            wait.wait_for(lambda: self._stop.is_set() or any(m.has_batch() for m in in_turn), POLL_S)
        waited = time.perf_counter() - start
        with self._lock:
            self._wait_s += waited
        for member in in_turn:
            if member.has_batch():
                in_turn.remove(member)
                in_turn.append(member)
                return member
        return None

    def _iterate(self, member: Member) -> bool:
        """Batch in, better policy out; whether the run ends with it."""
        turns, overlap = member.store.turns, self.config.max_lag == 1
        with member.lock:
            # Not before: another device's thread may have replaced the policy since, and void what was collected.
            slots = member.store.take(member.learner.version, 0.0)
            if slots is None:
                return False
            batch = member.gather(slots)
            ends = self._ends_after(batch.num_fresh)
            saves = self._saves_after()
            ahead = overlap and not ends and not saves  # a save starts from nothing in progress
            if ahead:
                member.publish(grant=True)
            report = member.train(batch, self._stop.is_set)
            if not turns:
                member.publish(grant=False)
        with self._lock:
            member.reports.append(report)
        if self.league:
            self.league.after_iteration(member)
        if not self.config.log.every_s:
            self._report()
        if ends:
            self._end(ends)
            return True
        self._save_when_due(saves)
        if turns and not ahead:
            member.publish(grant=True)
        return False

    # ------------------------------------------------------------ limits and signals

    def _ends_after(self, samples: int) -> str:
        """Which limit in steps or frames the next iteration reaches, if any."""
        steps = self.steps + samples
        if self.config.steps and steps >= self.config.steps:
            return "steps"
        if self.config.frames and steps * self.pool.spec.frame_skip >= self.config.frames:
            return "frames"
        return ""

    def _check_limits(self) -> None:
        if self.signals.number:
            self._end("signal")
        elif self.view.reader_gone:
            _LOG.warning("the reader of the output has gone: saving and stopping")
            self._end("output closed")
        elif self.config.minutes and time.time() - self.started_at >= 60.0 * self.config.minutes:
            self._end("minutes")

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._stop.set()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stop.set()

    # ------------------------------------------------------------ evaluation

    def _evaluate_when_due(self) -> None:
        """Start an evaluation of the newest weights if one is due, and act on one that ended."""
        done = self.evaluator.finished()
        if done is not None:
            self._act_on(done)
        if self.evaluator.due(self._episodes()):
            leader = self.members[self.league.leader if self.league else 0]
            playing = self.members if self._own else [leader]  # each signature's, or the one that plays all
            newest = [member.newest for member in playing]
            version = sum(snapshot.version for snapshot in newest)
            self.evaluator.start([snapshot.tensors for snapshot in newest], version, self.steps, leader.index)

    def _act_on(self, done: Finished) -> None:
        result, until = done.result, self.config.eval.until_return
        who = f" of policy {done.policy}" if len(self.members) > 1 and not self._own else ""
        text = "evaluation%s at %s steps: mean return %.4g ± %.2g over %d episodes"
        _LOG.info(text, who, f"{done.steps:,}", result.mean, result.stderr, result.episodes)
        result.write(self.run_dir / "eval" / f"{done.steps:012d}.json", checkpoint=f"at {done.steps} steps")
        self.evaluated.last = result.mean
        self.view.update({"eval": {"mean": result.mean, "stderr": result.stderr, "episodes": result.episodes}})
        if result.mean > self.evaluated.best:
            self.evaluated.best = result.mean
            state = {"steps": done.steps, "eval_mean": result.mean, "version": done.version, "policy": done.policy}
            nothing: dict[str, Any] = {"state": {}, "param_groups": []}
            first, *others = [SavedPolicy(dict(weights), nothing, state) for weights in done.weights]
            checkpoints.save(self.run_dir / "best", done.steps, *first, keep=1, others=others)
        if until is not None and result.mean >= until:
            self._end("return")

    # ------------------------------------------------------------ checkpoints

    def _saves_after(self) -> bool:
        """Whether the next iteration completes another --checkpoint.every-updates optimiser steps."""
        every, updates = self.config.checkpoint.every_updates, self.updates
        return bool(every) and (updates + self.config.updates_per_iteration) // every > updates // every

    def _save_when_due(self, by_updates: bool) -> None:
        """At an iteration's end, in a learner's thread, so that its policy does not move meanwhile."""
        every_s = 0.0 if self.config.deterministic else self.config.checkpoint.every_s
        if by_updates or (every_s and time.monotonic() - self._last_save >= every_s):
            self._save()
        if by_updates and self.config.max_lag <= 1:
            # What follows must not depend on whether the process goes on or is a new one that resumed here.
            self.sampler.request_reseed(derive_seed(self.config.seed, 3, self.updates))

    def _save(self) -> None:
        with contextlib.ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.lock)
            first, *others = [member.saved() for member in self.members]
            snapshots = dict(self.league.snapshots) if self.league else None
            path = checkpoints.save(
                self.run_dir / "checkpoints", self.updates, first.weights, first.optimizer, first.state | self._state(),
                keep=self.config.checkpoint.keep, others=others, snapshots=snapshots,
            )  # fmt: skip
        self._last_save = time.monotonic()
        _LOG.debug("saved %s, params_sha %s", path, first.state["params_sha"])

    def _state(self) -> dict[str, Any]:
        """Of the run, besides its policies."""
        state = {
            "best_return": self.evaluated.best if np.isfinite(self.evaluated.best) else None,
            "eval_mean": self.evaluated.last,
            "time_s": self._time_s(),
            "frame_skip": self.pool.spec.frame_skip,
            "reason": self._reason,
        }
        return state | ({"league": self.league.state(), "leader": self.league.leader} if self.league else {})

    def _restore(self, saved: Checkpoint) -> None:
        changed = dict(changed_settings(from_toml(self.run_dir / "config.toml"), self.config))
        self._notes += [f"changed: {name} {old} -> {new}" for name, (old, new) in changed.items()]
        if self._own:
            require_number(self.pool.spec, len(saved.policies), str(saved.path))
        for member, policy in zip(self.members, saved.policies, strict=True):
            member.restore(policy, str(saved.path), changed)
        state = saved.state
        self.evaluated.last = state["eval_mean"]
        if state["best_return"] is not None:
            self.evaluated.best = float(state["best_return"])
        self.previous_s = float(state["time_s"])

    def _write_config(self) -> None:
        checkpoints.write_atomically(self.run_dir / "config.toml", tomli_w.dumps(to_toml(self.config)).encode())
        spec = json.dumps(spec_to_json(self.pool.spec), indent=1).encode()
        checkpoints.write_atomically(self.run_dir / "env.json", spec)

    # ------------------------------------------------------------ what it says

    def _report(self, *, last: bool = False) -> None:
        """One line of metrics over the interval since the last one."""
        with self._lock:
            reports = [member.reports for member in self.members]
            for member in self.members:
                member.reports = []
        now = time.monotonic()
        steps, span = self.steps, max(now - self._interval["start"], 1e-9)
        if span >= 1.0:  # a last line just after another keeps its speed
            self._speed = (steps - self._interval["steps"]) / span
        speed, shares = self._speed, self._stage_shares(span)
        skip = self.pool.spec.frame_skip
        metrics: dict[str, Any] = {
            "time_s": round(self._time_s(), 3),
            "steps": steps,
            "frames": steps * skip,
            "updates": self.updates,
            "iterations": sum(m.learner.version for m in self.members),
            "steps_per_s": speed,
            "frames_per_s": speed * skip,
            "steps_sampled": self.sampler.num_steps,
            "worker_restarts": self.pool.restarts,
            "unrolls_lost": sum(m.store.num_discarded for m in self.members),
            "unrolls_voided": sum(m.store.num_voided for m in self.members),
            "remote_unrolls": 0,
            "world_size": 1,
            "updates_skipped": sum(m.learner.num_skipped for m in self.members),
            "samples_dropped": sum(m.learner.num_dropped for m in self.members),
            "params_sha": checkpoints.params_sha(self.members[0].newest.tensors),
            "stages": shares,
            "limiting_stage": limiting_stage(shares),
            **self._episodes(),
            **merged([report for of_member in reports for report in of_member]),
        }
        if self.league or len(self.members) > 1:
            for member, of_member in zip(self.members, reports, strict=True):
                metrics |= {f"policy/{member.index}/{k}": v for k, v in member.report(of_member).items()}
        if self.league:
            self.league.write_ratings(last=last)
            metrics |= self.league.report()
        if self.evaluated.last is not None:
            metrics["eval"] = {"mean": self.evaluated.last}
        self.writer.write(metrics)
        self.view.update(metrics)
        self._mark_interval()

    def _episodes(self) -> dict[str, float]:
        return pooled([member.tracker.snapshot() for member in self.members])

    @property
    def steps(self) -> int:
        """Samples that have entered batches, of all members."""
        return sum(member.learner.steps for member in self.members)

    @property
    def updates(self) -> int:
        """Optimiser steps of all members."""
        return sum(member.learner.updates for member in self.members)

    def _mark_interval(self) -> None:
        now = time.monotonic()
        self._interval = {"start": now, "next": now + self.config.log.every_s, "steps": self.steps}
        self._stage_marks = self._stage_seconds()

    def _stage_seconds(self) -> dict[str, float]:
        learner = {"wait": self._wait_s}
        learner |= {stage: sum(m.seconds[stage] for m in self.members) for stage in self.members[0].seconds}
        return {**_prefixed("sampler", self.sampler.seconds), **_prefixed("learner", learner)}

    def _stage_shares(self, span_s: float) -> dict[str, float]:
        spent = {name: value - self._stage_marks[name] for name, value in self._stage_seconds().items()}
        # A stage is booked when it ends, so one that began before the interval may be longer than it; and there may be
        # several learners.
        whole = {t: max(span_s, sum(v for k, v in spent.items() if k.startswith(t))) for t in ("sampler", "learner")}
        return {name: value / whole[name.split(":")[0]] for name, value in spent.items()}

    def _time_s(self) -> float:
        return self.previous_s + time.time() - self.started_at

    def _make_view(self) -> LiveView:
        config = self.config
        frames_as_steps = config.frames // self.pool.spec.frame_skip if config.frames else None
        return LiveView(
            ", ".join(config.env_names),
            config.steps or frames_as_steps,
            60.0 * config.minutes if config.minutes else None,
            {"auto": None, "rich": False, "plain": True, "off": True}[config.log.live],
            console=Console(quiet=config.log.live == "off"),
            elapsed_s=time.time() - self.started_at,
        )

    def _say_what_runs(self) -> None:
        c, n, rows = self.config, self.config.learner, self.pool.num_rows
        describe = getattr(self.pool, "describe", lambda: "")()
        lag = {0: "take turns (lag 0)", 1: "overlapped (lag exactly 1)"}.get(
            c.max_lag, f"free-running (lag at most {c.max_lag})"
        )
        _LOG.info(
            "%s %s on %s in %s",
            "resuming" if self.latest else "training",
            ", ".join(c.env_names),
            ", ".join(map(str, self._waits)),
            self.run_dir,
        )
        _LOG.info("environments: %d rows, %d frames a step. %s", rows, self.pool.spec.frame_skip, describe)
        for member in self.members if self._own else self.members[:1]:  # of a population, once for all
            spec = self._views[member.index].spec
            if self._own:
                _LOG.info("policy %d plays %s", member.index, ", ".join(spec.agents))
            seen = ", ".join(f"{name} ({leaf})" for name, leaf in spec.observation.items())
            _LOG.info("observation: %s. action: %s", seen, spec.action)
            _LOG.info("model: %s parameters, arithmetic in %s", f"{member.model.num_parameters:,}", c.precision)
        first = self.members[0]
        if first.device.type == "cuda":
            _LOG.info("acting: %s", first.acting.describe())
        if self.league:
            _LOG.info("policies: %s", self.league.describe())
        batch = f"batches of {n.batch_unrolls} unrolls x {n.unroll_length} steps = {c.batch_samples} samples"
        if n.replay_fraction:
            batch += f", {n.batch_unrolls - c.fresh_unrolls} of the unrolls from replay of the last {n.replay_unrolls}"
        _LOG.info("algorithm: %s, %s, %d epoch(s) x %d minibatch(es), %s", c.algo, batch, n.epochs, n.minibatches, lag)
        if self._defaults:
            _LOG.info("defaults for this environment: %s", self._defaults)
        for note in self._notes:
            _LOG.warning(note)
        if not (c.steps or c.frames or c.minutes or c.eval.until_return is not None):
            _LOG.info("no limit given: runs until Ctrl-C (limits: --steps, --frames, --minutes)")

    def _say_what_stands_still(self, seconds: float, threads: list[threading.Thread]) -> None:
        state = [*stall.places(threads), *getattr(self.pool, "state", list)()]
        _LOG.warning("neither a step nor an update for %g s:\n  %s", seconds, "\n  ".join(state))

    def _result(self) -> Result:
        steps, snapshot = self.steps, self._episodes()
        code = {"output closed": READER_GONE, "signal": self.signals.number and self.signals.exit_code}
        return Result(
            self.run_dir, steps, steps * self.pool.spec.frame_skip, self.updates, self._time_s(), self._reason,
            snapshot.get("return_mean"), self.evaluated.last, code.get(self._reason, 0),
        )  # fmt: skip


def _already_finished(config: Config, latest: Checkpoint | None) -> Result | None:
    """The result of a run that reached its limit before, so that there is nothing to do."""
    if latest is None:
        return None
    state, until = latest.state, config.eval.until_return
    steps = sum(int(policy.state["learner"]["steps"]) for policy in latest.policies)
    frames = steps * int(state["frame_skip"])
    if config.steps is not None and steps >= config.steps:
        what = f"{steps:,} of {config.steps:,} steps"
    elif config.frames is not None and frames >= config.frames:
        what = f"{frames:,} of {config.frames:,} frames"
    elif until is not None and (state["eval_mean"] or -np.inf) >= until:
        what = f"an evaluated return of {state['eval_mean']:.4g} (asked for: {until:.4g})"
    else:
        return None
    print(f"Already at {what}: nothing to do. Ask for more to go on.", file=sys.stderr)
    return Result(
        config.run_path, steps, frames, int(latest.state["updates"]), float(state["time_s"]), "finished already",
        None, state["eval_mean"], 0,
    )  # fmt: skip


def _prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}: {name}": value for name, value in values.items()}
