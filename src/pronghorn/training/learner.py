"""The learner: one batch of unrolls in, one better policy out. It knows no environment, thread or file.

`Learner.iterate` does all training on one batch: epochs × minibatches optimiser steps, then the normalisers, then
the version goes up by one. Algorithms are choices of `LearnerConfig`, not classes.

Several learners (`World`) train one policy: each has its part of every batch, and whatever is a mean, a norm or a
statistic of a batch is that of all parts together, so all take the same steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pronghorn.config import Config, Hyperparameters, LearnerConfig, derive_seed
from pronghorn.errors import DivergedError
from pronghorn.models.actor_critic import ActorCritic, ModelOutput
from pronghorn.ops import losses, returns
from pronghorn.training.device import Reader, make_queue, upload
from pronghorn.training.graphed import Step, StepGraphs, gradients
from pronghorn.training.optimizers import make_optimizer
from pronghorn.training.pieces import Pieces, arithmetic
from pronghorn.training.store import Batch
from pronghorn.training.world import World
from pronghorn.untrusted import whole as whole_number

EPSILON_CORRECTION = 1e-6  # Espeholt et al. 2018, §5.2.2
LR_BOUNDS = (1e-6, 1e-2)  # of the adaptive learning rate
SUMMED = ("loss", "policy_loss", "value_loss", "exploration_loss")  # under --learner.reduction sum


Estimate = returns.VTrace | returns.GAE


class Part(NamedTuple):
    """What one optimiser step trains on: whole unrolls [T, b] or single steps [1, n], and what belongs to them.

    estimate: targets and advantages made before the first step of the iteration, or None to make them in the step.
    """

    batch: Batch
    weights: Tensor | None
    estimate: Estimate | None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that losses are made of, by names."""
        for kind, group in (("obs", self.batch.obs), ("steps", self.batch.steps)):
            yield from ((f"{kind}/{name}", tensor) for name, tensor in group.items())
        yield "state", self.batch.state
        if self.weights is not None:
            yield "weights", self.weights
        if self.estimate is not None:
            yield from (("targets", self.estimate.targets), ("advantages", self.estimate.advantages))

    def with_tensors(self, named: Mapping[str, Tensor]) -> Part:
        """The same with other tensors, named as by `tensors`."""
        obs, steps = ({k: named[f"{kind}/{k}"] for k in group} for kind, group in
                      (("obs", self.batch.obs), ("steps", self.batch.steps)))  # fmt: skip
        estimate = self.estimate and self.estimate._replace(targets=named["targets"], advantages=named["advantages"])
        return Part(replace(self.batch, obs=obs, steps=steps, state=named["state"]), named.get("weights"), estimate)


@dataclass(frozen=True)
class Losses:
    """Every term of one optimiser step's loss (scalars), and what else is reported of it."""

    total: Tensor
    terms: dict[str, Tensor]
    targets: Tensor  # [T, b] value targets, raw return units


class Learner:
    """Owns the target policy, its optimiser and the hyper-parameters."""

    def __init__(self, config: Config, model: ActorCritic, world: World | None = None) -> None:
        """config: this learner's share. world: who else trains this policy; None: nobody."""
        self._world = world or World()
        self.settings: LearnerConfig = config.learner
        self.model = model
        self.hyper = Hyperparameters.from_config(config)
        self._parameters = list(model.parameters())
        self.optimizer = make_optimizer(self.settings, self._groups())
        self.total_steps = config.steps
        self.max_lag = config.max_lag
        self._single_steps = config.single_steps
        self.seed = config.seed
        self.version = 0  # policy_version: iterations behind the weights
        self.updates = 0
        self.steps = 0  # samples that have entered batches, of all learners
        self.num_skipped = 0  # optimiser steps skipped because a number was not finite
        self.num_dropped = 0  # samples dropped under --learner.drop-over-lag
        self._skipped_in_a_row = 0
        # Minibatches of single steps are too small to be worth it.
        self._device = self._parameters[0].device.type
        apart = self._device == "cpu" and config.threads > 1 and not config.single_steps
        self._precision = config.precision
        self._pieces = Pieces(model, config.threads, config.precision) if apart else None
        graphs = self._device == "cuda" and config.graphs != "off" and self._world.size == 1
        self._graphs = self._make_graphs(config) if graphs else None
        self._reader = Reader(self._parameters[0].device)

    def close(self) -> None:
        """End its threads."""
        if self._pieces:
            self._pieces.close()

    def _make_graphs(self, config: Config) -> StepGraphs:
        queue = make_queue(self._parameters[0].device)
        return StepGraphs(self._parameters, queue, graphs=config.graphs, rough=config.precision == "bfloat16")

    def _groups(self) -> list[dict[str, Any]]:
        """Two groups of parameters, the second what only the value depends on, with their learning rates."""
        critic = self.model.critic_parameters()
        own = {id(p) for p in critic}
        actor = [p for p in self._parameters if id(p) not in own]
        return [{"params": p, "lr": self.hyper.lr * s} for p, s in zip((actor, critic), self._lr_scales, strict=True)]

    @property
    def _lr_scales(self) -> tuple[float, float]:
        return 1.0, self.settings.critic_lr_scale

    def _tell_optimizer(self) -> None:
        for group, scale in zip(self.optimizer.param_groups, self._lr_scales, strict=True):
            group["lr"], group["eps"] = self.hyper.lr * scale, self.hyper.optimizer_eps

    def iterate(self, batch: Batch, stopping: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Train on one batch. Returns the means of the reported numbers over its optimiser steps.

        stopping: asked after each optimiser step; when it says so, to any learner, the iteration ends there.
        Raises DivergedError after more than max_skipped optimiser steps in a row that had to be skipped.
        """
        self.steps += batch.num_fresh * self._world.size
        weights, skipped, updates = self._weights(batch), self.num_skipped, self.updates
        estimate, once = self._estimate_once(batch, weights) if self.settings.estimates_once else (None, {})
        reports: list[dict[str, float]] = []
        targets: list[Tensor] = []
        counts: list[Tensor] = []
        for part in self._minibatches(Part(batch, weights, estimate)):
            step = self._differentiate(part) if self._graphs is None else self._by_graph(self._graphs, part)
            stops = stopping()
            if self._world.size > 1:
                step, stops = self._add_up(step, part, stops)
            reports.append(self._update(step))
            targets.append(step.targets.flatten())
            if part.weights is not None:
                counts.append(part.weights.flatten())
            if stops:
                break
        if self.num_skipped == skipped:  # whatever was not finite must not get into the statistics either
            if estimate is not None:  # the same in every epoch, so each counts once
                self._update_normalizers(batch, estimate.targets, weights, weights)
            else:
                self._update_normalizers(batch, torch.cat(targets), torch.cat(counts) if counts else None, weights)
        self.version += 1
        report = {k: float(np.mean([r[k] for r in reports if k in r])) for k in sorted({k for r in reports for k in r})}
        if once:
            report |= dict(zip(once, self._reader.read(torch.stack(list(once.values()))), strict=True))
        self._schedule_lr(report.get("kl", math.nan) if self.updates > updates else math.nan)
        lag = batch.policy_lag[:, : batch.policy_lag.shape[1] - batch.num_replayed]
        report |= {
            "policy_lag_min": int(lag.min()),
            "policy_lag_mean": float(lag.mean()),
            "policy_lag_max": int(lag.max()),
        }
        if batch.num_replayed:
            report["replay_lag_mean"] = float(batch.policy_lag[:, -batch.num_replayed :].mean())
        return report

    # ------------------------------------------------------------ one optimiser step

    def _forward(self, batch: Batch) -> ModelOutput:
        """What the model says about a batch, in the precision of training."""
        if self._pieces:
            return self._pieces.forward(batch)
        with arithmetic(self._precision, self._device):
            output: ModelOutput = self.model(batch.obs, batch.state, batch.steps["first"])
        return output

    def _differentiate(self, part: Part) -> Step:
        """Forward pass, losses, and clipped gradients. It asks the device for nothing, so it can be made a graph.

        Of several learners: the gradients of this one's part, as they are.
        """
        self.optimizer.zero_grad(set_to_none=True)
        out = self._forward(part.batch)
        result = compute_losses(
            self.model, part.batch, self.hyper, self.settings, part.weights, part.estimate, out, self._world.sums
        )
        if self._graphs is None:
            result.total.backward()  # type: ignore[no-untyped-call]
            if self._pieces:
                self._pieces.backward()
        else:
            for parameter, grad in zip(
                self._parameters, gradients(result.total, self._parameters), strict=True
            ):
                parameter.grad = grad
        terms = result.terms | {"loss": result.total.detach()}
        if self._world.size == 1:
            terms["grad_norm"] = self._clip()
        return Step(tuple(terms), torch.stack([term.float() for term in terms.values()]), result.targets)

    def _clip(self) -> Tensor:
        """Bound the norm of the gradients; what it was."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, self.hyper.max_grad_norm or math.inf)

    @torch.no_grad()
    def _add_up(self, step: Step, part: Part, stops: bool) -> tuple[Step, bool]:
        """Gradients and numbers of the whole batch, from those of every learner's part; whether any wants to stop.

        One call for everything. A number that is not finite in one part is not finite in the sum, so all skip the step.
        """
        counted = float(part.batch.num_samples) if part.weights is None else part.weights.sum()
        grads = [p.grad for p in self._parameters if p.grad is not None]
        like = step.numbers
        tail = torch.stack([torch.as_tensor(x, dtype=like.dtype, device=like.device) for x in (counted, float(stops))])
        is_sum = self.settings.reduction == "sum"
        sums = torch.tensor([is_sum and name in SUMMED for name in step.names], device=like.device)
        # L = sum_r n_r L_r / sum_r n_r for means, sum_r L_r for sums; so its gradient, and what is told of it
        flat = torch.cat([g.flatten() for g in grads]) * (1.0 if is_sum else tail[0])
        whole = self._world.sums(torch.cat((flat, like * torch.where(sums, 1.0, tail[0]), tail)))
        num = whole[-2].clamp(min=1.0)
        flat, numbers = whole[: len(flat)], whole[len(flat) : -2] / torch.where(sums, 1.0, num)
        for grad, new in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
            grad.copy_(new.view(grad.shape) / (1.0 if is_sum else num))
        numbers = torch.cat((numbers, self._clip().to(numbers.dtype).reshape(1)))
        return step._replace(names=(*step.names, "grad_norm"), numbers=numbers), bool(whole[-1] > 0)

    def _by_graph(self, graphs: StepGraphs, part: Part) -> Step:
        """`_differentiate`, as one operation of the device where there is a graph of it."""
        named = dict(part.tensors())
        # A graph has these numbers in it; those of the optimiser are outside.
        outside = ("lr", "optimizer_eps", "epochs", "version")
        hyper = tuple(value for name, value in vars(self.hyper).items() if name not in outside)

        def differentiate(tensors: Sequence[Tensor]) -> Step:
            return self._differentiate(part.with_tensors(dict(zip(named, tensors, strict=True))))

        return graphs(differentiate, list(named.values()), (tuple(named), hyper))

    def _update(self, step: Step) -> dict[str, float]:
        report = dict(zip(step.names, self._reader.read(step.numbers), strict=True)) | {"lr": self.hyper.lr}
        if math.isfinite(report["loss"]) and math.isfinite(report["grad_norm"]):
            self.optimizer.step()
            self.updates += 1
            self._skipped_in_a_row = 0
            return report
        return self._skip(report)

    def _skip(self, report: dict[str, float]) -> dict[str, float]:
        """A number is not finite: leave the weights alone, count it, and give up when it does not pass."""
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > self.settings.max_skipped:
            bad = [
                name for name, p in self.model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()
            ]
            raise DivergedError(
                f"{self._skipped_in_a_row} optimiser steps in a row had a loss or gradient that is not finite "
                f"(first such gradient: {bad[0] if bad else 'none, the loss itself'})."
            )
        return {k: v for k, v in report.items() if math.isfinite(v)}

    # ------------------------------------------------------------ around it

    def _weights(self, batch: Batch) -> Tensor | None:
        """[T, B] 1 for a sample that counts, 0 for one over the lag limit; None when all count."""
        if not self.settings.drop_over_lag:
            return None
        over = batch.policy_lag > self.max_lag
        if batch.num_replayed:  # old on purpose
            over[:, -batch.num_replayed :] = False
        self.num_dropped += int(over.sum())
        return upload(torch.from_numpy((~over).astype(np.float32)), batch.state.device)

    @torch.no_grad()
    def _estimate_once(self, batch: Batch, weights: Tensor | None) -> tuple[Estimate, dict[str, Tensor]]:
        """Targets and advantages [T, B] under the present weights, and what is reported of the critic before it learns.

        Advantages are normalised over the whole batch, so that a minibatch does not subtract what it has in common.
        """
        out = self._forward(batch)
        distribution = self.model.distribution(out.params[:-1], {k: v[:-1] for k, v in batch.obs.items()})
        log_rhos = distribution.log_prob(batch.steps["discrete"], batch.steps["continuous"]) - batch.steps["log_prob"]
        values = self.model.denormalize_value(out.values)
        estimate = _estimate(log_rhos, values, batch.steps, self.hyper, self.settings)
        report = _critic_report(estimate.targets, values[:-1], weights, self._world.sums)
        return _scaled(estimate, weights, self.model, self.settings, self._world.sums), report

    def _minibatches(self, whole: Part) -> Iterator[Part]:
        """What each optimiser step of an iteration trains on: every sample once an epoch (see Config.single_steps).

        Of several learners each deals its own part into as many: a step takes one of each, drawn apart.
        """
        n = self.settings
        if n.minibatches == 1:
            yield from [whole] * self.hyper.epochs
            return
        single = self._single_steps
        count = whole.batch.num_samples if single else whole.batch.state.shape[0]
        # Seeded by the version, not by a running state: a resumed run draws the same permutations.
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 2, self.version))
        for _ in range(self.hyper.epochs):
            order = torch.randperm(count, generator=generator)
            # tensor_split: sizes differ by one at most, so that no last minibatch is tiny (a batch without replay yet)
            num_parts = min(n.minibatches, count)
            if single:
                yield from _steps_apart(whole, order, num_parts)
            else:
                there = upload(order, whole.batch.state.device).tensor_split(num_parts)
                here = order.tensor_split(num_parts)
                yield from (_columns(whole, *index) for index in zip(there, here, strict=True))

    def _update_normalizers(
        self, batch: Batch, targets: Tensor, counts: Tensor | None, weights: Tensor | None
    ) -> None:
        """Last, so that the statistics in use are those that the policy acted with (they are part of the version).

        targets, counts: of everything that was trained on.  Observations count once, when they are fresh.
        """
        fresh = batch.state.shape[0] - batch.num_replayed
        with torch.no_grad():
            obs = {k: v[:-1, :fresh] for k, v in batch.obs.items()}
            sums = self._world.sums
            self.model.update_obs_norm(obs, None if weights is None else weights[:, :fresh], sums)
            self.model.update_return_norm(targets, counts, sums)

    def _schedule_lr(self, kl: float) -> None:
        n = self.settings
        lr = self.hyper.lr
        if n.lr_schedule == "linear" and self.total_steps:
            lr = n.lr * max(0.0, 1.0 - self.steps / self.total_steps)
        elif n.lr_schedule == "kl_adaptive" and math.isfinite(kl):  # nothing is known of skipped steps
            factor = 1.5 if kl < 0.5 * n.lr_kl_target else 1 / 1.5 if kl > 2.0 * n.lr_kl_target else 1.0
            lr = min(max(lr * factor, LR_BOUNDS[0]), LR_BOUNDS[1])
        if lr != self.hyper.lr:
            self.set_hyper(lr=lr)

    def set_hyper(self, **values: float) -> None:
        """A new version of the hyper-parameters."""
        changes: dict[str, Any] = values | ({"epochs": round(values["epochs"])} if "epochs" in values else {})
        self.hyper = replace(self.hyper, **changes, version=self.hyper.version + 1)
        self._tell_optimizer()

    def configure_optimizer(self) -> None:
        """Give the optimiser this run's settings and memory formats, after a saved state was loaded into it."""
        n = self.settings
        self._tell_optimizer()
        for group in self.optimizer.param_groups:
            for name in ("alpha", "decay"):  # RMSProp's, of torch and of TensorFlow
                if name in group:
                    group[name] = n.rmsprop_decay
        for parameter, state in self.optimizer.state.items():
            for name, saved in state.items():
                if torch.is_tensor(saved) and saved.shape == parameter.shape:
                    # Files hold plain memory. Fused Adam goes through moments and weights side by side in memory order,
                    # so with channels-last weights it would take each moment for that of another weight.
                    state[name] = torch.empty_like(parameter, dtype=saved.dtype).copy_(saved)

    def become(self, other: Learner) -> None:
        """Take over another's policy and optimiser, under a version of its own; counters and hyper-parameters stay."""
        self.model.load_state_dict(other.model.state_dict())
        # torch takes tensors over as they are: without a copy both would count their steps in one and the same.
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.configure_optimizer()
        self._skipped_in_a_row = 0
        self.version += 1

    def go_back(self, optimizer: Mapping[str, Any], lr: float) -> None:
        """Take over a saved optimiser after saved weights, under a new version. Counters go on.

        lr: the saved learning rate; taken where the KL divergence adapts it, as other schedules follow the steps.
        """
        self.optimizer.load_state_dict(dict(optimizer))
        if self.settings.lr_schedule == "kl_adaptive":
            self.set_hyper(lr=lr)
        self.configure_optimizer()
        self._skipped_in_a_row = 0
        self.version += 1

    # ------------------------------------------------------------ state

    def counters(self) -> dict[str, Any]:
        """What a checkpoint keeps besides tensors."""
        return {
            "version": self.version,
            "updates": self.updates,
            "steps": self.steps,
            "num_skipped": self.num_skipped,
            "num_dropped": self.num_dropped,
            "hyper": vars(self.hyper),
        }

    def load_counters(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's counters; hyper-parameters are set by the caller."""
        self.version, self.updates, self.steps, self.num_skipped, self.num_dropped = (
            whole_number(saved[name]) for name in ("version", "updates", "steps", "num_skipped", "num_dropped")
        )


def compute_losses(
    model: ActorCritic,
    batch: Batch,
    hyper: Hyperparameters,
    settings: LearnerConfig,
    weights: Tensor | None = None,
    estimate: Estimate | None = None,
    out: ModelOutput | None = None,
    over_all: Callable[[Tensor], Tensor] = losses.alone,
) -> Losses:
    """The whole loss of one optimiser step, from observations to a scalar.

    weights: [T, b] or None.
    estimate: targets and scaled advantages made before; None to make them here.
    out: what the model says about the batch; None to ask it here.
    over_all: sums over this part of a batch to those over all parts, for advantages and what is told of the critic.
    """
    steps = batch.steps
    num_rows = len(steps["reward"])
    # params [T+1, b, P], values [T+1, b]; [1, n] of single steps
    out = out or model(batch.obs, batch.state, steps["first"])
    distribution = model.distribution(out.params[:num_rows], {k: v[:num_rows] for k, v in batch.obs.items()})
    log_probs = distribution.log_prob(steps["discrete"], steps["continuous"])  # [T, b]
    log_ratio = log_probs - steps["log_prob"]
    critic_report: dict[str, Tensor] = {}
    if estimate is None:
        values = model.denormalize_value(out.values.detach())
        estimate = _estimate(log_ratio.detach(), values, steps, hyper, settings)
        critic_report = _critic_report(estimate.targets, values[:num_rows], weights, over_all)
        estimate = _scaled(estimate, weights, model, settings, over_all)
    advantages = estimate.advantages

    reduction = settings.reduction
    ratio = log_ratio.detach().clamp(-20.0, 20.0).exp()
    if settings.policy_loss == "ppo_clip":
        policy_loss, clip_fraction = losses.ppo_clip(
            log_probs, steps["log_prob"], advantages, hyper.ppo_clip, weights=weights, reduction=reduction
        )
    else:
        epsilon = EPSILON_CORRECTION if settings.advantage == "epsilon" else 0.0
        policy_loss = losses.policy_gradient(log_probs, advantages, weights, reduction, epsilon=epsilon)
        clip_fraction = losses.reduce((ratio > hyper.pg_rho_clip).float(), weights)
    value_loss = losses.value(
        out.values[:num_rows],
        model.normalize_value(estimate.targets),
        weights,
        reduction,
        old_values=model.normalize_value(steps["value"]) if hyper.value_clip else None,
        clip=hyper.value_clip or None,
    )
    entropy = distribution.entropy()
    if settings.exploration == "entropy":
        exploration_loss = losses.entropy(entropy, weights, reduction)
    else:
        exploration_loss = losses.symmetric_kl(distribution.symmetric_kl_to_uniform(), weights, reduction)
    # KL(mu || pi) ≈ E_mu[(pi/mu - 1) - log(pi/mu)], which is never negative.
    kl = (log_ratio.clamp(-20.0, 20.0).exp() if hyper.kl_coef else ratio) - 1.0 - log_ratio
    # L = L_policy + c_v L_value + c_e L_exploration + c_kl KL
    total = policy_loss + hyper.value_coef * value_loss + hyper.exploration_coef * exploration_loss
    if hyper.kl_coef:
        total = total + hyper.kl_coef * losses.reduce(kl, weights, reduction)
    with torch.no_grad():
        terms = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "exploration_loss": exploration_loss.detach(),
            "entropy": losses.reduce(entropy.detach(), weights),
            "kl": losses.reduce(kl.detach(), weights),
            "ratio_mean": losses.reduce(ratio, weights),
            "clip_fraction": clip_fraction.detach(),
        }
    return Losses(total, terms | critic_report, estimate.targets)


def _columns(whole: Part, index: Tensor, here: Tensor) -> Part:
    """The unrolls `index` [b] of an iteration's samples; `here`: the same numbers on this side."""
    weights = None if whole.weights is None else whole.weights[:, index]
    estimate = whole.estimate and whole.estimate._replace(
        targets=whole.estimate.targets[:, index], advantages=whole.estimate.advantages[:, index]
    )
    return Part(whole.batch.columns(index, here.numpy()), weights, estimate)


def _steps_apart(whole: Part, order: Tensor, num_parts: int) -> Iterator[Part]:
    """An iteration's samples as single steps in the given order [T*B] of this side, in parts [1, n]."""
    there = upload(order, whole.batch.state.device)

    def parts(x: Tensor) -> Sequence[Tensor]:
        # one gather for the epoch; the parts are views of it
        return x.flatten(0, 1)[there].unsqueeze(0).tensor_split(num_parts, 1)

    assert whole.estimate is not None
    obs, steps = ({k: parts(v) for k, v in x.items()} for x in (whole.batch.obs, whole.batch.steps))
    targets, advantages = parts(whole.estimate.targets), parts(whole.estimate.advantages)
    weights = None if whole.weights is None else parts(whole.weights)
    lag = torch.from_numpy(whole.batch.policy_lag).flatten()[order].unsqueeze(0).tensor_split(num_parts, 1)
    for i in range(len(targets)):
        batch = Batch(
            {k: v[i] for k, v in obs.items()},
            {k: v[i] for k, v in steps.items()},
            whole.batch.state.new_zeros(targets[i].shape[1], 0),
            lag[i].numpy(),
        )
        estimate = whole.estimate._replace(targets=targets[i], advantages=advantages[i])
        yield Part(batch, None if weights is None else weights[i], estimate)


def learning_rewards(rewards: Tensor, settings: LearnerConfig) -> Tensor:
    """Scaled, then clipped; the raw ones stay in the store and in the statistics."""
    scaled = rewards * settings.reward_scale
    return scaled.clamp(-settings.reward_clip, settings.reward_clip) if settings.reward_clip else scaled


def _estimate(
    log_rhos: Tensor, values: Tensor, steps: Mapping[str, Tensor], hyper: Hyperparameters, settings: LearnerConfig
) -> Estimate:
    """Targets and advantages [T, b] of the chosen estimator; values: [T+1, b] raw."""
    rewards = learning_rewards(steps["reward"], settings)
    if settings.advantage == "gae":
        return _gae(values, steps, rewards, hyper)
    following = returns.next_values(values, steps["truncated"], steps["truncation_value"])
    rest = (rewards, steps["terminated"], steps["truncated"], values[:-1], following, hyper.gamma)
    clip, lambda_, weighted = hyper.pg_rho_clip, hyper.lambda_, settings.policy_loss == "policy_gradient"
    if settings.advantage != "vtrace":
        # PPO's ratio is the importance weight already, so its advantage takes none.
        weights = log_rhos if settings.advantage == "one_step" and weighted else torch.zeros_like(log_rhos)
        return returns.one_step(weights, *rest, pg_rho_clip=clip, lambda_=lambda_)
    vtrace = returns.vtrace(
        log_rhos, *rest, rho_clip=hyper.rho_clip, c_clip=hyper.c_clip, pg_rho_clip=clip, lambda_=lambda_
    )
    if weighted:
        return vtrace
    # Again: A_t = r_t + gamma v_{t+1} - V(x_t), without rho_t.
    return returns.VTrace(vtrace.targets, vtrace.advantages / log_rhos.exp().clamp(min=1e-8, max=clip))


def _scaled(
    estimate: Estimate, weights: Tensor | None, model: ActorCritic, settings: LearnerConfig,
    over_all: Callable[[Tensor], Tensor],
) -> Estimate:  # fmt: skip
    """Advantages as the policy loss takes them: normalised over their batch, or in the units of normalised returns."""
    if settings.normalize_advantages:
        advantages = losses.normalize_advantages(estimate.advantages, weights, over_all)
    elif model.return_norm is not None:
        # A_t / sigma: the scale-invariant policy gradient of Hessel et al. 2018
        advantages = estimate.advantages / model.return_norm.std.to(estimate.advantages.dtype)
    else:
        return estimate
    return estimate._replace(advantages=advantages)


def _gae(values: Tensor, steps: Mapping[str, Tensor], rewards: Tensor, hyper: Hyperparameters) -> returns.GAE:
    following = returns.next_values(values, steps["truncated"], steps["truncation_value"])
    return returns.gae(
        rewards, steps["terminated"], steps["truncated"], values[:-1], following, hyper.gamma, hyper.lambda_
    )


def _critic_report(
    targets: Tensor, values: Tensor, weights: Tensor | None, over_all: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """How well the critic foresaw the targets: 1 - Var(target - V) / Var(target), 0 when they do not vary; its mean."""
    counts = torch.ones_like(targets) if weights is None else weights
    summed = {"targets": targets, "missed": targets - values, "values": values}
    wide = {name: torch.where(counts > 0, x, 0.0).double() for name, x in summed.items()}
    sums = over_all(torch.stack([counts.sum().double(), *((x * counts).sum() for x in wide.values())]))
    num = torch.where(sums[0] > 0, sums[0], 1.0)
    mean_target, mean_missed, mean_value = sums[1:] / num
    squares = [(wide["targets"] - mean_target).square(), (wide["missed"] - mean_missed).square()]
    variance, missed = over_all(torch.stack([(x * counts).sum() for x in squares])) / num
    explained = torch.where(variance > 1e-12, 1.0 - missed / variance, 0.0)
    return {"explained_variance": explained, "value_mean": mean_value}
