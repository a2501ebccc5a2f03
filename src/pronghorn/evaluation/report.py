"""Turns finished or running run directories into pictures: one self-contained HTML page, or one PNG.

It reads what the runs wrote and computes nothing new but overall averages; it plays no episode and needs
neither torch nor a network. The page's charts are SVG in the page's own colours, so they follow the reader's
light or dark theme.
"""

from __future__ import annotations

import base64
import json
import math
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pronghorn.errors import RunDirError, UsageError
from pronghorn.evaluation.charts import STYLE, Dot, Points, Series, colour, is_number, line_chart, short, text, thin
from pronghorn.evaluation.report_population import STYLE as POPULATION_STYLE
from pronghorn.evaluation.report_population import (
    Population,
    policy_charts,
    population_charts,
    rating_charts,
    read_population,
)
from pronghorn.training.metrics import METRICS_FILE, flatten, read_metrics

MAX_VIDEO_BYTES = 20_000_000
MAX_EVALUATIONS = 12
NO_EPISODE = "no episode has finished yet"

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run directory holds, as far as a report needs it; `notes` tells what could not be read."""

    name: str
    path: Path
    lines: list[dict[str, Any]]
    config: dict[str, Any]
    evaluations: list[tuple[str, dict[str, Any]]]
    video: Path | None
    command: str
    population: Population
    notes: list[str] = field(default_factory=list)

    def points(self, x: str, y: str, scale: float = 1.0) -> Points:
        """(x · scale, y) of every line that has both."""
        return [(line[x] * scale, line[y]) for line in self.lines if _has(line, x) and _has(line, y)]

    def changes(self, x: str, y: str, scale: float = 1.0) -> Points:
        """The points at which y changed: a number that stands on every line until a newer one replaces it."""
        points = self.points(x, y, scale)
        before = [math.nan, *(value for _, value in points)]
        return [point for point, last in zip(points, before, strict=False) if point[1] != last]

    def last(self, name: str) -> float | None:
        """The newest value of a metric, or None."""
        return next((line[name] for line in reversed(self.lines) if _has(line, name)), None)


def _has(line: Record, name: str) -> bool:
    return is_number(line.get(name))


def read_run(run_dir: Path, name: str | None = None) -> Run:
    """Raises RunDirError if the directory holds no metrics; anything else that is missing becomes a note."""
    lines = read_metrics(run_dir)
    if not lines:
        state = "is empty" if (run_dir / METRICS_FILE).exists() else "does not exist"
        raise RunDirError(
            f"nothing to report on in {run_dir}: {run_dir / METRICS_FILE} {state}. "
            "Give the directory of a run that has trained for at least a few seconds"
        )
    notes: list[str] = []
    config = _read_config(run_dir / "config.toml", notes)
    return Run(
        name=name or run_dir.resolve().name,
        path=run_dir,
        lines=lines,
        config=config,
        evaluations=_read_evaluations(run_dir / "eval", notes),
        video=_newest_video(run_dir / "videos", notes),
        command=_command(run_dir, config),
        population=read_population(run_dir, lines, config, notes),
        notes=notes,
    )


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")), separator=".")
    except FileNotFoundError:
        notes.append("config.toml is missing: its settings are not shown")
    except tomllib.TOMLDecodeError as error:
        notes.append(f"config.toml cannot be read: {error}")
    return {}


def _read_evaluations(folder: Path, notes: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """(file name, result) of the newest evaluations, oldest first."""
    evaluations = []
    files = sorted(folder.glob("*.json"), key=lambda file: (file.stat().st_mtime, file.name))
    for file in files[-MAX_EVALUATIONS:]:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            notes.append(f"eval/{file.name} cannot be read: {error}")
            continue
        if isinstance(result, dict) and _has(result, "mean"):
            evaluations.append((file.stem, result))
        else:
            notes.append(f"eval/{file.name} holds no evaluation: it has no 'mean'")
    if len(files) > MAX_EVALUATIONS:
        notes.append(f"only the newest {MAX_EVALUATIONS} of {len(files)} evaluations are shown")
    return evaluations


def _newest_video(folder: Path, notes: list[str]) -> Path | None:
    videos = sorted(folder.glob("*.mp4"), key=lambda file: (file.stat().st_mtime, file.name))
    if not videos:
        return None
    if videos[-1].stat().st_size >= MAX_VIDEO_BYTES:
        notes.append(f"the video {videos[-1]} is too large to be part of this page")
        return None
    return videos[-1]


def _command(run_dir: Path, config: Mapping[str, Any]) -> str:
    """The command that trains such a run again, from its saved settings."""
    if not config:
        return ""
    words = ["pronghorn", "train", str(config.get("env.id", "ENV")), "--config", str(run_dir / "config.toml")]
    return shlex.join([*words, "--run-dir", f"{run_dir}-again"])


# ---------------------------------------------------------------------------------------------- PNG


def plot_curve(run_dir: Path, out: Path) -> None:
    """Write the run's learning curve (mean return ± one standard deviation, against frames) as a PNG.

    A run without a finished episode gives a picture that says so. Raises RunDirError if there are no metrics.
    """
    from matplotlib.figure import Figure  # pyplot would bring global state and look for a display

    run = read_run(run_dir)
    curve = run.points("frames", "return_mean")
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(str(run.config.get("env.id") or run.name), loc="left", fontweight="bold")
    axes.set(xlabel="frames", ylabel="mean return")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if curve:
        axes.plot(*zip(*curve, strict=True), color="#2a6fdb", linewidth=2, marker="o" if len(curve) == 1 else None)
        band = [line for line in run.lines if _has(line, "return_mean") and _has(line, "return_std")]
        axes.fill_between(
            [line["frames"] for line in band],
            [line["return_mean"] - line["return_std"] for line in band],
            [line["return_mean"] + line["return_std"] for line in band],
            color="#2a6fdb",
            alpha=0.15,
            linewidth=0,
        )
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
    else:
        axes.text(0.5, 0.5, NO_EPISODE, transform=axes.transAxes, ha="center", color="gray")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


# ---------------------------------------------------------------------------------------------- page


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write one HTML page about the runs that needs nothing beside it: no network, no script, no other file.

    Raises UsageError without runs, RunDirError if one holds no metrics.
    """
    if not run_dirs:
        raise UsageError("a report needs at least one run directory: pronghorn report RUN … --out report.html")
    names = [run_dir.resolve().name for run_dir in run_dirs]
    unique = len(set(names)) == len(names)
    runs = [read_run(run_dir, None if unique else str(run_dir)) for run_dir in run_dirs]
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(_page(runs), encoding="utf-8")
    temporary.replace(out)  # a reader, or a browser that reloads, never sees half a page


def _page(runs: Sequence[Run]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    sections = [
        _section("Summary", _summary(runs)),
        _section("Learning", _charts(runs, _learning_charts(runs))),
        _section("Policies", _of_each(runs, policy_charts)),
        _section("Population", _of_each(runs, population_charts)),
        _section("Ratings", _of_each(runs, rating_charts)),
        _section("Evaluation", _evaluations(runs)),
        _section("Video", _videos(runs)),
        _section("Speed and lag", _charts(runs, _speed_charts())),
        _section("Optimisation", _charts(runs, _loss_charts())),
        _section("Settings", _settings(runs)),
        _section("Notes", _notes(runs)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)} · Pronghorn</title><style>{_STYLE}{STYLE}{POPULATION_STYLE}</style></head><body><main>"
        f"<header><h1>{text(title)}</h1>{_legend(runs)}</header>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _of_each(runs: Sequence[Run], draw: Callable[[Population, str], str]) -> str:
    """What is drawn of each run by itself, with the run's name before the captions if there are several."""
    return "".join(draw(run.population, f"{text(run.name)}: " if len(runs) > 1 else "") for run in runs)


def _legend(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"<p class=dim>{text(runs[0].config.get('env.id', ''))}</p>"
    items = (f"<li><i class=k{index % 8}></i>{text(run.name)}</li>" for index, run in enumerate(runs))
    return f"<ul class=legend>{''.join(items)}</ul>"


def _summary(runs: Sequence[Run]) -> str:
    columns: list[tuple[str, Callable[[Run], str]]] = [
        ("run", lambda run: text(run.name)),
        ("environment", lambda run: text(run.config.get("env.id", "–"))),
        ("algorithm", lambda run: text(run.config.get("algo", "–"))),
        ("steps", lambda run: _count(run.last("steps"))),
        ("frames", lambda run: _count(run.last("frames"))),
        ("time", lambda run: _duration(run.last("time_s"))),
        ("steps/s", lambda run: _count(_overall_speed(run))),
        ("episodes", lambda run: _count(run.last("episodes"))),
        ("last return", lambda run: _value(run.last("return_mean"), NO_EPISODE)),
        (
            "best return",
            lambda run: _value(max((y for _, y in run.points("steps", "return_mean")), default=None)),
        ),
        ("restarts", lambda run: _count(run.last("worker_restarts"))),
        ("unrolls lost", lambda run: _count(run.last("unrolls_lost"))),
    ]
    return _table([name for name, _ in columns], ([cell(run) for _, cell in columns] for run in runs))


def _overall_speed(run: Run) -> float | None:
    steps, time_s = run.last("steps"), run.last("time_s")
    return steps / time_s if steps is not None and time_s else None


def _evaluations(runs: Sequence[Run]) -> str:
    head = [
        "run",
        "evaluation",
        "policy",
        "checkpoint",
        "episodes",
        "mean return",
        "median",
        "IQM",
        "95 % interval",
    ]
    rows = [
        [
            text(run.name),
            text(name),
            text(result.get("policy", "–")),
            text(result.get("checkpoint") or "–"),
            _count(result.get("episodes")),
            _value(result["mean"]) + (f" ± {_value(result['stderr'])}" if _has(result, "stderr") else ""),
            _value(result.get("median")),
            _value(result.get("iqm")),
            " to ".join(_value(end) for end in result.get("iqm_ci95") or []) or "–",
        ]
        for run in runs
        for name, result in run.evaluations
    ]
    return _table(head, rows) if rows else ""


def _videos(runs: Sequence[Run]) -> str:
    figures = []
    for run in runs:
        if run.video is not None:
            data = base64.b64encode(run.video.read_bytes()).decode("ascii")
            caption = f"<figcaption>{text(run.name)}: {text(run.video.name)}</figcaption>"
            source = f'src="data:video/mp4;base64,{data}"'
            figures.append(f"<figure><video controls loop muted {source}></video>{caption}</figure>")
    return f"<div class=grid>{''.join(figures)}</div>" if figures else ""


def _settings(runs: Sequence[Run]) -> str:
    names = sorted({name for run in runs for name in run.config})
    parts = []
    if len(runs) > 1 and names:
        differ = [name for name in names if len({repr(run.config.get(name)) for run in runs}) > 1]
        rows = ([text(name), *(text(run.config.get(name, "–")) for run in runs)] for name in differ)
        same = "<p class=dim>All settings are the same.</p>"
        parts.append(_table(["differs", *(text(run.name) for run in runs)], rows) if differ else same)
    parts += [
        f"<p class=dim>Train {text(run.name)} again</p><pre>{text(run.command)}</pre>" for run in runs if run.command
    ]
    for run in runs:
        if run.config:
            rows = ([text(name), text(value)] for name, value in run.config.items())
            table = _table(["setting", "value"], rows)
            parts.append(f"<details><summary>All settings of {text(run.name)}</summary>{table}</details>")
    return "".join(parts)


def _notes(runs: Sequence[Run]) -> str:
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    for run in runs:
        if not run.points("steps", "return_mean"):
            longest = run.last("running_episode_length_max")
            tail = f" (longest running: {longest:,.0f} steps)" if longest is not None else ""
            notes.append(f"{run.name}: {NO_EPISODE}{tail}")
        resumes = sum(line.get("event") == "resume" for line in run.lines)
        if resumes:
            notes.append(f"{run.name}: resumed {resumes} time{'s' if resumes > 1 else ''}")
        bad = sorted({name for line in run.lines for name in line.get("nonfinite", [])})
        if bad:
            notes.append(f"{run.name}: not a finite number at some point: {', '.join(bad)}")
    return f"<ul>{''.join(f'<li>{text(note)}</li>' for note in notes)}</ul>" if notes else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already. Wide tables scroll inside their own box."""
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


# ---------------------------------------------------------------------------------------------- charts


@dataclass(frozen=True)
class Chart:
    """One picture: `y` against `x` (times `x_scale`) for each run, perhaps with a band between two metrics."""

    title: str
    x: str
    x_label: str
    y: str
    x_scale: float = 1.0
    band: tuple[str, str] | None = None
    dots: str = ""  # a metric drawn as single dots: evaluations
    empty: str = "nothing recorded"
    from_zero: bool = False


def _learning_charts(runs: Sequence[Run]) -> list[Chart]:
    steps = _steps_label(runs)
    by_time = Chart("Mean return by wall-clock time", "time_s", "minutes", "return_mean", 1 / 60)
    return [
        Chart("Mean return", "steps", steps, "return_mean", dots="eval/mean", empty=NO_EPISODE),
        replace(by_time, dots="eval/mean", empty=NO_EPISODE),
        Chart("Episode length, steps", "steps", steps, "episode_length_mean", empty=NO_EPISODE),
        Chart("Explained variance of the value", "steps", steps, "explained_variance"),
    ]


def _steps_label(runs: Sequence[Run]) -> str:
    """Names the x axis, and how many frames a step covers if that is the same for all runs."""
    ratios = {line["frames"] / line["steps"] for run in runs for line in run.lines if line.get("steps")}
    ratio = ratios.pop() if len(ratios) == 1 else 0.0
    return f"steps (1 step = {ratio:g} frames)" if ratio > 1 else "steps"


def _speed_charts() -> list[Chart]:
    lag = ("policy_lag_min", "policy_lag_max")
    lag_title = "Policy lag, iterations (mean; min to max)"
    return [
        Chart("Speed, steps/s", "time_s", "minutes", "steps_per_s", 1 / 60, from_zero=True),
        Chart(lag_title, "steps", "steps", "policy_lag_mean", band=lag, from_zero=True),
    ]


def _loss_charts() -> list[Chart]:
    titles = {
        "policy_loss": "Policy loss",
        "value_loss": "Value loss",
        "entropy": "Entropy, nats",
        "kl": "KL of behaviour from target policy, nats",
        "ratio_mean": "Mean probability ratio",
        "clip_fraction": "Clip fraction",
        "grad_norm": "Gradient norm",
        "lr": "Learning rate",
    }
    return [Chart(title, "steps", "steps", name) for name, title in titles.items()]


def _charts(runs: Sequence[Run], charts: Iterable[Chart]) -> str:
    drawn = (f"<figure><figcaption>{chart.title}</figcaption>{_draw(runs, chart)}</figure>" for chart in charts)
    return f"<div class=grid>{''.join(drawn)}</div>"


def _draw(runs: Sequence[Run], chart: Chart) -> str:
    """The chart as an SVG element, one curve a run."""
    series = [_series(run, chart, colour(index)) for index, run in enumerate(runs)]
    return line_chart(series, chart.title, chart.x_label, from_zero=chart.from_zero, empty=chart.empty)


def _series(run: Run, chart: Chart, of_colour: str) -> Series:
    curve = thin(run.points(chart.x, chart.y, chart.x_scale))
    evaluations = run.changes(chart.x, chart.dots, chart.x_scale) if chart.dots else []
    return Series(of_colour, curve, _band(run, chart), [Dot(x, y, f"evaluation: {short(y)}") for x, y in evaluations])


def _band(run: Run, chart: Chart) -> Points | None:
    """The outline of the area between the metrics of `chart.band`: along the upper, back along the lower."""
    if chart.band is None:
        return None
    low, high = (thin(run.points(chart.x, name, chart.x_scale)) for name in chart.band)
    return high + low[::-1]


# ---------------------------------------------------------------------------------------------- words


def _value(value: float | None, absent: str = "–") -> str:
    return absent if value is None else f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


_STYLE = """
:root{color-scheme:light dark;--bg:#fbfaf7;--card:#fff;--ink:#1d1f24;--dim:#6b6f78;--rule:#e7e5df;
--c0:#2a6fdb;--c1:#d9730d;--c2:#0f8a5f;--c3:#c2347f;--c4:#7a4fd0;--c5:#0b8aa6;--c6:#8a7a00;--c7:#c8372d}
@media(prefers-color-scheme:dark){:root{--bg:#14161a;--card:#1c1f25;--ink:#e8e8e6;--dim:#989ca6;--rule:#2d3139;
--c0:#6ea3f7;--c1:#f0a04b;--c2:#4cc795;--c3:#ef7db5;--c4:#ae8ef2;--c5:#4fc3dd;--c6:#d0c04c;--c7:#f2827a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1040px;margin:0 auto;padding:32px 20px 64px}h1{font-size:28px;margin:0 0 4px}
h2{font-size:17px;margin:36px 0 12px}p{margin:4px 0 8px}.dim{color:var(--dim)}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;padding:0;margin:10px 0 0;list-style:none}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:7px;background:var(--k)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px}
figure,.scroll,pre,details{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:10px}
figure{padding:12px 14px 8px}figcaption{font-weight:600;font-size:14px;margin-bottom:6px}
svg,video{display:block;width:100%;height:auto}video{border-radius:6px;max-width:640px}
.empty{color:var(--dim);text-align:center;padding:72px 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:7px 10px;white-space:nowrap;border-top:1px solid var(--rule);font-size:13px}
th{color:var(--dim);font-weight:500;border-top:0}
pre{padding:12px 14px;overflow-x:auto;font-size:13px;margin:0 0 12px}
details{padding:10px 14px;margin-top:12px}details .scroll{border:0;margin-top:8px}summary{cursor:pointer}
"""
