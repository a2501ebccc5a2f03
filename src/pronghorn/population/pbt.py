"""Population-based training: when members are compared, who is overwritten by whom, what is changed. It trains nothing.

One mechanism with the rules of Sample Factory (the defaults, after Jaderberg et al. 2019) and of IMPALA's Appendix F
(the preset pbt-impala) as settings. Rounds keep it fair: a round ends when *every* member has reached the same count of
frames and finished enough episodes; one that has arrived rests until the others have, so that members which take turns
on few slots are compared as those that train side by side. The trainer's part:

    pbt = PBT(settings, hyper, seed)                 # hyper: name -> value at the start, "reward.<name>" for rewards
    apply(pbt.start())                               # first values of each member; not after a resume
    ... loop:
        train the members pbt.active(training now)   # at most settings.slots; rows go to these only
        for member in those that finished an iteration:
            apply(pbt.report(member, frames, episodes, objective))      # objective: higher is better; None: not known

    apply: write the records to population.jsonl (after a resume, without its lines of rounds after pbt.round), then
    carry out the decisions in their order: copy decision.copied of the donor as it is in memory, discard and count the
    target's unrolls in flight, forget its statistics (`Matchmaker.overwrite`, `Ratings.branch`), and set
    decision.hyper. A target's own counters go on.

The order of decisions makes one at a time enough: no donor is overwritten before it has been copied.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from pronghorn.config_population import PopulationConfig
from pronghorn.errors import ConfigError, PopulationError
from pronghorn.population.mutation import Range, check_range, check_value, draw, perturb

REWARD = "reward."  # prefix of reward-shaping weights among the hyper-parameters
REWARD_SPAN = 100.0  # a reward weight without a range of its own goes from its first value / 100 to it * 100
ALL_PARTS = ("weights", "optimizer", "normalizers", "hyperparameters")

# Neither source bounds its values; these ends are ours, and wide.
RANGES: Mapping[str, Range] = {
    "lr": Range(1e-7, 1e-1, start=(5e-6, 5e-3)),
    "gamma": Range(0.9, 0.99999, "complement"),
    "lambda_": Range(0.5, 0.999, "complement"),
    "rho_clip": Range(0.1, 10.0, off_is="high"),
    "c_clip": Range(0.1, 10.0, off_is="high"),
    "pg_rho_clip": Range(0.1, 10.0, off_is="high"),
    "ppo_clip": Range(0.01, 1.0, off_is="high"),
    "value_clip": Range(0.01, 100.0, off_is="high"),
    "value_coef": Range(1e-3, 10.0),
    "exploration_coef": Range(1e-6, 1.0, start=(5e-5, 1e-2)),
    "kl_coef": Range(1e-6, 10.0),
    "max_grad_norm": Range(0.01, 1000.0, off_is="high"),
    "optimizer_eps": Range(1e-10, 1.0, choices=(1e-1, 1e-3, 1e-5, 1e-7)),
    "epochs": Range(2, 16, "integer"),  # one pass makes targets in the step, several before it: not a small change
}


@dataclass(frozen=True)
class Decision:
    """What becomes of one member at the end of a round; round 0 is the start."""

    round: int
    frames: int
    """Frames of each member at which the round ended."""
    member: int
    donor: int | None
    """Whose policy overwrites the member's; None: it keeps its own."""
    copied: tuple[str, ...]
    """What is taken from the donor, of ALL_PARTS: always as it is in memory now, never from a checkpoint, so that a
    donor that was never saved can be copied. (hyperparameters: decision.hyper comes from the donor's.)"""
    hyper: dict[str, float]
    """All hyper-parameters of the member from now on."""
    changed: dict[str, tuple[float, float]]
    """(before, after) of those that differ from the member's own before."""
    objective: float | None = None
    donor_objective: float | None = None
    member_frames: int = 0
    donor_frames: int | None = None
    """The donor's count: the trainer can check that the policy which it copies is of that age."""

    def to_json(self) -> dict[str, Any]:
        """A line of population.jsonl."""
        changed = {name: list(values) for name, values in self.changed.items()}
        source = None if self.donor is None else "live"
        return {**dataclasses.asdict(self), "copied": list(self.copied), "changed": changed, "source": source}


@dataclass
class _Member:
    """What is known of a member."""

    hyper: dict[str, float]
    frames: int = 0
    episodes: int = 0
    episodes_before: int = 0  # at the last comparison
    objective: float | None = None  # when it reached the end of the round; None: it has not yet
    is_late: bool = False  # had the frames of the round, but not its episodes


class PBT:
    """The state of a population: clocks, hyper-parameters, and who descends from whom."""

    def __init__(self, settings: PopulationConfig, base: Mapping[str, float], seed: int) -> None:
        """base: the run's own values of all hyper-parameters. Raises ConfigError for settings that break a rule."""
        check_settings(settings)
        self.settings, self.base = settings, dict(base)
        self.ranges = resolve_ranges(settings, base)
        self.round = 0  # rounds that have ended
        self.round_frames = settings.burn_in_frames  # frames of each member at which the present one ends
        self.copies: list[tuple[int, int, int]] = []  # (round, member, donor) of every copy
        self._started = False
        self._members = [_Member(dict(base)) for _ in range(settings.members)]
        self._rng = np.random.default_rng(seed)

    def hyper(self, member: int) -> dict[str, float]:
        """The member's present hyper-parameters."""
        return dict(self._member(member).hyper)

    # ------------------------------------------------------------ rounds

    def start(self) -> list[Decision]:
        """The first hyper-parameters of each member, once."""
        if self._started:
            raise PopulationError("The population has started already: its members have their first hyper-parameters.")
        self._started = True
        return [self._begin(index) for index in range(self.settings.members)]

    def active(self, training: Collection[int] = ()) -> list[int]:
        """Members that should train now, at most as many as there are slots.

        training: those that do at present. They keep their slot until they have arrived, so that a member changes
        places with another once a round at most; free slots go to those that are furthest behind.
        """
        waiting = [i for i, m in enumerate(self._members) if m.objective is None]
        waiting.sort(key=lambda i: (i not in training, self._members[i].frames, i))
        return sorted(waiting[: self.settings.num_slots])

    def report(self, member: int, frames: int, episodes: int, objective: float | None) -> list[Decision]:
        """What a member has done so far; the decisions of the round if that ends it, else none.

        frames, episodes: its totals. objective: None while it has none.
        Decisions come in an order in which they can be carried out one by one. Raises PopulationError for numbers that
        no member can have.
        """
        m = self._member(member)
        _check_report(member, m, frames, episodes, objective)
        m.frames, m.episodes = frames, episodes
        if m.objective is None and frames >= self.round_frames:
            self._arrive(m, objective)
        objectives = [other.objective for other in self._members if other.objective is not None]
        return self._end_round(objectives) if len(objectives) == len(self._members) else []

    def _arrive(self, m: _Member, objective: float | None) -> None:
        if objective is None or m.episodes - m.episodes_before < self.settings.period_episodes:
            m.is_late = True
            return
        m.objective = objective
        if m.is_late and m.frames > self.round_frames:
            # Its episodes took it past the end of the round: the others go on to the same frames.
            m.is_late, self.round_frames = False, m.frames
            for other in self._members:
                if other.frames < m.frames:
                    other.objective = None

    def _end_round(self, objectives: Sequence[float]) -> list[Decision]:
        self.round += 1
        donors, untouched = select(objectives, self.settings, self._rng)
        before = [m.hyper for m in self._members]
        # Worst first: every donor is better than what it overwrites, so it is still itself when its turn comes.
        order = sorted(range(len(objectives)), key=lambda i: (objectives[i], -i))
        decisions = [self._decide(i, donors.get(i), i in untouched, before, objectives) for i in order]
        self.copies += [(d.round, d.member, d.donor) for d in decisions if d.donor is not None]
        self._next_round()
        return decisions

    def _next_round(self) -> None:
        """Clocks: the next multiple of the period that no member has reached, so that all train before it."""
        s, most = self.settings, max(m.frames for m in self._members)
        if s.period_frames:
            periods = max(0, most - s.burn_in_frames) // s.period_frames + 1
            self.round_frames = s.burn_in_frames + periods * s.period_frames
        else:
            self.round_frames = most
        for m in self._members:
            m.episodes_before, m.objective, m.is_late = m.episodes, None, False

    # ------------------------------------------------------------ decisions

    def _begin(self, index: int) -> Decision:
        m, s = self._members[index], self.settings
        before = m.hyper
        if index == 0 and s.keep_first:
            pass
        elif s.start == "draw":
            m.hyper = before | {name: draw(r, self._rng) for name, r in self.ranges.items()}
        else:
            m.hyper = self._mutate(before)
        return Decision(0, 0, index, None, (), dict(m.hyper), _changes(before, m.hyper))

    def _decide(self, index: int, donor: int | None, untouched: bool, before: Sequence[dict[str, float]],
                objectives: Sequence[float]) -> Decision:  # fmt: skip
        m, is_kept = self._members[index], index == 0 and self.settings.keep_first
        copied = () if donor is None else tuple(p for p in ALL_PARTS if p != "hyperparameters" or not is_kept)
        if not (untouched or is_kept):
            m.hyper = self._mutate(before[index if donor is None else donor])
        changed, ended = _changes(before[index], m.hyper), (self.round, self.round_frames)
        of_donor = (None, None) if donor is None else (objectives[donor], self._members[donor].frames)
        return Decision(*ended, index, donor, copied, dict(m.hyper), changed, objectives[index], of_donor[0],
                        m.frames, of_donor[1])  # fmt: skip

    def _mutate(self, hyper: Mapping[str, float]) -> dict[str, float]:
        """Each mutable value changed with the mutation rate."""
        return dict(hyper) | {
            name: self._mutated(name, hyper[name], r)
            for name, r in self.ranges.items()
            if self._rng.random() < self.settings.mutation_rate
        }

    def _mutated(self, name: str, value: float, r: Range) -> float:
        s, first = self.settings, self.base[name]
        if self._rng.random() < s.reset_rate and first != value and r.holds(first):
            return first
        factor = float(self._rng.uniform(*(s.perturb_complement if r.scale == "complement" else s.perturb)))
        return perturb(value, r, factor, up=bool(self._rng.random() < 0.5))

    def _member(self, index: int) -> _Member:
        if not 0 <= index < len(self._members):
            raise PopulationError(f"There is no member {index}: the population has 0 to {len(self._members) - 1}.")
        return self._members[index]

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Plain JSON values that hold all of it: clocks, hyper-parameters, ranges, descent, generator."""
        return {
            "round": self.round,
            "round_frames": self.round_frames,
            "started": self._started,
            "base": dict(self.base),
            "ranges": {name: r.to_json() for name, r in self.ranges.items()},
            "members": [dataclasses.asdict(m) for m in self._members],
            "copies": [list(c) for c in self.copies],
            "generator": self._rng.bit_generator.state,
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state` gave. The saved ranges win: those of reward weights came from their first values.

        Raises ConfigError if the number of members is another.
        """
        if len(saved["members"]) != self.settings.members:
            rule = f"cannot change when a run is resumed (it was {len(saved['members'])})"
            raise ConfigError("population.members", self.settings.members, rule, "Start a new run.")
        self.round, self.round_frames = int(saved["round"]), int(saved["round_frames"])
        self._started, self.base = bool(saved["started"]), dict(saved["base"])
        self.ranges = {name: Range.from_json(raw) for name, raw in saved["ranges"].items()}
        self._members = [_Member(**raw) for raw in saved["members"]]
        self.copies = [(r, member, donor) for r, member, donor in saved["copies"]]
        self._rng.bit_generator.state = saved["generator"]


def _check_report(member: int, m: _Member, frames: int, episodes: int, objective: float | None) -> None:
    if frames < m.frames or episodes < m.episodes:
        raise PopulationError(
            f"Member {member} reports {frames} frames and {episodes} episodes after {m.frames} and {m.episodes}: "
            "totals never fall. After a copy a member keeps its own counters."
        )
    if objective is not None and not math.isfinite(objective):
        raise PopulationError(f"Member {member} reports an objective of {objective}: finite numbers are ranked.")


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {name: (before[name], value) for name, value in after.items() if before[name] != value}


# ---------------------------------------------------------------- who is overwritten


def select(
    objectives: Sequence[float], settings: PopulationConfig, rng: np.random.Generator
) -> tuple[dict[int, int], set[int]]:
    """(member -> donor of those that are overwritten, members that are left as they are), from all objectives."""
    if settings.selection == "rival":
        return _rivals(objectives, settings, rng), set()
    ranked = sorted(range(len(objectives)), key=lambda i: (-objectives[i], i))  # best first
    # k = ceil(fraction * members): not more than half, so that no member is both best and worst
    k = min(math.ceil(settings.replace_fraction * len(ranked) - 1e-9), len(ranked) // 2)
    donors = {target: ranked[int(rng.integers(k))] for target in ranked[len(ranked) - k :]}
    return {t: d for t, d in donors.items() if _is_better(objectives[d], objectives[t], settings)}, set(ranked[:k])


def _rivals(objectives: Sequence[float], settings: PopulationConfig, rng: np.random.Generator) -> dict[int, int]:
    others = {i: int(rng.integers(len(objectives) - 1)) for i in range(len(objectives))}
    rivals = {i: j + (j >= i) for i, j in others.items()}  # uniform over all but i
    return {i: j for i, j in rivals.items() if _is_better(objectives[j], objectives[i], settings)}


def _is_better(donor: float, target: float, settings: PopulationConfig) -> bool:
    # Δ > absolute gap  and  Δ > relative gap · |donor|
    delta = donor - target
    return delta > settings.gap_absolute and delta > settings.gap_relative * abs(donor)


# ---------------------------------------------------------------- rules of the settings


def check_settings(s: PopulationConfig) -> None:
    """Every rule that needs the settings alone. Raises ConfigError."""
    if s.members < 2:
        raise ConfigError("population.members", s.members, "must be at least 2, to compare one with another", "Try 4.")
    if not 0 <= s.slots <= s.members:
        rule = f"must be 0 (all at once) to population.members = {s.members}"
        raise ConfigError("population.slots", s.slots, rule, "More slots than members would stand empty.")
    for name, low in (("burn_in_frames", 0), ("period_frames", 0), ("period_episodes", 0), ("objective_episodes", 1)):
        if getattr(s, name) < low:
            raise ConfigError(f"population.{name}", getattr(s, name), f"must be at least {low}", "Raise it.")
    for name in ("mutation_rate", "reset_rate"):
        if not 0.0 <= getattr(s, name) <= 1.0:
            raise ConfigError(f"population.{name}", getattr(s, name), "is a chance, so in [0, 1]", "Try 0.15.")
    for name in ("gap_relative", "gap_absolute"):
        if not getattr(s, name) >= 0.0:
            rule = "must not be negative: nobody is overwritten by one that is worse"
            raise ConfigError(f"population.{name}", getattr(s, name), rule, "0 asks for any difference.")
    if not 0.0 < s.replace_fraction <= 0.5:
        rule = "must lie in (0, 0.5]: no member is both among the best and among the worst"
        raise ConfigError("population.replace_fraction", s.replace_fraction, rule, "Try 0.3.")
    for name in ("perturb", "perturb_complement"):
        low_factor, high_factor = getattr(s, name)
        if not 1.0 < low_factor <= high_factor < math.inf:
            rule = "must be two factors above 1, the smaller first"
            raise ConfigError(f"population.{name}", getattr(s, name), rule, "Try (1.1, 1.5).")


def resolve_ranges(s: PopulationConfig, base: Mapping[str, float]) -> dict[str, Range]:
    """The range of every mutable hyper-parameter, in a fixed order. Raises ConfigError.

    base: the run's own values of all hyper-parameters that can change while a run goes on.
    """
    ranges = {name: _range_of(name, base[name], s.ranges) for name in _mutable_names(s.mutable, base)}
    for name in s.ranges:
        if name not in ranges:
            raise ConfigError("population.ranges", name, "is not among the mutable ones", "Add it to mutable.")
    for name, r in ranges.items():
        check_range(name, r)
        check_value(name, base[name], r)
    return ranges


def _mutable_names(patterns: Iterable[str], base: Mapping[str, float]) -> list[str]:
    found: set[str] = set()
    for pattern in patterns:
        names = {name for name in base if fnmatchcase(name, pattern)}
        if not names:
            near = difflib.get_close_matches(pattern, base, 1)
            fix = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(sorted(base))}."
            raise ConfigError("population.mutable", pattern, "names no hyper-parameter that can change in a run", fix)
        found |= names
    return sorted(found)


def _range_of(name: str, value: float, given: Mapping[str, str]) -> Range:
    if name in given:
        return Range.parse(name, given[name], like=RANGES.get(name))
    if name in RANGES:
        return RANGES[name]
    if value == 0 or not name.startswith(REWARD):
        rule = "is mutable and has no range: " + ("0 gives it no size" if value == 0 else "none is usual for it")
        raise ConfigError(name, value, rule, "Give one in population.ranges, or leave it out of mutable.")
    low, high = sorted((value / REWARD_SPAN, value * REWARD_SPAN))
    return Range(low, high)


def check_layout(
    s: PopulationConfig, *, num_envs: int, lr_schedule: str, has_matches: bool, member_weight: float = 0.0
) -> None:
    """Rules between the population and the rest of a run, before it starts. Raises ConfigError.

    num_envs: environments of the whole run. has_matches: whether members meet opponents with a declared outcome.
    member_weight: how often these are other members (`pronghorn.config_population:SelfPlayConfig`).
    """
    if num_envs < s.num_slots:
        rule = f"is too few for {s.num_slots} members that train at once: each needs one, on whatever workers they are"
        fix = f"Raise --env.workers or --env.envs-per-worker, or let members take turns: population.slots = {num_envs}."
        raise ConfigError("environments", num_envs, rule, fix)
    if lr_schedule != "constant" and any(fnmatchcase("lr", pattern) for pattern in s.mutable):
        rule = "would overwrite the learning rates that the population chooses"
        raise ConfigError("learner.lr_schedule", lr_schedule, rule, "Set it to constant, or take lr out of mutable.")
    if member_weight and s.num_slots < 2:
        rule = "leaves one member loaded at a time, which cannot meet another (selfplay.member_weight > 0)"
        raise ConfigError("population.slots", s.slots, rule, "Raise it, or set selfplay.member_weight to 0.")
    if s.objective in ("win_rate", "rating") and not has_matches:
        rule = "needs matches with a declared outcome between two sides"
        raise ConfigError("population.objective", s.objective, rule, "Use return, or an environment of several rows.")


# ---------------------------------------------------------------- descent


@dataclass(frozen=True)
class Span:
    """A part of the training that made a policy: until the next span's from_frames it was `member`, with `hyper`."""

    round: int
    from_frames: int
    member: int
    hyper: dict[str, float]


def lineage(records: Iterable[Mapping[str, Any]], member: int) -> list[Span]:
    """How the weights that a member holds came to be, oldest first, from the lines of population.jsonl.

    The hyper-parameters along it are the schedule that population-based training found.
    """
    at = {(record["round"], record["member"]): record for record in records}
    spans: list[Span] = []
    for round_ in sorted({r for r, _ in at}, reverse=True):
        record = at.get((round_, member))
        if record is None:
            raise PopulationError(f"population.jsonl has no line of member {member} in round {round_}.")
        if round_ == 0 or record["changed"] or record["donor"] is not None:
            spans.append(Span(round_, record["frames"], member, dict(record["hyper"])))
        member = member if record["donor"] is None else record["donor"]
    return spans[::-1]
