"""Sees stages of a run that stand still, says who waits for whom, and ends what would never end. It saves nothing.

Each thread of a run is a stage, which says what it begins to do, or what it waits for and from whom. A thread of its
own looks at them, so that it sees the main one too.

The rule. A stage at work is judged by the time since it began its present piece of work (one optimiser step, one
forward pass, one save). The first piece of each kind may take `FIRST_FACTOR` times as long: that is when kernels and
graphs are made. One that waits is not judged itself, but for whom it waits; except that environments, which have
limits of their own, must have come some time after those; and that stages that wait for each other in a ring never
come. Time in which this process was stopped does not count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pronghorn.training.sentinel as sentinel
from pronghorn.errors import StallError
from pronghorn.training.stall import stacks

FIRST_FACTOR = 4.0
GRACE_S = 60.0  # for the main thread to save and end, once something stands still
ENVIRONMENTS = "environments"  # who is no stage, but has limits of its own
_CHECK_S = 0.5
_PAUSED_S = 5.0  # between two looks: this process did not run
_LOG = logging.getLogger("pronghorn")


class Stage:
    """What one thread does now. It is marked by that thread, and read by the watchdog.

    limited: whether it may be ended; else it is only told.  extra_s: what it may take beyond the common limit.
    """

    def __init__(self, name: str, thread: str = "", *, limited: bool = True, extra_s: float = 0.0) -> None:
        """thread: the thread's name; the stage's own unless given."""
        self.name, self.thread, self.limited, self.extra_s = name, thread or name, limited, extra_s
        self.doing, self.waits_for = "begins", ""
        self.since = time.monotonic()
        self.idle = True
        self._known: set[str] = set()  # kinds of work that it has done once
        self.is_first = False

    def works(self, doing: str) -> None:
        """It begins a piece of work, which takes its own time."""
        self._known.add(self.doing)
        self.is_first = doing not in self._known
        self.doing, self.waits_for, self.since, self.idle = doing, "", time.monotonic(), False

    def waits(self, doing: str, waits_for: str) -> None:
        """It waits for another stage; said again and again while that is so, which does not begin it anew."""
        if self.idle or (self.doing, self.waits_for) != (doing, waits_for):
            self._known.add(self.doing)
            self.doing, self.waits_for, self.since, self.idle = doing, waits_for, time.monotonic(), False

    def rests(self) -> None:
        """Nothing is asked of it."""
        self.idle = True

    def describe(self, now: float) -> str:
        """Who waits for whom, and for how long, in a line."""
        whom = f", from {self.waits_for}" if self.waits_for else ""
        return f"{self.name}: {self.doing}{whom}, for {now - self.since:.0f} s"


class Watchdog:
    """Looks at the stages of one run.

    timeout_s: of one piece of work; 0: nothing is ended, only told.  environments_s: beyond that, for environments.
    on_stall: told the error once; it should make the main thread save and end within GRACE_S, or the process ends.
    state: more lines to show, such as what each worker does.  run_dir: where stacks go if no Python code runs any more.
    """

    def __init__(
        self, stages: Sequence[Stage], *, tell_s: float, timeout_s: float, environments_s: float,
        on_stall: Callable[[BaseException], None], state: Callable[[], list[str]], run_dir: Path,
    ) -> None:  # fmt: skip
        self.stages, self.tell_s, self.timeout_s = list(stages), tell_s, timeout_s
        self._environments_s, self._on_stall, self._state = environments_s, on_stall, state
        self._run_dir = run_dir
        self._told: dict[str, float] = {}  # by the stage's name: since when it had stood still when that was told
        self.error: StallError | None = None
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the stages while this lasts."""
        silent_s = self.timeout_s + GRACE_S
        with sentinel.started(self._run_dir, silent_s) if self.timeout_s else contextlib.nullcontext() as beat:
            thread = threading.Thread(target=self._run, args=(beat or (lambda: None),), name="watchdog", daemon=True)
            thread.start()
            try:
                yield
            finally:
                self._ended.set()
                thread.join()

    def join(self, threads: Iterable[threading.Thread]) -> None:
        """Wait for threads to end; once something stands still, only a moment for those that can."""
        for thread in threads:
            while thread.is_alive() and self.error is None:
                thread.join(_CHECK_S)
            thread.join(1.0)

    # ------------------------------------------------------------ the watchdog's thread

    def _run(self, beat: Callable[[], None]) -> None:
        last = time.monotonic()
        while not self._ended.wait(_CHECK_S):
            beat()
            now = time.monotonic()
            self._excuse(now - last)
            last = now
            stalled = self.look(now)
            if stalled:
                self._stop(stalled, beat)
                return

    def _excuse(self, seconds: float) -> None:
        """This process was stopped (Ctrl-Z, a paused container): that was no stage's fault."""
        if seconds > _PAUSED_S:
            for stage in self.stages:
                stage.since += seconds

    def look(self, now: float) -> str:
        """Tell of stages that stand still; why the run is to be ended, or ''."""
        for stage in self._present():
            ring_since = self._ring_since(stage)
            seconds = now - (stage.since if ring_since is None else ring_since)
            others = stage.waits_for and stage.waits_for != ENVIRONMENTS and ring_since is None
            if seconds >= self.tell_s and self._told.get(stage.name) != stage.since and not others:
                self._told[stage.name] = stage.since
                self._say(f"{stage.name} stands still.\n{self.report(now)}")
            limit_s = None if others else self._limit_s(stage)
            if limit_s is not None and seconds >= limit_s:
                return f"{stage.describe(now)} (limit {limit_s:g} s"
        return ""

    def _present(self) -> list[Stage]:
        alive = {thread.name for thread in threading.enumerate()}
        return [stage for stage in self.stages if not stage.idle and stage.thread in alive]

    def _limit_s(self, stage: Stage) -> float | None:
        """Seconds after which this stage ends the run; None: it never does."""
        if not self.timeout_s or not stage.limited:
            return None
        if stage.waits_for == ENVIRONMENTS:
            return self.timeout_s + self._environments_s
        return (FIRST_FACTOR if stage.is_first and not stage.waits_for else 1.0) * self.timeout_s + stage.extra_s

    def _ring_since(self, stage: Stage) -> float | None:
        """Since when whom it waits for waits, over whatever others, for itself; None if that is not so.

        Of several whom it waits for (the learners of several devices), all must wait.
        """
        present, seen, since, waiting = self._present(), set[str](), stage.since, [stage]
        while waiting:
            whom = waiting.pop().waits_for
            others = [other for other in present if whom and other.name.startswith(whom)]
            if not others or not all(other.waits_for for other in others):
                return None
            since = max(since, *(other.since for other in others))
            if stage in others:
                return since
            waiting += [] if whom in seen else others
            seen.add(whom)
        return None

    def report(self, now: float) -> str:
        """Every stage, every worker, and the stack of every stage's thread."""
        stages = self._present()
        threads = [t for t in threading.enumerate() if t.name in {stage.thread for stage in stages}]
        lines = [*(stage.describe(now) for stage in stages), *self._state(), *stacks(threads)]
        return "\n".join("  " + line for line in lines)

    def _stop(self, stalled: str, beat: Callable[[], None]) -> None:
        """End the run by its main thread; if that cannot, end the process. Children are the keepers' business."""
        report = self.report(time.monotonic())
        self.error = StallError(f"The run stands still: {stalled}, --stall-timeout-s). log.txt has the stacks; "
                                "--resume goes on from the last checkpoint.")  # fmt: skip
        self._say(f"{self.error}\n{report}")
        self._on_stall(self.error)
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            beat()
            if self._ended.wait(_CHECK_S):
                return
        text = f"pronghorn: {self.error}\n{report}\nThe main thread did not end within {GRACE_S:g} s: the process ends."
        with contextlib.suppress(OSError, AttributeError):  # nobody may read it any more
            os.write(sys.stderr.fileno(), (text + "\n").encode())
        os._exit(StallError.exit_code)

    def _say(self, text: str) -> None:
        """Into the log, by a thread that may be left behind: a terminal that takes no more would hold this one up."""
        speaker = threading.Thread(target=_LOG.error, args=(text,), daemon=True)
        speaker.start()
        speaker.join(5.0)


class BeatingEvent(threading.Event):
    """An event that marks a stage whenever somebody asks whether it is set."""

    def __init__(self, event: threading.Event, stage: Stage, doing: str) -> None:
        super().__init__()
        self._event, self._stage, self._doing = event, stage, doing

    def is_set(self) -> bool:
        self._stage.works(self._doing)
        return self._event.is_set()
