"""Trains with Stable-Baselines3's PPO on Pong and prints `steps N` after every batch.

Its own Atari wrappers and its CnnPolicy, which is the Nature CNN. Environments in processes of their own or one after
another, by --processes; the caller gives the rest. Its logger writes nothing.
"""

import argparse

import ale_py
import gymnasium
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack


class PrintSteps(BaseCallback):
    """Before each rollout the batches of all earlier ones have been trained."""

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            print(f"steps {self.num_timesteps}", flush=True)

    def _on_step(self) -> bool:
        return True


def make_pong() -> gymnasium.Env:
    """Without sticky actions, 6 actions; the frames are repeated by the wrappers."""
    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=("pong",), required=True)
    parser.add_argument("--processes", action="store_true")
    for name in ("envs", "unroll", "batch", "minibatch", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    if args.batch != args.envs * args.unroll:
        parser.error("--batch must be --envs times --unroll: that is how its PPO makes batches")
    kind = SubprocVecEnv if args.processes else DummyVecEnv
    envs = VecFrameStack(make_atari_env(make_pong, n_envs=args.envs, seed=1, vec_env_cls=kind), n_stack=4)
    model = PPO(
        "CnnPolicy", envs, n_steps=args.unroll, batch_size=args.minibatch, n_epochs=args.epochs, learning_rate=2.5e-4,
        clip_range=0.1, ent_coef=0.01, vf_coef=0.5, device="cpu", seed=1, verbose=0,
    )  # fmt: skip
    model.learn(total_timesteps=10**9, callback=PrintSteps(), log_interval=10**9)


if __name__ == "__main__":
    main()
