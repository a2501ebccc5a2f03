"""Trains with RLlib's IMPALA or APPO (its new API) on Pong or CartPole and prints `steps N` once a second.

A process of environments for each core, which share the environments, and one learner process, as by its defaults.
APPO's circular buffer, which trains on each batch twice, is off: a batch is trained --epochs times here. Its own loop
reports every 10 s; 1 s here. For Pong a module of our own, as its default one has a dense layer for each head, and
Gymnasium's wrappers, which resize once for each action and keep bytes (its own: each frame, as float32). The caller
gives the rest.

Counted: steps that the loss takes in, in the learner itself, as RLlib's own count of trained steps includes the step
that it appends to each fragment for the last value, and every pass over a batch.
"""

import argparse
import os

import ale_py
import gymnasium
import ray
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import TARGET_NETWORK_ACTION_DIST_INPUTS, TargetNetworkAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.tune.registry import register_env
from torch import nn

COUNT = ("__all_modules__", "steps_in_loss")


def make_pong(_: dict) -> gymnasium.Env:
    """Pong as all here play it: no sticky actions, 6 actions, 84x84 grey, the last 4 frames."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    env = gymnasium.wrappers.AtariPreprocessing(env, terminal_on_life_loss=True)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


class Nature(TorchRLModule, ValueFunctionAPI, TargetNetworkAPI):
    """Mnih et al. 2015, shared by policy and value; APPO keeps an older copy of body and policy."""

    def setup(self) -> None:
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        )  # fmt: skip
        self.logits, self.value = nn.Linear(512, self.action_space.n), nn.Linear(512, 1)

    def _forward(self, batch, **_):
        """obs uint8 [N, 4, 84, 84] -> logits [N, A]. All that it returns is sent to the learner with the steps."""
        return {Columns.ACTION_DIST_INPUTS: self.logits(self.features(batch))}

    def _forward_train(self, batch, **_):
        """The same, and the features [N, 512] that the value needs."""
        features = self.features(batch)
        return {Columns.ACTION_DIST_INPUTS: self.logits(features), Columns.EMBEDDINGS: features}

    def features(self, batch):
        return self.body(batch[Columns.OBS].float() / 255.0)

    def compute_values(self, batch, embeddings=None):
        return self.value(self.features(batch) if embeddings is None else embeddings).squeeze(-1)

    def make_target_networks(self) -> None:
        self.old_body, self.old_logits = make_target_network(self.body), make_target_network(self.logits)

    def get_target_network_pairs(self):
        return [(self.body, self.old_body), (self.logits, self.old_logits)]

    def forward_target(self, batch, **_):
        logits = self.old_logits(self.old_body(batch[Columns.OBS].float() / 255.0))
        return {TARGET_NETWORK_ACTION_DIST_INPUTS: logits}


def counting(learner: type) -> type:
    """The learner class, with a count of the steps that its loss takes in."""

    class Counting(learner):
        def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
            steps = float(batch[Columns.LOSS_MASK].sum())
            self.metrics.log_value(COUNT, steps, reduce="lifetime_sum")
            return super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)

    return Counting


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
    if args.work == "pong":
        config.rl_module(rl_module_spec=RLModuleSpec(module_class=Nature))
    else:
        config.rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
        )
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
