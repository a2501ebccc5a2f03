"""Trains with RLlib's IMPALA or APPO (its new API) on Pong or CartPole and prints `steps N` once a second.

A process of environments for each core, which share the environments, and one learner process, as by its defaults.
APPO's circular buffer, which trains on each batch twice, is off: a batch is trained --epochs times here. Its own loop
reports every 10 s; 1 s here. Images are float32, as its own wrapper makes them, but resized once for each action
instead of for each frame, which is faster. The caller gives the rest.

Counted: steps that the loss takes in, in the learner itself, as RLlib's own count of trained steps includes the step
that it appends to each fragment for the last value, and every pass over a batch.
"""

import argparse
import os

import ale_py
import gymnasium
import numpy as np
import ray
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

COUNT = ("__all_modules__", "steps_in_loss")


class Stacked(gymnasium.Wrapper):
    """The last 4 frames along the last axis, where its convolutions look for channels: [84, 84, 4]."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(gymnasium.wrappers.FrameStackObservation(env, 4))
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (84, 84, 4), np.float32)

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return np.moveaxis(obs, 0, -1), info

    def step(self, action):
        obs, *rest = self.env.step(action)
        return np.moveaxis(obs, 0, -1), *rest


def make_pong(_: dict) -> gymnasium.Env:
    """Pong as all here play it: no sticky actions, 6 actions, 84x84 grey, the last 4 frames."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    return Stacked(gymnasium.wrappers.AtariPreprocessing(env, terminal_on_life_loss=True, scale_obs=True))


def counting(learner: type) -> type:
    """The learner class, with a count of the steps that its loss takes in."""

    class Counting(learner):
        def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
            steps = float(batch[Columns.LOSS_MASK].sum())
            self.metrics.log_value(COUNT, steps, reduce="lifetime_sum")
            return super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)

    return Counting


def network(work: str) -> DefaultModelConfig:
    if work == "pong":
        return DefaultModelConfig(
            conv_filters=[[32, 8, 4], [64, 4, 2], [64, 3, 1]], conv_activation="relu", head_fcnet_hiddens=[512],
            head_fcnet_activation="relu", vf_share_layers=True,
        )  # fmt: skip
    return DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)


def configure(args: argparse.Namespace):
    config = IMPALAConfig() if args.algo == "impala" else APPOConfig()
    num_runners = len(os.sched_getaffinity(0))
    config.environment("pong" if args.work == "pong" else "CartPole-v1")
    config.env_runners(
        num_env_runners=num_runners, num_envs_per_env_runner=args.envs // num_runners,
        rollout_fragment_length=args.unroll,
    )  # fmt: skip
    config.training(
        train_batch_size_per_learner=args.batch, num_epochs=args.epochs, lr=3e-4,
        minibatch_size=None if args.minibatch == args.batch else args.minibatch,
    )  # fmt: skip
    if args.algo == "appo":
        config.training(use_circular_buffer=False)
    config.rl_module(model_config=network(args.work))
    config.learners(learner_class=counting(config.get_default_learner_class()), num_learners=1)
    config.reporting(min_time_s_per_iteration=1)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algo", choices=("impala", "appo"), required=True)
    parser.add_argument("--work", choices=("pong", "cartpole"), required=True)
    for name in ("envs", "unroll", "batch", "minibatch", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    register_env("pong", make_pong)
    ray.init(num_cpus=16, include_dashboard=False, object_store_memory=2**30)  # so many places, not cores
    algorithm = configure(args).build_algo()
    while True:
        results = algorithm.train().get("learners", {}).get(COUNT[0], {})
        print(f"steps {int(results.get(COUNT[1], 0)) // args.epochs}", flush=True)


if __name__ == "__main__":
    main()
