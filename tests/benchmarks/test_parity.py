"""The comparison of arithmetics: Catch is what it says, and the plain arm runs without what is done for speed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from gymnasium.utils.env_checker import check_env

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from catch import Catch


def test_catch_rewards_the_paddle_below_the_ball() -> None:
    env = Catch()
    check_env(env, skip_render_check=True)
    env.reset(seed=0)
    rewards = []
    for _ in range(env.SIZE - 1):
        picture, reward, over, _, _ = env.step(1 + int(np.sign(env.column - env.paddle)))
        rewards.append(reward)
    assert over
    assert rewards == [0.0] * (env.SIZE - 2) + [1.0]
    assert picture.sum() == 255 * env.CELL**2  # ball and paddle in one cell
    env.reset(seed=0)
    missed = [env.step(0)[1] if env.column > env.SIZE // 2 else env.step(2)[1] for _ in range(env.SIZE - 1)]
    assert missed[-1] == -1.0


def test_the_plain_arm_has_neither_pieces_nor_channels_last_memory() -> None:
    script = """
import parity, torch
parity.run_plainly()
from pronghorn.config import Config, replace
from pronghorn.defaults import resolve
from pronghorn.evaluation.policy import build_model
from pronghorn.models import encoders
from pronghorn.training.learner import Learner
from specs import PIXELS
config = resolve(replace(Config(env="doom:basic"), {"threads": 2}), PIXELS)
model = build_model(config.model, PIXELS)
assert model.actor.encoder.convs[0].first.weight.is_contiguous()
assert Learner(config, model)._pieces is None
image = torch.zeros(2, 8, 8, 3, dtype=torch.uint8).permute(0, 3, 1, 2).float()
weight = torch.zeros(4, 3, 3, 3)
assert encoders.conv2d(image, weight, None, (1, 1), 0).is_contiguous()
"""
    folder = Path(__file__).parents[2]
    paths = f"import sys; sys.path[:0] = {[str(folder / 'benchmarks'), str(folder / 'tests')]!r}\n"
    found = subprocess.run([sys.executable, "-c", paths + script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
