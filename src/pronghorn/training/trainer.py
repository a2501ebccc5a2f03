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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from rich.console import Console

import pronghorn.training.checkpoint as checkpoints
import pronghorn.training.stall as stall
from pronghorn.config import Config, derive_seed, walk
from pronghorn.defaults import resolve
from pronghorn.envs.registry import make_pool
from pronghorn.envs.registry import resolve as resolve_name
from pronghorn.errors import ConfigError, MissingExtraError, PronghornError
from pronghorn.evaluation.evaluate import BackgroundEvaluator, Finished
from pronghorn.evaluation.policy import build_model, make_actor, spec_to_json
from pronghorn.limits import crowded, require_store, require_threads
from pronghorn.machine import available_memory, keep_memory_mapped, limit_threads, pick_device
from pronghorn.rules import changed_settings, validate
from pronghorn.settings_file import from_toml, to_toml
from pronghorn.training.acting import Snapshot, make_acting
from pronghorn.training.checkpoint import Checkpoint
from pronghorn.training.learner import Learner
from pronghorn.training.live import LiveView, logging_to
from pronghorn.training.metrics import EpisodeTracker, MetricsWriter, limiting_stage, merged
from pronghorn.training.player import Player, Publisher
from pronghorn.training.sampler import Sampler
from pronghorn.training.signals import READER_GONE, StopSignals
from pronghorn.training.store import make_replay, make_store, step_fields, stored_leaves
from pronghorn.types import Pool

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
        spec = self.pool.spec
        self.device = pick_device(config.device)
        torch.manual_seed(derive_seed(config.seed, 0))
        torch.use_deterministic_algorithms(config.deterministic)
        limit_threads(config.threads)
        leaves = stored_leaves(spec, config.model)
        numbers = sum(f.num_bytes for f in step_fields(spec.action).values())
        on_gpu = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if on_gpu else available_memory()
        bytes_per_step = sum(leaf.num_bytes for leaf in leaves.values()) + numbers
        require_store(config, bytes_per_step, self.pool.num_rows, free)
        try:
            self.model, actor = build_model(config.model, spec).to(self.device), make_actor(config, spec, self.device)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            sizes = f"core_size {config.model.core_size}, conv_features {config.model.conv_features}"
            why = f"the network does not fit into memory ({error})"
            raise ConfigError("model", sizes, why, "Lower the sizes of the [model] settings.") from None
        self.learner = Learner(config, self.model)
        self.learner.total_steps = config.step_limit(spec.frame_skip)
        self.tracker = EpisodeTracker(self.pool.num_rows, self.pool.tasks, self.pool.task_ids)
        self.best_return, self.previous_s = -float("inf"), 0.0
        self._notes: list[str] = []  # to be said once the log is open
        if config.threads > (os.cpu_count() or 1):
            self._notes.append(f"{config.threads} threads are more than the cores of this machine: --threads sets them")
        if note := crowded(config.env.workers):
            self._notes.append(note)
        if self.latest:
            self._restore(self.latest)
        self.store = make_store(config, self.pool, actor.state_size, self.device)
        self.replay = make_replay(config, derive_seed(seed, 4))
        self.newest = Snapshot.of(self.model, self.learner.version)
        self.publisher = Publisher(self.newest)
        # Before the threads start: while graphs are made, nobody else may use the device.
        acting = make_acting(actor, self.store, self.pool.num_rows, leaves, config.graphs)
        self._notes += [acting.fallback] if acting.fallback else []
        self.sampler = Sampler(
            self.pool, [Player(self.pool, self.store, acting, self.publisher, self.tracker)], seed=seed
        )
        self._reports: list[dict[str, float]] = []
        self._speed = 0.0
        self._learner_s = {"wait": 0.0, "gather": 0.0, "train": 0.0, "publish": 0.0}
        self._lock = threading.Lock()  # of what the learner's thread leaves for the main one
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._reason = ""
        self.signals = StopSignals(force=self.pool.close, quiet=config.log.live == "off")
        self.evaluator = BackgroundEvaluator(config, spec, self._stop)
        self._eval_mean: float | None = None
        self._last_save = time.monotonic()

    # ------------------------------------------------------------ the run

    def run(self) -> Result:
        """Start the threads, watch them to the end, save, clean up."""
        config = self.config
        self._write_config()
        resume_steps = self.learner.steps if self.latest else None
        with contextlib.ExitStack() as stack:
            stack.callback(self.pool.close)
            stack.callback(self.learner.close)
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
        threads = [
            threading.Thread(target=self._sample_until_stopped, name="sampler", daemon=True),
            threading.Thread(target=self._learn_until_stopped, name="learner", daemon=True),
        ]
        for thread in threads:
            thread.start()
        alarm = stall.StallAlarm(stall.AFTER_S)
        try:
            while not self._stop.wait(POLL_S):
                self._check_limits()
                if self.config.log.every_s and time.monotonic() >= self._interval["next"]:
                    self._report()
                self._evaluate_when_due()
                if alarm.rings((self.sampler.num_steps, self.learner.updates)):
                    self._say_what_stands_still(alarm.after_s, threads)
        except BaseException as error:
            self._fail(error)
        self._stop.set()
        self.sampler.stop.set()
        self.store.close()
        for thread in threads:
            thread.join()
        self.evaluator.join()
        try:
            self._report()
        finally:
            self._save()
        if self._error:
            raise self._error

    def _sample_until_stopped(self) -> None:
        limit_threads(self.config.acting_threads)
        self.sampler.run(self._fail)

    def _learn_until_stopped(self) -> None:
        try:
            limit_threads(self.config.threads)
            self._learn()
        except BaseException as error:
            self._fail(error)

    def _learn(self) -> None:
        """Batch in, better policy out, until a limit. With max_lag 0 and 1 it also says when sampling may go on."""
        turns, overlap = self.store.turns, self.config.max_lag == 1
        self._hand_over(grant=turns)
        while not self._stop.is_set():
            slots = self._timed("wait", self.store.take, self.learner.version, POLL_S)
            if slots is None:
                continue
            batch = self._timed("gather", self.store.gather, slots, self.learner.version)
            self.store.release(slots)
            ends = self._ends_after(batch.num_samples)
            if self.replay:
                batch = self._timed("gather", self.replay.mix, batch, self.learner.version)
            saves = self._saves_after()
            ahead = overlap and not ends and not saves  # a save starts from nothing in progress
            if ahead:
                self._hand_over(grant=True)
            report = self._timed("train", self.learner.iterate, batch, self._stop.is_set)
            with self._lock:
                self._reports.append(report)
            self.newest = self._timed("publish", Snapshot.of, self.model, self.learner.version)
            if not self.config.log.every_s:
                self._report()
            if ends:
                self._end(ends)
                return
            self._save_when_due(saves)
            if not ahead:
                self._hand_over(grant=turns)

    def _hand_over(self, *, grant: bool) -> None:
        """Give the sampler the newest weights; when taking turns, that is also the word to collect a batch."""
        self.publisher.latest = self.newest
        if grant:
            self.store.grant()

    # ------------------------------------------------------------ limits and signals

    def _ends_after(self, samples: int) -> str:
        """Which limit in steps or frames the next iteration reaches, if any."""
        steps = self.learner.steps + samples
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
        if self.evaluator.due(self.tracker.snapshot()):
            self.evaluator.start(self.newest.tensors, self.newest.version, self.learner.steps)

    def _act_on(self, done: Finished) -> None:
        result, until = done.result, self.config.eval.until_return
        text = "evaluation at %s steps: mean return %.4g ± %.2g over %d episodes"
        _LOG.info(text, f"{done.steps:,}", result.mean, result.stderr, result.episodes)
        result.write(self.run_dir / "eval" / f"{done.steps:012d}.json", checkpoint=f"at {done.steps} steps")
        self._eval_mean = result.mean
        self.view.update({"eval": {"mean": result.mean, "stderr": result.stderr, "episodes": result.episodes}})
        if result.mean > self.best_return:
            self.best_return = result.mean
            state = {"steps": done.steps, "eval_mean": result.mean, "version": done.version}
            nothing: dict[str, Any] = {"state": {}, "param_groups": []}
            checkpoints.save(self.run_dir / "best", done.steps, dict(done.weights), nothing, state, keep=1)
        if until is not None and result.mean >= until:
            self._end("return")

    # ------------------------------------------------------------ checkpoints

    def _saves_after(self) -> bool:
        """Whether the next iteration completes another --checkpoint.every-updates optimiser steps."""
        every = self.config.checkpoint.every_updates
        updates = self.learner.updates
        return bool(every) and (updates + self.config.updates_per_iteration) // every > updates // every

    def _save_when_due(self, by_updates: bool) -> None:
        """At an iteration's end, in the learner's thread, so that nothing moves meanwhile."""
        every_s = 0.0 if self.config.deterministic else self.config.checkpoint.every_s
        if by_updates or (every_s and time.monotonic() - self._last_save >= every_s):
            self._save()
        if by_updates and self.store.turns:
            # What follows must not depend on whether the process goes on or is a new one that resumed here.
            self.sampler.request_reseed(derive_seed(self.config.seed, 3, self.learner.updates))

    def _save(self) -> None:
        path = checkpoints.save(
            self.run_dir / "checkpoints",
            self.learner.updates,
            self.model.state_dict(),
            self.learner.optimizer.state_dict(),
            self._state(),
            keep=self.config.checkpoint.keep,
        )
        self._last_save = time.monotonic()
        _LOG.debug("saved %s, params_sha %s", path, checkpoints.params_sha(self.model.state_dict()))

    def _state(self) -> dict[str, Any]:
        return {
            "learner": self.learner.counters(),
            "episodes": self.tracker.state(),
            "best_return": self.best_return if np.isfinite(self.best_return) else None,
            "eval_mean": self._eval_mean,
            "time_s": self._time_s(),
            "frame_skip": self.pool.spec.frame_skip,
            "reason": self._reason,
            "params_sha": checkpoints.params_sha(self.model.state_dict()),
        }

    def _restore(self, saved: Checkpoint) -> None:
        changed = dict(changed_settings(from_toml(self.run_dir / "config.toml"), self.config))
        self._notes += [f"changed: {name} {old} -> {new}" for name, (old, new) in changed.items()]
        checkpoints.load_weights(self.model, saved.weights, str(saved.path))
        self.learner.optimizer.load_state_dict(saved.optimizer)
        self.learner.configure_optimizer()  # the saved state brings its own settings along
        state = saved.state
        self.learner.load_counters(state["learner"])
        # Saved values win, since schedules moved them, except those that were changed on purpose for this resume.
        chosen, kept = vars(self.learner.hyper), state["learner"]["hyper"]
        kept = {k: v for k, v in kept.items() if f"learner.{k}" not in changed}
        self.learner.set_hyper(**{k: v for k, v in (chosen | kept).items() if k != "version"})
        self.tracker.load_state(state["episodes"])
        if state["best_return"] is not None:
            self.best_return = float(state["best_return"])
        self.previous_s = float(state["time_s"])
        sha = checkpoints.params_sha(self.model.state_dict())
        if sha != state["params_sha"]:
            raise PronghornError(
                f"{saved.path}: restored weights have params_sha {sha}, saved was {state['params_sha']}."
            )

    def _write_config(self) -> None:
        checkpoints.write_atomically(self.run_dir / "config.toml", tomli_w.dumps(to_toml(self.config)).encode())
        spec = json.dumps(spec_to_json(self.pool.spec), indent=1).encode()
        checkpoints.write_atomically(self.run_dir / "env.json", spec)

    # ------------------------------------------------------------ what it says

    def _report(self) -> None:
        """One line of metrics over the interval since the last one."""
        with self._lock:
            reports, self._reports = self._reports, []
        now = time.monotonic()
        steps, span = self.learner.steps, max(now - self._interval["start"], 1e-9)
        if span >= 1.0:  # a last line just after another keeps its speed
            self._speed = (steps - self._interval["steps"]) / span
        speed, shares = self._speed, self._stage_shares(span)
        skip = self.pool.spec.frame_skip
        metrics: dict[str, Any] = {
            "time_s": round(self._time_s(), 3),
            "steps": steps,
            "frames": steps * skip,
            "updates": self.learner.updates,
            "iterations": self.learner.version,
            "steps_per_s": speed,
            "frames_per_s": speed * skip,
            "steps_sampled": self.sampler.num_steps,
            "worker_restarts": self.pool.restarts,
            "unrolls_lost": self.store.num_discarded,
            "remote_unrolls": 0,
            "world_size": 1,
            "updates_skipped": self.learner.num_skipped,
            "samples_dropped": self.learner.num_dropped,
            "params_sha": checkpoints.params_sha(self.newest.tensors),
            "stages": shares,
            "limiting_stage": limiting_stage(shares),
            **self.tracker.snapshot(),
            **merged(reports),
        }
        if self._eval_mean is not None:
            metrics["eval"] = {"mean": self._eval_mean}
        self.writer.write(metrics)
        self.view.update(metrics)
        self._mark_interval()

    def _mark_interval(self) -> None:
        now = time.monotonic()
        self._interval = {"start": now, "next": now + self.config.log.every_s, "steps": self.learner.steps}
        self._stage_marks = {**_prefixed("sampler", self.sampler.seconds), **_prefixed("learner", self._learner_s)}

    def _stage_shares(self, span_s: float) -> dict[str, float]:
        now = {**_prefixed("sampler", self.sampler.seconds), **_prefixed("learner", self._learner_s)}
        spent = {name: value - self._stage_marks[name] for name, value in now.items()}
        # A stage is booked when it ends, so one that began before the interval may be longer than it.
        whole = {t: max(span_s, sum(v for k, v in spent.items() if k.startswith(t))) for t in ("sampler", "learner")}
        return {name: value / whole[name.split(":")[0]] for name, value in spent.items()}

    def _timed(self, stage: str, function: Any, *args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        self._learner_s[stage] += time.perf_counter() - start
        return result

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
            self.device,
            self.run_dir,
        )
        _LOG.info("environments: %d rows, %d frames a step. %s", rows, self.pool.spec.frame_skip, describe)
        seen = ", ".join(f"{name} ({leaf})" for name, leaf in self.pool.spec.observation.items())
        _LOG.info("observation: %s. action: %s", seen, self.pool.spec.action)
        _LOG.info("model: %s parameters, arithmetic in %s", f"{self.model.num_parameters:,}", c.precision)
        if self.device.type == "cuda":
            _LOG.info("acting: %s", self.sampler.players[0].acting.describe())
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
        steps, snapshot = self.learner.steps, self.tracker.snapshot()
        code = {"output closed": READER_GONE, "signal": self.signals.number and self.signals.exit_code}
        return Result(
            self.run_dir, steps, steps * self.pool.spec.frame_skip, self.learner.updates, self._time_s(), self._reason,
            snapshot.get("return_mean"), self._eval_mean, code.get(self._reason, 0),
        )  # fmt: skip


def _already_finished(config: Config, latest: Checkpoint | None) -> Result | None:
    """The result of a run that reached its limit before, so that there is nothing to do."""
    if latest is None:
        return None
    state, steps, until = latest.state, int(latest.state["learner"]["steps"]), config.eval.until_return
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
