"""IMPALA in one file: actor threads and a learner with V-trace, on CartPole, on the same `pronghorn.ops`.

    python examples/vtrace_in_one_file.py            about a minute on two cores

Read it top to bottom: the record that crosses from actor to learner, the loss, the actor, the learner. There is no
store, no checkpoint and no configuration; `pronghorn train` has them. The loss here and the loss there are the same
function of the same numbers, and a test holds them together.

    [T, B] is time-major. Row t is one decision: the observation obs[t], the action taken there, its log-probability
    under the policy that acted, and the reward and the ending that this action caused. Nothing is ever shifted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from pronghorn.ops.distributions import ActionDistribution
from pronghorn.ops.losses import entropy, policy_gradient, value
from pronghorn.ops.returns import next_values, vtrace
from pronghorn.types import ActionSpec

ENV = "CartPole-v1"
SOLVED_RETURN = 475.0  # mean of the last 100 episodes; an episode is cut at 500 steps of reward 1
NUM_ACTORS = 2  # threads, each with environments of its own
ENVS_PER_ACTOR = 8
UNROLL_LENGTH = 32  # T
MAX_STEPS = 500_000

LEARNING_RATE = 3e-3  # at the start; it falls to 0 at MAX_STEPS
MAX_GRAD_NORM = 0.5
GAMMA = 0.99
VALUE_COEF = 0.5
ENTROPY_COEF = 0.005
RHO_CLIP = 1.0  # bounds how far a step may count towards the targets: what is learned
C_CLIP = 1.0  # bounds how far corrections travel back in time: how fast it is learned


# ------------------------------------------------------------------------------------------ the record


@dataclass
class Unroll:
    """T decisions in each of B environments under one policy, and the observation that follows them.

    A column may hold the end of one episode and the beginning of the next; the flags say where.
    """

    version: int  # updates behind the weights that acted
    obs: Tensor  # [T+1, B, ...] float32; the last row is only there to bootstrap from
    first: Tensor  # [T+1, B] bool: obs[t] begins an episode (a recurrent model resets its state there)
    actions: Tensor  # [T, B] int64
    log_probs: Tensor  # [T, B] log μ(a_t | x_t), of the policy that acted
    rewards: Tensor  # [T, B]
    terminated: Tensor  # [T, B] bool: the task's rules ended the episode; nothing follows
    truncated: Tensor  # [T, B] bool: a time limit cut the episode; something would have followed …
    truncation_values: Tensor  # [T, B] … and V of that final observation stands here; 0 where not truncated


def join(unrolls: list[Unroll]) -> Unroll:
    """Unrolls side by side along B."""
    tensors = [field.name for field in fields(Unroll) if field.name != "version"]
    joined = {name: torch.cat([getattr(unroll, name) for unroll in unrolls], dim=1) for name in tensors}
    return Unroll(version=min(unroll.version for unroll in unrolls), **joined)


# ------------------------------------------------------------------------------------------ model and loss


class ActorCritic(nn.Module):
    """Two small networks, so that the value's large errors do not disturb the policy."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.policy, self.value = _mlp(num_inputs, num_actions), _mlp(num_inputs, 1)

    def forward(self, obs: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """obs [..., num_inputs], first [...] → logits [..., A], values [...]. Without memory, `first` is unused."""
        return self.policy(obs), self.value(obs).squeeze(-1)


def _mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))


def losses(
    batch: Unroll,
    model: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *,
    gamma: float = GAMMA,
    value_coef: float = VALUE_COEF,
    entropy_coef: float = ENTROPY_COEF,
    rho_clip: float = RHO_CLIP,
    c_clip: float = C_CLIP,
) -> dict[str, Tensor]:
    """IMPALA's loss (Espeholt et al. 2018, §4.2) and its three terms, means over the batch.

    model(obs [T+1, B, ...], first [T+1, B]) returns logits [T+1, B, A] and values [T+1, B].
    """
    logits, values = model(batch.obs, batch.first)
    policy = ActionDistribution(logits[:-1], ActionSpec(discrete=(logits.shape[-1],)))  # π, at the T decisions
    actions = batch.actions.unsqueeze(-1)  # [T, B, D=1]: one discrete factor …
    nothing = torch.empty(*batch.actions.shape, 0)  # [T, B, C=0]: … and no continuous dimension
    log_probs = policy.log_prob(actions, nothing)  # [T, B] log π(a_t | x_t)

    # How likely π would have acted as μ did, ρ_t = π(a_t|x_t) / μ(a_t|x_t), weighs what μ experienced.
    log_rhos = log_probs.detach() - batch.log_probs
    followed = next_values(values.detach(), batch.truncated, batch.truncation_values)  # V of what came after a_t
    corrected = vtrace(
        log_rhos, batch.rewards, batch.terminated, batch.truncated, values[:-1].detach(), followed, gamma,
        rho_clip=rho_clip, c_clip=c_clip,
    )  # fmt: skip
    policy_loss = policy_gradient(log_probs, corrected.advantages)
    value_loss = value(values[:-1], corrected.targets)
    negative_entropy = entropy(policy.entropy())
    return {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": -negative_entropy,
        # L = L_policy + c_v L_value − c_e H
        "loss": policy_loss + value_coef * value_loss + entropy_coef * negative_entropy,
    }


# ------------------------------------------------------------------------------------------ shared by threads


class Shared:
    """What actors and learner share: the newest weights, a short queue of unrolls, and the word to stop."""

    def __init__(self, model: ActorCritic) -> None:
        # Short on purpose: an actor that is ahead waits, so no unroll is older than a few updates.
        self.unrolls: queue.Queue[Unroll | BaseException] = queue.Queue(maxsize=NUM_ACTORS)
        self.returns: deque[float] = deque(maxlen=100)  # of the last episodes that ended; appends are atomic
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        self._version = 0

    def publish(self, model: ActorCritic) -> None:
        """The learner's side: hand out the weights after an update."""
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        with self._lock:
            self._weights, self._version = weights, self._version + 1

    def fetch(self, model: ActorCritic) -> int:
        """The actors' side: take the newest weights; returns their version."""
        with self._lock:
            weights, version = self._weights, self._version
        model.load_state_dict(weights)
        return version

    def put(self, item: Unroll | BaseException) -> None:
        """Give an unroll to the learner, waiting for room, but not beyond the end of the run."""
        while not self.stop.is_set():
            with suppress(queue.Full):
                self.unrolls.put(item, timeout=0.1)
                return


# ------------------------------------------------------------------------------------------ actor


class Actor:
    """Plays ENVS_PER_ACTOR environments side by side, unroll after unroll."""

    def __init__(self, shared: Shared, seed: int) -> None:
        # Same-step: the step that ends an episode returns the next one's first observation, and the final one
        # beside it. So every row of the unroll is a real decision.
        same_step = gymnasium.vector.AutoresetMode.SAME_STEP
        makers = [lambda: gymnasium.make(ENV)] * ENVS_PER_ACTOR
        self.envs = gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=same_step)
        self.shared = shared
        self.model, self.spec = make_model()
        self.generator = torch.Generator().manual_seed(seed)
        self.obs = self.envs.reset(seed=seed)[0]
        self.first = np.ones(ENVS_PER_ACTOR, np.bool_)
        self.returns = np.zeros(ENVS_PER_ACTOR)

    def run(self) -> None:
        """The body of the actor's thread."""
        try:
            while not self.shared.stop.is_set():
                self.shared.put(self.unroll())
        except BaseException as error:
            self.shared.put(error)  # the learner raises it: a dead actor must not look like a slow one
        finally:
            self.envs.close()

    @torch.no_grad()
    def unroll(self) -> Unroll:
        """T decisions under one set of weights."""
        version = self.shared.fetch(self.model)
        rows = [self.step() for _ in range(UNROLL_LENGTH)]
        obs, first, *columns = map(list, zip(*rows, strict=True))
        obs.append(torch.tensor(self.obs))  # row T: nothing was decided there yet
        first.append(torch.tensor(self.first))
        return Unroll(version, *(torch.stack(column) for column in (obs, first, *columns)))

    def step(self) -> tuple[Tensor, ...]:
        """One decision in every environment: row t of the unroll, in the order of its fields."""
        obs, first = torch.tensor(self.obs), torch.tensor(self.first)  # copies: the environments reuse arrays
        logits, _ = self.model(obs, first)
        policy = ActionDistribution(logits, self.spec)
        action, nothing = policy.sample(self.generator)  # [B, 1], [B, 0]
        self.obs, reward, terminated, truncated, info = self.envs.step(action.squeeze(-1).numpy())
        truncated &= ~terminated  # an episode that the rules ended is not also cut
        self.first = terminated | truncated
        self.returns += reward
        self.shared.returns.extend(self.returns[self.first].tolist())
        self.returns[self.first] = 0.0
        values = self.truncation_values(truncated, info)
        caused = (torch.tensor(reward, dtype=torch.float32), torch.tensor(terminated), torch.tensor(truncated), values)
        return obs, first, action.squeeze(-1), policy.log_prob(action, nothing), *caused

    def truncation_values(self, truncated: np.ndarray, info: dict[str, np.ndarray]) -> Tensor:
        """[B]: V of the final observations of the episodes that the time limit cut, 0 elsewhere."""
        values = torch.zeros(len(truncated))
        if truncated.any():
            final = torch.tensor(np.stack(info["final_obs"][truncated]))
            values[torch.tensor(truncated)] = self.model(final, torch.zeros(len(final), dtype=torch.bool))[1]
        return values


# ------------------------------------------------------------------------------------------ learner


def make_model() -> tuple[ActorCritic, ActionSpec]:
    """A model for ENV, and the record of its actions: one discrete factor."""
    env = gymnasium.make(ENV)
    num_inputs, num_actions = env.observation_space.shape[0], int(env.action_space.n)
    env.close()
    return ActorCritic(num_inputs, num_actions), ActionSpec(discrete=(num_actions,))


def learn(shared: Shared, model: ActorCritic, max_steps: int, solved_return: float) -> float:
    """Train until the mean return of the last 100 episodes is reached, or max_steps; returns that mean."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=1e-5)
    steps_per_update = NUM_ACTORS * ENVS_PER_ACTOR * UNROLL_LENGTH
    started_s, mean = time.monotonic(), 0.0
    for update in range(max_steps // steps_per_update):
        batch = join([take(shared) for _ in range(NUM_ACTORS)])
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - update * steps_per_update / max_steps)
        terms = losses(batch, model)
        optimizer.zero_grad()
        terms["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        shared.publish(model)

        returns = list(shared.returns)  # a copy: the actors go on appending
        mean = float(np.mean(returns)) if returns else 0.0
        solved = len(returns) == 100 and mean >= solved_return
        if solved or update % 100 == 0:
            steps, seconds = (update + 1) * steps_per_update, time.monotonic() - started_s
            speed = f"{steps:>9,} steps  {seconds:5.1f} s  {steps / seconds:7,.0f} steps/s"
            lag = f"lag {update - batch.version}  entropy {terms['entropy'].item():.3f}"
            print(f"{speed}  return {mean:6.1f}  {lag}", flush=True)
        if solved:
            break
    return mean


def take(shared: Shared) -> Unroll:
    item = shared.unrolls.get(timeout=60)
    if isinstance(item, BaseException):
        raise RuntimeError("an actor failed") from item
    return item


def train(max_steps: int = MAX_STEPS, solved_return: float = SOLVED_RETURN, seed: int = 0) -> float:
    """Start the actors, learn, stop the actors. Returns the mean return of the last 100 episodes."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # these matrices are too small to share
    model, _ = make_model()
    shared = Shared(model)
    actors = [Actor(shared, seed=1000 * seed + index) for index in range(NUM_ACTORS)]
    threads = [threading.Thread(target=actor.run) for actor in actors]
    for thread in threads:
        thread.start()
    try:
        return learn(shared, model, max_steps, solved_return)
    finally:
        shared.stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    print(f"mean return of the last 100 episodes: {train():.1f}")
