"""The trainer: starts the threads of a run, watches them, and ends it. What they work with is built in parts.py.

Threads: one samples, one learns, the main one handles signals, the live view and the files. Everything that may go
wrong in a thread is raised in the main one.

Of several learners (torchrun) each process has all of these; whatever ends an iteration or the run is decided by all of
them together (rounds.py), in the learner's thread.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

import pronghorn.training.checkpoint as checkpoints
import pronghorn.training.stall as stall
from pronghorn.config import Config, derive_seed
from pronghorn.envs.registry import resolve as resolve_name
from pronghorn.errors import DivergedError, LearnersLost, MissingExtraError, PronghornError
from pronghorn.evaluation.evaluate import BackgroundEvaluator, Finished
from pronghorn.launch import Launch, refuse_several
from pronghorn.limits import require_threads
from pronghorn.machine import limit_threads, pick_own_device
from pronghorn.rules import changed_settings, validate
from pronghorn.settings_file import from_toml
from pronghorn.training.beginning import Beginning, shared
from pronghorn.training.checkpoint import Checkpoint
from pronghorn.training.member import Member
from pronghorn.training.parts import Parts
from pronghorn.training.reporting import Reporter
from pronghorn.training.rollback import Rollbacks
from pronghorn.training.rounds import ERROR, Rounds, Wish
from pronghorn.training.saving import Evaluated, Saver
from pronghorn.training.signals import EXIT_CODES, READER_GONE, StopSignals
from pronghorn.training.store import Slots
from pronghorn.training.watchdog import BeatingEvent, Stage, Watchdog
from pronghorn.training.world import World, join
from pronghorn.untrusted import number, usable, whole

POLL_S = 0.1
_LOCK_WAIT_S = 60.0  # that a process which torchrun is replacing may take to end
_ECHO_S = 10.0  # in which torchrun may pass on a signal that a learner has got itself

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


def train(
    config: Config, *, resume: bool = False, started_at: float | None = None, launch: Launch | None = None
) -> Result:
    """Train until a limit is reached or the process is told to stop; the last state is always saved.

    resume: go on with the run in `config.run_path` (an empty directory starts fresh and says so).
    started_at: `time.time()` from which `config.minutes` counts; now when None.
    launch: which of several learners this process is (`pronghorn.launch:launch_of`); None: a lone one. Processes that
        torchrun has started again resume.
    Raises PronghornError: bad configuration or environment, a run directory that holds a run, workers that keep dying,
    another learner that is lost.
    """
    started_at, launch = time.time() if started_at is None else started_at, launch or Launch()
    validate(config)
    refuse_several(config, launch)
    for name in config.env_names:  # before anything is written
        resolve_name(name, python=config.env.python or None)
    if config.log.wandb and find_spec("wandb") is None:
        raise MissingExtraError("wandb", "wandb", "Logging to Weights & Biases")
    if config.cluster.address and find_spec("ray") is None:
        raise MissingExtraError("ray", "cluster", "Training with remote actors")
    wait_s = _LOCK_WAIT_S if launch.restart else 0.0  # the process before may still be ending
    with _joined(config, launch) as world, contextlib.ExitStack() as stack:
        begin = Beginning(config)
        if world.leads:
            stack.enter_context(checkpoints.locked(config.run_path, wait_s))
            begin = _begin(config, resume=resume or launch.restart > 0)
        begin = shared(world, begin)
        finished = _already_finished(begin.given, begin.latest, quiet=not world.leads)
        if finished:
            return finished
        return _Run(begin, started_at, world, launch).run()


@contextlib.contextmanager
def _joined(config: Config, launch: Launch) -> Iterator[World]:
    """The learners of the run, while it lasts; an error of this one is told to the others."""
    device = pick_own_device(config.device, launch.local_rank) if launch.world_size > 1 else torch.device("cpu")
    world = join(launch, device, config.learner.peers_timeout_s)
    try:
        yield world
    except LearnersLost:
        raise
    except BaseException as error:
        world.fail(_in_words(error))
        raise
    finally:
        world.close()


def _in_words(error: BaseException) -> str:
    """An exit code and a text, for other learners."""
    return f"{getattr(error, 'exit_code', 1)} {str(error) or type(error).__name__}"


def _begin(config: Config, *, resume: bool) -> Beginning:
    """What the run directory says of an earlier run. Raises PronghornError for what may not be."""
    latest = checkpoints.previous(config.run_path, resume=resume)
    if latest is None:  # a run may go on where there are fewer cores, with the threads that it was begun with
        require_threads(config.threads)
        return Beginning(config)
    before = from_toml(config.run_path / "config.toml")
    list(changed_settings(before, config))  # refuses what may not change
    return Beginning(config, latest, before)


class _Run:
    """One process's share of a run, from its start to its end."""

    def __init__(self, begin: Beginning, started_at: float, world: World, launch: Launch) -> None:
        latest = begin.latest
        self.world, self.rounds = world, Rounds(world)
        self._wanted = ""  # why this learner wants all to end
        self._stop_signal = 0  # that ended the run, of whichever learner got it
        self._lost = False  # another learner
        self.parts = Parts(begin, started_at, world, launch)
        self.config, self.run_dir = self.parts.config, begin.given.run_path
        self.pool, self.members = self.parts.pool, self.parts.members
        self.sampler, self.league = self.parts.sampler, self.parts.league
        self.evaluated = Evaluated.of(latest)
        self.saver = Saver(self.parts, self.evaluated)
        self.reporter = Reporter(self.parts, self.evaluated, self.saver)
        self.rollbacks = Rollbacks(self.run_dir, self.config.learner.max_rollbacks, world)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._saves_by_time = False  # as all learners have decided
        self._reason = ""
        quiet, echo_s = self.config.log.live == "off", _ECHO_S if world.size > 1 else 0.0
        self.signals = StopSignals(force=self.pool.close, quiet=quiet, echo_s=echo_s)
        self._make_stages()

    def _make_stages(self) -> None:
        """What each thread does, and who looks at it."""
        env, devices = self.config.env, list(self.parts.waits)
        self.main = Stage("main", threading.current_thread().name, limited=False)
        self.evaluation = Stage("evaluation", extra_s=env.start_timeout_s + env.step_timeout_s)
        self.learning = {d: Stage("learner" if len(devices) == 1 else f"learner {d}") for d in devices}
        asked = BeatingEvent(self._stop, self.evaluation, "plays")
        self.evaluator = BackgroundEvaluator(self.config, self.pool.spec, asked)
        self.watchdog = Watchdog(
            [self.main, self.sampler.stage, *self.learning.values(), self.evaluation],
            tell_s=stall.AFTER_S, timeout_s=self.config.stall_timeout_s,
            environments_s=env.start_timeout_s + env.step_timeout_s,
            on_stall=self._fail, state=lambda: getattr(self.pool, "state", list)(), run_dir=self.run_dir,
        )  # fmt: skip

    def run(self) -> Result:
        """Start the threads, watch them to the end, save, clean up."""
        self.saver.write_settings()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.watchdog.watching())
            stack.callback(self.pool.close)
            for member in self.members:
                stack.callback(member.learner.close)
            stack.enter_context(self.reporter.open())
            stack.enter_context(self.signals.caught())
            self.reporter.start()
            self._watch()
        return self._result()

    def _watch(self) -> None:
        """The main thread's loop, and the end of the run whatever ended it."""
        threads = [threading.Thread(target=self._sample_until_stopped, name="sampler", daemon=True)]
        for device, stage in self.learning.items():
            members = [member for member in self.members if member.device == device]
            args = (members,)
            threads.append(threading.Thread(target=self._learn_until_stopped, args=args, name=stage.name, daemon=True))
        for thread in threads:
            thread.start()
        alarm = stall.StallAlarm(stall.AFTER_S)
        try:
            while not self._stop.wait(POLL_S):
                self.main.works("watches")
                self._check_limits()
                if self.reporter.due:
                    self.main.works("reports")
                    self.reporter.report()
                self._evaluate_when_due()
                if alarm.rings((self.sampler.num_steps, self.parts.updates)):
                    self._say_what_stands_still(alarm.after_s, threads)
        except BaseException as error:
            self._fail(error)
            self._leave_together()
        self._stop.set()
        self.sampler.stop.set()
        for member in self.members:
            member.store.close()
        self.main.waits("waits for their ends", "sampler")
        self.watchdog.join([*threads, *self.evaluator.threads])
        self.main.works("ends the run")
        self.main.limited = True
        try:
            self._save_at_end()
        finally:
            try:
                self.reporter.report(last=True)
            finally:
                self._part()
        if self._error:
            raise self._error

    def _save_at_end(self) -> None:
        """The last state, but not in place of a good one if its losses are not finite. One error is told: the first."""
        if isinstance(self._error, DivergedError) and checkpoints.list_checkpoints(self.run_dir / "checkpoints"):
            return
        try:
            self.saver.save(self._reason, alone=self._lost)
        except LearnersLost as error:
            self._fail(error)
            self.saver.save(self._reason, alone=True)
        except PronghornError as error:
            _LOG.error("%s", error)
            self._fail(error)

    def _part(self) -> None:
        """Of several learners nobody leaves before the first one has saved: torchrun ends all when one has failed."""
        self.world.tell("saved", "")
        if not self.world.leads and not self._lost:
            self.main.waits("waits until all is saved", "learners")
            self.world.wait_told_by(0, "saved", self.config.learner.peers_timeout_s)

    def _say_what_stands_still(self, seconds: float, threads: list[threading.Thread]) -> None:
        state = [*stall.places(threads), *getattr(self.pool, "state", list)()]
        _LOG.warning("neither a step nor an update for %g s:\n  %s", seconds, "\n  ".join(state))

    def _sample_until_stopped(self) -> None:
        limit_threads(self.config.acting_threads)
        self.sampler.run(self._fail)

    def _learn_until_stopped(self, members: Sequence[Member]) -> None:
        try:
            limit_threads(self.config.threads)
            if self.world.size == 1:
                self._learn(members)
            else:
                self._learn_with_others(members[0])
        except BaseException as error:
            self._leave(error)

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

    def _learn_with_others(self, member: Member) -> None:
        """`_learn` for one of several learners. Its batch is taken before the round, so that a promise can be kept."""
        if member.store.turns:
            member.store.grant()
        slots: Slots | None = None
        while not self._stop.is_set():
            if slots is None:
                self._next(deque([member]))
                slots = member.store.take(member.learner.version, 0.0)
            self.learning[member.device].waits("meets the others", "learners")
            decision = self.rounds.decide(self._wish(slots is not None))
            self._stop_signal = decision.signal
            if decision.ends == ERROR:
                self._error = self._error or self._error_of_another()
            if decision.ends:
                self._end(decision.ends)
            elif decision.trains:
                self._saves_by_time = decision.saves
                if self._iterate(member, slots):
                    return
                slots = None

    def _error_of_another(self) -> LearnersLost:
        rank, told = next(iter(self.world.told("error").items()))
        code, _, text = told.partition(" ")
        return LearnersLost(f"Learner {rank} ended with an error: {text}", int(code))

    def _wish(self, has_batch: bool) -> Wish:
        every_s = 0.0 if self.config.deterministic or not self.world.leads else self.config.checkpoint.every_s
        saves = bool(every_s) and self.saver.seconds_since >= every_s
        return Wish(has_batch, ERROR if self._error else self._wanted, self.signals.number, saves)

    def _next(self, in_turn: deque[Member]) -> Member | None:
        """The member that has a batch and was trained longest ago; None if none had one for a while."""
        start, wait = time.perf_counter(), self.parts.waits[in_turn[0].device]
        self.learning[in_turn[0].device].waits("waits for a batch", "sampler")
        with wait:
            wait.wait_for(lambda: self._stop.is_set() or any(m.has_batch() for m in in_turn), POLL_S)
        self.reporter.waited(time.perf_counter() - start)
        for member in in_turn:
            if member.has_batch():
                in_turn.remove(member)
                in_turn.append(member)
                return member
        return None

    def _iterate(self, member: Member, slots: Slots | None = None) -> bool:
        """Batch in, better policy out; whether the run ends with it. slots: those of the batch, if it was taken."""
        turns, overlap = member.store.turns, self.config.max_lag == 1
        stage = self.learning[member.device]
        with member.lock:
            # Not before: another device's thread may have replaced the policy since, and void what was collected.
            slots = member.store.take(member.learner.version, 0.0) if slots is None else slots
            if slots is None:
                return False
            stage.works("gathers a batch")
            batch = member.gather(slots)
            ends = self._ends_after(batch.num_fresh * self.world.size)
            saves = self._saves_after()
            ahead = overlap and not ends and not saves  # a save starts from nothing in progress
            if ahead:
                member.publish(grant=True)
            try:
                report = member.train(batch, self._stopping(stage))
            except DivergedError as error:
                self._go_back(member, error, granted=ahead)
                return False
            if not turns:
                member.publish(grant=False)
        self.reporter.trained(member, report)
        stage.works("ends an iteration")
        if self.league:
            self.league.after_iteration(member)
        if not self.config.log.every_s:
            self.reporter.report()
        if ends:
            self._end(ends)
            return True
        stage.works("saves")
        self._save_when_due(saves)
        if turns and not ahead:
            member.publish(grant=True)
        return False

    def _go_back(self, member: Member, error: DivergedError, *, granted: bool) -> None:
        """To the policy that was saved last. granted: the word to collect the next batch was given already.

        Several learners all come to this at the same time, as they all have the same sums.
        """
        with member.store.still():
            self.rollbacks.undo(member, error)
            if member.store.turns:  # what follows must not depend on how far the sampler has come
                self.sampler.request_reseed(derive_seed(self.config.seed, 13, member.num_rollbacks))
        if member.store.turns and not granted:
            member.publish(grant=True)

    # ------------------------------------------------------------ limits and signals

    def _ends_after(self, samples: int) -> str:
        """Which limit in steps or frames the next iteration reaches, if any."""
        steps = self.parts.steps + samples
        if self.config.steps and steps >= self.config.steps:
            return "steps"
        if self.config.frames and steps * self.pool.spec.frame_skip >= self.config.frames:
            return "frames"
        return ""

    def _check_limits(self) -> None:
        if self.signals.number:
            self._stop_signal = self._stop_signal or self.signals.number
            self._want("signal")
        elif self.reporter.view.reader_gone:
            if not self._wanted:
                _LOG.warning("the reader of the output has gone: saving and stopping")
            self._want("output closed")
        elif self.config.minutes and time.time() - self.parts.started_at >= 60.0 * self.config.minutes:
            self._want("minutes")

    def _stopping(self, stage: Stage) -> Callable[[], bool]:
        """Asks whether an iteration shall end before its time: of several learners as soon as one wants to end."""
        stop, several = BeatingEvent(self._stop, stage, "trains"), self.world.size > 1
        return lambda: stop.is_set() or (several and bool(self._wanted or self._error))

    def _want(self, reason: str) -> None:
        """End the run: now, or of several learners in the next round of all."""
        self._wanted = reason
        if self.world.size == 1:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._stop.set()

    def _fail(self, error: BaseException) -> None:
        """End the run with an error: now, or of several learners in the next round of all."""
        self.world.tell("error", _in_words(error))  # before the round that ends with it
        self._error = self._error or error
        self._lost |= isinstance(error, LearnersLost)
        if self.world.size == 1 or self._lost:
            self._stop.set()

    def _leave(self, error: BaseException) -> None:
        """The learner's thread has failed: of several learners the others cannot go on."""
        self._fail(error)
        if self.world.size > 1 and not self._lost:
            self.world.fail(_in_words(error))
            self._lost = True
        self._stop.set()

    def _leave_together(self) -> None:
        """The main thread has failed: of several learners all end in the next round."""
        self._stop.wait(0.0 if self.world.size == 1 else self.config.learner.peers_timeout_s)

    # ------------------------------------------------------------ evaluation

    def _evaluate_when_due(self) -> None:
        """Start an evaluation of the newest weights if one is due, and act on one that ended."""
        done = self.evaluator.finished()
        if done is not None:
            self._act_on(done)
        if self.evaluator.due(self.parts.episodes):
            leader = self.members[self.league.leader if self.league else 0]
            playing = self.members if self.parts.own else [leader]  # each signature's, or the one that plays all
            newest = [member.newest for member in playing]
            version = sum(snapshot.version for snapshot in newest)
            self.evaluation.works("starts")
            self.evaluator.start([snapshot.tensors for snapshot in newest], version, self.parts.steps, leader.index)

    def _act_on(self, done: Finished) -> None:
        result, until = done.result, self.config.eval.until_return
        who = f" of policy {done.policy}" if len(self.members) > 1 and not self.parts.own else ""
        text = "evaluation%s at %s steps: mean return %.4g ± %.2g over %d episodes"
        _LOG.info(text, who, f"{done.steps:,}", result.mean, result.stderr, result.episodes)
        with self.saver.going_on_without("evaluations"):
            result.write(self.run_dir / "eval" / f"{done.steps:012d}.json", checkpoint=f"at {done.steps} steps")
        self.evaluated.last = result.mean
        self.reporter.view.update({"eval": {"mean": result.mean, "stderr": result.stderr, "episodes": result.episodes}})
        if result.mean > self.evaluated.best:
            self.evaluated.best = result.mean
            self.saver.save_best(done)
        if until is not None and result.mean >= until:
            self._want("return")

    # ------------------------------------------------------------ checkpoints

    def _saves_after(self) -> bool:
        """Whether the next iteration completes another --checkpoint.every-updates optimiser steps."""
        every, updates = self.config.checkpoint.every_updates, self.parts.updates
        return bool(every) and (updates + self.config.updates_per_iteration) // every > updates // every

    def _save_when_due(self, by_updates: bool) -> None:
        """At an iteration's end, in a learner's thread, so that its policy does not move meanwhile."""
        by_time = self._saves_by_time if self.world.size > 1 else self._wish(True).saves
        if by_updates or by_time:
            broken = self.saver.save_if_possible(self._reason)
            if broken is not None:
                with self.members[broken].lock:
                    self._go_back(self.members[broken], DivergedError("Its weights are not finite."), granted=True)
        if by_updates and self.config.max_lag <= 1:
            # What follows must not depend on whether the process goes on or is a new one that resumed here.
            self.sampler.request_reseed(derive_seed(self.config.seed, 3, self.parts.updates))

    def _result(self) -> Result:
        parts = self.parts
        code = {"output closed": READER_GONE, "signal": EXIT_CODES.get(self._stop_signal, 0)}
        return Result(
            self.run_dir, parts.steps, parts.steps * self.pool.spec.frame_skip, parts.updates, parts.time_s(),
            self._reason, self.reporter.latest.get("return_mean"), self.evaluated.last, code.get(self._reason, 0),
        )  # fmt: skip


def _already_finished(config: Config, latest: Checkpoint | None, *, quiet: bool) -> Result | None:
    """The result of a run that reached its limit before, so that there is nothing to do. quiet: do not say so."""
    if latest is None:
        return None
    state, until = latest.state, config.eval.until_return
    with usable(latest.path / checkpoints.STATE_FILE):
        steps = sum(whole(policy.state["learner"]["steps"]) for policy in latest.policies)
        frames, seconds = steps * whole(state["frame_skip"], 1), number(state["time_s"])
    evaluated = Evaluated.of(latest)
    if config.steps is not None and steps >= config.steps:
        what = f"{steps:,} of {config.steps:,} steps"
    elif config.frames is not None and frames >= config.frames:
        what = f"{frames:,} of {config.frames:,} frames"
    elif until is not None and evaluated.last is not None and evaluated.last >= until:
        what = f"an evaluated return of {evaluated.last:.4g} (asked for: {until:.4g})"
    else:
        return None
    if not quiet:
        print(f"Already at {what}: nothing to do. Ask for more to go on.", file=sys.stderr)
    return Result(
        config.run_path, steps, frames, latest.state["updates"], seconds, "finished already",
        None, evaluated.last, 0,
    )  # fmt: skip
