"""Tests of pronghorn.training.metrics: hand-countable episodes, files read back, and the view as text."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pronghorn.errors import MissingExtraError, RunDirError, UsageError
from pronghorn.training.metrics import EpisodeTracker, LiveView, MetricsWriter, read_metrics
from pronghorn.types import Event, Ready

FIRST, STEP, LAST, LOST, INACTIVE = Event.FIRST, Event.STEP, Event.LAST, Event.LOST, Event.INACTIVE


def ready(
    *rows: tuple[int, Event, float], over: tuple[int, ...] = (), records: list[dict[str, Any]] | None = None
) -> Ready:
    """One recv from (row, event, reward) triples; `over` names the rows whose episode ended."""
    numbers = np.array([row for row, _, _ in rows], np.int64)
    ends = np.isin(numbers, over)
    return Ready(
        rows=numbers,
        event=np.array([event for _, event, _ in rows], np.uint8),
        obs={},
        reward=np.array([reward for _, _, reward in rows], np.float32),
        terminated=ends,
        truncated=np.zeros_like(ends),
        episode_over=ends,
        final_index=np.zeros(0, np.int64),
        final_obs={},
        records=records or [],
    )


def tracker(num_rows: int = 1, window: int = 100) -> EpisodeTracker:
    return EpisodeTracker(num_rows, ("task",), np.zeros(num_rows, np.int64), window)


# ------------------------------------------------------------------------------------------ EpisodeTracker


def test_every_episode_of_three_steps_and_reward_one_counts_three() -> None:
    episodes = tracker()
    episodes.observe(ready((0, FIRST, 99.0)))  # the reward of a FIRST belongs to nothing
    for _ in range(3):
        episodes.observe(ready((0, STEP, 1.0)))
        episodes.observe(ready((0, STEP, 1.0)))
        episodes.observe(ready((0, LAST, 1.0), over=(0,)))
    now = episodes.snapshot()
    assert now["episodes"] == episodes.num_episodes == 3
    assert (now["return_min"], now["return_mean"], now["return_max"], now["return_std"]) == (
        3.0,
        3.0,
        3.0,
        0.0,
    )
    assert now["episode_length_mean"] == 3.0


@pytest.mark.case("LOG-01")
def test_means_are_absent_until_an_episode_has_ended() -> None:
    episodes = tracker(num_rows=2)
    assert episodes.snapshot() == {"episodes": 0, "running_episode_length_max": 0}
    episodes.observe(ready((0, STEP, 1.0), (1, STEP, 1.0)))
    episodes.observe(ready((1, STEP, 1.0)))
    assert episodes.snapshot() == {"episodes": 0, "running_episode_length_max": 2}


@pytest.mark.case("LOG-11")
def test_an_unfinished_episode_is_never_counted() -> None:
    episodes = tracker()
    episodes.observe(ready((0, LAST, 1.0), over=(0,)))
    episodes.observe(ready((0, STEP, 100.0)))
    resumed = tracker()
    resumed.load_state(json.loads(json.dumps(episodes.state())))
    resumed.observe(ready((0, FIRST, 0.0)))
    resumed.observe(ready((0, LAST, 5.0), over=(0,)))
    assert episodes.snapshot()["return_max"] == 1.0
    assert resumed.snapshot()["return_max"] == 5.0
    assert resumed.num_episodes == 2


def test_a_life_loss_does_not_finish_an_episode() -> None:
    episodes = tracker()
    episodes.observe(ready((0, LAST, 1.0)))  # LAST without episode_over
    assert episodes.num_episodes == 0
    episodes.observe(ready((0, LAST, 2.0), over=(0,)))
    now = episodes.snapshot()
    assert (now["return_mean"], now["episode_length_mean"]) == (3.0, 2.0)


@pytest.mark.parametrize("event", [LOST, FIRST])
def test_a_lost_row_starts_from_nothing(event: Event) -> None:
    episodes = tracker()
    episodes.observe(ready((0, STEP, 10.0)))
    episodes.observe(ready((0, event, 10.0)))
    episodes.observe(ready((0, LAST, 1.0), over=(0,)))
    now = episodes.snapshot()
    assert (now["return_mean"], now["episode_length_mean"]) == (1.0, 1.0)


def test_an_inactive_row_is_left_alone() -> None:
    episodes = tracker()
    episodes.observe(ready((0, STEP, 1.0)))
    episodes.observe(ready((0, INACTIVE, 50.0)))
    episodes.observe(ready((0, LAST, 1.0), over=(0,)))
    now = episodes.snapshot()
    assert (now["return_mean"], now["episode_length_mean"]) == (2.0, 2.0)


def test_rows_out_of_order_keep_their_own_sums() -> None:
    episodes = tracker(num_rows=3)
    episodes.observe(ready((2, STEP, 20.0), (0, STEP, 0.5)))
    episodes.observe(ready((0, LAST, 0.25), (2, LAST, 2.0), over=(0, 2)))
    now = episodes.snapshot()
    assert (now["return_min"], now["return_max"]) == (0.75, 22.0)
    assert now["return_mean"] == pytest.approx(11.375)
    assert now["return_std"] == pytest.approx(10.625)  # both are half the distance 21.25 away from the mean


def test_small_rewards_of_a_long_episode_are_not_lost_in_float32() -> None:
    episodes = tracker()
    episodes.observe(ready((0, STEP, 2.0**24)))
    for _ in range(8):
        episodes.observe(ready((0, STEP, 0.5)))  # 2**24 + 0.5 is 2**24 in float32
    episodes.observe(ready((0, LAST, 0.0), over=(0,)))
    assert episodes.snapshot()["return_mean"] == 2.0**24 + 4.0


def test_means_are_over_the_window() -> None:
    episodes = tracker(window=2)
    for reward in (100.0, 1.0, 3.0):
        episodes.observe(ready((0, LAST, reward), over=(0,)))
    now = episodes.snapshot()
    assert (now["episodes"], now["return_mean"], now["return_max"]) == (3, 2.0, 3.0)


def test_tasks_are_counted_apart() -> None:
    episodes = EpisodeTracker(3, ("easy", "hard"), np.array([0, 1, 0]))
    episodes.observe(ready((0, LAST, 1.0), (1, LAST, 10.0), (2, LAST, 3.0), over=(0, 1, 2)))
    now = episodes.snapshot()
    assert (now["return_mean/easy"], now["return_mean/hard"]) == (2.0, 10.0)
    assert (now["episodes/easy"], now["episodes/hard"]) == (2, 1)


@pytest.mark.case("LOG-04")
def test_returns_come_from_rewards_and_records_only_add_to_them() -> None:
    episodes = tracker()
    episodes.observe(ready((0, LAST, 1.0), over=(0,), records=[{"row": 0, "return": 77.0, "kills": 4, "map": "e1m1"}]))
    episodes.observe(ready((0, LAST, 1.0), over=(0,), records=[{"row": 0, "kills": 6}]))
    now = episodes.snapshot()
    assert now["return_mean"] == 1.0
    assert now["episode/kills"] == 5.0
    assert "episode/row" not in now
    assert "episode/map" not in now


def test_state_survives_json_and_continues_the_window() -> None:
    episodes = EpisodeTracker(2, ("easy", "gone"), np.array([0, 1]), window=2)
    episodes.observe(ready((0, LAST, 1.0), (1, LAST, 5.0), over=(0, 1), records=[{"row": 0, "kills": 2}]))
    resumed = EpisodeTracker(2, ("easy", "new"), np.array([0, 1]), window=2)
    resumed.load_state(json.loads(json.dumps(episodes.state())))
    resumed.observe(ready((1, LAST, 7.0), over=(1,)))
    now = resumed.snapshot()
    assert now["episodes"] == 3
    assert now["return_mean"] == 6.0  # of 5 and 7: the window of two moved on
    assert (now["return_mean/easy"], now["return_mean/new"], now["episode/kills"]) == (1.0, 7.0, 2.0)
    assert "return_mean/gone" not in now


def test_one_thread_may_observe_while_another_reads() -> None:
    episodes = tracker(num_rows=64, window=10)
    batch = ready(*[(row, LAST, 1.0) for row in range(64)], over=tuple(range(64)))
    done = threading.Event()

    def observe() -> None:
        for _ in range(200):
            episodes.observe(batch)
        done.set()

    thread = threading.Thread(target=observe)
    thread.start()
    while not done.is_set():  # a deque that changes while it is read raises RuntimeError
        assert episodes.snapshot().get("return_mean", 1.0) == 1.0
        episodes.state()
    thread.join()
    assert episodes.num_episodes == 200 * 64


# ------------------------------------------------------------------------------------------ MetricsWriter


def line(steps: int, **more: Any) -> dict[str, Any]:
    return {"time_s": steps / 10, "steps": steps, "frames": 4 * steps, "updates": steps // 10, **more}


def write_run(run_dir: Path, *steps: int) -> None:
    with MetricsWriter(run_dir, tensorboard=False) as writer:
        for step in steps:
            writer.write(line(step))


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(line(10, params_sha="ab12", stages={"sampler: act": 0.5}, policy_lag_histogram=[3, 1]))
        writer.write(line(20, loss=np.float32(0.5), episodes=np.int64(3), grad_norm=None))
        assert len(read_metrics(tmp_path)) == 2  # flushed before it is closed
    first, second = read_metrics(tmp_path)
    assert first == line(10, params_sha="ab12", **{"stages/sampler: act": 0.5}, policy_lag_histogram=[3, 1])
    assert second == line(20, loss=0.5, episodes=3)


@pytest.mark.case("LOG-01")
def test_no_number_that_json_lacks_is_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(line(10, loss=float("nan"), kl=np.float32("inf"), lags=[1.0, float("nan")], lr=0.1))
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record == line(10, lr=0.1, nonfinite=["loss", "kl", "lags"])


@pytest.mark.case("LOG-07")
@pytest.mark.parametrize("name", ["time_s", "steps", "frames", "updates"])
def test_a_record_without_every_axis_is_refused(tmp_path: Path, name: str) -> None:
    record = line(10)
    del record[name]
    with MetricsWriter(tmp_path, tensorboard=False) as writer, pytest.raises(UsageError, match=name):
        writer.write(record)


@pytest.mark.case("LOG-05")
def test_resume_cuts_the_overlap_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path, 10, 20, 30, 40)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"time_s": 5.0, "steps": 50, "fra')  # torn by the crash
    with caplog.at_level("INFO"), MetricsWriter(tmp_path, tensorboard=False, resume_steps=20) as writer:
        assert writer.lines_cut == 3
        writer.write(line(30))
        writer.write(line(40))
    records = read_metrics(tmp_path)
    assert [record["steps"] for record in records] == [10, 20, 20, 30, 40]
    assert records[2] == {**line(20), "event": "resume", "lines_cut": 3}
    assert "cut 3 lines beyond step 20" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_without_overlap_loses_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, 10, 20)
    with MetricsWriter(tmp_path, tensorboard=False, resume_steps=20) as writer:
        assert writer.lines_cut == 0
    assert [record["steps"] for record in read_metrics(tmp_path)] == [10, 20, 20]


def test_resume_of_a_run_without_metrics_starts_a_file(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False, resume_steps=20):
        pass
    assert read_metrics(tmp_path) == [
        {"time_s": 0, "steps": 20, "frames": 0, "updates": 0, "event": "resume", "lines_cut": 0}
    ]


def test_a_new_run_refuses_the_metrics_of_another(tmp_path: Path) -> None:
    write_run(tmp_path, 10)
    with pytest.raises(RunDirError, match="--resume"):
        MetricsWriter(tmp_path, tensorboard=False)


def test_reading_leaves_torn_lines_out_and_warns_of_one_inside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"steps": 1}\n{"steps\n[2]\n{"steps": 3}\n{"st')
    assert [record["steps"] for record in read_metrics(tmp_path)] == [1, 3]
    assert "line 2, 3 " in caplog.text


def tensorboard_points(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


@pytest.mark.case("LOG-05")
def test_tensorboard_counts_in_steps_and_hides_the_overlap(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for steps in (10, 20, 30):
            writer.write(line(steps, loss=steps / 10, params_sha="ab"))
    assert tensorboard_points(tmp_path, "loss") == [(10, 1.0), (20, 2.0), (30, 3.0)]
    with MetricsWriter(tmp_path, resume_steps=20) as writer:
        writer.write(line(30, loss=8.0))
    assert tensorboard_points(tmp_path, "loss") == [(10, 1.0), (20, 2.0), (30, 8.0)]


def test_wandb_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pronghorn-rl\[wandb\]"):
        MetricsWriter(tmp_path, wandb=True)


class FakeWandb:
    """Stands for the wandb module and its run: keeps what it is given."""

    def __init__(self) -> None:
        self.settings: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str]] = []
        self.num_finished = 0

    def init(self, **settings: Any) -> FakeWandb:
        self.settings.append(settings)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, record: dict[str, Any]) -> None:
        self.logged.append(record)

    def finish(self) -> None:
        self.num_finished += 1


def test_wandb_gets_the_same_numbers_and_a_resume_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    with MetricsWriter(tmp_path, tensorboard=False, wandb=True, config={"seed": 3}) as writer:
        writer.write(line(10, loss=1.5, params_sha="ab"))
    with MetricsWriter(tmp_path, tensorboard=False, wandb=True, resume_steps=10) as writer:
        writer.write(line(20, loss=float("nan")))
    assert wandb.logged == [line(10, loss=1.5), line(20)]
    assert wandb.settings[0]["config"] == {"seed": 3}
    assert wandb.settings[0]["id"] == wandb.settings[1]["id"]
    assert wandb.axes == [("*", "steps")] * 2
    assert wandb.num_finished == 2


def test_every_name_that_scripts_rely_on_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`([a-z_]+)`", "\n".join(row for row in text.splitlines() if row.startswith("|"))))
    relied_on = """time_s steps frames updates iterations episodes steps_per_s frames_per_s return_mean
        episode_length_mean policy_lag_min policy_lag_mean policy_lag_max worker_restarts unrolls_lost remote_unrolls
        world_size params_sha loss policy_loss value_loss entropy ratio_mean clip_fraction kl grad_norm
        explained_variance lr"""
    assert set(relied_on.split()) - documented == set()
    assert set(tracker().snapshot()) - documented == set()


def test_importing_it_needs_no_torch() -> None:
    code = "import sys, pronghorn.training.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ------------------------------------------------------------------------------------------ LiveView

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
