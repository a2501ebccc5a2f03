"""Tests of pronghorn.evaluation.report: what stands on the page, and that it stands alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pronghorn.errors import RunDirError, UsageError
from pronghorn.evaluation import report
from pronghorn.evaluation.charts import Frame
from pronghorn.evaluation.report import plot_curve, read_run, write_report


def make_run(
    run_dir: Path, returns: list[float | None], config: str = 'algo = "appo"\n[env]\nid = "doom:basic"\n'
) -> Path:
    """A run with one line per return, 100 steps and 10 s apart; None: no episode had ended yet."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text(config)
    with (run_dir / "metrics.jsonl").open("w") as file:
        for index, value in enumerate(returns, 1):
            record: dict[str, Any] = {"time_s": 10.0 * index, "steps": 100 * index, "frames": 400 * index}
            record |= {"updates": index, "steps_per_s": 10.0, "policy_lag_mean": 1.0, "policy_loss": 0.1}
            record |= {"policy_lag_min": 0, "policy_lag_max": 2, "running_episode_length_max": 1500}
            if value is not None:
                record |= {"return_mean": value, "return_std": 0.1, "episode_length_mean": 43.0}
            file.write(json.dumps(record) + "\n")
    return run_dir


def evaluate(run_dir: Path, name: str, **result: Any) -> None:
    (run_dir / "eval").mkdir(exist_ok=True)
    (run_dir / "eval" / f"{name}.json").write_text(json.dumps(result))


def page(out: Path, *run_dirs: Path) -> str:
    write_report(run_dirs, out)
    return out.read_text(encoding="utf-8")


class Checker(HTMLParser):
    """Fails on tags that are not closed in order, and collects every address that the page would load."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return checker


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.0, 0.5, 1.0])
    (run / "videos").mkdir()
    (run / "videos" / "agent.mp4").write_bytes(b"a video")
    text = page(tmp_path / "deep" / "report.html", run)
    checker = check(text)
    assert checker.addresses == ["data:video/mp4;base64,YSB2aWRlbw=="]
    assert "script" not in checker.tags
    assert "link" not in checker.tags
    assert "url(" not in text
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.html"]


def test_the_page_shows_summary_curves_and_command(tmp_path: Path) -> None:
    text = page(tmp_path / "report.html", make_run(tmp_path / "run", [0.25, 0.75, 0.5]))
    for shown in ("doom:basic", "appo", "<td>300<", "<td>1,200<", "0:00:30", "<td>10<", "<td>0.5<", "<td>0.75<"):
        assert shown in text, shown
    assert "steps (1 step = 4 frames)" in text
    assert "minutes" in text
    assert f"pronghorn train doom:basic --config {tmp_path / 'run' / 'config.toml'}" in text
    assert text.count("<svg") == 6  # two returns, length, speed, lag, policy loss: the other losses were not recorded


def test_a_curve_is_drawn_to_scale(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", [0.0, 1.0]))
    svg = report._draw([run], report.Chart("Return", "steps", "steps", "return_mean"))
    line = re.search(r'class="line k0" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', svg)
    assert line is not None
    x0, y0, x1, y1 = map(float, line.groups())
    frame = Frame()
    width = frame.width - frame.left - frame.right
    assert (x0, x1) == (frame.left + width / 2, frame.left + width)  # steps 100 and 200 of 0 to 200
    assert (y0, y1) == (frame.height - frame.bottom, frame.top)  # 0 at the bottom, 1 at the top


def test_an_evaluation_that_every_line_repeats_is_one_dot(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [])
    with (run / "metrics.jsonl").open("w") as file:
        for steps, mean in ((100, None), (200, 0.5), (300, 0.5), (400, 0.7)):
            evaluation = {} if mean is None else {"eval/mean": mean}
            file.write(json.dumps({"time_s": 1, "steps": steps, "frames": steps, "updates": 1, **evaluation}) + "\n")
    assert read_run(run).changes("steps", "eval/mean") == [(200, 0.5), (400, 0.7)]


@pytest.mark.case("LOG-01")
def test_a_run_without_a_finished_episode_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [None, None])
    text = page(tmp_path / "report.html", run)
    check(text)
    assert "no episode has finished yet (longest running: 1,500 steps)" in text
    assert "nan" not in text.lower()
    plot_curve(run, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_one_line_is_a_dot(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.5])
    text = page(tmp_path / "report.html", run)
    check(text)
    assert 'class="end k0"' in text
    assert 'class="line k0"' not in text
    plot_curve(run, tmp_path / "curve.png")


@pytest.mark.parametrize("content", [None, ""])
def test_a_directory_without_metrics_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(RunDirError, match=r"nothing to report on in .*metrics\.jsonl"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(RunDirError):
        plot_curve(tmp_path, tmp_path / "curve.png")
    assert not (tmp_path / "report.html").exists()


def test_no_run_at_all_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one run"):
        write_report([], tmp_path / "report.html")


def test_evaluations_are_listed_and_unreadable_ones_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.5])
    evaluate(
        run, "last", mean=0.78, stderr=0.012, median=0.81, iqm=0.8, iqm_ci95=[0.77, 0.82], episodes=100,
        returns=[], checkpoint="checkpoints/00000238", policy="sampled",
    )  # fmt: skip
    evaluate(run, "random", mean=-1.9, episodes=20, checkpoint=None, policy="random")
    evaluate(run, "other", episodes=3)
    (run / "eval" / "torn.json").write_text('{"mean"')
    text = page(tmp_path / "report.html", run)
    for shown in ("0.78 ± 0.012", "0.77 to 0.82", "checkpoints/00000238", "<td>-1.9<", "<td>random<"):
        assert shown in text, shown
    assert "eval/torn.json cannot be read" in text
    assert "eval/other.json holds no evaluation" in text


def test_only_the_newest_evaluations_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.5])
    for index in range(15):
        evaluate(run, f"e{index:02d}", mean=float(index))
        os.utime(run / "eval" / f"e{index:02d}.json", (index, index))
    assert [name for name, _ in read_run(run).evaluations] == [f"e{index:02d}" for index in range(3, 15)]
    assert "only the newest 12 of 15 evaluations are shown" in page(tmp_path / "report.html", run)


def test_the_newest_video_is_taken_unless_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", [0.5])
    (run / "videos").mkdir()
    for age, name in enumerate(("new.mp4", "old.mp4")):
        (run / "videos" / name).write_bytes(b"0123456789")
        os.utime(run / "videos" / name, (100 - age, 100 - age))
    assert read_run(run).video == run / "videos" / "new.mp4"
    monkeypatch.setattr(report, "MAX_VIDEO_BYTES", 10)
    assert read_run(run).video is None
    text = page(tmp_path / "report.html", run)
    assert "new.mp4 is too large" in text
    assert "<video" not in text


def test_two_runs_show_the_settings_that_differ(tmp_path: Path) -> None:
    common = 'algo = "appo"\n[env]\nid = "doom:basic"\n[learner]\nunroll_length = 32\n'
    first = make_run(tmp_path / "first", [0.5, 0.6], common + "lr = 0.1\n")
    second = make_run(tmp_path / "second", [0.1, 0.2, 0.3], common + "lr = 0.2\n")
    text = page(tmp_path / "report.html", first, second)
    check(text)
    differing = text[text.index("<th>differs</th>") : text.index("</table>", text.index("<th>differs</th>"))]
    assert "<td>learner.lr</td><td>0.1</td><td>0.2</td>" in differing
    assert "unroll_length" not in differing
    assert 'class="line k1"' in text
    alone = page(tmp_path / "alone.html", first)
    assert "<th>differs</th>" not in alone
    assert "<td>learner.unroll_length</td><td>32</td>" in alone


def test_runs_of_the_same_name_are_told_apart_by_their_path(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / seed / "run", [0.5]) for seed in ("a", "b")]
    text = page(tmp_path / "report.html", *runs)
    assert str(runs[0]) in text
    assert "All settings are the same." in text


def test_names_are_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<b>run&", [0.5], '[env]\nid = "<script>alert(1)</script>"\n')
    checker = check(page(tmp_path / "report.html", run))
    assert not checker.tags & {"b", "script"}


def test_what_is_missing_or_went_wrong_is_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.5])
    (run / "config.toml").write_text("not toml")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"time_s": 11, "steps": 100, "frames": 400, "updates": 1, "event": "resume", "lines_cut": 2}\n')
        file.write('{"time_s": 20, "steps": 200, "frames": 800, "updates": 2, "nonfinite": ["loss"]}\n')
        file.write('{"time_s": 30, "st')
    text = page(tmp_path / "report.html", run)
    assert "config.toml cannot be read" in text
    assert "resumed 1 time<" in text
    assert "not a finite number at some point: loss" in text
    (run / "config.toml").unlink()
    assert "config.toml is missing" in page(tmp_path / "report.html", run)


def test_the_curve_is_written_without_a_display_or_torch(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", [0.1, 0.2, None, 0.4]), tmp_path / "pictures" / "curve.png"
    code = (
        "import sys; from pathlib import Path; from pronghorn.evaluation.report import plot_curve\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plot_curve(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run), str(out)], timeout=60).returncode == 0
    assert out.read_bytes().startswith(b"\x89PNG")
