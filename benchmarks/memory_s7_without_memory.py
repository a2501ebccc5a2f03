"""How well a policy without memory can play MiniGrid-MemoryS7: what a recurrent one has to beat. It trains nothing.

    python benchmarks/memory_s7_without_memory.py [--episodes 2000]

Facing west from the fork, one 7x7 view holds the cue and both objects. To face there an agent turns through north,
which looks the same after the choice as before it; so a policy that only sees the present observation must gamble
there: go on with probability p, else turn left to look again. The policy below reads the position instead of the
view; it uses nothing that the view does not show.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import minigrid  # noqa: F401  # registers its environments
import numpy as np

LEFT, RIGHT, FORWARD = 0, 1, 2
EAST, WEST, NORTH = 0, 2, 3  # MiniGrid's directions


def act(env: gym.Env, p: float, rng: np.random.Generator) -> int:
    """The action for what is seen now."""
    state = env.unwrapped
    at_fork = state.agent_pos[0] == state.success_pos[0]  # type: ignore[attr-defined]
    if not at_fork:
        return FORWARD
    if state.agent_dir == EAST:  # type: ignore[attr-defined]
        return LEFT
    if state.agent_dir == NORTH:  # type: ignore[attr-defined]
        return FORWARD if rng.random() < p else LEFT
    if state.agent_dir == WEST:  # type: ignore[attr-defined]
        is_north = state.success_pos[1] < state.agent_pos[1]  # type: ignore[attr-defined]
        return RIGHT if is_north else LEFT
    return FORWARD


def mean_return(p: float, episodes: int) -> float:
    """Over the seeds 0, 1, …"""
    env, rng, total = gym.make("MiniGrid-MemoryS7-v0"), np.random.default_rng(0), 0.0
    for seed in range(episodes):
        env.reset(seed=seed)
        over = False
        while not over:
            _, reward, terminated, truncated, _ = env.step(act(env, p, rng))
            total += float(reward)
            over = terminated or truncated
    return total / episodes


def main() -> None:
    """Print a table of p and the mean return."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    episodes = parser.parse_args().episodes
    for p in (0.02, 0.05, 0.08, 0.1, 0.15, 0.2, 0.4, 1.0):
        print(f"p = {p:4.2f}   mean return {mean_return(p, episodes):.3f}")


if __name__ == "__main__":
    main()
