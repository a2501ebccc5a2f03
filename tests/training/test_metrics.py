"""Tests of pronghorn.training.metrics: hand-countable episodes, and files read back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pronghorn.errors import MissingExtraError, RunDirError, UsageError
from pronghorn.training.metrics import (
    EpisodeTracker,
    MetricsWriter,
    episodes_of,
    limiting_stage,
    merged,
    pooled,
    read_lines,
    read_metrics,
)
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
def test_episodes_that_another_process_saw_count_like_any_other() -> None:
    """Rows 2 and 3 are the other's 0 and 1."""
    episodes = EpisodeTracker(4, ("a", "b"), np.array([0, 0, 1, 0]))
    episodes.absorb(2, {"episodes": [(0, 5.0, 3), (1, 7.0, 9)], "records": [{"kills": 2.0}], "lengths": [4, 6]})
    told = episodes.snapshot()
    assert (told["episodes"], told["return_mean"], told["episode_length_mean"]) == (2, 6.0, 6.0)
    assert (told["return_mean/a"], told["return_mean/b"], told["episode/kills"]) == (7.0, 5.0, 2.0)
    assert told["running_episode_length_max"] == 6
    assert episodes.num_whole == 2


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


def test_a_damaged_byte_costs_its_own_line_only(tmp_path: Path) -> None:
    (tmp_path / "any.jsonl").write_bytes(b'{"a": 1}\n{"a": \xff2}\n{"a": 3}\n{"a": 4, \xc3')
    assert read_lines(tmp_path / "any.jsonl") == [{"a": 1}, {"a": 3}]
    assert read_lines(tmp_path / "none.jsonl") == []


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


@pytest.mark.parametrize(
    ("shares", "limit"),
    [
        ({"sampler: slots": 0.6, "sampler: envs": 0.3, "learner: wait": 0.1}, "learning"),
        ({"sampler: envs": 0.5, "sampler: act": 0.3, "learner: wait": 0.7}, "simulation"),
        ({"sampler: envs": 0.2, "sampler: act": 0.7, "learner: wait": 0.7}, "acting"),
        ({"sampler: record": 0.4, "sampler: act": 0.3, "learner: wait": 0.7}, "transport"),
        ({}, None),
        ({"sampler: envs": 0.9, "learner: wait": 0.9, "actors: envs": 0.3, "actors: act": 0.6}, "acting"),
        ({"sampler: envs": 0.9, "learner: wait": 0.9, "actors: envs": 0.6, "actors: act": 0.3}, "simulation"),
        ({"sampler: record": 0.9, "learner: wait": 0.9, "actors: envs": 0.6, "actors: act": 0.3}, "transport"),
    ],
    ids=lambda x: str(x) if not isinstance(x, dict) else None,
)
def test_what_limits_follows_from_who_waits(shares: dict[str, float], limit: str | None) -> None:
    stages = ["sampler: envs", "sampler: act", "sampler: record", "sampler: slots", "learner: wait"]
    stages += ["actors: record"] if "actors: envs" in shares else []
    assert limiting_stage(dict.fromkeys(stages, 0.0) | shares) == limit


# ------------------------------------------------------------------------------------------ several policies


def test_episodes_that_an_earlier_policy_began_are_counted_and_are_in_no_mean() -> None:
    episodes = tracker(num_rows=3)
    episodes.observe(ready((0, LAST, 1.0), (1, LAST, 1.0), (2, STEP, 1.0), over=(0, 1)))
    episodes.begin(np.array([0, 1]), 0)
    episodes.inherit(tracker(num_rows=3), 1)
    assert "return_mean" not in episodes.snapshot()
    assert episodes.snapshot()["episodes"] == 2
    assert episodes.recent("return", 5) is None
    episodes.begin(np.array([2]), 0)  # its policy acted for the last time after it was replaced
    record = {"row": 0, "score": 7.0}
    episodes.observe(ready((0, LAST, 5.0), (2, LAST, 5.0), over=(0, 2), records=[record]))
    assert episodes.num_episodes == 4
    assert "return_mean" not in episodes.snapshot()
    assert episodes.recent("score", 5) is None
    episodes.begin(np.array([0, 2]), 1)
    episodes.observe(ready((0, LAST, 9.0), (1, LAST, 9.0), over=(0, 1), records=[record]))
    assert episodes.snapshot()["return_mean"] == 9.0  # of row 0; row 1 went on with an episode of the old one
    assert episodes.recent("score", 5) == 7.0
    assert episodes.num_episodes == 6
    assert episodes.num_whole == 3  # two of the first policy, one of the second


def test_what_was_known_of_a_donor_is_known_of_the_policy_that_it_overwrites() -> None:
    """Else the next episodes to end, which are short ones, would be all that it is judged by."""
    donor, target = tracker(num_rows=2), tracker(num_rows=2)
    donor.observe(ready((0, LAST, 8.0), (1, LAST, 6.0), over=(0, 1), records=[{"row": 0, "score": 3.0}]))
    target.observe(ready((0, LAST, 1.0), over=(0,)))
    target.inherit(donor, 1)
    assert target.snapshot()["return_mean"] == target.snapshot()["return_mean/task"] == 7.0
    assert target.recent("return", 9) == 7.0
    assert target.recent("score", 1) == 3.0
    assert target.num_episodes == 1
    target.begin(np.array([0]), 1)
    target.observe(ready((0, LAST, 1.0), over=(0,)))
    assert target.recent("return", 9) == 5.0
    assert donor.recent("return", 9) == 7.0


def test_a_resumed_policy_counts_its_episodes_whatever_it_descends_from() -> None:
    episodes = tracker()
    episodes.inherit(tracker(), 3)
    resumed = tracker()
    resumed.load_state(json.loads(json.dumps(episodes.state())))
    resumed.begin(np.array([0]), 3)
    resumed.observe(ready((0, LAST, 5.0), over=(0,)))
    assert resumed.recent("return", 1) == 5.0


def test_recent_looks_back_further_than_the_means_if_it_is_told_to() -> None:
    episodes = EpisodeTracker(1, ("task",), np.zeros(1, np.int64), window=2, kept=5)
    for value in range(1, 9):
        episodes.observe(ready((0, LAST, float(value)), over=(0,), records=[{"row": 0, "score": 10.0 * value}]))
    assert episodes.snapshot()["return_mean"] == (7 + 8) / 2
    assert episodes.snapshot()["episode/score"] == 75.0
    assert episodes.recent("return", 4) == (5 + 6 + 7 + 8) / 4
    assert episodes.recent("return", 99) == (4 + 5 + 6 + 7 + 8) / 5
    assert episodes.recent("score", 3) == 70.0
    assert episodes.recent("nothing", 3) is None


def test_statistics_of_several_policies_are_pooled_by_what_they_mean() -> None:
    one = {"episodes": 3, "running_episode_length_max": 7, "return_mean": 1.0, "return_min": -1.0, "return_max": 2.0,
           "episodes/a": 3}  # fmt: skip
    other = {"episodes": 1, "running_episode_length_max": 4, "return_mean": 3.0, "return_min": 3.0, "return_max": 3.0}
    none = {"episodes": 0, "running_episode_length_max": 9}
    assert pooled([one, other, none]) == {
        "episodes": 4, "running_episode_length_max": 9, "return_mean": 2.0, "return_min": -1.0, "return_max": 3.0,
        "episodes/a": 3,
    }  # fmt: skip
    assert pooled([one]) == one


def test_no_iteration_gives_no_report_and_extremes_stay_extremes() -> None:
    assert merged([]) == {}
    lags = [{"policy_lag_min": 1, "policy_lag_max": 4, "lr": 0.1, "loss": 1.0},
            {"policy_lag_min": 0, "policy_lag_max": 2, "lr": 0.2, "loss": 2.0}]  # fmt: skip
    assert merged(lags) == {"policy_lag_min": 0, "policy_lag_max": 4, "lr": 0.2, "loss": 1.5}


def episodes(count: int, *returns: float) -> dict[str, Any]:
    tasks = {"t": {"num_episodes": count, "returns": list(returns)}}
    return {"num_episodes": count, "num_whole": count, "lineage": 0, "finished": [[r, 3] for r in returns],
            "tasks": tasks, "records": {}}  # fmt: skip


def test_each_of_several_learners_goes_on_from_its_own_episodes_and_no_count_is_lost() -> None:
    state = {"episodes": episodes(10, 1.0), "learners": [episodes(20, 2.0), episodes(30, 3.0)]}
    same = [episodes_of(state, rank, 3) for rank in range(3)]
    assert [one["num_episodes"] for one in same] == [10, 20, 30]
    fewer = [episodes_of(state, rank, 2) for rank in range(2)]
    assert [one["num_episodes"] for one in fewer] == [40, 20]
    assert fewer[0]["tasks"]["t"]["num_episodes"] == 40
    assert fewer[0]["finished"] == [[1.0, 3]]
    more = [episodes_of(state, rank, 4) for rank in range(4)]
    assert [one["num_episodes"] for one in more] == [10, 20, 30, 0]
    assert episodes_of(state, 0, 1)["num_episodes"] == 60
    assert state["episodes"]["tasks"]["t"]["num_episodes"] == 10  # what was read is not changed
    tracker = EpisodeTracker(1, ("t",), np.zeros(1, np.int64))
    tracker.load_state(more[3])
    assert tracker.num_episodes == 0
