"""Who is measured beside Pronghorn, as data: packages, commands, where the count of steps is read. It runs no training.

A peer is a set of packages in a virtual environment of its own. A work is one task for all, with the same network,
unroll length, batch and passes over the data; a contender of it is one command (side_by_side.py). To add a peer: an
entry in PEERS, and a Contender in the works that it can do.

How the settings came about: unrolls, batches, passes and networks are those of Pronghorn's command of the same work,
and so is the number of environments for Pong (32). What is left to a peer was chosen for two cores: Sample Factory with
two workers, and 32 environments of Doom, the fastest it was there (ours are as many as a batch has unrolls, 64 on two
cores, by its own choice); for the others see the scripts in peer_scripts.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from side_by_side import Contender

OURS = "pronghorn"
INSTALLED = "installed_by_benchmark.txt"  # in a venv: what was installed there


@dataclass(frozen=True)
class Peer:
    """What pip is told. first: torch by itself and pinned, else a later package brings in another build of it; then
    packages, in one resolve. Only one of the two where torch is the peer's own pin.
    """

    first: tuple[str, ...]
    packages: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The packages' names, without versions and extras."""
        return [re.split(r"[\[=<>!~]", each)[0] for each in (*self.first, *self.packages)]


PEERS: Mapping[str, Peer] = {
    "sample-factory": Peer(
        ("torch==2.13.0", "numpy<2"),  # with NumPy 2 its workers die
        ("numpy<2", "sample-factory==2.1.1", "gymnasium<1", "vizdoom", "ale-py", "opencv-python-headless<5"),
    ),
    "pufferlib": Peer(
        (), ("pufferlib-core==3.0.23", "torch", "numpy", "gymnasium", "ale-py", "opencv-python-headless")
    ),
    "rllib": Peer(("torch==2.13.0", "numpy"), ("ray[rllib]==2.60.0", "gymnasium", "ale-py", "opencv-python-headless")),
    "sb3": Peer(
        ("torch==2.13.0", "numpy"), ("stable-baselines3==2.9.2", "gymnasium", "ale-py", "opencv-python-headless")
    ),
    "cleanrl": Peer(("torch==2.13.0", "numpy"), ("envpool==1.2.5", "gymnasium")),
}
OUR_PACKAGES = ("pronghorn-rl", "torch", "numpy", "gymnasium", "vizdoom", "ale-py")


@dataclass(frozen=True)
class Work:
    """A task, in words and as a command of each contender; the first one is Pronghorn."""

    what: str
    contenders: tuple[Contender, ...]

    def of(self, peers: list[str]) -> list[Contender]:
        """Pronghorn and the contenders of the given peers."""
        return [each for each in self.contenders if each.peer in (OURS, *peers)]


def _pronghorn(env: str, *settings: str) -> Contender:
    more = ("--log.live", "plain", "--run-dir", "{run}/run")
    arguments = ("-m", "pronghorn", "train", env, "--algo", "appo", "--device", "cpu", *settings, *more)
    return Contender(OURS, OURS, arguments, metrics="run/metrics.jsonl")


def _sample_factory(*program: str, frames: int) -> Contender:
    """frames: its count grows by so many at each step."""
    more = ("--device=cpu", "--num_workers=2", "--worker_num_splits=2", "--async_rl=True", "--save_every_sec=100000",
            "--experiment=bench", "--train_dir={run}")  # fmt: skip
    counter = r"Fps is \(.*?Total num frames: (\d+)"  # every 5 s
    return Contender("sample-factory", "sample-factory", (*program, *more), counter, counted_per_step=frames)


def _script(name: str, peer: str, script: str, *arguments: str) -> Contender:
    return Contender(name, peer, ("{scripts}/" + script, *arguments))


def _doom(scenario: str) -> Work:
    ours = _pronghorn(
        f"doom:{scenario}", "--learner.unroll-length", "32", "--learner.batch-unrolls", "64",
        "--learner.minibatches", "1", "--model.conv", "convnet_simple", "--model.core", "gru",
        "--model.core-size", "512",
    )  # fmt: skip
    theirs = _sample_factory(
        "-m", "sf_examples.vizdoom.train_vizdoom", f"--env=doom_{scenario}", "--num_envs_per_worker=16",
        "--rollout=32", "--batch_size=2048", "--num_batches_per_epoch=1", "--num_epochs=1",
        "--encoder_conv_architecture=convnet_simple", "--use_rnn=True", "--rnn_type=gru", "--rnn_size=512",
        frames=4,
    )  # fmt: skip
    what = (
        f"VizDoom {scenario}: 160x120 rendered, 128x72 RGB, action repeat 4, convnet_simple + GRU 512, unrolls of 32, "
        "2,048 samples a batch, one pass"
    )
    return Work(what, (ours, theirs))


_PONG = ("--work", "pong", "--envs", "32", "--unroll", "32", "--batch", "1024", "--minibatch", "1024", "--epochs", "1")
_CARTPOLE = (
    "--work", "cartpole", "--envs", "256", "--unroll", "32", "--batch", "8192", "--minibatch", "4096", "--epochs", "1",
)  # fmt: skip

WORKS: Mapping[str, Work] = {
    "doom": _doom("basic"),
    "doom-hgs": _doom("health_gathering_supreme"),
    "pong": Work(
        "Atari Pong: 84x84 grey, 4 frames stacked, action repeat 4, Nature CNN + 512, no memory, 32 environments, "
        "unrolls of 32, 1,024 samples a batch, one optimiser step a batch",
        (
            _pronghorn(
                "atari:Pong", "--env.workers", "2", "--env.envs-per-worker", "16", "--learner.unroll-length", "32",
                "--learner.batch-unrolls", "32", "--learner.minibatches", "1", "--learner.epochs", "1",
                "--model.conv", "nature", "--model.core", "none",
            ),
            _sample_factory(
                "{scripts}/sample_factory_atari.py", "--env=atari_pong", "--num_envs_per_worker=16", "--rollout=32",
                "--batch_size=1024", "--num_batches_per_epoch=1", "--num_epochs=1", frames=4,
            ),
            _script("pufferlib", "pufferlib", "train_with_pufferlib.py", *_PONG),
            _script("rllib-impala", "rllib", "train_with_rllib.py", "--algo", "impala", *_PONG),
            _script("rllib-appo", "rllib", "train_with_rllib.py", "--algo", "appo", *_PONG),
            _script("sb3", "sb3", "train_with_sb3.py", *_PONG),
            _script("cleanrl", "cleanrl", "ppo_on_envpool.py", *_PONG),
        ),
    ),
    "cartpole": Work(
        "CartPole-v1: two layers of 64 for the policy and two for the value, tanh, unrolls of 32, one pass in "
        "minibatches of 4,096; Pronghorn with its defaults, 1,024 environments and 32,768 samples a batch, the others "
        "256 and 8,192",
        (
            _pronghorn("gym:CartPole-v1"),
            _sample_factory(
                "-m", "sf_examples.train_gym_env", "--env=CartPole-v1", "--num_envs_per_worker=128", "--rollout=32",
                "--batch_size=4096", "--num_batches_per_epoch=2", "--num_epochs=1", "--use_rnn=False",
                "--encoder_mlp_layers", "64", "64", "--nonlinearity=tanh", "--actor_critic_share_weights=False",
                frames=1,
            ),
            _script("pufferlib", "pufferlib", "train_with_pufferlib.py", *_CARTPOLE),
            _script("rllib-impala", "rllib", "train_with_rllib.py", "--algo", "impala", *_CARTPOLE),
        ),
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------ virtual environments


class AbsentError(Exception):
    """A peer could not be installed; the message is pip's reason."""


def install(peer: Peer, folder: Path) -> str:
    """The peer in a virtual environment of its own; returns its interpreter. What is there already is kept.

    Raises AbsentError.
    """
    python, stamp = folder / "bin" / "python", folder / INSTALLED
    wanted = "\n".join([*peer.first, *peer.packages])
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if not stamp.exists() or stamp.read_text() != wanted:
        for packages in filter(None, (peer.first, peer.packages)):
            _pip(str(python), packages)
        stamp.write_text(wanted)
    return str(python.absolute())  # the link itself: what it leads to is outside of the environment


def _pip(python: str, packages: tuple[str, ...]) -> None:
    command = [python, "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise AbsentError(reason(done.stdout))


def reason(output: str) -> str:
    """Why pip gave up: its lines that say ERROR, else the end of what it said."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return "\n".join([line for line in lines if line.startswith("ERROR")] or lines[-5:])
