"""Statistics of evaluations: against scipy, by hand, and against published medians."""

from __future__ import annotations

import csv
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1]))

from playing import TOYS
from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.evaluation import evaluate as evaluate_module
from pronghorn.evaluation.evaluate import (
    bootstrap_iqm,
    evaluate,
    human_normalized,
    interquartile_mean,
    play_frames,
    quota,
    random_actions,
    record,
    watch,
)
from pronghorn.evaluation.policy import Policy, build_model
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 100, 101])
def test_interquartile_mean_is_scipys(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25))


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, 3.0, -50.0, 4.0, 5.0, 6.0])) == 3.5  # (2 + 3 + 4 + 5) / 4


def test_the_interval_is_that_of_scipys_bootstrap() -> None:
    values = np.random.default_rng(1).gamma(2.0, 3.0, size=60)
    low, high = bootstrap_iqm(values)
    expected = stats.bootstrap(
        (values,), lambda x, axis: stats.trim_mean(x, 0.25, axis=axis), n_resamples=5_000, method="percentile", rng=0
    ).confidence_interval
    width = expected.high - expected.low
    assert abs(low - expected.low) < 0.1 * width
    assert abs(high - expected.high) < 0.1 * width


def test_resampling_keeps_the_number_of_values_of_each_task() -> None:
    """Two tasks of very different level: by strata only the noise inside a task is left, and a slow loop agrees."""
    rng = np.random.default_rng(2)
    values = np.concatenate([rng.normal(0, 1, 20), rng.normal(100, 1, 20)])
    tasks = np.repeat([0, 1], 20)
    low, high = bootstrap_iqm(values, tasks)
    slow = []
    for _ in range(2_000):
        parts = [rng.choice(values[tasks == task], 20) for task in (0, 1)]
        slow.append(stats.trim_mean(np.concatenate(parts), 0.25))
    expected = np.percentile(slow, [2.5, 97.5])
    assert [low, high] == pytest.approx(expected.tolist(), abs=0.15)
    unstratified = bootstrap_iqm(values)
    assert high - low < 0.1 * (unstratified[1] - unstratified[0])


def test_a_single_episode_has_an_interval_of_no_width() -> None:
    assert bootstrap_iqm(np.array([3.0])) == (3.0, 3.0)


@pytest.mark.parametrize(("column", "median"), [("deep", 191.82), ("shallow", 93.23), ("multitask", 59.71)])
def test_the_published_medians_come_out_of_the_score_table(column: str, median: float) -> None:
    """IMPALA's per-game scores (Table C.1), normalised by our table, have the medians of its Table 4."""
    with open(Path(__file__).parent / "data" / "impala_atari57.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    scores = [human_normalized(f"atari:{row['game']}", float(row[column])) for row in rows]
    assert len(scores) == 57
    assert None not in scores
    assert np.median(np.array(scores, np.float64)) == pytest.approx(median, abs=0.005)


def test_names_of_games_and_levels() -> None:
    assert human_normalized("atari:Pong", -20.7) == pytest.approx(0.0)
    assert human_normalized("atari:pong", 14.6) == pytest.approx(100.0)
    assert human_normalized("atari:MontezumaRevenge", 4753.3) == human_normalized("atari:montezuma_revenge", 4753.3)
    assert human_normalized("dmlab:rooms_watermaze", 54.0) == pytest.approx(100.0)
    assert human_normalized("gym:CartPole-v1", 500.0) is None
    assert human_normalized("atari:Unheard", 1.0) is None


def test_episodes_are_dealt_to_all_tasks() -> None:
    """More rows than episodes, and rows of a task that lie together: both tasks are played."""
    together = np.repeat([0, 1], 32)
    shares = quota(together, 20)
    assert [shares[together == task].sum() for task in (0, 1)] == [10, 10]
    assert quota(np.array([0, 1, 0, 1]), 10).tolist() == [3, 3, 2, 2]
    assert quota(np.zeros(3, np.int64), 7).tolist() == [3, 2, 2]


@pytest.mark.timeout(60)
def test_agents_that_never_appear_are_not_waited_for() -> None:
    """Rows of 'b', and of 'c' after the first episode, end none: 'a' plays their share of the six episodes."""
    spec = EnvSpec({"x": LeafSpec((4,), "float32", "vector")}, ActionSpec((3,)), rows_per_env=3, rows_wait=True)
    values = {
        "env.workers": 1, "env.envs_per_worker": 1, "env.pin": "off", "env.pad_spaces": True, "model.mlp_layers": (8,),
    }  # fmt: skip
    config = resolve(replace(Config(env=f"{TOYS}:Absent"), values), spec)
    policy = Policy(build_model(config.model, spec), config, spec)
    result = evaluate(policy, config, episodes=6, seed=1, num_envs=1)
    assert result is not None
    assert result.returns == [15.0] * 6
    assert result.episode_length_mean == 5.0


@pytest.fixture
def drawn() -> tuple[Policy, Config]:
    """An untrained policy of a game in turns that draws 80 times the moves so far, of three."""
    pytest.importorskip("pettingzoo")
    leaf = LeafSpec((3,), "float32", "vector")
    spec = EnvSpec({"obs": leaf}, ActionSpec((3,)), rows_per_env=2, rows_wait=True, agents=("a", "b"))
    values = {"env.workers": 1, "env.envs_per_worker": 1, "env.pin": "off", "model.mlp_layers": (8,)}
    name = f"{Path(__file__).parents[1] / 'turn_games.py'}:Drawn"
    config = resolve(replace(Config(env=name), values), spec)
    return Policy(build_model(config.model, spec), config, spec), config


GAME = [0, 80, 160, 240]  # the last one is reset within the step that reaches it


def test_the_last_position_of_a_game_in_turns_is_shown(drawn: tuple[Policy, Config]) -> None:
    policy, config = drawn
    with closing(play_frames(policy, config, seed=1, deterministic=False)) as play:
        shown = list(islice(play, 10))
    assert [int(one.frame[0, 0, 0]) for one in shown] == [*GAME, *GAME, 0, 80]
    # what 'a' got for a move is known on its next turn, or at the end
    assert [one.episode_return for one in shown] == [0, 0, 1, 6, 0, 0, 1, 6, 0, 0]
    assert [one.episodes for one in shown] == [0] * 4 + [1] * 4 + [2] * 2


def test_the_last_position_of_a_game_in_turns_is_in_its_video(drawn: tuple[Policy, Config], tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    policy, config = drawn
    video = tmp_path / "game.mp4"
    assert record(policy, config, video, seconds=9 / policy.spec.render_fps) == 9
    decode = [ffmpeg, "-loglevel", "error", "-i", str(video), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(decode, capture_output=True, check=True, timeout=60).stdout
    frames = np.frombuffer(raw, np.uint8).reshape(9, -1).mean(axis=1)
    assert frames == pytest.approx([*GAME, *GAME, 0], abs=12)  # as far as the codec keeps them


def test_watching_ends_after_so_many_games_each_shown_to_its_end(
    drawn: tuple[Policy, Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, config = drawn
    seen, draw = list[int](), evaluate_module._half_blocks
    monkeypatch.setattr(
        evaluate_module, "_half_blocks", lambda frame, *size: seen.append(int(frame[0, 0, 0])) or draw(frame, *size)
    )
    watch(policy, config, episodes=2)
    assert seen == [*GAME, *GAME]


def test_random_actions_are_uniform_over_what_the_mask_allows() -> None:
    leaves = {"x": LeafSpec((1,), "float32", "vector"), "action_mask": LeafSpec((5,), "uint8", "mask")}
    spec = EnvSpec(leaves, ActionSpec((3, 2), (-2.0,), (float("inf"),)))
    obs = {"action_mask": np.tile(np.array([1, 0, 1, 0, 1], np.uint8), (4000, 1))}  # 0 or 2 of three, 1 of two
    discrete, continuous = random_actions(spec, obs, 4000, np.random.default_rng(0))
    assert discrete.shape == (4000, 2)
    assert np.bincount(discrete[:, 0], minlength=3)[1] == 0
    assert abs(np.bincount(discrete[:, 0])[0] - 2000) < 150
    assert set(discrete[:, 1].tolist()) == {1}
    assert continuous.dtype == np.float32
    assert (continuous.min() >= -2.0, continuous.max() <= 1e3) == (True, True)
    free, nothing = random_actions(EnvSpec({}, ActionSpec((3,))), {}, 100, np.random.default_rng(0))
    assert set(free[:, 0].tolist()) == {0, 1, 2}
    assert nothing.shape == (100, 0)
