"""What a run says: episode statistics, numbers to files, and the live view in the terminal.

It measures nothing but episodes: every other number comes in as a plain float. It knows neither torch nor the
training loop. All names that are written are listed in docs/metrics.md.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.box import ROUNDED
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pronghorn.errors import MissingExtraError, RunDirError, UsageError
from pronghorn.types import Event, Ready

METRICS_FILE = "metrics.jsonl"
AXES = (
    "time_s",
    "steps",
    "frames",
    "updates",
)  # every line carries them, so no metric needs a counter of its own

_LOG = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------- episodes


class EpisodeTracker:
    """Returns and lengths of finished episodes, summed from the raw rewards that the environments gave.

    Nothing is taken from info fields, so a changed info layout cannot make returns vanish. One thread
    observes while another reads; a lock keeps both consistent.
    """

    def __init__(self, num_rows: int, tasks: tuple[str, ...], task_ids: NDArray[np.int64], window: int = 100) -> None:
        """
        num_rows: rows of the pool; tasks: names of the tasks; task_ids: [num_rows] index of each row's task.
        window: finished episodes that the means are taken over, for all tasks together and for each task.
        """
        self._tasks = tasks
        self._task_ids = np.asarray(task_ids)
        self._window = window
        self._lock = threading.Lock()
        self._returns = np.zeros(num_rows, np.float64)  # running sums; float64: long episodes of small rewards
        self._lengths = np.zeros(num_rows, np.int64)
        self._num_episodes = 0
        self._finished: deque[tuple[float, int]] = deque(maxlen=window)
        self._num_by_task = dict.fromkeys(tasks, 0)
        self._finished_by_task: dict[str, deque[float]] = {task: deque(maxlen=window) for task in tasks}
        self._records: dict[str, deque[float]] = {}

    @property
    def num_episodes(self) -> int:
        """Episodes finished since the run began, over resumes."""
        return self._num_episodes

    def observe(self, ready: Ready) -> None:
        """Account for one `recv`: rewards of STEP and LAST rows, and the episodes that ended."""
        moved = (ready.event == Event.STEP) | (ready.event == Event.LAST)
        fresh = (ready.event == Event.FIRST) | (ready.event == Event.LOST)
        over = ready.rows[moved & ready.episode_over]  # a LAST alone may be a life loss, which ends no episode
        with self._lock:
            self._returns[ready.rows[moved]] += ready.reward[moved]
            self._lengths[ready.rows[moved]] += 1
            for row in over:
                self._finish(int(row))
            self._restart(over)
            self._restart(ready.rows[fresh])
            for record in ready.records:
                self._keep_record(record)

    def _finish(self, row: int) -> None:
        task = self._tasks[self._task_ids[row]]
        episode_return = float(self._returns[row])
        self._num_episodes += 1
        self._num_by_task[task] += 1
        self._finished.append((episode_return, int(self._lengths[row])))
        self._finished_by_task[task].append(episode_return)

    def _restart(self, rows: NDArray[np.int64]) -> None:
        self._returns[rows] = 0.0
        self._lengths[rows] = 0

    def _keep_record(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "row" and isinstance(value, (int, float)):
                self._records.setdefault(name, deque(maxlen=self._window)).append(float(value))

    def snapshot(self) -> dict[str, float]:
        """The statistics now, by their names in docs/metrics.md.

        Means are absent, not NaN, until an episode has ended; `running_episode_length_max` (steps) tells how
        long the longest unfinished one already is.
        """
        with self._lock:
            out: dict[str, float] = {"episodes": self._num_episodes}
            out["running_episode_length_max"] = int(self._lengths.max(initial=0))
            if self._finished:
                returns, lengths = np.array(self._finished, np.float64).T
                out["return_mean"] = float(returns.mean())
                out["return_min"] = float(returns.min())
                out["return_max"] = float(returns.max())
                out["return_std"] = float(returns.std())
                out["episode_length_mean"] = float(lengths.mean())
            for task, of_task in self._finished_by_task.items():
                if of_task:
                    out[f"return_mean/{task}"] = float(np.mean(of_task))
                    out[f"episodes/{task}"] = self._num_by_task[task]
            for name, values in self._records.items():
                out[f"episode/{name}"] = float(np.mean(values))
            return out

    def state(self) -> dict[str, Any]:
        """Counts and windows as JSON values, without unfinished episodes: they end with the process."""
        with self._lock:
            return {
                "num_episodes": self._num_episodes,
                "finished": [list(episode) for episode in self._finished],
                "tasks": {
                    task: {"num_episodes": self._num_by_task[task], "returns": list(returns)}
                    for task, returns in self._finished_by_task.items()
                },
                "records": {name: list(values) for name, values in self._records.items()},
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Tasks are matched by name; one that the run no longer has is left out."""
        with self._lock:
            self._num_episodes = int(state["num_episodes"])
            self._finished = deque(((float(r), int(n)) for r, n in state["finished"]), self._window)
            for task in self._tasks:
                if task in state["tasks"]:
                    self._num_by_task[task] = int(state["tasks"][task]["num_episodes"])
                    self._finished_by_task[task] = deque(state["tasks"][task]["returns"], self._window)
            self._records = {name: deque(values, self._window) for name, values in state["records"].items()}
            self._restart(np.arange(len(self._returns)))


# ---------------------------------------------------------------------------------------------- files


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl in order; empty if there is no file.

    A last line that a crash tore is left out; a line torn elsewhere is left out as well, with a warning.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    parsed = [_parse_line(line) for line in path.read_text(encoding="utf-8").splitlines()]
    torn = [number for number, record in enumerate(parsed[:-1], 1) if record is None]
    if torn:
        _LOG.warning("%s: line %s is no JSON object and was left out", path, ", ".join(map(str, torn)))
    return [record for record in parsed if record is not None]


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def flatten(metrics: Mapping[str, Any], separator: str = "/", prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level of names: {"stages": {"act": 0.4}} becomes {"stages/act": 0.4}."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, separator, f"{prefix}{name}{separator}"))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


class _Sink(Protocol):
    def write(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class MetricsWriter:
    """Appends a run's numbers to metrics.jsonl, to TensorBoard events and, if asked, to Weights & Biases.

    All three use the same names and `steps` as the x axis. A number that is not finite is left out of the
    line and named in its `nonfinite` list, so that the file is always valid JSON and a NaN still shows.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        tensorboard: bool = True,
        wandb: bool = False,
        config: Mapping[str, Any] | None = None,
        resume_steps: int | None = None,
    ) -> None:
        """
        config: the run's settings, shown by W&B.
        resume_steps: None for a new run; else the `steps` of the checkpoint that the run continues from.
            Lines beyond it, written after that checkpoint and before a crash, will be trained again: they are
            cut from metrics.jsonl (and hidden in TensorBoard), and a line with `lines_cut` says how many.
        Raises RunDirError if a new run meets metrics of an earlier one, MissingExtraError without W&B.
        """
        self._path = run_dir / METRICS_FILE
        if resume_steps is None and self._path.exists() and self._path.stat().st_size:
            raise RunDirError(
                f"{self._path} holds the metrics of an earlier run: resume that run (--resume) "
                "or choose another --run-dir"
            )
        self._sinks: list[_Sink] = []
        if wandb:  # first: it is the one that can fail
            self._sinks.append(_WandbSink(run_dir, config))
        if tensorboard:
            self._sinks.append(_TensorBoardSink(run_dir, resume_steps))
        self.lines_cut = 0 if resume_steps is None else _cut_beyond(self._path, resume_steps)
        self._file = self._path.open("a", encoding="utf-8")
        if resume_steps is not None:
            self._note_resume(run_dir, resume_steps)

    def _note_resume(self, run_dir: Path, resume_steps: int) -> None:
        lines = read_metrics(run_dir)
        last = lines[-1] if lines else {}
        record = {name: last.get(name, 0) for name in AXES}
        self._append({**record, "steps": resume_steps, "event": "resume", "lines_cut": self.lines_cut})
        if self.lines_cut:
            _LOG.info(
                "cut %d lines beyond step %d from %s: written after the checkpoint, they are trained again",
                self.lines_cut,
                resume_steps,
                self._path,
            )

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write one record: numbers, strings, lists of them, or nested mappings of them (joined by '/').

        Raises UsageError unless it carries time_s, steps, frames and updates.
        """
        flat = flatten(metrics)
        missing = [name for name in AXES if name not in flat]
        if missing:
            raise UsageError(f"a metrics record lacks {', '.join(missing)}: every record carries {', '.join(AXES)}")
        plain = {name: _plain(value) for name, value in flat.items() if value is not None}
        nonfinite = [name for name, value in plain.items() if not _is_finite(value)]
        record = {name: value for name, value in plain.items() if name not in nonfinite}
        self._append({**record, "nonfinite": nonfinite} if nonfinite else record)
        for sink in self._sinks:
            sink.write(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()  # a line at a time: a crash loses none that was written

    def close(self) -> None:
        """Flush and close everything; safe to call twice."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as Python values."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def _is_finite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _cut_beyond(path: Path, steps: int) -> int:
    """Cut the lines beyond `steps`, and any that a crash tore, by an atomic rewrite. Returns how many."""
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if (record := _parse_line(line)) is not None and record.get("steps", 0) <= steps]
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return len(lines) - len(kept)


class _TensorBoardSink:
    """Scalars as TensorBoard events, written by the tensorboard package itself and so without torch."""

    def __init__(self, run_dir: Path, resume_steps: int | None) -> None:
        self._event: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer_module: Any = import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer_module.EventFileWriter(str(run_dir), flush_secs=10)
        if resume_steps is not None:
            # TensorBoard hides the events of earlier files from this step on, as if they had been cut.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(step=resume_steps + 1, session_log=start)

    def write(self, record: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if isinstance(value, (int, float)) and name != "steps"
        ]
        self._add(step=int(record["steps"]), summary=self._summary(value=values))

    def _add(self, **fields: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), **fields))

    def close(self) -> None:
        self._writer.close()


class _WandbSink:
    """Scalars to Weights & Biases; a resumed run continues under the id that its directory keeps."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any] | None) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb", "Logging to Weights & Biases") from error
        id_file = run_dir / "wandb_id.txt"
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else os.urandom(4).hex()
        id_file.write_text(run_id, encoding="utf-8")
        settings = dict(config or {})
        self._run = wandb.init(
            project="pronghorn",
            name=run_dir.name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=settings,
        )
        self._run.define_metric("*", step_metric="steps")  # W&B's own counter would drop out-of-order points

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in record.items() if isinstance(value, (int, float))})

    def close(self) -> None:
        self._run.finish()


# ---------------------------------------------------------------------------------------------- terminal

_LOSSES = {
    "policy_loss": "policy",
    "value_loss": "value",
    "entropy": "entropy",
    "kl": "kl",
    "grad_norm": "grad norm",
}
_STAGE_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_MAX_CURVE_POINTS = 2048


class LiveView:
    """A live panel when the output is a terminal, else one plain line every `every_s` seconds.

    Numbers come in by `update`, under the names of docs/metrics.md; what is missing is not shown. Among them
    `stages`: {"sampler: waiting for envs": 0.4, …}, shares of each thread's time, and `eval`: {"mean": …, …}.
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
        self._metrics: dict[str, Any] = {}
        self._curve: list[tuple[float, float]] = []  # (steps, return_mean)
        self._best = -math.inf
        self._speed = 0.0  # steps/s, smoothed, for the time that remains

    def start(self) -> None:
        """Begin to draw. Text that anything prints from now on appears above the panel."""
        if not self._plain and self._live is None:
            self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4)
            self._live.start()

    def stop(self) -> None:
        """Draw the last state, leave it on the screen, and stop; safe to call twice."""
        if self._live is not None:
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
        new = {name: _plain(value) for name, value in flatten(metrics).items() if value is not None}
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
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

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
        """Lag, evaluation and mishaps, as (label, text); only what there is."""
        now = self._metrics
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
