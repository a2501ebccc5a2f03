"""The live view in the terminal: a panel, or plain lines where the output is no terminal; and the log above it.

It measures nothing: numbers come in under the names of docs/metrics.md, and what is missing is not shown.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import ROUNDED
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pronghorn.training.metrics import flatten, plain

_LOSSES = {
    "policy_loss": "policy",
    "value_loss": "value",
    "entropy": "entropy",
    "kl": "kl",
    "grad_norm": "grad norm",
}
_STAGE_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_MAX_CURVE_POINTS = 2048
_LOG = logging.getLogger("pronghorn")


class LiveView:
    """A live panel when the output is a terminal, else one plain line every `every_s` seconds.

    Numbers come in by `update`, under the names of docs/metrics.md; what is missing is not shown. Among them
    `stages`: {"sampler: waiting for envs": 0.4, …}, shares of each thread's time, and `eval`: {"mean": …, …}.

    Output that cannot be written raises nothing: the view falls silent. If it was a pipe whose reader has gone
    (`| head -1`), `reader_gone` says so; a terminal that has gone is told by its signal.
    """

    def __init__(
        self,
        title: str,
        total_steps: int | None = None,
        total_seconds: float | None = None,
        plain: bool | None = None,
        *,
        every_s: float = 10.0,
        console: Console | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        """
        total_steps, total_seconds: where the run will stop.  elapsed_s: seconds that count already.
        plain: True for lines, False for the panel, None to look at the output.
        console: where to write; None is the standard output.
        """
        self._title = title
        self._total_steps = total_steps
        self._total_s = total_seconds
        self._console = console or Console()
        self._plain = not self._console.is_terminal or self._console.is_dumb_terminal if plain is None else plain
        self._every_s = every_s
        self._started_s = time.monotonic() - elapsed_s
        self._next_line_s = 0.0
        self._shown: dict[str, Any] | None = None  # what the last line was made of
        self._live: Live | None = None
        self.reader_gone = False
        self._metrics: dict[str, Any] = {}
        self._curve: list[tuple[float, float]] = []  # (steps, return_mean)
        self._best = -math.inf
        self._speed = 0.0  # steps/s, smoothed, for the time that remains

    def start(self) -> None:
        """Begin to draw. Text that anything prints from now on appears above the panel."""
        if not self._plain and self._live is None:
            live = _GuardedLive(self._guarded, get_renderable=self._panel, console=self._console, refresh_per_second=4)
            with self._guarded():
                live.start()
                self._live = live

    def stop(self) -> None:
        """Draw the last state, leave it on the screen, and stop; safe to call twice."""
        if self._live is not None:
            with self._guarded():
                self._live.stop()
            self._live = None
        elif self._plain and self._metrics is not self._shown and self._metrics:
            self._print(self._line())
            self._shown = self._metrics

    def message(self, text: str) -> None:
        """Print a line above the panel."""
        self._print(text)

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show newer numbers. What a call does not mention keeps its last value."""
        new = {name: plain(value) for name, value in flatten(metrics).items() if value is not None}
        self._metrics = {**self._metrics, **new}  # replaced, not changed: the drawing thread reads it
        if "steps_per_s" in new:
            self._speed = 0.8 * self._speed + 0.2 * new["steps_per_s"] if self._speed else new["steps_per_s"]
        if math.isfinite(new.get("return_mean", math.nan)):
            if self._metrics.get("episodes", 0) >= _BEST_AFTER:  # the first episodes to end are the short ones
                self._best = max(self._best, new["return_mean"])
            self._curve.append((self._metrics.get("steps", len(self._curve)), new["return_mean"]))
        if len(self._curve) > _MAX_CURVE_POINTS:
            self._curve = self._curve[::2]
        if self._plain and time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + self._every_s
            self._print(self._line())
            self._shown = self._metrics

    def _print(self, text: str) -> None:
        with self._guarded():
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SystemExit) as error:  # rich makes a SystemExit of a broken pipe
            self.reader_gone |= isinstance(error, BrokenPipeError | SystemExit)
            self._console.quiet = True
            with contextlib.suppress(OSError):  # what is buffered would fail again when the process ends
                discard(self._console.file.fileno())

    # -- one line

    def _line(self) -> str:
        """The state as one line, for logs."""
        done, remaining_s = self._progress()
        parts = [self._title, _duration(self._elapsed_s()), self._steps_text()]
        if done is not None:
            parts[-1] += f" ({done:.0%})"
        parts.append(self._speed_text("  "))
        if "return_mean" in self._metrics:
            best = f"best {_number(self._best)}, " if math.isfinite(self._best) else ""
            trend = _TREND_WORDS[_trend(self._curve)]
            parts.append(f"return {_number(self._metrics['return_mean'])} ({best}{trend})")
            parts.append(f"episode length {_number(self._metrics.get('episode_length_mean', math.nan))}")
        else:
            parts.append(self._no_episode_text())
        parts += [f"{name} {text}" for name, text in self._counts()]
        if remaining_s is not None:
            parts.append(f"ETA {_duration(remaining_s)}")
        return " | ".join(part for part in parts if part)

    # -- panel

    def _panel(self) -> Panel:
        width = min(self._console.width, 100)
        inner = width - 4 - 11  # border and padding, label column
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=9, style="dim", no_wrap=True)
        grid.add_column(width=inner)
        for label, content in self._rows(inner):
            grid.add_row(label, content)
        return Panel(
            grid,
            title=Text(f" {self._title} ", "bold"),
            subtitle=Text(f" {_duration(self._elapsed_s())} ", "dim"),
            title_align="left",
            subtitle_align="right",
            box=ROUNDED,
            border_style="cyan",
            width=width,
        )

    def _rows(self, width: int) -> Iterable[tuple[str, Text]]:
        yield "return", self._return_text(width)
        yield "episodes", self._episodes_text(width)
        yield "speed", Text(self._speed_text("   "), "bold")
        losses = [(label, _number(self._metrics[name])) for name, label in _LOSSES.items() if name in self._metrics]
        if losses:
            yield "losses", _packed(map(_pair, losses), width)
        for name, text in self._counts():
            yield name, Text(text, "bold red" if name in _ALARMS else "")
        for thread, shares in _stages_by_thread(self._metrics).items():
            yield thread, _stacked_bar(shares, width)
            yield "", _packed(_legend(shares), width)
        yield from self._progress_rows(width)

    def _return_text(self, width: int) -> Text:
        if "return_mean" not in self._metrics:
            return Text(self._no_episode_text(), "dim")
        symbol, style = _TREND_SYMBOLS[_trend(self._curve)]
        text = Text.assemble(
            (_number(self._metrics["return_mean"]), "bold"), " ", (symbol, style),
            ("   best ", "dim"), _number(self._best) if math.isfinite(self._best) else "–", "   ",
        )  # fmt: skip
        return text.append(_sparkline(self._curve, max(width - len(text), 8)), "cyan")

    def _no_episode_text(self) -> str:
        longest = self._metrics.get("running_episode_length_max", 0)
        return f"no episode finished yet (longest running: {longest:,} steps)"

    def _episodes_text(self, width: int) -> Text:
        pairs = [("finished", f"{self._metrics.get('episodes', 0):,}")]
        if "episode_length_mean" in self._metrics:
            pairs.append(("mean length", f"{_number(self._metrics['episode_length_mean'])} steps"))
        return _packed(map(_pair, pairs), width)

    def _speed_text(self, gap: str) -> str:
        rates = [("steps_per_s", "steps/s"), ("frames_per_s", "frames/s")]
        return gap.join(f"{self._metrics[key]:,.0f} {unit}" for key, unit in rates if key in self._metrics)

    def _counts(self) -> Iterable[tuple[str, str]]:
        """What limits, lag, evaluation and mishaps, as (label, text); only what there is."""
        now = self._metrics
        if "limiting_stage" in now:
            yield "limited", f"by {now['limiting_stage']}"
        if "policy_lag_mean" in now:
            lag = [_number(now.get(f"policy_lag_{kind}", math.nan)) for kind in ("min", "mean", "max")]
            yield "lag", f"{' / '.join(lag)} iterations (min / mean / max)"
        if "eval/mean" in now:
            stderr = f" ± {_number(now['eval/stderr'])}" if "eval/stderr" in now else ""
            episodes = f" over {now['eval/episodes']:,} episodes" if "eval/episodes" in now else ""
            yield "eval", f"mean return {_number(now['eval/mean'])}{stderr}{episodes}"
        if now.get("worker_restarts", 0) > 0:
            yield "restarts", f"{now['worker_restarts']:,} workers"
        if now.get("unrolls_lost", 0) > 0:
            yield "lost", f"{now['unrolls_lost']:,} unrolls"

    # -- progress

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _steps_text(self) -> str:
        total = f" / {self._total_steps:,}" if self._total_steps else ""
        return f"{self._metrics.get('steps', 0):,}{total} steps"

    def _progress(self) -> tuple[float | None, float | None]:
        """(share done, seconds that remain) by whichever limit is reached first; None if there is none."""
        done: list[float] = []
        remaining: list[float] = []
        if self._total_steps:
            steps = self._metrics.get("steps", 0)
            done.append(steps / self._total_steps)
            if self._speed > 0:
                remaining.append((self._total_steps - steps) / self._speed)
        if self._total_s:
            done.append(self._elapsed_s() / self._total_s)
            remaining.append(self._total_s - self._elapsed_s())
        share = min(max(done), 1.0) if done else None
        return share, max(min(remaining), 0.0) if remaining else None

    def _progress_rows(self, width: int) -> Iterable[tuple[str, Text]]:
        done, remaining_s = self._progress()
        if done is not None:
            filled = round(done * width)
            yield "progress", Text.assemble(("━" * filled, "green"), ("━" * (width - filled), "bright_black"))
        parts = [self._steps_text()]
        if done is not None:
            parts.append(f"{done:.0%}")
        if remaining_s is not None:
            parts.append(f"ETA {_duration(remaining_s)}")
        yield "" if done is not None else "progress", Text("   ".join(parts))


class _GuardedLive(Live):
    """A panel whose own thread survives a terminal that has gone."""

    def __init__(self, guarded: Callable[[], AbstractContextManager[None]], **settings: Any) -> None:
        self._guarded = guarded
        super().__init__(**settings)

    def refresh(self) -> None:
        with self._guarded():
            super().refresh()


def discard(descriptor: int) -> None:
    """Let what is written to an open descriptor go nowhere from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


_ALARMS = ("restarts", "lost")
_BEST_AFTER = 100  # episodes
_TREND_WORDS = {1: "rising", 0: "flat", -1: "falling"}
_TREND_SYMBOLS = {1: ("↗", "green"), 0: ("→", "dim"), -1: ("↘", "red")}


def _trend(curve: Sequence[tuple[float, float]]) -> int:
    """+1, 0 or -1: the last five points against the five before, beyond a twentieth of the curve's range."""
    values = [value for _, value in curve]
    recent, before = values[-5:], values[-10:-5]
    if not before:
        return 0
    change = sum(recent) / len(recent) - sum(before) / len(before)
    if abs(change) <= 0.05 * (max(values) - min(values)):
        return 0
    return 1 if change > 0 else -1


def _sparkline(curve: Sequence[tuple[float, float]], width: int) -> str:
    """The whole curve in `width` characters: mean per bin of steps; an empty bin repeats the one before."""
    steps = np.array([point[0] for point in curve], np.float64)
    values = np.array([point[1] for point in curve], np.float64)
    span = steps[-1] - steps[0]
    bins = np.zeros(len(steps), np.int64) if span <= 0 else ((steps - steps[0]) / span * (width - 1)).astype(np.int64)
    low, high = float(values.min()), float(values.max())
    line, level = "", 0.0
    for index in range(int(bins[-1]) + 1):
        if (bins == index).any():
            level = float(values[bins == index].mean())
        line += "▁▂▃▄▅▆▇█"[int((level - low) / (high - low) * 7.999) if high > low else 0]
    return line


def _stages_by_thread(metrics: Mapping[str, Any]) -> dict[str, list[tuple[str, float]]]:
    """{"stages/sampler: act": 0.4, …} → {"sampler": [("act", 0.4), …]}, largest share first."""
    threads: dict[str, list[tuple[str, float]]] = {}
    for name, share in metrics.items():
        if name.startswith("stages/"):
            thread, _, stage = name.removeprefix("stages/").rpartition(": ")
            threads.setdefault(thread or "time", []).append((stage, share))
    return {thread: sorted(shares, key=lambda item: -item[1]) for thread, shares in threads.items()}


def _stacked_bar(shares: Sequence[tuple[str, float]], width: int) -> Text:
    bar, drawn, total = Text(), 0, 0.0
    for index, (_, share) in enumerate(shares):
        total += share
        end = min(round(total * width), width)
        bar.append("█" * max(end - drawn, 0), _STAGE_COLOURS[index % len(_STAGE_COLOURS)])
        drawn = max(end, drawn)
    return bar.append("░" * (width - drawn), "bright_black")


def _legend(shares: Sequence[tuple[str, float]]) -> Iterable[Text]:
    for index, (stage, share) in enumerate(shares):
        colour = _STAGE_COLOURS[index % len(_STAGE_COLOURS)]
        yield Text.assemble(("■ ", colour), f"{stage} ", (f"{share:.0%}", "bold"))


def _pair(pair: tuple[str, str]) -> Text:
    return Text.assemble((f"{pair[0]} ", "dim"), pair[1])


def _packed(items: Iterable[Text], width: int) -> Text:
    """Items side by side, two spaces apart, in lines of at most `width`; no item is broken across lines."""
    text, used = Text(), 0
    for item in items:
        gap = "" if not used else "  " if used + 2 + len(item) <= width else "\n"
        text.append(gap).append_text(item)
        used = len(item) + (used + 2 if gap == "  " else 0)
    return text


def _number(value: float) -> str:
    """Three significant digits below a thousand, whole numbers with separators above."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


@contextlib.contextmanager
def logging_to(path: Path, view: LiveView, *, quiet: bool, speaker: str = "") -> Iterator[None]:
    """Send this package's log to a file and, from INFO on, above the live view.

    speaker: who has no view of its own; its warnings go to the standard error, behind this.
    """
    handlers: list[logging.Handler] = [_LogFile(path)]
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if not quiet:
        handlers.append(_ViewHandler(view))
    if speaker:
        handlers.append(logging.StreamHandler())
        handlers[-1].setLevel(logging.WARNING)
        handlers[-1].setFormatter(logging.Formatter(speaker + "%(message)s"))
    _LOG.setLevel(logging.DEBUG)
    for handler in handlers:
        _LOG.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            _LOG.removeHandler(handler)
            handler.close()


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk must not print a stack for every line; the terminal has what was said."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _ViewHandler(logging.Handler):
    def __init__(self, view: LiveView) -> None:
        super().__init__(logging.INFO)
        self.view = view

    def emit(self, record: logging.LogRecord) -> None:
        self.view.message(record.getMessage())
