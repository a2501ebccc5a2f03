"""Pictures of play: the endings of games too, in videos and in the terminal."""

from __future__ import annotations

import subprocess
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.evaluation import video as video_module
from pronghorn.evaluation.policy import Policy, build_model
from pronghorn.evaluation.video import play_frames, record, watch
from pronghorn.types import ActionSpec, EnvSpec, LeafSpec


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
    seen, draw = list[int](), video_module._half_blocks
    monkeypatch.setattr(
        video_module, "_half_blocks", lambda frame, *size: seen.append(int(frame[0, 0, 0])) or draw(frame, *size)
    )
    watch(policy, config, episodes=2)
    assert seen == [*GAME, *GAME]
