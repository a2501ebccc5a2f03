"""PPO in one file in the manner of CleanRL, with EnvPool's C++ Pong, printing `steps N` after every batch.

It takes turns: all environments play an unroll together (EnvPool's synchronous mode, its threads on all cores), then
the network learns from it. EnvPool's defaults are the task: action repeat 4, 84x84 grey, 4 frames, 6 actions, up to 30
no-ops, no sticky actions; a lost life ends an episode and rewards are clipped. Learning rate and coefficients are
those that PPO is mostly run with on Atari. The caller gives environments, unroll, batch, minibatches and passes.
"""

import argparse

import envpool
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, MAX_NORM = 0.99, 0.95, 0.1, 0.01, 0.5, 0.5


class Agent(nn.Module):
    """Mnih et al. 2015, then a head for the policy and one for the value."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        )  # fmt: skip
        self.logits, self.value = nn.Linear(512, num_actions), nn.Linear(512, 1)

    def forward(self, obs: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        """obs uint8 [N, 4, 84, 84] -> (policy, values [N])."""
        features = self.body(obs.float() / 255.0)
        return Categorical(logits=self.logits(features)), self.value(features).squeeze(1)


class Unroll:
    """T steps of N environments: obs [T, N, 4, 84, 84], all else [T, N]."""

    def __init__(self, length: int, num_envs: int) -> None:
        self.obs = torch.zeros(length, num_envs, 4, 84, 84, dtype=torch.uint8)
        self.actions = torch.zeros(length, num_envs, dtype=torch.int64)
        self.log_probs, self.values, self.rewards, self.ends = (torch.zeros(length, num_envs) for _ in range(4))

    def play(self, agent: Agent, envs, obs: np.ndarray) -> np.ndarray:
        """Fill it from `obs` on; returns the observation after the last step."""
        for t in range(len(self.obs)):
            self.obs[t] = torch.from_numpy(obs)
            policy, self.values[t] = agent(self.obs[t])
            self.actions[t] = policy.sample()
            self.log_probs[t] = policy.log_prob(self.actions[t])
            obs, reward, terminated, truncated, _ = envs.step(self.actions[t].numpy().astype(np.int32))
            self.rewards[t] = torch.from_numpy(reward)
            self.ends[t] = torch.from_numpy((terminated | truncated).astype(np.float32))
        return obs

    def advantages(self, last_values: torch.Tensor) -> torch.Tensor:
        """GAE: A_t = delta_t + gamma lambda (1 - end_t) A_{t+1}."""
        found, following = torch.zeros_like(self.rewards), torch.zeros_like(last_values)
        for t in reversed(range(len(self.rewards))):
            goes_on = 1.0 - self.ends[t]
            delta = self.rewards[t] + GAMMA * goes_on * last_values - self.values[t]
            following = delta + GAMMA * LAMBDA * goes_on * following
            found[t], last_values = following, self.values[t]
        return found


def learn(agent: Agent, optimizer: torch.optim.Optimizer, unroll: Unroll, advantages: torch.Tensor, size: int) -> None:
    """One pass over the unroll in minibatches of `size` single steps."""
    obs, actions, old = unroll.obs.flatten(0, 1), unroll.actions.flatten(), unroll.log_probs.flatten()
    returns, advantages = (advantages + unroll.values).flatten(), advantages.flatten()
    for rows in torch.randperm(len(obs)).split(size):
        policy, values = agent(obs[rows])
        advantage = (advantages[rows] - advantages[rows].mean()) / (advantages[rows].std() + 1e-8)
        ratio = (policy.log_prob(actions[rows]) - old[rows]).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantage).mean()
        error = 0.5 * (values - returns[rows]).square().mean()
        optimizer.zero_grad()
        (VALUE * error - gain - ENTROPY * policy.entropy().mean()).backward()
        nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=("pong",), required=True)
    for name in ("envs", "unroll", "batch", "minibatch", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    if args.batch != args.envs * args.unroll:
        parser.error("--batch must be --envs times --unroll: all environments play an unroll together")
    envs = envpool.make("Pong-v5", env_type="gymnasium", num_envs=args.envs, episodic_life=True, reward_clip=True)
    agent, unroll = Agent(envs.action_space.n), Unroll(args.unroll, args.envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    obs, _ = envs.reset()
    steps = 0
    while True:
        with torch.no_grad():
            obs = unroll.play(agent, envs, obs)
            advantages = unroll.advantages(agent(torch.from_numpy(obs))[1])
        for _ in range(args.epochs):
            learn(agent, optimizer, unroll, advantages, args.minibatch)
        steps += args.batch
        print(f"steps {steps}", flush=True)


if __name__ == "__main__":
    main()
