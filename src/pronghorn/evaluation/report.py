"""Turns finished or running run directories into pictures: one self-contained HTML page, or one PNG.

It reads what the runs wrote and computes nothing new but overall averages; it plays no episode and needs
neither torch nor a network. The page's charts are SVG in the page's own colours, so they follow the reader's
light or dark theme.
"""

from __future__ import annotations

import base64
import html
import json
import math
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pronghorn.errors import RunDirError, UsageError
from pronghorn.training.metrics import METRICS_FILE, flatten, read_metrics

MAX_VIDEO_BYTES = 20_000_000
MAX_POINTS = 400  # of a curve: more than a chart has pixels only makes the page heavy
MAX_EVALUATIONS = 12
NO_EPISODE = "no episode has finished yet"

Record = Mapping[str, Any]
Points = list[tuple[float, float]]


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
    return isinstance(line.get(name), (int, float))


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
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))
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
        f"<title>{_text(title)} · Pronghorn</title><style>{_STYLE}</style></head><body><main>"
        f"<header><h1>{_text(title)}</h1>{_legend(runs)}</header>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _legend(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"<p class=dim>{_text(runs[0].config.get('env.id', ''))}</p>"
    items = (f"<li><i class=k{index % 8}></i>{_text(run.name)}</li>" for index, run in enumerate(runs))
    return f"<ul class=legend>{''.join(items)}</ul>"


def _summary(runs: Sequence[Run]) -> str:
    columns: list[tuple[str, Callable[[Run], str]]] = [
        ("run", lambda run: _text(run.name)),
        ("environment", lambda run: _text(run.config.get("env.id", "–"))),
        ("algorithm", lambda run: _text(run.config.get("algo", "–"))),
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
            _text(run.name),
            _text(name),
            _text(result.get("policy", "–")),
            _text(result.get("checkpoint") or "–"),
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
            caption = f"<figcaption>{_text(run.name)}: {_text(run.video.name)}</figcaption>"
            source = f'src="data:video/mp4;base64,{data}"'
            figures.append(f"<figure><video controls loop muted {source}></video>{caption}</figure>")
    return f"<div class=grid>{''.join(figures)}</div>" if figures else ""


def _settings(runs: Sequence[Run]) -> str:
    names = sorted({name for run in runs for name in run.config})
    parts = []
    if len(runs) > 1 and names:
        differ = [name for name in names if len({repr(run.config.get(name)) for run in runs}) > 1]
        rows = ([_text(name), *(_text(run.config.get(name, "–")) for run in runs)] for name in differ)
        same = "<p class=dim>All settings are the same.</p>"
        parts.append(_table(["differs", *(_text(run.name) for run in runs)], rows) if differ else same)
    parts += [
        f"<p class=dim>Train {_text(run.name)} again</p><pre>{_text(run.command)}</pre>" for run in runs if run.command
    ]
    for run in runs:
        if run.config:
            rows = ([_text(name), _text(value)] for name, value in run.config.items())
            table = _table(["setting", "value"], rows)
            parts.append(f"<details><summary>All settings of {_text(run.name)}</summary>{table}</details>")
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
    return f"<ul>{''.join(f'<li>{_text(note)}</li>' for note in notes)}</ul>" if notes else ""


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


_WIDTH, _HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 58, 12, 38  # room for tick labels, the last value, and the axis title


def _draw(runs: Sequence[Run], chart: Chart) -> str:
    """The chart as an SVG element whose colours come from the page's style."""
    curves = [_thin(run.points(chart.x, chart.y, chart.x_scale)) for run in runs]
    dots = [run.changes(chart.x, chart.dots, chart.x_scale) if chart.dots else [] for run in runs]
    bands = [_band(run, chart) for run in runs]
    shown = [point for group in (*curves, *dots, *bands) for point in group]
    if not shown:
        return f"<p class=empty>{chart.empty}</p>"
    y_low, y_high = min(y for _, y in shown), max(y for _, y in shown)
    y_ticks = _ticks(min(y_low, 0.0) if chart.from_zero else y_low, y_high, 4)
    x_high = max(x for x, _ in shown) or 1.0
    place = _placer((0.0, x_high), (y_ticks[0], y_ticks[-1]))
    x_ticks = [tick for tick in _ticks(0.0, x_high, 5) if tick <= x_high]
    parts = [_axes(x_ticks, y_ticks, chart.x_label, place)]
    for index, (curve, band, dot) in enumerate(zip(curves, bands, dots, strict=True)):
        parts.append(_curve(curve, band, dot, f"k{index % 8}", place))
    parts.append(_last_values(curves, place))
    label = _text(f"{chart.title} against {chart.x_label}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _band(run: Run, chart: Chart) -> Points:
    """The outline of the area between the metrics of `chart.band`: along the upper, back along the lower."""
    if chart.band is None:
        return []
    low, high = (_thin(run.points(chart.x, name, chart.x_scale)) for name in chart.band)
    return high + low[::-1]


def _thin(points: Points) -> Points:
    """At most MAX_POINTS of the points, evenly taken, the last one among them."""
    if len(points) <= MAX_POINTS:
        return points
    last = len(points) - 1
    return [points[round(index * last / (MAX_POINTS - 1))] for index in range(MAX_POINTS)]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers that enclose [low, high], about `count` steps of 1, 2 or 5 times a power of ten apart."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * count >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


Placer = Callable[[float, float], tuple[float, float]]


def _placer(x_range: tuple[float, float], y_range: tuple[float, float]) -> Placer:
    """Maps data to the SVG's coordinates, whose y grows downwards."""

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / (x_range[1] - x_range[0])
        down = (y_range[1] - y) / (y_range[1] - y_range[0])
        return (
            round(_LEFT + across * (_WIDTH - _LEFT - _RIGHT), 1),
            round(_TOP + down * (_HEIGHT - _TOP - _BOTTOM), 1),
        )

    return place


def _axes(x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, place: Placer) -> str:
    parts = []
    for tick in y_ticks:
        x, y = place(x_ticks[0], tick)
        parts.append(f'<path class=rule d="M{x} {y}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{x - 7}" y="{y + 3.5}" text-anchor="end">{_short(tick)}</text>')
    for tick in x_ticks:
        x, y = place(tick, y_ticks[0])
        parts.append(f'<text x="{x}" y="{y + 15}" text-anchor="middle">{_short(tick)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class=axis x="{middle}" y="{_HEIGHT - 5}" text-anchor="middle">{_text(x_label)}</text>')
    return "".join(parts)


def _curve(curve: Points, band: Points, dots: Points, colour: str, place: Placer) -> str:
    parts = []
    if band:
        parts.append(f'<path class="band {colour}" d="{_path(band, place)}Z"/>')
    if len(curve) > 1:
        parts.append(f'<path class="line {colour}" d="{_path(curve, place)}"/>')
    for x, y in dots:
        at_x, at_y = place(x, y)
        title = f"<title>evaluation: {_short(y)}</title>"
        parts.append(f'<circle class="dot {colour}" cx="{at_x}" cy="{at_y}" r="4">{title}</circle>')
    if curve:
        at_x, at_y = place(*curve[-1])
        parts.append(f'<circle class="end {colour}" cx="{at_x}" cy="{at_y}" r="3"/>')
    return "".join(parts)


def _last_values(curves: Sequence[Points], place: Placer) -> str:
    """Each curve's last value at the right edge, pushed down where it would cover the one above."""
    ends = [(place(*curve[-1])[1], curve[-1][1], index) for index, curve in enumerate(curves) if curve]
    parts, free = [], 0.0
    for at_y, value, index in sorted(ends):
        free = max(at_y + 3.5, free)
        label = f'x="{_WIDTH - _RIGHT + 6}" y="{free:.1f}">{_short(value)}'
        parts.append(f'<text class="value k{index % 8}" {label}</text>')
        free += 12
    return "".join(parts)


def _path(points: Points, place: Placer) -> str:
    return "M" + "L".join("{} {}".format(*place(x, y)) for x, y in points)


# ---------------------------------------------------------------------------------------------- words


def _text(value: object) -> str:
    return html.escape(str(value))


def _short(value: float) -> str:
    """Three digits and a letter: 1.2k, 3M; small numbers plainly, the smallest with two digits."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.2g}"


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
svg text{font-size:11px;fill:var(--dim);font-variant-numeric:tabular-nums}svg .axis{font-size:11.5px}
.rule{stroke:var(--rule);fill:none}.line{stroke:var(--k);stroke-width:2;fill:none;stroke-linejoin:round}
.band{fill:var(--k);opacity:.16}.end{fill:var(--k)}.dot{fill:var(--card);stroke:var(--k);stroke-width:2}
svg .value{fill:var(--k);font-weight:600}.empty{color:var(--dim);text-align:center;padding:72px 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:7px 10px;white-space:nowrap;border-top:1px solid var(--rule);font-size:13px}
th{color:var(--dim);font-weight:500;border-top:0}
pre{padding:12px 14px;overflow-x:auto;font-size:13px;margin:0 0 12px}
details{padding:10px 14px;margin-top:12px}details .scroll{border:0;margin-top:8px}summary{cursor:pointer}
.k0{--k:var(--c0)}.k1{--k:var(--c1)}.k2{--k:var(--c2)}.k3{--k:var(--c3)}
.k4{--k:var(--c4)}.k5{--k:var(--c5)}.k6{--k:var(--c6)}.k7{--k:var(--c7)}
"""
