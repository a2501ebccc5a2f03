"""What a run writes: episode statistics, and numbers to files.

It measures nothing but episodes: every other number comes in as a plain float. It knows neither torch nor the
training loop, and draws nothing (live.py does). All names that are written are listed in docs/metrics.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pronghorn.errors import MissingExtraError, RunDirError, UsageError
from pronghorn.types import FIRST, LAST, LOST, STEP, Ready

METRICS_FILE = "metrics.jsonl"
POPULATION_FILE = "population.jsonl"  # a line per pronghorn.population.pbt:Decision
RATINGS_FILE = "ratings.jsonl"  # a line per interval: every player's rating
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

    def __init__(
        self, num_rows: int, tasks: tuple[str, ...], task_ids: NDArray[np.int64], window: int = 100, kept: int = 0
    ) -> None:
        """
        num_rows: rows of the pool; tasks: names of the tasks; task_ids: [num_rows] index of each row's task.
        window: finished episodes that the means are taken over, for all tasks together and for each task.
        kept: finished episodes that `recent` can look back on, if more.
        """
        self._tasks = tasks
        self._task_ids = np.asarray(task_ids)
        self._window = window
        self._lock = threading.Lock()
        self._returns = np.zeros(num_rows, np.float64)  # running sums; float64: long episodes of small rewards
        self._lengths = np.zeros(num_rows, np.int64)
        self._num_episodes = 0
        self._kept = max(window, kept)
        self._num_whole = 0
        self._lineage = 0  # how often the policy was replaced by another
        self._began = np.zeros(num_rows, np.int64)  # lineage that began each row's episode
        self._finished: deque[tuple[float, int]] = deque(maxlen=self._kept)
        self._num_by_task = dict.fromkeys(tasks, 0)
        self._finished_by_task: dict[str, deque[float]] = {task: deque(maxlen=window) for task in tasks}
        self._records: dict[str, deque[float]] = {}

    @property
    def num_episodes(self) -> int:
        """Episodes finished since the run began, over resumes."""
        return self._num_episodes

    @property
    def num_whole(self) -> int:
        """Those of them that one policy played from beginning to end."""
        return self._num_whole

    def begin(self, rows: NDArray[np.int64], lineage: int) -> None:
        """These rows begin an episode under the policy of that lineage. Untold, it is the first one."""
        with self._lock:
            self._began[rows] = lineage

    def observe(self, ready: Ready) -> None:
        """Account for one `recv`: rewards of STEP and LAST rows, and the episodes that ended."""
        moved = (ready.event == STEP) | (ready.event == LAST)
        fresh = (ready.event == FIRST) | (ready.event == LOST)
        over = ready.rows[moved & ready.episode_over]  # a LAST alone may be a life loss, which ends no episode
        with self._lock:
            of_others = set(over[self._began[over] != self._lineage].tolist())  # begun by a policy replaced since
            self._returns[ready.rows[moved]] += ready.reward[moved]
            self._lengths[ready.rows[moved]] += 1
            for row in over:
                self._finish(int(row))
            self._restart(over)
            self._restart(ready.rows[fresh])
            for record in ready.records:
                if record["row"] not in of_others:
                    self._keep_record(record)

    def absorb(self, first_row: int, report: Mapping[str, Any]) -> None:
        """Take what another process observed of its rows, here those from first_row on.

        report: "episodes", each (row, return, steps); "records" of their ends; "lengths" [rows] of unfinished ones.
        """
        with self._lock:
            lengths = np.asarray(report["lengths"], np.int64)
            rows = slice(first_row, first_row + len(lengths))
            self._began[rows] = self._lineage  # who began an episode there is not told: one that goes on counts as its
            for row, episode_return, length in report["episodes"]:
                self._count_episode(first_row + int(row), float(episode_return), int(length))
            for record in report["records"]:
                self._keep_record(record)
            self._lengths[rows] = lengths

    def _finish(self, row: int) -> None:
        self._count_episode(row, float(self._returns[row]), int(self._lengths[row]))

    def _count_episode(self, row: int, episode_return: float, length: int) -> None:
        task = self._tasks[self._task_ids[row]]
        self._num_episodes += 1
        self._num_by_task[task] += 1
        if self._began[row] != self._lineage:
            return
        self._num_whole += 1
        self._finished.append((episode_return, length))
        self._finished_by_task[task].append(episode_return)

    def _restart(self, rows: NDArray[np.int64]) -> None:
        self._returns[rows] = 0.0
        self._lengths[rows] = 0

    def _keep_record(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "row" and isinstance(value, (int, float)):
                self._records.setdefault(name, deque(maxlen=self._kept)).append(float(value))

    def snapshot(self) -> dict[str, float]:
        """The statistics now, by their names in docs/metrics.md.

        Means are absent, not NaN, until an episode has ended; `running_episode_length_max` (steps) tells how
        long the longest unfinished one already is.
        """
        with self._lock:
            out: dict[str, float] = {"episodes": self._num_episodes}
            out["running_episode_length_max"] = int(self._lengths.max(initial=0))
            if self._finished:
                returns, lengths = np.array(self._finished, np.float64)[-self._window :].T
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
                if values:
                    out[f"episode/{name}"] = float(np.mean(list(values)[-self._window :]))
            return out

    def recent(self, name: str, count: int) -> float | None:
        """Mean of the last `count` episodes' "return", or of a number of their records; None: there is none yet."""
        with self._lock:
            values = [value for value, _ in self._finished] if name == "return" else list(self._records.get(name, ()))
            return float(np.mean(values[-count:])) if values else None

    def follow(self, lineage: int) -> None:
        """The policy is of this lineage now, and still itself: what is known of it stays."""
        with self._lock:
            self._lineage = lineage

    def inherit(self, other: EpisodeTracker, lineage: int) -> None:
        """The policy was overwritten by another's, and is of this lineage now: what was known of that is known of it.

        Counts go on.

        Episodes that are under way are of two policies, so no mean will take them in. The first to end after that are
        short ones; beside the inherited ones they do not make the same policy look worse.
        """
        theirs = other.state()
        with self._lock:
            self._finished = deque(((float(r), int(n)) for r, n in theirs["finished"]), self._kept)
            for task, known in theirs["tasks"].items():
                self._finished_by_task[task] = deque(known["returns"], self._window)
            self._records = {name: deque(values, self._kept) for name, values in theirs["records"].items()}
            self._lineage = lineage

    def state(self) -> dict[str, Any]:
        """Counts and windows as JSON values, without unfinished episodes: they end with the process."""
        with self._lock:
            return {
                "num_episodes": self._num_episodes,
                "num_whole": self._num_whole,
                "lineage": self._lineage,
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
            self._num_whole = int(state.get("num_whole", self._num_episodes))
            self._lineage = int(state.get("lineage", 0))
            self._finished = deque(((float(r), int(n)) for r, n in state["finished"]), self._kept)
            for task in self._tasks:
                if task in state["tasks"]:
                    self._num_by_task[task] = int(state["tasks"][task]["num_episodes"])
                    self._finished_by_task[task] = deque(state["tasks"][task]["returns"], self._window)
            self._records = {name: deque(values, self._kept) for name, values in state["records"].items()}
            self._restart(np.arange(len(self._returns)))


def episodes_of(state: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """What one of `size` learners goes on from, of a saved policy's state: the episodes of learner `rank`.

    Where there are fewer learners than before, the first takes over the counts of those that are no more; a new one
    begins with nothing.
    """
    saved = [state["episodes"], *state.get("learners", ())]
    if rank >= len(saved):
        return {"num_episodes": 0, "finished": [], "tasks": {}, "records": {}}
    own = {**saved[rank], "tasks": {task: dict(known) for task, known in saved[rank]["tasks"].items()}}
    for gone in saved[size:] if rank == 0 else ():
        own["num_episodes"] += gone["num_episodes"]
        own["num_whole"] = own.get("num_whole", 0) + gone.get("num_whole", 0)
        for task, known in gone["tasks"].items():
            if task in own["tasks"]:
                own["tasks"][task]["num_episodes"] += known["num_episodes"]
    return own


# ---------------------------------------------------------------------------------------------- files


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, as `read_lines` gives them."""
    return read_lines(run_dir / METRICS_FILE)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that holds one a line, in order; empty if there is no file.

    A last line that a crash tore is left out; a line torn elsewhere is left out as well, with a warning.
    """
    if not path.exists():
        return []
    # A damaged byte is no reason to lose the other lines: replaced, it makes its own line no JSON.
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    parsed = [_parse_line(line) for line in lines]
    torn = [number for number, record in enumerate(parsed[:-1], 1) if record is None]
    if torn:
        _LOG.warning("%s: line %s is no JSON object and was left out", path, ", ".join(map(str, torn)))
    return [record for record in parsed if record is not None]


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or numbers or depths that no line of ours has
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


@contextlib.contextmanager
def _said(text: str) -> Iterator[None]:
    """Log an error of the disk instead of raising it: the run's end matters more."""
    try:
        yield
    except OSError as error:
        _LOG.error(text, error.strerror or error)


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
        values = {name: plain(value) for name, value in flat.items() if value is not None}
        nonfinite = [name for name, value in values.items() if not _is_finite(value)]
        record = {name: value for name, value in values.items() if name not in nonfinite}
        self._append({**record, "nonfinite": nonfinite} if nonfinite else record)
        for sink in self._sinks:
            sink.write(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()  # a line at a time: a crash loses none that was written

    def close(self) -> None:
        """Flush and close everything; safe to call twice."""
        for sink in self._sinks:
            with _said("more metrics cannot be written: %s"):
                sink.close()
        self._sinks = []
        with _said("the last metrics cannot be written: %s"):
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plain(value: Any) -> Any:
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


def limiting_stage(shares: Mapping[str, float]) -> str | None:
    """What sets the pace, by the shares of time that the threads spent in each stage; None if neither did a thing.

    The sampler waits for slots while learning is the slower side, the learner for data while sampling is. Of sampling
    it is what took the sampler longest: 'simulation' (it waited for environments), 'acting' or 'transport' (recording).
    Where it mostly waited for remote actors, it is what took those longest.
    """
    waits = shares["sampler: envs"] >= max(shares["sampler: act"], shares["sampler: record"])
    who = "actors" if "actors: envs" in shares and waits else "sampler"
    sampling = {"simulation": f"{who}: envs", "acting": f"{who}: act", "transport": f"{who}: record"}
    if shares["sampler: slots"] > shares["learner: wait"]:
        return "learning"
    slowest = max(sampling, key=lambda stage: shares[sampling[stage]])
    return slowest if shares[sampling[slowest]] > 0.0 else None


def merged(reports: list[dict[str, float]]) -> dict[str, float]:
    """Means over the interval's iterations; policy_lag_min and _max are extremes, lr is the last."""
    if not reports:
        return {}
    means = {name: float(np.mean([r[name] for r in reports if name in r])) for name in reports[-1]}
    means["policy_lag_min"] = min(r["policy_lag_min"] for r in reports)
    means["policy_lag_max"] = max(r["policy_lag_max"] for r in reports)
    if "lr" in reports[-1]:
        means["lr"] = reports[-1]["lr"]
    return means


def pooled(snapshots: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Episode statistics of several policies as one: counts are sums, extremes are extremes, means are means of means.

    Of a single policy they are its own.
    """
    if len(snapshots) == 1:
        return dict(snapshots[0])
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for snapshot in snapshots for name in snapshot):
        values = [snapshot[name] for snapshot in snapshots if name in snapshot]
        if name == "episodes" or name.startswith("episodes/"):
            out[name] = sum(values)
        elif name.endswith("_max"):
            out[name] = max(values)
        else:
            out[name] = min(values) if name.endswith("_min") else float(np.mean(values))
    return out


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
