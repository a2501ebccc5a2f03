"""The view as text: what the panel and the plain lines show."""

from __future__ import annotations

import errno
import io
import re
from typing import Any

import pytest
from rich.console import Console

from pronghorn.training.live import LiveView


def line(steps: int, **more: Any) -> dict[str, Any]:
    return {"time_s": steps / 10, "steps": steps, "frames": 4 * steps, "updates": steps // 10, **more}


SOME = line(
    20_000,
    steps_per_s=2812.4,
    frames_per_s=11249.6,
    episodes=140,
    return_mean=0.5,
    episode_length_mean=43.25,
    policy_lag_min=0,
    policy_lag_mean=1.26,
    policy_lag_max=4,
    policy_loss=-0.0123,
    value_loss=0.184,
    entropy=1.02,
    kl=0.0031,
    grad_norm=0.61,
    stages={"sampler: waiting for envs": 0.41, "sampler: acting": 0.38, "learner: idle": 0.2},
)


def view(plain: bool, **settings: Any) -> tuple[LiveView, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=80, height=40, force_terminal=not plain, color_system=None)
    return LiveView("doom:basic", plain=plain, console=console, **settings), out


def panel(live: LiveView) -> str:
    """The panel as text, 80 columns wide."""
    out = io.StringIO()
    Console(file=out, width=80, height=40).print(live._panel())
    return out.getvalue()


def test_the_panel_shows_every_number_within_80_columns() -> None:
    live, _ = view(plain=False, total_steps=100_000)
    live.update({**SOME, "return_mean": 0.7})
    live.update({**SOME, "steps": 40_000, "eval": {"mean": 0.71, "stderr": 0.01, "episodes": 100}})
    text = panel(live)
    assert all(len(row) <= 80 for row in text.splitlines())
    for shown in (
        "doom:basic", "0.5", "best 0.7", "finished 140", "mean length 43.2 steps", "2,812 steps/s",
        "11,250 frames/s", "0 / 1.26 / 4 iterations", "policy -0.0123", "value 0.184", "entropy 1.02",
        "kl 0.0031", "grad norm 0.61", "waiting for envs 41%", "acting 38%", "idle 20%",
        "40,000 / 100,000 steps   40%", "ETA 0:00:21", "mean return 0.71 ± 0.01 over 100 episodes",
    ):  # fmt: skip
        assert shown in text, shown
    assert "restarts" not in text
    assert "lost" not in text


def test_panel_and_line_say_what_limits() -> None:
    live, _ = view(plain=False)
    live.update(line(500, limiting_stage="learning"))
    assert re.search(r"limited +by learning", panel(live))
    plain, out = view(plain=True)
    plain.update(line(500, limiting_stage="acting"))
    assert "limited by acting" in out.getvalue()


def test_the_panel_shows_mishaps_and_that_no_episode_has_ended() -> None:
    live, _ = view(plain=False)
    live.update(line(500, running_episode_length_max=1500, worker_restarts=2, unrolls_lost=8))
    text = panel(live)
    assert "no episode finished yet (longest running: 1,500 steps)" in text
    assert re.search(r"restarts +2 workers", text)
    assert re.search(r"lost +8 unrolls", text)
    assert "nan" not in text.lower()


def test_the_panel_of_nothing_yet_can_be_drawn() -> None:
    live, _ = view(plain=False)
    assert "0 steps" in panel(live)


def test_the_sparkline_spans_the_run_from_lowest_to_highest() -> None:
    live, _ = view(plain=False)
    for steps in range(0, 101, 10):
        live.update({"steps": steps, "return_mean": steps / 100})
    spark = re.search(r"[▁▂▃▄▅▆▇█]+", panel(live))
    assert spark is not None
    assert spark[0][0] == "▁"
    assert spark[0][-1] == "█"
    assert sorted(spark[0]) == list(spark[0])
    assert "↗" in panel(live)


def test_a_long_run_keeps_a_bounded_curve_with_its_first_point() -> None:
    live, _ = view(plain=True, every_s=1e9)
    for steps in range(10_000):
        live.update({"steps": steps, "return_mean": 1.0})
    assert live._curve[0] == (0, 1.0)
    assert 1000 <= len(live._curve) <= 2048


def test_plain_lines_come_every_so_often_and_at_the_end() -> None:
    live, out = view(plain=True, every_s=1e9, total_steps=100_000)
    live.start()
    live.update(SOME)
    live.update({**SOME, "steps": 30_000})
    live.message("checkpoint [saved]")
    live.stop()
    live.stop()
    first, message, last = out.getvalue().splitlines()
    assert "20,000 / 100,000 steps (20%)" in first
    assert "2,812 steps/s  11,250 frames/s | return 0.5 (best 0.5, flat) | episode length 43.2" in first
    assert message == "checkpoint [saved]"
    assert "30,000 / 100,000 steps (30%)" in last


def test_output_that_is_no_terminal_gets_plain_lines() -> None:
    out = io.StringIO()
    live = LiveView("title", console=Console(file=out))
    live.start()
    live.update(SOME)
    live.stop()
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().count("\n") == 1  # the last state had been shown already


def test_the_time_before_the_view_counts_and_no_share_is_negative() -> None:
    live = LiveView("title", total_seconds=60.0, console=Console(file=io.StringIO()), elapsed_s=15.0)
    assert live._progress() == (pytest.approx(0.25, abs=0.01), pytest.approx(45.0, abs=0.5))
    late = LiveView("title", total_seconds=3.0, console=Console(file=io.StringIO()), elapsed_s=10.0)
    assert late._progress() == (1.0, 0.0)


def test_the_best_return_waits_for_a_hundred_episodes() -> None:
    live, _ = view(plain=False)
    live.update({**SOME, "episodes": 5, "return_mean": 99.0})
    live.update({**SOME, "episodes": 120, "return_mean": 0.5})
    assert live._best == 0.5


def test_a_terminal_gets_the_panel_and_messages_stay_above_it() -> None:
    live, out = view(plain=False, total_seconds=60.0)
    live.start()
    live.update(SOME)
    live.message("saved")
    live.stop()
    live.stop()
    text = out.getvalue()
    assert "saved" in text
    assert "2,812 steps/s" in text[text.index("saved") :]
    assert "ETA 0:00:59" in text or "ETA 0:01:00" in text


def test_what_an_update_does_not_mention_stays() -> None:
    live, _ = view(plain=False)
    live.update({"eval": {"mean": 0.71}, "steps": 1})
    live.update({"steps": 2})
    assert "mean return 0.71" in panel(live)


class Broken(io.StringIO):
    """A stream that can no longer be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(("error", "gone"), [(BrokenPipeError(), True), (OSError(errno.EIO, "no terminal"), False)])
@pytest.mark.parametrize("plain", [True, False])
def test_output_that_cannot_be_written_silences_the_view_and_raises_nothing(
    error: OSError, gone: bool, plain: bool
) -> None:
    console = Console(file=Broken(error), force_terminal=not plain, color_system=None)
    live = LiveView("title", plain=plain, console=console)
    live.start()
    live.update(SOME)
    live.message("saved")
    live.stop()
    assert live.reader_gone == gone
    assert console.quiet
