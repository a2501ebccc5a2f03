"""Pictures of a policy playing: as a video, or in the terminal."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronghorn.config import Config
from pronghorn.envs.registry import make_env
from pronghorn.errors import EnvError, UsageError
from pronghorn.evaluation.at_rows import at_rows
from pronghorn.evaluation.policy import Policies, Policy

VIDEO_SUFFIXES = (".mp4", ".mkv", ".mov")


class Shown(NamedTuple):
    """One picture of play. frame: uint8 RGB [H, W, 3].  episode_return: of the first row so far.  episodes: how many of
    its episodes were over before."""

    frame: NDArray[np.uint8]
    episode_return: float
    episodes: int


def play_frames(
    policy: Policy | Policies, config: Config, *, seed: int, deterministic: bool
) -> Generator[Shown, None, None]:
    """Pictures of play without end: one a step, and before it one of how an episode ended that was over in this step.

    Close it, to end its environment. Raises EnvError if nothing renders.
    """
    env = make_env(config, seed=seed, render=True)
    try:
        policy.seed(seed)
        player, episodes = at_rows(policy, env.pool, deterministic), 0
        while True:
            ready = env.receive()
            ended = {row: total for row, total, _ in player.observe(ready)}
            ending = env.render_ending()
            if ending is not None:
                yield Shown(_as_image(ending), ended.get(0, float(player.returns[0])), episodes)
            episodes += 0 in ended
            frame = env.render()
            if frame is None:
                raise EnvError(f"{policy.spec.name} renders no frames: its render() gives None. Nothing was recorded.")
            yield Shown(_as_image(frame), float(player.returns[0]), episodes)
            env.pool.send(*player.answer(ready))
    finally:
        env.close()


def _as_image(frame: NDArray[Any]) -> NDArray[np.uint8]:
    """uint8 RGB with even sides, as video codecs want; small frames are enlarged by whole factors."""
    if frame.dtype.kind == "f":
        frame = np.clip(frame * (255.0 if frame.max(initial=0.0) <= 1.0 else 1.0), 0, 255)
    image = np.atleast_3d(frame.astype(np.uint8))
    image = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image[:, :, :3]
    factor = max(1, 320 // max(image.shape[:2]))
    image = image.repeat(factor, 0).repeat(factor, 1)
    return np.ascontiguousarray(np.pad(image, ((0, image.shape[0] % 2), (0, image.shape[1] % 2), (0, 0)), mode="edge"))


def record(
    policy: Policy | Policies, config: Config, out: Path, *, seconds: float = 20.0, seed: int = 0,
    deterministic: bool = False,
) -> int:  # fmt: skip
    """Write an mp4 of the policy playing (no display needed). Returns the number of frames; at least 1.

    Raises UsageError for a length without a frame, EnvError if the environment renders nothing.
    """
    import imageio.v2 as imageio  # type: ignore[import-untyped,unused-ignore]

    fps = max(1.0, policy.spec.render_fps)
    max_frames = round(seconds * fps)
    if max_frames < 1:
        raise UsageError(f"--seconds {seconds}: a video needs at least one frame ({1 / fps:.3g} s).")
    if out.suffix not in VIDEO_SUFFIXES:
        raise UsageError(f"--out {out}: must end in {', '.join(VIDEO_SUFFIXES)}. Try {out.with_suffix('.mp4')}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(".partial-" + out.name)
    count = 0
    try:
        writer: Any = imageio.get_writer(partial, fps=fps, macro_block_size=1, format="FFMPEG")
        with writer, closing(play_frames(policy, config, seed=seed, deterministic=deterministic)) as play:
            for shown in islice(play, max_frames):
                writer.append_data(shown.frame)
                count += 1
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return count


def watch(
    policy: Policy | Policies, config: Config, *, seed: int = 0, deterministic: bool = False, episodes: int = 3
) -> None:
    """Show the policy playing in the terminal, in colour blocks, at the environment's own speed."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with (
        Live(console=console, refresh_per_second=20, screen=console.is_terminal) as live,
        closing(play_frames(policy, config, seed=seed, deterministic=deterministic)) as play,
    ):
        for shown in takewhile(lambda shown: shown.episodes < episodes, play):
            picture = _half_blocks(shown.frame, console.width, console.height - 2)
            live.update(Text.assemble(picture, f"\nreturn {shown.episode_return:.3g}   Ctrl-C ends"))
            time.sleep(1.0 / max(1.0, policy.spec.render_fps))


def _half_blocks(frame: NDArray[np.uint8], width: int, height: int) -> Any:
    """Two pixels a character: the upper half block in one colour on the other."""
    from rich.text import Text

    scale = max(frame.shape[1] / width, frame.shape[0] / (2 * height))
    rows = (np.arange(0, frame.shape[0], scale)).astype(int)[: 2 * height // 2 * 2]
    small = frame[rows][:, (np.arange(0, frame.shape[1], scale)).astype(int)[:width]]
    text = Text()
    for top, bottom in zip(small[0::2], small[1::2], strict=False):
        for a, b in zip(top, bottom, strict=True):
            text.append("▀", f"rgb({a[0]},{a[1]},{a[2]}) on rgb({b[0]},{b[1]},{b[2]})")
        text.append("\n")
    return text
