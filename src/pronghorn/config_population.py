"""Settings of self-play and of populations, as they stand in a run's configuration. They decide nothing.

The rules that they keep are checked by what uses them (population/matchmaking.py, population/pbt.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class SelfPlayConfig:
    """Games of several agents: who plays against whom, and which frozen snapshots are kept to play against.

    Without weights for others one policy plays all sides.
    """

    self_weight: float = 0.8
    """Weight of matches in which the opponent is the learner itself: both sides learn. The weights are shares of all
    opponents once divided by their sum. (0.8 and 0.2: OpenAI Five, Berner et al. 2019.)"""
    member_weight: float = 0.0
    """Weight of the other members of the population, as they are at present: both sides learn, if both train now."""
    snapshot_weight: float = 0.0
    """Weight of frozen snapshots of the pool; 0.2 is a good start."""
    script_weight: float = 0.0
    """Weight of the scripted opponents, each as likely as another."""
    scripts: tuple[str, ...] = ()
    """Scripted opponents: random, or module.path:function (docs/agents.md)."""
    size: int = 20
    """Most snapshots in the pool, of all members together."""
    add_every_steps: int = 1_000_000
    """A member is added again after this many of its steps; 0: only by win rate."""
    add_win_rate: float = 0.0
    """A member is added before that if it scores at least this against every snapshot in the pool; 0: it is not."""
    evict: Literal["spread", "oldest"] = "spread"
    """Which snapshot makes room. spread: the one whose neighbours in age, of the same member, are closest together, so
    that what stays covers all of the past, its first and last snapshot included. oldest: the first that came."""
    sample: Literal["uniform", "recent", "prioritized"] = "uniform"
    """How snapshots are drawn. recent: uniformly among the newest. prioritized: by (1 - x)^p, x being the learner's win
    rate against it: prioritised fictitious self-play (Vinyals et al. 2019, Methods, f_hard)."""
    recent: int = 5
    """Newest snapshots that `recent` draws from."""
    power: float = 2.0
    """p of `prioritized`: 0 is uniform, more looks at the hardest only."""
    win_rate_decay: float = 0.99
    """What an earlier result still counts after each later one, in win rates against snapshots: the learner changes."""
    line_up: int = 4
    """Snapshots that new matches draw on at a time."""
    seat_matches: int = 32
    """Matches after which a seat of the line-up is drawn anew."""

    @property
    def meets_others(self) -> bool:
        """Whether a learner meets anybody but itself."""
        return self.member_weight > 0 or self.snapshot_weight > 0 or self.script_weight > 0


@dataclass(frozen=True)
class PopulationConfig:
    """Population-based training, with the rules of Sample Factory unless said otherwise.

    Its members are compared at equal frames; there whenever one of them has had its period.
    """

    members: int = 1
    """Policies that are trained; 1: no population."""
    slots: int = 0
    """Members that train at the same time; the others wait for their turn. 0: all."""
    objective: str = "return"
    """What members are compared by, higher is better: return, win_rate, rating, or a statistic of episodes by name."""
    objective_episodes: int = 100
    """Last episodes of a member that the trainer takes the mean of."""
    selection: Literal["truncation", "rival"] = "truncation"
    """truncation: the worst are overwritten by one of the best each, and the best are left alone. rival: each member is
    overwritten by another, drawn at random, if that is better."""
    burn_in_frames: int = 20_000_000
    """Frames of each member before the first comparison."""
    period_frames: int = 5_000_000
    """Frames of each member between two comparisons. 0: as soon as there are enough episodes."""
    period_episodes: int = 0
    """Episodes that each member must have finished, and played from beginning to end, since the last comparison. 0: two
    for each row that it plays, or the short ones, which end first, would speak for all."""
    replace_fraction: float = 0.3
    """Share of the members that count as the best, and as the worst (rounded up; at most half). truncation only."""
    gap_relative: float = 0.1
    """A member is overwritten only if the donor is better by more than this share of the donor's objective ..."""
    gap_absolute: float = 1e-6
    """... and by more than this."""
    mutation_rate: float = 0.15
    """Chance that a hyper-parameter is changed."""
    reset_rate: float = 0.01
    """Chance that a hyper-parameter that is to be changed goes back to its value at the start instead."""
    perturb: tuple[float, float] = (1.1, 1.5)
    """A value is multiplied or divided by a factor drawn uniformly from this range."""
    perturb_complement: tuple[float, float] = (1.01, 1.2)
    """The same for 1 - value, of discounts."""
    start: Literal["mutate", "draw"] = "mutate"
    """First values of the members: the run's settings, mutated once; or drawn from the ranges."""
    keep_first: bool = True
    """Member 0 keeps the run's settings for ever; it can still get the weights of another."""
    mutable: tuple[str, ...] = ("lr", "exploration_coef", "value_coef", "max_grad_norm", "ppo_clip", "value_clip")
    """Hyper-parameters that may change; reward.* for all weights of reward shaping. gamma is left to your choice."""
    ranges: Annotated[dict[str, str], tyro.conf.arg(metavar="NAME LOW..HIGH …")] = field(default_factory=dict)
    """Ranges that differ from the usual ones, by name, as 1e-5..1e-2; 'complement' behind it for discounts, whose
    1 - value is multiplied, 'integer' for whole numbers."""

    @property
    def num_slots(self) -> int:
        """Members that train at the same time."""
        return self.slots or self.members
