"""What a run says of itself: lines of metrics, the live view, and what it is made of. It changes nothing.

metrics.py and live.py know how; here is what is told. Of several learners the first one tells, of all; the others leave
their numbers where it finds them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

import pronghorn.training.checkpoint as checkpoints
from pronghorn.settings_file import to_toml
from pronghorn.training.live import LiveView, logging_to
from pronghorn.training.member import Member
from pronghorn.training.metrics import MetricsWriter, limiting_stage, merged, pooled
from pronghorn.training.parts import Parts
from pronghorn.training.saving import Evaluated, Saver

# Of several learners: counts, and what is a statistic of each one's own experience.
_SUMS = ("steps_sampled", "worker_restarts", "unrolls_lost", "unrolls_voided", "remote_unrolls", "remote_bytes",
         "actors", "actors_replaced", "samples_dropped")  # fmt: skip
_POOLED = ("episode", "return_", "running_episode", "policy_lag_")
_LAST_WAIT_S = 60.0  # for the others' last numbers

_LOG = logging.getLogger("pronghorn")


class Reporter:
    """Collects what learners' threads tell, and writes it down at each interval's end."""

    def __init__(self, parts: Parts, evaluated: Evaluated, saver: Saver) -> None:
        """evaluated: changes while the run goes on, and is told as it is then. saver: its failures are told."""
        self._parts, self._evaluated, self._config, self._saver = parts, evaluated, parts.config, saver
        self._lock = threading.Lock()  # of what learners' threads leave for the main one
        self._wait_s = 0.0  # of learners, for a batch
        self._speed = 0.0
        self.latest: dict[str, Any] = {}  # the last line
        self.view = self._make_view()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Write files, and log into them, while this lasts."""
        config, world = self._config, self._parts.world
        config.run_path.mkdir(parents=True, exist_ok=True)  # on another machine
        file = config.run_path / ("log.txt" if world.leads else f"log.rank{world.rank}.txt")
        speaker = "" if world.leads else f"learner {world.rank}: "
        with contextlib.ExitStack() as stack:
            self._writer = stack.enter_context(self._make_writer()) if world.leads else None
            stack.callback(self.view.stop)
            stack.enter_context(logging_to(file, self.view, quiet=config.log.live == "off", speaker=speaker))
            yield

    def _make_writer(self) -> MetricsWriter:
        config = self._config
        return MetricsWriter(
            config.run_path,
            tensorboard=config.log.tensorboard,
            wandb=config.log.wandb,
            config=to_toml(self._parts.whole),
            resume_steps=self._parts.steps if self._parts.latest else None,
        )

    def start(self) -> None:
        """Say what runs, and begin the first interval."""
        self._say_what_runs()
        self.view.start()
        self._mark_interval()

    # ------------------------------------------------------------ from learners' threads

    def waited(self, seconds: float) -> None:
        """A learner's thread waited so long for a batch."""
        with self._lock:
            self._wait_s += seconds

    def trained(self, member: Member, report: dict[str, float]) -> None:
        """An iteration of this member has ended."""
        with self._lock:
            member.reports.append(report)

    # ------------------------------------------------------------ lines

    @property
    def due(self) -> bool:
        """Whether the interval has ended, where lines are written by time."""
        return bool(self._config.log.every_s) and time.monotonic() >= self._interval["next"]

    def report(self, *, last: bool = False) -> None:
        """One line of metrics over the interval since the last one. last: of all learners, wait for their last ones."""
        with self._lock:
            reports = [member.reports for member in self._parts.members]
            for member in self._parts.members:
                member.reports = []
        metrics = self._metrics(reports)
        if self._parts.world.size > 1:
            metrics = self._with_others(metrics, last=last)
        if league := self._parts.league:
            with self._saver.going_on_without("ratings"):
                league.write_ratings(last=last)
            metrics |= league.report()
        if self._evaluated.last is not None:
            metrics["eval"] = {"mean": self._evaluated.last}
        self.latest = metrics
        with self._saver.going_on_without("metrics"):
            if self._writer:
                self._writer.write(metrics)
        self.view.update(metrics)
        self._mark_interval()

    def _metrics(self, reports: list[list[dict[str, float]]]) -> dict[str, Any]:
        """All that is known of the run and its members now. reports: of each member's iterations."""
        parts, members = self._parts, self._parts.members
        metrics: dict[str, Any] = {
            "time_s": round(parts.time_s(), 3),
            "steps": parts.steps,
            "frames": parts.steps * parts.pool.spec.frame_skip,
            "updates": parts.updates,
            "iterations": sum(m.learner.version for m in members),
            **self._speeds(parts.steps),
            "steps_sampled": parts.sampler.num_steps,
            "worker_restarts": parts.pool.restarts,
            "unrolls_lost": sum(m.store.num_discarded for m in members),
            "unrolls_voided": sum(m.store.num_voided for m in members),
            **self._slots(),
            **parts.sampler.counts(),
            "world_size": parts.world.size,
            "updates_skipped": sum(m.learner.num_skipped for m in members),
            "rollbacks": sum(m.num_rollbacks for m in members),
            "saves_failed": self._saver.num_failed,
            "samples_dropped": sum(m.learner.num_dropped for m in members),
            "params_sha": checkpoints.params_sha(members[0].newest.tensors),
            **parts.episodes(),
            **merged([report for of_member in reports for report in of_member]),
        }
        if parts.league or len(members) > 1:
            for member, of_member in zip(members, reports, strict=True):
                metrics |= {f"policy/{member.index}/{k}": v for k, v in member.report(of_member).items()}
        return metrics

    def _slots(self) -> dict[str, int]:
        """Slots of all members' stores in each state."""
        counts = [member.store.counts() for member in self._parts.members]
        return {f"slots_{state}": sum(each[state] for each in counts) for state in counts[0]}

    def _with_others(self, metrics: dict[str, Any], *, last: bool) -> dict[str, Any]:
        """These numbers of this learner, and for the first one those of all: counts are sums, the rest as in `pooled`.

        What the learner itself is told is that of all already.
        """
        world, name = self._parts.world, "last metrics" if last else "metrics"
        own = {k: metrics[k] for k in metrics if k in _SUMS or k.startswith(_POOLED)}
        if not world.leads:
            world.tell(name, json.dumps(own))
            return metrics
        told = world.told("metrics") | (world.wait_told(name, _LAST_WAIT_S) if last else {})
        everyone = [own, *(json.loads(text) for text in told.values())]
        sums = {k: sum(each[k] for each in everyone) for k in _SUMS if k in own}
        return metrics | pooled([{k: v for k, v in each.items() if k not in _SUMS} for each in everyone]) | sums

    def _speeds(self, steps: int) -> dict[str, Any]:
        """How fast it goes, and what its threads spent the interval on."""
        span = max(time.monotonic() - self._interval["start"], 1e-9)
        if span >= 1.0:  # a last line just after another keeps its speed
            self._speed = (steps - self._interval["steps"]) / span
        shares = self._stage_shares(span)
        skip = self._parts.pool.spec.frame_skip
        return {"steps_per_s": self._speed, "frames_per_s": self._speed * skip, "stages": shares,
                "limiting_stage": limiting_stage(shares)}  # fmt: skip

    def _mark_interval(self) -> None:
        now = time.monotonic()
        self._interval = {"start": now, "next": now + self._config.log.every_s, "steps": self._parts.steps}
        self._stage_marks = self._stage_seconds()

    def _stage_seconds(self) -> dict[str, float]:
        members = self._parts.members
        learner = {"wait": self._wait_s}
        learner |= {stage: sum(m.seconds[stage] for m in members) for stage in members[0].seconds}
        sampler = self._parts.sampler
        both = {**_prefixed("sampler", sampler.seconds), **_prefixed("learner", learner)}
        return both | _prefixed("actors", sampler.elsewhere)

    def _stage_shares(self, span_s: float) -> dict[str, float]:
        spent = {name: value - self._stage_marks[name] for name, value in self._stage_seconds().items()}
        # A stage is booked when it ends, so one that began before the interval may be longer than it; and there may be
        # several learners, and many actors.
        threads = {name.split(":")[0] for name in spent}
        whole = {t: max(span_s, sum(v for k, v in spent.items() if k.startswith(f"{t}:"))) for t in threads}
        return {name: value / whole[name.split(":")[0]] for name, value in spent.items()}

    # ------------------------------------------------------------ what runs

    def _make_view(self) -> LiveView:
        config, parts = self._config, self._parts
        frames_as_steps = config.frames // parts.pool.spec.frame_skip if config.frames else None
        return LiveView(
            ", ".join(config.env_names),
            config.steps or frames_as_steps,
            60.0 * config.minutes if config.minutes else None,
            {"auto": None, "rich": False, "plain": True, "off": True}[config.log.live],
            console=Console(quiet=config.log.live == "off"),
            elapsed_s=time.time() - parts.started_at,
        )

    def _say_what_runs(self) -> None:
        c, parts = self._config, self._parts
        how = "resuming" if parts.latest else "training"
        if parts.world.size > 1:
            how = f"learner {parts.world.rank} of {parts.world.size}, {how}"
        where = ", ".join(map(str, parts.waits))
        _LOG.info("%s %s on %s in %s", how, ", ".join(c.env_names), where, c.run_path)
        describe = getattr(parts.pool, "describe", lambda: "")()
        skip = parts.pool.spec.frame_skip
        _LOG.info("environments: %d rows, %d frames a step. %s", parts.pool.num_rows, skip, describe)
        self._say_who_learns()
        self._say_how()
        if parts.defaults:
            _LOG.info("defaults for this environment: %s", parts.defaults)
        for note in parts.notes:
            _LOG.log(logging.WARNING if parts.world.leads else logging.INFO, note)
        if not (c.steps or c.frames or c.minutes or c.eval.until_return is not None):
            _LOG.info("no limit given: runs until Ctrl-C (limits: --steps, --frames, --minutes)")

    def _say_who_learns(self) -> None:
        parts = self._parts
        for member in parts.members if parts.own else parts.members[:1]:  # of a population, once for all
            spec = parts.views[member.index].spec
            if parts.own:
                _LOG.info("policy %d plays %s", member.index, ", ".join(spec.agents))
            seen = ", ".join(f"{name} ({leaf})" for name, leaf in spec.observation.items())
            _LOG.info("observation: %s. action: %s", seen, spec.action)
            size, precision = f"{member.model.num_parameters:,}", self._config.precision
            _LOG.info("model: %s parameters, arithmetic in %s", size, precision)
        first = parts.members[0]
        if first.device.type == "cuda" and not self._config.cluster.address:
            _LOG.info("acting: %s", first.acting.describe())
        if parts.league:
            _LOG.info("policies: %s", parts.league.describe())

    def _say_how(self) -> None:
        c, n = self._parts.whole, self._parts.whole.learner
        lag = {0: "take turns (lag 0)", 1: "overlapped (lag exactly 1)"}.get(
            c.max_lag, f"free-running (lag at most {c.max_lag})"
        )
        batch = f"batches of {n.batch_unrolls} unrolls x {n.unroll_length} steps = {c.batch_samples} samples"
        if self._parts.world.size > 1:
            batch += f", shared by {self._parts.world.size} learners"
        if n.replay_fraction:
            batch += f", {n.batch_unrolls - c.fresh_unrolls} of the unrolls from replay of the last {n.replay_unrolls}"
        _LOG.info("algorithm: %s, %s, %d epoch(s) x %d minibatch(es), %s", c.algo, batch, n.epochs, n.minibatches, lag)


def _prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}: {name}": value for name, value in values.items()}
