"""Trains with PufferLib's PuffeRL on Pong or CartPole and prints `steps N` after every batch.

Environments run one after another in this process (its serial back end): with two worker processes on two cores it was
slower in a first look at both works (Pong 670 and 278 steps/s, CartPole 30,479 and 2,801). CartPole's network gets one
thread: two were several times slower on a busy machine. No memory and no compilation; common values for what speed
does not depend on. Its dashboard, redrawn up to four times a second, is switched off. Batch, unroll, minibatches and
passes are given by the caller. It draws minibatches by priorities, so `epochs` passes are as many samples, but not
each of them as often.
"""

import argparse

import ale_py
import gymnasium
import pufferlib.emulation
import pufferlib.pufferl
import pufferlib.vector
import torch
from torch import nn

SETTINGS = {
    "env": "benchmark", "seed": 1, "device": "cpu", "cpu_offload": False, "torch_deterministic": False,
    "precision": "float32", "use_rnn": False, "compile": False, "compile_mode": "default", "compile_fullgraph": False,
    "optimizer": "adam", "learning_rate": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8,
    "anneal_lr": False, "total_timesteps": 10**9, "checkpoint_interval": 10**9, "data_dir": "pufferlib",
    "gamma": 0.99, "gae_lambda": 0.95, "clip_coef": 0.2, "vf_clip_coef": 0.2, "vf_coef": 0.5, "ent_coef": 0.01,
    "max_grad_norm": 0.5, "vtrace_rho_clip": 1.0, "vtrace_c_clip": 1.0, "prio_alpha": 0.8, "prio_beta0": 0.2,
}  # fmt: skip


def make_pong() -> gymnasium.Env:
    """Pong as all here play it: no sticky actions, 6 actions, 84x84 grey, the last 4 frames."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    env = gymnasium.wrappers.AtariPreprocessing(env, terminal_on_life_loss=True)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def make_env(work: str, buf=None, seed: int = 0) -> pufferlib.emulation.GymnasiumPufferEnv:
    create = make_pong if work == "pong" else lambda: gymnasium.make("CartPole-v1")
    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=create, buf=buf, seed=seed)


def conv_body() -> nn.Module:
    """Mnih et al. 2015: [N, 4, 84, 84] -> [N, 512]."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
    )  # fmt: skip


def dense_body(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())


class Policy(nn.Module):
    """One convolutional body for both heads, or for vectors one body for each."""

    def __init__(self, work: str, env) -> None:
        super().__init__()
        self.is_image = work == "pong"
        inputs = env.single_observation_space.shape[0]
        self.body = conv_body() if self.is_image else dense_body(inputs)
        self.value_body = None if self.is_image else dense_body(inputs)
        width = 512 if self.is_image else 64
        self.logits, self.value = nn.Linear(width, env.single_action_space.n), nn.Linear(width, 1)

    def forward_eval(self, obs, state=None):
        """obs [N, ...] -> (logits [N, A], values [N, 1])."""
        x = obs.float() / 255.0 if self.is_image else obs.float()
        y = self.body(x)
        return self.logits(y), self.value(y if self.value_body is None else self.value_body(x))

    forward = forward_eval


class Trainer(pufferlib.pufferl.PuffeRL):
    def print_dashboard(self, *_, **__) -> None:
        """Nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=("pong", "cartpole"), required=True)
    for name in ("envs", "unroll", "batch", "minibatch", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    envs = pufferlib.vector.make(
        make_env, env_args=[args.work], num_envs=args.envs, backend=pufferlib.vector.Serial, seed=1
    )
    sizes = {
        "batch_size": args.batch, "bptt_horizon": args.unroll, "minibatch_size": args.minibatch,
        "max_minibatch_size": args.minibatch, "update_epochs": args.epochs,
    }  # fmt: skip
    torch.manual_seed(1)
    if args.work == "cartpole":
        torch.set_num_threads(1)
    trainer = Trainer(SETTINGS | sizes, envs, Policy(args.work, envs))
    while True:
        trainer.evaluate()
        trainer.train()
        print(f"steps {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
